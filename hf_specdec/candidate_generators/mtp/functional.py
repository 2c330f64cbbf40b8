"""A lean forward of MTP layers of the Llama family, as plain functions over their weights.

One entry through one layer is mostly module calls, see [`~decoding.functional`]. The results are bit for bit those of
the network's own forward, which all other families go through.

Shapes: R rows, T entries, S slots of the draft's cache, h hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ...decoding.cache import SlotCache
from ...decoding.functional import LeanLayer, LeanNorm, RotaryAngles, is_untouched, with_query_groups
from .network import MtpNetwork


# Classes of layers that are: RMS norm, rotary attention, RMS norm, gated MLP, each added to the stream.
_FAMILY = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")


class FunctionalMtp:
    """Called like `MtpNetwork.forward`; the cache has its layers already.

    Args:
        network (`MtpNetwork`): Layers that this `fits`.
        lead (`int`): How far a position may be ahead of its slot.
    """

    def __init__(self, network: MtpNetwork, lead: int):
        self.network = network
        self.layers = [LeanLayer(layer) for layer in network.layers]
        self.token_norms = [LeanNorm(norm) for norm in network.enorm]
        self.state_norms = [LeanNorm(norm) for norm in network.hnorm]
        self.norms = [LeanNorm(norm) for norm in network.norm]
        rotary = network.rotary_emb
        self.angles = RotaryAngles(rotary, rotary.config.rope_parameters, lead)

    @staticmethod
    def fits(network: MtpNetwork) -> bool:
        """Whether this computes exactly what the network's own forward does."""
        is_llama = all(type(layer).__name__ in _FAMILY for layer in network.layers)
        return is_llama and all(map(is_untouched, (*network.modules(), network.rotary_emb)))

    def __call__(
        self,
        tokens: torch.LongTensor,
        hidden: torch.Tensor,
        positions: torch.LongTensor,
        mask: torch.Tensor | None,
        cache: SlotCache,
        layer: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        network, plan = self.network, cache.plan
        part = layer % network.config.num_projections
        halves = [self.token_norms[part](network.embed(tokens)), self.state_norms[part](hidden)]
        if network.config.layout.hidden_first:
            halves.reverse()
        projection = network.eh_proj[part]
        stream = F.linear(torch.cat(halves, dim=-1), projection.weight, projection.bias)
        lean = self.layers[layer]
        mask = with_query_groups(mask, lean.attention.groups)
        stream = lean(stream, self.angles(positions, stream, plan.columns), cache.layers[layer], plan, mask)
        if network.config.layout.before_norm:
            return stream, network.final_norm(stream)
        output = self.norms[part](stream)
        return output, output
