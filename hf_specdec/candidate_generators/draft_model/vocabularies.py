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

import json
import re
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils import logging

from ...drafts import DraftTree
from ...errors import CheckpointFormatError, SpecConfigError
from ...protocol import Commit, Prompt
from ...target.graphs import Variant
from ...target_facts import MAX_VOCABULARY_GAP, num_embeddings, vocabulary_size
from ...threads import cached_property
from ...transfers import upload


logger = logging.get_logger(__name__)

_TOKENS = "tokenizer.json"
_MARKER = "\u2581"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}
# Special tokens that have the same meaning in any tokenizer, whatever they are called.
_ROLES = ("bos_token_id", "eos_token_id")
# Bytes of the text before that a tokenizer is shown, so that it segments the new text as inside of a text.
CONTEXT_BYTES = 32


def load_tokenizer(name: str | None, location: dict[str, Any] | None = None) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a checkpoint, with arguments of `from_pretrained`; `None` where there is none to be loaded."""
    if not name:
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **{"trust_remote_code": False, **(location or {})})
        # Without files transformers makes up a tokenizer of special tokens for some models.
        ordinary = (
            tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens) - tokenizer.get_added_vocab().keys()
        )
    except Exception as error:  # noqa: BLE001 - a stranger's files may trip anything
        logger.debug(f"No tokenizer for '{name}': {error}")
        return None
    return tokenizer if len(ordinary) > 1 else None


def is_one_tokenizer(first: str | None, second: str | None) -> bool:
    """Tells whether two folders hold the same tokenizer, by its files: large ones take seconds to load and compare."""
    if not first or not second:
        return False
    try:
        settings = [json.loads(Path(name, "tokenizer_config.json").read_bytes()) for name in (first, second)]
        # Templates of chats say nothing of tokens.
        one, other = ({**each, "chat_template": None} for each in settings)
        return one == other and Path(first, _TOKENS).read_bytes() == Path(second, _TOKENS).read_bytes()
    except (OSError, ValueError, TypeError):
        return False


class Vocabulary:
    """The tokens of a tokenizer as the bytes that they stand for, in which those of any two can be compared.

    Byte-level tokenizers have a character for every byte, those of SentencePiece write blanks as U+2581 and rare
    characters as `<0x0A>`, those of WordPiece mark what goes on: as bytes " the" is the same token in all of them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        table = tokenizer.get_vocab()
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = set(tokenizer.all_special_ids) | {index for index, token in added.items() if token.special}
        spell = _speller(tokenizer, table)
        self.texts: dict[int, bytes] = {}  # of each token that is no special one
        self.ids: dict[bytes, int] = {}
        single_bytes = {index for token, index in table.items() if isinstance(token, str) and _BYTE.fullmatch(token)}
        # Of several tokens a whole one before a single byte of a fallback, and then the first.
        for token, index in sorted(table.items(), key=lambda item: (item[1] in single_bytes, item[1])):
            if index not in special and (text := str(added[index]).encode() if index in added else spell(token)):
                self.texts[index] = text
                self.ids.setdefault(text, index)
        self._lengths = sorted(set(map(len, self.ids)), reverse=True)  # in bytes, the longest first
        self.special: dict[str, int] = {str(token): index for token, index in table.items() if index in special}
        roles = {name: getattr(tokenizer, name, None) for name in _ROLES}
        self.roles: dict[str, int] = {name: index for name, index in roles.items() if index is not None}

    def __len__(self) -> int:
        return len(self.texts) + len(self.special)

    @cached_property
    def opening(self) -> list[int]:
        """Tokens that the tokenizer puts in front of every text."""
        try:
            tokens = self.tokenizer("")["input_ids"]
        except Exception as error:  # noqa: BLE001 - remote code may trip over anything
            logger.debug(f"{type(self.tokenizer).__name__} reads no empty text: {error}")
            return []
        begins = self.roles.get("bos_token_id")
        return [begins] if begins is not None and begins in tokens[:1] else []

    def text(self, tokens: Iterable[int]) -> bytes:
        """The bytes of tokens; special ones have none."""
        return b"".join(self.texts.get(token, b"") for token in tokens)

    def encode(self, text: bytes, before: bytes = b"") -> list[int]:
        """Tokens of a text after another one, as the tokenizer segments it; both may end inside of a character."""
        if not text:
            return []
        # From the beginning of a character on.
        before = before[-CONTEXT_BYTES:].lstrip(bytes(range(0x80, 0xC0)))
        whole = before + text
        try:
            readable = whole.decode()
        except UnicodeDecodeError as error:
            # Whole characters are for the tokenizer.
            count = max(error.start - len(before), 0)
            return self.encode(text[:count], before) + self._longest(text[count:])
        tokens = self.tokenizer.encode(readable, add_special_tokens=False)
        pieces = [self.texts.get(token, b"") for token in tokens]
        # Some begin every text with a blank.
        if not b"".join(pieces).endswith(whole):
            return self._longest(text)
        first, size = len(tokens), len(text)
        while first and len(pieces[first - 1]) <= size:
            first -= 1
            size -= len(pieces[first])
        # What is new of a token that reaches across, then those after it.
        return self._longest(text[:size]) + tokens[first:]

    def _longest(self, text: bytes) -> list[int]:
        """Tokens of a text, the longest one that fits at each place."""
        tokens, place = [], 0
        while place < len(text):
            sizes = (size for size in self._lengths if size <= len(text) - place)
            size = next((size for size in sizes if text[place : place + size] in self.ids), 0)
            if size:
                tokens.append(self.ids[text[place : place + size]])
            place += size or 1
        return tokens


def _speller(tokenizer: PreTrainedTokenizerBase, table: dict[Any, int]) -> Callable[[Any], bytes]:
    """The function from a token as it stands in the table to its bytes."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    parts = [] if decoder is None else [json.loads(decoder.__getstate__())]
    for part in parts:
        parts += part.get("decoders", ())
    kinds = {part.get("type") for part in parts}
    replaced = {part["pattern"].get("String") for part in parts if part.get("type") == "Replace"}
    is_byte_level = "ByteLevel" in kinds or (not kinds and "\u0120" in table)
    is_word_piece = "WordPiece" in kinds
    # What stands for a blank.
    blank = next((part.get("suffix", "</w>") for part in parts if part.get("type") == "BPEDecoder"), None)
    is_marked = "Metaspace" in kinds or _MARKER in replaced
    if blank is None and (is_marked or (not kinds and any(_MARKER in str(token) for token in table))):
        blank = _MARKER

    def spell(token: Any) -> bytes:
        # Tables of tiktoken have bytes.
        if isinstance(token, bytes):
            return token
        if is_byte_level:
            return bytes(map(_BYTE_OF.__getitem__, token)) if _BYTE_OF.keys() >= set(token) else token.encode()
        if is_word_piece:
            return (token[2:] if token.startswith("##") else f" {token}").encode()
        if blank == _MARKER and (byte := _BYTE.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        return (token if blank is None else token.replace(blank, " ")).encode()

    return spell


# Part of the target's vocabulary that both must have for drafts among these tokens: of a third of it fewer drafts are
# accepted than of re-encoded text.
LEAST_SHARED = 0.5


@dataclass
class RowText:
    """What segmentations of a row's text need that differ."""

    drafted: list[int] = field(default_factory=list)  # the last draft in the draft model's own tokens
    end: bytes = b""  # of the text


@dataclass(eq=False)
class SameTokens:
    """One tokenizer, whose vocabulary may be padded to different widths."""

    target_size: int  # V
    draft_size: int  # W
    readable: int  # rows of the draft's embedding: it can read the ids below

    is_one: ClassVar[bool] = True  # both have the same tokens
    drafts_target_tokens: ClassVar[bool] = True  # drafts are chosen from logits in the target's vocabulary

    def __post_init__(self) -> None:
        self.num_drafted: int = self.target_size  # the first so many tokens may be drafted
        self.note: str | None = None  # for the statistics

    def prompts(self, prompt: Prompt) -> tuple[torch.LongTensor, list[int], list[RowText]]:
        """Prompts as the draft reads them: left-padded tokens `(B, P)`, the first one of each row, and the rest."""
        return self.inputs(prompt.input_ids), prompt.starts, [RowText() for _ in prompt.starts]

    def inputs(self, tokens: torch.LongTensor) -> torch.LongTensor:
        """Target tokens of any shape as the draft reads them; what it lacks is replaced, and less is accepted."""
        return tokens.masked_fill(tokens >= self.readable, 0) if self.readable < self.target_size else tokens

    @property
    def key(self) -> tuple[Any, ...]:
        """Whatever of it is built into a graph."""
        return (self.num_drafted, self.target_size, self.readable)

    def logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Of the draft's logits `(..., W)` those of tokens that may be drafted."""
        return logits[..., : self.num_drafted]

    def shortened(self, num_drafted: int) -> SameTokens:
        """The same, of which the first tokens alone are drafted."""
        if not self.is_one:
            raise SpecConfigError(
                f"`draft_vocabulary_size`={num_drafted} is for draft models with the target's tokenizer, and this one "
                "has another. Leave it out."
            )
        vocabularies = copy(self)
        vocabularies.num_drafted = min(num_drafted, self.target_size)
        return vocabularies

    def draft(self, draft: DraftTree, depths: list[int], texts: list[RowText]) -> DraftTree:
        """The drafts of a cycle in the target's tokens, to such depths; the texts keep what they must know of them."""
        return draft

    def commit(self, commit: Commit, texts: list[RowText], num_read: int) -> tuple[Commit, list[int]]:
        """What the draft has still to read of a commit, and how many of `num_read` drafted tokens stay in each row."""
        if self.is_one and not num_read:
            return replace(commit, tokens=self.inputs(commit.tokens)), [0] * len(texts)
        rows = zip(texts, commit.token_lists, commit.num_accepted)
        kept, lists = zip(*(self.committed(*row, num_read) for row in rows))
        width = max(map(len, lists))
        tokens = upload([row + row[-1:] * (width - len(row)) for row in lists], commit.tokens.device)
        return Commit(commit.rows, tokens, list(lists), commit.num_accepted), list(kept)

    def committed(self, text: RowText, tokens: list[int], num_accepted: int, num_read: int) -> tuple[int, list[int]]:
        """The same of one row: how many drafted tokens stay, and the tokens that are still to be read."""
        # The last token is the next anchor. It is read in any case, for its logits; where rows are held to equal
        # lengths, it may be an accepted draft token.
        kept = min(num_accepted, num_read, len(tokens) - 1)
        return kept, [token if token < self.readable else 0 for token in tokens[kept:]]


@dataclass(eq=False)
class OtherTokens(SameTokens):
    """Two tokenizers: texts are segmented anew."""

    target: Vocabulary
    draft_side: Vocabulary
    shared: dict[int, int]  # by target token the draft's with the same bytes, or of the same role

    is_one: ClassVar[bool] = False
    drafts_are: ClassVar[str]  # in the note

    def __post_init__(self) -> None:
        super().__post_init__()
        self.note: str | None = (
            f"draft and target have different tokenizers: drafts are {self.drafts_are}, {len(self.shared)} tokens are "
            f"in both (of the target's {len(self.target)}, the draft's {len(self.draft_side)})"
        )

    def prompts(self, prompt: Prompt) -> tuple[torch.LongTensor, list[int], list[RowText]]:
        texts = [RowText() for _ in prompt.starts]
        rows = [self._read(text, tokens) for text, tokens in zip(texts, prompt.token_lists)]
        # As the draft's tokenizer begins every text.
        opening = self.draft_side.opening
        rows = [(row if row[: len(opening)] == opening else opening + row) or [0] for row in rows]
        longest = max(map(len, rows))
        starts = [longest - len(row) for row in rows]
        padded = [[0] * start + row for start, row in zip(starts, rows)]
        return torch.tensor(padded, device="cpu"), starts, texts

    def _read(self, text: RowText, tokens: list[int]) -> list[int]:
        """Target tokens that go on with a text, in the draft's segmentation; special ones by name or role."""
        read, unread = [], b""
        for token in tokens:
            if (ordinary := self.target.texts.get(token)) is not None:
                unread += ordinary
                continue
            read, unread = read + self._encoded(text, unread), b""
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

    drafts_are = "of the shared tokens"

    def __post_init__(self) -> None:
        super().__post_init__()
        # The draft's logit of each target token; where there is none, one that is added after the last.
        self._sources = torch.full((self.target_size,), self.draft_size)
        self._sources[list(self.shared)] = torch.tensor(list(self.shared.values()))
        self._on: dict[torch.device, torch.LongTensor] = {}

    @property
    def key(self) -> tuple[Any, ...]:
        return (Variant(self),)

    def _sources_on(self, device: torch.device) -> torch.LongTensor:
        if device not in self._on:
            self._on[device] = self._sources.to(device)
        return self._on[device]

    def inputs(self, tokens: torch.LongTensor) -> torch.LongTensor:
        # Those are drafted tokens, which both have.
        return self._sources_on(tokens.device)[tokens].clamp_(max=self.readable - 1)

    def logits(self, logits: torch.Tensor) -> torch.Tensor:
        """The draft's logits of the target's tokens, `(..., V)`; -inf for tokens that it lacks."""
        return F.pad(logits, (0, 1), value=float("-inf"))[..., self._sources_on(logits.device)]

    def committed(self, text: RowText, tokens: list[int], num_accepted: int, num_read: int) -> tuple[int, list[int]]:
        kept = min(num_accepted, num_read, len(tokens) - 1)
        text.end = (text.end + self.target.text(tokens[:kept]))[-CONTEXT_BYTES:]
        new = tokens[kept:]
        if not all(token in self.shared for token in new):
            return kept, self._read(text, new) or [0]
        text.end = (text.end + self.target.text(new))[-CONTEXT_BYTES:]
        return kept, [self.shared[token] for token in new]


class ReencodedText(OtherTokens):
    """Drafts in the draft's own tokens, whose text becomes the target's tokens."""

    drafts_target_tokens = False
    drafts_are = "re-encoded as text"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._ends = {drafted: token for token, drafted in self.shared.items() if drafted not in self.draft_side.texts}

    @property
    def key(self) -> tuple[Any, ...]:
        return ()

    def inputs(self, tokens: torch.LongTensor) -> torch.LongTensor:
        return tokens

    def logits(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def draft(self, draft: DraftTree, depths: list[int], texts: list[RowText]) -> DraftTree:
        # Waits for the device: the tokenizer is on the host.
        drafts = []
        for text, drafted, depth in zip(texts, draft.token_lists(), depths):
            text.drafted = drafted
            # Up to the first special one, which may be an end that both have.
            ordinary = list(takewhile(self.draft_side.texts.__contains__, drafted))
            tokens = self.target.encode(self.draft_side.text(ordinary), text.end)
            tokens += [self._ends[token] for token in drafted[len(ordinary) :][:1] if token in self._ends]
            # A tokenizer may have more tokens than its model.
            drafts.append(list(takewhile(self.target_size.__gt__, tokens))[:depth])
        return DraftTree.from_lists(drafts, draft.tokens.device)

    def committed(self, text: RowText, tokens: list[int], num_accepted: int, num_read: int) -> tuple[int, list[int]]:
        ordinary = list(takewhile(self.target.texts.__contains__, tokens))
        new, place, kept = self.target.text(ordinary), 0, 0
        for token in text.drafted[:num_read]:
            written = self.draft_side.texts.get(token)
            if written is None or not new.startswith(written, place):
                break
            # Something is left to be read, for its logits.
            if place + len(written) == len(new) and len(ordinary) == len(tokens):
                break
            place, kept = place + len(written), kept + 1
        text.end = (text.end + new[:place])[-CONTEXT_BYTES:]
        text.drafted = []
        return kept, (self._encoded(text, new[place:]) + self._read(text, tokens[len(ordinary) :])) or [0]


def match_vocabularies(
    draft_model: Any,
    target_model: Any,
    mapping: str = "auto",
    tokenizers: tuple[PreTrainedTokenizerBase | None, PreTrainedTokenizerBase | None] | None = None,
) -> SameTokens:
    """The relation of a draft model's vocabulary to the target's; tokenizers of `None` are known to be the same."""
    readable = num_embeddings(draft_model.get_input_embeddings())
    sizes = vocabulary_size(target_model), vocabulary_size(draft_model), readable
    if tokenizers is None:
        return SameTokens(*sizes)
    if None not in tokenizers:
        if difference(*(tokenizer.get_vocab() for tokenizer in tokenizers)) is None:
            return SameTokens(*sizes)
        names = [model.config.name_or_path for model in (target_model, draft_model)]
        return relation(*map(Vocabulary, tokenizers), sizes, mapping, names)
    # Padded vocabularies of one tokenizer differ in size, and different tokenizers may agree in it.
    if sizes[0] != sizes[1]:
        raise CheckpointFormatError(
            f"Target and draft model have vocabularies of {sizes[0]} and {sizes[1]} tokens, and no tokenizer was found"
            " beside them to tell whether these are the same tokens, padded. If they are, set "
            "draft_vocabulary='same'; else name the draft's tokenizer as `draft_tokenizer`, or pass both to "
            "generate() as `tokenizer` and `assistant_tokenizer`."
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
    """The relation of the vocabularies of two tokenizers; the sizes are those of [`SameTokens`]."""
    pairs = shared_tokens(target, draft).items()
    shared = {token: drafted for token, drafted in pairs if token < sizes[0] and drafted < min(sizes[1:])}
    num_shared = len([token for token in shared if token in target.texts])
    if not num_shared:
        raise CheckpointFormatError(
            f"The target '{names[0]}' ({len(target)} tokens) and the draft model '{names[1]}' ({len(draft)} tokens) "
            "have different tokenizers without a common token. Choose a draft model that writes the target's "
            "language, or pass its own tokenizer as `draft_tokenizer`."
        )
    if mapping == "auto":
        mapping = "shared_tokens" if num_shared >= LEAST_SHARED * len(target) else "text"
    kind = SharedTokens if mapping == "shared_tokens" else ReencodedText
    return kind(*sizes, target, draft, shared)


def shared_tokens(target: Vocabulary, draft: Vocabulary) -> dict[int, int]:
    """By target token the draft's token: of the same bytes, or special and of the same name or role. One to one."""
    shared: dict[int, int] = {}
    taken: set[int] = set()
    for mine, other in ((target.ids, draft.ids), (target.special, draft.special), (target.roles, draft.roles)):
        for name in mine.keys() & other.keys():
            if mine[name] not in shared and other[name] not in taken:
                shared[mine[name]] = other[name]
                taken.add(other[name])
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
