"""Cards of drafters and targets: what is written is read again, and figures and commands are right."""

import json
from datetime import date

import pytest
import yaml
from huggingface_hub import ModelCard
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec import SpecConfigError, SpeculativeConfig
from hf_specdec.hub.card import add_to_target_card, load_card, make_card, read_card, read_target_card, target_entry
from hf_specdec.hub.published import published_config


EAGLE3 = SpeculativeConfig(method="eagle3", model="user/head", num_speculative_tokens=4)


def card_of(config=EAGLE3, **arguments):
    return make_card(config, **{"name": "user/head", "target": "user/target", **arguments})


def written(folder, card):
    card.save(folder / "README.md")
    return folder


# Settings that others can use, by method.
HEADS = {"method": st.sampled_from(["eagle", "eagle3", "mtp", "medusa", "draft_model"]), "model": st.just("user/head")}
TREES = {"speculative_token_tree": st.sampled_from([[0, 0, 1], [[0], [1], [0, 0]]])}
CONFIGS = st.one_of(
    st.fixed_dictionaries(
        {"method": st.just("ngram")},
        optional={"num_speculative_tokens": st.integers(1, 64), "prompt_lookup_max": st.integers(4, 9)},
    ),
    st.fixed_dictionaries(
        {"method": st.just("suffix")}, optional={"suffix_decoding_min_token_prob": st.floats(0.0, 1.0)}
    ),
    st.fixed_dictionaries(
        HEADS, optional={"num_speculative_tokens": st.integers(1, 9), "max_model_len": st.integers(1, 10**6)}
    ),
    st.fixed_dictionaries({**HEADS, "method": st.just("medusa"), **TREES}),
)


@given(CONFIGS, st.sampled_from([None, "user/target"]))
def test_written_card_parses_into_the_same_settings(flat, target):
    config = SpeculativeConfig.from_dict(flat)
    metadata = ModelCard(str(card_of(config, target=target))).data.to_dict()
    settings = {key: value for key, value in metadata["speculative"].items() if key != "target"}
    assert published_config(settings, "The card", model="user/head") == config
    assert metadata["speculative"].get("target") == target


def test_metadata():
    assert card_of(license="mit", tags=["qwen3"]).data.to_dict() == {
        "base_model": ["user/target"],
        "base_model_relation": "adapter",
        "library_name": "hf_specdec",
        "license": "mit",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-model", "eagle3", "vllm", "sglang", "qwen3"],
        "speculative": {"target": "user/target", "method": "eagle3", "num_speculative_tokens": 4},
    }
    whole = card_of(SpeculativeConfig(method="draft_model", model="a/b")).data
    assert (whole.library_name, "base_model_relation" in whole) == ("transformers", False)
    assert card_of(base_model_relation="quantized").data.base_model_relation == "quantized"
    assert "base_model_relation" not in card_of(base_model_relation="none").data
    medusa = card_of(SpeculativeConfig(method="medusa", model="a/b")).data
    assert medusa.tags == ["speculative-decoding", "draft-model", "medusa"]


def test_places_on_this_machine_stay_out(tmp_path):
    config = EAGLE3.replace(model=str(tmp_path), device="cuda:1", cache_dir="/cache", token="hf_x", revision="v2")
    for private in (str(tmp_path), "cuda", "/cache", "hf_x", "v2", "base_model"):
        assert private not in str(card_of(config, target=str(tmp_path)))


def test_commands_of_engines():
    text = card_of().text
    assert 'pipeline("text-generation", model="user/target", speculative="user/head")' in text
    vllm = json.loads(text.split("--speculative-config '")[1].split("'")[0])
    assert vllm == {"method": "eagle3", "model": "user/head", "num_speculative_tokens": 4}
    assert "--speculative-algorithm EAGLE3 \\\n    --speculative-draft-model-path user/head" in text
    assert "--speculative-num-steps 4" in text
    assert "--speculative-num-draft-tokens 5" in text
    # Of what the settings leave open, the checkpoint tells the length.
    dflash = SpeculativeConfig(method="dflash", model="a/b")
    text = card_of(dflash, num_draft_tokens=7).text
    assert '"num_speculative_tokens": 7' in text
    assert "--speculative-num-draft-tokens 8" in text
    # Engines have no adaptive length.
    text = card_of(dflash.replace(num_speculative_tokens="auto")).text
    assert "| num_speculative_tokens | `auto` |" in text
    assert "--speculative-num-draft-tokens 16" in text
    for method, engines in (("medusa", 0), ("mtp", 0), ("mlp_speculator", 0), ("suffix", 1), ("ngram", 2)):
        text = card_of(SpeculativeConfig(method, None if engines else "a/b")).text
        assert ("With vLLM" in text) + ("With SGLang" in text) == engines
    # Which rule accepts drafts is for whoever generates.
    assert str(card_of(EAGLE3.replace(rejection_sample_method="typical"))) == str(card_of())


def test_measured_figures():
    names = ("method", "tokens_per_second", "speedup", "mean_acceptance_length", "acceptance_rate")
    rows = [
        ("plain", 100.0, 1.0),
        ("eagle3", 250.0, 2.5, 3.25, 0.75),
        ("eagle3_tree", 300.0, 3.0),
        ("ngram", 120.0, 1.2),
    ]
    report = {
        "rows": [dict(zip(names, row)) for row in rows],
        "settings": {"batch_size": 1, "max_new_tokens": 256},
        "environment": {"cpu": "A | processor", "gpu": None, "dtype": "bfloat16", "torch": "2.9"},
    }
    text = card_of(report=report).text
    assert "| plain | 100.0 | 1.00 |  |  |" in text
    assert "| eagle3 | 250.0 | 2.50 | 3.25 | 75% |" in text
    assert "| eagle3_tree | 300.0 | 3.00 |  |  |" in text
    assert "ngram" not in text
    assert "A \\| processor, data type bfloat16, batch size 1, most new tokens 256, torch 2.9." in text
    with pytest.raises(SpecConfigError, match="no figures of 'medusa', but of: plain, eagle3, eagle3_tree, ngram"):
        card_of(SpeculativeConfig(method="medusa", model="a/b"), report=report)
    for wrong in ([], {"rows": 3}, {"rows": [{}]}):
        with pytest.raises(SpecConfigError, match="no `rows`"):
            card_of(report=wrong)


def test_reading(tmp_path, hub):
    card = card_of()
    # What another version knows is left out.
    card.data["speculative"]["of_the_future"] = 3
    folder = written(tmp_path, card)
    assert read_card(folder) == EAGLE3.replace(model=str(folder))
    # It is no entry of a target.
    assert target_entry(load_card(folder).data.to_dict()) is read_target_card(folder) is None
    hub.add("user/head", folder)
    hub.add("user/head", folder, revision="v2")
    hub.add("user/none", files={"a.txt": ""})
    assert read_card("user/head") == EAGLE3
    assert read_card("user/head", revision="v2") == EAGLE3.replace(revision="v2")
    assert read_card("user/none") is None


def test_wrong_settings_are_clear_errors(tmp_path):
    for settings, match in (
        ({"method": "ngrm"}, "Unknown spec_method='ngrm'"),
        ({"method": "eagle3", "trust_remote_code": True}, "must not let code run"),
        ({"method": "eagle3", "options": {"trust_remote_code": 1}}, "must not let code run"),
        ({"method": "eagle3", "num_speculative_tokens": "many"}, "must be an integer|num_speculative_tokens"),
        ({"method": "ngram", "prompt_lookup_max": {}}, "prompt_lookup_max"),
        ({"method": ["eagle3"]}, "name of a method"),
        ([1, 2], "a mapping of names to values, got list"),
        ({3: 4}, "a mapping of names to values"),
        (date(2026, 1, 1), "a mapping of names to values, got date"),
    ):
        (tmp_path / "README.md").write_text(f"---\n{yaml.safe_dump({'speculative': settings})}---\n")
        with pytest.raises(SpecConfigError, match=f"in the card of '.*{match}"):
            read_card(tmp_path)


def test_entry_of_a_target(tmp_path, hub):
    card = ModelCard("---\nlicense: mit\n---\n# A model\n")
    add_to_target_card(card, EAGLE3.replace(revision="v2", device="cpu"))
    folder = written(tmp_path, card)
    assert (load_card(folder).data.license, load_card(folder).text.strip()) == ("mit", "# A model")
    hub.add("user/target", folder)
    for name in (folder, "user/target"):
        assert read_target_card(name) == EAGLE3.replace(revision="v2")
    for settings, expected in ((None, None), ("ngram", SpeculativeConfig(method="ngram"))):
        add_to_target_card(card, settings)
        assert read_target_card(written(tmp_path, card)) == expected
    with pytest.raises(SpecConfigError, match="is a path.*Push the drafter"):
        add_to_target_card(card, EAGLE3.replace(model=str(tmp_path)))


def test_refusals(tmp_path):
    for config in (SpeculativeConfig(model="a/b"), SpeculativeConfig(method="auto")):
        with pytest.raises(SpecConfigError, match="settings with a method"):
            card_of(config)
    # What cannot be read is not overwritten.
    (tmp_path / "README.md").write_text("---\na: [\n---\nWords.\n")
    with pytest.raises(SpecConfigError, match="cannot be read"):
        load_card(tmp_path)
    assert load_card(tmp_path / "none") is None
