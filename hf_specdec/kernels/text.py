"""Loops over the tokens of a text: earlier matches of its end, and tables of what followed each token.

Shapes: L tokens of a text, M matches or nodes that were found, N nodes of a tree, V vocabulary, S successors of a
token.
"""

from __future__ import annotations

import numpy as np

from .compiled import compiled


def best_matches(text: np.ndarray, count: int, limit: int, first: bool) -> list[tuple[int, int]]:
    """Lengths of the longest matches of a text's end with what came before, and where they go on, the best first.

    Of equally long matches the last, or the first, are the best; those beyond the limit count as this long.
    """
    if not len(text):
        return []
    ends = np.flatnonzero(text == text[-1]) + 1
    lengths, ends = _longest(text, ends, count, limit, first)
    return list(zip(lengths.tolist(), ends.tolist()))


@compiled("Tuple((int64[::1], int64[::1]))(int32[::1], int64[::1], int64, int64, boolean)")
def _longest(text: np.ndarray, ends: np.ndarray, count: int, limit: int, first: bool) -> tuple[np.ndarray, np.ndarray]:
    """Lengths and ends of the best matches among all `ends` of the text's last token, the newest included."""
    size, newest = len(text), len(ends) - 1
    lengths = np.zeros(len(ends), dtype=np.int64)
    # The Z function of the text read backwards. From `begin` to `ends[known]` is the match that reaches furthest back.
    # It copies the text's end, so a place inside of it matches what its counterpart in the end does, up to `begin`.
    begin, known = size, newest
    for place in range(newest - 1, -1, -1):
        end = ends[place]
        most = min(end, limit)
        length = min(lengths[newest - known + place], end - begin) if end > begin else 0
        while length < most and text[end - 1 - length] == text[size - 1 - length]:
            length += 1
        lengths[place] = length
        if end - length < begin:
            begin, known = end - length, place
    # The newest stands for none: its length is 0.
    best = np.full(min(count, newest), newest)
    worst = 0
    for step in range(newest):
        place = step if first else newest - 1 - step
        if lengths[place] <= worst:
            continue
        rank = len(best) - 1
        while rank and lengths[best[rank - 1]] < lengths[place]:
            best[rank] = best[rank - 1]
            rank -= 1
        best[rank] = place
        worst = lengths[best[-1]]
    return lengths[best], ends[best]


@compiled("void(int32[:, ::1], int64[::1])")
def learn_text(successors: np.ndarray, tokens: np.ndarray) -> None:
    """Moves what follows each token of a text to the front of its successors `(V, S)`, best first, -1 for none."""
    vocab_size, most = successors.shape
    for index in range(len(tokens) - 1):
        token, successor = tokens[index], tokens[index + 1]
        if not (0 <= token < vocab_size and 0 <= successor < vocab_size):
            continue
        rank = 0
        while rank < most - 1 and successors[token, rank] != successor:
            rank += 1
        for after in range(rank, 0, -1):
            successors[token, after] = successors[token, after - 1]
        successors[token, 0] = successor


@compiled("int64[:, :](int32[:, ::1], int64[::1], int64[::1], int64)")
def fill_tree(successors: np.ndarray, parents: np.ndarray, ranks: np.ndarray, anchor: int) -> np.ndarray:
    """Fills a tree, by the parents `(N,)` of its nodes and their ranks among their siblings, with successors.

    Returns tokens, parents (-1: the anchor) and nodes `(3, M)` of those that have a token, which those below others
    without one have not.
    """
    vocab_size, most = successors.shape
    filled = np.empty((3, len(parents)), dtype=np.int64)
    places = np.full(len(parents), -1)
    count = 0
    for node in range(len(parents)):
        parent = -1
        if parents[node] >= 0:
            parent = places[parents[node]]
            if parent < 0:
                continue
        token = anchor if parent < 0 else filled[0, parent]
        if not (0 <= token < vocab_size and ranks[node] < most) or successors[token, ranks[node]] < 0:
            continue
        filled[0, count], filled[1, count], filled[2, count] = successors[token, ranks[node]], parent, node
        places[node] = count
        count += 1
    return filled[:, :count]
