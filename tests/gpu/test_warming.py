"""Warm-up: what calls would have had to capture is there before the first one; on a CPU nothing is missing."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from hf_specdec import SpecConfigError, cli, demo, forget_speculators, load_speculator, record, warm_up
from hf_specdec.decoding import graphs
from tests.helpers.levels import full, split
from tests.helpers.models import prompts, tiny_llama
from tests.helpers.tape import tape_everything


@pytest.fixture
def backends(monkeypatch):
    yield tape_everything(monkeypatch)
    graphs.forget_graphs()
    forget_speculators()


@pytest.fixture(scope="module")
def target():
    return demo.load_target(torch.float32)


def batch(model, rows: int, length: int = 20) -> dict:
    size = model.config.vocab_size
    tokens = torch.randint(size // 4, size // 2, (rows, length), generator=torch.Generator().manual_seed(rows))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


# Settings with the heads of the demo.
HEADS = {
    "ngram": {},
    "eagle3": {"model": demo.drafter_path("eagle3"), "num_speculative_tokens": 3},
    "mtp": {"model": demo.drafter_path("mtp"), "draft_tree_depth": 3, "draft_tree_top_k": 2, "num_draft_nodes": 4},
    "dflash": {"model": demo.drafter_path("dflash"), "num_speculative_tokens": 3},
    "medusa": {"model": demo.drafter_path("medusa"), "num_draft_nodes": 6},
    "mlp_speculator": {"model": demo.drafter_path("mlp_speculator"), "num_speculative_tokens": 2},
    "draft_model": {"model": demo.drafter_path("draft_model"), "num_speculative_tokens": 2},
}


def settings_of(method: str) -> dict:
    return {"method": method, **HEADS[method]}


@pytest.mark.parametrize("method", split(HEADS, short=["eagle3"]))
def test_calls_after_it_capture_nothing(method, target, backends):
    done = warm_up(target, settings_of(method), prompt_length=24, max_new_tokens=16, sampling=False)
    assert done.graphs == "on"
    assert done.num_graph_captures > 0
    assert (done.num_draft_graph_captures > 0) == (method != "ngram")
    inputs = batch(target, 1)
    arguments = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    plain = target.generate(**inputs, **arguments).sequences
    output = target.generate(**inputs, **arguments, speculative=settings_of(method))
    stats = output.speculative
    assert output.sequences.tolist() == plain.tolist()
    assert (stats.num_graph_captures, stats.num_draft_graph_captures) == (0, 0)
    # All but the prefill.
    assert stats.num_graph_replays == stats.num_target_forwards - 1


@full
def test_fewer_rows_too(backends):
    """Rows that end, and smaller batches."""
    model = tiny_llama()
    calls = []
    done = warm_up(
        model, batch_sizes=[3, 2], prompt_length=10, max_new_tokens=12, sampling=False, on_call=lambda: calls.append(1)
    )
    assert done.num_calls == len(calls) == 3  # 4, 2, 1
    for rows in (3, 2, 1):
        inputs = prompts(rows)
        texts = model.generate(**inputs, max_new_tokens=12, do_sample=False)
        settings = {"eos_token_id": int(texts[0, 10]), "pad_token_id": 0}
        with record() as made:
            model.generate(**inputs, max_new_tokens=12, do_sample=False, spec_method="ngram", **settings)
        stats = made.calls[0].stats
        assert stats.num_graph_captures == 0
        assert stats.num_graph_replays == stats.num_target_forwards - 1


@full
def test_sampling_too(target, backends):
    """Tokens of drafts that are drawn one after the other come from graphs of their own."""
    speculator = load_speculator(target, **settings_of("eagle3"), draft_sample_method="probabilistic")
    greedy = warm_up(target, speculator, prompt_length=24, max_new_tokens=16, sampling=False)
    both = warm_up(target, speculator, prompt_length=24, max_new_tokens=16)
    assert greedy.num_draft_graph_captures > 0
    assert both.num_draft_graph_captures > 0
    output = target.generate(
        **batch(target, 1), max_new_tokens=12, do_sample=True, return_dict_in_generate=True, assistant=speculator
    )
    assert output.speculative.num_graph_captures == output.speculative.num_draft_graph_captures == 0


def test_on_a_cpu_there_is_nothing_to_capture():
    model = tiny_llama()
    torch.manual_seed(5)
    state = torch.get_rng_state()
    with record() as made:
        done = warm_up(model, prompt_length=10, max_new_tokens=4)
    assert done.graphs == "off: not on a CUDA device"
    assert done.num_calls == 2
    assert done.num_graph_captures == done.num_draft_graph_captures == 0
    # Nobody is told, no random number is used up.
    assert not made.calls
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_sizes": []}, "`batch_sizes` must be a list of integers of at least 1"),
        ({"prompt_length": 0}, "`prompt_length` must be an integer of at least 1"),
        ({"max_new_tokens": 1}, "`max_new_tokens` must be an integer of at least 2"),
    ],
)
def test_numbers_that_are_too_small(arguments, message):
    with pytest.raises(SpecConfigError, match=message):
        warm_up(tiny_llama(), **arguments)


def invoke(*arguments):
    return CliRunner().invoke(cli.app, ["warm-up", "--device", "cpu", "-n", "8", "--prompt-length", "20", *arguments])


@full
def test_warm_up_command():
    shown = invoke("--spec", "medusa", "--greedy")
    assert shown.exit_code == 0, shown.output
    assert "1 call in" in shown.stdout
    assert "nothing to capture (not on a CUDA device)" in shown.stdout
    done = json.loads(invoke("--json", "--batch-size", "2").stdout)
    assert (done["num_calls"], done["num_graph_captures"]) == (4, 0)
    assert done["graphs"] == "off: not on a CUDA device"
    assert invoke("--batch-size", "0").exit_code == 2


@full
def test_nothing_is_remembered(target, caplog):
    """Neither texts nor costs nor how little of such drafts is accepted."""
    speculator = load_speculator(target, **settings_of("medusa"), num_speculative_tokens="auto")
    retrieval = load_speculator(target, "suffix")
    pair = load_speculator(target, **{**settings_of("medusa"), "method": "ngram+medusa"})
    before, of_pair = speculator.profile.to_dict(), pair.resources.profile.to_dict()
    with caplog.at_level("WARNING", logger="hf_specdec"):
        warm_up(target, speculator, batch_sizes=[16], prompt_length=24, max_new_tokens=16, sampling=False)
        warm_up(target, retrieval, prompt_length=24, max_new_tokens=16, sampling=False)
        warm_up(target, pair, prompt_length=24, max_new_tokens=16, sampling=False)
        warm_up(target, settings_of("eagle3"), batch_sizes=[64], prompt_length=8, max_new_tokens=8, sampling=False)
    assert speculator.profile.to_dict() == before
    assert pair.resources.profile.to_dict() == of_pair
    assert retrieval.resources.num_cached_tokens == 0
    assert "hardly pays" not in caplog.text
