"""A drafter that is saved or pushed loads again by folder or name alone and drafts the same; the commands for it."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM
from typer.testing import CliRunner

from hf_specdec import SpecConfigError, SpeculativeConfig, cli, demo, forget_speculators, load_speculator, record
from hf_specdec.candidate_generators.eagle.network import load_eagle
from hf_specdec.checkpoints.files import ReadOfRepositories
from hf_specdec.hub.card import read_card
from hf_specdec.method import takes_model
from tests.helpers.heads import HEADS, WITH_LAYERS, loaded_target
from tests.helpers.levels import full, in_full
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


@pytest.mark.parametrize(
    "row", ["eagle3", "ngram", *in_full(*(row for row in ROWS if row not in ("eagle3", "ngram")))]
)
def test_saved_and_pushed_drafters_draft_the_same(row, target, inputs, tmp_path, hub):
    speculator = load_speculator(target, ROWS[row])
    expected = drafts_of(target, inputs, assistant=speculator)
    folder = str(speculator.save_pretrained(tmp_path / "saved"))
    url = speculator.push_to_hub("user/drafter", token=TOKEN)
    assert url.startswith(f"{hub.url}/user/drafter/commit/")
    # That tokenizers need not be compared is for the user to say.
    own = {"same_tokenizer": False} if speculator.method == "draft_model" else {}
    for name in (folder, "user/drafter"):
        assert drafts_of(target, inputs, spec_model=name) == expected
        # Both know the settings, not only the method.
        place = {"model": name} if takes_model(speculator.method) else {}
        assert load_speculator(target, name).config == speculator.config.replace(**place, **own) == read_card(name)


def test_settings_of_the_call_take_precedence(target, tmp_path):
    settings = {"model": demo.drafter_path("eagle3"), "num_speculative_tokens": 3, "max_model_len": 100}
    folder = str(load_speculator(target, settings).save_pretrained(tmp_path))
    assert load_speculator(target, folder).config.num_speculative_tokens == 3
    changed = load_speculator(target, model=folder, num_speculative_tokens=2).config
    assert (changed.num_speculative_tokens, changed.max_model_len) == (2, 100)
    tree = load_speculator(target, {"model": folder, "speculative_token_tree": [0, 0, 1]}).config
    assert tree.num_speculative_tokens is None
    # Who names the method gets what the call says and no more.
    assert load_speculator(target, {"method": "eagle3", "model": folder}).config.num_speculative_tokens is None


@pytest.mark.parametrize(
    "name",
    [
        "medusa/v01_heads_pt",
        *in_full(
            "eagle/eagle1_llama", "eagle/eagle3_specforge", "eagle/eagle3_speculators", "dflash/dspark_vanilla_b5"
        ),
        *in_full("medusa/v2_shared_lm_head_safetensors", "medusa/vllm_truncated_vocab", "mlp_speculator/tied_scaled"),
    ],
)
def test_every_format_is_kept_byte_for_byte(name, tmp_path):
    # Some fixtures have both kinds of weights; the first that is read is copied.
    speculator = load_speculator(loaded_target(HEADS[name]), model=str(HEADS[name]))
    folder = speculator.save_pretrained(tmp_path)
    (copy,) = (path for path in folder.iterdir() if path.suffix in (".safetensors", ".pt", ".bin"))
    for file in ("config.json", copy.name):
        assert (folder / file).read_bytes() == (HEADS[name] / file).read_bytes()
    # Saving to the same place again changes nothing.
    again = load_speculator(loaded_target(HEADS[name]), model=str(folder))
    assert again.method == speculator.method
    again.save_pretrained(folder)
    assert copy.read_bytes() == (HEADS[name] / copy.name).read_bytes()


@pytest.mark.parametrize("name", ["deepseek_v3", *in_full("qwen3_next", "mimo")])
def test_multi_token_prediction_layers_leave_their_model(name, tmp_path):
    checkpoint = WITH_LAYERS[f"mtp/{name}"]
    cls = Qwen2ForCausalLM if name == "mimo" else AutoModelForCausalLM
    target = cls.from_pretrained(checkpoint, dtype=torch.float32).eval()
    target.generation_config.pad_token_id = 0
    inputs = {"input_ids": torch.arange(1, 9)[None]}
    for model in (None, str(checkpoint)):
        settings = {"method": "mtp", "num_speculative_tokens": 2, "model": model}
        speculator = load_speculator(target, settings)
        folder = speculator.save_pretrained(tmp_path / str(model is None))
        sizes = [sum(file.stat().st_size for file in path.glob("*.safetensors")) for path in (folder, checkpoint)]
        assert sizes[0] < sizes[1]
        expected = drafts_of(target, inputs, assistant=speculator)
        assert drafts_of(target, inputs, spec_model=str(folder)) == expected


@pytest.mark.parametrize("method", ["eagle3", *in_full("draft_model")])
def test_networks_that_were_passed(method, target, tmp_path, inputs):
    path = demo.drafter_path(method)
    if method == "eagle3":
        network = load_eagle(SpeculativeConfig(method="eagle3", model=path), target)
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


def test_cards_keep_what_was_written_by_hand(target, tmp_path, hub):
    speculator = load_speculator(target, "ngram")
    (tmp_path / "README.md").write_text("---\nlicense: mit\ntags: [mine]\n---\nMy own words.\n")
    speculator.save_pretrained(tmp_path, target="user/target")
    card = ModelCard.load(tmp_path / "README.md")
    assert (card.data.license, card.data.base_model) == ("mit", ["user/target"])
    hub.add("user/settings", tmp_path)
    speculator.push_to_hub("user/settings", token=TOKEN, tags=["new"])
    card = ModelCard.load("user/settings")
    assert card.text.strip() == "My own words."
    assert {"mine", "new", "ngram"} <= set(card.data.tags)


def test_second_push_is_seen_and_the_last_one_offline(target, hub, monkeypatch):
    load_speculator(target, model=demo.drafter_path("medusa")).push_to_hub("user/drafter", token=TOKEN)
    assert load_speculator(target, model="user/drafter").method == "medusa"
    for length in (3, 5):
        load_speculator(target, "ngram", num_speculative_tokens=length).push_to_hub("user/drafter", token=TOKEN)
        assert load_speculator(target, model="user/drafter").config.num_speculative_tokens == length
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("hf_specdec.hub.published._saved_on_the_hub", ReadOfRepositories())
    assert load_speculator(target, model="user/drafter").config.num_speculative_tokens == 5


def test_push_options_and_refusals(target, hub):
    speculator = load_speculator(target, "ngram", num_speculative_tokens=7)
    with pytest.raises(SpecConfigError, match="cannot be the id"):
        speculator.push_to_hub("no/such/id", token=TOKEN)
    with pytest.raises(HfHubHTTPError, match="401"):
        speculator.push_to_hub("user/drafter")
    with pytest.raises(HfHubHTTPError, match="403"):
        speculator.push_to_hub("other/drafter", token=TOKEN)
    assert hub.repos == {}
    speculator.push_to_hub("user/private", token=TOKEN, private=True, commit_message="Mine", license="mit")
    info = HfApi(endpoint=hub.url, token=TOKEN).model_info("user/private")
    assert (info.private, info.card_data.license) == (True, "mit")
    # Private repositories are loaded with a token, which the settings carry and never show.
    found = load_speculator(target, {"model": "user/private", "token": TOKEN}).config
    assert (found.method, found.num_speculative_tokens) == ("ngram", 7)


def test_network_that_cannot_be_saved(target, tmp_path):
    speculator = load_speculator(target, "ngram")
    speculator.generator_class = type("Own", (speculator.generator_class,), {})
    speculator.resources = torch.nn.Linear(2, 2)
    with pytest.raises(SpecConfigError, match="Linear cannot be saved"):
        speculator.save_pretrained(tmp_path / "saved")


@pytest.mark.parametrize("content", ["{", *in_full("[1]", '{"method": "ngrm"}', '{"trust_remote_code": true}')])
def test_damaged_settings(content, target, tmp_path):
    folder = load_speculator(target, model=demo.drafter_path("medusa")).save_pretrained(tmp_path)
    (folder / "speculation_config.json").write_text(content)
    for speculation in ({"model": str(folder)}, {"config": str(folder)}):
        with pytest.raises(SpecConfigError, match="speculation_config.json|Unknown spec_method='ngrm'"):
            load_speculator(target, **speculation)


class TestCommands:
    """`hf-specdec card` and `hf-specdec export-custom-generate`."""

    def run(self, *arguments, exit_code=0):
        result = CliRunner().invoke(cli.app, list(map(str, arguments)), prog_name="hf-specdec")
        assert result.exit_code == exit_code, result.output
        return result.stdout if exit_code == 0 else " ".join(result.stderr.split())

    @pytest.fixture
    def head(self, target, tmp_path):
        settings = {"model": demo.drafter_path("eagle3"), "num_speculative_tokens": 4}
        folder = load_speculator(target, settings).save_pretrained(tmp_path / "head")
        (folder / "README.md").unlink()
        return folder

    def test_card_of_a_drafter(self, head, tmp_path):
        options = ("--target", "user/target", "--name", "user/head", "--license", "mit", "--tag", "a", "--tag", "b")
        rows = [{"method": "plain", "tokens_per_second": 10.0}, {"method": "eagle3", "tokens_per_second": 25.0}]
        (tmp_path / "bench.json").write_text(json.dumps({"rows": rows}))
        printed = ModelCard(self.run("card", head, *options, "--bench", tmp_path / "bench.json"))
        assert not (head / "README.md").exists()
        assert {"a", "b", "eagle3"} <= set(printed.data.tags)
        assert (printed.data.license, printed.data.base_model) == ("mit", ["user/target"])
        assert 'speculative="user/head"' in printed.text
        assert "| eagle3 | 25.0 |" in printed.text
        assert self.run("card", head, *options, "--write").strip() == str(head / "README.md")
        assert read_card(head) == SpeculativeConfig(method="eagle3", model=str(head), num_speculative_tokens=4)
        # What the card says need not be said again.
        assert ModelCard(self.run("card", head)).data.to_dict() == printed.data.to_dict()
        # Of one that nobody saved the length comes from the checkpoint.
        printed = ModelCard(self.run("card", demo.drafter_path("dflash"), "--name", "user/draft"))
        assert printed.data.speculative == {"method": "dflash"}
        assert "--speculative-num-draft-tokens" in printed.text

    @full
    def test_wrong_arguments(self, tmp_path, head):
        (tmp_path / "bench.json").write_text("{")
        for message, *arguments in (
            ("--license: for the card of a drafter", "card", tmp_path, "--drafter", "ngram", "--license", "mit"),
            ("cannot be read as JSON", "card", head, "--bench", tmp_path / "bench.json"),
            ("is no folder", "card", tmp_path / "none"),
            ("config.json", "card", tmp_path),
            ("Name the repo id", "export-custom-generate", head),
            ("Unknown spec_method", "export-custom-generate", head, "--method", "ngrm"),
        ):
            assert message in self.run(*arguments, exit_code=2)

    def test_export(self, tmp_path, head):
        repo = tmp_path / "repo"
        for folder, settings, *arguments in (
            (repo, "{'method': 'ngram', 'num_speculative_tokens': 4}", "--method", "ngram", "-k", 4),
            (repo, "{'model': 'user/head'}", "--spec-model", "user/head"),
            (repo, "{'method': 'ngram', 'num_speculative_tokens': 3", "--config", '{"method": "ngram"}', "-k", 3),
            (head, "{'method': 'eagle3', 'model': 'user/head', 'num_spec", "--name", "user/head"),
        ):
            assert len(self.run("export-custom-generate", folder, *arguments).split()) == 2
            assert f"SETTINGS = {settings}" in (folder / "custom_generate" / "generate.py").read_text()
