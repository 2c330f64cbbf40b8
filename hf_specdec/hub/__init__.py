"""The Hub: drafters are inspected, found, trusted within limits, and published."""

from ..checkpoints.files import RepoFiles
from .candidate import Candidate
from .card import add_to_target_card, make_card, read_card, read_target_card
from .detect import Detection, detect_checkpoint
from .discover import discover_drafters
from .inspect import Inspection, inspect_checkpoint


__all__ = [
    "Candidate",
    "Detection",
    "Inspection",
    "RepoFiles",
    "add_to_target_card",
    "detect_checkpoint",
    "discover_drafters",
    "inspect_checkpoint",
    "make_card",
    "read_card",
    "read_target_card",
]
