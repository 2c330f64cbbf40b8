"""MTP layers and their checkpoints: every layout, where they are found, what they compute, and what is wrong."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_specdec import CheckpointFormatError, SpecConfigError, SpeculativeConfig, UnsupportedModelError, record
from hf_specdec.candidate_generators.mtp.formats import _LAYOUTS, MTP_LAYOUT, MtpConfig
from hf_specdec.candidate_generators.mtp.network import SUPPORTED_MODEL_TYPES, MtpNetwork, new_mtp
from hf_specdec.hub.detect import detect_method
from hf_specdec.target.states import captured_states
from hf_specdec.target_facts import decoder_layers
from tests.helpers import heads
from tests.helpers.architectures import tiny_model
from tests.helpers.heads import copy_of, same_network, without
from tests.helpers.levels import in_full
from tests.helpers.models import prompts, tiny_gpt2, tiny_llama
from tests.helpers.paths import FIXTURES as ALL_FIXTURES
from tests.helpers.published import HYBRID
from tests.helpers.published import published as published_case


GREEDY = {"do_sample": False, "max_new_tokens": 16, "eos_token_id": None}
FIXTURES = ALL_FIXTURES / "mtp"
CLOSE, F32 = {"atol": 1e-4, "rtol": 1e-4}, torch.float32


def published(name):
    """Target, with its MTP layers in its own checkpoint, and expected tensors of a published case."""
    case = published_case(f"mtp/{name}")
    return case.target, case.expected


def load(target, model=None, **settings):
    return heads.load("mtp", model, target, **settings)


def copied(name, folder, change=None, config=None):
    return copy_of(f"mtp/{name}", folder / "target", config, change)


def stored(network, layout, num_target_layers):
    """The tensors of a network under the names of a layout, experts one by one."""
    tensors = {}
    for name, tensor in network.state_dict().items():
        prefix, _, kind = name.rpartition(".")
        if not prefix.endswith(".experts"):
            tensors[name] = tensor
            continue
        names = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else ["down_proj"]
        for expert, whole in enumerate(tensor):
            for part, values in zip(names, whole.chunk(len(names))):
                tensors[f"{prefix}.{expert}.{part}.weight"] = values
    return {layout.stored_name(name, num_target_layers): t.contiguous().clone() for name, t in tensors.items()}


NAMES = sorted(path.name for path in FIXTURES.iterdir())


@torch.no_grad()
def test_recorded_first_step():
    """Logits of the layer after the whole prompt, without a cache."""
    for name in NAMES:
        target, expected = published(name)
        network, text = load(target), expected["reuse.r0.ids"]
        hidden, output = first_step(target, network, text)
        torch.testing.assert_close(hidden[0], expected["target.hidden"], **CLOSE)
        torch.testing.assert_close(output, expected["reuse.r0.out"][0], **CLOSE)
        torch.testing.assert_close(network.logits(output), expected["reuse.r0.logits"][0], **CLOSE)


@torch.no_grad()
def first_step(target, network, text):
    """States of the target over a text but for its last token, and the output of the first layer at its end."""
    with captured_states(target, network.target_hidden_states) as states:
        target(text[None, :-1])
    hidden, steps = network.fuse(states), torch.arange(len(text) - 1)
    far = network.spans[0].hidden(steps[:, None], steps)
    visible = (steps <= steps[:, None]) & (True if far is None else ~far)
    mask = torch.zeros(visible.shape).masked_fill_(~visible, torch.finfo(torch.float32).min)
    return hidden, network(text[None, 1:], hidden, steps[None], mask[None, None])[1][0, -1]


def test_layers_in_a_file_of_their_own_and_fewer_by_the_config(tmp_path):
    target, _ = published("qwen3_5")
    folder = copied("qwen3_5", tmp_path, without("mtp."))
    tensors = load_file(FIXTURES / "qwen3_5" / "target" / "model.safetensors")
    save_file({name: t for name, t in tensors.items() if "mtp." in name}, folder / "mtp.safetensors")
    same_network(load(target, folder), load(target))
    folder = copied("glm4_moe_k3", tmp_path / "fewer", config={"num_nextn_predict_layers": 2})
    assert load(published("glm4_moe_k3")[0], folder).config.num_layers == 2


def test_target_without_layers(tmp_path):
    with pytest.raises(SpecConfigError, match="LlamaForCausalLM was not loaded.*`spec_model`"):
        tiny_llama().generate(**prompts(1), **GREEDY, spec_method="mtp")
    target = AutoModelForCausalLM.from_pretrained(copied("glm4_moe", tmp_path, without("layers.3.")))
    with pytest.raises(CheckpointFormatError, match="no MTP layers.*quantised.*`spec_model`"):
        target.generate(**prompts(1), **GREEDY, spec_method="mtp")


@pytest.mark.parametrize("num_layers", [2, *in_full(1)])
def test_layout_is_read(num_layers, tmp_path):
    """Every tensor comes back from the names of the layout."""
    for layout in _LAYOUTS:
        target = published("longcat_flash" if layout.is_half_layer else "glm4_moe")[0]
        network = MtpNetwork(MtpConfig(layout, num_layers), target)
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter)
        tensors = stored(network, layout, len(decoder_layers(target)))
        tensors.pop("norm.1.weight", None)
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text("{}")
        if layout.is_half_layer and num_layers > 1:
            # One norm in the file, and nobody knows how several layers would share it.
            with pytest.raises(CheckpointFormatError, match="lacks 1 tensors of the MTP layers: norm.1.weight"):
                load(target, tmp_path)
            continue
        again = load(target, tmp_path)
        assert (again.config.layout, again.config.num_layers) == (layout, num_layers)
        same_network(again, network)


def assert_alike(network, other):
    torch.manual_seed(0)
    tokens, hidden = torch.randint(0, 256, (2, 5)), torch.randn((2, 5, 64))
    outputs = [part(tokens, hidden, torch.arange(5)[None], None) for part in (network, other)]
    for ours, theirs in zip(*outputs):
        torch.testing.assert_close(ours, theirs)


def test_layout_of_speculators(tmp_path):
    """Names are those of MiMo, and the projection reads the embedding first."""
    target, _ = published("mimo")
    tensors = load_file(FIXTURES / "mimo" / "target" / "model.safetensors")
    tensors = {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.mtp_layers.")}
    name = "mtp_layers.0.input_proj.weight"
    tensors[name] = torch.cat(tensors[name].chunk(2, dim=1)[::-1], dim=1).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"speculators_model_type": "mtp", "transformer_layer_config": {"hidden_size": 64, "vocab_size": 256}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert detect_method(SpeculativeConfig(model=str(tmp_path))) == "mtp"
    network = load(target, tmp_path)
    assert not network.config.layout.hidden_first
    assert_alike(network, load(target))


@pytest.mark.parametrize("name", ["qwen3_5", "mimo", *in_full("glm4_moe")])
def test_saved_layers_compute_the_same(name, tmp_path):
    """In the `mtp` layout, whatever their own is."""
    target, _ = published(name)
    load(target).save(tmp_path)
    assert all(key.startswith("mtp.") for key in load_file(tmp_path / "model.safetensors"))
    again = load(target, tmp_path)
    assert again.config.layout is MTP_LAYOUT
    assert_alike(again, load(target))


@pytest.mark.parametrize(
    "name", ["qwen3", "deepseek_v3", *in_full(*sorted({*SUPPORTED_MODEL_TYPES} - {"mimo", "qwen3", "deepseek_v3"}))]
)
def test_greedy_with_new_layers_matches_generate(name, tmp_path):
    """Saved, loaded, and drafting in the right places."""
    target = tiny_model(name, **({"first_k_dense_replace": 1} if name == "deepseek_v3" else {}))
    target.generation_config.pad_token_id = 0
    torch.manual_seed(0)
    new_mtp(target).save(tmp_path)
    for batch_size in (4, 1):
        inputs, row = prompts(batch_size, length=9), batch_size - 1
        plain = target.generate(**inputs, **GREEDY)
        with record(trace=True) as made:
            ours = target.generate(**inputs, **GREEDY, spec_model=str(tmp_path))
        assert torch.equal(ours, plain)
        assert made.calls[0].stats.method == "mtp"
        network = load(target, tmp_path)
        first = next(trace for trace in made.calls[0].cycles[0].rows if trace.row == row)
        expected = network.logits(first_step(target, network, plain[row][: 9 + 1])[1]).argmax()
        assert first.draft_tokens[:1] == [int(expected)]


def test_targets_that_have_and_lack_a_layer_to_copy(tmp_path):
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel.*deepseek_v3.*qwen3_next"):
        tiny_gpt2().generate(**prompts(1), **GREEDY, spec_method="mtp")
    with pytest.raises(UnsupportedModelError, match="'gpt2'"):
        new_mtp(tiny_gpt2())
    # All layers are dense, and MTP layers of this family have experts.
    with pytest.raises(UnsupportedModelError, match="parts of an MTP layer"):
        new_mtp(tiny_model("deepseek_v3"))
    for name in HYBRID:
        assert hasattr(new_mtp(published(name)[0]).layers[0], "self_attn")
    new_mtp(tiny_llama(hidden_size=16)).save(tmp_path)
    with pytest.raises(CheckpointFormatError, match="hidden size 16, and .* has 32"):
        load(tiny_llama(), tmp_path)


@pytest.mark.parametrize("name", ["glm4_moe", *in_full(*(name for name in NAMES if name != "glm4_moe"))])
def test_every_tensor_is_needed(name, tmp_path):
    target, _ = published(name)
    number, tensors = len(decoder_layers(target)), load_file(FIXTURES / name / "target" / "model.safetensors")
    own, shared = ("mtp", *(f".layers.{number + j}." for j in range(3))), ("embed_tokens", "shared_head.head")
    needed = [key for key in tensors if any(o in key for o in own) and not any(part in key for part in shared)]
    # One of each kind.
    ends = {key.split(".experts.")[0].split(".", 3)[-1]: key for key in needed}
    for number, key in enumerate(sorted(ends.values())[::4]):
        with pytest.raises(CheckpointFormatError, match="lacks 1 tensors of the MTP layers|no MTP layers"):
            load(target, copied(name, tmp_path / str(number), without(key)))
