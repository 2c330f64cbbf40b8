"""LiLiCorr: a transformer over the candidates of a whole block scores which follows which (arXiv:2608.20530).

Positions keep their k best tokens. The state x of a candidate comes from its embedding, the output of its position,
its log-probability and its rank; layers of attention let all candidates of the block see each other. With a the state
of the text, from the last token that the target has read,

    f = silu(W [x; a; x * a])            out = normed(O f)            in = normed(I f)
    score(i -> j) = scale out_i . in_j                   score(anchor -> j) = scale normed(O_a a) . in_j

A draft is a walk through these scores, as in DFlash 2.

Shapes: R rows, K positions, k candidates of each, h hidden size, D that of the lattice, V vocabulary of the target.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from ...layers.llama import RMSNorm
from .config import DFlashConfig, LiLiCorrConfig
from .selector import Edges, best_tokens_of


# Features of a candidate beside its embedding: see `LiLiCorrHead._features`.
_NUM_FEATURES = 5


class LiLiCorrHead(nn.Module):
    """Scores of candidates after each other.

    Args:
        config (`DFlashConfig`): Of the draft.
        sizes (`LiLiCorrConfig`): Its `lilicorr`.
    """

    def __init__(self, config: DFlashConfig, sizes: LiLiCorrConfig):
        super().__init__()
        size, slots, epsilon = sizes.hidden_size, config.block_size - 1, config.rms_norm_eps
        self.sizes = sizes
        self.token_proj: nn.Linear | None = None
        if size != config.hidden_size:
            self.token_proj = nn.Linear(config.hidden_size, size)
        self.pass_hidden_proj: nn.Linear = nn.Linear(config.hidden_size, size)
        self.context_proj: nn.Linear = nn.Linear(config.hidden_size, size)
        self.feature_norm: nn.LayerNorm = nn.LayerNorm(_NUM_FEATURES)
        self.feature_mlp: LatticeMLP = LatticeMLP(_NUM_FEATURES, size, size)
        self.slot_embedding: nn.Parameter = nn.Parameter(0.02 * torch.randn(1, 1, slots, 1, size))
        self.rank_embedding: nn.Parameter = nn.Parameter(0.02 * torch.randn(1, 1, 1, sizes.candidate_topk, size))
        self.relative_slot_bias: nn.Parameter = nn.Parameter(torch.zeros(sizes.num_heads, 2 * slots + 1))
        self.same_slot_bias: nn.Parameter = nn.Parameter(torch.zeros(sizes.num_heads))
        self.layers: nn.ModuleList = nn.ModuleList(LatticeLayer(sizes, epsilon) for _ in range(sizes.num_layers))
        self.output_norm: RMSNorm = RMSNorm(size, epsilon)
        self.anchor_norm: RMSNorm = RMSNorm(size, epsilon)
        self.factor_input_proj: nn.Linear = nn.Linear(3 * size, size)
        self.out_head: nn.Linear = nn.Linear(size, sizes.factor_dim)
        self.in_head: nn.Linear = nn.Linear(size, sizes.factor_dim)
        self.anchor_out_head: nn.Linear = nn.Linear(size, sizes.factor_dim)

    def forward(
        self,
        logits: torch.Tensor,
        output: torch.Tensor,
        context: torch.Tensor,
        embed: Callable[[torch.LongTensor], torch.Tensor],
        ranked: torch.Tensor | None = None,
    ) -> Edges:
        """Scores of the candidates of the first K positions of a block.

        Args:
            logits (`torch.Tensor` of shape `(R, K, V)`): Of the positions.
            output (`torch.Tensor` of shape `(R, K, h)`): The network's output there.
            context (`torch.Tensor` of shape `(R, h)`): What its layers see of the last token of the text.
            embed (`Callable`): Embeds the target's tokens.
            ranked (`torch.Tensor` of shape `(R, K, V)`, *optional*): What candidates are chosen by, if not the logits.
        """
        _, tokens = best_tokens_of(logits if ranked is None else ranked, self.sizes.candidate_topk)
        values = logits.gather(-1, tokens)
        count, width = tokens.shape[1:]
        log_probs = values.float() - logits.float().logsumexp(-1, keepdim=True)
        embedded = embed(tokens.flatten(1)).view(*tokens.shape, -1)
        states = embedded if self.token_proj is None else self.token_proj(embedded)
        states = states + self.pass_hidden_proj(output)[:, :, None]
        states = states + self.feature_mlp(self.feature_norm(self._features(log_probs).to(states)))
        states = states + self.slot_embedding[0, :, :count] + self.rank_embedding[0, :, :, :width]
        states = states.flatten(1, 2)
        bias = self._bias(count, width)
        for layer in self.layers:
            states = layer(states, bias)
        states = self.output_norm(states)
        anchor = self.anchor_norm(self.context_proj(context))
        beside = anchor[:, None].expand_as(states)
        factors = F.silu(self.factor_input_proj(torch.cat((states, beside, states * beside), dim=-1)))
        after, before = (
            self._vectors(head, factors).unflatten(1, (count, width)) for head in (self.in_head, self.out_head)
        )
        of_anchor = self._vectors(self.anchor_out_head, anchor)[:, None, None].expand(-1, 1, width, -1)
        before = torch.cat((of_anchor, before[:, :-1]), dim=1)
        return Edges(tokens, self.sizes.logit_scale * (before @ after.transpose(-1, -2)))

    def _vectors(self, head: nn.Linear, factors: torch.Tensor) -> torch.FloatTensor:
        return F.normalize(head(factors).float(), dim=-1, eps=self.sizes.vector_eps)

    @staticmethod
    def _features(log_probs: torch.FloatTensor) -> torch.FloatTensor:
        """Features `(R, K, k, 5)` of candidates: how probable, how far from the best, which rank."""
        width = log_probs.shape[-1]
        ranks = torch.arange(width, device=log_probs.device).expand_as(log_probs)
        parts = (log_probs, log_probs.exp(), log_probs - log_probs[..., :1], ranks / max(width - 1, 1), ranks == 0)
        return torch.stack([part.to(log_probs) for part in parts], dim=-1)

    def _bias(self, count: int, width: int) -> torch.Tensor:
        """Terms that attention adds between candidates, by the distance of their positions: `(heads, K k, K k)`."""
        slots = torch.arange(count, device=self.same_slot_bias.device).repeat_interleave(width)
        distances = slots[:, None] - slots
        bias = self.relative_slot_bias[:, distances + self.relative_slot_bias.shape[1] // 2]
        return bias + self.same_slot_bias[:, None, None] * (distances == 0)


class LatticeMLP(nn.Module):
    """Two linear layers with silu between them."""

    def __init__(self, size: int, inner_size: int, output_size: int):
        super().__init__()
        self.up_proj: nn.Linear = nn.Linear(size, inner_size)
        self.down_proj: nn.Linear = nn.Linear(inner_size, output_size)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.up_proj(states)))


class LatticeLayer(nn.Module):
    """A pre-norm layer in which all candidates of a block see each other."""

    def __init__(self, sizes: LiLiCorrConfig, epsilon: float):
        super().__init__()
        self.attn_norm: RMSNorm = RMSNorm(sizes.hidden_size, epsilon)
        # Only its weights: what its forward may fuse is none of the operations of a graph.
        self.attn: nn.MultiheadAttention = nn.MultiheadAttention(sizes.hidden_size, sizes.num_heads)
        self.mlp_norm: RMSNorm = RMSNorm(sizes.hidden_size, epsilon)
        self.mlp: LatticeMLP = LatticeMLP(sizes.hidden_size, sizes.mlp_size, sizes.hidden_size)

    def forward(self, states: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        attention = self.attn
        joint = F.linear(self.attn_norm(states), attention.in_proj_weight, attention.in_proj_bias)
        heads = (part.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2) for part in joint.chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(*heads, attn_mask=bias.to(states))
        states = states + attention.out_proj(attended.transpose(1, 2).flatten(2))
        return states + self.mlp(self.mlp_norm(states))
