"""The tables of methods in README, docs and navigation are those that `tools/method_tables.py` makes."""

import pytest

from hf_specdec.method import built_in_methods
from tools import method_tables


@pytest.mark.parametrize("path", method_tables.PAGES)
def test_pages_are_up_to_date(path):
    """Run `python -m tools.method_tables` otherwise."""
    page = (method_tables.ROOT / path).read_text(encoding="utf-8")
    assert page == method_tables.with_tables(page)


def test_every_table_is_on_a_page():
    pages = "".join((method_tables.ROOT / path).read_text(encoding="utf-8") for path in method_tables.PAGES)
    assert {name for name in method_tables.TABLES if f" table {name}" in pages} == set(method_tables.TABLES)


@pytest.mark.parametrize("method", built_in_methods(), ids=lambda method: method.name)
def test_a_method_has_its_page(method):
    assert (method_tables.ROOT / "docs" / f"{method_tables.page_of(method)}.md").is_file()
    assert method.drafts_from
