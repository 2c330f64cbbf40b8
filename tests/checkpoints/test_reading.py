"""Files and JSON that a user names: no pipe, device or flood is read, and no number or key is taken for another."""

import os

import pytest

from hf_specdec import SpecConfigError, SpeculativeConfig
from hf_specdec.reading import MAX_SETTINGS_BYTES, parse_json, read_text


@pytest.fixture(params=["text", "link", "empty"])
def readable(request, tmp_path):
    file = tmp_path / "a.json"
    file.write_text("" if request.param == "empty" else "ä\n", encoding="utf-8")
    if request.param != "link":
        return file
    (tmp_path / "link.json").symlink_to(file)
    return tmp_path / "link.json"


def test_regular_files_are_read(readable):
    assert read_text(readable) == readable.read_text(encoding="utf-8")
    assert read_text(str(readable)) == read_text(readable)


@pytest.fixture(params=["pipe", "device", "folder", "large", "bytes", "missing"])
def unreadable(request, tmp_path):
    path = tmp_path / "a.json"
    if request.param == "pipe":
        if not hasattr(os, "mkfifo"):
            pytest.skip("the system has no named pipes")
        os.mkfifo(path)
    elif request.param == "device":
        path.symlink_to("/dev/zero")
    elif request.param == "folder":
        path.mkdir()
    elif request.param == "large":
        path.write_bytes(b" " * (MAX_SETTINGS_BYTES + 1))
    elif request.param == "bytes":
        path.write_bytes(b"\xff\xfe")
    return path


def test_other_files_are_errors(unreadable):
    with pytest.raises((ValueError, OSError)):
        read_text(unreadable)
    for value in (str(unreadable), unreadable):
        with pytest.raises(SpecConfigError, match=r"a\.json.*cannot be read"):
            SpeculativeConfig.resolve(value)


def test_a_limit_is_of_bytes(tmp_path):
    file = tmp_path / "a"
    file.write_text("ää", encoding="utf-8")
    assert read_text(file, max_bytes=4) == "ää"
    with pytest.raises(ValueError, match="more than 3 bytes"):
        read_text(file, max_bytes=3)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"method": "ngram", "method": "suffix"}', "'method' stands twice"),
        ('{"method": "ngram", "options": {"prompt_lookup_max": 3, "prompt_lookup_max": 4}}', "stands twice"),
        ('{"method": "ngram", "num_speculative_tokens": ' + "9" * 5000 + "}", "digits"),
        ('{"method": ' + "[" * 10**5, "nested too deeply"),
        ('{"a":' * 10**5, "nested too deeply"),
        ('{"method": "typical", "posterior_alpha": NaN}', "NaN is no number"),
        ('{"method": "typical", "posterior_alpha": -Infinity}', "Infinity is no number"),
        ('{"' + "k" * 10**5 + '": 1, "' + "k" * 10**5 + '": 2}', "stands twice"),
        ("{'method': 'ngram'}", "double quotes"),
    ],
    ids=range(9),
)
def test_json_that_says_nothing_clear_is_an_error(tmp_path, text, why):
    with pytest.raises(ValueError):  # noqa: PT011 - the words are looked at below
        parse_json(text)
    (tmp_path / "settings.json").write_text(text)
    for value in (text, tmp_path / "settings.json"):
        with pytest.raises(SpecConfigError, match=why) as caught:
            SpeculativeConfig.resolve(value)
        assert len(str(caught.value)) < 700
