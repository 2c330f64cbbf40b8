"""The training of a draft by `transformers.Trainer`, with its loop, processes, checkpoints and logging.

The loss is the recipe's, an evaluation measures the acceptance of drafts on held-out rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import islice
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import broadcast
from safetensors.torch import load_model, save_model
from torch import nn
from torch.utils.data import DataLoader, Sampler
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_pt_utils import LengthGroupedSampler

from ..errors import SpecConfigError, SpecDecError
from .arguments import DraftTrainingArguments
from .reading import TargetReader, collate
from .recipe import Acceptance, Recipe


if TYPE_CHECKING:
    from datasets import Dataset


class DraftTrainer(Trainer):
    """Trains the parameters of a network that require gradients."""

    def __init__(
        self,
        recipe: Recipe,  # the loss and the measure
        network: nn.Module,  # in float32
        target: PreTrainedModel | None,  # gives the hidden states that both need, if they do
        arguments: DraftTrainingArguments,  # completed by the recipe
        # To train on, see `text.py`, or any data set whose items `data_collator` makes batches of; to measure on.
        rows: Dataset | torch.utils.data.Dataset | None = None,
        held_out: Dataset | None = None,
        **further: Any,  # the other arguments of `transformers.Trainer`
    ):
        self.recipe = recipe
        self.network = network
        self.reader: TargetReader = TargetReader(target, recipe.states_for(network), keeps=arguments.keep_states)
        if arguments.weight_decay is None:
            arguments.weight_decay = recipe.weight_decay
        if arguments.muon is None:
            arguments.muon = recipe.muon and hasattr(torch.optim, "Muon") and arguments.optim == type(arguments).optim
        data = {"data_collator": collate, "train_dataset": rows, "eval_dataset": held_out}
        try:
            super().__init__(_Objective(recipe, network, self.reader), arguments, **data | further)
        except (ImportError, RuntimeError, ValueError) as error:
            raise SpecConfigError(f"The training cannot begin: {error}") from error
        if arguments.max_minutes is not None:
            self.add_callback(_TimeLimit(arguments.max_minutes))

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        if not loss.isfinite():
            step = self.state.global_step
            raise SpecDecError(f"The loss became {loss.item()} at step {step}; lower `learning_rate`.")
        return loss

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None and self.args.muon:
            self.optimizer: torch.optim.Optimizer | None = MuonAndAdamW(self.network, self.args)
        return super().create_optimizer(model)

    def measure(self, rows: Dataset) -> Acceptance:
        """Measures the acceptance on all rows, in every process, so that all know the figures."""
        self.network.eval()
        batches = DataLoader(rows, batch_size=self.args.eval_batch_size, collate_fn=collate)
        return self.recipe.measure(self.network, self.reader, map(self._prepare_inputs, batches))

    def evaluate(
        self,
        eval_dataset: Dataset | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        acceptance = self.measure(self.eval_dataset if eval_dataset is None else eval_dataset)
        figures = {"tokens_per_cycle": acceptance.tokens_per_cycle}
        figures |= {f"accuracy_{depth}": share for depth, share in enumerate(acceptance.accuracies, 1)}
        metrics = {f"{metric_key_prefix}_{name}": figure for name, figure in figures.items()}
        self.log(metrics)
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        dataset: Any = self.train_dataset
        lengths = list(map(len, dataset["tokens"]))
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        rows_per_step = self.get_total_train_batch_size(self.args)
        return ByLength(lengths, rows_per_step, seed, lambda: int(self.state.epoch or 0))

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Saves the weights as they are trained; the recipe saves the draft in its public format in the end."""
        if self.args.should_save:
            os.makedirs(output_dir, exist_ok=True)
            save_model(self.model, os.path.join(output_dir, "model.safetensors"))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        # Trainer's own does not know weights that are shared inside of a network.
        load_model(self.model, os.path.join(resume_from_checkpoint, "model.safetensors"))


class _Objective(nn.Module):
    """A network and its loss as one module, so that a wrapper for several processes sees all of its forward."""

    _keys_to_ignore_on_save = None  # asked of every model by Trainer

    def __init__(self, recipe: Recipe, network: nn.Module, reader: TargetReader):
        super().__init__()
        self.network = network
        self._recipe, self._reader = recipe, reader

    def forward(self, **batch: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self._recipe.loss(self.network, self._reader.read(**batch))}


class ByLength(LengthGroupedSampler):
    """Rows of similar length share a step, and an epoch has its steps in an order that a resumed run finds again."""

    def __init__(self, lengths: list[int], rows_per_step: int, seed: int, epoch: Callable[[], int]):
        super().__init__(rows_per_step, lengths=lengths, generator=torch.Generator())
        self.seed: int = seed
        self.epoch: Callable[[], int] = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator.manual_seed(self.seed + self.epoch())
        *steps, last = torch.tensor(list(super().__iter__())).split(self.batch_size)
        order = torch.randperm(len(steps), generator=self.generator)
        # The last one may be smaller.
        yield from torch.cat([*(steps[step] for step in order), last]).tolist()


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for the weights of linear layers that neither read nor write the vocabulary, AdamW for all others."""

    def __init__(self, network: nn.Module, arguments: DraftTrainingArguments):
        linear = {name: part for name, part in network.named_modules() if isinstance(part, nn.Linear)}
        hidden = {part.weight for name, part in linear.items() if not name.endswith("lm_head")}
        hidden -= {part.weight for part in network.modules() if isinstance(part, nn.Embedding)}
        trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in trained if parameter in hidden]
        rest = [parameter for parameter in trained if parameter not in hidden]
        rate, decay = arguments.learning_rate, arguments.weight_decay
        groups = [
            {"params": [parameter for parameter in rest if parameter.ndim >= 2], "weight_decay": decay},
            {"params": [parameter for parameter in rest if parameter.ndim < 2], "weight_decay": 0.0},
        ]
        moments = {"betas": (arguments.adam_beta1, arguments.adam_beta2), "eps": arguments.adam_epsilon, "fused": True}
        self._parts: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=rate, **moments)]
        if matrices:
            # Scaled so that one learning rate serves both.
            scaled = {"weight_decay": decay, "adjust_lr_fn": "match_rms_adamw"}
            self._parts.append(torch.optim.Muon(matrices, lr=rate, **scaled))
        super().__init__([group for part in self._parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        groups = iter(self.param_groups)
        for part in self._parts:
            # Those that a checkpoint may have brought.
            part.param_groups, part.state = list(islice(groups, len(part.param_groups))), self.state
            part.step()


class _TimeLimit(TrainerCallback):
    """Ends a training in time. Its schedule goes by steps or by time, whichever is further on."""

    def __init__(self, minutes: float):
        self.seconds = 60 * minutes

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.begin = monotonic()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        share = torch.tensor((monotonic() - self.begin) / self.seconds, device=args.device)
        # By the main process's clock, so that all stop at the same step.
        share = min(1.0, broadcast(share).item())
        while kwargs["lr_scheduler"].last_epoch < share * state.max_steps:
            kwargs["lr_scheduler"].step()
        if share == 1.0:
            control.should_training_stop = control.should_log = True
            control.should_save = args.save_strategy != "no"
