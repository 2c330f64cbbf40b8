"""A drafting method with one option of every kind, for tests of settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest

from hf_specdec.candidate_generators.base import CandidateGenerator
from hf_specdec.errors import SpecConfigError
from hf_specdec.settings.checks import setting


@dataclass(frozen=True)
class ToyOptions:
    width: int = setting(2, "Children of a node.", key="toy_width", least=1, most=64)
    rate: float | None = field(default=0.5, metadata={"help": "Share of cycles with drafts; `None` for all."})
    mode: Literal["wide", "deep"] = field(default="wide", metadata={"help": "What grows first."})
    layers: tuple[int, ...] = field(default=(), metadata={"help": "Layers that are read."})


class ToyGenerator(CandidateGenerator):
    options_class = ToyOptions
    default_num_speculative_tokens = 3


def error_of(action, *args, **kwargs) -> str:
    """What a call is refused with."""
    with pytest.raises(SpecConfigError) as caught:
        action(*args, **kwargs)
    return str(caught.value)
