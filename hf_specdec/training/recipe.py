"""What a method adds to the training frame: a network for a target, its loss, and how it is saved.

The target is frozen. It reads the rows, and the hidden states that a recipe asks for are captured by the mechanism
that drafting uses, so that a network trains on what it will see. Acceptance is measured without generating: a cycle
begins at a position of held-out text, its drafts are compared with the text, and the next cycle begins behind the
accepted ones. On text that the target wrote greedily this is the mean acceptance length itself.

Shapes: B rows, T tokens of a row, H hidden size, V vocabulary, K drafts of a cycle, R candidate ranks, N positions.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.decoding.states import captured_states
from hf_specdec.errors import SpecConfigError, UnsupportedModelError


# Logits of one chunk of positions: small enough for the allocator to reuse their memory.
CHUNK_LOGITS = 2**21

# More logits than that are not kept for the backward pass, but computed again.
KEPT_LOGITS = 2**28

IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """
    Rows of tokens.

    Args:
        tokens (`torch.LongTensor` of shape `(B, T)`): Token ids.
        counted (`torch.BoolTensor` of shape `(B, T)`): Which tokens a draft is to predict: not those of a prompt
            that the target continued, and not the padding behind its answer.
        index (`torch.LongTensor` of shape `(B,)`, *optional*): Which rows of a whole these are.
    """

    tokens: torch.LongTensor
    counted: torch.BoolTensor
    index: torch.LongTensor | None = None

    @classmethod
    def of(cls, tokens: torch.LongTensor | Batch) -> Batch:
        """A batch in which every token counts, if it is none yet."""
        return tokens if isinstance(tokens, Batch) else cls(tokens, torch.ones_like(tokens, dtype=torch.bool))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, rows: Any) -> Batch:
        return Batch(self.tokens[rows], self.counted[rows], None if self.index is None else self.index[rows])

    def to(self, device: torch.device) -> Batch:
        # The index stays with what it points into.
        return Batch(self.tokens.to(device), self.counted.to(device), self.index)

    def numel(self) -> int:
        return self.tokens.numel()


@dataclass(frozen=True)
class Reading:
    """
    A batch as the target has read it.

    Args:
        tokens, counted: See [`Batch`].
        states (`dict`): The hidden states asked for, each `(B, T, H)`, see [`captured_states`].
        head (`nn.Module`, *optional*): The target's lm_head.
    """

    tokens: torch.LongTensor
    counted: torch.BoolTensor
    states: dict = field(default_factory=dict)
    head: nn.Module | None = None

    def flat_states(self, key: Any = "last") -> torch.Tensor:
        """States of all positions, row after row: `(B * T, H)`."""
        return self.states[key].flatten(0, 1)

    @torch.no_grad()
    def target_logits(self, positions: torch.LongTensor) -> torch.Tensor:
        """The target's logits at some of the B * T positions, `(*positions.shape, V)`."""
        return self.head(self.flat_states()[positions])

    @property
    def vocab_size(self) -> int:
        """V, also where the weights of the head are packed."""
        return getattr(self.head, "out_features", None) or self.head.weight.shape[0]

    def next_tokens(self, offset: int) -> torch.LongTensor:
        """The token `offset` places on, `(B, T)`; -100 where there is none or it does not count."""
        tokens = torch.where(self.counted, self.tokens, IGNORED)
        return F.pad(tokens[:, offset:], (0, min(offset, tokens.shape[1])), value=IGNORED)


class TargetReader:
    """
    Lets the frozen target read batches.

    Args:
        target (`PreTrainedModel`, *optional*): The target; `None` if a recipe needs nothing of it.
        states (`tuple`): Which hidden states to capture.
    """

    def __init__(self, target: PreTrainedModel | None, states: tuple):
        self.target, self.states = target, states
        self._kept: dict[Any, torch.Tensor] = {}
        if states:
            target.requires_grad_(False).eval()

    def keep(self, batches: Iterable[Batch]) -> None:
        """
        Reads the rows of a whole, in order, and keeps their states in the host's memory: for several passes.

        Memory: H values of the target's type for every token and state.
        """
        parts: dict[Any, list[torch.Tensor]] = {key: [] for key in self.states}
        for batch in batches:
            for key, state in self.read(batch.to(self.target.device)).states.items():
                parts[key].append(state.cpu())
        self._kept = {key: torch.cat(states) for key, states in parts.items()}

    @torch.no_grad()
    def read(self, batch: torch.LongTensor | Batch) -> Reading:
        batch = Batch.of(batch)
        if not self.states:
            return Reading(batch.tokens, batch.counted)
        if self._kept and batch.index is not None:
            states = {key: kept[batch.index].to(batch.tokens.device) for key, kept in self._kept.items()}
            return Reading(batch.tokens, batch.counted, states, self.target.get_output_embeddings())
        counted = batch.counted.any(0).nonzero()
        width = int(counted[-1]) + 1 if len(counted) else 1
        # In its own type, whatever the draft trains in.
        with (
            captured_states(self.target, self.states) as states,
            torch.autocast(batch.tokens.device.type, enabled=False),
        ):
            self.target.get_decoder()(input_ids=batch.tokens[:, :width], use_cache=False)
        # Nothing is predicted from the padding behind.
        states = {key: F.pad(state, (0, 0, 0, batch.tokens.shape[1] - width)) for key, state in states.items()}
        return Reading(batch.tokens, batch.counted, states, self.target.get_output_embeddings())


@torch.no_grad()
def check_plain_head(model: PreTrainedModel, what: str) -> None:
    """Checks that the logits are what the lm_head makes of the last hidden state, with nothing behind it.

    Raises:
        UnsupportedModelError: They are scaled or capped.
    """
    tokens = torch.arange(min(4, model.get_input_embeddings().weight.shape[0]), device=model.device)[None]
    with captured_states(model, ("last",)) as states:
        logits = model(input_ids=tokens, use_cache=False).logits.float()
    plain = model.get_output_embeddings()(states["last"]).float()
    if not torch.allclose(plain, logits, atol=1e-2, rtol=1e-2):
        raise UnsupportedModelError(
            f"{type(model).__name__} scales or caps the logits behind its lm_head, which {what} does not follow. "
            "Set `kl_weight` to 0, or choose another model."
        )


@dataclass(frozen=True)
class Acceptance:
    """
    What a draft achieves on held-out text, teacher-forced.

    Attributes:
        tokens_per_cycle (`float`): Mean number of tokens that a cycle commits: accepted drafts and the target's own.
        rank_accuracies (`tuple[tuple[float, ...], ...]` of shape `(K, R)`): How often the candidate of each rank was
            right, at each depth, over all positions.
        num_positions (`int`): Positions that were measured.
    """

    tokens_per_cycle: float
    rank_accuracies: tuple[tuple[float, ...], ...]
    num_positions: int

    @property
    def accuracies(self) -> tuple[float, ...]:
        """How often the best candidate was right, at each depth."""
        return tuple(ranks[0] for ranks in self.rank_accuracies)


class Recipe(ABC):
    """
    How a method's network is trained. A recipe is made from its options, which it checks by themselves; `check` then
    holds them against a target before anything is trained.

    Class attributes:
        method (`str`): The method, as `spec_method` names it.
        weight_decay (`float`): What suits the method, where the user names none.
        muon (`bool`): Whether whole matrices are trained that Muon suits.
    """

    method: ClassVar[str]
    weight_decay: ClassVar[float] = 0.0
    muon: ClassVar[bool] = False

    @property
    @abstractmethod
    def target_hidden_states(self) -> tuple:
        """Which hidden states of the target the loss needs; none, and the target reads nothing."""

    def states_for(self, network: nn.Module) -> tuple:
        """Those, and what else the network reads."""
        return self.target_hidden_states

    @property
    @abstractmethod
    def num_drafts(self) -> int:
        """K: drafts of a cycle that the measure assumes."""

    @abstractmethod
    def check(self, target: PreTrainedModel) -> None:
        """Raises a `SpecDecError` if the options do not suit the target."""

    @abstractmethod
    def build(self, target: PreTrainedModel) -> nn.Module:
        """A new network for the target, in float32."""

    def prepare(self, network: nn.Module, target: PreTrainedModel, tokens: torch.LongTensor) -> None:  # noqa: B027
        """Lets a new network take what it needs from the tokens that it is trained on, `(N,)`; by default nothing."""

    @abstractmethod
    def loss(self, network: nn.Module, reading: Reading) -> torch.Tensor:
        """The scalar loss of a batch."""

    @abstractmethod
    def hits(self, network: nn.Module, reading: Reading) -> tuple[torch.BoolTensor, torch.BoolTensor]:
        """
        What the candidates of cycles that begin at each position are worth. The cycle of position t knows the tokens
        up to t + 1 (the target's own) and drafts those at t + 2, t + 3, ...

        Returns:
            `torch.BoolTensor` of shape `(K, R, B, T)`: whether a depth's candidate of a rank is the token of the text;
            `torch.BoolTensor` of shape `(K, B, T)`: whether that token is there and counts.
        """

    def save(
        self,
        network: nn.Module,
        folder: Path,
        *,
        target_name: str = "",
        tokenizer: PreTrainedTokenizerBase | None = None,
        acceptance: Acceptance | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Writes the network in its method's public format, in `dtype`; the network itself stays as it is."""
        copied = copy.deepcopy(network).to(dtype)
        self.write(copied, folder, target_name=target_name, tokenizer=tokenizer, acceptance=acceptance)

    def write(self, network: Any, folder: Path, *, target_name: str, tokenizer: Any, acceptance: Any) -> None:
        """What `save` does with the copy in the right type; the arguments are those of `save`."""
        network.save(folder)

    def objective(self, network: nn.Module, reader: TargetReader) -> Callable[[Any], torch.Tensor]:
        """The loss as a function of a batch, as [`train`] takes it."""
        return lambda batch: self.loss(network, reader.read(batch))

    @torch.no_grad()
    def measure(self, network: nn.Module, reader: TargetReader, batches: Iterable[Any]) -> Acceptance:
        """The draft's acceptance on held-out batches."""
        committed = cycles = 0
        right = seen = torch.zeros(())
        for batch in batches:
            hits, known = self.hits(network, reader.read(batch))
            hits = hits & known[:, None]
            right, seen = right + hits.sum((2, 3)).cpu(), seen + known.sum((1, 2)).cpu()
            runs = hits[:, 0].long().cumprod(0).sum(0)
            for row_runs, row_known in zip(runs.tolist(), known[0].tolist()):
                row_committed, row_cycles = walk(row_runs, row_known)
                committed, cycles = committed + row_committed, cycles + row_cycles
        if not cycles:
            raise SpecConfigError(
                "The held-out text has no position to measure acceptance at. Give more text, longer rows, or a larger "
                "held-out share."
            )
        shares = right / seen.clamp(min=1)[:, None]
        ranks = tuple(tuple(row) for row in shares.tolist())
        return Acceptance(committed / cycles, ranks, int(seen[0]))


def walk(runs: list[int], known: list[bool]) -> tuple[int, int]:
    """Goes through a row in cycles.

    Args:
        runs (`list[int]`): How many drafts a cycle that begins at each position would get accepted.
        known (`list[bool]`): Where a cycle can begin.

    Returns:
        Tokens committed, and cycles.
    """
    position = committed = cycles = 0
    while position < len(runs):
        if known[position]:
            committed += runs[position] + 1
            cycles += 1
            position += runs[position]
        position += 1
    return committed, cycles


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
    """
    `(1 - kl_weight)` of the cross-entropy of the text's tokens and `kl_weight` of KL(target || draft), per position.

    Args:
        logits (`torch.Tensor` of shape `(..., V)`): The draft's.
        labels (`torch.LongTensor` of shape `(...)`): The tokens of the text; 0 is the loss where they are -100.
        target_logits (`torch.Tensor` of shape `(..., V)`, *optional*): The target's, unless `kl_weight` is 0.

    The type is autocast's affair: on a GPU it takes the logarithms in float32; on a CPU it leaves them in bfloat16,
    which is twice as fast, and the rounding is small beside the noise of a batch.
    """
    log_probs = logits.log_softmax(-1)
    losses = 0.0
    if kl_weight < 1:
        with torch.autocast(logits.device.type, enabled=False):
            flat = F.nll_loss(log_probs.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="none")
        losses = (1 - kl_weight) * flat.view(labels.shape).float()
    if kl_weight > 0:
        targets = target_logits[..., : logits.shape[-1]].log_softmax(-1)
        divergence = F.kl_div(log_probs, targets, reduction="none", log_target=True)
        losses = losses + kl_weight * divergence.sum(-1, dtype=torch.float32)
    return losses.masked_fill(labels == IGNORED, 0.0)


def check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise SpecConfigError(f"`{name}` must be from 0 to 1, got {value}.")


def check_at_least(name: str, value: int, least: int = 1) -> None:
    if value < least:
        raise SpecConfigError(f"`{name}` must be at least {least}, got {value}.")
