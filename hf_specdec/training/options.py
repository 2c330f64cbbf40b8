"""Options of training, from which the command line is built without torch.

Those of a method stand beside its `Method`, those of every run and those that several methods have stand here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from types import NoneType
from typing import Any, get_args, get_origin

from ..errors import MissingDependencyError, SpecConfigError
from ..validation import Options, hints_of, setting


# Beside a trained draft: how its training went, and on which kind of target.
RESULT_FILE = "training.json"

# ---------------------------------------------------------------------------------------------- options of several


@dataclass(frozen=True)
class TextOptions(Options):
    """
    Rows to train on.

    Raises:
        SpecConfigError: A value is out of range, or two contradict each other.
    """

    data: Sequence[str] = setting(
        help="Text: a file or folder (.txt, .md, .py, .jsonl, .parquet) or the id of a data set. May be repeated.",
        flags=("--data", "-d"),
    )
    column: str | None = setting(None, "Column of the records that holds text or messages.")
    max_tokens: int | None = setting(None, "Read no more tokens of the data.", least=1, most=10**15)
    self_generate: int = setting(
        0, "Prompts from the data that the target continues; training is then on what the target wrote.", least=0
    )
    max_new_tokens: int | None = setting(None, "Most tokens of a continuation. Left out: it fills its row.", least=1)
    keep_text: bool = setting(False, "With --self-generate: train on the data too.")
    temperature: float = setting(0.8, "Of the sampled half of --self-generate.", least=0, inclusive=False)
    seq_length: int = setting(1024, "Tokens of a row.", least=8)
    held_out: float = setting(
        0.05, "Share of the rows that acceptance is measured on.", least=0, most=1, inclusive=False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.self_generate == 1:
            raise SpecConfigError("`self_generate` must be at least 2: one continuation is held out.")
        if self.keep_text and not self.self_generate:
            raise SpecConfigError(
                "`keep_text` adds text to the target's continuations, and `self_generate` asks for none."
            )


@dataclass(frozen=True)
class TrainingOptions(Options):
    """
    Length, schedule and precision of a training.

    `TrainingRun` fills in what is left out. For `train`, `steps` must be given, and `None` means 0 or off.

    Args:
        final_learning_rate (`float`): Share of the peak at which the schedule ends.
        max_grad_norm (`float`): Gradients are clipped to this norm.

    Raises:
        SpecConfigError: A value is out of range.
        MissingDependencyError: This torch has no Muon.
    """

    batch_size: int = setting(8, "Rows of a step, those of all processes together.", least=1)
    steps: int | None = setting(None, "Training steps. Left out: as many as --epochs take.", least=1)
    epochs: float = setting(1.0, "Passes over the rows.", least=0, inclusive=False)
    max_minutes: float | None = setting(
        None, "Time limit; the schedule ends with it. Left out: none.", least=0, inclusive=False
    )
    learning_rate: float = setting(
        1e-3, "Peak of the cosine schedule.", flags=("--learning-rate", "--lr"), least=0, inclusive=False
    )
    warmup_steps: int | None = setting(
        None, "Steps of linear warm-up. Left out: a twentieth of all, at most 100.", least=0
    )
    weight_decay: float | None = setting(
        None, "Decoupled weight decay of matrices. Left out: 0.1 for draft models, else 0.", least=0
    )
    muon: bool | None = setting(
        None,
        "Muon for hidden matrices, AdamW for the rest: fewer steps for whole networks. Left out: for draft models, "
        "eagle, eagle3, dflash and mtp.",
    )
    keep_states: bool = setting(False, "Read the rows with the target once and keep its states in memory.")
    seed: int = setting(0, "Seed of weights, data order and sampling.", most=2**64 - 1)
    resume: bool = setting(False, "Take up the run in the output folder.")
    save_every: int = setting(500, "Steps between two states to resume from.", least=1)
    bf16: bool = setting(
        True,
        "Train in bfloat16 autocast, on machines that compute in it, and save bfloat16; or do both in float32.",
    )
    final_learning_rate: float = 0.02
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.muon:
            return
        import torch

        if not hasattr(torch.optim, "Muon"):
            raise MissingDependencyError(
                f"`muon=True` needs torch 2.9 or later, found {torch.__version__}. Upgrade torch or set `muon=False`."
            )

    def progress(self, step: int, seconds: float) -> float:
        """
        Returns the share of the training that is done, 0 to 1: by steps or by time, whichever is further on, so that a
        run cut by time still ends at the final learning rate.
        """
        assert self.steps is not None, "settled before the training begins"
        by_time = seconds / (60 * self.max_minutes) if self.max_minutes else 0.0
        return min(1.0, max(step / self.steps, by_time))

    def learning_rate_at(self, step: int, progress: float) -> float:
        warmup = min(1.0, (step + 1) / max(1, self.warmup_steps or 0))
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.learning_rate * warmup * (self.final_learning_rate + (1 - self.final_learning_rate) * cosine)


# Options that several methods have, each with a default of its own.
_SHARED: dict[str, dict[str, Any]] = {
    "kl_weight": {
        "help": "Share of KL(target || draft) in the loss; the rest is the cross-entropy of the text.",
        "least": 0,
        "most": 1,
    },
    "head_decay": {"help": "Weight of a draft's loss relative to the one before it.", "least": 0, "most": 1},
    "ttt_steps": {"help": "Steps in the draft's own states that it is trained on.", "least": 1},
    "intermediate_size": {"help": "Width of the MLPs; 0 for the target's.", "least": 0},
    "mask_token_id": {
        "help": "Token of the masks. Left out: the tokenizer's, an unused one, or end of text.",
        "least": 0,
    },
    # Neighbouring positions teach much the same.
    "max_positions": {
        "help": "Positions of a batch that are drawn for the loss: with many rows and --keep-states. Left out: all.",
        "least": 1,
    },
}


def shared_option(name: str, default: Any) -> Any:
    """Declares an option that several methods have, with its help and limits."""
    return setting(default, **_SHARED[name])


# ------------------------------------------------------------------------------------------------- reading options


def options_of(options: type) -> Iterator[tuple[Field[Any], Any]]:
    """Yields the options of a dataclass and their types, without `None`."""
    hints = hints_of(options)
    for item in fields(options):
        if "help" in item.metadata:
            kinds = get_args(hints[item.name])
            yield item, kinds[0] if NoneType in kinds else hints[item.name]


def flags_of(item: Field[Any], kind: Any) -> tuple[str, ...]:
    """Returns the flags of an option, switches with both of theirs: "--muon/--no-muon"."""
    name = item.name.replace("_", "-")
    can_be_off = kind is bool and item.default is not False
    return item.metadata.get("flags") or (f"--{name}/--no-{name}" if can_be_off else f"--{name}",)


def parsed(name: str, value: Any, kind: Any) -> Any:
    """
    Reads an option's value as the command line gives it: numbers separated by commas, sizes from JSON or
    `name=number,...`; other values stay as they are.
    """
    flag = f"--{name.replace('_', '-')}"
    if get_origin(kind) is tuple:
        try:
            return tuple(int(part) for part in value.split(","))
        except ValueError as error:
            raise SpecConfigError(
                f"{flag} must be numbers separated by commas such as 2,8,13, got '{value}'."
            ) from error
    if get_origin(kind) is Mapping:
        try:
            if value.lstrip().startswith("{"):
                return json.loads(value)
            pairs = (part.partition("=") for part in value.split(","))
            return {size.strip(): json.loads(number) for size, _, number in pairs}
        except ValueError as error:
            raise SpecConfigError(
                f"{flag} must be sizes such as hidden_size=256,num_hidden_layers=4 or JSON, got '{value}'."
            ) from error
    return value
