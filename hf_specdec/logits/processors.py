"""The host's logits processors, sorted by what they look at.

Processors that read only the scores run vectorised over all nodes of a draft, and so do the masks of a grammar that
this package knows. Those that read the tokens before a position must be shown exactly the sequence that plain
generation would have shown them, so they run along the accepted path, position by position. Processors that this
package does not know may keep state or depend on their place in the batch; they see whole batches of equal length,
once per position, as in plain generation.

Shapes: B rows of a call, R rows of it, L tokens so far, M scores, V vocabulary, W words of a grammar's mask.
"""

from __future__ import annotations

import copy
import inspect
from functools import reduce
from typing import Any

import numpy as np
import torch
from transformers.generation import logits_process as hf
from transformers.generation.logits_process import LogitsProcessorList

from ..errors import SpecConfigError, shown
from .grammar.masks import GrammarMask, RowGrammars
from .warpers import TOGETHER, Warpers, and_then


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
    hf.WhisperTimeStampLogitsProcessor,
}


class ProcessorStack:
    """The processors of one `generate()` call, in the host's order; `grammar` is that of one of them."""

    def __init__(self, processors: LogitsProcessorList, grammar: RowGrammars | None = None):
        self.processors: LogitsProcessorList = processors
        self.grammar: RowGrammars | None = grammar
        # Where a processor takes more than tokens and scores, transformers' own list says what is missing.
        signatures = [inspect.signature(type(processor).__call__) for processor in processors]
        asks_more = any(len(signature.parameters) > 3 for signature in signatures)
        self._list = LogitsProcessorList if asks_more else _Processors
        self._run = self._list(reduce(and_then, processors, []))
        kinds = [type(processor) for processor in processors if not self._is_grammar(processor)]
        # One that is not the grammar reads the tokens before a position; or the grammar does.
        self.walks: bool = any(kind not in _POSITION_INDEPENDENT for kind in kinds)
        self.reads_tokens: bool = self.walks or grammar is not None
        # Without unknown ones rows are processed one by one.
        self.unknown_names: list[str] = [type(one).__name__ for one in processors if not self._is_known(one)]

    def _is_grammar(self, processor: Any) -> bool:
        return self.grammar is not None and processor is self.grammar.processor

    def _is_known(self, processor: Any) -> bool:
        kind = type(processor)
        return kind in _POSITION_INDEPENDENT or kind in _ROW_WISE or self._is_grammar(processor)

    def __bool__(self) -> bool:
        return len(self.processors) > 0

    @property
    def signature(self) -> tuple[Any, ...] | None:
        """Equal for stacks that make the same of all scores; `None` where more than the scores is read."""
        if self.reads_tokens:
            return None

        def hashable(value: Any) -> tuple[Any, ...] | str:
            return tuple(value.flatten().tolist()) if torch.is_tensor(value) else repr(value)

        return tuple(
            (type(processor), *((name, hashable(value)) for name, value in vars(processor).items()))
            for processor in self.processors
        )

    @property
    def runs_in_graphs(self) -> bool:
        """Whether none asks anything of the host, so that a graph can repeat them with their settings."""
        return all(type(processor) in TOGETHER for processor in self.processors)

    def known_only(self) -> ProcessorStack:
        """Leaves out the unknown ones: what a draft model may apply to its own logits without anyone noticing."""
        return ProcessorStack(LogitsProcessorList(filter(self._is_known, self.processors)), self.grammar)

    def all_nodes(self, logits: torch.Tensor, masks: np.ndarray | None = None) -> torch.Tensor:
        """Scores of all nodes at once, in float32, of logits `(..., V)`; a grammar needs its masks `(..., W)`."""
        if not self.processors:
            return logits.float()
        flat = logits.reshape(-1, logits.shape[-1])
        if len(self._run) == 1 and isinstance(self._run[0], Warpers):
            return self._run[0](None, flat).view(logits.shape)
        no_tokens = torch.empty((flat.shape[0], 0), dtype=torch.long, device=flat.device)
        run = self._run if masks is None else self._masking(self._run, masks.reshape(-1, masks.shape[-1]))
        return run(no_tokens, flat.to(torch.float32, copy=True)).view(logits.shape)

    def rows(
        self,
        sequences: list[torch.LongTensor],
        logits: torch.Tensor,
        rows: list[int],
        masks: np.ndarray | None = None,
    ) -> torch.Tensor:
        """Scores `(R, V)` after the tokens `(L,)` of each row, from logits `(R, V)`; `rows` are those of the call."""
        if self.grammar is not None and masks is None:
            texts = [tokens.tolist() for tokens in sequences]
            masks = np.stack([self.grammar.mask_after(*row, is_drafted=True) for row in zip(rows, texts)])
        if not self.walks:
            return self.all_nodes(logits, masks)
        groups: dict[int, list[int]] = {}
        for index, sequence in enumerate(sequences):
            groups.setdefault(len(sequence), []).append(index)
        if len(groups) == 1:
            return self._for(rows, masks)(torch.stack(sequences), logits.float().clone())
        scores = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        for members in groups.values():
            tokens = torch.stack([sequences[index] for index in members])
            run = self._for([rows[index] for index in members], None if masks is None else masks[members])
            scores[members] = run(tokens, logits[members].float())
        return scores

    def whole_batch(self, tokens: torch.LongTensor, logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """As `rows`, for unknown processors: one call with the tokens `(B, L)` of all rows; other rows have zeros."""
        batch = logits.new_zeros((tokens.shape[0], logits.shape[-1]), dtype=torch.float32)
        batch[rows] = logits.float()
        return self._run(tokens, batch)[rows]

    def _for(self, rows: list[int], masks: np.ndarray | None) -> LogitsProcessorList:
        """The processors with their per-row settings cut to these rows."""
        selected = self._list()
        for processor in self._run:
            ignored = getattr(processor, "prompt_ignore_length", None)
            if torch.is_tensor(ignored):
                processor = copy.copy(processor)
                processor.prompt_ignore_length = ignored[rows]
            selected.append(processor)
        return selected if masks is None else self._masking(selected, masks)

    def _masking(self, run: LogitsProcessorList, masks: np.ndarray) -> LogitsProcessorList:
        """The processors with masks `(M, W)` in the place of the grammar's."""
        masking = GrammarMask(masks, self.grammar.grammar.allows_rest)
        return self._list(masking if self._is_grammar(processor) else processor for processor in run)


class _Processors(LogitsProcessorList):
    """Processors of tokens and scores alone, whose signatures are not read anew for every node."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.FloatTensor:
        width = scores.shape[-1]
        for processor in self:
            scores = processor(input_ids, scores)
        if not torch.is_tensor(scores) or scores.dim() != 2 or scores.shape[1] > width:
            raise SpecConfigError(
                f"Logits processors return scores as they are given them, for {width} tokens, got {shown(scores)}. "
                "Look at those that are your own."
            )
        return scores
