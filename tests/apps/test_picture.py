"""The page of a call: what it says, whatever a model has written, and what it refuses."""

import json
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specdec import SpecConfigError, SpecDecodingStats, demo, record
from hf_specdec.metrics import CallRecord, CallTrace, CycleTiming, CycleTrace, RowTrace
from hf_specdec.metrics.picture.pieces import Pieces
from tests.helpers.models import prompts
from tests.helpers.pages import Page, story_in


TOKENIZER = demo.load_tokenizer()


class Words:
    """A tokenizer whose tokens are any texts.

    Args:
        words (`list[str]`): The text of each token.
    """

    def __init__(self, words):
        self.words = words

    def decode(self, tokens, **_):
        return "".join(self.words[token] for token in tokens)


def drawn(rows, prompt=(0,), first=0, method="ngram", **stats):
    """A call of one prompt whose cycles have these rows."""
    cycles = [CycleTrace(list(row) if isinstance(row, tuple) else [row]) for row in rows]
    trace = CallTrace([list(prompt)], CycleTrace([RowTrace(0, [], [], 0, [first])]), cycles)
    timings = [CycleTiming(0.003, 0.001, 0.002, len(cycle.rows[0].committed_tokens)) for cycle in cycles]
    return CallRecord(SpecDecodingStats(method, **stats), "user/model", trace, timings)


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


@pytest.mark.parametrize("method", ["ngram", "eagle3", "ngram+eagle3"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_page_tells_the_text(method, batch_size):
    target = demo.load_target()
    texts = [prompt.text[-300:] for prompt in demo.prompts()[:batch_size]]
    inputs = TOKENIZER(texts, return_tensors="pt", padding=True, padding_side="left")
    drafter = {"model": demo.drafter_path("eagle3")} if "eagle3" in method else {}
    with record(trace=True, tokenizer=TOKENIZER) as made:
        output = target.generate(
            **inputs, max_new_tokens=24, do_sample=False, speculative={"method": method, **drafter}
        )
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


@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=12), st.lists(st.integers(0, len(TOKENIZER) - 1)))
@settings(max_examples=150)
def test_pieces_of_any_tokens_make_the_whole_text(before, tokens):
    """Also of tokens that are parts of characters, or of none."""
    pieces = Pieces(TOKENIZER).of_row([*before, *tokens])
    assert "".join(pieces) == TOKENIZER.decode([*before, *tokens])
    assert Pieces(TOKENIZER).of_row(tokens, before) == pieces[len(before) :]


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=40))
@settings(max_examples=100)
def test_pieces_of_any_text(text):
    tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert "".join(Pieces(TOKENIZER).of_row(tokens)) == TOKENIZER.decode(tokens)


def test_half_a_character():
    """The token that completes a character has all of it, and a draft that stops before says so."""
    tokens = TOKENIZER("x\u20acy", add_special_tokens=False)["input_ids"]
    assert len(tokens) > 3
    assert Pieces(TOKENIZER).of_row(tokens) == ["x", *[""] * (len(tokens) - 3), "\u20ac", "y"]
    assert Pieces(TOKENIZER).of_row(tokens[:2]) == ["x", "\ufffd"]
    parents = list(range(-1, len(tokens) - 2))
    assert "\ufffd" in Pieces(TOKENIZER).of_draft(tokens[1:], parents, tokens[:1])[0]


NASTY = [
    "</script><script>alert(1)</script>",
    "<!--",
    "<script",
    "]]>",
    "&lt;img src=x onerror=alert(1)>",
    '"><img src=x>',
    "\u2028\u2029\u202e\u0000\ud800",
]


@given(st.lists(st.one_of(st.sampled_from(NASTY), st.text(alphabet=st.characters(exclude_categories=()))), min_size=1))
def test_no_text_breaks_out(words):
    """Whatever a model writes stays data: the page has the elements of any other page."""
    everything = list(range(len(words)))
    rows = [RowTrace(0, everything, [-1] * len(words), 0, everything[:1], words[0])]
    call = drawn(rows, prompt=everything, method=words[0], notes=words)
    call.model_name = words[0]
    html = call.to_html(tokenizer=Words(words))
    assert html.isascii()
    page, usual = Page(html), Page(drawn([RowTrace(0, [], [], 0, [0])]).to_html(tokenizer=Words(["word"])))
    assert page.tags == usual.tags
    assert [(attributes, "" if attributes else text) for attributes, text in page.scripts] == [
        (attributes, "" if attributes else text) for attributes, text in usual.scripts
    ]
    # A pair of surrogates in two texts is still two.
    assert [node[0] for node in story_in(html)["rows"][0]["steps"][1]["nodes"]] == words


def test_page_is_one_file_that_asks_for_nothing():
    html = drawn([RowTrace(0, [1], [-1], 1, [1, 2])]).to_html(tokenizer=Words(list("abc")))
    assert not Page(html).links
    assert "default-src 'none'" in html
    assert "http" not in html.replace('http-equiv="Content-Security-Policy"', "")
    assert "url(" not in html
    assert "@import" not in html


def test_figures_that_are_no_numbers():
    row = RowTrace(0, [1], [-1], 0, [2], "ngram", [(float("nan"), 3, float("-inf"))], [], [(1.0, 1, float("inf"))])
    row.draft_scores = [Score(*score) for score in row.draft_scores]
    row.committed_scores = [Score(*score) for score in row.committed_scores]
    step = story_in(drawn([row]).to_html())["rows"][0]["steps"][1]
    assert step["nodes"] == [[" 1", 1, -1, None, 3, None, None]]
    assert step["tokens"] == [[" 2", 2, "corrected", 1.0, 1, None]]


class Score:
    def __init__(self, prob, rank, margin):
        self.prob, self.rank, self.margin = prob, rank, margin


def test_folders_are_shown_by_their_names():
    call = drawn([])
    call.model_name = "/home/somebody/models/mine"
    assert story_in(call.to_html())["model"] == "mine"
    call.model_name = "user/model"
    assert story_in(call.to_html())["model"] == "user/model"


def test_call_that_failed_in_the_middle(model):
    """Tokens without scores, and a cycle without its time."""

    def fail(input_ids, scores):
        if input_ids.shape[1] > 12:
            raise ZeroDivisionError
        return scores

    with record(trace=True) as made, pytest.raises(ZeroDivisionError):
        model.generate(**prompts(1), do_sample=False, max_new_tokens=20, spec_method="ngram", logits_processor=[fail])
    story = story_in(made.calls[0].to_html())
    assert tokens_of(story)
    assert all(token[3:] == [None, None, None] for token in tokens_of(story))


class TestErrors:
    def call(self, model, **settings):
        with record(**settings) as made:
            model.generate(**prompts(1), do_sample=False, max_new_tokens=4, spec_method="ngram")
        return made.calls[0]

    @pytest.mark.parametrize("settings", [{}, {"timings": True}])
    def test_without_a_trace(self, model, settings):
        call = self.call(model, **settings)
        with pytest.raises(SpecConfigError, match=r"Record it inside `with hf_specdec.record\(trace=True\) as r:`"):
            call.to_html()
        assert call._repr_html_() is None

    def test_before_the_first_token(self):
        call = CallRecord(SpecDecodingStats("ngram"), "model", CallTrace())
        with pytest.raises(SpecConfigError, match="ended before its first token"):
            call.to_html()
        assert call._repr_html_() is None

    @pytest.mark.parametrize("tokenizer", ["gpt2", 3])
    def test_no_tokenizer(self, model, tokenizer):
        with pytest.raises(SpecConfigError, match="`tokenizer` must be a tokenizer of transformers"):
            self.call(model, trace=True).to_html(tokenizer=tokenizer)

    def test_no_folder(self, model, tmp_path):
        with pytest.raises(OSError, match="nowhere"):
            self.call(model, trace=True).to_html(tmp_path / "nowhere" / "call.html")


def test_written_page_is_the_returned_one(model, tokenizer, tmp_path):
    with record(trace=True) as made:
        model.generate(**prompts(1), do_sample=False, max_new_tokens=4, spec_method="ngram")
    path = tmp_path / "call.html"
    html = made.calls[0].to_html(path, tokenizer=tokenizer)
    assert path.read_bytes() == html.encode()
    assert made.calls[0].to_html(str(path)) != html


def test_in_a_notebook():
    """The page lies in a frame, where its script sees nothing of the notebook."""
    call = drawn([RowTrace(0, [1], [-1], 1, [1, 2])])
    call.tokenizer = Words(['"', "<b>", "'"])
    shown = Page(call._repr_html_())
    assert shown.tags == ["iframe"]
    (source,) = re.findall(r'srcdoc="([^"]*)"', call._repr_html_())
    assert "&lt;!DOCTYPE html&gt;" in source


def test_batch_rows_and_idle_rows(model):
    inputs = prompts(3)
    text = model.generate(**inputs, do_sample=False, max_new_tokens=12)
    eos = int(text[1, inputs["input_ids"].shape[1] + 3])
    with record(trace=True) as made:
        model.generate(**inputs, do_sample=False, max_new_tokens=12, spec_method="ngram", eos_token_id=eos)
    story = json.loads(json.dumps(story_in(made.calls[0].to_html())))
    lengths = [len(tokens_of(story, row)) for row in range(3)]
    assert lengths[1] == 4
    assert sum(lengths) == made.calls[0].stats.num_committed_tokens


def test_metrics_stay_light():
    """Pages are written without torch."""
    code = "import sys, hf_specdec.metrics.picture; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
