"""The lean forward of MTP layers: bit for bit the network's own, and only where it is known to be."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from hf_specdec.candidate_generators.mtp.entries import LayerEntries
from hf_specdec.candidate_generators.mtp.network import MtpNetwork, new_mtp
from hf_specdec.drafting import entries as module
from hf_specdec.drafting.entries import DraftEntries
from hf_specdec.layers.lean import lean_forward
from tests.models import VOCAB_SIZE, tiny_llama


FIXTURES = Path(__file__).parents[1] / "fixtures" / "mtp"

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0}


def qwen3(**settings):
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, **settings)).eval()


def mistral():
    return MistralForCausalLM(MistralConfig(**SIZES, head_dim=8, sliding_window=6)).eval()


TARGETS = {
    "llama": tiny_llama,
    "qwen3": qwen3,
    "yarn": lambda: qwen3(rope_parameters=YARN),
    "dynamic": lambda: qwen3(rope_parameters=DYNAMIC),
    "window": mistral,
}

# Where families differ around the layer.
LAYOUTS = {"plain": {}, "state_first": {"hidden_first": True}, "before_norm": {"before_norm": True}}


@torch.no_grad()
def make(name="llama", layout="plain", dtype=torch.float32, num_layers=1):
    torch.manual_seed(0)
    target = TARGETS[name]()
    like = new_mtp(target, num_layers=num_layers)
    config = replace(like.config, layout=replace(like.config.layout, **LAYOUTS[layout]))
    network = MtpNetwork(config, target)
    for weight in (*network.parameters(), target.get_decoder().norm.weight):
        # Norms that do something.
        weight.copy_(torch.randn_like(weight) * 0.3 + (weight.dim() == 1))
    return network.to(dtype).eval().requires_grad_(False).attach(target.to(dtype))


class Draws:
    """Tokens and states, the same in every run."""

    def __init__(self, network, rows):
        self.rows, self.size, self.dtype = rows, network.target.hidden_size, network.dtype
        self.random = torch.Generator().manual_seed(1)

    def tokens(self, count):
        return torch.randint(VOCAB_SIZE, (self.rows, count), generator=self.random)

    def states(self, count):
        return torch.randn((self.rows, count, self.size), generator=self.random).to(self.dtype)


@torch.no_grad()
def outputs_of(network, starts, offsets):
    """All outputs over a prompt and three cycles: of one layer levels of a tree, of several a chain."""
    rows, draws = len(starts), Draws(network, len(starts))
    several = network.config.num_layers > 1
    slots = {"starts": starts, "offsets": offsets, "capacity": 8}
    entries = LayerEntries(network, network.config.num_layers, **slots) if several else DraftEntries(network, **slots)
    outputs = list(entries.read(draws.tokens(7), draws.states(7), [7] * rows))
    for cycle in range(3):
        counts = [1 + (row + cycle) % 3 for row in range(rows)]
        outputs += entries.read(draws.tokens(max(counts)), draws.states(max(counts)), counts)
        entries.begin_draft(6)
        if several:
            outputs += entries.read_nodes(draws.tokens(1), draws.states(1), torch.tensor([0]))
        else:
            outputs += entries.read_nodes(draws.tokens(3), draws.states(3), torch.zeros(3, dtype=torch.long))
            outputs += entries.read_nodes(draws.tokens(2), draws.states(2), torch.tensor([[2, 0]] * rows))
    return outputs


ROWS = {"one_row": ([0], [0]), "uniform": ([0, 0], [5, 5]), "left_padded": ([3, 0, 1], [0, 40, 0])}


class TestLeanForward:
    @pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("name", TARGETS)
    def test_is_bit_for_bit_that_of_the_modules(self, name, layout, dtype, rows, monkeypatch):
        self.compare(lambda: make(name, layout, dtype), rows, monkeypatch)

    @pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
    def test_also_of_several_layers(self, rows, monkeypatch):
        self.compare(lambda: make("qwen3", num_layers=3), rows, monkeypatch)

    def compare(self, make_network, rows, monkeypatch):
        network = make_network()
        assert lean_forward(network) is not network
        lean = outputs_of(network, *rows)
        monkeypatch.setattr(module, "lean_forward", lambda network, lead: network)
        own = outputs_of(make_network(), *rows)
        assert all(output.isfinite().all() for output in own)
        assert all(map(torch.equal, lean, own))


def hooked(network):
    network.layers[0].mlp.register_forward_hook(lambda *arguments: None)


def in_training(network):
    network.train()


def replaced_forward(network):
    network.layers[0].self_attn.forward = lambda **arguments: None


def other_rotary(network):
    network.rotary_emb.forward = lambda like, positions: None


class TestOwnForward:
    @pytest.mark.parametrize("change", [hooked, in_training, replaced_forward, other_rotary])
    def test_a_changed_network_goes_through_its_own(self, change):
        network = make()
        change(network)
        assert lean_forward(network) is network

    def test_layers_of_other_families_go_through_theirs(self):
        target = AutoModelForCausalLM.from_pretrained(FIXTURES / "glm4_moe" / "target").eval()
        network = new_mtp(target).eval()
        assert lean_forward(network) is network
