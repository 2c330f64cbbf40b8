"""Exported `custom_generate` repositories run in a fresh interpreter that has not imported the package."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.dynamic_module_utils import get_imports

from hf_specdec import SpecConfigError, SpeculativeConfig, __version__, demo, load_speculator, record
from hf_specdec.hub.custom_generate import export_custom_generate
from tests.helpers.models import prompts, tiny_llama


SETTINGS = {"do_sample": False, "max_new_tokens": 16}

# The script of a user who has the package installed, and does not know it.
SCRIPT = """
import json, sys
import torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

arguments = json.loads(sys.argv[1])
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(arguments["target"])
tokenizer = AutoTokenizer.from_pretrained(arguments["target"])
inputs = tokenizer(arguments["prompt"], return_tensors="pt")
settings = {"do_sample": False, "max_new_tokens": 16}
plain = model.generate(**inputs, **settings)
assert "hf_specdec" not in sys.modules
found = []
for repo, call in arguments["calls"]:
    streamed = []
    methods = {"put": lambda _, tokens: streamed.extend(tokens.flatten().tolist()), "end": lambda _: None}
    streamer = type("Streamer", (), methods)()
    output = model.generate(
        **inputs, **settings, custom_generate=repo, trust_remote_code=True,
        return_dict_in_generate=True, streamer=streamer, **call,
    )
    stats = output.speculative
    found.append({
        "equal": torch.equal(output.sequences, plain),
        "streamed": streamed == plain[0].tolist(),
        "method": stats.method,
        "drafted": stats.num_draft_tokens,
        "forwards": stats.num_target_forwards,
    })
print(json.dumps(found))
"""


def test_in_a_fresh_process(hub, tmp_path):
    """Calls from a folder, and by name with the drafter beside it."""
    repo = tmp_path / "speculation"
    files = export_custom_generate(repo, SpeculativeConfig(method="ngram", num_speculative_tokens=4))
    assert [str(file.relative_to(repo)) for file in files] == [
        "custom_generate/generate.py",
        "README.md",
    ]
    settings = {"model": demo.drafter_path("eagle3"), "num_speculative_tokens": 3}
    folder = load_speculator(demo.load_target(), settings).save_pretrained(tmp_path / "head")
    export_custom_generate(folder, name="user/head")
    hub.add("user/head", folder)
    calls = [
        (str(repo), {}),
        (str(repo), {"spec_method": "ngram", "num_speculative_tokens": 2}),
        (str(repo), {"spec_model": demo.drafter_path("medusa")}),
        ("user/head", {}),
        ("user/head", {"num_speculative_tokens": 1}),
    ]
    arguments = {"target": demo.target_path(), "prompt": "def read_json(path):\n", "calls": calls}
    command = [sys.executable, "-c", SCRIPT, json.dumps(arguments)]
    done = subprocess.run(command, env=hub.environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for call in found:
        assert call["equal"]
        assert call["streamed"]
        assert call["drafted"] > 0
    assert [call["method"] for call in found] == ["ngram", "ngram", "medusa", "eagle3", "eagle3"]
    assert found[3]["forwards"] < 16
    assert found[3]["forwards"] < found[4]["forwards"]


@pytest.fixture
def ngram_repo(tmp_path):
    export_custom_generate(tmp_path / "speculation", SpeculativeConfig(method="ngram"))
    return str(tmp_path / "speculation")


def calls_of(run):
    with record() as made:
        output = run()
    return output, [call.stats.method for call in made.calls]


def test_with_the_package_imported(model, ngram_repo):
    inputs = prompts(2)
    plain = model.generate(**inputs, **SETTINGS)
    custom = {"custom_generate": ngram_repo, "trust_remote_code": True}
    for speculation, method in (
        ({}, "ngram"),
        ({"spec_method": "suffix"}, "suffix"),
        ({"speculative": "ngram"}, "ngram"),
    ):
        output, methods = calls_of(lambda given=speculation: model.generate(**inputs, **SETTINGS, **custom, **given))
        assert torch.equal(output, plain)
        assert methods == [method]
    output, methods = calls_of(lambda: model.generate(**inputs, **SETTINGS, **custom, spec_method="off"))
    assert torch.equal(output, plain)
    assert methods == []


def test_without_settings_a_drafter_is_found(model, tmp_path):
    export_custom_generate(tmp_path)
    custom = {"custom_generate": str(tmp_path), "trust_remote_code": True}
    output, methods = calls_of(lambda: model.generate(**prompts(2), **SETTINGS, **custom))
    assert torch.equal(output, model.generate(**prompts(2), **SETTINGS))
    assert methods in (["suffix+recycling"], ["ngram+recycling"])


def test_no_custom_generate_is_none(model):
    output, methods = calls_of(
        lambda: model.generate(**prompts(2), **SETTINGS, custom_generate=None, spec_method="ngram")
    )
    assert methods == ["ngram"]
    assert torch.equal(output, model.generate(**prompts(2), **SETTINGS))


def test_what_transformers_itself_hands_over(model, ngram_repo):
    """Stop strings, criteria, processors and positional inputs."""
    tokenizer = AutoTokenizer.from_pretrained(demo.target_path())
    target = demo.load_target()
    inputs = tokenizer("def read_json(path):\n", return_tensors="pt")
    settings = {"do_sample": False, "max_new_tokens": 40, "stop_strings": ["\n"], "tokenizer": tokenizer}
    settings["repetition_penalty"] = 1.1
    plain = target.generate(**inputs, **settings)
    custom = {"custom_generate": ngram_repo, "trust_remote_code": True}
    output, methods = calls_of(lambda: target.generate(**inputs, **settings, **custom))
    assert torch.equal(output, plain)
    assert methods == ["ngram"]
    output, _ = calls_of(lambda: target.generate(inputs["input_ids"], **settings, **custom))
    assert torch.equal(output, plain)


def test_a_target_s_repository_may_have_it(ngram_repo, tmp_path):
    """transformers then takes its function for generate() of the loaded model, if remote code is trusted."""
    tiny_llama().save_pretrained(ngram_repo)
    model = AutoModelForCausalLM.from_pretrained(ngram_repo, trust_remote_code=True)
    inputs = prompts(1)
    output, methods = calls_of(lambda: model.generate(inputs["input_ids"], **SETTINGS))
    assert methods == ["ngram"]
    assert torch.equal(output, tiny_llama().generate(inputs["input_ids"], **SETTINGS))


def test_it_needs_trust(model, ngram_repo):
    with pytest.raises(ValueError, match="trust_remote_code"):
        model.generate(**prompts(1), **SETTINGS, custom_generate=ngram_repo, trust_remote_code=False)
    with pytest.raises(SpecConfigError, match="custom_generate"):
        model.generate(**prompts(1), **SETTINGS, custom_generate=ngram_repo, spec_method="ngram")


def test_functions_of_others_do_not_get_our_arguments(model, tmp_path):
    other = tmp_path / "other" / "custom_generate"
    other.mkdir(parents=True)
    (other / "generate.py").write_text("def generate(model, input_ids, **kwargs):\n    return input_ids\n")
    custom = {"custom_generate": str(other.parent), "trust_remote_code": True}
    with pytest.raises(SpecConfigError, match="custom_generate.*replaces the decoding loop"):
        model.generate(**prompts(1), **SETTINGS, **custom, spec_method="ngram")
    assert model.generate(**prompts(1), **SETTINGS, **custom).shape == (1, 7)


def test_without_the_package_a_call_says_how_to_install_it(ngram_repo, monkeypatch):
    file = Path(ngram_repo, "custom_generate", "generate.py")
    # Of these transformers would say that pip installs them by their names.
    assert get_imports(file) == []
    monkeypatch.setitem(sys.modules, "hf_specdec", None)
    with pytest.raises(ImportError, match=f"hf_specdec {__version__} or newer: `pip install PATH`"):
        runpy.run_path(str(file))


def settings_in(folder):
    scope = {}
    lines = (folder / "custom_generate" / "generate.py").read_text().splitlines()
    exec(next(line for line in lines if line.startswith("SETTINGS")), scope)
    return scope["SETTINGS"]


def test_settings_of_the_export(tmp_path):
    for index, (config, settings) in enumerate(
        (
            (None, {"method": "auto"}),
            (SpeculativeConfig(method="ngram"), {"method": "ngram"}),
            (
                SpeculativeConfig(model="user/head", device="cpu", token="hf_x", num_speculative_tokens=2),
                {"model": "user/head", "num_speculative_tokens": 2},
            ),
        )
    ):
        export_custom_generate(tmp_path / str(index), config)
        assert settings_in(tmp_path / str(index)) == settings
    SpeculativeConfig(method="suffix", suffix_decoding_max_tree_depth=9).save_pretrained(tmp_path / "saved")
    export_custom_generate(tmp_path / "saved")
    assert settings_in(tmp_path / "saved") == {"method": "suffix", "suffix_decoding_max_tree_depth": 9}


def test_drafters_that_others_could_not_load(tmp_path):
    folder = load_speculator(demo.load_target(), model=demo.drafter_path("medusa")).save_pretrained(tmp_path / "head")
    with pytest.raises(SpecConfigError, match="Name the repo id"):
        export_custom_generate(folder)
    with pytest.raises(SpecConfigError, match="cannot load the drafter from the folder"):
        export_custom_generate(tmp_path / "new", SpeculativeConfig(model=str(folder)))
    with pytest.raises(SpecConfigError, match="cannot be the id"):
        export_custom_generate(tmp_path / "new", name='x" + y')
    assert not (tmp_path / "new").exists()
    export_custom_generate(folder, name="user/head")
    assert settings_in(folder) == {"method": "medusa", "model": "user/head"}


def test_the_card(tmp_path):
    export_custom_generate(tmp_path / "new", name="user/new")
    card = ModelCard.load(tmp_path / "new" / "README.md")
    assert card.data.tags == ["custom_generate", "speculative-decoding"]
    assert 'custom_generate="user/new", trust_remote_code=True' in card.text
    folder = load_speculator(demo.load_target(), model=demo.drafter_path("medusa")).save_pretrained(tmp_path / "head")
    before = ModelCard.load(folder / "README.md")
    for _ in range(2):
        export_custom_generate(folder, name="user/head")
        card = ModelCard.load(folder / "README.md")
        assert card.data.speculative == before.data.speculative
        assert {*before.data.tags, "custom_generate"} == set(card.data.tags)
        assert card.text.count("## With `custom_generate`") == 1
        assert before.text.strip() in card.text
