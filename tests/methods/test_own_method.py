"""The page "Write your own method": its example is run as it is written."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import pytest
import torch

from hf_specdec import (
    CandidateGenerator,
    DraftTree,
    generate_many,
    record,
    register_candidate_generator,
)
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


def test_greedy_batches(method):
    """Other ways to pass a drafter are tried in `test_assisted.py`."""
    for speculative in ({"assistant": method()}, {"spec_method": "followers", "num_speculative_tokens": 2}):
        with record() as made:
            text = demo_target().generate(**demo_inputs(4), max_new_tokens=NEW, do_sample=False, **speculative)
        assert torch.equal(text, plain_text(4, NEW))
        assert made.calls[0].stats.num_accepted_tokens > 10


def test_rows_join(method):
    prompts = [row[mask.bool()].tolist() for row, mask in zip(*demo_inputs(4).values())]
    call = {"max_new_tokens": NEW, "do_sample": False, "spec_method": "followers", "num_speculative_tokens": 2}
    results = list(generate_many(demo_target(), prompts, 2, in_order=True, **call))
    assert [result.tokens for result in results] == plain_text(4, NEW)[:, -NEW:].tolist()
    assert sum(result.stats.num_accepted_tokens for result in results) > 10


def test_options_that_have_no_hash():
    """Options may be lists, and the dataclass one that can be changed."""

    @dataclass
    class Options:
        widths: list = field(default_factory=lambda: [1, 2])

    class Nothing(CandidateGenerator):
        options_class = Options

        def propose(self, step):
            return DraftTree.empty(len(step.rows), self.session.device)

    register_candidate_generator("nothing", Nothing)
    try:
        for _ in range(2):
            text = demo_target().generate(**demo_inputs(2), max_new_tokens=8, do_sample=False, spec_method="nothing")
        assert torch.equal(text, demo_target().generate(**demo_inputs(2), max_new_tokens=8, do_sample=False))
    finally:
        unregister_candidate_generator("nothing")
