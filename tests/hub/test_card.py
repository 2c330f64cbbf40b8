"""Cards: what is written is read again, and what is read is only data."""

import json
from datetime import date

import pytest
import yaml
from huggingface_hub import ModelCard
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specdec import SpecConfigError, SpeculativeConfig
from hf_specdec.hub.card import (
    add_to_target_card,
    load_card,
    make_card,
    read_card,
    read_target_card,
    target_entry,
)
from hf_specdec.hub.published import published_config


REPORT = {
    "rows": [
        {"method": "plain", "tokens_per_second": 100.0, "speedup": 1.0},
        {
            "method": "eagle3",
            "tokens_per_second": 250.0,
            "speedup": 2.5,
            "mean_acceptance_length": 3.25,
            "acceptance_rate": 0.75,
        },
        {"method": "eagle3_tree", "tokens_per_second": 300.0, "speedup": 3.0, "acceptance_rate": None},
        {"method": "ngram", "tokens_per_second": 120.0, "speedup": 1.2},
    ],
    "settings": {"batch_size": 1, "max_new_tokens": 256},
    "environment": {"cpu": "A | processor", "gpu": None, "dtype": "bfloat16", "torch": "2.9"},
}

EAGLE3 = SpeculativeConfig(method="eagle3", model="user/head", num_speculative_tokens=4)


def written(tmp_path, card):
    tmp_path.mkdir(parents=True, exist_ok=True)
    card.save(tmp_path / "README.md")
    return tmp_path


# Settings that others can use, by method.
CONFIGS = st.one_of(
    st.fixed_dictionaries(
        {"method": st.just("ngram")},
        optional={"num_speculative_tokens": st.integers(1, 64), "prompt_lookup_max": st.integers(4, 9)},
    ),
    st.fixed_dictionaries(
        {"method": st.just("suffix")}, optional={"suffix_decoding_min_token_prob": st.floats(0.0, 1.0)}
    ),
    st.fixed_dictionaries(
        {"method": st.sampled_from(["eagle", "eagle3", "mtp", "medusa"]), "model": st.just("user/head")},
        optional={
            "num_speculative_tokens": st.integers(1, 9),
            "max_model_len": st.integers(1, 10**6),
            "disable_by_batch_size": st.integers(1, 64),
        },
    ),
    st.fixed_dictionaries(
        {
            "method": st.just("medusa"),
            "model": st.just("user/head"),
            "speculative_token_tree": st.sampled_from([[0, 0, 1], [[0], [1], [0, 0]]]),
        }
    ),
    st.fixed_dictionaries(
        {"method": st.just("draft_model"), "model": st.just("user/head")},
        optional={
            "draft_confidence_threshold": st.floats(0.0, 1.0),
        },
    ),
)


@given(CONFIGS, st.sampled_from([None, "user/target"]))
@settings(max_examples=60)
def test_a_written_card_parses_into_the_same_settings(flat, target):
    config = SpeculativeConfig.from_dict(flat)
    card = make_card(config, name="user/head", target=target)
    metadata = ModelCard(str(card)).data.to_dict()
    settings = {key: value for key, value in metadata["speculative"].items() if key != "target"}
    assert published_config(settings, "The card", model="user/head") == config
    assert metadata["speculative"].get("target") == target


def test_metadata():
    card = make_card(EAGLE3, name="user/head", target="user/target", license="mit", tags=["qwen3"])
    assert card.data.to_dict() == {
        "base_model": ["user/target"],
        "base_model_relation": "adapter",
        "library_name": "hf_specdec",
        "license": "mit",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-model", "eagle3", "vllm", "sglang", "qwen3"],
        "speculative": {"target": "user/target", "method": "eagle3", "num_speculative_tokens": 4},
    }
    whole = make_card(SpeculativeConfig(method="draft_model", model="a/b"), name="a/b", target="user/target").data
    assert whole.library_name == "transformers"
    assert "base_model_relation" not in whole
    for relation in ("quantized", "none"):
        data = make_card(EAGLE3, name="user/head", target="user/target", base_model_relation=relation).data
        assert data.get("base_model_relation", "none") == relation
    medusa = make_card(SpeculativeConfig(method="medusa", model="a/b"), name="a/b").data
    assert medusa.tags == ["speculative-decoding", "draft-model", "medusa"]


def test_places_on_this_machine_stay_out(tmp_path):
    config = EAGLE3.replace(model=str(tmp_path), device="cuda:1", cache_dir="/cache", token="hf_x", revision="v2")
    text = str(make_card(config, name="user/head", target=str(tmp_path)))
    for private in (str(tmp_path), "cuda", "/cache", "hf_x", "v2", "base_model"):
        assert private not in text


def test_usage():
    text = make_card(EAGLE3, name="user/head", target="user/target").text
    assert 'pipeline("text-generation", model="user/target", speculative="user/head")' in text
    vllm = json.loads(text.split("--speculative-config '")[1].split("'")[0])
    assert vllm == {"method": "eagle3", "model": "user/head", "num_speculative_tokens": 4}
    assert "--speculative-algorithm EAGLE3 \\\n    --speculative-draft-model-path user/head" in text
    assert "--speculative-num-steps 4" in text
    assert "--speculative-num-draft-tokens 5" in text
    # Of what the settings leave open, the checkpoint tells the length.
    text = make_card(SpeculativeConfig(method="dflash", model="a/b"), name="a/b", num_draft_tokens=7).text
    assert '"num_speculative_tokens": 7' in text
    assert "--speculative-num-draft-tokens 8" in text
    # Engines have no adaptive length.
    text = make_card(SpeculativeConfig("dflash", "a/b", num_speculative_tokens="auto"), name="a/b").text
    assert "| num_speculative_tokens | `auto` |" in text
    assert "--speculative-num-draft-tokens 16" in text
    for method, engines in (("medusa", 0), ("mtp", 0), ("mlp_speculator", 0), ("suffix", 1), ("ngram", 2)):
        model = None if method in ("suffix", "ngram") else "a/b"
        text = make_card(SpeculativeConfig(method=method, model=model), name="a/b").text
        assert ("With vLLM" in text) + ("With SGLang" in text) == engines
    # Which rule accepts drafts is for whoever generates.
    typical = make_card(EAGLE3.replace(rejection_sample_method="typical"), name="user/head", target="user/target")
    assert str(typical) == str(make_card(EAGLE3, name="user/head", target="user/target"))


def test_measured_figures():
    text = make_card(EAGLE3, name="user/head", report=REPORT).text
    assert "| plain | 100.0 | 1.00 |  |  |" in text
    assert "| eagle3 | 250.0 | 2.50 | 3.25 | 75% |" in text
    assert "| eagle3_tree | 300.0 | 3.00 |  |  |" in text
    assert "ngram" not in text
    assert "A \\| processor, data type bfloat16, batch size 1, most new tokens 256, torch 2.9." in text
    with pytest.raises(SpecConfigError, match="no figures of 'medusa', but of: plain, eagle3, eagle3_tree, ngram"):
        make_card(SpeculativeConfig(method="medusa", model="a/b"), name="a/b", report=REPORT)
    for wrong in ([], {"rows": 3}, {"rows": [{}]}):
        with pytest.raises(SpecConfigError, match="no `rows`"):
            make_card(EAGLE3, name="user/head", report=wrong)


def test_figures_are_renewed_in_a_text_that_is_kept():
    card = ModelCard("---\nlicense: mit\n---\n# Mine\n\nWords.\n")
    for speed in (250.0, 260.0):
        row = {"method": "eagle3", "tokens_per_second": speed}
        card = make_card(EAGLE3, name="user/head", report={"rows": [row]}, existing=card)
        assert card.text.count("## Measured") == 1
        assert f"| eagle3 | {speed} |" in card.text
        assert card.text.startswith("# Mine\n\nWords.\n")
    card.text += "\n## More\n"
    card = make_card(EAGLE3, name="user/head", report={"rows": [row]}, existing=card)
    assert card.text.count("## Measured") == card.text.count("## More") == 1


def test_a_method_is_needed():
    for config in (SpeculativeConfig(model="a/b"), SpeculativeConfig(method="auto")):
        with pytest.raises(SpecConfigError, match="settings with a method"):
            make_card(config, name="user/head")


def test_reading(tmp_path, hub):
    folder = written(tmp_path, make_card(EAGLE3, name="user/head", target="user/target"))
    assert read_card(folder) == EAGLE3.replace(model=str(folder))
    hub.add("user/head", folder)
    hub.add("user/head", folder, revision="v2")
    hub.add("user/none", files={"a.txt": ""})
    assert read_card("user/head") == EAGLE3
    assert read_card("user/head", revision="v2") == EAGLE3.replace(revision="v2")
    assert read_card("user/none") is None


def test_settings_of_another_version_are_left_out(tmp_path):
    card = make_card(EAGLE3, name="user/head", target="user/target")
    card.data["speculative"]["of_the_future"] = 3
    assert read_card(written(tmp_path, card)) == EAGLE3.replace(model=str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"method": "ngrm"}, "Unknown spec_method='ngrm'"),
        ({"method": "eagle3", "num_speculative_tokens": "many"}, "must be an integer|num_speculative_tokens"),
        ({"method": "eagle3", "trust_remote_code": True}, "must not let code run"),
        ({"method": "eagle3", "options": {"trust_remote_code": 1}}, "must not let code run"),
        ([1, 2], "a mapping of names to values, got list"),
        ({3: 4}, "a mapping of names to values"),
        (date(2026, 1, 1), "a mapping of names to values, got date"),
        ({"method": 3}, "name of a method"),
        ({"method": "ngram", "prompt_lookup_max": {}}, "prompt_lookup_max"),
        ({"method": ["eagle3"]}, "name of a method"),
    ],
)
def test_wrong_settings_are_clear_errors(settings, match, tmp_path):
    (tmp_path / "README.md").write_text(f"---\n{yaml.safe_dump({'speculative': settings})}---\n")
    with pytest.raises(SpecConfigError, match=f"in the card of '.*{match}"):
        read_card(tmp_path)


def test_yaml_runs_nothing_and_cannot_grow(tmp_path):
    for metadata in (
        "speculative: !!python/object/apply:os.system ['exit 1']",
        "speculative: {method: ngram, x: " + "[" * 2_000,
        "speculative: [",
        "- a list",
    ):
        (tmp_path / "README.md").write_text(f"---\n{metadata}\n---\n")
        assert read_card(tmp_path) is None
        assert read_target_card(tmp_path) is None
    # Each line doubles the value of the one before.
    levels = [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60)]
    lines = ["a0: &a0 [1, 1]", *levels, "speculative: {method: medusa, speculative_token_tree: *a59}"]
    (tmp_path / "README.md").write_text("---\n" + "\n".join(lines) + "\n---\n")
    with pytest.raises(SpecConfigError, match="more than 10000 values|more than 8 deep"):
        read_card(tmp_path)


def test_the_entry_of_a_target(tmp_path, hub):
    card = ModelCard("---\nlicense: mit\n---\n# A model\n")
    add_to_target_card(card, EAGLE3.replace(revision="v2", device="cpu"))
    folder = written(tmp_path, card)
    assert load_card(folder).data.license == "mit"
    assert load_card(folder).text.strip() == "# A model"
    assert read_target_card(folder) == EAGLE3.replace(revision="v2")
    hub.add("user/target", folder)
    assert read_target_card("user/target") == EAGLE3.replace(revision="v2")
    add_to_target_card(card, None)
    assert read_target_card(written(tmp_path, card)) is None
    add_to_target_card(card, "ngram")
    assert read_target_card(written(tmp_path, card)) == SpeculativeConfig(method="ngram")
    with pytest.raises(SpecConfigError, match="is a path.*Push the drafter"):
        add_to_target_card(card, EAGLE3.replace(model=str(tmp_path)))


def test_a_drafter_s_card_is_no_entry_of_a_target(tmp_path):
    folder = written(tmp_path, make_card(EAGLE3, name="user/head", target="user/target"))
    assert target_entry(load_card(folder).data.to_dict()) is None
    assert read_target_card(folder) is None


def test_an_unreadable_card_is_not_overwritten(tmp_path):
    (tmp_path / "README.md").write_text("---\na: [\n---\nWords.\n")
    with pytest.raises(SpecConfigError, match="cannot be read"):
        load_card(tmp_path)
    assert load_card(tmp_path / "none") is None
