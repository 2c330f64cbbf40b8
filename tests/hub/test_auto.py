"""spec_method="auto" and pipelines, end to end: what is found through the loopback Hub drafts, and changes no text."""

import json
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save
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
from hf_specdec.hub.card import add_to_target_card
from tests.helpers.drafters import EAGLE, FIXTURES, card_of, load, speculated
from tests.helpers.loopback_hub import TOKEN
from tests.helpers.models import prompts, tiny_llama


FALLBACK = "suffix+recycling"


def generate(model, **arguments):
    """The statistics of a call, by default with "auto"."""
    return speculated(model, prompts(1), **(arguments or {"spec_method": "auto"}))


@pytest.fixture
def target(hub):
    hub.add("user/target", EAGLE / "target")
    return "user/target"


@pytest.fixture
def log(monkeypatch):
    """Lines of the package's log from the level "info" on."""
    lines = []

    class Lines(logging.Handler):
        def emit(self, record):
            lines.append(f"{record.levelname}: {record.getMessage()}")

    handler, logger = Lines(), logging.getLogger("hf_specdec.loader")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


class TestPlaces:
    def test_target(self, hub):
        hub.add("user/target", FIXTURES / "mtp" / "deepseek_v3" / "target")
        assert generate(load()).method == "mtp"

    @pytest.mark.parametrize("method", ["eagle3", "ngram+eagle3"])
    def test_method_of_an_entry(self, hub, method):
        entry = {"speculative": {"method": method, "model": "user/head", "num_speculative_tokens": 3}}
        hub.add("user/target", EAGLE / "target", files={"generation_config.json": json.dumps(entry)})
        hub.add("user/head", EAGLE)
        stats = generate(load())
        assert stats.method == method
        assert "named by the target" in stats.notes[0]

    def test_nothing_found(self, target, log, monkeypatch):
        monkeypatch.delenv("HF_SPECDEC_ADAPTIVE")
        model = load()
        for _ in range(2):
            stats = generate(model)
            assert stats.method == FALLBACK
            assert stats.notes[0] == f"method='auto' chose {FALLBACK}: no drafter with weights was found"
            # How much is drafted is measured.
            assert any(note.startswith("adaptive length: ") for note in stats.notes)
        assert log == [f"INFO: Speculation: {stats.notes[0]}."]

    def test_nothing_found_and_no_suffix_trees(self, target, monkeypatch):
        monkeypatch.setattr("hf_specdec.hub.discover.find_spec", lambda name: None)
        stats = generate(load())
        assert stats.method == "ngram+recycling"
        assert stats.notes[0].startswith("method='auto' chose ngram+recycling: no drafter with weights was found")

    def test_nothing_that_loads(self, target, hub, log):
        tensors = load_file(EAGLE / "model.safetensors")
        del tensors["norm.weight"]
        hub.add("user/broken", EAGLE, files={"model.safetensors": save(tensors)}, card=card_of(target, "eagle3"))
        stats = generate(load())
        assert stats.notes[0] == f"method='auto' chose {FALLBACK}: what was found cannot be loaded, as warnings say"
        assert "user/broken" in log[0]

    @pytest.mark.parametrize(
        ("given", "length"),
        [
            ({}, None),
            ({"num_speculative_tokens": 5}, 5),
            ({"prompt_lookup_max": 3}, None),
            ({"draft_tree_depth": 4}, None),
        ],
    )
    def test_length_without_weights(self, target, given, length):
        assert load_speculator(load(), "auto", **given).config.num_speculative_tokens == length

    def test_model_that_was_never_saved(self, hub):
        assert generate(tiny_llama()).method == FALLBACK

    def test_hub_that_fails(self, target, hub, no_backoff):
        model = load()
        hub.fault("/api/*", status=500)
        stats = generate(model)
        assert stats.method == FALLBACK
        assert "no drafter with weights was found (on the Hub: " in stats.notes[0]


class TestPublished:
    """Drafters that this package writes are found by it."""

    def test_drafter_that_was_pushed(self, target, hub):
        model = load()
        speculator = load_speculator(model, str(EAGLE), num_speculative_tokens=3)
        speculator.push_to_hub("user/head", token=TOKEN)
        found = load_speculator(model, "auto")
        assert (found.config.model, found.config.num_speculative_tokens) == ("user/head", 3)
        assert generate(model).method == "eagle3"

    def test_card_of_a_target(self, hub):
        card = ModelCard("---\n{}\n---\n")
        add_to_target_card(card, {"method": "eagle3", "model": "user/head", "num_speculative_tokens": 2})
        hub.add("user/target", EAGLE / "target", card=str(card))
        hub.add("user/head", EAGLE)
        found = load_speculator(load(), "auto")
        assert (found.config.model, found.config.num_speculative_tokens) == ("user/head", 2)


class TestChoice:
    @pytest.mark.parametrize(
        "arguments",
        [{"spec_method": "auto"}, {"speculative": "auto"}, {"speculative": {"method": "auto"}}],
        ids=["spec_method", "speculative", "dict"],
    )
    def test_spellings(self, target, hub, arguments):
        hub.add("user/head", EAGLE, card=card_of(target, "eagle3"))
        assert generate(load(), **arguments).method == "eagle3"

    def test_one_line_says_what_was_chosen_and_why(self, target, hub, log):
        hub.add("user/head", EAGLE, card=card_of(target, "eagle3"))
        model = load()
        for _ in range(2):
            generate(model)
        assert [line.split(":")[0] for line in log] == ["WARNING", "INFO"]
        size = sum(tensor.nbytes for tensor in load_file(EAGLE / "model.safetensors").values())
        for part in ("eagle3 'user/head'", "owner 'user'", f"{size} bytes", "on the Hub", "made for the target"):
            assert part in log[0]

    def test_the_line_comes_before_the_download(self, target, hub, monkeypatch):
        hub.add("user/head", EAGLE, card=card_of(target, "eagle3"))
        sent = []

        def warning(line):
            sent.append((line, hub.sent("*user/head/*model.safetensors")))

        monkeypatch.setattr(loader.logger, "warning", warning)
        assert generate(load()).method == "eagle3"
        ((line, num_bytes),) = sent
        assert "takes eagle3 'user/head'" in line
        assert num_bytes < (EAGLE / "model.safetensors").stat().st_size / 2

    def test_one_that_fails_while_it_is_loaded_is_passed_over_with_a_warning(self, target, hub, log):
        tensors = load_file(EAGLE / "model.safetensors")
        # Only the loader knows that it is needed.
        del tensors["norm.weight"]
        incomplete = {"model.safetensors": save(tensors)}
        hub.add("user/broken", EAGLE, files=incomplete, card=card_of(target, "eagle3"), downloads=100)
        hub.add("user/head", EAGLE, card=card_of(target, "eagle3"))
        assert "user/head" in generate(load()).notes[0]
        assert [line.split(":")[0] for line in log] == ["WARNING", "WARNING", "WARNING", "INFO"]
        assert "takes eagle3 'user/broken'" in log[0]
        assert "passes over eagle3 'user/broken'" in log[1]

    def test_second_call_searches_nothing(self, target, hub):
        hub.add("user/head", EAGLE, card=card_of(target, "eagle3"))
        model = load()
        first = load_speculator(model, "auto")
        num_requests = len(hub.requests)
        second = load_speculator(model, "auto", num_speculative_tokens=2)
        assert len(hub.requests) == num_requests
        assert second.resources is first.resources
        assert second.config.num_speculative_tokens == 2

    def test_threads_that_begin_together_search_once(self, target, hub):
        hub.add("user/head", EAGLE, card=card_of(target, "eagle3"))
        model = load()
        load_speculator(model, "auto")
        searches = [request.path for request in hub.requests].count("/api/models")
        forget_speculators(model)
        hub.requests.clear()
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: load_speculator(model, "auto"), range(4)))
        assert len({id(speculator.resources) for speculator in found}) == 1
        assert [request.path for request in hub.requests].count("/api/models") == searches

    def test_forgetting_begins_anew(self, target, hub):
        model = load()
        assert load_speculator(model, "auto").method == FALLBACK
        hub.add("user/head", EAGLE, card=card_of(target, "eagle3"))
        assert load_speculator(model, "auto").method == FALLBACK
        forget_speculators(model)
        assert load_speculator(model, "auto").method == "eagle3"

    def test_settings_pass_through(self, target, hub):
        hub.add("user/head", EAGLE, card=card_of(target, "eagle3"))
        config = load_speculator(load(), "auto", num_speculative_tokens=4, dtype="float32").config
        assert (config.num_speculative_tokens, config.dtype) == (4, "float32")
        assert config.revision == hub.repos["user/head"].branches["main"]

    def test_settings_of_a_method_that_is_not_chosen_are_left_out(self, target):
        assert load_speculator(load(), "auto", draft_tree_depth=4, draft_tree_top_k=4).method == FALLBACK

    def test_token_opens_gated_drafters(self, target, hub):
        hub.add("user/head", EAGLE, card=card_of(target, "eagle3"), gated=True)
        model = load()
        assert load_speculator(model, "auto").method == FALLBACK
        assert load_speculator(model, "auto", token=TOKEN).method == "eagle3"

    def test_auto_beside_a_model_reads_the_method_from_it(self, target, hub):
        hub.add("user/head", EAGLE)
        model = load()
        speculator = load_speculator(model, "auto", model="user/head")
        assert (speculator.method, speculator.note) == ("eagle3", None)
        assert load_speculator(model, "auto", draft_model=tiny_llama(vocab_size=256)).method == "draft_model"

    @pytest.mark.parametrize("name", ["revision", "code_revision", "subfolder"])
    def test_place_without_a_model(self, name):
        with pytest.raises(SpecConfigError, match=f"`{name}`='x' is about a named `model`"):
            SpeculativeConfig("auto", **{name: "x"})

    def test_code_of_whoever_it_may_be(self):
        with pytest.raises(SpecConfigError, match="`trust_remote_code`=True is about a named `model`"):
            SpeculativeConfig("auto", trust_remote_code=True)

    def test_name_is_reserved(self):
        with pytest.raises(SpecConfigError, match="'auto' is taken"):
            register_candidate_generator("auto", CandidateGenerator)

    def test_settings_survive_in_a_file(self, tmp_path):
        config = SpeculativeConfig("auto", num_speculative_tokens=3, draft_tree_depth=5, token="hf_secret")
        config.save_pretrained(tmp_path)
        assert SpeculativeConfig.from_pretrained(tmp_path) == config
        assert config.replace(dtype="float32").to_dict() == {**config.to_dict(), "dtype": "float32"}

    def test_unknown_setting(self):
        with pytest.raises(SpecConfigError, match="num_speculative_tokens"):
            SpeculativeConfig("auto", num_speculative_token=3)


class TestPipeline:
    """`pipeline(..., speculative=...)` with names on the Hub."""

    prompt = "def read_json(path):\n    with open("

    def text(self, **arguments):
        generator = pipeline("text-generation", model="user/target", device="cpu", **arguments)
        with record() as recorded:
            answer = generator([self.prompt, "import os\n"], do_sample=False, max_new_tokens=24, batch_size=2)
        return answer, recorded.calls

    @pytest.fixture
    def plain(self, hub):
        hub.add("user/target", demo.target_path())
        return self.text()[0]

    def test_named_drafter(self, plain, hub):
        hub.add("user/head", demo.drafter_path("eagle3"))
        answer, calls = self.text(speculative="user/head")
        assert answer == plain
        assert {call.stats.method for call in calls} == {"eagle3"}
        assert sum(call.stats.num_accepted_tokens for call in calls) > 0

    def test_auto(self, plain, hub):
        hub.add("user/head", demo.drafter_path("dflash"), card=card_of("user/target", "dflash"))
        answer, calls = self.text(speculative="auto")
        assert answer == plain
        assert {call.stats.method for call in calls} == {"dflash"}
