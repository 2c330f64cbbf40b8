"""The n-gram method: its drafts are those of vLLM and of the definition of its matches, on the host and the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from hf_specdec.candidate_generators.ngram import generator
from hf_specdec.candidate_generators.ngram.generator import NgramCandidateGenerator
from hf_specdec.candidate_generators.ngram.texts import LONGEST_MATCH, CallTexts, DeviceTexts, RowText
from hf_specdec.drafting.state import Entries
from hf_specdec.drafts import DraftTree
from hf_specdec.kernels.text import best_matches
from hf_specdec.protocol import DraftStep, Session
from hf_specdec.settings import SpeculativeConfig
from tests.helpers.by_hand import commit_of, paths_of, prompt_of
from tests.helpers.levels import full, in_full
from tests.helpers.paths import FIXTURES


CPU = torch.device("cpu")


def all_matches(text: list[int], limit: int | None = None, first: bool = False) -> list[tuple[int, int]]:
    """Every earlier end with its match, the longest first, and the first or the last of equally long ones."""
    found = []
    for end in range(1, len(text)):
        count = 0
        while count < (limit or end) and count < end and text[end - 1 - count] == text[-1 - count]:
            count += 1
        found += [(count, end)] * (count > 0)
    return sorted(found, key=lambda match: (-match[0], match[1] if first else -match[1]))


def make_step(texts: list[list[int]], rows: list[int] | None = None, room: int | list[int] = 1000) -> DraftStep:
    rows = list(range(len(texts))) if rows is None else rows
    rooms = [room] * len(texts) if isinstance(room, int) else room
    return DraftStep(rows, torch.tensor([text[-1] for text in texts]), list(map(len, texts)), rooms)


def make_generator(batch_size: int = 1, session: Session | None = None, **options) -> NgramCandidateGenerator:
    """One that drafts chains, unless the options say otherwise: those of vLLM's rule do."""
    chain = {} if {"prompt_lookup_min", "prompt_lookup_max"} & options.keys() else {"prompt_lookup_num_matches": 1}
    config = SpeculativeConfig(method="ngram", **{**chain, **options})
    return NgramCandidateGenerator(config, None, session or Session(batch_size, 10_000, CPU))


def draft_after(texts: list[list[int]], room: int | list[int] = 1000, **options) -> DraftTree:
    generator = make_generator(len(texts), **options)
    generator.prefill(prompt_of(texts))
    draft = generator.propose(make_step(texts, room=room))
    assert max(draft.num_nodes.tolist()) <= generator.num_draft_nodes
    return draft


def drafts_after(texts: list[list[int]], room: int | list[int] = 1000, **options) -> list[list[int]]:
    return draft_after(texts, room, **options).token_lists()


def trees_after(texts: list[list[int]], room: int | list[int] = 1000, **options) -> list[list[tuple[int, ...]]]:
    return paths_of(draft_after(texts, room, **options))


@pytest.fixture(scope="module")
def recorded() -> dict:
    tensors = load_file(FIXTURES / "ngram" / "vllm_cpu" / "expected.safetensors")
    bounds, tokens = tensors["offsets"].tolist(), tensors["tokens"].tolist()
    answers = {"params": tensors["params"].tolist()}
    answers["texts"] = [tokens[start:end] for start, end in zip(bounds, bounds[1:])]
    for rule in ("draft", "last"):
        sizes = tensors[f"{rule}_len"].flatten().tolist()
        drafts = iter(torch.split(tensors[f"{rule}_flat"], sizes))
        answers[rule] = [[next(drafts).tolist() for _ in answers["params"]] for _ in answers["texts"]]
    return answers


@pytest.mark.parametrize("number", [2, *in_full(0, 1, *range(3, 10))])
def test_drafts_are_those_of_vllm(recorded, number):
    shortest, longest, count, max_model_len = recorded["params"][number]
    texts = recorded["texts"]
    for rule, matches in (("draft", None), ("draft", "first"), ("last", 1)):
        lengths = {"prompt_lookup_min": shortest, "prompt_lookup_max": longest, "max_model_len": max_model_len}
        drafts = drafts_after(texts, num_speculative_tokens=count, prompt_lookup_num_matches=matches, **lengths)
        assert drafts == [row[number] for row in recorded[rule]]


few_tokens = st.lists(st.integers(0, 3), max_size=12)
# Pieces that come again make long matches, and runs of one token make nothing but ties.
pieces = st.lists(
    st.one_of(few_tokens, st.sampled_from([[0, 1, 2, 3, 1], [0] * 9, [2, 1] * 4])), min_size=1, max_size=12
)
limits = st.sampled_from([None, 1, 2, 5])


def found_matches(text: list[int], count: int, limit: int | None = None, first: bool = False) -> list[tuple[int, int]]:
    return best_matches(np.array(text, dtype=np.int32), count, limit or len(text), first)


@given(pieces, few_tokens, limits, st.booleans(), st.integers(4, 200))
def test_scan_of_rows_that_grow_and_forget(pieces, lead, limit, first, most):
    row, text = RowText([], most), []
    for piece in pieces:
        row.extend(piece)
        text = text + piece
        if len(text) > most:
            text = text[-(most - most // 4) :]
        assert row.tokens.tolist() == text
        assert len(row) == len(text)
        # Tokens that are not committed do not stay.
        followed = row.followed_by(lead).tolist()
        assert followed == (text + lead if len(text + lead) <= most else [])
        for count in (1, 4, 64):
            assert found_matches(followed, count, limit, first) == all_matches(followed, limit, first)[:count]
        assert row.num_bytes <= 4 * most


@full
def test_scan_of_long_texts():
    for period in (1, 2, 3, 7):
        text = [9, 8, 0, *(list(range(period)) * 600)[:600]]
        assert found_matches(text, 4) == all_matches(text)[:4]
        assert found_matches([*text, 8], 4, 5, first=True) == all_matches([*text, 8], 5, first=True)[:4]
    block = [2**31 - 1 - i * 7 for i in range(1000)]
    assert found_matches([*block, 5, *block], 1) == [(1000, 1000)]
    # Every place matches as far as the text reaches back: compared pair by pair it takes an hour.
    size = 200_000
    assert found_matches([1, 2] * size, 2) == [(2 * size - 2, 2 * size - 2), (2 * size - 4, 2 * size - 4)]


def test_default_rule_and_lengths(monkeypatch):
    # The last longest match, whose length bounds the draft.
    text = [5, 1, 2, 3, 4, 6, 1, 2, 7, 8, 9, 10, 11, 12, 1, 2]
    assert drafts_after([text]) == [[7, 8, 9, 10]]
    assert drafts_after([text], prompt_lookup_num_matches="first") == [[3, 4, 6, 1]]
    assert drafts_after([text], prompt_lookup_min=2) == [[3, 4, 6, 1, 2, 7, 8, 9, 10, 11, 12, 1, 2]]
    assert drafts_after([text], prompt_lookup_min=3) == [[]]
    block = list(range(100, 160))
    text = [*block, 1, *block[:30]]
    # Rows of a batch share the default length.
    for batch_size, longest in ((1, 24), (2, 12), (16, 4)):
        assert drafts_after([text] * batch_size) == [block[30 : 30 + longest]] * batch_size
    assert drafts_after([text] * 4, num_speculative_tokens=8) == [block[30:38]] * 4
    text = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    assert drafts_after([text] * 3, room=[0, 2, 50]) == [[], [4, 5], [4, 5, 6, 1, 2, 3]]
    for max_model_len, draft in ((11, [4, 5]), (9, []), (3, [])):
        assert drafts_after([text], max_model_len=max_model_len) == [draft]
    far = [1, 2, 3, *range(100, 200), 1, 2]
    assert drafts_after([far]) == [[3, 100, 101, 102]]
    monkeypatch.setattr(generator, "_MAX_INDEXED_TOKENS", 64)
    assert drafts_after([far]) == [[]]


def test_rows_of_a_batch_go_their_own_ways():
    generator = make_generator(3)
    texts = [[1, 2, 3, 1], [1, 2, 3, 1], [4, 5]]
    generator.prefill(prompt_of(texts))
    new = [[2], [3, 1, 2, 3], [4]]
    generator.observe(commit_of([0, 1, 2], new))
    texts = [text + more for text, more in zip(texts, new)]
    tree = generator.propose(make_step(texts))
    assert tree.token_lists() == [[3, 1, 2], [1, 3, 1, 2, 3], [5, 4]]
    assert tree.is_chain
    generator.keep_rows([2, 0])
    generator.observe(commit_of([2, 0], [[5, 6], [3]]))
    texts = [[*texts[2], 5, 6], [*texts[0], 3]]
    assert generator.propose(make_step(texts, rows=[2, 0])).token_lists() == [[], [1, 2, 3]]
    # A second selection counts from the rows that are left, and a finished row is forgotten.
    generator.keep_rows([1])
    assert generator.propose(make_step(texts[1:], rows=[0])).token_lists() == [[1, 2, 3]]
    assert len(generator.state.texts) == 1


@given(pieces, st.integers(2, 6), st.integers(1, 30), st.sampled_from([{}, {"prompt_lookup_max": 2}]))
def test_every_path_follows_a_match(pieces, num_matches, room, options):
    text = sum(pieces, [0])
    (paths,) = trees_after([text], room, prompt_lookup_num_matches=num_matches, **options)
    found = all_matches(text, options.get("prompt_lookup_max"), first=False)[:num_matches]
    shortest = options.get("prompt_lookup_max", 1)
    chains = [
        tuple(text[end:][: min(room, 24) if options else min(room, 24, 2 * match)])
        for match, end in found
        if match >= shortest
    ]
    whole = [chain[:size] for chain in chains for size in range(1, len(chain) + 1)]
    assert paths == list(dict.fromkeys(whole))[: num_matches * 24 if options else 24]


@full
def test_best_matches_are_branches_of_one_tree():
    text = [1, 2, 3, 4, 9, 2, 3, 5, 9, 3, 6, 1, 2, 3]
    # After (1, 2, 3) came 4, after (2, 3) came 5, after (3) came 6.
    tree = [(4,), (4, 9), (5,), (5, 9), (6,), (6, 1)]
    assert trees_after([text], room=2, prompt_lookup_num_matches=3) == [tree]
    # Rows have trees of their own, and matches with one continuation make a chain.
    paths = trees_after([[1, 2, 1, 3, 1], [4, 5, 4], [6]], prompt_lookup_num_matches=2)
    assert paths == [[(3,), (3, 1), (2,), (2, 1)], [(5,), (5, 4)], []]
    assert draft_after([[1, 2, 3, 1, 2, 3, 1, 2]], 3, prompt_lookup_num_matches=3).is_chain
    # They have as many tokens as chains, or without a length tied to the match, all that every match can draft.
    text = [*range(10, 40), 1, *range(50, 80), 1, *range(90, 120), 1]
    options = {"prompt_lookup_num_matches": 4, "num_speculative_tokens": 3}
    assert drafts_after([text], **options) == [[90, 91, 50]]
    assert drafts_after([text], prompt_lookup_max=1, **options) == [[90, 91, 92, 50, 51, 52]]


# Lookups in tensors on the device

ON_DEVICE = {
    "default": {},
    "vllm": {"prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "chain": {"prompt_lookup_num_matches": 1},
    "first": {"prompt_lookup_num_matches": "first"},
    "last": {"prompt_lookup_max": 3, "prompt_lookup_num_matches": 3},
    "many": {"num_speculative_tokens": 3, "prompt_lookup_num_matches": 8},
}


def drafts_of_host_and_device(texts, rooms, **options):
    """Tokens and parents of the drafts that the two make of the same texts."""
    generator = make_generator(
        len(texts), **{"prompt_lookup_num_matches": None, "num_speculative_tokens": 6, **options}
    )
    generator.prefill(prompt_of(texts))
    host = generator.propose(make_step(texts, room=rooms))
    # Anything lies behind the texts.
    memory = torch.randint(0, 4, (len(texts), max(map(len, texts)) + 3))
    for row, text in enumerate(texts):
        memory[row, : len(text)] = torch.tensor(text)
    longest = generator.config.num_speculative_tokens
    most = torch.tensor([min(room, longest) for room in rooms])
    lengths = torch.tensor(list(map(len, texts)))
    found = generator.rule.draft(memory, lengths, most, longest, generator.num_draft_nodes)
    is_chain = generator.rule.num_matches == 1
    device = DraftTree.chain(found[0], found[2]) if is_chain else DraftTree(*found)
    assert (host.token_lists(), host.parent_lists()) == (device.token_lists(), device.parent_lists())
    return device


@st.composite
def texts_of_rows(draw):
    token = st.integers(0, draw(st.integers(0, 3)))
    texts = draw(st.lists(st.lists(token, min_size=1, max_size=40), min_size=1, max_size=3))
    return texts, [draw(st.integers(0, 7)) for _ in texts]


@pytest.mark.parametrize("name", ["default", *in_full(*list(ON_DEVICE)[1:])])
@given(case=texts_of_rows())
def test_drafts_of_the_device_are_those_of_the_host(name, case):
    drafts_of_host_and_device(*case, **ON_DEVICE[name])


@full
def test_long_matches_on_the_device():
    """The last of two that are long enough, whichever is longer; the user's limit holds."""
    for size, again, options, following in (
        (2 * LONGEST_MATCH, LONGEST_MATCH, {"prompt_lookup_num_matches": 1}, 2),
        *((75, 66, {"prompt_lookup_min": 1, "prompt_lookup_max": most}, next) for most, next in ((66, 2), (70, 1))),
    ):
        passage = list(range(100, 100 + size))
        text = [*passage, 1, 9, *passage[-again:], 2, *passage]
        options |= {"prompt_lookup_num_matches": 1}
        assert drafts_of_host_and_device([text], [6], **options).token_lists()[0][0] == following


def test_texts_of_a_call_on_the_device():
    """What the host knows is written once, and what a graph has written counts as far as it has been committed."""
    memory = DeviceTexts(CPU)
    texts = CallTexts(memory)
    texts.write([0, 1], [np.array([1, 2, 3]), np.array([4])], 2)
    buffer = memory.of_rows(2, texts.size)
    assert buffer[:, :4].tolist() == [[1, 2, 3, 0], [4, 0, 0, 0]]
    tokens, counts = torch.tensor([[5, 6], [7, 8]]), torch.tensor([2, 1])
    in_a_graph = texts.in_a_graph({"ends": torch.tensor([3, 1])}, 0)
    _, lengths = in_a_graph.with_new(Entries(tokens, {}, counts))
    assert lengths.tolist() == [5, 2]
    assert buffer[:, :6].tolist() == [[1, 2, 3, 5, 6, 0], [4, 7, 0, 0, 0, 0]]
    # Of the first row only one token was kept: the text goes on otherwise.
    texts.lengths = [4, 2]
    texts.write([0, 1], [np.array([1, 2, 3, 5, 9]), np.array([4, 7])], 2)
    assert buffer[:, :5].tolist() == [[1, 2, 3, 5, 9], [4, 7, 0, 0, 0]]
    for num_more in (0, texts.size + 1):
        texts.select([0])
        texts.write([1], [np.array([4, 7, 7])], num_more)
        assert memory.of_rows(1, texts.size)[0, :3].tolist() == [4, 7, 7]
