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
from tests.helpers.drafters import DFLASH, EAGLE, FIXTURES, MEDUSA, MTP, card_of
from tests.helpers.models import letter_tokenizer, tiny_llama


WITHOUT_WEIGHTS = ["suffix+recycling", "suffix", "ngram+recycling", "ngram", "recycling"]


def search_for(name="user/target", limit=discover.DEFAULT_LIMIT, **access):
    access = Access(**access)
    return Search(Target.of_name(str(name), access), access, limit)


def found_by(search):
    """Method, model and place of what can be used, but for what needs no weights."""
    return [(item.method, item.model, item.place) for item in search.usable() if item.place != "none"]


def draft_model(folder, **sizes):
    """A whole model with the vocabulary of the EAGLE fixtures' target."""
    tiny_llama(vocab_size=256, **sizes).save_pretrained(folder)
    return folder


@pytest.fixture
def target(hub):
    """The target of the EAGLE-3 fixture, which names nothing and has no MTP layers."""
    hub.add("user/target", EAGLE / "target")
    return "user/target"


PREFERRED = [method.name for method in preferred_methods() if not (method.needs_grammar or method.only_if_named)]


class TestRanking:
    candidates = st.builds(
        Candidate,
        st.sampled_from([*PREFERRED, "of_a_plugin"]),
        st.sampled_from(["user/a", "user/b", "user/c", None]),
        st.sampled_from(PLACES),
        st.sampled_from(RELATIONS),
        downloads=st.integers(0, 3),
        is_trusted=st.booleans(),
        problems=st.sampled_from([(), ("It does not fit.",)]),
    )

    @given(st.lists(candidates, max_size=12), st.randoms())
    def test_order_is_total_and_does_not_depend_on_the_order_of_the_search(self, found, shuffled):
        ranked = sorted(found, key=rank)
        shuffled.shuffle(found)
        assert list(map(rank, sorted(found, key=rank))) == list(map(rank, ranked))

    @given(candidates, candidates)
    def test_what_does_not_fit_is_last_and_what_is_closest_first(self, one, other):
        first, second = sorted((one, other), key=rank)
        assert bool(first.problems) <= bool(second.problems)
        if bool(first.problems) == bool(second.problems) and first.is_trusted == second.is_trusted:
            assert RELATIONS.index(first.relation) <= RELATIONS.index(second.relation)
            if first.relation == second.relation:
                assert PLACES.index(first.place) <= PLACES.index(second.place)

    @pytest.mark.parametrize(("better", "worse"), list(zip(PREFERRED, PREFERRED[1:])))
    def test_methods_are_preferred_in_the_order_of_the_table(self, better, worse):
        popular = Candidate(worse, "user/popular", "hub", "exact", downloads=10**6)
        assert rank(Candidate(better, "user/new", "hub", "exact")) < rank(popular)

    def test_of_one_method_the_most_downloaded_is_first(self):
        items = [Candidate("eagle3", f"user/{count}", "hub", "exact", downloads=count) for count in (3, 20, 100)]
        assert [item.downloads for item in sorted(items, key=rank)] == [100, 20, 3]

    @settings(max_examples=50)
    @given(st.lists(candidates, max_size=12))
    def test_usable_ones_come_in_the_order_of_the_whole_list(self, found):
        # Every place has some relations; what needs no weights is of none in particular.
        found = [item for item in found if (item.relation == "any") == (item.place == "none")]
        distinct = list({(item.method, item.model): item for item in sorted(found, key=rank)}.values())
        places = {
            place: lambda search, place=place: iter([i for i in distinct if i.place == place]) for place in PLACES
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(discover, "_SEARCHES", places)
            usable = list(Search(Target("", {})).usable())
            everything = Search(Target("", {})).all()
        assert list(map(rank, usable)) == [rank(item) for item in everything if not item.problems]
        assert len(everything) == len(distinct)

    def test_later_places_are_not_searched_while_there_is_something_better(self, monkeypatch):
        searched = []

        def place(name, *candidates):
            return lambda search: (searched.append(name), iter(candidates))[1]

        exact = Candidate("mtp", None, "target", "exact", is_trusted=True)
        distant = Candidate("eagle3", "a/b", "cache", "sizes")
        places = {"target": place("target", exact), "cache": place("cache", distant), "hub": place("hub")}
        monkeypatch.setattr(discover, "_SEARCHES", places)
        usable = Search(Target("", {})).usable()
        assert next(usable) is exact
        assert searched == ["target"]
        # Something closer might still be found.
        assert next(usable) is distant
        assert searched == ["target", "cache", "hub"]


class TestSettings:
    @pytest.fixture
    def asked(self):
        return SpeculativeConfig(
            AUTO, num_speculative_tokens=4, draft_tree_depth=4, dtype="float32", token="hf_secret"
        )

    def test_those_of_the_call_go_to_a_method_that_has_them(self, asked):
        config = Candidate("eagle3", "user/head", settings={"revision": "abc"}).configured(asked)
        assert config == SpeculativeConfig(
            "eagle3", "user/head", revision="abc", num_speculative_tokens=4, draft_tree_depth=4, dtype="float32"
        )
        assert config.token == "hf_secret"

    def test_those_that_a_method_lacks_are_left_out(self):
        asked = SpeculativeConfig(AUTO, speculative_token_tree=[[0], [1]], dtype="float32", token="hf_secret")
        assert Candidate("ngram").configured(asked) == SpeculativeConfig("ngram")

    def test_those_of_the_drafter_hold_where_the_call_says_nothing(self, asked):
        candidate = Candidate("eagle3", "user/head", settings={"num_speculative_tokens": 7})
        assert candidate.configured(SpeculativeConfig(AUTO)).num_speculative_tokens == 7
        assert candidate.configured(asked).num_speculative_tokens == 4
        with_tree = candidate.configured(SpeculativeConfig(AUTO, speculative_token_tree=[[0], [1]]))
        assert with_tree.num_speculative_tokens is None

    def test_heads_draft_no_more_than_one_token_each(self):
        candidate = Candidate("medusa", "user/head", num_draft_tokens=2)
        assert candidate.configured(SpeculativeConfig(AUTO, num_speculative_tokens=9)).num_speculative_tokens == 2
        adaptive = SpeculativeConfig(AUTO, num_speculative_tokens="auto")
        assert candidate.configured(adaptive).num_speculative_tokens == "auto"


class TestTarget:
    """MTP layers of the target's own checkpoint."""

    @pytest.mark.parametrize("name", sorted(path.name for path in MTP.iterdir() if path.is_dir()))
    def test_layers_of_every_family_are_found(self, name):
        first = next(search_for(MTP / name / "target", local_files_only=True).usable())
        assert (first.method, first.model, first.place) == ("mtp", None, "target")

    def test_only_the_header_is_read(self, hub):
        hub.add("user/target", MTP / "deepseek_v3" / "target")
        assert found_by(search_for()) == [("mtp", None, "target")]
        size = (MTP / "deepseek_v3" / "target" / "model.safetensors").stat().st_size
        assert hub.sent("*model.safetensors") < size / 2

    def test_unsupported_family_is_listed_with_the_reason(self, tmp_path):
        shutil.copytree(MTP / "deepseek_v3" / "target", tmp_path / "target")
        file = tmp_path / "target" / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": "pangu_ultra_moe"}))
        search = search_for(tmp_path / "target", local_files_only=True)
        listed = search.all()
        assert [item.method for item in listed if not item.problems] == WITHOUT_WEIGHTS
        assert "pangu_ultra_moe" in listed[-1].problems[0]

    def test_target_without_such_layers(self, target):
        assert found_by(search_for()) == []


class TestEntry:
    """Drafters that the target's generation config or card names."""

    @pytest.fixture
    def add_target(self, hub):
        def add(generation_config=None, **card):
            settings = {} if generation_config is None else {"generation_config.json": json.dumps(generation_config)}
            hub.add("user/target", EAGLE / "target", files=settings, card=f"---\n{json.dumps(card)}\n---\n")

        hub.add("user/head", EAGLE)
        return add

    @pytest.mark.parametrize(
        "entry", ["user/head", {"model": "user/head"}, {"method": "eagle3", "model": "user/head"}]
    )
    def test_generation_config_and_card(self, add_target, entry):
        for where in ({"generation_config": {"speculative": entry}}, {"speculative": entry}):
            add_target(**where)
            assert found_by(search_for()) == [("eagle3", "user/head", "entry")]

    def test_settings_of_the_entry_come_with_it(self, add_target):
        shape = {"num_speculative_tokens": 6, "draft_tree_depth": 5}
        add_target(speculative={"model": "user/head", "revision": "main", **shape})
        candidate = next(search_for().usable())
        assert candidate.settings == {"revision": "main", **shape}

    def test_method_that_needs_no_weights(self, add_target):
        add_target(speculative={"method": "ngram", "prompt_lookup_max": 3})
        candidate = next(search_for().usable())
        assert (candidate.method, candidate.place, candidate.settings) == ("ngram", "entry", {"prompt_lookup_max": 3})

    @pytest.mark.parametrize(
        ("entry", "reason"),
        [
            ({"model": "user/head", "draft_tree_depth": "deep"}, "depth"),
            ({"model": "user/absent"}, "neither a local folder nor a repository"),
            ({"method": "dflash", "model": "user/head"}, "eagle3"),
            ({"method": "dflash"}, "no model"),
            ({"model": "/etc"}, "no id of a repository"),
            ({"model": "../../head"}, "no id of a repository"),
            ({"model": "user/head", "trust_remote_code": True}, "trust_remote_code"),
            (["user/head"], "mapping"),
        ],
    )
    def test_wrong_entries_are_listed_with_the_reason(self, add_target, entry, reason):
        add_target(speculative=entry)
        listed = [item for item in search_for().all() if item.place == "entry"]
        assert len(listed) == 1
        assert reason in " ".join(listed[0].problems)

    @pytest.mark.parametrize("entry", ["auto", "off", "none", False])
    def test_entry_that_names_nothing_is_no_candidate(self, add_target, entry):
        add_target(speculative=entry)
        assert [item.method for item in search_for().all()] == WITHOUT_WEIGHTS

    def test_folder_inside_of_a_local_target(self, tmp_path):
        folder = shutil.copytree(EAGLE / "target", tmp_path / "target")
        shutil.copytree(EAGLE, folder / "head")
        (folder / "README.md").write_text('---\nspeculative: {"model": "head"}\n---\n')
        search = search_for(folder, local_files_only=True)
        assert found_by(search) == [("eagle3", str(folder / "head"), "entry")]


class TestCache:
    """Repositories in the local cache."""

    @pytest.fixture
    def add(self, hub):
        """Adds repositories and downloads them; nothing is asked of the Hub afterwards."""

        def add(name, folder, **options):
            hub.add(name, folder, **options)
            snapshot_download(name)

        return add

    def offline(self):
        return search_for(local_files_only=True)

    def test_heads_that_name_the_target(self, add, hub):
        add("user/target", EAGLE / "target")
        add("user/head", EAGLE, card=card_of("user/target"))
        num_requests = len(hub.requests)
        candidate = next(self.offline().usable())
        assert (candidate.method, candidate.model, candidate.place) == ("eagle3", "user/head", "cache")
        assert candidate.relation == "exact"
        assert candidate.settings["revision"] == hub.repos["user/head"].branches["main"]
        assert len(hub.requests) == num_requests

    def test_heads_of_the_right_sizes(self, add):
        add("user/target", EAGLE / "target")
        add("user/head", EAGLE)
        candidate = next(self.offline().usable())
        assert (candidate.model, candidate.relation) == ("user/head", "sizes")
        assert candidate.reason == "in the local cache, of the target's sizes"

    def test_heads_that_name_another_target_are_never_chosen(self, add):
        add("user/target", EAGLE / "target")
        add("user/head", EAGLE, card=card_of("user/other"))
        assert found_by(self.offline()) == []

    def test_other_models_are_not_mentioned(self, add, tmp_path):
        add("user/target", EAGLE / "target")
        add("user/large", EAGLE / "target")
        add("user/dflash", DFLASH)
        add("user/unknown", files={"config.json": '{"model_type": "bert"}'}, folder=None)
        assert [item.method for item in self.offline().all()] == WITHOUT_WEIGHTS

    def test_small_model_with_the_same_tokenizer(self, add, tmp_path):
        large, small = tmp_path / "large", tmp_path / "small"
        tiny_llama(num_hidden_layers=8).save_pretrained(large)
        tiny_llama().save_pretrained(small)
        add("user/same_number_of_tokens", small)
        for folder in (large, small):
            letter_tokenizer().save_pretrained(folder)
        add("user/target", large)
        add("user/small", small)
        assert found_by(self.offline()) == [("draft_model", "user/small", "cache")]

    def test_repository_of_which_only_the_config_is_there(self, add, hub):
        add("user/target", EAGLE / "target")
        hub.add("user/head", EAGLE)
        snapshot_download("user/head", allow_patterns="*.json")
        assert found_by(self.offline()) == []

    def test_closer_one_on_the_hub_comes_first(self, add, hub):
        add("user/target", EAGLE / "target")
        add("user/unnamed", EAGLE)
        hub.add("user/head", EAGLE, card=card_of("user/target", "eagle3"))
        assert [model for _, model, _ in found_by(search_for())] == ["user/head", "user/unnamed"]

    def test_another_cache(self, hub, tmp_path):
        for name, folder in (("user/target", EAGLE / "target"), ("user/head", EAGLE)):
            hub.add(name, folder)
            snapshot_download(name, cache_dir=tmp_path)
        search = search_for(local_files_only=True, cache_dir=str(tmp_path))
        assert found_by(search) == [("eagle3", "user/head", "cache")]


class TestHub:
    """Repositories of the Hub that are based on the target."""

    def test_the_owner_of_the_target_and_trusted_ones_come_first(self, target, hub, monkeypatch):
        eagle1 = FIXTURES / "eagle" / "eagle1_llama"
        for name, folder, downloads in (
            ("evil/head", EAGLE, 10**6),
            ("friend/head", eagle1, 3),
            ("user/head", eagle1, 0),
            ("evil/other", EAGLE, 10**5),
        ):
            hub.add(name, folder, card=card_of(target, "eagle3"), downloads=downloads)
        snapshot_download("evil/head")
        assert [model for _, model, _ in found_by(search_for())] == [
            "user/head",
            "evil/head",
            "evil/other",
            "friend/head",
        ]
        # However few are looked into.
        assert [model for _, model, place in found_by(search_for(limit=1)) if place == "hub"] == ["user/head"]
        monkeypatch.setattr(discover, "_MOST_LISTED", 1)
        assert [model for _, model, _ in found_by(search_for())][0] == "user/head"
        monkeypatch.setenv("HF_SPECDEC_TRUSTED_OWNERS", "friend,user")
        assert {model for _, model, _ in found_by(search_for())} == {"user/head", "friend/head"}
        monkeypatch.delenv("HF_SPECDEC_TRUSTED_OWNERS")
        search = Search(search_for().target, trusted_owners=["friend", "evil"])
        assert next(search.usable()).origin["owner"] == "evil"

    def test_a_quarter_of_the_target_is_the_most(self, target, hub, monkeypatch):
        monkeypatch.setattr("hf_specdec.hub.target._LEAST_BOUND", 0)
        size = (EAGLE / "target" / "model.safetensors").stat().st_size // 4
        weights = (EAGLE / "model.safetensors").read_bytes()
        padded = {"model.safetensors": weights + bytes(size - len(weights) + 8192)}
        hub.add("user/large", EAGLE, files=padded, card=card_of(target, "eagle3"))
        hub.add("user/small", EAGLE, card=card_of(target, "eagle3"))
        assert [model for _, model, _ in found_by(search_for())] == ["user/small"]
        (reason,) = next(item.problems for item in search_for().all() if item.model == "user/large")
        assert "what nobody has named may have" in reason

    def test_tag_or_config_tells_a_drafter(self, target, hub):
        hub.add("user/tagged", EAGLE, card=card_of(target, "speculative-decoding"), downloads=1)
        hub.add("user/untagged", FIXTURES / "eagle" / "eagle3_specforge", card=card_of(target), downloads=9)
        hub.add("user/finetune", EAGLE / "target", card=card_of(target), downloads=99)
        assert [model for _, model, _ in found_by(search_for())] == ["user/untagged", "user/tagged"]

    def test_ranked_by_method_and_downloads(self, target, hub):
        hub.add("user/eagle", FIXTURES / "eagle" / "eagle1_llama", card=card_of(target, "eagle"), downloads=1000)
        hub.add("user/few", EAGLE, card=card_of(target, "eagle3"), downloads=5)
        hub.add("user/many", EAGLE, card=card_of(target, "eagle3"), downloads=50)
        assert [model for _, model, _ in found_by(search_for())] == ["user/many", "user/few", "user/eagle"]

    def test_commit_that_was_looked_at_is_the_one_that_is_loaded(self, target, hub):
        repo = hub.add("user/head", EAGLE, card=card_of(target, "eagle3"))
        assert next(search_for().usable()).settings == {"revision": repo.branches["main"]}

    def test_drafter_of_the_model_that_the_target_is_based_on(self, hub):
        hub.add("user/target", EAGLE / "target", card=card_of("user/base"))
        hub.add("user/distant", EAGLE, card=card_of("user/base", "eagle3"), downloads=100)
        hub.add("user/close", FIXTURES / "eagle" / "eagle1_llama", card=card_of("user/target", "eagle"))
        candidates = list(search_for().usable())
        assert [item.model for item in candidates[:2]] == ["user/close", "user/distant"]
        assert [item.relation for item in candidates[:2]] == ["exact", "derived"]
        assert candidates[1].reason == "on the Hub, made for the model that the target is based on"

    def test_quantised_copies_are_no_draft_models(self, target, hub):
        card = card_of(target, "speculative-decoding", base_model_relation="quantized")
        hub.add("user/quantised", EAGLE / "target", card=card)
        assert [item.model for item in search_for().all()] == [None] * len(WITHOUT_WEIGHTS)

    def test_draft_model_must_be_small(self, target, hub, tmp_path):
        hub.add("user/small", draft_model(tmp_path), card=card_of(target, "draft-model"))
        hub.add("user/large", EAGLE / "target", card=card_of(target, "draft-model"))
        assert found_by(search_for()) == [("draft_model", "user/small", "hub")]
        assert "of the target's work" in search_for().all()[-1].problems[-1]

    def test_misfits_are_listed_with_the_reason(self, target, hub, tmp_path):
        config = json.loads((EAGLE / "config.json").read_text())
        wide = {"config.json": json.dumps({**config, "target_hidden_size": 128})}
        hub.add("user/wide", EAGLE, files=wide, card=card_of(target, "eagle3"))
        problems = [item.problems for item in search_for().all() if item.model == "user/wide"]
        assert "128" in problems[0][0]
        assert "64" in problems[0][0]
        assert found_by(search_for()) == []

    def test_pickled_weights_are_not_chosen(self, hub):
        hub.add("user/target", MEDUSA / "target")
        hub.add("user/pickled", MEDUSA / "v01_heads_pt", card=card_of("user/target", "medusa"), downloads=9)
        hub.add("user/safe", MEDUSA / "vllm_converted", card=card_of("user/target", "medusa"))
        assert found_by(search_for()) == [("medusa", "user/safe", "hub")]
        assert "pickled" in search_for().all()[-1].problems[0]

    def test_remote_code_is_not_chosen(self, target, hub, tmp_path):
        config = json.loads((draft_model(tmp_path) / "config.json").read_text())
        config |= {"model_type": "own_type", "auto_map": {"AutoModelForCausalLM": "modeling.Own"}}
        hub.add("user/code", tmp_path, files={"config.json": json.dumps(config)}, card=card_of(target, "draft-model"))
        assert found_by(search_for()) == []
        assert "trust_remote_code" in search_for().all()[-1].problems[0]

    @pytest.mark.parametrize("where", ["card", "file"])
    def test_settings_that_a_drafter_was_saved_with(self, target, hub, where):
        saved = {"num_speculative_tokens": 3, "draft_tree_top_k": 2}
        if where == "card":
            hub.add("user/head", EAGLE, card=card_of(target, "eagle3", speculative={"target": target, **saved}))
        else:
            files = {"speculation_config.json": json.dumps({"method": "eagle3", **saved})}
            hub.add("user/head", EAGLE, files=files, card=card_of(target, "eagle3"))
        found = next(search_for().usable()).settings
        assert {key: found[key] for key in saved} == saved

    def test_weights_stay_where_they_are(self, target, hub):
        hub.add("user/head", EAGLE, card=card_of(target, "eagle3"))
        assert len(found_by(search_for())) == 1
        assert hub.sent("*user/head/*model.safetensors") < (EAGLE / "model.safetensors").stat().st_size / 2

    def test_requests_are_limited(self, target, hub):
        for index in range(6):
            hub.add(f"user/head{index}", EAGLE, card=card_of(target, "eagle3"), downloads=index)
        assert [model for _, model, _ in found_by(search_for(limit=2))] == ["user/head5", "user/head4"]
        assert not any("head3" in request.path for request in hub.requests)
        assert sum(request.path == "/api/models" for request in hub.requests) <= 7


class TestFaults:
    """A search finds less, and does not fail."""

    anything = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=8,
    )

    @settings(max_examples=60)
    @given(entry=anything, key=st.sampled_from(["method", "model", "revision", "num_speculative_tokens", "options"]))
    def test_any_entry(self, entry, key):
        for found in (entry, {key: entry}, {"model": "user/absent", key: entry}):
            search = Search(Target("", {"hidden_size": 64}, entry=found), Access(local_files_only=True))
            assert [item.method for item in search.usable()][-len(WITHOUT_WEIGHTS) :] == WITHOUT_WEIGHTS
            # What went wrong is said of the entry, not of the place.
            assert not any("named by the target" in note for note in search.notes)

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

    @pytest.fixture
    def head(self, target, hub):
        hub.add("user/head", EAGLE, card=card_of(target, "eagle3"))
        return "user/head"

    def test_offline(self, head, monkeypatch):
        snapshot_download("user/target")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        search = search_for()
        assert [item.method for item in search.all()] == WITHOUT_WEIGHTS
        assert any("offline" in note for note in search.notes)

    @pytest.mark.usefixtures("no_backoff")
    @pytest.mark.parametrize("fault", [{"status": 500}, {"status": 401}, {"replace": lambda body: b"<html>"}])
    def test_search_that_is_answered_with_nonsense(self, head, hub, fault):
        hub.fault("/api/models", **fault)
        search = search_for()
        assert found_by(search) == []
        assert any("on the Hub" in note for note in search.notes)

    @pytest.mark.usefixtures("no_backoff")
    def test_candidate_that_cannot_be_read(self, head, target, hub):
        hub.add("user/other", FIXTURES / "eagle" / "eagle1_llama", card=card_of(target, "eagle"))
        hub.fault("/user/head/*", status=500)
        assert [model for _, model, _ in found_by(search_for())] == ["user/other"]
        assert search_for().all()[-1].model == "user/head"

    def test_gated_candidate(self, target, hub):
        hub.add("user/head", EAGLE, card=card_of(target, "eagle3"), gated=True)
        assert found_by(search_for()) == []
        assert "gated" in search_for().all()[-1].problems[0]

    @pytest.mark.parametrize("path", ["/api/models", "/api/models/user/target"])
    def test_answers_that_do_not_come(self, head, hub, monkeypatch, path):
        snapshot_download("user/target")
        search = search_for()
        monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
        hub.fault(path, delay=60)
        assert found_by(search) == []
        assert any("on the Hub" in note for note in search.notes)

    def test_slow_answers(self, target, hub, monkeypatch):
        for index in range(3):
            hub.add(f"user/head{index}", EAGLE, card=card_of(target, "eagle3"), downloads=-index)
        search = search_for()
        monkeypatch.setattr(discover, "SECONDS_PER_PLACE", 0)
        assert [model for _, model, _ in found_by(search)] == ["user/head0"]
        assert any("slow" in note for note in search.notes)

    def test_missing_package(self, target, monkeypatch):
        monkeypatch.setattr(discover, "find_spec", lambda name: None)
        assert [item.method for item in search_for().usable()] == ["ngram+recycling", "ngram", "recycling"]


class TestCommand:
    def invoke(self, *arguments):
        result = CliRunner().invoke(cli.app, ["discover", *arguments], prog_name="hf-specdec")
        assert result.exit_code == 0, result.stderr
        return result

    def test_json(self, target, hub):
        hub.add("user/head", EAGLE, card=card_of(target, "eagle3"), downloads=3)
        hub.add("user/misfit", DFLASH, card=card_of(target, "dflash"))
        found = json.loads(self.invoke(target, "--json").stdout)
        assert found["target"] == target
        assert [item["method"] for item in found["candidates"]] == ["eagle3", *WITHOUT_WEIGHTS, "dflash"]
        head = found["candidates"][0]
        assert (head["model"], head["place"], head["relation"]) == ("user/head", "hub", "exact")
        assert (head["downloads"], head["problems"]) == (3, [])
        assert head["num_bytes"] > 1000
        assert found["candidates"][-1]["problems"]
        assert [item.to_dict() for item in discover_drafters(target)] == found["candidates"]

    def test_table(self, target, hub):
        hub.add("user/head", EAGLE, card=card_of(target, "eagle3"))
        hub.add("user/misfit", DFLASH, card=card_of(target, "dflash"))
        output = self.invoke(target).stdout
        assert output.index("user/head") < output.index("ngram") < output.index("Not usable: dflash 'user/misfit'")

    def test_offline(self, target, hub):
        snapshot_download(target)
        hub.add("user/head", EAGLE, card=card_of(target, "eagle3"))
        num_requests = len(hub.requests)
        found = json.loads(self.invoke(target, "--offline", "--json").stdout)
        assert [item["method"] for item in found["candidates"]] == WITHOUT_WEIGHTS
        assert len(hub.requests) == num_requests
        assert found["notes"]

    def test_embedded_target(self):
        found = json.loads(self.invoke("demo", "--offline", "--json").stdout)
        assert found["candidates"][-1]["method"] == "recycling"

    def test_target_that_does_not_exist(self, hub):
        result = CliRunner().invoke(cli.app, ["discover", "user/absent"])
        assert result.exit_code == 2
        assert "user/absent" in result.stderr
