"""spec_method="auto" and methods without a model: what is found and may be trusted drafts, and changes no text."""

import logging
import shutil

import pytest
import torch
from huggingface_hub import constants, snapshot_download
from transformers import pipeline

from hf_specdec import SpecConfigError, demo, forget_speculators, load_speculator, record
from tests.helpers.drafters import DFLASH, EAGLE, MTP, card_of, entry_of, load, speculated, with_integers
from tests.helpers.levels import full, in_full, split
from tests.helpers.loopback_hub import TOKEN
from tests.helpers.models import prompts, tiny_llama


FALLBACK = "suffix+recycling"
DRAFTERS = {row["method"]: row["model"] for row in demo.settings().values() if "model" in row}
DRAFT = demo.drafter_path("dflash")
TEXT = "def read_json(path):\n    with open("


def generate(model, **arguments):
    """The statistics of a call, by default with "auto"."""
    return speculated(model, prompts(1), **(arguments or {"spec_method": "auto"}))


def found_for(model, method="dflash", **settings):
    return load_speculator(model, method, **settings).config.model


@pytest.fixture
def head(hub, target):
    """A drafter that is found for the target."""
    return hub.add("user/head", EAGLE, card=card_of(target, "eagle3"))


@pytest.fixture
def large(hub):
    """The embedded target, as a repository and loaded."""
    hub.add("user/target", demo.target_path())
    return load()


@pytest.fixture
def draft(hub):
    """A drafter for it."""
    return hub.add("user/draft", DRAFT, card=card_of("user/target", "dflash"))


@pytest.fixture
def log(caplog):
    """Lines of the package's log from the level "info" on."""
    caplog.set_level(logging.INFO, logger="hf_specdec.loader")
    return lambda: [f"{entry.levelname}: {entry.getMessage()}" for entry in caplog.records if "loader" in entry.name]


def test_layers_of_the_target_need_no_search(hub):
    hub.add("user/target", MTP / "deepseek_v3" / "target")
    assert generate(load()).method == "mtp"
    assert not hub.asked("/api/models")


def test_nothing_found(target, log, monkeypatch):
    monkeypatch.delenv("HF_SPECDEC_ADAPTIVE")
    model = load()
    for _ in range(2):
        stats = generate(model)
        assert stats.method == FALLBACK
        assert stats.notes[0] == f"method='auto' chose {FALLBACK}: no drafter with weights was found"
        # How much is drafted is measured.
        assert any(note.startswith("adaptive length: ") for note in stats.notes)
    assert log() == [f"INFO: Speculation: {stats.notes[0]}."]
    assert load_speculator(model, "auto", num_speculative_tokens=5).config.num_speculative_tokens == 5
    assert load_speculator(model, "auto", draft_tree_depth=4).config.num_speculative_tokens is None


def test_one_line_says_what_was_chosen_and_why(head, log):
    model = load()
    for _ in range(2):
        assert generate(model).method == "eagle3"
    for part in ("takes eagle3 'user/head'", "owner 'user'", " bytes", "on the Hub", "made for the target"):
        assert part in log()[0]


def test_what_fails_while_it_is_loaded_is_passed_over(head, hub, log):
    hub.add("user/broken", EAGLE, files=with_integers(EAGLE), card=card_of("user/target", "eagle3"), downloads=100)
    assert "user/head" in generate(load()).notes[0]
    assert "takes eagle3 'user/broken'" in log()[0]
    assert "passes over eagle3 'user/broken'" in log()[1]


def test_searched_once_until_it_is_forgotten(target, hub):
    model = load()
    assert load_speculator(model, "auto").method == FALLBACK
    hub.add("user/head", EAGLE, card=card_of(target, "eagle3"))
    assert load_speculator(model, "auto").method == FALLBACK
    forget_speculators(model)
    first = load_speculator(model, "auto", dtype="float32")
    assert (first.method, first.config.dtype) == ("eagle3", "float32")
    hub.requests.clear()
    second = load_speculator(model, "auto", num_speculative_tokens=2, dtype="float32")
    assert not hub.requests
    assert second.resources is first.resources
    assert second.config.num_speculative_tokens == 2
    assert second.config.revision == hub.repos["user/head"].branches["main"]


@full
def test_auto_with_a_model_and_after_a_push(hub, target):
    model = load()
    load_speculator(model, str(EAGLE), num_speculative_tokens=3).push_to_hub("user/head", token=TOKEN)
    found = load_speculator(model, "auto").config
    assert (found.model, found.num_speculative_tokens) == ("user/head", 3)
    named = load_speculator(model, "auto", model="user/head")
    assert (named.method, named.note) == ("eagle3", None)
    assert load_speculator(model, "auto", draft_model=tiny_llama(vocab_size=256)).method == "draft_model"
    with pytest.raises(SpecConfigError, match="`revision`=.* is about a named `model`"):
        load_speculator(model, "auto", revision="x")


def test_pipeline(hub):
    hub.add("user/target", demo.target_path())
    hub.add("user/drafter", DRAFT, card=card_of("user/target", "dflash"))

    def texts(**arguments):
        generator = pipeline("text-generation", model="user/target", device="cpu", **arguments)
        with record() as recorded:
            answer = generator([TEXT, "import os\n"], do_sample=False, max_new_tokens=24, batch_size=2)
        return answer, recorded.calls

    answer, calls = texts(speculative="auto")
    assert answer == texts()[0]
    assert {call.stats.method for call in calls} == {"dflash"}
    assert sum(call.stats.num_accepted_tokens for call in calls) > 0


@pytest.mark.parametrize("method", split(sorted(DRAFTERS), ["eagle3"]))
def test_every_method_finds_its_drafter(large, hub, method, tmp_path):
    repo = hub.add("user/drafter", DRAFTERS[method], card=card_of("user/target", "speculative-decoding"))
    # Others would be preferred.
    other = "dflash" if method != "dflash" else "eagle3"
    hub.add("other/drafter", DRAFTERS[other], card=card_of("user/target", other), downloads=100)
    inputs = demo.load_tokenizer()(TEXT, return_tensors="pt")
    stats = speculated(large, inputs, spec_method=method, num_speculative_tokens=2)
    assert (stats.method, stats.num_accepted_tokens > 0) == (method, True)
    assert len(stats.num_accepted_tokens_per_pos) <= 2
    revision = repo.branches["main"]
    assert stats.drafter == {"model": "user/drafter", "owner": "user", "revision": revision, "place": "hub"}
    hub.requests.clear()
    again = load_speculator(large, method)
    assert not hub.requests
    card = (again.save_pretrained(tmp_path) / "README.md").read_text()
    assert f"| weights of | `user/drafter` at revision `{revision}` |" in card


def test_cache_and_folders_serve_offline(large, draft, hub, monkeypatch, tmp_path):
    snapshot_download("user/target")
    # What a search has taken from the Hub is found again.
    assert generate(large, spec_method="dflash").drafter["place"] == "hub"
    forget_speculators(large)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert generate(large, spec_method="dflash").drafter["place"] == "cache"
    assert not hub.requests
    folder = shutil.copytree(demo.target_path(), tmp_path / "target")
    shutil.copytree(DRAFT, folder / "draft")
    (folder / "README.md").write_text('---\nspeculative: {"model": "draft"}\n---\n')
    origin = load_speculator(load(str(folder)), "dflash").origin
    assert (origin["place"], origin["owner"]) == ("entry", None)


@full
def test_target_as_its_own_draft_model(large, hub, tmp_path):
    for name in ("user/target", snapshot_download("user/target")):
        with pytest.raises(SpecConfigError, match="is the target itself and has no multi-token-prediction layers"):
            load_speculator(large, {"model": name})
    # Who names the method may mean it, and so may another commit or folder of the repository.
    assert load_speculator(large, {"model": "user/target", "method": "draft_model"}).method == "draft_model"
    hub.add("user/target", DRAFTERS["draft_model"], revision="small")
    assert load_speculator(large, {"model": "user/target", "revision": "small"}).method == "draft_model"
    # Where it has such layers, they draft.
    source = MTP / "deepseek_v3" / "target"
    folder = str(shutil.copytree(source, tmp_path / "target"))
    hub.add("user/layers", source)
    names = (folder, folder + "/../target/"), ("user/layers", "user/layers"), ("user/layers", None)
    for loaded, name in names:
        model, name = load(loaded), name or snapshot_download(loaded)
        stats = speculated(model, prompts(1), speculative={"model": name, "num_speculative_tokens": 1})
        assert stats.method == "mtp"
        own, named = (load_speculator(model, place).resources.state_dict() for place in ("mtp", name))
        assert all(torch.equal(tensor, own[key]) for key, tensor in named.items())


@full
def test_all_that_was_seen_is_listed_where_nothing_is_found(large, hub):
    hub.add("user/misfit", DFLASH, card=card_of("user/target", "dflash"))
    hub.add("user/head", DRAFTERS["eagle3"], card=card_of("user/target", "eagle3"))
    hub.add("user/broken", DRAFT, files=with_integers(DRAFT), card=card_of("user/target", "dflash"))
    with pytest.raises(SpecConfigError, match="spec_method='dflash' needs a draft, and none was found") as error:
        load_speculator(large, "dflash")
    message = str(error.value)
    for part in ("'user/misfit'", "hidden size", "for method='eagle3'", "stored as int64"):
        assert part in message
    # A search that has failed is repeated.
    hub.add("user/draft", DRAFT, card=card_of("user/target", "dflash"))
    assert found_for(large) == "user/draft"
    for method in ("suffix+eagle3", *sorted(DRAFTERS.keys() - {"mtp"})):
        with pytest.raises(SpecConfigError, match=r"needs .*none was found for a target without a name"):
            tiny_llama().generate(**prompts(1), max_new_tokens=4, spec_method=method)


@pytest.mark.parametrize("how", ["environment", *in_full("call", "both")])
def test_trusted_owners_on_the_hub(large, hub, monkeypatch, how):
    hub.add("stranger/popular", DRAFT, card=card_of("user/target", "dflash"), downloads=10**6)
    hub.add("Friend/draft", DRAFT, card=card_of("user/target", "dflash"))
    given = {} if how == "environment" else {"trusted_owners": ["friend", "other"]}
    if how != "call":
        monkeypatch.setenv("HF_SPECDEC_TRUSTED_OWNERS", "friend, user")
    for method in ("dflash", "auto"):
        assert found_for(large, method, **given) == "Friend/draft"
    # Of others nothing is read.
    assert not hub.asked("*stranger*")
    assert load_speculator(large, "dflash", model="stranger/popular", **given).resources
    monkeypatch.setenv("HF_SPECDEC_TRUSTED_OWNERS", "")
    with pytest.raises(SpecConfigError, match="Its owner 'friend' is not among HF_SPECDEC_TRUSTED_OWNERS"):
        load_speculator(large, "dflash", **given)


def test_trusted_owners_in_the_cache_and_named_by_the_target(hub, monkeypatch):
    hub.add("user/target", demo.target_path(), files=entry_of({"model": "stranger/named"}))
    snapshot_download("user/target")
    for name in ("stranger/named", "stranger/cached"):
        hub.add(name, DRAFT, card=card_of("user/target", "dflash"))
        snapshot_download(name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model = load()
    assert found_for(model, "auto", trusted_owners=["stranger"]) == "stranger/named"
    assert found_for(model, "auto", trusted_owners="user") is None


def test_folder_of_the_same_name_is_not_taken_for_the_repository(large, draft, tmp_path, monkeypatch):
    shutil.copytree(DRAFT, tmp_path / "user" / "draft")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecConfigError, match="A folder here has the same name"):
        load_speculator(large, "dflash")
