"""Clocks of calls and forwards, scripted drafts, models and prompts of the programs beside this one.

Shapes: B rows of a batch, P prompt length, L length of the whole text, V vocabulary.
"""

from __future__ import annotations

import functools
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Generic, NamedTuple, TypeVar
from unittest.mock import patch

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator as HfCandidateGenerator
from transformers.generation.streamers import BaseStreamer

from hf_specdec import (
    CandidateGenerator,
    DraftTree,
    SpeculativeConfig,
    Speculator,
    demo,
    record,
    register_candidate_generator,
)
from hf_specdec.call.output import CACHE_FIELD
from hf_specdec.method import methods
from hf_specdec.metrics.records import Record
from hf_specdec.protocol import DraftStep
from hf_specdec.target.model import SlotModel


T = TypeVar("T")


# Scripts of this folder are started by their paths; `tools` lies beside it.
sys.path.append(str(Path(__file__).parents[1]))

# Sides that name no length have the method's own in every cycle, so that all rounds of a case do the same.
os.environ.setdefault("HF_SPECDEC_ADAPTIVE", "0")

# -------------------------------------------------------------------------------------------------------------- clocks


class Reading(NamedTuple):
    """Time of a clock, and the forwards until then."""

    time: float
    target_forwards: int
    target_seconds: float
    draft_seconds: float


@dataclass
class ForwardTimer:
    """Counts and times model forwards, those of the target apart from all others (the draft model's).

    The outermost forward counts: of a `SlotModel`, which makes masks and positions before it calls the model, as the
    model's own forward does in transformers' loops. The timer costs about a microsecond a forward.

    Args:
        target (`PreTrainedModel`): The target model.
        clock (`Callable`): Seconds; also that of everything else that is timed in the call.
    """

    target: PreTrainedModel
    clock: Callable[[], float] = perf_counter
    target_forwards: int = 0
    target_seconds: float = 0.0
    draft_seconds: float = 0.0
    _is_inside: bool = field(default=False, repr=False)

    @contextmanager
    def attached(self) -> Iterator[ForwardTimer]:
        """Times the forwards inside the block, by replacing the forwards of the classes and not of any object."""
        places = [(type(self.target), "forward", lambda module: module)]
        places += [(SlotModel, name, lambda module: module.model) for name in ("verify", "forward")]
        with ExitStack() as stack:
            for kind, name, model_of in places:
                stack.enter_context(patch.object(kind, name, self._timed(getattr(kind, name), model_of)))
            yield self

    def read(self) -> Reading:
        return Reading(self.clock(), self.target_forwards, self.target_seconds, self.draft_seconds)

    def _timed(self, forward: Callable, model_of: Callable) -> Callable:
        @functools.wraps(forward)
        def timed(module, *args, **kwargs):
            if self._is_inside:
                return forward(module, *args, **kwargs)
            self._is_inside = True
            began = self.clock()
            try:
                return forward(module, *args, **kwargs)
            finally:
                self._add(model_of(module), self.clock() - began)

        return timed

    def _add(self, model, seconds: float) -> None:
        self._is_inside = False
        if model is self.target:
            self.target_forwards += 1
            self.target_seconds += seconds
        else:
            self.draft_seconds += seconds


class MarkingStreamer(BaseStreamer, Generic[T]):
    """Leaves a mark at every delivery: a reading of a clock, and the tokens that the call has committed by then.

    Rows of a batch that are ahead of others are delivered later than committed, so calls of ours are asked.

    Args:
        recorded (`Record`): The records of the block in which the call runs.
        read (`Callable`): The reading.
    """

    def __init__(self, recorded: Record, read: Callable[[], T]):
        self.recorded, self.read = recorded, read
        self.marks: list[tuple[T, int]] = []
        self._delivered: int | None = None  # None: not even the prompt

    def put(self, value: torch.Tensor) -> None:
        if self._delivered is None:
            self._delivered = 0
            return
        self._delivered += value.numel()
        calls = self.recorded.calls
        self.marks.append((self.read(), calls[-1].stats.num_committed_tokens if calls else self._delivered))

    def end(self) -> None:
        """Nothing: the last delivery is the end."""


@dataclass
class Sample:
    """The decoding part of one or more calls: without prefill and first cycle, in which drafters read the prompt.

    Attributes:
        tokens (`int`): Tokens committed.
        cycles (`int`): Target forwards.
        seconds, target_seconds, draft_seconds (`float`): All time, and that inside forwards.
        texts (`list[list[list[int]]]`): For each call the rows of the output, prompts included.
    """

    tokens: int = 0
    cycles: int = 0
    seconds: float = 0.0
    target_seconds: float = 0.0
    draft_seconds: float = 0.0
    texts: list[list[list[int]]] = field(default_factory=list)

    def __add__(self, other: Sample) -> Sample:
        return Sample(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def outside_seconds(self) -> float:
        """Seconds outside of all model forwards."""
        return self.seconds - self.target_seconds - self.draft_seconds


def least_seconds(
    rounds: int, sides: Sequence[Callable[[], object]], clock: Callable[[], float] = perf_counter
) -> list[float]:
    """Seconds of each side, the least of several rounds in which they take turns."""
    seconds = [float("inf")] * len(sides)
    for _ in range(rounds):
        for index, side in enumerate(sides):
            began = clock()
            side()
            seconds[index] = min(seconds[index], clock() - began)
    return seconds


def time_call(
    generate: Callable[..., torch.LongTensor], target: PreTrainedModel, clock: Callable[[], float], **arguments
) -> Sample:
    """Times one generate() call.

    Args:
        generate (`Callable`): Takes the arguments of `generate()`, a `streamer` among them, and returns token ids.
        target (`PreTrainedModel`): The model that generates.
        clock (`Callable`): Seconds.
        arguments: Passed on.
    """
    with ForwardTimer(target, clock).attached() as timer, record() as recorded:
        streamer = MarkingStreamer(recorded, timer.read)
        output = generate(streamer=streamer, **arguments)
    first = next((mark for mark in streamer.marks if mark[0].target_forwards >= 2), None)
    last, tokens = streamer.marks[-1]
    if first is None or last.target_forwards == first[0].target_forwards:
        raise SystemExit(f"The call ended after {last.target_forwards} target forwards. Raise --new-tokens.")
    began, tokens_before = first
    return Sample(
        tokens - tokens_before,
        last.target_forwards - began.target_forwards,
        last.time - began.time,
        last.target_seconds - began.target_seconds,
        last.draft_seconds - began.draft_seconds,
        [output.tolist()],
    )


# ----------------------------------------------------------------------------------------------------- scripted drafts


@dataclass(frozen=True)
class Script:
    """Drafts that are right by design, or wrong at positions drawn beforehand, so that all who use them draft alike.

    Args:
        texts (`list[list[int]]`): The whole text of each row, prompt included.
        vocab_size (`int`): V.
        accuracy (`float`): Share of positions at which the draft is right.
        seed (`int`): Of the draws.
        num_siblings (`int`): Depths of a draft, from the first on, at which there is a second token, which is right at
            half of the positions where the first one is wrong.
    """

    texts: list[list[int]]
    vocab_size: int
    accuracy: float = 0.8
    seed: int = 0
    num_siblings: int = 0

    @functools.cached_property
    def drafts(self) -> list[list[int]]:
        """The token that is drafted at each position of each row."""
        draws = random.Random(self.seed)
        return [
            [token if draws.random() < self.accuracy else (token + 1) % self.vocab_size for token in text]
            for text in self.texts
        ]

    def draft(self, row: int, length: int, count: int) -> list[int]:
        """Draft tokens after the first `length` tokens of a row, at most `count`."""
        return self.drafts[row][length : length + count]

    @functools.cached_property
    def siblings(self) -> list[list[int]]:
        """The second token for each position of each row."""
        draws = random.Random(self.seed + 1)
        return [
            [token if draws.random() < 0.5 else (token + 2) % self.vocab_size for token in text] for text in self.texts
        ]

    def tree(self, row: int, length: int, count: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of the draft of a chain and of the second tokens at its first depths."""
        chain = self.draft(row, length, count)
        siblings = self.siblings[row][length : length + min(count, self.num_siblings)]
        return chain + siblings, [*range(-1, len(chain) - 1), *range(-1, len(siblings) - 1)]


class ScriptedCandidateGenerator(CandidateGenerator):
    """Drafts from a [`Script`] in our loop."""

    def __init__(self, config, resources: Script, session):
        super().__init__(config, resources, session)
        self.script = resources

    def propose(self, step: DraftStep) -> DraftTree:
        rooms = (min(room, self.num_speculative_tokens) for room in step.max_draft_tokens)
        drafts, parents = zip(*(self.script.tree(*where) for where in zip(step.rows, step.lengths, rooms)))
        return DraftTree.from_lists(list(drafts), self.session.device, list(parents))


class StockScriptedCandidateGenerator(HfCandidateGenerator):
    """Drafts from a [`Script`] in transformers' loop.

    Its first cycle, which also reads the prompt, gets no draft: our loop drafts only after the first token, and so
    both see the same drafts in the same cycles.
    """

    def __init__(self, script: Script, num_speculative_tokens: int):
        self.script, self.num_speculative_tokens = script, num_speculative_tokens
        self.has_begun = False

    def get_candidates(self, input_ids: torch.LongTensor, **kwargs) -> tuple[torch.LongTensor, None]:
        length = input_ids.shape[1]
        room = len(self.script.texts[0]) - length - 1
        draft = self.script.draft(0, length, min(room, self.num_speculative_tokens)) if self.has_begun else []
        self.has_begun = True
        return torch.cat([input_ids, input_ids.new_tensor([draft])], dim=1) if draft else input_ids, None

    def update_candidate_strategy(self, input_ids, scores, num_matches) -> None:
        pass


def scripted_speculator(script: Script, num_speculative_tokens: int) -> Speculator:
    """Speculator for `generate(assistant=...)`."""
    if "scripted_benchmark" not in methods():
        register_candidate_generator("scripted_benchmark", ScriptedCandidateGenerator)
    config = SpeculativeConfig(method="scripted_benchmark", num_speculative_tokens=num_speculative_tokens)
    return Speculator(config, ScriptedCandidateGenerator, script)


@contextmanager
def stock_drafts_from(model: PreTrainedModel, generator: HfCandidateGenerator) -> Iterator[None]:
    """Lets transformers' assisted decoding of `model` draft with `generator`.

    Assisted decoding reads the whole prompt even if it is given keys and values of it; inside it continues from them,
    as plain generate does.
    """
    prepare = model.prepare_inputs_for_generation

    @functools.wraps(prepare)
    def prepare_the_rest(input_ids, *args, **kwargs):
        cache = kwargs.get(CACHE_FIELD)
        if kwargs.get("is_first_iteration") and cache is not None and cache.get_seq_length():
            kwargs["next_sequence_length"] = input_ids.shape[1] - cache.get_seq_length()
        return prepare(input_ids, *args, **kwargs)

    model._get_candidate_generator = lambda *args, **kwargs: generator
    model.prepare_inputs_for_generation = prepare_the_rest
    try:
        yield
    finally:
        del model._get_candidate_generator, model.prepare_inputs_for_generation


# -------------------------------------------------------------------------------------------------- models and prompts


def without_end(model: PreTrainedModel) -> PreTrainedModel:
    """The model without an end-of-sequence token, so that all texts have the length asked for."""
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def random_prompts(batch_size: int, context: int, vocab_size: int, seed: int = 0) -> torch.LongTensor:
    """Prompts `(B, context)` that differ in their last token only, so that the same cache serves all rows."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, (context - 1 + batch_size,), generator=generator)
    return torch.cat([tokens[: context - 1].expand(batch_size, -1), tokens[context - 1 :, None]], dim=1)


def prefilled_cache(model: PreTrainedModel, input_ids: torch.LongTensor) -> DynamicCache:
    """Keys and values of all tokens of `input_ids` `(1, P)` but the last."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids[:, :-1], **{CACHE_FIELD: cache}, use_cache=True, logits_to_keep=1)
    return cache


def demo_prompts(count: int, context: int, seed: int = 0) -> torch.LongTensor:
    """Windows `(count, context)` of Python sources that the embedded models were not trained on."""
    from tools.build_demo.data import python_sources

    tokenizer = demo.load_tokenizer()
    texts = python_sources().validation
    encoded = [tokenizer(text, verbose=False)["input_ids"] for text in texts]
    windows = [
        tokens[start : start + context] for tokens in encoded for start in range(0, len(tokens) - context + 1, context)
    ]
    if len(windows) < count:
        raise SystemExit(f"The held-out sources have {len(windows)} windows of {context} tokens, {count} are needed.")
    return torch.tensor(random.Random(seed).sample(windows, count))
