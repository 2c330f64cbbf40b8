"""Text to train on, read by `datasets`: files, folders and data sets of the Hub, chats in the chat template.

Documents and rows are records of one form: their tokens, and how many of them only lead up to the rest: of a chat what
comes before its last answer, of a row what no draft has to predict.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from packaging.version import Version
from transformers import PreTrainedTokenizerBase

from ..errors import MissingDependencyError, SpecConfigError, SpecDecError, shown
from ..prompts import PROMPT_FIELDS, WHOLE_FIELDS, prompts_in


if TYPE_CHECKING:
    from datasets import Dataset

# What reads a kind of file.
BUILDERS = {
    **dict.fromkeys((".txt", ".md", ".py"), "text"),
    **dict.fromkeys((".jsonl", ".json"), "json"),
    **{".parquet": "parquet", ".csv": "csv"},
}


def datasets_library() -> Any:
    """Imports `datasets`, of a version that runs no code of data sets."""
    try:
        import datasets

        if Version(datasets.__version__).major >= 4:
            return datasets
        problem = f"found datasets {datasets.__version__}"
    except ImportError:
        problem = "it is not installed"
    raise MissingDependencyError(
        f"Training reads its text with the datasets library, version 4 or later; {problem}. Install it with: pip "
        "install 'hf-specdec[train]'"
    )


def rows_of(records: Iterable[Mapping[str, Any]]) -> Dataset:
    """Makes a data set of documents or rows."""
    return datasets_library().Dataset.from_list(list(records), features=_features())


def _features() -> Any:
    datasets = datasets_library()
    return datasets.Features(tokens=[datasets.Value("int32")], prompt_length=datasets.Value("int32"))


def find_sources(data: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """Finds the files and data sets that `data` names, without reading any: for each the arguments of its reading."""
    datasets_library()
    if not data:
        raise SpecConfigError("There is no training data. Name files, folders or data sets.")
    sources: list[tuple[str, dict[str, Any]]] = []
    for name in data:
        path, (location, _, split) = Path(name), name.partition(":")
        if not path.exists():
            if Path(location).suffix in BUILDERS or location.startswith((".", "/", "~")) or location.count("/") > 1:
                raise SpecConfigError(f"There is no file or folder '{name}'.")
            sources.append((name, {"path": location, "split": split or "train"}))
            continue
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        files = [file for file in files if file.suffix in BUILDERS and file.is_file()]
        if not files:
            raise SpecConfigError(f"'{path}' has no files of a known kind: {', '.join(BUILDERS)}.")
        for builder in dict.fromkeys(BUILDERS[file.suffix] for file in files):
            of_kind = [str(file) for file in files if BUILDERS[file.suffix] == builder]
            arguments = {"path": builder, "data_files": of_kind, "split": "train"}
            # A file of text is one document.
            sources.append((name, arguments | ({"sample_by": "document"} if builder == "text" else {})))
    return sources


def load_documents(
    data: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    column: str | None = None,
    max_tokens: int | None = None,
    takes_prompts: bool = False,
) -> Dataset:
    """Reads and tokenises the texts and chats of files and data sets, up to the one that reaches `max_tokens`."""
    datasets = datasets_library()
    columns = [column] if column else [*WHOLE_FIELDS, *(PROMPT_FIELDS if takes_prompts else ())]
    parts, room = [], max_tokens
    for name, arguments in find_sources(data):
        try:
            parts.append(_read(arguments, room, {"tokenizer": tokenizer, "columns": columns, "name": name}))
        except SpecDecError:
            raise
        except (OSError, ValueError, RecursionError, datasets.exceptions.DatasetsError) as error:
            raise SpecConfigError(f"'{name}' cannot be read: {error.__cause__ or error}") from error
        if room is not None and (room := room - sum(map(len, parts[-1]["tokens"]))) <= 0:
            break
    return datasets.concatenate_datasets(parts).filter(bool, input_columns="tokens")


def _read(arguments: Mapping[str, Any], max_tokens: int | None, how: dict[str, Any]) -> Dataset:
    """The documents of a source; of some of them no more is downloaded than they need."""
    tokenising = {"function": _tokenised, "batched": True, "with_indices": True, "fn_kwargs": how}
    records = datasets_library().load_dataset(**arguments, streaming=max_tokens is not None)
    if max_tokens is None:
        return records.map(**tokenising, remove_columns=records.column_names, features=_features())
    taken, count = [], 0
    for document in records.map(**tokenising):
        taken.append({name: document[name] for name in _features()})
        count += len(document["tokens"])
        if count >= max_tokens:
            break
    return rows_of(taken)


def _tokenised(
    batch: Mapping[str, list],
    indices: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    columns: list[str],
    name: str,
) -> dict[str, list]:
    """Reads the text or chat of every record, and tokenises it."""
    records = [dict(zip(batch, values)) for values in zip(*batch.values())]
    places = [f"Record {index + 1} of '{name}'" for index in indices]
    pairs = zip(*[_text_and_prompt(record, place, tokenizer, columns) for record, place in zip(records, places)])
    texts, prompts = (tokenizer(list(part), add_special_tokens=False, verbose=False)["input_ids"] for part in pairs)
    # A prompt whose tokens join those of the answer is none.
    lengths = [len(prompt) if text[: len(prompt)] == prompt else 0 for text, prompt in zip(texts, prompts)]
    return {"tokens": texts, "prompt_length": lengths}


def _text_and_prompt(
    record: Mapping[str, Any], place: str, tokenizer: PreTrainedTokenizerBase, columns: list[str]
) -> tuple[str, str]:
    """The text of a record, and what of it comes before the last answer of a chat; all of what is a prompt alone."""
    field, content = next(iter(prompts_in(record, columns).items()), (None, None))
    if isinstance(content, str):
        # A column that is named is the text.
        return content, content if len(columns) > 1 and field in PROMPT_FIELDS else ""
    if not isinstance(content, list):
        raise SpecConfigError(
            f"{place} has no text or chat in {' or '.join(columns)}; it has: {', '.join(record)}. Name the column."
        )
    if not all(isinstance(message, Mapping) and message.get("role") is not None for message in content):
        raise SpecConfigError(f"{place} is no list of messages with role and content: {shown(content)}.")
    if tokenizer.chat_template is None:
        raise SpecConfigError(
            f"{place} is a chat, and the target's tokenizer has no chat template. Give text, or a target that was "
            "trained on chats."
        )
    # What some messages of a column have, `datasets` gives all of them.
    messages = [{key: value for key, value in message.items() if value is not None} for message in content]
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    last = answers[-1] if answers else len(messages)
    prompt = tokenizer.apply_chat_template(messages[:last], tokenize=False, add_generation_prompt=True)
    text = tokenizer.apply_chat_template(messages[: last + 1], tokenize=False) if answers else prompt
    return text, prompt


def pack(documents: Dataset, length: int, eos_token_id: int | None, max_tokens: int | None = None) -> Dataset:
    """Packs documents, each with its end, into whole rows of `length` tokens."""
    end = [] if eos_token_id is None else [eos_token_id]
    parts = [np.array([*tokens, *end], dtype=np.int32) for tokens in documents["tokens"]]
    stream = np.concatenate([np.zeros(0, dtype=np.int32), *parts])[:max_tokens]
    count = len(stream) // length
    if not count:
        raise SpecConfigError(
            f"The data have {len(stream)} tokens, fewer than one row of {length}. Give more text, or shorter rows."
        )
    return rows_of({"tokens": row, "prompt_length": 0} for row in stream[: count * length].reshape(count, length))


def split(rows: Dataset, share: float, seed: int) -> tuple[Dataset, Dataset]:
    """Divides rows at random: the rest to train on, and a share of at least one row to measure on."""
    if len(rows) < 2:
        raise SpecConfigError(
            f"The data fill {len(rows)} row, and training needs at least two, one of them held out. Give more text, "
            "or shorter rows."
        )
    parts = rows.train_test_split(min(max(1, round(share * len(rows))), len(rows) - 1), seed=seed)
    return parts["train"], parts["test"]


def learned_tokens(rows: Dataset) -> torch.LongTensor:
    """The tokens that count of all rows."""
    parts = [np.array(row["tokens"][row["prompt_length"] :], dtype=np.int64) for row in rows]
    return torch.from_numpy(np.concatenate(parts))
