"""The recipe of draft models: language-model training, distillation from the target, or a mixture of both.

Distillation minimises KL(target || draft), best on the target's own text, which is what a draft has to predict
(DistillSpec, Zhou et al. 2023, arXiv:2310.08461). Shapes as in `recipe.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from ...errors import CheckpointFormatError, SpecConfigError
from ...target_facts import vocabulary_size
from ...training.reading import IGNORED, Reading, check_plain_head
from ...training.recipe import Recipe, best_tokens
from . import DraftModelTraining


class DraftModelRecipe(DraftModelTraining, Recipe):
    """A small causal language model."""

    method = "draft_model"
    weight_decay: ClassVar[float] = 0.1
    muon = True
    num_drafts = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.draft_model is None) == (self.from_scratch is None):
            which = "neither" if self.draft_model is None else "both"
            raise SpecConfigError(
                "Training a draft model needs either `draft_model`, a checkpoint to train on, or `from_scratch`, the "
                f"sizes of a new one; got {which}."
            )

    def check(self, target: PreTrainedModel) -> None:
        if self.kl_weight:
            check_plain_head(target, "distillation")

    def build(self, target: PreTrainedModel) -> PreTrainedModel:
        network = self._new_model(target) if self.draft_model is None else self._load(self.draft_model)
        draft_size, target_size = vocabulary_size(network), vocabulary_size(target)
        if draft_size > target_size:
            raise CheckpointFormatError(
                f"The draft model has {draft_size} tokens, the target {target_size}. Pass a draft model with the "
                "target's tokenizer."
            )
        check_plain_head(network, "the loss")
        return network

    def _new_model(self, target: PreTrainedModel) -> LlamaForCausalLM:
        text = target.config.get_text_config(decoder=True)
        of_target = {
            "vocab_size": vocabulary_size(target),
            "max_position_embeddings": getattr(text, "max_position_embeddings", 2048),
            "tie_word_embeddings": True,
            "bos_token_id": text.bos_token_id,
            "eos_token_id": text.eos_token_id,
        }
        unknown = sorted(set(self.from_scratch) - set(LlamaConfig().to_dict()))
        if unknown:
            raise SpecConfigError(f"`from_scratch` names sizes that LlamaConfig does not have: {', '.join(unknown)}.")
        try:
            network = LlamaForCausalLM(LlamaConfig(**of_target | dict(self.from_scratch)))
        except (ValueError, TypeError, RuntimeError, ZeroDivisionError) as error:
            raise SpecConfigError(f"`from_scratch` gives no model: {error}") from error
        network.generation_config.pad_token_id = target.generation_config.pad_token_id
        return network

    def _load(self, name: str) -> PreTrainedModel:
        try:
            return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise CheckpointFormatError(f"The draft model '{name}' cannot be loaded: {error}") from error

    def losses(self, network: nn.Module, reading: Reading) -> Iterator[torch.Tensor | float]:
        labels = reading.next_tokens(1).flatten()
        # Ids that only the target has are padding of its vocabulary.
        labels = labels.masked_fill(labels >= vocabulary_size(network), IGNORED)
        positions = (labels != IGNORED).nonzero()[:, 0]
        output = self._hidden(network, reading).flatten(0, 1)[positions]
        head = network.get_output_embeddings()
        yield self.token_loss(reading, head, output, labels[positions], positions, head.weight.shape[0])

    def _hidden(self, network: nn.Module, reading: Reading) -> torch.Tensor:
        """Computes the states that the draft's lm_head reads, `(B, T, H)`."""
        tokens = reading.tokens.clamp(max=vocabulary_size(network) - 1)
        return network.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state

    def drafts(self, network: nn.Module, reading: Reading, anchors: torch.LongTensor) -> torch.LongTensor:
        best = best_tokens(network.get_output_embeddings(), self._hidden(network, reading))
        # Draft d of a cycle at t is the model's prediction at t + 1 + d, given the text up to there.
        places = [(anchors + 1 + draft).clamp(max=best.shape[1] - 1) for draft in range(self.num_drafts)]
        return torch.stack([best.gather(1, place) for place in places])[:, None]

    def write(
        self, network: PreTrainedModel, folder: Path, *, tokenizer: PreTrainedTokenizerBase | None = None, **about: Any
    ) -> None:
        network.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
