"""A lean forward of EAGLE heads: what the network's modules do, as plain functions over their weights.

A level of a draft is a few tokens through one layer, which is mostly module calls, as in small targets
([`~decoding.functional`], whose parts are used here). The results are bit for bit those of the network's own forward,
which training and networks that were changed go through.

Shapes: R rows, T entries, S slots of the draft's cache, h hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..decoding.cache import SlotCache
from ..decoding.functional import LeanAttention, LeanMLP, LeanNorm, half_angles, is_untouched, rotary_table
from .eagle import Eagle3Network, EagleLayer, EagleNetwork, FirstEagle3Layer


def lean_forward(network: EagleNetwork, lead: int = 0) -> Callable:
    """The network's forward over slots, the lean one where it is known to be the same; for arguments see there."""
    if not isinstance(network, EagleNetwork) or not all(map(is_untouched, network.modules())):
        return network
    return (_Eagle3Forward if isinstance(network, Eagle3Network) else _Eagle1Forward)(network, lead)


class FunctionalEagle:
    """Called like `EagleNetwork.forward`; the cache has its layers already.

    Args:
        network (`EagleNetwork`): A head for which `lean_forward` says that this is the same.
        lead (`int`): How far a position may be ahead of its slot.
    """

    def __init__(self, network: EagleNetwork, lead: int):
        self.network, self.lead = network, lead
        self.layers = [
            (_FirstLayer if isinstance(layer, FirstEagle3Layer) else _Layer)(layer) for layer in network.layers
        ]
        self.norm = _norm(network.norm)
        self.table = rotary_table(network.rotary_emb, network.config.rope_parameters)

    def __call__(
        self,
        tokens: torch.LongTensor,
        hidden: torch.Tensor,
        positions: torch.LongTensor,
        mask: torch.Tensor | None,
        cache: SlotCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        groups = self.layers[0].attention.groups
        if mask is not None and mask.shape[2] > 1 and groups > 1:
            # The query heads of a group become further positions of their key/value head.
            mask = mask.expand(-1, groups, -1, -1).reshape(len(mask), 1, -1, mask.shape[3])
        rotary = self._rotary(positions, hidden, cache.plan.columns)
        wheres = [(rotary, slots, cache.plan, mask) for slots in cache.layers]
        return self._read(self.network.embed(tokens), hidden, wheres)

    def _rotary(self, positions, hidden, columns):
        """Cosine and sine of each entry, `(R | 1, T | 1, 1, D / 2)`."""
        if self.table is None:
            return half_angles(*self.network.rotary_emb(hidden, positions))
        cosine, sine = self.table.up_to(columns + self.lead, hidden)
        return cosine[positions], sine[positions]


class _Eagle1Forward(FunctionalEagle):
    def _read(self, embedded, hidden, wheres):
        stream = self.network.fc(torch.cat((embedded, hidden), dim=-1))
        for layer, where in zip(self.layers, wheres):
            stream = layer(stream, *where)
        stream = self.norm(stream)
        return stream, stream


class _Eagle3Forward(FunctionalEagle):
    def _read(self, embedded, hidden, wheres):
        stream = self.layers[0](embedded, hidden, *wheres[0])
        for layer, where in zip(self.layers[1:], wheres[1:]):
            stream = layer(stream, *where)
        output = self.norm(stream)
        return output if self.network.config.norm_output else stream, output


class _Layer:
    def __init__(self, layer: EagleLayer):
        self.attention, self.mlp = LeanAttention(layer.self_attn), LeanMLP(layer.mlp)
        self.attention_norm, self.mlp_norm = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)

    def __call__(self, stream, *where):
        return self._finished(stream, self.attention_norm(stream), *where)

    def _finished(self, stream, attended, *where):
        stream = stream + self.attention(attended, *where)
        return stream + self.mlp(self.mlp_norm(stream))


class _FirstLayer(_Layer):
    def __init__(self, layer: FirstEagle3Layer):
        super().__init__(layer)
        self.hidden_norm, self.norm_before_residual = _norm(layer.hidden_norm), layer.norm_before_residual

    def __call__(self, embedded, state, *where):
        normed = self.hidden_norm(state)
        both = torch.cat((self.attention_norm(embedded), normed), dim=-1)
        return self._finished(normed if self.norm_before_residual else state, both, *where)


def _norm(norm: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return norm if isinstance(norm, nn.Identity) else LeanNorm(norm)
