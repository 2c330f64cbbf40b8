"""Text to train on, read by `datasets`: files, folders and data sets of the Hub, chats in the chat template.

It may also be what the target writes after prompts from it.

Documents and rows are records of one form: their tokens, and how many of them only lead up to the rest: of a chat what
comes before its last answer, of a row what no draft has to predict.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from packaging.version import Version
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import MissingDependencyError, SpecConfigError, SpecDecError, UnsupportedModelError, shown
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


# Text of the target's own: a draft has to predict what the target writes, not what others wrote.


def draw_prompts(documents: Dataset, count: int, length: int, seed: int) -> list[list[int]]:
    """Draws prompts of up to half of `length` tokens: of a chat all before its last answer, of a text a piece."""
    # No chat is drawn again before all have been.
    choose = random.Random(seed)
    texts, prompt_lengths = list(documents["tokens"]), list(documents["prompt_length"])
    weights = [length if prompt_length else len(tokens) for tokens, prompt_length in zip(texts, prompt_lengths)]
    chats = [index for index, prompt_length in enumerate(prompt_lengths) if prompt_length]
    choose.shuffle(chats)
    in_turn = cycle(chats)
    prompts = []
    for index in choose.choices(range(len(texts)), weights, k=count):
        if prompt_lengths[index]:
            index = next(in_turn)
            prompts.append(texts[index][: prompt_lengths[index]][-(length // 2) :])
            continue
        size = choose.randint(max(1, length // 16), max(1, length // 2))
        start = choose.randrange(max(1, len(texts[index]) - size + 1))
        prompts.append(texts[index][start : start + size])
    return prompts


@torch.no_grad()
def continue_prompts(
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    length: int,
    *,
    sampled_share: float = 0.5,  # of the batches, the others are greedy
    temperature: float = 0.8,
    max_new_tokens: int | None = None,  # long continuations repeat themselves more, and more prompts teach more
    batch_size: int = 32,
    show_progress: bool = False,
) -> list[dict[str, Any]]:
    """Continues prompts with the target to rows of at most `length` tokens, in the order of the prompts' lengths."""
    ends = target.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    # Prompts of similar length together.
    prompts = sorted(prompts, key=len)
    rows: list[dict[str, Any]] = []
    with tqdm(desc="target's continuations", total=len(prompts), disable=not show_progress) as bar:
        for number, start in enumerate(range(0, len(prompts), batch_size)):
            chosen = [torch.tensor(prompt) for prompt in prompts[start : start + batch_size]]
            mask = [torch.ones_like(prompt) for prompt in chosen]
            input_ids, attention_mask = (
                pad_sequence(batch, batch_first=True, padding_side="left").to(target.device)
                for batch in (chosen, mask)
            )
            is_sampled = int((number + 1) * sampled_share) > int(number * sampled_share)
            arguments: dict[str, Any] = {
                "input_ids": input_ids,
                "attention_mask": attention_mask,
                "max_new_tokens": min(length - len(chosen[0]), max_new_tokens or length),
                "pad_token_id": 0,
                **({"do_sample": True, "temperature": temperature} if is_sampled else {"do_sample": False}),
            }
            try:
                # Greedy output is the same, sampled output has the same distribution, and both come sooner.
                output = target.generate(**arguments, spec_method="ngram")
            except UnsupportedModelError:
                output = target.generate(**arguments)
            for prompt, answer in zip(chosen, output[:, input_ids.shape[1] :].tolist()):
                end = next((index + 1 for index, token in enumerate(answer) if token in ends), len(answer))
                tokens = [*prompt.tolist(), *answer[:end]][:length]
                rows.append({"tokens": tokens, "prompt_length": len(prompt)})
            bar.update(len(chosen))
    return rows
