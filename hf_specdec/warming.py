"""Warm-up: kernels are compiled and graphs captured before the first real call.

A call of its own goes through all sizes of verifications and drafts. It counts in its own statistics only.

Shapes: B rows, P prompt length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from transformers import MaxLengthCriteria
from transformers.generation import StoppingCriteriaList

from .call.build import build
from .call.entry import prepare_request
from .control import ControlProfile
from .drafts import DraftTree
from .loader import load_speculator
from .loop.rows import Group, Rows
from .metrics import SpecDecodingStats
from .settings.checks import Bounds, checked
from .speculator import Speculator
from .target.cache import row_sizes
from .target.facts import model_profile
from .target_facts import vocabulary_size


@dataclass
class WarmUp:
    """What a warm-up has done; names as in [`SpecDecodingStats`]."""

    seconds: float = 0.0
    num_calls: int = 0
    num_graph_captures: int = 0
    num_draft_graph_captures: int = 0
    graphs: str = ""
    draft_graphs: str = ""
    attention: str = ""
    notes: list[str] = field(default_factory=list)

    def add(self, stats: SpecDecodingStats) -> None:
        self.num_calls += 1
        self.num_graph_captures += stats.num_graph_captures
        self.num_draft_graph_captures += stats.num_draft_graph_captures
        self.graphs = stats.graphs
        self.draft_graphs = stats.draft_graphs
        self.attention = stats.attention
        self.notes = list(dict.fromkeys([*self.notes, *stats.notes]))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def warm_up(
    model: torch.nn.Module,
    speculative: Any = "ngram",
    *,
    batch_sizes: Sequence[int] = (1,),
    prompt_length: int = 512,
    max_new_tokens: int = 128,
    sampling: bool = True,
    on_call: Callable[[], None] = lambda: None,
) -> WarmUp:
    """Compiles kernels and captures graphs before the first call, which would otherwise do so.

    Compiled kernels are kept on disk, where later processes find them; graphs belong to the model in this process. On
    a CPU there is nothing to compile or capture, and only a few forwards are made.

    Args:
        model (`PreTrainedModel`): The target.
        speculative ([`Speculator`], or what `generate(speculative=...)` takes): What will draft.
        batch_sizes (`Sequence[int]`): Rows of the calls to come. Rows that end leave a batch, so smaller numbers of
            rows are warmed up, too.
        prompt_length, max_new_tokens (`int`): About the most that calls will have: graphs are captured for buffers of
            that size.
        sampling (`bool`): Some calls will sample.
        on_call (`Callable`): Called after each of the calls that it makes.

    Returns:
        [`WarmUp`].

    Raises:
        SpecConfigError: A number is too small.
        UnsupportedModelError: The loop cannot drive the model.
    """
    began = perf_counter()
    checked("batch_sizes", tuple(batch_sizes), tuple[int, ...], Bounds(least=1))
    checked("prompt_length", prompt_length, int, Bounds(least=1))
    checked("max_new_tokens", max_new_tokens, int, Bounds(least=2))
    model_profile(model)
    speculator = speculative if isinstance(speculative, Speculator) else load_speculator(model, speculative)
    # These calls leave no texts in caches, and no costs or acceptance in the profile.
    speculator = speculator.without_texts(model).at_full_length()
    speculator.profile = ControlProfile()
    if speculator.generator_class.parts:
        speculator.resources = replace(speculator.resources, profile=ControlProfile())
    done = WarmUp()
    # The largest batches first: the smaller ones find room in their slots.
    for rows in row_sizes(max(batch_sizes)):
        for do_sample in (False, True)[: 1 + sampling]:
            done.add(_call(model, speculator, _prompts(model, rows, prompt_length), max_new_tokens, do_sample))
            on_call()
    done.seconds = perf_counter() - began
    return done


def _prompts(model: torch.nn.Module, rows: int, length: int) -> torch.LongTensor:
    """Tokens `(B, P)` from the middle of the vocabulary, twice the same, in which n-grams are found."""
    size = vocabulary_size(model)
    generator = torch.Generator().manual_seed(0)
    shape = rows, -(-length // 2)
    piece = torch.randint(size // 10, max(size // 2, 1), shape, generator=generator, device="cpu")
    return piece.repeat(1, 2)[:, :length].to(model.device)


@torch.no_grad()
def _call(
    model: Any, speculator: Speculator, prompts: torch.LongTensor, max_new_tokens: int, do_sample: bool
) -> SpecDecodingStats:
    """The statistics of a call that goes through all sizes."""
    settings = {"max_new_tokens": max_new_tokens, "do_sample": do_sample}
    # The user's random state stays as it was.
    with torch.random.fork_rng(devices=[]):
        request = prepare_request(model, {"inputs": prompts, "attention_mask": torch.ones_like(prompts), **settings})
        # Rows end at the maximum length only.
        criteria = (each for each in request.stopping_criteria if isinstance(each, MaxLengthCriteria))
        request.stopping_criteria = StoppingCriteriaList(criteria)
        group = Group(request)
        loop = build(request, speculator, Rows(request.batch_size), [group], is_reported=False)
        with closing(loop):
            loop.begin()
            rows = loop.rows
            # Sizes of verifications, first that without a draft, of which nothing is kept, then depths of drafts.
            loop.verify(rows.step(0), DraftTree.empty(len(rows.active), loop.session.device))
            for depth in range(loop.drafter.num_speculative_tokens, 0, -1):
                group.most_draft_tokens = depth
                if not rows.all_finished:
                    loop.cycle()
            loop.end()
    return loop.stats
