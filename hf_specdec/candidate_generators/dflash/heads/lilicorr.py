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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from ....checkpoints.schema import COUNT, FLAG, POSITIVE, Key, Tensor, count_up_to
from ....drafting.state import Entries
from ....errors import SpecConfigError
from ....layers.llama import RMSNorm
from ....training.reading import IGNORED, check_plain_head
from ....training.recipe import sum_over_chunks
from .. import LiLiCorrTraining
from ..recipe import Blocks, DFlashRecipe, memory_before
from . import BlockHead, FormatRow, HeadConfig, projector, size_field
from .walks import Block, CandidateWalk, Memory, best_tokens_of


if TYPE_CHECKING:
    from ..formats import DFlashReader
    from ..network import DFlashConfig, DFlashNetwork


_NUM_FEATURES = 5  # of a candidate beside its embedding


class LiLiCorrHead(BlockHead):
    """Scores of candidates after each other."""

    def __init__(self, config: DFlashConfig, sizes: LiLiCorrConfig):
        super().__init__(config, sizes)
        size, slots, epsilon = sizes.hidden_size, config.block_size - 1, config.rms_norm_eps
        is_wide = size != config.hidden_size
        self.token_proj: nn.Linear | None = nn.Linear(config.hidden_size, size) if is_wide else None
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

    def remember(self, kept: Memory, fused: torch.Tensor, new: Entries) -> Memory:
        return {"context": new.last(fused)}

    def begin(self, block: Block) -> CandidateWalk:
        logits = block.logits
        _, tokens = best_tokens_of(block.allowed_first(logits), self.sizes.candidate_topk)
        values = logits.gather(-1, tokens)
        count, width = tokens.shape[1:]
        # (R, K, k, 5): how probable a candidate is, how far from the best, of which rank.
        log_probs = values.float() - logits.float().logsumexp(-1, keepdim=True)
        ranks = torch.arange(width, device=log_probs.device).expand_as(log_probs)
        parts = (log_probs, log_probs.exp(), log_probs - log_probs[..., :1], ranks / max(width - 1, 1), ranks == 0)
        features = torch.stack([part.to(log_probs) for part in parts], dim=-1)
        embedded = block.network.embed(tokens.flatten(1)).view(*tokens.shape, -1)
        states = embedded if self.token_proj is None else self.token_proj(embedded)
        states = states + self.pass_hidden_proj(block.output)[:, :, None]
        states = states + self.feature_mlp(self.feature_norm(features.to(states)))
        states = states + self.slot_embedding[0, :, :count] + self.rank_embedding[0, :, :, :width]
        states = states.flatten(1, 2)
        # What attention adds between candidates, by the distance of their positions: (heads, K k, K k).
        slots = torch.arange(count, device=states.device).repeat_interleave(width)
        distances = slots[:, None] - slots
        bias = self.relative_slot_bias[:, distances + self.relative_slot_bias.shape[1] // 2]
        bias = bias + self.same_slot_bias[:, None, None] * (distances == 0)
        for layer in self.layers:
            states = layer(states, bias)
        states = self.output_norm(states)
        anchor = self.anchor_norm(self.context_proj(block.memory["context"]))
        beside = anchor[:, None].expand_as(states)
        factors = F.silu(self.factor_input_proj(torch.cat((states, beside, states * beside), dim=-1)))
        after, before = (
            self._vectors(head, factors).unflatten(1, (count, width)) for head in (self.in_head, self.out_head)
        )
        of_anchor = self._vectors(self.anchor_out_head, anchor)[:, None, None].expand(-1, 1, width, -1)
        before = torch.cat((of_anchor, before[:, :-1]), dim=1)
        return CandidateWalk(block, tokens, self.sizes.logit_scale * (before @ after.transpose(-1, -2)))

    def _vectors(self, head: nn.Linear, factors: torch.Tensor) -> torch.FloatTensor:
        return F.normalize(head(factors).float(), dim=-1, eps=self.sizes.vector_eps)


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


@dataclass(frozen=True)
class LiLiCorrConfig(HeadConfig):
    """Sizes of the lattice, named as in its configs without their `lilicorr_`."""

    hidden_size: int = size_field(COUNT, "l")  # D
    candidate_topk: int = size_field(count_up_to(256), "c")  # k
    num_layers: int = size_field(COUNT, "lattice_layer")
    num_heads: int = size_field(COUNT, "a")
    mlp_size: int = size_field(COUNT, "u")
    factor_dim: int = size_field(COUNT, "o")  # size of the vectors whose products are the scores
    logit_scale: float = size_field(POSITIVE)  # factor of the scores
    vector_eps: float = size_field(POSITIVE, default=1e-6)  # least norm that such a vector is divided by

    head_class: ClassVar[type[BlockHead]] = LiLiCorrHead
    takes_steps = False
    chooses_together = True
    kind = "a LiLiCorr draft"
    what = "LiLiCorr's lattice"
    architecture = "LiLiCorrDraftModel"
    kinds: ClassVar[tuple[str, ...]] = ("lilicorr",)
    marks: ClassVar[tuple[str, ...]] = ("architectures=.*LiLiCorr.*",)
    excludes: ClassVar[tuple[str, ...]] = ("predicts_next", "has_own_vocabulary")
    keys: ClassVar[tuple[Key, ...]] = (Key("lilicorr_enabled", FLAG),)
    table: ClassVar[tuple[Tensor, ...]] = (
        Tensor("rank_embedding", "* * * c l", kind),
        Tensor("slot_embedding", "* * p * l", kind),
        Tensor("pass_hidden_proj.weight", "l h", kind),
        Tensor("relative_slot_bias", "a *", kind),
        Tensor("out_head.weight", "o l", kind),
        Tensor("layers.{lattice_layer}.mlp.up_proj.weight", "u l", needed=False),
    )
    prefix = "lilicorr_"
    notes = "lilicorr_mlp_ratio"
    names: ClassVar[Mapping[str, str]] = {"lilicorr.": ""}
    formats: ClassVar[tuple[FormatRow, ...]] = (
        ("lilicorr", "ModelOpt, hf_specdec", (*marks, *projector("lilicorr")), ("lilicorr.",)),
    )

    @classmethod
    def is_there(cls, reader: DFlashReader) -> bool:
        return reader.setting("lilicorr_enabled") is not False and super().is_there(reader)

    @classmethod
    def read(cls, reader: DFlashReader) -> LiLiCorrConfig:
        sizes = reader.sizes
        if sizes["p"] != reader.block_size - 1:
            raise reader.wrong(
                f"has a `slot_embedding` of {sizes['p']} positions, which does not fit blocks of {reader.block_size} "
                "tokens",
                "Pass an intact checkpoint.",
            )
        if not sizes["a"] or sizes["l"] % sizes["a"]:
            raise reader.wrong(
                f"has {sizes['a']} heads in a lattice of {sizes['l']}, which they do not divide",
                "Pass an intact checkpoint.",
            )
        return super().read(reader)

    def entries(self, config: DFlashConfig) -> dict[str, Any]:
        entries = {"projector_type": "lilicorr", **super().entries(config), "lilicorr_enabled": True}
        entries["lilicorr_mlp_ratio"] = entries.pop("lilicorr_mlp_size") / self.hidden_size
        return entries


class LiLiCorrRecipe(LiLiCorrTraining, DFlashRecipe):
    """A LiLiCorr draft, whose lattice learns beside the tokens, and through their probabilities the layers with it
    (arXiv:2608.20530). A place counts as long as it and all before it have the text's token among their candidates.
    The loss there is, over the candidates after the right one before them, the cross-entropy of the right one, and the
    expected logit by which the target prefers the right one to what is chosen, as far as it does.
    """

    head_config: ClassVar[type[HeadConfig]] = LiLiCorrConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lilicorr_hidden_size % self.lilicorr_num_heads:
            raise SpecConfigError(
                f"`lilicorr_num_heads`={self.lilicorr_num_heads} must divide `lilicorr_hidden_size`, got "
                f"{self.lilicorr_hidden_size}."
            )

    @property
    def target_hidden_states(self) -> tuple[int | str, ...]:
        return ("last",) if self.kl_weight or self.rejection_weight else ()

    def check(self, target: PreTrainedModel) -> None:
        super().check(target)
        if self.rejection_weight:
            check_plain_head(target, "`rejection_weight`")

    @property
    def lilicorr_mlp_size(self) -> int:
        return 2 * self.lilicorr_hidden_size

    def further_loss(self, network: DFlashNetwork, blocks: Blocks) -> torch.Tensor:
        reading, anchors, is_read = blocks.reading, blocks.anchors, blocks.labels[..., 0] != IGNORED
        context = memory_before(network, reading, anchors)["context"].view(*anchors.shape, -1)[is_read]
        whole, labels, places = (part[is_read] for part in (blocks.whole, blocks.labels, blocks.places))
        first = blocks.before[..., 0][is_read]

        def chunk_losses(part: slice) -> torch.Tensor:
            block = network.block(whole[part], first[part], {"context": context[part]})
            walk = network.block_head.begin(block)
            is_right = walk.tokens == labels[part, :, None]
            counts = is_right.any(-1).cumprod(-1)
            right = is_right.int().argmax(-1, keepdim=True)
            before = F.pad(right[:, :-1], (0, 0, 1, 0))[..., None].expand(-1, -1, 1, walk.scores.shape[3])
            log_probs = walk.scores.gather(2, before)[:, :, 0].log_softmax(-1)
            losses = -self.lattice_weight * log_probs.gather(2, right)[..., 0]
            if self.rejection_weight:
                preferences = reading.target_logits(places[part]).to(log_probs).gather(2, walk.tokens)
                rejected = (preferences.gather(2, right) - preferences).clamp(min=0)
                losses = losses + self.rejection_weight * (log_probs.exp() * rejected).sum(-1)
            return torch.stack(((counts * losses).sum(), counts.sum()))

        loss, count = sum_over_chunks(chunk_losses, len(first), labels.shape[1] * network.config.draft_vocab_size)
        return loss / count.clamp(min=1)
