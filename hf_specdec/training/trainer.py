"""A small training frame: optimiser, schedule, clipping and progress; a recipe adds batches and a loss.

On a CPU two things decide the speed of a small model: attention and the logits. `blockwise_causal` computes
attention in blocks of queries that never look past the diagonal, and `mean_over_chunks` computes losses on slices of
the logits that stay small enough for the allocator to reuse.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from hf_specdec.errors import MissingDependencyError, SpecConfigError, SpecDecError


LossFunction = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class TrainingOptions:
    """
    Args:
        steps (`int`): Optimiser steps.
        learning_rate (`float`): Peak of the cosine schedule, reached after `warmup_steps`.
        warmup_steps (`int`): Steps of linear warm-up.
        final_learning_rate (`float`): Share of the peak at which the schedule ends.
        weight_decay (`float`): Decoupled weight decay, on matrices only.
        max_grad_norm (`float`): Gradients are clipped to this norm.
        max_minutes (`float`, *optional*): Time limit. The schedule follows whichever of steps and time is further
            on, so that a run cut by time still ends at the final learning rate.
        muon (`bool`): Update the matrices of hidden layers with Muon and only the rest with AdamW, which takes
            markedly fewer steps when a whole network is trained from scratch.
        bf16 (`bool`): Compute in bfloat16 autocast; weights and optimiser stay in float32.
    """

    steps: int
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    final_learning_rate: float = 0.02
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    max_minutes: float | None = None
    muon: bool = False
    bf16: bool = True

    def __post_init__(self):
        if self.steps < 1:
            raise SpecConfigError(f"`steps` must be at least 1, got {self.steps}.")
        if self.muon and not hasattr(torch.optim, "Muon"):
            raise MissingDependencyError(
                f"`muon=True` needs torch 2.9 or later, found {torch.__version__}. Upgrade torch or set `muon=False`."
            )

    def progress(self, step: int, seconds: float) -> float:
        """Share of the training that is done, 0 to 1."""
        by_time = seconds / (60 * self.max_minutes) if self.max_minutes else 0.0
        return min(1.0, max(step / self.steps, by_time))

    def learning_rate_at(self, step: int, progress: float) -> float:
        warmup = min(1.0, (step + 1) / max(1, self.warmup_steps))
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.learning_rate * warmup * (self.final_learning_rate + (1 - self.final_learning_rate) * cosine)


def train(
    model: nn.Module,
    batches: Iterable[torch.Tensor],
    loss_function: LossFunction,
    options: TrainingOptions,
    *,
    description: str = "training",
    on_step: Callable[[int], None] | None = None,
) -> list[float]:
    """
    Trains the parameters of `model` that require gradients.

    Args:
        model (`nn.Module`): The network to train, left in evaluation mode.
        batches (`Iterable[torch.Tensor]`): Batches of tokens, as many as there are steps or more.
        loss_function (`Callable`): Gives the scalar loss of a batch.
        options ([`TrainingOptions`]): Length, schedule and precision.
        description (`str`): Label of the progress bar.
        on_step (`Callable[[int], None]`, *optional*): Called after every step with the number of steps done.

    Returns:
        `list[float]`: The loss of every step.
    """
    optimizers = _optimizers(model, options)
    device = next(model.parameters()).device
    losses: list[float] = []
    start = time.monotonic()
    model.train()
    with _progress_bar() as bar:
        task = bar.add_task(description, total=options.steps, loss=math.nan, speed=0)
        tokens_seen = 0
        for step, batch in enumerate(batches):
            seconds = time.monotonic() - start
            progress = options.progress(step, seconds)
            if progress >= 1.0:
                break
            _set_learning_rate(optimizers, options.learning_rate_at(step, progress))
            with autocast(device, options.bf16):
                loss = loss_function(batch.to(device))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), options.max_grad_norm)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                raise SpecDecError(f"The loss became {losses[-1]} at step {step}; lower `learning_rate`.")
            tokens_seen += batch.numel()
            bar.update(
                task,
                completed=step + 1,
                loss=_recent_mean(losses),
                speed=round(tokens_seen / (time.monotonic() - start)),
            )
            if (step + 1) % 100 == 0 and not bar.console.is_terminal:  # a log file shows no moving bar
                bar.console.print(f"{description}: step {step + 1}/{options.steps}, loss {_recent_mean(losses):.3f}")
            if on_step is not None:
                on_step(step + 1)
    model.eval()
    return losses


def autocast(device: torch.device, enabled: bool = True):
    """bfloat16 autocast on `device`, or nothing."""
    return torch.autocast(device.type, torch.bfloat16) if enabled else nullcontext()


def _optimizers(model: nn.Module, options: TrainingOptions) -> list[torch.optim.Optimizer]:
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    hidden = {name for name in parameters if options.muon and name in _hidden_matrices(model)}
    rest = [parameter for name, parameter in parameters.items() if name not in hidden]
    groups = [
        {"params": [parameter for parameter in rest if parameter.ndim >= 2], "weight_decay": options.weight_decay},
        {"params": [parameter for parameter in rest if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95), fused=True)
    ]
    if hidden:
        muon = torch.optim.Muon(
            [parameters[name] for name in sorted(hidden)],
            lr=options.learning_rate,
            weight_decay=options.weight_decay,
            adjust_lr_fn="match_rms_adamw",  # so that one learning rate serves both optimisers
        )
        optimizers.append(muon)
    return optimizers


def _hidden_matrices(model: nn.Module) -> set[str]:
    """Names of the weights of linear layers, without those that read or write the vocabulary."""
    vocabulary = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module.weight) not in vocabulary and not name.endswith("lm_head")
    }


def _set_learning_rate(optimizers: list[torch.optim.Optimizer], learning_rate: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate


def _recent_mean(losses: list[float], window: int = 50) -> float:
    recent = losses[-window:]
    return sum(recent) / len(recent)


def _progress_bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[speed]} tokens/s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        refresh_per_second=1,
    )


def next_token_loss(model: PreTrainedModel) -> LossFunction:
    """Returns the mean cross-entropy of the next token as a function of a batch of tokens `(B, T)`."""

    def loss_function(tokens: torch.Tensor) -> torch.Tensor:
        hidden = model.model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state.flatten(0, 1)
        labels = tokens[:, 1:].flatten()

        def chunk_loss(rows: slice) -> torch.Tensor:
            return F.cross_entropy(model.lm_head(hidden[rows]).float(), labels[rows], reduction="sum")

        return mean_over_chunks(chunk_loss, len(labels))

    return loss_function


def distillation_loss(student: PreTrainedModel, teacher: PreTrainedModel) -> LossFunction:
    """
    Returns KL(teacher || student) of the next-token distributions, averaged over the positions of a batch.

    Both models read the same tokens; only the student receives gradients.
    """

    def loss_function(tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            teacher_hidden = teacher.model(input_ids=tokens, use_cache=False).last_hidden_state.flatten(0, 1)
        hidden = student.model(input_ids=tokens, use_cache=False).last_hidden_state.flatten(0, 1)

        def chunk_loss(rows: slice) -> torch.Tensor:
            with torch.no_grad():
                target = teacher.lm_head(teacher_hidden[rows]).float().log_softmax(-1)
            draft = student.lm_head(hidden[rows]).float().log_softmax(-1)
            return F.kl_div(draft, target, reduction="sum", log_target=True)

        return mean_over_chunks(chunk_loss, len(hidden))

    return loss_function


def mean_over_chunks(chunk_loss: Callable[[slice], torch.Tensor], count: int, chunk: int = 512) -> torch.Tensor:
    """Sums `chunk_loss` over slices of `count` positions and divides by `count`."""
    return sum(chunk_loss(slice(start, start + chunk)) for start in range(0, count, chunk)) / count


def blockwise_causal(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    block: int = 128,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """
    Causal self-attention over whole, unpadded rows, in blocks of queries.

    Args:
        query (`torch.FloatTensor` of shape `(B, H, T, D)`): Queries.
        key, value (`torch.FloatTensor` of shape `(B, H_kv, T, D)`): Keys and values, `H` a multiple of `H_kv`.
        attention_mask: Must be `None`; rows have no padding.

    Returns:
        `torch.FloatTensor` of shape `(B, T, H, D)`, and `None` for the attention weights.
    """
    batch, heads, length, dim = query.shape
    kv_heads = key.shape[1]
    if attention_mask is not None or key.shape[2] != length or dropout:
        raise ValueError("`blockwise_causal` attends over whole rows: no mask, no cache and no dropout.")
    query, key = query.to(value.dtype), key.to(value.dtype)
    query = query.view(batch, kv_heads, heads // kv_heads, length, dim)
    scaling = dim**-0.5 if scaling is None else scaling
    future = torch.full((block, block), -math.inf, dtype=value.dtype, device=value.device).triu(1)
    outputs = []
    for start in range(0, length, block):
        end = min(start + block, length)
        size = end - start
        scores = (query[..., start:end, :] * scaling).flatten(2, 3) @ key[:, :, :end].transpose(-1, -2)
        scores = scores.view(batch, kv_heads, -1, size, end)
        scores[..., start:] += future[:size, :size]
        weights = scores.softmax(-1, dtype=value.dtype).flatten(2, 3)
        outputs.append((weights @ value[:, :, :end]).view(batch, heads, size, dim))
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


AttentionInterface.register("blockwise_causal", blockwise_causal)
