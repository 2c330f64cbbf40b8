"""Verification along the path: at each depth the rows that still follow their draft are judged together.

Shapes: R active rows, T verified nodes, V vocabulary, A rows that still follow their draft.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ..drafts import DraftTree
from ..kernels.acceptance import reject
from ..kernels.best import best_tokens
from ..kernels.sampling import sample_from_probs
from ..logits.randomness import ACCEPT, TARGET, RowKeys
from ..transfers import upload
from .cycle import Cycle, Verdict, no_token_error


if TYPE_CHECKING:
    from .judging import Verifier


class Walk:
    """A verification that is walked when it is waited for. In its methods `active` are places in the batch."""

    acceptance: None = None

    def __init__(self, verifier: Verifier, cycle: Cycle):
        self.verifier: Verifier = verifier
        self.cycle: Cycle = cycle

    def wait(self) -> Verdict:
        draft, table, recorder = self.cycle.draft, self.verifier.rows, self.verifier.recorder
        # Of each row: the children of each verified node as {token: verified node}, of equal siblings the first; the
        # node that it has come to; its tokens, and the nodes that they were predicted from.
        self.children: list[list[dict[int, int]]] = []
        for tokens, parents in zip(draft.token_lists(), draft.parent_lists()):
            children: list[dict[int, int]] = [{} for _ in range(len(tokens) + 1)]
            for node, (token, parent) in enumerate(zip(tokens, parents), start=1):
                children[parent + 1].setdefault(token, node)
            self.children.append(children)
        self.nodes: list[int] = [0] * draft.batch_size
        self.token_lists: list[list[int]] = [[] for _ in self.nodes]
        self.paths: list[list[int]] = [[] for _ in self.nodes]
        active = list(range(draft.batch_size))
        while active:
            scores = self._scores(active)
            rows = [self.cycle.rows[i] for i in active]
            if recorder is not None:
                recorder.add(rows, scores[:, None], [1] * len(rows))
            tokens, next_nodes = self._choose(active, scores)
            for i, token in zip(active, tokens):
                self.paths[i].append(self.nodes[i])
                self.token_lists[i].append(token)
            table.append(rows, [[token] for token in tokens])
            active = self._follow(active, next_nodes)
        device, width = self.cycle.output.logits.device, max(map(len, self.paths))
        accepted = [
            sum(token in children[node] for node, token in zip(path, tokens))
            for children, path, tokens in zip(self.children, self.paths, self.token_lists)
        ]
        path = upload([row + [row[-1]] * (width - len(row)) for row in self.paths], device)
        tokens = upload([row + [0] * (width - len(row)) for row in self.token_lists], device)
        return Verdict(self.token_lists, list(map(len, self.token_lists)), accepted, path, tokens)

    def _scores(self, active: list[int]) -> torch.Tensor:
        """Processed scores `(A, V)` after the nodes that the rows have come to."""
        stack, rows, logits = self.verifier.stack, self.verifier.rows, self.cycle.output.logits
        places = upload([active, [self.nodes[i] for i in active]], logits.device)
        logits = logits[places[0], places[1]]
        masks = None
        if stack.grammar is not None and self.cycle.draft.masks is not None:
            masks = np.stack([self.cycle.draft.masks[i][self.nodes[i]] for i in active])
        if not stack.walks:
            return stack.all_nodes(logits, masks)
        numbers = [self.cycle.rows[i] for i in active]
        indices = [rows.at(number)[1] for number in numbers]
        texts = rows.group(numbers[0]).texts
        if not stack.unknown_names or len(texts.lengths) == 1:
            return stack.rows([rows.row(number) for number in numbers], logits, indices, masks)
        longest = texts.columns(max(texts.lengths[index] for index in indices))
        return stack.whole_batch(longest.to(texts.device), logits, indices)

    def _choose(self, active: list[int], scores: torch.Tensor) -> tuple[list[int], list[int | None]]:
        """A token for each active row, and the draft node that carries it (`None`: no node does)."""
        if not self.verifier.rule.samples:
            tokens = best_tokens(scores).tolist()
        elif self.cycle.draft.probs is None:
            tokens = self._draw(active, scores.softmax(-1))
        else:
            return self._choose_by_rejection(active, scores.softmax(-1), self.cycle.draft.probs)
        return tokens, [self.children[i][self.nodes[i]].get(token) for i, token in zip(active, tokens)]

    def _draw(self, active: list[int], probs: torch.Tensor) -> list[int]:
        tokens = sample_from_probs(probs, self._keys(active).at(TARGET, 1)[:, 0]).tolist()
        if min(tokens) < 0:
            raise no_token_error()
        return tokens

    def _choose_by_rejection(
        self, active: list[int], probs: torch.Tensor, draft_probs: torch.Tensor
    ) -> tuple[list[int], list[int | None]]:
        """Rejection sampling at one depth: the children of each row's node as a star below it."""
        stars = [list(self.children[i][self.nodes[i]].values()) for i in active]
        width = max(map(len, stars))
        if width == 0:
            return self._draw(active, probs), [None] * len(active)
        draft, device = self.cycle.draft, probs.device
        picks = upload([star + [1] * (width - len(star)) for star in stars], device) - 1
        index = upload(active, device)[:, None]
        parents = torch.full((width,), -1, device=device)
        star = DraftTree(draft.tokens[index, picks], parents, list(map(len, stars)), draft_probs[index, picks])
        # Only the first row of target probabilities is looked at; the token after an accepted child comes later.
        target = probs[:, None].expand(-1, width + 1, -1)
        target_uniforms = self._keys(active).at(TARGET, 1).expand(-1, width + 1)
        if draft.is_chain:
            accept_uniforms = self._keys(active).at(ACCEPT, 1)
        else:
            numbers, positions = ([values[i] for i in active] for values in (self.cycle.rows, self.cycle.positions))
            accept_uniforms = self.verifier.rule.keys(numbers, positions).for_nodes(draft.size).gather(1, picks)
        star.is_chain = width == 1
        accepted = reject(star, target, accept_uniforms, target_uniforms)
        tables = accepted.tokens[:, :1], accepted.num_accepted[:, None], accepted.path[:, 1:2]
        tokens, counts, children = zip(*torch.cat(tables, dim=1).tolist())
        if min(tokens) < 0:
            raise no_token_error()
        nodes = [star[child - 1] if count else None for star, count, child in zip(stars, counts, children)]
        return list(tokens), nodes

    def _keys(self, active: list[int]) -> RowKeys:
        """The keys of the rows' random numbers for their next tokens."""
        numbers = [self.cycle.rows[i] for i in active]
        positions = [self.cycle.positions[i] + len(self.token_lists[i]) for i in active]
        return self.verifier.rule.keys(numbers, positions)

    def _follow(self, active: list[int], next_nodes: list[int | None]) -> list[int]:
        """The rows that go on: those whose token has a node, or nobody if rows must keep equal lengths."""
        rows = self.verifier.rows
        if rows.all_finished:
            return []
        ended = rows.finished([rows.at(self.cycle.rows[i]) for i in active])
        going = {i: node for i, node, end in zip(active, next_nodes, ended) if node is not None and not end}
        if self.verifier.why_equal and len(going) < len(active) - sum(ended):
            return []
        for i, node in going.items():
            self.nodes[i] = node
        return list(going)
