"""Rotary angles: what is looked up is what the embedding computes."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from hf_specdec import demo, load_speculator
from hf_specdec.candidate_generators.dflash.network import GivenContext
from hf_specdec.kernels import _triton
from hf_specdec.layers import rope
from hf_specdec.layers.draft_network import rotary_embedding
from hf_specdec.layers.llama import rotate
from hf_specdec.layers.rope import RotaryAngles, signed_angles
from tests.helpers.architectures import tiny_model
from tests.helpers.layer_references import rotary_angles
from tests.helpers.levels import in_full


KINDS = {
    "default": {},
    "linear": {"factor": 8.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 16},
    "dynamic": {"factor": 8.0},
}
POSITIONS = torch.tensor([[0, 3, 4, 5], [7, 8, 30, 31]])


def embedding(kind, kind_of=LlamaRotaryEmbedding):
    parameters = {"rope_type": kind, "rope_theta": 10000.0, **KINDS[kind]}
    return kind_of(LlamaConfig(head_dim=16, max_position_embeddings=16, rope_parameters=parameters))


# By model: types of layer that have angles of their own, and whether neighbours turn together.
EMBEDDINGS = {
    **dict.fromkeys(("llama", "qwen3", "gemma2", "phi3", "granite", "mixtral", "smollm3"), ((), False)),
    **dict.fromkeys(("olmo", "olmo2"), ((), False)),
    "glm4": ((), True),
    "gemma3_text": (("full_attention", "sliding_attention"), False),
    "olmo3": (("full_attention", "sliding_attention"), False),
}


class Counted(LlamaRotaryEmbedding):
    """An embedding that counts its calls."""

    num_calls = 0

    def forward(self, *args):
        self.num_calls += 1
        return super().forward(*args)


@pytest.mark.parametrize("kind", KINDS)
def test_angles_are_those_of_the_embedding_looked_up_or_computed(kind):
    for dtype in (torch.float32, torch.bfloat16):
        like, looked_up, computed = torch.zeros(1, dtype=dtype), *(RotaryAngles(embedding(kind)) for _ in range(2))
        for bound in (32, 40, 500):
            # A dynamic embedding remembers the longest text.
            expected = signed_angles(*embedding(kind)(like, POSITIONS))
            found = looked_up(POSITIONS, like, bound)
            assert [part.shape for part in found] == [(2, 4, 1, 16)] * 2
            assert all(map(torch.equal, found, expected))
            assert all(map(torch.equal, computed(POSITIONS, like), expected))


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Calls of the kernel that computes angles, which torch computes here."""
    calls = []
    monkeypatch.setattr(_triton, "CHOICE", "triton")
    monkeypatch.setattr(rope, "fuses", lambda tensor: True)
    monkeypatch.setattr(rope, "rotary_angles", lambda *given: calls.append(given) or rotary_angles(*given))
    return calls


FIRST = ("llama", "glm4", "gemma3_text")


@pytest.mark.parametrize("name", [*FIRST, *in_full(*(name for name in EMBEDDINGS if name not in FIRST))])
@torch.no_grad()
def test_angles_of_known_models_are_one_operation_on_a_gpu(name, as_on_a_gpu):
    known, (types, is_interleaved) = tiny_model(name).get_decoder().rotary_emb, EMBEDDINGS[name]
    for dtype in (torch.float32, torch.bfloat16):
        like = torch.zeros(1, dtype=dtype)
        as_on_a_gpu.clear()
        for layer_type in types or (None,):
            own = () if layer_type is None else (layer_type,)
            expected = signed_angles(*known(like, POSITIONS, *own), is_interleaved)
            found = RotaryAngles(known, layer_type, is_interleaved)(POSITIONS, like)
            assert all(map(torch.equal, found, expected))
            assert [part.dtype for part in found] == [part.dtype for part in expected]
        assert len(as_on_a_gpu) == max(len(types), 1)


@torch.no_grad()
def test_hooks_of_an_embedding_run(as_on_a_gpu):
    hooked, calls = embedding("default"), []
    hooked.register_forward_hook(lambda *given: calls.append(given))
    RotaryAngles(hooked)(POSITIONS, torch.zeros(1))
    assert len(calls) == 1
    assert not as_on_a_gpu


def test_angles_are_computed_once_for_many_positions_unless_they_change_with_the_text():
    counted = embedding("default", kind_of=Counted)
    angles, like, last = RotaryAngles(counted), torch.zeros(1), torch.tensor([[64]])
    for bound in (32, 33, 64):
        angles(POSITIONS, like, bound)
    assert counted.num_calls == 1
    expected = signed_angles(*embedding("default")(like, last))
    assert all(map(torch.equal, angles(last, like, 65), expected))
    assert counted.num_calls == 2
    changing = embedding("dynamic", kind_of=Counted)
    angles = RotaryAngles(changing)
    for calls in (1, 2):
        angles(POSITIONS, torch.zeros(1), 32)
        assert changing.num_calls == calls


def test_heads_turn_as_in_transformers():
    heads = torch.randn(2, 4, 3, 16)
    cosine, sine = embedding("yarn")(heads, POSITIONS)
    expected, _ = apply_rotary_pos_emb(heads.transpose(1, 2), heads.transpose(1, 2), cosine, sine)
    assert torch.equal(rotate(heads, *signed_angles(cosine, sine)), expected.transpose(1, 2))


@pytest.mark.parametrize("method", ["eagle3", "dflash", *in_full("eagle", "mtp")])
@torch.no_grad()
def test_networks_make_the_same_of_angles_looked_up_or_computed(method):
    target = demo.load_target()
    network = load_speculator(target, {"method": method, "model": demo.drafter_path(method)}).resources
    tokens, positions = torch.tensor([[5, 6, 7], [8, 9, 10]]), torch.tensor([[0, 1, 2], [40, 41, 42]])

    def outputs(bound):
        if method != "dflash":
            hidden = torch.linspace(-1, 1, 2 * 3 * 256).view(2, 3, 256)
            return network(tokens, hidden, positions, None, bound=bound)
        fused = torch.linspace(-1, 1, 2 * 3 * network.config.hidden_size).view(2, 3, -1)
        context = network.context(fused, positions, bound)
        block = network(tokens, positions + 3, dict.fromkeys(network.views), GivenContext(context), bound)
        return [block, *(part for layer in context for part in layer)]

    assert all(map(torch.equal, outputs(46), outputs(None)))


@torch.no_grad()
def test_a_network_with_other_rope_parameters():
    """A copy that shares all but its rotary embedding, as the doctor makes them."""
    network = load_speculator(demo.load_target(), {"method": "dflash", "model": demo.drafter_path("dflash")}).resources
    like, positions = torch.zeros(1), torch.tensor([[3, 9]])
    before = network.angles(positions, like, 10)
    changed = network.with_settings(rope_parameters={**network.config.rope_parameters, "rope_theta": 77.0})
    expected = signed_angles(*rotary_embedding(changed.config)(like, positions))
    assert all(map(torch.equal, changed.angles(positions, like, 10), expected))
    assert not torch.equal(before[0], expected[0])
    assert all(map(torch.equal, network.angles(positions, like, 10), before))
