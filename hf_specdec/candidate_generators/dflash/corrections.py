"""Corrections of a block's logits by its tokens, from left to right, and the head that foresees how many are kept.

One forward yields the outputs y_j and the logits of all positions. What is drafted at a position then depends on the
tokens t before it, t_0 the anchor, since every kind adds something to its logits:

    DSpark, vanilla (arXiv:2607.05147)   W_2 W_1[t]                      t the token just before
    DSpark, gated                        W_2 (sigmoid(G [y; e]) * e)     e = W_1[t]
    DSpark, rnn                          W_2 tanh(o)                     g, c, o = J [s; e; y]
                                         s <- sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c)
    Domino (arXiv:2605.29707)            V silu(U [y; s])                s: a GRU after the embeddings of t_0 ... t

So draft tokens may be chosen or drawn: the logits of a position are those of its distribution given the tokens before.

DSpark's confidence head estimates the probability that a draft token is accepted once those before it are, from the
position's output and, in most drafts, the row e.

Shapes: R rows, K positions that predict, h hidden size, U vocabulary of the draft, r rank of the Markov head, G size
of Domino's state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from ...kernels.best import best_tokens
from .config import DFlashConfig, DominoConfig


class Block(NamedTuple):
    """Predictions of one forward that are still to be corrected or rated.

    Attributes:
        logits (`torch.Tensor` of shape `(R, K, U)`): Of the draft, before any correction.
        output (`torch.Tensor` of shape `(R, K, h)`): The network's output there.
    """

    logits: torch.Tensor
    output: torch.Tensor


class Chain(NamedTuple):
    """Tokens of a block that were chosen from left to right, or all at once.

    Attributes:
        tokens (`torch.LongTensor` of shape `(R, K)`): The target's ids.
        confidence_logits (`torch.FloatTensor` of shape `(R, K)`, *optional*): Log-odds that each is accepted once
            those before it are; `None` where nothing foresees it.
        probs (`torch.FloatTensor` of shape `(R, K, V)`, *optional*): The distributions that they were sampled from.
    """

    tokens: torch.LongTensor
    confidence_logits: torch.Tensor | None = None
    probs: torch.Tensor | None = None


class CorrectionHead(nn.Module):
    """Base of the corrections. A state, `None` at the anchor, goes from each position of a block to the next one."""

    def forward(
        self,
        position: int,
        tokens: torch.LongTensor,
        output: torch.Tensor,
        state: torch.Tensor | None,
        embed: Callable[[torch.LongTensor], torch.Tensor],
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Corrects one position.

        Args:
            position (`int`): Its number among those that predict.
            tokens (`torch.LongTensor` of shape `(R,)`): The target's tokens just before it.
            output (`torch.Tensor` of shape `(R, h)`): The network's output there.
            state (`torch.Tensor`, *optional*): That of the position before.
            embed (`Callable`): Embeds tokens as the network does.

        Returns:
            `tuple`: What is to be added to its logits, `(R, U)` or `None` for nothing, and its state.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement forward().")


class MarkovHead(CorrectionHead):
    """DSpark's corrections, of rank r.

    Args:
        config (`DFlashConfig`): Has `markov_rank`, `markov_head_type`.
    """

    def __init__(self, config: DFlashConfig):
        super().__init__()
        rank, size = config.markov_rank, config.hidden_size
        self.markov_w1: nn.Embedding = nn.Embedding(config.vocab_size, rank)
        self.markov_w2: nn.Linear = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if config.markov_head_type == "gated":
            self.gate_proj: nn.Linear = nn.Linear(size + rank, rank)
        if config.markov_head_type == "rnn":
            self.joint_proj: nn.Linear = nn.Linear(2 * rank + size, 3 * rank)

    def forward(self, position, tokens, output, state, embed):
        row = self.markov_w1(tokens)
        if "gate_proj" in self._modules:
            row = self.gate_proj(torch.cat((output, row), dim=-1)).sigmoid() * row
        if "joint_proj" in self._modules:
            state = torch.zeros_like(row) if state is None else state
            gate, candidate, row = self.joint_proj(torch.cat((state, row, output), dim=-1)).chunk(3, dim=-1)
            state, row = torch.lerp(candidate.tanh(), state, gate.sigmoid()), row.tanh()
        return self.markov_w2(row), state


class DominoHead(CorrectionHead):
    """Domino's corrections; a new one adds next to nothing.

    Args:
        config (`DFlashConfig`): Of the draft.
        sizes (`DominoConfig`): Its `domino`.
    """

    def __init__(self, config: DFlashConfig, sizes: DominoConfig):
        super().__init__()
        self.first: int = sizes.pure_draft_prefix_len
        self.prefix_gru: PrefixGRU = PrefixGRU(config.hidden_size, sizes.gru_hidden_dim)
        last = nn.Linear(sizes.emb_dim, config.draft_vocab_size, bias=False)
        # Of zeros alone the other parts would learn nothing at first.
        nn.init.normal_(last.weight, std=1e-3)
        self.embed_proj: nn.Sequential = nn.Sequential(
            nn.Linear(config.hidden_size + sizes.gru_hidden_dim, sizes.emb_dim, bias=False), nn.SiLU(), last
        )

    def forward(self, position, tokens, output, state, embed):
        # Tokens of the positions that are not corrected are read, too.
        state = self.prefix_gru(embed(tokens[:, None])[:, 0], state)
        if position < self.first:
            return None, state
        return self.embed_proj(torch.cat((output, state.to(output)), dim=-1)), state

    def states(self, embedded: torch.Tensor) -> torch.Tensor:
        """The states `(N, K, G)` after each token of N blocks, by their embeddings `(N, K, h)`, the anchors' first."""
        states = [self.prefix_gru(embedded[:, 0], None)]
        for position in range(1, embedded.shape[1]):
            states.append(self.prefix_gru(embedded[:, position], states[-1]))
        return torch.stack(states, dim=1)


class PrefixGRU(nn.Module):
    """A GRU without biases, whose weights have the names of torch's."""

    def __init__(self, size: int, state_size: int):
        super().__init__()
        bound = state_size**-0.5
        self.weight_ih_l0: nn.Parameter = nn.Parameter(torch.empty(3 * state_size, size).uniform_(-bound, bound))
        self.weight_hh_l0: nn.Parameter = nn.Parameter(torch.empty(3 * state_size, state_size).uniform_(-bound, bound))

    def forward(self, embedded: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        """The state `(R, G)` after another token, by its embedding `(R, h)`; without a state, after the first one."""
        if state is None:
            state = embedded.new_zeros((len(embedded), self.weight_hh_l0.shape[1]))
        return torch.gru_cell(embedded, state, self.weight_ih_l0, self.weight_hh_l0)


class LeftToRight:
    """Logits of the positions of a block, each given the tokens before it.

    ```python
    walk, tokens = network.left_to_right(block), anchors
    for position in range(count):
        tokens = choose(walk.after(tokens))
    ```

    Args:
        block (`Block`): Its predictions.
        head (`CorrectionHead`, *optional*): The corrections; `None`: there are none.
        embed (`Callable`): As for [`CorrectionHead`].
    """

    def __init__(self, block: Block, head: CorrectionHead | None, embed: Callable[[torch.LongTensor], torch.Tensor]):
        self._block, self._head, self._embed = block, head, embed
        self._position = 0
        self._state: torch.Tensor | None = None

    def best(
        self, anchors: torch.LongTensor, count: int, target_ids: Callable[[torch.LongTensor], torch.LongTensor]
    ) -> list[torch.LongTensor]:
        """The anchors `(R,)`, and after them the best tokens of the next `count` positions, in the target's ids."""
        tokens = [anchors]
        for _ in range(count):
            tokens.append(target_ids(best_tokens(self.after(tokens[-1]))))
        return tokens

    def after(self, tokens: torch.LongTensor) -> torch.Tensor:
        """Logits `(R, U)` of the next position after the target's tokens `(R,)`."""
        logits, output = (part[:, self._position] for part in self._block)
        if self._head is not None:
            added, self._state = self._head(self._position, tokens, output, self._state, self._embed)
            logits = logits if added is None else logits + added
        self._position += 1
        return logits


class ConfidenceHead(nn.Module):
    """DSpark's estimate of what is accepted.

    Args:
        config (`DFlashConfig`): Has `confidence_with_markov`, `markov_rank`.
    """

    def __init__(self, config: DFlashConfig):
        super().__init__()
        rank = config.markov_rank if config.confidence_with_markov else 0
        self.proj: nn.Linear = nn.Linear(config.hidden_size + rank, 1)

    def forward(self, output: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Log-odds `(R, K)` that draft tokens are accepted once those before them are.

        Args:
            output (`torch.Tensor` of shape `(R, K, h)`): The network's output at their positions.
            rows (`torch.Tensor` of shape `(R, K, r)`, *optional*): Rows of the Markov head of the tokens before them.
        """
        return self.proj(output if rows is None else torch.cat((output, rows), dim=-1))[..., 0]
