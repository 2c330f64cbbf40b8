"""A drafter that is saved or pushed loads again by name alone and drafts the same; its card says what it is."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM
from typer.testing import CliRunner

from hf_specdec import SpecConfigError, SpeculativeConfig, cli, demo, forget_speculators, load_speculator, record
from hf_specdec.candidate_generators.eagle.network import EagleNetwork
from hf_specdec.checkpoints.files import read_of_repositories
from hf_specdec.checkpoints.loading import load
from hf_specdec.hub.card import add_to_target_card, load_card, make_card, read_card, read_target_card, target_entry
from hf_specdec.hub.published import published_config
from hf_specdec.method import takes_model
from tests.helpers.heads import HEADS, WITH_LAYERS, loaded_target
from tests.helpers.levels import full, in_full, split
from tests.helpers.loopback_hub import TOKEN
from tests.helpers.models import tiny_llama


ROWS = demo.settings()


@pytest.fixture(scope="module")
def target():
    return demo.load_target()


@pytest.fixture(scope="module")
def inputs():
    return demo.load_tokenizer()("def read_json(path):\n    with open(path) as file:\n  ", return_tensors="pt")


def drafts_of(model, inputs, **speculation):
    """The tokens of a call, and all that was drafted on the way, by a drafter that has seen no other call."""
    forget_speculators(model)
    with record(trace=True) as made:
        tokens = model.generate(**inputs, max_new_tokens=14, do_sample=False, **speculation)
    (call,) = made.calls
    return tokens.tolist(), [row.draft_tokens for cycle in call.cycles for row in cycle.rows]


@pytest.mark.parametrize("row", split(ROWS, ["eagle3"]))
def test_saved_and_pushed_drafters_draft_the_same(row, target, inputs, tmp_path, hub):
    speculator = load_speculator(target, ROWS[row])
    expected = drafts_of(target, inputs, assistant=speculator)
    folder = str(speculator.save_pretrained(tmp_path / "saved"))
    assert speculator.push_to_hub("user/drafter", token=TOKEN).startswith(f"{hub.url}/user/drafter/commit/")
    # That tokenizers need not be compared is for the user to say.
    own = {"draft_vocabulary": "auto"} if speculator.method == "draft_model" else {}
    for name in (folder, "user/drafter"):
        assert drafts_of(target, inputs, spec_model=name) == expected
        # Both know the settings, not only the method.
        place = {"model": name} if takes_model(speculator.method) else {}
        assert load_speculator(target, name).config == speculator.config.replace(**place, **own) == read_card(name)


def test_settings_of_the_call_take_precedence(target, tmp_path):
    settings = {"model": demo.drafter_path("eagle3"), "num_speculative_tokens": 3, "max_model_len": 100}
    folder = str(load_speculator(target, settings).save_pretrained(tmp_path))
    # Who names the method gets what the call says and no more.
    lengths = [({}, 3), ({"num_speculative_tokens": 2}, 2), ({"speculative_token_tree": [[0], [1], [0, 0]]}, None)]
    for changes, length in (*lengths, ({"method": "eagle3"}, None)):
        config = load_speculator(target, {"model": folder, **changes}).config
        assert config.num_speculative_tokens == length
        assert config.max_model_len == (None if "method" in changes else 100)


PUBLISHED = ["medusa/v01_heads_pt", "medusa/v2_shared_lm_head_safetensors", "medusa/vllm_truncated_vocab"]
PUBLISHED += ["eagle/eagle1_llama", "eagle/eagle3_specforge", "eagle/eagle3_speculators", "dflash/dspark_vanilla_b5"]
PUBLISHED += ["mlp_speculator/tied_scaled"]


@pytest.mark.parametrize("name", split(PUBLISHED, PUBLISHED[:1]))
def test_every_format_is_kept_byte_for_byte(name, tmp_path):
    place = HEADS[name]
    # Saving to the same place again changes nothing.
    for _ in range(2):
        speculator = load_speculator(loaded_target(HEADS[name]), model=str(place))
        place = speculator.save_pretrained(tmp_path)
        # Some fixtures have both kinds of weights; the first that is read is copied.
        (copy,) = (path for path in place.iterdir() if path.suffix in (".safetensors", ".pt", ".bin"))
        for file in ("config.json", copy.name):
            assert (place / file).read_bytes() == (HEADS[name] / file).read_bytes()


@pytest.mark.parametrize("name", ["deepseek_v3", *in_full("qwen3_next", "mimo")])
def test_multi_token_prediction_layers_leave_their_model(name, tmp_path):
    checkpoint = WITH_LAYERS[f"mtp/{name}"]
    cls = Qwen2ForCausalLM if name == "mimo" else AutoModelForCausalLM
    target = cls.from_pretrained(checkpoint, dtype=torch.float32).eval()
    target.generation_config.pad_token_id = 0
    inputs = {"input_ids": torch.arange(1, 9)[None]}
    for model in (None, str(checkpoint)):
        speculator = load_speculator(target, {"method": "mtp", "num_speculative_tokens": 2, "model": model})
        folder = speculator.save_pretrained(tmp_path / str(model is None))
        sizes = [sum(file.stat().st_size for file in path.glob("*.safetensors")) for path in (folder, checkpoint)]
        assert sizes[0] < sizes[1]
        expected = drafts_of(target, inputs, assistant=speculator)
        assert drafts_of(target, inputs, spec_model=str(folder)) == expected


@pytest.mark.parametrize("method", ["eagle3", *in_full("draft_model")])
def test_networks_that_were_passed(method, target, tmp_path, inputs):
    path = demo.drafter_path(method)
    if method == "eagle3":
        network = load(EagleNetwork, SpeculativeConfig(method="eagle3", model=path), target)
    else:
        # As the saved one will be: in another data type it may draft otherwise.
        network = AutoModelForCausalLM.from_pretrained(path, dtype=target.dtype)
    speculator = load_speculator(target, draft_model=network)
    folder = speculator.save_pretrained(tmp_path)
    published = load_file(Path(path, "model.safetensors"))
    assert load_file(folder / "model.safetensors").keys() == published.keys()
    assert (folder / "tokenizer.json").is_file() == Path(path, "tokenizer.json").is_file()
    assert drafts_of(target, inputs, spec_model=str(folder)) == drafts_of(target, inputs, assistant=speculator)


def test_nothing_of_this_machine_is_published(tmp_path):
    tiny_llama(seed=1).save_pretrained(tmp_path / "draft")
    settings = {"model": str(tmp_path / "draft"), "device": "cpu", "token": "hf_secret", "cache_dir": "/cache"}
    folder = load_speculator(tiny_llama(), settings).save_pretrained(tmp_path / "saved")
    written = "".join(path.read_text() for path in folder.iterdir() if path.suffix in (".json", ".md"))
    for private in ("hf_secret", "/cache", str(tmp_path), '"device"'):
        assert private not in written
    assert json.loads((folder / "speculation_config.json").read_text()) == {"method": "draft_model"}


def test_second_push_is_seen_and_the_last_one_offline(target, hub, monkeypatch):
    load_speculator(target, model=demo.drafter_path("medusa")).push_to_hub("user/drafter", token=TOKEN)
    assert load_speculator(target, model="user/drafter").method == "medusa"
    for length in (3, 5):
        load_speculator(target, "ngram", num_speculative_tokens=length).push_to_hub("user/drafter", token=TOKEN)
        assert load_speculator(target, model="user/drafter").config.num_speculative_tokens == length
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    read_of_repositories.forget(lambda key: True)
    assert load_speculator(target, model="user/drafter").config.num_speculative_tokens == 5


def test_push_options_and_refusals(target, hub):
    speculator = load_speculator(target, "ngram", num_speculative_tokens=7)
    with pytest.raises(SpecConfigError, match="cannot be the id"):
        speculator.push_to_hub("no/such/id", token=TOKEN)
    for repo_id, token, status in (("user/drafter", None, "401"), ("other/drafter", TOKEN, "403")):
        with pytest.raises(HfHubHTTPError, match=status):
            speculator.push_to_hub(repo_id, token=token)
    assert hub.repos == {}
    speculator.push_to_hub("user/private", token=TOKEN, private=True, commit_message="Mine", license="mit")
    info = HfApi(endpoint=hub.url, token=TOKEN).model_info("user/private")
    assert (info.private, info.card_data.license) == (True, "mit")
    # Private repositories are loaded with a token, which the settings carry and never show.
    found = load_speculator(target, {"model": "user/private", "token": TOKEN}).config
    assert (found.method, found.num_speculative_tokens) == ("ngram", 7)


@full
def test_damaged_settings(target, tmp_path):
    folder = load_speculator(target, model=demo.drafter_path("medusa")).save_pretrained(tmp_path)
    for content in ("{", "[1]", '{"method": "ngrm"}', '{"trust_remote_code": true}'):
        (folder / "speculation_config.json").write_text(content)
        for speculation in ({"model": str(folder)}, {"config": str(folder)}):
            with pytest.raises(SpecConfigError, match="speculation_config.json|Unknown spec_method='ngrm'"):
                load_speculator(target, **speculation)


EAGLE3 = SpeculativeConfig(method="eagle3", model="user/head", num_speculative_tokens=4)


def card_of(config=EAGLE3, **arguments):
    return make_card(config, **{"name": "user/head", "target": "user/target", **arguments})


def written(folder, card):
    card.save(folder / "README.md")
    return folder


def run(*arguments):
    result = CliRunner().invoke(cli.app, list(map(str, arguments)), prog_name="hf-specdec")
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("about", ["H100", ["H100"], None])
def test_of_the_circumstances_a_card_tells_what_a_report_says_in_their_form(about):
    report = {"rows": [{"method": "eagle3", "speedup": 2.5}], "environment": about, "settings": about}
    assert "| eagle3 |" in card_of(report=report).text


@full
def test_the_command_and_texts_of_cards(target, tmp_path, hub, monkeypatch):
    settings = {"model": demo.drafter_path("eagle3"), "num_speculative_tokens": 4}
    head = load_speculator(target, settings).save_pretrained(tmp_path / "head")
    (head / "README.md").write_text("---\ntags: [mine]\n---\nMy own words.\n")
    names = ("method", "tokens_per_second", "speedup", "mean_acceptance_length", "acceptance_rate")
    rows = [("plain", 100.0, 1.0), ("eagle3", 250.0, 2.5, 3.25, 0.75), ("ngram", 120.0)]
    (tmp_path / "bench.json").write_text(json.dumps({"rows": [dict(zip(names, row)) for row in rows]}))
    options = ["--target", "user/target", "--license", "mit", "--tag", "qwen3", "--bench", tmp_path / "bench.json"]
    for _ in range(2):
        assert run("publish", head, "user/head", *options, "--dry-run").strip() == str(head / "README.md")
    assert hub.repos == {}
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    # What the card says already need not be said again.
    assert run("publish", head, "user/head", "--private").startswith(f"{hub.url}/user/head/commit/")
    assert HfApi(endpoint=hub.url, token=TOKEN).model_info("user/head").private
    assert load_speculator(target, {"model": "user/head", "token": TOKEN}).method == "eagle3"
    refused = CliRunner().invoke(cli.app, ["publish", str(head), "other/head"])
    assert (refused.exit_code, "The Hub refuses 'other/head'" in refused.stderr) == (2, True)
    card = ModelCard((head / "README.md").read_text())
    assert (card.data.license, card.data.base_model) == ("mit", ["user/target"])
    assert card.text.startswith("My own words.\n")
    assert {"mine", "eagle3", "qwen3"} <= set(card.data.tags)
    assert card.text.count("| eagle3 | 250.0 | 2.50 | 3.25 | 75% |") == 1
    text = card_of().text
    vllm = json.loads(text.split("--speculative-config '")[1].split("'")[0])
    assert vllm == {"method": "eagle3", "model": "user/head", "num_speculative_tokens": 4}
    assert "--speculative-algorithm EAGLE3 \\\n    --speculative-draft-model-path user/head" in text
    assert read_card(head) == EAGLE3.replace(model=str(head))
    # Which rule accepts drafts is for whoever generates.
    assert str(card_of(EAGLE3.replace(rejection_sample_method="typical"))) == str(card_of())


# Settings that others can use, by method.
NAMED = {"method": st.sampled_from(["eagle", "eagle3", "mtp", "medusa", "draft_model"]), "model": st.just("user/head")}
TREES = {"speculative_token_tree": st.sampled_from([[[0], [0, 0]], [[0], [1], [0, 0]]])}
LENGTHS = {"num_speculative_tokens": st.integers(1, 9)}
CONFIGS = st.one_of(
    st.fixed_dictionaries({"method": st.just("ngram")}, optional={**LENGTHS, "prompt_lookup_max": st.integers(4, 9)}),
    st.fixed_dictionaries({"method": st.just("suffix"), "suffix_decoding_min_token_prob": st.floats(0.0, 1.0)}),
    st.fixed_dictionaries(NAMED, optional={**LENGTHS, "max_model_len": st.integers(1, 10**6)}),
    st.fixed_dictionaries({**NAMED, "method": st.just("medusa"), **TREES}),
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
    assert card_of(SpeculativeConfig(method="draft_model", model="a/b")).data.library_name == "transformers"


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
        ({"method": "eagle3", "num_speculative_tokens": "many"}, "must be an integer|num_speculative_tokens"),
        ({"method": ["eagle3"]}, "name of a method"),
        ([1, 2], "a mapping of names to values, got list"),
        (b"eagle3", "a mapping of names to values, got bytes"),
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
