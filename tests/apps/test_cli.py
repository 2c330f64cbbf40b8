"""The commands `demo` and `generate`: texts of plain generation, settings that reach them, errors of one line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from hf_specdec import __version__, cli, demo
from hf_specdec.bench import engine
from hf_specdec.errors import SpecDecError
from tests.helpers.levels import full, in_full
from tests.helpers.pages import story_in


PROMPT = "def read_json(path):\n    with open(path) as file:\n"
SHORT_DEMO = ("demo", "--json", "--max-new-tokens", "6", "--rounds", "1", "--max-seconds", "1")
DRAFT = demo.drafter_path("draft_model")


def invoke(*arguments, code=0, **options):
    result = CliRunner().invoke(cli.app, list(map(str, arguments)), prog_name="hf-specdec", **options)
    assert result.exit_code == code, result.output
    return result


def generate_json(*arguments, **options):
    return json.loads(invoke("generate", "--json", "-n", "24", *arguments, **options).stdout)


def run_process(*arguments):
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout


@pytest.fixture(scope="module", autouse=True)
def few_prompts():
    """Two prompts of each kind for the demo."""
    names = ("rename_argument", "remove_docstring", "class", "function")
    prompts = [prompt for prompt in demo.prompts() if prompt.name in names]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "prompts", lambda: prompts)
        yield


@pytest.fixture(scope="module")
def plain_tokens(target, demo_tokenizer):
    inputs = demo_tokenizer(PROMPT, return_tensors="pt")
    return target.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :].tolist()


def test_version_and_help():
    assert invoke("--version").stdout == f"hf-specdec {__version__}\n"
    for command in ((), ("demo",), ("generate",), ("bench",)):
        assert "Usage: hf-specdec" in invoke(*command, "--help").stdout


@full
def test_help_does_not_wait_for_torch():
    assert run_process("-m", "hf_specdec", "--version") == f"hf-specdec {__version__}\n"
    code = "import sys, contextlib, hf_specdec.cli as cli\nwith contextlib.suppress(SystemExit): cli.main()"
    code += "\nprint(sorted({'torch', 'transformers', 'numpy'} & sys.modules.keys()))"
    for command in ("demo", "generate", "train"):
        assert run_process("-c", code, command, "--help").splitlines()[-1] == "[]"


def test_demo_compares_every_method():
    report = json.loads(invoke(*SHORT_DEMO).stdout)
    rows = {row["method"]: row for row in report["rows"]}
    missing = {row["method"] for row in report["unavailable"]}
    assert rows.keys() | missing == {"plain", "none", *demo.settings()}
    assert all(row["identical"] and row["first_differences"] == {} for row in rows.values())
    for method, row in rows.items():
        assert row["tokens_per_second"] > 0
        assert row["speedup"] == pytest.approx(row["tokens_per_second"] / rows["plain"]["tokens_per_second"])
        assert method in ("plain", "none") or row["mean_acceptance_length"] > 1.0
        assert sum(kind["num_tokens"] for kind in row["kinds"].values()) == row["num_tokens"]
    assert report["environment"]["hf_specdec"] == __version__
    assert report["environment"]["threads"] == torch.get_num_threads()
    assert report["settings"]["prompts"] == {prompt.name: prompt.kind for prompt in demo.prompts()}


def test_demo_fails_if_an_output_differs(monkeypatch):
    faithful = engine.time_call

    def time_call(model, batch, arguments, seed=0):
        call = faithful(model, batch, arguments, seed)
        if "assistant" in arguments and "class" in batch.names:
            call.tokens[0][3] += 1
        return call

    monkeypatch.setattr(engine, "time_call", time_call)
    result = invoke(*SHORT_DEMO, "--methods", "ngram", code=1)
    rows = json.loads(result.stdout)["rows"]
    assert {row["method"]: row["identical"] for row in rows} == {"plain": True, "none": False, "ngram": False}
    assert rows[1]["first_differences"] == {"class": 3}
    assert "ngram differs from plain generation on 'class', from new token 4 on." in result.stderr


@pytest.mark.parametrize(
    ("options", "method"),
    [
        ((), "draft_model"),
        (("--model", demo.target_path(), "--dtype", "float32"), "ngram"),
        *in_full(
            (("--method", "off"), "off"),
            (("--method", "ngram", "-k", 3), "ngram"),
            (("--spec-model", DRAFT), "draft_model"),
            (("--config", '{"method": "ngram", "prompt_lookup_max": 3}'), "ngram"),
            (("--temperature", 0), "draft_model"),
        ),
    ],
    ids=["demo", "model", "off", "method", "spec_model", "config", "temperature_0"],
)
def test_generate_gives_the_tokens_of_plain_generation(options, method, plain_tokens, demo_tokenizer):
    answer = generate_json(*options, PROMPT)
    assert answer["token_ids"] == plain_tokens
    assert answer["text"] == demo_tokenizer.decode(plain_tokens, skip_special_tokens=True)
    assert (answer["stats"]["num_tokens"], answer["stats"]["method"]) == (len(plain_tokens), method)


def test_generate_streams_only_the_new_text(plain_tokens, demo_tokenizer):
    result = invoke("generate", "-n", 24, PROMPT)
    assert result.stdout == demo_tokenizer.decode(plain_tokens, skip_special_tokens=True) + "\n"
    assert "draft_model: 24 tokens in" in result.stderr
    assert "mean acceptance length" in result.stderr
    assert invoke("generate", "-n", 4, "--no-stats", PROMPT).stderr == ""


@full
def test_demo_in_batches_with_heads_of_a_folder_and_a_package_missing(tmp_path, monkeypatch):
    shutil.copytree(demo.drafter_path("eagle3"), tmp_path / "mine")
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", None)
    options = ("--heads", tmp_path, "--methods", "mine,suffix", "--batch-sizes", "1,2", "--stock", "--sample")
    result = invoke("demo", *options, "--max-new-tokens", 4, "--rounds", 1, "--dtype", "float32")
    first, second = result.stdout.split("Batch size 2\n")
    for part in (first, second):
        lines = [line.split() for line in part.splitlines()]
        assert ["mine", "yes"] in [[*line[:1], *line[-1:]] for line in lines]
        assert ["suffix", "unavailable"] in [[*line[:1], *line[-1:]] for line in lines]
    assert "…" not in result.stdout
    assert "pip install 'arctic-inference" in second
    (tmp_path / "logs").mkdir()
    error = invoke(*SHORT_DEMO, "--heads", tmp_path / "logs", code=2).stderr
    assert "has no sub-folder with the config.json of a drafter" in error


@full
def test_generate_takes_settings_prompts_and_pages_from_files(tmp_path, plain_tokens):
    path = tmp_path / "speculation.json"
    path.write_text(json.dumps({"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 2}))
    for options, length in (((), 2), (("-k", 1), 1)):
        stats = generate_json("--config", path, *options, PROMPT)["stats"]
        assert (stats["method"], len(stats["num_accepted_tokens_per_pos"])) == ("draft_model", length)
    path.write_text(PROMPT, encoding="utf-8")
    assert generate_json("--file", path)["token_ids"] == plain_tokens
    assert generate_json(input=PROMPT)["token_ids"] == plain_tokens
    answer = generate_json("--html", path, "--method", "ngram", "-", input=PROMPT)
    page = path.read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert [token[1] for step in story_in(page)["rows"][0]["steps"] for token in step["tokens"]] == answer["token_ids"]


@full
def test_generate_with_the_target_s_own_settings(tmp_path, plain_tokens):
    model, tokenizer = demo.load_target(), demo.load_tokenizer()
    model.generation_config.do_sample, model.generation_config.temperature = True, 1.5
    model.save_pretrained(tmp_path)
    tokenizer.chat_template = "# task: {{ messages[0]['content'] }}\n{% if add_generation_prompt %}import {% endif %}"
    tokenizer.save_pretrained(tmp_path)

    def tokens(*options):
        return generate_json("--model", tmp_path, *options)["token_ids"]

    one = tokens("--raw", "--seed", 1, PROMPT)
    assert one == tokens("--raw", "--seed", 1, "--method", "ngram", "-k", 2, PROMPT) != plain_tokens
    assert one != tokens("--raw", "--seed", 2, PROMPT)
    assert tokens("--raw", "--temperature", 0, PROMPT) == plain_tokens
    templated = tokens("--temperature", 0, "def main")
    assert templated == tokens("--raw", "--temperature", 0, "# task: def main\nimport ")


def test_errors_are_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    for arguments, message in (
        (("--method", "ngramm", PROMPT), "Unknown spec_method='ngramm'. Did you mean 'ngram'?"),
        (("--method", "off", "-k", 3, PROMPT), "--spec-method off generates without drafts. Leave out --num-s"),
        (("--config", "{method: ngram}", PROMPT), "is not valid JSON"),
        (("--config", '{"method": "ngram", "max_ngram": 3}', PROMPT), "has no setting 'max_ngram'"),
        (("--file", "nowhere.py", PROMPT), "The prompt is given twice"),
        (("",), "The prompt is empty."),
        (("\udcff",), "The prompt is no text of UTF-8."),
        (("--html", "nowhere/call.html", PROMPT), "The page 'nowhere/call.html' cannot be written"),
        (("--temperature", 0, "--top-k", 5, PROMPT), "leaves nothing for top_k to choose from"),
        (("--model", "./no-such-model", PROMPT), "The model './no-such-model' is neither a local folder nor the"),
        (("--device", "gpu", PROMPT), "--device 'gpu' is no device"),
    ):
        result = invoke("generate", "--no-stats", *arguments, code=2)
        assert message in result.stderr
        assert (len(result.stderr.splitlines()), result.stdout) == (1, "")
    assert "Not a directory" in invoke("export-custom-generate", "--method", "ngram", tmp_path / "file", code=2).stderr
    assert "no method 'sufix'. Did you mean 'suffix'?" in invoke("demo", "--methods", "sufix", code=2).stderr
    result = CliRunner().invoke(cli.app, ["generate", "--debug", "--method", "ngramm", PROMPT])
    assert isinstance(result.exception, SpecDecError)


@pytest.mark.skipif(os.name == "nt", reason="signals and pipes of POSIX")
@pytest.mark.parametrize("event", in_full("interrupt", "closed pipe"))
def test_ends_quietly(event):
    code = "from hf_specdec import cli\nwrite = cli.common.reporting(lambda: [*map(print, range(10**9))])\n"
    real = ["-m", "hf_specdec", "generate", "-n", "2000", "--method", "off", "--no-stats", PROMPT]
    # A command that only writes, or the one that streams what a model writes.
    arguments = ["-c", code + "cli.app.command('write')(write)\ncli.main()", "write"] if event == "interrupt" else real
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # A shell's background job ignores interrupts, and so would its children.
    process = subprocess.Popen(
        [sys.executable, *arguments], **pipes, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    )
    assert process.stdout.read(1)
    if event == "interrupt":
        process.send_signal(signal.SIGINT)
        process.stdout.read()
    process.stdout.close()
    errors = process.stderr.read().decode()
    assert process.wait(timeout=60) == {"interrupt": 130, "closed pipe": 141}[event]
    assert "Traceback" not in errors
    process.stderr.close()
