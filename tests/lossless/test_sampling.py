"""Sampling: the text follows from the seed, and its distribution is the target's.

Chosen drafts leave the text of a seed as it is without drafts, which is exact; that calls without drafts sample from
the target's distribution is tested in `tests.helpers.distribution.py`. Drawn drafts change the text, but not its
distribution: the first tokens of many rows are compared by chi-square with their enumerated probabilities.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.helpers.calls import NEW, drafted, inputs, with_mask
from tests.helpers.chi_square import chi_square_pvalue
from tests.helpers.distribution import P_VALUE, no_drafts
from tests.helpers.levels import full, in_full
from tests.helpers.methods import demo_target, draws, fresh_speculator, settings_of


SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 20}
# Processors that read tokens, here without effect, draw and judge one token after the other.
WALK = {"no_repeat_ngram_size": 30}


def sampled(row, batch_size, drawn=False, seed=0, **settings):
    torch.manual_seed(seed)
    method = {"draft_sample_method": "probabilistic" if drawn else "greedy"} if draws(row) else {}
    return drafted(row, batch_size, options=method, **{**SAMPLING, **settings})


@cache
def undrafted(**settings):
    torch.manual_seed(0)
    call = {**SAMPLING, "max_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": None, **settings}
    return demo_target().generate(**inputs(3), **call, assistant=no_drafts())


def test_sampled_text_depends_on_the_seed_alone(row):
    text, call = sampled(row, 3)
    assert torch.equal(text, undrafted())
    assert call.stats.num_accepted_tokens > 0


@full
def test_sampled_text_where_processors_read_tokens(row):
    text, call = sampled(row, 3, **WALK)
    assert torch.equal(text, undrafted(**WALK))
    assert call.stats.num_accepted_tokens > 0


@full
@pytest.mark.as_users_run
def test_sequences_of_one_prompt_differ(row):
    text, _ = sampled(row, 2, num_return_sequences=3, max_new_tokens=8, temperature=1.5)
    assert len({tuple(tokens) for tokens in text.tolist()}) == 6


@full
def test_drawn_drafts_repeat_with_the_seed(row):
    text, call = sampled(row, 3, drawn=True)
    assert torch.equal(text, sampled(row, 3, drawn=True, **WALK)[0])
    assert not torch.equal(text, sampled(row, 3, drawn=True, seed=1)[0])
    assert call.stats.num_accepted_tokens > 0
    for cycle in call.cycles:
        for trace in cycle.rows:
            assert trace.parents == list(range(-1, len(trace.draft_tokens) - 1))


P_WRONG = 1e-6
SETTINGS = {
    "plain": {"temperature": 1.5, "top_k": 0},
    "penalty": {"temperature": 1.5, "top_k": 3, "top_p": 0.95, "repetition_penalty": 1.5},
}


@cache
def prompt() -> torch.LongTensor:
    return inputs(1)["input_ids"][:, -3:]


@cache
def four_tokens(name: str) -> dict:
    """Settings that leave four tokens, to the target and to drafters."""
    with torch.no_grad():
        kept = demo_target()(prompt()).logits[0, -1].topk(4).indices.tolist()
    suppressed = [token for token in range(demo_target().config.vocab_size) if token not in kept]
    return {"suppress_tokens": suppressed, **SETTINGS[name]}


@cache
def exact(name: str) -> dict[tuple[int, ...], float]:
    """Probabilities of the first three tokens after the prompt, by transformers' own processors."""

    def catch(model, input_ids, logits_processor, **kwargs):
        return logits_processor

    probs = {(): 1.0}
    for _ in range(3):
        texts = torch.cat([prompt().expand(len(probs), -1), torch.tensor(list(probs)).long()], dim=1)
        processors = demo_target().generate(
            **with_mask(texts),
            do_sample=True,
            max_new_tokens=4,
            custom_generate=catch,
            **four_tokens(name),
        )
        with torch.no_grad():
            scores = processors(texts, demo_target()(texts).logits[:, -1].float()).double().softmax(-1)
        probs = {
            (*path, token): probs[path] * float(probs_of_next[token])
            for path, probs_of_next in zip(list(probs), scores)
            for token in probs_of_next.nonzero()[:, 0].tolist()
        }
    return probs


def chi_square(row: str, name: str, rule: str, num_rows: int) -> tuple[float, int]:
    """The p-value of the texts of many rows of one prompt, and how many tokens of drafts are in them."""
    torch.manual_seed(0)
    options = {"draft_sample_method": "probabilistic", "rejection_sample_method": rule, "num_speculative_tokens": 2}
    batch = with_mask(prompt().repeat(num_rows, 1))
    text, call = drafted(row, batch, options=options, do_sample=True, max_new_tokens=4, **four_tokens(name))
    probs, size = exact(name), prompt().shape[1]
    counts = dict.fromkeys(probs, 0)
    for tokens in text[:, size : size + 3].tolist():
        # A text that is impossible must not pass.
        counts[tuple(tokens)] += 1
    return chi_square_pvalue(list(counts.values()), list(probs.values())), call.stats.num_accepted_tokens


@pytest.mark.parametrize(
    ("name", "rule", "num_rows"), [("plain", "standard", 200), *in_full(("penalty", "block", 400))]
)
def test_drawn_drafts_keep_the_distribution(row, name, rule, num_rows):
    pvalue, num_accepted = chi_square(row, name, rule, num_rows)
    assert pvalue > P_VALUE
    assert num_accepted > 0.1 * num_rows


@full
def test_drawn_drafts_that_lie_about_their_distribution_are_noticed(row, monkeypatch):
    """Drafts that claim the less probable tokens to have been the more probable ones."""
    generator_class = fresh_speculator(settings_of(row)).generator_class
    # Of a combination the one that draws.
    *_, generator_class = getattr(generator_class, "parts", ()) or (generator_class,)
    propose = generator_class.propose

    def lying(self, step):
        draft = propose(self, step)
        if draft.probs is not None:
            claimed = torch.where(draft.probs > 0, 1.01 - draft.probs, 0.0)
            draft.probs = claimed / claimed.sum(-1, keepdim=True).clamp(min=1e-6)
        return draft

    monkeypatch.setattr(generator_class, "propose", lying)
    assert chi_square(row, "plain", "standard", 400)[0] < P_WRONG
