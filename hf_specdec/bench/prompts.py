"""Prompts to measure on (the user's own files, Spec-Bench's questions, those of the demo), and batches of them."""

from __future__ import annotations

import hashlib
import itertools
import re
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import demo
from ..demo import Prompt
from ..errors import SpecConfigError, shown
from ..machine import home_folder
from ..prompts import PROMPT_FIELDS, WHOLE_FIELDS, is_chat, json_records, prompts_in
from ..settings.checks import is_int


if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


DEMO = "demo"
SPEC_BENCH = "spec-bench"

SPEC_BENCH_URL = (
    "https://raw.githubusercontent.com/hemingkx/Spec-Bench/66230f10cb0a02aced5ef3ce1e85163c16160454/data/spec_bench/"
    "question.jsonl"
)
SPEC_BENCH_SHA256 = "4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04"
_DOWNLOAD_SECONDS = 60

# Spec-Bench's tables have these, the categories of MT-Bench, in one column.
_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")

_FIELDS = (*PROMPT_FIELDS, *WHOLE_FIELDS)
# Keys of a record for its name and its sort of text.
_NAME_KEYS = ("name", "question_id", "id")
_KIND_KEYS = ("category", "kind", "task")


# For those who name no prompts: new prose, new code, a text to repeat with changes, and a list.
_GENERAL = {
    "explain": "Explain in a few sentences why the sky is blue and sunsets are red.",
    "code": "Write a Python function that merges two sorted lists into one sorted list, with a docstring.",
    "rewrite": "Rewrite this paragraph in the past tense and change nothing else:\n\nThe ship leaves the harbour at "
    "dawn. The captain looks at the map, the crew sets the sails, and the wind carries the ship to the open sea. In "
    "the evening the crew sees an island, and the captain decides to stay there for the night.",
    "list": "List the planets of the solar system in order, with one fact about each of them.",
}


@dataclass(frozen=True)
class Batch:
    """Prompts that are generated from together."""

    names: tuple[str, ...]  # of the B prompts
    kind: str  # of text they ask for; results are also given by kind
    inputs: dict[str, torch.Tensor]  # `input_ids` and `attention_mask` `(B, P)`, padded on the left
    max_new_tokens: int


def read_prompts(source: str, max_new_tokens: int = 256, per_kind: int | None = None) -> list[Prompt]:
    """The prompts that `--prompts` names, "demo", "spec-bench" or a file, or of each kind the first ones."""
    if source == DEMO:
        prompts = demo.prompts()
    elif source == SPEC_BENCH:
        prompts = [
            replace(prompt, kind="mt_bench") if prompt.kind in _MT_BENCH else prompt
            for prompt in _read_file(spec_bench_file(), max_new_tokens)
        ]
    else:
        prompts = _read_file(Path(source), max_new_tokens)
    return first_of_kinds(prompts, max_new_tokens, per_kind)


def general_prompts(max_new_tokens: int = 128) -> list[Prompt]:
    """A few prompts that any language model can go on from, each of its own kind."""
    return [Prompt(name, text, name, max_new_tokens) for name, text in _GENERAL.items()]


def first_of_kinds(prompts: Sequence[Prompt], max_new_tokens: int, per_kind: int | None) -> list[Prompt]:
    """The first prompts of each kind, or all, with at most so many tokens to generate."""
    prompts = [replace(prompt, max_new_tokens=min(prompt.max_new_tokens, max_new_tokens)) for prompt in prompts]
    if per_kind is None:
        return prompts
    first, taken = [], Counter()
    for prompt in prompts:
        taken[prompt.kind] += 1
        if taken[prompt.kind] <= per_kind:
            first.append(prompt)
    return first


def as_chat(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, **options: Any) -> list[Prompt]:
    """The prompts as the user's message in the chat template, to be tokenised without special tokens."""

    def in_template(text: str) -> str:
        message = [{"role": "user", "content": text}]
        return tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False, **options)

    return [replace(prompt, text=in_template(prompt.text)) for prompt in prompts]


def make_batches(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterable[Prompt],
    batch_size: int = 1,
    max_new_tokens: int | None = None,
    device: torch.device | str = "cpu",
    *,
    fill: bool = False,
    add_special_tokens: bool = True,
) -> list[Batch]:
    """Tokenises prompts in batches of one kind and length of answer; `fill` repeats a kind's first in the last."""
    groups: dict[tuple[str, int], list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault((prompt.kind, prompt.max_new_tokens), []).append(prompt)
    batches = []
    for (kind, longest), group in groups.items():
        length = longest if max_new_tokens is None else min(longest, max_new_tokens)
        for start in range(0, len(group), batch_size):
            rows = group[start : start + batch_size]
            if fill:
                rows += itertools.islice(itertools.cycle(group), batch_size - len(rows))
            inputs = tokenizer(
                [row.text for row in rows],
                return_tensors="pt",
                padding=len(rows) > 1,
                add_special_tokens=add_special_tokens,
            ).to(device)
            tensors = {key: inputs[key] for key in ("input_ids", "attention_mask")}
            batches.append(Batch(tuple(row.name for row in rows), kind, tensors, length))
    return batches


# --------------------------------------------------------------------------------------------------------- Spec-Bench


def spec_bench_file() -> Path:
    """Path of Spec-Bench's questions (Xia et al., arXiv 2401.07851), which are downloaded on first use."""
    from huggingface_hub import constants

    path = home_folder() / "spec_bench" / "question.jsonl"
    if path.is_file():
        return path
    if constants.HF_HUB_OFFLINE:
        raise _no_spec_bench("HF_HUB_OFFLINE is set", path)
    try:
        with urllib.request.urlopen(SPEC_BENCH_URL, timeout=_DOWNLOAD_SECONDS) as response:
            content = response.read()
        if hashlib.sha256(content).hexdigest() != SPEC_BENCH_SHA256:
            raise _no_spec_bench("what came is another file", path)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written beside it first: two processes may do this at once, or one be interrupted.
        part = path.with_suffix(".part")
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        raise _no_spec_bench(str(error), path) from error
    return path


def _no_spec_bench(reason: str, path: Path) -> SpecConfigError:
    return SpecConfigError(
        f"Spec-Bench's questions are not on this machine and cannot be downloaded from {SPEC_BENCH_URL}: {reason}. "
        f"Fetch the file by other means and save it as {path}, or pass its path to --prompts."
    )


# --------------------------------------------------------------------------------------------------------------- files


def _read_file(path: Path, max_new_tokens: int) -> list[Prompt]:
    """Of JSON (an object or text a line, or one list) its records; of a text its paragraphs, or else its lines."""
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecConfigError(
            f"The prompts in '{path}' cannot be read: {error}. Pass a file, '{SPEC_BENCH}' or '{DEMO}'."
        ) from error
    if path.suffix in (".json", ".jsonl") or content.lstrip()[:1] == "{":
        records = json_records(content, path, 'Write an object such as {"prompt": ...}.')
    else:
        paragraphs = re.split(r"\n\s*\n", content.strip("\n"))
        texts = paragraphs if len(paragraphs) > 1 else content.splitlines()
        texts = enumerate((text for text in texts if text.strip()), start=1)
        records = [(f"Text {number} of '{path}'", text) for number, text in texts]
    if not records:
        raise SpecConfigError(f"'{path}' has no prompts. Put one in each line, as text or as JSON with a `prompt`.")
    width = len(str(len(records)))
    prompts = [
        _prompt(record, place, f"prompt {number:0{width}}", max_new_tokens)
        for number, (place, record) in enumerate(records, start=1)
    ]
    for name, count in Counter(prompt.name for prompt in prompts).items():
        if count > 1:
            raise SpecConfigError(f"'{path}' has two prompts named '{name}'. Give each its own name.")
    return prompts


def _prompt(record: Any, place: str, name: str, max_new_tokens: int) -> Prompt:
    record = record if isinstance(record, dict) else {"prompt": record}
    text: Any = next(iter(prompts_in(record, _FIELDS).values()), None)
    if is_chat(text):
        messages = [message for message in text if isinstance(message, Mapping)]
        text = next((message.get("content") for message in messages if message.get("role") == "user"), None)
    if not isinstance(text, str) or not text.strip():
        raise SpecConfigError(
            f"{place} is no prompt: a text, or an object with one of {', '.join(_FIELDS)}; got {shown(record)}."
        )
    longest = record.get("max_new_tokens", max_new_tokens)
    if not is_int(longest) or longest < 2:
        raise SpecConfigError(f"{place}: `max_new_tokens` must be a number of at least 2, got {longest!r}.")
    return Prompt(str(_first(record, _NAME_KEYS, name)), text, str(_first(record, _KIND_KEYS, "prompt")), longest)


def _first(record: dict[str, Any], keys: Iterable[str], default: Any = None) -> Any:
    return next((record[key] for key in keys if record.get(key) is not None), default)
