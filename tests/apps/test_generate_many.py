"""`hf-specdec generate-many`: a file of requests to a file of results, in one process and in several."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hf_specdec import SpecConfigError, cli, demo
from hf_specdec.many.files import Output
from tests.helpers.encoder_decoders import text_model
from tests.helpers.models import letter_tokenizer
from tests.helpers.paths import ROOT
from tests.loop.test_many import UNREADABLE


DRAFTING = ("--spec-method", "ngram", "-k", "4")
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
    """A file of requests, and a place for the results."""
    return written(tmp_path / "in.jsonl", REQUESTS), tmp_path / "out.jsonl"


def written(path: Path, requests: list) -> Path:
    path.write_text("\n".join(map(json.dumps, requests)) + "\n")
    return path


def options(source: Path, target: Path) -> list[str]:
    return ["generate-many", "-i", str(source), "-o", str(target), "-n", str(LENGTH), "-b", "2", *DRAFTING]


def invoke(source: Path, target: Path, *more: str):
    return CliRunner().invoke(cli.app, [*options(source, target), *more])


def entries(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    # With --cpu accelerate starts one process, or asks MPI for more.
    "accelerate launch": [
        *("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
        *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
    ],
}


def launch(launcher: str, source: Path, target: Path) -> dict:
    """Report of a run by two processes of this launcher."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", *LAUNCHERS[launcher], "-m", "hf_specdec", *options(source, target), "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_every_line_is_answered(files):
    result = invoke(*files, "--json")
    assert result.exit_code == 0, result.stderr
    found = entries(files[1])
    assert [entry["index"] for entry in found] == list(range(5))
    assert [entry.get("id") for entry in found] == [None, "second", None, 4, None]
    model, tokenizer = demo.load_target(), demo.load_tokenizer()
    for request, entry in zip(REQUESTS, found):
        if isinstance(request, dict) and request.get("do_sample"):
            continue
        settings = request if isinstance(request, dict) else {"text": request}
        text = settings.get("text", settings.get("prompt"))
        ids = settings.get("input_ids") or tokenizer(text)["input_ids"]
        length = settings.get("max_new_tokens", LENGTH)
        plain = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=length)[0, len(ids) :].tolist()
        assert entry["tokens"] == plain
        assert entry["num_prompt_tokens"] == len(ids)
        assert entry["text"] == tokenizer.decode(plain, skip_special_tokens=True)
        assert entry["error"] is None
    report = json.loads(result.stdout)
    assert report["num_requests"] == 5
    assert report["num_failed"] == 0
    assert report["num_tokens"] == sum(len(entry["tokens"]) for entry in found)
    assert report["num_accepted_tokens"] == sum(entry["stats"]["num_accepted_tokens"] for entry in found) > 0
    # Nothing but the results is left.
    assert sorted(path.name for path in files[1].parent.iterdir()) == ["in.jsonl", "out.jsonl"]
    again = invoke(*files)
    assert again.exit_code == 2
    assert "results in" in again.stderr


def test_what_has_failed_is_tried_again(files):
    source, target = files
    written(source, [*REQUESTS[:2], {"prompt": "x", "nonsense": 3}, {"prompt": "x", "stop_strings": 3}])
    result = invoke(source, target)
    assert result.exit_code == 1
    assert "2 requests failed" in result.stderr
    found = entries(target)
    assert [entry["finish_reason"] for entry in found] == ["length", "length", "error", "error"]
    assert "nonsense" in found[2]["error"]
    written(source, [*REQUESTS[:2], {"prompt": "x"}, {"prompt": "y"}])
    assert invoke(source, target).exit_code == 0
    assert [entry["tokens"] for entry in entries(target)[:2]] == [entry["tokens"] for entry in found[:2]]
    assert all(entry["error"] is None for entry in entries(target))


def test_fewer_requests_than_before(files):
    source, target = files
    written(source, [REQUESTS[0], {"prompt": "x", "nonsense": 3}, REQUESTS[2]])
    assert invoke(source, target).exit_code == 1
    written(source, REQUESTS[:1])
    report = json.loads(invoke(source, target, "--json").stdout)
    assert len(entries(target)) == report["num_requests"] == 1
    assert report["num_failed"] == 0
    assert report["num_tokens"] == len(entries(target)[0]["tokens"])


def test_names_that_are_patterns(files):
    target = files[1].with_name("out[1].jsonl")
    assert invoke(files[0], target).exit_code == 0
    assert len(entries(target)) == len(REQUESTS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('"one"\n{"prompt": \n', "Line 2 of .* is no JSON"),
        ('"one"\n\n3\n', "Line 3 of .* is no request but 3"),
        ("\n", "There is no request"),
        ("[" * 100_000, "Line 1 of .* nested too deeply"),
        ('{"prompt": "a", "temperature": NaN}', "Line 1 of .* is no JSON"),
    ],
)
def test_files_that_are_no_requests(files, content, message):
    files[0].write_text(content)
    result = invoke(*files)
    assert result.exit_code == 2
    assert re.search(message, " ".join(result.stderr.split()))
    assert not files[1].exists()


@pytest.mark.parametrize("name", ["folder", "link to itself", "device", "pipe"])
@pytest.mark.parametrize("what", ["in.jsonl", "out.jsonl.part-0"])
def test_files_that_are_none(tmp_path, what, name):
    source, target = written(tmp_path / "in.jsonl", REQUESTS[:1]), tmp_path / "out.jsonl"
    (tmp_path / what).unlink(missing_ok=True)
    UNREADABLE[name](tmp_path / what)
    result = invoke(source, target)
    assert result.exit_code == 2
    assert what in result.stderr.replace("\n", "")
    assert not target.exists()


def test_names_that_are_too_long(files):
    source, target = files
    for length in (300, 250):
        result = invoke(source, target.with_name("x" * length))
        assert result.exit_code == 2
        assert "another" in result.stderr


def test_halves_of_characters(files):
    source, target = files
    source.write_text('{"prompt": "def", "id": "\\ud800"}\n{"prompt": "\\ud800"}\n')
    assert invoke(source, target).exit_code in (0, 1)
    found = entries(target)
    assert found[0]["id"] == "\ud800"
    assert found[0]["error"] is None


def test_nothing_is_written_through_a_link(files):
    source, target = files
    others = written(target.with_name("others"), ["mine"])
    target.with_name("out.jsonl.unfinished").symlink_to(others)
    assert invoke(source, target).exit_code == 0
    assert entries(others) == ["mine"]
    assert len(entries(target)) == len(REQUESTS)
    assert not target.is_symlink()


def test_a_journal_that_is_gone(files):
    source, target = files
    with pytest.raises(SpecConfigError, match=r"request 0: .* was removed"):
        Output(target).merge([None])
    assert not target.exists()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_processes_share_the_requests(files, launcher):
    source, target = files
    report = launch(launcher, source, target)
    assert report["num_processes"] == 2
    assert report["num_accepted_tokens"] > 0
    alone = target.with_name("alone.jsonl")
    assert invoke(source, alone).exit_code == 0
    # Sampled texts, too, whose random numbers are named after the request.
    assert [entry["tokens"] for entry in entries(target)] == [entry["tokens"] for entry in entries(alone)]
    assert [entry.get("id") for entry in entries(target)] == [entry.get("id") for entry in entries(alone)]


def test_a_run_of_several_processes_goes_on_in_one(files, monkeypatch):
    source, target = files
    # The shares of two of three processes, which were stopped before the merge.
    for rank, names in ((1, ("RANK", "WORLD_SIZE")), (2, ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))):
        with monkeypatch.context() as patch:
            patch.setenv(names[0], str(rank))
            patch.setenv(names[1], "3")
            patch.setattr("hf_specdec.many.files.Processes.wait", lambda self: None)
            assert invoke(source, target).exit_code == 0
    assert not target.exists()
    parts = {part.name: len(entries(part)) for part in Output(target).parts}
    assert parts == {"out.jsonl.part-1": 2, "out.jsonl.part-2": 1}
    result = invoke(source, target)
    assert result.exit_code == 0
    assert [entry["index"] for entry in entries(target)] == list(range(5))
    alone = target.with_name("alone.jsonl")
    assert invoke(source, alone).exit_code == 0
    assert [entry["tokens"] for entry in entries(alone)] == [entry["tokens"] for entry in entries(target)]


def test_sources_of_an_encoder(files, tmp_path):
    """Requests to a translator, say; other commands say that they take none."""
    source, target = files
    folder, tokenizer = tmp_path / "t5", letter_tokenizer()
    model, _ = text_model("t5", vocab_size=len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    begun = {"input_ids": [5, 6, 7], "decoder_input_ids": [1, 9, 8], "max_new_tokens": 3, "id": "begun"}
    written(source, ["abcdef", {"prompt": "xyz", "max_new_tokens": 5}, begun])
    result = invoke(source, target, "--model", str(folder))
    assert result.exit_code == 0, result.stderr
    found = entries(target)
    calls = [(tokenizer("abcdef")["input_ids"], LENGTH, [1]), (tokenizer("xyz")["input_ids"], 5, [1])]
    for entry, (ids, length, begin) in zip(found, [*calls, ([5, 6, 7], 3, [1, 9, 8])], strict=True):
        call = {"decoder_input_ids": torch.tensor([begin]), "max_new_tokens": length, "do_sample": False}
        assert entry["tokens"] == model.generate(torch.tensor([ids]), **call)[0, len(begin) :].tolist()
        assert entry["num_prompt_tokens"] == len(ids)
    refused = CliRunner().invoke(cli.app, ["generate", "--model", str(folder), "abc"])
    assert refused.exit_code == 2
    assert "it has an encoder, and of the commands only generate-many" in " ".join(refused.stderr.split())
