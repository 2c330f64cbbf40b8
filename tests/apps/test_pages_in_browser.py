"""The page of a call in a real browser: what is seen, heard, clicked and typed."""

from __future__ import annotations

import pytest

from hf_specdec import demo, record
from hf_specdec.metrics import RowTrace, TokenScore
from tests.helpers.browser import browser
from tests.helpers.levels import full
from tests.helpers.pages import NASTY, Words, drawn


pytestmark = full

TREE = {"draft_tree_depth": 3, "draft_tree_top_k": 3, "num_draft_nodes": 9}
EAGLE = {"method": "eagle3", "model": demo.drafter_path("eagle3"), **TREE}
CALLS = {
    "tree": (1, {"speculative": EAGLE}),
    "chain": (1, {"spec_method": "ngram"}),
    "batch": (3, {"spec_method": "ngram"}),
    "sampled": (1, {"spec_model": demo.drafter_path("draft_model"), "spec_method": "draft_model", "do_sample": True}),
    "plain_cycles": (2, {"speculative": {"method": "ngram", "disable_by_batch_size": 1}}),
}


@pytest.fixture(scope="module")
def page():
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def calls(target, demo_tokenizer, tmp_path_factory):
    """Pages of real calls, by name, with their texts."""
    folder, pages = tmp_path_factory.mktemp("pages"), {}
    for name, (batch_size, settings) in CALLS.items():
        texts = [prompt.text[-400:] for prompt in demo.prompts()[:batch_size]]
        inputs = demo_tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
        with record(trace=True, tokenizer=demo_tokenizer) as made:
            output = target.generate(**inputs, **{"do_sample": False, "max_new_tokens": 32, **settings})
        made.calls[0].to_html(folder / f"{name}.html")
        texts = [demo_tokenizer.decode(row) for row in output[:, inputs["input_ids"].shape[1] :]]
        pages[name] = folder / f"{name}.html", texts, made.calls[0]
    return pages


def text_of(page):
    """The text that is shown, without its marks."""
    return page.run(
        "(() => { const copy = document.getElementById('text').cloneNode(true);"
        "copy.querySelectorAll('.mark').forEach((mark) => mark.remove()); return copy.textContent; })()"
    )


@pytest.mark.parametrize("name", CALLS)
def test_page_shows_the_text_and_asks_for_nothing(page, calls, name):
    path, texts, call = calls[name]
    page.open(path, width=360 if name == "sampled" else 1200)
    assert text_of(page) == texts[0]
    cycles = [cycle for cycle in call.cycles if any(row.row == 0 for row in cycle.rows)]
    assert page.run("document.querySelectorAll('.cycle').length") == len(cycles)
    assert page.run("performance.getEntriesByType('resource').length") == 0
    assert page.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    for row, text in enumerate(texts[1:], 1):
        page.find(f"#row option[value='{row}']").click()
        assert text_of(page) == text
    assert page.complaints() == []


def test_click_unfolds_a_tree(page, calls):
    path, _, call = calls["tree"]
    page.open(path)
    assert not page.is_visible("#drawer")
    drawn_rows = [cycle.rows[0] for cycle in call.cycles]
    number, row = next(
        (number, row) for number, row in enumerate(drawn_rows) if len(set(row.parents)) < len(row.parents)
    )
    page.find(f"#cycle-{number + 1}").click()
    assert page.is_visible("#drawer")
    assert (
        f"eagle3 drafted {len(row.draft_tokens)} tokens, {row.num_accepted} accepted" in page.find("#drawer h2").text
    )
    # The anchor, the draft, and the target's own token.
    assert page.run("document.querySelectorAll('#tree .node').length") == len(row.draft_tokens) + 2
    assert page.run("document.querySelectorAll('#tree .node.a').length") == row.num_accepted
    page.find("#next").click()
    assert f"Cycle {number + 2} " in page.find("#drawer h2").text
    page.find("#close").click()
    assert not page.is_visible("#drawer")
    # A token unfolds the cycle that wrote it.
    page.find("#text .token:last-child").click()
    assert page.is_visible("#drawer")
    assert page.complaints() == []


def test_colours_follow_the_reader(page, calls):
    for dark in (False, True):
        page.open(calls["tree"][0], dark=dark)
        for shown in (dark, not dark):
            assert page.run("document.documentElement.dataset.theme") == ("dark" if shown else "light")
            page.find("#theme").click()


def test_keyboard_alone_is_enough(page, calls):
    path, _, call = calls["tree"]
    page.open(path)
    for _ in range(12):
        page.press("TAB")
        if page.run("document.activeElement.id") == "text":
            break
    active = "document.getElementById('text').getAttribute('aria-activedescendant')"
    assert page.run(active) == "token-0"
    assert page.is_visible("#card")
    page.press("ARROW_RIGHT", "ARROW_RIGHT", "ARROW_LEFT")
    assert page.run(active) == "token-1"
    page.press("ARROW_DOWN")
    assert page.run(active) == f"token-{1 + len(call.cycles[0].rows[0].committed_tokens)}"
    page.press("END")
    assert page.run(active) == f"token-{call.stats.num_committed_tokens - 1}"
    page.press("HOME", "ARROW_RIGHT", "ENTER")
    assert page.find("#drawer h2").text.startswith("Cycle 1 of")
    assert page.run("document.activeElement.textContent").endswith("anchor")
    page.press("ARROW_RIGHT")
    first = page.run("document.activeElement.getAttribute('aria-label')")
    assert "probability" in first
    page.press("ARROW_DOWN", "ARROW_UP", "ARROW_LEFT")
    assert page.run("document.activeElement.textContent").endswith("anchor")
    page.press("ESCAPE")
    assert not page.is_visible("#drawer")
    assert page.run("document.activeElement.id") == "text"
    assert page.complaints() == []


def test_what_a_screen_reader_hears(page, calls):
    path, _, call = calls["chain"]
    page.open(path)
    heard = page.spoken()
    options = [name for role, name in heard if role == "option"]
    accepted = sum(row.num_accepted for cycle in call.cycles for row in cycle.rows)
    assert sum("accepted draft; probability" in name for name in options) == accepted > 0
    assert ("listbox", "Generated text, token by token") in heard
    assert sum(name.startswith("Cycle ") for name in options) == len(call.cycles)
    for role, name in heard:
        assert name.strip() or role not in ("button", "option", "listbox", "combobox", "treeitem", "heading")


def test_hostile_texts_stay_texts(page, tmp_path):
    words = [*NASTY, "<img src=x onerror='window.broken = 1'>", "<svg onload='window.broken = 1'>"]
    everything = list(range(len(words)))
    score = TokenScore(0.5, 2, -1.0)
    row = RowTrace(0, everything, [-1] * len(words), 1, [0, 1], words[0], [score] * len(words), [], [score] * 2)
    call = drawn([row, RowTrace(0, everything, [-1] * len(words), 1, [7, 8], words[0])], everything, notes=words)
    call.model_name = words[0]
    call.to_html(tmp_path / "call.html", tokenizer=Words(words))
    page.open(tmp_path / "call.html")
    page.find("#cycle-1").click()
    page.hover("#token-2")
    assert page.run("window.broken") is None
    assert page.run("document.scripts.length") == 2
    assert page.run("document.images.length") == 0
    assert words[0] in text_of(page)
    assert page.complaints() == []
