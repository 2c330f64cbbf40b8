"""A method without a model: its drafter is looked for as "auto" does, and what is found is told."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants, snapshot_download
from safetensors.torch import load_file, save

from hf_specdec import SpecConfigError, demo, forget_speculators, load_speculator
from hf_specdec.errors import CheckpointFormatError, UnsupportedModelError
from tests.helpers.drafters import DFLASH, EAGLE, FIXTURES, card_of, load, speculated
from tests.helpers.models import prompts, tiny_gpt2, tiny_llama


PROMPT = "def read_json(path):\n    with open("
DRAFTERS = {row["method"]: row["model"] for row in demo.settings().values() if "model" in row}


@pytest.fixture
def target(hub):
    """The embedded target as a repository."""
    hub.add("user/target", demo.target_path())
    return "user/target"


def generate(model, **arguments):
    """The statistics of a call."""
    return speculated(model, demo.load_tokenizer()(PROMPT, return_tensors="pt"), **arguments)


@pytest.mark.parametrize("method", sorted(DRAFTERS))
def test_every_method_finds_its_drafter(target, hub, method, tmp_path):
    repo = hub.add("user/drafter", DRAFTERS[method], card=card_of(target, "speculative-decoding"))
    # Others would be preferred.
    other = "dflash" if method != "dflash" else "eagle3"
    hub.add("other/drafter", DRAFTERS[other], card=card_of(target, other), downloads=100)
    model = load()
    stats = generate(model, spec_method=method, num_speculative_tokens=2)
    assert (stats.method, stats.num_accepted_tokens > 0) == (method, True)
    assert len(stats.num_accepted_tokens_per_pos) <= 2
    revision = repo.branches["main"]
    assert stats.drafter == {"model": "user/drafter", "owner": "user", "revision": revision, "place": "hub"}
    assert stats.to_dict()["drafter"] == stats.drafter
    assert stats.notes[0] == (
        f"method='{method}' chose {method} 'user/drafter' (owner 'user', revision '{revision}'): on the Hub, made for "
        "the target"
    )
    num_requests = len(hub.requests)
    again = load_speculator(model, method)
    assert len(hub.requests) == num_requests
    assert again.config.model == "user/drafter"
    card = (again.save_pretrained(tmp_path) / "README.md").read_text()
    assert f"| weights of | `user/drafter` at revision `{revision}` |" in card


@pytest.mark.parametrize(
    "settings",
    [
        {
            "method": "suffix+eagle3",
            "suffix_decoding_max_tree_depth": 9,
            "draft_tree_depth": 3,
            "draft_tree_top_k": 2,
            "num_draft_nodes": 4,
        },
        {"method": "ngram+eagle3", "prompt_lookup_max": 3, "retrieval_num_speculative_tokens": 5},
        {"method": "eagle3", "draft_tree_depth": 3, "draft_tree_top_k": 2, "num_draft_nodes": 4},
        {"method": "eagle3", "num_speculative_tokens": 3, "max_model_len": 100, "rejection_sample_method": "block"},
        {"method": "eagle3", "speculative_token_tree": [0, 0, 1]},
    ],
)
def test_settings_of_the_call_are_kept(target, hub, settings):
    files = {"speculation_config.json": json.dumps({"method": "eagle3", "num_speculative_tokens": 7})}
    hub.add("user/head", demo.drafter_path("eagle3"), files=files, card=card_of(target, "eagle3"))
    model = load()
    found = load_speculator(model, settings).config.to_dict()
    given = {key: found.get(key) for key in settings if key != "speculative_token_tree"}
    assert given == {key: value for key, value in settings.items() if key != "speculative_token_tree"}
    assert ("speculative_token_tree" in found) == ("speculative_token_tree" in settings)
    assert found["model"] == "user/head"
    # The drafter's own length holds where the call says nothing of the shape.
    assert found.get("num_speculative_tokens") == settings.get("num_speculative_tokens")
    assert load_speculator(model, "eagle3").config.num_speculative_tokens == 7
    assert generate(model, speculative=settings).num_accepted_tokens > 0


class TestPlaces:
    def test_card(self, hub):
        card = "---\nspeculative: {method: ngram+dflash, model: user/draft, num_speculative_tokens: 3}\n---\n"
        hub.add("user/target", demo.target_path(), card=card)
        hub.add("user/draft", demo.drafter_path("dflash"))
        stats = generate(load(), spec_method="dflash")
        assert (stats.method, stats.drafter["place"]) == ("dflash", "entry")

    def test_cache_and_folders_serve_offline(self, target, hub, monkeypatch, tmp_path):
        hub.add("user/draft", demo.drafter_path("dflash"), card=card_of(target))
        for name in ("user/draft", target):
            snapshot_download(name)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        num_requests = len(hub.requests)
        assert generate(load(), spec_method="dflash").drafter["place"] == "cache"
        assert len(hub.requests) == num_requests
        folder = shutil.copytree(demo.target_path(), tmp_path / "target")
        shutil.copytree(demo.drafter_path("dflash"), folder / "draft")
        (folder / "README.md").write_text('---\nspeculative: {"model": "draft"}\n---\n')
        stats = generate(load(str(folder)), spec_method="dflash")
        assert (stats.drafter["place"], stats.drafter["owner"]) == ("entry", None)

    def test_layers_of_the_target_come_first(self, hub):
        hub.add("user/target", FIXTURES / "mtp" / "deepseek_v3" / "target")
        model = load()
        num_requests = len(hub.requests)
        speculator = load_speculator(model, "mtp")
        assert (speculator.config.model, speculator.origin["place"]) == (None, "target")
        assert not any(request.path == "/api/models" for request in hub.requests[num_requests:])

    def test_layers_are_looked_for_elsewhere(self, target, hub):
        hub.add("user/layers", demo.drafter_path("mtp"), card=card_of(target, "mtp"))
        assert generate(load(), spec_method="mtp").drafter["model"] == "user/layers"


class TestTheTargetItself:
    """Named as a draft model without a method."""

    @pytest.mark.parametrize("where", ["folder", "repository", "snapshot"])
    def test_its_own_layers_draft(self, hub, tmp_path, where):
        source = FIXTURES / "mtp" / "deepseek_v3" / "target"
        folder = str(shutil.copytree(source, tmp_path / "target"))
        hub.add("user/target", source)
        model = load(folder if where == "folder" else "user/target")
        name = {"folder": folder + "/../target/", "repository": "user/target"}.get(where) or snapshot_download(
            "user/target"
        )
        stats = speculated(model, prompts(1), speculative={"model": name, "num_speculative_tokens": 1})
        assert stats.method == "mtp"
        own = load_speculator(model, "mtp").resources.state_dict()
        assert all(
            torch.equal(tensor, own[key])
            for key, tensor in load_speculator(model, name).resources.state_dict().items()
        )

    def test_without_such_layers(self, target, hub):
        model = load()
        for name in (target, snapshot_download(target)):
            with pytest.raises(SpecConfigError, match="is the target itself and has no multi-token-prediction layers"):
                load_speculator(model, {"model": name})
        # Who names the method may mean it, and so may another commit or folder of the repository.
        assert load_speculator(model, {"model": target, "method": "draft_model"}).method == "draft_model"
        hub.add("user/target", demo.drafter_path("draft_model"), revision="small")
        assert load_speculator(model, {"model": target, "revision": "small"}).method == "draft_model"

    def test_named_by_its_own_generation_config(self, hub):
        files = {"generation_config.json": json.dumps({"speculative": {"model": "user/target"}})}
        hub.add("user/target", demo.target_path(), files=files)
        with pytest.raises(SpecConfigError, match="names the target itself"):
            load_speculator(load(), "eagle3")


class TestNothingFound:
    def test_all_that_was_seen_is_listed(self, target, hub):
        hub.add("user/misfit", DFLASH, card=card_of(target, "dflash"))
        hub.add("user/head", demo.drafter_path("eagle3"), card=card_of(target, "eagle3"))
        hub.add("user/other", demo.drafter_path("dflash"), card=card_of("user/another"))
        snapshot_download("user/other")
        tensors = load_file(demo.drafter_path("dflash") + "/model.safetensors")
        del tensors["norm.weight"]
        broken = {"model.safetensors": save(tensors)}
        hub.add("user/broken", demo.drafter_path("dflash"), files=broken, card=card_of(target, "dflash"))
        with pytest.raises(SpecConfigError, match="spec_method='dflash' needs a draft, and none was found") as error:
            generate(load(), spec_method="dflash")
        message = str(error.value)
        for name, reason in (
            ("user/misfit", "hidden size"),
            ("user/head", "It is for method='eagle3'"),
            ("user/other", "It was made for 'user/another'"),
            ("user/broken", "norm.weight"),
        ):
            line = message[message.index(f"'{name}'") :].partition("(1)")[0].partition(" (")[2]
            assert reason in line
        assert "`spec_model`" in message
        assert len(message) < 5000

    def test_offline(self, target, hub, monkeypatch):
        hub.add("user/draft", demo.drafter_path("dflash"), card=card_of(target, "dflash"))
        model = load()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(SpecConfigError, match="found for 'user/target'. Not searched: on the Hub.*offline"):
            generate(model, spec_method="dflash")

    @pytest.mark.parametrize("method", [*sorted(set(DRAFTERS) - {"mtp"}), "suffix+eagle3"])
    def test_of_a_target_without_a_name(self, hub, method):
        with pytest.raises(SpecConfigError, match=r"needs .*none was found for a target without a name"):
            tiny_llama().generate(**prompts(1), max_new_tokens=4, spec_method=method)

    def test_what_is_wrong_with_own_layers_is_an_error_of_their_loader(self, hub):
        with pytest.raises(SpecConfigError, match="was not loaded from a checkpoint"):
            load_speculator(tiny_llama(), "mtp")
        with pytest.raises(UnsupportedModelError, match="'gpt2'"):
            load_speculator(tiny_gpt2(), "mtp")

    def test_what_was_found_once_is_searched_for_again_after_a_failure(self, target, hub):
        model = load()
        with pytest.raises(SpecConfigError):
            load_speculator(model, "dflash")
        hub.add("user/draft", demo.drafter_path("dflash"), card=card_of(target, "dflash"))
        assert load_speculator(model, "dflash").config.model == "user/draft"
        # "auto" has a search of its own.
        assert load_speculator(model, "auto").method == "dflash"
        forget_speculators(model)

    @pytest.mark.parametrize("name", ["revision", "subfolder", "code_revision", "trust_remote_code"])
    def test_places_are_about_a_named_model(self, target, name):
        with pytest.raises(
            SpecConfigError, match=f"`{name}`=.* is about a named `model`, and method='dflash' finds one"
        ):
            load_speculator(load(), "dflash", **{name: name == "trust_remote_code" or "x"})


class TestTrust:
    def test_size_is_bounded_before_anything_is_downloaded(self, target, hub):
        # Its header says nothing of them.
        padded = {"model.safetensors": (EAGLE / "model.safetensors").read_bytes() + bytes(8_000_000)}
        hub.add("user/huge", EAGLE, files=padded, card=card_of("user/small", "eagle3"))
        hub.add("user/small", EAGLE / "target")
        with pytest.raises(SpecConfigError, match="'user/huge'.*It has 8 MB, and what nobody has named"):
            load_speculator(load("user/small"), "eagle3")
        assert hub.sent("/storage/user/huge/*") < 200_000

    @pytest.mark.parametrize("how", ["environment", "call", "both"])
    def test_only_trusted_owners(self, target, hub, monkeypatch, how):
        hub.add("stranger/popular", demo.drafter_path("dflash"), card=card_of(target, "dflash"), downloads=10**6)
        hub.add("Friend/draft", demo.drafter_path("dflash"), card=card_of(target, "dflash"))
        given = {} if how == "environment" else {"trusted_owners": ["friend", "other"]}
        if how != "call":
            monkeypatch.setenv("HF_SPECDEC_TRUSTED_OWNERS", "friend, user")
        model = load()
        for method in ("dflash", "auto"):
            found = load_speculator(model, method, **given)
            assert found.config.model == "Friend/draft"
            assert found.config.trusted_owners is None
        # Of others nothing is read.
        assert not any("stranger" in request.path for request in hub.requests)
        assert load_speculator(model, "dflash", model="stranger/popular", **given).config.model == "stranger/popular"
        monkeypatch.setenv("HF_SPECDEC_TRUSTED_OWNERS", "")
        with pytest.raises(SpecConfigError, match="Its owner 'friend' is not among HF_SPECDEC_TRUSTED_OWNERS"):
            load_speculator(model, "dflash", **given)

    def test_trusted_owners_hold_for_the_cache_and_for_what_the_target_names(self, hub, monkeypatch):
        entry = {"generation_config.json": json.dumps({"speculative": {"model": "stranger/named"}})}
        hub.add("user/target", demo.target_path(), files=entry)
        for name in ("stranger/named", "stranger/cached"):
            hub.add(name, demo.drafter_path("dflash"), card=card_of("user/target"))
            snapshot_download(name)
        model = load()
        assert load_speculator(model, "auto", trusted_owners=["stranger"]).config.model == "stranger/named"
        assert load_speculator(model, "auto", trusted_owners="user").config.model is None

    def test_allowed_models(self, target, hub, monkeypatch):
        hub.add("user/one", demo.drafter_path("dflash"), card=card_of(target, "dflash"), downloads=5)
        hub.add("user/two", demo.drafter_path("dflash"), card=card_of(target, "dflash"))
        monkeypatch.setenv("HF_SPECDEC_ALLOWED_MODELS", "user/tw*")
        assert load_speculator(load(), "dflash").config.model == "user/two"

    def test_a_folder_of_the_same_name_is_not_taken_for_the_repository(self, target, hub, tmp_path, monkeypatch):
        hub.add("user/draft", demo.drafter_path("dflash"), card=card_of(target, "dflash"))
        shutil.copytree(demo.drafter_path("dflash"), tmp_path / "user" / "draft")
        model = load()
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SpecConfigError, match="A folder here has the same name"):
            load_speculator(model, "dflash")

    def test_settings_of_what_is_taken_are_the_shape_of_drafts(self, target, hub, caplog):
        saved = {"method": "dflash", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic"}
        saved |= {"synthetic_acceptance_rates": [1.0], "control_profile": "/etc/passwd", "cache_dir": "/etc"}
        saved |= {"token": "hf_other", "model": "user/other", "device": "cuda:7", "local_files_only": True}
        files = {"speculation_config.json": json.dumps(saved)}
        hub.add("user/draft", demo.drafter_path("dflash"), files=files, card=card_of(target, "dflash"))
        model = load()
        for method in ("dflash", "auto"):
            config = load_speculator(model, method).config
            assert config.to_dict().keys() == {"method", "model", "revision", "num_speculative_tokens"}
            assert config.token is None
        lines = [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.WARNING]
        assert sum("rejection_sample_method" in line and "'user/draft'" in line for line in lines) == 1
        assert generate(model, spec_method="dflash").is_lossless


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("x"), RecursionError("deep"), KeyError("a"), RuntimeError("b"), MemoryError()]
)
def test_one_that_trips_its_loader_is_passed_over(target, hub, monkeypatch, error):
    """Configs of strangers can trip libraries."""
    hub.add("user/bad", demo.drafter_path("dflash"), card=card_of(target, "dflash"), downloads=10)
    hub.add("user/good", demo.drafter_path("dflash"), card=card_of(target, "dflash"))
    from hf_specdec.candidate_generators.dflash.generator import DFlashCandidateGenerator

    load_really = DFlashCandidateGenerator.load

    def trip(config, *args, **kwargs):
        if config.model == "user/bad":
            raise error
        return load_really(config, *args, **kwargs)

    monkeypatch.setattr(DFlashCandidateGenerator, "load", trip)
    assert load_speculator(load(), "auto").config.model == "user/good"


@pytest.mark.parametrize(
    "changes",
    [{"num_attention_heads": 0}, {"hidden_size": "wide"}],
)
def test_a_bad_repository_in_the_cache(hub, tmp_path, changes):
    """A draft model with the target's tokenizer whose config transformers trips over."""
    hub.add("user/target", demo.target_path())
    config = json.loads(Path(demo.drafter_path("draft_model"), "config.json").read_text())
    names = ("tokenizer.json", "tokenizer_config.json")
    files = {name: Path(demo.target_path(), name).read_bytes() for name in names}
    files |= {"config.json": json.dumps({**config, **changes})}
    hub.add("user/bad", demo.drafter_path("draft_model"), files=files, card=card_of("user/target"))
    for name in ("user/bad", "user/target"):
        snapshot_download(name)
    assert generate(load(), spec_method="auto").method == "suffix+recycling"
    with pytest.raises((SpecConfigError, CheckpointFormatError), match="user/bad|none was found"):
        generate(load(), spec_method="draft_model")
