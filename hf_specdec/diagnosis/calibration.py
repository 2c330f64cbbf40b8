"""Measures a profile on purpose: all lengths are drafted in turn, and the first real call knows what each costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..control.controller import Choice, SpeculationController
from ..control.profile import ControlProfile
from ..errors import SpecConfigError
from ..speculator import Speculator


class SweepingController(SpeculationController):
    """Goes through all limits from cycle to cycle, downwards, none included; trees stay whole."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.tree_size: None = None

    def _choose(self, rows: list[int]) -> Choice:
        return Choice(self.most - self.num_cycles % (self.most + 1))


class _SweepingSpeculator(Speculator):
    """A speculator whose calls measure instead of choosing."""

    def controller(self, generator) -> SpeculationController:
        return SweepingController(generator.num_speculative_tokens, generator.session.batch_size, self.profile)


def calibrate(
    target_model: torch.nn.Module,
    speculator: Speculator,
    inputs: Sequence[dict[str, torch.Tensor]],
    max_new_tokens: int = 128,
    rounds: int = 3,
) -> ControlProfile:
    """Measures what drafts and verifications of each length cost, and how often drafts are accepted.

    Args:
        target_model (`PreTrainedModel`): The target.
        speculator ([`Speculator`]): With adaptive lengths.
        inputs (`Sequence[dict]`): Arguments of `generate()`, such as `input_ids` and `attention_mask`: text of the
            kind that will be generated, in batches of the sizes that will be used.
        max_new_tokens (`int`): Of each call.
        rounds (`int`): Calls with each of the inputs.

    Returns:
        `ControlProfile`: A new one.

    Raises:
        SpecConfigError: The speculator has a fixed length.
    """
    config = speculator.config
    if not speculator.is_adaptive:
        raise SpecConfigError(
            "Calibration is for lengths that are chosen by what pays, num_speculative_tokens='auto', got "
            f"{config.num_speculative_tokens!r}. A fixed length needs no profile."
        )
    profile = ControlProfile()
    sweeping = _SweepingSpeculator(config, speculator.generator_class, speculator.resources, profile=profile)
    for _ in range(rounds):
        for batch in inputs:
            target_model.generate(**batch, max_new_tokens=max_new_tokens, do_sample=False, assistant=sweeping)
    return profile
