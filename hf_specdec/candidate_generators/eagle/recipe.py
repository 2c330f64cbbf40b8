"""Recipes of EAGLE heads: EAGLE-1, EAGLE-3 with its training-time test, P-EAGLE; see `training/autoregressive.py`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from ...errors import SpecConfigError
from ...layers.mask_token import mask_token_for
from ...target_facts import decoder_layers, hidden_size, vocabulary_size
from ...training.autoregressive import AutoregressiveRecipe
from ...training.initial_weights import begin_as, begin_near, copy_rows, layer_sizes
from . import Eagle1Training, Eagle3Training, PEagleTraining
from .formats import EagleConfig
from .network import EagleNetwork


class Eagle1Recipe(Eagle1Training, AutoregressiveRecipe):
    """An EAGLE-1 head, which EAGLE-2 drafts with too: regression of the target's next state, and through the target's
    lm_head the next token (Li et al. 2024, arXiv:2401.15077, section 4.2). With more than one step it is HASS. Its
    layer begins as the target's last one.
    """

    method = "eagle"

    def build(self, target: PreTrainedModel) -> EagleNetwork:
        vocab_size = vocabulary_size(target)
        config = EagleConfig(
            method="eagle",
            **layer_sizes(target, hidden_size(target), self.intermediate_size, self.num_layers),
            draft_vocab_size=vocab_size,
            norms=_layer_norms(self.num_layers),
        )
        network = EagleNetwork(config).attach(target)
        # It reads about what the target's last layer reads: the embedding, and a share of the state.
        begin_as(network.layers[0], decoder_layers(target)[-1])
        begin_near(network.fc, (1.0, 0.3))
        return network

    def step_loss(self, fed: torch.Tensor, token_loss: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return F.smooth_l1_loss(fed.float(), states.to(fed.device).float()) + self.token_weight * token_loss


class Eagle3Recipe(Eagle3Training, AutoregressiveRecipe):
    """An EAGLE-3 head, on states from between the target's layers and with an lm_head of its own.

    It shares the target's embedding, which is frozen, and its lm_head begins as a copy of the target's rows, or is the
    target's; a head of another hidden size begins with the main directions of both, and trains its own embedding.
    """

    method = "eagle3"
    own_embedding: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.own_head and (self.hidden_size or self.draft_vocab_size):
            raise SpecConfigError(
                "`own_head=False` shares the target's lm_head, so that `hidden_size` and `draft_vocab_size` must be "
                f"left out, got {self.hidden_size} and {self.draft_vocab_size}."
            )

    def check(self, target: PreTrainedModel) -> None:
        super().check(target)
        self.check_layers(target, "aux_layer_ids", len(decoder_layers(target)))
        if self.draft_vocab_size > vocabulary_size(target):
            raise SpecConfigError(
                f"`draft_vocab_size` must be at most {vocabulary_size(target)}, the target's, got "
                f"{self.draft_vocab_size}."
            )

    def build(self, target: PreTrainedModel, **further: Any) -> EagleNetwork:
        num_layers, vocab_size = len(decoder_layers(target)), vocabulary_size(target)
        size = self.hidden_size or hidden_size(target)
        draft_size = self.draft_vocab_size or vocab_size
        layers = self.aux_layer_ids or (min(2, num_layers), num_layers // 2, max(num_layers - 3, 0))
        config = EagleConfig(
            method="eagle3",
            **layer_sizes(target, size, self.intermediate_size, self.num_layers),
            draft_vocab_size=draft_size,
            aux_layer_ids=tuple(sorted(set(layers))),
            norms=("layers.0.input_layernorm", "layers.0.hidden_norm", *_layer_norms(self.num_layers), "norm"),
            own_embedding=self.own_embedding or size != hidden_size(target),
            own_head=self.own_head,
            has_token_ids=draft_size != vocab_size,
            **further,
        )
        network = EagleNetwork(config).attach(target)
        if network.embed_tokens is not None:
            copy_rows(network.embed_tokens, target.get_input_embeddings())
        if network.lm_head is not None:
            copy_rows(network.lm_head, target.get_output_embeddings(), network.token_ids)
        return network

    def prepare(self, network: EagleNetwork, target: PreTrainedModel, tokens: torch.LongTensor) -> None:
        if network.token_ids is None:
            return
        counts = torch.bincount(tokens, minlength=network.config.vocab_size)
        frequent = counts.argsort(descending=True, stable=True)[: len(network.token_ids)]
        network.token_ids.copy_(frequent.sort().values)
        copy_rows(network.lm_head, target.get_output_embeddings(), network.token_ids)


class PEagleRecipe(PEagleTraining, Eagle3Recipe):
    """A P-EAGLE head: an EAGLE-3 head of several layers that drafts `ttt_steps` tokens in one forward, and learns the
    state of the masks in the places of those that it does not know (Hui et al. 2026, arXiv:2602.01469).
    """

    @property
    def num_drafts(self) -> int:
        return self.ttt_steps

    def check(self, target: PreTrainedModel) -> None:
        super().check(target)
        mask_token_for(target, self.mask_token_id)

    def build(self, target: PreTrainedModel, **further: Any) -> EagleNetwork:
        token = mask_token_for(target, self.mask_token_id)
        network = super().build(target, mask_token_id=token, num_parallel_tokens=self.ttt_steps, **further)
        # At zero the norm of a state is as steep as can be.
        torch.nn.init.normal_(network.mask_hidden, std=0.02)
        return network


def _layer_norms(num_layers: int) -> tuple[str, ...]:
    """Names the norms of ordinary layers, of which the first has none before its attention."""
    names = [f"layers.{index}.post_attention_layernorm" for index in range(num_layers)]
    return (*names, *[f"layers.{index}.input_layernorm" for index in range(1, num_layers)])
