"""The grammar of a call's rows as masks: on scores, on drafts, and on drafts while they grow.

Processors of grammar libraries are recognised without importing these: one whose library is not loaded cannot be its
own. Processors of other libraries (lm-format-enforcer, outlines' own automata) are called along the accepted path like
any unknown one. Masks go to a device as packed words.

Shapes: R rows, P tokens of a prompt, M scores, V vocabulary, W words of a mask (see `matchers.py`), F nodes of a
level, U tokens of a draft.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from transformers.generation.logits_process import LogitsProcessor

from ...drafts import DraftTree
from ...errors import SpecConfigError, SpecDecError
from ...transfers import upload
from .libraries import LLGuidanceGrammar, XGrammar
from .matchers import Grammar, GrammarMatcher, NodeMasks


class GrammarMask(LogitsProcessor):
    """Masks scores `(M, V)` in place by masks int32 `(M, W)`; tokens beyond these are allowed or forbidden."""

    def __init__(self, masks: np.ndarray, allows_rest: bool):
        self.masks: np.ndarray[Any, Any] = masks
        self.allows_rest: bool = allows_rest

    def __call__(self, input_ids: torch.LongTensor | None, scores: torch.FloatTensor) -> torch.FloatTensor:
        width = min(self.masks.shape[1] * 32, scores.shape[1])
        scores[:, :width].masked_fill_(forbidden_tokens(self.masks, width, scores.device), -torch.inf)
        if not self.allows_rest:
            scores[:, width:] = -torch.inf
        return scores


def forbidden_tokens(masks: np.ndarray, width: int, device: torch.device) -> torch.BoolTensor:
    """Which of the first tokens masks int32 `(..., W)` forbid, `(..., width)`."""
    if device.type == "cpu":
        bits = np.unpackbits(masks.view(np.uint8), axis=-1, count=width, bitorder="little")
        return torch.from_numpy(bits) == 0
    words = torch.from_numpy(masks).to(device, non_blocking=True)
    shifts = torch.arange(32, dtype=torch.int32, device=device)
    return ((words[..., None] >> shifts) & 1).flatten(-2)[..., :width] == 0


def masked_nodes(masks: Sequence[NodeMasks | None], logits: torch.Tensor) -> torch.Tensor:
    """Logits `(R, T, V)` of all nodes of drafts with -inf for what the grammars of their rows forbid."""
    table = NodeMasks.padded(masks, logits.shape[1], -(-logits.shape[2] // 32))
    return logits.masked_fill(forbidden_tokens(table, logits.shape[2], logits.device), -torch.inf)


class GrowingMasks:
    """Masks after the nodes of R drafts whose children are chosen next; at first these nodes are the anchors."""

    def __init__(self, matchers: Sequence[GrammarMatcher | None], vocab_size: int):
        self._matchers = matchers
        # Processors of the call move the same matchers.
        self._begins = [matcher and list(matcher.tokens) for matcher in matchers]
        self._vocab_size = vocab_size
        self._paths: list[list[tuple[int, ...]]] = [[()] for _ in matchers]

    def apply(self, logits: torch.Tensor, ids: torch.LongTensor | None = None) -> torch.Tensor:
        """Logits `(R, F, U)` with -inf for forbidden tokens; `ids` `(U,)` are the target's, if others than these."""
        masks = np.full((*logits.shape[:2], -(-self._vocab_size // 32)), -1, dtype=np.int32)
        for row, matcher, begin, paths in zip(masks, self._matchers, self._begins, self._paths):
            if matcher is not None:
                matcher.move_to(begin)
                allowed = matcher.masks_after(paths)
                width = min(row.shape[1], allowed.shape[1])
                row[:, :width] = allowed[:, :width]
                row[:, width:] = 0
        if ids is not None:
            forbidden = forbidden_tokens(masks, self._vocab_size, logits.device).index_select(2, ids)
        else:
            width = min(logits.shape[-1], self._vocab_size)
            forbidden = forbidden_tokens(masks, width, logits.device)
            forbidden = F.pad(forbidden, (0, logits.shape[-1] - width), value=True)
        return logits.masked_fill(forbidden, -torch.inf)

    def follow(self, tokens: torch.LongTensor, parents: torch.LongTensor | slice) -> None:
        """Goes on to the next level: nodes `(R, F)` in the target's ids, and their parents in the level before."""
        if isinstance(parents, slice):
            parents = torch.arange(len(self._paths[0]), device="cpu")[parents]
        token_lists, parent_lists = tokens.tolist(), parents.expand(tokens.shape).tolist()
        self._paths = [
            [(*paths[parent], token) for token, parent in zip(row, above)]
            for paths, row, above in zip(self._paths, token_lists, parent_lists)
        ]


class RowGrammars:
    """The places of rows in a grammar, that of the user's `processor`, after prompts of `prompt_length` columns."""

    def __init__(self, grammar: Grammar, prompt_length: int, processor: Any = None):
        self.grammar: Grammar = grammar
        self.prompt_length: int = prompt_length
        self.processor = processor
        self._matchers: dict[int, GrammarMatcher] = {}

    def at(self, row: int, tokens: Sequence[int], is_drafted: bool = False) -> GrammarMatcher:
        """The place of a row after its tokens; a `SpecDecError` where one of them is forbidden."""
        if row not in self._matchers:
            self._matchers[row] = self.grammar.matcher(row)
        matcher = self._matchers[row]
        go = matcher.move_to if is_drafted else matcher.begin_at
        go(tokens[self.prompt_length :])
        return matcher

    def mask_after(self, row: int, tokens: Sequence[int], is_drafted: bool = False) -> np.ndarray:
        """Tokens that may follow, int32 `(W,)`: all of them where the row has left its grammar, as after its end."""
        try:
            return self.at(row, tokens, is_drafted).mask()
        except SpecDecError:
            return np.full(self.grammar.num_words, -1, dtype=np.int32)

    @classmethod
    def of_call(
        cls, processors: Sequence[Any], prompts: torch.LongTensor, vocab_size: int, ends: Collection[int]
    ) -> RowGrammars | None:
        """The grammar among a call's processors, if it is one; prompts are `(R, P)`, and `ends` may end a row."""
        grammars = [(processor, grammar_of(processor)) for processor in processors]
        grammars = [(processor, grammar) for processor, grammar in grammars if grammar is not None]
        if len(grammars) != 1:
            return None
        ((processor, grammar),) = grammars
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
        rows = cls(grammar, prompts.shape[1], processor)
        for row, prompt in enumerate(prompts.tolist()):
            if not rows.mask_after(row, prompt).any():
                raise SpecConfigError(
                    f"The grammar of {grammar.library} admits nothing, so row {row} cannot begin. Look for a pattern "
                    "or schema that no text fits, and for characters that the tokenizer lacks."
                )
        stop_tokens = rows.at(0, prompts[0].tolist()).stop_tokens
        if ends and stop_tokens and stop_tokens.isdisjoint(ends):
            raise SpecConfigError(
                f"The grammar of {grammar.library} ends texts with token {_listed(stop_tokens)}, and this call ends "
                f"at {_listed(ends)}, so that no text would end. Make the grammar with the tokenizer whose "
                "`eos_token_id` the call has, or pass `eos_token_id` to generate()."
            )
        return rows


def _listed(tokens: Collection[int]) -> str:
    return " or ".join(map(str, sorted(tokens)))


def constrained(draft: DraftTree, matchers: Sequence[GrammarMatcher | None]) -> DraftTree:
    """Cuts drafts where the grammars of their rows forbid them, and gives them the masks after all their nodes.

    Of tokens that were drawn a forbidden one stays, without what follows it: who has drawn it may not do without its
    rejection, which the distribution of the next token depends on.
    """
    token_lists, parent_lists = draft.token_lists(), draft.parent_lists()
    nodes: list[list[int]] = []  # that stay, of each row
    for matcher, tokens, parents in zip(matchers, token_lists, parent_lists):
        kept = list(range(len(tokens)))
        if matcher is not None:
            allowed = set(matcher.allowed_nodes(tokens, parents))
            # The verified nodes whose children can be accepted.
            goes_on = {node for node in allowed if node == 0 or tokens[node - 1] not in matcher.stop_tokens}
            keepers = goes_on if draft.probs is not None else set()
            kept = [node for node, parent in enumerate(parents) if node + 1 in allowed or parent + 1 in keepers]
        nodes.append(kept)
    if any(len(kept) < len(tokens) for kept, tokens in zip(nodes, token_lists)):
        draft = _cut(draft, nodes)
        token_lists, parent_lists = draft.token_lists(), draft.parent_lists()
    draft.masks = [
        None if matcher is None else NodeMasks(matcher, tokens, parents)
        for matcher, tokens, parents in zip(matchers, token_lists, parent_lists)
    ]
    return draft


def _cut(draft: DraftTree, nodes: list[list[int]]) -> DraftTree:
    """These nodes of each row, in their order."""
    device = draft.tokens.device
    tokens = [[row[node] for node in kept] for row, kept in zip(draft.token_lists(), nodes)]
    parents = []
    for row, kept in zip(draft.parent_lists(), nodes):
        places = {node: place for place, node in enumerate(kept)}
        parents.append([places.get(row[node], -1) for node in kept])
    fewer = DraftTree.from_lists(tokens, device, parents)
    if draft.probs is not None and fewer.size == 0:
        fewer.probs = draft.probs[:, :0]
    elif draft.probs is not None:
        index = upload([kept + [0] * (fewer.size - len(kept)) for kept in nodes], device)
        fewer.probs = draft.probs[torch.arange(len(nodes), device=device)[:, None], index]
    fewer.drafters = draft.drafters
    fewer.why_empty = draft.why_empty
    return fewer


# Grammars by processor: tables of a vocabulary are made once.
_grammars: WeakKeyDictionary[Any, Grammar] = WeakKeyDictionary()

# Classes of processors by what they keep their grammar for, and the modules that have them.
_KINDS = {
    "own": ("hf_specdec.logits.grammar.processor", "GrammarLogitsProcessor"),
    "xgrammar": ("xgrammar.contrib.hf", "LogitsProcessor"),
    "outlines' xgrammar": ("outlines.backends.xgrammar", "XGrammarLogitsProcessor"),
    "outlines' llguidance": ("outlines.backends.llguidance", "LLGuidanceLogitsProcessor"),
}


def grammar_of(processor: Any) -> Grammar | None:
    """The grammar of a logits processor; `None` for one that is of no grammar, or of an unknown library."""
    classes = {kind: getattr(sys.modules.get(module), name, None) for kind, (module, name) in _KINDS.items()}
    kind = next((kind for kind, known in classes.items() if type(processor) is known), None)
    if kind is None or processor in _grammars:
        return None if kind is None else _grammars[processor]
    if kind == "own":
        grammar = processor.grammar
    elif kind == "outlines' llguidance":
        tokenizer = processor.llg_tokenizer
        grammar = LLGuidanceGrammar(vocab_size=tokenizer.vocab_size, tokenizer=tokenizer, source=processor.grammar)
    elif kind == "xgrammar":
        # A used processor has one compiled grammar for each row of that call.
        compiled = processor.compiled_grammars
        compiled = compiled[:1] if all(one is compiled[0] for one in compiled) else compiled
        settings: dict[str, Any] = {"vocab_size": processor.full_vocab_size, "num_grammars": len(compiled)}
        grammar = XGrammar(**settings, allows_rest=True, compiled=tuple(compiled))
    else:
        compiled = processor.compiled_grammar
        grammar = XGrammar(vocab_size=compiled.tokenizer_info.vocab_size, allows_rest=True, compiled=(compiled,))
    _grammars[processor] = grammar
    return grammar
