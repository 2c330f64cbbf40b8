"""`transformers.TrainingArguments` for drafts: other defaults, and the options that only drafts have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import SchedulerType, TrainingArguments
from transformers.hf_argparser import HfArg
from transformers.utils import is_torch_bf16_gpu_available

from ..errors import MissingDependencyError, SpecConfigError
from ..machine import multiplies


# They need a transformers model, or write what is no draft.
_UNSUITABLE = (
    *("activation_checkpointing", "deepspeed", "fsdp", "gradient_checkpointing", "label_smoothing_factor"),
    *("neftune_noise_alpha", "push_to_hub", "use_liger_kernel"),
)


@dataclass
class DraftTrainingArguments(TrainingArguments):
    """
    Length, optimiser, schedule, precision, logging, evaluation and checkpoints of a training.

    All fields of `TrainingArguments` can be given. Those below have another default, a short flag or a meaning for
    drafts alone. `output_dir` is the folder of the draft, of the checkpoints and of the report.

    Raises:
        SpecConfigError: A value is out of range, or has no meaning for drafts.
        MissingDependencyError: `muon=True`, and this torch has no Muon.
    """

    per_device_train_batch_size: int = HfArg(default=8, aliases="--batch-size", help="Rows of a step on each device.")
    max_steps: int = HfArg(default=-1, aliases="--steps", help="Training steps. Default: as many as the epochs take.")
    num_train_epochs: float = HfArg(default=1.0, aliases="--epochs", help="Passes over the rows.")
    max_minutes: float | None = HfArg(default=None, help="Time limit of a start; the schedule ends with it.")
    learning_rate: float = HfArg(default=1e-3, aliases="--lr", help="Peak of the schedule.")
    lr_scheduler_type: SchedulerType | str = HfArg(
        default="cosine_with_min_lr", help="Schedule. The default ends at a fiftieth of the peak."
    )
    warmup_steps: float = HfArg(default=0.05, help="Steps of linear warm-up, or their share of all.")
    weight_decay: float | None = HfArg(
        default=None, help="Decoupled weight decay. Default: 0.1 for draft models, else 0."
    )
    adam_beta2: float = HfArg(default=0.95, help="Decay of AdamW's second moments.")
    muon: bool | None = HfArg(
        default=None,
        help="Muon for hidden matrices, AdamW for the rest: fewer steps for whole networks. Default: for draft "
        "models, eagle, eagle3, dflash and mtp, unless `optim` is given.",
    )
    bf16: bool = HfArg(
        default=True,
        help="Train in bfloat16 autocast, on machines that compute in it, and save bfloat16; or do both in float32.",
    )
    keep_states: bool = HfArg(default=False, help="Keep what the target has read in memory, for further epochs.")
    seed: int = HfArg(default=0, help="Seed of weights, data order and sampling.")
    resume: bool = HfArg(default=False, help="Take up the run in the output folder.")
    save_steps: float = HfArg(default=500, aliases="--save-every", help="Steps between checkpoints, or their share.")
    save_total_limit: int | None = HfArg(default=1, help="Checkpoints that are kept.")
    logging_steps: float = HfArg(default=0.02, help="Steps between logged losses, or their share of all.")
    # Batches have other columns than a network's `forward`, and every parameter takes part in every loss.
    remove_unused_columns: bool = False
    ddp_find_unused_parameters: bool | None = False

    def __post_init__(self) -> None:
        unsuitable = [name for name in _UNSUITABLE if getattr(self, name)]
        if unsuitable:
            raise SpecConfigError(f"`{unsuitable[0]}` has no meaning for the training of a draft. Leave it out.")
        if self.max_minutes is not None and self.max_minutes <= 0:
            raise SpecConfigError(f"`max_minutes` must be above 0, got {self.max_minutes}.")
        if self.muon and not hasattr(torch.optim, "Muon"):
            raise MissingDependencyError(
                f"`muon=True` needs torch 2.9 or later, found {torch.__version__}. Upgrade torch or leave it out."
            )
        self.saved_dtype: torch.dtype = torch.bfloat16 if self.bf16 else torch.float32
        if self.bf16 and (self.use_cpu or not is_torch_bf16_gpu_available()):
            # Other CPUs take many times as long for products in bfloat16 as in float32.
            self.use_cpu: bool = self.use_cpu or not torch.cuda.is_available()
            self.bf16 = self.use_cpu and bool(multiplies())
        if self.lr_scheduler_type == "cosine_with_min_lr" and self.lr_scheduler_kwargs is None:
            self.lr_scheduler_kwargs: dict[str, Any] | str | None = {"min_lr_rate": 0.02}
        try:
            super().__post_init__()
        except (ImportError, ValueError) as error:
            raise SpecConfigError(f"The options of the training do not go together: {error}") from error

    @property
    def n_gpu(self) -> int:
        """GPUs of this process: one at most, since the target is on it. Others have processes of their own."""
        return min(1, super().n_gpu)
