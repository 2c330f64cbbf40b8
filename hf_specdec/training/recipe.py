"""Recipes, a method's part of the training: a network for a target, its loss, and how it is saved.

The target is frozen. It reads the rows, and the hidden states that a recipe asks for are captured by the mechanism
that drafting uses, so that a network trains on what it will see. Acceptance is measured without generating: a cycle
begins at a position of held-out text, its drafts are compared with the text, and the next cycle begins after the
accepted ones. On text that the target wrote greedily this is the mean acceptance length itself.

Shapes: B rows, T tokens of a row, H hidden size, V vocabulary, K drafts of a cycle, R candidate ranks, N positions.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ..errors import SpecConfigError
from .options import Options
from .reading import IGNORED, Reading, TargetReader, check_plain_head


# Logits of one chunk of positions: small enough for the allocator to reuse their memory.
CHUNK_LOGITS = 2**21

# More logits than that are not kept for the backward pass, but computed again.
KEPT_LOGITS = 2**28


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of a draft on held-out text, teacher-forced."""

    tokens_per_cycle: float  # accepted drafts and the target's own token
    rank_accuracies: tuple[tuple[float, ...], ...]  # (K, R), share of the cycles in which a candidate was right
    num_positions: int  # that were measured

    @property
    def accuracies(self) -> tuple[float, ...]:
        """Share of cycles in which the best candidate was right, at each depth."""
        return tuple(ranks[0] for ranks in self.rank_accuracies)


class Recipe(Options, ABC):
    """A method's network, losses and checkpoint: a dataclass of its options, which `check` holds against a target."""

    method: ClassVar[str]  # as `spec_method` names it
    weight_decay: ClassVar[float] = 0.0  # by default
    muon: ClassVar[bool] = False  # by default: it suits whole hidden matrices

    kl_weight: float

    @property
    def target_hidden_states(self) -> tuple[int | str, ...]:
        """Hidden states of the target that the loss needs; if none, the target reads nothing."""
        return ("last",) if self.kl_weight else ()

    def states_for(self, network: nn.Module) -> tuple[int | str, ...]:
        """Hidden states that the loss or the network needs."""
        return tuple(dict.fromkeys((*self.target_hidden_states, *getattr(network, "target_hidden_states", ()))))

    @property
    @abstractmethod
    def num_drafts(self) -> int:
        """K: drafts of a cycle that the measure assumes."""

    def check(self, target: PreTrainedModel) -> None:
        """Raises a `SpecDecError` where the options do not suit the target."""
        if target.get_output_embeddings() is None:
            raise SpecConfigError(f"{type(target).__name__} has no lm_head. Pass a causal language model as target.")
        if self.kl_weight:
            check_plain_head(target, "`kl_weight`")

    def check_layers(self, target: PreTrainedModel, name: str, most: int) -> None:
        """Checks the layers of the target that an option lists by numbers from 0 to `most`, if it is not left out."""
        layers = getattr(self, name)
        outside = [layer for layer in layers or () if not 0 <= layer <= most]
        if outside or layers == ():
            raise SpecConfigError(
                f"`{name}` must list at least one layer from 0 to {most} of {type(target).__name__}, got "
                f"{outside[0] if outside else 'none'}."
            )

    @abstractmethod
    def build(self, target: PreTrainedModel) -> nn.Module:
        """Builds a new network for the target, in float32."""

    def prepare(self, network: nn.Module, target: PreTrainedModel, tokens: torch.LongTensor) -> None:
        """Takes what a new network needs from the tokens `(N,)` that it is trained on; by default nothing."""

    def loss(self, network: nn.Module, reading: Reading) -> torch.Tensor:
        """The scalar loss of a batch."""
        # Every process must take part in a step with all parameters, also with rows in which nothing counts.
        nothing = sum(parameter.sum() for parameter in network.parameters() if parameter.requires_grad) * 0.0
        return sum(self.losses(network, reading), start=nothing)

    @abstractmethod
    def losses(self, network: Any, reading: Reading) -> Iterator[torch.Tensor | float]:
        """The parts of the loss of a batch, those of its tokens by `token_loss`."""

    @abstractmethod
    def drafts(self, network: Any, reading: Reading, anchors: torch.LongTensor) -> torch.LongTensor:
        """The candidates `(K, R, B, C)` of cycles at anchors `(B, C)`, the best first and by the target's ids.

        The cycle of position t knows the tokens up to t + 1, the target's own, and drafts those at t + 2, t + 3, ...
        The tokens drafted before one may be the text's: it counts only after right ones.
        """

    def save(self, network: nn.Module, folder: Path, dtype: torch.dtype = torch.bfloat16, **about: Any) -> None:
        """Writes a copy in the dtype, with what it may tell `about` it: `target_name`, `tokenizer`, `acceptance`."""
        self.write(copy.deepcopy(network).to(dtype), folder, **about)

    def write(self, network: Any, folder: Path, **about: Any) -> None:
        """Writes the copy that `save` has made in the method's public format."""
        network.save(folder)

    def token_loss(
        self,
        reading: Reading,
        logits: Callable[[torch.Tensor], torch.Tensor],  # of some of the inputs, (n, ..., U)
        inputs: torch.Tensor,  # (N, ...)
        labels: torch.LongTensor,  # (N, ...), the draft's ids; -100 where none counts
        places: torch.LongTensor,  # (N, ...), in the flattened batch: where the target predicts them
        num_logits: int,  # of an input
        weights: torch.Tensor | None = None,  # (N, ...)
        token_ids: torch.LongTensor | None = None,  # (U,), the target's of the draft's ids where they differ
    ) -> torch.Tensor | float:
        """The weighted mean loss of the tokens that a network predicts from N inputs."""
        if not len(labels):
            return 0.0
        weights = torch.ones(labels.shape, device=labels.device) if weights is None else weights

        def chunk_loss(part: slice) -> torch.Tensor:
            target_logits = None
            if self.kl_weight:
                target_logits = reading.target_logits(places[part]).to(inputs.device)
                target_logits = target_logits if token_ids is None else target_logits[..., token_ids]
            losses = draft_loss(logits(inputs[part]), labels[part], target_logits, self.kl_weight)
            return (weights[part] * losses).sum()

        return sum_over_chunks(chunk_loss, len(labels), num_logits) / weights.sum()

    @torch.no_grad()
    def measure(
        self, network: nn.Module, reader: TargetReader, batches: Iterable[Mapping[str, torch.Tensor]]
    ) -> Acceptance:
        """Measures the draft's acceptance on held-out batches."""
        committed = cycles = 0
        right = seen = torch.zeros(())
        for batch in batches:
            reading = reader.read(**batch)
            anchors = reading.cycle_anchors()
            if not anchors.numel():
                continue
            labels = reading.labels_at(anchors, self.num_drafts)
            hits = self.drafts(network, reading, anchors) == labels[:, None]
            right, seen = right + hits.sum((2, 3)).cpu(), seen + (labels != IGNORED).sum((1, 2)).cpu()
            runs = hits[:, 0].long().cumprod(0).sum(0)
            for row in zip(anchors.tolist(), runs.tolist(), reading.begins_at(anchors).tolist()):
                end = 0
                for anchor, run, begins in zip(*row):
                    if begins and anchor >= end:
                        committed, cycles, end = committed + run + 1, cycles + 1, anchor + run + 1
        if not cycles:
            raise SpecConfigError(
                "The held-out text has no position to measure acceptance at. Give more text, longer rows, or a larger "
                "held-out share."
            )
        shares = right / seen.clamp(min=1)[:, None]
        return Acceptance(committed / cycles, tuple(map(tuple, shares.tolist())), int(seen[0]))


class HeadsRecipe(Recipe):
    """The loss and measure of a network that drafts K tokens from the target's last hidden state alone.

    The state at position t has predicted token t + 1. Draft d, counted from 0, is token t + 2 + d; its loss is
    weighted with `head_decay`^d, since it only matters once the drafts before it are right (Cai et al. 2024,
    arXiv:2401.10774, section 2.2.1).
    """

    num_ranks: ClassVar[int] = 1  # of candidates, whose accuracy is measured
    target_hidden_states: ClassVar[tuple[int | str, ...]] = ("last",)

    head_decay: float
    max_positions: int | None

    @abstractmethod
    def draft_logits(self, network: nn.Module, reading: Reading, positions: torch.LongTensor) -> torch.Tensor:
        """The logits `(K, N, V)` of the cycles that begin at the positions `(N,)` of the flattened batch."""

    def losses(self, network: nn.Module, reading: Reading) -> Iterator[torch.Tensor | float]:
        labels = [reading.next_tokens(2 + draft).flatten() for draft in range(self.num_drafts)]
        labels = torch.stack(labels, dim=1)
        positions = (labels != IGNORED).any(1).nonzero()[:, 0]
        if self.max_positions is not None and len(positions) > self.max_positions:
            chosen = torch.randperm(len(positions), device=positions.device)[: self.max_positions]
            positions = positions[chosen.sort().values]
        labels = labels[positions]
        counts = labels != IGNORED
        decay = self.head_decay ** torch.arange(self.num_drafts, device=labels.device)
        yield self.token_loss(
            reading,
            lambda places: self.draft_logits(network, reading, places).movedim(0, 1),
            positions,
            labels,
            self.drafted_from(positions, reading).T,
            self.num_drafts * reading.vocab_size,
            weights=counts * decay / counts.sum(0).clamp(min=1),
        )

    def drafts(self, network: nn.Module, reading: Reading, anchors: torch.LongTensor) -> torch.LongTensor:
        rows = torch.arange(len(anchors), device=anchors.device)[:, None]
        positions = (anchors + rows * reading.tokens.shape[1]).flatten()
        ranks = min(self.num_ranks, reading.vocab_size)
        parts = [
            self.draft_logits(network, reading, part).topk(ranks, dim=-1).indices for part in positions.split(512)
        ]
        return torch.cat(parts, dim=1).movedim(2, 1).unflatten(2, anchors.shape)

    def drafted_from(self, positions: torch.LongTensor, reading: Reading) -> torch.LongTensor:
        """Positions `(K, N)` at which the target decides each draft's token; those past the end do not count."""
        offsets = torch.arange(1, self.num_drafts + 1, device=positions.device)[:, None]
        return (positions + offsets).clamp(max=reading.tokens.numel() - 1)


def sum_over_chunks(chunk_loss: Callable[[slice], torch.Tensor], count: int, logits_per_position: int) -> torch.Tensor:
    """Sums `chunk_loss` over slices of `count` positions that have a bounded number of logits."""
    chunk = max(16, CHUNK_LOGITS // logits_per_position)
    slices = [slice(start, start + chunk) for start in range(0, count, chunk)]
    if torch.is_grad_enabled() and count * logits_per_position > KEPT_LOGITS:
        return sum(checkpoint(chunk_loss, rows, use_reentrant=False) for rows in slices)
    return sum(chunk_loss(rows) for rows in slices)


def draft_loss(
    logits: torch.Tensor, labels: torch.LongTensor, target_logits: torch.Tensor | None, kl_weight: float
) -> torch.Tensor:
    """Mixes cross-entropy of labels `(...)` and KL(target || draft) by logits `(..., V)`; 0 where a label is -100."""
    # Autocast decides about the dtype: on a GPU it takes the logarithms in float32; on a CPU it leaves them in
    # bfloat16, which is twice as fast, and the rounding is small beside the noise of a batch.
    log_probs = logits.log_softmax(-1)
    losses = 0.0
    if kl_weight < 1:
        with torch.autocast(logits.device.type, enabled=False):
            flat = F.nll_loss(log_probs.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="none")
        losses = (1 - kl_weight) * flat.view(labels.shape).float()
    if kl_weight > 0:
        assert target_logits is not None, "needed for the divergence"
        targets = target_logits[..., : logits.shape[-1]].log_softmax(-1)
        divergence = F.kl_div(log_probs, targets, reduction="none", log_target=True)
        losses = losses + kl_weight * divergence.sum(-1, dtype=torch.float32)
    return losses.masked_fill(labels == IGNORED, 0.0)


def best_tokens(logits: Callable[[torch.Tensor], torch.Tensor], output: torch.Tensor) -> torch.LongTensor:
    """Returns the most probable tokens `(...)` of outputs `(..., h)`, with the logits of few at a time."""
    best = [logits(rows).argmax(-1) for rows in output.flatten(0, -2).split(512)]
    return torch.cat(best).view(output.shape[:-1])
