"""A method without a model: its drafter is looked for as "auto" does, and only what may be trusted is taken."""

import logging
import shutil

import pytest
import torch
from huggingface_hub import constants, snapshot_download

from hf_specdec import SpecConfigError, SpeculativeConfig, demo, load_speculator
from hf_specdec.candidate_generators.dflash.generator import DFlashCandidateGenerator
from tests.helpers.drafters import DFLASH, MTP, card_of, entry_of, load, saved_with, speculated, without_norm
from tests.helpers.levels import full, in_full
from tests.helpers.models import prompts, tiny_llama


PROMPT = "def read_json(path):\n    with open("
DRAFTERS = {row["method"]: row["model"] for row in demo.settings().values() if "model" in row}
DRAFT = demo.drafter_path("dflash")


@pytest.fixture
def target(hub):
    """The embedded target as a repository."""
    hub.add("user/target", demo.target_path())
    return "user/target"


@pytest.fixture
def draft(hub, target):
    """A drafter for it."""
    return hub.add("user/draft", DRAFT, card=card_of(target, "dflash"))


def generate(model, **arguments):
    """The statistics of a call."""
    return speculated(model, demo.load_tokenizer()(PROMPT, return_tensors="pt"), **arguments)


def found_for(model, method="dflash", **settings):
    return load_speculator(model, method, **settings).config.model


@pytest.mark.parametrize("method", ["eagle3", *in_full(*sorted(DRAFTERS.keys() - {"eagle3"}))])
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
    hub.requests.clear()
    again = load_speculator(model, method)
    assert not hub.requests
    card = (again.save_pretrained(tmp_path) / "README.md").read_text()
    assert f"| weights of | `user/drafter` at revision `{revision}` |" in card


TREE = {"draft_tree_depth": 3, "draft_tree_top_k": 2, "num_draft_nodes": 4}


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "suffix+eagle3", "suffix_decoding_max_tree_depth": 9, **TREE},
        *in_full(
            {"method": "ngram+eagle3", "prompt_lookup_max": 3, "retrieval_num_speculative_tokens": 5},
            {"method": "eagle3", "num_speculative_tokens": 3, "max_model_len": 99, "rejection_sample_method": "block"},
            {"method": "eagle3", "speculative_token_tree": ((0,), (0, 0), (1,))},
        ),
    ],
)
def test_settings_of_the_call_are_kept(target, hub, settings):
    files = saved_with(method="eagle3", num_speculative_tokens=7)
    hub.add("user/head", demo.drafter_path("eagle3"), files=files, card=card_of(target, "eagle3"))
    model = load()
    config = load_speculator(model, settings).config
    assert SpeculativeConfig.from_dict(settings).to_dict().items() <= config.to_dict().items()
    assert config.model == "user/head"
    # The drafter's own length holds where the call says nothing of the shape.
    assert config.num_speculative_tokens == settings.get("num_speculative_tokens")
    assert load_speculator(model, "eagle3").config.num_speculative_tokens == 7
    assert generate(model, speculative=settings).num_accepted_tokens > 0


class TestPlaces:
    def test_cache_and_folders_serve_offline(self, target, draft, hub, monkeypatch, tmp_path):
        for name in ("user/draft", target):
            snapshot_download(name)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        hub.requests.clear()
        assert generate(load(), spec_method="dflash").drafter["place"] == "cache"
        assert not hub.requests
        folder = shutil.copytree(demo.target_path(), tmp_path / "target")
        shutil.copytree(DRAFT, folder / "draft")
        (folder / "README.md").write_text('---\nspeculative: {"model": "draft"}\n---\n')
        origin = load_speculator(load(str(folder)), "dflash").origin
        assert (origin["place"], origin["owner"]) == ("entry", None)


@full
class TestTargetAsItsOwnDraftModel:
    @pytest.mark.parametrize("where", ["folder", *in_full("repository", "snapshot")])
    def test_its_layers_draft(self, hub, tmp_path, where):
        source = MTP / "deepseek_v3" / "target"
        folder = str(shutil.copytree(source, tmp_path / "target"))
        hub.add("user/target", source)
        model = load(folder if where == "folder" else "user/target")
        name = folder + "/../target/" if where == "folder" else "user/target"
        name = snapshot_download(name) if where == "snapshot" else name
        stats = speculated(model, prompts(1), speculative={"model": name, "num_speculative_tokens": 1})
        assert stats.method == "mtp"
        own, named = (load_speculator(model, place).resources.state_dict() for place in ("mtp", name))
        assert all(torch.equal(tensor, own[key]) for key, tensor in named.items())

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
        hub.add("user/target", demo.target_path(), files=entry_of({"model": "user/target"}))
        with pytest.raises(SpecConfigError, match="names the target itself"):
            load_speculator(load(), "eagle3")


@full
class TestNothingFound:
    def test_all_that_was_seen_is_listed(self, target, hub):
        hub.add("user/misfit", DFLASH, card=card_of(target, "dflash"))
        hub.add("user/head", demo.drafter_path("eagle3"), card=card_of(target, "eagle3"))
        hub.add("user/other", DRAFT, card=card_of("user/another"))
        snapshot_download("user/other")
        hub.add("user/broken", DRAFT, files=without_norm(DRAFT), card=card_of(target, "dflash"))
        with pytest.raises(SpecConfigError, match="spec_method='dflash' needs a draft, and none was found") as error:
            load_speculator(load(), "dflash")
        message = str(error.value)
        for name, reason in (
            ("user/misfit", "hidden size"),
            ("user/head", "It is for method='eagle3'"),
            ("user/other", "It was made for 'user/another'"),
            ("user/broken", "norm.weight"),
        ):
            assert reason in message[message.index(f"'{name}'") :].partition("(1)")[0].partition(" (")[2]
        assert "`spec_model`" in message
        assert len(message) < 5000

    @pytest.mark.parametrize("method", ["suffix+eagle3", *in_full(*sorted(DRAFTERS.keys() - {"mtp"}))])
    def test_target_without_a_name(self, hub, method):
        with pytest.raises(SpecConfigError, match=r"needs .*none was found for a target without a name"):
            tiny_llama().generate(**prompts(1), max_new_tokens=4, spec_method=method)

    def test_failed_search_is_repeated(self, target, hub):
        model = load()
        with pytest.raises(SpecConfigError):
            load_speculator(model, "dflash")
        hub.add("user/draft", DRAFT, card=card_of(target, "dflash"))
        assert found_for(model) == found_for(model, "auto") == "user/draft"


class TestTrust:
    @pytest.mark.parametrize("how", ["environment", *in_full("call", "both")])
    def test_trusted_owners_on_the_hub(self, target, hub, monkeypatch, how):
        hub.add("stranger/popular", DRAFT, card=card_of(target, "dflash"), downloads=10**6)
        hub.add("Friend/draft", DRAFT, card=card_of(target, "dflash"))
        given = {} if how == "environment" else {"trusted_owners": ["friend", "other"]}
        if how != "call":
            monkeypatch.setenv("HF_SPECDEC_TRUSTED_OWNERS", "friend, user")
        model = load()
        for method in ("dflash", "auto"):
            assert found_for(model, method, **given) == "Friend/draft"
        # Of others nothing is read.
        assert not hub.asked("*stranger*")
        assert load_speculator(model, "dflash", model="stranger/popular", **given).resources
        monkeypatch.setenv("HF_SPECDEC_TRUSTED_OWNERS", "")
        with pytest.raises(SpecConfigError, match="Its owner 'friend' is not among HF_SPECDEC_TRUSTED_OWNERS"):
            load_speculator(model, "dflash", **given)

    def test_trusted_owners_in_the_cache_and_named_by_the_target(self, hub):
        hub.add("user/target", demo.target_path(), files=entry_of({"model": "stranger/named"}))
        for name in ("stranger/named", "stranger/cached"):
            hub.add(name, DRAFT, card=card_of("user/target"))
            snapshot_download(name)
        model = load()
        assert found_for(model, "auto", trusted_owners=["stranger"]) == "stranger/named"
        assert found_for(model, "auto", trusted_owners="user") is None

    def test_folder_of_the_same_name_is_not_taken_for_the_repository(self, draft, tmp_path, monkeypatch):
        shutil.copytree(DRAFT, tmp_path / "user" / "draft")
        model = load()
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SpecConfigError, match="A folder here has the same name"):
            load_speculator(model, "dflash")

    def test_saved_settings_say_the_shape_of_drafts_alone(self, target, hub, caplog):
        saved = {"method": "dflash", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic"}
        saved |= {"synthetic_acceptance_rates": [1.0], "control_profile": "/etc/passwd", "cache_dir": "/etc"}
        saved |= {"token": "hf_other", "model": "user/other", "device": "cuda:7", "local_files_only": True}
        hub.add("user/draft", DRAFT, files=saved_with(**saved), card=card_of(target, "dflash"))
        model = load()
        for method in ("dflash", "auto"):
            config = load_speculator(model, method).config
            assert config.to_dict().keys() == {"method", "model", "revision", "num_speculative_tokens"}
            assert config.token is None
        lines = [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.WARNING]
        assert sum("rejection_sample_method" in line and "'user/draft'" in line for line in lines) == 1
        assert generate(model, spec_method="dflash").is_lossless

    @pytest.mark.parametrize("error", [ZeroDivisionError("x"), *in_full(RecursionError("deep"), MemoryError())])
    def test_what_trips_its_loader_is_passed_over(self, draft, hub, monkeypatch, error):
        """Configs of strangers can trip libraries."""
        hub.add("user/bad", DRAFT, card=card_of("user/target", "dflash"), downloads=10)
        load_really = DFlashCandidateGenerator.load

        def trip(config, *args, **kwargs):
            if config.model == "user/bad":
                raise error
            return load_really(config, *args, **kwargs)

        monkeypatch.setattr(DFlashCandidateGenerator, "load", trip)
        assert found_for(load(), "auto") == "user/draft"
