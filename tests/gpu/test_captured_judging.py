"""Drafts that are judged in the graph of their verification: what it accepts is what is accepted outside of it."""

from __future__ import annotations

import pytest
import torch

from hf_specdec import SpeculativeConfig, Speculator, generate_many, record
from hf_specdec.candidate_generators.ngram.generator import NgramCandidateGenerator
from hf_specdec.decoding import graphs, target
from hf_specdec.decoding.loop import DecodingLoop
from hf_specdec.logits.randomness import ACCEPT, TARGET, CapturedUniforms, RowKeys, RowUniforms
from tests.helpers.levels import in_full
from tests.helpers.models import prompts, tiny_llama
from tests.helpers.sampled import sampled_speculator
from tests.helpers.tape import spoil_inputs, tape_everything


DRAFTS = {
    "chains": lambda: sampled_speculator(3),
    "trees": lambda: sampled_speculator(6, widths=(2, 2)),
    "not drawn": lambda: Speculator(
        SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1), NgramCandidateGenerator, None
    ),
}
WARPERS = {"temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
RULES = {
    "standard": {},
    "block": {"rejection_sample_method": "block"},
    "typical": {"rejection_sample_method": "typical"},
    "synthetic": {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5},
}


@pytest.fixture(autouse=True)
def on_tapes(monkeypatch):
    monkeypatch.setenv("HF_SPECDEC_CHECK", "0")
    spoil_inputs(monkeypatch)
    tape_everything(monkeypatch)
    yield
    graphs.forget_graphs()


@pytest.fixture
def judged(monkeypatch) -> list[bool]:
    """Tells of each verification after a prefill whether its graph has judged."""
    noted: list[bool] = []
    verify = DecodingLoop._verify

    def noting(self, draft):
        output = verify(self, draft)
        noted.append(output.outcome is not None)
        return output

    monkeypatch.setattr(DecodingLoop, "_verify", noting)
    return noted


def call(speculator: Speculator, enforce_eager: bool, rows: int = 3, **arguments):
    """Text, drafts and statistics of a call."""
    config = SpeculativeConfig.resolve(speculator.config, enforce_eager=enforce_eager)
    speculator = Speculator(config, speculator.generator_class, speculator.resources)
    torch.manual_seed(0)
    with record(trace=True) as made:
        output = tiny_llama().generate(
            **prompts(rows), max_new_tokens=20, return_dict_in_generate=True, assistant=speculator, **arguments
        )
    return output.sequences.tolist(), made.calls[0].cycles, output.speculative


def check(make, judged: list[bool], **arguments):
    text, cycles, stats = call(make(), enforce_eager=False, **arguments)
    assert all(judged)
    assert len(judged) > 3
    eager_text, eager_cycles, eager_stats = call(make(), enforce_eager=True, **arguments)
    assert not all(judged)
    assert text == eager_text
    assert cycles == eager_cycles
    assert stats.num_accepted_tokens == eager_stats.num_accepted_tokens
    return stats


@pytest.mark.parametrize(
    ("drafts", "rule"),
    [
        ("chains", "standard"),
        ("trees", "standard"),
        *in_full(
            ("chains", "block"), *(("trees", rule) for rule in ("typical", "synthetic")), ("not drawn", "standard")
        ),
    ],
)
def test_sampling(drafts, rule, judged):
    def make():
        speculator = DRAFTS[drafts]()
        config = SpeculativeConfig.resolve(speculator.config, **RULES[rule])
        return Speculator(config, speculator.generator_class, speculator.resources)

    check(make, judged, do_sample=True, **WARPERS)


def test_scripted_acceptance_of_a_greedy_target(judged):
    """Its graph reads random numbers, though nothing else does."""

    def make():
        speculator = DRAFTS["not drawn"]()
        config = SpeculativeConfig.resolve(speculator.config, **RULES["synthetic"])
        return Speculator(config, speculator.generator_class, speculator.resources)

    stats = check(make, judged, do_sample=False)
    assert stats.num_accepted_tokens > 0


def test_drafts_that_would_take_too_much_memory(judged, monkeypatch):
    """Smaller batches are judged in the graph, larger ones after it."""
    monkeypatch.setattr(target, "_MOST_SCORES", 2 * 4 * 64)
    texts = [call(sampled_speculator(3), False, rows, do_sample=True, **WARPERS)[0] for rows in (2, 3)]
    assert {True, False} == set(judged)
    assert texts == [call(sampled_speculator(3), True, rows, do_sample=True, **WARPERS)[0] for rows in (2, 3)]


def test_requests_with_seeds_of_their_own(judged):
    """Rows that take the place of others have their own numbers; those with other settings wait for nobody's graph."""
    drawn, found = torch.randint(3, 60, (7, 6), generator=torch.Generator().manual_seed(0)).tolist(), []
    requests = [{"input_ids": row, "max_new_tokens": 9 + index, "seed": index} for index, row in enumerate(drawn)]
    requests[-1]["temperature"] = 0.9
    for enforce_eager in (False, True):
        arguments = {"do_sample": True, "in_order": True, **WARPERS}
        speculator = sampled_speculator(3, enforce_eager=enforce_eager)
        found.append(
            [one.tokens for one in generate_many(tiny_llama(), requests, 3, assistant=speculator, **arguments)]
        )
    assert found[0] == found[1]
    assert judged[0]


def test_numbers_are_those_of_the_host():
    """Rows of any seed and number, at any position."""
    uniforms = RowUniforms(2**64 - 5)
    uniforms.name(1, 2**63 + 11, 4)
    rows, positions = [0, 2, 1], [5, 1000, 3]
    keys = RowKeys(*map(torch.tensor, uniforms.keys(rows, positions)))
    captured = CapturedUniforms(keys)
    for purpose in (TARGET, ACCEPT):
        assert torch.equal(captured.at(purpose, [], [], 9), uniforms.at(purpose, rows, positions, 9))
    assert torch.equal(captured.for_nodes([], [], 7), uniforms.for_nodes(rows, positions, 7))
    counts = torch.tensor([1, 3, 8])
    anchors = [position + count - 1 for position, count in zip(positions, counts.tolist())]
    drawn = [uniforms.draft_at(rows, anchors, depth) for depth in range(5)]
    assert torch.equal(keys.drafts_after(counts, 5), torch.stack(drawn, dim=1))
