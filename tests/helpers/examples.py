"""Examples of README and docs: blocks of Python that run as they stand, with local stand-ins for models of the Hub.

Blocks marked `python` run, also inside of tabs; those marked `py` do not.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from pathlib import Path

from hf_specdec import demo


TEMPLATE = "{% for message in messages %}# {{ message.role }}: {{ message.content }}\n{% endfor %}"
# By method, repositories whose place its drafter for the demo's target takes.
DRAFTERS = {
    "draft_model": ("Qwen/Qwen3-0.6B",),
    "dflash": ("z-lab/Qwen3-8B-DFlash-b16",),
    "eagle3": ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",),
    "eagle": ("yuhuili/EAGLE-LLaMA3.1-Instruct-8B",),
    "medusa": ("FasterDecoding/medusa-vicuna-7b-v1.3",),
    "mlp_speculator": ("ibm-ai-platform/llama3-8b-accelerator",),
}


def examples(page: Path) -> list[str]:
    """The code of a page's blocks, in order."""
    blocks = re.findall(r"^( *)```python\n(.*?)^\1```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(code) for _, code in blocks]


def stand_ins(folder: Path) -> dict[str, str]:
    """Repositories and the folders that take their place; the target's gets a chat template, as chat models have."""
    target = shutil.copytree(demo.target_path(), folder / "target")
    (target / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    drafters = {name: demo.drafter_path(method) for method, names in DRAFTERS.items() for name in names}
    return {"Qwen/Qwen3-8B": str(target), **drafters}


def with_stand_ins(code: str, places: dict[str, str]) -> str:
    """The code, loading from folders what it would load from the Hub, with short answers."""
    for name, place in places.items():
        code = code.replace(f'"{name}"', repr(place))
    return re.sub(r"(max_new_tokens\"?[=:] ?)(120|256)\b", r"\g<1>32", code)
