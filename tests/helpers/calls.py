"""Calls of the demo's target without drafts, made once, and the same calls with the drafts of a row."""

from __future__ import annotations

import os
from functools import cache

import torch
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

from hf_specdec import record
from hf_specdec.metrics.records import CallRecord
from tests.helpers.methods import demo_inputs, demo_target, fresh_speculator, settings_of


NEW = 11
# Longer than the window of `windowed_target`.
PROMPT = 32


@cache
def inputs(batch_size: int) -> dict[str, torch.Tensor]:
    """Left-padded prompts; the last row has the most padding."""
    batch = {name: value[:, -PROMPT:].clone() for name, value in demo_inputs(batch_size).items()}
    for row in range(batch_size):
        batch["attention_mask"][row, : 4 * row] = 0
    batch["input_ids"] *= batch["attention_mask"]
    return batch


def with_mask(input_ids: torch.LongTensor) -> dict[str, torch.Tensor]:
    """A prompt without padding as `generate()` takes it."""
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}


@cache
def plain(batch_size: int, model: PreTrainedModel | None = None, **settings):
    """Output of plain generation; settings that are tuples are passed as lists."""
    return (model or demo_target()).generate(**inputs(batch_size), **_call(settings))


def continuation(**batch: torch.Tensor) -> torch.LongTensor:
    """Plain generation's 8 tokens for other inputs; made once for each."""
    key = tuple(map(tuple, batch["input_ids"].tolist()))
    if key not in _continuations:
        _continuations[key] = demo_target().generate(**batch, **_call({"max_new_tokens": 8}))
    return _continuations[key]


_continuations: dict[tuple, torch.LongTensor] = {}


def drafted(row: str, batch: int | dict, model: PreTrainedModel | None = None, options=None, **settings):
    """Output of the same call with the drafts of a row, and its record.

    Args:
        row (`str`): Of `tests/helpers/methods.py`.
        batch (`int` or `dict`): Number of prompts, or other inputs.
        model (`PreTrainedModel`, *optional*): The target, if it is another one than the demo's.
        options (`dict`, *optional*): Speculative settings beside those of the row.
    """
    batch = inputs(batch) if isinstance(batch, int) else batch
    speculator = fresh_speculator(settings_of(row, **(options or {})), model)
    with record(trace=True) as made:
        output = (model or demo_target()).generate(**batch, **_call(settings), assistant=speculator)
    return output, made.calls[0]


def assert_same(
    row: str, batch_size: int, model: PreTrainedModel | None = None, options=None, **settings
) -> CallRecord:
    """Generates with the drafts of a row what plain generation says, and drafts."""
    ours, call = drafted(row, batch_size, model, options, **settings)
    assert torch.equal(ours, plain(batch_size, model, **settings))
    assert_drafts(row, call)
    return call


def assert_drafts(row: str, call: CallRecord) -> None:
    """Some drafts were accepted; where lengths are chosen by the time that cycles take, some were made."""
    if os.environ.get("HF_SPECDEC_ADAPTIVE") == "0":
        assert call.stats.num_accepted_tokens > 0
    elif "+" not in row:  # time says, too, which part of a combination drafts
        assert call.stats.num_draft_tokens > 0


# Prompt and new tokens of each request: some end while others have just begun, one with its first token.
LENGTHS = [(9, 7), (1, 2), (20, 11), (5, 1), (33, 4), (2, 9), (14, 3), (7, 12), (1, 5), (26, 2), (3, 8), (11, 6)]
GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@cache
def requests() -> list[dict]:
    """Requests for `generate_many`, of the lengths of `LENGTHS`."""
    texts = [row[mask.bool()].tolist() for row, mask in zip(*demo_inputs(4).values())]
    return [
        {"input_ids": texts[index % 4][-length - index :][:length], "max_new_tokens": new, "seed": index}
        for index, (length, new) in enumerate(LENGTHS)
    ]


@cache
def texts_alone() -> list[list[int]]:
    """What plain generation says to each of them."""
    return [
        demo_target()
        .generate(torch.tensor([own["input_ids"]]), max_new_tokens=own["max_new_tokens"], **GREEDY)[0, length:]
        .tolist()
        for own, (length, _) in zip(requests(), LENGTHS)
    ]


def depths_of(trace) -> list[int]:
    """The depth of every drafted node of a row, 1 for children of the anchor."""
    depths: list[int] = []
    for parent in trace.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def traces_of(call: CallRecord) -> list:
    """All rows of all cycles."""
    return [trace for cycle in call.cycles for trace in cycle.rows]


@cache
def windowed_target() -> MistralForCausalLM:
    """The demo's target with a sliding window."""
    model = demo_target()
    settings = {
        key: value for key, value in model.config.to_dict().items() if key not in ("model_type", "architectures")
    }
    target = MistralForCausalLM(MistralConfig(**settings, sliding_window=20)).eval()
    target.load_state_dict(model.state_dict())
    return target


@cache
def half_target() -> PreTrainedModel:
    """The demo's target in bfloat16."""
    model = demo_target()
    target = type(model)(model.config).eval()
    target.load_state_dict(model.state_dict())
    return target.to(torch.bfloat16)


def _call(settings: dict) -> dict:
    made = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
    return {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": None, **made}
