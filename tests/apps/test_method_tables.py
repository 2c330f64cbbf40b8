"""The tables in README, docs and navigation are those that `tools/method_tables.py` makes; examples keep to them."""

import re

import pytest
import transformers

from hf_specdec.method import built_in_methods
from tests.helpers import images
from tools import command_tables, method_tables


DOCS = method_tables.ROOT / "docs"


@pytest.mark.parametrize("path", method_tables.PAGES)
def test_pages_are_up_to_date(path):
    """Run `python -m tools.method_tables` otherwise."""
    page = (method_tables.ROOT / path).read_text(encoding="utf-8")
    version = transformers.__version__.rpartition(".")[0]
    if path == "docs/support.md" and f"transformers {version}" not in page:
        pytest.skip(f"its model types are not those of transformers {version}")
    assert page == method_tables.with_tables(page)


@pytest.mark.parametrize(
    ("path", "phrase"),
    [
        ("README.md", "and {} of them with images"),
        ("CHANGELOG.md", "Prompts with images are tested for {} types"),
        ("docs/limits.md", "{} types are tested with images"),
    ],
)
def test_the_number_of_types_with_images_is_that_of_the_table(path, phrase):
    text = " ".join((method_tables.ROOT / path).read_text(encoding="utf-8").split())
    assert phrase.format(len(images.TESTED)) in text


def test_every_table_is_on_a_page():
    pages = "".join((method_tables.ROOT / path).read_text(encoding="utf-8") for path in method_tables.PAGES)
    assert {name for name in method_tables.TABLES if f" table {name}" in pages} == set(method_tables.TABLES)


@pytest.mark.parametrize("method", built_in_methods(), ids=lambda method: method.name)
def test_a_method_has_its_page(method):
    assert (method_tables.ROOT / "docs" / f"{method_tables.page_of(method)}.md").is_file()
    assert method.drafts_from


def test_every_command_has_its_section():
    headings = re.findall(r"^## `hf-specdec ([\w-]+)`$", (DOCS / "cli.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(headings) == sorted(command_tables.commands())


@pytest.mark.parametrize(
    "path", [method_tables.ROOT / "README.md", *sorted(DOCS.rglob("*.md"))], ids=lambda path: path.stem
)
def test_options_of_examples_exist(path):
    commands = command_tables.commands()
    text = re.sub(r" *\\\n *", " ", path.read_text(encoding="utf-8"))
    for name, arguments in re.findall(r"^(?:.*\| |.*`)?hf-specdec ([\w-]+)([^`\n]*)", text, re.MULTILINE):
        known = {"--help", "-h", "--debug"}
        known.update(*([*item.opts, *item.secondary_opts] for item in commands[name].params))
        # Values in quotes may hold anything.
        arguments = re.sub(r"'[^']*'|\"[^\"]*\"|#.*", "", arguments)
        assert set(re.findall(r"(?<!\S)(?:--[a-z][\w-]*|-[a-zA-Z](?!\S))", arguments)) <= known, (name, arguments)
