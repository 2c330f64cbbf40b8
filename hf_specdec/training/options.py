"""Options of the text to train on, and of recipes, from which the command line is built without torch.

Those of one method stand beside its `Method`, those of the training itself are `DraftTrainingArguments`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import SpecConfigError
from ..settings.checks import Options, setting


# Beside a trained draft: how its training went, and on which kind of target.
RESULT_FILE = "training.json"


@dataclass(frozen=True)
class TextOptions(Options):
    """Rows to train on."""

    data: Sequence[str] = setting(
        help="Text: a file or folder (.txt, .md, .py, .jsonl, .json, .parquet, .csv) or the id of a data set. May be "
        "repeated.",
        flags=("--data", "-d"),
    )
    column: str | None = setting(None, "Column of the records that holds text or messages.")
    max_tokens: int | None = setting(None, "Read no more tokens of the data.", least=1, most=10**15)
    self_generate: int = setting(
        0, "Prompts from the data that the target continues; training is then on what the target wrote.", least=0
    )
    max_new_tokens: int | None = setting(None, "Most tokens of a continuation. Default: it fills its row.", least=1)
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
        "help": "Token of the masks. Default: the tokenizer's, an unused one, or end of text.",
        "least": 0,
    },
    # Neighbouring positions teach much the same.
    "max_positions": {
        "help": "Positions of a batch that are drawn for the loss: with many rows and --keep-states. Default: all.",
        "least": 1,
    },
}


def shared_option(name: str, default: Any) -> Any:
    """Declares an option that several methods have, with its help and limits."""
    return setting(default, **_SHARED[name])
