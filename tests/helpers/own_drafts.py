"""Drafts of a call beside the texts that they continue, and models that are nearly the target."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch

from hf_specdec import load_speculator, record


GREEDY = {"do_sample": False, "max_new_tokens": 25}


def perturbed(model, noise: float = 0.05, seed: int = 0):
    """A copy that agrees with the model more often than not."""
    twin = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * noise * parameter.std())
    return twin


def drafted_call(target, inputs, drafter: dict, **settings):
    """Text and record of a greedy call with the arguments of a drafter; the text must be plain generation's."""
    settings = {**GREEDY, **settings}
    with record(trace=True) as made:
        text = target.generate(**inputs, **settings, **drafter)
    assert torch.equal(text, target.generate(**inputs, **settings))
    return text, made.calls[0]


def with_draft_model(target, draft, inputs, options: dict | None = None, **settings):
    """The same with a draft model, whose drafts must be its own wherever processors do not change them."""
    speculator = load_speculator(target, {"method": "draft_model", **(options or {})}, draft_model=draft)
    text, call = drafted_call(target, inputs, {"assistant": speculator}, **settings)
    if "repetition_penalty" not in settings:
        assert_own_drafts(draft, inputs, text, call, target.config.vocab_size)
    return text, call


def drafts_in(call, inputs, text) -> Iterator[tuple]:
    """Every row of every cycle, and the row's text so far without its padding."""
    starts = (inputs["attention_mask"] == 0).sum(1).tolist()
    lengths = [inputs["input_ids"].shape[1] + 1] * len(text)
    for cycle in call.cycles:
        for trace in cycle.rows:
            yield trace, text[trace.row, starts[trace.row] : lengths[trace.row]]
            lengths[trace.row] += len(trace.committed_tokens)


def logits_along(model, text: torch.LongTensor, draft: list[int]) -> torch.Tensor:
    """Logits of a model after a text, and after each token of the draft but the last, `(len(draft), V)`."""
    whole = torch.cat([text, torch.tensor(draft[:-1], dtype=torch.long)])[None]
    with torch.no_grad():
        return model(whole).logits[0, len(text) - 1 :]


def assert_own_drafts(draft, inputs, text, call, vocab_size: int | None = None) -> None:
    """Every draft is what the draft model itself says after the text so far: its cache is never wrong.

    Tokens that it lacks are read as 0, and none beyond the target's `vocab_size` is drafted.
    """
    known = draft.get_input_embeddings().num_embeddings
    for trace, so_far in drafts_in(call, inputs, text):
        if trace.draft_tokens:
            logits = logits_along(draft, so_far.masked_fill(so_far >= known, 0), trace.draft_tokens)
            assert trace.draft_tokens == logits[:, :vocab_size].argmax(-1).tolist()
