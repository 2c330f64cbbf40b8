"""Exported `custom_generate` repositories generate what plain generation does, also in a fresh interpreter."""

import json
import subprocess
import sys

import pytest
import torch
from huggingface_hub import ModelCard
from transformers.dynamic_module_utils import get_imports

from hf_specdec import SpecConfigError, SpeculativeConfig, demo, load_speculator, record
from hf_specdec.hub.custom_generate import export_custom_generate
from tests.helpers.levels import full
from tests.helpers.models import prompts


SETTINGS = {"do_sample": False, "max_new_tokens": 16}

# The script of a user who has the package installed, and does not know it.
SCRIPT = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

arguments = json.loads(sys.argv[1])
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(arguments["target"])
tokenizer = AutoTokenizer.from_pretrained(arguments["target"])
inputs = tokenizer("def read_json(path):\\n", return_tensors="pt")
settings = {"do_sample": False, "max_new_tokens": 16}
plain = model.generate(**inputs, **settings)
assert "hf_specdec" not in sys.modules
found = []
for repo, call in arguments["calls"]:
    settings |= {"custom_generate": repo, "trust_remote_code": True, "return_dict_in_generate": True}
    output = model.generate(**inputs, **settings, **call)
    stats = output.speculative
    found.append((torch.equal(output.sequences, plain), stats.method, stats.num_draft_tokens > 0))
print(json.dumps(found))
"""


@full
def test_in_a_fresh_process(hub, tmp_path):
    """Calls from a folder, and by name with the drafter beside it."""
    repo = tmp_path / "speculation"
    export_custom_generate(repo, SpeculativeConfig(method="ngram", num_speculative_tokens=4))
    settings = {"model": demo.drafter_path("eagle3"), "num_speculative_tokens": 3}
    folder = load_speculator(demo.load_target(), settings).save_pretrained(tmp_path / "head")
    export_custom_generate(folder, name="user/head")
    hub.add("user/head", folder)
    calls = [(str(repo), {}), (str(repo), {"spec_model": demo.drafter_path("medusa")})]
    calls += [("user/head", {"num_speculative_tokens": 1})]
    command = [sys.executable, "-c", SCRIPT, json.dumps({"target": demo.target_path(), "calls": calls})]
    done = subprocess.run(command, env=hub.environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == [[True, method, True] for method in ("ngram", "medusa", "eagle3")]


@pytest.fixture
def repo(tmp_path):
    export_custom_generate(tmp_path / "speculation", SpeculativeConfig(method="ngram"))
    return str(tmp_path / "speculation")


def methods_of(model, inputs, repo, **arguments):
    """The methods of a call's speculation, which must have the tokens of plain generation."""
    plain = {key: value for key, value in arguments.items() if key not in ("speculative", "spec_method")}
    with record() as made:
        custom = {"custom_generate": str(repo), "trust_remote_code": True}
        output = model.generate(**inputs, **{**SETTINGS, **arguments}, **custom)
    assert torch.equal(output, model.generate(**inputs, **{**SETTINGS, **plain}))
    return [call.stats.method for call in made.calls]


def test_with_the_package_imported(model, repo, tmp_path):
    inputs = prompts(2)
    suffix = ({"spec_method": "suffix"}, ["suffix"]), ({"speculative": "suffix"}, ["suffix"])
    for speculation, methods in (({}, ["ngram"]), *suffix, ({"spec_method": "off"}, [])):
        assert methods_of(model, inputs, repo, **speculation) == methods
    # Without settings a drafter is found.
    export_custom_generate(tmp_path)
    assert methods_of(model, inputs, tmp_path) in (["suffix+recycling"], ["ngram+recycling"])


def test_stop_strings_and_processors(repo):
    target, tokenizer = demo.load_target(), demo.load_tokenizer()
    inputs = tokenizer("def read_json(path):\n", return_tensors="pt")
    settings = {"max_new_tokens": 40, "stop_strings": ["\n"], "tokenizer": tokenizer, "repetition_penalty": 1.1}
    assert methods_of(target, inputs, repo, **settings) == ["ngram"]


def test_it_needs_trust_and_others_do_not_get_our_arguments(model, repo, tmp_path):
    with pytest.raises(ValueError, match="trust_remote_code"):
        model.generate(**prompts(1), **SETTINGS, custom_generate=repo, trust_remote_code=False)
    other = tmp_path / "other" / "custom_generate"
    other.mkdir(parents=True)
    (other / "generate.py").write_text("def generate(model, input_ids, **kwargs):\n    return input_ids\n")
    custom = {"custom_generate": str(other.parent), "trust_remote_code": True}
    with pytest.raises(SpecConfigError, match="custom_generate.*replaces the decoding loop"):
        model.generate(**prompts(1), **SETTINGS, **custom, spec_method="ngram")
    assert model.generate(**prompts(1), **SETTINGS, **custom).shape == (1, 7)


@full
def test_drafter_and_card(tmp_path):
    folder = load_speculator(demo.load_target(), model=demo.drafter_path("medusa")).save_pretrained(tmp_path / "head")
    with pytest.raises(SpecConfigError, match="Name the repo id"):
        export_custom_generate(folder)
    with pytest.raises(SpecConfigError, match="cannot load the drafter from the folder"):
        export_custom_generate(tmp_path / "new", SpeculativeConfig(model=str(folder)))
    with pytest.raises(SpecConfigError, match="cannot be the id"):
        export_custom_generate(tmp_path / "new", name='x" + y')
    for _ in range(2):
        export_custom_generate(folder, name="user/head")
        card = ModelCard.load(folder / "README.md")
        assert {"medusa", "custom_generate"} <= set(card.data.tags)
        assert card.text.count("## With `custom_generate`") == 1
    settings = "SETTINGS = {'method': 'medusa', 'model': 'user/head'}"
    file = folder / "custom_generate" / "generate.py"
    assert settings in file.read_text()
    # Of these transformers would say that pip installs them by their names.
    assert get_imports(file) == []
