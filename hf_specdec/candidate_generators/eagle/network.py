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

P-EAGLE (arXiv:2602.01469) is an EAGLE-3 head with a trained state for masks, see
[`~candidate_generators.eagle.parallel`]. Further layers are ordinary ones. A norm or a bias is there if and only if
its tensor is in the checkpoint; which, and what else a checkpoint says, is in [`EagleConfig`].

Shapes: R rows, T entries, S slots of the draft's cache, h and th hidden sizes of draft and target, A captured states,
V vocabulary of the target, U that of the draft.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from ...checkpoints.checkpoint import Checkpoint, head_placement, save_checkpoint
from ...checkpoints.header import TargetSizes
from ...checkpoints.loading import check_given, loads_checkpoint
from ...errors import SpecConfigError
from ...layers.draft_network import DraftNetwork, TargetParts, is_copy, loaded_network, new_attention, new_mlp
from ...layers.llama import DecoderLayer, KeyValueCache, RMSNorm, project, with_query_groups
from ...target.masks import FULL, Span
from .formats import EagleConfig, EagleReader, stored_tensors


if TYPE_CHECKING:
    from ...checkpoints.draft_reader import DraftConfig
    from ...settings import SpeculativeConfig


class EagleNetwork(DraftNetwork):
    """An EAGLE head; `Eagle1Network` or `Eagle3Network`.

    The state dict has the names of the published files, with `layers.0` for EAGLE-3's `midlayer`. What a head shares
    with the target, embedding and lm_head, is read where the target has it and is not part of the state dict.

    Args:
        config (`EagleConfig`): What the head consists of.

    Attributes:
        target_hidden_states (`tuple`): Keys of the target states that `fuse` takes: ("last",), or the boundaries in
            increasing order, see [`captured_states`].
        span (`Span`): How far back its layers look.
        token_ids (`torch.LongTensor` of shape `(U,)`): The target's id of each draft id; `None` where they are equal.
    """

    def __init__(self, config: EagleConfig):
        super().__init__(config)
        self.target_hidden_states: tuple[int | str, ...] = config.aux_layer_ids or ("last",)
        self.span: Span = Span("sliding", config.sliding_window) if config.sliding_window else FULL
        size = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, size) if config.own_embedding else None
        self.fc: nn.Module = (
            nn.Linear(config.fc_inputs, size, "fc" in config.biases) if config.has_fc else nn.Identity()
        )
        self.layers: nn.ModuleList = nn.ModuleList(map(self._layer, range(config.num_hidden_layers)))
        self.norm: nn.Module = _norm(config, "norm", size)
        self.lm_head: nn.Linear | None = (
            nn.Linear(size, config.draft_vocab_size, bias=False) if config.own_head else None
        )
        self.register_buffer("token_ids", torch.arange(config.draft_vocab_size) if config.has_token_ids else None)
        self._target: TargetParts | None = None

    def _layer(self, index: int) -> DecoderLayer:
        return EagleLayer(self.config, index)

    @property
    def spec_method(self) -> str:
        return self.config.method

    def attach(self, target_model: nn.Module) -> EagleNetwork:
        """Reads embedding and lm_head from `target_model` where the head has none of its own.

        An embedding that is only a copy of the target's is given up.
        """
        self._target = TargetParts(target_model)
        if self.embed_tokens is not None and is_copy(self.embed_tokens.weight, self._target.embedding.weight):
            self.embed_tokens = None
            self.config: DraftConfig = replace(self.config, own_embedding=False)
        return self

    def fuse(self, states: dict[int | str, torch.Tensor]) -> torch.Tensor:
        """Input `hidden` of `forward` for entries with states of the target.

        Args:
            states (`dict`): For each of `target_hidden_states` a tensor of shape `(R, T, th)`.

        Returns:
            `torch.Tensor` of shape `(R, T, h)`, in the dtype and on the device of the head.
        """
        like = self._weight
        return torch.cat([states[key].to(like) for key in self.target_hidden_states], dim=-1)

    def forward(
        self,
        tokens: torch.LongTensor,
        hidden: torch.Tensor,
        positions: torch.LongTensor,
        mask: torch.Tensor | None,
        cache: KeyValueCache | None = None,
        bound: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads entries.

        Args:
            tokens (`torch.LongTensor` of shape `(R, T)`): The token of each entry, in the target's ids.
            hidden (`torch.Tensor` of shape `(R, T, h)`): Its state: from `fuse`, or what an earlier call fed back.
            positions (`torch.LongTensor` of shape `(R, T)` or `(1, T)`): Position ids: those of the states' tokens.
            mask (`torch.Tensor` of shape `(R | 1, 1, T, S)`, *optional*): Additive, in the head's dtype, or boolean.
                `None`: causal, or where T is 1 everything.
            cache (`KeyValueCache`, *optional*): Where keys and values are put; the plan of a `SlotCache` is set.
                `None`: nowhere, the entries see each other alone.
            bound (`int`, *optional*): Above all positions; with it, angles are looked up.

        Returns:
            Two tensors of shape `(R, T, h)`: what is fed back as `hidden` of the next entry, and what `logits` reads.
        """
        if mask is not None:
            mask = with_query_groups(mask, self.config.num_attention_heads // self.config.num_key_value_heads)
        angles = self.angles(positions, hidden, bound)
        return self._read(self.embed(tokens), hidden, (angles, mask, cache))

    def _read(
        self, embedded: torch.Tensor, hidden: torch.Tensor, attention: tuple
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both outputs of `forward`; `attention` are the last arguments of [`DecoderLayer`]."""
        raise NotImplementedError

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """Logits `(..., U)` over the draft's vocabulary, from the second tensor of `forward`, `(..., h)`."""
        if self.lm_head is not None:
            logits = project(self.lm_head, output)
        else:
            logits = self._target.logits(output).to(output)
        return logits if self.config.logit_scale == 1 else logits * self.config.logit_scale

    def save(self, folder: str | Path) -> None:
        """Writes `config.json` and `model.safetensors` in the layout of the first publishers; makes the folder."""
        save_checkpoint(folder, self.config.to_dict(), stored_tensors(self.config, self.state_dict()))


class Eagle1Network(EagleNetwork):
    """EAGLE-1, EAGLE-2, HASS: ordinary layers over the fully connected layer; all that is read and fed back is x."""

    has_targets_embedding = True

    def _read(self, embedded, hidden, attention):
        parts = self._modules
        stream = project(parts["fc"], torch.cat((embedded, hidden), dim=-1))
        for layer in parts["layers"]:
            stream = layer(stream, *attention)
        stream = parts["norm"](stream)
        return stream, stream


class Eagle3Network(EagleNetwork):
    """EAGLE-3: the first layer attends over embedding and state side by side.

    Attributes:
        input_norm (`nn.Module`): Norm over all captured states together, in some variants.
        fc_norm (`nn.ModuleList`): Norms over each of them, in EAGLE-3.1; empty in others.
        mask_hidden (`nn.Parameter` of shape `(A * th,)`): State of masks, in P-EAGLE alone.
    """

    unreliable_flags: ClassVar[tuple[str, ...]] = ("norm_output", "norm_before_residual")
    states_keys: ClassVar[tuple[str, ...]] = ("aux_layer_ids", "eagle_aux_hidden_state_layer_ids", "layer_ids")
    states_setting = "aux_layer_ids"

    def __init__(self, config: EagleConfig):
        super().__init__(config)
        size, count = config.target_hidden_size, config.num_states
        self.input_norm: nn.Module = _norm(config, "input_norm", count * size)
        chunks = range(count) if "fc_norm.0" in config.norms else ()
        self.fc_norm: nn.ModuleList = nn.ModuleList(_norm(config, f"fc_norm.{index}", size) for index in chunks)
        if config.mask_token_id is not None:
            self.mask_hidden: nn.Parameter = nn.Parameter(torch.zeros(count * size))

    def _layer(self, index):
        return (EagleLayer if index else FirstEagle3Layer)(self.config, index)

    def fuse(self, states: dict[int | str, torch.Tensor]) -> torch.Tensor:
        fused = self.input_norm(super().fuse(states))
        if self.fc_norm:
            chunks = fused.split(self.config.target_hidden_size, dim=-1)
            fused = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks)], dim=-1)
        return self.fc(fused)

    def mask_state(self) -> torch.Tensor:
        """The state `(1, 1, h)` of masks, made as those of the target are."""
        parts = self.mask_hidden.split(self.config.target_hidden_size)
        return self.fuse({key: part[None, None] for key, part in zip(self.target_hidden_states, parts)})

    def _read(self, embedded, hidden, attention):
        parts = self._modules
        first, *others = parts["layers"]
        norms = first._modules
        state = norms["hidden_norm"](hidden)
        both = torch.cat((norms["input_layernorm"](embedded), state), dim=-1)
        stream = first(state if self.config.norm_before_residual else hidden, *attention, attended=both)
        for layer in others:
            stream = layer(stream, *attention)
        output = parts["norm"](stream)
        return output if self.config.norm_output else stream, output


class EagleLayer(DecoderLayer):
    """A decoder layer of the Llama or Qwen3 kind, with the norms and biases that its checkpoint has.

    Args:
        config (`EagleConfig`): The head.
        index (`int`): Which layer.
    """

    # Times h: what the projections of queries, keys and values read.
    widths = 1

    def __init__(self, config: EagleConfig, index: int):
        name, size = f"layers.{index}", config.hidden_size
        attention, mlp = (
            {bias.removeprefix(part) for bias in config.biases if bias.startswith(part)}
            for part in (f"{name}.self_attn.", f"{name}.mlp.")
        )
        has_head_norms = f"{name}.self_attn.q_norm" in config.norms
        super().__init__(
            new_attention(config, index, attention, has_head_norms, self.widths * size),
            new_mlp(config, mlp),
            _norm(config, f"{name}.input_layernorm", size),
            _norm(config, f"{name}.post_attention_layernorm", size),
        )


class FirstEagle3Layer(EagleLayer):
    """EAGLE-3's first layer, which attends over embedding and state, normed each by itself."""

    widths = 2

    def __init__(self, config: EagleConfig, index: int):
        super().__init__(config, index)
        self.hidden_norm: nn.Module = _norm(config, f"layers.{index}.hidden_norm", config.hidden_size)


def _norm(config: EagleConfig, name: str, size: int) -> nn.Module:
    return RMSNorm(size, config.rms_norm_eps) if name in config.norms else nn.Identity()


_NETWORKS = {"eagle": Eagle1Network, "eagle3": Eagle3Network}


@loads_checkpoint
def load_eagle(config: SpeculativeConfig, target_model: nn.Module) -> EagleNetwork:
    """Loads `config.model`, in any of its formats, in the target's dtype and on its device unless the settings differ.

    Args:
        config (`SpeculativeConfig`): `model`, `revision`, `subfolder`, `dtype`, `device`, the option `aux_layer_ids`.
        target_model (`PreTrainedModel`): The target.

    Raises:
        SpecConfigError: No checkpoint was named, it is of the other method, or its layers do not fit the quantisation.
        CheckpointFormatError: The checkpoint is incomplete, no EAGLE head that this package knows, or was made for
            another target.
    """
    placement = head_placement(config, target_model, can_be_quantised=True)
    aux_layer_ids = getattr(config.options, "aux_layer_ids", None)
    checkpoint = Checkpoint(config)
    reader = EagleReader(checkpoint.header, aux_layer_ids)
    found = reader.configured(checkpoint, TargetSizes.of(target_model))
    if config.method in _NETWORKS and config.method != found.method:
        raise SpecConfigError(
            f"'{reader.name}' is a head for spec_method='{found.method}', got '{config.method}'. Change it, or "
            "leave the method out: it is read from the checkpoint."
        )
    if aux_layer_ids is not None and not found.aux_layer_ids:
        raise SpecConfigError(
            f"`aux_layer_ids`={list(aux_layer_ids)} is for EAGLE-3 heads that read states between the target's "
            f"layers; '{reader.name}' reads the one after the final norm. Leave it out."
        )
    make = partial(_NETWORKS[found.method], found)
    return loaded_network(make, reader, checkpoint, target_model, placement, config.quantization)


def fitting_network(network: nn.Module, config: SpeculativeConfig, target_model: nn.Module) -> EagleNetwork:
    """A head that was not loaded here, such as one in training, checked against the target and attached to it.

    Raises:
        SpecConfigError: It is no EAGLE head, of the other method, or of another size than the target.
    """
    # The tables of a head are as long as the vocabulary.
    check_given(network, EagleNetwork, config, target_model, most_gap=0)
    found = network.config
    if config.method != found.method:
        raise SpecConfigError(f"The head is for spec_method='{found.method}', got '{config.method}'. Change it.")
    if config.options.aux_layer_ids not in (None, found.aux_layer_ids):
        raise SpecConfigError(
            f"`aux_layer_ids`={list(config.options.aux_layer_ids)} is about loading a head, and the one that was "
            f"passed reads the states {list(found.aux_layer_ids)}. Leave it out."
        )
    return network.attach(target_model)
