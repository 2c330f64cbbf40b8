"""Targets whose weights are quantised, or loaded for each forward: methods write plain's texts, and no kernel takes
packed weights for numbers.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from hf_specdec import SpecConfigError, demo, generate_many, load_speculator, record
from hf_specdec.candidate_generators.dflash.recipe import DFlashRecipe
from hf_specdec.candidate_generators.medusa.recipe import MedusaRecipe
from hf_specdec.candidate_generators.mtp.network import new_mtp
from hf_specdec.checkpoints.files import RepoFiles
from hf_specdec.diagnosis.checks import network_findings
from hf_specdec.kernels import products
from hf_specdec.layers.draft_network import TargetParts, is_close, is_copy
from hf_specdec.target.lean import has_lean_forward
from hf_specdec.target_facts import is_packed, num_embeddings, numbers_of, quantisation
from hf_specdec.training.options import RESULT_FILE
from tests.helpers.levels import full, in_full, split
from tests.helpers.methods import demo_inputs, settings_of
from tests.helpers.models import prompts, tiny_llama


CALL = {"max_new_tokens": 12, "do_sample": False}
ROWS = ["eagle3 tree", "mtp", "ngram", "draft_model", "medusa static tree", "dflash"]


def loaded(folder, **settings) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **settings).eval()


def assert_same_text(target, settings: dict, inputs=None) -> None:
    """Weights that are widened for a product in float32 round no more than plain ones."""
    call = {**(inputs or demo_inputs(2)), **CALL}
    with record() as made:
        found = target.generate(**call, speculative=settings)
    assert torch.equal(found, target.generate(**call))
    assert made.calls[0].stats.num_accepted_tokens > 0


def in_blocks(folder, size: int = 64) -> None:
    """Stores the projections of a checkpoint in 8 bits, with a scale for each block, as DeepSeek publishes them."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "_proj.weight" in name]:
        weight = tensors[name]
        grid = [-(-length // size) for length in weight.shape]
        padded = weight.new_zeros([count * size for count in grid])
        padded[: len(weight), : weight.shape[1]] = weight
        scales = padded.view(grid[0], size, grid[1], size).abs().amax((1, 3)).clamp(min=1e-8) / 448
        whole = scales.repeat_interleave(size, 0).repeat_interleave(size, 1)[: len(weight), : weight.shape[1]]
        tensors[name], tensors[f"{name}_scale_inv"] = (weight / whole).to(torch.float8_e4m3fn), scales
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [size, size]}
    (folder / "config.json").write_text(json.dumps(config))


def fp8(path):
    demo.load_target().save_pretrained(path)
    in_blocks(path)
    return loaded(path)


def by_torchao(path, name: str, **settings):
    torchao = pytest.importorskip("torchao.quantization")
    demo.load_target().save_pretrained(path)
    config = getattr(torchao, name)(**settings)
    return loaded(path, quantization_config=transformers.TorchAoConfig(config))


def int4(path):
    groups = pytest.importorskip("torchao.quantization.granularity").PerGroup(32)
    return by_torchao(path, "IntxWeightOnlyConfig", weight_dtype=torch.int4, granularity=groups)


def everything(path):
    """Embedding and lm_head, too, by a user's own call."""
    torchao = pytest.importorskip("torchao.quantization")
    target, tables = demo.load_target(), (nn.Linear, nn.Embedding)
    torchao.quantize_(target, torchao.Int8WeightOnlyConfig(), lambda module, _: type(module) in tables)
    return target


# What makes a target, and what its weights are called then.
KINDS = {"fp8": (fp8, None), "int4": (int4, "torchao"), "everything": (everything, "torchao")}


@pytest.fixture(scope="module", params=["everything", *in_full("fp8", "int4")])
def quantised(request, tmp_path_factory):
    make, kind = KINDS[request.param]
    return make(tmp_path_factory.mktemp("made")), kind


@pytest.mark.parametrize("drafter", split(ROWS, short=["eagle3 tree"]))
def test_greedy_matches_generate(quantised, drafter):
    assert_same_text(quantised[0], settings_of(drafter))


def test_packed_weights_are_known_and_copied_as_numbers(quantised, monkeypatch):
    target, kind = quantised
    assert quantisation(target) == kind
    assert has_lean_forward(target) == (kind is None)
    holders = [module for module in target.modules() if any(map(is_packed, module.parameters(recurse=False)))]
    assert bool(holders) == (kind is not None)
    monkeypatch.setattr(products, "is_used", True)
    monkeypatch.setattr(products, "LEAST_BYTES", 0)
    assert not any(map(products.has_large_matrices, holders))
    # Networks that begin as the target.
    head = target.get_output_embeddings().weight
    heads = MedusaRecipe(num_heads=1, share_lm_head=False).build(target)
    torch.testing.assert_close(heads.lm_heads[0], numbers_of(head.detach()))
    assert is_close(heads.lm_heads.detach()[0], head)
    assert not is_packed(head) or not is_copy(heads.lm_heads.detach()[0], head)
    layer = target.model.layers[-1].mlp.up_proj.weight
    torch.testing.assert_close(new_mtp(target).layers[0].mlp.up_proj.weight, numbers_of(layer.detach()))


@full
@pytest.mark.parametrize("bits", [4, 8])
def test_bitsandbytes(bits, tmp_path):
    pytest.importorskip("bitsandbytes")
    tiny_llama(hidden_size=64, intermediate_size=128, initializer_range=0.3).save_pretrained(tmp_path)
    settings = {4: {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}, 8: {"load_in_8bit": True}}[bits]
    target = loaded(tmp_path, quantization_config=transformers.BitsAndBytesConfig(**settings))
    target.generation_config.pad_token_id = 0
    assert quantisation(target) == "bitsandbytes"
    draft = {"method": "draft_model", "model": str(tmp_path), "draft_vocabulary": "same"}
    for method in ({"method": "ngram"}, {"method": "recycling"}, draft):
        assert_same_text(target, method, prompts(3))


@pytest.mark.parametrize("kind", ["Embedding8bit", *in_full("EmbeddingNF4")])
def test_packed_rows_of_an_embedding(kind):
    """Bitsandbytes packs them into integers of another shape."""
    library = pytest.importorskip("bitsandbytes")
    target = demo.load_target()
    plain = target.get_input_embeddings()
    embedding = getattr(library.nn, kind)(*plain.weight.shape, dtype=torch.float32)
    embedding.load_state_dict({"weight": plain.weight.detach().clone()})
    embedding = embedding.to("cpu")
    target.set_input_embeddings(embedding)
    for drafter in ("draft_model", "eagle3 tree", "dflash", "mtp"):
        assert_same_text(target, settings_of(drafter))
    tokens = torch.tensor([[5, 4095]])
    assert not embedding.weight.is_floating_point()
    assert num_embeddings(embedding) == 4096
    assert torch.equal(TargetParts(target).bind_embedding()(tokens), embedding(tokens))
    with pytest.raises(SpecConfigError, match="from 0 to 4095, the tokens that the target's embedding has, got 4096"):
        DFlashRecipe(mask_token_id=4096).check(target)
    known, unknown = generate_many(target, [[5, 4095], [4096]], in_order=True, max_new_tokens=2)
    assert known.error is None
    assert "all from 0 to 4095" in str(unknown.error)


@full
def test_a_draft_model_that_was_published_quantised(tmp_path):
    shutil.copytree(settings_of("draft_model")["model"], tmp_path / "draft")
    in_blocks(tmp_path / "draft")
    assert_same_text(demo.load_target(), settings_of("draft_model", model=str(tmp_path / "draft")), demo_inputs(1))


@full
def test_the_doctor_knows_what_a_head_was_trained_on_and_distrusts_its_file(tmp_path):
    head, target = tmp_path / "head", by_torchao(tmp_path / "int8", "Int8WeightOnlyConfig")
    shutil.copytree(settings_of("eagle3")["model"], head)
    hostile = {"target_quantization": "\x1b[2J" + 999 * "x"}
    for content, status in (({"target_quantization": "torchao"}, "ok"), ([1], "warning"), (hostile, "warning")):
        (head / RESULT_FILE).write_text(json.dumps(content))
        findings = network_findings(load_speculator(target, "eagle3", model=str(head)), target, RepoFiles(str(head)))
        (found,) = (one for one in findings if one.check == "dtype" and "computes in" not in one.found)
        assert (found.status, found.found.isprintable()) == (status, True)
        assert len(found.found) < 600


@pytest.mark.parametrize("places", ["both", *in_full("cpu", "disk")])
def test_offloaded_weights(places, tmp_path):
    """Weights that are loaded for each forward, from memory, a disk, or by turns."""
    accelerate, target = pytest.importorskip("accelerate"), demo.load_target()
    if places == "cpu":
        target = accelerate.cpu_offload(target, execution_device=torch.device("cpu"))
    elif places == "disk":
        target = accelerate.disk_offload(target, str(tmp_path), execution_device=torch.device("cpu"))
    else:
        where = {
            f"model.layers.{index}": ("cpu", "disk")[index % 2] for index in range(target.config.num_hidden_layers)
        }
        where |= dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
        settings = {"main_device": "cpu", "offload_dir": str(tmp_path), "force_hooks": True}
        target = accelerate.dispatch_model(target, where, **settings)
    for drafter in ("recycling", "eagle") if places == "both" else ROWS[::2]:
        assert_same_text(target, settings_of(drafter))
    assert any(weight.is_meta for weight in target.parameters())
