"""The recipe of DFlash block drafters: masked blocks at random places of the target's own text (arXiv:2602.06036).

A block begins at an anchor, as in drafting: the token that was committed last, and masks. It sees the target's states
of the text before the anchor, and itself. Every mask is to become the text's token of its place, and the loss of the
j-th of them has the weight `head_decay`^(j - 1): a wrong token makes those after it worthless.

A DFlash 2 draft also learns the scores of its selector, see [`DFlash2Recipe`], a LiLiCorr draft those of its lattice,
see [`LiLiCorrRecipe`], a Domino draft its corrections by the text's own tokens before each mask, see [`DominoRecipe`].
With `causal` a place of the block sees none of the later
ones, as in JetSpec (arXiv:2606.18394): a token of a tree then depends on its path alone.

With `reveal_share` some blocks have the text's tokens in the place of a part of their masks, as in training masked
diffusion (LLaDA, Nie et al. 2025, arXiv:2502.09992, section 2.2). Only such drafts gain from several denoising steps.

Shapes as in `recipe.py`; A anchors of a row, S tokens of a block, K = S - 1 masks, h the draft's hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from ...errors import SpecConfigError
from ...layers.mask_token import mask_token_for
from ...target_facts import decoder_layers, hidden_size, vocabulary_size
from ...training.initial_weights import begin_as, begin_near, layer_sizes
from ...training.reading import IGNORED, Reading, check_plain_head
from ...training.recipe import (
    CHUNK_LOGITS,
    CycleRecipe,
    no_loss,
    sum_over_chunks,
)
from . import DFlash2Training, DFlashTraining, DominoTraining, LiLiCorrTraining
from .config import BlockView, DFlashConfig, DominoConfig, LiLiCorrConfig, default_layer_ids
from .corrections import Block
from .denoising import Denoising, keep_counts
from .network import DFlashNetwork, GivenContext
from .selector import best_tokens_of


# Keys and values of the text, of each layer.
LayerContext = list[tuple[torch.Tensor, torch.Tensor]]

# Positions of blocks that attend in one piece. Blocks do not see each other, so that more would be wasted work, and
# fewer would copy the keys and values of the text more often.
_PIECE = 128


class DFlashRecipe(DFlashTraining, CycleRecipe):
    """
    A DFlash draft: decoder layers that fill a block of masks, with the embedding and the lm_head of the target. They
    begin as the target's last ones, as far as their shapes agree.
    """

    method = "dflash"
    muon = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target_layer_ids is not None and not self.target_layer_ids:
            raise SpecConfigError("`target_layer_ids` must name at least one layer of the target, got none.")
        if (self.num_denoising_steps or 1) > 1 and not self.reveal_share:
            raise SpecConfigError(
                f"`num_denoising_steps`={self.num_denoising_steps} needs a draft that has seen revealed tokens. "
                "Set `reveal_share`, or leave it out."
            )

    @property
    def num_drafts(self) -> int:
        return self.block_size - 1

    @property
    def further_parts(self) -> dict[str, Any]:
        """Settings of the network beside those of every draft."""
        return {}

    def check(self, target: PreTrainedModel) -> None:
        super().check(target)
        num_layers = len(decoder_layers(target))
        outside = [layer for layer in self.target_layer_ids or () if not 0 <= layer < num_layers]
        if outside:
            raise SpecConfigError(
                f"`target_layer_ids` must be from 0 to {num_layers - 1}, the layers of {type(target).__name__}, got "
                f"{outside[0]}."
            )
        mask_token_for(target, self.mask_token_id)

    def build(self, target: PreTrainedModel) -> DFlashNetwork:
        num_layers, vocab_size, size = len(decoder_layers(target)), vocabulary_size(target), hidden_size(target)
        sizes = layer_sizes(target, size, self.intermediate_size, self.num_layers)
        text = target.config.get_text_config(decoder=True)
        sizes["head_dim"] = getattr(text, "head_dim", None) or sizes["head_dim"]
        # A target of few layers has no room for the default.
        usual = (min(max(layer, 0), num_layers - 1) for layer in default_layer_ids(self.num_layers, num_layers))
        config = DFlashConfig(
            **sizes,
            draft_vocab_size=vocab_size,
            block_size=self.block_size,
            mask_token_id=mask_token_for(target, self.mask_token_id),
            target_layer_ids=self.target_layer_ids or tuple(sorted(set(usual))),
            num_target_layers=num_layers,
            views=(BlockView(causal=True),) * self.num_layers if self.causal else (),
            num_denoising_steps=self.num_denoising_steps or (3 if self.reveal_share else 1),
            **self.further_parts,
        )
        network = DFlashNetwork(config).attach(target)
        # The target's last layers, on what the deepest of the captured states says.
        for own_layer, layer in zip(reversed(network.layers), reversed(decoder_layers(target))):
            begin_as(own_layer, layer)
        deepest = max(config.target_layer_ids)
        begin_near(network.fc, [float(layer == deepest) for layer in config.target_layer_ids])
        return network

    def loss(self, network: DFlashNetwork, reading: Reading) -> torch.Tensor:
        total = no_loss(network)
        anchors = self.draw_anchors(reading)
        if not anchors.numel():
            return total
        labels = reading.labels_at(anchors, self.num_drafts).movedim(0, 2)
        revealed = self.draw_revealed(labels)
        inputs = torch.where(revealed, labels, network.config.mask_token_id)
        context = _context(network, reading, anchors)
        output = read_blocks(network, context, anchors, _blocks(reading, anchors, inputs))
        labels = labels.masked_fill(revealed, IGNORED)
        rows, blocks, masks = counting = (labels != IGNORED).nonzero(as_tuple=True)
        if not len(rows):
            return total
        # The target predicts the tokens there.
        places = rows * reading.tokens.shape[1] + anchors[rows, blocks] + 1 + masks
        weights = self.head_decay**masks
        read, logits = self.predictions(network, output, reading, anchors)
        total = total + self.token_loss(
            reading,
            logits,
            read[counting],
            labels[counting],
            places,
            network.config.draft_vocab_size,
            weights=weights,
        )
        return total + self.further_loss(network, output, reading, anchors, labels)

    def predictions(
        self, network: DFlashNetwork, output: torch.Tensor, reading: Reading, anchors: torch.LongTensor
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        """Values `(B, A, K, X)` that the logits of the masks depend on, and what computes them from rows `(n, X)`."""
        return output, network.logits

    def further_loss(
        self,
        network: DFlashNetwork,
        output: torch.Tensor,
        reading: Reading,
        anchors: torch.LongTensor,
        labels: torch.LongTensor,
    ) -> torch.Tensor | float:
        """Loss beside that of the tokens, by outputs `(B, A, K, h)` and labels `(B, A, K)`, -100 where none counts."""
        return 0.0

    def draw_anchors(self, reading: Reading) -> torch.LongTensor:
        """Draws the anchors of this step, `(B, A)`."""
        anchors = reading.cycle_anchors()
        if not 0 < self.num_anchors < anchors.shape[1]:
            return anchors
        # Those that only fill up their rows come last.
        order = torch.rand(anchors.shape, device=anchors.device) + reading.begins_at(anchors)
        return anchors.gather(1, order.topk(self.num_anchors, dim=1).indices)

    def draw_revealed(self, labels: torch.LongTensor) -> torch.BoolTensor:
        """Draws the masks that show their tokens, `(B, A, K)`: at least one of a block that shows any, never all."""
        count = self.num_drafts
        if not self.reveal_share or count < 2:
            return torch.zeros_like(labels, dtype=torch.bool)
        device, blocks = labels.device, labels.shape[:2]
        shown = torch.randint(1, count, (*blocks, 1), device=device)
        shown = shown * (torch.rand((*blocks, 1), device=device) < self.reveal_share)
        ranks = torch.rand(labels.shape, device=device).argsort(dim=2).argsort(dim=2)
        return (ranks < shown) & (labels != IGNORED)

    def drafts(self, network: DFlashNetwork, reading: Reading, anchors: torch.LongTensor) -> torch.LongTensor:
        context = _context(network, reading, anchors)
        chunk = max(1, CHUNK_LOGITS // (len(anchors) * self.num_drafts * network.config.draft_vocab_size))
        drafts = [draft_blocks(network, context, reading, part) for part in anchors.split(chunk, 1)]
        return torch.cat(drafts, dim=1).movedim(2, 0)


class DFlash2Recipe(DFlash2Training, DFlashRecipe):
    """
    A DFlash 2 draft, which begins as a DFlash draft: its convolutions change nothing, its selector next to nothing.
    The selector learns beside the tokens, from the candidates after the text's own token, where the right one is among
    them.
    """

    def check(self, target: PreTrainedModel) -> None:
        super().check(target)
        size = hidden_size(target)
        if size % self.conv_group_size:
            raise SpecConfigError(
                f"`conv_group_size` must divide {size}, the hidden size of {type(target).__name__}, got "
                f"{self.conv_group_size}."
            )

    @property
    def further_parts(self) -> dict[str, Any]:
        names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        return {name: getattr(self, name) for name in names}

    def further_loss(
        self,
        network: DFlashNetwork,
        output: torch.Tensor,
        reading: Reading,
        anchors: torch.LongTensor,
        labels: torch.LongTensor,
    ) -> torch.Tensor:
        selector = network.candidate_selector
        rows, blocks, masks = counting = (labels != IGNORED).nonzero(as_tuple=True)
        before = reading.tokens[rows, anchors[rows, blocks] + 1 + masks]
        output, labels, weights = output[counting], labels[counting], self.head_decay**masks

        def chunk_loss(part: slice) -> torch.Tensor:
            values, tokens = best_tokens_of(network.logits(output[part]), selector.top_k)
            scores = values.float() + selector.scores(tokens, before[part, None], output[part])[:, 0]
            # Where none is right, nothing is learned.
            is_right = tokens == labels[part, None]
            return -(weights[part] * (scores.log_softmax(-1) * is_right).sum(-1)).sum()

        losses = sum_over_chunks(chunk_loss, len(labels), network.config.draft_vocab_size)
        return self.selector_weight * losses / weights.sum()


class _OneStepRecipe(DFlashRecipe):
    """A draft whose blocks take one denoising step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reveal_share:
            raise SpecConfigError(
                f"`reveal_share`={self.reveal_share} is for several denoising steps, and drafts of this kind take "
                "one. Leave it out."
            )


class LiLiCorrRecipe(LiLiCorrTraining, _OneStepRecipe):
    """
    A LiLiCorr draft, whose lattice learns beside the tokens, and through their probabilities the layers with it
    (arXiv:2608.20530). A place counts as long as it and all before it have the text's token among their candidates.
    The loss there is, over the candidates after the right one before them, the cross-entropy of the right one, and the
    expected logit by which the target prefers the right one to what is chosen, as far as it does.
    """

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
    def further_parts(self) -> dict[str, Any]:
        sizes = LiLiCorrConfig(
            hidden_size=self.lilicorr_hidden_size,
            candidate_topk=self.lilicorr_candidate_topk,
            num_layers=self.lilicorr_num_layers,
            num_heads=self.lilicorr_num_heads,
            mlp_size=2 * self.lilicorr_hidden_size,
            factor_dim=self.lilicorr_factor_dim,
            logit_scale=self.lilicorr_logit_scale,
        )
        return {"lilicorr": sizes}

    def further_loss(
        self,
        network: DFlashNetwork,
        output: torch.Tensor,
        reading: Reading,
        anchors: torch.LongTensor,
        labels: torch.LongTensor,
    ) -> torch.Tensor:
        rows, blocks = counting = (labels[..., 0] != IGNORED).nonzero(as_tuple=True)
        begins = anchors[counting]
        first = reading.tokens[rows, begins + 1]
        output, labels, context = output[counting], labels[counting], _seen_last(network, reading, anchors)[counting]
        places = rows[:, None] * reading.tokens.shape[1] + begins[:, None] + 1
        # Past the end of a row nothing counts.
        places = (places + torch.arange(labels.shape[1], device=rows.device)).clamp(max=reading.tokens.numel() - 1)

        def chunk_losses(part: slice) -> torch.Tensor:
            edges = network.edges(network.logits(output[part]), output[part], first[part], context[part])
            is_right = edges.tokens == labels[part, :, None]
            counts = is_right.any(-1).cumprod(-1)
            right = is_right.int().argmax(-1, keepdim=True)
            before = F.pad(right[:, :-1], (0, 0, 1, 0))[..., None].expand(-1, -1, 1, edges.scores.shape[3])
            log_probs = edges.scores.gather(2, before)[:, :, 0].log_softmax(-1)
            losses = -self.lattice_weight * log_probs.gather(2, right)[..., 0]
            if self.rejection_weight:
                preferences = reading.target_logits(places[part]).to(log_probs).gather(2, edges.tokens)
                rejected = (preferences.gather(2, right) - preferences).clamp(min=0)
                losses = losses + self.rejection_weight * (log_probs.exp() * rejected).sum(-1)
            return torch.stack(((counts * losses).sum(), counts.sum()))

        loss, count = sum_over_chunks(chunk_losses, len(rows), labels.shape[1] * network.config.draft_vocab_size)
        return loss / count.clamp(min=1)


class DominoRecipe(DominoTraining, _OneStepRecipe):
    """
    A Domino draft, which begins as a DFlash draft: its corrections add next to nothing. They learn with the layers,
    from the text's own tokens before each mask.
    """

    @property
    def further_parts(self) -> dict[str, Any]:
        return {"domino": DominoConfig(self.gru_hidden_dim, self.emb_dim, self.pure_draft_prefix_len)}

    def predictions(
        self, network: DFlashNetwork, output: torch.Tensor, reading: Reading, anchors: torch.LongTensor
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        head, count, size = network.logit_head, output.shape[2], output.shape[3]
        places = anchors[..., None] + 1 + torch.arange(count, device=anchors.device)
        # Past the end of a row there is nothing to predict.
        places = places.clamp(max=reading.tokens.shape[1] - 1)
        before = reading.tokens.gather(1, places.flatten(1))
        states = head.states(network.embed(before).view(-1, count, size)).view(*output.shape[:3], -1)
        is_corrected = (torch.arange(count, device=output.device) >= head.first).to(output)
        read = torch.cat((output, states, is_corrected[:, None].expand(*output.shape[:3], 1)), dim=-1)

        def logits(rows: torch.Tensor) -> torch.Tensor:
            return network.logits(rows[:, :size]) + rows[:, -1:] * head.embed_proj(rows[:, :-1])

        return read, logits


def _blocks(reading: Reading, anchors: torch.LongTensor, masked: torch.LongTensor) -> torch.LongTensor:
    """Joins the tokens of blocks, `(B, A, S)`: the cycle of position t begins with the token at t + 1."""
    return torch.cat((reading.tokens.gather(1, anchors + 1)[..., None], masked), dim=2)


def _context(network: DFlashNetwork, reading: Reading, anchors: torch.LongTensor) -> LayerContext:
    """Computes the keys and values of the text up to the last anchor."""
    width = int(anchors.max()) + 1
    fused = network.fuse({key: reading.states[key][:, :width] for key in network.target_hidden_states})
    return network.context(fused, torch.arange(width, device=fused.device)[None])


def _seen_last(network: DFlashNetwork, reading: Reading, anchors: torch.LongTensor) -> torch.Tensor:
    """Makes what the layers see of the last token of the text before each block, `(B, A, h)`."""
    rows = torch.arange(len(anchors), device=anchors.device)[:, None]
    return network.fuse({key: reading.states[key][rows, anchors] for key in network.target_hidden_states})


def read_blocks(
    network: DFlashNetwork,
    context: LayerContext,
    anchors: torch.LongTensor,
    tokens: torch.LongTensor,
) -> torch.Tensor:
    """
    Reads blocks at several places of each row, each as drafting does.

    Args:
        network (`DFlashNetwork`): The draft.
        context (`list`): Its keys and values of the text, from `context`, as far as the last anchor.
        anchors (`torch.LongTensor` of shape `(B, A)`): Last places of the text that the blocks see.
        tokens (`torch.LongTensor` of shape `(B, A, S)`): The blocks, which begin one place further on.

    Returns:
        `torch.Tensor` of shape `(B, A, K, h)`: the network's output at the masks.
    """
    rows, count, size = tokens.shape
    together = min(count, max(1, _PIECE // size))
    pieces = -(-count // together)
    # The blocks of a piece share a row of the batch; the last one is filled up.
    fill = pieces * together - count
    anchors = F.pad(anchors, (0, fill)).reshape(-1, together)
    tokens = F.pad(tokens, (0, 0, 0, fill)).reshape(-1, together * size)
    positions = (anchors[..., None] + 1 + torch.arange(size, device=anchors.device)).flatten(1)
    masks = {view: _mask(network, view, anchors, positions, context[0][0].shape[2]) for view in network.views}
    repeated = [tuple(part.repeat_interleave(pieces, dim=0) for part in layer) for layer in context]
    output = network(tokens, positions, masks, GivenContext(repeated), block_size=size)
    output = network.predicting(output.view(-1, size, output.shape[-1]))
    return output.view(rows, pieces * together, *output.shape[1:])[:, :count]


def _mask(
    network: DFlashNetwork, view: BlockView, anchors: torch.LongTensor, positions: torch.LongTensor, width: int
) -> torch.Tensor:
    """Makes a layer's additive mask `(N, 1, P, width + P)` for P positions of the blocks of a piece."""
    size = positions.shape[1] // anchors.shape[1]
    text = torch.arange(width, device=positions.device)
    block = torch.arange(positions.shape[1], device=positions.device) // size
    later = text > anchors.repeat_interleave(size, dim=1)[..., None]
    others = (block[:, None] != block).expand(len(positions), -1, -1)
    keys = torch.cat((text.expand(len(positions), -1), positions), dim=1)
    hidden = torch.cat((later, others), dim=2) | view.hidden(positions[..., None] - keys[:, None])
    mask = torch.zeros(hidden.shape, dtype=network.dtype, device=hidden.device)
    return mask.masked_fill_(hidden, torch.finfo(mask.dtype).min)[:, None]


def draft_blocks(
    network: DFlashNetwork,
    context: LayerContext,
    reading: Reading,
    anchors: torch.LongTensor,
) -> torch.LongTensor:
    """Drafts the tokens `(B, A, K)` of the cycles at the anchors `(B, A)`, in as many steps as the draft has."""
    count, mask_token_id = network.config.num_drafts(network.config.block_size), network.config.mask_token_id
    state = Denoising.start(anchors.numel(), count, mask_token_id, anchors.device)
    first = reading.tokens.gather(1, anchors + 1).flatten()
    if network.config.takes_one_step:
        blocks = _blocks(reading, anchors, state.inputs.view(*anchors.shape, count))
        output = read_blocks(network, context, anchors, blocks).flatten(0, 1)
        logits = network.logits(output)
        if network.config.has_edges:
            edges = network.edges(logits, output, first, _seen_last(network, reading, anchors).flatten(0, 1))
            drafts = edges.tokens_at(edges.walk())
        else:
            drafts = torch.stack(
                network.left_to_right(Block(logits, output)).best(first, count, network.target_ids)[1:], 1
            )
        return drafts.view(*anchors.shape, count)
    for keep in keep_counts(count, network.config.num_denoising_steps):
        blocks = _blocks(reading, anchors, state.inputs.view(*anchors.shape, count))
        output = read_blocks(network, context, anchors, blocks)
        network.denoise(state, output.flatten(0, 1), first, keep)
    return state.tokens.view(*anchors.shape, count)
