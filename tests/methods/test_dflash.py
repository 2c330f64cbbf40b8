"""DFlash: the official drafts and runs, the target's text whatever is drafted, and drafts against recomputation."""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from hf_specdec import SpecConfigError, SpeculativeConfig, Speculator, load_speculator, record
from hf_specdec.candidate_generators.dflash.config import (
    BlockView,
    DFlashConfig,
    DominoConfig,
    LiLiCorrConfig,
    XPressConfig,
)
from hf_specdec.candidate_generators.dflash.generator import DFlashCandidateGenerator
from hf_specdec.candidate_generators.dflash.network import DFlashNetwork
from hf_specdec.drafting import slots
from hf_specdec.protocol import Commit, DraftStep, Prompt, Session
from tests.helpers.by_hand import GREEDY, drafts_of, feed, random_rows, rows_of
from tests.helpers.distribution import (
    P_VALUE,
    SETTINGS,
    V,
    exact_distribution,
    sampled_counts,
    small_model,
)
from tests.helpers.models import VOCAB_SIZE, tiny_llama
from tests.helpers.paths import FIXTURES
from tests.helpers.statistics import chi_square_pvalue


PUBLISHED = FIXTURES / "dflash"
ROUNDS = ("qwen3_random_b8", "default_layer_ids_b4", "trained_b8", "trained_for_refinement_b8", "dspark_vanilla_b5")
ROUNDS += ("jetspec_b8", "dflash2_full_b8", "dflash2_sliding_b5")
# Cases whose rounds are the first cycles of the greedy run.
RUNS = ("domino_b6", "dspark_confidence_b5")


@cache
def published(name):
    """Target, folder of the draft and expected tensors of a published case."""
    target = AutoModelForCausalLM.from_pretrained(PUBLISHED / name / "target").eval()
    target.generation_config.pad_token_id = 0
    return target, str(PUBLISHED / name), load_file(PUBLISHED / name / "expected.safetensors")


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
            ("dflash2_full_b8", "prompt0.generate_b4", {"dflash_block_size": 4}),
            ("dflash2_sliding_b5", "prompt0.generate_b3", {"num_speculative_tokens": 2}),
            ("domino_b6", "generate", {}),
            ("dspark_confidence_b5", "generate_t00", {}),
            *(
                (name, f"prompt{row}.{run}", shape)
                for name, runs in (
                    ("trained_b8", ("generate", "refine2", "refine3", "ddtree7", "ddtree16")),
                    ("trained_for_refinement_b8", ("generate", "refine2", "refine3", "refine5", "ddtree16")),
                    ("jetspec_b8", ("generate", "tree_w4_n15", "tree_w7_n30")),
                    ("dflash2_full_b8", ("generate",)),
                    ("dflash2_sliding_b5", ("generate",)),
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
        shape = {"num_draft_nodes": 0, **shape}
        if "ddtree" in run:
            shape = {"num_draft_nodes": int(last.removeprefix("ddtree"))}
        if "tree_w" in run:
            # Theirs count the anchor.
            width, size = (int(number[1:]) for number in last.split("_")[1:])
            shape = {"num_draft_nodes": size - 1, "draft_tree_top_k": width}
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
        key = f"{run}.acceptance_lengths"
        lengths = (expected[key] if key in expected else expected[f"{run}.accepted"] + 1).tolist()
        traces = rows_of(made.calls[0])[: len(lengths)]
        assert [trace.num_accepted + 1 for trace in traces] == lengths
        if f"{run}.block_tokens" in expected:
            blocks = expected[f"{run}.block_tokens"].tolist()
            assert [trace.draft_tokens for trace in traces[: len(blocks)]] == blocks
        if "ddtree" in run and run.startswith("prompt0"):
            assert traces[0].draft_tokens == expected[f"{last}.node_token_ids"].tolist()
            assert traces[0].parents == [parent - 1 for parent in expected[f"{last}.parents"][1:].tolist()]

    @pytest.mark.parametrize("name", [*ROUNDS, *RUNS])
    @torch.no_grad()
    def test_rounds(self, name):
        """Drafts, and the keys and values that are kept of the text."""
        target, folder, expected = published(name)
        speculator = load_speculator(target, model=folder, num_draft_nodes=0)
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
            if f"{entered}anchor_position" in expected:
                assert length - 1 == expected[f"{entered}anchor_position"]
            proposed = generator.propose(DraftStep([0], anchor, [length], [100]))
            assert torch.equal(proposed.tokens, expected[f"{entered}draft_tokens"])
            if f"{entered}survival" in expected:
                survival = proposed.path_log_probs.exp()
                torch.testing.assert_close(survival, expected[f"{entered}survival"], atol=2e-4, rtol=1e-4)
            if number < 2:
                count = int(expected[f"{entered}accepted" if name in RUNS else f"{entered}forced_accepted"])
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
        """Logits of every position of a block that has these tokens after the anchor."""
        network, config = self.network, self.network.config
        stream, length = network.embed(torch.cat([self.anchor, masked])[None])[0], len(self.fused)
        positions = torch.arange(length + len(stream))
        cosine, sine = network.rotary_emb(stream, positions[None])
        for index, layer in enumerate(network.layers):
            attention, view = layer.self_attn, config.view(index)
            normed = norm(layer.input_layernorm, stream)
            read = self.convolved(layer, "attention_conv", normed, 0, normed)
            both = torch.cat([self.fused, read])
            queries, keys, values = (
                projection(x).view(len(x), -1, config.head_dim).transpose(0, 1)
                for projection, x in ((attention.q_proj, read), (attention.k_proj, both), (attention.v_proj, both))
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
            attended = attention.o_proj(attended.transpose(0, 1).flatten(1))
            stream = stream + self.convolved(layer, "attention_conv", normed, 1, attended)
            normed = norm(layer.post_attention_layernorm, stream)
            output = layer.mlp(self.convolved(layer, "mlp_conv", normed, 0, normed))
            stream = stream + self.convolved(layer, "mlp_conv", normed, 1, output)
        output = norm(network.norm, stream)
        logits = network.logits(output)
        self.anchor_output, self.output = output[:1], output if config.predicts_next else output[1:]
        if network.candidate_selector is not None:
            head = network._target.head.weight
            logits = config.logit_scale * (output @ head.T)
            logits = config.logit_softcap * (logits / config.logit_softcap).tanh() if config.logit_softcap else logits
        return logits if config.predicts_next else logits[1:]

    def convolved(self, layer, name, normed, side, values):
        """One side of a convolution, tap by tap."""
        if not self.network.config.conv_kernel_size:
            return values
        convolution, taps = getattr(layer, name), self.network.config.conv_kernel_size
        group = self.network.config.conv_group_size
        kernels = (normed @ convolution.kernel_projection.weight.T).view(len(normed), 2, taps, -1)
        result = torch.zeros_like(values)
        for row in range(len(values)):
            for tap in range(min(taps, row + 1)):
                of_groups = [part for part in kernels[row, side, tap] for _ in range(group)]
                result[row] += (convolution.base_kernel[side, tap] + torch.stack(of_groups)) * values[row - tap]
        return result

    def candidates(self, row):
        """The best tokens of a position, of equal ones the lower ids first."""
        return sorted(range(len(row)), key=lambda token: (-row[token].item(), token))[
            : self.network.config.selector_top_k or self.network.config.lilicorr.candidate_topk
        ]

    def scores(self, rows, position, previous, candidates):
        """Scores of candidates after a token."""
        selector = self.network.candidate_selector
        if selector is None:
            # The lattice's, whose own numbers are compared with the official ones.
            whole = self.network.lilicorr(rows[None], self.output[None], self.fused[-1:], self.network.embed)
            place = 0 if position == 0 else whole.tokens[0, position - 1].tolist().index(previous)
            return whole.scores[0, position, place]
        before = selector.predecessor_codebook[previous] * selector.hidden_projection(self.output[position])
        return torch.stack([rows[position][c] + before @ selector.successor_codebook[c] for c in candidates])

    def walk(self, rows, known):
        """Tokens of a walk and their probabilities among the candidates; `known` tokens by position are kept."""
        previous, tokens, sureness = self.anchor.item(), [], []
        for position, row in enumerate(rows):
            candidates = self.candidates(row)
            scores = self.scores(rows, position, previous, candidates)
            best = scores.argmax().item()
            previous = known.get(position, candidates[best])
            tokens.append(previous)
            sureness.append(scores.softmax(-1)[best].item())
        return tokens, sureness

    def masks(self, block_size):
        return torch.full((block_size - 1,), self.network.config.mask_token_id)

    def chain(self, block_size, count):
        rows, found = self.logits(self.masks(block_size)), []
        if self.network.config.has_edges:
            return prefixes(self.walk(rows[:count] if self.network.lilicorr else rows, {})[0][:count])
        for position, row in enumerate(rows[:count]):
            row = row + self.correction(position, [self.anchor.item(), *found])
            found.append(self.network.target_ids(row.argmax()[None]).item())
        return prefixes(found)

    def refined(self, before, count):
        """XPress's passes, position by position."""
        head, config = self.network.xpress_head, self.network.config
        size = config.block_size
        rows, anchor = self.logits(self.masks(size)), self.anchor.item()
        outputs = torch.cat([self.anchor_output, self.output])
        mean, tokens = head.down_g(outputs.mean(0)), self.network.target_ids(rows.argmax(-1)).tolist()
        for _ in range(config.xpress.num_passes):
            previous, states = [before, anchor, *tokens[:-1]], []
            for output, token in zip(outputs, previous):
                states.append(head.in_proj(torch.cat([head.down_h(output), mean, head.w1.weight[token]])))
            found = []
            for place in range(1, size):
                mixed = states[place] + sum(head.mix.L[:, place, j] * states[j] for j in range(place + 1))
                gate, up = head.mlp.gate_proj(mixed), head.mlp.up_proj(mixed)
                mixed = mixed + head.mlp.down_proj(gate * gate.sigmoid() * up)
                found.append((rows[place - 1] + head.w2(mixed)).argmax()[None])
            tokens = self.network.target_ids(torch.cat(found)).tolist()
        return prefixes(tokens[:count])

    def confidences(self, block_size):
        """Probabilities that tokens are kept, by the head's equation."""
        found = [path[-1] for path in self.chain(block_size, block_size)]
        head, confidences = self.network.confidence_head, []
        for output, before in zip(self.output, [self.anchor.item(), *found]):
            if self.network.config.confidence_with_markov:
                output = torch.cat([output, self.network.markov_head.markov_w1.weight[before]])
            confidences.append(head.proj(output).sigmoid().item())
        return confidences

    def correction(self, position, before):
        """What the tokens of a block before a position, the anchor among them, add to its logits."""
        network, config, output = self.network, self.network.config, self.output[position]
        if config.domino is not None:
            head, sizes = network.logit_head, config.domino
            gru = torch.nn.GRU(config.hidden_size, sizes.gru_hidden_dim, bias=False, batch_first=True)
            gru.load_state_dict(head.prefix_gru.state_dict())
            state = gru(network.embed(torch.tensor([before])))[1][0, 0]
            first, _, second = head.embed_proj
            inner = first.weight @ torch.cat([output, state])
            return 0 if position < sizes.pure_draft_prefix_len else second.weight @ (inner * inner.sigmoid())
        if not config.markov_rank:
            return 0
        head, state = network.markov_head, torch.zeros(config.markov_rank)
        for place, token in enumerate(before):
            row = head.markov_w1.weight[token]
            if config.markov_head_type == "gated":
                row = row * head.gate_proj(torch.cat([output, row])).sigmoid()
            if config.markov_head_type == "rnn":
                joint = head.joint_proj(torch.cat([state, row, self.output[place]]))
                gate, new, row = joint.view(3, -1)
                state, row = gate.sigmoid() * state + (1 - gate.sigmoid()) * new.tanh(), row.tanh()
        return head.markov_w2.weight @ row

    def denoised(self, block_size, num_steps, count):
        """The equations of several denoising steps over lists."""
        size = block_size - 1
        tokens, sureness, known = [None] * size, [0.0] * size, set()
        for step in range(num_steps):
            inputs = [tokens[i] if i in known else self.network.config.mask_token_id for i in range(size)]
            rows = self.logits(torch.tensor(inputs))
            if self.network.candidate_selector is None:
                best = [self.network.target_ids(row.argmax()).item() for row in rows]
                sure = [row.max().item() for row in rows.softmax(-1)]
            else:
                best, sure = self.walk(rows, {i: tokens[i] for i in known})
            for i in set(range(size)) - known:
                tokens[i], sureness[i] = best[i], sure[i]
            keep = -(-size * (step + 1) // num_steps)
            known = set(sorted(range(size), key=lambda i: -sureness[i])[:keep])
        return prefixes(tokens[:count])

    def tree(self, block_size, budget, depth):
        """The most probable of all prefixes of the first tokens."""
        if self.network.config.has_edges:
            return self.tree_of_walks(block_size, budget, depth)
        log_probs = self.logits(self.masks(block_size))[:depth].log_softmax(-1)
        values, ids = log_probs.sort(descending=True)
        ids, values = self.network.target_ids(ids).tolist(), values.double().tolist()
        ranked = []
        for length in range(1, depth + 1):
            for ranks in product(range(budget), repeat=length):
                ranked.append((-sum(values[i][r] for i, r in enumerate(ranks)), ranks))
        best = [ranks for _, ranks in sorted(ranked)[:budget]]
        return [tuple(ids[i][r] for i, r in enumerate(ranks)) for ranks in best]

    def tree_of_walks(self, block_size, budget, depth):
        rows = self.logits(self.masks(block_size))[:depth]
        self.output = self.output[:depth]
        found, last = [], [(0.0, ())]
        for position in range(depth):
            candidates, longer = self.candidates(rows[position]), []
            for total, path in last:
                previous = path[-1] if path else self.anchor.item()
                log_probs = self.scores(rows, position, previous, candidates).double().log_softmax(-1)
                longer += [(total + p.item(), (*path, c)) for p, c in zip(log_probs, candidates)]
            found, last = found + longer, longer
        return [path for _, path in sorted(found, key=lambda prefix: -prefix[0])[:budget]]


def norm(layer, hidden):
    scale = torch.rsqrt(hidden.square().mean(-1, keepdim=True) + layer.variance_epsilon)
    return layer.weight * (hidden * scale)


def prefixes(tokens):
    return [tuple(tokens[: count + 1]) for count in range(len(tokens))]


SELECTOR = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 5}
LATTICE = LiLiCorrConfig(
    hidden_size=16, candidate_topk=5, num_layers=2, num_heads=2, mlp_size=24, factor_dim=6, logit_scale=4.0
)
REFINER = XPressConfig(rank=6, mlp_hidden=10, num_passes=3)
_DSPARK = {"predicts_next": True, "block_size": 6, "markov_rank": 4}
NETWORKS = {
    "full": {},
    "window_and_full": {"views": (BlockView(4, True), BlockView())},
    "window": {"views": (BlockView(4), BlockView(4))},
    "causal": {"views": (BlockView(None, True), BlockView(None, True))},
    "reduced_vocabulary": {"known": list(range(1, 40, 3))},
    "biases": {"attention_bias": True, "target_layer_ids": (2, -1, 0), "num_hidden_layers": 1},
    "selector": SELECTOR,
    "selector_window_and_scales": {
        **SELECTOR,
        "conv_kernel_size": 2,
        "views": (BlockView(4), BlockView()),
        "embedding_scale": 0.5,
        "logit_scale": 1.5,
        "logit_softcap": 6.0,
    },
    "next_token": {"predicts_next": True, "block_size": 6},
    "corrections": _DSPARK,
    "corrections_reduced": {**_DSPARK, "known": list(range(0, 40, 2))},
    "corrections_gated": {**_DSPARK, "markov_head_type": "gated"},
    "corrections_rnn": {**_DSPARK, "markov_head_type": "rnn"},
    "confident": {**_DSPARK, "has_confidence": True, "confidence_with_markov": True},
    "confident_rnn": {**_DSPARK, "markov_head_type": "rnn", "has_confidence": True, "confidence_with_markov": True},
    "confident_alone": {"predicts_next": True, "block_size": 6, "has_confidence": True},
    "lilicorr": {"lilicorr": LATTICE},
    "lilicorr_convolutions": {"lilicorr": LATTICE, "conv_kernel_size": 2, "conv_group_size": 8},
    "domino": {"domino": DominoConfig(12, 10, pure_draft_prefix_len=1)},
    "domino_next_token": {"domino": DominoConfig(12, 10), "predicts_next": True, "known": list(range(0, 40, 2))},
}
every_network = pytest.mark.parametrize("network", list(NETWORKS.values()), ids=list(NETWORKS))
# Their drafts depend on more of the text than other recomputations know.
NETWORKS |= {"xpress": {"xpress": REFINER}, "xpress_reduced": {"xpress": REFINER, "known": list(range(1, 40, 2))}}


@torch.no_grad()
def random_network(seed=0, **settings):
    torch.manual_seed(seed)
    network = draft(32, 40, num_embeddings=41, mask_token_id=40, num_target_layers=3, **settings)
    if network.lm_head is None:
        network.attach(tiny_llama(vocab_size=40).requires_grad_(False))
    for name, weight in network.named_parameters():
        # Clear choices, and norms and biases that are no constants.
        if "_conv." in name or "_selector." in name or "logit_head." in name or "xpress_head." in name:
            weight.normal_(0.0, 0.3 if "_conv." in name else 1.0)
        else:
            weight.mul_(2.0) if weight.dim() == 2 else weight.add_(0.2 * torch.randn_like(weight))
    return network.requires_grad_(False)


class TestAgainstRecomputation:
    LENGTHS = (9, 6, 12)
    PROMPTS = (5, 1, 4)

    def generator(self, network, num_rows=3, **shape):
        session = Session(num_rows, 1000, torch.device("cpu"))
        return speculator_for(network, **{"num_draft_nodes": 0, **shape}).candidate_generator(session)

    @every_network
    @pytest.mark.parametrize(
        ("lengths", "prompt_lengths", "parts", "chunk_size"),
        [(LENGTHS, PROMPTS, 1, 1024), (LENGTHS, PROMPTS, 2, 2), (LENGTHS, PROMPTS, 3, 3), ((8, 8), (4, 4), 1, 1024)],
        ids=["at_once", "2_parts", "3_parts", "equal_lengths"],
    )
    def test_chain(self, network, lengths, prompt_lengths, parts, chunk_size, monkeypatch):
        monkeypatch.setattr(slots, "_CHUNK_SIZE", chunk_size)
        network = random_network(**network)
        generator = self.generator(network, len(lengths))
        texts, states = random_rows(network, lengths, seed=parts)
        feed(generator, texts, states, prompt_lengths, parts)
        for row, paths in enumerate(drafts_of(generator, texts)):
            recomputed = Recomputed(network, texts[row], states[row])
            assert paths == recomputed.chain(network.config.block_size, 6)

    @pytest.mark.parametrize("name", ["full", "next_token", "window_and_full", "domino_next_token"])
    def test_sizes_of_blocks(self, name):
        network = random_network(**NETWORKS[name])
        texts, states = random_rows(network, self.LENGTHS, seed=4)
        anchor = 7 - network.config.num_drafts(7)
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

    @pytest.mark.parametrize("name", ["full", "window_and_full", "reduced_vocabulary", "selector"])
    @pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 9])
    def test_denoising(self, name, num_steps):
        network = random_network(**NETWORKS[name], num_denoising_steps=9)
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

    @pytest.mark.parametrize(
        "name",
        ["full", "window_and_full", "reduced_vocabulary", "next_token", "selector", "selector_window_and_scales"]
        + ["lilicorr"],
    )
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

    @pytest.mark.parametrize("num_steps", [1, 3])
    def test_limits_of_the_rows(self, num_steps):
        network = random_network()
        texts, states = random_rows(network, (6, 7, 8, 9), seed=7)
        limits = [0, 1, 2, 6]
        generator = self.generator(network, 4, dflash_num_denoising_steps=num_steps)
        feed(generator, texts, states, [4] * 4)
        for row, paths in enumerate(drafts_of(generator, texts, limits)):
            recomputed = Recomputed(network, texts[row], states[row])
            assert paths == recomputed.denoised(7, num_steps, limits[row])
        assert drafts_of(generator, texts, [0] * 4) == [[]] * 4

    @pytest.mark.parametrize(("num_tokens", "num_states"), [(8, 3), (3, 3), (0, 8), (8, 1)])
    def test_prompts_of_which_a_part_is_unknown(self, num_tokens, num_states):
        """The remaining tokens are read at their own positions, and drafted from."""
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


def small_draft(**settings):
    """A draft that knows some of the tokens of the target whose distribution is enumerated."""
    target = small_model()
    torch.manual_seed(2)
    settings = {"num_target_layers": 1, "target_layer_ids": (-1, 0), "known": [0, 1, 2, 4], **settings}
    network = draft(target.config.hidden_size, V, mask_token_id=3, block_size=4, **settings)
    with torch.no_grad():
        network.lm_head.weight.mul_(4.0)
        if network.logit_head is not None:
            # A strong say.
            network.logit_head.embed_proj[2].weight.normal_(0.0, 3.0)
    return network.attach(target).requires_grad_(False)


def small_selector():
    """A draft with a selector that has a strong say, of fewer candidates than tokens, for the same target."""
    target = small_model()
    torch.manual_seed(3)
    settings = {"num_target_layers": 1, "target_layer_ids": (-1, 0), **SELECTOR, "selector_top_k": 3}
    network = draft(target.config.hidden_size, V, mask_token_id=3, block_size=4, **settings)
    with torch.no_grad():
        network.candidate_selector.successor_codebook.normal_()
    return network.attach(target).requires_grad_(False)


class TestSampling:
    @pytest.mark.parametrize("rule", ["standard", "block"])
    @pytest.mark.parametrize("name", ["temperature", "top_k"])
    def test_drawn_walks_keep_the_distribution(self, name, rule):
        speculator = speculator_for(
            small_selector(), draft_sample_method="probabilistic", rejection_sample_method=rule
        )
        counts, stats = sampled_counts(SETTINGS[name], speculator)
        assert chi_square_pvalue(counts, exact_distribution(SETTINGS[name])) > P_VALUE
        assert stats.num_accepted_tokens > 500

    @pytest.mark.parametrize("shape", [{}, {"num_draft_nodes": 6}, {"num_draft_nodes": 6, "draft_tree_top_k": 2}])
    def test_walks_and_trees_that_are_chosen_keep_the_distribution(self, shape):
        counts, stats = sampled_counts(SETTINGS["temperature"], speculator_for(small_selector(), **shape))
        assert chi_square_pvalue(counts, exact_distribution(SETTINGS["temperature"])) > P_VALUE
        assert stats.num_accepted_tokens > 300

    @pytest.mark.parametrize("rule", ["standard", "block"])
    @pytest.mark.parametrize(
        "parts",
        [
            {"predicts_next": True, "markov_rank": 3},
            {"predicts_next": True, "markov_rank": 3, "markov_head_type": "rnn"},
            {"domino": DominoConfig(6, 5, pure_draft_prefix_len=1)},
        ],
        ids=["corrections", "corrections_rnn", "domino"],
    )
    def test_drawn_drafts_that_depend_on_each_other_keep_the_distribution(self, parts, rule):
        speculator = speculator_for(
            small_draft(**parts), draft_sample_method="probabilistic", rejection_sample_method=rule
        )
        counts, stats = sampled_counts(SETTINGS["top_k"], speculator)
        assert chi_square_pvalue(counts, exact_distribution(SETTINGS["top_k"])) > P_VALUE
        assert stats.num_accepted_tokens > 500


def session(**changes):
    return Session(1, 100, torch.device("cpu"), **changes)


class TestSettings:
    @pytest.mark.parametrize(
        ("changes", "match"),
        [
            ({"vocab_size": 66}, "vocabulary of 66 tokens, and LlamaForCausalLM has 64"),
            ({"num_target_layers": 9}, "a target with 9 decoder layers, and LlamaForCausalLM has 2"),
            ({"mask_token_id": 64}, "mask token of the draft is 64.*tokens 0 to 63"),
        ],
    )
    def test_networks_that_do_not_fit(self, model, changes, match):
        with pytest.raises(SpecConfigError, match=match):
            load_speculator(model, draft_model=draft(32, **{"vocab_size": VOCAB_SIZE, **changes}))

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

    def test_number_of_denoising_steps(self, warnings):
        network = random_network()
        several = random_network(num_denoising_steps=3)

        def steps(network, **options):
            return speculator_for(network, **options).candidate_generator(session()).num_steps

        assert (steps(network), steps(several)) == (1, 3)
        assert steps(several, dflash_num_denoising_steps=1) == 1
        assert steps(several, num_draft_nodes=4) == 1
        assert steps(several, dflash_num_denoising_steps=2) == 2
        assert warnings == []
        assert steps(several, dflash_num_denoising_steps=13) == 13
        assert steps(network, dflash_num_denoising_steps=14) == 14
        assert steps(network, dflash_num_denoising_steps=14) == 14
        assert ["=13" in line and "trained for 3" in line for line in warnings] == [True, False]
        assert "=14" in warnings[1]
        assert "accepted less often" in warnings[1]
        for name in ("next_token", "corrections", "domino", "lilicorr", "xpress", "confident_alone"):
            dspark = random_network(**NETWORKS[name], num_denoising_steps=3)
            assert steps(dspark) == steps(dspark, dflash_num_denoising_steps=1) == 1
            with pytest.raises(SpecConfigError, match="must be 1 for drafts whose positions predict the next token"):
                steps(dspark, dflash_num_denoising_steps=2)

    @pytest.mark.parametrize("name", ["corrections", "domino", "xpress"])
    def test_trees_of_drafts_whose_tokens_depend_on_each_other(self, name):
        generator = speculator_for(random_network(**NETWORKS[name]), num_draft_nodes=4)
        notes = generator.candidate_generator(call := session()).session.notes
        assert notes == call.notes == ["chains instead of trees: the draft's tokens depend on each other"]

    def test_drafts_that_were_made_for_trees(self):
        """Where nothing is said, and a verification is not wide already."""
        cases = (
            ("full", {}, 1, 0),
            ("window", {}, 1, 0),
            ("causal", {}, 1, 20),
            ("causal", {}, 2, 0),
            ("causal", {"num_draft_nodes": 0}, 1, 0),
            ("causal", {"num_speculative_tokens": 4}, 1, 0),
            ("causal", {"dflash_num_denoising_steps": 2}, 1, 0),
            ("selector", {}, 1, 20),
            ("selector", {"num_draft_nodes": 7}, 3, 7),
            ("next_token", {}, 1, 0),
        )
        for name, settings, num_rows, budget in cases:
            call = Session(num_rows, 100, torch.device("cpu"))
            generator = speculator_for(random_network(**NETWORKS[name]), **settings).candidate_generator(call)
            assert (generator.tree_budget, call.notes) == (budget, []), (name, settings)
        chains_only = Session(1, 100, torch.device("cpu"), supports_trees=False)
        generator = speculator_for(random_network(**NETWORKS["causal"])).candidate_generator(chains_only)
        assert (generator.tree_budget, chains_only.notes) == (0, [])

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

    def test_a_tree_of_several_steps(self):
        with pytest.raises(SpecConfigError, match="asks for several. Leave one out"):
            SpeculativeConfig("dflash", "folder", num_draft_nodes=4, dflash_num_denoising_steps=2)
