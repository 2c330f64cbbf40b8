"""spec_method="auto" and pipelines, end to end: what is found through the Hub drafts, and changes no text."""

import logging

import pytest
from transformers import pipeline

from hf_specdec import (
    CandidateGenerator,
    SpecConfigError,
    SpeculativeConfig,
    demo,
    forget_speculators,
    load_speculator,
    loader,
    record,
    register_candidate_generator,
)
from tests.helpers.drafters import EAGLE, MTP, card_of, entry_of, load, speculated, without_norm
from tests.helpers.levels import full, in_full
from tests.helpers.loopback_hub import TOKEN
from tests.helpers.models import prompts, tiny_llama
from tests.helpers.threads import in_threads


FALLBACK = "suffix+recycling"


def generate(model, **arguments):
    """The statistics of a call, by default with "auto"."""
    return speculated(model, prompts(1), **(arguments or {"spec_method": "auto"}))


@pytest.fixture
def head(hub, target):
    """A drafter that is found for the target."""
    return hub.add("user/head", EAGLE, card=card_of(target, "eagle3"))


@pytest.fixture
def log(caplog):
    """Lines of the package's log from the level "info" on."""
    caplog.set_level(logging.INFO, logger="hf_specdec.loader")
    return lambda: [f"{entry.levelname}: {entry.getMessage()}" for entry in caplog.records if "loader" in entry.name]


class TestPlaces:
    def test_layers_of_the_target(self, hub):
        hub.add("user/target", MTP / "deepseek_v3" / "target")
        assert generate(load()).method == "mtp"

    @pytest.mark.parametrize("method", ["ngram+eagle3", *in_full("eagle3")])
    def test_entry_of_the_target(self, hub, method):
        entry = {"method": method, "model": "user/head", "num_speculative_tokens": 3}
        hub.add("user/target", EAGLE / "target", files=entry_of(entry))
        hub.add("user/head", EAGLE)
        stats = generate(load())
        assert stats.method == method
        assert "named by the target" in stats.notes[0]

    def test_drafter_that_was_pushed(self, hub, target):
        model = load()
        load_speculator(model, str(EAGLE), num_speculative_tokens=3).push_to_hub("user/head", token=TOKEN)
        found = load_speculator(model, "auto").config
        assert (found.model, found.num_speculative_tokens) == ("user/head", 3)
        assert generate(model).method == "eagle3"

    def test_nothing_found(self, target, log, monkeypatch):
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


class TestChoice:
    def test_one_line_before_the_download_says_what_was_chosen_and_why(self, head, hub, log, monkeypatch):
        sent, warn = [], loader.logger.warning
        monkeypatch.setattr(
            loader.logger, "warning", lambda line: (sent.append(hub.sent("*user/head/*.safetensors")), warn(line))
        )
        model = load()
        for _ in range(2):
            assert generate(model).method == "eagle3"
        assert [line.split(":")[0] for line in log()] == ["WARNING", "INFO"]
        for part in ("takes eagle3 'user/head'", "owner 'user'", " bytes", "on the Hub", "made for the target"):
            assert part in log()[0]
        assert sent[0] < (EAGLE / "model.safetensors").stat().st_size / 2

    def test_what_fails_while_it_is_loaded_is_passed_over(self, head, hub, log):
        hub.add("user/broken", EAGLE, files=without_norm(EAGLE), card=card_of("user/target", "eagle3"), downloads=100)
        assert "user/head" in generate(load()).notes[0]
        assert [line.split(":")[0] for line in log()] == ["WARNING", "WARNING", "WARNING", "INFO"]
        assert "takes eagle3 'user/broken'" in log()[0]
        assert "passes over eagle3 'user/broken'" in log()[1]

    def test_searched_once_until_it_is_forgotten(self, target, hub):
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
    def test_threads_that_begin_together_search_once(self, head, hub):
        model = load()
        load_speculator(model, "auto")
        searches = hub.asked("/api/models")
        forget_speculators(model)
        hub.requests.clear()
        found = in_threads(*[lambda: load_speculator(model, "auto")] * 4)
        assert len({id(speculator.resources) for speculator in found}) == 1
        assert hub.asked("/api/models") == searches

    def test_auto_beside_a_model_reads_the_method_from_it(self, head):
        model = load()
        speculator = load_speculator(model, "auto", model="user/head")
        assert (speculator.method, speculator.note) == ("eagle3", None)
        assert load_speculator(model, "auto", draft_model=tiny_llama(vocab_size=256)).method == "draft_model"


@full
class TestSettings:
    @pytest.mark.parametrize("method", ["auto", *in_full("dflash")])
    def test_places_are_about_a_named_model(self, method):
        for name in ("revision", "code_revision", "subfolder", "trust_remote_code"):
            with pytest.raises(SpecConfigError, match=f"`{name}`=.* is about a named `model`"):
                load_speculator(tiny_llama(), method, **{name: name == "trust_remote_code" or "x"})

    def test_name_is_reserved(self):
        with pytest.raises(SpecConfigError, match="'auto' is taken"):
            register_candidate_generator("auto", CandidateGenerator)

    def test_settings_survive_in_a_file(self, tmp_path):
        config = SpeculativeConfig("auto", num_speculative_tokens=3, draft_tree_depth=5, token="hf_secret")
        config.save_pretrained(tmp_path)
        assert SpeculativeConfig.from_pretrained(tmp_path) == config
        assert config.replace(dtype="float32").to_dict() == {**config.to_dict(), "dtype": "float32"}
        with pytest.raises(SpecConfigError, match="num_speculative_tokens"):
            SpeculativeConfig("auto", num_speculative_token=3)


@pytest.mark.parametrize(("speculative", "method"), [("auto", "dflash"), *in_full(("user/drafter", "eagle3"))])
def test_pipeline(hub, speculative, method):
    hub.add("user/target", demo.target_path())
    hub.add("user/drafter", demo.drafter_path(method), card=card_of("user/target", method))

    def texts(**arguments):
        generator = pipeline("text-generation", model="user/target", device="cpu", **arguments)
        texts = ["def read_json(path):\n    with open(", "import os\n"]
        with record() as recorded:
            answer = generator(texts, do_sample=False, max_new_tokens=24, batch_size=2)
        return answer, recorded.calls

    answer, calls = texts(speculative=speculative)
    assert answer == texts()[0]
    assert {call.stats.method for call in calls} == {method}
    assert sum(call.stats.num_accepted_tokens for call in calls) > 0
