"""Discovery: what each place has to offer, in which order it is taken, and what a search does without it."""

import json
import shutil

import pytest
from huggingface_hub import constants, snapshot_download
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from hf_specdec import SpeculativeConfig, cli
from hf_specdec.hub import discover, discover_drafters
from hf_specdec.hub.candidate import PLACES, RELATIONS, Candidate, rank
from hf_specdec.hub.discover import Search
from hf_specdec.hub.target import Access, Target
from hf_specdec.method import preferred_methods
from hf_specdec.settings import AUTO
from tests.helpers.drafters import DFLASH, EAGLE, FIXTURES, MTP, card_of, entry_of
from tests.helpers.levels import full, in_full
from tests.helpers.models import letter_tokenizer, tiny_llama


EAGLE1 = FIXTURES / "eagle" / "eagle1_llama"
WITHOUT_WEIGHTS = ["suffix+recycling", "suffix", "ngram+recycling", "ngram", "recycling"]
PREFERRED = [method.name for method in preferred_methods() if not (method.needs_grammar or method.only_if_named)]


def search_for(name="user/target", limit=discover.DEFAULT_LIMIT, **access):
    access = Access(**access)
    return Search(Target.of_name(str(name), access), access, limit)


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


class TestRanking:
    def test_order(self):
        """Of what fits the closest first, then the first of the places, the methods' order, and downloads."""
        items = [
            *(Candidate("dflash", "a/b", place, "exact", is_trusted=True) for place in PLACES[:4]),
            *(Candidate("dflash", "a/b", "hub", relation) for relation in RELATIONS[:2]),
            *(Candidate(name, f"a/{n}", "hub", "sizes", downloads=n) for name in PREFERRED for n in (9, 3)),
            Candidate("mtp", None, "target", "exact", is_trusted=True, problems=("It does not fit.",)),
        ]
        assert sorted(items[::-1], key=rank) == items

    def test_later_places_are_not_searched_while_there_is_something_better(self, monkeypatch):
        searched = []

        def place(name, *candidates):
            return lambda search: (searched.append(name), iter(candidates))[1]

        exact = Candidate("mtp", None, "target", "exact", is_trusted=True)
        distant = Candidate("eagle3", "a/b", "cache", "sizes")
        places = {"target": place("target", exact), "cache": place("cache", distant), "hub": place("hub")}
        monkeypatch.setattr(discover, "_SEARCHES", places)
        usable = Search(Target("", {})).usable()
        assert (next(usable), searched) == (exact, ["target"])
        # Something closer might still be found.
        assert (next(usable), searched) == (distant, ["target", "cache", "hub"])


def test_settings_of_the_call_and_of_the_drafter():
    shape = {"num_speculative_tokens": 4, "draft_tree_depth": 4, "dtype": "float32"}
    candidate = Candidate("eagle3", "user/head", settings={"revision": "abc"})
    config = candidate.configured(SpeculativeConfig(AUTO, **shape, token="hf_secret"))
    assert config == SpeculativeConfig("eagle3", "user/head", revision="abc", **shape)
    assert config.token == "hf_secret"
    asked = SpeculativeConfig(AUTO, speculative_token_tree=[[0], [1]], dtype="float32", token="hf_secret")
    assert Candidate("ngram").configured(asked) == SpeculativeConfig("ngram")
    for method, asked, length in (
        # That of the drafter, where the call says nothing.
        ("eagle3", {}, 7),
        ("eagle3", {"num_speculative_tokens": 4}, 4),
        ("eagle3", {"speculative_token_tree": [[0], [1]]}, None),
        # Heads draft no more than one token each.
        ("medusa", {"num_speculative_tokens": 9}, 2),
        ("medusa", {"num_speculative_tokens": "auto"}, "auto"),
    ):
        candidate = Candidate(method, "user/head", settings={"num_speculative_tokens": 7}, num_draft_tokens=2)
        assert candidate.configured(SpeculativeConfig(AUTO, **asked)).num_speculative_tokens == length


def test_mtp_layers_of_every_family_of_targets():
    for folder in MTP.glob("*/target"):
        first = next(search_for(folder, local_files_only=True).usable())
        assert (first.method, first.model, first.place) == ("mtp", None, "target")


class TestEntry:
    """Drafters that the target's generation config or card names."""

    @pytest.fixture
    def name(self, hub):
        def name(entry, where="card"):
            card = {"speculative": entry} if where == "card" else {}
            files = entry_of(entry) if where == "generation_config" else {}
            hub.add("user/target", EAGLE / "target", files=files, card=f"---\n{json.dumps(card)}\n---\n")

        hub.add("user/head", EAGLE)
        return name

    @pytest.mark.parametrize("where", ["generation_config", "card"])
    def test_forms(self, name, where):
        for entry in ("user/head", {"method": "eagle3", "model": "user/head"}):
            name(entry, where)
            assert found_by(search_for()) == [("eagle3", "user/head", "entry")]
        shape = {"revision": "main", "num_speculative_tokens": 6, "draft_tree_depth": 5}
        name({"model": "user/head", **shape}, where)
        assert next(search_for().usable()).settings == shape
        name({"method": "ngram", "prompt_lookup_max": 3}, where)
        found = next(search_for().usable())
        assert (found.method, found.place, found.settings) == ("ngram", "entry", {"prompt_lookup_max": 3})

    @full
    def test_wrong_entries_are_listed_with_the_reason(self, name):
        for entry, reason in (
            ({"model": "user/head", "draft_tree_depth": "deep"}, "depth"),
            ({"model": "user/absent"}, "neither a local folder nor a repository"),
            ({"method": "dflash", "model": "user/head"}, "eagle3"),
            ({"method": "dflash"}, "no model"),
            ({"model": "/etc"}, "no id of a repository"),
            ({"model": "../../head"}, "no id of a repository"),
            ({"model": "user/head", "trust_remote_code": True}, "trust_remote_code"),
            (["user/head"], "mapping"),
        ):
            name(entry)
            (listed,) = (item for item in search_for().all() if item.place == "entry")
            assert reason in " ".join(listed.problems)
        for entry in ("auto", "off", False):
            name(entry)
            assert [item.method for item in search_for().all()] == WITHOUT_WEIGHTS

    def test_folder_inside_of_a_local_target(self, tmp_path):
        folder = shutil.copytree(EAGLE / "target", tmp_path / "target")
        shutil.copytree(EAGLE, folder / "head")
        (folder / "README.md").write_text('---\nspeculative: {"model": "head"}\n---\n')
        search = search_for(folder, local_files_only=True)
        assert found_by(search) == [("eagle3", str(folder / "head"), "entry")]


class TestCache:
    """Repositories in the local cache."""

    def test_heads_that_name_the_target_or_have_its_sizes(self, cached, hub):
        for card, relation, of in (
            (card_of("user/target"), "exact", "made for the target"),
            (None, "sizes", "of the target's sizes"),
        ):
            cached("user/head", card=card)
            first = next(search_for(local_files_only=True).usable())
            assert (first.method, first.model, first.place) == ("eagle3", "user/head", "cache")
            assert (first.relation, first.reason) == (relation, f"in the local cache, {of}")
            assert first.settings["revision"] == hub.repos["user/head"].branches["main"]
        assert not hub.requests

    def test_others_are_not_chosen(self, cached, hub):
        cached("user/large", EAGLE / "target")
        cached("user/dflash", DFLASH)
        cached("user/unknown", None, files={"config.json": '{"model_type": "bert"}'})
        # Of which only the config is there.
        hub.add("user/part", EAGLE)
        snapshot_download("user/part", allow_patterns="*.json")
        assert [item.method for item in search_for(local_files_only=True).all()] == WITHOUT_WEIGHTS
        cached("user/other", card=card_of("user/other"))
        assert models_found(local_files_only=True) == []

    def test_small_model_with_the_same_tokenizer(self, cached, hub, tmp_path):
        large, small = tmp_path / "large", tmp_path / "small"
        tiny_llama(num_hidden_layers=8).save_pretrained(large)
        tiny_llama().save_pretrained(small)
        cached("user/same_number_of_tokens", small)
        for folder in (large, small):
            letter_tokenizer().save_pretrained(folder)
        cached("user/target", large)
        cached("user/small", small)
        assert found_by(search_for(local_files_only=True)) == [("draft_model", "user/small", "cache")]


class TestHub:
    """Repositories of the Hub that are based on the target."""

    def test_owner_of_the_target_and_trusted_ones_come_first(self, add, monkeypatch):
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
        search = Search(search_for().target, trusted_owners=["friend", "evil"])
        assert next(search.usable()).origin["owner"] == "evil"

    def test_ranked_by_method_and_downloads(self, add, hub):
        """A tag or the config tells a drafter."""
        add("user/eagle", EAGLE1, "eagle", downloads=1000)
        few = add("user/few", EAGLE, "speculative-decoding", downloads=5)
        hub.add("user/many", FIXTURES / "eagle/eagle3_specforge", card=card_of("user/target"), downloads=50)
        hub.add("user/finetune", EAGLE / "target", card=card_of("user/target"), downloads=99)
        assert models_found() == ["user/many", "user/few", "user/eagle"]
        # The commit that was looked at is the one that is loaded.
        assert list(search_for().usable())[1].settings == {"revision": few.branches["main"]}
        assert hub.sent("*user/few/*model.safetensors") < (EAGLE / "model.safetensors").stat().st_size

    def test_drafter_of_the_model_that_the_target_is_based_on(self, add, hub):
        hub.add("user/target", EAGLE / "target", card=card_of("user/base"))
        add("user/distant", made_for="user/base", downloads=100)
        add("user/close", EAGLE1, "eagle")
        first, second, *_ = search_for().usable()
        assert [(item.model, item.relation) for item in (first, second)] == [
            ("user/close", "exact"),
            ("user/distant", "derived"),
        ]
        assert second.reason == "on the Hub, made for the model that the target is based on"

    def test_draft_model_must_be_small(self, add, hub, tmp_path):
        tiny_llama(vocab_size=256).save_pretrained(tmp_path)
        add("user/small", tmp_path, "draft-model")
        add("user/large", EAGLE / "target", "draft-model")
        card = card_of("user/target", "speculative-decoding", base_model_relation="quantized")
        hub.add("user/quantised", EAGLE / "target", card=card)
        assert found_by(search_for()) == [("draft_model", "user/small", "hub")]
        assert "of the target's work" in why_not("user/large")
        assert "user/quantised" not in [item.model for item in search_for().all()]

    def test_drafter_of_at_most_a_quarter_of_the_target(self, add, monkeypatch):
        monkeypatch.setattr("hf_specdec.hub.target._LEAST_BOUND", 0)
        size = (EAGLE / "target" / "model.safetensors").stat().st_size // 4
        weights = (EAGLE / "model.safetensors").read_bytes()
        add("user/large", files={"model.safetensors": weights + bytes(size - len(weights) + 8192)})
        add("user/small")
        assert models_found() == ["user/small"]
        assert "what nobody has named may have" in why_not("user/large")

    def test_misfits_and_gated_ones_are_listed_with_the_reason(self, add):
        config = json.loads((EAGLE / "config.json").read_text())
        add("user/wide", files={"config.json": json.dumps({**config, "target_hidden_size": 128})})
        add("user/gated", gated=True)
        assert models_found() == []
        assert "hidden size 128, and the target has 64" in why_not("user/wide")
        assert "gated" in why_not("user/gated")

    @full
    def test_requests_are_limited(self, add, hub):
        for index in range(6):
            add(f"user/head{index}", downloads=index)
        assert models_found(limit=2) == ["user/head5", "user/head4"]
        assert not hub.asked("*head3*")
        assert hub.asked("/api/models") <= 7


@full
class TestFaults:
    """A search finds less, and does not fail."""

    anything = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=8,
    )

    @settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(value=anything, key=st.sampled_from(["hidden_size", "vocab_size", "num_hidden_layers", "architectures"]))
    def test_any_config_of_a_candidate(self, tmp_path, value, key):
        config = json.loads((EAGLE / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
        (tmp_path / "model.safetensors").write_bytes((EAGLE / "model.safetensors").read_bytes())
        search = search_for(EAGLE / "target", local_files_only=True)
        candidate = search.examined(str(tmp_path), "entry", relation="exact")
        assert candidate.method == "eagle3" or candidate.problems
        assert search.examined(str(tmp_path), "cache") is None or not candidate.problems

    def test_offline(self, add, target, hub, monkeypatch):
        add("user/head")
        snapshot_download(target)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        search = search_for()
        assert [item.method for item in search.all()] == WITHOUT_WEIGHTS
        assert any("offline" in note for note in search.notes)

    @pytest.mark.parametrize(
        "fault", [{"status": 500}, *in_full({"status": 401}, {"replace": lambda body: b"<html>"})]
    )
    def test_search_that_is_answered_with_nonsense(self, add, hub, no_backoff, fault):
        add("user/head")
        hub.fault("/api/models", **fault)
        search = search_for()
        assert found_by(search) == []
        assert any("on the Hub" in note for note in search.notes)

    def test_candidate_that_cannot_be_read(self, add, hub, no_backoff):
        add("user/head")
        add("user/other", EAGLE1, "eagle")
        hub.fault("/user/head/*", status=500)
        assert models_found() == ["user/other"]
        assert why_not("user/head")

    @pytest.mark.parametrize("path", ["/api/models", *in_full("/api/models/user/target")])
    def test_answers_that_do_not_come(self, add, target, hub, monkeypatch, path):
        add("user/head")
        snapshot_download(target)
        search = search_for()
        monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
        hub.fault(path, hangs=True)
        assert found_by(search) == []
        assert any("on the Hub" in note for note in search.notes)

    def test_slow_answers(self, add, monkeypatch):
        for index in range(3):
            add(f"user/head{index}", downloads=-index)
        search = search_for()
        monkeypatch.setattr(discover, "SECONDS_PER_PLACE", 0)
        assert [model for _, model, _ in found_by(search)] == ["user/head0"]
        assert any("slow" in note for note in search.notes)

    def test_missing_package(self, target, monkeypatch):
        monkeypatch.setattr(discover, "find_spec", lambda name: None)
        assert [item.method for item in search_for().usable()] == ["ngram+recycling", "ngram", "recycling"]


def test_command(add, target):
    def run(*arguments):
        result = CliRunner().invoke(cli.app, ["discover", *arguments], prog_name="hf-specdec")
        assert result.exit_code == 0, result.stderr
        return result.stdout

    add("user/head", downloads=3)
    add("user/misfit", DFLASH, "dflash")
    found = json.loads(run(target, "--json"))
    assert found["target"] == target
    assert [item["method"] for item in found["candidates"]] == ["eagle3", *WITHOUT_WEIGHTS, "dflash"]
    head = found["candidates"][0]
    assert (head["model"], head["place"], head["relation"]) == ("user/head", "hub", "exact")
    assert (head["downloads"], head["problems"]) == (3, [])
    assert head["num_bytes"] > 1000
    assert [item.to_dict() for item in discover_drafters(target)] == found["candidates"]
    table = run(target)
    assert table.index("user/head") < table.index("ngram") < table.index("Not usable: dflash 'user/misfit'")
    assert json.loads(run("demo", "--offline", "--json"))["notes"]
