"""EAGLE networks: the published numbers, every variant against its equations, and what settings mean."""

from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hf_specdec import CheckpointFormatError, UnsupportedModelError
from hf_specdec.drafts import chain_topology
from hf_specdec.target.cache import SlotCache
from hf_specdec.target.masks import FULL, RowPlaces, node_masks
from hf_specdec.target.states import captured_states
from tests.helpers import heads
from tests.helpers.heads import (
    HEADS,
    copy_of,
    expected_of,
    loaded_target,
    published,
    put,
    renamed,
    same_network,
    write,
)
from tests.helpers.levels import in_full
from tests.helpers.models import TINY, VOCAB_SIZE, tiny_llama


# Between implementations, see the fixtures' descriptions.
CLOSE = {"atol": 5e-5, "rtol": 0}


@pytest.fixture(scope="module")
def target():
    """Deep enough for three states between its layers."""
    return tiny_llama(num_hidden_layers=8, initializer_range=0.1)


def load(folder, target, method="eagle3", **settings):
    return heads.load(method, folder, target, **settings)


@torch.no_grad()
def states_of(target, network, tokens):
    with captured_states(target, network.target_hidden_states) as states:
        target(tokens)
    return states


def read(network, cache, tokens, hidden):
    topology = chain_topology(tokens.shape[1] - 1, torch.device("cpu"))
    plan = cache.plan_write(tokens.shape[1])
    rows = RowPlaces(cache.lengths, [0], [0])
    masks = node_masks(topology, rows, plan.columns, network.spans, network.dtype)
    mask = masks[0] if len(masks) == 1 else dict(zip(network.spans, masks))
    return network(tokens, hidden, cache.lengths[0] + topology.depths[None], mask, cache)


BOUNDARIES = {"eagle1_llama": ("last",), "eagle3_llama": (2, 4, 5), "eagle3_specforge": (2, 4, 5)}
BOUNDARIES |= {"eagle3_qwen3": (2, 3, 4), "eagle3_speculators": (2, 3, 4)}


def test_recorded_states_and_logits():
    """The chains that follow are among the official runs."""
    for variant, boundaries in BOUNDARIES.items():
        name = f"eagle/{variant}"
        target, network, expected = loaded_target(HEADS[name]), published(name), expected_of(name)
        assert network.target_hidden_states == boundaries
        before = target.config.to_dict(), target.config._attn_implementation
        states = states_of(target, network, expected["prompt_ids"])
        captured = torch.cat([states[key] for key in network.target_hidden_states], dim=-1)
        torch.testing.assert_close(captured, expected["target_hidden"], **CLOSE)
        tokens = torch.cat([expected["prompt_ids"][:, 1:], expected["root_token"][None]], dim=1)
        fed_back, output = network(tokens, network.fuse(states), torch.arange(tokens.shape[1])[None], None)
        torch.testing.assert_close(fed_back, expected["prefix_hidden"], **CLOSE)
        torch.testing.assert_close(network.logits(output[0, -1]), expected["chain_logits"][0], **CLOSE)
        assert before == (target.config.to_dict(), target.config._attn_implementation)


def test_embedding_of_the_target_or_its_own(target, tmp_path):
    name, tokens, table = "eagle/eagle3_speculators", torch.tensor([[3, 9, 255]]), torch.randn(256, 64)
    verifier = loaded_target(HEADS[name])
    own = load(copy_of(name, tmp_path / "own", change=put("embed_tokens.weight", table)), verifier)
    assert torch.equal(own.embed(tokens), table[tokens])
    theirs = verifier.get_input_embeddings().weight.detach()
    # Left out, or a copy that need not be kept.
    for change in (renamed(embed_tokens=None), put("embed_tokens.weight", theirs)):
        shared = load(copy_of(name, tmp_path / "shared", change=change), verifier)
        assert torch.equal(shared.embed(tokens), theirs[tokens])
        assert shared.embed_tokens is None
    # With fewer rows than the target's.
    copy_of("eagle/eagle1_llama", tmp_path, change=put("embed_tokens.weight", lambda table: table[:250]))
    network = load(tmp_path, loaded_target(HEADS["eagle/eagle1_llama"]), "eagle")
    assert network.embed_tokens.weight.shape == (256, 64)
    assert not network.embed(torch.tensor([[250, 255]])).any()
    # A target's factor in its embedding module is not the head's.
    gemma = Gemma3ForCausalLM(Gemma3TextConfig(**{**TINY, "head_dim": 16, "num_hidden_layers": 8})).eval()
    network, tokens = load(Head().save(tmp_path), gemma), torch.tensor([[3, 9]])
    assert torch.equal(network.embed(tokens), gemma.get_input_embeddings().weight[tokens])
    assert not torch.allclose(network.embed(tokens), gemma.get_input_embeddings()(tokens))
    narrow = {"hidden": 24, "own_embedding": True, "vocab": VOCAB_SIZE, "without": ("lm_head",)}
    for head, part in ((Head(hidden=24), "embed_tokens"), (Head(**narrow), "lm_head")):
        with pytest.raises(CheckpointFormatError, match=f"no `{part}.weight`, and its hidden size 24"):
            load(head.save(tmp_path / part), target)


@dataclass
class Head:
    """A head of random weights with any of the published variations, and what it computes, written down plainly."""

    kind: str = "eagle3"
    hidden: int = 32
    heads: int = 4
    groups: int = 2
    head_size: int = 8
    layers: int = 1
    states: int = 3
    vocab: int = 40
    biases: tuple = ()
    norms: dict = field(default_factory=dict)
    without: tuple = ()
    own_embedding: bool = False
    config: dict = field(default_factory=dict)

    def __post_init__(self):
        draw, size, is_third = torch.Generator().manual_seed(0), self.hidden, self.kind == "eagle3"
        shapes = {name: (size,) for name in ("layers.0.hidden_norm", "norm")} if is_third else {}
        for index in range(self.layers):
            name, inputs = f"layers.{index}.", 2 * size if is_third and not index else size
            shapes |= {f"{name}mlp.gate_proj": (48, size), f"{name}mlp.up_proj": (48, size)}
            shapes |= {f"{name}mlp.down_proj": (size, 48), f"{name}post_attention_layernorm": (size,)}
            groups = {"q": self.heads, "k": self.heads // self.groups, "v": self.heads // self.groups}
            shapes |= {f"{name}self_attn.{part}_proj": (n * self.head_size, inputs) for part, n in groups.items()}
            shapes[f"{name}self_attn.o_proj"] = (size, self.heads * self.head_size)
            if index or is_third:
                shapes[f"{name}input_layernorm"] = (size,)
        if is_third:
            shapes["lm_head"] = (self.vocab, size)
        if self.states:
            shapes["fc"] = (size, self.states * 32 if is_third else 2 * size)
        if self.own_embedding:
            shapes["embed_tokens"] = (VOCAB_SIZE, size)
        shapes |= self.norms
        self.tensors = {
            f"{name}.weight": torch.randn(shape, generator=draw) * shape[-1] ** -0.5 + (len(shape) == 1)
            for name, shape in shapes.items()
            if name not in self.without
        }
        self.tensors |= {f"{name}.bias": torch.randn(shapes[name][:1], generator=draw) for name in self.biases}
        if is_third and self.vocab < VOCAB_SIZE:
            ids = torch.randperm(VOCAB_SIZE, generator=draw)[: self.vocab].sort().values
            self.tensors["d2t"] = ids - torch.arange(self.vocab)

    def save(self, folder):
        stated = {"architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB_SIZE, "rms_norm_eps": 1e-5}
        stated |= {"hidden_size": self.hidden, "num_attention_heads": self.heads, **self.config}
        return write(folder, self.tensors, stated)

    def linear(self, name, values):
        return F.linear(values, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def norm(self, name, values):
        weight = self.tensors.get(f"{name}.weight")
        return values if weight is None else F.rms_norm(values, weight.shape, weight, 1e-5)

    def fuse(self, states):
        values = self.norm("input_norm", torch.cat(states, dim=-1))
        chunks = values.chunk(self.states or 1, dim=-1)
        values = torch.cat([self.norm(f"fc_norm.{index}", chunk) for index, chunk in enumerate(chunks)], dim=-1)
        return self.linear("fc", values) if self.states and self.kind == "eagle3" else values

    def attend(self, name, values, cosine, sine, window):
        query, key, value = (
            self.linear(f"{name}.{part}_proj", values).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for part in "qkv"
        )

        def turn(heads):
            first, second = heads.chunk(2, dim=-1)
            return heads * cosine + torch.cat((-second, first), dim=-1) * sine

        query, key = turn(self.norm(f"{name}.q_norm", query)), turn(self.norm(f"{name}.k_norm", key))
        distance = torch.arange(values.shape[1])[:, None] - torch.arange(values.shape[1])
        seen = (distance >= 0) & (distance < window)
        output = F.scaled_dot_product_attention(query, key, value, seen, enable_gqa=True)
        return self.linear(f"{name}.o_proj", output.transpose(1, 2).flatten(2))

    def forward(self, embedded, hidden, cosine, sine, windows=()):
        """Both outputs of a whole text, with `windows` of layers: what is fed back, and what the lm_head reads."""
        for index in range(self.layers):
            name = f"layers.{index}"
            if index == 0 and self.kind == "eagle3":
                normed = self.norm(f"{name}.hidden_norm", hidden)
                stream = normed if self.config.get("norm_before_residual") else hidden
                values = torch.cat((self.norm(f"{name}.input_layernorm", embedded), normed), dim=-1)
            else:
                stream = self.linear("fc", torch.cat((embedded, hidden), dim=-1)) if index == 0 else stream
                values = self.norm(f"{name}.input_layernorm", stream)
            window = windows[index] if windows else None
            stream = stream + self.attend(f"{name}.self_attn", values, cosine, sine, window or 10**6)
            values = self.norm(f"{name}.post_attention_layernorm", stream)
            gate, up = (self.linear(f"{name}.mlp.{part}_proj", values) for part in ("gate", "up"))
            stream = stream + self.linear(f"{name}.mlp.down_proj", F.silu(gate) * up)
        output = self.norm("norm", stream)
        feeds_output = self.kind == "eagle" or self.config.get("norm_output")
        return (output if feeds_output else stream), output


CHUNK_NORMS = {f"fc_norm.{index}": (32,) for index in range(3)}
QKV = tuple(f"layers.0.self_attn.{part}_proj" for part in "qkv")
MLP = tuple(f"layers.0.mlp.{part}_proj" for part in ("gate", "up", "down"))
SPECULATORS = {"speculators_model_type": "eagle3"}
NO_NORMS = {"eagle_config": {"use_last_layernorm": False, "use_input_layernorm_in_first_layer": False}}

VARIANTS = {
    "eagle_qkv_bias": Head("eagle", biases=("fc", *QKV)),
    "eagle_with_all_norms": Head("eagle", norms={"layers.0.input_layernorm": (32,), "norm": (32,)}),
    "eagle3_all_biases": Head(biases=("fc", *QKV, "layers.0.self_attn.o_proj", *MLP)),
    "eagle3_three_layers": Head(layers=3),
    "eagle3_own_embedding": Head(own_embedding=True, vocab=VOCAB_SIZE),
    "eagle3_narrower_than_the_target": Head(hidden=24, own_embedding=True, config={"target_hidden_size": 32}),
    "eagle3_no_states_between_layers": Head(states=0, config={"eagle_config": {"use_aux_hidden_state": False}}),
    "eagle3_norm_before_residual": Head(config={"norm_before_residual": True, **SPECULATORS}),
    "eagle3_both_norms": Head(norms={**CHUNK_NORMS, "input_norm": (96,)}),
    "eagle3.1": Head(norms=CHUNK_NORMS, config={"fc_norm": True, "norm_output": True}),
    "eagle3_without_norms": Head(without=("norm", "layers.0.input_layernorm"), config=NO_NORMS),
}
ALONE = ("eagle_with_all_norms", "eagle3_all_biases", "eagle3_three_layers", "eagle3_norm_before_residual", "eagle3.1")


@pytest.mark.parametrize("variant", [*ALONE, *in_full(*(name for name in VARIANTS if name not in ALONE))])
def test_equations(target, variant, tmp_path):
    head = VARIANTS[variant]
    network = load(head.save(tmp_path / "head"), target, head.kind)
    check(head, network, target)
    network.save(tmp_path / "again")
    same_network(load(tmp_path / "again", target, head.kind), network)


@torch.no_grad()
def check(head, network, target, windows=()):
    """Over a text in pieces, with a cache."""
    tokens = torch.randint(VOCAB_SIZE, (1, 13), generator=torch.Generator().manual_seed(1))
    states = states_of(target, network, tokens[:, :-1])
    hidden, positions = network.fuse(states), torch.arange(12)[None]
    torch.testing.assert_close(hidden, head.fuse(list(states.values())), atol=1e-5, rtol=1e-5)
    embedding = head.tensors.get("embed_tokens.weight", target.get_input_embeddings().weight)
    cosine, sine = network.rotary_emb(hidden, positions)
    expected = head.forward(embedding[tokens[:, 1:]], hidden, cosine, sine, windows)
    cache, found = SlotCache(4), []
    cache.start_slots(1)
    for size in (1, 5, 2, 4):
        begin = cache.lengths[0]
        found.append(read(network, cache, tokens[:, begin + 1 :][:, :size], hidden[:, begin : begin + size]))
        cache.commit([size])
    ours = [torch.cat(parts, dim=1) for parts in zip(*found)]
    for one, other in zip(ours, expected):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    weight = head.tensors.get("lm_head.weight", target.lm_head.weight)
    torch.testing.assert_close(network.logits(ours[1]), ours[1] @ weight.T, atol=1e-5, rtol=1e-5)


def test_without_cache_and_mask_it_is_causal_and_has_gradients(target, tmp_path):
    network = load(Head().save(tmp_path), target).requires_grad_(True)
    states = {key: torch.randn(1, 9, 32) for key in network.target_hidden_states}
    tokens, hidden, positions = torch.randint(VOCAB_SIZE, (1, 9)), network.fuse(states), torch.arange(9)[None]
    whole, output = network(tokens, hidden, positions, None)
    part = network(tokens[:, :5], hidden[:, :5], positions[:, :5], None)[0]
    torch.testing.assert_close(whole[:, :5], part, atol=1e-5, rtol=1e-5)
    network.logits(output).square().sum().backward()
    assert all(parameter.grad.any() for parameter in network.parameters())
    scaled = load(Head(config={"logit_scale": 0.5, "norm_output": True}).save(tmp_path), target)
    torch.testing.assert_close(scaled.logits(output), network.logits(output) / 2)
    # Of those trainers it means another norm.
    assert scaled.config.norm_output is False


SLIDING, EVERYTHING = "sliding_attention", "full_attention"


@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_windows_of_layers(target, tmp_path, kind):
    for number, (kinds, count, windows) in enumerate(
        (
            ([SLIDING, EVERYTHING], 1, (4,)),
            ([SLIDING, EVERYTHING, SLIDING], 3, (4, None, 4)),
            ([EVERYTHING, SLIDING], 2, (None, 4)),
        )
    ):
        config = {"layer_types": kinds, "sliding_window": 4}
        head = Head(kind, layers=count, config=config)
        network = load(head.save(tmp_path / f"{number}"), target, kind)
        check(head, network, target, windows)
        network.save(tmp_path / "again")
        same_network(load(tmp_path / "again", target, kind), network)
    for without_window in ({"sliding_window": 4}, {**config, "use_sliding_window": False}):
        assert load(Head(config=without_window).save(tmp_path / "full"), target).spans == (FULL,)
    Head(layers=3, config={"layer_types": [SLIDING], "sliding_window": 4}).save(tmp_path / "short")
    with pytest.raises(CheckpointFormatError, match="has `layer_types`=.* in its config.json, and 3 layers"):
        load(tmp_path / "short", target)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 32.0, "original_max_position_embeddings": 16}


ROPES = [
    ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "rope_theta": 5e5}, "llama3", 5e5, LLAMA3),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_theta": 9.0}, "default", 7.0, {}),
    (
        {"rope_parameters": {SLIDING: {"rope_theta": 7.0}, EVERYTHING: {"rope_theta": 9.0}}, **SPECULATORS},
        "default",
        7.0,
        {},
    ),
    ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "linear", 10000.0, {"factor": 4.0}),
    ({"rope_scaling": {"rope_type": "yarn", **YARN}, "rope_theta": 1e6}, "yarn", 1e6, YARN),
    ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}, "default", 10000.0, {}),
]


def test_angles_are_the_heads_own(tmp_path):
    """The head's own counts, whatever the target has; and they are saved."""
    theirs = {"rope_parameters": {"rope_type": "linear", "rope_theta": 3.0, "factor": 2.0}}
    target = tiny_llama(num_hidden_layers=8, **theirs)
    for settings, kind, theta, more in ROPES:
        network = load(Head(config={**settings, "max_position_embeddings": 32}).save(tmp_path), target)
        config = LlamaConfig(
            hidden_size=32, num_attention_heads=4, head_dim=8, max_position_embeddings=32,
            rope_parameters={"rope_type": kind, "rope_theta": theta, **more},
        )  # fmt: skip
        init = LlamaRotaryEmbedding.compute_default_rope_parameters
        frequencies, scale = (ROPE_INIT_FUNCTIONS[kind] if kind != "default" else init)(config)
        angles = torch.arange(12)[:, None] * frequencies
        expected = torch.cat((angles, angles), dim=-1).cos() * scale
        network.save(tmp_path / "again")
        for one in (network, load(tmp_path / "again", target)):
            torch.testing.assert_close(one.rotary_emb(torch.zeros(1), torch.arange(12)[None])[0][0], expected)


# States between the target's layers

IDS = "eagle_aux_hidden_state_layer_ids"


# For a target of 8 layers.
NOTATIONS = [
    ({}, (2, 4, 5)),
    ({IDS: [1, 3, 4]}, (2, 4, 5)),
    ({IDS: [1, 3, 4], **SPECULATORS}, (1, 3, 4)),
    ({"eagle_config": {IDS: [4, 6, 8]}}, (4, 6, 8)),
    ({"eagle_config": {"layer_ids": [2, 5, 6]}}, (2, 5, 6)),
    ({"aux_layer_ids": [1, 3, 4]}, (1, 3, 4)),
]


def test_notations_of_captured_layers(target, tmp_path):
    for settings, boundaries in NOTATIONS:
        Head(config=settings).save(tmp_path)
        assert load(tmp_path, target).target_hidden_states == boundaries
        # What the user says goes before.
        assert load(tmp_path, target, aux_layer_ids=(5, 1, 8)).target_hidden_states == (1, 5, 8)
    # In shallow targets each boundary once, and none that there is not.
    for layers, boundaries in ((5, (2,)), (7, (2, 3, 4)), (6, (2, 3)), (3, (0, 1, 2))):
        Head(states=len(boundaries)).save(tmp_path)
        assert load(tmp_path, tiny_llama(num_hidden_layers=layers)).target_hidden_states == boundaries
    tokens = torch.tensor([[3, 4, 5]])
    with torch.no_grad(), captured_states(target, (4, 8)) as states:
        output = target(tokens, output_hidden_states=True)
    assert torch.equal(states[4], output.hidden_states[4])
    # The last boundary is before the final norm.
    assert torch.equal(target.model.norm(states[8]), output.hidden_states[8])
    for key in (9, -1):
        with pytest.raises(UnsupportedModelError, match=f"boundaries 0 to 8, and {key} was asked for"):
            with captured_states(target, (key,)):
                pass
