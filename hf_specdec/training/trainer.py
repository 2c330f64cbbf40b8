"""The training loop of every recipe: optimiser, schedule, clipping, several processes, progress, and resuming.

It trains one network with any loss on any batches; what they are is a recipe's affair. Where it runs (device, number
of processes) is accelerate's: the same call works in one process, under `accelerate launch` and under `torchrun`.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import nn

from hf_specdec.errors import MissingDependencyError, SpecConfigError, SpecDecError


LossFunction = Callable[[Any], torch.Tensor]

STATE_FOLDER = "training_state"


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

    Raises:
        SpecConfigError: A value is out of range.
        MissingDependencyError: This torch has no Muon.
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
        if self.learning_rate <= 0:
            raise SpecConfigError(f"`learning_rate` must be above 0, got {self.learning_rate}.")
        if self.max_minutes is not None and self.max_minutes <= 0:
            raise SpecConfigError(f"`max_minutes` must be above 0, got {self.max_minutes}.")
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


@dataclass
class Checkpoints:
    """
    Where the state of a run is kept, so that it can be taken up again.

    Args:
        folder (`Path`): Folder of the state.
        every (`int`): Steps between two states; the last step is always kept.
        resume (`bool`): Take up the state in the folder, if there is one.
        identity (`dict`): What makes the run what it is; a state of another run is refused.
    """

    folder: Path
    every: int = 500
    resume: bool = False
    identity: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Position:
    """How far a run has come; a part of its state."""

    identity: dict[str, Any]
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        return {"identity": self.identity, "seconds": self.seconds, "losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_identity(self.identity, state["identity"])
        self.seconds, self.losses = state["seconds"], list(state["losses"])


def check_identity(wanted: dict[str, Any], found: dict[str, Any]) -> None:
    """
    Checks that what is resumed belongs to this run.

    Args:
        wanted (`dict`): Settings of this run.
        found (`dict`): Settings that were kept.

    Raises:
        SpecConfigError: Some differ: which, and how.
    """
    changed = [name for name, value in wanted.items() if found.get(name) != value]
    if changed:
        details = "; ".join(f"{name} was {found.get(name)!r}, is {wanted[name]!r}" for name in changed)
        raise SpecConfigError(
            f"What is to be resumed is another run: {details}. Resume with the settings it was begun with, or begin a "
            "new run in another folder."
        )


class _Objective(nn.Module):
    """The network and its loss as one module, so that a wrapper for several processes sees all of its forward."""

    def __init__(self, network: nn.Module, loss_function: LossFunction):
        super().__init__()
        self.network = network
        self.loss_function = loss_function

    def forward(self, batch: Any) -> torch.Tensor:
        return self.loss_function(batch)


def train(
    network: nn.Module,
    batches: Iterable[Any],
    loss_function: LossFunction,
    options: TrainingOptions,
    *,
    description: str = "training",
    on_step: Callable[[int], None] | None = None,
    measure: Callable[[], float] | None = None,
    measure_every: int = 250,
    checkpoints: Checkpoints | None = None,
    accelerator: Accelerator | None = None,
) -> list[float]:
    """
    Trains the parameters of `network` that require gradients.

    Args:
        network (`nn.Module`): The network to train, left in evaluation mode.
        batches (`Iterable`): Batches, as many as there are steps or more, the same in every process: tensors or
            [`Batch`]es, of which each process takes its share of the rows. Seeded: a resumed run skips those it had.
        loss_function (`Callable`): Gives the scalar loss of a batch on the network's device.
        options ([`TrainingOptions`]): Length, schedule and precision.
        description (`str`): Label of the progress bar.
        on_step (`Callable[[int], None]`, *optional*): Called after every step with the number of steps done.
        measure (`Callable[[], float]`, *optional*): Gives a figure that the progress bar shows, every `measure_every`
            steps: tokens per cycle.
        checkpoints ([`Checkpoints`], *optional*): Keep the state of the run.
        accelerator (`Accelerator`, *optional*): Devices and processes, for this run alone. By default those that
            accelerate finds.

    Returns:
        `list[float]`: The loss of every step, those before a resumption included.

    Raises:
        SpecDecError: The loss is no number any more.
        SpecConfigError: A batch cannot be divided among the processes, or the state is that of another run.
    """
    accelerator = accelerator or Accelerator()
    objective = _Objective(network, loss_function)
    objective, *optimizers = accelerator.prepare(objective, *_optimizers(network, options))
    position = _Position(checkpoints.identity if checkpoints else {})
    if checkpoints:
        accelerator.register_for_checkpointing(position)
        if checkpoints.resume and checkpoints.folder.is_dir():
            accelerator.load_state(str(checkpoints.folder))
    first = len(position.losses)
    start = time.monotonic() - position.seconds
    figure = math.nan
    network.train()
    with _progress_bar(accelerator.is_main_process) as bar:
        task = bar.add_task(description, total=options.steps, completed=first, loss=math.nan, figure="", speed=0)
        tokens_seen, begin = 0, time.monotonic()
        for step, batch in enumerate(islice(batches, first, None), first):
            progress = options.progress(step, _agreed(time.monotonic() - start, options, accelerator))
            if progress >= 1.0:
                break
            tokens_seen += batch.numel()
            batch = _share_of_process(batch, accelerator).to(accelerator.device)
            _set_learning_rate(optimizers, options.learning_rate_at(step, progress))
            with autocast(accelerator.device, options.bf16):
                loss = objective(batch)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(objective.parameters(), options.max_grad_norm)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            position.losses.append(accelerator.gather(loss.detach()).mean().item())
            position.seconds = time.monotonic() - start
            if not math.isfinite(position.losses[-1]):
                raise SpecDecError(f"The loss became {position.losses[-1]} at step {step}; lower `learning_rate`.")
            if measure is not None and (step + 1) % measure_every == 0:
                network.eval()
                figure = measure()
                network.train()
            bar.update(
                task,
                completed=step + 1,
                loss=_recent_mean(position.losses),
                figure="" if math.isnan(figure) else f"tokens per cycle {figure:.2f}",
                speed=round(tokens_seen / (time.monotonic() - begin)),
            )
            # A log file shows no moving bar.
            if (step + 1) % 100 == 0 and accelerator.is_main_process and not bar.console.is_terminal:
                measured = "" if math.isnan(figure) else f", tokens per cycle {figure:.2f}"
                loss = _recent_mean(position.losses)
                bar.console.print(f"{description}: step {step + 1}/{options.steps}, loss {loss:.3f}{measured}")
            if on_step is not None:
                on_step(step + 1)
            if checkpoints and (step + 1) % checkpoints.every == 0:
                _save_state(accelerator, checkpoints.folder)
    if checkpoints:
        _save_state(accelerator, checkpoints.folder)
    accelerator.free_memory(objective, *optimizers)
    network.eval()
    return position.losses


def autocast(device: torch.device, enabled: bool = True):
    """bfloat16 autocast on `device`, or nothing."""
    return torch.autocast(device.type, torch.bfloat16) if enabled else nullcontext()


def _agreed(seconds: float, options: TrainingOptions, accelerator: Accelerator) -> float:
    """The main process's clock, so that all processes stop at the same step."""
    if options.max_minutes is None or accelerator.num_processes == 1:
        return seconds
    return broadcast(torch.tensor(seconds, device=accelerator.device)).item()


def _share_of_process(batch: Any, accelerator: Accelerator) -> Any:
    if accelerator.num_processes == 1:
        return batch
    if len(batch) % accelerator.num_processes:
        raise SpecConfigError(
            f"A batch of {len(batch)} rows cannot be divided among {accelerator.num_processes} processes. Choose a "
            "batch size that is a multiple of their number."
        )
    return batch[accelerator.process_index :: accelerator.num_processes]


def _save_state(accelerator: Accelerator, folder: Path) -> None:
    """Writes the state beside the old one and then takes its place, so that there is always a whole one."""
    new, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    # Not as safetensors, which warn of tied weights.
    accelerator.save_state(str(new), safe_serialization=False)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    accelerator.wait_for_everyone()


def _optimizers(network: nn.Module, options: TrainingOptions) -> list[torch.optim.Optimizer]:
    parameters = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
    hidden = {name for name in parameters if options.muon and name in _hidden_matrices(network)}
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


def _hidden_matrices(network: nn.Module) -> set[str]:
    """Names of the weights of linear layers, without those that read or write the vocabulary."""
    vocabulary = {id(module.weight) for module in network.modules() if isinstance(module, nn.Embedding)}
    return {
        f"{name}.weight"
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and id(module.weight) not in vocabulary and not name.endswith("lm_head")
    }


def _set_learning_rate(optimizers: list[torch.optim.Optimizer], learning_rate: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate


def _recent_mean(losses: list[float], window: int = 50) -> float:
    recent = losses[-window:]
    return sum(recent) / len(recent)


def _progress_bar(visible: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[figure]}"),
        TextColumn("{task.fields[speed]} tokens/s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        refresh_per_second=1,
        disable=not visible,
        console=Console(stderr=True),
    )
