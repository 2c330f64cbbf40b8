"""The lean forward of small models: bit for bit the model's own over slots, and only where it is known to be."""

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hf_specdec.decoding.cache import SlotCache
from hf_specdec.decoding.functional import FunctionalSlotModel, has_lean_forward, slot_model
from hf_specdec.decoding.target import SlotModel
from hf_specdec.drafts import TreeTopology, chain_topology, static_topology
from tests.helpers.architectures import tiny_model
from tests.helpers.models import VOCAB_SIZE, prompts, tiny_llama, tiny_mistral
from tests.helpers.pairs import every_pair


CPU = torch.device("cpu")
SETTINGS = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.5,
}


def rope(kind, **parameters):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, "factor": 8.0, **parameters}}


LLAMA3 = rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = rope("yarn", original_max_position_embeddings=64)
LONGROPE = rope("longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4, original_max_position_embeddings=64)
SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}

MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama_one_head_each": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 4}),
    "llama_one_key_head": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 1}),
    "llama_bias": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama_tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama_head_dim": (LlamaForCausalLM, LlamaConfig, {"head_dim": 24}),
    "llama_gelu": (LlamaForCausalLM, LlamaConfig, {"hidden_act": "gelu_pytorch_tanh"}),
    "llama_eps": (LlamaForCausalLM, LlamaConfig, {"rms_norm_eps": 0.1}),
    "llama3": (LlamaForCausalLM, LlamaConfig, LLAMA3),
    "llama_linear": (LlamaForCausalLM, LlamaConfig, rope("linear")),
    "llama_yarn": (LlamaForCausalLM, LlamaConfig, YARN),
    "llama_wide": (LlamaForCausalLM, LlamaConfig, {"hidden_size": 512, "num_attention_heads": 8}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "mistral_sliding": (MistralForCausalLM, MistralConfig, {"sliding_window": 5}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen2_some_sliding": (Qwen2ForCausalLM, Qwen2Config, SLIDING),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
    "qwen3_some_sliding": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 8, **SLIDING}),
}


def make(name: str, dtype=torch.float32):
    kind, config, settings = MODELS[name]
    torch.manual_seed(0)
    model = kind(config(**{**SETTINGS, **settings})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Norm weights and biases that do something.
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.to(dtype)


TREE = static_topology((-1, -1, 0, 0, 1, 3, 3), CPU)
ROW_TREES = [[-1, 0, 1, -1, 3], [-1, -1, -1, 2, 3], [-1, 0, 0, 0, 3]]


@torch.no_grad()
def outputs_of(kind, model, starts, offsets=None, capacity=12, forwards=9, max_position=None, states=()):
    """Logits and states of chains and trees in turn, each followed by the commit of other counts in every row."""
    batch_size = len(starts)
    inputs = torch.randint(1, VOCAB_SIZE, (batch_size, 9), generator=torch.Generator().manual_seed(1))
    driver = kind(model, SlotCache(capacity), states)
    driver.prefill(inputs, starts)
    driver.leads = [lead + offset for lead, offset in zip(driver.leads, offsets or [0] * batch_size)]
    driver.max_position = max_position
    outputs = []
    for cycle in range(forwards):
        row_trees = TreeTopology.from_parents(torch.tensor([ROW_TREES[row % 3] for row in range(batch_size)]))
        topology = (chain_topology(cycle % 4, CPU), TREE, row_trees)[cycle % 3]
        nodes = topology.depths.shape[-1]
        tokens = torch.randint(VOCAB_SIZE, (batch_size, nodes), generator=torch.Generator().manual_seed(cycle))
        output = driver.forward(tokens, topology)
        outputs += [output.logits, *(output.hidden_states[key] for key in states)]
        counts = [1 + (row + cycle) % min(nodes, 4) for row in range(batch_size)]
        # A path of the first tree; in the others it only has to be the same for both drivers.
        path = torch.tensor([[0, 1, 4, 5]]).expand(batch_size, -1)
        driver.cache.commit(counts, None if topology.is_chain else path)
    return outputs


def assert_same_bits(model, starts, lean_capacity=12, **how):
    own = outputs_of(SlotModel, model, starts, **how)
    lean = outputs_of(FunctionalSlotModel, model, starts, **{**how, "capacity": lean_capacity})
    assert all(torch.isfinite(output).all() for output in own)
    assert all(map(torch.equal, lean, own))


class TestSameBits:
    @every_pair(
        name=MODELS.keys(),
        dtype={"float32": torch.float32, "bfloat16": torch.bfloat16},
        starts={"one_row": [0], "uniform": [0, 0, 0], "left_padded": [3, 0, 5]},
    )
    def test_as_the_models_own_forward(self, name, dtype, starts):
        model = make(name, dtype)
        assert has_lean_forward(model)
        assert_same_bits(model, starts)

    @every_pair(
        name={
            name: name
            for name in (
                *("gemma", "gemma3_text", "phi3", "olmo2", "glm", "glm4", "arcee"),
                *("granite", "olmo", "olmo3", "smollm3", "seed_oss", "ministral", "cwm"),
                *("mixtral", "qwen2_moe", "qwen3_moe"),
            )
        },
        dtype={"float32": torch.float32, "bfloat16": torch.bfloat16},
        starts={"one_row": [0], "left_padded": [3, 0, 5]},
    )
    def test_other_families(self, name, dtype, starts):
        """Other norms, joined products, neighbours that turn, parts of heads that turn, and experts."""
        model = tiny_model(name, attn_implementation="sdpa").to(dtype)
        assert has_lean_forward(model)
        assert_same_bits(model, starts, states=("last", 1))

    @pytest.mark.parametrize("name", ["llama", "mistral_sliding"])
    def test_one_token_a_row(self, name):
        """The forwards of a draft model: rows of equal length need no mask."""
        model = make(name)

        @torch.no_grad()
        def drive(kind):
            driver = kind(model, SlotCache(8))
            driver.prefill(prompts(2, padding=False)["input_ids"], [0, 0])
            for token in range(40):
                yield driver.forward(torch.tensor([[token], [token + 9]]), chain_topology(0, CPU)).logits
                driver.cache.commit([1, 1])

        assert all(map(torch.equal, drive(FunctionalSlotModel), drive(SlotModel)))

    def test_agrees_with_plain_forwards(self):
        """Logits are those of the text read at once, and not only those of `SlotModel`."""
        model = make("qwen3_some_sliding")
        text = prompts(1, length=30, padding=False)["input_ids"]
        driver = FunctionalSlotModel(model, SlotCache(8))
        chunks = []
        with torch.no_grad():
            driver.prefill(text[:, :9], [0])
            for begin in range(9, 30, 3):
                chunks.append(driver.forward(text[:, begin : begin + 3], chain_topology(2, CPU)).logits)
                driver.cache.commit([3])
            whole = model(text).logits[:, 9:]
        # Sums in another order.
        torch.testing.assert_close(torch.cat(chunks, dim=1), whole, atol=1e-4, rtol=1e-4)

    def test_positions_of_the_user(self):
        assert_same_bits(make("llama"), [0], offsets=[1000])
        assert_same_bits(make("llama"), [0, 0, 2], offsets=[0, 7, 300])

    def test_growth_of_cache_and_rotary_table(self):
        assert_same_bits(make("llama_yarn"), [2, 0], capacity=200, lean_capacity=4, forwards=60)

    def test_last_position(self):
        """Nodes beyond it are moved onto it, as in the model's own way."""
        assert_same_bits(make("llama"), [0, 4], max_position=12)

    @pytest.mark.parametrize("name", ["llama", "qwen3_some_sliding"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    def test_hidden_states(self, name, dtype):
        """States at any boundary between layers, before the final norm, and those that the head reads."""
        model = make(name, dtype)
        assert_same_bits(model, [3, 0, 5], states=(2, "last", 0, model.config.num_hidden_layers))

    @pytest.mark.parametrize("kind", [SlotModel, FunctionalSlotModel])
    @pytest.mark.parametrize("states", [(), ("last", 1)])
    def test_logits_of_the_last_nodes(self, kind, states):
        model = make("llama")

        def forward(**wanted):
            driver = kind(model, SlotCache(12), states)
            driver.prefill(prompts(2)["input_ids"], [0, 2])
            tokens = torch.randint(VOCAB_SIZE, (2, 5), generator=torch.Generator().manual_seed(0))
            return driver.forward(tokens, chain_topology(4, CPU), **wanted)

        every, last = forward(), forward(logits_from=3)
        assert last.logits.shape == (2, 2, VOCAB_SIZE)
        torch.testing.assert_close(last.logits, every.logits[:, 3:])
        assert all(map(torch.equal, last.hidden_states.values(), every.hidden_states.values()))

    def test_under_autocast(self):
        with torch.autocast("cpu", torch.bfloat16):
            assert_same_bits(make("qwen3"), [3, 0, 5])

    def test_weights_are_read_where_they_are(self):
        model = make("llama_tied")
        driver = FunctionalSlotModel(model, SlotCache(16))
        own = SlotModel(model, driver.cache)
        token, topology = torch.tensor([[4]]), chain_topology(0, CPU)
        with torch.no_grad():
            driver.prefill(torch.tensor([[1, 2, 3]]), [0])
            own.starts, own.leads = driver.starts, driver.leads
            before = driver.forward(token, topology).logits
            model.model.layers[1].mlp.up_proj.weight.mul_(1.5)
            after = driver.forward(token, topology).logits
            assert torch.equal(own.forward(token, topology).logits, after)
        assert not torch.equal(before, after)

    def test_rows_that_leave(self):
        model = make("mistral_sliding")

        @torch.no_grad()
        def drive(kind):
            driver = kind(model, SlotCache(10))
            driver.prefill(prompts(4)["input_ids"], [3, 2, 1, 0])
            for rows, keep in ((4, [0, 3, 2]), (3, [2, 1]), (2, [1])):
                yield driver.forward(torch.arange(3 * rows).view(rows, 3), chain_topology(2, CPU)).logits
                driver.cache.commit([1 + row % 3 for row in range(rows)])
                driver.keep_rows(keep)

        assert all(map(torch.equal, drive(FunctionalSlotModel), drive(SlotModel)))


# Models that do not get the lean forward


class Wrapped(nn.Module):
    """Layer inside of another module, as adapters have it, which returns more than the layer."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    @property
    def weight(self):
        return self.inner.weight

    @property
    def bias(self):
        return self.inner.bias

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


def replace_activation(model):
    model.model.layers[0].mlp.act_fn = Wrapped(nn.SiLU())


def double_output(module, args, output):
    return output * 2


CHANGES = {
    "wrapped_linear": wrap_linear,
    "subclassed_linear": subclass_linear,
    "replaced_forward": replace_forward,
    "replaced_activation": replace_activation,
    "hook": lambda model: model.model.layers[0].mlp.register_forward_hook(double_output),
    "pre_hook": lambda model: model.model.norm.register_forward_pre_hook(lambda module, args: (args[0].abs(),)),
}
HARMLESS_CHANGES = {
    "hook_of_the_root": lambda model: model.register_forward_hook(lambda module, args, output: None),
    "training": lambda model: model.train(),
    "training_of_a_part": lambda model: model.model.layers[1].self_attn.train(),
    "eager_attention": lambda model: model.set_attn_implementation("eager"),
}


class TestRules:
    @pytest.mark.parametrize("change", [*CHANGES, *HARMLESS_CHANGES])
    def test_changed_models_run_their_own_forward(self, change):
        model = make("llama")
        assert type(slot_model(model, SlotCache(4))) is FunctionalSlotModel
        {**CHANGES, **HARMLESS_CHANGES}[change](model)
        assert not has_lean_forward(model)
        assert type(slot_model(model, SlotCache(4))) is SlotModel

    @pytest.mark.parametrize("change", CHANGES)
    def test_changes_count_in_generate(self, change):
        """Changes of target and draft model: the text of the changed model, and drafts that are right."""
        model, unchanged = make("llama"), make("llama")
        CHANGES[change](model)
        inputs = {**prompts(2), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
        plain = model.generate(**inputs)
        assert not torch.equal(plain, unchanged.generate(**inputs))
        output = model.generate(**inputs, assistant=model, return_dict_in_generate=True)
        assert torch.equal(output.sequences, plain)
        assert output.speculative.acceptance_rate == 1

    def test_patched_classes(self, monkeypatch):
        model = make("llama")
        monkeypatch.setattr(type(model.model.layers[0].mlp), "forward", lambda self, hidden: hidden)
        assert not has_lean_forward(model)

    def test_classes_from_outside(self):
        """Classes of any name may compute something else."""
        own_class = type("LlamaForCausalLM", (LlamaForCausalLM,), {"__module__": __name__})
        assert not has_lean_forward(own_class(LlamaConfig(**SETTINGS)).eval())

    def test_other_architectures(self):
        assert not has_lean_forward(GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1)).eval())

    @pytest.mark.parametrize("parameters", [rope("dynamic"), LONGROPE], ids=["dynamic", "longrope"])
    def test_rotary_embeddings_that_depend_on_the_length(self, parameters):
        assert not has_lean_forward(tiny_llama(**parameters))

    def test_any_size_and_device(self):
        large = tiny_llama(hidden_size=2048, num_hidden_layers=1, intermediate_size=8)
        assert has_lean_forward(large)
        assert has_lean_forward(large.to("meta"))

    def test_states_and_arguments(self):
        model = tiny_llama()
        assert type(slot_model(model, SlotCache(4), states=("last", 1))) is FunctionalSlotModel
        assert type(slot_model(model, SlotCache(4), forward_kwargs={"output_hidden_states": True})) is SlotModel

    def test_autocast(self):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert not has_lean_forward(tiny_llama())
        assert has_lean_forward(tiny_llama())

    def test_removed_hooks(self):
        model = make("llama")
        handle = model.model.register_forward_hook(lambda module, args, output: output)
        assert not has_lean_forward(model)
        handle.remove()
        assert has_lean_forward(model)


@pytest.mark.parametrize("make_target", [tiny_llama, tiny_mistral])
def test_generate_takes_the_lean_way(make_target, monkeypatch):
    forwards = []
    run = FunctionalSlotModel.forward

    def counted(self, tokens, topology):
        forwards.append(tokens.shape)
        return run(self, tokens, topology)

    monkeypatch.setattr(FunctionalSlotModel, "forward", counted)
    target = make_target()
    inputs = {**prompts(3), "max_new_tokens": 20, "do_sample": False}
    assert torch.equal(target.generate(**inputs, spec_method="ngram"), target.generate(**inputs))
    assert forwards


@pytest.mark.parametrize("method", ["ngram", "early_exit", "sparse_kv"])
def test_autocast(method):
    """Layers of the lean forward draft, where they do; keys and values have dtypes of their own."""
    target = tiny_llama()
    inputs = {**prompts(3), "max_new_tokens": 20, "do_sample": False}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = target.generate(**inputs)
        output = target.generate(**inputs, spec_method=method, num_speculative_tokens=3, return_dict_in_generate=True)
    assert output.speculative.num_accepted_tokens > 0
    # Up to ties in bfloat16.
    assert (output.sequences == plain).float().mean() > 0.8
