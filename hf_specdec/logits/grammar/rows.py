"""The grammar of a call's rows: masks in the place of the user's processor, and drafts that stay within them.

Shapes: R rows, T verified nodes of a row (node 0 is the anchor), V vocabulary, W words of a mask.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch

from ...drafts import DraftTree
from ...errors import SpecConfigError
from ...transfers import upload
from .masks import GrammarMask
from .matchers import Grammar, GrammarMatcher, RowDraft, RowMatchers
from .recognition import grammar_of


class RowGrammars(RowMatchers):
    """The places of a call's rows in their grammar. The user's processor is not touched.

    Args:
        processor (`LogitsProcessor`): The user's.
        grammar (`Grammar`): What it is.
        prompt_length (`int`): Columns in front of the text.
    """

    def __init__(self, processor: Any, grammar: Grammar, prompt_length: int):
        super().__init__(grammar, prompt_length)
        self.processor = processor

    @classmethod
    def found(
        cls, processors: Sequence[Any], prompts: torch.LongTensor, vocab_size: int, ends: Collection[int] = ()
    ) -> RowGrammars | None:
        """The grammar among the processors of a call; `None` where there is none, or more than one.

        Args:
            processors (`Sequence`): The processors.
            prompts (`torch.LongTensor` of shape `(R, P)`): The prompts.
            vocab_size (`int`): V.
            ends (`Collection[int]`): Tokens that end a row in this call, if any do.

        Raises:
            SpecConfigError: It is of another vocabulary or number of rows, admits no text, or has none of the ends.
        """
        known = [(processor, grammar_of(processor)) for processor in processors]
        known = [(processor, grammar) for processor, grammar in known if grammar is not None]
        if len(known) != 1:
            return None
        ((processor, grammar),) = known
        if grammar.vocab_size > vocab_size:
            raise SpecConfigError(
                f"The grammar of {grammar.library} was made for a vocabulary of {grammar.vocab_size} tokens, and the "
                f"target has {vocab_size}. Make it with the target's own tokenizer."
            )
        if grammar.num_grammars not in (1, len(prompts)):
            raise SpecConfigError(
                f"The logits processor of {grammar.library} has {grammar.num_grammars} grammars, and the batch "
                f"{len(prompts)} rows. Give it one grammar for all rows, or one for each."
            )
        rows = cls(processor, grammar, prompts.shape[1])
        for row, prompt in enumerate(prompts.tolist()):
            if not rows.mask_after(row, prompt).any():
                raise SpecConfigError(
                    f"The grammar of {grammar.library} admits nothing, so row {row} cannot begin. Look for a pattern "
                    "or schema that no text fits, and for characters that the tokenizer lacks."
                )
        own_ends = rows.at(0, prompts[0].tolist()).stop_tokens
        if ends and own_ends and own_ends.isdisjoint(ends):
            raise SpecConfigError(
                f"The grammar of {grammar.library} ends texts with token {_listed(own_ends)}, and this call ends at "
                f"{_listed(ends)}, so that no text would end. Make the grammar with the tokenizer whose "
                "`eos_token_id` the call has, or pass `eos_token_id` to generate()."
            )
        return rows

    def masks_after(self, sequences: Sequence[torch.LongTensor], rows: Sequence[int]) -> np.ndarray:
        """Masks `(R, W)` of rows after their tokens, each of shape `(L,)`."""
        return np.stack(
            [self.mask_after(row, tokens.tolist(), is_drafted=True) for row, tokens in zip(rows, sequences)]
        )

    def masking(self, masks: np.ndarray) -> GrammarMask:
        """The processor for scores `(M, V)` with these masks `(M, W)`."""
        return GrammarMask(masks, self.grammar.allows_rest)


def _listed(tokens: Collection[int]) -> str:
    return " or ".join(map(str, sorted(tokens)))


class NodeMasks:
    """The masks after the anchor and the nodes of a row's draft, each made when it is asked for.

    Args:
        matcher (`GrammarMatcher`): At the anchor.
        tokens, parents (`Sequence[int]` of length N): The draft, parents before their children, -1: the anchor.
    """

    def __init__(self, matcher: GrammarMatcher, tokens: Sequence[int], parents: Sequence[int]):
        self.matcher = matcher
        self._begin = list(matcher.tokens)
        self._tokens, self._parents = tokens, parents
        self._all: np.ndarray | None = None

    def __getitem__(self, node: int) -> np.ndarray:
        """The mask int32 `(W,)` after a verified node; everything is allowed after one that cannot be accepted."""
        if self._all is not None:
            return self._all[node]
        path: list[int] = []
        while node > 0:
            path.append(self._tokens[node - 1])
            node = self._parents[node - 1] + 1
        is_reached = self.matcher.follow(self._begin, path[::-1])
        return self.matcher.mask() if is_reached else _full(self.matcher.num_words)

    @staticmethod
    def all_of(rows: Sequence[NodeMasks | None]) -> list[np.ndarray | None]:
        """All masks of rows, int32 `(T, W)` each; each library makes those of its rows in one call."""
        by_kind: dict[type[GrammarMatcher], list[RowDraft]] = {}
        for row in rows:
            if row is not None and row._all is None:
                matcher = row.matcher
                matcher.move_to(row._begin)
                row._all = _full(len(row._tokens) + 1, matcher.num_words)
                draft = RowDraft(matcher, row._tokens, row._parents, row._all)
                by_kind.setdefault(type(matcher), []).append(draft)
        for kind, drafts in by_kind.items():
            kind.fill_drafts(drafts)
        return [None if row is None else row._all for row in rows]


def constrained(draft: DraftTree, matchers: Sequence[GrammarMatcher | None]) -> DraftTree:
    """Cuts drafts where the grammars of their rows forbid them, and gives them the masks after all their nodes.

    Of tokens that were drawn a forbidden one stays, without what follows it: who has drawn it may not do without its
    rejection, which the distribution of the next token depends on.

    Args:
        draft (`DraftTree`): The drafts.
        matchers (`Sequence[GrammarMatcher]` of length R): The rows' places; `None` for rows without a grammar.
    """
    token_lists, parent_lists = draft.token_lists(), draft.parent_lists()
    kept = [
        list(range(len(tokens))) if matcher is None else _kept(matcher, tokens, parents, draft.probs is not None)
        for matcher, tokens, parents in zip(matchers, token_lists, parent_lists)
    ]
    if any(len(nodes) < len(tokens) for nodes, tokens in zip(kept, token_lists)):
        draft = _cut(draft, kept)
        token_lists, parent_lists = draft.token_lists(), draft.parent_lists()
    draft.masks = [
        None if matcher is None else NodeMasks(matcher, tokens, parents)
        for matcher, tokens, parents in zip(matchers, token_lists, parent_lists)
    ]
    return draft


def _full(*shape: int) -> np.ndarray:
    return np.full(shape, -1, dtype=np.int32)


def _kept(matcher: GrammarMatcher, tokens: list[int], parents: list[int], keeps_first_forbidden: bool) -> list[int]:
    """The nodes of a row's draft that stay."""
    is_allowed = matcher.allowed_nodes(tokens, parents)
    # Whether children of the anchor and of each node can be accepted.
    goes_on, kept = [True], []
    for node, (token, parent) in enumerate(zip(tokens, parents)):
        goes_on.append(is_allowed[node] and token not in matcher.stop_tokens)
        if is_allowed[node] or (goes_on[parent + 1] and keeps_first_forbidden):
            kept.append(node)
    return kept


def _cut(draft: DraftTree, kept: list[list[int]]) -> DraftTree:
    """The kept nodes of each row, in their order."""
    device, counts = draft.tokens.device, list(map(len, kept))
    tokens = [[row[node] for node in nodes] for row, nodes in zip(draft.token_lists(), kept)]
    parents = [_renumbered(row, nodes) for row, nodes in zip(draft.parent_lists(), kept)]
    fewer = DraftTree.from_lists(tokens, device, parents)
    if draft.probs is not None and fewer.size == 0:
        fewer.probs = draft.probs[:, :0]
    elif draft.probs is not None:
        index = upload([nodes + [0] * (fewer.size - len(nodes)) for nodes in kept], device)
        fewer.probs = draft.probs[torch.arange(len(counts), device=device)[:, None], index]
    fewer.drafters, fewer.why_empty = draft.drafters, draft.why_empty
    return fewer


def _renumbered(parents: list[int], nodes: list[int]) -> list[int]:
    places = {node: place for place, node in enumerate(nodes)}
    return [places.get(parents[node], -1) for node in nodes]
