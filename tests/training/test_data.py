import ast
import itertools

import pytest
import torch

from hf_specdec.errors import SpecDecError
from hf_specdec.training.data import (
    EditDocuments,
    Mixture,
    TokenRows,
    collect_snippets,
    python_sources,
    remove_comments,
    remove_docstring,
    rename,
)


SOURCE = '''
import os

class Greeter:
    """Say hello."""

    def greet(self, name, loud=False):
        """Return a greeting.

        It is for `name`.
        """
        # A greeting is short.
        words = ["hello", name, os.linesep]
        message = " ".join(words)
        return message.upper() if loud else message


def repeat(message, times):
    result = []
    for index in range(times):
        result.append(f"{index}: {message} is said {times} times, whoever it may concern")
    return result
'''


def char_encode(text):
    return [1 + ord(character) % 255 for character in text]


@pytest.fixture
def snippets():
    return collect_snippets([SOURCE])


def rows(snippets, seed=0):
    return TokenRows([SOURCE] * 3, EditDocuments(snippets, 5), char_encode, 0, seed)


def test_sources_are_sorted_and_split(tmp_path):
    for name in ("b.py", "a.py", "pkg/held.py", "test/c.py", "_sysconfigdata__linux.py", "pkg/site-packages/d.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "empty.py").write_text("\n")
    corpus = python_sources(tmp_path, held_out=frozenset({"pkg/held.py"}))
    assert corpus.train == ("# a.py\n", "# b.py\n")
    assert corpus.validation == ("# pkg/held.py\n",)


def test_no_sources_is_an_error(tmp_path):
    with pytest.raises(SpecDecError, match="No Python source files"):
        python_sources(tmp_path)


def test_snippets_are_dedented_definitions(snippets):
    texts = [snippet.text for snippet in snippets]
    assert [text.split("(")[0].split(":")[0] for text in texts] == ["def repeat", "def greet", "class Greeter"]
    greet = snippets[1]
    assert "\n    words = " in greet.text
    assert greet.names == ("greet", "loud", "message", "name", "words")
    assert [len(text) for text in texts] == sorted(len(text) for text in texts)


def test_broken_sources_are_left_out():
    assert collect_snippets(["def broken(:\n" + "    pass\n" * 40]) == []
    with pytest.raises(SpecDecError, match="No functions or classes"):
        EditDocuments([], 0)


def test_edits_of_the_code(snippets):
    greet = snippets[1]
    assert rename("name = names[name_1].name", "name", "x") == "x = names[name_1].x"
    bare = remove_docstring(greet, greet.text)
    assert ast.get_docstring(ast.parse(greet.text).body[0])
    assert ast.get_docstring(ast.parse(bare).body[0]) is None
    assert len(greet.text.splitlines()) - len(bare.splitlines()) == 4
    assert "# A greeting" not in remove_comments(greet.text)
    assert remove_comments(snippets[0].text) == snippets[0].text


def split_document(document):
    """Parts of a document: alternating headings and codes."""
    parts, heading = [], None
    for line in document.splitlines(keepends=True):
        if line.startswith("# "):
            heading = line[2:].strip()
            parts.append([heading, ""])
        elif heading is not None:
            parts[-1][1] += line
    return [(heading, code.rstrip("\n") + "\n") for heading, code in parts]


def test_every_edit_does_what_its_heading_says(snippets):
    documents = EditDocuments(snippets, seed=3)
    seen = set()
    for _ in range(300):
        parts = split_document(documents.draw(3000))
        assert parts[0][0] == "original"
        for (_, before), (heading, after) in itertools.pairwise(parts):
            seen.add(heading.split()[0] + heading.split()[-1] * heading.startswith("remove"))
            ast.parse(after)
            if heading == "copy":
                assert after == before
            elif heading == "remove the comments":
                assert after == remove_comments(before)
            elif heading == "remove the docstring":
                assert ast.get_docstring(ast.parse(before).body[0])
                assert ast.get_docstring(ast.parse(after).body[0]) is None
            else:
                for step in heading.removeprefix("rename ").split(" and "):
                    old, new = (name.strip("`") for name in step.split(" to "))
                    before = rename(before, old, new)
                assert after == before
    assert seen == {"copy", "rename", "removecomments", "removedocstring"}


def test_documents_are_short_enough_and_repeatable(snippets):
    short = len(snippets[0].text) * 2 + 10
    assert all("class Greeter" not in EditDocuments(snippets, seed).draw(short) for seed in range(20))
    first, second = EditDocuments(snippets, 7), EditDocuments(snippets, 7)
    assert [first.draw(2000) for _ in range(5)] == [second.draw(2000) for _ in range(5)]


def test_batches_have_the_asked_size_and_order(snippets):
    mixture = Mixture({32: 0.5, 64: 0.5}, tokens_per_batch=128, edit_share=0.3, repeat_share=0.3)
    first, second, other = (list(itertools.islice(rows(snippets, seed).batches(mixture), 20)) for seed in (1, 1, 2))
    assert {tuple(batch.shape) for batch in first} == {(4, 32), (2, 64)}
    assert all(batch.dtype == torch.long for batch in first)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(first, other))


def test_source_rows_are_windows(snippets):
    source = rows(snippets)
    stream = [token for _ in range(3) for token in [*char_encode(SOURCE), 0]]
    for _ in range(10):
        row = source.row(64, Mixture({64: 1.0})).tolist()
        assert any(stream[start : start + 64] == row for start in range(len(stream)))


def test_edit_rows_are_documents_with_separators(snippets):
    row = rows(snippets).row(4000, Mixture({64: 1.0}, edit_share=1.0)).tolist()
    heading = char_encode("# original\n")
    ends = [index for index, token in enumerate(row[: -len(heading)]) if token == 0]
    assert len(ends) > 2
    assert all(row[start : start + len(heading)] == heading for start in [0] + [end + 1 for end in ends])


def test_repeat_rows_have_a_period(snippets):
    source = rows(snippets)
    replaced = 0
    stream = source.stream.tolist()
    for _ in range(30):
        row = source.row(96, Mixture({64: 1.0}, repeat_share=1.0)).tolist()
        periods = [period for period in range(1, 49) if row[period:] == row[:-period]]
        assert periods
        assert set(row) <= set(stream)
        passage = row[: periods[0]]
        replaced += not any(stream[i : i + len(passage)] == passage for i in range(len(stream)))
    assert 5 < replaced < 25


def test_too_little_text_is_an_error(snippets):
    with pytest.raises(SpecDecError, match="fewer than a row of 100000"):
        rows(snippets).source_row(100000)
