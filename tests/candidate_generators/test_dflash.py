"""DFlash: the official drafts and runs, the target's text whatever is drafted, and drafts against recomputation."""

import copy
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from hf_specdec import SpecConfigError, SpeculativeConfig, Speculator, load_speculator, record
from hf_specdec.candidate_generators.dflash import generator as module
from hf_specdec.candidate_generators.dflash.formats import BlockView, DFlashConfig
from hf_specdec.candidate_generators.dflash.generator import DFlashCandidateGenerator
from hf_specdec.candidate_generators.dflash.network import DFlashNetwork, GivenContext
from hf_specdec.decoding.states import captured_states
from hf_specdec.drafting import slots
from hf_specdec.protocol import Commit, DraftStep, Prompt, Session
from tests.architectures import tiny_model
from tests.candidate_generators.by_hand import GREEDY, drafts_of, feed, padded, plain_and_ours, random_rows, rows_of
from tests.models import VOCAB_SIZE, prompts, tiny_llama
from tests.statistics import chi_square_pvalue
from tests.test_sampling import (
    P_VALUE,
    SETTINGS,
    V,
    exact_distribution,
    sample,
    sampled_counts,
    small_model,
)


FIXTURES = Path(__file__).parents[1] / "fixtures" / "dflash"
ROUNDS = ("qwen3_random_b8", "default_layer_ids_b4", "trained_b8", "trained_for_refinement_b8", "dspark_vanilla_b5")
ROUNDS += ("jetspec_b8",)

# Every way to draft.
SHAPES = {
    "default": {},
    "short": {"num_speculative_tokens": 2},
    "small_block": {"dflash_block_size": 4},
    "part_of_a_block": {"dflash_block_size": 6, "num_speculative_tokens": 3},
    "denoising": {"dflash_num_denoising_steps": 3},
    "tree": {"num_draft_nodes": 12},
    "small_tree": {"num_draft_nodes": 3, "num_speculative_tokens": 2},
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
KINDS = ("default", "denoising", "tree")
every_kind = pytest.mark.parametrize("shape", [SHAPES[name] for name in KINDS], ids=KINDS)


@cache
def published(name):
    """Target, folder of the draft and expected tensors of a published case."""
    target = AutoModelForCausalLM.from_pretrained(FIXTURES / name / "target").eval()
    target.generation_config.pad_token_id = 0
    return target, str(FIXTURES / name), load_file(FIXTURES / name / "expected.safetensors")


def draft(hidden_size, vocab_size, known=None, **settings):
    """A draft of random weights; `known` lists the target's tokens that it knows."""
    config = DFlashConfig(
        **{
            "hidden_size": hidden_size,
            "target_hidden_size": hidden_size,
            "vocab_size": vocab_size,
            "draft_vocab_size": vocab_size if known is None else len(known),
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 2 * hidden_size,
            "block_size": 7,
            "mask_token_id": 0,
            "target_layer_ids": (0, 1),
            "num_target_layers": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "own_head": known is not None,
            "has_token_ids": known is not None,
            **settings,
        }
    )
    network = DFlashNetwork(config).eval()
    if known is not None:
        network.token_ids = torch.tensor(known)
    return network


# By batch size. No row is padding alone.
LENGTHS = {1: 7, 3: 7, 8: 12}


def fitted(target, num_steps=100, seed=0, lengths=LENGTHS, **settings):
    """A draft that has seen the target's greedy text after the prompts of these batch sizes and lengths."""
    torch.manual_seed(seed)
    layers = target.config.num_hidden_layers
    settings = {"num_target_layers": layers, "target_layer_ids": (0, layers - 1), **settings}
    network = draft(target.config.hidden_size, target.config.vocab_size, **settings).attach(target)
    texts = []
    for batch_size, length in lengths.items():
        inputs = prompts(batch_size, length)
        for row, mask in zip(inputs["input_ids"], inputs["attention_mask"].bool()):
            text = target.generate(row[mask][None], **GREEDY)
            with torch.no_grad(), captured_states(target, network.target_hidden_states) as states:
                target(text)
            texts.append((text, states))
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
    for step in range(num_steps):
        text, states = texts[step % len(texts)]
        loss = block_loss(network, text, states)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network.requires_grad_(False)


def block_loss(network, text, states):
    """Cross entropy of blocks after every token of a text, all in one forward."""
    size, length = network.config.block_size, text.shape[1]
    anchors = torch.arange(1, length - size)
    positions = (anchors[:, None] + torch.arange(size)).flatten()
    tokens = torch.full((len(anchors), size), network.config.mask_token_id)
    tokens[:, 0] = text[0, anchors]
    block = torch.arange(len(anchors)).repeat_interleave(size)
    sees_text = torch.arange(length) < anchors.repeat_interleave(size)[:, None]
    visible = torch.cat([sees_text, block[:, None] == block], dim=1)
    keys = torch.cat([torch.arange(length), positions])
    masks = {}
    for view in network.views:
        hidden = ~visible | view.hidden(positions[:, None] - keys)
        masks[view] = torch.zeros(hidden.shape).masked_fill_(hidden, torch.finfo(torch.float32).min)[None, None]
    context = network.context(network.fuse(states), torch.arange(length)[None])
    output = network(tokens.view(1, -1), positions[None], masks, GivenContext(context))
    logits = network.target_logits(network.logits(output)).view(len(anchors), size, -1)[:, 1:]
    wanted = text[0, anchors[:, None] + torch.arange(1, size)]
    known = logits.gather(2, wanted[..., None])[..., 0].isfinite()
    return F.cross_entropy(logits[known], wanted[known])


@pytest.fixture(scope="module")
def fitted_draft(model):
    return fitted(model, num_steps=60, known=list(range(6, VOCAB_SIZE)))


def speculator_for(network, **settings) -> Speculator:
    return Speculator(SpeculativeConfig("dflash", "loaded", **settings), DFlashCandidateGenerator, network)


class TestOfficialRuns:
    @pytest.mark.parametrize(
        ("name", "run", "shape"),
        [
            ("qwen3_random_b8", "generate", {}),
            ("qwen3_random_b8", "generate_b4", {"dflash_block_size": 4}),
            ("qwen3_random_b8", "generate_b4", {"num_speculative_tokens": 3}),
            ("default_layer_ids_b4", "generate", {}),
            *(
                (name, f"prompt{row}.{run}", shape)
                for name, runs in (
                    ("trained_b8", ("generate", "refine2", "refine3", "ddtree7", "ddtree16")),
                    ("trained_for_refinement_b8", ("generate", "refine2", "refine3", "refine5", "ddtree16")),
                    ("jetspec_b8", ("generate",)),
                )
                for run in runs
                for row in range(4)
                for shape in (
                    {"dflash_num_denoising_steps": int(run.removeprefix("refine"))} if "refine" in run else {},
                )
            ),
        ],
    )
    def test_tokens_and_acceptance_lengths(self, name, run, shape):
        target, folder, expected = published(name)
        beginning, _, last = run.rpartition(".")
        prompt = expected[f"{beginning}.input_ids" if beginning else "input_ids"]
        text = expected[f"{beginning}.generate.output_ids" if beginning else f"{run}.output_ids"]
        if "ddtree" in run:
            shape = {"num_draft_nodes": int(last.removeprefix("ddtree"))}
        with record(trace=True) as made:
            # Some tokens more, so that the room left does not limit the last drafts.
            output = target.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                **{**GREEDY, "max_new_tokens": text.shape[1] - prompt.shape[1] + 10},
                speculative={"model": folder, **shape},
            )
        assert made.calls[0].stats.method == "dflash"
        assert torch.equal(output[:, : text.shape[1]], text)
        lengths = expected[f"{run}.acceptance_lengths"].tolist()
        traces = rows_of(made.calls[0])[: len(lengths)]
        assert [trace.num_accepted + 1 for trace in traces] == lengths
        if "refine" in run:
            blocks = expected[f"{run}.block_tokens"].tolist()
            assert [trace.draft_tokens for trace in traces[: len(blocks)]] == blocks
        if "ddtree" in run and run.startswith("prompt0"):
            assert traces[0].draft_tokens == expected[f"{last}.node_token_ids"].tolist()
            assert traces[0].parents == [parent - 1 for parent in expected[f"{last}.parents"][1:].tolist()]

    @pytest.mark.parametrize("name", ROUNDS)
    @torch.no_grad()
    def test_rounds_with_forced_acceptance(self, name):
        """Drafts, and the keys and values that are kept of the text."""
        target, folder, expected = published(name)
        speculator = load_speculator(target, model=folder)
        network = speculator.resources
        generator = speculator.candidate_generator(Session(1, 1000, torch.device("cpu")))
        prompt = expected["input_ids"] if "input_ids" in expected else expected["prompt0.input_ids"]
        committed, length = [], prompt.shape[1]
        for number in range(3):
            entered = f"r{number}."
            parts = expected[f"{entered}context_features"].split(network.config.target_hidden_size, dim=-1)
            states = dict(zip(network.target_hidden_states, parts))
            anchor = expected[f"{entered}block_input_ids"][:, 0]
            if number == 0:
                generator.prefill(Prompt(prompt, [0], states))
                states = {key: value[:, -1:] for key, value in states.items()}
            tokens = torch.cat([*committed, anchor])[None]
            generator.observe(Commit([0], tokens, tokens.tolist(), [tokens.shape[1] - 1], states))
            length += tokens.shape[1]
            assert length - 1 == expected[f"{entered}anchor_position"]
            proposed = generator.propose(DraftStep([0], anchor, [length], [100]))
            assert torch.equal(proposed.tokens, expected[f"{entered}draft_tokens"])
            if number < 2:
                count = int(expected[f"{entered}forced_accepted"])
                committed = [expected[f"{entered}draft_tokens"][0, :count]]
        kept = generator.text.cache.row_states(0)
        for layer, ours in enumerate(kept):
            for part, mine in zip("kv", ours):
                if f"cache.{part}.{layer}" in expected:
                    # In some cases a further round has been run.
                    kept = expected[f"cache.{part}.{layer}"][:, :, : mine.shape[1]]
                    torch.testing.assert_close(mine[None], kept, atol=2e-4, rtol=1e-4)


class Recomputed:
    """One row's drafts by definition: text and block as one sequence, without a cache, with attention spelt out."""

    def __init__(self, network, text, states):
        self.network, self.anchor = network, text[-1:]
        joined = torch.cat([states[layer + 1] for layer in network.config.target_layer_ids], dim=-1)
        self.fused = norm(network.hidden_norm, joined @ network.fc.weight.T)

    def logits(self, masked):
        """Of every position of a block that has these tokens after the anchor."""
        network, config = self.network, self.network.config
        stream, length = network.embed(torch.cat([self.anchor, masked])[None])[0], len(self.fused)
        positions = torch.arange(length + len(stream))
        cosine, sine = network.rotary_emb(stream, positions[None])
        for index, layer in enumerate(network.layers):
            attention, view = layer.self_attn, config.view(index)
            normed = norm(layer.input_layernorm, stream)
            both = torch.cat([self.fused, normed])
            queries, keys, values = (
                projection(x).view(len(x), -1, config.head_dim).transpose(0, 1)
                for projection, x in ((attention.q_proj, normed), (attention.k_proj, both), (attention.v_proj, both))
            )
            queries, keys = norm(attention.q_norm, queries), norm(attention.k_norm, keys)
            queries = apply_rotary_pos_emb(queries[None], queries[None], cosine[:, length:], sine[:, length:])[0][0]
            keys = apply_rotary_pos_emb(keys[None], keys[None], cosine, sine)[0][0]
            groups = config.num_attention_heads // config.num_key_value_heads
            keys, values = keys.repeat_interleave(groups, 0), values.repeat_interleave(groups, 0)
            distance = positions[length:, None] - positions
            seen = (distance >= 0) | (not view.causal)
            seen &= distance.abs() < (view.window or 1000)
            weights = queries @ keys.transpose(1, 2) / config.head_dim**0.5
            attended = weights.masked_fill(~seen, -torch.inf).softmax(-1) @ values
            stream = stream + attention.o_proj(attended.transpose(0, 1).flatten(1))
            stream = stream + layer.mlp(norm(layer.post_attention_layernorm, stream))
        logits = network.logits(norm(network.norm, stream))
        return logits if config.predicts_next else logits[1:]

    def masks(self, block_size):
        return torch.full((block_size - 1,), self.network.config.mask_token_id)

    def chain(self, block_size, count):
        rows, previous, found = self.logits(self.masks(block_size)), self.anchor, []
        for row in rows[:count]:
            if self.network.markov_head is not None:
                head = self.network.markov_head
                row = row + (head.markov_w1.weight[previous] @ head.markov_w2.weight.T)[0]
            previous = self.network.target_ids(row.argmax()[None])
            found.append(previous.item())
        return prefixes(found)

    def denoised(self, block_size, num_steps, count):
        """The equations of several denoising steps over lists."""
        size = block_size - 1
        tokens, sureness, known = [None] * size, [0.0] * size, set()
        for step in range(num_steps):
            inputs = [tokens[i] if i in known else self.network.config.mask_token_id for i in range(size)]
            for i, row in enumerate(self.logits(torch.tensor(inputs)).softmax(-1)):
                if i not in known:
                    tokens[i] = self.network.target_ids(row.argmax()).item()
                    sureness[i] = row.max().item()
            keep = -(-size * (step + 1) // num_steps)
            known = set(sorted(range(size), key=lambda i: -sureness[i])[:keep])
        return prefixes(tokens[:count])

    def tree(self, block_size, budget, depth):
        """The most probable of all prefixes of the first tokens."""
        log_probs = self.logits(self.masks(block_size))[:depth].log_softmax(-1)
        values, ids = log_probs.sort(descending=True)
        ids, values = self.network.target_ids(ids).tolist(), values.double().tolist()
        ranked = []
        for length in range(1, depth + 1):
            for ranks in product(range(budget), repeat=length):
                ranked.append((-sum(values[i][r] for i, r in enumerate(ranks)), ranks))
        best = [ranks for _, ranks in sorted(ranked)[:budget]]
        return [tuple(ids[i][r] for i, r in enumerate(ranks)) for ranks in best]


def norm(layer, hidden):
    scale = torch.rsqrt(hidden.square().mean(-1, keepdim=True) + layer.variance_epsilon)
    return layer.weight * (hidden * scale)


def prefixes(tokens):
    return [tuple(tokens[: count + 1]) for count in range(len(tokens))]


NETWORKS = {
    "full": {},
    "window_and_full": {"views": (BlockView(4, True), BlockView())},
    "window": {"views": (BlockView(4), BlockView(4))},
    "causal": {"views": (BlockView(None, True), BlockView(None, True))},
    "reduced_vocabulary": {"known": list(range(1, 40, 3))},
    "biases": {"attention_bias": True, "target_layer_ids": (2, -1, 0), "num_hidden_layers": 1},
    "next_token": {"predicts_next": True, "block_size": 6},
    "corrections": {"predicts_next": True, "block_size": 6, "markov_rank": 4},
    "corrections_reduced": {"predicts_next": True, "block_size": 6, "markov_rank": 4, "known": list(range(0, 40, 2))},
}
every_network = pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS.keys())


@torch.no_grad()
def random_network(seed=0, **settings):
    torch.manual_seed(seed)
    network = draft(32, 40, num_embeddings=41, mask_token_id=40, num_target_layers=3, **settings)
    if network.lm_head is None:
        network.attach(tiny_llama(vocab_size=40).requires_grad_(False))
    for weight in network.parameters():
        # Clear choices, and norms and biases that are no constants.
        weight.mul_(2.0) if weight.dim() == 2 else weight.add_(0.2 * torch.randn_like(weight))
    return network.requires_grad_(False)


class TestAgainstRecomputation:
    LENGTHS = (9, 6, 12)
    PROMPTS = (5, 1, 4)

    def generator(self, network, num_rows=3, **shape):
        session = Session(num_rows, 1000, torch.device("cpu"))
        return speculator_for(network, **shape).candidate_generator(session)

    @every_network
    @pytest.mark.parametrize(("parts", "chunk_size"), [(1, 1024), (2, 2), (3, 3)])
    def test_chain(self, network, parts, chunk_size, monkeypatch):
        monkeypatch.setattr(slots, "_CHUNK_SIZE", chunk_size)
        network = random_network(**network)
        generator = self.generator(network)
        texts, states = random_rows(network, self.LENGTHS, seed=parts)
        feed(generator, texts, states, self.PROMPTS, parts)
        for row, paths in enumerate(drafts_of(generator, texts)):
            recomputed = Recomputed(network, texts[row], states[row])
            assert paths == recomputed.chain(network.config.block_size, 6)

    @every_network
    def test_rows_of_equal_length(self, network):
        network = random_network(**network)
        generator = self.generator(network, 2)
        texts, states = random_rows(network, (8, 8), seed=3)
        feed(generator, texts, states, (4, 4))
        for row, paths in enumerate(drafts_of(generator, texts)):
            recomputed = Recomputed(network, texts[row], states[row])
            assert paths == recomputed.chain(network.config.block_size, 6)

    @pytest.mark.parametrize("name", ["full", "next_token", "window_and_full"])
    def test_sizes_of_blocks(self, name):
        network = random_network(**NETWORKS[name])
        texts, states = random_rows(network, self.LENGTHS, seed=4)
        anchor = 0 if network.config.predicts_next else 1
        for settings, block, count in (
            ({"num_speculative_tokens": 2}, 2 + anchor, 2),
            ({"dflash_block_size": 4}, 4, 4 - anchor),
            ({"dflash_block_size": 5, "num_speculative_tokens": 2}, 5, 2),
            ({"dflash_block_size": 1 + anchor}, 1 + anchor, 1),
        ):
            generator = self.generator(network, **settings)
            assert (generator.block_size, generator.num_speculative_tokens) == (block, count)
            feed(generator, texts, states, self.PROMPTS)
            for row, paths in enumerate(drafts_of(generator, texts)):
                assert paths == Recomputed(network, texts[row], states[row]).chain(block, count)

    @pytest.mark.parametrize("name", ["full", "window_and_full", "reduced_vocabulary"])
    @pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 9])
    def test_denoising(self, name, num_steps):
        network = random_network(**NETWORKS[name])
        texts, states = random_rows(network, self.LENGTHS, seed=5)
        for shape, block, count in (
            ({}, 7, 6),
            ({"num_speculative_tokens": 4}, 5, 4),
            ({"dflash_block_size": 6, "num_speculative_tokens": 2}, 6, 2),
        ):
            generator = self.generator(network, dflash_num_denoising_steps=num_steps, **shape)
            feed(generator, texts, states, self.PROMPTS)
            for row, paths in enumerate(drafts_of(generator, texts)):
                recomputed = Recomputed(network, texts[row], states[row])
                assert paths == recomputed.denoised(block, num_steps, count)

    def test_steps_change_drafts(self):
        network = random_network(seed=1)
        texts, states = random_rows(network, self.LENGTHS, seed=5)
        found = []
        for num_steps in (1, 3):
            generator = self.generator(network, dflash_num_denoising_steps=num_steps)
            feed(generator, texts, states, self.PROMPTS)
            found.append(drafts_of(generator, texts))
        assert found[0] != found[1]

    @pytest.mark.parametrize("name", ["full", "window_and_full", "reduced_vocabulary", "next_token"])
    @pytest.mark.parametrize(("budget", "depth"), [(1, 4), (5, 1), (12, 4)])
    def test_tree(self, name, budget, depth):
        network = random_network(**NETWORKS[name])
        block = depth + (0 if network.config.predicts_next else 1)
        texts, states = random_rows(network, self.LENGTHS, seed=6)
        generator = self.generator(network, num_draft_nodes=budget, num_speculative_tokens=depth)
        feed(generator, texts, states, self.PROMPTS)
        for row, paths in enumerate(drafts_of(generator, texts)):
            recomputed = Recomputed(network, texts[row], states[row])
            assert paths == recomputed.tree(block, budget, depth)

    @every_kind
    def test_limits_of_the_rows(self, shape):
        network = random_network()
        texts, states = random_rows(network, (6, 7, 8, 9), seed=7)
        limits = [0, 1, 2, 6]
        generator = self.generator(network, 4, **shape)
        feed(generator, texts, states, [4] * 4)
        for row, paths in enumerate(drafts_of(generator, texts, limits)):
            recomputed = Recomputed(network, texts[row], states[row])
            assert max(map(len, paths), default=0) <= limits[row]
            if shape == SHAPES["default"]:
                assert paths == recomputed.chain(7, limits[row])
            elif shape == SHAPES["denoising"]:
                assert paths == recomputed.denoised(7, 3, limits[row])
        assert drafts_of(generator, texts, [0] * 4) == [[]] * 4

    @every_shape
    @pytest.mark.parametrize("name", ["full", "window_and_full"])
    def test_rows_do_not_depend_on_each_other(self, name, shape):
        network = random_network(**NETWORKS[name])
        texts, states = random_rows(network, (9, 6, 12, 8), seed=3)
        together = self.generator(network, 4, **shape)
        feed(together, texts, states, (5, 2, 4, 6))
        found = drafts_of(together, texts)
        for row in range(4):
            alone = self.generator(network, 1, **shape)
            feed(alone, texts[row : row + 1], states[row : row + 1], [3])
            assert drafts_of(alone, texts[row : row + 1])[0] == found[row]

    @every_kind
    def test_blocks_leave_nothing_behind(self, shape):
        """Another draft after a draft is the same, and so is one after more text."""
        network = random_network(**NETWORKS["window_and_full"])
        texts, states = random_rows(network, (9, 6, 12), seed=9)
        again = self.generator(network, **shape)
        short = [text[:-2] for text in texts]
        known = [{key: value[:-2] for key, value in row.items()} for row in states]
        feed(again, short, known, self.PROMPTS)
        assert drafts_of(again, short) == drafts_of(again, short)
        more = {key: torch.stack([row[key][-2:] for row in states]) for key in network.target_hidden_states}
        tokens = torch.stack([text[-2:] for text in texts])
        again.observe(Commit([0, 1, 2], tokens, tokens.tolist(), [1, 1, 1], more))
        fresh = self.generator(network, **shape)
        feed(fresh, texts, states, self.PROMPTS)
        assert drafts_of(again, texts) == drafts_of(fresh, texts)

    def test_rows_that_leave(self):
        network = random_network()
        texts, states = random_rows(network, (9, 6, 12, 8), seed=5)
        for read_before in (False, True):
            generator = self.generator(network, 4)
            feed(generator, texts, states, (5, 2, 4, 6))
            if read_before:
                drafts_of(generator, texts)
            generator.keep_rows([3, 1])
            kept = drafts_of(generator, [texts[3], texts[1]])
            assert kept == [Recomputed(network, texts[row], states[row]).chain(7, 6) for row in (3, 1)]

    @pytest.mark.parametrize(("num_tokens", "num_states"), [(8, 3), (3, 3), (0, 8), (8, 1)])
    def test_prompts_of_which_a_part_is_unknown(self, num_tokens, num_states):
        """What is left is read at its own position, and drafted from."""
        network = random_network()
        (text,), (states,) = random_rows(network, [9], seed=6)
        generator = self.generator(network, 1)
        known = {key: value[None, 8 - num_states :] for key, value in states.items()}
        generator.prefill(Prompt(text[None, 8 - num_tokens : 8], [0], known))
        last = {key: value[:, -1:] for key, value in known.items()}
        generator.observe(Commit([0], text[None, -1:], [text[-1:].tolist()], [0], last))
        count = min(num_states, num_tokens + 1)
        assert generator.text.offsets == [max(num_tokens - count, 0)]
        known = {key: value[8 - count :] for key, value in states.items()}
        # Only distances of positions count.
        assert drafts_of(generator, [text])[0] == Recomputed(network, text[8 - count :], known).chain(7, 6)


class TestLogits:
    def test_a_part_of_a_block_copies_no_weights(self):
        """The positions that predict are no matrix of their own; a batched product would copy the lm_head."""
        for network in (random_network(), random_network(known=list(range(1, 40, 3)))):
            output = torch.randn(1, 7, network.config.hidden_size)
            with Operators() as seen:
                logits = network.logits(network.predicting(output)[:, :3])
            assert logits.shape == (1, 3, network.config.draft_vocab_size)
            assert "aten::mm" in seen.names
            assert "aten::bmm" not in seen.names
            torch.testing.assert_close(logits, network.logits(output)[:, 1:4])


class Operators(TorchDispatchMode):
    """Names of the operators that run inside."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name().partition(".")[0])
        return func(*args, **(kwargs or {}))


class TestNothingIsReadBack:
    """On the meta device there are no numbers: whoever asks for one fails, as a GPU would have to wait."""

    @pytest.mark.parametrize(
        ("name", "shape"),
        [
            *product(("full", "window_and_full"), SHAPES.values()),
            ("corrections_reduced", {}),
            ("corrections_reduced", {"num_speculative_tokens": 2}),
        ],
    )
    def test_drafting(self, name, shape):
        network = random_network(**NETWORKS[name])
        network = network.to("meta") if network.lm_head is not None else attached_to_meta(network)
        generator = speculator_for(network, **shape).candidate_generator(Session(3, 100, torch.device("meta")))
        rows, size = [0, 1, 2], network.config.target_hidden_size

        def tensors(width):
            states = {key: torch.zeros((3, width, size), device="meta") for key in network.target_hidden_states}
            return torch.zeros((3, width), dtype=torch.long, device="meta"), states

        tokens, states = tensors(5)
        generator.prefill(Prompt(tokens, [0, 1, 2], states))
        tokens, states = tensors(3)
        generator.observe(Commit(rows, tokens, [[1], [1, 2], [1, 2, 3]], [0] * 3, states))
        limits = [generator.num_speculative_tokens] * 3
        proposed = generator.propose(DraftStep(rows, tokens[:, 0], [6, 6, 6], [*limits[:2], limits[2] - 1]))
        assert proposed.batch_size == 3


def attached_to_meta(network):
    return network.to("meta").attach(tiny_llama(vocab_size=40).to("meta"))


class TestDraftCache:
    @pytest.mark.parametrize("name", ["trained_b8", "dspark_vanilla_b5"])
    def test_equals_a_rebuild(self, name, monkeypatch):
        """After every cycle the keys and values are those of the text so far, read at once."""
        target, folder, expected = published(name)
        kept = []
        begin_block = module.DraftText.begin_block

        def watched(text, size):
            kept.append((text.cache.lengths[0], text.cache.row_states(0)))
            begin_block(text, size)

        monkeypatch.setattr(module.DraftText, "begin_block", watched)
        speculator = load_speculator(target, model=folder)
        prompt = expected["input_ids"] if "input_ids" in expected else expected["prompt0.input_ids"]
        text = target.generate(prompt, attention_mask=torch.ones_like(prompt), **GREEDY, assistant=speculator)
        lengths = [length for length, _ in kept]
        assert lengths == sorted(set(lengths))
        cycles = kept.copy()
        network = speculator.resources
        with torch.no_grad(), captured_states(target, network.target_hidden_states) as states:
            target(text)
        rebuilt = speculator.candidate_generator(Session(1, 1000, torch.device("cpu")))
        rebuilt.prefill(Prompt(text, [0], states))
        for length, layers in cycles:
            for ours, whole in zip(layers, rebuilt.text.cache.row_states(0)):
                for mine, all_of_them in zip(ours, whole):
                    torch.testing.assert_close(mine, all_of_them[:, :length], atol=1e-4, rtol=1e-4)


class TestGreedyEqualsPlain:
    @every_kind
    def test_published_draft(self, shape):
        """A padded batch of the official prompts: every row drafts what it drafts alone."""
        target, folder, expected = published("trained_b8")
        rows = [expected[f"prompt{row}.input_ids"][0] for row in range(4)]
        texts = [expected[f"prompt{row}.generate.output_ids"][0, len(rows[row]) :] for row in range(4)]
        inputs = {"input_ids": padded(rows, True), "attention_mask": padded([torch.ones_like(r) for r in rows], True)}
        speculator = load_speculator(target, model=folder, **shape)
        plain, ours, call = plain_and_ours(target, speculator, inputs, max_new_tokens=32)
        assert torch.equal(ours, plain)
        for row in range(4):
            assert torch.equal(ours[row, inputs["input_ids"].shape[1] :], texts[row][:32])
            alone = {"input_ids": rows[row][None], "attention_mask": torch.ones_like(rows[row])[None]}
            _, _, single = plain_and_ours(target, speculator, alone, max_new_tokens=32)
            ours_of_row, theirs = rows_of(call, row), rows_of(single)
            assert [(trace.draft_tokens, trace.parents) for trace in ours_of_row] == [
                (trace.draft_tokens, trace.parents) for trace in theirs
            ]

    @pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss"])
    def test_architectures(self, name):
        """Sliding windows, sinks and scaled embeddings in the target; its last layer among those read."""
        target = tiny_model(name)
        network = fitted(target, num_steps=40, lengths={4: 9})
        for shape in (SHAPES["default"], SHAPES["tree"]):
            plain, ours, call = plain_and_ours(target, speculator_for(network, **shape), prompts(4, length=9))
            assert torch.equal(ours, plain)
            assert call.stats.num_accepted_tokens > 0

    def test_stop_token_inside_of_an_accepted_block(self):
        target, folder, expected = published("trained_b8")
        prompt, text = expected["prompt0.input_ids"], expected["prompt0.generate.output_ids"]
        first_block = text[0, prompt.shape[1] :].tolist()
        lengths = expected["prompt0.generate.acceptance_lengths"].tolist()
        begin, ended = 0, 0
        for length in lengths:
            inside = [token for token in first_block[begin + 1 : begin + length] if token not in first_block[:begin]]
            begin += length
            for eos in inside[:1]:
                plain, ours, _ = plain_and_ours(
                    target,
                    load_speculator(target, model=folder),
                    {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)},
                    eos_token_id=eos,
                    max_new_tokens=60,
                )
                assert torch.equal(ours, plain)
                ended += ours.shape[1] < prompt.shape[1] + 60
        assert ended > 3


def small_draft(**settings):
    """A draft that knows some of the tokens of the target whose distribution is enumerated."""
    target = small_model()
    torch.manual_seed(2)
    settings = {"num_target_layers": 1, "target_layer_ids": (-1, 0), "known": [0, 1, 2, 4], **settings}
    network = draft(target.config.hidden_size, V, mask_token_id=3, block_size=4, **settings)
    with torch.no_grad():
        network.lm_head.weight.mul_(4.0)
    return network.attach(target).requires_grad_(False)


class TestSampling:
    def test_drawn_drafts_that_depend_on_each_other_keep_the_distribution(self):
        speculator = speculator_for(
            small_draft(predicts_next=True, markov_rank=3),
            draft_sample_method="probabilistic",
            rejection_sample_method="block",
        )
        counts, stats = sampled_counts(SETTINGS["top_k"], speculator)
        assert chi_square_pvalue(counts, exact_distribution(SETTINGS["top_k"])) > P_VALUE
        assert stats.num_accepted_tokens > 500

    @pytest.mark.parametrize(
        ("shape", "note"), [(SHAPES["tree"], "draws chains"), (SHAPES["denoising"], "chosen, not drawn")]
    )
    def test_what_is_not_drawn(self, model, fitted_draft, shape, note):
        target, network = model, fitted_draft
        speculator = speculator_for(network, draft_sample_method="probabilistic", **shape)
        with record(trace=True) as made:
            sample(target, prompts(2), assistant=speculator)
        assert any(note in line for line in made.calls[0].stats.notes)
        for cycle in made.calls[0].cycles:
            for row in cycle.rows:
                assert row.parents == list(range(-1, len(row.draft_tokens) - 1))
        with record() as made:
            target.generate(**prompts(2), **GREEDY, assistant=speculator)
        assert made.calls[0].stats.notes == []


def session(**changes):
    return Session(1, 100, torch.device("cpu"), **changes)


class TestSettings:
    def test_network_as_an_object(self, model, fitted_draft):
        target, network = model, fitted_draft
        inputs = prompts(3)
        with record() as made:
            ours = target.generate(**inputs, **GREEDY, spec_model=network)
        assert torch.equal(ours, target.generate(**inputs, **GREEDY))
        assert made.calls[0].stats.method == "dflash"
        assert made.calls[0].stats.num_accepted_tokens > 0
        for options, other, match in (
            (
                {"method": "eagle3"},
                network,
                "'eagle3' cannot draft with a DFlashNetwork, which is for method='dflash'",
            ),
            (
                {"method": "dflash"},
                torch.nn.Linear(2, 2),
                "drafts with a network of the class DFlashNetwork, got a Linear",
            ),
            ({}, draft(48, VOCAB_SIZE), "hidden size 48, and LlamaForCausalLM has 32"),
            ({}, draft(32, 66), "vocabulary of 66 tokens, and LlamaForCausalLM has 64"),
            (
                {},
                draft(32, VOCAB_SIZE, num_target_layers=9),
                "a target with 9 decoder layers, and LlamaForCausalLM has 2",
            ),
            ({}, draft(32, VOCAB_SIZE, mask_token_id=64), "mask token of the draft is 64.*tokens 0 to 63"),
        ):
            with pytest.raises(SpecConfigError, match=match):
                load_speculator(target, draft_model=other, **options)

    def test_no_checkpoint(self, model):
        with pytest.raises(SpecConfigError, match="spec_method='dflash' needs a draft"):
            model.generate(**prompts(1), **GREEDY, spec_method="dflash")

    def test_loads_once(self, monkeypatch):
        loaded = []

        def counted(config, target_model, load=module.load_dflash):
            loaded.append(config.options.dflash_mask_token_id)
            return load(config, target_model)

        monkeypatch.setattr(module, "load_dflash", counted)
        target, folder, _ = published("qwen3_random_b8")
        target = copy.deepcopy(target)
        for shape in (*SHAPES.values(), {"dflash_mask_token_id": 7}):
            target.generate(**prompts(1), max_new_tokens=3, do_sample=False, speculative={"model": folder, **shape})
        assert loaded == [None, 7]

    def test_mask_token(self):
        network = random_network()
        texts, states = random_rows(network, (8,), seed=1)
        found = []
        for token in (None, 40, 3):
            generator = speculator_for(network, dflash_mask_token_id=token).candidate_generator(session())
            feed(generator, texts, states, [4])
            found.append(drafts_of(generator, texts))
            masked = replace(network.config, mask_token_id=generator.mask_token_id)
            assert masked.mask_token_id == (40 if token is None else token)
            recomputed = Recomputed(network, texts[0], states[0])
            recomputed.masks = lambda size, token=masked.mask_token_id: torch.full((size - 1,), token)
            assert found[-1][0] == recomputed.chain(7, 6)
        assert found[0] == found[1] != found[2]
        with pytest.raises(SpecConfigError, match="mask token of the draft is 41.*tokens 0 to 40"):
            speculator_for(network, dflash_mask_token_id=41).candidate_generator(session())

    def test_number_of_denoising_steps(self, caplog):
        network = random_network()
        several = random_network(num_denoising_steps=3)

        def steps(network, **options):
            return speculator_for(network, **options).candidate_generator(session()).num_steps

        assert (steps(network), steps(several)) == (1, 3)
        assert steps(several, dflash_num_denoising_steps=1) == 1
        assert steps(several, num_draft_nodes=4) == 1
        with warnings_of(module) as seen:
            assert steps(several, dflash_num_denoising_steps=2) == 2
            assert seen == []
            assert steps(several, dflash_num_denoising_steps=13) == 13
            assert steps(network, dflash_num_denoising_steps=14) == 14
            assert steps(network, dflash_num_denoising_steps=14) == 14
        assert ["=13" in line and "trained for 3" in line for line in seen] == [True, False]
        assert "=14" in seen[1]
        assert "accepted less often" in seen[1]
        for name in ("next_token", "corrections"):
            dspark = random_network(**NETWORKS[name], num_denoising_steps=3)
            assert steps(dspark) == steps(dspark, dflash_num_denoising_steps=1) == 1
            with pytest.raises(SpecConfigError, match="must be 1 for drafts whose positions predict the next token"):
                steps(dspark, dflash_num_denoising_steps=2)

    def test_trees_of_drafts_whose_tokens_depend_on_each_other(self):
        generator = speculator_for(random_network(**NETWORKS["corrections"]), num_draft_nodes=4)
        notes = generator.candidate_generator(call := session()).session.notes
        assert notes == call.notes == ["chains instead of trees: the draft's tokens depend on each other"]

    def test_length_for_other_engines(self):
        for settings, length in (({}, 15), ({"dflash_block_size": 8}, 7), ({"num_speculative_tokens": 3}, 3)):
            assert SpeculativeConfig("dflash", "folder", **settings).to_vllm()["num_speculative_tokens"] == length

    @pytest.mark.parametrize(
        ("settings", "match"),
        [
            ({"dflash_block_size": 8}, "from 2 to 7, the block that the draft was trained with, got 8"),
            ({"dflash_block_size": 1}, "from 2 to 7, the block that the draft was trained with, got 1"),
            ({"num_speculative_tokens": 7}, "at most 6, what the draft's block of 7 tokens yields, got 7"),
            ({"dflash_block_size": 4, "num_speculative_tokens": 4}, "at most 3, what `dflash_block_size`=4 yields"),
        ],
    )
    def test_sizes_that_do_not_fit(self, settings, match):
        with pytest.raises(SpecConfigError, match=match):
            speculator_for(random_network(), **settings).candidate_generator(session())

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"dflash_block_size": 0}, "`dflash_block_size` must be an integer from 1 to 1025, got 0"),
            (
                {"dflash_num_denoising_steps": 0},
                "`dflash_num_denoising_steps` must be an integer from 1 to 1024, got 0",
            ),
            ({"dflash_mask_token_id": -1}, "`dflash_mask_token_id` must be an integer of at least 0, got -1"),
            ({"num_draft_nodes": -1}, "`num_draft_nodes` must be an integer from 0 to 1024, got -1"),
            ({"draft_sample_method": "best"}, "`draft_sample_method` must be 'greedy'"),
            ({"num_draft_nodes": 4, "dflash_num_denoising_steps": 2}, "asks for several. Leave one out"),
        ],
    )
    def test_options_out_of_range(self, options, match):
        with pytest.raises(SpecConfigError, match=match):
            SpeculativeConfig("dflash", "folder", **options)


class warnings_of:
    """The warnings that a module logs inside."""

    def __init__(self, module):
        self.logger, self.seen = module.logger, []

    def __enter__(self):
        self.logger.addFilter(self._keep)
        return self.seen

    def __exit__(self, *error):
        self.logger.removeFilter(self._keep)

    def _keep(self, line):
        self.seen.append(line.getMessage())
        return False
