"""A drafter for tests: it knows what plain generation will say, and spoils some of it on purpose.

With it every path of the loop is reached in a few cycles: rows that accept nothing, something or all of a draft, at
the same time, over chains and trees.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from hf_specdec import CandidateGenerator, DraftTree, SpeculativeConfig, Speculator, register_candidate_generator
from hf_specdec.method import methods
from hf_specdec.protocol import DraftStep
from hf_specdec.transfers import upload


# Nodes of a tree of random shape.
_RANDOM_NODES = 6


@dataclass(frozen=True)
class ScriptedOptions:
    """The script is no setting; it comes as the speculator's resources."""


@dataclass(frozen=True)
class Script:
    """Tokens to propose."""

    # For each row of the call its prompt and what follows, without padding.
    texts: list[list[int]]
    # Wrong tokens are drawn below it.
    vocab_size: int
    # Probability that a draft token is the right one.
    accuracy: float = 0.7
    seed: int = 0
    # Parents of the draft nodes, -1 for the anchor; `None` drafts chains, and `"random"` draws other parents for every
    # row. The right tokens lie on a branch chosen anew in every cycle.
    tree: tuple[int, ...] | str | None = None


class ScriptedCandidateGenerator(CandidateGenerator):
    """Proposes from a [`Script`]."""

    options_class = ScriptedOptions

    def __init__(self, config, resources: Script, session):
        super().__init__(config, resources, session)
        self.script = resources
        self.random = random.Random(resources.seed)

    @property
    def num_draft_nodes(self) -> int:
        tree = self.script.tree
        return self.num_speculative_tokens if tree is None else _RANDOM_NODES if tree == "random" else len(tree)

    def propose(self, step: DraftStep) -> DraftTree:
        if self.script.tree is not None:
            return self._trees(step)
        drafts = []
        for row, length, room in zip(step.rows, step.lengths, step.max_draft_tokens):
            size = min(self.random.randint(self.num_speculative_tokens - 1, self.num_speculative_tokens), room)
            drafts.append([self._token(row, length + depth) for depth in range(size)])
        return DraftTree.from_lists(drafts, self.session.device)

    def _token(self, row: int, position: int) -> int:
        """The token at this position of the row's text, or now and then a wrong one."""
        text = self.script.texts[row]
        if position >= len(text) or self.random.random() > self.script.accuracy:
            return self.random.randrange(self.script.vocab_size)
        return text[position]

    def _trees(self, step: DraftStep) -> DraftTree:
        is_random = self.script.tree == "random"
        if is_random:
            parents = [[self.random.randint(-1, node - 1) for node in range(_RANDOM_NODES)] for _ in step.rows]
        else:
            parents = [list(self.script.tree)] * len(step.rows)
        rows = zip(step.rows, step.lengths, step.max_draft_tokens, parents)
        drafts = [self._tree_tokens(*row) for row in rows]
        tokens = [draft + [0] * (len(parents[0]) - len(draft)) for draft in drafts]
        # As tensors alone, like a drafter that works on the device.
        tables = tokens, parents if is_random else parents[0], list(map(len, drafts))
        return DraftTree(*(upload(table, self.session.device) for table in tables))

    def _tree_tokens(self, row: int, length: int, room: int, parents: list[int]) -> list[int]:
        tokens, depths, right_nodes = [], [], self._right_branch(parents)
        for node, parent in enumerate(parents):
            depth = 0 if parent < 0 else depths[parent] + 1
            if depth >= room:
                break
            wrong = self.random.randrange(self.script.vocab_size)
            tokens.append(self._token(row, length + depth) if node in right_nodes else wrong)
            depths.append(depth)
        return tokens

    def _right_branch(self, parents: list[int]) -> set[int]:
        """A way from the anchor to a leaf."""
        branch, children = set(), [node for node, parent in enumerate(parents) if parent == -1]
        while children:
            last = self.random.choice(children)
            branch.add(last)
            children = [node for node, parent in enumerate(parents) if parent == last]
        return branch


def scripted_speculator(
    outputs: torch.LongTensor, starts: list[int], vocab_size: int, num_speculative_tokens: int = 5, **options
) -> Speculator:
    """Drafts from `outputs` of plain `generate()`, whose rows begin at `starts`; options are those of [`Script`]."""
    texts = [row[start:] for row, start in zip(outputs.tolist(), starts)]
    config = SpeculativeConfig(method="scripted", num_speculative_tokens=num_speculative_tokens)
    return Speculator(config, ScriptedCandidateGenerator, Script(texts, vocab_size, **options))


if "scripted" not in methods():
    register_candidate_generator("scripted", ScriptedCandidateGenerator)
