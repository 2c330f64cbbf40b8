"""`generate()` over draft trees: plain generation's text and cache, and the states after every committed token."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from hf_specdec import Speculator, record
from hf_specdec.drafts import TokenTree
from hf_specdec.protocol import Commit, Prompt
from hf_specdec.target import lean
from hf_specdec.target.cache import SlotCache
from hf_specdec.target.lean import LeanModel, slot_model
from tests.helpers.architectures import tiny_model
from tests.helpers.caches import CACHE
from tests.helpers.families import outputs_and_states
from tests.helpers.levels import full, in_full, split
from tests.helpers.models import prompts, scripted_for, tiny_gpt2, tiny_llama, tiny_mistral
from tests.helpers.scripted import ScriptedCandidateGenerator


NEW_TOKENS = 16
CALL = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
TREES = {
    "one_node": (-1,),
    "7_nodes": (-1, -1, -1, 0, 1, 3, 3),
    "chain": None,
    "eagle_1": TokenTree.published("eagle_1").parents,
    "medusa": TokenTree.published("mc_sim_7b_63").parents,
    # Another tree for every row in every cycle.
    "random": "random",
}


# Windows of 2 to 4 tokens are shorter than the prompts and than most paths. Small and plain models have a lean forward
# of this package.
LEAN = {
    "llama": tiny_llama,
    "llama_one_key_head": lambda: tiny_llama(seed=1, num_key_value_heads=1),
    "window": lambda: tiny_mistral(sliding_window=3),
    "window_of_two": lambda: tiny_mistral(sliding_window=2),
    # Masks and rotary embeddings by kind of layer, norms on queries and keys.
    "sliding_and_full_layers": lambda: tiny_model("gemma3_text", sliding_window=4, vocab_size=64),
}
OWN_FORWARD = {
    "learned_positions": tiny_gpt2,
    **{f"{name}_own_forward": LEAN[name] for name in ("llama", "window", "sliding_and_full_layers")},
}


@cache
def target(name: str):
    model = {**LEAN, **OWN_FORWARD}[name]()
    if name in OWN_FORWARD:
        model.get_decoder().register_forward_hook(lambda module, args, output: None)
    assert isinstance(slot_model(model, SlotCache(4)), LeanModel) == (name in LEAN)
    return model


def assert_same_cache(ours, expected):
    assert ours.get_seq_length() == expected.get_seq_length()
    for layer, other in zip(ours.layers, expected.layers, strict=True):
        # Sums in another order.
        torch.testing.assert_close(layer.keys, other.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(layer.values, other.values, atol=1e-4, rtol=1e-4)


SHORT = ["llama", "window_of_two", "sliding_and_full_layers_own_forward"]


@pytest.mark.parametrize("name", split([*LEAN, *OWN_FORWARD], SHORT))
def test_text_and_cache_equal_plain_generate(name):
    for number, (label, tree) in enumerate(TREES.items()):
        batch_size = (1, 3, 8)[number % 3]
        inputs = prompts(batch_size, length=11)
        settings = {**CALL, "return_dict_in_generate": True}
        expected = target(name).generate(**inputs, **settings)
        speculator = scripted_for(expected.sequences, inputs, accuracy=0.8, tree=tree)
        ours = target(name).generate(**inputs, **settings, assistant=speculator)
        assert torch.equal(ours.sequences, expected.sequences), label
        assert ours.speculative.num_accepted_tokens > 0.2 * batch_size * NEW_TOKENS
        assert_same_cache(ours[CACHE], expected[CACHE])


@full
def test_rows_that_leave_one_by_one():
    inputs = prompts(8, length=11)
    text = target("window").generate(**inputs, **CALL)
    settings = {**CALL, "eos_token_id": sorted({int(row[11 + 2 * index]) for index, row in enumerate(text)})}
    expected = target("window").generate(**inputs, **settings)
    assert len({int(row.ne(0).sum()) for row in expected}) > 3
    for tree in TREES.values():
        speculator = scripted_for(text, inputs, accuracy=0.8, tree=tree)
        assert torch.equal(target("window").generate(**inputs, **settings, assistant=speculator), expected)


STATE_KEYS = ("last", 0, 1, 2)

# Model, whether it has the lean forward, whether processors read every position, drafts, and rows.
SHORT_STATES = [
    (tiny_llama, True, False, "7_nodes", 3, None),
    (tiny_mistral, False, True, "random", 3, None),
    (tiny_llama, True, False, "chain", 3, 4),
]
STATES = [
    (tiny_llama, False, False, "medusa", 1, None),
    (tiny_mistral, True, True, "chain", 3, None),
    (tiny_mistral, True, False, "random", 1, None),
    *((tiny_llama, True, False, "chain", 1 + 2 * (size % 2), size) for size in (1, 8, 9, 20)),
]


@pytest.mark.parametrize(
    ("make", "is_lean", "walks", "tree", "batch_size", "chunk_size"), [*SHORT_STATES, *in_full(*STATES)]
)
def test_states_predicted_the_committed_tokens(make, is_lean, walks, tree, batch_size, chunk_size, monkeypatch):
    if not is_lean:
        monkeypatch.setattr(lean, "has_lean_forward", lambda model: False)
    # Weights of the usual size: large ones would make the last digits of a sum matter.
    model = make(initializer_range=0.1)
    inputs = prompts(batch_size, length=9)
    text = model.generate(**inputs, **CALL)
    settings = {**CALL, "eos_token_id": int(text[0, 22]), "prefill_chunk_size": chunk_size}
    if walks:
        settings["no_repeat_ngram_size"] = NEW_TOKENS
    told, commits = [], []

    class Recording(ScriptedCandidateGenerator):
        """Keeps what it is handed."""

        target_hidden_states = STATE_KEYS

        def prefill(self, prompt: Prompt) -> None:
            told.append(prompt)

        def observe(self, commit: Commit) -> None:
            commits.append(commit)

    script = scripted_for(text, inputs, accuracy=0.9, tree=TREES[tree])
    with record() as made:
        model.generate(**inputs, **settings, assistant=Speculator(script.config, Recording, script.resources))
    assert made.calls[0].stats.num_accepted_tokens > 5
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    (prompt,) = told
    check_states(model, prompt, commits)


def check_states(model, prompt: Prompt, commits: list[Commit]) -> None:
    texts = [list(tokens) for tokens in prompt.token_lists]
    for commit in commits:
        for row, tokens in zip(commit.rows, commit.token_lists):
            texts[row] += tokens
    # Of a forward over each whole text without a cache.
    read = (outputs_and_states(model, STATE_KEYS, input_ids=torch.tensor([tokens]))[1] for tokens in texts)
    expected = [{key: state[0] for key, state in states.items()} for states in read]
    ends = list(map(len, prompt.token_lists))
    # Sums in another order.
    close = {"atol": 1e-5, "rtol": 1e-5}
    for key in STATE_KEYS:
        assert prompt.hidden_states[key].shape[:2] == prompt.input_ids.shape
        for row, start in enumerate(prompt.starts):
            torch.testing.assert_close(
                prompt.hidden_states[key][row, start:], expected[row][key][: ends[row]], **close
            )
    for commit in commits:
        for index, (row, tokens) in enumerate(zip(commit.rows, commit.token_lists)):
            read = slice(ends[row] - 1, ends[row] - 1 + len(tokens))
            for key in STATE_KEYS:
                states = commit.hidden_states[key]
                assert states.shape[:2] == commit.tokens.shape
                torch.testing.assert_close(states[index, : len(tokens)], expected[row][key][read], **close)
            ends[row] += len(tokens)
    assert ends == list(map(len, texts))
