"""XPress: a small causal network refines the tokens of a block in several passes (arXiv:2608.02438).

With y_k the outputs of all B positions of a block, the anchor's included, g their mean, and p_k the token before
position k,

    x_k = W [H y_k; G g; W_1[p_k]]              x_k += sum_{j <= k} L[:, k, j] * x_j              x_k += mlp(x_k)
    logits_k + W_2 x_k

The tokens begin as the best ones of the logits, and every pass predicts all of them anew from those of the pass before
(Jacobi iteration). After B - 1 passes they are those that left-to-right decoding would choose; drafts have fewer. No
distribution goes with them, so that they are chosen, never drawn.

Shapes: R rows, B positions of a block, h hidden size, r rank, U vocabulary of the draft.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ...layers.llama import GatedMLP
from .config import DFlashConfig, XPressConfig


class XPressHead(nn.Module):
    """The network that refines; a new one changes nothing.

    Args:
        config (`DFlashConfig`): Of the draft.
        sizes (`XPressConfig`): Its `xpress`.
    """

    def __init__(self, config: DFlashConfig, sizes: XPressConfig):
        super().__init__()
        size, rank, inner = config.hidden_size, sizes.rank, sizes.mlp_hidden
        self.num_passes: int = sizes.num_passes
        self.w1: nn.Embedding = nn.Embedding(config.vocab_size, rank)
        self.down_h: nn.Linear = nn.Linear(size, rank, bias=False)
        self.down_g: nn.Linear = nn.Linear(size, rank, bias=False)
        self.in_proj: nn.Linear = nn.Linear(3 * rank, rank, bias=False)
        self.mix: BlockMixing = BlockMixing(rank, config.block_size)
        layers = (nn.Linear(*shape, bias=False) for shape in ((rank, inner), (rank, inner), (inner, rank)))
        self.mlp: GatedMLP = GatedMLP(*layers, act_fn=nn.SiLU())
        self.w2: nn.Linear = nn.Linear(rank, config.draft_vocab_size, bias=False)
        nn.init.zeros_(self.w2.weight)

    def forward(self, output: torch.Tensor, previous: torch.LongTensor) -> torch.Tensor:
        """Terms that are added to the logits of a block, `(R, B, U)`.

        Args:
            output (`torch.Tensor` of shape `(R, B, h)`): The network's output.
            previous (`torch.LongTensor` of shape `(R, B)`): The target's tokens before each position: the anchor's has
                the last one of the text in front of it.
        """
        mean = self.down_g(output.mean(1, keepdim=True)).expand(-1, output.shape[1], -1)
        states = self.in_proj(torch.cat((self.down_h(output), mean, self.w1(previous)), dim=-1))
        states = states + self.mix(states)
        return self.w2(states + self.mlp(states))

    def refine(
        self,
        logits: torch.Tensor,
        output: torch.Tensor,
        anchors: torch.LongTensor,
        before: torch.LongTensor,
        best: Callable[[torch.Tensor], torch.LongTensor],
    ) -> torch.LongTensor:
        """The tokens of a block after all passes, `(R, B - 1)`.

        Args:
            logits (`torch.Tensor` of shape `(R, B, U)`): Of the block, without refinement.
            output (`torch.Tensor` of shape `(R, B, h)`): The network's output.
            anchors, before (`torch.LongTensor` of shape `(R,)`): First tokens of the blocks, and the ones before them.
            best (`Callable`): Chooses tokens `(R, B - 1)` by logits `(R, B - 1, U)`, in the target's ids.
        """
        tokens, first = best(logits[:, 1:]), torch.stack((before, anchors), dim=1)
        for _ in range(self.num_passes):
            added = self(output, torch.cat((first, tokens[:, :-1]), dim=1))
            tokens = best(logits[:, 1:] + added[:, 1:])
        return tokens


class BlockMixing(nn.Module):
    """Mixes each channel over the positions up to its own, by weights for each pair of positions."""

    def __init__(self, rank: int, block_size: int):
        super().__init__()
        self.L: nn.Parameter = nn.Parameter(torch.zeros(rank, block_size, block_size))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """From `(R, B, r)` to the same shape."""
        return torch.einsum("rkj,bjr->bkr", self.L.tril(), states)
