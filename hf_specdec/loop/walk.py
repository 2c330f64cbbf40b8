"""Verification along the path: at each depth the rows that still follow their draft are judged together.

Shapes: R active rows, T verified nodes, V vocabulary, A rows that still follow their draft.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ..drafts import DraftTree
from ..kernels.acceptance import reject_chain, reject_tree
from ..kernels.best import best_tokens
from ..kernels.sampling import sample_from_probs
from ..logits.randomness import ACCEPT, TARGET
from ..transfers import read_together, upload
from .verdict import Verdict, check_drawn


if TYPE_CHECKING:
    from .judging import Verifier


class Walk:
    """A verification that is walked when it is waited for. In its methods `active` are places in the batch."""

    acceptance: None = None

    def __init__(
        self, verifier: Verifier, draft: DraftTree, logits: torch.Tensor, rows: list[int], positions: list[int]
    ):
        self.verifier: Verifier = verifier
        self.draft: DraftTree = draft
        self.logits: torch.Tensor = logits
        self.rows: list[int] = rows
        self.positions: list[int] = positions

    def wait(self) -> Verdict:
        draft, rows, recorder = self.draft, self.verifier.rows, self.verifier.recorder
        self.children: list[dict[int, int]] = [
            _children(*row) for row in zip(draft.token_lists(), draft.parent_lists())
        ]
        self.nodes: list[int] = [0] * len(self.rows)
        self.token_lists: list[list[int]] = [[] for _ in self.rows]
        self.paths: list[list[int]] = [[] for _ in self.rows]
        active = list(range(len(self.rows)))
        while active:
            scores = self._scores(active)
            numbers = [self.rows[i] for i in active]
            if recorder is not None:
                recorder.add(numbers, scores[:, None], [1] * len(numbers))
            tokens, next_nodes = self._choose(active, scores)
            for index, token in zip(active, tokens):
                self.paths[index].append(self.nodes[index])
                self.token_lists[index].append(token)
            rows.append(numbers, [[token] for token in tokens])
            active = self._follow(active, next_nodes)
        return self._verdict()

    def _scores(self, active: list[int]) -> torch.Tensor:
        """Processed scores `(A, V)` after the nodes that the rows have come to."""
        places = upload([active, [self.nodes[i] for i in active]], self.logits.device)
        logits = self.logits[places[0], places[1]]
        stack, rows = self.verifier.stack, self.verifier.rows
        masks = None
        if stack.grammar is not None:
            assert self.draft.masks is not None, "a draft without the masks of its grammar"
            masks = np.stack([self.draft.masks[i][self.nodes[i]] for i in active])
        if not stack.walks:
            return stack.all_nodes(logits, masks)
        numbers = [self.rows[i] for i in active]
        indices = [rows.at(number)[1] for number in numbers]
        sequences = rows.group(numbers[0]).sequences
        if stack.knows_all or len(sequences.lengths) == 1:
            return stack.rows([rows.row(number) for number in numbers], logits, indices, masks)
        length = max(sequences.lengths[index] for index in indices)
        return stack.whole_batch(sequences.prefix(length), logits, indices)

    def _choose(self, active: list[int], scores: torch.Tensor) -> tuple[list[int], list[int | None]]:
        """A token for each active row, and the draft node that carries it (`None`: no node does)."""
        if self.verifier.rule.uniforms is None:
            tokens = best_tokens(scores).tolist()
        elif self.draft.probs is None:
            tokens = self._draw(active, scores.softmax(-1))
        else:
            return self._choose_by_rejection(active, scores.softmax(-1), self.draft.probs)
        return tokens, [self.children[i][self.nodes[i]].get(token) for i, token in zip(active, tokens)]

    def _draw(self, active: list[int], probs: torch.Tensor) -> list[int]:
        return check_drawn(sample_from_probs(probs, self._uniforms(TARGET, active)).tolist())

    def _choose_by_rejection(
        self, active: list[int], probs: torch.Tensor, draft_probs: torch.Tensor
    ) -> tuple[list[int], list[int | None]]:
        """Rejection sampling at one depth: the children of each row's node as a star below it."""
        stars = [list(self.children[i][self.nodes[i]].values()) for i in active]
        width = max(map(len, stars))
        if width == 0:
            return self._draw(active, probs), [None] * len(active)
        device = probs.device
        picks = upload([star + [1] * (width - len(star)) for star in stars], device) - 1
        index = upload(active, device)[:, None]
        star = DraftTree(
            self.draft.tokens[index, picks],
            torch.full((width,), -1, device=device),
            list(map(len, stars)),
            draft_probs[index, picks],
        )
        # Only the first row of target probabilities is looked at; the token after an accepted child comes later.
        target = probs[:, None].expand(-1, width + 1, -1)
        target_uniforms = self._uniforms(TARGET, active)[:, None].expand(-1, width + 1)
        if self.draft.is_chain:
            accept_uniforms = self._uniforms(ACCEPT, active)[:, None]
        else:
            numbers, positions = ([values[i] for i in active] for values in (self.rows, self.positions))
            uniforms = self.verifier.rule.uniforms.for_nodes(numbers, positions, self.draft.size)
            accept_uniforms = uniforms.gather(1, picks)
        star.is_chain = width == 1
        reject = reject_chain if star.is_chain else reject_tree
        accepted = reject(star, target, accept_uniforms, target_uniforms)
        tables = read_together(
            {
                "counts": accepted.num_accepted[:, None],
                "new": accepted.tokens[:, :1],
                "path": accepted.path[:, :2],
            }
        )
        counts, children = ([row[-1] for row in tables[name]] for name in ("counts", "path"))
        tokens = check_drawn([row[0] for row in tables["new"]])
        nodes = [star[child - 1] if count else None for star, count, child in zip(stars, counts, children)]
        return tokens, nodes

    def _uniforms(self, purpose: int, active: list[int]) -> torch.Tensor:
        """The rows' random numbers `(A,)` for their next tokens."""
        numbers = [self.rows[i] for i in active]
        positions = [self.positions[i] + len(self.token_lists[i]) for i in active]
        return self.verifier.rule.uniforms.at(purpose, numbers, positions, 1)[:, 0]

    def _follow(self, active: list[int], next_nodes: list[int | None]) -> list[int]:
        """The rows that go on: those whose token has a node, or nobody if rows must keep equal lengths."""
        rows = self.verifier.rows
        if rows.all_finished:
            return []
        ended = [rows.has_left(self.rows[i]) for i in active]
        going = {i: node for i, node, end in zip(active, next_nodes, ended) if node is not None and not end}
        if self.verifier.why_equal and len(going) < len(active) - sum(ended):
            return []
        for i, node in going.items():
            self.nodes[i] = node
        return list(going)

    def _verdict(self) -> Verdict:
        device = self.logits.device
        width = max(map(len, self.paths))
        path = upload([p + [p[-1]] * (width - len(p)) for p in self.paths], device)
        tokens = upload([t + [0] * (width - len(t)) for t in self.token_lists], device)
        accepted = [
            sum(children[node].get(token) is not None for node, token in zip(nodes, row_tokens))
            for children, nodes, row_tokens in zip(self.children, self.paths, self.token_lists)
        ]
        return Verdict(self.token_lists, list(map(len, self.token_lists)), accepted, path, tokens)


def _children(tokens: list[int], parents: list[int]) -> list[dict[int, int]]:
    """Children of each verified node as {token: verified node}; of equal siblings the first counts."""
    children: list[dict[int, int]] = [{} for _ in range(len(tokens) + 1)]
    for index, (token, parent) in enumerate(zip(tokens, parents)):
        children[parent + 1].setdefault(token, index + 1)
    return children
