"""Medusa: recorded trees, candidates and acceptance; trees by settings, base model and measured accuracies."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import BloomConfig, BloomForCausalLM

from hf_specdec import load_speculator
from hf_specdec.candidate_generators.medusa import generator as medusa
from hf_specdec.candidate_generators.medusa.generator import RankCounts, default_tree
from hf_specdec.candidate_generators.medusa.network import MedusaHeads
from hf_specdec.drafts import PUBLISHED_TREES, TokenTree
from hf_specdec.drafts.static import prior_accuracies
from hf_specdec.kernels.acceptance import follow
from hf_specdec.kernels.best import best_tokens
from hf_specdec.logits.rules import TypicalRule
from hf_specdec.protocol import Commit, DraftStep, Session
from hf_specdec.target.cache import SlotCache
from hf_specdec.target.lean import slot_model
from tests.helpers.by_hand import paths_of
from tests.helpers.draft_calls import medusa_speculator, random_heads
from tests.helpers.levels import full, in_full
from tests.helpers.models import VOCAB_SIZE, prompts, tiny_gpt2, tiny_llama
from tests.helpers.paths import FIXTURES
from tests.helpers.published import published
from tests.helpers.threads import in_threads


PUBLISHED = FIXTURES / "medusa"
GREEDY = {"max_new_tokens": 24, "do_sample": False}
CPU = torch.device("cpu")


def check_buffers(tree: TokenTree, buffers: dict, prefix: str):
    """A static tree says all that the original's buffers say."""
    topology = tree.topology(CPU)
    assert torch.equal(topology.ancestors.float()[None, None], buffers[f"{prefix}.medusa_attn_mask"])
    assert torch.equal(topology.depths, buffers[f"{prefix}.medusa_position_ids"])
    # Theirs counts the root, with ten candidates a head.
    index = 1 + medusa._candidate_of_node(tree, 10, CPU)
    assert torch.equal(torch.cat([torch.zeros(1, dtype=torch.long), index]), buffers[f"{prefix}.tree_indices"])


class TestRecordedTrees:
    def test_buffers(self):
        recorded = load_file(PUBLISHED / "tree_buffers" / "expected.safetensors")
        for name, choices in json.loads((PUBLISHED / "tree_buffers" / "choices.json").read_text()).items():
            tree = TokenTree.from_paths(choices)
            check_buffers(tree, recorded, name)
            assert name not in PUBLISHED_TREES or TokenTree.published(name) == tree

    @pytest.mark.parametrize("name", ["v01_heads_pt", *in_full("v2_shared_lm_head_safetensors")])
    def test_candidates_logits_and_acceptance(self, name):
        target, _, tensors = published(f"medusa/{name}")
        trees = {"small": TokenTree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [2]])}
        if name == "v01_heads_pt":
            trees["mc_sim_7b_63"] = TokenTree.published("mc_sim_7b_63")
        for label, tree in trees.items():
            check_buffers(tree, tensors, f"{label}.buf")
            root, draft = self.draft(target, name, tree, tensors)
            tokens = torch.cat([root[:, None], draft.tokens], dim=1)
            assert torch.equal(tokens, tensors[f"{label}.tree_candidates"])
            logits = self.tree_logits(target, tensors["input_ids"], tokens, draft)
            assert torch.allclose(logits, tensors[f"{label}.tree_logits"], rtol=0, atol=1e-4)
            self.check(follow(draft, best_tokens(logits)), root, tensors, f"{label}.greedy")
            for temperature in (0.7, 1.0):
                typical = TypicalRule(None, threshold=0.09, alpha=0.3).judge(draft, logits / temperature, None)
                self.check(typical, root, tensors, f"{label}.typical_t{temperature}")

    def draft(self, target, name, tree, tensors):
        """The anchor after the recorded prompt, and what the generator drafts after it."""
        settings = {"model": str(PUBLISHED / name), "speculative_token_tree": tree.paths}
        generator = load_speculator(target, "medusa", **settings).candidate_generator(Session(1, 100, CPU))
        root = tensors["base_logits"][:, -1].argmax(-1)
        length = tensors["input_ids"].shape[1] + 1
        with torch.no_grad():
            states = {"last": tensors["hidden_states"][:, -1:]}
            generator.observe(Commit([0], root[:, None], [root.tolist()], [0], states))
            return root, generator.propose(DraftStep([0], root, [length], [tree.max_depth]))

    def tree_logits(self, target, input_ids, tokens, draft):
        with torch.no_grad():
            slots = slot_model(target, SlotCache(64 + tokens.shape[1]))
            slots.prefill(input_ids, [0])
            return slots.forward(tokens, draft.topology).logits

    def check(self, acceptance, root, tensors, prefix):
        count = int(acceptance.num_accepted)
        assert count == int(tensors[f"{prefix}.accept_length"])
        # The recorded list begins with the root and ends before the target's new token.
        accepted = [int(root), *acceptance.tokens[0, :count].tolist()]
        assert accepted == tensors[f"{prefix}.accepted_tokens"].tolist()


def plain_heads(num_heads=4, vocab_size=VOCAB_SIZE) -> MedusaHeads:
    return MedusaHeads(4, vocab_size, num_heads, own_lm_heads=False)


def generator_for(heads, session=None, **settings):
    lm_head = torch.nn.Linear(heads.hidden_size, heads.vocab_size, bias=False)
    return medusa_speculator(heads, lm_head, **settings).candidate_generator(session or Session(1, 100, CPU))


class TestTrees:
    @full
    def test_published_tree_of_the_base_model(self):
        for base_model, name in (
            ("lmsys/vicuna-7b-v1.3", "vicuna_7b_stage2"),
            ("lmsys/Vicuna-33B-v1.3", "vicuna_33b_stage2"),
            ("HuggingFaceH4/zephyr-7b-beta", "zephyr_stage2"),
            (None, "mc_sim_7b_63"),
        ):
            heads = plain_heads(5)
            heads.base_model = base_model
            assert default_tree(heads) == TokenTree.published(name)
            heads.num_heads = 2
            assert default_tree(heads) == TokenTree.published(name).up_to(2)

    def test_measured_accuracies_make_the_tree(self):
        accuracies = [[0.5, 0.3, 0.01], [0.9, 0.05, 0.01], [0.2, 0.1, 0.1]]
        tree = default_tree(plain_heads(3), accuracies, 4)
        assert set(tree.paths) == {(0,), (0, 0), (1,), (1, 0)}
        assert default_tree(plain_heads(1), accuracies, 4).paths == ((0,), (1,), (2,))
        assert max(default_tree(plain_heads(3, 2), accuracies, 9).ranks) == 1
        heads = plain_heads(3)
        heads.accuracies = [[0.6, 0.1]] * 3
        assert generator_for(heads, num_draft_nodes=4).plan.paths == ((0,), (1,), (0, 0), (0, 0, 0))
        # Rows share the budget that is worth its time; what the user asks for is not priced.
        rows = [Session(size, 100, CPU) for size in (1, 8)]
        sizes = [generator_for(plain_heads(), session).num_draft_nodes for session in rows]
        assert 63 > sizes[0] > sizes[1] >= 1
        assert generator_for(plain_heads(), rows[1], num_draft_nodes=40).num_draft_nodes == 40
        chains_only = Session(1, 100, CPU, supports_trees=False)
        assert generator_for(plain_heads(), chains_only, num_draft_nodes=12).plan == TokenTree.chain(4)


def test_the_most_probable_paths_are_drafted_as_far_as_they_are_probable():
    heads, threshold = random_heads(logit_scale=0.3), 0.02
    settings = {"draft_confidence_threshold": threshold, "num_draft_nodes": 9}
    generator = medusa_speculator(heads, **settings).candidate_generator(Session(3, 100, CPU))
    states, tokens, limits = torch.randn(3, 1, 32), torch.zeros(3, 1, dtype=torch.long), [4, 2, 0]
    generator.observe(Commit([0, 1, 2], tokens, tokens.tolist(), [0] * 3, {"last": states}))
    draft = generator.propose(DraftStep([0, 1, 2], tokens[:, 0], [9] * 3, limits))
    probs = heads(states[:, 0]).softmax(-1)
    for row, (paths, limit) in enumerate(zip(paths_of(draft), limits)):
        found, level = {}, {(): 1.0}
        for head in range(limit):
            level = {
                (*path, token): prob * float(factor)
                for path, prob in level.items()
                for token, factor in enumerate(probs[head, row])
                if prob > threshold
            }
            found |= level
        best = sorted(found, key=found.get, reverse=True)[:9]
        assert set(paths) == {path for path in best if found[path] > threshold} | set(best[:1])


class TestMeasuredTree:
    def add(self, counts, ranks, times, committed=None):
        """`times` drafts in which head d's right token had the rank `ranks[d]`; `committed` tokens were committed."""
        candidates = torch.arange(10).expand(len(ranks), 1, 10)
        tokens = torch.tensor([ranks])
        for _ in range(times):
            counts.add(candidates, tokens, [committed or len(ranks)])

    def test_counts_become_accuracies(self):
        counts = RankCounts([[0.5, 0.25], [0.5, 0.25]], 2)
        self.add(counts, [1, 0], 63)
        assert counts.accuracies == [[0.5, 0.25], [0.5, 0.25]]
        self.add(counts, [3, 0], 1)
        weight = 64 + medusa._PRIOR_WEIGHT
        prior = [0.5 * medusa._PRIOR_WEIGHT, 0.25 * medusa._PRIOR_WEIGHT]
        assert counts.accuracies[0][:4] == pytest.approx([prior[0] / weight, (63 + prior[1]) / weight, 0, 1 / weight])
        assert counts.accuracies[1][:2] == pytest.approx([(64 + prior[0]) / weight, prior[1] / weight])
        # Heads after the first wrong one do not count, inside and outside of inference mode.
        counts = RankCounts(None, 3)
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                self.add(counts, [0, 0, 0], 32, committed=2)
        assert counts.accuracies[1][0] > 0.8
        assert counts.accuracies[2][0] == pytest.approx(prior_accuracies(1, 1)[0][0])

    @full
    def test_the_tree_follows(self):
        generator = generator_for(plain_heads(), medusa_tree="measured", num_draft_nodes=4)
        assert generator.plan == default_tree(plain_heads(), None, 4)
        step = DraftStep([0], torch.zeros(1, dtype=torch.long), [9], [4])
        with torch.no_grad():
            commit = Commit([0], torch.zeros(1, 1, dtype=torch.long), [[0]], [0], {"last": torch.randn(1, 1, 4)})
            generator.observe(commit)
            for _ in range(medusa._FIRST_REVIEW):
                generator.propose(step)
                right = generator.candidates[:, 0, 2][None]
                states = {"last": torch.randn(1, 4, 4)}
                generator.observe(Commit([0], right, right.tolist(), [3], states))
        assert set(generator.plan.paths) >= {(0,), (1,), (2,)}
        assert len(generator.plan) == 4

    @full
    def test_calls_share_the_counts(self, model):
        heads = MedusaHeads(32, VOCAB_SIZE, 3, own_lm_heads=False)
        speculator = load_speculator(model, "medusa", draft_model=heads, medusa_tree="measured")
        first = speculator.candidate_generator(Session(1, 100, CPU)).plan
        in_threads(*[lambda: model.generate(**prompts(3), **GREEDY, assistant=speculator)] * 4)
        assert speculator.resources.counts.accuracies is not None
        assert speculator.candidate_generator(Session(1, 100, CPU)).plan != first

    @full
    def test_targets_that_verify_chains_only_measure_nothing(self):
        heads = MedusaHeads(32, VOCAB_SIZE, 4, own_lm_heads=False)
        # At first the best tree is a chain, and what is counted would make it branch.
        heads.accuracies = [[0.02, 0.0]] * 4
        torch.manual_seed(0)
        sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.5}
        model = BloomForCausalLM(BloomConfig(**sizes, pad_token_id=0, eos_token_id=None, bos_token_id=None)).eval()
        settings = {"medusa_tree": "measured", "num_draft_nodes": 2}
        speculator = load_speculator(model, {"method": "medusa", **settings}, draft_model=heads)
        call = {**prompts(1, padding=False), "do_sample": False, "max_new_tokens": 100}
        assert torch.equal(model.generate(**call, assistant=speculator), model.generate(**call))
        assert speculator.resources.counts._num_drafts == 0


@pytest.mark.parametrize("make", [tiny_gpt2, *in_full(lambda: tiny_llama(tie_word_embeddings=True))])
def test_the_targets_lm_head(make, tmp_path):
    """Heads of version 2 go through the target's own module, which is neither copied nor changed."""
    model, inputs = make(), prompts(3)
    MedusaHeads(32, VOCAB_SIZE, 4, own_lm_heads=False).save(tmp_path)
    resources = load_speculator(model, {"method": "medusa", "model": str(tmp_path)}).resources
    assert resources.target.head is model.get_output_embeddings()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain = model.generate(**inputs, **GREEDY)
    assert torch.equal(model.generate(**inputs, **GREEDY, spec_model=str(tmp_path)), plain)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
