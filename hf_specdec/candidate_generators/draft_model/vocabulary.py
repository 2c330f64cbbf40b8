"""The tokens of a tokenizer as the bytes that they stand for, in which tokens of any two tokenizers can be compared.

Byte-level tokenizers have a character for every byte, those of SentencePiece write blanks as U+2581 and rare
characters as `<0x0A>`, those of WordPiece mark what goes on: as bytes " the" is the same token in all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils import logging

from ...threads import cached_property


logger = logging.get_logger(__name__)

_MARKER = "\u2581"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Special tokens that have the same meaning in any tokenizer, whatever they are called.
_ROLES = ("bos_token_id", "eos_token_id")
# Bytes of the text before that a tokenizer is shown, so that it segments the new text as inside of a text.
CONTEXT_BYTES = 32


def load_tokenizer(name: str | None, location: dict[str, Any] | None = None) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a checkpoint; `None` where there is none that can be loaded.

    Args:
        name (`str`, *optional*): Folder or repo id.
        location (`dict`, *optional*): Further arguments of `from_pretrained`.
    """
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
    folders = Path(first), Path(second)
    tokens = [folder / "tokenizer.json" for folder in folders]
    settings = [folder / "tokenizer_config.json" for folder in folders]
    try:
        # Templates of chats say nothing of tokens.
        one, other = ({**json.loads(file.read_bytes()), "chat_template": None} for file in settings)
        return one == other and tokens[0].read_bytes() == tokens[1].read_bytes()
    except (OSError, ValueError, TypeError):
        return False


class Vocabulary:
    """The tokens of one tokenizer.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Of any kind.

    Attributes:
        texts (`dict[int, bytes]`): The bytes of each token that is no special one.
        ids (`dict[bytes, int]`): The token of these bytes; of several a whole one before a single byte of a fallback,
            and then the first.
        special (`dict[str, int]`): Special tokens by what they are called.
        roles (`dict[str, int]`): Those of them that begin or end a text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        table = tokenizer.get_vocab()
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = set(tokenizer.all_special_ids) | {index for index, token in added.items() if token.special}
        spell = _speller(tokenizer, table)
        self.texts: dict[int, bytes] = {}
        self.ids: dict[bytes, int] = {}
        single_bytes: list[tuple[bytes, int]] = []
        for token, index in sorted(table.items(), key=lambda item: item[1]):
            if index in special:
                continue
            text = str(added[index]).encode() if index in added else spell(token)
            if text:
                self.texts[index] = text
                if isinstance(token, str) and _BYTE.fullmatch(token):
                    single_bytes.append((text, index))
                else:
                    self.ids.setdefault(text, index)
        for text, index in single_bytes:
            self.ids.setdefault(text, index)
        self.special: dict[str, int] = {str(token): index for token, index in table.items() if index in special}
        roles = {name: getattr(tokenizer, name, None) for name in _ROLES}
        self.roles: dict[str, int] = {name: index for name, index in roles.items() if index is not None}

    def __len__(self) -> int:
        return len(self.texts) + len(self.special)

    @cached_property
    def _lengths(self) -> list[int]:
        """Lengths in bytes of the tokens, the longest first."""
        return sorted(set(map(len, self.ids)), reverse=True)

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
        """Tokens of a text that follows another one, segmented as the tokenizer does where that is possible.

        Args:
            text (`bytes`): The text; it may begin and end inside of a character.
            before (`bytes`): The end of what comes before.

        Returns:
            `list[int]`: Tokens with these bytes; bytes that no token has are left out.
        """
        if not text:
            return []
        before = before[-CONTEXT_BYTES:]
        while before and 0x80 <= before[0] < 0xC0:
            before = before[1:]
        whole = before + text
        try:
            readable = whole.decode()
        except UnicodeDecodeError as error:
            # Whole characters are for the tokenizer.
            known = error.start - len(before)
            return (
                self.encode(text[:known], before) + self._longest(text[known:]) if known > 0 else self._longest(text)
            )
        tokens = self.tokenizer.encode(readable, add_special_tokens=False)
        pieces = [self.texts.get(token, b"") for token in tokens]
        # Some begin every text with a blank.
        place = len(whole) - len(b"".join(pieces))
        if not b"".join(pieces).endswith(whole):
            return self._longest(text)
        for index, piece in enumerate(pieces):
            if place == len(before):
                return tokens[index:]
            place += len(piece)
            if place > len(before):
                # A token that reaches across: what is new of it, then those after it.
                return self._longest(whole[len(before) : place]) + tokens[index + 1 :]
        return []

    def _longest(self, text: bytes) -> list[int]:
        """Tokens of a text, the longest one that fits at each place."""
        tokens, place = [], 0
        while place < len(text):
            fitting = (size for size in self._lengths if text[place : place + size] in self.ids)
            size = next((size for size in fitting if size <= len(text) - place), 0)
            if size:
                tokens.append(self.ids[text[place : place + size]])
            place += size or 1
        return tokens


def _speller(tokenizer: PreTrainedTokenizerBase, table: dict[Any, int]) -> Callable[[Any], bytes]:
    """The function from a token as it stands in the table to its bytes."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    parts = list(_decoders(json.loads(decoder.__getstate__()))) if decoder is not None else []
    kinds = {part.get("type") for part in parts}
    replaced = {part["pattern"].get("String") for part in parts if part.get("type") == "Replace"}
    if "ByteLevel" in kinds or (not kinds and "\u0120" in table):
        spell = _byte_level
    elif "WordPiece" in kinds:
        spell = _word_piece
    elif "BPEDecoder" in kinds:
        suffix = next(part.get("suffix", "</w>") for part in parts if part.get("type") == "BPEDecoder")
        spell = partial(_with_ends, suffix=suffix)
    elif "Metaspace" in kinds or _MARKER in replaced or (not kinds and any(_MARKER in str(token) for token in table)):
        spell = _marked
    else:
        spell = str.encode
    # Tables of tiktoken have bytes.
    return lambda token: token if isinstance(token, bytes) else spell(token)


_BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}


def _byte_level(token: str) -> bytes:
    return bytes(map(_BYTE_OF.__getitem__, token)) if _BYTE_OF.keys() >= set(token) else token.encode()


def _word_piece(token: str) -> bytes:
    return (token[2:] if token.startswith("##") else f" {token}").encode()


def _with_ends(token: str, suffix: str) -> bytes:
    return token.replace(suffix, " ").encode()


def _marked(token: str) -> bytes:
    found = _BYTE.fullmatch(token)
    return bytes([int(found[1], 16)]) if found else token.replace(_MARKER, " ").encode()


def _decoders(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield state
    for part in state.get("decoders", ()):
        yield from _decoders(part)
