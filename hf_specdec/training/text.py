"""Training rows from a user's text: files, folders or a data set, chats in the chat template, the target's own text.

Documents are packed one behind the other, with the end-of-sequence token between them, into rows of equal length. What
a draft has to predict is not text but what the target writes: `continue_prompts` lets the target continue documents,
greedily and sampled, and only what it wrote counts in the loss.

Shapes: B rows, N rows in all, T tokens of a row.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from hf_specdec.errors import MissingDependencyError, SpecConfigError, UnsupportedModelError

from .reading import Batch


logger = logging.get_logger(__name__)

TEXT_SUFFIXES = (".txt", ".md", ".py")
SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", ".parquet")
TEXT_COLUMNS = ("text", "content")
CHAT_COLUMNS = ("messages", "conversations")

# Batches whose rows are sorted by length before they are dealt out.
_SORTED_BATCHES = 16


@dataclass(frozen=True)
class Document:
    """
    A text.

    Args:
        tokens (`list[int]`): Its tokens, without special ones around it.
        prompt_length (`int`): How many of them come before the last answer of a chat; 0 for a text.
    """

    tokens: list[int]
    prompt_length: int = 0


@dataclass(frozen=True)
class Rows:
    """
    Rows of equal length.

    Args:
        tokens (`torch.LongTensor` of shape `(N, T)`): Token ids.
        counted (`torch.BoolTensor` of shape `(N, T)`): Which tokens a draft is to predict.
    """

    tokens: torch.LongTensor
    counted: torch.BoolTensor

    def __len__(self) -> int:
        return len(self.tokens)

    def __add__(self, other: Rows) -> Rows:
        return Rows(torch.cat((self.tokens, other.tokens)), torch.cat((self.counted, other.counted)))

    def batches(self, batch_size: int, seed: int) -> Iterator[Batch]:
        """
        Yields batches without end; every pass has an order of its own, which the seed alone decides. Rows that end at
        about the same place share a batch, as far as few batches allow: the target does not read what is behind.
        """
        order = torch.empty(0, dtype=torch.long)
        generator = torch.Generator().manual_seed(seed)
        ends = self.counted.shape[1] - self.counted.flip(1).to(torch.uint8).argmax(1)
        while True:
            order = torch.cat((order, torch.randperm(len(self), generator=generator)))
            while len(order) >= batch_size:
                count = min(_SORTED_BATCHES, len(order) // batch_size) * batch_size
                rows, order = order[:count], order[count:]
                batches = rows[ends[rows].argsort(stable=True)].split(batch_size)
                for place in torch.randperm(len(batches), generator=generator).tolist():
                    index = batches[place]
                    yield Batch(self.tokens[index], self.counted[index], index)

    def once(self, batch_size: int) -> list[Batch]:
        """All rows in order, in batches."""
        return [Batch(*parts) for parts in zip(self.tokens.split(batch_size), self.counted.split(batch_size))]

    def split(self, share: float, seed: int) -> tuple[Rows, Rows]:
        """Draws a share of the rows, at least one, for the measurement: the rest, and those."""
        if len(self) < 2:
            raise SpecConfigError(
                f"The data fill {len(self)} row, and training needs at least two, one of them held out. Give more "
                "text, or shorter rows."
            )
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        count = min(max(1, round(share * len(self))), len(self) - 1)
        held_out, rest = order[:count].sort().values, order[count:].sort().values
        return self[rest], self[held_out]

    def __getitem__(self, index: Any) -> Rows:
        return Rows(self.tokens[index], self.counted[index])


def load_documents(
    data: Sequence[str], tokenizer: PreTrainedTokenizerBase, column: str | None = None
) -> Iterator[Document]:
    """
    Reads the documents of `data`, one source after the other.

    Args:
        data (`Sequence[str]`): Files (.txt, .md, .py: one document each; .jsonl, .parquet: one a record), folders of
            such files, or ids of the `datasets` library, whose split may follow a colon (`name:train`).
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        column (`str`, *optional*): Which column of records to read: text, or a chat as a list of messages. By default
            the first of messages, conversations, text, content that they have.

    Raises:
        SpecConfigError: Something cannot be read: a name that is neither file nor folder nor data set id, a record
            without text, a chat without a chat template.
        MissingDependencyError: A data set id or .parquet without the packages that read them.
    """
    for name in data:
        for record in _records(name):
            document = _document(record, name, tokenizer, column)
            if document.tokens:
                yield document


def check_data(data: Sequence[str]) -> None:
    """Checks that the sources are there, before anything is loaded; raises as [`load_documents`] does."""
    if not data:
        raise SpecConfigError("There is no training data. Name files, folders or data sets.")
    for name in data:
        path = Path(name)
        if path.is_dir():
            _files_of(path)
        elif path.is_file():
            _check_suffix(path)
        else:
            _check_dataset_id(name)


def _records(name: str) -> Iterator[Any]:
    path = Path(name)
    if path.is_dir():
        return chain.from_iterable(map(_file_records, _files_of(path)))
    if path.is_file():
        _check_suffix(path)
        return _file_records(path)
    return _dataset_records(name)


def _files_of(folder: Path) -> list[Path]:
    files = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    if not files:
        raise SpecConfigError(f"The folder '{folder}' has no files of a known kind: {', '.join(SUFFIXES)}.")
    return files


def _check_suffix(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise SpecConfigError(f"'{path}' is of no known kind. Training data are files of {', '.join(SUFFIXES)}.")


def _file_records(path: Path) -> Iterator[Any]:
    if path.suffix == ".parquet":
        yield from _parquet_records(path)
        return
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecConfigError(f"'{path}' cannot be read: {error}") from error
    if path.suffix != ".jsonl":
        yield text
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise SpecConfigError(f"Line {number} of '{path}' is no JSON: {error}") from error


def _parquet_records(path: Path) -> Iterator[Any]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise MissingDependencyError(
            f"Reading '{path}' needs pyarrow. Install it with: pip install pyarrow"
        ) from error
    for part in parquet.ParquetFile(path).iter_batches():
        yield from part.to_pylist()


def _check_dataset_id(name: str) -> Any:
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


def _dataset_records(name: str) -> Iterator[Any]:
    datasets = _check_dataset_id(name)
    location, _, split = name.partition(":")
    try:
        yield from datasets.load_dataset(location, split=split or "train", streaming=True)
    except (OSError, ValueError, ConnectionError) as error:
        raise SpecConfigError(f"The data set '{name}' cannot be read: {error}") from error


def _document(record: Any, name: str, tokenizer: PreTrainedTokenizerBase, column: str | None) -> Document:
    content = record if isinstance(record, str) else _content(record, name, column)
    if isinstance(content, str):
        return Document(_encode(tokenizer, content))
    return _chat(content, name, tokenizer)


def _content(record: Any, name: str, column: str | None) -> Any:
    columns = (column,) if column else (*CHAT_COLUMNS, *TEXT_COLUMNS)
    if isinstance(record, dict):
        content = next((record[key] for key in columns if record.get(key) is not None), None)
        if isinstance(content, (str, list)):
            return content
    found = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
    raise SpecConfigError(
        f"A record of '{name}' has no text or chat in {' or '.join(columns)}; it has: {found}. Name the column."
    )


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant"}


def _chat(messages: list, name: str, tokenizer: PreTrainedTokenizerBase) -> Document:
    """A chat in the tokenizer's template, up to its last answer."""
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
        documents (`Iterable[Document]`): What to pack, in order.
        length (`int`): Tokens of a row.
        eos_token_id (`int`, *optional*): Put behind every document.
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


def draw_prompts(documents: Sequence[Document], count: int, length: int, seed: int) -> list[list[int]]:
    """
    Draws beginnings for the target to continue: of a chat all that comes before its last answer, of a text a piece.

    Args:
        documents (`Sequence[Document]`): Where from.
        count (`int`): How many prompts.
        length (`int`): Tokens of the row that a prompt is continued to; a prompt takes up to half of them.
        seed (`int`): Seed of the draws.
    """
    choose = random.Random(seed)
    weights = [len(document.tokens) if not document.prompt_length else length for document in documents]
    prompts = []
    for document in choose.choices(documents, weights, k=count):
        if document.prompt_length:
            prompts.append(document.tokens[: document.prompt_length][-(length // 2) :])
            continue
        size = choose.randint(max(1, length // 16), max(1, length // 2))
        start = choose.randrange(max(1, len(document.tokens) - size + 1))
        prompts.append(document.tokens[start : start + size])
    return prompts


@torch.no_grad()
def continue_prompts(
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    length: int,
    *,
    sampled_share: float = 0.5,
    temperature: float = 0.8,
    max_new_tokens: int | None = None,
    batch_size: int = 32,
    on_step: Callable[[int], None] | None = None,
) -> Rows:
    """
    Lets the target continue prompts to the end of a row, or to its end-of-sequence token.

    Args:
        target (`PreTrainedModel`): The target.
        prompts (`Sequence[Sequence[int]]`): Token ids, each shorter than `length`.
        length (`int`): Tokens of a row.
        sampled_share (`float`): Share of the batches that are sampled, at `temperature`; the others are greedy.
        max_new_tokens (`int`, *optional*): Most tokens of a continuation. Long ones repeat themselves more, and more
            prompts teach more.
        batch_size (`int`): Prompts continued together.
        on_step (`Callable[[int], None]`, *optional*): Called with the number of prompts done.

    Returns:
        [`Rows`]: prompt, continuation and padding; only the continuation counts. In the order of the prompts' lengths.
    """
    tokens = torch.zeros(len(prompts), length, dtype=torch.long)
    counted = torch.zeros(len(prompts), length, dtype=torch.bool)
    # Prompts of similar length together.
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    due = 0.0
    for start in range(0, len(order), batch_size):
        chosen = [prompts[index] for index in order[start : start + batch_size]]
        due += sampled_share
        sampled = due >= 1.0
        due -= sampled
        sampling = {"do_sample": True, "temperature": temperature} if sampled else {"do_sample": False}
        room = length - min(map(len, chosen))
        most = room if max_new_tokens is None else min(room, max_new_tokens)
        for row, answer in enumerate(_continuations(target, chosen, most, sampling), start):
            end = len(chosen[row - start])
            text = torch.cat((torch.tensor(chosen[row - start]), answer.cpu()))[:length]
            tokens[row, : len(text)] = text
            counted[row, end : len(text)] = True
        if on_step is not None:
            on_step(min(start + batch_size, len(order)))
    return Rows(tokens, counted)


def _continuations(target, prompts, max_new_tokens, sampling) -> Iterator[torch.LongTensor]:
    """The answers to some prompts, each with its end-of-sequence token if there is one."""
    width = max(map(len, prompts))
    input_ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    inputs = {"input_ids": input_ids.to(target.device), "attention_mask": mask.to(target.device)}
    arguments = {"max_new_tokens": max_new_tokens, "pad_token_id": 0, **sampling}
    try:
        # The same text, faster.
        output = target.generate(**inputs, **arguments, spec_method="ngram")
    except UnsupportedModelError:
        output = target.generate(**inputs, **arguments)
    ends = target.generation_config.eos_token_id
    ends = torch.tensor(ends if isinstance(ends, list) else [-1 if ends is None else ends], device=output.device)
    for answer in output[:, width:]:
        found = torch.isin(answer, ends).nonzero()
        yield answer[: found[0, 0] + 1] if len(found) else answer
