"""Structured output: a drafted text under a grammar is that of plain generation under the same grammar."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from transformers.generation.logits_process import LogitsProcessor

import hf_specdec
from hf_specdec import SpecConfigError, record
from hf_specdec.logits.grammar.masks import GrammarMask
from hf_specdec.logits.sampling import DraftSampler
from tests.helpers.chi_square import chi_square_pvalue
from tests.helpers.distribution import P_VALUE
from tests.helpers.grammars import (
    BACKENDS,
    COMPACT,
    LIBRARIES,
    SCHEMA,
    WALKED,
    constraint,
    matcher_of,
    needs,
    own,
    tokenizer,
)
from tests.helpers.levels import full, in_full
from tests.helpers.methods import demo_target, draws, fresh_speculator, needs_library, settings_of
from tests.helpers.models import nothing_runs


NEW = 56
TEXTS = ["def parse(line):\n    return ", "import json\n\nvalue = ", "class Colour:\n    name = ", "# known: "]


@pytest.fixture(autouse=True)
def eager():
    """Lets outlines mask without compiling a kernel."""
    with torch.compiler.set_stance("force_eager"):
        yield


@cache
def inputs(batch_size: int) -> dict[str, torch.Tensor]:
    encoded = tokenizer()(TEXTS[:batch_size], return_tensors="pt", padding=True, padding_side="left")
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def generated(constraints: dict, batch_size: int, **settings) -> torch.LongTensor:
    end = tokenizer().eos_token_id
    call = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": end, "pad_token_id": end, **settings}
    return demo_target().generate(**inputs(batch_size), **constraints, **call)


@cache
def plain(library: str, batch_size: int, **settings):
    return generated(constraint(library), batch_size, **settings)


def drafted(drafter: str, constraints: dict, batch_size: int, options=None, **settings):
    """The text with the drafts of a row of `tests/helpers/methods.py`, and the record of the call."""
    speculator = fresh_speculator(settings_of(drafter, **(options or {})))
    with record(trace=True) as made:
        text = generated(constraints, batch_size, assistant=speculator, **settings)
    return text, made.calls[0]


def texts_of(output: torch.LongTensor, batch_size: int) -> list[str]:
    return tokenizer().batch_decode(output[:, inputs(batch_size)["input_ids"].shape[1] :], skip_special_tokens=True)


def with_libraries(*cases: tuple[str, str]) -> list:
    """Names of libraries, which may be missing, and drafters."""
    marks = {library.id: library.marks for library in LIBRARIES}
    suffix = {"grammar+suffix": (needs_library,)}
    return [pytest.param(name, drafter, marks=(*marks[name], *suffix.get(drafter, ()))) for name, drafter in cases]


NAMES = [library.id for library in LIBRARIES]
# Each library, and each drafter under this package's own grammars.
SHORT = [("own xgrammar", "grammar"), ("xgrammar", "eagle3 tree"), ("own llguidance", "grammar+ngram")]
DRAFTERS = "ngram recycling medusa draft_model mlp_speculator dflash mtp grammar+eagle3 grammar+suffix".split()
REST = [(name, ("grammar", "eagle3 tree")[number % 2]) for number, name in enumerate(NAMES)]
REST += [(NAMES[number % 2], drafter) for number, drafter in enumerate(DRAFTERS)]
REST = with_libraries(*(case for case in REST if case not in SHORT))


@pytest.mark.parametrize(("library", "drafter"), [*with_libraries(*SHORT), *in_full(*REST)])
def test_greedy_matches_generate(library, drafter):
    for batch_size in (1, 4):
        text, call = drafted(drafter, constraint(library), batch_size)
        assert torch.equal(text, plain(library, batch_size))
        # With as much whitespace as it likes the target does not come to an end.
        ended = [tokenizer().eos_token_id in row[-NEW:] for row in text.tolist()]
        assert all(ended) or library not in COMPACT
        for answer, has_ended in zip(texts_of(text, batch_size), ended):
            assert not has_ended or json.loads(answer).keys() == SCHEMA["properties"].keys()
        # What texts repeat is of no use in so short ones.
        assert call.stats.num_accepted_tokens > 0 or drafter in ("ngram", "recycling")
        if "grammar" in drafter and library.startswith("own"):
            assert call.stats.num_accepted_tokens > 0.3 * call.stats.num_committed_tokens
        assert not [note for note in call.stats.notes if "slowest" in note]


@pytest.mark.parametrize("library", [WALKED[1], *in_full(WALKED[0])])
def test_processors_that_are_walked(library):
    text, call = drafted("eagle3 tree", constraint(library), 2)
    assert torch.equal(text, plain(library, 2))
    assert [note for note in call.stats.notes if "slowest" in note]


@full
@needs("xgrammar")
def test_adaptive_lengths():
    text, call = drafted("draft_model", constraint("own xgrammar"), 4, {"num_speculative_tokens": "auto"})
    assert torch.equal(text, plain("own xgrammar", 4))
    assert any(note.startswith("adaptive length: ") for note in call.stats.notes)
    assert call.stats.num_accepted_tokens > 0


ORDERS = [(name, ("eagle3 tree", "grammar")[number % 2]) for number, name in enumerate(NAMES) if number != 1]


@pytest.mark.parametrize(
    ("library", "drafter"), [*with_libraries((NAMES[1], "eagle3 tree")), *in_full(*with_libraries(*ORDERS))]
)
def test_order_among_processors(library, drafter):
    settings = {"repetition_penalty": 1.3, "output_scores": True, "return_dict_in_generate": True}
    text, call = drafted(drafter, constraint(library), 4, **settings)
    alone = plain(library, 4, **settings)
    assert torch.equal(text.sequences, alone.sequences)
    assert call.stats.num_accepted_tokens > 0
    # After a row's end its scores are zeros.
    first = alone.sequences[0]
    num_steps = int(first.ne(first[-1]).nonzero()[-1]) + 2 - len(first) + len(alone.scores)
    for ours, theirs in list(zip(text.scores, alone.scores))[:num_steps]:
        active = ~torch.isneginf(theirs[0])
        assert torch.equal(torch.isneginf(ours[0]), ~active)
        torch.testing.assert_close(ours[0][active], theirs[0][active], atol=1e-4, rtol=1e-4)


@needs("llguidance")
def test_unknown_processor_beside_a_grammar():
    def unknown(input_ids, scores):
        return scores + 3.0 * (torch.arange(scores.shape[1]) % 7 == input_ids[:, -1:] % 7)

    def constraints():
        return {"logits_processor": [own("llguidance"), unknown]}

    text, call = drafted("grammar", constraints(), 4)
    assert torch.equal(text, generated(constraints(), 4))
    assert not torch.equal(text, plain("own llguidance", 4))
    assert call.stats.num_accepted_tokens > 0


@full
@pytest.mark.parametrize("backend", BACKENDS)
def test_forced_text_takes_few_forwards(backend):
    choices = ["the only text that may be written here"]
    text, call = drafted("grammar", {"logits_processor": [own(backend, choices=choices)]}, 1)
    assert texts_of(text, 1) == choices
    # The demo's target writes in single letters where xgrammar lets it.
    most = 2 if backend == "llguidance" else 0.8 * call.stats.num_committed_tokens
    assert call.stats.num_target_forwards <= most


@pytest.mark.parametrize("backend", [BACKENDS[1], *in_full(BACKENDS[0])])
def test_many_requests(backend):
    end = tokenizer().eos_token_id
    call = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": end, "pad_token_id": end}
    # The first of them without a grammar.
    requests = [{"input_ids": tokenizer()(text)["input_ids"]} for text in (TEXTS[0], *TEXTS)]
    requests[0]["logits_processor"] = []
    settings = {**call, "speculative": settings_of("grammar"), "logits_processor": [own(backend)]}
    first, *results = hf_specdec.generate_many(demo_target(), requests, batch_size=2, in_order=True, **settings)
    for text, result in zip(TEXTS, results):
        encoded = tokenizer()(text, return_tensors="pt")
        alone = demo_target().generate(**encoded, **call, logits_processor=[own(backend)])
        assert result.tokens == alone[0, encoded["input_ids"].shape[1] :].tolist()
        assert result.stats.num_accepted_tokens > 0
    assert first.stats.num_accepted_tokens == 0


class Forcing(LogitsProcessor):
    """Chooses a token at one place, whatever was done to the scores before."""

    def __init__(self, length: int, token: int):
        self.length, self.token = length, token

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] != self.length:
            return scores
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([self.token]), 0.0)


@full
@needs("llguidance")
@pytest.mark.parametrize("drafter", ["ngram", "grammar"])
def test_requests_that_leave_their_grammar_say_so(drafter):
    requests = [{"input_ids": [50, 60, 70]}, {"input_ids": [1, 2], "logits_processor": []}]
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "in_order": True}
    settings |= {"logits_processor": [own("llguidance"), Forcing(length=6, token=9)]}
    failed, good = hf_specdec.generate_many(demo_target(), requests, 2, speculative=settings_of(drafter), **settings)
    assert failed.finish_reason == "error"
    assert "does not allow token 9, generated token 4 of its row" in str(failed.error)
    assert good.error is None


# Drafts under the mask

GROWN = [
    *("medusa", "medusa static tree", "mlp_speculator candidates", "mlp_speculator tree"),
    *("eagle tree", "eagle3 chain", "eagle3 static tree", "eagle3 adaptive tree", "mtp", "mtp reuse tree"),
    *("dflash", "dflash tree", "dflash siblings", "dflash selector", "dflash selector tree"),
    *("dflash domino", "dflash denoising", "dflash lilicorr", "dflash xpress"),
]


@needs("xgrammar")
@pytest.mark.parametrize(
    ("drafter", "batch_size"),
    [("eagle3 tree", 4), *in_full(*((name, (1, 4)[place % 2]) for place, name in enumerate(GROWN)))],
)
def test_drafts_grow_under_the_mask(drafter, batch_size, monkeypatch):
    """Twice as many tokens are accepted as of drafts that the grammar cuts."""
    constraints = {"logits_processor": [own("xgrammar")]}
    text, call = drafted(drafter, constraints, batch_size)
    assert torch.equal(text, plain("own xgrammar", batch_size))
    monkeypatch.setattr(DraftSampler, "growing", lambda sampler, rows, limits: None)
    cut_text, cut = drafted(drafter, constraints, batch_size)
    assert torch.equal(cut_text, text)
    assert call.stats.num_accepted_tokens > 2 * cut.stats.num_accepted_tokens
    assert call.stats.num_target_forwards < 0.75 * cut.stats.num_target_forwards


# Sampling

CHOICES = ["yes", "no", "maybe not", "maybe so"]
NUM_ROWS = 400
SAMPLING = {"do_sample": True, "temperature": 1.5, "top_k": 0, "max_new_tokens": 12}


@cache
def exact(library: str) -> dict[tuple[int, ...], float]:
    """Probabilities of all texts under the choices, by the library's masks and a forward for each beginning."""
    prompt, end, matcher = inputs(1)["input_ids"], tokenizer().eos_token_id, matcher_of(library, "|".join(CHOICES))
    open_paths, probs = {(): 1.0}, {}
    while open_paths:
        path, prob = open_paths.popitem()
        text = torch.cat([prompt, torch.tensor([path]).long()], dim=1)
        with torch.no_grad():
            logits = demo_target()(text).logits[:, -1].float()
        scores = GrammarMask(matcher.masks_after([path]), allows_rest=False)(text, logits)
        for token, share in enumerate((scores[0].double() / SAMPLING["temperature"]).softmax(-1).tolist()):
            if share > 0:
                (probs if token == end else open_paths)[(*path, token)] = prob * share
    return probs


# Drawn drafts under every library, chosen ones, and further methods that draw under this package's own.
DRAWING = "eagle3 chain, mlp_speculator chain, dflash, dflash selector, dflash lilicorr".split(", ")
SAMPLED = [*((name, "draft_model") for name in NAMES[1:]), (NAMES[0], "grammar"), (NAMES[2], "grammar")]
SAMPLED += [(NAMES[number % 2], drafter) for number, drafter in enumerate(DRAWING)]


@pytest.mark.parametrize(
    ("library", "drafter"), [*with_libraries((NAMES[0], "draft_model")), *in_full(*with_libraries(*SAMPLED))]
)
def test_distribution(library, drafter):
    torch.manual_seed(0)
    options = {"draft_sample_method": "probabilistic"} if draws(drafter) else {}
    speculator = fresh_speculator(settings_of(drafter, **{**options, "num_speculative_tokens": 3}))
    prompt, end = inputs(1)["input_ids"].repeat(NUM_ROWS, 1), tokenizer().eos_token_id
    call = {**SAMPLING, "eos_token_id": end, "pad_token_id": end, "return_dict_in_generate": True}
    call |= {"attention_mask": torch.ones_like(prompt), **constraint(library, "|".join(CHOICES))}
    output = demo_target().generate(input_ids=prompt, **call, assistant=speculator)
    probs = exact(library)
    counts = dict.fromkeys(probs, 0)
    for tokens in output.sequences[:, prompt.shape[1] :].tolist():
        # A text that is impossible must not pass.
        counts[tuple(tokens[: tokens.index(end) + 1])] += 1
    assert chi_square_pvalue(list(counts.values()), list(probs.values())) > P_VALUE
    assert output.speculative.num_accepted_tokens > 0.1 * NUM_ROWS


# Grammars that do not fit


def of_xgrammar(*patterns: str, tokens=None, ends=None):
    """Constraints of the library's own processor, over the demo's vocabulary or another one."""
    import xgrammar.contrib.hf

    if tokens is None:
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer(), vocab_size=4096, stop_token_ids=ends)
    else:
        info = xgrammar.TokenizerInfo(tokens, stop_token_ids=ends)
    compiled = [xgrammar.GrammarCompiler(info).compile_regex(pattern) for pattern in patterns]
    return {"logits_processor": [xgrammar.contrib.hf.LogitsProcessor(compiled if patterns[1:] else compiled[0])]}


@full
@needs("xgrammar")
def test_grammars_that_do_not_fit_the_call_are_refused():
    words = [f"t{i}" for i in range(5000)]
    for constraints, batch_size, message in (
        (of_xgrammar("t1t2", tokens=words, ends=[0]), 1, r"vocabulary of 5000 tokens.* 4096"),
        (of_xgrammar("c", tokens=["a", "b", "end"], ends=[2]), 1, "admits nothing"),
        (of_xgrammar("a", "b", "c"), 4, r"3 grammars, and the batch 4 rows"),
    ):
        with nothing_runs(demo_target()), pytest.raises(SpecConfigError, match=message):
            drafted("ngram", constraints, batch_size)


@pytest.mark.parametrize("library", in_full(*LIBRARIES))
def test_ends_that_the_grammar_does_not_know_are_refused(library):
    end = tokenizer().eos_token_id
    message = rf"ends texts with token {end}, and this call ends at 5 or 7, so that no text would end"
    with nothing_runs(demo_target()), pytest.raises(SpecConfigError, match=message):
        drafted("ngram", constraint(library), 1, eos_token_id=[5, 7])
    text, _ = drafted("grammar", constraint(library), 1, eos_token_id=[5, end])
    assert torch.equal(text, plain(library, 1, eos_token_id=(5, end)))


@full
@needs("xgrammar")
@pytest.mark.parametrize("drafter", ["grammar", "eagle3 tree"])
def test_ends_of_the_grammar_that_are_no_ends_of_the_call(drafter):
    """A text whose end the call does not know goes on as in plain generation; one that it knows ends."""
    end, other = tokenizer().eos_token_id, 7
    for ends in ([other], [end], [end, other]):
        settings = {"eos_token_id": ends, "max_new_tokens": 16}
        # Of this class one serves a single plain call.
        ours, theirs = (of_xgrammar("(yes|no)[a-z]{3}", ends=[end, other]) for _ in range(2))
        text, made = drafted(drafter, ours, 4, **settings)
        assert torch.equal(text, generated(theirs, 4, **settings))
        assert made.stats.num_accepted_tokens > 0
