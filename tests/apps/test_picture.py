"""The page of a call: what it says, whatever a model has written; and in a browser what is seen, heard and typed."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specdec import SpecConfigError, SpecDecodingStats, demo, record
from hf_specdec.metrics import CallRecord, CallTrace, RowTrace, TokenScore
from hf_specdec.metrics.picture.pieces import Pieces
from tests.helpers.browser import browser
from tests.helpers.levels import full, in_full
from tests.helpers.models import prompts
from tests.helpers.pages import NASTY, Page, Words, drawn, story_in


TOKENIZER = demo.load_tokenizer()
SHORT = {"do_sample": False, "max_new_tokens": 4, "spec_method": "ngram"}


def tokens_of(story, row=0):
    return [token for step in story["rows"][row]["steps"] for token in step["tokens"]]


def test_who_wrote_what():
    rows = [
        RowTrace(0, [1, 2, 3], [-1, 0, 0], 2, [1, 3, 4], "suffix"),  # a leaf: all of its path was accepted
        RowTrace(0, [1, 2], [-1, 0], 1, [1, 5], "eagle3"),
        RowTrace(0, [1], [-1], 0, [2], "suffix"),
        RowTrace(0, [], [], 0, [3], "suffix"),
        RowTrace(0, [1, 2], [-1, 0], 1, [1], "suffix"),  # ended inside of a draft
    ]
    story = story_in(drawn(rows, method="suffix+eagle3").to_html(tokenizer=Words(list("abcdef"))))
    assert story["drafters"] == ["suffix", "eagle3"]
    steps = story["rows"][0]["steps"]
    assert [step["drafter"] for step in steps] == [None, 0, 1, 0, None, 0]
    assert [step["path"] for step in steps] == [[], [0, 2], [0], [], [], [0]]
    assert [(text, who) for text, _, who, *_ in tokens_of(story)] == [
        ("a", "plain"),
        *[("b", "accepted"), ("d", "accepted"), ("e", "bonus")],
        *[("b", "accepted"), ("f", "corrected")],
        ("c", "corrected"),
        ("d", "plain"),
        ("b", "accepted"),
    ]


@pytest.mark.parametrize(("method", "batch_size"), [("ngram", 3), *in_full(("eagle3", 1), ("ngram+eagle3", 3))])
def test_page_tells_the_text(target, method, batch_size):
    texts = [prompt.text[-300:] for prompt in demo.prompts()[:batch_size]]
    inputs = TOKENIZER(texts, return_tensors="pt", padding=True, padding_side="left")
    given = {"method": method, **({"model": demo.drafter_path("eagle3")} if "eagle3" in method else {})}
    with record(trace=True, tokenizer=TOKENIZER) as made:
        output = target.generate(**inputs, max_new_tokens=24, do_sample=False, speculative=given)
    story = story_in(made.calls[0].to_html())
    assert len(story["cycles"]) == story["forwards"] - 1
    assert set(story["drafters"]) <= set(method.split("+"))
    for row, (told, prompt) in enumerate(zip(story["rows"], texts)):
        assert told["prompt"] == prompt
        tokens = tokens_of(story, row)
        generated = output[row, inputs["input_ids"].shape[1] :].tolist()[: len(tokens)]
        assert [token[1] for token in tokens] == generated
        assert "".join(token[0] for token in tokens) == TOKENIZER.decode(generated)
        assert all(0 < token[3] <= 1 and token[4] == 1 and token[5] >= 0 for token in tokens)


def test_rows_that_have_ended_and_calls_that_fail(model):
    inputs = prompts(3)
    text = model.generate(**inputs, do_sample=False, max_new_tokens=12)
    eos = int(text[1, inputs["input_ids"].shape[1] + 3])
    with record(trace=True) as made:
        model.generate(**inputs, **{**SHORT, "max_new_tokens": 12}, eos_token_id=eos)
    lengths = [len(tokens_of(story_in(made.calls[0].to_html()), row)) for row in range(3)]
    assert lengths[1] == 4
    assert sum(lengths) == made.calls[0].stats.num_committed_tokens

    def fail(input_ids, scores):
        if input_ids.shape[1] > 12:
            raise ZeroDivisionError
        return scores

    with record(trace=True) as made, pytest.raises(ZeroDivisionError):
        model.generate(**prompts(1), **{**SHORT, "max_new_tokens": 20}, logits_processor=[fail])
    # Tokens without scores, and a cycle without its time.
    story = story_in(made.calls[0].to_html())
    assert tokens_of(story)
    assert all(token[3:] == [None, None, None] for token in tokens_of(story))


IDS = st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=12)


@full
@settings(max_examples=150)
@given(IDS, IDS, st.text(alphabet=st.characters(codec="utf-8"), max_size=40))
def test_pieces_of_any_tokens_make_the_whole_text(before, tokens, text):
    """Also of tokens that are parts of characters, or of none."""
    pieces = Pieces(TOKENIZER).of_row([*before, *tokens])
    assert "".join(pieces) == TOKENIZER.decode([*before, *tokens])
    assert Pieces(TOKENIZER).of_row(tokens, before) == pieces[len(before) :]
    tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert "".join(Pieces(TOKENIZER).of_row(tokens)) == TOKENIZER.decode(tokens)


def test_half_a_character_and_figures_that_are_no_numbers():
    """The token that completes a character has all of it, and a draft that stops before says so."""
    tokens = TOKENIZER("x\u20acy", add_special_tokens=False)["input_ids"]
    assert Pieces(TOKENIZER).of_row(tokens) == ["x", *[""] * (len(tokens) - 3), "\u20ac", "y"]
    assert Pieces(TOKENIZER).of_row(tokens[:2]) == ["x", "\ufffd"]
    parents = list(range(-1, len(tokens) - 2))
    assert "\ufffd" in Pieces(TOKENIZER).of_draft(tokens[1:], parents, tokens[:1])[0]
    draft, committed = TokenScore(float("nan"), 3, float("-inf")), TokenScore(1.0, 1, float("inf"))
    row = RowTrace(0, [1], [-1], 0, [2], "ngram", [draft], [], [committed])
    step = story_in(drawn([row]).to_html())["rows"][0]["steps"][1]
    assert step["nodes"] == [[" 1", 1, -1, None, 3, None, None]]
    assert step["tokens"] == [[" 2", 2, "corrected", 1.0, 1, None]]


def check_quoting(words):
    """Whatever a model writes stays data: the page has the elements of any other."""
    everything = list(range(len(words)))
    rows = [RowTrace(0, everything, [-1] * len(words), 0, everything[:1], words[0])]
    call = drawn(rows, prompt=everything, method=words[0], notes=words)
    call.model_name = words[0]
    html = call.to_html(tokenizer=Words(words))
    assert html.isascii()
    page, usual = Page(html), Page(drawn([RowTrace(0, [], [], 0, [0])]).to_html(tokenizer=Words(["word"])))
    assert page.tags == usual.tags
    (data,) = (text for attributes, text in page.scripts if attributes)
    assert not set("<>&") & set(data)
    scripts = [[(attributes, "" if attributes else text) for attributes, text in one.scripts] for one in (page, usual)]
    assert scripts[0] == scripts[1]
    # A pair of surrogates in two texts is still two.
    assert [node[0] for node in story_in(html)["rows"][0]["steps"][1]["nodes"]] == words


def test_hostile_texts_do_not_break_out():
    for word in NASTY:
        check_quoting([word, *NASTY])


@full
@given(st.lists(st.one_of(st.sampled_from(NASTY), st.text(alphabet=st.characters(exclude_categories=()))), min_size=1))
def test_no_text_breaks_out(words):
    check_quoting(words)


def test_page_is_one_file_that_asks_for_nothing(model, tmp_path):
    call = drawn([RowTrace(0, [1], [-1], 1, [1, 2])])
    html = call.to_html(tokenizer=Words(list("abc")))
    assert not Page(html).links
    assert "default-src 'none'" in html
    assert "http" not in html.replace('http-equiv="Content-Security-Policy"', "")
    assert "url(" not in html
    assert "@import" not in html
    # In a notebook it lies in a frame, where its script sees nothing of the notebook.
    call.tokenizer = Words(['"', "<b>", "'"])
    assert Page(call._repr_html_()).tags == ["iframe"]
    (source,) = re.findall(r'srcdoc="([^"]*)"', call._repr_html_())
    assert "&lt;!DOCTYPE html&gt;" in source
    call.to_html(tmp_path / "call.html")
    assert call.to_html().encode() == (tmp_path / "call.html").read_bytes()
    # Calls that cannot be drawn.
    with record(timings=True) as made:
        model.generate(**prompts(1), **SHORT)
    assert made.calls[0]._repr_html_() is None
    for call, tokenizer, message in (
        (made.calls[0], None, r"Record it inside `with hf_specdec.record\(trace=True\) as r:`"),
        (CallRecord(SpecDecodingStats("ngram"), "model", CallTrace()), None, "ended before its first token"),
        (drawn([]), "gpt2", "`tokenizer` must be a tokenizer of transformers"),
    ):
        with pytest.raises(SpecConfigError, match=message):
            call.to_html(tokenizer=tokenizer)


# In a real browser, over pages of real calls

TREE = {"draft_tree_depth": 3, "draft_tree_top_k": 3, "num_draft_nodes": 9}
CALLS = {
    "tree": (1, {"speculative": {"method": "eagle3", "model": demo.drafter_path("eagle3"), **TREE}}),
    "batch": (3, {"spec_method": "ngram"}),
    "sampled": (1, {"spec_model": demo.drafter_path("draft_model"), "spec_method": "draft_model", "do_sample": True}),
    "plain_cycles": (2, {"speculative": {"method": "ngram", "num_speculative_tokens_per_batch_size": {1: 0}}}),
}


@pytest.fixture(scope="module")
def page():
    with browser() as opened:
        yield opened


@pytest.fixture
def made_call(page, target, tmp_path, request):
    """The page of a call, its texts, and its record."""
    batch_size, drafting = CALLS[getattr(request, "param", "tree")]
    texts = [prompt.text[-400:] for prompt in demo.prompts()[:batch_size]]
    inputs = TOKENIZER(texts, return_tensors="pt", padding=True, padding_side="left")
    with record(trace=True, tokenizer=TOKENIZER) as made:
        output = target.generate(**inputs, **{"do_sample": False, "max_new_tokens": 32, **drafting})
    made.calls[0].to_html(tmp_path / "call.html")
    yield tmp_path / "call.html", TOKENIZER.batch_decode(output[:, inputs["input_ids"].shape[1] :]), made.calls[0]
    assert page.complaints() == []


@full
@pytest.mark.parametrize("made_call", CALLS, indirect=True)
def test_browser_shows_the_text_and_asks_for_nothing(page, made_call):
    path, texts, call = made_call
    page.open(path, width=360 if len(texts) == 1 else 1200)
    assert page.count(".cycle") == sum(any(row.row == 0 for row in cycle.rows) for cycle in call.cycles)
    assert page.run("performance.getEntriesByType('resource').length") == 0
    assert page.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert page.text() == texts[0]
    for row, text in enumerate(texts[1:], 1):
        page.find(f"#row option[value='{row}']").click()
        assert page.text() == text


@full
def test_click_unfolds_a_tree_and_colours_follow_the_reader(page, made_call):
    path, _, call = made_call
    for dark in (False, True):
        page.open(path, dark=dark)
        for shown in (dark, not dark):
            assert page.run("document.documentElement.dataset.theme") == ("dark" if shown else "light")
            page.find("#theme").click()
    rows = [cycle.rows[0] for cycle in call.cycles]
    number = next(number for number, row in enumerate(rows) if len(set(row.parents)) < len(row.parents))
    page.find(f"#cycle-{number + 1}").click()
    # The anchor, the draft, and the target's own token.
    assert page.count("#tree .node") == len(rows[number].draft_tokens) + 2
    assert page.count("#tree .node.a") == rows[number].num_accepted
    page.find("#close").click()
    assert not page.find("#drawer").is_displayed()
    # A token unfolds the cycle that wrote it.
    page.find("#text .token:last-child").click()
    assert page.find("#drawer").is_displayed()


@full
def test_keyboard_alone_and_a_screen_reader_are_enough(page, made_call):
    path, _, call = made_call
    page.open(path)
    options = [name for role, name in page.spoken() if role == "option"]
    assert sum("accepted draft; probability" in name for name in options) == call.stats.num_accepted_tokens > 0
    assert sum(name.startswith("Cycle ") for name in options) == len(call.cycles)
    for _ in range(12):
        page.press("TAB")
        if page.run("document.activeElement.id") == "text":
            break
    below, last = 1 + len(call.cycles[0].rows[0].committed_tokens), call.stats.num_committed_tokens - 1
    for keys, place in ((["RIGHT", "RIGHT", "LEFT"], 1), (["DOWN"], below), (["END"], last), (["HOME"], 0)):
        page.press(*keys)
        active = page.run("document.getElementById('text').getAttribute('aria-activedescendant')")
        assert active == f"token-{place}"
    page.press("RIGHT", "ENTER")
    assert page.find("#drawer h2").text.startswith("Cycle 1 of")
    page.press("RIGHT")
    assert "probability" in page.run("document.activeElement.getAttribute('aria-label')")
    page.press("ESCAPE")
    assert not page.find("#drawer").is_displayed()
    assert page.run("document.activeElement.id") == "text"


@full
def test_browser_runs_nothing_of_hostile_texts(page, tmp_path):
    words = [*NASTY, "<img src=x onerror='window.broken = 1'>", "<svg onload='window.broken = 1'>"]
    everything, score = list(range(len(words))), TokenScore(0.5, 2, -1.0)
    row = RowTrace(0, everything, [-1] * len(words), 1, [0, 1], words[0], [score] * len(words), [], [score] * 2)
    call = drawn([row, RowTrace(0, everything, [-1] * len(words), 1, [7, 8], words[0])], everything, notes=words)
    call.model_name = words[0]
    call.to_html(tmp_path / "call.html", tokenizer=Words(words))
    page.open(tmp_path / "call.html")
    page.find("#cycle-1").click()
    page.hover("#token-2")
    assert page.run("[window.broken, document.scripts.length, document.images.length]") == [None, 2, 0]
    assert words[0] in page.text()
    assert page.complaints() == []
