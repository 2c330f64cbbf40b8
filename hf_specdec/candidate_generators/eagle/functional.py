"""A lean forward of EAGLE heads: what the network's modules do, as plain functions over their weights.

A level of a draft is a few tokens through one layer, which is mostly module calls, as in small targets
([`~decoding.functional`], whose parts are used here). The results are bit for bit those of the network's own forward,
which training and networks that were changed go through.

Shapes: R rows, T entries, S slots of the draft's cache, h hidden size.
"""

from __future__ import annotations

import torch

from ...decoding.cache import SlotCache
from ...decoding.functional import LeanLayer, RotaryAngles, is_untouched, lean_norm, with_query_groups
from .network import EagleNetwork, FirstEagle3Layer


class FunctionalEagle:
    """Called like `EagleNetwork.forward`; the cache has its layers already.

    Args:
        network (`EagleNetwork`): A head that this `fits`.
        lead (`int`): How far a position may be ahead of its slot.
    """

    def __init__(self, network: EagleNetwork, lead: int):
        self.network = network
        self.layers = [
            (_FirstLayer if isinstance(layer, FirstEagle3Layer) else LeanLayer)(layer) for layer in network.layers
        ]
        self.norm = lean_norm(network.norm)
        self.angles = RotaryAngles(network.rotary_emb, network.config.rope_parameters, lead)

    @staticmethod
    def fits(network: EagleNetwork) -> bool:
        """Whether this computes exactly what the network's own forward does."""
        return all(map(is_untouched, network.modules()))

    def __call__(
        self,
        tokens: torch.LongTensor,
        hidden: torch.Tensor,
        positions: torch.LongTensor,
        mask: torch.Tensor | None,
        cache: SlotCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mask = with_query_groups(mask, self.layers[0].attention.groups)
        rotary = self.angles(positions, hidden, cache.plan.columns)
        wheres = [(rotary, slots, cache.plan, mask) for slots in cache.layers]
        return self._read(self.network.embed(tokens), hidden, wheres)


class FunctionalEagle1(FunctionalEagle):
    def _read(self, embedded, hidden, wheres):
        stream = self.network.fc(torch.cat((embedded, hidden), dim=-1))
        for layer, where in zip(self.layers, wheres):
            stream = layer(stream, *where)
        stream = self.norm(stream)
        return stream, stream


class FunctionalEagle3(FunctionalEagle):
    def _read(self, embedded, hidden, wheres):
        stream = self.layers[0](embedded, hidden, *wheres[0])
        for layer, where in zip(self.layers[1:], wheres[1:]):
            stream = layer(stream, *where)
        output = self.norm(stream)
        return output if self.network.config.norm_output else stream, output


class _FirstLayer(LeanLayer):
    def __init__(self, layer: FirstEagle3Layer):
        super().__init__(layer)
        self.hidden_norm, self.norm_before_residual = lean_norm(layer.hidden_norm), layer.norm_before_residual

    def __call__(self, embedded, state, *where):
        normed = self.hidden_norm(state)
        both = torch.cat((self.attention_norm(embedded), normed), dim=-1)
        return self.finish(normed if self.norm_before_residual else state, both, *where)
