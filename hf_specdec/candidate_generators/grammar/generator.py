"""Grammar drafting: what the grammar of a call forces is drafted, and the few alternatives that it leaves.

In structured output many tokens follow from the grammar alone: keys, quotes, separators, the rest of an enum's value
("jump-forward", Zheng et al. 2024, "SGLang", arXiv:2312.07104, section 4). Engines that insert such text change the
tokens of the output; as drafts, which the target verifies, they do not. No weights, no history.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar, NamedTuple

from ...drafting.state import RowState
from ...drafts import DraftTree
from ...logits.grammar.matchers import GrammarMatcher, allows, alternatives
from ...protocol import Commit, DraftStep, Lookups, Prompt, Session
from ...settings import SpeculativeConfig
from ...settings.checks import Options, setting
from ..base import CandidateGenerator
from ..row_trees import depth_sums


# Estimated probability that the target writes forced text in the tokens that are drafted for it.
_FORCED_PROB = 0.95

# What ends a value in JSON, and the estimated probability that a value ends at its next token.
_ENDS = ('"', ",", "}", "]")
_END_PROB = 0.3
# Values that are still going on then are long ones.
_MOST_MISSES = 8

_MAX_ALTERNATIVES = 16

_MISSING = (
    "grammar drafts nothing: the call has no logits processor of a known grammar library. Pass one, such as "
    "logits_processor=[hf_specdec.grammar(schema, tokenizer)]."
)


@dataclass(frozen=True)
class GrammarOptions(Options):
    """Options of `spec_method="grammar"`."""

    most_alternatives: int = setting(
        3,
        "Most alternatives at a place of the grammar, such as the values of an enum, that are drafted side by side; "
        "where there are more, the draft ends. 1: no alternatives, only forced tokens and likely ends of values, as "
        "of a string in JSON. 0: only forced tokens.",
        least=0,
        most=_MAX_ALTERNATIVES,
        key="grammar_most_alternatives",
        published=True,
    )


class GrammarCandidateGenerator(CandidateGenerator):
    """Drafts forced tokens, and trees over few alternatives. Without a grammar in the call it drafts nothing."""

    options_class = GrammarOptions
    default_num_speculative_tokens = 16
    samples_drafts: bool | None = False
    estimates_acceptance = True
    leads = True
    loaded_by: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: SpeculativeConfig, resources: Any, session: Session):
        super().__init__(config, resources, session)
        self.lookups: Lookups = Lookups()
        self.state: RowState = RowState(misses=[])  # guesses of each row that were wrong, one after the other
        self._drafts: list[RowTree] = []
        self._guessed: list[bool] = []  # the rows whose last draft is a guess
        self._most_alternatives = max(self.options.most_alternatives, 1) if session.supports_trees else 1

    def prefill(self, prompt: Prompt) -> None:
        self.state.misses = [0] * len(prompt.starts)

    def propose(self, step: DraftStep) -> DraftTree:
        sampler = self.session.sampler
        matchers = [None] * len(step.rows) if sampler is None else sampler.matchers(step.rows)
        most, rooms = self.shared_length(len(step.rows)), self.draft_depths(step)
        self._drafts, self._guessed = [], []
        for row, (matcher, room) in enumerate(zip(matchers, rooms)):
            draft = RowTree([], [], []) if matcher is None else foreseen(matcher, room, most, self._most_alternatives)
            if draft.tokens:
                self.state.misses[row] = 0
            is_open = matcher is not None and not draft.tokens and self.state.misses[row] < _MOST_MISSES
            self._guessed.append(is_open and self.options.most_alternatives > 0)
            self._drafts.append(guessed_end(matcher, min(most, room)) if self._guessed[-1] else draft)
        if not any(matchers):
            self.note(_MISSING)
        tokens, parents, log_probs = map(list, zip(*self._drafts))
        self.lookups.count(list(map(len, tokens)), rooms, 0, 0)
        return DraftTree.from_lists(tokens, self.session.device, parents, log_probs)

    def observe(self, commit: Commit) -> None:
        guessed, self._guessed = self._guessed, []
        for row, (is_guess, num_accepted) in enumerate(zip(guessed, commit.num_accepted)):
            if is_guess:
                self.state.misses[row] = 0 if num_accepted else self.state.misses[row] + 1

    @property
    def acceptance_probs(self) -> list[list[float]]:
        """Sums of the nodes' probabilities by depth, if alternatives are equally probable."""
        return [depth_sums(map(math.exp, draft.log_probs), draft.parents) for draft in self._drafts]


class RowTree(NamedTuple):
    """The draft of a row: tokens, parents (-1: the anchor) and log-probabilities of the paths to them."""

    tokens: list[int]
    parents: list[int]
    log_probs: list[float]


def foreseen(matcher: GrammarMatcher, depth: int, most_nodes: int, most_alternatives: int) -> RowTree:
    """The likeliest nodes of the tree of forced tokens and alternatives after a place in a grammar."""
    here, order, tree = list(matcher.tokens), count(), RowTree([], [], [])

    def add(token: int, parent: int, cost: float) -> int:
        for values, value in zip(tree, (token, parent, -cost)):
            values.append(value)
        return len(tree.tokens) - 1

    # Paths that go on: the least negative log-probability first, among equals the oldest.
    open_paths: list[tuple[float, int, int, list[int]]] = [(0.0, next(order), -1, [])]
    while open_paths and len(tree.tokens) < most_nodes:
        cost, _, node, path = heapq.heappop(open_paths)
        if path:
            node = add(path[-1], node, cost)
        if path and path[-1] in matcher.stop_tokens:
            continue
        matcher.move_to(here + path)
        run, next_tokens = _run_and_choice(matcher, most_alternatives)
        for token in run[: max(min(depth - len(path), most_nodes - len(tree.tokens)), 0)]:
            cost -= math.log(_FORCED_PROB)
            node = add(token, node, cost)
            path = [*path, token]
        if len(path) < depth:
            for token in next_tokens:
                item = (cost + math.log(len(next_tokens)), next(order), node, [*path, token])
                heapq.heappush(open_paths, item)
    matcher.move_to(here)
    return tree


def _run_and_choice(matcher: GrammarMatcher, most_alternatives: int) -> tuple[list[int], list[int]]:
    """The forced tokens after a place in a grammar, and the few tokens between which the target then chooses."""
    run = matcher.forced()
    if most_alternatives < 2 or (run and run[-1] in matcher.stop_tokens):
        return run, []
    begin = len(matcher.tokens)
    pieces = matcher.pieces(run[-1:])
    # A blank at the end is mostly written together with the word after it, where that is one of a few words, unless
    # the text has had blanks alone.
    is_open = bool(pieces) and pieces[0].isspace() and run[-1] not in matcher.tokens
    ends = [len(run) - 1, len(run)] if is_open else [len(run)]
    for end in ends:
        for token in run[len(matcher.tokens) - begin : end]:
            matcher.accept(token)
        if next_tokens := alternatives(matcher, matcher.mask(), most_alternatives):
            return run[:end], next_tokens
    return run, []


def guessed_end(matcher: GrammarMatcher, most: int) -> RowTree:
    """At most so many tokens that end a value of JSON here, with the text that is then forced."""
    mask = matcher.mask()
    for end in _ENDS:
        tokens = matcher.tokenized(end)
        if len(tokens) != 1 or not allows(mask, tokens[0]) or not matcher.accept(tokens[0]):
            continue
        forced = [token for token in matcher.forced() if token not in matcher.stop_tokens]
        matcher.rollback(1)
        pieces = matcher.pieces(forced)
        if not pieces:
            continue
        try:
            whole = matcher.tokenized(end + b"".join(pieces).decode())
        except UnicodeDecodeError:
            continue
        count = 0
        while count < len(whole) and matcher.accept(whole[count]):
            count += 1
        matcher.rollback(count)
        drafted = whole[: min(count, most)]
        log_probs = [math.log(_END_PROB) + place * math.log(_FORCED_PROB) for place in range(len(drafted))]
        return RowTree(drafted, list(range(-1, len(drafted) - 1)), log_probs)
    return RowTree([], [], [])
