"""The n-gram method: its scan against the definition, vLLM's answers, options, batches and the stock protocol."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from hf_specdec.candidate_generators.ngram.generator import NgramCandidateGenerator, NgramOptions, merge
from hf_specdec.candidate_generators.ngram.text import RowText
from hf_specdec.drafts import DraftTree
from hf_specdec.errors import SpecConfigError
from hf_specdec.kernels.text import best_matches
from hf_specdec.protocol import Commit, DraftStep, Prompt, Session
from hf_specdec.settings import SpeculativeConfig
from tests.helpers.by_hand import paths_of
from tests.helpers.paths import FIXTURES


FIXTURE = FIXTURES / "ngram" / "vllm_cpu" / "expected.safetensors"


def all_matches(text: list[int], limit: int | None = None, first: bool = False) -> list[tuple[int, int]]:
    """Every earlier end with its match, the longest first, and the first or the last of equally long ones."""
    matches = [(min(common_suffix(text[:end], text), limit or end), end) for end in range(1, len(text))]
    return sorted(
        ((m, end) for m, end in matches if m), key=lambda found: (-found[0], found[1] if first else -found[1])
    )


def common_suffix(text: list[int], other: list[int]) -> int:
    count = 0
    while count < min(len(text), len(other)) and text[-1 - count] == other[-1 - count]:
        count += 1
    return count


def pad_left(rows: list[list[int]], padding: int = 0) -> Prompt:
    width = max(map(len, rows))
    padded = [[padding] * (width - len(row)) + row for row in rows]
    return Prompt(torch.tensor(padded).view(len(rows), width), [width - len(row) for row in rows])


def commit(rows: list[int], token_lists: list[list[int]]) -> Commit:
    return Commit(rows, pad_left(token_lists).input_ids, token_lists, [len(tokens) - 1 for tokens in token_lists])


def make_step(texts: list[list[int]], rows: list[int] | None = None, room: int | list[int] = 1000) -> DraftStep:
    rows = list(range(len(texts))) if rows is None else rows
    rooms = [room] * len(texts) if isinstance(room, int) else room
    anchors = torch.tensor([text[-1] for text in texts])
    return DraftStep(rows, anchors, [len(text) for text in texts], rooms)


def make_generator(batch_size: int = 1, max_length: int = 10_000, **options) -> NgramCandidateGenerator:
    """One that drafts chains, unless the options say otherwise."""
    config = SpeculativeConfig(method="ngram", **{"prompt_lookup_num_matches": 1, **options})
    return NgramCandidateGenerator(config, None, Session(batch_size, max_length, torch.device("cpu")))


def drafts_after(texts: list[list[int]], room: int | list[int] = 1000, **options) -> list[list[int]]:
    generator = make_generator(len(texts), **options)
    generator.prefill(pad_left(texts))
    return generator.propose(make_step(texts, room=room)).token_lists()


# --------------------------------------------------------------------------------------------------- vLLM's answers


@pytest.fixture(scope="module")
def recorded() -> dict:
    tensors = load_file(FIXTURE)
    bounds, tokens = tensors["offsets"].tolist(), tensors["tokens"].tolist()
    answers = {"params": tensors["params"].tolist()}
    answers["texts"] = [tokens[start:end] for start, end in zip(bounds, bounds[1:])]
    for rule in ("draft", "last"):
        sizes = tensors[f"{rule}_len"].flatten().tolist()
        drafts = iter(torch.split(tensors[f"{rule}_flat"], sizes))
        answers[rule] = [[next(drafts).tolist() for _ in answers["params"]] for _ in answers["texts"]]
    return answers


@pytest.fixture(scope="module")
def prefilled(recorded):
    generator = make_generator(len(recorded["texts"]))
    generator.prefill(pad_left(recorded["texts"]))
    return generator


@pytest.mark.parametrize(("rule", "match"), [("draft", None), ("draft", "first"), ("last", "last")])
@pytest.mark.parametrize("number", range(10))
def test_drafts_are_those_of_vllm(recorded, prefilled, rule, match, number):
    shortest, longest, count, max_model_len = recorded["params"][number]
    generator = make_generator(
        num_speculative_tokens=count,
        max_model_len=max_model_len,
        prompt_lookup_min=shortest,
        prompt_lookup_max=longest,
        prompt_lookup_match=match,
    )
    # The texts do not depend on the options, so they serve all of them.
    generator._row_texts = prefilled._row_texts
    drafts = generator.propose(make_step(recorded["texts"])).token_lists()
    assert drafts == [row[number] for row in recorded[rule]]


# ----------------------------------------------------------------------------------------------------------- the scan

few_tokens = st.lists(st.integers(0, 3), max_size=12)
# Pieces that come again make long matches, and runs of one token make nothing but ties.
pieces = st.lists(
    st.one_of(few_tokens, st.sampled_from([[0, 1, 2, 3, 1], [0] * 9, [2, 1] * 4])), min_size=1, max_size=12
)
limits = st.sampled_from([None, 1, 2, 5])


def found_matches(text: list[int], count: int, limit: int | None = None, first: bool = False) -> list[tuple[int, int]]:
    return best_matches(np.array(text, dtype=np.int32), count, limit or len(text), first)


@settings(max_examples=300, deadline=None)
@given(pieces, limits, st.booleans())
def test_scan_follows_the_definition(pieces, limit, first):
    text = sum(pieces, [])
    expected = all_matches(text, limit, first)
    for count in (1, 2, 5, 64, 200):
        assert found_matches(text, count, limit, first) == expected[:count]


@settings(max_examples=150, deadline=None)
@given(pieces, few_tokens, limits, st.booleans(), st.integers(4, 200))
def test_rows_grow_and_forget(pieces, lead, limit, first, most):
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
        assert found_matches(followed, 4, limit, first) == all_matches(followed, limit, first)[:4]
        assert row.num_bytes <= 4 * most


def test_few_of_many_matches():
    text = [7, 1] * 300 + [8, 1] * 300 + [1]
    assert found_matches(text, 3) == [(1, 1200), (1, 1198), (1, 1196)]
    assert found_matches(text, 2, first=True) == [(1, 2), (1, 4)]
    text += [7, 1]
    assert found_matches(text, 200) == all_matches(text)[:200]


@pytest.mark.parametrize("period", [1, 2, 3, 7])
def test_endless_loops_stay_exact(period):
    text = [9, 8, 0, *(list(range(period)) * 600)[:600]]
    for more in ([], [8]):
        text += more
        assert found_matches(text, 4) == all_matches(text)[:4]
        assert found_matches(text, 4, 5, first=True) == all_matches(text, 5, first=True)[:4]


def test_large_token_ids_and_long_matches():
    block = [2**31 - 1 - i * 7 for i in range(1000)]
    text = [*block, 5, *block]
    assert found_matches(text, 1) == [(1000, 1000)]
    assert found_matches([*text, 6], 1) == []


def test_work_grows_with_the_text_alone():
    """A loop, where every place matches as far as the text reaches back: compared pair by pair it takes an hour."""
    size = 200_000
    assert found_matches([1, 2] * size, 2) == [(2 * size - 2, 2 * size - 2), (2 * size - 4, 2 * size - 4)]


# ------------------------------------------------------------------------------------------------------- the generator


def test_default_rule_takes_the_last_longest_match_and_ties_the_draft_to_its_length():
    text = [5, 1, 2, 3, 4, 6, 1, 2, 7, 8, 9, 10, 11, 12, 1, 2]
    assert drafts_after([text]) == [[7, 8, 9, 10]]
    assert drafts_after([text], num_speculative_tokens=3) == [[7, 8, 9]]
    assert drafts_after([text], prompt_lookup_match="first") == [[3, 4, 6, 1]]
    assert drafts_after([text], prompt_lookup_min=2) == [[3, 4, 6, 1, 2, 7, 8, 9, 10, 11, 12, 1, 2]]
    assert drafts_after([text], prompt_lookup_min=3) == [[]]


def test_default_draft_length_is_24():
    block = list(range(100, 160))
    assert drafts_after([[*block, 1, *block[:30]]]) == [block[30:54]]


def test_drafts_keep_to_the_room_of_each_row():
    text = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    assert drafts_after([text] * 3, room=[0, 2, 50]) == [[], [4, 5], [4, 5, 6, 1, 2, 3]]
    assert drafts_after([text], max_model_len=11) == [[4, 5]]
    assert drafts_after([text], max_model_len=9) == [[]]
    assert drafts_after([text], max_model_len=3) == [[]]


def test_padding_is_no_text():
    # With the padding in the text, the short row would repeat zeros.
    texts = [[3, 4, 3, 4, 0], [0], [7, 7, 7, 7, 7, 6, 9, 9, 7]]
    assert drafts_after(texts) == [[], [], [6, 9]] == [drafts_after([text])[0] for text in texts]


def test_rows_of_a_batch_go_their_own_ways():
    generator = make_generator(3)
    texts = [[1, 2, 3, 1], [1, 2, 3, 1], [4, 5]]
    generator.prefill(pad_left(texts))
    new = [[2], [3, 1, 2, 3], [4]]
    generator.observe(commit([0, 1, 2], new))
    texts = [text + more for text, more in zip(texts, new)]
    tree = generator.propose(make_step(texts))
    assert tree.token_lists() == [[3, 1, 2], [1, 3, 1, 2, 3], [5, 4]]
    assert tree.is_chain
    assert tree.num_nodes.tolist() == [3, 5, 2]
    assert tree.tokens.shape == (3, 5)

    generator.keep_rows([2, 0])
    generator.observe(commit([2, 0], [[5, 6], [3]]))
    texts = [[*texts[2], 5, 6], [*texts[0], 3]]
    assert generator.propose(make_step(texts, rows=[2, 0])).token_lists() == [[], [1, 2, 3]]
    # A second selection counts from the rows that are left, and a finished row is forgotten.
    generator.keep_rows([1])
    assert generator.propose(make_step(texts[1:], rows=[0])).token_lists() == [[1, 2, 3]]
    assert list(generator._row_texts) == [0]
    generator.close()
    assert not generator._row_texts


def test_rows_with_one_prompt_go_their_own_ways():
    text = np.random.default_rng(0).integers(0, 9, 2000).tolist()
    generator = make_generator(4, num_speculative_tokens=24)
    generator.prefill(pad_left([text, text, text[:1500], text]))
    new = [[1, 2], [3], text[1500:1505], [4, 4, 4]]
    generator.observe(commit([0, 1, 2, 3], new))
    texts = [text + new[0], text + new[1], text[:1505], text + new[3]]
    assert generator.propose(make_step(texts)).token_lists() == [drafts_after([text])[0] for text in texts]


@pytest.mark.parametrize(("batch_size", "longest"), [(1, 24), (2, 12), (4, 6), (16, 4)])
def test_rows_of_a_batch_share_the_default_length(batch_size, longest):
    text = [*range(40), *range(30)]
    assert [len(draft) for draft in drafts_after([text] * batch_size)] == [longest] * batch_size
    assert [len(draft) for draft in drafts_after([text] * batch_size, num_speculative_tokens=8)] == [8] * batch_size


def test_max_indexed_tokens_limits_the_search():
    far = [1, 2, 3, *range(100, 200), 1, 2]
    assert drafts_after([far]) == [[3, 100, 101, 102]]
    assert drafts_after([far], prompt_lookup_max_indexed_tokens=64) == [[]]


def test_stock_protocol():
    text = [1, 2, 3, 4, 1, 2]
    generator = make_generator(max_length=10)
    candidates, logits = generator.get_candidates(torch.tensor([text]))
    assert candidates.tolist() == [[*text, 3, 4, 1]]
    assert logits is None
    generator.update_candidate_strategy(candidates, None, num_matches=1)
    candidates, _ = generator.get_candidates(torch.tensor([[*text, 3, 9]]))
    assert candidates.tolist() == [[*text, 3, 9]]
    single, _ = make_generator().get_candidates(torch.tensor([[5]]))
    assert single.tolist() == [[5]]


@pytest.mark.parametrize("seed", range(3))
def test_cycles_agree_with_a_fresh_start(seed):
    # What a row has become after many cycles drafts what its whole text drafts.
    random = np.random.default_rng(seed)
    texts = [random.integers(0, 4, size).tolist() for size in (1, 50, 700)]
    generator = make_generator(3, num_speculative_tokens=24)
    generator.prefill(pad_left(texts))
    for _ in range(40):
        new = [random.integers(0, 4, random.integers(1, 6)).tolist() for _ in texts]
        generator.observe(commit([0, 1, 2], new))
        texts = [text + more for text, more in zip(texts, new)]
        assert generator.propose(make_step(texts)).token_lists() == [drafts_after([text])[0] for text in texts]


# ---------------------------------------------------------------------------------------------------------- the trees


def trees_after(texts: list[list[int]], room: int | list[int] = 1000, **options) -> list[list[tuple[int, ...]]]:
    generator = make_generator(len(texts), **options)
    generator.prefill(pad_left(texts))
    draft = generator.propose(make_step(texts, room=room))
    assert max(draft.num_nodes.tolist()) <= generator.num_draft_nodes
    return paths_of(draft)


@settings(max_examples=150)
@given(st.lists(st.lists(st.integers(0, 3), max_size=10), max_size=6), st.integers(10, 30))
def test_merged_chains_are_a_trie(chains, most):
    tokens, parents = merge(chains, 1000)
    assert merge(chains, most) == (tokens[:most], parents[:most])
    assert all(parent < node for node, parent in enumerate(parents))
    (paths,) = paths_of(DraftTree.from_lists([tokens], parents=[parents]))
    assert len(set(paths)) == len(paths)
    assert set(paths) == {tuple(chain[:size]) for chain in chains for size in range(1, len(chain) + 1)}
    if chains:
        assert tokens[: len(chains[0])] == chains[0]


@settings(max_examples=100)
@given(pieces, st.integers(2, 6), st.integers(1, 30), st.sampled_from([{}, {"prompt_lookup_max": 2}]))
def test_every_path_follows_a_match(pieces, num_matches, room, options):
    text = sum(pieces, [0])
    (paths,) = trees_after([text], room, prompt_lookup_num_matches=num_matches, **options)
    found = all_matches(text, options.get("prompt_lookup_max"), first=bool(options))[:num_matches]
    shortest = options.get("prompt_lookup_max", 1)
    chains = [
        tuple(text[end:][: min(room, 24) if options else min(room, 24, 2 * match)])
        for match, end in found
        if match >= shortest
    ]
    whole = [chain[:size] for chain in chains for size in range(1, len(chain) + 1)]
    assert paths == list(dict.fromkeys(whole))[: num_matches * 24 if options else 24]


def test_best_matches_are_branches_of_one_tree():
    text = [1, 2, 3, 4, 9, 2, 3, 5, 9, 3, 6, 1, 2, 3]
    # After (1, 2, 3) came 4, after (2, 3) came 5, after (3) came 6.
    assert trees_after([text], prompt_lookup_num_matches=1) == [
        [(4,), (4, 9), (4, 9, 2), (4, 9, 2, 3), (4, 9, 2, 3, 5), (4, 9, 2, 3, 5, 9)]
    ]
    (paths,) = trees_after([text], room=2, prompt_lookup_num_matches=3)
    assert paths == [(4,), (4, 9), (5,), (5, 9), (6,), (6, 1)]
    (paths,) = trees_after([text], room=2, prompt_lookup_num_matches=2, prompt_lookup_min=2, prompt_lookup_max=2)
    assert paths == [(4,), (4, 9), (5,), (5, 9)]


def test_matches_with_one_continuation_make_a_chain():
    text = [1, 2, 3, 1, 2, 3, 1, 2]
    generator = make_generator(prompt_lookup_num_matches=3)
    generator.prefill(pad_left([text]))
    draft = generator.propose(make_step([text], room=3))
    assert draft.is_chain
    assert draft.token_lists() == [[3, 1, 2]]


def test_rows_have_trees_of_their_own():
    branching, plain, nothing = [1, 2, 1, 3, 1], [4, 5, 4], [6]
    paths = trees_after([branching, plain, nothing], prompt_lookup_num_matches=2)
    assert paths == [[(3,), (3, 1), (2,), (2, 1)], [(5,), (5, 4)], []]


@pytest.mark.parametrize("asked", [{}, {"prompt_lookup_num_matches": 1}, {"prompt_lookup_num_matches": 4}])
def test_targets_that_take_no_trees_get_chains(asked):
    session = Session(1, 100, torch.device("cpu"), supports_trees=False)
    config = SpeculativeConfig(method="ngram", **asked)
    generator = NgramCandidateGenerator(config, None, session)
    text = [1, 2, 1, 3, 1]
    generator.prefill(pad_left([text]))
    draft = generator.propose(make_step([text]))
    assert draft.is_chain
    assert draft.token_lists() == [[3, 1]]
    note = "ngram drafts from one match: the target cannot verify trees."
    assert session.notes == ([note] if asked.get("prompt_lookup_num_matches") == 4 else [])


def test_trees_have_as_many_tokens_as_chains_may_have():
    text = [*range(10, 40), 1, *range(50, 80), 1, *range(90, 120), 1]
    generator = make_generator(prompt_lookup_num_matches=4, num_speculative_tokens=3)
    assert generator.num_draft_nodes == 3
    generator.prefill(pad_left([text]))
    assert generator.propose(make_step([text])).token_lists() == [[90, 91, 50]]
    # Without a length tied to the match, every match drafts as much as it can.
    generator = make_generator(prompt_lookup_num_matches=4, num_speculative_tokens=3, prompt_lookup_max=1)
    assert generator.num_draft_nodes == 12
    generator.prefill(pad_left([text]))
    assert generator.propose(make_step([text])).token_lists() == [[50, 51, 52, 90, 91, 92]]


def test_stock_protocol_gets_the_best_match():
    text = torch.tensor([[1, 2, 1, 3, 1]])
    candidates, _ = make_generator(prompt_lookup_num_matches=4).get_candidates(text)
    assert candidates.tolist() == [[1, 2, 1, 3, 1, 3, 1]]


# --------------------------------------------------------------------------------------------------------- the options


@pytest.mark.parametrize(
    ("given_options", "shortest", "longest", "takes_first", "matches"),
    [
        ({}, 1, 64, False, 4),
        ({"match": "first"}, 1, 64, True, 4),
        ({"num_matches": 2}, 1, 64, False, 2),
        ({"prompt_lookup_max": 4}, 4, 4, True, 1),
        ({"prompt_lookup_min": 3}, 3, 3, True, 1),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 6}, 2, 6, True, 1),
        ({"prompt_lookup_max": 4, "match": "last", "num_matches": 3}, 4, 4, False, 3),
    ],
)
def test_what_is_left_out(given_options, shortest, longest, takes_first, matches):
    options = NgramOptions(**given_options)
    found = (options.min_match, options.max_match, options.takes_first, options.most_matches)
    assert found == (shortest, longest, takes_first, matches)


def test_the_shortest_match_is_not_above_the_longest():
    with pytest.raises(SpecConfigError, match="got prompt_lookup_min=5 and prompt_lookup_max=2"):
        NgramOptions(prompt_lookup_min=5, prompt_lookup_max=2)
