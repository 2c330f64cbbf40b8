"""The built site in a real browser: `make docs` builds it, and without it these are skipped."""

from __future__ import annotations

import pytest

from tests.helpers.browser import browser
from tests.helpers.paths import ROOT


SITE = ROOT / "build" / "site"
PAGES = ("index", "get_started", "choose", "many", "howto/serving", "cli")


@pytest.fixture(scope="module")
def page():
    if not (SITE / "index.html").exists():
        pytest.skip("needs the site: make docs")
    with browser() as opened:
        yield opened


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width", [1200, 390])
def test_pages_have_the_colours_of_the_system_and_fit(page, name, width):
    brightness = []
    for dark in (False, True):
        page.open(SITE / f"{name}.html", dark=dark, width=width)
        assert page.find("h1").text
        # Wide tables and code are moved sideways by themselves, never the page.
        assert page.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        # Nothing is fetched from anywhere.
        assert page.run("performance.getEntriesByType('resource').every((one) => one.name.startsWith('file:'))")
        assert page.complaints() == []
        colour = page.run("getComputedStyle(document.body).backgroundColor")
        brightness.append(sum(map(int, colour[4:-1].split(", "))))
    light, dark = brightness
    assert dark < 200 < 600 < light


def test_names_in_tables_stay_whole(page):
    page.open(SITE / "choose.html", width=390)
    broken = page.run(
        "[...document.querySelectorAll('table code')].filter((code) => /^[\\w+.]+$/.test(code.textContent)"
        " && code.getClientRects().length > 1).map((code) => code.textContent)"
    )
    assert broken == []
