"""MTP layers and their checkpoints: every layout, where they are found, what they compute, and what is wrong."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_specdec import CheckpointFormatError, SpecConfigError, SpeculativeConfig, UnsupportedModelError, record
from hf_specdec.candidate_generators.mtp import formats as mtp_formats
from hf_specdec.candidate_generators.mtp.formats import _LAYOUTS, MTP_LAYOUT, MtpConfig
from hf_specdec.candidate_generators.mtp.network import SUPPORTED_MODEL_TYPES, MtpNetwork, new_mtp
from hf_specdec.decoding.states import captured_states
from hf_specdec.hub.detect import detect_method
from hf_specdec.target_facts import decoder_layers
from tests.helpers import heads
from tests.helpers.architectures import tiny_model
from tests.helpers.heads import copy_of, same_network, without
from tests.helpers.models import prompts, tiny_gpt2, tiny_llama
from tests.methods.test_mtp import FIXTURES, HYBRID, published


GREEDY = {"do_sample": False, "max_new_tokens": 16, "eos_token_id": None}
NAMES = sorted(path.name for path in FIXTURES.iterdir())
every_case = pytest.mark.parametrize("name", NAMES)


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


class TestPublishedLayers:
    @every_case
    @torch.no_grad()
    def test_first_step(self, name):
        """Logits of the layer after the whole prompt, without a cache."""
        target, expected = published(name)
        network = load(target)
        text = expected["reuse.r0.ids"]
        with captured_states(target, network.target_hidden_states) as states:
            target(text[None, :-1])
        hidden = network.fuse(states)
        torch.testing.assert_close(hidden[0], expected["target.hidden"], atol=1e-4, rtol=1e-4)
        steps = torch.arange(len(text) - 1)
        far = network.span.hidden(steps[:, None], steps)
        visible = (steps <= steps[:, None]) & (True if far is None else ~far)
        mask = torch.zeros(visible.shape).masked_fill_(~visible, torch.finfo(torch.float32).min)
        _, output = network(text[None, 1:], hidden, steps[None], mask[None, None])
        torch.testing.assert_close(output[0, -1], expected["reuse.r0.out"][0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(network.logits(output[0, -1]), expected["reuse.r0.logits"][0], atol=1e-4, rtol=1e-4)

    def test_dtypes(self):
        target = AutoModelForCausalLM.from_pretrained(FIXTURES / "deepseek_v3" / "target", dtype=torch.bfloat16)
        tensors = load(target).state_dict()
        # As in the target, where the choice of experts depends on it.
        in_float32, of_target = (
            {name.partition(".mlp.")[2] for name, tensor in found.items() if tensor.dtype == torch.float32}
            for found in (tensors, target.state_dict())
        )
        assert in_float32 == of_target >= {"gate.e_score_correction_bias"}
        assert load(target, dtype="float32").dtype == torch.float32

    @pytest.mark.parametrize("bits", [4, 8])
    def test_quantised_target(self, bits, tmp_path):
        """The layers stay in the type that the target computes in."""
        pytest.importorskip("bitsandbytes")
        whole = tiny_llama(hidden_size=64, intermediate_size=128)
        whole.save_pretrained(tmp_path / "target")
        new_mtp(whole).save(tmp_path / "mtp")
        settings = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32} if bits == 4 else {}
        quantization = BitsAndBytesConfig(**(settings or {"load_in_8bit": True}))
        target = AutoModelForCausalLM.from_pretrained(
            tmp_path / "target", quantization_config=quantization, dtype=torch.float32
        ).eval()
        target.generation_config.pad_token_id = 0
        assert {tensor.dtype for tensor in load(target, tmp_path / "mtp").state_dict().values()} == {torch.float32}
        with record() as made:
            target.generate(**prompts(2), **GREEDY, spec_model=str(tmp_path / "mtp"))
        assert made.calls[0].stats.num_draft_tokens > 0
        with pytest.raises(UnsupportedModelError, match="no quantised weights"):
            new_mtp(target)


class TestWhereTheyAre:
    def test_file_of_their_own(self, tmp_path):
        target, _ = published("qwen3_5")
        folder = copied("qwen3_5", tmp_path, without("mtp."))
        tensors = load_file(FIXTURES / "qwen3_5" / "target" / "model.safetensors")
        save_file({name: t for name, t in tensors.items() if "mtp." in name}, folder / "mtp.safetensors")
        same_network(load(target, folder), load(target))

    def test_target_made_in_memory(self):
        with pytest.raises(SpecConfigError, match="LlamaForCausalLM was not loaded.*`spec_model`"):
            tiny_llama().generate(**prompts(1), **GREEDY, spec_method="mtp")

    def test_checkpoint_without_them(self, tmp_path):
        folder = copied("glm4_moe", tmp_path, without("layers.3."))
        target = AutoModelForCausalLM.from_pretrained(folder)
        with pytest.raises(CheckpointFormatError, match="no MTP layers.*quantised.*`spec_model`"):
            target.generate(**prompts(1), **GREEDY, spec_method="mtp")
        # They are found elsewhere.
        other = str(FIXTURES / "glm4_moe" / "target")
        plain = target.generate(**prompts(1), **GREEDY)
        assert torch.equal(target.generate(**prompts(1), **GREEDY, spec_method="mtp", spec_model=other), plain)


class TestLayouts:
    @pytest.mark.parametrize("layout", _LAYOUTS, ids=lambda layout: layout.name)
    @pytest.mark.parametrize("num_layers", [1, 2])
    def test_round_trip(self, layout, num_layers, tmp_path):
        """Every tensor comes back from the names of the layout."""
        target = published("longcat_flash" if layout.is_half_layer else "glm4_moe")[0]
        torch.manual_seed(0)
        network = MtpNetwork(MtpConfig(layout, num_layers), target)
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter)
        tensors = stored(network, layout, len(decoder_layers(target)))
        tensors.pop("norm.1.weight", None)
        save_file(tensors, tmp_path / "model.safetensors")
        if layout.is_half_layer and num_layers > 1:
            # One norm in the file, and nobody knows how several layers would share it.
            (tmp_path / "config.json").write_text("{}")
            with pytest.raises(CheckpointFormatError, match="lacks 1 tensors of the MTP layers: norm.1.weight"):
                load(target, tmp_path)
            return
        (tmp_path / "config.json").write_text("{}")
        again = load(target, tmp_path)
        assert (again.config.layout, again.config.num_layers) == (layout, num_layers)
        same_network(again, network)

    def test_speculators(self, tmp_path):
        """Names are those of MiMo, and the projection reads the embedding first."""
        target, _ = published("mimo")
        own = load(target)
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
        self.assert_alike(network, own)

    @pytest.mark.parametrize("name", ["mimo", "qwen3_5", "glm4_moe"])
    def test_saved(self, name, tmp_path):
        """The `mtp` layout computes the same as its own, whatever that is."""
        target, _ = published(name)
        network = load(target)
        network.save(tmp_path / "saved")
        assert detect_method(SpeculativeConfig(model=str(tmp_path / "saved"))) == "mtp"
        tensors = load_file(tmp_path / "saved" / "model.safetensors")
        assert all(name.startswith("mtp.") for name in tensors)
        again = load(target, tmp_path / "saved")
        assert again.config.layout is MTP_LAYOUT
        self.assert_alike(again, network)

    def assert_alike(self, network, other):
        torch.manual_seed(0)
        tokens, hidden = torch.randint(0, 256, (2, 5)), torch.randn((2, 5, 64))
        outputs = [part(tokens, hidden, torch.arange(5)[None], None) for part in (network, other)]
        for ours, theirs in zip(*outputs):
            torch.testing.assert_close(ours, theirs)

    @pytest.mark.parametrize("name", ["ernie4_5_moe", "longcat_flash", "glm4_moe_k3"])
    def test_layers_that_cannot_be_saved(self, name, tmp_path):
        with pytest.raises(CheckpointFormatError, match="cannot be written as `mtp"):
            load(published(name)[0]).save(tmp_path)
        assert not list(tmp_path.iterdir())

    def test_blocks_of_8_bits(self, tmp_path):
        """Weights with a scale for each block; the last blocks are cut off."""
        target, _ = published("deepseek_v3")
        expected, size = load(target).state_dict(), 24

        def quantised(tensors):
            for name in [name for name in tensors if ".layers.3." in name and "_proj" in name]:
                weight = tensors[name]
                counts = [-(-length // size) for length in weight.shape]
                scales = torch.rand(counts) + 0.5
                whole = scales.repeat_interleave(size, 0).repeat_interleave(size, 1)
                tensors[name] = (weight / whole[: len(weight), : weight.shape[1]]).to(torch.float8_e4m3fn)
                tensors[f"{name}_scale_inv"] = scales
            return tensors

        config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [size, size]}}
        found = load(target, copied("deepseek_v3", tmp_path, quantised, config)).state_dict()
        for name, tensor in expected.items():
            # Three bits after the point.
            torch.testing.assert_close(found[name], tensor, rtol=0.07, atol=0.01)


class TestSupportedTargets:
    @pytest.mark.parametrize(
        ("name", "batch_size"),
        [*((name, 4) for name in SUPPORTED_MODEL_TYPES if name != "mimo"), ("deepseek_v3", 1), ("qwen3_next", 1)],
    )
    def test_text(self, name, batch_size, tmp_path):
        """New layers for every kind of target: saved, loaded, and drafting in the right places."""
        changes = {"first_k_dense_replace": 1} if name == "deepseek_v3" else {}
        target = tiny_model(name, **changes)
        target.generation_config.pad_token_id = 0
        torch.manual_seed(0)
        new_mtp(target).save(tmp_path)
        inputs = prompts(batch_size, length=9)
        plain = target.generate(**inputs, **GREEDY)
        with record(trace=True) as made:
            ours = target.generate(**inputs, **GREEDY, spec_model=str(tmp_path))
        assert torch.equal(ours, plain)
        assert made.calls[0].stats.method == "mtp"
        network, row = load(target, tmp_path), batch_size - 1
        first = next(trace for trace in made.calls[0].cycles[0].rows if trace.row == row)
        assert first.draft_tokens[:1] == [self.first_draft(target, network, plain[row][: 9 + 1])]

    @torch.no_grad()
    def first_draft(self, target, network, text):
        with captured_states(target, network.target_hidden_states) as states:
            target(text[None, :-1])
        steps = torch.arange(len(text) - 1)
        far = network.span.hidden(steps[:, None], steps)
        visible = (steps <= steps[:, None]) & (True if far is None else ~far)
        mask = torch.zeros(visible.shape).masked_fill_(~visible, torch.finfo(torch.float32).min)
        _, output = network(text[None, 1:], network.fuse(states), steps[None], mask[None, None])
        return int(network.logits(output[0, -1]).argmax())

    def test_new_layers_can_be_trained(self):
        network = new_mtp(tiny_llama(), num_layers=2)
        tokens, hidden, positions = torch.randint(0, 64, (2, 6)), torch.randn((2, 6, 32)), torch.arange(6)[None]
        handed_on, first = network(tokens, hidden, positions, None)
        _, second = network(tokens[:, 1:], handed_on[:, :-1], positions[:, :-1], None, layer=1)
        (network.logits(first).sum() + network.logits(second).sum()).backward()
        assert all(parameter.grad is not None for parameter in network.parameters())

    def test_other_targets(self):
        with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel.*deepseek_v3.*qwen3_next"):
            tiny_gpt2().generate(**prompts(1), **GREEDY, spec_method="mtp")
        with pytest.raises(UnsupportedModelError, match="'gpt2'"):
            new_mtp(tiny_gpt2())

    def test_targets_without_a_layer_to_copy(self):
        """All layers are dense, and MTP layers of this family have experts."""
        with pytest.raises(UnsupportedModelError, match="parts of an MTP layer"):
            new_mtp(tiny_model("deepseek_v3"))

    def test_hybrid_targets_copy_a_layer_with_attention(self):
        for name in HYBRID:
            target, _ = published(name)
            assert hasattr(new_mtp(target).layers[0], "self_attn")


class TestWhatIsWrong:
    @every_case
    def test_every_tensor_is_needed(self, name, tmp_path):
        target, _ = published(name)
        tensors = load_file(FIXTURES / name / "target" / "model.safetensors")
        number = len(decoder_layers(target))
        needed = [
            key
            for key in tensors
            if ("mtp" in key or any(f".layers.{number + j}." in key for j in range(3)))
            and not ("embed_tokens" in key or "shared_head.head" in key)
        ]
        assert len(needed) > 10
        # One of each kind.
        ends = {key.split(".experts.")[0].split(".", 3)[-1]: key for key in needed}
        for number, key in enumerate(sorted(ends.values())[::4]):
            folder = copied(name, tmp_path / str(number), without(key))
            with pytest.raises(CheckpointFormatError, match="lacks 1 tensors of the MTP layers|no MTP layers"):
                load(target, folder)

    def test_fewer_layers_by_the_config(self, tmp_path):
        target, _ = published("glm4_moe_k3")
        folder = copy_of("mtp/glm4_moe_k3", tmp_path / "target", {"num_nextn_predict_layers": 2})
        assert load(target, folder).config.num_layers == 2

    def test_other_sizes(self, tmp_path):
        target = tiny_llama()
        new_mtp(tiny_llama(hidden_size=16)).save(tmp_path)
        with pytest.raises(CheckpointFormatError, match="hidden size 16, and .* has 32"):
            load(target, tmp_path)
        new_mtp(tiny_llama(intermediate_size=48)).save(tmp_path)
        with pytest.raises(CheckpointFormatError, match=r"mtp.layers.0.mlp.*\[48, 32\].*\[64, 32\]"):
            load(target, tmp_path)

    def test_what_is_not_used_is_named(self, tmp_path, monkeypatch):
        target, _ = published("qwen3_next")
        extra = {"mtp.layers.0.self_attn.q_proj.bias": torch.zeros(4)}
        folder = copied("qwen3_next", tmp_path, lambda tensors: {**tensors, **extra})
        messages = []
        monkeypatch.setattr(mtp_formats.logger, "warning", messages.append)
        load(target, folder)
        assert len(messages) == 1
        assert "q_proj.bias" in messages[0]
