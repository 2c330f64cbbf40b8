"""Text of the target's own, for its drafts to learn from: prompts from a user's documents, and their continuations.

A draft has to predict what the target writes, not what others wrote. Shapes: N rows, T tokens of a row.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from .reading import Rows
from .text import Document


def draw_prompts(documents: Sequence[Document], count: int, length: int, seed: int) -> list[list[int]]:
    """
    Draws beginnings for the target to continue: of a chat all that comes before its last answer, of a text a piece.
    No chat is drawn again before all have been.

    Args:
        documents (`Sequence[Document]`): Chats and texts to draw from.
        count (`int`): Number of prompts.
        length (`int`): Tokens of the row that a prompt is continued to; a prompt takes up to half of them.
        seed (`int`): Seed of the draws.
    """
    choose = random.Random(seed)
    weights = [len(document.tokens) if not document.prompt_length else length for document in documents]
    chats = [document for document in documents if document.prompt_length]
    choose.shuffle(chats)
    in_turn = cycle(chats)
    prompts = []
    for document in choose.choices(documents, weights, k=count):
        if document.prompt_length:
            document = next(in_turn)
            prompts.append(document.tokens[: document.prompt_length][-(length // 2) :])
            continue
        size = choose.randint(max(1, length // 16), max(1, length // 2))
        start = choose.randrange(max(1, len(document.tokens) - size + 1))
        prompts.append(document.tokens[start : start + size])
    return prompts


@torch.no_grad()
def continue_prompts(
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    length: int,
    *,
    sampled_share: float = 0.5,
    temperature: float = 0.8,
    max_new_tokens: int | None = None,
    batch_size: int = 32,
    on_step: Callable[[int], None] | None = None,
) -> Rows:
    """
    Continues prompts with the target, to the end of a row or to its end-of-sequence token.

    Args:
        target (`PreTrainedModel`): The target.
        prompts (`Sequence[Sequence[int]]`): Token ids, each shorter than `length`.
        length (`int`): Tokens of a row.
        sampled_share (`float`): Share of the batches that are sampled, at `temperature`; the others are greedy.
        max_new_tokens (`int`, *optional*): Most tokens of a continuation. Long ones repeat themselves more, and more
            prompts teach more.
        batch_size (`int`): Prompts continued together.
        on_step (`Callable[[int], None]`, *optional*): Called with the number of prompts done.

    Returns:
        [`Rows`]: prompt, continuation and padding; only the continuation counts. In the order of the prompts' lengths.
    """
    tokens = torch.zeros(len(prompts), length, dtype=torch.long)
    counted = torch.zeros(len(prompts), length, dtype=torch.bool)
    # Prompts of similar length together.
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    due = 0.0
    for start in range(0, len(order), batch_size):
        chosen = [prompts[index] for index in order[start : start + batch_size]]
        due += sampled_share
        sampled = due >= 1.0
        due -= sampled
        sampling = {"do_sample": True, "temperature": temperature} if sampled else {"do_sample": False}
        room = length - min(map(len, chosen))
        most = room if max_new_tokens is None else min(room, max_new_tokens)
        for row, answer in enumerate(_continuations(target, chosen, most, sampling), start):
            end = len(chosen[row - start])
            text = torch.cat((torch.tensor(chosen[row - start]), answer.cpu()))[:length]
            tokens[row, : len(text)] = text
            counted[row, end : len(text)] = True
        if on_step is not None:
            on_step(min(start + batch_size, len(order)))
    return Rows(tokens, counted)


def _continuations(
    target: PreTrainedModel, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: dict[str, Any]
) -> Iterator[torch.LongTensor]:
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
    ends = torch.tensor(ends if isinstance(ends, list) else [-1 if ends is None else ends], device=output.device)
    for answer in output[:, input_ids.shape[1] :]:
        found = torch.isin(answer, ends).nonzero()
        yield answer[: found[0, 0] + 1] if len(found) else answer
