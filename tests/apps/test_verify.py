"""Differences from plain generation are found, and judged: what is broken is a bug, what rounding does a tie."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from hf_specdec import cli, demo
from hf_specdec.bench.prompts import Batch, make_batches
from hf_specdec.decoding.cache import SlotCache
from hf_specdec.diagnosis import BUG, TIE, general_prompts, verification, verify
from hf_specdec.diagnosis.verification import _Reference
from hf_specdec.errors import SpecConfigError
from hf_specdec.logits import rules
from tests.helpers.models import prompts, scripted_for, tiny_llama


NUM_TOKENS = 48


def batch_of(inputs, max_new_tokens=NUM_TOKENS):
    names = tuple(f"row {index}" for index in range(len(inputs["input_ids"])))
    return Batch(names, "random", inputs, max_new_tokens)


def scripted(model, inputs, **options):
    text = model.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False)
    return scripted_for(text, inputs, **options)


def check(model, inputs, **options):
    (found,) = verify(model, {"scripted": scripted(model, inputs, **options)}, [batch_of(inputs)])
    assert found.num_texts == len(inputs["input_ids"])
    return found


@pytest.fixture
def second_best_wins(monkeypatch):
    """A verifier that now and then takes the second best token."""

    def second_best(scores):
        best = scores.topk(2, dim=-1).indices
        wrong = (best[..., 1] % 5) == 0
        return torch.where(wrong, best[..., 1], best[..., 0])

    monkeypatch.setattr(rules, "best_tokens", second_best)


@pytest.fixture
def moves_nothing(monkeypatch):
    """A cache that leaves the accepted path of a tree where it was written."""
    commit = SlotCache.commit
    monkeypatch.setattr(SlotCache, "commit", lambda self, counts, path=None: commit(self, counts))


def test_equal_texts_are_equal(model):
    found = check(model, prompts(3))
    assert found.differences == []
    assert found.num_tokens == 3 * NUM_TOKENS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_choice_is_a_bug(second_best_wins, dtype):
    found = check(tiny_llama().to(dtype), prompts(3))
    assert found.bugs
    for item in found.bugs:
        assert item.margin > item.tolerance > 0
        assert item.plain_logit > item.speculative_logit
        assert item.reference_dtype == ("float64" if dtype is torch.float32 else "float32")


def test_plain_generation_is_plain_whatever_the_generation_config_says(second_best_wins):
    model, inputs = tiny_llama(), prompts(2)
    speculator = scripted(model, inputs)
    model.generation_config.speculative = {"method": "ngram"}
    (found,) = verify(model, {"scripted": speculator}, [batch_of(inputs)])
    assert len(found.bugs) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_damaged_cache_is_a_bug(moves_nothing, dtype):
    tree = (-1, -1, 0, 0, 1, 2)
    found = check(tiny_llama().to(dtype), prompts(3), tree=tree, accuracy=1.0)
    assert found.bugs


def coarser_for_several_tokens(module, inputs, logits):
    """Leaves bfloat16 logits of several tokens at once 3 bits after the leading one; machines differ in theirs."""
    if logits.dtype != torch.bfloat16 or logits.shape[1] == 1:
        return logits
    mantissa, exponent = torch.frexp(logits.float())
    return torch.ldexp((mantissa * 16).round() / 16, exponent).to(logits.dtype)


def test_rounding_is_a_tie():
    model = tiny_llama(initializer_range=0.02).to(torch.bfloat16)
    model.lm_head.register_forward_hook(coarser_for_several_tokens)
    inputs = prompts(8, length=24, padding=False)
    found = check(model, inputs)
    assert found.differences
    assert {item.verdict for item in found.differences} == {TIE}
    for item in found.differences:
        assert item.margin <= item.tolerance < 1


def test_the_reference_is_the_truth_in_a_wider_type():
    model = tiny_llama().to(torch.bfloat16)
    inputs = prompts(1, padding=False)
    plain = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, 7:].tolist()
    other = [*plain[:5], (plain[5] + 1) % 64, *plain[6:]]
    judged = _Reference(model).judge("row", inputs["input_ids"], plain, other, 8)
    text = torch.cat([inputs["input_ids"], torch.tensor([plain[:5]])], dim=1)
    logits = tiny_llama().to(torch.bfloat16).float()(text).logits[0, -1]
    assert judged.index == 5
    assert judged.plain_logit == pytest.approx(logits[plain[5]].item(), rel=1e-5)
    assert judged.speculative_logit == pytest.approx(logits[other[5]].item(), rel=1e-5)
    assert judged.margin == pytest.approx((logits.max() - logits[[plain[5], other[5]]].min()).item(), rel=1e-4)


def test_without_room_for_a_wider_copy_the_own_type_judges(monkeypatch, second_best_wins):
    monkeypatch.setattr(verification, "free_bytes", lambda device: 0)
    found = check(tiny_llama(), prompts(2))
    assert found.bugs
    assert {item.reference_dtype for item in found.differences} == {"float32"}


def test_processors_count(model):
    """The logits that are judged are those after the processors."""
    inputs = prompts(1, padding=False)
    model = tiny_llama()
    model.generation_config.repetition_penalty = 1.5
    plain = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, 7:].tolist()
    text = torch.cat([inputs["input_ids"], torch.tensor([plain[:5]])], dim=1)
    logits = model(text).logits[0, -1]
    seen = torch.unique(text)
    logits[seen] = torch.where(logits[seen] > 0, logits[seen] / 1.5, logits[seen] * 1.5)
    repeated = int(text[0, 0])
    judged = _Reference(model).judge("row", inputs["input_ids"], plain, [*plain[:5], repeated], 8)
    assert judged.speculative_logit == pytest.approx(logits[repeated].item(), rel=1e-4)
    assert judged.plain_logit == pytest.approx(logits.max().item(), rel=1e-4)
    assert judged.verdict == BUG
    assert check(model, prompts(2)).differences == []


@pytest.mark.parametrize(("plain", "other"), [([5, 6, 7], [5, 6]), ([5, 6], [5, 6, 7])])
def test_a_text_that_ends_elsewhere_is_a_bug(model, plain, other):
    judged = _Reference(model).judge("row", prompts(1, padding=False)["input_ids"], plain, other, 8)
    assert judged.index == 2
    assert judged.margin is None
    assert judged.verdict == BUG


def test_what_cannot_be_loaded_is_an_error_before_anything_is_generated(model, monkeypatch):
    monkeypatch.setattr(type(model), "generate", None)
    with pytest.raises(SpecConfigError, match="Did you mean 'ngram'"):
        verify(model, {"wrong": "ngrm"}, [batch_of(prompts(1))])


def test_general_prompts_can_be_batched():
    batches = make_batches(demo.load_tokenizer(), general_prompts(9))
    assert [batch.max_new_tokens for batch in batches] == [9] * 4


# The command


def run_command(*arguments):
    return CliRunner().invoke(cli.app, ["verify", *map(str, arguments)], prog_name="hf-specdec")


def test_command_reports_equal_texts():
    result = run_command("--spec", "eagle3", "--spec", "ngram", "-p", "def f(x):", "-n", 12, "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert [row["method"] for row in report["methods"]] == ["eagle3", "ngram"]
    assert all(row["num_equal"] == row["num_texts"] == 1 for row in report["methods"])
    assert report["dtype"] == "float32"


def test_command_fails_on_a_bug(second_best_wins, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "import os\\n"}\n{"turns": ["class A:\\n"]}\n')
    result = run_command("--prompts", file, "-n", 24)
    assert result.exit_code == 1
    assert "bug" in result.stdout
    shown = " ".join(result.stdout.split())
    assert "with logit" in shown
    assert "The margin" in shown
    report = json.loads(run_command("--prompts", file, "-n", 24, "--json", "--batch-size", 2).stdout)
    (row,) = report["methods"]
    assert row["num_texts"] == 2
    assert row["num_bugs"] >= 1
    assert row["differences"][0]["plain_text"] != row["differences"][0]["speculative_text"]


def test_command_shows_a_tie():
    function = next(prompt for prompt in demo.prompts() if prompt.name == "function")
    result = run_command("--spec", "eagle3", "-p", f"{function.text}", "-n", 64, "--dtype", "bfloat16", "--json")
    (row,) = json.loads(result.stdout)["methods"]
    assert row["num_bugs"] == 0
    assert result.exit_code == 0


def test_command_names_what_is_wrong(tmp_path):
    result = run_command("--spec", "ngrm")
    assert result.exit_code == 2
    assert "Did you mean 'ngram'" in " ".join(result.stderr.split())
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"words": "x"}\n')
    result = run_command("--prompts", file)
    assert result.exit_code == 2
    assert "line 1" in result.stderr
