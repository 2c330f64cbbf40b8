"""Denoising steps: against plain arithmetic, and bit for bit the same however often and beside whatever they run."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from hf_specdec.candidate_generators.dflash import denoising
from hf_specdec.candidate_generators.dflash.denoising import Denoising, confidences, keep_counts
from tests.helpers.paths import FIXTURES


PUBLISHED = FIXTURES / "dflash"

MASK = 3
RATIOS = (0.25, 0.5, 0.75, 1.0)
VOCABS = (100, 1_000, 32_000, 128_000)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STEPS = (1, 2, 3, 4, 5, 10)


def step(logits: torch.Tensor, keep: int, ids=None) -> Denoising:
    """One step on blocks of which nothing is known."""
    state = Denoising.start(*logits.shape[:2], MASK, logits.device)
    state.update(logits, keep, ids)
    return state


def assert_same(state: Denoising, expected: Denoising) -> None:
    assert torch.equal(state.tokens, expected.tokens)
    assert torch.equal(state.known, expected.known)
    assert torch.equal(state.confidences, expected.confidences)


def assert_same_row(state: Denoising, alone: Denoising, row: int) -> None:
    for name in ("tokens", "known", "confidences"):
        assert torch.equal(getattr(state, name)[row], getattr(alone, name)[0])


def random_logits(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul_(4).to(dtype)


class TestSchedule:
    def test_known_shares(self):
        assert [count / 8 for count in keep_counts(8, 4)] == list(RATIOS)
        assert keep_counts(16, 3) == (6, 11, 16)
        assert keep_counts(7, 3) == (3, 5, 7)
        assert keep_counts(7, 1) == (7,)

    def test_ends_once_all_is_known(self):
        assert keep_counts(1, 10) == (1,)
        assert keep_counts(2, 10) == (1, 1, 1, 1, 1, 2)

    @given(st.integers(1, 64), st.integers(1, 64))
    def test_rises_from_at_least_one_to_all(self, num_positions, num_steps):
        counts = keep_counts(num_positions, num_steps)
        assert counts == tuple(sorted(counts))
        assert counts[0] >= 1
        assert counts[-1] == num_positions
        assert num_positions not in counts[:-1]
        assert len(counts) <= num_steps
        assert all(
            (count - 1) * num_steps < num_positions * (index + 1) <= count * num_steps
            for index, count in enumerate(counts)
        )


class SlowState:
    """One row of the same in Python's numbers."""

    def __init__(self, num_positions: int):
        self.tokens = [MASK] * num_positions
        self.known = [False] * num_positions
        self.confidences = [0.0] * num_positions

    def update(self, logits: list[list[float]], keep: int) -> None:
        for position, row in enumerate(logits):
            if not self.known[position]:
                self.tokens[position] = row.index(max(row))
                self.confidences[position] = largest_probability(row)
        ranking = sorted(range(len(logits)), key=lambda position: (-self.confidences[position], position))
        self.known = [position in ranking[:keep] for position in range(len(logits))]


def largest_probability(row: list[float]) -> float:
    return 1 / math.fsum(math.exp(value - max(row)) for value in row)


@st.composite
def runs(draw):
    """Logits `(R, K, 5)` and what is kept, step by step; confidences are either the same numbers or far apart."""
    values = st.lists(st.integers(-6, 6), min_size=5, max_size=5)
    pool = draw(st.lists(values, min_size=1, max_size=6, unique_by=lambda row: round(largest_probability(row), 3)))
    shape = rows, num_positions = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    picks = st.lists(st.integers(0, len(pool) - 1), min_size=rows * num_positions, max_size=rows * num_positions)
    steps = draw(st.lists(st.tuples(picks, st.integers(0, num_positions)), min_size=1, max_size=6))
    return [(torch.tensor([pool[index] for index in picked]).view(*shape, 5), keep) for picked, keep in steps]


class TestSteps:
    @given(runs(), st.sampled_from(DTYPES))
    def test_equals_plain_arithmetic(self, run, dtype):
        rows, num_positions = run[0][0].shape[:2]
        state = Denoising.start(rows, num_positions, MASK, "cpu")
        slow = [SlowState(num_positions) for _ in range(rows)]
        for values, keep in run:
            state.update(values.to(dtype), keep)
            for row, expected in enumerate(slow):
                expected.update(values[row].tolist(), keep)
            assert state.tokens.tolist() == [row.tokens for row in slow]
            assert state.known.tolist() == [row.known for row in slow]
            assert state.inputs.tolist() == [
                [token if known else MASK for token, known in zip(row.tokens, row.known)] for row in slow
            ]
            if all(slow[0].known):
                break
            wanted = torch.tensor([row.confidences for row in slow])
            torch.testing.assert_close(state.confidences, wanted, atol=1e-6, rtol=0)

    def test_all_known_is_the_end(self):
        state = step(random_logits((2, 4, 9)), keep=4)
        tokens = state.tokens.clone()
        state.update(random_logits((2, 4, 9), seed=1), keep=4)
        assert torch.equal(state.tokens, tokens)
        assert state.known.all()

    def test_known_tokens_carry(self):
        logits = torch.zeros(1, 3, 6)
        logits[0, 0, 4] = 8.0
        state = step(logits, keep=1)
        assert state.known.tolist() == [[True, False, False]]
        kept = state.confidences[0, 0].clone()
        other = torch.zeros(1, 3, 6)
        other[0, :, 1] = torch.tensor([9.0, 2.0, 1.0])
        state.update(other, keep=2)
        assert state.tokens.tolist() == [[4, 1, 1]]
        assert state.known.tolist() == [[True, True, False]]
        assert torch.equal(state.confidences[0, 0], kept)

    def test_a_known_token_can_be_masked_again(self):
        logits = torch.zeros(1, 3, 6)
        logits[0, 0, 4] = 1.0
        state = step(logits, keep=1)
        logits = torch.zeros(1, 3, 6)
        logits[0, 1:, 2] = 5.0
        state.update(logits, keep=2)
        assert state.known.tolist() == [[False, True, True]]
        assert state.inputs.tolist() == [[MASK, 2, 2]]

    def test_the_masks_own_id_can_be_predicted(self):
        logits = torch.zeros(1, 4, 6)
        logits[0, 0, MASK], logits[0, 1, 5] = 9.0, 8.0
        state = step(logits, keep=2)
        assert state.known.tolist() == [[True, True, False, False]]
        state.update(torch.eye(6)[None, :4] * 20, keep=4)
        # Both were known, so that neither is predicted again.
        assert state.tokens.tolist() == [[MASK, 5, 2, 3]]

    def test_ids_of_a_draft_vocabulary(self):
        ids = torch.tensor([40, 10, 30, 20])
        state = step(torch.eye(4)[None, [2, 0, 1]] * 5, keep=2, ids=ids)
        assert state.tokens.tolist() == [[30, 40, 10]]
        assert state.inputs.tolist() == [[30, 40, MASK]]

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_logits_that_are_no_distribution_are_masked_first(self, bad, dtype):
        logits = random_logits((2, 4, 9)).to(dtype)
        logits[1, 2, 5] = logits[1, 2, 7] = bad
        state = step(logits, keep=3)
        assert state.known.tolist()[1] == [True, True, False, True]
        assert state.tokens[1, 2] == 5
        assert state.confidences.isfinite().all()
        assert_same_row(state, step(logits[:1], keep=3), 0)

    def test_logits_without_any_probability(self):
        state = step(torch.full((1, 3, 7), -math.inf), keep=1)
        assert state.tokens.tolist() == [[0, 0, 0]]
        assert state.confidences.tolist() == [[0.0, 0.0, 0.0]]
        assert state.known.tolist() == [[True, False, False]]

    @pytest.mark.parametrize(("shape", "keep"), [((2, 4, 9), 5), ((2, 4, 9), -1), ((2, 3, 9), 2), ((1, 4, 9), 2)])
    def test_what_does_not_fit_is_refused(self, shape, keep):
        with pytest.raises(ValueError, match="takes logits of shape"):
            Denoising.start(2, 4, MASK, "cpu").update(torch.zeros(shape), keep)


class TestRecordedSteps:
    STEP = load_file(PUBLISHED / "denoise_step" / "expected.safetensors")
    TRACES = load_file(PUBLISHED / "trained_b8" / "expected.safetensors")

    @pytest.mark.parametrize("name", sorted(name for name in STEP if ".keep_" in name))
    def test_pure_step(self, name):
        case, fraction = name.split(".keep_")
        part, whole = map(int, fraction.split("_of_"))
        logits, mask = self.STEP[f"{case}.logits"], self.STEP["mask_token_id"].item()
        rows, num_positions = logits.shape[:2]
        state = Denoising.start(rows, num_positions, mask, "cpu")
        keep = keep_counts(num_positions * part, whole)[0]
        state.update(logits, keep)
        assert torch.equal(state.tokens, self.STEP[f"{case}.tokens"])
        assert torch.equal(state.inputs, self.STEP[name])
        assert (~state.known).sum(1).tolist() == [num_positions - keep] * rows
        torch.testing.assert_close(confidences(logits), self.STEP[f"{case}.confidence"], atol=1e-6, rtol=0)

    @pytest.mark.parametrize("cycle", [0, 1])
    def test_trace_of_a_trained_draft(self, cycle):
        prefix = f"refine_trace.n3.cycle{cycle}.step"
        traces = [
            {name: self.TRACES[f"{prefix}{index}.{name}"] for name in ("block_input_ids", "logits", "tokens", "kept")}
            for index in range(3)
        ]
        state = Denoising.start(1, 7, self.TRACES["mask_token_id"].item(), "cpu")
        for index, (trace, keep) in enumerate(zip(traces, keep_counts(7, 3))):
            assert torch.equal(state.inputs, trace["block_input_ids"][:, 1:])
            state.update(trace["logits"], keep)
            assert torch.equal(state.tokens, trace["tokens"])
            assert torch.equal(state.known, trace["kept"].bool())
            if keep < 7:
                wanted = self.TRACES[f"{prefix}{index}.confidence"]
                torch.testing.assert_close(state.confidences, wanted, atol=1e-6, rtol=0)


# Batch, positions, share that is kept.
CONFIGURATIONS = list(product((1, 2, 4, 8, 64), (1, 8, 16), RATIOS))
MOST_LOGITS = 1 << 22


def configured_logits(index: int, batch_size: int, num_positions: int) -> torch.Tensor:
    """Every vocabulary and data type in turn, as far as they are quick enough to be repeated."""
    vocabs = [size for size in VOCABS if batch_size * num_positions * size <= MOST_LOGITS]
    shape = batch_size, num_positions, vocabs[-1 - index % len(vocabs)]
    return random_logits(shape, DTYPES[index % len(DTYPES)], seed=index)


def tied_confidences() -> torch.Tensor:
    """One distribution at every position, over other ids at each."""
    return torch.stack([random_logits((50,)).sort().values.roll(4 * position) for position in range(8)])[None]


EDGE_CASES = {
    "overflow": torch.full((2, 8, 100), 1000.0).add_(random_logits((2, 8, 100))),
    "underflow": torch.full((2, 8, 100), -1000.0).add_(random_logits((2, 8, 100))),
    "far_apart": torch.sign(random_logits((2, 8, 100))) * 1000.0,
    "overflow_half": torch.full((2, 8, 100), 60_000.0, dtype=torch.float16),
    "tied_confidences": tied_confidences(),
    "tied_rows": random_logits((1, 1, 100)).expand(4, 16, 100),
    "uniform": torch.zeros(2, 8, 100),
}


class TestDeterminism:
    def test_repetitions(self):
        cases = [
            (configured_logits(index, *shape), shape[1], ratio) for index, (*shape, ratio) in enumerate(CONFIGURATIONS)
        ]
        cases += [(logits, logits.shape[1], 0.5) for logits in EDGE_CASES.values()]
        for logits, num_positions, ratio in cases:
            keep = math.ceil(num_positions * ratio)
            state = step(logits, keep)
            for _ in range(2):
                assert_same(step(logits, keep), state)
            assert state.confidences.isfinite().all()
            assert (state.known.sum(1) == keep).all()
            assert (state.inputs == MASK).sum(1).ge(num_positions - keep).all()
            if ratio == 1.0:
                assert torch.equal(state.inputs, logits.float().argmax(-1))
        assert {logits.shape[2] for logits, *_ in cases} >= set(VOCABS)
        assert {logits.dtype for logits, *_ in cases} == set(DTYPES)

    @pytest.mark.parametrize("num_steps", STEPS)
    @pytest.mark.parametrize("num_positions", [1, 8, 16])
    def test_repetitions_of_whole_runs(self, num_steps, num_positions):
        table = random_logits((num_positions, 50, 50))
        positions = torch.arange(num_positions)

        def run() -> Denoising:
            state = Denoising.start(4, num_positions, MASK, "cpu")
            for keep in keep_counts(num_positions, num_steps):
                # A draft whose answer depends on what it is shown, there and at the next position.
                shown = table[positions, state.inputs] + table[positions, state.inputs.roll(1, dims=1)]
                state.update(shown + torch.arange(4.0)[:, None, None], keep)
            assert state.known.all()
            return state

        first = run()
        assert_same(run(), first)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("vocab_size", [97, 1_000, 32_000])
    def test_rows_do_not_depend_on_others(self, vocab_size, dtype):
        logits = random_logits((8, 5, vocab_size), dtype)
        state = step(logits, keep=2)
        for row in range(8):
            assert_same_row(state, step(logits[row : row + 1].clone(), keep=2), row)
        shuffled = step(logits.flip(0), keep=2)
        assert torch.equal(shuffled.confidences.flip(0), state.confidences)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_chunks_do_not_matter(self, dtype, monkeypatch):
        logits = random_logits((3, 5, 1_003), dtype)
        whole = step(logits, keep=2)
        for size in (1, 2_500, 7_000):
            monkeypatch.setitem(denoising._CHUNK_SIZES, "cpu", size)
            assert_same(step(logits, keep=2), whole)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_strided_logits(self, dtype):
        logits = random_logits((3, 6, 101), dtype)
        assert_same(step(logits[:, 1:], keep=2), step(logits[:, 1:].clone(), keep=2))

    def test_ties_go_to_the_first(self):
        assert step(EDGE_CASES["uniform"], keep=3).tokens.eq(0).all()
        assert step(EDGE_CASES["uniform"], keep=3).known.tolist() == [[True] * 3 + [False] * 5] * 2
        assert step(EDGE_CASES["tied_rows"], keep=9).known.tolist() == [[True] * 9 + [False] * 7] * 4

    def test_large_logits_keep_their_confidences(self):
        small = random_logits((2, 8, 100)).mul_(64).round_().div_(64)
        assert torch.equal(confidences(small + 1000), confidences(small))
        assert torch.equal(confidences(small - 1000), confidences(small))

    def test_nothing_waits_for_the_device(self):
        # Reading a value of a tensor that has none is an error.
        state = Denoising.start(2, 4, MASK, "meta")
        for keep in keep_counts(4, 3):
            state.update(torch.empty(2, 4, 9, device="meta", dtype=torch.bfloat16), keep)
        assert state.inputs.shape == (2, 4)
