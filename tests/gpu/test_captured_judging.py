"""Drafts that are judged in the graph of their verification: what it accepts is what is accepted outside of it."""

from __future__ import annotations

import pytest
import torch

from hf_specdec import SpeculativeConfig, Speculator, generate_many, record
from hf_specdec.logits.randomness import ACCEPT, DRAFT, TARGET, RowKeys, RowUniforms
from hf_specdec.loop.loop import DecodingLoop
from hf_specdec.target import graphed
from tests.helpers.levels import full, in_full
from tests.helpers.models import prompts, tiny_llama
from tests.helpers.sampled import sampled_speculator
from tests.helpers.tiny_drafters import tiny_drafter


pytestmark = pytest.mark.usefixtures("tapes")

DRAFTS = {
    "chains": lambda model: sampled_speculator(3),
    "trees": lambda model: sampled_speculator(6, widths=(2, 2)),
    "not drawn": lambda model: tiny_drafter(model, "ngram", prompt_lookup_min=1),
}
SAMPLED = {"do_sample": True, "temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
RULES = {
    "standard": {},
    "block": {"rejection_sample_method": "block"},
    "typical": {"rejection_sample_method": "typical"},
    "synthetic": {"rejection_sample_method": "synthetic", "rejection_sample_options": 2.5},
}


@pytest.fixture
def judged(monkeypatch) -> list[bool]:
    """Tells of each verification after a prefill whether its graph has judged."""
    noted: list[bool] = []
    verify = DecodingLoop.verify

    def noting(self, step, draft):
        output = verify(self, step, draft)
        noted.append(output.outcome is not None)
        return output

    monkeypatch.setattr(DecodingLoop, "verify", noting)
    return noted


def call(drafts: str, rule: str, enforce_eager: bool, rows: int = 3, **arguments):
    """Text, drafts and accepted tokens of a call."""
    drafter = DRAFTS[drafts](model := tiny_llama())
    config = SpeculativeConfig.resolve(drafter.config, **RULES[rule], enforce_eager=enforce_eager)
    speculator = Speculator(config, drafter.generator_class, drafter.resources)
    torch.manual_seed(0)
    with record(trace=True) as made:
        text = model.generate(**prompts(rows), max_new_tokens=20, assistant=speculator, **arguments)
    return text.tolist(), made.calls[0].cycles, made.calls[0].stats.num_accepted_tokens


@pytest.mark.parametrize(
    ("drafts", "rule", "arguments"),
    [
        ("chains", "standard", SAMPLED),
        ("trees", "standard", SAMPLED),
        # The graph reads random numbers, though nothing else does.
        ("not drawn", "synthetic", {"do_sample": False}),
        *in_full(
            ("chains", "block", SAMPLED),
            ("trees", "typical", SAMPLED),
            ("trees", "synthetic", SAMPLED),
            ("not drawn", "standard", {"do_sample": True, "temperature": 0.3}),
        ),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_graph_accepts_what_is_accepted_outside_of_it(drafts, rule, arguments, judged):
    found = call(drafts, rule, enforce_eager=False, **arguments)
    assert all(judged)
    assert len(judged) > 3
    assert found == call(drafts, rule, enforce_eager=True, **arguments)
    assert not all(judged)
    assert found[2] > 0


@full
def test_scores_that_are_returned(judged):
    """They are made of the logits of the graph."""
    asked = {"output_scores": True, "return_dict_in_generate": True, "max_new_tokens": 12, **SAMPLED}
    found = []
    for enforce_eager in (False, True):
        torch.manual_seed(0)
        speculator = sampled_speculator(3, enforce_eager=enforce_eager)
        found.append(tiny_llama().generate(**prompts(2), assistant=speculator, **asked).scores)
    assert judged[0]
    torch.testing.assert_close(found[0], found[1])


def test_drafts_that_would_take_too_much_memory(judged, monkeypatch):
    """Smaller batches are judged in the graph, larger ones after it."""
    monkeypatch.setattr(graphed, "_MOST_SCORES", 2 * 4 * 64)
    calls = [call("chains", "standard", False, rows, **SAMPLED) for rows in (2, 3)]
    assert {True, False} == set(judged)
    assert calls == [call("chains", "standard", True, rows, **SAMPLED) for rows in (2, 3)]


def test_requests_with_seeds_of_their_own(judged):
    """Rows that take the place of others have their own numbers; those with other settings wait for nobody's graph."""
    drawn, found = torch.randint(3, 60, (7, 6), generator=torch.Generator().manual_seed(0)).tolist(), []
    requests = [{"input_ids": row, "max_new_tokens": 9 + index, "seed": index} for index, row in enumerate(drawn)]
    requests[-1]["temperature"] = 0.9
    for enforce_eager in (False, True):
        speculator = sampled_speculator(3, enforce_eager=enforce_eager)
        results = generate_many(tiny_llama(), requests, 3, assistant=speculator, in_order=True, **SAMPLED)
        found.append([one.tokens for one in results])
    assert found[0] == found[1]
    assert judged[0]


def test_numbers_are_those_of_the_host():
    """Rows of any seed and number, at any position."""
    uniforms = RowUniforms(2**64 - 5)
    uniforms.name(1, 2**63 + 11, 4)
    rows, positions = [0, 2, 1], [5, 1000, 3]
    keys = uniforms.keys(rows, positions)
    captured = RowKeys(*map(torch.tensor, keys[:3]))
    for purpose in (TARGET, ACCEPT):
        assert torch.equal(captured.at(purpose, 9), keys.at(purpose, 9))
    assert torch.equal(captured.for_nodes(7), keys.for_nodes(7))
    counts = torch.tensor([1, 3, 8])
    anchors = [position + count - 1 for position, count in zip(positions, counts.tolist())]
    drawn = [uniforms.keys(rows, anchors).for_nodes(1, DRAFT, depth)[:, 0] for depth in range(5)]
    assert torch.equal(captured.drafts_after(counts, 5), torch.stack(drawn, dim=1))
