"""`hf-specdec batch` in one process: a file of requests to a file of results. `test_integrations.py` has two ranks."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hf_specdec import cli
from hf_specdec.many.files import Output
from tests.helpers.levels import full


LENGTH = 10
REQUESTS = [
    "def read(path):",
    {"prompt": "import os\nimport ", "max_new_tokens": 5, "id": "second"},
    {"input_ids": [264, 329, 632]},
    {"text": "class Reader:\n", "do_sample": True, "id": 4},
    "for line in file:\n    for line in ",
]


@pytest.fixture
def files(tmp_path) -> tuple[Path, Path]:
    return written(tmp_path / "in.jsonl", REQUESTS), tmp_path / "out.jsonl"


def written(path: Path, requests: list) -> Path:
    path.write_text("\n".join(map(json.dumps, requests)) + "\n")
    return path


def options(source: Path, target: Path) -> list[str]:
    places = ("-b", "2", "--max-tokens-in-flight", "4000")
    return ["batch", "demo", str(source), "-o", str(target), "-n", str(LENGTH), *places, "-d", "ngram", "-k", "4"]


def invoke(source: Path, target: Path, *more: str, code: int = 0):
    result = CliRunner().invoke(cli.app, [*options(source, target), *more])
    assert result.exit_code == code, result.output
    return result


def entries(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def tokens_of(path: Path) -> list[list[int]]:
    return [entry["tokens"] for entry in entries(path)]


def test_every_line_is_answered(files, target, demo_tokenizer):
    result = invoke(*files, "--json")
    found = entries(files[1])
    assert [entry["index"] for entry in found] == list(range(5))
    assert [entry.get("id") for entry in found] == [None, "second", None, 4, None]
    for request, entry in zip(REQUESTS, found):
        settings = request if isinstance(request, dict) else {"text": request}
        if settings.get("do_sample"):
            continue
        text, length = settings.get("text", settings.get("prompt")), settings.get("max_new_tokens", LENGTH)
        ids = settings.get("input_ids") or demo_tokenizer(text)["input_ids"]
        plain = target.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=length)[0, len(ids) :].tolist()
        assert (entry["tokens"], entry["num_prompt_tokens"], entry["error"]) == (plain, len(ids), None)
        assert entry["text"] == demo_tokenizer.decode(plain, skip_special_tokens=True)
    report = json.loads(result.stdout)
    assert (report["num_requests"], report["num_failed"]) == (5, 0)
    assert report["num_tokens"] == sum(len(entry["tokens"]) for entry in found)
    assert report["num_accepted_tokens"] == sum(entry["stats"]["num_accepted_tokens"] for entry in found) > 0
    # Nothing but the results is left.
    assert sorted(path.name for path in files[1].parent.iterdir()) == ["in.jsonl", "out.jsonl"]
    assert "results in" in invoke(*files, code=2).stderr


def test_what_has_failed_is_tried_again(files):
    source, target = files
    written(source, [*REQUESTS[:2], {"prompt": "x", "nonsense": 3}, {"prompt": "x", "stop_strings": 3}])
    assert "2 requests failed" in invoke(source, target, code=1).stderr
    found = entries(target)
    assert [entry["finish_reason"] for entry in found] == ["length", "length", "error", "error"]
    assert "nonsense" in found[2]["error"]
    written(source, [*REQUESTS[:2], {"prompt": "x"}, {"prompt": "y"}])
    invoke(source, target)
    assert tokens_of(target)[:2] == [entry["tokens"] for entry in found[:2]]
    assert all(entry["error"] is None for entry in entries(target))
    # Fewer requests than before.
    target.unlink()
    written(source, [REQUESTS[0], {"prompt": "x", "nonsense": 3}, REQUESTS[2]])
    invoke(source, target, code=1)
    written(source, REQUESTS[:1])
    report = json.loads(invoke(source, target, "--json").stdout)
    assert len(entries(target)) == report["num_requests"] == 1
    assert (report["num_failed"], report["num_tokens"]) == (0, len(tokens_of(target)[0]))


def test_files_that_are_no_requests_and_places_that_hold_no_file(files):
    source, target = files
    for content, message in (
        ('"one"\n\n3\n', "Line 3 of .* is no request but 3"),
        ("\n", "There is no request"),
        ("[" * 100_000, "Line 1 of .* nested too deeply"),
        ('{"prompt": "a", "temperature": NaN}', "Line 1 of .* is no JSON"),
    ):
        source.write_text(content)
        assert re.search(message, " ".join(invoke(*files, code=2).stderr.split()))
    assert not target.exists()
    for place in (source, target.with_name("out.jsonl.part-0")):
        for make in (Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
            place.unlink(missing_ok=True)
            make(place)
            assert place.name in invoke(source, target, code=2).stderr.replace("\n", "")
            place.rmdir() if place.is_dir() else place.unlink()
        written(source, REQUESTS[:1])
    # Nothing is written through a link.
    others = written(target.with_name("others"), ["mine"])
    target.with_name("out.jsonl.unfinished").symlink_to(others)
    invoke(source, target)
    assert entries(others) == ["mine"]
    assert (len(entries(target)), target.is_symlink()) == (1, False)


@full
def test_names_and_texts_that_are_odd(files):
    source, target = files
    # A name that is a pattern, and halves of characters.
    source.write_text('{"prompt": "def", "id": "\\ud800"}\n{"prompt": "\\ud800"}\n')
    assert CliRunner().invoke(cli.app, options(source, target.with_name("out[1].jsonl"))).exit_code in (0, 1)
    first = entries(target.with_name("out[1].jsonl"))[0]
    assert (first["id"], first["error"]) == ("\ud800", None)


def share_of(rank: int, size: int, files, monkeypatch, names=("RANK", "WORLD_SIZE")) -> None:
    """One of several processes, which is stopped before the merge."""
    with monkeypatch.context() as patch:
        patch.setenv(names[0], str(rank))
        patch.setenv(names[1], str(size))
        patch.setattr("hf_specdec.many.files.Processes.wait", lambda self: None)
        CliRunner().invoke(cli.app, options(*files))


def test_a_result_replaces_the_failure_of_another_process(files, monkeypatch):
    source, target = files
    written(source, [*REQUESTS[:3], {"prompt": "x", "nonsense": 3}])
    share_of(1, 2, files, monkeypatch)
    written(source, REQUESTS[:4])
    share_of(3, 4, files, monkeypatch)
    assert [path.name for path in Output(target).parts] == ["out.jsonl.part-1", "out.jsonl.part-3"]
    invoke(source, target)
    assert [entry["error"] for entry in entries(target)] == [None] * 4


def test_a_run_of_several_processes_goes_on_in_one(files, monkeypatch):
    source, target = files
    share_of(1, 3, files, monkeypatch)
    share_of(2, 3, files, monkeypatch, ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))
    assert not target.exists()
    parts = {part.name: len(entries(part)) for part in Output(target).parts}
    assert parts == {"out.jsonl.part-1": 2, "out.jsonl.part-2": 1}
    invoke(source, target)
    assert [entry["index"] for entry in entries(target)] == list(range(5))
    alone = target.with_name("alone.jsonl")
    invoke(source, alone)
    assert tokens_of(alone) == tokens_of(target)
