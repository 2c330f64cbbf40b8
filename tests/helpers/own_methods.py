"""The methods on the page "Write your own method", as they are written there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from hf_specdec import forget_speculators
from hf_specdec.methods import CandidateGenerator, unregister_candidate_generator
from tests.helpers.methods import demo_target
from tests.helpers.paths import DOCS


PAGE = DOCS / "write_your_own_method.md"
# By name: mark and class of the example, and the lines that the page promises at most.
EXAMPLES = {"followers": ("example", "Followers", 45), "next_states": ("network example", "NextStatesGenerator", 60)}


class OwnMethod(NamedTuple):
    name: str
    generator_class: type[CandidateGenerator]


@contextmanager
def registered(name: str) -> Iterator[OwnMethod]:
    """The class of an example, which its last line registers."""
    mark, class_name, most_lines = EXAMPLES[name]
    code = re.findall(
        rf"<!-- {mark} -->\n```python\n(.*?)```\n<!-- end -->", PAGE.read_text("utf-8"), flags=re.DOTALL
    )[0]
    assert len(code.splitlines()) <= most_lines
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    try:
        yield OwnMethod(name, names[class_name])
    finally:
        unregister_candidate_generator(name)
        forget_speculators(demo_target())
