"""The host's logits processors, sorted by what they look at.

Processors that read only the scores run vectorised over all nodes of a draft. Those that read the tokens before a
position must be shown exactly the sequence that plain generation would have shown them, so they run along the
accepted path, position by position. Processors that this package does not know may keep state or depend on their
place in the batch; they see whole batches of equal length, once per position, as in plain generation.

Shapes: R rows, L tokens so far, V vocabulary.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.generation import logits_process as hf
from transformers.generation.logits_process import LogitsProcessorList

from .warpers import without_sort


# Read the scores alone.
_POSITION_INDEPENDENT = {
    hf.TemperatureLogitsWarper,
    hf.TopKLogitsWarper,
    hf.TopPLogitsWarper,
    hf.MinPLogitsWarper,
    hf.TypicalLogitsWarper,
    hf.EpsilonLogitsWarper,
    hf.EtaLogitsWarper,
    hf.SuppressTokensLogitsProcessor,
    hf.InfNanRemoveLogitsProcessor,
    hf.LogitNormalization,
    hf.TopHLogitsWarper,
}

# Read a row's tokens too, each row by itself and without memory.
_ROW_WISE = {
    hf.RepetitionPenaltyLogitsProcessor,
    hf.NoRepeatNGramLogitsProcessor,
    hf.SequenceBiasLogitsProcessor,
    hf.NoBadWordsLogitsProcessor,
    hf.MinLengthLogitsProcessor,
    hf.MinNewTokensLengthLogitsProcessor,
    hf.ForcedBOSTokenLogitsProcessor,
    hf.ForcedEOSTokenLogitsProcessor,
    hf.ExponentialDecayLengthPenalty,
    hf.SuppressTokensAtBeginLogitsProcessor,
    hf.WatermarkLogitsProcessor,
}


class ProcessorStack:
    """The processors of one `generate()` call, in the host's order.

    Args:
        processors (`LogitsProcessorList`): What `generate()` prepared: penalties, user processors, warpers.
    """

    def __init__(self, processors: LogitsProcessorList):
        self.processors = processors
        self._run = LogitsProcessorList(map(without_sort, processors))
        kinds = [type(processor) for processor in processors]
        self.reads_tokens: bool = any(kind not in _POSITION_INDEPENDENT for kind in kinds)
        self.knows_all: bool = all(kind in _POSITION_INDEPENDENT or kind in _ROW_WISE for kind in kinds)

    def __bool__(self) -> bool:
        return len(self.processors) > 0

    @property
    def unknown_names(self) -> list[str]:
        """Types of the processors that this package does not know."""
        kinds = [type(processor) for processor in self.processors]
        return [kind.__name__ for kind in kinds if kind not in _POSITION_INDEPENDENT and kind not in _ROW_WISE]

    @property
    def signature(self) -> tuple[Any, ...] | None:
        """Equal for stacks that make the same of all scores; `None` where more than the scores is read."""
        if self.reads_tokens:
            return None
        return tuple(
            (type(one), *((name, _hashable(value)) for name, value in vars(one).items())) for one in self.processors
        )

    def known_only(self) -> ProcessorStack:
        """Leaves out the unknown ones: what a draft model may apply to its own logits without anyone noticing."""
        known = [p for p in self.processors if type(p) in _POSITION_INDEPENDENT or type(p) in _ROW_WISE]
        return ProcessorStack(LogitsProcessorList(known))

    def all_nodes(self, logits: torch.Tensor) -> torch.Tensor:
        """Scores of all nodes at once, shape `(..., V)`, float32. Only for stacks that do not read tokens."""
        scores = logits.float()
        if not self.processors:
            return scores
        flat = scores.reshape(-1, scores.shape[-1])
        no_tokens = torch.empty((flat.shape[0], 0), dtype=torch.long, device=flat.device)
        return self._run(no_tokens, flat.clone()).view(scores.shape)

    def rows(self, sequences: list[torch.LongTensor], logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """Scores of one position of each row.

        Args:
            sequences (`list[torch.LongTensor]`): Each row's tokens so far, padding included, shape `(L,)`.
            logits (`torch.Tensor` of shape `(R, V)`): Logits of the position after them.
            rows (`list[int]`): Index of each row in the call's batch.

        Returns:
            `torch.FloatTensor` of shape `(R, V)`.
        """
        if not self.reads_tokens:
            return self.all_nodes(logits)
        groups: dict[int, list[int]] = {}
        for index, sequence in enumerate(sequences):
            groups.setdefault(len(sequence), []).append(index)
        if len(groups) == 1:
            return self._for(rows)(torch.stack(sequences), logits.float().clone())
        scores = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        for members in groups.values():
            tokens = torch.stack([sequences[index] for index in members])
            processors = self._for([rows[index] for index in members])
            scores[members] = processors(tokens, logits[members].float())
        return scores

    def whole_batch(self, tokens: torch.LongTensor, logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """Like `rows`, for stacks with unknown processors: they are called once, with the whole batch.

        Args:
            tokens (`torch.LongTensor` of shape `(B, L)`): All rows of the call, finished ones padded.
            logits (`torch.Tensor` of shape `(R, V)`): Logits of the rows `rows`; the others are shown zeros.
        """
        batch = logits.new_zeros((tokens.shape[0], logits.shape[-1]), dtype=torch.float32)
        batch[rows] = logits.float()
        return self._run(tokens, batch)[rows]

    def _for(self, rows: list[int]) -> LogitsProcessorList:
        """The processors with their per-row settings cut to these rows."""
        selected = [_select_rows(processor, rows) for processor in self._run]
        return LogitsProcessorList(selected)


def _hashable(value):
    return tuple(value.flatten().tolist()) if torch.is_tensor(value) else repr(value)


def _select_rows(processor, rows: list[int]):
    ignored = getattr(processor, "prompt_ignore_length", None)
    if not torch.is_tensor(ignored):
        return processor
    processor = copy.copy(processor)
    processor.prompt_ignore_length = ignored[rows]
    return processor
