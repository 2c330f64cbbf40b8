"""The lean forward of EAGLE heads: bit for bit the network's own, and only where it is known to be."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_specdec.candidate_generators.eagle.formats import EagleConfig
from hf_specdec.candidate_generators.eagle.network import Eagle1Network, Eagle3Network
from hf_specdec.drafting import entries as module
from hf_specdec.drafting.entries import DraftEntries
from hf_specdec.layers.lean import lean_forward
from tests.models import VOCAB_SIZE, tiny_llama


EAGLE1 = {"method": "eagle", "norms": ("layers.0.post_attention_layernorm",)}
EAGLE3 = {
    "method": "eagle3",
    "aux_layer_ids": (0, 1),
    "own_head": True,
    "norms": ("layers.0.input_layernorm", "layers.0.hidden_norm", "layers.0.post_attention_layernorm", "norm"),
}
SECOND_LAYER = ("layers.1.input_layernorm", "layers.1.post_attention_layernorm")
HEAD_NORMS = ("layers.0.self_attn.q_norm", "layers.0.self_attn.k_norm")
BIASES = ("fc", *(f"layers.0.self_attn.{name}_proj" for name in "qkv"), "layers.0.mlp.down_proj")


def rope(kind, **parameters):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, "factor": 8.0, **parameters}}


def wider(base, *norms, **settings):
    return {**base, **settings, "norms": base["norms"] + norms}


NETWORKS = {
    "eagle1": EAGLE1,
    "eagle1_biases": wider(EAGLE1, biases=BIASES),
    "eagle1_all_norms": wider(EAGLE1, "layers.0.input_layernorm", "norm"),
    "eagle1_two_layers": wider(EAGLE1, *SECOND_LAYER, num_hidden_layers=2),
    "eagle3": EAGLE3,
    "eagle3_two_layers": wider(EAGLE3, *SECOND_LAYER, num_hidden_layers=2),
    "eagle3_normed": wider(EAGLE3, norm_before_residual=True, norm_output=True),
    "eagle3_head_norms": wider(EAGLE3, *HEAD_NORMS),
    "eagle3_gelu": wider(EAGLE3, hidden_act="gelu_pytorch_tanh", rms_norm_eps=0.1),
    "eagle3_one_head_each": wider(EAGLE3, num_key_value_heads=4),
    "eagle3_of_another_size": wider(EAGLE3, hidden_size=24, own_embedding=True),
    "eagle3_window": wider(EAGLE3, sliding_window=4),
    "eagle3_yarn": wider(EAGLE3, **rope("yarn", original_max_position_embeddings=16)),
    "eagle3_dynamic": wider(EAGLE3, **rope("dynamic"), max_position_embeddings=16),
}


@torch.no_grad()
def make(name, dtype=torch.float32):
    sizes = {"hidden_size": 32, "target_hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    vocabulary = {"vocab_size": VOCAB_SIZE, "draft_vocab_size": VOCAB_SIZE}
    rotary = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    config = EagleConfig(**{**sizes, **heads, **vocabulary, **rotary, **NETWORKS[name]})
    torch.manual_seed(0)
    network = (Eagle3Network if config.method == "eagle3" else Eagle1Network)(config)
    for weight in network.parameters():
        # Norms and biases that do something.
        weight.add_(torch.randn_like(weight) * 0.3)
    return network.to(dtype).eval().requires_grad_(False).attach(tiny_llama().to(dtype))


@torch.no_grad()
def outputs_of(network, starts, offsets):
    """All outputs over a prompt and three cycles of commits, levels of a tree, and single nodes."""
    draws, rows = torch.Generator().manual_seed(1), len(starts)
    entries = DraftEntries(network, starts, offsets, capacity=8)
    outputs = []

    def tokens(count):
        return torch.randint(VOCAB_SIZE, (rows, count), generator=draws)

    def states(count):
        return torch.randn((rows, count, network.config.hidden_size), generator=draws).to(network.dtype)

    outputs += entries.read(tokens(7), states(7), [7] * rows)
    for cycle in range(3):
        counts = [1 + (row + cycle) % 3 for row in range(rows)]
        outputs += entries.read(tokens(max(counts)), states(max(counts)), counts)
        entries.begin_draft(6)
        outputs += entries.read_nodes(tokens(3), states(3), torch.zeros(3, dtype=torch.long))
        outputs += entries.read_nodes(tokens(2), states(2), torch.tensor([[2, 0]] * rows))
        outputs += entries.read_nodes(tokens(1), states(1), torch.tensor([1]))
    return outputs


ROWS = {"one_row": ([0], [0]), "uniform": ([0, 0], [5, 5]), "left_padded": ([3, 0, 1], [0, 40, 0])}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", NETWORKS)
def test_is_bit_for_bit_that_of_the_modules(name, dtype, rows, monkeypatch):
    network = make(name, dtype)
    assert lean_forward(network) is not network
    lean = outputs_of(network, *rows)
    monkeypatch.setattr(module, "lean_forward", lambda network, lead: network)
    # Made again: a rotary embedding that changes with the text remembers the longest one.
    own = outputs_of(make(name, dtype), *rows)
    assert all(output.isfinite().all() for output in own)
    assert all(map(torch.equal, lean, own))


def hooked(network):
    network.layers[0].self_attn.register_forward_hook(lambda *arguments: None)


def in_training(network):
    network.train()


def other_norm(network):
    class Norm(LlamaRMSNorm):
        def forward(self, hidden_states):
            return 2 * super().forward(hidden_states)

    network.layers[0].hidden_norm.__class__ = Norm


def replaced_forward(network):
    network.layers[0].mlp.forward = lambda hidden: hidden


@pytest.mark.parametrize("change", [hooked, in_training, other_norm, replaced_forward])
def test_a_changed_network_goes_through_its_own(change):
    network = make("eagle3")
    change(network)
    assert lean_forward(network) is network


def test_reads_the_weights_where_they_are():
    network = make("eagle3")
    before = outputs_of(network, [0], [0])[-1]
    with torch.no_grad():
        network.layers[0].mlp.down_proj.weight.mul_(2)
    assert not torch.equal(outputs_of(network, [0], [0])[-1], before)
