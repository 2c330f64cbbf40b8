"""A lean forward of DFlash drafts: what the network's modules do, as plain functions over their weights.

A block is a few tokens through a few layers, which is mostly module calls, as in small targets
([`~decoding.functional`], whose parts are used here). The results are bit for bit those of the network's own methods,
which training and networks that were changed go through.

Shapes: R rows, T positions of a block, S slots of the draft's cache, C tokens of the text, h hidden size, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from ...decoding.cache import SlotCache
from ...decoding.functional import LeanAttention, LeanLayer, LeanNorm, is_untouched, with_query_groups
from .formats import BlockView
from .network import DFlashNetwork, turned


def lean_network(network: DFlashNetwork) -> DFlashNetwork | FunctionalDFlash:
    """The network's `forward` and `context`, the lean ones where they are known to be the same."""
    return FunctionalDFlash(network) if all(map(is_untouched, network.modules())) else network


class FunctionalDFlash:
    """Called like `DFlashNetwork.forward`; the cache is a `SlotCache` that has its layers already.

    Args:
        network (`DFlashNetwork`): A draft for which `lean_network` says that this is the same.
    """

    def __init__(self, network: DFlashNetwork):
        self.network = network
        self.layers = [LeanLayer(layer, _Attention) for layer in network.layers]
        self.views = [network.config.view(index) for index in range(len(self.layers))]
        self.norm = LeanNorm(network.norm)

    def context(
        self, fused: torch.Tensor, positions: torch.LongTensor, bound: int | None = None
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of tokens of the text, for every layer, see `DFlashNetwork.context`."""
        keys = [layer.attention.keys(fused) for layer in self.layers]
        # The angles are those of all layers.
        angles = self.network.angles(fused, positions, bound)
        keys = turned(torch.cat(keys, dim=2), *angles).split(keys[0].shape[2], dim=2)
        return [(key.transpose(1, 2), layer.attention.values(fused)) for layer, key in zip(self.layers, keys)]

    def __call__(
        self,
        tokens: torch.LongTensor,
        positions: torch.LongTensor,
        masks: Mapping[BlockView, torch.Tensor | None],
        cache: SlotCache,
        bound: int | None = None,
    ) -> torch.Tensor:
        stream = self.network.embed(tokens)
        angles = self.network.angles(stream, positions, bound)
        groups = self.layers[0].attention.groups
        masks = {view: with_query_groups(mask, groups) for view, mask in masks.items()}
        for layer, view, slots in zip(self.layers, self.views, cache.layers):
            stream = layer(stream, angles, slots, cache.plan, masks[view])
        return self.norm(stream)


class _Attention(LeanAttention):
    def keys(self, fused: torch.Tensor) -> torch.Tensor:
        """Keys of the text before they are turned, `(R, C, kv heads, D)`."""
        return self.head_norms[1](self._heads(fused, self.key))

    def values(self, fused: torch.Tensor) -> torch.Tensor:
        """Values of the text, `(R, kv heads, C, D)`."""
        return self._heads(fused, self.value).transpose(1, 2)

    def _heads(self, fused: torch.Tensor, weights: tuple) -> torch.Tensor:
        return F.linear(fused, *weights).view(*fused.shape[:2], -1, self.head_size)
