"""Training text of the demo: sources of Python's standard library, and editing documents made from them.

An editing document is a piece of code followed by the same code after an edit that its heading names:

    # original
    def total(prices): ...

    # rename `prices` to `amounts`
    def total(amounts): ...

Such text teaches a small model to copy from its context, which is most of what editing code takes.
"""

from __future__ import annotations

import ast
import bisect
import builtins
import keyword
import random
import re
import string
import sysconfig
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch


SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "encodings", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tests", "turtledemo"}
)
SKIPPED_FILES = ("_sysconfigdata*.py", "entities.py", "sre_constants.py", "keysyms.py")
HELD_OUT = frozenset(
    {"fractions.py", "heapq.py", "json/decoder.py", "shlex.py", "textwrap.py", "urllib/robotparser.py"}
)

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Corpus:
    """Source files for training and files held out for validation, each a tuple of texts in a fixed order."""

    train: tuple[str, ...]
    validation: tuple[str, ...]


def python_sources(root: str | Path | None = None, held_out: frozenset[str] = HELD_OUT) -> Corpus:
    """
    Collects Python files in sorted order, without tests and generated tables.

    Args:
        root (`str` or `Path`, *optional*): Folder to search; the standard library of the running Python by default.
        held_out (`frozenset[str]`): Paths relative to `root` that go to the validation part.
    """
    root = Path(root or sysconfig.get_paths()["stdlib"])
    train, validation = [], []
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(relative.parts[:-1]) or any(map(relative.match, SKIPPED_FILES)):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            (validation if relative.as_posix() in held_out else train).append(text)
    if not train:
        raise SystemExit(f"There are no Python source files to train on under {root}.")
    return Corpus(tuple(train), tuple(validation))


@dataclass(frozen=True)
class Snippet:
    """A dedented function or class, the names it binds, and the line span `[start, end)` of its docstring."""

    text: str
    names: tuple[str, ...]
    docstring: tuple[int, int] | None


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_FIXED_NAMES = frozenset(keyword.kwlist) | frozenset(dir(builtins)) | {"self", "cls"}


def collect_snippets(sources: Sequence[str], min_chars: int = 120, max_chars: int = 3000) -> list[Snippet]:
    """Returns the functions and classes of `sources`, shortest first, each text once."""
    snippets = {}
    for source in sources:
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue
        lines = source.splitlines(keepends=True)
        for node in ast.walk(tree):
            if isinstance(node, _DEFINITIONS):
                text = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno])).rstrip() + "\n"
                if min_chars <= len(text) <= max_chars and not text[0].isspace() and text not in snippets:
                    snippets[text] = Snippet(text, _bound_names(node), _docstring_span(node))
    return sorted(snippets.values(), key=lambda snippet: (len(snippet.text), snippet.text))


def _bound_names(node: ast.AST) -> tuple[str, ...]:
    names = set()
    for child in ast.walk(node):
        if isinstance(child, ast.arg):
            names.add(child.arg)
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            names.add(child.id)
        elif isinstance(child, _DEFINITIONS):
            names.add(child.name)
    return tuple(sorted(name for name in names - _FIXED_NAMES if not name.startswith("__")))


def _docstring_span(node: ast.AST) -> tuple[int, int] | None:
    first = node.body[0]
    has_docstring = len(node.body) > 1 and ast.get_docstring(node, clean=False) is not None
    if not has_docstring or first.lineno == node.lineno:
        return None
    return first.lineno - node.lineno, first.end_lineno - node.lineno + 1


def rename(code: str, old: str, new: str) -> str:
    """Replaces the word `old` by `new` everywhere in `code`."""
    return re.sub(rf"(?<!\w){re.escape(old)}(?!\w)", new, code)


def remove_docstring(snippet: Snippet, code: str) -> str:
    """Returns `code`, a version of `snippet` with the same lines, without the lines of the docstring."""
    start, end = snippet.docstring
    lines = code.splitlines(keepends=True)
    return "".join(lines[:start] + lines[end:])


def remove_comments(code: str) -> str:
    """Returns `code` without the lines that hold only a comment."""
    return "".join(line for line in code.splitlines(keepends=True) if not line.lstrip().startswith("#"))


class EditDocuments:
    """Draws editing documents from functions and classes; the same seed gives the same documents."""

    def __init__(self, snippets: list[Snippet], seed: int):
        self.snippets = snippets
        self.lengths = [len(snippet.text) for snippet in snippets]
        self.name_pool = sorted({name for snippet in snippets for name in snippet.names})
        self.random = random.Random(seed)

    def draw(self, max_chars: int) -> str:
        """Returns one document: an original of at most about `max_chars / 2` characters and its edited versions."""
        fitting = bisect.bisect_right(self.lengths, max_chars // 2)
        # The longest of up to three draws: long copies are rarer in the sources than short ones.
        index = max(self.random.randrange(max(fitting, 1)) for _ in range(self.random.randint(1, 3)))
        snippet = self.snippets[index]
        code, names = snippet.text, list(snippet.names)
        # Some names change beforehand, so that the copy cannot be written from memory of the sources.
        for old in self.random.sample(names, min(len(names), self.random.randint(0, 4))):
            code, names, _ = self._rename(code, names, old)
        document = f"# original\n{code}"
        has_docstring = snippet.docstring is not None
        while True:
            heading, code, names, has_docstring = self._edit(snippet, code, names, has_docstring)
            document += f"\n# {heading}\n{code}"
            if len(document) + len(code) > max_chars or self.random.random() < 0.5:
                return document

    def _edit(
        self, snippet: Snippet, code: str, names: list[str], has_docstring: bool
    ) -> tuple[str, str, list[str], bool]:
        choice = self.random.random()
        if has_docstring and choice < 0.15:
            return "remove the docstring", remove_docstring(snippet, code), names, False
        if choice < 0.3 and (stripped := remove_comments(code)) != code:
            # The docstring's lines may have moved, so its removal is no longer offered.
            return "remove the comments", stripped, names, False
        if not names or choice < 0.4:
            return "copy", code, names, has_docstring
        steps = []
        for old in self.random.sample(names, min(len(names), 1 if choice < 0.8 else 2)):
            code, names, new = self._rename(code, names, old)
            steps.append(f"`{old}` to `{new}`")
        return f"rename {' and '.join(steps)}", code, names, has_docstring

    def _rename(self, code: str, names: list[str], old: str) -> tuple[str, list[str], str]:
        """Gives `old` a new name that `code` does not contain."""
        while True:
            if self.random.random() < 0.25:
                new = "".join(self.random.choices(string.ascii_lowercase, k=self.random.randint(2, 8)))
            else:
                new = self.random.choice(self.name_pool)
            if new not in _FIXED_NAMES and not re.search(rf"(?<!\w){re.escape(new)}(?!\w)", code):
                return rename(code, old, new), sorted(new if name == old else name for name in names), new


@dataclass(frozen=True)
class Mixture:
    """
    Rows that the batches of a training phase are made of.

    Args:
        row_lengths (`dict[int, float]`): Row lengths and how often each is drawn.
        tokens_per_batch (`int`): Tokens of a batch, whatever the length of its rows.
        edit_share (`float`): Share of rows made of editing documents.
        repeat_share (`float`): Share of rows that repeat one passage; the rest are windows of the sources.
    """

    row_lengths: dict[int, float]
    tokens_per_batch: int = 4096
    edit_share: float = 0.0
    repeat_share: float = 0.0


class Batches(torch.utils.data.IterableDataset):
    """Batches for `DraftTrainer` that are drawn as they are needed, each an item of its own, see `own_batch`."""

    def __init__(self, batches: Iterator[dict[str, torch.Tensor]]):
        self.drawn = batches

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self.drawn


def own_batch(items: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The collator of batches that come as single items."""
    return items[0]


class TokenRows:
    """
    Seeded rows of tokens: windows of the sources, editing documents and repeated passages.

    Args:
        sources (`Sequence[str]`): Texts to take windows from.
        edits ([`EditDocuments`]): Editing documents.
        encode (`Callable[[str], list[int]]`): Tokenizer, without special tokens.
        eos_token_id (`int`): Separates documents.
        seed (`int`): Seed of all draws.
    """

    def __init__(self, sources: Sequence[str], edits: EditDocuments, encode: Encode, eos_token_id: int, seed: int = 0):
        self.stream = np.concatenate([np.array([*encode(text), eos_token_id], dtype=np.int64) for text in sources])
        self.edits = edits
        self.encode = encode
        self.eos_token_id = eos_token_id
        self.random = random.Random(seed)
        self.chars_per_token = sum(map(len, sources)) / len(self.stream)

    def batches(self, mixture: Mixture) -> Iterator[dict[str, torch.Tensor]]:
        """
        Yields endless batches `(B, T)` of about `mixture.tokens_per_batch` tokens, all of which count; the row length
        is drawn for each batch, so that most are cheap and some are long.
        """
        lengths, weights = zip(*mixture.row_lengths.items())
        while True:
            length = self.random.choices(lengths, weights)[0]
            count = max(1, mixture.tokens_per_batch // length)
            tokens = torch.stack([self.row(length, mixture) for _ in range(count)])
            yield {"tokens": tokens, "counted": torch.ones_like(tokens, dtype=torch.bool)}

    def row(self, length: int, mixture: Mixture) -> torch.LongTensor:
        """Returns one row `(length,)` of a kind drawn from `mixture`."""
        draw = self.random.random()
        if draw < mixture.edit_share:
            return self.edit_row(length)
        if draw < mixture.edit_share + mixture.repeat_share:
            return self.repeat_row(length)
        return self.source_row(length)

    def source_row(self, length: int) -> torch.LongTensor:
        start = self.random.randrange(len(self.stream) - length + 1)
        return torch.from_numpy(self.stream[start : start + length].copy())

    def edit_row(self, length: int) -> torch.LongTensor:
        tokens: list[int] = []
        while len(tokens) < length:
            document = self.edits.draw(int(length * self.chars_per_token))
            tokens += [*self.encode(document), self.eos_token_id]
        return torch.tensor(tokens[:length])

    def repeat_row(self, length: int) -> torch.LongTensor:
        """
        Returns a passage repeated to the end of the row; in half of the rows with tokens replaced by other tokens.

        A replaced token cannot be guessed from its neighbours, only found in the earlier copy.
        """
        passage = self.source_row(self.random.randint(min(12, length), max(min(12, length), length // 2))).numpy()
        if self.random.random() < 0.5:
            share = self.random.random()
            for index in range(len(passage)):
                if self.random.random() < share:
                    passage[index] = self.stream[self.random.randrange(len(self.stream))]
        return torch.from_numpy(np.resize(passage, length))
