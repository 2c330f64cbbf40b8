"""The lean forward of small models: bit for bit the model's own over slots, and only where it is known to be."""

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from hf_specdec.drafts import TreeTopology, chain_topology, static_topology
from hf_specdec.modules import kept_for
from hf_specdec.target.cache import SlotCache
from hf_specdec.target.lean import LeanModel, has_lean_forward, slot_model
from hf_specdec.target.model import SlotModel
from tests.helpers.architectures import tiny_model
from tests.helpers.levels import full, split
from tests.helpers.models import VOCAB_SIZE, prompts, tiny_gpt2, tiny_llama


CPU = torch.device("cpu")


def rope(kind, **parameters):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, "factor": 8.0, **parameters}}


TRAINED = {"original_max_position_embeddings": 64}
LONGROPE = rope("longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4, **TRAINED)
SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "layer_types": None}

# Architecture and settings.
MODELS = {
    "llama": ("llama", {}),
    "llama one head each": ("llama", {"num_key_value_heads": 4}),
    "llama one key head": ("llama", {"num_key_value_heads": 1}),
    "llama bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama eps": ("llama", {"rms_norm_eps": 0.1}),
    "llama3": ("llama", rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, **TRAINED)),
    "llama linear": ("llama", rope("linear")),
    "llama yarn": ("llama", rope("yarn", **TRAINED)),
    "llama wide": ("llama", {"hidden_size": 512, "num_attention_heads": 8}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral sliding": ("mistral", {"sliding_window": 5}),
    "qwen2 some sliding": ("qwen2", SLIDING),
    "qwen3 some sliding": ("qwen3", SLIDING),
    # Other norms, joined products, neighbours that turn, parts of heads that turn, and experts.
    **{
        name: (name, {})
        for name in (
            *("qwen2", "qwen3", "gemma", "gemma3_text", "phi3", "olmo2", "glm", "glm4", "arcee", "granite", "olmo"),
            *("olmo3", "smollm3", "seed_oss", "ministral", "cwm", "mixtral", "qwen2_moe", "qwen3_moe"),
        )
    },
}


def make(name: str):
    kind, settings = MODELS[name]
    return tiny_model(kind, attn_implementation="sdpa", **settings)


TREE = static_topology((-1, -1, 0, 0, 1, 3, 3), CPU)
ROW_TREES = [[-1, 0, 1, -1, 3], [-1, -1, -1, 2, 3], [-1, 0, 0, 0, 3]]


def tokens_of(*shape: int, seed: int = 1) -> torch.LongTensor:
    return torch.randint(1, VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def slots_of(model, capacity):
    """Empty slots, with what calls of the model keep."""
    cache = SlotCache(capacity)
    cache.plans = kept_for(model)
    return cache


def outputs_of(kind, model, starts, offsets=None, capacity=12, forwards=6, max_position=None, states=()):
    """Logits and states of chains and trees in turn, each followed by the commit of other counts in every row."""
    batch_size = len(starts)
    driver = kind(model, slots_of(model, capacity), states)
    driver.prefill(tokens_of(batch_size, 9), starts)
    driver.leads = [lead + offset for lead, offset in zip(driver.leads, offsets or [0] * batch_size)]
    driver.max_position = max_position
    outputs = []
    for cycle in range(forwards):
        row_trees = TreeTopology.from_parents(torch.tensor([ROW_TREES[row % 3] for row in range(batch_size)]))
        topology = (chain_topology(cycle % 4, CPU), TREE, row_trees)[cycle % 3]
        nodes = topology.depths.shape[-1]
        output = driver.forward(tokens_of(batch_size, nodes, seed=cycle), topology)
        outputs += [output.logits, *(output.hidden_states[key] for key in states)]
        counts = [1 + (row + cycle) % min(nodes, 4) for row in range(batch_size)]
        # A path of the first tree; in the others it only has to be the same for both drivers.
        path = torch.tensor([[0, 1, 4, 5]]).expand(batch_size, -1)
        driver.cache.commit(counts, None if topology.is_chain else path)
    return outputs


def assert_same_bits(model, starts, lean_capacity=12, **how):
    assert has_lean_forward(model) or torch.is_autocast_enabled("cpu")
    own = outputs_of(SlotModel, model, starts, **how)
    lean = outputs_of(LeanModel, model, starts, **{**how, "capacity": lean_capacity})
    assert all(torch.isfinite(output).all() for output in own)
    assert all(map(torch.equal, lean, own))


ONE, ALIKE, PADDED = [0], [0, 0, 0], [3, 0, 5]
SHORT = ["llama bias", "qwen3 some sliding", "gemma3_text", "phi3"]


@pytest.mark.parametrize("name", split(MODELS, SHORT))
def test_same_bits_as_the_models_own_forward(name):
    model = make(name)
    assert_same_bits(model, PADDED, states=("last", 1))
    model.bfloat16()
    assert_same_bits(model, ONE)
    assert_same_bits(model, ALIKE, states=(2, "last", 0, model.config.num_hidden_layers))


def test_same_bits_at_other_positions_and_capacities():
    model = make("llama")
    assert_same_bits(model, ONE, offsets=[200])
    assert_same_bits(model, [0, 0, 2], offsets=[0, 7, 100])
    # Nodes beyond the last position are moved onto it, as in the model's own way.
    assert_same_bits(model, [0, 4], max_position=12)
    # Cache and rotary table grow.
    assert_same_bits(make("llama yarn"), [2, 0], capacity=200, lean_capacity=4, forwards=40)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_bits(make("qwen3"), PADDED)


def test_same_bits_of_single_tokens_and_of_rows_that_leave():
    """The forwards of a draft model: rows of equal length need no mask."""
    model = make("mistral sliding")

    @torch.no_grad()
    def drive(kind):
        driver = kind(model, slots_of(model, 8))
        driver.prefill(prompts(2, padding=False)["input_ids"], [0, 0])
        for token in range(20):
            yield driver.forward(torch.tensor([[token], [token + 9]]), chain_topology(0, CPU)).logits
            driver.cache.commit([1, 1])
        driver = kind(model, slots_of(model, 10))
        driver.prefill(prompts(4)["input_ids"], [3, 2, 1, 0])
        for rows, keep in ((4, [0, 3, 2]), (3, [2, 1]), (2, [1])):
            yield driver.forward(torch.arange(3 * rows).view(rows, 3), chain_topology(2, CPU)).logits
            driver.cache.commit([1 + row % 3 for row in range(rows)])
            driver.keep_rows(keep)

    assert all(map(torch.equal, drive(LeanModel), drive(SlotModel)))


def test_logits_of_the_last_nodes():
    model = make("llama")

    def forward(kind, states, **wanted):
        driver = kind(model, slots_of(model, 12), states)
        driver.prefill(prompts(2)["input_ids"], [0, 2])
        return driver.forward(tokens_of(2, 5), chain_topology(4, CPU), **wanted)

    for kind, states in ((SlotModel, ()), (SlotModel, ("last", 1)), (LeanModel, ("last", 1))):
        every, last = forward(kind, states), forward(kind, states, logits_from=3)
        assert last.logits.shape[:2] == (2, 2)
        torch.testing.assert_close(last.logits, every.logits[:, 3:])
        assert all(map(torch.equal, last.hidden_states.values(), every.hidden_states.values()))


class Wrapped(nn.Module):
    """Layer inside of another module, as adapters have it, which returns more than the layer."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.weight, self.bias = inner, getattr(inner, "weight", None), None

    def forward(self, hidden):
        return self.inner(hidden) * 2


class DoubledLinear(nn.Linear):
    def forward(self, hidden):
        return super().forward(hidden) * 2


def wrap_linear(model):
    model.model.layers[1].mlp.up_proj = Wrapped(model.model.layers[1].mlp.up_proj)


def subclass_linear(model):
    # In the way of quantised linears, too: the weights stay, the class is another.
    model.model.layers[0].self_attn.q_proj.__class__ = DoubledLinear


def replace_forward(model):
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda hidden: type(mlp).forward(mlp, hidden) * 2


CHANGES = {
    "wrapped linear": wrap_linear,
    "subclassed linear": subclass_linear,
    "replaced forward": replace_forward,
    "hook": lambda model: model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * 2),
    "pre-hook": lambda model: model.model.norm.register_forward_pre_hook(lambda module, args: (args[0].abs(),)),
}
HARMLESS_CHANGES = (
    lambda model: model.register_forward_hook(lambda module, args, output: None),
    lambda model: model.model.layers[1].self_attn.train(),
    lambda model: model.set_attn_implementation("eager"),
)


def test_changed_models_run_their_own_forward(monkeypatch):
    for change in (*CHANGES.values(), *HARMLESS_CHANGES):
        model = tiny_llama()
        assert type(slot_model(model, SlotCache(4))) is LeanModel
        change(model)
        assert type(slot_model(model, SlotCache(4))) is SlotModel
    model = tiny_llama()
    handle = model.model.register_forward_hook(lambda module, args, output: output)
    assert not has_lean_forward(model)
    handle.remove()
    assert has_lean_forward(model)
    # What a plain call has asked for leaves hooks behind that do nothing in forwards over slots.
    plain = model.generate(**prompts(1), max_new_tokens=2, output_hidden_states=True, output_attentions=True)
    assert any(module._forward_hooks for module in model.modules())
    assert has_lean_forward(model)
    assert torch.equal(model.generate(**prompts(1), max_new_tokens=2, spec_method="ngram"), plain)
    monkeypatch.setattr(type(model.model.layers[0].mlp), "forward", lambda self, hidden: hidden)
    assert not has_lean_forward(model)


@pytest.mark.parametrize("change", split(CHANGES, ["subclassed linear"]))
def test_changes_count_in_generate(change):
    """Changes of target and draft model: the text of the changed model, and drafts that are right."""
    model, unchanged = tiny_llama(), tiny_llama()
    CHANGES[change](model)
    inputs = {**prompts(2), "max_new_tokens": 12, "do_sample": False}
    plain = model.generate(**inputs)
    assert not torch.equal(plain, unchanged.generate(**inputs))
    output = model.generate(**inputs, assistant=model, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain)
    assert output.speculative.acceptance_rate == 1


def test_which_models_have_a_lean_forward():
    # Classes of any name may compute something else.
    outside = type("LlamaForCausalLM", (LlamaForCausalLM,), {"__module__": __name__})(tiny_llama().config)
    # Rotary embeddings that depend on the length.
    by_length = [tiny_llama(**rope("dynamic")), tiny_llama(**LONGROPE)]
    for model in (outside, tiny_gpt2(), *by_length):
        assert not has_lean_forward(model.eval())
    model = tiny_llama()
    assert has_lean_forward(tiny_llama().to("meta"))
    assert type(slot_model(model, SlotCache(4), states=("last", 1))) is LeanModel
    assert type(slot_model(model, SlotCache(4), forward_kwargs={"output_hidden_states": True})) is SlotModel
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not has_lean_forward(model)


@full
@pytest.mark.parametrize("method", ["early_exit", "sparse_kv"])
def test_generate_under_autocast(method):
    """Keys and values have dtypes of their own."""
    target = tiny_llama()
    inputs = {**prompts(3), "max_new_tokens": 20, "do_sample": False}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = target.generate(**inputs)
        output = target.generate(**inputs, spec_method=method, num_speculative_tokens=3, return_dict_in_generate=True)
    assert output.speculative.num_accepted_tokens > 0
    # Up to ties in bfloat16.
    assert (output.sequences == plain).float().mean() > 0.8
