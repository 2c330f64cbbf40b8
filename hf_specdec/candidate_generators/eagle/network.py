"""EAGLE heads: a decoder layer that extrapolates the target's hidden states, one token at a time.

EAGLE-1 (arXiv:2401.15077) and EAGLE-2 (arXiv:2406.16858) share one network, EAGLE-3 (arXiv:2503.01840) has another.
Entry t of the draft is made of the embedding e of token t + 1 and a state of token t: the target's or the draft's own.
With W the fully connected layer `fc`:

    EAGLE-1    x_0 = W [e ; f] + b                    f: after the target's final norm
               y = x_0 + Attn(x_0),                   x = y + MLP(norm(y))
               logits = lm_head of the target (x),    fed back: x
    EAGLE-3    g = W [s_1 ; s_2 ; s_3]                s_a: the residual stream between layers of the target
               y = g + Attn([norm(e) ; norm(g)]),     x = y + MLP(norm(y))
               logits = lm_head (norm(x)),            fed back: x, in the place of g

P-EAGLE (arXiv:2602.01469) is an EAGLE-3 head with a trained state for masks. Further layers are ordinary ones. A norm
or a bias is there if and only if its tensor is in the checkpoint; which, and what else a checkpoint says, is in
[`EagleConfig`].

Shapes: R rows, T entries, S slots of the draft's cache, h and th hidden sizes of draft and target, A captured states,
V vocabulary of the target, U that of the draft.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import nn

from ...checkpoints.draft_reader import DraftConfig
from ...checkpoints.loading import save_checkpoint
from ...checkpoints.reader import CheckpointReader
from ...errors import SpecConfigError
from ...kernels.heads import KeyValueCache
from ...layers.draft_network import DraftNetwork, TargetParts, is_copy
from ...layers.llama import DecoderLayer, GatedMLP, RMSNorm, RotaryAttention, with_query_groups
from ...layers.plan import LayerPlan, Normed, Way, bind_linears, norm_of, plan_layers, planned
from ...settings import SpeculativeConfig
from ...target.masks import FULL, Span
from ...transfers import RowNumbers, last_of_each
from .formats import EagleConfig, EagleReader, stored_tensors


class EaglePlan(NamedTuple):
    """Bound functions of an EAGLE head; `project` is that of EAGLE-1, in front of its layers."""

    embed: Callable[[torch.LongTensor], torch.Tensor]
    project: Callable[[torch.Tensor], Sequence[torch.Tensor]] | None
    norm_embedded: Callable[[torch.Tensor], torch.Tensor]
    norm_hidden: Callable[[torch.Tensor], torch.Tensor]
    layers: list[LayerPlan]
    head: Callable[[torch.Tensor], torch.Tensor]


class EagleNetwork(DraftNetwork):
    """An EAGLE head. What it shares is read where the target has it."""

    reader_class: ClassVar[type[EagleReader]] = EagleReader

    def __init__(self, config: EagleConfig):
        super().__init__(config)
        self.is_eagle3: bool = config.method == "eagle3"
        self.has_targets_embedding: bool = not self.is_eagle3
        # What is fed back has gone through the final norm.
        self._feeds_normed = config.norm_output or not self.is_eagle3
        # Keys of the states that `fuse` takes, see [`captured_states`].
        self.target_hidden_states: tuple[int | str, ...] = config.aux_layer_ids or ("last",)
        slides = FULL if config.sliding_window is None else Span("sliding", config.sliding_window)
        layers = range(config.num_hidden_layers)
        self._layer_spans = tuple(FULL if index in config.full_layers else slides for index in layers)
        self.spans: tuple[Span, ...] = tuple(dict.fromkeys(self._layer_spans))
        size, vocab_size = config.hidden_size, config.vocab_size
        width, count = config.target_hidden_size, config.num_states
        self.embed_tokens: nn.Embedding | None = nn.Embedding(vocab_size, size) if config.own_embedding else None
        read = count * width if self.is_eagle3 else size + width
        self.fc: nn.Module = nn.Linear(read, size, "fc" in config.biases) if config.has_fc else nn.Identity()
        self.layers: nn.ModuleList = nn.ModuleList(EagleLayer(config, index) for index in layers)
        self.norm: nn.Module = _norm(config, "norm", size)
        self.lm_head: nn.Linear | None = (
            nn.Linear(size, config.draft_vocab_size, bias=False) if config.own_head else None
        )
        self.register_buffer("token_ids", torch.arange(config.draft_vocab_size) if config.has_token_ids else None)
        self._target: TargetParts | None = None
        if not self.is_eagle3:
            return
        # Over all captured states together in some variants, over each of them in EAGLE-3.1.
        self.input_norm: nn.Module = _norm(config, "input_norm", count * width)
        chunks = range(count) if "fc_norm.0" in config.norms else ()
        self.fc_norm: nn.ModuleList = nn.ModuleList(_norm(config, f"fc_norm.{index}", width) for index in chunks)
        if config.mask_token_id is not None:
            self.mask_hidden: nn.Parameter = nn.Parameter(torch.zeros(count * width))

    @property
    def spec_method(self) -> str:
        return self.config.method

    def fitted(
        self, config: SpeculativeConfig, target_model: nn.Module, reader: CheckpointReader | None = None
    ) -> EagleNetwork:
        head = "The head" if reader is None else f"'{reader.name}'"
        if config.method in ("eagle", "eagle3") and config.method != self.config.method:
            raise SpecConfigError(
                f"{head} is for spec_method='{self.config.method}', got '{config.method}'. Change it, or "
                "leave the method out: it is read from the checkpoint."
            )
        # Those of a checkpoint have been read so.
        asked, states = getattr(config.options, "aux_layer_ids", None), self.config.aux_layer_ids
        if asked is not None and (not states or (reader is None and tuple(asked) != states)):
            raise SpecConfigError(
                f"`aux_layer_ids`={list(asked)} names the states between the target's layers that an EAGLE-3 head "
                f"reads when it is loaded; {head} reads {list(states) or 'the one after the final norm'}. Leave it "
                "out."
            )
        is_parallel, wanted = self.config.mask_token_id is not None, getattr(config.options, "parallel_drafting", None)
        if wanted not in (None, is_parallel):
            does = "all tokens at once, with mask tokens" if is_parallel else "one token after the other"
            raise SpecConfigError(
                f"`parallel_drafting`={wanted}, and this head was trained to draft {does}. Leave it out, or pass "
                "another head."
            )
        return super().fitted(config, target_model, reader)

    def attach(self, target_model: nn.Module) -> EagleNetwork:
        """Reads from the target what the head has none of its own of; a mere copy of the embedding is given up."""
        self._target = TargetParts(target_model)
        if self.embed_tokens is not None and is_copy(self.embed_tokens.weight, self._target.embedding.weight):
            self.embed_tokens = None
            self.config: DraftConfig = replace(self.config, own_embedding=False)
        return self

    def fuse(self, states: dict[int | str, torch.Tensor]) -> torch.Tensor:
        """Input `hidden` of `forward`, `(R, T, h)`, for entries with states `(R, T, th)` of the target."""
        like = self._weight
        fused = torch.cat([states[key].to(like) for key in self.target_hidden_states], dim=-1)
        if not self.is_eagle3:
            return fused
        fused = self.input_norm(fused)
        if self.fc_norm:
            chunks = fused.split(self.config.target_hidden_size, dim=-1)
            fused = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks)], dim=-1)
        return self.fc(fused)

    def mask_state(self) -> torch.Tensor:
        """The state `(1, 1, h)` of masks, made as those of the target are."""
        parts = self.mask_hidden.split(self.config.target_hidden_size)
        return self.fuse({key: part[None, None] for key, part in zip(self.target_hidden_states, parts)})

    def forward(
        self,
        tokens: torch.LongTensor,  # (R, T), in the target's ids
        hidden: torch.Tensor,  # (R, T, h), from `fuse`, or what an earlier call fed back
        positions: torch.LongTensor,  # (R | 1, T), those of the states' tokens
        # (R | 1, 1, T, S), additive in the head's dtype or boolean, one for each of several `spans`. `None`: causal,
        # or where T is 1 everything.
        mask: torch.Tensor | Mapping[Span, torch.Tensor] | None,
        cache: KeyValueCache | None = None,  # keys and values are put there; `None`: the entries see each other alone
        bound: int | None = None,  # above all positions; with it, angles are looked up
        counts: RowNumbers | None = None,  # (R,): of these entries only the last one predicts
        predicts: bool = False,  # returns the logits, in the place of what they are made of
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What is fed back as `hidden`, and what `logits` reads, `(R, T, h)` each; with counts `(R, h)`."""
        plan = planned(self, hidden, cache)
        groups = self.config.num_attention_heads // self.config.num_key_value_heads
        masks = dict(mask) if isinstance(mask, Mapping) else dict.fromkeys(self.spans, mask)
        if mask is not None:
            masks = {span: with_query_groups(one, groups) for span, one in masks.items()}
        angles, embedded = self.angles(positions, hidden, bound), plan.embed(tokens)
        if plan.project is not None:
            (stream,) = plan.project(torch.cat((embedded, hidden), dim=-1))
            read = plan.norm_embedded(stream)
        else:
            state = plan.norm_hidden(hidden)
            stream = state if self.config.norm_before_residual else hidden
            read = torch.cat((plan.norm_embedded(embedded), state), dim=-1)
        for layer, layer_plan, span in zip(self._modules["layers"], plan.layers, self._layer_spans):
            stream, read = layer.advance(layer_plan, stream, read, angles, masks[span], cache)
        fed_back = read if self._feeds_normed else stream
        if counts is not None:
            fed_back, read = last_of_each(fed_back, counts), last_of_each(read, counts)
            # On a CPU any number of tokens goes the same way.
            plan = plan if read.is_cpu else planned(self, read, cache)
        return fed_back, plan.head(read) if predicts else read

    def plan(self, way: Way, dtype: torch.dtype) -> EaglePlan:
        """What it computes with."""
        layers = plan_layers(self._modules["layers"], Normed(norm_of(self._modules["norm"])), way, dtype)
        norms = layers[0].norms
        project = None if self.is_eagle3 else bind_linears(way, dtype, [self._modules["fc"]])[0]
        head, scale = self.bind_head(way, dtype), self.config.logit_scale
        scaled_head = head if scale == 1 else lambda output: head(output) * scale
        norm_embedded, norm_hidden = norms["input_layernorm"], norms.get("hidden_norm", norms[None])
        return EaglePlan(self.bind_embedding(), project, norm_embedded, norm_hidden, layers, scaled_head)

    def logits(self, output: torch.Tensor, cache: KeyValueCache | None = None) -> torch.Tensor:
        """Logits `(..., U)` over the draft's vocabulary, from the second tensor of `forward`, `(..., h)`."""
        return planned(self, output, cache).head(output)

    def save(self, folder: str | Path) -> None:
        """Writes `config.json` and `model.safetensors` in the layout of the first publishers; makes the folder."""
        save_checkpoint(folder, self.config.to_dict(), stored_tensors(self.config, self.state_dict()))


class EagleLayer(DecoderLayer):
    """A decoder layer of the Llama or Qwen3 kind, with the norms and biases that its checkpoint has.

    EAGLE-3's first one attends over embedding and state side by side, normed each by itself.
    """

    def __init__(self, config: EagleConfig, index: int):
        name, size, reads_both = f"layers.{index}", config.hidden_size, config.method == "eagle3" and index == 0
        attention, mlp = (
            {bias.removeprefix(part) for bias in config.biases if bias.startswith(part)}
            for part in (f"{name}.self_attn.", f"{name}.mlp.")
        )
        has_head_norms = f"{name}.self_attn.q_norm" in config.norms
        super().__init__(
            RotaryAttention(config, index, attention, has_head_norms, 2 * size if reads_both else size),
            GatedMLP(size, config.intermediate_size, config.hidden_act, mlp),
            _norm(config, f"{name}.input_layernorm", size),
            _norm(config, f"{name}.post_attention_layernorm", size),
        )
        if reads_both:
            self.hidden_norm: nn.Module = _norm(config, f"{name}.hidden_norm", size)


def _norm(config: EagleConfig, name: str, size: int) -> nn.Module:
    return RMSNorm(size, config.rms_norm_eps) if name in config.norms else nn.Identity()
