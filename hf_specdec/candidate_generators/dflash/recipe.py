"""The recipe of DFlash block drafters: masked blocks at random places of the target's own text (arXiv:2602.06036).

A block begins at an anchor, as in drafting: the token that was committed last, and masks. It sees the target's states
of the text before the anchor, and itself. Every mask is to become the text's token of its place, and the loss of the
j-th of them has the weight `head_decay`^(j - 1): a wrong token makes those after it worthless.

A variant's recipe, in the file of its head, adds what the head learns. With `causal` a place of the block sees none of
the later ones, as in JetSpec (arXiv:2606.18394): a token of a tree then depends on its path alone.

With `reveal_share` some blocks have the text's tokens in the place of a part of their masks, as in training masked
diffusion (LLaDA, Nie et al. 2025, arXiv:2502.09992, section 2.2). Only such drafts gain from several denoising steps.

Shapes as in `recipe.py`; A anchors of a row, S tokens of a block, K = S - 1 masks, h the draft's hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from ...drafting.state import Entries
from ...errors import SpecConfigError
from ...layers.mask_token import mask_token_for
from ...target_facts import decoder_layers, hidden_size, vocabulary_size
from ...training.initial_weights import begin_as, begin_near, layer_sizes
from ...training.reading import IGNORED, GrowingCache, Reading
from ...training.recipe import CHUNK_LOGITS, Recipe
from . import DFlashTraining
from .heads import HeadConfig
from .heads.walks import Denoising, Memory, keep_counts
from .network import BlockView, DFlashConfig, DFlashNetwork, default_layer_ids


# Keys and values of the text, of each layer.
LayerContext = list[tuple[torch.Tensor, torch.Tensor]]

# Positions of blocks that attend in one piece. Blocks do not see each other, so that more would be wasted work, and
# fewer would copy the keys and values of the text more often.
_PIECE = 128


class Blocks(NamedTuple):
    """Blocks of a batch that a loss is about."""

    reading: Reading
    anchors: torch.LongTensor  # (B, A), last places of the text that the blocks see
    whole: torch.Tensor  # (B, A, S, h), output of the network
    output: torch.Tensor  # (B, A, K, h), the same at the masks
    labels: torch.LongTensor  # (B, A, K), tokens of the text there, -100 where none counts
    places: torch.LongTensor  # (B, A, K), of the tokens before these in the flattened batch, where it predicts them

    @property
    def counting(self) -> tuple[torch.LongTensor, ...]:
        """Row, block and mask of every place that counts."""
        return (self.labels != IGNORED).nonzero(as_tuple=True)

    @property
    def before(self) -> torch.LongTensor:
        """Tokens `(B, A, K)` of the text in front of the masks."""
        return self.reading.tokens.flatten()[self.places]


class DFlashRecipe(DFlashTraining, Recipe):
    """A DFlash draft: decoder layers that fill a block of masks, with the embedding and the lm_head of the target.
    They begin as the target's last ones, as far as their shapes agree.
    """

    method = "dflash"
    muon = True
    head_config: ClassVar[type[HeadConfig]] = HeadConfig
    conv_kernel_size = conv_group_size = 0  # without convolutions

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.num_denoising_steps or 1) > 1 and not self.reveal_share:
            raise SpecConfigError(
                f"`num_denoising_steps`={self.num_denoising_steps} needs a draft that has seen revealed tokens. "
                "Set `reveal_share`, or leave it out."
            )
        if self.reveal_share and not self.head.takes_steps:
            raise SpecConfigError(
                f"`reveal_share`={self.reveal_share} is for several denoising steps, and drafts of this kind take "
                "one. Leave it out."
            )

    @property
    def num_drafts(self) -> int:
        return self.block_size - 1

    @property
    def head(self) -> HeadConfig:
        """What follows the parallel prediction, by the options of the same names."""
        kind = self.head_config
        options = {item.name: getattr(self, kind.prefix + item.name, None) for item in fields(kind)}
        return kind(**{name: value for name, value in options.items() if value is not None})

    def check(self, target: PreTrainedModel) -> None:
        super().check(target)
        self.check_layers(target, "target_layer_ids", len(decoder_layers(target)) - 1)
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
            head=self.head,
            conv_kernel_size=self.conv_kernel_size,
            conv_group_size=self.conv_group_size,
        )
        network = DFlashNetwork(config).attach(target)
        # The target's last layers, on what the deepest of the captured states says.
        for own_layer, layer in zip(reversed(network.layers), reversed(decoder_layers(target))):
            begin_as(own_layer, layer)
        deepest = max(config.target_layer_ids)
        begin_near(network.fc, [float(layer == deepest) for layer in config.target_layer_ids])
        return network

    def losses(self, network: DFlashNetwork, reading: Reading) -> Iterator[torch.Tensor | float]:
        anchors = self.draw_anchors(reading)
        if not anchors.numel():
            return
        labels = reading.labels_at(anchors, self.num_drafts).movedim(0, 2)
        revealed = self.draw_revealed(labels)
        inputs = torch.where(revealed, labels, network.config.mask_token_id)
        whole = _read_blocks(network, reading, _context(network, reading, anchors), anchors, inputs)
        output = network.predicting(whole.flatten(0, 1)).view(*labels.shape, -1)
        masks = torch.arange(self.num_drafts, device=anchors.device)
        rows = torch.arange(len(anchors), device=anchors.device)[:, None, None]
        # Past the end of a row there is nothing to predict.
        places = rows * reading.tokens.shape[1] + anchors[..., None] + 1 + masks
        places = places.clamp(max=reading.tokens.numel() - 1)
        blocks = Blocks(reading, anchors, whole, output, labels.masked_fill(revealed, IGNORED), places)
        counting = blocks.counting
        if not len(counting[0]):
            return
        read, logits = self.predictions(network, blocks)
        read, labels, places = (part[counting] for part in (read, blocks.labels, places))
        weights, size = self.head_decay ** counting[2], network.config.draft_vocab_size
        yield self.token_loss(reading, logits, read, labels, places, size, weights)
        yield self.further_loss(network, blocks)

    def predictions(
        self, network: DFlashNetwork, blocks: Blocks
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        """Values `(B, A, K, X)` that the logits of the masks depend on, and what computes them from rows `(n, X)`."""
        return blocks.output, network.logits

    def further_loss(self, network: DFlashNetwork, blocks: Blocks) -> torch.Tensor | float:
        """Loss beside that of the tokens."""
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
        config, context = network.config, _context(network, reading, anchors)
        count = config.num_drafts(config.block_size)
        num_steps = config.num_denoising_steps if config.takes_steps else 1
        drafts, chunk = [], max(1, CHUNK_LOGITS // (len(anchors) * self.num_drafts * config.draft_vocab_size))
        for part in anchors.split(chunk, 1):
            first, memory = reading.tokens.gather(1, part + 1).flatten(), memory_before(network, reading, part)
            state = Denoising(part.numel(), count, config.mask_token_id, part.device)
            for keep in keep_counts(count, num_steps):
                whole = _read_blocks(network, reading, context, part, state.inputs.view(*part.shape, count))
                state.update(network.block(whole.flatten(0, 1), first, memory), keep)
            drafts.append(state.tokens.view(*part.shape, count))
        return torch.cat(drafts, dim=1).movedim(2, 0)[:, None]


def _context(network: DFlashNetwork, reading: Reading, anchors: torch.LongTensor) -> LayerContext:
    """Computes the keys and values of the text up to the last anchor."""
    width = int(anchors.max()) + 1
    fused = network.fuse({key: reading.states[key][:, :width] for key in network.target_hidden_states})
    return network.context(fused, torch.arange(width, device=fused.device)[None])


def memory_before(network: DFlashNetwork, reading: Reading, anchors: torch.LongTensor) -> Memory:
    """What the head remembers of the text before each block; of B blocks a row, `(B A, ...)` each."""
    rows = torch.arange(len(anchors), device=anchors.device)[:, None]
    last = network.fuse({key: reading.states[key][rows, anchors] for key in network.target_hidden_states})
    tokens = torch.stack([reading.tokens.gather(1, anchors + shift).flatten() for shift in (0, 1)], dim=1)
    head, fused = network.block_head, last.flatten(0, 1)[:, None]
    kept = head.begin_text(tokens[:, :1], fused.device)
    return head.remember(kept, fused, Entries(tokens[:, 1:], {}, [1] * len(fused)))


def _read_blocks(
    network: DFlashNetwork,
    reading: Reading,
    context: LayerContext,
    anchors: torch.LongTensor,
    masked: torch.LongTensor,  # (B, A, K), tokens in the place of the masks
) -> torch.Tensor:
    """The network's output `(B, A, S, h)` for blocks at anchors `(B, A)`, each read as drafting does."""
    # The cycle of position t begins with the token at t + 1.
    tokens = torch.cat((reading.tokens.gather(1, anchors + 1)[..., None], masked), dim=2)
    rows, count, size = tokens.shape
    together = min(count, max(1, _PIECE // size))
    pieces = -(-count // together)
    # The blocks of a piece share a row of the batch; the last one is filled up.
    fill = pieces * together - count
    anchors = F.pad(anchors, (0, fill)).reshape(-1, together)
    tokens = F.pad(tokens, (0, 0, 0, fill)).reshape(-1, together * size)
    positions = (anchors[..., None] + 1 + torch.arange(size, device=anchors.device)).flatten(1)
    # What a position does not see: later text, other blocks, and what its layer's view hides.
    text = torch.arange(context[0][0].shape[2], device=anchors.device)
    blocks = torch.arange(together * size, device=anchors.device) // size
    later = text > anchors.repeat_interleave(size, dim=1)[..., None]
    others = (blocks[:, None] != blocks).expand(len(positions), -1, -1)
    unseen = torch.cat((later, others), dim=2)
    distances = positions[..., None] - torch.cat((text.expand(len(positions), -1), positions), dim=1)[:, None]
    masks = {view: ~(unseen | view.hidden(distances))[:, None] for view in network.views}
    repeated = [tuple(part.repeat_interleave(pieces, dim=0) for part in layer) for layer in context]
    output = network(tokens, positions, masks, GrowingCache(repeated), block_size=size)
    return output.view(rows, pieces * together, size, -1)[:, :count]
