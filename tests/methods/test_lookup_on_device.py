"""Lookups of n-grams in tensors: the drafts are those of the scan on the host."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specdec import SpeculativeConfig
from hf_specdec.candidate_generators.ngram.generator import NgramCandidateGenerator
from hf_specdec.candidate_generators.ngram.on_device import LONGEST_MATCH, CallTexts, DeviceTexts
from hf_specdec.protocol import DraftStep, Prompt, Session


CPU = torch.device("cpu")
SETTINGS = [
    {},
    {"prompt_lookup_num_matches": 1},
    {"prompt_lookup_match": "first"},
    {"prompt_lookup_min": 2, "prompt_lookup_max": 4},
    {"prompt_lookup_max": 3, "prompt_lookup_num_matches": 3, "prompt_lookup_match": "last"},
    {"num_speculative_tokens": 3, "prompt_lookup_num_matches": 8},
]


def drafts_of_host_and_device(texts, rooms, **options):
    """Tokens and parents of the drafts that the two make of the same texts."""
    config = SpeculativeConfig(
        method="ngram", num_speculative_tokens=options.pop("num_speculative_tokens", 6), **options
    )
    generator = NgramCandidateGenerator(config, None, Session(len(texts), 1000, CPU))
    width = max(map(len, texts))
    padded = torch.tensor([[0] * (width - len(text)) + text for text in texts])
    generator.prefill(Prompt(padded, [width - len(text) for text in texts]))
    rows = list(range(len(texts)))
    host = generator.propose(DraftStep(rows, padded[:, -1], list(map(len, texts)), rooms))
    size = width + 3
    memory = torch.randint(0, 4, (len(texts), size))
    for row, text in enumerate(texts):
        memory[row, : len(text)] = torch.tensor(text)
    limits = torch.tensor([min(room, config.num_speculative_tokens) for room in rooms])
    found = generator._rule(config.num_speculative_tokens).draft(memory, torch.tensor(list(map(len, texts))), limits)
    device = generator._drafted(found)
    return [(draft.token_lists(), draft.parent_lists()) for draft in (host, device)]


@st.composite
def texts_of_rows(draw):
    token = st.integers(0, draw(st.integers(0, 3)))
    texts = draw(st.lists(st.lists(token, min_size=1, max_size=40), min_size=1, max_size=3))
    return texts, [draw(st.integers(0, 7)) for _ in texts]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
@settings(max_examples=60, deadline=None)
@given(case=texts_of_rows())
def test_drafts_are_those_of_the_host(options, case):
    host, device = drafts_of_host_and_device(*case, **options)
    assert device == host


def test_branches_and_prefixes():
    """Three continuations, of which the last ones begin alike."""
    text = [1, 2, 7, 7, 1, 2, 8, 5, 1, 2, 8, 6, 1, 2]
    host, device = drafts_of_host_and_device([text], [6])
    assert device == host
    (tokens,), (parents,) = device
    assert tokens[:4] == [8, 6, 1, 2]
    assert parents.count(0) == 2  # 6 and 5 after the same 8


def test_matches_beyond_the_longest_count_as_this():
    """The last of two that are long enough, whichever is longer."""
    passage = [int(token) for token in torch.randint(5, 60, (2 * LONGEST_MATCH,), generator=torch.Generator())]
    text = [*passage, 1, *passage[-LONGEST_MATCH:], 2, *passage]
    host, ((tokens,), parents) = drafts_of_host_and_device([text], [6], prompt_lookup_num_matches=1)
    assert host == ([tokens], parents)
    assert tokens[0] == 2


@pytest.mark.parametrize(("most", "following"), [(100, 1), (66, 2), (70, 1)])
def test_the_users_limit_holds_for_both(most, following):
    """Matches of 75 and 66 tokens."""
    passage = list(range(100, 175))
    text = [*passage, 1, 9, *passage[-66:], 2, *passage]
    lengths = {"prompt_lookup_min": 1, "prompt_lookup_max": most}
    host, device = drafts_of_host_and_device([text], [6], **lengths, prompt_lookup_match="last")
    assert device == host
    assert device[0][0][0] == following


def test_texts_of_a_call():
    """What the host knows is written once, and what a graph has written counts as far as it has been committed."""
    memory = DeviceTexts(CPU)
    texts = CallTexts(memory)
    texts.have_room(5)
    texts.write([0, 1], [[1, 2, 3], [4]])
    buffer = memory.of_rows(2, texts.size)
    assert buffer[:, :4].tolist() == [[1, 2, 3, 0], [4, 0, 0, 0]]
    tokens, counts = torch.tensor([[5, 6], [7, 8]]), torch.tensor([2, 1])
    memory.append(tokens, counts, torch.tensor([3, 1]), texts.size)
    assert buffer[:, :6].tolist() == [[1, 2, 3, 5, 6, 0], [4, 7, 0, 0, 0, 0]]
    # Of the first row only one token was kept: the text goes on otherwise.
    texts.have_grown([4, 2])
    texts.write([0, 1], [[1, 2, 3, 5, 9], [4, 7]])
    assert buffer[:, :5].tolist() == [[1, 2, 3, 5, 9], [4, 7, 0, 0, 0]]
    texts.forget()
    texts.write([1], [[4, 7, 7]])
    assert memory.of_rows(1, texts.size)[0, :3].tolist() == [4, 7, 7]
    texts.have_room(texts.size + 1)
    texts.write([1], [[4, 7, 7]])
    assert memory.of_rows(1, texts.size)[0, :3].tolist() == [4, 7, 7]
