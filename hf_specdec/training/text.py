"""Training rows from a user's text: files, folders or a data set, chats in the chat template.

Documents are packed one after the other, with the end-of-sequence token between them, into rows of equal length.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..errors import MissingDependencyError, SpecConfigError
from .reading import Rows


SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet")
TEXT_COLUMNS = ("text", "content")
CHAT_COLUMNS = ("messages", "conversations")


@dataclass(frozen=True)
class Document:
    """
    A text.

    Args:
        tokens (`list[int]`): Its tokens, without special ones around it.
        prompt_length (`int`): Number of those before the last answer of a chat; 0 for a text.
    """

    tokens: list[int]
    prompt_length: int = 0


def load_documents(
    data: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    column: str | None = None,
    max_tokens: int | None = None,
) -> Iterator[Document]:
    """
    Reads the documents of `data`, one source after the other.

    Args:
        data (`Sequence[str]`): Files (.txt, .md, .py: one document each; .jsonl, .parquet: one per record), folders of
            such files, or ids of the `datasets` library, whose split may follow a colon (`name:train`).
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        column (`str`, *optional*): Column of records to read: text, or a chat as a list of messages. By default the
            first of messages, conversations, text, content that they have.
        max_tokens (`int`, *optional*): Stop after the document that reaches so many tokens.

    Raises:
        SpecConfigError: Something cannot be read: a name that is neither file nor folder nor data set id, a record
            without text, a chat without a chat template.
        MissingDependencyError: A data set id or .parquet without the packages that read them.
    """
    seen = 0
    for source in find_sources(data):
        for record in _records(source):
            document = _document(record, str(source), tokenizer, column)
            if document.tokens:
                yield document
            seen += len(document.tokens)
            if max_tokens is not None and seen >= max_tokens:
                return


def find_sources(data: Sequence[str]) -> list[Path | str]:
    """
    Returns the files of `data` and the ids of data sets, without reading any.

    Raises:
        SpecConfigError: There is no such file or folder, or no file of a known kind.
        MissingDependencyError: A name seems to be that of a data set, and the library is not there.
    """
    if not data:
        raise SpecConfigError("There is no training data. Name files, folders or data sets.")
    found: list[Path | str] = []
    for name in data:
        path = Path(name)
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
            if not files:
                raise SpecConfigError(f"The folder '{path}' has no files of a known kind: {', '.join(SUFFIXES)}.")
            found += files
        elif path.is_file():
            if path.suffix not in SUFFIXES:
                raise SpecConfigError(
                    f"'{path}' is of no known kind. Training data are files of {', '.join(SUFFIXES)}."
                )
            found.append(path)
        else:
            _datasets_library(name)
            found.append(name)
    return found


def _records(source: Path | str) -> Iterator[Any]:
    """Yields the texts and records of a file or data set."""
    if isinstance(source, str):
        location, _, split = source.partition(":")
        try:
            yield from _datasets_library(source).load_dataset(location, split=split or "train", streaming=True)
        except (OSError, ValueError, ConnectionError) as error:
            raise SpecConfigError(f"The data set '{source}' cannot be read: {error}") from error
    elif source.suffix == ".parquet":
        try:
            from pyarrow import ArrowException, parquet
        except ImportError as error:
            raise MissingDependencyError(
                f"Reading '{source}' needs pyarrow. Install it with: pip install pyarrow"
            ) from error
        try:
            for part in parquet.ParquetFile(source).iter_batches():
                yield from part.to_pylist()
        except (OSError, ArrowException) as error:
            raise SpecConfigError(f"'{source}' cannot be read as parquet: {error}") from error
    elif source.suffix == ".jsonl":
        for number, line in enumerate(_read_text(source).splitlines(), 1):
            if line.strip():
                try:
                    yield json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise SpecConfigError(f"Line {number} of '{source}' is no JSON: {error}") from error
    else:
        yield _read_text(source)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecConfigError(f"'{path}' cannot be read: {error}") from error


def _datasets_library(name: str) -> Any:
    """Imports the `datasets` library for a name that is no file and no folder."""
    location = name.partition(":")[0]
    looks_like_path = (
        Path(location).suffix in SUFFIXES or location.startswith((".", "/", "~")) or location.count("/") > 1
    )
    if looks_like_path:
        raise SpecConfigError(f"There is no file or folder '{name}'.")
    try:
        import datasets
    except ImportError as error:
        raise MissingDependencyError(
            f"'{name}' is neither a file nor a folder; reading it as a data set needs the datasets library. Install "
            "it with: pip install datasets"
        ) from error
    return datasets


def _document(record: Any, name: str, tokenizer: PreTrainedTokenizerBase, column: str | None) -> Document:
    """Reads a text, or the text or chat in a column of a record."""
    content, columns = record, (column,) if column else (*CHAT_COLUMNS, *TEXT_COLUMNS)
    if isinstance(record, dict):
        content = next((record[key] for key in columns if record.get(key) is not None), None)
    if isinstance(content, str):
        return Document(_encode(tokenizer, content))
    if isinstance(record, dict) and isinstance(content, list):
        return _chat(content, name, tokenizer)
    found = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
    raise SpecConfigError(
        f"A record of '{name}' has no text or chat in {' or '.join(columns)}; it has: {found}. Name the column."
    )


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant"}


def _chat(messages: list[Any], name: str, tokenizer: PreTrainedTokenizerBase) -> Document:
    """Renders a chat in the tokenizer's template, up to its last answer."""
    if tokenizer.chat_template is None:
        raise SpecConfigError(
            f"'{name}' holds chats, and the target's tokenizer has no chat template. Give text, or a target that was "
            "trained on chats."
        )
    try:
        messages = [
            message
            if "role" in message
            else {"role": _ROLES.get(message["from"], message["from"]), "content": message["value"]}
            for message in messages
        ]
    except (TypeError, KeyError) as error:
        raise SpecConfigError(
            f"A chat of '{name}' is no list of messages with role and content: {str(messages)[:80]}"
        ) from error
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    last = answers[-1] if answers else len(messages)
    prompt = _encode(
        tokenizer, tokenizer.apply_chat_template(messages[:last], tokenize=False, add_generation_prompt=True)
    )
    if not answers:
        return Document(prompt, len(prompt))
    tokens = _encode(tokenizer, tokenizer.apply_chat_template(messages[: last + 1], tokenize=False))
    return Document(tokens, len(prompt) if tokens[: len(prompt)] == prompt else 0)


def pack(documents: Iterable[Document], length: int, eos_token_id: int | None, max_tokens: int | None = None) -> Rows:
    """
    Packs documents into rows; the last tokens, too few for a row, are left out.

    Args:
        documents (`Iterable[Document]`): Documents, in order.
        length (`int`): Tokens of a row.
        eos_token_id (`int`, *optional*): Appended to every document.
        max_tokens (`int`, *optional*): Stop at so many tokens.

    Raises:
        SpecConfigError: There is not even one row of text.
    """
    stream: list[int] = []
    for document in documents:
        stream += document.tokens
        if eos_token_id is not None:
            stream.append(eos_token_id)
        if max_tokens is not None and len(stream) >= max_tokens:
            del stream[max_tokens:]
            break
    count = len(stream) // length
    if not count:
        raise SpecConfigError(
            f"The data have {len(stream)} tokens, fewer than one row of {length}. Give more text, or shorter rows."
        )
    tokens = torch.tensor(stream[: count * length]).view(count, length)
    return Rows(tokens, torch.ones_like(tokens, dtype=torch.bool))
