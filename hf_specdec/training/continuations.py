"""Text of the target's own, for its drafts to learn from: prompts from a user's documents, and their continuations.

A draft has to predict what the target writes, not what others wrote.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError


if TYPE_CHECKING:
    from datasets import Dataset


def draw_prompts(documents: Dataset, count: int, length: int, seed: int) -> list[list[int]]:
    """Draws prompts of up to half of `length` tokens: of a chat all before its last answer, of a text a piece."""
    # No chat is drawn again before all have been.
    choose = random.Random(seed)
    texts, prompt_lengths = list(documents["tokens"]), list(documents["prompt_length"])
    weights = [length if prompt_length else len(tokens) for tokens, prompt_length in zip(texts, prompt_lengths)]
    chats = [index for index, prompt_length in enumerate(prompt_lengths) if prompt_length]
    choose.shuffle(chats)
    in_turn = cycle(chats)
    prompts = []
    for index in choose.choices(range(len(texts)), weights, k=count):
        if prompt_lengths[index]:
            index = next(in_turn)
            prompts.append(texts[index][: prompt_lengths[index]][-(length // 2) :])
            continue
        size = choose.randint(max(1, length // 16), max(1, length // 2))
        start = choose.randrange(max(1, len(texts[index]) - size + 1))
        prompts.append(texts[index][start : start + size])
    return prompts


@torch.no_grad()
def continue_prompts(
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    length: int,
    *,
    sampled_share: float = 0.5,  # of the batches, the others are greedy
    temperature: float = 0.8,
    max_new_tokens: int | None = None,  # long continuations repeat themselves more, and more prompts teach more
    batch_size: int = 32,
    show_progress: bool = False,
) -> list[dict[str, Any]]:
    """Continues prompts with the target to rows of at most `length` tokens, in the order of the prompts' lengths."""
    # Prompts of similar length together.
    prompts = sorted(prompts, key=len)
    rows: list[dict[str, Any]] = []
    with tqdm(desc="target's continuations", total=len(prompts), disable=not show_progress) as bar:
        for number, start in enumerate(range(0, len(prompts), batch_size)):
            chosen = prompts[start : start + batch_size]
            is_sampled = int((number + 1) * sampled_share) > int(number * sampled_share)
            sampling = {"do_sample": True, "temperature": temperature} if is_sampled else {"do_sample": False}
            most = min(length - len(chosen[0]), max_new_tokens or length)
            for prompt, answer in zip(chosen, _continuations(target, chosen, most, sampling)):
                rows.append({"tokens": [*prompt, *answer][:length], "prompt_length": len(prompt)})
            bar.update(len(chosen))
    return rows


def _continuations(
    target: PreTrainedModel, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: dict[str, Any]
) -> Iterator[list[int]]:
    """Generates the answers to some prompts, each with its end-of-sequence token if there is one."""
    rows = [torch.tensor(prompt) for prompt in prompts]
    input_ids = pad_sequence(rows, batch_first=True, padding_side="left").to(target.device)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
    inputs = {"input_ids": input_ids, "attention_mask": mask.to(target.device)}
    arguments = {"max_new_tokens": max_new_tokens, "pad_token_id": 0, **sampling}
    try:
        # Greedy output is the same, sampled output has the same distribution, and both come sooner.
        output = target.generate(**inputs, **arguments, spec_method="ngram")
    except UnsupportedModelError:
        output = target.generate(**inputs, **arguments)
    ends = target.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    for answer in output[:, input_ids.shape[1] :].tolist():
        end = next((index + 1 for index, token in enumerate(answer) if token in ends), len(answer))
        yield answer[:end]
