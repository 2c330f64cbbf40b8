"""Whole calls with the kinds of block drafts that the behaviour matrix has no checkpoint for."""

import pytest
import torch

from hf_specdec import load_speculator, record
from tests.methods.test_dflash import published


def official(name, **settings):
    """An official draft, its target, and prompts with padding of different lengths."""
    target, folder, expected = published(name)
    prompt = expected["input_ids"][0]
    rows = [prompt, prompt[3:], prompt[:-2]]
    width = len(prompt)
    ids = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in rows])
    mask = torch.stack([(torch.arange(width) >= width - len(row)).long() for row in rows])
    return target, {"input_ids": ids, "attention_mask": mask}, load_speculator(target, model=folder, **settings)


CALLS = {
    "domino": lambda **s: official("domino_b6", **s),
    "confidence": lambda **s: official("dspark_confidence_b5", draft_confidence_threshold=0.4, **s),
}


def late_token(texts):
    """A token that texts first say at different places, but not at once."""

    def places(token):
        return [text.index(token) if token in text else len(text) for text in texts]

    late = [token for token in set(sum(texts, [])) if min(places(token)) > 5]
    return max(late, key=lambda token: (len(set(places(token))), -token))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("case", ["texts", "ends", "paused", "auto"])
def test_rows_have_the_target_s_texts(name, case):
    """Ragged rows, rows that end at other times, and a pause until rows have ended."""
    settings = {"paused": {"disable_by_batch_size": 1}, "auto": {"num_speculative_tokens": "auto"}}.get(case, {})
    target, inputs, speculator = CALLS[name](**settings)
    arguments = {**inputs, "max_new_tokens": 40, "do_sample": False}
    plain = target.generate(**arguments, eos_token_id=None)
    if case in ("ends", "paused"):
        arguments["eos_token_id"] = late_token(plain[:, inputs["input_ids"].shape[1] :].tolist())
        plain = target.generate(**arguments)
    else:
        arguments["eos_token_id"] = None
    with record() as made:
        ours = target.generate(**arguments, assistant=speculator)
    assert torch.equal(ours, plain)
    stats = made.calls[0].stats
    if case in ("texts", "ends"):
        assert stats.num_accepted_tokens > 0
