"""Gemma 4's assistant: a small model over the keys and values of its target.

It has queries alone: its layers read the keys and values that the target's last layer of each type with some of its
own has left in its slots. A draft begins with the embedding of the anchor beside the state from which the target
predicted it, and goes on with each drafted token beside the assistant's own last state. All tokens of a draft have the
position of the anchor, and see what the target has read, as in transformers' candidate generator for one row,
`SinglePositionMultiTokenCandidateGenerator`. Nothing is kept from cycle to cycle but the state.

Shapes: R rows, H hidden size of the target, S slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...drafting.chain import SteeredChain
from ...drafting.graphs import AnchorStates
from ...drafting.shape import growth_option
from ...drafts import DraftTree
from ...errors import SpecConfigError, UnsupportedModelError
from ...protocol import Commit, DraftStep, Session
from ...target.masks import FULL, Span, additive_mask
from ...target_facts import decoder_layers
from ...transfers import upload
from ..base import CandidateGenerator


if TYPE_CHECKING:
    from ...settings import SpeculativeConfig
    from ...target.model import SlotModel


def lending_layers(target_model: torch.nn.Module) -> dict[str, int]:
    """By type of attention the target's layer whose keys and values an assistant reads.

    Raises:
        UnsupportedModelError: It has none.
    """
    attention = [getattr(layer, "self_attn", None) for layer in decoder_layers(target_model)]
    lending = {
        module.layer_type: index
        for index, module in enumerate(attention)
        if getattr(module, "store_full_length_kv", False)
    }
    if not lending:
        raise UnsupportedModelError(
            f"{type(target_model).__name__} has no layers that share their keys and values, which a Gemma 4 assistant "
            "reads. Use it with the Gemma 4 model that it was made for."
        )
    return lending


class AssistantCandidateGenerator(CandidateGenerator):
    """Drafts chains."""

    target_hidden_states = ("last",)
    default_num_speculative_tokens = 3

    def __init__(self, config: SpeculativeConfig, resources: torch.nn.Module, session: Session):
        super().__init__(config, resources, session)
        self.assistant: Any = resources
        branching = "speculative_token_tree" if config.speculative_token_tree else growth_option(config)
        if branching:
            raise SpecConfigError(
                f"`{branching}` is about trees, and a {type(resources).__name__} drafts chains. Leave it out."
            )
        self.samples_drafts: bool | None = self.asks_to_sample
        self.check_sampled_length()
        self.hidden: AnchorStates = AnchorStates()

    def observe(self, commit: Commit) -> None:
        self.hidden.observe(commit)

    def propose(self, step: DraftStep) -> DraftTree:
        session = self.session
        target = session.target
        if target is None:
            raise SpecConfigError(
                f"A {type(self.assistant).__name__} reads the keys and values of its target, which only this "
                "package's loop hands over. Pass it to generate() as `assistant` or `spec_model`."
            )
        depths = self.draft_depths(step)
        count = max(depths, default=0)
        if count == 0:
            return DraftTree.empty(len(step.rows), session.device)
        chain = SteeredChain(session.sampler, step.rows, step.lengths, bool(self.samples_drafts))
        keys_and_values, masks = self._seen(target)
        # That of the anchor, for all tokens.
        rows = zip(target.cache.lengths, target.leads)
        positions = upload([[length + lead] for length, lead in rows], self.device)
        embedding = target.model.get_input_embeddings()
        tokens, hidden = step.anchor_tokens, self.hidden()[:, None]
        for _ in range(count):
            embedded = embedding(tokens.to(embedding.weight.device)[:, None]).to(self.device)
            inputs = torch.cat([embedded, hidden.to(embedded)], dim=-1)
            logits, hidden = self._read(inputs, positions, keys_and_values, masks)
            tokens = chain.choose(chain.scores(logits[:, -1].to(session.device)))
        return chain.draft(depths)

    @property
    def device(self) -> torch.device:
        return self.assistant.pre_projection.weight.device

    def _read(
        self,
        inputs: torch.Tensor,
        positions: torch.LongTensor,
        keys_and_values: dict[str, tuple[torch.Tensor, torch.Tensor]],
        masks: dict[str, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and the state for the next token, `(R, 1, H)`, of inputs `(R, 1, 2 * H)`."""
        assistant = self.assistant
        states = assistant.model(
            inputs_embeds=assistant.pre_projection(inputs.to(assistant.pre_projection.weight.dtype)),
            attention_mask=masks,
            position_ids=positions,
            shared_kv_states=keys_and_values,
            use_cache=False,
        ).last_hidden_state
        if assistant.config.use_ordered_embeddings:
            logits = assistant.masked_embedding(states, assistant.lm_head.weight)
        else:
            logits = assistant.lm_head(states)
        return logits, assistant.post_projection(states)

    def _seen(self, target: SlotModel) -> tuple[dict[str, tuple[torch.Tensor, torch.Tensor]], dict[str, torch.Tensor]]:
        """By type of attention what the target's slots hold, and the masks `(R, 1, 1, S)` of those that are seen."""
        lengths, columns = target.cache.lengths, max(target.cache.lengths)
        slots = torch.arange(columns, device=self.device)
        starts, ends = (upload(values, self.device)[:, None] for values in (target.starts, lengths))
        visible = (slots >= starts) & (slots < ends)
        if target.hidden is not None:
            width = min(target.hidden.shape[1], columns)
            visible[:, :width] &= ~target.hidden[:, :width].to(self.device)
        # The distance from the last token that was read may be as long as the window.
        window = self.assistant.config.get_text_config().sliding_window
        dtype = self.assistant.pre_projection.weight.dtype
        keys_and_values, masks = {}, {}
        for layer_type, index in lending_layers(target.model).items():
            layer: Any = target.cache.layers[index]
            keys_and_values[layer_type] = tuple(
                states[: len(lengths), :, :columns].to(self.device) for states in (layer.keys, layer.values)
            )
            span = Span("sliding", window + 1) if layer_type == "sliding_attention" else FULL
            distant = span.hidden(ends - 1, slots)
            hidden = ~visible if distant is None else ~visible | distant
            masks[layer_type] = additive_mask(hidden, dtype)[:, None, None]
        return keys_and_values, masks

    def keep_rows(self, keep: list[int]) -> None:
        self.hidden.keep_rows(keep)

    def join(self, other: AssistantCandidateGenerator, numbers: dict[int, int]) -> None:
        self.hidden.join(other.hidden)
