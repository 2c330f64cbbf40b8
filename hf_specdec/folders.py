"""Folders in which the package keeps what it has measured and fetched."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import constants

from .environment import variable


def home_folder() -> Path:
    """Folder of all that the package keeps: `hf_specdec` in the home of the Hub's files."""
    return Path(constants.HF_HOME) / "hf_specdec"


def profile_folder() -> Path:
    """Folder of the profiles: `HF_SPECDEC_PROFILES`, or `profiles` in the home folder."""
    folder = variable("PROFILES")
    return Path(folder) if folder else home_folder() / "profiles"
