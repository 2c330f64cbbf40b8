"""Speculative decoding for Hugging Face transformers.

Importing the package teaches `generate()` of every transformers model the arguments `spec_method`, `spec_model`,
`num_speculative_tokens`, `speculative` and `assistant` (unless `HF_SPECDEC_DISABLE=1` is set); `uninstall()` takes it
back. `hf_specdec.generate(model, ...)` does the same without a patched method.
"""

from typing import TYPE_CHECKING, Any

from .environment import is_switched_on, kernel_choice
from .errors import (
    CheckpointFormatError,
    MissingDependencyError,
    SpecConfigError,
    SpecDecError,
    UnsupportedModelError,
)
from .version import __version__ as __version__


_LAZY = {
    "CandidateGenerator": "candidate_generators.base",
    "Commit": "candidate_generators.base",
    "DraftStep": "candidate_generators.base",
    "DraftTree": "drafts",
    "Prompt": "candidate_generators.base",
    "Session": "candidate_generators.base",
    "SpeculativeBatchingManager": "many.manager",
    "SpecDecodingStats": "metrics",
    "SpeculativeConfig": "settings",
    "Speculator": "speculator",
    "forget_speculators": "loader",
    "generate": "call.entry",
    "generate_batch": "many.batching",
    "generate_many": "many.generate",
    "grammar": "logits.grammar.processor",
    "install": "hook",
    "load_speculator": "loader",
    "record": "metrics",
    "register_candidate_generator": "candidate_generators",
    "store_settings": "hub.published",
    "uninstall": "hook",
    "warm_up": "warming",
}

__all__ = [
    "CandidateGenerator",
    "CheckpointFormatError",
    "Commit",
    "DraftStep",
    "DraftTree",
    "MissingDependencyError",
    "Prompt",
    "Session",
    "SpecConfigError",
    "SpecDecError",
    "SpecDecodingStats",
    "SpeculativeBatchingManager",
    "SpeculativeConfig",
    "Speculator",
    "UnsupportedModelError",
    "forget_speculators",
    "generate",
    "generate_batch",
    "generate_many",
    "grammar",
    "install",
    "load_speculator",
    "metrics",
    "record",
    "register_candidate_generator",
    "store_settings",
    "uninstall",
    "warm_up",
]

if TYPE_CHECKING:
    from . import metrics
    from .call.entry import generate
    from .candidate_generators import register_candidate_generator
    from .candidate_generators.base import CandidateGenerator
    from .drafts import DraftTree
    from .hook import install, uninstall
    from .hub.published import store_settings
    from .loader import forget_speculators, load_speculator
    from .logits.grammar.processor import grammar
    from .many.batching import generate_batch
    from .many.generate import generate_many
    from .many.manager import SpeculativeBatchingManager
    from .metrics import SpecDecodingStats, record
    from .protocol import Commit, DraftStep, Prompt, Session
    from .settings import SpeculativeConfig
    from .speculator import Speculator


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "metrics":
        return import_module(".metrics", __name__)
    if name not in _LAZY:
        raise AttributeError(f"module 'hf_specdec' has no attribute '{name}'")
    return getattr(import_module(f".{_LAZY[name]}", __name__), name)


kernel_choice()
if not is_switched_on("DISABLE", default=False):
    from .hook import install

    install()
