"""A check that forwards over slots compute what plain generation computes, before anything is shown.

The first verification is compared with plain generation's own forward of the same tokens. That forward runs once in a
process for a class of models and a config, and once more in the first call that hides slots from a row. Forwards that
are neither transformers' nor PEFT's may behave differently later: of them several run, and are compared with one over
all their tokens. None is counted in the statistics.

Shapes: B rows of the call, N tokens after the prompts, V vocabulary.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from transformers.cache_utils import DynamicCache

from ..drafts import chain_topology
from ..environment import is_switched_on
from ..errors import UnsupportedModelError
from ..target_facts import quantisation
from .forward import Part, SlotNodes, SlotOutput
from .model import SlotModel
from .parts.rotary import ChangingRotary
from .prompts import Continuation, following_inputs


# Largest difference of logits by rounding, as a part of their spread over the vocabulary.
_ROUNDING, _COARSE_ROUNDING = 0.005, 0.1

# Packages with whose forwards whole texts are compared in the tests. With those of others so many tokens are read.
_COMPARED = ("torch", "transformers", "peft", "accelerate", "hf_specdec")
_MOST_TOKENS = 32

# How many tokens models were found to go on for as in plain generation, by class and config, whether slots were
# hidden, and forwards of others.
_checked: dict[tuple[Any, ...], int] = {}
# Config of each model, and whether a part of it is a class of others.
_known: WeakKeyDictionary[nn.Module, tuple[str, bool]] = WeakKeyDictionary()


class ContinuationCheck(Part):
    """Compares the first verification of rows with plain generation."""

    def __init__(self, model: nn.Module):
        self.model = model
        # Logits `(N, V)` by what is checked, as in `_checked`, and by place in the batch.
        self.expected: dict[tuple[Any, ...], dict[int, torch.Tensor]] = {}

    @classmethod
    def begin(
        cls, target: SlotModel, continuation: Continuation, tokens: torch.LongTensor, most: int
    ) -> ContinuationCheck | None:
        """Reads the first tokens `(B,)`, of `most` that follow the prompts, as plain generation does.

        The target gets the part that checks its verification; `None` where there is nothing to check.
        """
        model, check = target.model, cls(target.model)
        if model not in _known:
            forwards = (type(module).forward for module in model.modules() if module._modules)
            _known[model] = model.config.to_json_string(), not all(map(_is_compared, forwards))
        config, has_others = _known[model]
        others = _forwards_of_others(model)
        key = type(model), config, any(continuation.num_others), others
        count = min(most, _MOST_TOKENS) if others or has_others else 1
        rotary = target.find(ChangingRotary)
        # Dropout makes every forward another one, and plain generation may read the whole text again.
        is_another = model.training or (rotary is not None and rotary.read_again_at is not None)
        if _checked.get(key, 0) >= count or is_another or not is_switched_on("CHECK", default=True):
            return None
        read, expected = _plainly_read(target, continuation, tokens, count)
        check.expected[key] = dict(enumerate(expected))
        if count > 1:
            # None of these tokens is committed, and their graph would not run again.
            graphs = target.graphs
            target.graphs = None
            try:
                check._judge(target.forward(read, chain_topology(count - 1, read.device)).logits, expected)
            finally:
                target.graphs = graphs
        target.parts.append(check)
        return check

    def verified(self, output: SlotOutput) -> None:
        for key, rows in self.expected.items():
            if rows:
                first = torch.stack([expected[:1] for expected in rows.values()])
                self._judge(output.logits[list(rows), :1], first)
                _checked[key] = max(_checked.get(key, 0), min(map(len, rows.values())))
        self.expected = {}
        self.is_done = True

    def without_rows(self) -> ContinuationCheck:
        return ContinuationCheck(self.model)

    def keep_rows(self, keep: list[int]) -> None:
        for key, rows in self.expected.items():
            self.expected[key] = {place: rows[row] for place, row in enumerate(keep) if row in rows}

    def join(self, other: ContinuationCheck, num_rows: int) -> None:
        for key, rows in other.expected.items():
            self.expected.setdefault(key, {}).update({num_rows + row: logits for row, logits in rows.items()})

    def _judge(self, logits: torch.Tensor, expected: torch.Tensor) -> None:
        differences = _differences(logits, expected.to(logits.device))
        limit = _ROUNDING if _is_precise(self.model) else _COARSE_ROUNDING
        if limit == _COARSE_ROUNDING and differences.shape[1] > 1:
            # A single token may be near a tie of experts.
            differences = torch.minimum(differences[:, :-1], differences[:, 1:])
        difference = float(differences.max())
        if not difference <= limit:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} goes on after the prompt in a way that speculation does not know: the "
                f"logits of its verification differ from those of plain generation by {difference:.1%} of their "
                f"spread, and rounding explains {limit:.1%}. The text would not be that of plain generation. Leave "
                f"the speculative arguments out; HF_SPECDEC_CHECK=0 in the environment switches this check off."
            )


def _plainly_read(
    target: SlotModel, continuation: Continuation, tokens: torch.LongTensor, count: int
) -> tuple[torch.LongTensor, torch.Tensor]:
    """Tokens `(B, N)` after the prompts, the best ones, and their logits, by forwards of plain generation."""
    model, profile, read, logits = target.model, target.profile, [], []
    like = DynamicCache(config=model.config.get_text_config(decoder=True))
    with target.cache.kept(like), target.reading(SlotNodes(tokens[:, None])):
        for number in range(count):
            read.append(tokens[:, None])
            inputs = following_inputs(continuation.inputs, profile, read[-1], number)
            inputs |= {profile.cache_name: target.forward_cache, "return_dict": True}
            logits.append(model(**inputs).logits[:, -1])
            tokens = logits[-1].argmax(-1).to(tokens.device)
    return torch.cat(read, dim=1), torch.stack(logits, dim=1)


def _forwards_of_others(model: nn.Module) -> tuple[ref[Any], ...]:
    """The forwards of a model and the parts below it that no package has which is known here."""
    references = []
    for module in (model, *model.children()):
        # accelerate's hooks keep what they run.
        forward = vars(module).get("_old_forward") or module.forward
        function = getattr(forward, "__func__", forward)
        if not _is_compared(function):
            with suppress(TypeError):
                references.append(ref(function))
    return tuple(references)


def _is_compared(function: Any) -> bool:
    while function is not None:
        # A function around another one has taken its names over, as those of transformers' decorators do.
        name = getattr(function, "__globals__", {}).get("__name__") or type(function).__module__
        if name.partition(".")[0] not in _COMPARED:
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def _differences(logits: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Root mean squares of the differences over the standard deviations of what was expected, `(B, N)`."""
    logits, expected = logits.double(), expected.double()
    # Some models rule tokens out by the lowest number.
    is_usual = expected.abs() < torch.finfo(torch.bfloat16).max / 2**20
    count = is_usual.sum(-1).clamp(min=1)
    expected = expected.where(is_usual, 0)
    mean = expected.sum(-1, keepdim=True) / count[..., None]
    spread = (expected - mean).where(is_usual, 0).square().sum(-1)
    error = (logits - expected).where(is_usual, 0).square().sum(-1)
    return (error / spread.clamp(min=torch.finfo(torch.float32).tiny)).sqrt()


def _is_precise(model: nn.Module) -> bool:
    """Tells whether the model computes in float32 throughout."""
    device = model.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return False
    if torch.get_float32_matmul_precision() != "highest":
        return False
    # Layers may round what they read, too.
    is_wide = all(parameter.dtype in (torch.float32, torch.float64) for parameter in model.parameters())
    return is_wide and quantisation(model) is None
