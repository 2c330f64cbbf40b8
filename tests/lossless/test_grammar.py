"""Structured output: a drafted text under a grammar is that of plain generation under the same grammar."""

from __future__ import annotations

import json
import re
from functools import cache

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import LogitsProcessor

import hf_specdec
from hf_specdec import SpecConfigError, forget_speculators, record
from hf_specdec.decoding.loop import DecodingLoop
from hf_specdec.logits.grammar.growth import GrowingMasks
from hf_specdec.logits.grammar.masks import GrammarMask
from hf_specdec.logits.grammar.recognition import grammar_of
from hf_specdec.logits.sampling import DraftSampler
from tests.helpers.grammars import (
    BACKENDS,
    COMPACT,
    LIBRARIES,
    SCHEMA,
    AllowedTokens,
    constraint,
    matcher_of,
    needs,
    own,
    own_call,
    tokenizer,
)
from tests.helpers.methods import demo_target, draws, fresh_speculator, needs_library, settings_of
from tests.helpers.models import nothing_runs
from tests.helpers.statistics import chi_square_pvalue


NEW = 56
TEXTS = ["def parse(line):\n    return ", "import json\n\nvalue = ", "class Colour:\n    name = ", "# known: "]

DRAFTERS = [
    *("ngram", "recycling", "draft_model", "medusa", "mlp_speculator", "eagle3 tree", "dflash", "mtp"),
    *("grammar", "grammar+ngram", "grammar+eagle3"),
    *(pytest.param(name, marks=needs_library) for name in ("suffix tree", "grammar+suffix")),
]


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
def plain(library: str, batch_size: int, **settings) -> torch.LongTensor:
    return generated(constraint(library), batch_size, **settings)


def drafted(drafter: str, constraints: dict, batch_size: int, options=None, **settings):
    """The text with the drafts of a row of `tests/helpers/methods.py`, and the record of the call."""
    speculator = fresh_speculator(settings_of(drafter, **(options or {})))
    with record(trace=True) as made:
        text = generated(constraints, batch_size, assistant=speculator, **settings)
    return text, made.calls[0]


def texts_of(output: torch.LongTensor, batch_size: int) -> list[str]:
    return tokenizer().batch_decode(output[:, inputs(batch_size)["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_text_is_that_of_plain_generation(library, drafter, batch_size):
    text, call = drafted(drafter, constraint(library), batch_size)
    assert torch.equal(text, plain(library, batch_size))
    # With as much whitespace as it likes the target does not come to an end.
    ended = [tokenizer().eos_token_id in row[-NEW:] for row in text.tolist()]
    assert all(ended) or library not in COMPACT
    for answer, has_ended in zip(texts_of(text, batch_size), ended):
        assert not has_ended or json.loads(answer).keys() == SCHEMA["properties"].keys()
    # What texts repeat is of no use in so short ones.
    assert call.stats.num_accepted_tokens > 0 or drafter in ("ngram", "recycling", "suffix tree")
    if "grammar" in drafter and library.startswith("own"):
        assert call.stats.num_accepted_tokens > 0.3 * call.stats.num_committed_tokens
    assert not [note for note in call.stats.notes if "slowest" in note]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("settings", [{"repetition_penalty": 1.3}, {"output_scores": True}], ids=["walk", "scores"])
@pytest.mark.parametrize("drafter", ["grammar", "eagle3 tree"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_order_among_processors(library, drafter, settings):
    settings = {**settings, "return_dict_in_generate": True}
    text, call = drafted(drafter, constraint(library), 4, **settings)
    alone = plain(library, 4, **settings)
    assert torch.equal(text.sequences, alone.sequences)
    assert call.stats.num_accepted_tokens > 0
    # After a row's end its scores are zeros.
    first = alone.sequences[0]
    num_steps = int(first.ne(first[-1]).nonzero()[-1]) + 2 - len(first) + len(alone.scores or ())
    for ours, theirs in list(zip(text.scores or (), alone.scores or ()))[:num_steps]:
        active = ~torch.isneginf(theirs[0])
        assert torch.equal(torch.isneginf(ours[0]), ~active)
        torch.testing.assert_close(ours[0][active], theirs[0][active], atol=1e-4, rtol=1e-4)


class Unknown(LogitsProcessor):
    """Adds a little to some scores, in a way that this package does not know."""

    def __call__(self, input_ids, scores):
        assert len({len(row) for row in input_ids}) == 1
        return scores + (torch.arange(scores.shape[1]) % 3) * 0.5


@pytest.mark.parametrize("backend", BACKENDS)
def test_beside_an_unknown_processor_the_rows_advance_together(backend):
    def both():
        return {"logits_processor": [own(backend), Unknown()]}

    text, call = drafted("grammar", both(), 4)
    assert torch.equal(text, generated(both(), 4))
    assert call.stats.num_accepted_tokens > 0
    assert [note for note in call.stats.notes if "slowest" in note]


@pytest.mark.parametrize("backend", BACKENDS)
def test_forced_text_takes_few_forwards(backend):
    choices = ["the only text that may be written here"]
    text, call = drafted("grammar", {"logits_processor": [own(backend, choices=choices)]}, 1)
    assert texts_of(text, 1) == choices
    tokens = call.stats.num_committed_tokens
    assert tokens >= 8
    # The demo's target writes in single letters where xgrammar lets it.
    assert call.stats.num_target_forwards <= (2 if backend == "llguidance" else 0.8 * tokens)


def test_without_a_grammar_nothing_is_drafted():
    text, call = drafted("grammar", {}, 1)
    assert torch.equal(text, generated({}, 1))
    assert call.stats.num_drafts == 0
    assert any("no logits processor of a known grammar" in note for note in call.stats.notes)


@needs("xgrammar")
def test_a_used_processor_of_xgrammar_serves_again():
    constraints = constraint("xgrammar")
    first, again = (drafted("grammar", constraints, size)[0] for size in (4, 1))
    assert torch.equal(first, plain("xgrammar", 4))
    assert torch.equal(again, plain("xgrammar", 1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_requests(backend):
    end = tokenizer().eos_token_id
    call = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": end, "pad_token_id": end}
    # The first of them without a grammar.
    free = {"prompt": tokenizer()(TEXTS[0])["input_ids"], "logits_processor": []}
    prompts = [free, *({"prompt": tokenizer()(text)["input_ids"]} for text in TEXTS)]
    results = hf_specdec.generate_many(
        demo_target(),
        [{"input_ids": each.pop("prompt"), **each} for each in prompts],
        speculative=settings_of("grammar"),
        batch_size=2,
        logits_processor=[own(backend)],
        **call,
    )
    results = sorted(results, key=lambda result: result.index)
    for text, result in zip(TEXTS, results[1:]):
        encoded = tokenizer()(text, return_tensors="pt")
        alone = demo_target().generate(**encoded, **call, logits_processor=[own(backend)])
        assert result.tokens == alone[0, encoded["input_ids"].shape[1] :].tolist()
        assert result.stats.num_accepted_tokens > 0
    assert results[0].stats.num_accepted_tokens == 0


class Forcing(LogitsProcessor):
    """Chooses a token at one place, whatever was done to the scores before."""

    def __init__(self, length: int, token: int):
        self.length, self.token = length, token

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] != self.length:
            return scores
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([self.token]), 0.0)


@needs("llguidance")
@pytest.mark.parametrize("drafter", ["ngram", "grammar"])
def test_requests_that_leave_their_grammar_say_so(drafter):
    processors = [own("llguidance"), Forcing(length=6, token=9)]
    results = hf_specdec.generate_many(
        demo_target(),
        [{"input_ids": [50, 60, 70]}, {"input_ids": [51, 61, 71]}, {"input_ids": [1, 2], "logits_processor": []}],
        speculative=settings_of(drafter),
        batch_size=3,
        logits_processor=processors,
        max_new_tokens=8,
        do_sample=False,
        pad_token_id=0,
    )
    *failed, good = sorted(results, key=lambda result: result.index)
    for result in failed:
        assert result.finish_reason == "error"
        assert "does not allow token 9, generated token 4 of its row" in str(result.error)
    assert good.error is None


# Drafts under the mask

GROWN = [
    *("medusa", "medusa chain", "medusa static tree"),
    *("mlp_speculator candidates", "mlp_speculator static tree", "mlp_speculator tree"),
    *("eagle", "eagle tree", "eagle3 chain", "eagle3 static tree", "eagle3 tree", "eagle3 adaptive tree"),
    *("dflash", "dflash tree", "dflash siblings", "dflash selector", "dflash selector tree", "mtp", "mtp reuse tree"),
    *("dflash domino", "dflash denoising", "dflash lilicorr", "dflash xpress"),
]


@pytest.mark.thinned(5)
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("drafter", GROWN)
@pytest.mark.parametrize("backend", BACKENDS[:1])
def test_drafts_grow_under_the_mask(backend, drafter, batch_size, monkeypatch):
    """Twice as many tokens are accepted as of drafts that the grammar cuts."""
    constraints = {"logits_processor": [own(backend)]}
    text, call = drafted(drafter, constraints, batch_size)
    assert torch.equal(text, plain(f"own {backend}", batch_size))
    monkeypatch.setattr(DraftSampler, "growing", lambda sampler, rows, limits: None)
    cut_text, cut = drafted(drafter, constraints, batch_size)
    assert torch.equal(cut_text, text)
    assert call.stats.num_accepted_tokens > 2 * cut.stats.num_accepted_tokens
    assert call.stats.num_target_forwards < 0.75 * cut.stats.num_target_forwards


@pytest.mark.parametrize("backend", BACKENDS[:1])
def test_successors_are_learned_under_the_mask(backend, monkeypatch):
    """Token recycling knows what the target has written under the grammar, and not what it would have written."""

    def accepted() -> int:
        speculator, constraints = fresh_speculator(settings_of("recycling")), {"logits_processor": [own(backend)]}
        for _ in range(2):
            with record(trace=True) as made:
                assert torch.equal(generated(constraints, 4, assistant=speculator), plain(f"own {backend}", 4))
        return made.calls[0].stats.num_accepted_tokens

    masked = accepted()
    monkeypatch.setattr("hf_specdec.decoding.loop.masked_nodes", lambda draft, logits: logits)
    assert masked > 1.2 * accepted()


# Lengths

FREE, HALF_FORCED = "[a-z ]{600}", "(red [a-z]{2}, this text is forced, ){8}"


@pytest.fixture
def cost(monkeypatch):
    """Seconds of a clock of its own: a verification takes 20 and 0.2 for each node, and whoever looks waits for 1."""
    seconds, verify = [0.0], DecodingLoop._verify

    def look() -> float:
        seconds[0] += 1
        return seconds[0]

    def timed_verify(loop, draft):
        seconds[0] += 20 + 0.2 * draft.size
        return verify(loop, draft)

    monkeypatch.setattr(DecodingLoop, "_verify", timed_verify)
    monkeypatch.setattr("hf_specdec.control.clock.clock_of", lambda device: look)
    forget_speculators(demo_target())
    yield seconds
    forget_speculators(demo_target())


def second_call(drafter: str, regex: str, cost: list[float]):
    """Statistics of a call whose lengths are chosen by what another one has found, and its seconds for a token."""
    speculator = fresh_speculator({**settings_of(drafter), "num_speculative_tokens": "auto"})
    for _ in range(2):
        began = cost[0]
        with record(trace=True) as made:
            generated(own_call("xgrammar", regex), 1, assistant=speculator, max_new_tokens=90)
    stats = made.calls[0].stats
    return stats, (cost[0] - began) / stats.num_committed_tokens


def drafts_the_worst(monkeypatch) -> None:
    """Lets drafters choose what they find the least probable of all that the grammar allows."""
    apply = GrowingMasks.apply
    monkeypatch.setattr(GrowingMasks, "apply", lambda masks, logits, ids=None: apply(masks, -logits, ids))


@needs("xgrammar")
@pytest.mark.parametrize(
    "drafter",
    [
        pytest.param("eagle3", marks=pytest.mark.slow),
        pytest.param("eagle3 chain", marks=pytest.mark.slow),
        "grammar+eagle3",
    ],
)
def test_drafts_that_are_not_accepted_end_under_a_grammar(drafter, monkeypatch, cost):
    good, seconds = second_call(drafter, FREE, cost)
    assert good.num_target_forwards < 0.4 * good.num_committed_tokens
    assert seconds < 10
    forget_speculators(demo_target())
    drafts_the_worst(monkeypatch)
    bad, seconds = second_call(drafter, FREE, cost)
    assert bad.num_accepted_tokens == 0
    assert bad.num_drafts < 0.15 * bad.num_target_forwards
    # It finds nothing to draft there.
    plain = second_call("grammar", FREE, cost)[1]
    assert seconds < 1.03 * plain


def shares(notes: list[str]) -> dict[str, tuple[int, int]]:
    """Accepted tokens and drafts of each part of a combination."""
    found = (re.fullmatch(r"(\w+): (\d+) tokens accepted from (\d+) drafts", note) for note in notes)
    return {match[1]: (int(match[2]), int(match[3])) for match in found if match}


@needs("xgrammar")
def test_forced_tokens_are_weighed_against_those_of_the_other_drafter(monkeypatch, cost):
    good, _ = second_call("grammar+eagle3", HALF_FORCED, cost)
    assert shares(good.notes)["eagle3"][0] > 0.8 * good.num_accepted_tokens
    forget_speculators(demo_target())
    drafts_the_worst(monkeypatch)
    bad, _ = second_call("grammar+eagle3", HALF_FORCED, cost)
    by_part = shares(bad.notes)
    assert by_part["grammar"][0] > 0.9 * bad.num_accepted_tokens
    assert by_part["eagle3"][1] < 0.1 * bad.num_drafts
    alone, _ = second_call("grammar", HALF_FORCED, cost)
    assert alone.num_accepted_tokens > 20
    assert bad.num_target_forwards < 1.05 * alone.num_target_forwards


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


# Chosen drafts and drawn ones under every library, and further methods that draw under this package's own.
SAMPLED = [
    *((library, drafter) for library in LIBRARIES for drafter in ("grammar", "draft_model")),
    *(
        (library, drafter)
        for library in LIBRARIES[:2]
        for drafter in ("eagle3 chain", "mlp_speculator chain", "dflash", "dflash selector", "dflash lilicorr")
    ),
]


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("library", "drafter"),
    [pytest.param(*library.values, drafter, marks=library.marks) for library, drafter in SAMPLED],
)
def test_distribution(library, drafter):
    torch.manual_seed(0)
    options = {"draft_sample_method": "probabilistic"} if draws(drafter) else {}
    speculator = fresh_speculator(settings_of(drafter, **{**options, "num_speculative_tokens": 3}))
    prompt, end = inputs(1)["input_ids"].repeat(NUM_ROWS, 1), tokenizer().eos_token_id
    call = {**SAMPLING, "eos_token_id": end, "pad_token_id": end, "return_dict_in_generate": True}
    output = demo_target().generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        **constraint(library, "|".join(CHOICES)),
        assistant=speculator,
        **call,
    )
    probs = exact(library)
    counts = dict.fromkeys(probs, 0)
    for tokens in output.sequences[:, prompt.shape[1] :].tolist():
        # A text that is impossible must not pass.
        counts[tuple(tokens[: tokens.index(end) + 1])] += 1
    assert chi_square_pvalue(list(counts.values()), list(probs.values())) > 1e-3
    assert output.speculative.num_accepted_tokens > 0.1 * NUM_ROWS


@pytest.mark.parametrize(
    "drafter", ["draft_model", "eagle3 chain", "dflash", "dflash selector", "mlp_speculator chain"]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_drafts_are_drawn_under_the_mask(backend, drafter, monkeypatch):
    """Forbidden tokens have no probability in the distributions that drafts were drawn from."""
    seen = []
    constrain = DraftSampler.constrained

    def spy(sampler, draft, rows):
        fewer = constrain(sampler, draft, rows)
        if draft.size:
            seen.append((draft, fewer))
        return fewer

    monkeypatch.setattr(DraftSampler, "constrained", spy)
    torch.manual_seed(0)
    options = {"draft_sample_method": "probabilistic", "num_speculative_tokens": 3}
    drafted(drafter, {"logits_processor": [own(backend)]}, 1, options, do_sample=True, temperature=1.5, top_k=0)
    assert len(seen) > 2
    end = tokenizer().eos_token_id
    for draft, fewer in seen:
        assert draft.probs is not None
        tokens = draft.token_lists()[0]
        # What follows an end is of no use.
        whole = tokens[: tokens.index(end) + 1] if end in tokens else tokens
        assert fewer.token_lists()[0] == whole
        masks = torch.from_numpy(np.stack([fewer.masks[0][node] for node in range(len(whole))]))
        allowed = (masks[..., None] >> torch.arange(32, dtype=torch.int32) & 1).flatten(1)
        assert (fewer.probs[0, : len(whole)][allowed[:, : fewer.probs.shape[-1]] == 0] == 0).all()


@needs("xgrammar")
def test_nothing_is_written_for_draft_tokens_beyond_the_vocabulary(capfd):
    processor = own("xgrammar", regex="[a-z]{3}")
    matcher = grammar_of(processor, 4200).matcher(0, [1])
    assert matcher.allowed_nodes([4095, 4096, 4199], [-1, -1, -1]) == [False] * 3
    assert capfd.readouterr() == ("", "")


# Errors


@needs("xgrammar")
def test_a_grammar_of_another_vocabulary_is_refused():
    import xgrammar

    info = xgrammar.TokenizerInfo([f"t{i}" for i in range(5000)], stop_token_ids=[0])
    compiled = xgrammar.GrammarCompiler(info).compile_regex("t1t2")
    processor = xgrammar.contrib.hf.LogitsProcessor(compiled)
    with nothing_runs(demo_target()), pytest.raises(SpecConfigError, match=r"vocabulary of 5000 tokens.* 4096"):
        drafted("ngram", {"logits_processor": [processor]}, 1)


@needs("xgrammar")
def test_a_grammar_that_admits_nothing_is_refused():
    import xgrammar

    info = xgrammar.TokenizerInfo(["a", "b", "end"], stop_token_ids=[2])
    compiled = xgrammar.GrammarCompiler(info).compile_regex("c")
    with nothing_runs(demo_target()), pytest.raises(SpecConfigError, match="admits nothing"):
        drafted("ngram", {"logits_processor": [xgrammar.contrib.hf.LogitsProcessor(compiled)]}, 1)


@needs("xgrammar")
def test_a_number_of_grammars_that_is_not_that_of_the_rows_is_refused():
    import xgrammar

    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer(), vocab_size=4096)
    compiled = [xgrammar.GrammarCompiler(info).compile_regex(pattern) for pattern in ("a", "b", "c")]
    with nothing_runs(demo_target()), pytest.raises(SpecConfigError, match=r"3 grammars, and the batch 4 rows"):
        drafted("ngram", {"logits_processor": [xgrammar.contrib.hf.LogitsProcessor(compiled)]}, 4)


@pytest.mark.parametrize("library", LIBRARIES)
def test_ends_that_the_grammar_does_not_know_are_refused(library):
    end = tokenizer().eos_token_id
    message = rf"ends texts with token {end}, and this call ends at 5 or 7, so that no text would end"
    with nothing_runs(demo_target()), pytest.raises(SpecConfigError, match=message):
        drafted("ngram", constraint(library), 1, eos_token_id=[5, 7])
    text, _ = drafted("grammar", constraint(library), 1, eos_token_id=[5, end])
    assert torch.equal(text, plain(library, 1, eos_token_id=(5, end)))


@needs("xgrammar")
@pytest.mark.parametrize("drafter", ["ngram", "grammar", "eagle3 tree", "draft_model"])
def test_ends_of_the_grammar_that_are_no_ends_of_the_call(drafter):
    """A text whose end the call does not know goes on as in plain generation; one that it knows ends."""
    import xgrammar.contrib.hf

    end, other = tokenizer().eos_token_id, 7
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer(), vocab_size=4096, stop_token_ids=[end, other])
    compiled = xgrammar.GrammarCompiler(info).compile_regex("(yes|no)[a-z]{3}")
    for ends in ([other], [end], [end, other]):
        settings = {"eos_token_id": ends, "max_new_tokens": 16}
        # Of this class one serves a single plain call.
        ours, theirs = ({"logits_processor": [xgrammar.contrib.hf.LogitsProcessor(compiled)]} for _ in range(2))
        text, made = drafted(drafter, ours, 4, **settings)
        assert torch.equal(text, generated(theirs, 4, **settings))
        assert made.stats.num_accepted_tokens > 0 or drafter == "ngram"


@needs("lmformatenforcer")
@pytest.mark.parametrize("missing", [-3, 0, 3])
def test_an_enforcer_of_another_vocabulary(missing):
    """Fewer tokens than the target has are forbidden in plain generation as well, more are refused."""
    from lmformatenforcer import RegexParser, TokenEnforcer, TokenEnforcerTokenizerData

    size, end = demo_target().config.vocab_size - missing, tokenizer().eos_token_id
    tokens = [(token, "ab"[token % 2], False) for token in range(size) if token != end]
    data = TokenEnforcerTokenizerData(tokens, lambda ids: "".join("ab"[one % 2] for one in ids), end, False, size)

    def constraints():
        return {"prefix_allowed_tokens_fn": AllowedTokens(TokenEnforcer(data, RegexParser("[ab]{9}")))}

    if missing >= 0:
        text, _ = drafted("ngram", constraints(), 1)
        assert torch.equal(text, generated(constraints(), 1))
        return
    with nothing_runs(demo_target()), pytest.raises(SpecConfigError, match=r"vocabulary of 4099 tokens.* 4096"):
        drafted("ngram", constraints(), 1)


@needs("outlines")
@pytest.mark.parametrize("missing", [-3, 0, 3])
def test_an_automaton_of_another_vocabulary(missing):
    from outlines.backends.outlines_core import OutlinesCoreLogitsProcessor
    from outlines_core import Index, Vocabulary

    size, end = demo_target().config.vocab_size - missing, tokenizer().eos_token_id
    ids = {
        letter: [token for token in range(size) if token != end and token % 2 == place]
        for place, letter in enumerate("ab")
    }

    def constraints(pattern):
        return {"logits_processor": [OutlinesCoreLogitsProcessor(Index(pattern, Vocabulary(end, ids)), "torch")]}

    if missing < 0:
        with nothing_runs(demo_target()), pytest.raises(SpecConfigError, match=r"vocabulary of 4099 tokens.* 4096"):
            drafted("ngram", constraints("[ab]{9}"), 1)
        # What the target cannot write later on is passed over, as by the library itself.
        ids["c"], ids["b"], ids["a"] = [5000, 9], [10], [11]
    text, _ = drafted("ngram", constraints("[ab][abc]{8}"), 1)
    assert torch.equal(text, generated(constraints("[ab][abc]{8}"), 1))
