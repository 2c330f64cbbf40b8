"""`generate()` over draft trees: plain generation's text and cache, and the states after every committed token."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from hf_specdec import DraftTree, SpeculativeConfig, Speculator, record
from hf_specdec.decoding import functional
from hf_specdec.decoding.functional import FunctionalSlotModel, slot_model
from hf_specdec.drafts import TokenTree
from hf_specdec.protocol import Commit, DraftStep, Prompt
from tests.helpers.caches import CACHE
from tests.helpers.models import TINY, VOCAB_SIZE, prompts, tiny_gpt2, tiny_llama, tiny_mistral
from tests.helpers.pairs import every_pair
from tests.helpers.scripted import Script, ScriptedCandidateGenerator


BATCH_SIZES = [1, 3, 8]
NEW_TOKENS = 16
STATIC_TREES = {
    "one_node": TokenTree.from_parents([0]),
    "7_nodes": TokenTree.from_paths([(0,), (1,), (2,), (0, 0), (1, 0), (0, 0, 0), (0, 0, 1)]),
    "chain": TokenTree.chain(6),
    "eagle_1": TokenTree.published("eagle_1"),
    "medusa": TokenTree.published("mc_sim_7b_63"),
}
DYNAMIC = "dynamic"
TREES = {**STATIC_TREES, DYNAMIC: DYNAMIC}


class TreeGenerator(ScriptedCandidateGenerator):
    """Drafts a static tree, or in every cycle another tree for every row."""

    most_nodes = 20

    @property
    def num_draft_nodes(self) -> int:
        return self.most_nodes if self.script.tree == DYNAMIC else len(self.script.tree)

    def propose(self, step: DraftStep) -> DraftTree:
        return self._dynamic(step) if self.script.tree == DYNAMIC else self._static(step)

    def _static(self, step: DraftStep) -> DraftTree:
        tree = self.script.tree
        tokens = [
            self._tree_tokens(row, length, tree.max_depth, list(tree.parents))
            for row, length in zip(step.rows, step.lengths)
        ]
        return DraftTree.of_shape(tree, torch.tensor(tokens), step.max_draft_tokens)

    def _dynamic(self, step: DraftStep) -> DraftTree:
        parents = [
            [
                self.random.randint(max(-1, node - 4), node - 1)
                for node in range(self.random.randint(0, self.most_nodes))
            ]
            for _ in step.rows
        ]
        tokens = [
            self._tree_tokens(row, length, room, row_parents)
            for row, length, room, row_parents in zip(step.rows, step.lengths, step.max_draft_tokens, parents)
        ]
        size = max(map(len, tokens))
        if size == 0:
            return DraftTree.empty(len(tokens))
        return DraftTree(
            torch.tensor([row + [0] * (size - len(row)) for row in tokens]),
            torch.tensor([(row + [-1] * size)[:size] for row in parents]),
            torch.tensor(list(map(len, tokens))),
        )


def speculator_for(text, inputs, tree, kind=TreeGenerator, accuracy=0.8, resources=Script, **more) -> Speculator:
    """Drafts with `kind` from `text`, an output of `generate(**inputs)`."""
    starts = (inputs["attention_mask"] == 0).sum(1).tolist()
    texts = [row[start:] for row, start in zip(text.tolist(), starts)]
    depth = 12 if tree == DYNAMIC else tree.max_depth
    config = SpeculativeConfig(method="scripted", num_speculative_tokens=depth)
    return Speculator(config, kind, resources(texts, VOCAB_SIZE, accuracy, tree=tree, **more))


def tiny_gemma3():
    """Sliding and full layers in turn, masks and rotary embeddings by kind of layer, norms on queries and keys."""
    settings = {name: value for name, value in TINY.items() if value is not None}
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        **{**settings, "num_hidden_layers": 3, "head_dim": 8, "initializer_range": 0.3, "query_pre_attn_scalar": 8},
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    model = Gemma3ForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def hooked(model):
    """Runs through its own forward, as everything does that is not small and plain."""
    model.get_decoder().layers[0].register_forward_hook(lambda module, args, output: None)
    return model


@dataclass(frozen=True)
class Case:
    """A model; windows of 2 to 4 tokens are shorter than the prompts and than most paths."""

    make: object
    is_lean: bool = False


CASES = {
    "llama": Case(tiny_llama, is_lean=True),
    "llama_own_forward": Case(lambda: hooked(tiny_llama())),
    "llama_one_key_head": Case(lambda: tiny_llama(seed=1, num_key_value_heads=1), is_lean=True),
    "window": Case(lambda: tiny_mistral(sliding_window=3), is_lean=True),
    "window_own_forward": Case(lambda: hooked(tiny_mistral(sliding_window=3))),
    "window_of_two": Case(lambda: tiny_mistral(sliding_window=2), is_lean=True),
    "sliding_and_full_layers": Case(tiny_gemma3, is_lean=True),
    "sliding_and_full_layers_own_forward": Case(lambda: hooked(tiny_gemma3())),
    "learned_positions": Case(tiny_gpt2),
}


@cache
def target(name: str):
    return CASES[name].make()


@cache
def plain(name: str, batch_size: int):
    """Prompts, and what plain generation makes of them."""
    inputs = prompts(batch_size, length=11)
    output = target(name).generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, return_dict_in_generate=True)
    return inputs, output


def test_models_go_the_way_they_are_here_for():
    for name, case in CASES.items():
        assert isinstance(slot_model(target(name), None), FunctionalSlotModel) == case.is_lean, name


class TestGreedyEqualsPlain:
    @every_pair(name=CASES.keys(), tree=TREES.keys(), batch_size=BATCH_SIZES)
    def test_text_and_cache(self, name, tree, batch_size):
        inputs, expected = plain(name, batch_size)
        speculator = speculator_for(expected.sequences, inputs, TREES[tree])
        ours = target(name).generate(
            **inputs, max_new_tokens=NEW_TOKENS, do_sample=False, return_dict_in_generate=True, assistant=speculator
        )
        assert torch.equal(ours.sequences, expected.sequences)
        assert ours.speculative.num_accepted_tokens > 0.2 * batch_size * NEW_TOKENS
        assert_same_cache(ours[CACHE], expected[CACHE])

    @pytest.mark.parametrize("tree", TREES)
    @pytest.mark.parametrize("accuracy", [0.0, 1.0])
    def test_nothing_or_everything_is_right(self, tree, accuracy):
        inputs, expected = plain("llama", 3)
        speculator = speculator_for(expected.sequences, inputs, TREES[tree], accuracy=accuracy)
        with record(trace=True) as made:
            ours = target("llama").generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, assistant=speculator)
        assert torch.equal(ours, expected.sequences)
        if accuracy and tree != DYNAMIC:
            rows = [row for cycle in made.calls[0].cycles for row in cycle.rows]
            assert all(row.num_accepted >= 1 for row in rows if row.draft_tokens)

    @pytest.mark.parametrize("tree", TREES)
    def test_rows_that_leave_one_by_one(self, tree):
        inputs = prompts(8, length=11)
        text = target("window").generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        ends = {int(row[11 + 2 * index]) for index, row in enumerate(text)}
        settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": sorted(ends)}
        expected = target("window").generate(**inputs, **settings)
        lengths = {int(row.ne(0).sum()) for row in expected}
        assert len(lengths) > 3
        speculator = speculator_for(text, inputs, TREES[tree])
        assert torch.equal(target("window").generate(**inputs, **settings, assistant=speculator), expected)


def assert_same_cache(ours, expected):
    assert ours.get_seq_length() == expected.get_seq_length()
    assert len(ours.layers) == len(expected.layers)
    for layer, other in zip(ours.layers, expected.layers):
        # Sums in another order.
        torch.testing.assert_close(layer.keys, other.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(layer.values, other.values, atol=1e-4, rtol=1e-4)


@dataclass(frozen=True)
class RecordedScript(Script):
    prompts: list[Prompt] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)


class RecordingGenerator(TreeGenerator):
    """Keeps what it is handed."""

    target_hidden_states = ("last", 0, 1, 2)

    def prefill(self, prompt: Prompt) -> None:
        self.script.prompts.append(prompt)

    def observe(self, commit: Commit) -> None:
        self.script.commits.append(commit)


@torch.no_grad()
def states_of_plain_forward(model, tokens: list[int]) -> dict:
    """States `(L, H)` of a forward over one whole text without cache, read by hooks of this test's own."""
    decoder, found = model.get_decoder(), {}
    # What leaves one of them enters the next.
    taps = {"last": decoder.norm, 0: decoder.embed_tokens, 1: decoder.layers[0], 2: decoder.layers[1]}
    handles = [
        tap.register_forward_hook(
            lambda module, args, output, key=key: found.update({key: output if torch.is_tensor(output) else output[0]})
        )
        for key, tap in taps.items()
    ]
    model(torch.tensor([tokens]), use_cache=False)
    for handle in handles:
        handle.remove()
    return {key: state[0] for key, state in found.items()}


class TestHiddenStates:
    @every_pair(
        make={"llama": tiny_llama, "window": tiny_mistral},
        lean={"lean_forward": True, "own_forward": False},
        walks={"at_once": False, "walk": True},
        tree=["chain", "7_nodes", "medusa", DYNAMIC],
        batch_size=[1, 3],
    )
    def test_are_those_that_predicted_the_committed_tokens(self, make, lean, walks, tree, batch_size, monkeypatch):
        self.run(make, lean, walks, tree, batch_size, monkeypatch)

    @pytest.mark.parametrize("batch_size", [1, 3])
    @pytest.mark.parametrize("chunk_size", [1, 4, 8, 9, 20])
    def test_of_prompts_that_are_read_in_chunks(self, chunk_size, batch_size, monkeypatch):
        self.run(tiny_llama, True, False, "chain", batch_size, monkeypatch, prefill_chunk_size=chunk_size)

    def run(self, make, lean, walks, tree, batch_size, monkeypatch, **more):
        if not lean:
            monkeypatch.setattr(functional, "has_lean_forward", lambda model: False)
        # Weights of the usual size: large ones would make the last digits of a sum matter.
        model = make(initializer_range=0.1)
        inputs = prompts(batch_size, length=9)
        text = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": int(text[0, 22]), **more}
        if walks:
            settings["no_repeat_ngram_size"] = NEW_TOKENS
        speculator = speculator_for(
            text, inputs, TREES[tree], RecordingGenerator, accuracy=0.9, resources=RecordedScript
        )
        with record() as made:
            model.generate(**inputs, **settings, assistant=speculator)
        assert made.calls[0].stats.num_accepted_tokens > 5
        script = speculator.resources
        (prompt,) = script.prompts
        self.check(model, prompt, script.commits, batch_size)

    def check(self, model, prompt, commits, batch_size):
        lengths = [len(tokens) for tokens in prompt.token_lists]
        texts = [list(tokens) for tokens in prompt.token_lists]
        for commit in commits:
            for row, tokens in zip(commit.rows, commit.token_lists):
                texts[row] += tokens
        expected = [states_of_plain_forward(model, tokens) for tokens in texts]
        for key in RecordingGenerator.target_hidden_states:
            assert prompt.hidden_states[key].shape[:2] == prompt.input_ids.shape
            for row, start in enumerate(prompt.starts):
                self.assert_close(prompt.hidden_states[key][row, start:], expected[row][key][: lengths[row]])
        ends = list(lengths)
        for commit in commits:
            for key in RecordingGenerator.target_hidden_states:
                assert commit.hidden_states[key].shape[:2] == commit.tokens.shape
                for index, (row, tokens) in enumerate(zip(commit.rows, commit.token_lists)):
                    states = commit.hidden_states[key][index, : len(tokens)]
                    self.assert_close(states, expected[row][key][ends[row] - 1 : ends[row] - 1 + len(tokens)])
            for row, tokens in zip(commit.rows, commit.token_lists):
                ends[row] += len(tokens)
        assert ends == [len(tokens) for tokens in texts]

    def assert_close(self, states, expected):
        # Sums in another order.
        torch.testing.assert_close(states, expected, atol=1e-5, rtol=1e-5)

    def test_hooks_are_gone(self, monkeypatch):
        monkeypatch.setattr(functional, "has_lean_forward", lambda model: False)
        model = tiny_llama()
        inputs = prompts(1)
        text = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        speculator = speculator_for(text, inputs, TREES["7_nodes"], RecordingGenerator, resources=RecordedScript)
        model.generate(**inputs, max_new_tokens=8, do_sample=False, assistant=speculator)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
