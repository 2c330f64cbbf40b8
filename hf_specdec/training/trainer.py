"""The training loop of every recipe: optimiser, schedule, clipping, several processes, progress, and resuming.

It trains one network with any loss on any batches; a recipe chooses both. accelerate chooses devices and processes:
the same call works in one process, under `accelerate launch` and under `torchrun`.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import nn

from ..errors import SpecConfigError, SpecDecError
from ..machine import multiplies_bfloat16
from .options import TrainingOptions


LossFunction = Callable[[Any], torch.Tensor]

# Steps between two measurements, and between two lines in a log file.
MEASURE_EVERY = 250
LOG_EVERY = 100


class RunState:
    """
    Progress of a run, kept in a folder with weights, optimisers and random generators, to be resumed from.

    Args:
        folder (`Path`, *optional*): Folder of the state; by default it is not kept.
        identity (`dict`, *optional*): Settings that make the run what it is; a state with others is refused.

    Attributes:
        losses (`list[float]`): The loss of every step so far.
        seconds (`float`): Training time so far.
    """

    def __init__(self, folder: Path | None = None, identity: dict[str, Any] | None = None):
        self.folder = folder
        self.identity: dict[str, Any] = identity or {}
        self.losses: list[float] = []
        self.seconds: float = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"identity": self.identity, "seconds": self.seconds, "losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_identity(self.identity, state["identity"])
        self.seconds = state["seconds"]
        self.losses = list(state["losses"])

    def begin(self, accelerator: Accelerator, resume: bool) -> None:
        """Loads the state of the folder if the run is to be resumed."""
        accelerator.register_for_checkpointing(self)
        if resume and self.folder is not None and self.folder.is_dir():
            accelerator.load_state(str(self.folder))

    def save(self, accelerator: Accelerator) -> None:
        """Writes the state beside the old one, which it then replaces, so that there is always a whole one."""
        if self.folder is None:
            return
        new, old = (self.folder.with_name(self.folder.name + suffix) for suffix in (".new", ".old"))
        # Not as safetensors, which warn of tied weights.
        accelerator.save_state(str(new), safe_serialization=False)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            shutil.rmtree(old, ignore_errors=True)
            if self.folder.exists():
                self.folder.rename(old)
            new.rename(self.folder)
            shutil.rmtree(old, ignore_errors=True)
        accelerator.wait_for_everyone()


def check_identity(wanted: dict[str, Any], found: dict[str, Any]) -> None:
    """
    Checks that a kept state belongs to this run.

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
    measure: Callable[[], float] | None = None,
    state: RunState | None = None,
    accelerator: Accelerator | None = None,
) -> list[float]:
    """
    Trains the parameters of `network` that require gradients.

    Args:
        network (`nn.Module`): The network to train, left in evaluation mode.
        batches (`Iterable`): Batches, as many as there are steps or more, the same in every process: tensors or
            [`Rows`], of which each process takes its share. Seeded: a resumed run skips those it had.
        loss_function (`Callable`): Gives the scalar loss of a batch on the network's device.
        options ([`TrainingOptions`]): Length, schedule and precision.
        description (`str`): Label of the progress bar.
        measure (`Callable[[], float]`, *optional*): Gives the tokens per cycle that the progress bar shows.
        state ([`RunState`], *optional*): Progress of the run, kept in a folder.
        accelerator (`Accelerator`, *optional*): Devices and processes, for this run alone. By default those that
            accelerate finds.

    Returns:
        `list[float]`: The loss of every step, those before a resumption included.

    Raises:
        SpecDecError: The loss is infinite or not a number.
        SpecConfigError: The state is that of another run.
    """
    accelerator, state = accelerator or Accelerator(), state or RunState()
    objective, *optimizers = accelerator.prepare(_Objective(network, loss_function), *_optimizers(network, options))
    state.begin(accelerator, options.resume)
    first, start = len(state.losses), time.monotonic() - state.seconds
    device, processes = accelerator.device, accelerator.num_processes
    # Other CPUs take many times as long for products in bfloat16 as in float32.
    computes_in_bfloat16 = options.bf16 and (device.type != "cpu" or bool(multiplies_bfloat16()))
    network.train()
    with _ProgressBar(description, options.steps, first, accelerator.is_main_process) as bar:
        for step, batch in enumerate(islice(batches, first, None), first):
            seconds = time.monotonic() - start
            if options.max_minutes is not None and processes > 1:
                # By the main process's clock, so that all stop at the same step.
                seconds = broadcast(torch.tensor(seconds, device=device)).item()
            progress = options.progress(step, seconds)
            if progress >= 1.0:
                break
            learning_rate = options.learning_rate_at(step, progress)
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["lr"] = learning_rate
            share = batch[accelerator.process_index :: processes].to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=computes_in_bfloat16):
                loss = objective(share)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(objective.parameters(), options.max_grad_norm)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            state.losses.append(accelerator.gather(loss.detach()).mean().item())
            state.seconds = time.monotonic() - start
            if not math.isfinite(state.losses[-1]):
                raise SpecDecError(f"The loss became {state.losses[-1]} at step {step}; lower `learning_rate`.")
            if measure is not None and (step + 1) % MEASURE_EVERY == 0:
                network.eval()
                bar.figure = f"tokens per cycle {measure():.2f}"
                network.train()
            bar.show(state.losses, batch.numel())
            if (step + 1) % options.save_every == 0:
                state.save(accelerator)
    state.save(accelerator)
    accelerator.free_memory(objective, *optimizers)
    network.eval()
    return state.losses


def _optimizers(network: nn.Module, options: TrainingOptions) -> list[torch.optim.Optimizer]:
    """Makes AdamW, and Muon for the weights of linear layers that do not read or write the vocabulary."""
    embeddings = {id(module.weight) for module in network.modules() if isinstance(module, nn.Embedding)}
    hidden = {
        f"{name}.weight"
        for name, module in network.named_modules()
        if options.muon and isinstance(module, nn.Linear) and not name.endswith("lm_head")
        if id(module.weight) not in embeddings
    }
    trained = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
    matrices = [parameter for name, parameter in sorted(trained.items()) if name in hidden]
    rest = [parameter for name, parameter in trained.items() if name not in hidden]
    rate, weight_decay = options.learning_rate, options.weight_decay or 0.0
    groups = [
        {"params": [parameter for parameter in rest if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in rest if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)]
    if matrices:
        # Scaled so that one learning rate serves both optimisers.
        scale = "match_rms_adamw"
        optimizers.append(torch.optim.Muon(matrices, lr=rate, weight_decay=weight_decay, adjust_lr_fn=scale))
    return optimizers


class _ProgressBar(Progress):
    """A bar with loss, figure and speed; where standard error is a file, a line every `LOG_EVERY` steps instead."""

    def __init__(self, description: str, steps: int, first: int, visible: bool):
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            refresh_per_second=1,
            disable=not visible,
            console=Console(stderr=True),
        )
        self.description, self.steps = description, steps
        self.figure = ""
        self.bar = self.add_task(description, total=steps, completed=first, shown="")
        self.num_tokens, self.begin = 0, time.monotonic()

    def show(self, losses: list[float], num_tokens: int) -> None:
        """Shows the state after a step, given all losses so far and the tokens of the step."""
        recent = losses[-50:]
        self.num_tokens += num_tokens
        shown = [f"loss {sum(recent) / len(recent):.3f}"]
        if self.figure:
            shown.append(self.figure)
        shown.append(f"{self.num_tokens / (time.monotonic() - self.begin):.0f} tokens/s")
        self.update(self.bar, completed=len(losses), shown=" ".join(shown))
        if len(losses) % LOG_EVERY == 0 and not (self.disable or self.console.is_terminal):
            self.console.print(f"{self.description}: step {len(losses)}/{self.steps}, {', '.join(shown)}")
