"""Texts that grow: however their tokens arrive, the same text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specdec import demo
from hf_specdec.serving.text import GrowingText


TOKENIZER = demo.load_tokenizer()
TEXTS = st.text("abc \n()é漢🙂", max_size=30)


def read(tokens: list[int], ends: list[int], stop: list[str]) -> tuple[str, bool]:
    """The text and whether it has stopped, of tokens that arrive up to these places."""
    text, said = GrowingText(TOKENIZER, stop), ""
    for end in [*ends, len(tokens)]:
        said += text.add(tokens[:end], end == len(tokens))
        if text.has_stopped or end == len(tokens):
            break
    return said, text.has_stopped


@settings(deadline=None, max_examples=200)
@given(text=TEXTS, stop=st.lists(st.text("abc \n(é🙂", min_size=1, max_size=4), max_size=3), data=st.data())
def test_parts_are_the_whole(text, stop, data):
    tokens = TOKENIZER(text)["input_ids"]
    ends = sorted(data.draw(st.sets(st.integers(1, max(len(tokens), 1)))))
    # The end and the beginning of each: the text ends with the one that is complete first.
    places = [(text.find(one) + len(one), text.find(one)) for one in stop if one in text]
    expected = text[: min(places)[1]] if places else text
    assert read(tokens, ends, stop) == (expected, bool(places))


def test_text_is_held_back_while_it_may_stop():
    tokens = [TOKENIZER(part)["input_ids"] for part in ("one two", " th", "ree", " four")]
    text, said, so_far = GrowingText(TOKENIZER, [" three five", "four"]), [], []
    for part in tokens:
        so_far = so_far + part
        said.append(text.add(so_far, False))
    assert "".join(said) == "one two three "
    assert said[0] == "one two"
    assert said[1] == ""
    assert text.has_stopped
