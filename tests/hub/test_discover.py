"""Discovery: what each place has to offer, in which order it is taken, and what a search does without it."""

import json

import pytest
from huggingface_hub import constants, snapshot_download
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from hf_specdec import SpeculativeConfig, cli
from hf_specdec.hub import discover, discover_drafters
from hf_specdec.hub.candidate import PLACES, Candidate, rank
from hf_specdec.hub.discover import Search
from hf_specdec.method import preferred_methods
from hf_specdec.settings import AUTO
from tests.helpers.drafters import ANYTHING, DFLASH, EAGLE, FIXTURES, card_of, entry_of
from tests.helpers.levels import full
from tests.helpers.models import tiny_llama


EAGLE1 = FIXTURES / "eagle" / "eagle1_llama"
WITHOUT_WEIGHTS = ["suffix+recycling", "suffix", "ngram+recycling", "ngram", "recycling"]
PREFERRED = [method.name for method in preferred_methods() if not (method.needs_grammar or method.only_if_named)]


def search_for(name="user/target", limit=discover.DEFAULT_LIMIT, **access):
    return discover.search_for(name, limit=limit, **access)


def found_by(search):
    """Method, model and place of what can be used, but for what needs no weights."""
    return [(item.method, item.model, item.place) for item in search.usable() if item.place != "none"]


def models_found(**arguments):
    return [model for _, model, _ in found_by(search_for(**arguments))]


def why_not(model, **arguments):
    """The reasons not to choose a repository."""
    return " ".join(next(item for item in search_for(**arguments).all() if item.model == model).problems)


@pytest.fixture
def add(hub, target):
    """Adds a drafter for the target, by default an EAGLE-3 head."""

    def add(name, folder=EAGLE, *tags, made_for=target, **options):
        return hub.add(name, folder, card=card_of(made_for, *(tags or ["eagle3"])), **options)

    return add


@pytest.fixture
def cached(hub, target):
    """Downloads repositories; nothing is asked of the Hub afterwards."""
    snapshot_download(target)

    def cached(name, folder=EAGLE, **options):
        hub.add(name, folder, **options)
        snapshot_download(name)
        hub.requests.clear()

    return cached


def test_ranking():
    """Of what fits trusted owners' first, then the first of the places, the methods' order, and downloads."""
    items = [
        *(Candidate("dflash", "a/b", place, is_trusted=True) for place in PLACES[:4]),
        *(Candidate(name, f"a/{n}", "hub", downloads=n) for name in PREFERRED for n in (9, 3)),
        Candidate("ngram"),
        Candidate("mtp", None, "target", is_trusted=True, problems=("It does not fit.",)),
    ]
    assert sorted(items[::-1], key=rank) == items


def test_settings_of_the_call_and_of_the_drafter():
    shape = {"num_speculative_tokens": 4, "draft_tree_depth": 4, "dtype": "float32"}
    candidate = Candidate("eagle3", "user/head", settings={"revision": "abc"})
    config = candidate.configured(SpeculativeConfig(AUTO, **shape, token="hf_secret"))
    assert config == SpeculativeConfig("eagle3", "user/head", revision="abc", **shape)
    assert config.token == "hf_secret"
    assert Candidate("ngram").configured(SpeculativeConfig(AUTO, dtype="float32")) == SpeculativeConfig("ngram")
    for method, asked, length in (
        # That of the drafter, where the call says nothing.
        ("eagle3", {}, 7),
        ("eagle3", {"num_speculative_tokens": 4}, 4),
        ("eagle3", {"speculative_token_tree": [[0], [1]]}, None),
        ("suffix+eagle3", {"suffix_decoding_max_tree_depth": 9, "num_draft_nodes": 4}, None),
        # Heads draft no more than one token each.
        ("medusa", {"num_speculative_tokens": 9}, 2),
        ("medusa", {"num_speculative_tokens": "auto"}, "auto"),
    ):
        candidate = Candidate(method, "user/head", settings={"num_speculative_tokens": 7}, num_draft_tokens=2)
        assert candidate.configured(SpeculativeConfig(AUTO, **asked)).num_speculative_tokens == length


def test_drafters_that_the_target_names(hub):
    hub.add("user/head", EAGLE)
    shape = {"revision": "main", "num_speculative_tokens": 6, "draft_tree_depth": 5}
    for entry, *expected in (
        ("user/head", "eagle3", "user/head", {}),
        ({"method": "eagle3", "model": "user/head", **shape}, "eagle3", "user/head", shape),
        ({"method": "ngram", "prompt_lookup_max": 3}, "ngram", None, {"prompt_lookup_max": 3}),
        ({"method": "ngram+eagle3", "model": "user/head"}, "ngram+eagle3", "user/head", {}),
        # Another method, code, and folders of the machine.
        ({"method": "dflash", "model": "user/head"}, None),
        ({"model": "user/head", "trust_remote_code": True}, None),
        ({"model": "/etc"}, None),
    ):
        for place in ({"files": entry_of(entry)}, {"card": f"---\n{json.dumps({'speculative': entry})}\n---\n"}):
            hub.add("user/target", EAGLE / "target", **place)
            (found,) = (item for item in search_for().all() if item.place == "entry")
            assert bool(found.problems) == (expected == [None])
            assert found.problems or [found.method, found.model, found.settings] == expected


def test_heads_in_the_cache(cached, hub):
    """Offline, those whose card names the target as their base; online the Hub alone is asked."""
    cached("user/head", card=card_of("User/Target", "eagle3"))
    first = next(search_for(local_files_only=True).usable())
    assert (first.method, first.model, first.place) == ("eagle3", "user/head", "cache")
    assert first.reason == "in the local cache, made for the target"
    assert first.settings["revision"] == hub.repos["user/head"].branches["main"]
    assert not hub.requests
    assert models_found() == []
    # Not chosen: others' and those that do not say whose, no drafters, misfits, and configs without weights.
    cached("user/head", card=card_of("user/other", "eagle3"))
    cached("user/silent")
    cached("user/finetune", EAGLE / "target", card=card_of("user/target"))
    cached("user/dflash", DFLASH, card=card_of("user/target", "dflash"))
    cached("user/unknown", None, files={"config.json": "{"}, card=card_of("user/target"))
    hub.add("user/part", EAGLE, card=card_of("user/target", "eagle3"))
    snapshot_download("user/part", allow_patterns=["*.json", "*.md"])
    assert models_found(local_files_only=True) == []
    seen = search_for(local_files_only=True).all()
    assert [item.model for item in seen if item.place != "none"] == ["user/dflash"]


def test_owner_of_the_target_and_trusted_ones_come_first(add, monkeypatch):
    add("evil/head", downloads=10**6)
    add("friend/head", EAGLE1, downloads=3)
    add("user/head", EAGLE1)
    add("evil/other", downloads=10**5)
    snapshot_download("evil/head")
    assert models_found() == ["user/head", "evil/head", "evil/other", "friend/head"]
    # However few are looked into.
    assert [model for _, model, place in found_by(search_for(limit=1)) if place == "hub"] == ["user/head"]
    monkeypatch.setattr(discover, "_MOST_LISTED", 1)
    assert models_found()[0] == "user/head"
    monkeypatch.setenv("HF_SPECDEC_TRUSTED_OWNERS", "friend,user")
    assert set(models_found()) == {"user/head", "friend/head"}
    monkeypatch.delenv("HF_SPECDEC_TRUSTED_OWNERS")
    search = Search(search_for().target, SpeculativeConfig("auto", trusted_owners=["friend", "evil"]))
    assert next(search.usable()).origin["owner"] == "evil"


def test_repositories_of_the_hub_are_ranked(add, hub):
    """A tag or the config tells a drafter."""
    # What was made for the target's own base, or says nothing, is not looked at.
    hub.add("user/target", EAGLE / "target", card=card_of("user/base"))
    add("user/distant", made_for="user/base", downloads=10**4)
    hub.add("user/silent", EAGLE)
    snapshot_download("user/silent")
    add("user/eagle", EAGLE1, "eagle", downloads=1000)
    few = add("user/few", EAGLE, "speculative-decoding", downloads=5)
    hub.add("user/many", FIXTURES / "eagle/eagle3_specforge", card=card_of("user/target"), downloads=50)
    hub.add("user/finetune", EAGLE / "target", card=card_of("user/target"), downloads=99)
    assert models_found() == ["user/many", "user/few", "user/eagle"]
    found = list(search_for().usable())
    # The commit that was looked at is the one that is loaded.
    assert found[1].settings == {"revision": few.branches["main"]}
    assert hub.sent("*user/few/*model.safetensors") < (EAGLE / "model.safetensors").stat().st_size


@full
def test_drafters_must_be_small(add, hub, tmp_path, monkeypatch):
    tiny_llama(vocab_size=256).save_pretrained(tmp_path)
    add("user/small", tmp_path, "draft-model")
    add("user/large", EAGLE / "target", "draft-model")
    card = card_of("user/target", "speculative-decoding", base_model_relation="quantized")
    hub.add("user/quantised", EAGLE / "target", card=card)
    assert found_by(search_for()) == [("draft_model", "user/small", "hub")]
    assert "of the target's work" in why_not("user/large")
    assert "user/quantised" not in [item.model for item in search_for().all()]
    # Of at most a quarter of the target's size.
    monkeypatch.setattr("hf_specdec.hub.discover._LEAST_BOUND", 0)
    size = (EAGLE / "target" / "model.safetensors").stat().st_size // 4
    weights = (EAGLE / "model.safetensors").read_bytes()
    add("user/huge", files={"model.safetensors": weights + bytes(size - len(weights) + 8192)})
    add("user/head")
    assert models_found()[0] == "user/head"
    assert "what nobody has named may have" in why_not("user/huge")


def test_misfits_and_gated_ones_are_listed_with_the_reason(add):
    config = json.loads((EAGLE / "config.json").read_text())
    add("user/wide", files={"config.json": json.dumps({**config, "target_hidden_size": 128})})
    add("user/gated", gated=True)
    assert models_found() == []
    assert "hidden size 128, and the target has 64" in why_not("user/wide")
    assert "gated" in why_not("user/gated")


@full
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=ANYTHING, key=st.sampled_from(["hidden_size", "vocab_size", "num_hidden_layers", "architectures"]))
def test_any_config_of_a_candidate(tmp_path, value, key):
    config = json.loads((EAGLE / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
    (tmp_path / "model.safetensors").write_bytes((EAGLE / "model.safetensors").read_bytes())
    search = search_for(EAGLE / "target", local_files_only=True)
    candidate = search.examined(str(tmp_path), "entry")
    assert candidate.method == "eagle3" or candidate.problems
    assert "same name" in search.examined(str(tmp_path), "cache").problems[0]


@full
@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("/api/models", {"status": 500}),
        ("/api/models", {"replace": lambda body: b"<html>"}),
        ("/api/models", {"hangs": True}),
        ("/api/models/user/target", {"hangs": True}),
        ("/user/head/*", {"status": 500}),
    ],
)
def test_faults_of_the_hub_find_less_and_do_not_fail(add, target, hub, no_backoff, monkeypatch, path, fault):
    add("user/head")
    snapshot_download(target)
    search = search_for()
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    hub.fault(path, **fault)
    assert found_by(search) == []
    assert why_not("user/head") if "head" in path else any("on the Hub" in note for note in search.notes)


@full
def test_search_without_network_or_packages(add, target, monkeypatch):
    add("user/head")
    snapshot_download(target)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert [item.method for item in search_for().all()] == WITHOUT_WEIGHTS
    monkeypatch.setattr(discover, "find_spec", lambda name: None)
    assert [item.method for item in search_for().usable()] == ["ngram+recycling", "ngram", "recycling"]


@full
def test_command(add, target):
    def run(*arguments):
        result = CliRunner().invoke(cli.app, ["inspect", "--target", *arguments], prog_name="hf-specdec")
        assert result.exit_code == 0, result.stderr
        return result.stdout

    add("user/head", downloads=3)
    add("user/misfit", DFLASH, "dflash")
    found = json.loads(run(target, "--json"))
    assert [item["method"] for item in found["candidates"]] == ["eagle3", *WITHOUT_WEIGHTS, "dflash"]
    assert [item.to_dict() for item in discover_drafters(target)] == found["candidates"]
    assert "Not usable: dflash 'user/misfit'" in run(target)
