"""Commands and options that were once spelled otherwise: they are refused with today's spelling."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from ..errors import SpecConfigError


# By what stands in their place.
_FORMER = {
    "bench": "demo",
    "bench MODEL --recommend": "advise",
    "bench MODEL --check": "verify",
    "batch MODEL INPUT -o OUTPUT": "generate-many",
    "inspect --target MODEL": "discover",
    "publish FOLDER REPO --dry-run": "card",
    "a function of Python, hf_specdec.warm_up() or generate()": "warm-up export-custom-generate",
    "MODEL, the first argument": "--model -m --target -t",
    "-d METHOD:MODEL, repeated for several": "--spec -s --spec-method --method --spec-model --methods --heads",
    "--set KEY=VALUE": "--config",
    "-k fixed": "--fixed",
    "-b, repeated for several sizes": "--batch-sizes",
    "an argument after MODEL": "--input -i --data",
    "standard input": "--file -f",
    "2>/dev/null": "--stats --no-stats",
    "--output, for figures in JSON": "--plot",
    "OMP_NUM_THREADS=N in front": "--threads",
    "--device cpu": "--cpu",
    "--muon false": "--no-muon",
    "nothing, it is always so": "--stock --no-stock --lengths --no-lengths --quick",
    "--recommend, which searches": "--search --no-search --most-drafters",
    "the former options in CHANGELOG.md": "--limit --name --target-revision --cache-dir --base-model-relation --write",
}
_TODAYS = {former: today for today, names in _FORMER.items() for former in names.split()}


def check_spelling(arguments: list[str], commands: Mapping[str, Any]) -> None:
    """Refuses a former command, and former options that the command does not have today."""
    name, *others = arguments
    known = {option for item in getattr(commands.get(name), "params", ()) for option in item.opts}
    options = (text.partition("=")[0] for text in takewhile("--".__ne__, others) if text.startswith("-"))
    for former in (name, *options):
        if former in _TODAYS and former not in known:
            raise SpecConfigError(f"There is no '{former}' any more. Instead: {_TODAYS[former]}.")
