"""Differences from plain generation are found, and judged: what is broken is a bug, what rounding does a tie."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from hf_specdec import cli
from hf_specdec.bench.prompts import Batch
from hf_specdec.decoding.cache import SlotCache
from hf_specdec.diagnosis import BUG, TIE, verification, verify
from hf_specdec.diagnosis.verification import _Reference
from hf_specdec.logits import rules
from tests.helpers.levels import full, in_full
from tests.helpers.models import prompts, scripted_for, tiny_llama


NUM_TOKENS = 48


def check(model, inputs, text=None, **options):
    if text is None:
        text = model.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False)
    names = tuple(f"row {index}" for index in range(len(text)))
    batch = Batch(names, "random", inputs, NUM_TOKENS)
    (found,) = verify(model, {"scripted": scripted_for(text, inputs, **options)}, [batch])
    assert (found.num_texts, found.num_tokens) == (len(text), NUM_TOKENS * len(text))
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


@pytest.mark.parametrize("fault", ["second_best_wins", *in_full("moves_nothing")])
@pytest.mark.parametrize("dtype", [torch.float32, *in_full(torch.bfloat16)])
def test_faults_are_bugs(request, fault, dtype):
    model = tiny_llama().to(dtype)
    # Plain generation is plain, whatever the generation config says.
    model.generation_config.speculative = {"method": "ngram"}
    request.getfixturevalue(fault)
    options = {"tree": (-1, -1, 0, 0, 1, 2), "accuracy": 1.0} if fault == "moves_nothing" else {}
    text = tiny_llama().to(dtype).generate(**prompts(3), max_new_tokens=NUM_TOKENS, do_sample=False)
    found = check(model, prompts(3), text, **options)
    assert found.bugs
    for item in found.bugs:
        assert item.margin > item.tolerance > 0
        assert item.plain_logit > item.speculative_logit
        assert item.reference_dtype == ("float64" if dtype is torch.float32 else "float32")


def coarser_for_several_tokens(module, inputs, logits):
    """Leaves bfloat16 logits of several tokens at once 3 bits after the leading one; machines differ in theirs."""
    if logits.dtype != torch.bfloat16 or logits.shape[1] == 1:
        return logits
    mantissa, exponent = torch.frexp(logits.float())
    return torch.ldexp((mantissa * 16).round() / 16, exponent).to(logits.dtype)


def test_rounding_is_a_tie_and_equal_texts_are_equal(model):
    assert check(model, prompts(3)).differences == []
    model = tiny_llama(initializer_range=0.02).to(torch.bfloat16)
    model.lm_head.register_forward_hook(coarser_for_several_tokens)
    found = check(model, prompts(8, length=24, padding=False))
    assert found.differences
    assert {item.verdict for item in found.differences} == {TIE}
    assert all(item.margin <= item.tolerance < 1 for item in found.differences)


@full
def test_without_room_for_a_wider_copy_the_own_type_judges(monkeypatch, second_best_wins):
    monkeypatch.setattr(verification, "free_bytes", lambda device: 0)
    found = check(tiny_llama(), prompts(2))
    assert found.bugs
    assert {item.reference_dtype for item in found.differences} == {"float32"}


@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_logits_are_those_of_a_wider_type_after_the_processors(penalty):
    model, inputs = tiny_llama().to(torch.bfloat16), prompts(1, padding=False)
    model.generation_config.repetition_penalty = penalty
    plain = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, 7:].tolist()
    text = torch.cat([inputs["input_ids"], torch.tensor([plain[:5]])], dim=1)
    other = int(text[0, 0]) if int(text[0, 0]) != plain[5] else int(text[0, 1])
    judged = _Reference(model).judge("row", inputs["input_ids"], plain, [*plain[:5], other, *plain[6:]], 8)
    logits, seen = tiny_llama().to(torch.bfloat16).float()(text).logits[0, -1], torch.unique(text)
    logits[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    assert (judged.index, judged.verdict) == (5, BUG)
    assert judged.plain_logit == pytest.approx(logits[plain[5]].item(), rel=1e-4)
    assert judged.speculative_logit == pytest.approx(logits[other].item(), rel=1e-4)
    assert judged.margin == pytest.approx((logits.max() - logits[[plain[5], other]].min()).item(), rel=1e-4)


def test_a_text_that_ends_elsewhere_is_a_bug(model):
    for plain, other in (([5, 6, 7], [5, 6]), ([5, 6], [5, 6, 7])):
        judged = _Reference(model).judge("row", prompts(1, padding=False)["input_ids"], plain, other, 8)
        assert (judged.index, judged.margin, judged.verdict) == (2, None, BUG)


def test_command(second_best_wins, tmp_path, monkeypatch):
    def run(*arguments):
        return CliRunner().invoke(cli.app, ["verify", *map(str, arguments)], prog_name="hf-specdec")

    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "import os\\n"}\n{"turns": ["class A:\\n"]}\n')
    result = run("--prompts", file, "-n", 24)
    assert result.exit_code == 1
    shown = " ".join(result.stdout.split())
    assert all(words in shown for words in ("bug", "with logit", "The margin"))
    report = json.loads(run("--prompts", file, "-n", 24, "--json", "--batch-size", 2).stdout)
    (row,) = report["methods"]
    assert row["num_texts"] == 2
    assert row["num_bugs"] >= 1
    assert row["differences"][0]["plain_text"] != row["differences"][0]["speculative_text"]
    monkeypatch.undo()
    result = run("--spec", "eagle3", "--spec", "ngram", "-p", "def f(x):", "-n", 12, "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert [row["method"] for row in report["methods"]] == ["eagle3", "ngram"]
    assert all(row["num_equal"] == row["num_texts"] == 1 for row in report["methods"])
    # What cannot be read is an error before anything is generated.
    file.write_text('{"words": "x"}\n')
    for arguments, words in ((["--spec", "ngrm"], "Did you mean 'ngram'"), (["--prompts", file], "line 1")):
        result = run(*arguments)
        assert (result.exit_code, words in " ".join(result.stderr.split())) == (2, True)
