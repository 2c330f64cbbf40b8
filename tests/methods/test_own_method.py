"""The page "Write your own method": its example is run as it is written."""

from __future__ import annotations

import re

import pytest
import torch

from hf_specdec import generate_many, record
from hf_specdec.candidate_generators import unregister_candidate_generator
from tests.helpers.methods import demo_inputs, demo_target, plain_text
from tests.helpers.paths import DOCS


PAGE = DOCS / "write_your_own_method.md"
NEW = 24


@pytest.fixture(scope="module")
def method():
    """The class on the page, registered by its last line."""
    (code,) = re.findall(r"<!-- example -->\n```python\n(.*?)```\n<!-- end -->", PAGE.read_text(), flags=re.DOTALL)
    assert 30 <= len(code.splitlines()) <= 45
    names: dict = {}
    exec(compile(code, str(PAGE), "exec"), names)
    yield names["Followers"]
    unregister_candidate_generator("followers")


def test_batches_and_rows_that_join(method):
    for speculative in ({"assistant": method()}, {"spec_method": "followers", "num_speculative_tokens": 2}):
        with record() as made:
            text = demo_target().generate(**demo_inputs(4), max_new_tokens=NEW, do_sample=False, **speculative)
        assert torch.equal(text, plain_text(4, NEW))
        assert made.calls[0].stats.num_accepted_tokens > 10
    rows = [row[mask.bool()].tolist() for row, mask in zip(*demo_inputs(4).values())]
    call = {"max_new_tokens": NEW, "do_sample": False, "spec_method": "followers", "num_speculative_tokens": 2}
    results = list(generate_many(demo_target(), rows, 2, in_order=True, **call))
    assert [result.tokens for result in results] == plain_text(4, NEW)[:, -NEW:].tolist()
    assert sum(result.stats.num_accepted_tokens for result in results) > 10
