"""Targets with quantised weights: methods write plain's texts, and no kernel takes packed weights for numbers."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from hf_specdec import SpecConfigError, SpeculativeConfig, demo, generate_many, load_speculator, record
from hf_specdec.candidate_generators.dflash.recipe import DFlashRecipe
from hf_specdec.candidate_generators.medusa.recipe import MedusaRecipe
from hf_specdec.candidate_generators.mtp.network import new_mtp
from hf_specdec.checkpoints.files import RepoFiles
from hf_specdec.decoding.functional import has_lean_forward
from hf_specdec.diagnosis.checks import network_findings
from hf_specdec.kernels.products import _matrices
from hf_specdec.layers.draft_network import TargetParts, is_close, is_copy
from hf_specdec.target_facts import is_packed, num_embeddings, numbers_of, quantisation
from hf_specdec.training.options import RESULT_FILE
from hf_specdec.training.reading import TargetReader
from tests.helpers.methods import demo_inputs, settings_of
from tests.helpers.models import prompts, tiny_llama


NEW = 12
CALL = {"max_new_tokens": NEW, "do_sample": False}
ROWS = ["ngram", "draft_model", "medusa static tree", "eagle3 tree", "dflash", "mtp"]


def loaded(folder, **settings) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **settings).eval()


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


def packed(numbers: torch.Tensor, dim: int, order: tuple[int, ...]) -> torch.Tensor:
    """Eight numbers of four bits in each int32 along a dimension, in this order from the lowest bits."""
    parts = numbers.long().unflatten(dim, (-1, 8)).movedim(dim + 1, -1)[..., list(order)]
    words = (parts << 4 * torch.arange(8)).sum(-1)
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32).contiguous()


# How the two formats order numbers in a word, the dimension along which words of weights are made, and what is taken
# from the zero points.
FOUR_BITS = {"gptq": (tuple(range(8)), 0, 1), "awq": ((0, 2, 4, 6, 1, 3, 5, 7), 1, 0)}


def in_four_bits(folder, kind: str, group: int = 32) -> None:
    """Stores the projections of a checkpoint in four bits, rounded to the nearest, as GPTQ or AWQ publish them."""
    order, dim, offset = FOUR_BITS[kind]
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "_proj.weight" in name]:
        weight, part = tensors.pop(name), name.removesuffix("weight")
        groups = weight.unflatten(1, (-1, group))
        scales = (groups.abs().amax(-1) / 7).half()
        numbers = (groups / scales.float()[..., None]).round().clamp(-8, 7).view_as(weight) + 8
        zeros = torch.full_like(scales.T, 8 - offset)
        tensors[f"{part}qweight"] = packed(numbers.T, dim, order)
        tensors[f"{part}qzeros"], tensors[f"{part}scales"] = packed(zeros, 1, order), scales.T.contiguous()
        if kind == "gptq":
            tensors[f"{part}g_idx"] = torch.arange(weight.shape[1], dtype=torch.int32) // group
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    own = {"gptq": {"desc_act": False, "sym": True, "backend": "torch"}, "awq": {"backend": "torch_awq"}}[kind]
    config["quantization_config"] = {"quant_method": kind, "bits": 4, "group_size": group, **own}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("plain")
    demo.load_target().save_pretrained(path)
    return path


def fp8(folder, made):
    demo.load_target().save_pretrained(made)
    in_blocks(made)
    return loaded(made)


def int8(folder):
    torchao = pytest.importorskip("torchao.quantization")
    return loaded(folder, quantization_config=transformers.TorchAoConfig(torchao.Int8WeightOnlyConfig()))


def int4(folder, made):
    torchao = pytest.importorskip("torchao.quantization")
    groups = pytest.importorskip("torchao.quantization.granularity").PerGroup(32)
    config = torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=groups)
    return loaded(folder, quantization_config=transformers.TorchAoConfig(config))


def everything(folder, made):
    """Embedding and lm_head, too, by a user's own call."""
    torchao = pytest.importorskip("torchao.quantization")
    target = demo.load_target()
    tables = (nn.Linear, nn.Embedding)
    torchao.quantize_(target, torchao.Int8WeightOnlyConfig(), lambda module, _: type(module) in tables)
    return target


# What makes a target, and what its weights are called then.
KINDS = {"fp8": (fp8, None), "int4": (int4, "torchao"), "everything": (everything, "torchao")}


@pytest.fixture(scope="module", params=KINDS)
def quantised(request, folder, tmp_path_factory):
    """A target, what its weights are called, and its text."""
    make, kind = KINDS[request.param]
    target = make(folder, tmp_path_factory.mktemp("made"))
    return target, kind, target.generate(**demo_inputs(2), **CALL)


@pytest.mark.parametrize("drafter", ROWS)
def test_text_is_that_of_plain_generation(quantised, drafter):
    """Weights that are widened for a product in float32 round no more than plain ones."""
    target, _, plain = quantised
    with record() as made:
        found = target.generate(**demo_inputs(2), **CALL, speculative=settings_of(drafter))
    assert torch.equal(found, plain)
    assert made.calls[0].stats.num_accepted_tokens > 0


def test_packed_weights_are_known(quantised):
    target, kind, _ = quantised
    assert quantisation(target) == kind
    assert has_lean_forward(target) == (kind is None)
    packed = [module for module in target.modules() if any(map(is_packed, module.parameters(recurse=False)))]
    assert bool(packed) == (kind is not None)
    assert not [matrix for module in packed for matrix in _matrices(module)]


def test_networks_that_begin_as_the_target(quantised):
    """Copies of its weights are copies of their numbers."""
    target, _, _ = quantised
    head = target.get_output_embeddings().weight
    heads = MedusaRecipe(num_heads=1, share_lm_head=False).build(target)
    torch.testing.assert_close(heads.lm_heads[0], numbers_of(head.detach()))
    assert is_close(heads.lm_heads.detach()[0], head)
    assert not is_packed(head) or not is_copy(heads.lm_heads.detach()[0], head)
    layer = target.model.layers[-1].mlp.up_proj.weight
    torch.testing.assert_close(new_mtp(target).layers[0].mlp.up_proj.weight, numbers_of(layer.detach()))


@pytest.fixture(scope="module", params=[4, 8])
def of_few_bits(request, tmp_path_factory):
    """A target of bitsandbytes, and its plain copy as a draft model."""
    pytest.importorskip("bitsandbytes")
    folder = tmp_path_factory.mktemp("wide")
    tiny_llama(hidden_size=64, intermediate_size=128, initializer_range=0.3).save_pretrained(folder)
    settings = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}
    config = transformers.BitsAndBytesConfig(**(settings if request.param == 4 else {"load_in_8bit": True}))
    target = loaded(folder, quantization_config=config)
    target.generation_config.pad_token_id = 0
    return target, {"method": "draft_model", "model": str(folder), "same_tokenizer": True}


@pytest.mark.parametrize("method", ["ngram", "recycling", "draft_model"])
def test_text_with_bitsandbytes(of_few_bits, method):
    target, draft = of_few_bits
    settings = draft if method == "draft_model" else {"method": method}
    with record() as made:
        found = target.generate(**prompts(3), **CALL, speculative=settings)
    assert torch.equal(found, target.generate(**prompts(3), **CALL))
    assert made.calls[0].stats.num_accepted_tokens > 0
    assert quantisation(target) == "bitsandbytes"


@pytest.fixture(scope="module", params=FOUR_BITS)
def of_four_bits(request, tmp_path_factory):
    """A target of GPTQ or AWQ, what its weights are called, and a draft model of the same kind."""
    pytest.importorskip("optimum")
    pytest.importorskip("gptqmodel")
    path = tmp_path_factory.mktemp(request.param)
    demo.load_target().save_pretrained(path / "target")
    shutil.copytree(settings_of("draft_model")["model"], path / "draft")
    for name in ("target", "draft"):
        in_four_bits(path / name, request.param)
    return loaded(path / "target"), request.param, path / "draft"


# optimum asks transformers for a property by its old name.
old_name = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")


@old_name
@pytest.mark.parametrize("drafter", ROWS)
def test_text_with_gptq_and_awq(of_four_bits, drafter):
    target, kind, _ = of_four_bits
    with record() as made:
        found = target.generate(**demo_inputs(2), **CALL, speculative=settings_of(drafter))
    assert torch.equal(found, target.generate(**demo_inputs(2), **CALL))
    assert made.calls[0].stats.num_accepted_tokens > 0
    assert quantisation(target) == kind
    assert not has_lean_forward(target)


@old_name
def test_draft_models_of_gptq_and_awq(of_four_bits):
    _, _, draft = of_four_bits
    target = demo.load_target()
    with record() as made:
        found = target.generate(**demo_inputs(2), **CALL, speculative=settings_of("draft_model", model=str(draft)))
    assert torch.equal(found, target.generate(**demo_inputs(2), **CALL))
    assert made.calls[0].stats.num_accepted_tokens > 0


@old_name
@pytest.mark.parametrize("recipe", [MedusaRecipe(num_heads=1), DFlashRecipe(num_layers=1, block_size=4)])
def test_heads_for_gptq_and_awq_are_trained(of_four_bits, recipe):
    target, _, _ = of_four_bits
    recipe.check(target)
    network = recipe.build(target)
    rows = torch.randint(1, 4000, (2, 24), generator=torch.Generator().manual_seed(0))
    recipe.loss(network, TargetReader(target, recipe.states_for(network)).read(rows)).backward()
    assert all(parameter.grad.isfinite().all() for parameter in network.parameters())


@pytest.fixture(scope="module", params=["Embedding8bit", "EmbeddingNF4"])
def of_packed_rows(request):
    """A target whose embedding bitsandbytes has packed into integers of another shape."""
    library = pytest.importorskip("bitsandbytes")
    target = demo.load_target()
    plain = target.get_input_embeddings()
    packed = getattr(library.nn, request.param)(*plain.weight.shape, dtype=torch.float32)
    packed.load_state_dict({"weight": plain.weight.detach().clone()})
    target.set_input_embeddings(packed.to("cpu"))
    return target


@pytest.mark.parametrize("drafter", ["draft_model", "eagle3 tree", "dflash", "mtp"])
def test_text_with_a_packed_embedding(of_packed_rows, drafter):
    target = of_packed_rows
    with record() as made:
        found = target.generate(**demo_inputs(2), **CALL, speculative=settings_of(drafter))
    assert torch.equal(found, target.generate(**demo_inputs(2), **CALL))
    assert made.calls[0].stats.num_accepted_tokens > 0


def test_the_rows_of_a_packed_embedding(of_packed_rows):
    embedding, tokens = of_packed_rows.get_input_embeddings(), torch.tensor([[5, 4095]])
    assert not embedding.weight.is_floating_point()
    assert num_embeddings(embedding) == 4096
    assert torch.equal(TargetParts(of_packed_rows).embed(tokens), embedding(tokens))
    with pytest.raises(SpecConfigError, match="from 0 to 4095, the tokens that the target's embedding has, got 4096"):
        DFlashRecipe(mask_token_id=4096).check(of_packed_rows)
    known, unknown = generate_many(of_packed_rows, [[5, 4095], [4096]], in_order=True, max_new_tokens=2)
    assert known.error is None
    assert "all from 0 to 4095" in str(unknown.error)


def test_the_doctor_tells_drafter_and_target_apart(of_few_bits):
    target, draft = of_few_bits
    findings = list(network_findings(load_speculator(target, draft), target, None))
    found = next(one for one in findings if one.check == "quantisation")
    assert "target's weights are quantised (bitsandbytes), the drafter's not quantised" in found.found


def test_a_draft_model_that_was_published_quantised(tmp_path):
    source = settings_of("draft_model")["model"]
    shutil.copytree(source, tmp_path / "draft")
    in_blocks(tmp_path / "draft")
    settings = settings_of("draft_model") | {"model": str(tmp_path / "draft")}
    target = demo.load_target()
    with record() as made:
        found = target.generate(**demo_inputs(1), **CALL, speculative=settings)
    assert torch.equal(found, target.generate(**demo_inputs(1), **CALL))
    assert made.calls[0].stats.num_accepted_tokens > 0


@pytest.mark.parametrize(("trained_on", "status"), [(None, "warning"), ("torchao", "ok")])
def test_the_doctor_knows_what_a_head_was_trained_on(trained_on, status, folder, tmp_path):
    target = int8(folder)
    settings = SpeculativeConfig(**settings_of("eagle3"))
    shutil.copytree(settings.model, tmp_path / "head")
    (tmp_path / "head" / RESULT_FILE).write_text(json.dumps({"target_quantization": trained_on}))
    speculator = load_speculator(target, "eagle3", model=str(tmp_path / "head"))
    findings = list(network_findings(speculator, target, RepoFiles(str(tmp_path / "head"))))
    assert [one.status for one in findings if one.check == "quantisation"] == [status]


@pytest.mark.parametrize(
    ("text", "message"),
    [("[1]", "must hold an object"), (json.dumps({"target_quantization": "\x1b[2J" + 999 * "x"}), "not quantised")],
)
def test_the_doctor_distrusts_what_lies_beside_a_head(text, message, tmp_path):
    settings = SpeculativeConfig(**settings_of("eagle3"))
    shutil.copytree(settings.model, tmp_path / "head")
    (tmp_path / "head" / RESULT_FILE).write_text(text)
    target = demo.load_target()
    speculator = load_speculator(target, "eagle3", model=str(tmp_path / "head"))
    findings = network_findings(speculator, target, RepoFiles(str(tmp_path / "head")))
    [found] = [one for one in findings if one.check == "quantisation"]
    assert found.status == "warning"
    assert message in found.found
    assert found.found.isprintable()
    assert len(found.found) < 600
