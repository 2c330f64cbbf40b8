"""A drafter that is saved or pushed loads again by folder or name alone, and drafts the same."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from hf_specdec import SpecConfigError, SpeculativeConfig, demo, forget_speculators, load_speculator, record
from hf_specdec.candidate_generators.eagle.network import load_eagle
from hf_specdec.checkpoints.files import ReadOfRepositories
from hf_specdec.hub.card import read_card
from hf_specdec.method import takes_model
from tests.helpers.loopback_hub import TOKEN
from tests.helpers.models import prompts, tiny_llama
from tests.helpers.paths import FIXTURES


PROMPT = "def read_json(path):\n    with open(path) as file:\n        return json.load(file)\n\ndef write_"


@pytest.fixture(scope="module")
def target():
    return demo.load_target()


@pytest.fixture(scope="module")
def inputs():
    return demo.load_tokenizer()(PROMPT, return_tensors="pt")


def drafts_of(model, inputs, **speculation):
    """The tokens of a call, and all that was drafted on the way, by a drafter that has seen no other call."""
    forget_speculators(model)
    with record(trace=True) as made:
        tokens = model.generate(**inputs, max_new_tokens=14, do_sample=False, **speculation)
    (call,) = made.calls
    return tokens.tolist(), [row.draft_tokens for cycle in call.cycles for row in cycle.rows]


@pytest.mark.parametrize("row", demo.settings())
def test_saved_and_pushed_drafters_draft_the_same(row, target, inputs, tmp_path, hub):
    speculator = load_speculator(target, demo.settings()[row])
    expected = drafts_of(target, inputs, assistant=speculator)
    folder = speculator.save_pretrained(tmp_path / "saved")
    assert drafts_of(target, inputs, spec_model=str(folder)) == expected
    url = speculator.push_to_hub("user/drafter", token=TOKEN)
    assert url.startswith(f"{hub.url}/user/drafter/commit/")
    assert drafts_of(target, inputs, spec_model="user/drafter") == expected
    # Both know the settings, not only the method.
    for name in (str(folder), "user/drafter"):
        loaded = load_speculator(target, name).config
        place = {"model": name} if takes_model(speculator.method) else {}
        # That tokenizers need not be compared is for the user to say.
        own = {"same_tokenizer": False} if speculator.method == "draft_model" else {}
        assert loaded == speculator.config.replace(**place, **own)
        assert read_card(name) == loaded


def test_settings_of_the_call_take_precedence(target, tmp_path):
    speculator = load_speculator(
        target, {"model": demo.drafter_path("eagle3"), "num_speculative_tokens": 3, "max_model_len": 100}
    )
    folder = str(speculator.save_pretrained(tmp_path))
    assert load_speculator(target, folder).config.num_speculative_tokens == 3
    changed = load_speculator(target, model=folder, num_speculative_tokens=2).config
    assert (changed.num_speculative_tokens, changed.max_model_len) == (2, 100)
    tree = load_speculator(target, {"model": folder, "speculative_token_tree": [0, 0, 1]}).config
    assert tree.num_speculative_tokens is None
    # Who names the method gets what the call says and no more.
    assert load_speculator(target, {"method": "eagle3", "model": folder}).config.num_speculative_tokens is None


def test_a_call_takes_a_chain_of_a_draft_with_a_saved_tree(target, inputs, tmp_path):
    chain = {"method": "dflash", "model": demo.drafter_path("dflash")}
    shape = {"num_draft_nodes": 20, "draft_tree_top_k": 3}
    folder = str(load_speculator(target, {**chain, **shape}).save_pretrained(tmp_path))
    tree, expected = (drafts_of(target, inputs, speculative=settings) for settings in ({"model": folder}, chain))
    assert drafts_of(target, inputs, speculative={"model": folder, "num_draft_nodes": 0}) == expected != tree


def test_weights_are_copied_byte_for_byte(target, tmp_path):
    source = Path(demo.drafter_path("dflash"))
    folder = load_speculator(target, model=str(source)).save_pretrained(tmp_path)
    for name in ("config.json", "model.safetensors"):
        assert (folder / name).read_bytes() == (source / name).read_bytes()
    # Saving to the same place again changes nothing.
    load_speculator(target, model=str(folder)).save_pretrained(folder)
    assert (folder / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


PUBLISHED = [
    *("eagle/eagle1_llama", "eagle/eagle3_llama", "eagle/eagle3_specforge", "eagle/eagle3_speculators"),
    *("dflash/qwen3_random_b8", "dflash/dspark_vanilla_b5"),
    *("medusa/v01_heads_pt", "medusa/v2_shared_lm_head_safetensors", "medusa/vllm_truncated_vocab"),
    *("mlp_speculator/tied_scaled", "mlp_speculator/untied_plain"),
]


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_format_is_kept(name, tmp_path):
    checkpoint = FIXTURES / name
    targets = checkpoint / "target", checkpoint.parent / "target"
    target = AutoModelForCausalLM.from_pretrained(next(path for path in targets if path.is_dir())).eval()
    # Some fixtures have both kinds of weights; the first that is read is copied.
    speculator = load_speculator(target, model=str(checkpoint))
    folder = speculator.save_pretrained(tmp_path)
    saved = load_speculator(target, model=str(folder))
    assert saved.method == speculator.method
    tensors, again = (item.generator_class.network(item.resources).state_dict() for item in (speculator, saved))
    assert tensors.keys() == again.keys()
    assert all(torch.equal(tensor, again[key]) for key, tensor in tensors.items())
    copies = [path for path in folder.iterdir() if path.suffix in (".safetensors", ".pt", ".bin")]
    assert len(copies) == 1
    assert copies[0].read_bytes() == (checkpoint / copies[0].name).read_bytes()


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_next", "mimo"])
@pytest.mark.parametrize("is_named", [False, True])
def test_multi_token_prediction_layers_leave_their_model(name, is_named, tmp_path):
    checkpoint = FIXTURES / "mtp" / name / "target"
    cls = Qwen2ForCausalLM if name == "mimo" else AutoModelForCausalLM
    target = cls.from_pretrained(checkpoint, dtype=torch.float32).eval()
    target.generation_config.pad_token_id = 0
    inputs = {"input_ids": torch.arange(1, 9)[None]}
    settings = {"method": "mtp", "num_speculative_tokens": 2, "model": str(checkpoint) if is_named else None}
    speculator = load_speculator(target, settings)
    folder = speculator.save_pretrained(tmp_path)
    whole, saved = (sum(file.stat().st_size for file in path.glob("*.safetensors")) for path in (checkpoint, folder))
    assert saved < whole
    expected = drafts_of(target, inputs, assistant=speculator)
    assert drafts_of(target, inputs, spec_model=str(folder)) == expected


def test_networks_are_written_in_their_published_format(target, tmp_path, inputs):
    network = load_eagle(SpeculativeConfig(method="eagle3", model=demo.drafter_path("eagle3")), target)
    speculator = load_speculator(target, draft_model=network)
    folder = speculator.save_pretrained(tmp_path)
    published = load_file(Path(demo.drafter_path("eagle3"), "model.safetensors"))
    assert load_file(folder / "model.safetensors").keys() == published.keys()
    assert drafts_of(target, inputs, spec_model=str(folder)) == drafts_of(target, inputs, assistant=speculator)


def test_a_draft_model_is_saved_with_its_tokenizer(target, inputs, tmp_path):
    # As the saved one will be: in another data type it may draft otherwise.
    draft = AutoModelForCausalLM.from_pretrained(demo.drafter_path("draft_model"), dtype=target.dtype)
    speculator = load_speculator(target, draft_model=draft, num_speculative_tokens=3)
    folder = speculator.save_pretrained(tmp_path)
    assert (folder / "tokenizer.json").is_file() == Path(draft.config.name_or_path, "tokenizer.json").is_file()
    assert drafts_of(target, inputs, spec_model=str(folder)) == drafts_of(target, inputs, assistant=speculator)


def test_nothing_of_this_machine_is_published(tmp_path):
    model = tiny_llama()
    tiny_llama(seed=1).save_pretrained(tmp_path / "draft")
    settings = {"model": str(tmp_path / "draft"), "device": "cpu", "token": "hf_secret", "cache_dir": "/cache"}
    folder = load_speculator(model, settings).save_pretrained(tmp_path / "saved")
    written = "".join(path.read_text() for path in folder.iterdir() if path.suffix in (".json", ".md"))
    for private in ("hf_secret", "/cache", str(tmp_path), '"device"'):
        assert private not in written
    assert json.loads((folder / "speculation_config.json").read_text()) == {"method": "draft_model"}


def test_cards_keep_what_was_written_by_hand(target, tmp_path, hub):
    speculator = load_speculator(target, "ngram")
    (tmp_path / "README.md").write_text("---\nlicense: mit\ntags: [mine]\n---\nMy own words.\n")
    speculator.save_pretrained(tmp_path, target="user/target")
    card = ModelCard.load(tmp_path / "README.md")
    assert card.text.strip() == "My own words."
    assert card.data.license == "mit"
    assert card.data.base_model == ["user/target"]
    assert {"mine", "ngram"} <= set(card.data.tags)
    hub.add("user/settings", tmp_path)
    speculator.push_to_hub("user/settings", token=TOKEN, tags=["new"])
    card = ModelCard.load("user/settings")
    assert card.text.strip() == "My own words."
    assert {"mine", "new"} <= set(card.data.tags)


def test_a_second_push_is_seen(target, hub):
    for length in (3, 5):
        load_speculator(target, "ngram", num_speculative_tokens=length).push_to_hub("user/drafter", token=TOKEN)
        assert load_speculator(target, model="user/drafter").config.num_speculative_tokens == length
    load_speculator(target, model=demo.drafter_path("medusa")).push_to_hub("user/drafter", token=TOKEN)
    assert load_speculator(target, model="user/drafter").method == "medusa"


def test_push_options(target, hub):
    speculator = load_speculator(target, "ngram", num_speculative_tokens=7)
    api = HfApi(endpoint=hub.url, token=TOKEN)
    speculator.push_to_hub("user/private", token=TOKEN, private=True, commit_message="Mine", license="mit")
    assert api.model_info("user/private").private
    assert api.model_info("user/private").card_data.license == "mit"
    commit = next(request for request in hub.requests if "/commit/" in request.path)
    assert commit.status == 200
    # Private repositories are loaded with a token, which the settings carry and never show.
    found = load_speculator(target, {"model": "user/private", "token": TOKEN}).config
    assert (found.method, found.num_speculative_tokens) == ("ngram", 7)


def test_pushes_that_cannot_be(target, hub):
    speculator = load_speculator(target, "ngram")
    with pytest.raises(SpecConfigError, match="cannot be the id"):
        speculator.push_to_hub("no/such/id", token=TOKEN)
    with pytest.raises(HfHubHTTPError, match="401"):
        speculator.push_to_hub("user/drafter")
    with pytest.raises(HfHubHTTPError, match="403"):
        speculator.push_to_hub("other/drafter", token=TOKEN)
    assert hub.repos == {}


def test_networks_that_cannot_be_saved(target, tmp_path):
    speculator = load_speculator(target, "ngram")
    speculator.generator_class = type("Own", (speculator.generator_class,), {})
    speculator.resources = torch.nn.Linear(2, 2)
    with pytest.raises(SpecConfigError, match="Linear cannot be saved"):
        speculator.save_pretrained(tmp_path / "saved")


def test_saved_settings_without_weights_name_their_drafter(tmp_path, target):
    SpeculativeConfig(model=demo.drafter_path("medusa"), num_speculative_tokens=2).save_pretrained(tmp_path)
    found = load_speculator(target, model=str(tmp_path)).config
    assert (found.method, found.model, found.num_speculative_tokens) == ("medusa", demo.drafter_path("medusa"), 2)


@pytest.mark.parametrize(
    "content", ["[1]", "{", '{"method": "ngrm"}', '{"method": "medusa", "trust_remote_code": true}']
)
def test_damaged_settings(content, target, tmp_path):
    folder = load_speculator(target, model=demo.drafter_path("medusa")).save_pretrained(tmp_path)
    (folder / "speculation_config.json").write_text(content)
    for speculation in ({"model": str(folder)}, {"config": str(folder)}):
        with pytest.raises(SpecConfigError, match="speculation_config.json|Unknown spec_method='ngrm'"):
            load_speculator(target, **speculation)


def test_a_saved_drafter_is_found_offline(target, tmp_path, hub, monkeypatch):
    load_speculator(target, "ngram", num_speculative_tokens=3).push_to_hub("user/drafter", token=TOKEN)
    assert load_speculator(target, model="user/drafter").config.num_speculative_tokens == 3
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("hf_specdec.hub.published._saved_on_the_hub", ReadOfRepositories())
    assert load_speculator(target, model="user/drafter").config.num_speculative_tokens == 3


def test_pushed_shards(hub, tmp_path):
    model, draft = tiny_llama(), tiny_llama(seed=1)
    draft.save_pretrained(tmp_path / "draft", max_shard_size="20KB")
    assert len(list((tmp_path / "draft").glob("*.safetensors"))) > 1
    load_speculator(model, model=str(tmp_path / "draft")).push_to_hub("user/draft", token=TOKEN)
    inputs = prompts(2)
    expected = drafts_of(model, inputs, assistant=draft)
    assert drafts_of(model, inputs, spec_model="user/draft") == expected
