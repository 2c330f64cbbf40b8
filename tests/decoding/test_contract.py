"""A transformers that lacks what decoding relies on is told by name before anything is decoded."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from transformers import masking_utils
from transformers.generation import GenerationMixin

import hf_specdec
from hf_specdec import MissingDependencyError
from hf_specdec.decoding import contract


ROOT = Path(__file__).parents[2]
PACKAGE = Path(hf_specdec.__file__).parent

FIRST_CALL = """
import hf_specdec, torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation import GenerationMixin
sizes = dict(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(**sizes))
del GenerationMixin._prefill
for attempt in range(2):
    try:
        model.generate(torch.ones((1, 4), dtype=torch.long), spec_method="ngram", max_new_tokens=2)
    except hf_specdec.MissingDependencyError as error:
        print(error)
"""


def test_the_first_call_names_what_is_missing():
    made = subprocess.run([sys.executable, "-c", FIRST_CALL], capture_output=True, text=True, timeout=120, check=True)
    # It is no better the second time.
    first, second = made.stdout.splitlines()
    assert first == second
    assert first.startswith(
        f"transformers {transformers.__version__} does not have what hf_specdec relies on: "
        "transformers.generation.utils.GenerationMixin._prefill. Versions 5.17 to 5.23 do: "
    )


def test_all_that_is_missing_is_named(monkeypatch):
    def other(self, ids, config, kwargs):
        pass

    monkeypatch.setattr(GenerationMixin, "_prefill", other)
    monkeypatch.delattr(masking_utils, "sdpa_mask")
    monkeypatch.setitem(contract._HOOKS, "transformers.no_such_module", {"anything": ()})
    monkeypatch.setattr(contract, "_OF_CONFIGS", ("_no_such_attribute",))
    with pytest.raises(MissingDependencyError) as raised:
        contract.check_transformers()
    for name in (
        "GenerationMixin._prefill(input_ids=), transformers",
        "GenerationMixin._prefill(model_kwargs=)",
        "transformers.masking_utils.sdpa_mask",
        "transformers.no_such_module",
        "PreTrainedConfig._no_such_attribute",
    ):
        assert name in str(raised.value)


def names_of_transformers() -> set[str]:
    """What the loop and the rules of acceptance import from submodules of transformers."""
    found = set()
    for path in (*PACKAGE.glob("decoding/*.py"), *PACKAGE.glob("logits/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers."):
                found |= {item.name for item in node.names}
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "hf":
                found.add(node.attr)
    return found - {"logging", "logits_process"}


def test_the_contract_is_complete():
    known = {name.partition(".")[0] for names in contract._HOOKS.values() for name in names}
    assert names_of_transformers() <= known


def test_its_versions_are_those_of_the_tests():
    assert f'"transformers>={contract.OLDEST},' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f"transformers=={contract.OLDEST}." in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    pinned = re.search(
        r"^transformers==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert pinned[1] == contract.NEWEST
