"""Folders in which the package keeps what it has measured."""

from __future__ import annotations

import os
from pathlib import Path

from huggingface_hub.constants import HF_HOME


def profile_folder() -> Path:
    """Folder of the profiles: `HF_SPECDEC_PROFILES`, or `hf_specdec/profiles` in the home of the Hub's files."""
    folder = os.environ.get("HF_SPECDEC_PROFILES")
    return Path(folder) if folder else Path(HF_HOME) / "hf_specdec" / "profiles"
