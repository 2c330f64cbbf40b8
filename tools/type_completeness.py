"""Holds the completeness of the package's public types, as type checkers of its users see them.

python -m tools.type_completeness         # a minute; the symbols whose types are incomplete with --list
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).parents[1]

# Percent of the public symbols whose types are known.
LEAST = 97.0


def main() -> None:
    checker = Path(sys.executable).with_name("basedpyright")
    command = [checker, "--verifytypes", "hf_specdec", "--ignoreexternal", "--outputjson"]
    # The repository, since the checker does not follow an editable install; and the environment's own interpreter,
    # which it looks for on the path alone.
    path = os.pathsep.join([str(checker.parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    completeness = json.loads(found.stdout)["typeCompleteness"]
    symbols = [item for item in completeness["symbols"] if item["isExported"]]
    if not symbols:
        raise SystemExit(f"basedpyright finds no package with types in {ROOT}.")
    incomplete = [item["name"] for item in symbols if not item["isTypeKnown"]]
    percent = 100 * completeness["completenessScore"]
    text = f"Types of {percent:.1f} % of {len(symbols)} public symbols are known, {LEAST:.0f} % must be."
    if "--list" in sys.argv:
        text = "\n".join([*incomplete, text])
    if percent < LEAST:
        raise SystemExit(f"{text} `python -m tools.type_completeness --list` names the others.")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
