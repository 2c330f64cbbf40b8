"""N-gram speculation (prompt lookup): drafts the tokens that followed earlier occurrences of the text's end.

Saxena, "Prompt Lookup Decoding" (2023); the rule with `prompt_lookup_max` is that of vLLM's CPU proposer. No weights.

The host scans the text for its end. On a GPU, a graph does it ahead of the verdict, in the tokens alone
([`~candidate_generators.ngram.texts`]), and the host where the graph has not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from ...drafting.runner import Runner
from ...drafting.state import Entries, NetworkState, RowState
from ...drafts import DraftTree
from ...errors import SpecConfigError
from ...protocol import Commit, DeviceCommit, DraftStep, Lookups, Prompt, Session
from ...settings import SpeculativeConfig
from ...settings.checks import Options, setting
from ...target.graphs import graphs_for
from ...threads import cached_property
from ..base import CandidateGenerator
from ..row_trees import grafted
from .texts import LONGEST_MATCH, CallTexts, FoundTrees, LookupRule, RowText, texts_of


# Without a fixed n-gram range, a match of l tokens is trusted for so many times l draft tokens.
_DRAFT_TOKENS_PER_MATCHED = 2

_DEFAULT_MATCHES = 4
_MAX_MATCHES = 64

# Tokens of a row that are searched, of 4 to 8 bytes each; a longer row forgets its oldest quarter.
_MAX_INDEXED_TOKENS = 2**20


@dataclass(frozen=True)
class NgramOptions(Options):
    """Options of `spec_method="ngram"`.

    With neither `prompt_lookup_min` nor `prompt_lookup_max`, a match of l tokens is followed by at most 2 l draft
    tokens, and what followed several matches is one tree. With one of the two, the other equals
    it, and the draft is the longest that follows the one best match: vLLM's rule.
    """

    prompt_lookup_min: int | None = setting(
        None,
        "Shortest match that is drafted from, in tokens. Default: `prompt_lookup_max`, or else 1.",
        least=1,
        most=_MAX_INDEXED_TOKENS,
        published=True,
    )
    prompt_lookup_max: int | None = setting(
        None,
        f"Longest match looked for, in tokens. Default: `prompt_lookup_min`, or else {LONGEST_MATCH}: what is longer "
        "counts as this long.",
        least=1,
        most=_MAX_INDEXED_TOKENS,
        published=True,
    )
    num_matches: int | Literal["first"] | None = setting(
        None,
        "Occurrences that are drafted from, the longest matches and of these the last ones first; 1 drafts a chain, "
        "more a tree. `first`: the first occurrence of the longest match alone. Default: `first` if "
        "`prompt_lookup_min` or `prompt_lookup_max` is given, as in vLLM, or else 4.",
        least=1,
        most=_MAX_MATCHES,
        key="prompt_lookup_num_matches",
        published=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rule.min_match > self.rule.max_match:
            raise SpecConfigError(
                f"`prompt_lookup_min` must not be above `prompt_lookup_max`, got prompt_lookup_min="
                f"{self.rule.min_match} and prompt_lookup_max={self.rule.max_match}."
            )

    @cached_property
    def rule(self) -> LookupRule:
        """Where the user has chosen the lengths of matches, vLLM's rule."""
        is_fixed = self.prompt_lookup_min is not None or self.prompt_lookup_max is not None
        takes_first = self.num_matches == "first" or (self.num_matches is None and is_fixed)
        return LookupRule(
            min_match=self.prompt_lookup_min or self.prompt_lookup_max or 1,
            max_match=self.prompt_lookup_max or self.prompt_lookup_min or LONGEST_MATCH,
            tokens_per_matched=None if is_fixed else _DRAFT_TOKENS_PER_MATCHED,
            num_matches=1 if takes_first else self.num_matches or _DEFAULT_MATCHES,
            takes_first=takes_first,
        )


class NgramCandidateGenerator(CandidateGenerator):
    """Drafts what followed the longest earlier occurrences of the text's end, row by row."""

    options_class = NgramOptions
    default_num_speculative_tokens = 24
    samples_drafts: bool | None = False
    estimates_acceptance = True
    continues_leads = True
    loaded_by: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: SpeculativeConfig, resources: Any, session: Session):
        # Numba is imported here, before the cycles, which are timed.
        from ...kernels.text import best_matches

        super().__init__(config, resources, session)
        self.lookups: Lookups = Lookups()
        self._best_matches = best_matches
        # Texts of the rows; and on the device, where the target's verifications are graphs.
        self.state: RowState = RowState(texts=[], on_device=None)
        self._best: list[tuple[int, int]] = []  # of each row's last draft: its longest match, and the tokens from it
        self.rule: LookupRule = self.options.rule
        if self.rule.num_matches > 1 and not session.supports_trees:
            self.rule = replace(self.rule, num_matches=1)
            if self.options.num_matches is not None:
                session.notes.append("ngram drafts from one match: the target cannot verify trees.")
        if config.max_model_len is not None:
            # As in vLLM, drafts may fill the model's length.
            self.longest_row: tuple[int, str] | None = (config.max_model_len, "max_model_len")
        self._runner: Runner | None = None
        # A draft whose graph has run ahead, for which rows and how deep; and one that was taken, and the rooms it had.
        self._ahead: tuple[DraftTree, list[int], list[int]] | None = None
        self._taken: tuple[DraftTree, list[int]] | None = None

    @property
    def num_draft_nodes(self) -> int:
        return self._most_nodes(self.num_speculative_tokens)

    def _most_nodes(self, longest: int) -> int:
        """Most nodes of a row whose longest path may have so many: no more where drafts are tied to their matches."""
        return longest * self.rule.num_matches if self.rule.tokens_per_matched is None else longest

    def prefill(self, prompt: Prompt) -> None:
        target = self.session.target
        # Compared on the device token by token, matches of any length would be too slow.
        is_short = self.rule.max_match <= LONGEST_MATCH
        if is_short and target is not None and target.graphs is not None and target.graphs.pads_drafts:
            self.state.on_device = CallTexts(texts_of(target.model))
            memory = self.state.on_device.memory
            graphs = graphs_for(memory, {"enforce_eager=True": self.config.enforce_eager})
            self._runner = Runner.of(graphs, memory.place.device, self.session)
        self.state.texts = [RowText(tokens, _MAX_INDEXED_TOKENS) for tokens in prompt.texts]

    def propose(self, step: DraftStep) -> DraftTree:
        longest, rooms = self.shared_length(len(step.rows)), self.draft_depths(step)
        limits = [min(longest, room) for room in rooms]
        ahead, self._ahead = self._ahead, None
        # The graph is forgotten where rows were cut.
        if ahead is not None and ahead[1:] == (step.rows, limits) and self._runner.graphs.has_run_ahead:
            self._taken = ahead[0], rooms
            return ahead[0]
        self._best = []
        leads = step.leads or [[]] * len(step.rows)
        most = self._most_nodes(longest)
        rows = zip(self.state.texts, leads, limits)
        drafts = [self._draft(text, lead, depth, most) for text, lead, depth in rows]
        tokens, parents = map(list, zip(*drafts)) if drafts else ([], [])
        self._count_lookups(list(map(len, tokens)), rooms)
        return DraftTree.from_lists(tokens, self.session.device, parents)

    def _count_lookups(self, counts: list[int], rooms: list[int]) -> None:
        texts = self.state.texts
        self.lookups.count(counts, rooms, sum(map(len, texts)), sum(text.num_bytes for text in texts))

    # On the device

    @property
    def drafts_ahead(self) -> bool:
        # Under a grammar the host must know the tokens.
        return self._runner is not None and self._runner.has_graphs and not self.may_mask

    def draft_ahead(self, commit: DeviceCommit) -> DraftTree | None:
        longest, texts, width = self.shared_length(len(commit.rows)), self.state.on_device, commit.tokens.shape[1]
        tokens = [text.tokens for text in self.state.texts]
        if max(map(len, tokens)) + width > _MAX_INDEXED_TOKENS:
            # The row will forget its beginning, and places are others then.
            return None
        texts.write(commit.rows, tokens, width)
        size = longest, self._most_nodes(longest)
        limits = [min(room, longest) for room in commit.max_draft_tokens]

        def look_up(state: NetworkState, new: Entries) -> FoundTrees:
            return self.rule.draft(*state.slots.with_new(new), new.limits, *size)

        new = Entries(commit.tokens, {}, commit.counts, limits=limits)
        trees = self._runner.replay(look_up, NetworkState(texts), new, (self.rule, *size, texts.size), width)
        if trees is None:
            # Capturing has failed.
            return None
        texts.will_grow = True
        is_chain = self.rule.num_matches == 1
        draft = DraftTree.chain(trees[0], trees[2]) if is_chain else DraftTree(*trees)
        self._ahead = draft, commit.rows, limits
        return draft

    @property
    def acceptance_probs(self) -> list[list[float]]:
        """Estimates from the best match alone: where l tokens agree, one more agrees in l of l + 1 cases."""
        return [[(match / (match + 1)) ** depth for depth in range(1, count + 1)] for match, count in self._best]

    def observe(self, commit: Commit) -> None:
        for text, tokens in zip(self.state.texts, commit.token_lists):
            text.extend(tokens)
        on_device = self.state.on_device
        if on_device is not None and on_device.will_grow:
            on_device.will_grow, on_device.lengths = False, list(map(len, self.state.texts))
        taken, self._taken = self._taken, None
        if taken is not None and taken[0].node_counts is not None:
            self._count_lookups(taken[0].node_counts, taken[1])

    def close(self) -> None:
        super().close()
        if self._runner is not None:
            self._runner.graphs.close()

    def _draft(self, text: RowText, lead: list[int], depth: int, most: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of what followed the best matches of the text with a lead after it, to a depth."""
        rule, chains = self.rule, []
        self._best.append((0, 0))
        if depth <= 0:
            return [], []
        matches = self._best_matches(text.followed_by(lead), rule.num_matches, rule.max_match, rule.takes_first)
        for match, end in matches:
            if match >= rule.min_match:
                longest = min(depth, (rule.tokens_per_matched or depth) * match)
                chains.append(text.tokens[end : end + longest].tolist())
        if chains:
            self._best[-1] = matches[0][0], len(chains[0])
        return grafted(((chain, range(-1, len(chain) - 1), -1) for chain in chains), most)
