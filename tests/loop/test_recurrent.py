"""Recurrent layers: their states stay at the committed tokens, and nodes read as their paths do step by step."""

from __future__ import annotations

import random
from copy import deepcopy
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache, StaticCache

import hf_specdec
from hf_specdec import UnsupportedModelError, generate_many, load_speculator
from hf_specdec.candidate_generators.dflash.recipe import DFlashRecipe
from hf_specdec.candidate_generators.eagle.recipe import Eagle3Recipe
from hf_specdec.drafts import TreeTopology, chain_topology
from hf_specdec.target.cache import SlotCache
from hf_specdec.target.facts import model_profile
from hf_specdec.target.model import SlotModel
from hf_specdec.target.parts.recurrences import over_nodes, read_nodes, reads_nodes
from hf_specdec.target.parts.recurrent import RecurrentLayers, mixers
from hf_specdec.target.parts.recurrent_state import Nodes
from tests.helpers.architectures import empty_model, tiny_model
from tests.helpers.caches import CACHE
from tests.helpers.levels import full, in_full, split
from tests.helpers.scripted import scripted_speculator


# Every way in which a state is kept: sums with decays (gated delta rule, with a decay for each channel, Mamba-2 beside
# attention), states of every node (Mamba-1 in one part and in several), the last inputs, calls for single tokens.
WAYS = ["qwen3_next", "kimi_linear", "falcon_h1", "jamba", "zamba", "lfm2", "zaya", "nemotron_h"]
GENERATING = ["qwen3_next", "qwen3_5", "lfm2", "falcon_h1", "bamba", "nemotron_h", "jamba", "mamba", "mamba2"]

CPU = torch.device("cpu")
PROMPTS = [9, 4, 7]
KEYS = (1, "last")
STARTS = [max(PROMPTS) - length for length in PROMPTS]
VOCAB_SIZE = 99


@pytest.fixture(scope="module")
def models():
    """Tiny models by architecture, each built once."""
    made: dict[str, torch.nn.Module] = {}

    def model(name: str) -> torch.nn.Module:
        return made.setdefault(name, tiny_model(name, initializer_range=0.2))

    return model


def left_padded(rows: list[list[int]]) -> torch.LongTensor:
    width = max(map(len, rows))
    return torch.tensor([[0] * (width - len(row)) + row for row in rows])


def random_tokens(count: int, draw: random.Random) -> list[int]:
    return [draw.randrange(3, VOCAB_SIZE) for _ in range(count)]


def numbers(output, states, keys) -> torch.Tensor:
    """Logits and the named states of each token."""
    return torch.cat([output.logits, *(states[key] for key in keys)], dim=-1)


class Plain:
    """One row as plain generation reads it: the prompt at once, then one token at a time."""

    def __init__(self, model, prompt: list[int]):
        self.model, self.cache, self.length = model, DynamicCache(config=model.config), 0
        self.read(prompt)

    def read(self, tokens: list[int]) -> torch.Tensor:
        """Logits and hidden states after each of the tokens."""
        how = {CACHE: self.cache, "use_cache": True, "output_hidden_states": True}
        how["position_ids"] = torch.arange(self.length, self.length + len(tokens))[None]
        self.length += len(tokens)
        output = self.model(torch.tensor([tokens]), **how)
        return numbers(output, output.hidden_states, (1, -1))[0]

    def step(self, tokens: list[int]) -> torch.Tensor:
        return torch.cat([self.read([token]) for token in tokens])

    def assert_same_states(self, driver: SlotModel, row: int) -> None:
        states = driver.find(RecurrentLayers).of_rows([row])
        assert states
        for layer_idx, state in states.items():
            theirs = self.cache.layers[layer_idx]
            for key, own in state.conv_states.items():
                torch.testing.assert_close(own, theirs.conv_states[key], rtol=1e-3, atol=1e-3)
            for key, own in state.recurrent_states.items():
                torch.testing.assert_close(own, theirs.recurrent_states[key], rtol=1e-3, atol=1e-3)


def prefilled(model, rows: list[list[int]], states: tuple = ()) -> SlotModel:
    driver = SlotModel(model, SlotCache(64), states)
    driver.prefill(left_padded(rows), [max(map(len, rows)) - len(row) for row in rows])
    return driver


def random_parents(nodes: int, draw: random.Random) -> list[int]:
    return [draw.randint(-1, node - 1) for node in range(nodes)]


# Parents of draft nodes in every row.
SHAPES = {
    "chains": lambda nodes, draw: [list(range(-1, nodes - 1))] * len(PROMPTS),
    "one tree": lambda nodes, draw: [random_parents(nodes, draw)] * len(PROMPTS),
    "trees": lambda nodes, draw: [random_parents(nodes, draw) for _ in PROMPTS],
}


def topology_of(parents: list[list[int]]) -> TreeTopology:
    first = parents[0]
    if any(row != first for row in parents):
        return TreeTopology.from_parents(torch.tensor(parents))
    is_chain = first == list(range(-1, len(first) - 1))
    return chain_topology(len(first), CPU) if is_chain else TreeTopology.from_parents(torch.tensor(first))


def paths_of(parents: list[int]) -> list[list[int]]:
    """The nodes on the way from the root to each node, both among them."""
    paths = [[0]]
    for node, parent in enumerate(parents, 1):
        paths.append([*paths[parent + 1], node])
    return paths


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("qwen3_next", "trees"),
        ("jamba", "one tree"),
        *in_full(("zamba", "chains"), ("falcon_h1", "chains"), *((name, "trees") for name in WAYS[1:])),
    ],
)
def test_any_course_of_a_generation(models, name, shape):
    """Rows that accept different ways through drafts of different sizes, rows that leave."""
    model, draw = models(name), random.Random(len(shape))
    prompts = [random_tokens(length, draw) for length in PROMPTS]
    driver, rows = prefilled(model, prompts, KEYS), [Plain(model, prompt) for prompt in prompts]
    for nodes in (1, 5, 3, 7, 1):
        parents = SHAPES[shape](nodes - 1, draw)[: len(rows)]
        read = [random_tokens(nodes, draw) for _ in rows]
        output = driver.forward(torch.tensor(read), topology_of(parents))
        found, accepted = numbers(output, output.hidden_states, KEYS), []
        for row, (plain_row, new) in enumerate(zip(rows, read)):
            paths = paths_of(parents[row])
            for node, path in enumerate(paths):
                expected = deepcopy(plain_row).step([new[earlier] for earlier in path])[-1]
                torch.testing.assert_close(found[row, node], expected, rtol=1e-3, atol=1e-3)
            accepted.append(draw.choice(paths))
            plain_row.step([new[node] for node in accepted[-1]])
        longest = max(map(len, accepted))
        path = torch.tensor([nodes + [0] * (longest - len(nodes)) for nodes in accepted])
        driver.commit(list(map(len, accepted)), None if shape == "chains" else path)
        for row, plain_row in enumerate(rows):
            plain_row.assert_same_states(driver, row)
        if nodes == 3:
            driver.keep_rows([2, 1])
            rows = [rows[2], rows[1]]


@torch.no_grad()
@pytest.mark.parametrize("name", split(WAYS, ["falcon_h1"]))
def test_going_back_to_a_mark(models, name):
    model, draw = models(name), random.Random(1)
    prompts = [random_tokens(length, draw) for length in PROMPTS]
    driver, rows = prefilled(model, prompts), [Plain(model, prompt) for prompt in prompts]
    read = [random_tokens(3, draw) for _ in rows]
    driver.forward(torch.tensor(read), chain_topology(2, CPU))
    driver.commit([3, 1, 2])
    for plain_row, new, count in zip(rows, read, (3, 1, 2)):
        plain_row.step(new[:count])
    mark = dict(driver.find(RecurrentLayers).states)
    for _ in range(3):
        driver.forward(torch.tensor([random_tokens(1, draw) for _ in rows]), chain_topology(0, CPU))
        driver.commit([1, 1, 1])
    driver.find(RecurrentLayers).put(mark)
    for row, plain_row in enumerate(rows):
        plain_row.assert_same_states(driver, row)


def test_states_that_are_updated_elsewhere_are_refused(models):
    driver = prefilled(models("qwen3_next"), [random_tokens(5, random.Random(0))])
    with pytest.raises(UnsupportedModelError, match="Layer 0 updates a recurrent state in an unknown place"):
        driver.cache.update_conv_state(torch.zeros(1, 128, 1), 0)


@pytest.mark.parametrize("name", split(["recurrent_gemma", "rwkv", "xlstm", "minimax"], ["recurrent_gemma"]))
def test_states_that_are_kept_in_modules_are_refused(name):
    model, prompt = empty_model(name), torch.ones((1, 4), dtype=torch.long)
    words = "keeps its recurrent state in its modules, not in a cache.*Leave the speculative arguments out"
    with pytest.raises(UnsupportedModelError, match=words):
        hf_specdec.generate(model, prompt, spec_method="ngram")
    with pytest.raises(UnsupportedModelError, match=words):
        next(iter(generate_many(model, [{"input_ids": prompt[0]}], spec_method="ngram")))


GREEDY = {"max_new_tokens": 20, "do_sample": False}


def inputs(batch_size: int) -> dict[str, torch.Tensor]:
    """Left-padded prompts whose texts repeat themselves, for drafts that look up."""
    draw = random.Random(5)
    rows = [(random_tokens(4, draw) * 3)[-length:] for length in PROMPTS[:batch_size]]
    input_ids = left_padded(rows)
    mask = torch.tensor([[0] * (input_ids.shape[1] - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": input_ids, "attention_mask": mask}


def plain(model, batch_size: int, **arguments) -> torch.LongTensor:
    return model.generate(**inputs(batch_size), **GREEDY, **arguments)


TREE = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]"


@pytest.mark.parametrize("name", split(GENERATING, ["qwen3_next"]))
def test_methods_equal_plain_generate(models, name):
    """Chains and trees of drafters with and without weights."""
    model = models(name)
    block_drafter = DFlashRecipe(block_size=4, num_layers=1, target_layer_ids=(0, 1)).build(model).eval()
    head = Eagle3Recipe(aux_layer_ids=(0, 1)).build(model).eval()
    for batch_size, method in (
        (1, {"assistant": tiny_model("llama"), "num_speculative_tokens": 3}),
        (3, {"assistant": block_drafter}),
        (1, {"assistant": head}),
        (3, {"spec_method": "ngram", "speculative": {"prompt_lookup_num_matches": 4}}),
        (3, {"spec_method": "suffix", "speculative": {"suffix_decoding_use_tree_spec": True}}),
        (3, {"spec_method": "recycling"}),
        (1, {"assistant": load_speculator(model, "eagle3", draft_model=head, speculative_token_tree=TREE)}),
    ):
        settings = {**GREEDY, "return_dict_in_generate": True}
        output = hf_specdec.generate(model, **inputs(batch_size), **settings, **method)
        assert output.sequences.tolist() == plain(model, batch_size).tolist()
        assert output.speculative.num_draft_tokens > 0


def assert_same_caches(ours, theirs) -> None:
    for own, other in zip(ours.layers, theirs.layers, strict=True):
        assert type(own) is type(other)
        for part in ("conv_states", "recurrent_states"):
            for key, state in (getattr(other, part, None) or {}).items():
                if state is not None:
                    torch.testing.assert_close(getattr(own, part)[key], state, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["nemotron_h", *in_full("qwen3_next", "lfm2")])
def test_cache_of_a_batch_holds_the_states_of_every_row(models, name):
    """Rows end at different cycles."""
    model, wanted = models(name), {"return_dict_in_generate": True}
    theirs = plain(model, 3, **wanted)
    script = scripted_speculator(theirs.sequences, STARTS, VOCAB_SIZE, accuracy=0.8)
    assert_same_caches(plain(model, 3, **wanted, assistant=script)[CACHE], theirs[CACHE])


@pytest.mark.parametrize(
    ("name", "kind"), [("jamba", DynamicCache), *in_full(*product(["mamba", "mamba2"], [DynamicCache, StaticCache]))]
)
def test_cache_of_the_user_is_filled_and_continued(models, name, kind):
    """As by plain generation, which reads all tokens on top of states alone."""
    model, limit = models(name), {"max_cache_len": 80} if kind is StaticCache else {}
    plain_name = model_profile(model).cache_name
    caches = [kind(config=model.config, **limit) for _ in range(2)]
    arguments = {"max_new_tokens": 9, "do_sample": False, "return_dict_in_generate": True, "disable_compile": True}
    text = inputs(2)
    for _ in range(2):
        theirs = model.generate(**text, **arguments, **{plain_name: caches[0]})
        ours = model.generate(**text, **arguments, cache=caches[1], spec_method="ngram")
        assert ours.sequences.tolist() == theirs.sequences.tolist()
        assert ours[CACHE] is caches[1]
        assert_same_caches(caches[1], caches[0])
        width = theirs.sequences.shape[1] - text["input_ids"].shape[1]
        mask = torch.nn.functional.pad(text["attention_mask"], (0, width), value=1)
        text = {"input_ids": theirs.sequences, "attention_mask": mask}


@pytest.mark.parametrize(
    ("name", "batch_size"), [("qwen3_next", 3), *in_full(("lfm2", 1), ("jamba", 3), ("falcon_h1", 1))]
)
def test_recurrent_draft_models(models, name, batch_size):
    """A model that drafts for itself is always right, if its own states are."""
    model, wanted = models(name), {"num_speculative_tokens": 4, "return_dict_in_generate": True}
    output = plain(model, batch_size, assistant=model, **wanted)
    assert output.sequences.tolist() == plain(model, batch_size).tolist()
    assert output.speculative.num_accepted_tokens == output.speculative.num_draft_tokens
    # Now and then it is wrong, and goes back.
    other = tiny_model("llama")
    output = plain(other, batch_size, assistant=model, **wanted)
    assert output.sequences.tolist() == plain(other, batch_size).tolist()
    assert output.speculative.num_accepted_tokens < output.speculative.num_draft_tokens


ROWS, HEADS, SIZE, VALUES = 2, 3, 4, 5


@st.composite
def topologies(draw) -> TreeTopology:
    size = draw(st.integers(1, 7))
    rows = [[draw(st.integers(-1, node - 1)) for node in range(size)] for _ in range(draw(st.sampled_from([1, ROWS])))]
    return TreeTopology.from_parents(torch.tensor(rows[0] if len(rows) == 1 else rows))


def draws(seed: int):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)


@given(topologies(), st.booleans(), st.booleans(), st.sampled_from([0.1, 300.0]), st.integers(0, 99))
def test_every_node_continues_its_parent(topology, by_channel, has_rates, strength, seed):
    random, count = draws(seed), topology.depths.shape[-1]
    query, key, value = (random(ROWS, HEADS, count, size) for size in (SIZE, SIZE, VALUES))
    key = key / key.norm(dim=-1, keepdim=True)
    # Strong decays: their products along one way vanish beside those along others.
    decay = -strength * random(ROWS, HEADS, count, SIZE if by_channel else 1).abs()
    beta = random(ROWS, HEADS, count, 1).sigmoid() if has_rates else None
    start = random(ROWS, HEADS, SIZE, VALUES)
    output, sums = read_nodes(query, key, value, decay, start, Nodes(topology).visible, beta)

    parents, states = topology.parents.view(-1, count).expand(ROWS, -1), []
    for node in range(count):
        before = start if node == 0 else torch.stack([states[parents[row, node]][row] for row in range(ROWS)])
        before = before * decay[:, :, node, :, None].exp()
        written = value[:, :, node]
        if has_rates:
            written = beta[:, :, node] * (written - (before * key[:, :, node, :, None]).sum(-2))
        states.append(before + key[:, :, node, :, None] * written[:, :, None])
        torch.testing.assert_close(output[:, :, node], (states[-1] * query[:, :, node, :, None]).sum(-2))
    for nodes in torch.randint(count, (4, ROWS), generator=torch.Generator().manual_seed(seed)):
        expected = torch.stack([states[node][row] for row, node in enumerate(nodes.tolist())])
        torch.testing.assert_close(sums.after(nodes), expected)


def test_other_calls_get_the_own_forward():
    model = tiny_model("qwen3_next")
    module, other = list(mixers(model))[:2]
    assert over_nodes(model, [module]) is over_nodes(model, [module])
    with over_nodes(model, [other]).in_place():
        assert "forward" in vars(other)
        assert "forward" not in vars(module)
    hidden = draws(0)(2, 5, 64).float()
    with torch.no_grad():
        expected = module(hidden)
        with over_nodes(model, [module]).in_place():
            assert torch.equal(module(hidden), expected)


@full
def test_mixers_of_unknown_functions_and_replaced_forwards_are_stepped():
    for name, is_known in (("lfm2", True), ("mamba2", True), ("zaya", False)):
        model = tiny_model(name)
        module = next(iter(mixers(model)))
        assert reads_nodes(module, True, name != "lfm2") is is_known
        module.forward = theirs = lambda *args, **kwargs: None
        with over_nodes(model, [module]).in_place():
            assert vars(module)["forward"] is theirs
            assert not reads_nodes(module, True, name != "lfm2")
