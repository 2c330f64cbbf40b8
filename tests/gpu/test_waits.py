"""The host waits for the device once in a cycle, whatever is drafted."""

from __future__ import annotations

import pytest
import torch
from gpu_clocks import noted_waits
from transformers.generation.streamers import BaseStreamer

from hf_specdec import load_speculator, record
from hf_specdec.candidate_generators.dflash.config import DominoConfig
from hf_specdec.decoding.loop import DecodingLoop
from hf_specdec.many.engine import Engine
from hf_specdec.many.requests import RequestReader
from tests.helpers.levels import in_full, split
from tests.helpers.models import prompts, tiny_gpt2, tiny_llama, tiny_mistral
from tests.helpers.other_device import DEVICE, move, other_device
from tests.helpers.sampled import sampled_speculator
from tests.helpers.tiny_drafters import (
    SPARSE,
    dflash,
    draft_model,
    eagle3,
    medusa,
    method,
    mlp_speculator,
    mtp,
    scripted,
)


TREE = (-1, -1, 0, 0, 1, 2)
GREEDY = {"max_new_tokens": 9, "do_sample": False}


class Columns(BaseStreamer):
    """Keeps the tokens of a single row."""

    def __init__(self):
        self.tokens = []

    def put(self, value):
        self.tokens.extend(value.flatten().tolist())

    def end(self):
        pass


class Watched:
    """Runs calls on the other device.

    Attributes:
        cycles (`list[list[Wait]]`): The waits of each cycle of the last call.
    """

    def __init__(self, monkeypatch):
        self.waits, self.cycles = [], []
        cycle = DecodingLoop._cycle

        def watched(loop):
            before = len(self.waits)
            cycle(loop)
            if loop.device == DEVICE:
                self.cycles.append(self.waits[before:])

        monkeypatch.setattr(DecodingLoop, "_cycle", watched)

    def generate(self, model, inputs, make_drafter, **arguments):
        """Text of the model with the drafter that `make_drafter` makes for it, once it is on the device."""
        self.cycles.clear()
        with other_device() as self.waits:
            model = move(model)
            inputs = {name: move(values) for name, values in inputs.items()}
            output = model.generate(**inputs, **{**GREEDY, **arguments}, assistant=make_drafter(model))
            return output.cpu() if torch.is_tensor(output) else output

    def check(self):
        """One wait in each cycle, for the verdict."""
        assert len(self.cycles) > 2
        for waits in self.cycles:
            # A drafter that has not drafted before reads the prompt first, once.
            found = [(wait.what, wait.where.split()[-1]) for wait in waits if not wait.where.endswith(" prefill")]
            assert found == [("read", "read")]


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    """The check of a class of models waits in a cycle, once in a process."""
    monkeypatch.setenv("HF_SPECDEC_CHECK", "0")


@pytest.fixture
def watched(monkeypatch) -> Watched:
    return Watched(monkeypatch)


DRAFTERS = {
    "chains": scripted(k=4),
    "trees": scripted(tree=TREE),
    "a tree for each row": scripted(tree="random"),
    "ngram": method("ngram"),
    "recycling": method("recycling"),
    "sparse_kv": method("sparse_kv", **SPARSE, num_speculative_tokens=3),
    "draft model": draft_model(num_speculative_tokens=3),
    "draft model, masks": draft_model(mask_token=3, num_speculative_tokens=3),
    "draft model, states": draft_model(mask_token=3, reads_states=True, num_speculative_tokens=3),
    "medusa": medusa(),
    "medusa, measured": medusa(medusa_tree="measured"),
    "mlp_speculator": mlp_speculator(),
    "mlp_speculator, candidates": mlp_speculator(mlp_speculator_num_candidates=4),
    "mlp_speculator, chain": mlp_speculator(num_speculative_tokens=2),
    "mlp_speculator, static tree": mlp_speculator(speculative_token_tree=[(0,), (1,), (0, 0), (1, 0)]),
    "eagle3, chain": eagle3(num_speculative_tokens=3),
    "eagle3, static tree": eagle3(speculative_token_tree=[(0,), (1,), (0, 0), (1, 0)]),
    "eagle3, dynamic tree": eagle3(draft_tree_depth=4, draft_tree_top_k=2, num_draft_nodes=6),
    "mtp, layers": mtp(),
    "dflash": dflash(),
    "dflash, tree": dflash(num_draft_nodes=6),
    "dflash, denoising": dflash(dflash_num_denoising_steps=2),
    "dflash, corrections": dflash(predicts_next=True, markov_rank=3),
    "dflash, domino": dflash(domino=DominoConfig(8, 4)),
    "adaptive": draft_model(num_speculative_tokens="auto"),
}

QUICK = (
    "chains",
    "a tree for each row",
    "ngram",
    "medusa, measured",
    "mlp_speculator",
    "eagle3, dynamic tree",
    "mtp, layers",
)
QUICK += ("dflash", "adaptive")

DRAWN = {
    "sparse_kv": method("sparse_kv", **SPARSE, num_speculative_tokens=3)(None, None),
    "chains": lambda model: sampled_speculator(3),
    "trees": lambda model: sampled_speculator(2, widths=(2, 2)),
    "draft model": draft_model(num_speculative_tokens=3)(None, None),
    "mlp_speculator": mlp_speculator(draft_sample_method="probabilistic", num_speculative_tokens=3)(None, None),
    "mtp, layers": mtp(draft_sample_method="probabilistic")(None, None),
    "best tokens of a draft model": draft_model(draft_sample_method="greedy", num_speculative_tokens=3)(None, None),
}


class TestOneWaitACycle:
    @pytest.mark.parametrize("drafter", split(DRAFTERS, short=QUICK))
    def test_greedy(self, drafter, watched):
        model, inputs = tiny_llama(), prompts(3)
        plain = model.generate(**inputs, **GREEDY)
        ours = watched.generate(model, inputs, DRAFTERS[drafter](plain, inputs))
        assert ours.tolist() == plain.tolist()
        watched.check()

    @pytest.mark.parametrize("drafter", split(DRAWN, short=["trees", "draft model"]))
    def test_sampling(self, drafter, watched):
        inputs, texts = prompts(2), []
        for run in (watched.generate, here):
            torch.manual_seed(3)
            texts.append(run(tiny_llama(), inputs, DRAWN[drafter], do_sample=True, temperature=0.7, top_k=12))
        assert texts[0].tolist() == texts[1].tolist()
        watched.check()

    @pytest.mark.parametrize("make", [tiny_mistral, *in_full(tiny_gpt2)])
    def test_windows_and_learned_positions(self, make, watched):
        model, inputs = make(), prompts(3)
        plain = model.generate(**inputs, **GREEDY)
        ours = watched.generate(model, inputs, scripted(tree=TREE)(plain, inputs))
        assert ours.tolist() == plain.tolist()
        watched.check()

    def test_rows_end_apart(self, watched):
        model, inputs = tiny_llama(), prompts(4)
        texts = model.generate(**inputs, max_new_tokens=24, do_sample=False)[:, 7:].tolist()
        # Rows of the batch leave it at different times.
        settings = {"max_new_tokens": 24, "eos_token_id": [texts[0][5], texts[2][11]], "pad_token_id": 0}
        plain = model.generate(**inputs, do_sample=False, **settings)
        assert len({row.index(0) if 0 in row else -1 for row in plain[:, 7:].tolist()}) > 1
        ours = watched.generate(model, inputs, scripted(k=2)(plain, inputs), **settings)
        assert ours.tolist() == plain.tolist()
        watched.check()

    def test_outputs_and_streamer(self, watched):
        model, inputs = tiny_llama(), prompts(1)
        plain = model.generate(**inputs, **GREEDY)
        asked = {"output_scores": True, "output_logits": True, "output_hidden_states": True}
        streamer = Columns()
        make = scripted(tree=TREE)(plain, inputs)
        output = watched.generate(model, inputs, make, streamer=streamer, return_dict_in_generate=True, **asked)
        assert output.sequences.inner.tolist() == plain.tolist()
        assert streamer.tokens == plain[0].tolist()
        assert len(output.scores) == len(output.logits) == len(output.hidden_states) == GREEDY["max_new_tokens"]
        watched.check()

    def test_traces(self, watched):
        """Tokens and parents of the drafts come with the verdict."""
        inputs = prompts(2)
        plain = tiny_llama().generate(**inputs, **GREEDY)
        traces = []
        for run in (watched.generate, here):
            with record(trace=True) as made:
                run(tiny_llama(), inputs, scripted(tree="random")(plain, inputs))
            traces.append(made.calls[0].cycles)
        assert traces[0] == traces[1]
        watched.check()

    def test_confidence_threshold_reads_every_token(self, watched):
        """A draft model that may stop early is asked for it, a token later."""
        model, inputs = tiny_llama(), prompts(2)
        plain = model.generate(**inputs, **GREEDY)
        make = draft_model(draft_confidence_threshold=0.5, num_speculative_tokens=6)(plain, inputs)
        assert watched.generate(model, inputs, make).tolist() == plain.tolist()
        places = {wait.where.split()[-1] for waits in watched.cycles for wait in waits}
        assert places == {"read", "_draft"}
        assert min(map(len, watched.cycles)) < 6


def here(model, inputs, make_drafter, **arguments):
    """Makes the call on the CPU."""
    return model.generate(**inputs, **{**GREEDY, **arguments}, assistant=make_drafter(model))


@pytest.mark.gpu
class TestOnAGpu:
    """Torch says itself where the host waits, but for events."""

    @pytest.mark.parametrize(
        "drafter",
        [pytest.param(name, marks=[pytest.mark.smoke] * (name in ("trees", "eagle3, chain"))) for name in DRAFTERS],
    )
    @pytest.mark.parametrize("batch_size", [1, 3])
    def test_one_wait_a_cycle(self, drafter, batch_size, monkeypatch):
        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")
        model, inputs = tiny_llama().cuda(), prompts(batch_size)
        far = {name: values.cuda() for name, values in inputs.items()}
        plain = model.generate(**far, **GREEDY)
        assistant = DRAFTERS[drafter](plain, inputs)(model)
        # Whatever is captured, compiled or kept for later is made in the first calls. In the fourth, of three rows, a
        # measured tree is rebuilt: after 64 drafts.
        for _ in range(4):
            model.generate(**far, **GREEDY, assistant=assistant)
        cycle, waits = DecodingLoop._cycle, []

        def watched(loop):
            with noted_waits() as seen:
                cycle(loop)
            waits.append(len(seen))

        monkeypatch.setattr(DecodingLoop, "_cycle", watched)
        assert torch.equal(model.generate(**far, **GREEDY, assistant=assistant), plain)
        assert set(waits) == {1}


@pytest.mark.parametrize(("asked", "waits_of_a_step"), [({}, 1), ({"top_logprobs": 2}, 2)])
def test_rows_that_stream(asked, waits_of_a_step):
    """What rows have got so far is read after every cycle, and costs no wait; only log-probabilities cost one."""
    prompt, model = prompts(1, padding=False)["input_ids"][0].tolist(), tiny_llama()
    expected = model.generate(torch.tensor([prompt]), **GREEDY)[0, len(prompt) :].tolist()
    with other_device() as waits:
        model = move(model)
        reader = RequestReader(model, GREEDY, num_places=2)
        engine = Engine(model, load_speculator(model, "ngram", num_speculative_tokens=3), reader, 2)
        rows = [reader.row(index, prompt, asked) for index in range(2)]
        for row in rows:
            engine.add(row)
        engine.step()
        steps, before = [], len(waits)
        while not engine.is_idle:
            engine.step()
            shown = [(row.prompt, row.tokens, row.logprobs) for row in rows]
            steps.append(len(waits) - before)
            before = len(waits)
    assert len(steps) > 1
    assert set(steps) == {waits_of_a_step}
    for _, tokens, logprobs in shown:
        assert tokens == expected
        assert len(logprobs) == (len(tokens) if asked else 0)
