from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from hf_specdec import __version__, cli, demo
from hf_specdec.bench import engine
from hf_specdec.cli.demo import _speedup_chart
from hf_specdec.cli.generate import _read_prompt
from hf_specdec.errors import SpecConfigError, SpecDecError
from hf_specdec.machine import suitable_dtype
from tests.helpers.pages import story_in


PROMPT = "def read_json(path):\n    with open(path) as file:\n"
SHORT_DEMO = ("demo", "--json", "--max-new-tokens", "6", "--rounds", "1", "--max-seconds", "1")


def invoke(*arguments, **options):
    return CliRunner().invoke(cli.app, list(map(str, arguments)), prog_name="hf-specdec", **options)


def generate_json(*arguments, **options):
    result = invoke("generate", "--json", "-n", "24", *arguments, **options)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def run_process(*arguments):
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.fixture(scope="module", autouse=True)
def few_prompts():
    """Two prompts of each kind for the demo."""
    prompts = [
        prompt
        for prompt in demo.prompts()
        if prompt.name in ("rename_argument", "remove_docstring", "class", "function")
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "prompts", lambda: prompts)
        yield


@pytest.fixture(scope="module")
def plain_tokens():
    model, tokenizer = demo.load_target(), demo.load_tokenizer()
    inputs = tokenizer(PROMPT, return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    return tokens[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.fixture(scope="module")
def short_demo():
    result = invoke(*SHORT_DEMO)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


# The program


def test_version():
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.stdout == f"hf-specdec {__version__}\n"


def test_runs_as_a_module():
    assert run_process("-m", "hf_specdec", "--version") == f"hf-specdec {__version__}\n"


@pytest.mark.parametrize("command", ["demo", "generate", "train"])
def test_help_does_not_wait_for_torch(command):
    code = "import sys, contextlib, hf_specdec.cli as cli\nwith contextlib.suppress(SystemExit): cli.main()"
    code += "\nprint(sorted({'torch', 'transformers', 'numpy'} & sys.modules.keys()))"
    assert run_process("-c", code, command, "--help").splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", [(), ("demo",), ("generate",), ("bench",)])
def test_help(command):
    result = invoke(*command, "--help")
    assert result.exit_code == 0
    assert "Usage: hf-specdec" in result.stdout


# demo


def test_demo_compares_every_method(short_demo):
    rows = {row["method"]: row for row in short_demo["rows"]}
    missing = {row["method"] for row in short_demo["unavailable"]}
    assert rows.keys() | missing == {"plain", "none", *demo.settings()}
    assert all(row["identical"] and row["first_differences"] == {} for row in rows.values())
    assert rows["plain"]["speedup"] == 1.0
    for method in rows.keys() - {"plain"}:
        row = rows[method]
        assert row["tokens_per_second"] > 0
        assert row["speedup"] == pytest.approx(row["tokens_per_second"] / rows["plain"]["tokens_per_second"])
        if method != "none":
            assert row["mean_acceptance_length"] > 1.0
            assert 0.0 < row["acceptance_rate"] <= 1.0
        assert row["kinds"].keys() == {"edit", "complete"}
        assert sum(kind["num_tokens"] for kind in row["kinds"].values()) == row["num_tokens"]


def test_demo_says_what_was_measured(short_demo):
    environment, settings = short_demo["environment"], short_demo["settings"]
    assert environment["hf_specdec"] == __version__
    assert environment["torch"] == torch.__version__
    assert environment["threads"] == 1
    assert environment["dtype"] == str(suitable_dtype(environment["device"])).removeprefix("torch.")
    assert environment["cpu"]
    assert settings["rounds"] == 1
    assert settings["prompts"] == {prompt.name: prompt.kind for prompt in demo.prompts()}
    assert short_demo["identity_check"]["dtype"] == "float32"


def test_demo_prints_a_table_that_fits_a_terminal():
    result = invoke("demo", "--methods", "ngram", "--max-new-tokens", 4, "--rounds", 1, "--dtype", "float32")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    row = next(line.split() for line in lines if line.strip().startswith("ngram"))
    assert row[-1] == "yes"
    assert any(line.strip().startswith("plain") for line in lines)
    assert not any(line.strip().startswith("suffix") for line in lines)
    assert "…" not in result.stdout
    assert "float32 for plain generation and all methods, timed in turn (1 round)" in " ".join(result.stdout.split())


def test_demo_in_batches_and_with_threads_of_its_own():
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        result = invoke(*SHORT_DEMO, "--methods", "ngram", "--batch-sizes", 3, "--threads", before)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["environment"]["threads"] == before
    assert report["rows"][1]["identical"]
    # Batches of both kinds are filled.
    assert report["rows"][1]["num_texts"] == 2 * 3
    assert report["settings"]["batch_size"] == 3


def test_demo_samples_and_still_compares_greedy_texts(monkeypatch):
    time_call, temperatures = engine.time_call, []

    def noted(model, batch, arguments, seed=0):
        temperatures.append(arguments["do_sample"] and arguments["temperature"])
        return time_call(model, batch, arguments, seed)

    monkeypatch.setattr(engine, "time_call", noted)
    result = invoke(*SHORT_DEMO, "--methods", "ngram", "--batch-sizes", "2,1", "--temperature", 0.8)
    assert result.exit_code == 0, result.stderr
    # Both kinds have two batches of one prompt and one of two, in all three ways; the warm-up has one of each size.
    assert temperatures == [False] * 18 + [0.8] * (6 + 18)
    report = json.loads(result.stdout)
    assert [(row["batch_size"], row["method"]) for row in report["rows"]] == [
        (size, method) for size in (1, 2) for method in ("plain", "none", "ngram")
    ]
    assert all(row["identical"] and row["first_differences"] == {} for row in report["rows"])
    # Nothing is said of sampled texts, which differ.
    assert not any("same_texts" in row for row in report["rows"])
    settings = report["settings"]
    assert settings["batch_sizes"] == settings["batch_size"] == [1, 2]
    assert (settings["decoding"], settings["seed"]) == ("sampled (temperature 0.8)", 0)
    assert len(report["identity_check"]["plain_tokens_per_second"]) == 2


def test_demo_prints_a_table_for_each_batch_size():
    short = ("--max-new-tokens", 4, "--rounds", 1)
    result = invoke("demo", "--methods", "ngram", "--batch-sizes", "1,2", "--stock", "--sample", *short)
    assert result.exit_code == 0, result.stderr
    first, second = result.stdout.split("Batch size 2\n")
    assert first.startswith("Batch size 1\n")
    for part in (first, second):
        lines = [line.split() for line in part.splitlines()]
        (measured,) = (line for line in lines if line[:1] == ["ngram"] and line[-1] == "yes")
        (bars,) = (line for line in lines if line[:1] == ["ngram"] and "|" in "".join(line))
        assert measured[2] == bars[-1]
        # One round has no range.
        assert not any("(" in cell for cell in measured)
    # The name of prompt lookup leaves no room for the kinds of prompts, which have a table of their own.
    assert "…" not in result.stdout
    text = " ".join(second.split())
    assert "new tokens, sampled;" in text
    assert "Sampled with seed 0 in the first round" in text
    assert "Texts that are the same" not in text
    assert "stock_prompt_lookup cannot run at batch size 2" in text


@pytest.mark.parametrize(("encoding", "bar"), [("utf-8", "━"), ("ascii", "-")])
def test_chart_marks_plain_generation(encoding, bar):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    speedups = {"plain": 1.0, "faster": 3.0, "slower": 0.5, "a_little": 1.5}
    chart = _speedup_chart([{"method": name, "speedup": speedup} for name, speedup in speedups.items()])
    Console(file=file, width=80).print(chart)
    file.seek(0)
    _, *lines = file.read().splitlines()
    bars = {line.split()[0]: [part.count(bar) for part in line.split("|")] for line in lines}
    assert bars == {"plain": [16, 0], "faster": [16, 32], "slower": [8, 0], "a_little": [16, 8]}
    assert [line.split()[-1] for line in lines] == ["1.00", "3.00", "0.50", "1.50"]


def test_demo_takes_the_heads_of_a_folder(tmp_path):
    for name, method in (("mine", "eagle3"), ("medusa", "eagle")):
        shutil.copytree(demo.drafter_path(method), tmp_path / name)
    (tmp_path / "logs").mkdir()
    result = invoke(*SHORT_DEMO, "--heads", tmp_path, "--methods", "mine,medusa,ngram")
    assert result.exit_code == 0, result.stderr
    found = {row["method"]: row["settings"] for row in json.loads(result.stdout)["rows"][2:]}
    assert list(found) == ["mine", "medusa", "ngram"]
    assert (found["mine"]["method"], found["mine"]["model"]) == ("eagle3", str(tmp_path / "mine"))
    # It takes the place of the demo's own.
    assert (found["medusa"]["method"], found["medusa"]["model"]) == ("eagle", str(tmp_path / "medusa"))


def test_demo_refuses_heads_before_the_first_forward(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "time_call", lambda *_: pytest.fail("a call was timed"))

    def refusal(folder):
        result = invoke(*SHORT_DEMO, "--heads", folder)
        assert result.exit_code == 2, result.stdout
        assert len(result.stderr.splitlines()) == 1
        return result.stderr

    assert "nowhere' is no folder." in refusal(tmp_path / "nowhere")
    assert "has no sub-folder with the config.json of a drafter" in refusal(tmp_path)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=100, **sizes)).save_pretrained(tmp_path / "small")
    assert f"'{tmp_path / 'small'}' cannot draft for the model." in refusal(tmp_path)


def test_demo_refuses_batch_sizes_below_one():
    result = invoke("demo", "--batch-sizes", "0,2")
    assert result.exit_code == 2
    assert "--batch-sizes must be numbers from 1" in result.stderr


def test_demo_fails_if_an_output_differs(monkeypatch):
    faithful = engine.time_call

    def time_call(model, batch, arguments, seed=0):
        call = faithful(model, batch, arguments, seed)
        if "assistant" in arguments and "class" in batch.names:
            call.tokens[0][3] += 1
        return call

    monkeypatch.setattr(engine, "time_call", time_call)
    result = invoke(*SHORT_DEMO, "--methods", "ngram")
    assert result.exit_code == 1
    rows = json.loads(result.stdout)["rows"]
    assert {row["method"]: row["identical"] for row in rows} == {"plain": True, "none": False, "ngram": False}
    assert rows[1]["first_differences"] == {"class": 3}
    assert "ngram differs from plain generation on 'class', from new token 4 on." in result.stderr


def test_demo_shows_methods_whose_package_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", None)
    result = invoke("demo", "--methods", "suffix", "--max-new-tokens", 4, "--rounds", 1, "--dtype", "float32")
    assert result.exit_code == 0, result.stderr
    row = next(line.split() for line in result.stdout.splitlines() if line.strip().startswith("suffix"))
    assert row[-1] == "unavailable"
    assert "pip install 'arctic-inference" in result.stdout


def test_demo_refuses_unknown_methods():
    result = invoke("demo", "--methods", "ngram,sufix")
    assert result.exit_code == 2
    assert "The demo has no method 'sufix'. Did you mean 'suffix'?" in result.stderr
    assert result.stdout == ""


# generate


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--method", "off"),
        ("--method", "ngram", "-k", 3),
        ("--method", "draft_model"),
        ("--spec-model", demo.drafter_path("draft_model")),
        ("--config", '{"method": "ngram", "prompt_lookup_max": 3}'),
        ("--model", demo.target_path(), "--dtype", "float32"),
    ],
    ids=str,
)
def test_generate_gives_the_tokens_of_plain_generation(options, plain_tokens):
    answer = generate_json(*options, PROMPT)
    assert answer["token_ids"] == plain_tokens
    assert answer["text"] == demo.load_tokenizer().decode(plain_tokens, skip_special_tokens=True)
    assert answer["stats"]["num_tokens"] == len(plain_tokens)


@pytest.mark.parametrize(
    ("options", "method"),
    [
        ((), "draft_model"),
        (("--model", demo.target_path()), "ngram"),
        (("--method", "off"), "off"),
        (("--config", "ngram"), "ngram"),
    ],
)
def test_generate_chooses_the_method(options, method):
    assert generate_json(*options, PROMPT)["stats"]["method"] == method


def test_generate_takes_the_settings(tmp_path):
    path = tmp_path / "speculation.json"
    path.write_text(
        json.dumps({"method": "draft_model", "model": demo.drafter_path("draft_model"), "num_speculative_tokens": 2})
    )
    stats = generate_json("--config", path, PROMPT)["stats"]
    assert stats["method"] == "draft_model"
    assert len(stats["num_accepted_tokens_per_pos"]) == 2
    assert len(generate_json("--config", path, "-k", 1, PROMPT)["stats"]["num_accepted_tokens_per_pos"]) == 1


def test_generate_streams_only_the_new_text(plain_tokens):
    result = invoke("generate", "-n", 24, PROMPT)
    assert result.stdout == demo.load_tokenizer().decode(plain_tokens, skip_special_tokens=True) + "\n"
    assert "draft_model: 24 tokens in" in result.stderr
    assert "mean acceptance length" in result.stderr


def test_generate_draws_the_call(tmp_path):
    path = tmp_path / "call.html"
    answer = generate_json("--html", path, "--method", "ngram", PROMPT)
    page = path.read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert [token[1] for step in story_in(page)["rows"][0]["steps"] for token in step["tokens"]] == answer["token_ids"]


def test_generate_without_statistics():
    result = invoke("generate", "-n", 4, "--no-stats", PROMPT)
    assert result.exit_code == 0
    assert result.stderr == ""


def test_generate_reads_a_file_and_standard_input(tmp_path, plain_tokens):
    path = tmp_path / "prompt.py"
    path.write_text(PROMPT, encoding="utf-8")
    assert generate_json("--file", path)["token_ids"] == plain_tokens
    assert generate_json(input=PROMPT)["token_ids"] == plain_tokens
    assert generate_json("-", input=PROMPT)["token_ids"] == plain_tokens


def test_generate_samples_by_the_seed(plain_tokens):
    def sampled(*options):
        options = ("--temperature", "1.5", "--top-k", 50, "--top-p", "0.95", "--method", "ngram", *options)
        return generate_json(*options, PROMPT)["token_ids"]

    one = sampled("--seed", 1)
    assert one != plain_tokens
    assert sampled("--seed", 1, "-k", 2) == one
    assert sampled("--seed", 2) != one


def test_generate_at_temperature_zero_is_greedy(plain_tokens):
    assert generate_json("--temperature", 0, PROMPT)["token_ids"] == plain_tokens


def test_generate_with_a_chat_template(tmp_path):
    tokenizer, text = demo.load_tokenizer(), "def main"
    tokenizer.chat_template = "# task: {{ messages[0]['content'] }}\n{% if add_generation_prompt %}import {% endif %}"
    demo.load_target().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    templated = generate_json("--model", tmp_path, text)
    in_template = generate_json("--model", tmp_path, "--raw", "# task: def main\nimport ")
    assert templated["token_ids"] == in_template["token_ids"]
    assert templated["token_ids"] != generate_json("--model", tmp_path, "--raw", text)["token_ids"]


def test_generate_samples_where_the_generation_config_does(tmp_path, plain_tokens):
    model = demo.load_target()
    model.generation_config.do_sample, model.generation_config.temperature = True, 1.5
    model.save_pretrained(tmp_path)
    demo.load_tokenizer().save_pretrained(tmp_path)
    sampled, again = (generate_json("--model", tmp_path, "--seed", 1, PROMPT)["token_ids"] for _ in range(2))
    assert sampled == again
    assert sampled != plain_tokens
    assert generate_json("--model", tmp_path, "--temperature", 0, PROMPT)["token_ids"] == plain_tokens


# Errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method", "ngramm", PROMPT), "Unknown spec_method='ngramm'. Did you mean 'ngram'?"),
        (("--method", "off", "-k", 3, PROMPT), "--spec-method off generates without drafts. Leave out --num-s"),
        (("--config", "{method: ngram}", PROMPT), "is not valid JSON"),
        (("--config", '{"method": "ngram", "max_ngram": 3}', PROMPT), "has no setting 'max_ngram'"),
        (("--file", "nowhere.py"), "The prompt in 'nowhere.py' cannot be read"),
        (("--file", "nowhere.py", PROMPT), "The prompt is given twice"),
        (("",), "The prompt is empty."),
        (("\udcff",), "The prompt is no text of UTF-8."),
        (("--html", "call.html", "--method", "off", PROMPT), "--html draws drafts, and --spec-method off makes none."),
        (("--html", "nowhere/call.html", PROMPT), "The page 'nowhere/call.html' cannot be written"),
        (("--temperature", 0, "--top-k", 5, PROMPT), "leaves nothing for top_k to choose from"),
        (
            ("--model", "./no-such-model", PROMPT),
            "The model './no-such-model' is neither a local folder nor the id of",
        ),
        (
            ("--model", "/nonexistent", PROMPT),
            "The model '/nonexistent' is neither a local folder nor the id of a rep",
        ),
        (("--device", "gpu", PROMPT), "--device 'gpu' is no device"),
    ],
)
def test_errors_are_one_line(arguments, message):
    result = invoke("generate", "--no-stats", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


def test_paths_that_cannot_be_written_are_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    result = invoke("export-custom-generate", "--method", "ngram", tmp_path / "file")
    assert result.exit_code == 2
    assert "Not a directory" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_debug_shows_the_traceback():
    result = invoke("generate", "--debug", "--method", "ngramm", PROMPT)
    assert isinstance(result.exception, SpecDecError)


def test_a_terminal_is_not_waited_for(monkeypatch):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    with pytest.raises(SpecConfigError, match="There is no prompt"):
        _read_prompt(None, None)


def test_usage_errors():
    result = invoke("generate", "--max-new-tokens", 0, PROMPT)
    assert result.exit_code == 2
    assert "--max-new-tokens" in result.stderr


@pytest.mark.skipif(os.name == "nt", reason="signals and pipes of POSIX")
@pytest.mark.parametrize("event", ["interrupt", "closed pipe"])
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
