"""OpenAI's penalties on tokens that an answer has already.

Shapes: B rows, L tokens so far, V vocabulary.
"""

from __future__ import annotations

import torch
from transformers.generation.logits_process import LogitsProcessor


class PenaltiesLogitsProcessor(LogitsProcessor):
    """Takes from each token's score what its occurrences in the generated text cost, and the first one in addition."""

    def __init__(self, frequency: float, presence: float, prompt_length: int):
        self.frequency = frequency
        self.presence = presence
        self.prompt_length = prompt_length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Scores `(B, V)` after `input_ids` `(B, L)`."""
        generated = input_ids[:, self.prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(1, generated, scores.new_ones(generated.shape))
        return scores - self.frequency * counts - self.presence * (counts > 0)
