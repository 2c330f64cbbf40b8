"""Output of `generate()`: the host's own, with the statistics attached."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from ..logits.recorder import StepRecorder
from ..logits.verifier import take_nodes
from ..metrics import SpecDecodingStats
from ..target_facts import cache_name_among


if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig


# The host's field for the cache.
CACHE_FIELD = cache_name_among([field.name for field in fields(GenerateDecoderOnlyOutput)])


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput` with one more field.

    Args:
        speculative (`SpecDecodingStats`): Drafts, acceptance and time of the call.
    """

    speculative: SpecDecodingStats | None = None


@dataclass
class SpeculativeEncoderDecoderOutput(GenerateEncoderDecoderOutput):
    """`GenerateEncoderDecoderOutput` with the attribute `speculative`, a [`SpecDecodingStats`].

    It is no field: Whisper's `generate()` cuts all fields of an output into rows.
    """

    @property
    def speculative(self) -> SpecDecodingStats | None:
        return vars(self).get("_speculative")

    @classmethod
    def of(
        cls, source: Any, hidden_states: Any, stats: SpecDecodingStats, **fields: Any
    ) -> SpeculativeEncoderDecoderOutput:
        """The output of a call, with the states of its encoder if those of the decoder were asked for.

        Args:
            source (`ModelOutput`): The encoder's output.
            hidden_states (`tuple`, *optional*): The decoder's, of all steps.
            stats (`SpecDecodingStats`): Drafts, acceptance and time of the call.
            fields: As they are.
        """
        if hidden_states is not None:
            fields |= {
                "decoder_hidden_states": hidden_states,
                "encoder_hidden_states": getattr(source, "hidden_states", None),
            }
        output = cls(**fields)
        vars(output)["_speculative"] = stats
        return output


class OutputRecorder:
    """The optional fields of the returned output.

    Args:
        batch_size (`int`): B.
        config (`GenerationConfig`): Says which fields are asked for.

    Attributes:
        wants_steps (`bool`): Something is returned for each token.
    """

    def __init__(self, batch_size: int, config: GenerationConfig):
        wants_dict = config.return_dict_in_generate
        self.scores: StepRecorder | None = StepRecorder(batch_size) if wants_dict and config.output_scores else None
        self.logits: StepRecorder | None = StepRecorder(batch_size) if wants_dict and config.output_logits else None
        self.wants_states: bool = bool(wants_dict and config.output_hidden_states)
        self.prompt_states: tuple[Any, ...] | None = None
        self.wants_steps: bool = self.wants_states or self.scores is not None or self.logits is not None
        self._batch_size = batch_size
        self._states: list[StepRecorder] = []

    def add(
        self,
        rows: list[int],
        path: torch.Tensor,
        counts: list[int],
        logits: torch.Tensor,
        hidden_states: Any,
    ) -> None:
        """Adds the first `counts[i]` nodes of each row's `path` `(R, M)`.

        From a forward with logits `(R, T, V)` and, per layer, hidden states `(R, T, H)`. Scores are added by others.
        """
        if self.logits is not None:
            self.logits.add(rows, take_nodes(logits, path).float(), counts)
        if self.wants_states:
            self._add_states(rows, path, hidden_states, counts)

    def _add_states(self, rows, path, hidden_states, counts) -> None:
        if self.prompt_states is None:
            # The first token comes from the prompt's states, which are returned whole.
            self.prompt_states = hidden_states
            self._states = [StepRecorder(self._batch_size) for _ in hidden_states]
            return
        for recorder, states in zip(self._states, hidden_states):
            recorder.add(rows, take_nodes(states, path), counts)

    def cut(self, lengths: list[int]) -> None:
        """Drops what goes beyond the tokens that each row has generated."""
        for recorder in filter(None, (self.scores, self.logits)):
            recorder.cut(lengths)
        for recorder in self._states:
            recorder.cut([length - 1 for length in lengths])

    def hidden_states(self) -> tuple[Any, ...] | None:
        """Tuples over layers, one for each generated token, `(B, P, H)` for the first one and `(B, 1, H)` after it."""
        if not self.wants_states:
            return None
        layers = [recorder.steps() for recorder in self._states]
        later = [tuple(state[:, None] for state in step) for step in zip(*layers)]
        return (self.prompt_states, *later)
