"""EAGLE: the official drafts and runs, the target's text whatever is drafted, and drafts against recomputation."""

from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_specdec import SpecConfigError, SpeculativeConfig, Speculator, load_speculator, record
from hf_specdec.candidate_generators.eagle.formats import EagleConfig
from hf_specdec.candidate_generators.eagle.generator import EagleCandidateGenerator
from hf_specdec.candidate_generators.eagle.network import Eagle1Network, Eagle3Network
from hf_specdec.drafting import growth, slots
from hf_specdec.drafting.entries import DraftEntries
from hf_specdec.drafting.growth import DynamicTree
from hf_specdec.drafts import DraftTree, TokenTree
from hf_specdec.protocol import Commit, Prompt, Session
from tests.helpers.by_hand import GREEDY, drafts_of, feed, random_rows, rows_of
from tests.helpers.models import VOCAB_SIZE, prompts, tiny_llama
from tests.helpers.paths import FIXTURES


PUBLISHED = FIXTURES / "eagle"
NAMES = ("eagle1_llama", "eagle3_llama", "eagle3_qwen3", "eagle3_speculators", "eagle3_specforge")
every_case = pytest.mark.parametrize("name", NAMES)

# That of the official runs.
OFFICIAL = {"draft_tree_depth": 5, "draft_tree_top_k": 4, "num_draft_nodes": 11}

STATIC = [(0,), (1,), (3,), (0, 0), (0, 2), (1, 0), (0, 2, 1), (0, 2, 1, 0)]


@cache
def published(name):
    """Target, folder of the head and expected tensors of a published case."""
    target = AutoModelForCausalLM.from_pretrained(PUBLISHED / name / "target").eval()
    target.generation_config.pad_token_id = 0
    return target, str(PUBLISHED / name), load_file(PUBLISHED / name / "expected.safetensors")


def method_of(name):
    return "eagle" if name.startswith("eagle1") else "eagle3"


def head(method, hidden_size, vocab_size, aux_layer_ids=(), known=None, **settings):
    """A head of random weights; `known` lists the target's tokens that it knows."""
    norms = ["layers.0.post_attention_layernorm"]
    if method == "eagle3":
        norms += ["layers.0.hidden_norm", "layers.0.input_layernorm", "norm"]
    config = EagleConfig(
        method=method,
        hidden_size=hidden_size,
        target_hidden_size=hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size if known is None else len(known),
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=2 * hidden_size,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        aux_layer_ids=aux_layer_ids,
        norms=tuple(norms),
        own_head=method == "eagle3",
        has_token_ids=known is not None,
        **settings,
    )
    network = (Eagle3Network if method == "eagle3" else Eagle1Network)(config).eval()
    if known is not None:
        network.token_ids = torch.tensor(known)
    return network


def speculator_for(network, **settings) -> Speculator:
    config = SpeculativeConfig(network.config.method, "loaded", **settings)
    return Speculator(config, EagleCandidateGenerator, network)


def topology(trace):
    draft = DraftTree.from_lists([trace.draft_tokens], parents=[trace.parents])
    return draft.topology


class TestOfficialRuns:
    def run(self, name, **shape):
        target, folder, expected = published(name)
        prompt = expected["prompt_ids"]
        # Some tokens more, so that the room left does not limit the last drafts.
        length = len(expected["gen_tokens"]) + 10
        with record(trace=True) as made:
            output = target.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                **{**GREEDY, "max_new_tokens": length},
                speculative={"method": method_of(name), "model": folder, **shape},
            )
        return expected, output[0, prompt.shape[1] :], rows_of(made.calls[0])

    @every_case
    def test_chain(self, name):
        expected, tokens, traces = self.run(name, num_speculative_tokens=5)
        assert traces[0].draft_tokens == expected["chain_tokens"].tolist()
        assert traces[0].parents == [-1, 0, 1, 2, 3]
        count = len(expected["baseline_tokens"])
        assert torch.equal(tokens[:count], expected["baseline_tokens"])

    @every_case
    def test_whole_run(self, name):
        expected, tokens, traces = self.run(name, **OFFICIAL)
        assert torch.equal(tokens[: len(expected["gen_tokens"])], expected["gen_tokens"])
        count = len(expected["gen_accept_lengths"])
        assert [trace.num_accepted for trace in traces[:count]] == expected["gen_accept_lengths"].tolist()
        for trace, drafted, mask, depths in zip(
            traces,
            expected["gen_cycle_draft_tokens"],
            expected["gen_cycle_tree_mask"],
            expected["gen_cycle_position_ids"],
        ):
            assert trace.draft_tokens == drafted[1:].tolist()
            assert torch.equal(topology(trace).ancestors, mask.bool())
            assert torch.equal(topology(trace).depths, depths)

    def test_static_tree_of_the_first_version(self):
        expected, tokens, traces = self.run("eagle1_llama", speculative_token_tree="eagle_1")
        assert torch.equal(tokens[: len(expected["v1_gen_tokens"])], expected["v1_gen_tokens"])
        count = len(expected["v1_gen_accept_lengths"])
        assert [trace.num_accepted for trace in traces[:count]] == expected["v1_gen_accept_lengths"].tolist()
        drafts = [trace.draft_tokens for trace in traces[:count]]
        assert drafts == expected["v1_gen_cycle_draft_tokens"][:, 1:].tolist()
        assert torch.equal(topology(traces[0]).ancestors, expected["v1_tree_attn_mask"].bool())
        assert torch.equal(topology(traces[0]).depths, expected["v1_tree_position_ids"])


def tree_of(settings: dict[str, int]) -> DynamicTree:
    """The dynamic tree of some settings, in the published code's numbers."""
    depth, num_nodes = settings["draft_tree_depth"] - 1, settings["num_draft_nodes"]
    return DynamicTree(depth, settings["draft_tree_top_k"], num_nodes + 1)


class Recomputed:
    """One row's drafts by definition: every node reads the whole text and its path again, without a cache."""

    def __init__(self, network, text, states):
        self.network, self.tokens = network, text[1:]
        self.hidden = network.fuse({key: value[None] for key, value in states.items()})[0]

    def log_probs(self, path):
        """The target's tokens that may follow a path of tokens: best first, with their log-probabilities."""
        hidden = self.hidden
        for count in range(len(path) + 1):
            tokens = torch.cat([self.tokens, torch.tensor(path[:count], dtype=torch.long)])
            steps = torch.arange(len(tokens))
            distance = steps[:, None] - steps
            visible = (distance >= 0) & (distance < (self.network.config.sliding_window or len(tokens)))
            mask = torch.zeros(visible.shape).masked_fill_(~visible, torch.finfo(torch.float32).min)
            fed_back, output = self.network(tokens[None], hidden[None], steps[None], mask[None, None])
            hidden = torch.cat([hidden, fed_back[0, -1:]])
        logits = self.network.logits(output[0, -1])
        values, ids = logits.log_softmax(-1).sort(descending=True)
        return list(zip(self.network.target_ids(ids).tolist(), values.tolist()))

    def static(self, paths):
        found = []
        for ranks in paths:
            path = ()
            for rank in ranks:
                path = (*path, self.log_probs(path)[rank][0])
            found.append(path)
        return found

    def dynamic(self, plan, limit):
        """The equations of EAGLE-2 over lists: `(score, path)` of all candidates, level by level."""
        if limit == 0:
            return []
        candidates, front = [], [(0.0, ())]
        for _ in range(min(limit, plan.max_depth)):
            level = [
                (score + value, (*path, token))
                for score, path in front
                for token, value in self.log_probs(path)[: plan.top_k]
            ]
            candidates += level
            front = sorted(level, key=lambda node: -node[0])[: plan.top_k]
        chosen = sorted(range(len(candidates)), key=lambda i: -candidates[i][0])[: plan.total_tokens - 1]
        return [candidates[i][1] for i in sorted(chosen)]


NETWORKS = {
    "eagle1": {"method": "eagle"},
    "eagle3": {"method": "eagle3", "aux_layer_ids": (0, 2, 3), "known": list(range(1, 40, 3))},
    "window": {"method": "eagle3", "aux_layer_ids": (1,), "sliding_window": 3},
}


@torch.no_grad()
def random_network(seed=0, **settings):
    torch.manual_seed(seed)
    network = head(hidden_size=32, vocab_size=40, own_embedding=True, **settings)
    if network.lm_head is None:
        network.attach(tiny_llama(vocab_size=40).requires_grad_(False))
    for weight in network.parameters():
        if weight.dim() == 2:
            # Clear choices.
            weight.mul_(2.0)
    return network.requires_grad_(False)


class TestAgainstRecomputation:
    LENGTHS = (9, 6, 12)
    PROMPTS = (5, 1, 4)

    def generator(self, network, num_rows=3, **shape):
        session = Session(num_rows, 1000, torch.device("cpu"))
        return speculator_for(network, **shape).candidate_generator(session)

    @pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS.keys())
    @pytest.mark.parametrize(("parts", "chunk_size"), [(1, 1024), (2, 2), (3, 3)])
    def test_dynamic_tree(self, network, parts, chunk_size, monkeypatch):
        monkeypatch.setattr(slots, "_CHUNK_SIZE", chunk_size)
        shape = {"draft_tree_depth": 4, "draft_tree_top_k": 3, "num_draft_nodes": 9}
        network = random_network(**network)
        generator = self.generator(network, **shape)
        texts, states = random_rows(network, self.LENGTHS, seed=parts)
        feed(generator, texts, states, self.PROMPTS, parts)
        for row, paths in enumerate(drafts_of(generator, texts)):
            assert paths == Recomputed(network, texts[row], states[row]).dynamic(tree_of(shape), 4)

    @pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS.keys())
    @pytest.mark.parametrize("paths", [STATIC, [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]], ids=["tree", "chain"])
    def test_static_tree(self, network, paths):
        network = random_network(**network)
        generator = self.generator(network, speculative_token_tree=paths)
        texts, states = random_rows(network, self.LENGTHS, seed=4)
        feed(generator, texts, states, self.PROMPTS, parts=2)
        for row, found in enumerate(drafts_of(generator, texts)):
            assert found == Recomputed(network, texts[row], states[row]).static(generator.plan.paths)

    @pytest.mark.parametrize(
        "shape",
        [{"draft_tree_depth": 4, "draft_tree_top_k": 3, "num_draft_nodes": 9}, {"num_speculative_tokens": 4}],
    )
    def test_limits_of_the_rows(self, shape):
        network = random_network(**NETWORKS["eagle3"])
        texts, states = random_rows(network, (6, 7, 8, 9), seed=7)
        limits = [0, 1, 2, 4]
        generator = self.generator(network, 4, **shape)
        feed(generator, texts, states, [4] * 4)
        for row, paths in enumerate(drafts_of(generator, texts, limits)):
            recomputed = Recomputed(network, texts[row], states[row])
            if "draft_tree_depth" in shape:
                assert paths == recomputed.dynamic(tree_of(shape), limits[row])
            else:
                assert paths == recomputed.static(TokenTree.chain(limits[row]).paths)
        assert drafts_of(generator, texts, [0] * 4) == [[]] * 4

    def test_adaptive_drafts_end_after_unlikely_nodes(self):
        network = random_network(**NETWORKS["eagle1"])
        texts, states = random_rows(network, (9, 6, 12, 8), seed=3)
        depths = {}
        for threshold in (0.0, 0.05, 0.2, 0.99):
            shape = {"draft_tree_depth": 4, "draft_tree_top_k": 3, "num_draft_nodes": 39}
            shape |= {"draft_min_path_prob": threshold}
            generator = self.generator(network, 4, **shape)
            feed(generator, texts, states, (5, 2, 4, 6))
            for row, paths in enumerate(drafts_of(generator, texts)):
                recomputed = Recomputed(network, texts[row], states[row])
                depth = 1
                while depth < 4:
                    level = [path for path in recomputed.dynamic(DynamicTree(3, 3, 40), depth) if len(path) == depth]
                    log_probs = [sum(dict(recomputed.log_probs(p[:i]))[p[i]] for i in range(depth)) for p in level]
                    if threshold and max(log_probs) <= torch.tensor(threshold).log():
                        break
                    depth += 1
                assert paths == recomputed.dynamic(DynamicTree(3, 3, 40), depth)
                depths.setdefault(threshold, []).append(depth)
        assert depths[0.0] == [4] * 4
        assert depths[0.99].count(1) >= 3
        assert 4 < sum(depths[0.2]) <= sum(depths[0.05])

    def test_equal_probabilities_keep_parents(self):
        """A head that is sure gives the child the probability of its parent."""
        network = random_network(**NETWORKS["eagle3"])
        network.lm_head.weight.mul_(1e4)
        generator = self.generator(network, draft_tree_depth=4, draft_tree_top_k=2, num_draft_nodes=3)
        texts, states = random_rows(network, self.LENGTHS, seed=1)
        feed(generator, texts, states, self.PROMPTS)
        assert [list(map(len, paths)) for paths in drafts_of(generator, texts)] == [[1, 2, 3]] * 3

    def test_nodes_whose_children_cannot_be_drafted_are_not_read(self, monkeypatch):
        network = random_network(**NETWORKS["eagle1"])
        shapes = [{"draft_tree_depth": 5, "draft_tree_top_k": 4, "num_draft_nodes": nodes} for nodes in (2, 3, 6, 11)]
        texts, states = random_rows(network, self.LENGTHS, seed=2)
        read_nodes = DraftEntries.read_nodes

        def outcomes(shape):
            read = []

            def counting(entries, tokens, *arguments):
                read.append(tokens.shape[1])
                return read_nodes(entries, tokens, *arguments)

            monkeypatch.setattr(DraftEntries, "read_nodes", counting)
            generator = self.generator(network, **shape)
            feed(generator, texts, states, self.PROMPTS)
            return drafts_of(generator, texts), sum(read)

        found = [outcomes(shape) for shape in shapes]
        monkeypatch.setattr(growth, "num_expandable", lambda plan, levels, log_probs: log_probs.shape[1])
        expected = [outcomes(shape) for shape in shapes]
        assert [drafts for drafts, _ in found] == [drafts for drafts, _ in expected]
        assert all(few < many for (_, few), (_, many) in zip(found, expected))

    @pytest.mark.parametrize(("num_tokens", "num_states"), [(8, 3), (3, 3), (0, 8), (8, 1)])
    def test_prompts_of_which_a_part_is_unknown(self, num_tokens, num_states):
        """The remaining tokens are read at their own positions, and drafted from."""
        network = random_network(**NETWORKS["eagle3"])
        (text,), (states,) = random_rows(network, [9], seed=6)
        generator = self.generator(network, 1, **OFFICIAL)
        known = {key: value[None, 8 - num_states :] for key, value in states.items()}
        generator.prefill(Prompt(text[None, 8 - num_tokens : 8], [0], known))
        last = {key: value[:, -1:] for key, value in known.items()}
        generator.observe(Commit([0], text[None, -1:], [text[-1:].tolist()], [0], last))
        count = min(num_states, num_tokens + 1)
        assert generator.entries.offsets == [max(num_tokens - count, 0)]
        known = {key: value[8 - count :] for key, value in states.items()}
        recomputed = Recomputed(network, text[8 - count :], known)
        assert drafts_of(generator, [text])[0] == recomputed.dynamic(tree_of(OFFICIAL), 5)


class TestSettings:
    def test_layers_that_are_read(self):
        target, folder, _ = published("eagle3_llama")
        other = load_speculator(target, "eagle3", model=folder, aux_layer_ids=[1, 3, 6])
        assert other.resources.target_hidden_states == (1, 3, 6)
        generator = other.candidate_generator(Session(1, 100, torch.device("cpu")))
        assert generator.target_hidden_states == (1, 3, 6)
        assert load_speculator(target, "eagle3", model=folder).resources.target_hidden_states == (2, 4, 5)

    @pytest.mark.parametrize(
        ("network", "settings", "match"),
        [
            ({}, {"aux_layer_ids": [2]}, r"\[2\] is about loading a head.*states \[0, 1\]"),
            ({"vocab_size": 66}, {}, "vocabulary of 66 tokens, and LlamaForCausalLM has 64"),
            ({"aux_layer_ids": (1, 5)}, {}, "states of 5 decoder layers, and LlamaForCausalLM has 2. Pass"),
        ],
    )
    def test_networks_that_do_not_fit(self, model, network, settings, match):
        network = head("eagle3", 32, **{"vocab_size": VOCAB_SIZE, "aux_layer_ids": (0, 1), **network})
        with pytest.raises(SpecConfigError, match=match):
            load_speculator(model, draft_model=network, method="eagle3", **settings)

    @pytest.mark.parametrize("name", ["eagle1_llama", "eagle3_speculators"])
    def test_the_other_method(self, name):
        target, folder, _ = published(name)
        right = method_of(name)
        wrong = "eagle" if right == "eagle3" else "eagle3"
        with pytest.raises(SpecConfigError, match=f"'{right}'"):
            target.generate(**prompts(1), **GREEDY, speculative={"model": folder, "method": wrong})

    def test_shapes_by_default(self):
        """A tree for few rows, the published one where nodes cost little; otherwise a chain."""
        network = random_network(**NETWORKS["eagle1"])

        def default(device, batch_size=1, settings=None, **changes):
            session = Session(batch_size, 100, torch.device(device), **changes)
            config = SpeculativeConfig("eagle", "loaded", **(settings or {}))
            return EagleCandidateGenerator(config, network, session).plan, session.notes

        assert default("cuda") == (DynamicTree(7, 10, 60), [])
        assert default("cuda", 4)[0] == DynamicTree(7, 10, 60)
        assert default("cuda", 5) == (TokenTree.chain(4), [])
        assert default("cuda", 5, {"draft_tree_depth": 6}) == (DynamicTree(5, 10, 60), [])
        assert default("cpu")[0] == default("cpu", 2)[0] == TokenTree.chain(4)
        assert default("cpu", settings={"num_draft_nodes": 19})[0] == DynamicTree(4, 4, 20)
        assert default("cuda", settings={"num_speculative_tokens": 6}) == (TokenTree.chain(6), [])
        assert default("cuda", settings={"draft_tree_top_k": 1, "draft_tree_depth": 4}) == (TokenTree.chain(4), [])
        few = {"draft_tree_top_k": 1, "draft_tree_depth": 4, "num_draft_nodes": 2}
        assert default("cuda", settings=few) == (TokenTree.chain(2), [])
        plan, notes = default("cuda", supports_trees=False)
        assert plan == TokenTree.chain(4)
        assert len(notes) == 1
        assert default("cuda", settings={"draft_tree_depth": 7}, supports_trees=False)[0] == TokenTree.chain(7)

    @pytest.mark.parametrize(
        ("device", "settings", "threshold"),
        [
            ("cpu", {}, 0.2),
            ("cuda", {}, 0.0),
            ("cpu", {"num_speculative_tokens": 4}, 0.0),
            ("cpu", {"draft_tree_top_k": 4}, 0.0),
            ("cpu", {"draft_min_path_prob": 0.0}, 0.0),
            ("cuda", {"draft_min_path_prob": 0.4}, 0.4),
            ("cpu", {"draft_min_path_prob": 0.4, "draft_tree_depth": 3}, 0.4),
        ],
    )
    def test_threshold_by_default(self, device, settings, threshold):
        """Doubtful drafts end where waiting is cheap, and no shape was asked for."""
        session = Session(1, 100, torch.device(device))
        config = SpeculativeConfig("eagle", "loaded", **settings)
        generator = EagleCandidateGenerator(config, random_network(**NETWORKS["eagle1"]), session)
        assert generator.threshold == threshold

    @pytest.mark.parametrize(
        ("tree", "max_depth", "size", "reads"),
        [
            (DynamicTree(7, 10, 60), 8, 59, 70),
            (DynamicTree(4, 4, 12), 5, 11, 16),
            (DynamicTree(0, 5, 60), 1, 5, 0),
            (DynamicTree(2, 2, 60), 3, 10, 4),
            (DynamicTree(9, 4, 3), 2, 2, 4),
        ],
    )
    def test_sizes_of_dynamic_trees(self, tree, max_depth, size, reads):
        assert (tree.max_depth, len(tree), tree.num_reads) == (max_depth, size, reads)

    @pytest.mark.parametrize(
        ("shape", "match"),
        [
            (
                {"num_speculative_tokens": 4, "draft_tree_depth": 3},
                "`num_speculative_tokens` asks for a chain, and `draft_tree_depth` is",
            ),
            (
                {"speculative_token_tree": [0, 0], "num_draft_nodes": 8},
                "asks for a static tree, and `num_draft_nodes` is",
            ),
            ({"speculative_token_tree": [(0,), (0, 40)]}, "has the rank 40, and the draft knows 40 tokens"),
        ],
    )
    def test_settings_that_do_not_fit(self, shape, match):
        speculator = speculator_for(random_network(**NETWORKS["eagle1"]), **shape)
        with pytest.raises(SpecConfigError, match=match):
            speculator.candidate_generator(Session(1, 100, torch.device("cpu")))

    @pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
    def test_nothing_would_be_continued(self, method):
        with pytest.raises(SpecConfigError, match="`draft_min_path_prob` must be below 1, got 1"):
            SpeculativeConfig(method, "folder", draft_min_path_prob=1.0)
