"""Speculative decoding for Hugging Face transformers.

Importing the package teaches `generate()` of every transformers model the arguments `spec_method`, `spec_model`,
`num_speculative_tokens`, `speculative` and `assistant` (unless `HF_SPECDEC_DISABLE=1` is set); `uninstall()` takes it
back. `hf_specdec.generate(model, ...)` does the same without a patched method.
"""

from typing import TYPE_CHECKING, Any

from .environment import is_switched_on, kernel_choice
from .version import __version__ as __version__


# The modules of all public names, which are imported when they are first asked for.
_MODULES = {
    "CandidateGenerator": "candidate_generators.base",
    "CheckpointFormatError": "errors",
    "Commit": "protocol",
    "DraftStep": "protocol",
    "DraftTree": "drafts",
    "MissingDependencyError": "errors",
    "Prompt": "protocol",
    "Session": "protocol",
    "SpecConfigError": "errors",
    "SpecDecError": "errors",
    "SpecDecodingStats": "metrics",
    "SpeculativeBatchingManager": "many.manager",
    "SpeculativeConfig": "settings",
    "Speculator": "speculator",
    "UnsupportedModelError": "errors",
    "forget_speculators": "loader",
    "generate": "call.entry",
    "generate_batch": "many.generate",
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

__all__ = [*_MODULES, "metrics"]

if TYPE_CHECKING:
    from . import metrics as metrics
    from .call.entry import generate as generate
    from .candidate_generators import register_candidate_generator as register_candidate_generator
    from .candidate_generators.base import CandidateGenerator as CandidateGenerator
    from .drafts import DraftTree as DraftTree
    from .errors import CheckpointFormatError as CheckpointFormatError
    from .errors import MissingDependencyError as MissingDependencyError
    from .errors import SpecConfigError as SpecConfigError
    from .errors import SpecDecError as SpecDecError
    from .errors import UnsupportedModelError as UnsupportedModelError
    from .hook import install as install
    from .hook import uninstall as uninstall
    from .hub.published import store_settings as store_settings
    from .loader import forget_speculators as forget_speculators
    from .loader import load_speculator as load_speculator
    from .logits.grammar.processor import grammar as grammar
    from .many.generate import generate_batch as generate_batch
    from .many.generate import generate_many as generate_many
    from .many.manager import SpeculativeBatchingManager as SpeculativeBatchingManager
    from .metrics import SpecDecodingStats as SpecDecodingStats
    from .metrics import record as record
    from .protocol import Commit as Commit
    from .protocol import DraftStep as DraftStep
    from .protocol import Prompt as Prompt
    from .protocol import Session as Session
    from .settings import SpeculativeConfig as SpeculativeConfig
    from .speculator import Speculator as Speculator
    from .warming import warm_up as warm_up


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "metrics":
        return import_module(".metrics", __name__)
    if name not in _MODULES:
        raise AttributeError(f"module 'hf_specdec' has no attribute '{name}'")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


kernel_choice()
if not is_switched_on("DISABLE", default=False):
    from .hook import install

    install()
