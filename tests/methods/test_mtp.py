"""MTP layers in any order of accepted and rejected drafts, what their settings mean, and assistants of Gemma 4."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec import (
    SpecConfigError,
    UnsupportedModelError,
    generate_many,
    load_speculator,
    record,
)
from hf_specdec.candidate_generators.mtp.generator import LayerEntries
from hf_specdec.candidate_generators.mtp.network import new_mtp
from hf_specdec.drafting import slots
from hf_specdec.protocol import Commit, DraftStep, Prompt, Session
from tests.helpers.by_hand import CPU, GREEDY, generator_for, padded
from tests.helpers.distribution import no_drafts
from tests.helpers.draft_layers import random_mtp
from tests.helpers.gemma4 import tiny_gemma4
from tests.helpers.levels import full, in_full
from tests.helpers.models import prompts, tiny_llama, tiny_mistral
from tests.helpers.own_drafts import drafts_in


class Row:
    """A text that grows by what is drafted for it, with states of the target made up."""

    def __init__(self, network, length, generator):
        self.network, self.generator = network, generator
        self.text = torch.randint(1, 64, (length + 1,), generator=generator)
        self.states = torch.randn((length, 32), generator=generator)

    def recomputed(self, depth):
        """Drafts and their logits by definition: every layer reads the whole text."""
        tokens, hidden, logits = self.text[1:][None], self.states[None], []
        positions = torch.arange(len(self.states))[None]
        for layer in range(depth):
            hidden, output = self.network(tokens, hidden, positions, None, layer=layer)
            logits.append(self.network.logits(output[0, -1]))
            tokens = torch.cat((tokens[:, 1:], logits[-1].argmax()[None, None]), dim=1)
        return torch.stack(logits).argmax(-1).tolist(), torch.stack(logits)

    def extend(self, drafted, num_accepted, num_kept):
        """Commits so many of the accepted drafts and the token after them: its tokens, and the states they follow."""
        bonus = torch.randint(1, 64, (1,), generator=self.generator)
        new = torch.cat((torch.tensor(drafted[:num_accepted], dtype=torch.long), bonus))[:num_kept]
        states = torch.randn((len(new), 32), generator=self.generator)
        self.text, self.states = torch.cat((self.text, new)), torch.cat((self.states, states))
        return new, states


@pytest.mark.parametrize("seed", [0, *in_full(1, 2)])
def test_a_sliding_window_in_padded_rows(seed):
    """Rows that end apart, in positions that become equal, since one of them began later."""
    target = tiny_mistral(sliding_window=16, vocab_size=8)
    inputs = {"input_ids": torch.tensor([[1, 2, 3, 4, 5], [0, 0, 3, 4, 5]])}
    inputs["attention_mask"] = (inputs["input_ids"] > 0).long()
    speculator = load_speculator(target, draft_model=new_mtp(target, 1), method="mtp", num_speculative_tokens=4)
    settings = {**inputs, **GREEDY, "do_sample": True, "max_new_tokens": 60, "return_dict_in_generate": True}
    texts = []
    for drafter in (speculator, no_drafts()):
        torch.manual_seed(seed)
        output = target.generate(**settings, assistant=drafter)
        texts.append(output.sequences.tolist())
        assert (output.speculative.num_draft_tokens > 40) == (drafter is speculator)
    assert texts[0] == texts[1]


class LayersByDefinition:
    """A made-up call, in which any number of drafts is accepted, rows leave and others differ in everything."""

    def __init__(self, num_layers, lengths, seed, monkeypatch):
        network = random_mtp(num_layers)
        self.random = torch.Generator().manual_seed(seed)
        self.rows = [Row(network, length, self.random) for length in lengths]
        self.logits, compute = [], network.logits
        monkeypatch.setattr(network, "logits", lambda *read: self.logits.append(compute(*read)) or self.logits[-1])
        self.generator = generator_for(
            network, len(lengths), mtp_mode="chain", num_speculative_tokens=num_layers, draft_confidence_threshold=0.0
        )
        starts = [max(lengths) - length for length in lengths]
        states = {"last": padded([row.states for row in self.rows], left=True)}
        self.generator.prefill(Prompt(padded([row.text[:-1] for row in self.rows], left=True), starts, states))
        assert isinstance(self.generator.state.slots, LayerEntries)
        self.news = [(row.text[-1:], row.states[-1:]) for row in self.rows]

    def below(self, most):
        return int(torch.randint(0, most, (1,), generator=self.random))

    def observe(self):
        tokens, states = (padded(parts, left=False) for parts in zip(*self.news))
        numbers, lists = list(range(len(self.rows))), [new.tolist() for new, _ in self.news]
        self.generator.observe(Commit(numbers, tokens, lists, [0] * len(numbers), {"last": states}))

    def cycle(self):
        self.observe()
        if self.below(4) == 0:
            # Nothing was drafted before the next tokens.
            self.news = [row.extend([], 0, 1) for row in self.rows]
            return
        limits = [1 + self.below(self.generator.num_speculative_tokens) for _ in self.rows]
        anchors = torch.stack([row.text[-1] for row in self.rows])
        # An unlikely draft ends early; the layers after it must have read the text when another goes on.
        is_unlikely = self.below(4) == 0
        self.generator.threshold = 0.999 if is_unlikely else 0.0
        self.logits.clear()
        step = DraftStep(list(range(len(limits))), anchors, [len(row.text) for row in self.rows], limits)
        drafts = self.generator.propose(step).token_lists()
        seen = torch.stack([logits.view(len(limits), -1) for logits in self.logits if logits.dim() > 1], dim=1)
        for index, row in enumerate(self.rows):
            wanted, values = row.recomputed(1 if is_unlikely else limits[index])
            torch.testing.assert_close(seen[index, : len(wanted)], values, atol=1e-4, rtol=1e-4)
            assert drafts[index] == wanted
        counts = [self.below(len(draft) + 1) for draft in drafts]
        self.news = [
            row.extend(draft, count, 1 + self.below(count + 1)) for row, draft, count in zip(self.rows, drafts, counts)
        ]
        if len(self.rows) > 1 and self.below(3) == 0:
            # As in the loop, what was committed is known before rows leave.
            self.observe()
            keep = [len(self.rows) - 1, *range(1, len(self.rows) - 1)]
            self.generator.keep_rows(keep)
            self.rows = [self.rows[index] for index in keep]
            self.news = [row.extend([], 0, 1) for row in self.rows]


@pytest.mark.parametrize("num_layers", [3, *in_full(1, 2, 4)])
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    chunk_size=st.sampled_from([1, 2, 3, 1024]),
    seed=st.integers(0, 10**6),
)
def test_states_of_layers_whatever_was_accepted(num_layers, lengths, chunk_size, seed):
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(slots, "_CHUNK_SIZE", chunk_size)
        call = LayersByDefinition(num_layers, lengths, seed, monkeypatch)
        for _ in range(6):
            call.cycle()


def test_modes_and_lengths():
    for num_layers, mode in ((3, "chain"), (1, "reuse")):
        generator = generator_for(random_mtp(num_layers))
        assert ("reuse" if generator.has_steps else "chain", generator.num_speculative_tokens) == (mode, 3)
    # A chain is no longer than the layers are many, and is all that some targets take.
    network, chains_only = random_mtp(3), Session(1, 100, CPU, supports_trees=False)
    generator = generator_for(network, num_speculative_tokens=5)
    assert (generator.num_speculative_tokens, len(generator.session.notes)) == (3, 1)
    assert generator_for(network, num_speculative_tokens=5, mtp_mode="reuse").num_speculative_tokens == 5
    generator_for(random_mtp(1), session=chains_only, mtp_mode="reuse", num_draft_nodes=7)
    assert any("chains instead of trees" in note for note in chains_only.notes)


@pytest.fixture(scope="module")
def pair():
    """A tiny Gemma 4 and an assistant for it."""
    with tiny_gemma4() as models:
        yield models


class TestAssistantsThatReadTheCache:
    """Gemma 4's assistants, in batches."""

    # Few tokens are left, so that some of the drafts of an untrained assistant are right.
    FEW = {"suppress_tokens": list(range(4, 64))}

    def official_draft(self, target, assistant, text, count):
        """The draft of transformers' forward of the assistant after a text `(1, L)`, the anchor included."""
        with torch.no_grad():
            read = target(text[:, :-1], output_hidden_states=True, return_shared_kv_states=True)
            hidden, token, draft = read.hidden_states[-1][:, -1:], text[:, -1:], []
            for _ in range(count):
                inputs = torch.cat([target.get_input_embeddings()(token), hidden], dim=-1)
                output = assistant(
                    inputs_embeds=inputs,
                    position_ids=torch.tensor([[text.shape[1] - 1]]),
                    shared_kv_states=read.shared_kv_states,
                )
                scores = output.logits.index_fill(-1, torch.tensor(self.FEW["suppress_tokens"]), float("-inf"))
                token, hidden = scores.argmax(-1), output.last_hidden_state
                draft.append(int(token))
        return draft

    @pytest.mark.parametrize(("batch_size", "samples"), [(3, True), *in_full((1, False))])
    def test_drafts_are_those_of_transformers_forward(self, pair, batch_size, samples):
        target, assistant = pair
        inputs, arguments = prompts(batch_size, length=14), {**GREEDY, **self.FEW}
        settings = {"method": "mtp", "num_speculative_tokens": 3}
        if samples:
            arguments |= {"do_sample": True, "temperature": 20.0, "max_new_tokens": 40}
            settings["draft_sample_method"] = "greedy"
            torch.manual_seed(0)
        speculator = load_speculator(target, settings, draft_model=assistant)
        with record(trace=True) as made:
            ours = target.generate(**inputs, **arguments, assistant=speculator)
        (call,), num_drafts = made.calls, 0
        assert samples or torch.equal(ours, target.generate(**inputs, **arguments))
        for trace, text in drafts_in(call, inputs, ours):
            if trace.draft_tokens:
                draft = self.official_draft(target, assistant, text[None], len(trace.draft_tokens))
                assert trace.draft_tokens == draft
                num_drafts += 1
        assert num_drafts > 5
        right = call.stats.num_accepted_tokens
        # Where they are sampled, rows of the batch get different lengths.
        assert not samples or right > 4 * batch_size

    @full
    def test_checkpoint(self, pair, tmp_path):
        target, assistant = pair
        assistant.save_pretrained(tmp_path)
        plain = target.generate(**prompts(2), **GREEDY)
        output = target.generate(
            **prompts(2), **GREEDY, spec_model=str(tmp_path), num_speculative_tokens=2, return_dict_in_generate=True
        )
        assert torch.equal(output.sequences, plain)
        assert output.speculative.num_draft_tokens > 0

    def test_rows_join(self, pair):
        target, assistant = pair
        speculator = load_speculator(target, draft_model=assistant, num_speculative_tokens=2)
        requests = [prompts(1, length=length, padding=False)["input_ids"][0].tolist() for length in (5, 9, 7, 12)]
        results = generate_many(target, requests, batch_size=2, in_order=True, assistant=speculator, **GREEDY)
        for request, result in zip(requests, results):
            text = torch.tensor([request])
            plain = target.generate(text, attention_mask=torch.ones_like(text), **GREEDY)
            assert result.tokens == plain[0, len(request) :].tolist()

    @full
    def test_what_does_not_work(self, pair):
        target, assistant = pair
        with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM has no layers that share"):
            load_speculator(tiny_llama(), draft_model=assistant)
        generator = load_speculator(target, draft_model=assistant).candidate_generator(Session(1, 100, CPU))
        with pytest.raises(SpecConfigError, match="keys and values of its target"):
            generator.propose(DraftStep([0], torch.tensor([1]), [3], [2]))
