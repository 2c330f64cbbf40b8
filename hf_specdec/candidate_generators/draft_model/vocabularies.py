"""Relations of a draft model's vocabulary to the target's, and drafts and texts on their way between the two.

| tokenizers | drafts |
|---|---|
| one and the same, padded or with further tokens | [`SameTokens`]: the draft's tokens are the target's |
| two with many common tokens | [`SharedTokens`]: drafts are sampled among the tokens that both have. TLI, algorithm 4 of Timor et al. 2025 (arXiv:2502.05202): for a token t that both have, q'(t) is q(t) divided by the sum of q over all such tokens, and rejection sampling with q' is exact |
| two with few | [`ReencodedText`]: the draft writes in its own tokens, and its text is segmented as the target's. SLEM, algorithm 2 there, transformers' universal assisted generation |

In the last two the draft reads the text in its own segmentation. Nothing of a model is changed: its logits are
gathered, and what it reads is looked up.

Shapes: R rows that are drafted for, K drafted tokens, V vocabulary of the target, W logits of the draft.
"""  # noqa: E501 - rows of a table

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ...drafts import DraftTree
from ...errors import CheckpointFormatError
from ...protocol import Prompt
from ...target.following import Following, Translation
from ...target_facts import MAX_VOCABULARY_GAP, num_embeddings, vocabulary_size
from ...transfers import RowNumbers
from .vocabulary import CONTEXT_BYTES, Vocabulary


logger = logging.get_logger(__name__)

# Part of the target's vocabulary that both must have for drafts among these tokens: of a third of it fewer drafts are
# accepted than of re-encoded text (benchmarks/vocabularies.py).
LEAST_SHARED = 0.5


@dataclass
class RowText:
    """The text of a row as the draft model has it.

    Attributes:
        pending (`list[int]`): Tokens that it has not been fed, the last one for the next logits.
        num_fed (`int`): Draft tokens of the last cycle in its cache.
        drafted (`list[int]`): Draft tokens of the last cycle, where they are its own.
        end (`bytes`): The end of the text, where segmentations differ.
        states (`list[dict]`): The target's states that belong to the pending tokens, each `(t, H)`, where the draft
            model reads them.
    """

    pending: list[int] = field(default_factory=list)
    num_fed: int = 0
    drafted: list[int] = field(default_factory=list)
    end: bytes = b""
    states: list[dict[int | str, torch.Tensor]] = field(default_factory=list)


class SameTokens:
    """One tokenizer, whose vocabulary may be padded to different widths.

    Args:
        target_size (`int`): V.
        draft_size (`int`): W.
        readable (`int`): Rows of the draft's embedding: it can read the ids below.

    Attributes:
        drafts_target_tokens (`bool`): Drafts are chosen from logits in the target's vocabulary.
        note (`str`, *optional*): For the statistics.
    """

    drafts_target_tokens = True
    note: str | None = None

    def __init__(self, target_size: int, draft_size: int, readable: int):
        self.target_size: int = target_size
        self.draft_size: int = draft_size
        self.readable: int = readable

    def prompts(self, prompt: Prompt) -> tuple[torch.LongTensor, list[int], list[RowText]]:
        """Prompts as the draft reads them: left-padded tokens `(B, P)`, the first one of each row, and the rest."""
        return self.inputs(prompt.input_ids), prompt.starts, [RowText() for _ in prompt.starts]

    def inputs(self, tokens: torch.LongTensor) -> torch.LongTensor:
        """Target tokens of any shape as the draft reads them; those that it lacks are replaced, at the cost of some
        acceptance."""
        return tokens.masked_fill(tokens >= self.readable, 0) if self.readable < self.target_size else tokens

    @property
    def num_choices(self) -> int:
        """Of the best tokens, those that may be drafted: the first ones of the logits."""
        return min(self.target_size, self.draft_size)

    def translation(self, device: torch.device) -> Translation | None:
        """The way of drafts between the two vocabularies, on a device; `None` where the draft chooses its own."""
        return None

    def logits(self, logits: torch.Tensor) -> torch.Tensor:
        """The draft's logits `(R, W)`, of which those of the target's tokens are the first V."""
        return logits

    def draft(self, drafted: Following, counts: RowNumbers, depths: list[int], texts: list[RowText]) -> DraftTree:
        """The drafts of a cycle.

        Args:
            drafted (`Following`): Their tokens.
            counts (`list[int]` or `torch.LongTensor` of length R): Valid tokens of each row.
            depths (`list[int]`): Most tokens of each row's draft.
            texts (`list[RowText]`): The rows, which keep what they must know of their drafts.
        """
        return DraftTree.chain(drafted.tokens, counts, drafted.probs)

    def commit(self, text: RowText, committed: list[int], num_accepted: int) -> int:
        """Adds what the target has committed to a text; returns how many of the fed draft tokens stay."""
        # The last token is the next anchor. It is fed in any case, for its logits; where rows are held to equal
        # lengths, it may be an accepted draft token.
        kept = min(num_accepted, text.num_fed, len(committed) - 1)
        text.pending.extend(token if token < self.readable else 0 for token in committed[kept:])
        return kept


class OtherTokens(SameTokens):
    """Two tokenizers: texts are segmented anew.

    Args:
        target_size, draft_size, readable (`int`): As for [`SameTokens`].
        target, draft (`Vocabulary`): The tokens.
        shared (`dict[int, int]`): By target token the draft's with the same bytes, or of the same role.
    """

    def __init__(
        self,
        target_size: int,
        draft_size: int,
        readable: int,
        target: Vocabulary,
        draft: Vocabulary,
        shared: dict[int, int],
    ):
        super().__init__(target_size, draft_size, readable)
        self.target: Vocabulary = target
        self.draft_side: Vocabulary = draft
        self.shared: dict[int, int] = shared

    @property
    def extent(self) -> str:
        """The size of the common vocabulary."""
        return (
            f"{len(self.shared)} tokens are in both (of the target's {len(self.target)}, the draft's "
            f"{len(self.draft_side)})"
        )

    def prompts(self, prompt: Prompt) -> tuple[torch.LongTensor, list[int], list[RowText]]:
        texts = [RowText() for _ in prompt.starts]
        rows = [self._begun(self._read(text, tokens)) for text, tokens in zip(texts, prompt.token_lists)]
        longest = max(map(len, rows))
        starts = [longest - len(row) for row in rows]
        padded = [[0] * start + row for start, row in zip(starts, rows)]
        return torch.tensor(padded, device="cpu"), starts, texts

    def _begun(self, tokens: list[int]) -> list[int]:
        """A prompt that begins as the draft's tokenizer begins every text."""
        opening = self.draft_side.opening
        return (tokens if tokens[: len(opening)] == opening else opening + tokens) or [0]

    def _read(self, text: RowText, tokens: list[int]) -> list[int]:
        """Target tokens that go on with a text, in the draft's segmentation; special ones by name or role."""
        read: list[int] = []
        unread = b""
        for token in tokens:
            ordinary = self.target.texts.get(token)
            if ordinary is not None:
                unread += ordinary
                continue
            read += self._encoded(text, unread)
            unread = b""
            if token in self.shared:
                read.append(self.shared[token])
                text.end = b""
        return read + self._encoded(text, unread)

    def _encoded(self, text: RowText, new: bytes) -> list[int]:
        tokens = self.draft_side.encode(new, text.end)
        text.end = (text.end + new)[-CONTEXT_BYTES:]
        return [token for token in tokens if token < self.readable]


class SharedTokens(OtherTokens):
    """Drafts among the tokens that both vocabularies have."""

    def __init__(self, *sizes_and_vocabularies: Any):
        super().__init__(*sizes_and_vocabularies)
        # The draft's logit of each target token; where there is none, one that is added after the last.
        self._sources = torch.full((self.target_size,), self.draft_size)
        self._sources[list(self.shared)] = torch.tensor(list(self.shared.values()))
        self._on: dict[torch.device, Translation] = {}
        self.note = f"draft and target have different tokenizers: drafts are of the shared tokens, {self.extent}"

    @property
    def num_choices(self) -> int:
        return self.target_size

    def translation(self, device: torch.device) -> Translation:
        if device not in self._on:
            self._on[device] = Translation(self._sources.to(device), self.readable)
        return self._on[device]

    def inputs(self, tokens: torch.LongTensor) -> torch.LongTensor:
        # Those are drafted tokens, which both have.
        return self.translation(tokens.device).inputs(tokens)

    def logits(self, logits: torch.Tensor) -> torch.Tensor:
        """The draft's logits of the target's tokens, `(R, V)`."""
        return self.translation(logits.device).logits(logits)

    def commit(self, text: RowText, committed: list[int], num_accepted: int) -> int:
        kept = min(num_accepted, text.num_fed, len(committed) - 1)
        text.end = (text.end + self.target.text(committed[:kept]))[-CONTEXT_BYTES:]
        new = committed[kept:]
        if all(token in self.shared for token in new):
            text.end = (text.end + self.target.text(new))[-CONTEXT_BYTES:]
            text.pending.extend(self.shared[token] for token in new)
        else:
            text.pending.extend(self._read(text, new) or [0])
        return kept


class ReencodedText(OtherTokens):
    """Drafts in the draft's own tokens, whose text becomes the target's tokens."""

    drafts_target_tokens = False

    def __init__(self, *sizes_and_vocabularies: Any):
        super().__init__(*sizes_and_vocabularies)
        self.note = f"draft and target have different tokenizers: drafts are re-encoded as text, {self.extent}"
        self._ends = {own: token for token, own in self.shared.items() if own not in self.draft_side.texts}

    @property
    def num_choices(self) -> int:
        return self.draft_size

    def inputs(self, tokens: torch.LongTensor) -> torch.LongTensor:
        return tokens

    def draft(self, drafted: Following, counts: RowNumbers, depths: list[int], texts: list[RowText]) -> DraftTree:
        # Waits for the device: the tokenizer is on the host.
        tokens = drafted.tokens.tolist()
        counts = counts if isinstance(counts, list) else counts.tolist()
        drafts = []
        for text, own, count, depth in zip(texts, tokens, counts, depths):
            text.drafted = own[:count]
            drafts.append(self._as_target(text)[:depth])
        return DraftTree.from_lists(drafts, drafted.tokens.device)

    def _as_target(self, text: RowText) -> list[int]:
        """A row's draft in the target's tokens, up to the first special one, which may be an end that both have."""
        ordinary = self._ordinary(text.drafted, self.draft_side)
        tokens = self.target.encode(self.draft_side.text(ordinary), text.end)
        tokens += [self._ends[token] for token in text.drafted[len(ordinary) :][:1] if token in self._ends]
        # A tokenizer may have more tokens than its model.
        return list(takewhile(lambda token: token < self.target_size, tokens))

    @staticmethod
    def _ordinary(tokens: list[int], side: Vocabulary) -> list[int]:
        """The tokens before the first special one."""
        count = next((index for index, token in enumerate(tokens) if token not in side.texts), len(tokens))
        return tokens[:count]

    def commit(self, text: RowText, committed: list[int], num_accepted: int) -> int:
        known = self._ordinary(committed, self.target)
        new, place, kept = self.target.text(known), 0, 0
        for token in text.drafted[: text.num_fed]:
            own = self.draft_side.texts.get(token)
            if own is None or not new.startswith(own, place):
                break
            # Something is left to be fed, for its logits.
            if place + len(own) == len(new) and len(known) == len(committed):
                break
            place, kept = place + len(own), kept + 1
        text.end = (text.end + new[:place])[-CONTEXT_BYTES:]
        pending = self._encoded(text, new[place:]) + self._read(text, committed[len(known) :])
        text.pending.extend(pending or [0])
        text.drafted = []
        return kept


def match_vocabularies(
    draft_model: Any,
    target_model: Any,
    mapping: str = "auto",
    tokenizers: tuple[PreTrainedTokenizerBase | None, PreTrainedTokenizerBase | None] | None = None,
) -> SameTokens:
    """The relation of a draft model's vocabulary to the target's.

    The tokenizers are compared where they are known. The sizes alone prove nothing: padded vocabularies of one
    tokenizer differ in size, and different tokenizers may agree in it.

    Args:
        draft_model, target_model (`PreTrainedModel`): The two models.
        mapping (`str`): For different tokenizers: "shared_tokens", "text", or "auto", by the size of what both have.
        tokenizers (`tuple`, *optional*): The target's and the draft's, as far as there are any. `None`: they are one
            and the same.

    Raises:
        CheckpointFormatError: They have no token in common, or nothing shows how they are related.
    """
    readable = num_embeddings(draft_model.get_input_embeddings())
    sizes = vocabulary_size(target_model), vocabulary_size(draft_model), readable
    if tokenizers is None:
        return SameTokens(*sizes)
    if None not in tokenizers:
        if difference(*(tokenizer.get_vocab() for tokenizer in tokenizers)) is None:
            return SameTokens(*sizes)
        names = [model.config.name_or_path for model in (target_model, draft_model)]
        return relation(*map(Vocabulary, tokenizers), sizes, mapping, names)
    if sizes[0] != sizes[1]:
        raise CheckpointFormatError(
            f"Target and draft model have vocabularies of {sizes[0]} and {sizes[1]} tokens, and no tokenizer was found"
            " beside them to tell whether these are the same tokens, padded. If they are, pass speculative={'method': "
            "'draft_model', 'same_tokenizer': True, ...}; else name the draft's tokenizer as `draft_tokenizer`, or "
            "pass both to generate() as `tokenizer` and `assistant_tokenizer`."
        )
    logger.warning_once(
        "Target and draft model have vocabularies of the same size; their tokenizers could not be compared. If "
        "they differ, drafts will rarely be accepted (the output stays right). Name the draft's tokenizer as "
        "`draft_tokenizer`, or pass both to generate() as `tokenizer` and `assistant_tokenizer`."
    )
    return SameTokens(*sizes)


def relation(
    target: Vocabulary, draft: Vocabulary, sizes: tuple[int, int, int], mapping: str, names: list[str]
) -> OtherTokens:
    """The relation of the vocabularies of two tokenizers.

    Args:
        target, draft (`Vocabulary`): The two.
        sizes (`tuple[int, int, int]`): Those of [`SameTokens`].
        mapping (`str`): As for [`match_vocabularies`].
        names (`list[str]`): Of the two models.

    Raises:
        CheckpointFormatError: They have no token in common.
    """
    shared = {
        token: own for token, own in shared_tokens(target, draft).items() if token < sizes[0] and own < min(sizes[1:])
    }
    found = len([token for token in shared if token in target.texts])
    if not found:
        raise CheckpointFormatError(
            f"The target '{names[0]}' ({len(target)} tokens) and the draft model '{names[1]}' ({len(draft)} tokens) "
            "have different tokenizers without a common token. Choose a draft model that writes the target's "
            "language, or pass its own tokenizer as `draft_tokenizer`."
        )
    if mapping == "auto":
        mapping = "shared_tokens" if found >= LEAST_SHARED * len(target) else "text"
    kind = SharedTokens if mapping == "shared_tokens" else ReencodedText
    return kind(*sizes, target, draft, shared)


def shared_tokens(target: Vocabulary, draft: Vocabulary) -> dict[int, int]:
    """By target token the draft's token: of the same bytes, or special and of the same name or role. One to one."""
    pairs = [
        *((target.ids[text], draft.ids[text]) for text in target.ids.keys() & draft.ids.keys()),
        *((target.special[text], draft.special[text]) for text in target.special.keys() & draft.special.keys()),
        *((target.roles[role], draft.roles[role]) for role in target.roles.keys() & draft.roles.keys()),
    ]
    shared: dict[int, int] = {}
    taken: set[int] = set()
    for token, own in pairs:
        if token not in shared and own not in taken:
            shared[token] = own
            taken.add(own)
    return shared


def difference(target: dict[str, int], draft: dict[str, int]) -> str | None:
    """The differences of two token tables, with examples; `None` for those of one tokenizer."""
    common = target.keys() & draft.keys()
    moved = sorted(token for token in common if target[token] != draft[token])
    # Tokens that one of them lacks may be special tokens added later; a different vocabulary lacks most.
    missing = max(len(target), len(draft)) - len(common)
    if not moved and missing <= MAX_VOCABULARY_GAP * len(target):
        return None
    examples = [f"{token!r} is {target[token]} and {draft[token]}" for token in moved[:3]]
    if not examples:
        lacking = sorted(target.keys() - draft.keys())[:3] or sorted(draft.keys() - target.keys())[:3]
        examples = [f"{token!r} is in one of them only" for token in lacking]
    return f"{len(moved)} common tokens have other ids, {missing} are in one of them only ({'; '.join(examples)})"
