"""Stacks of processors: what the host's list would say, without its price for every node."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers.generation import logits_process as hf

from hf_specdec.logits.processors import ProcessorStack


def test_signatures_are_not_read_for_every_node(monkeypatch):
    processors = hf.LogitsProcessorList([hf.RepetitionPenaltyLogitsProcessor(1.5), hf.TemperatureLogitsWarper(0.5)])
    sequences, logits = [torch.tensor([1, 2, 2]), torch.tensor([3, 0, 1])], torch.linspace(-1, 2, 8).repeat(2, 1)
    expected = processors(torch.stack(sequences), logits)
    stack = ProcessorStack(processors)
    monkeypatch.setattr(inspect, "signature", lambda *_: pytest.fail("a signature was read"))
    assert torch.equal(stack.rows(sequences, logits, [0, 1]), expected)
    ragged = stack.rows([sequences[0], sequences[1][:2]], logits, [0, 1])
    assert torch.equal(ragged[0], expected[0])


def test_processors_that_ask_for_more():
    """The error is that of plain generation."""

    class Asking(hf.LogitsProcessor):
        def __call__(self, input_ids, scores, step):
            return scores

    processors = hf.LogitsProcessorList([Asking()])
    with pytest.raises(ValueError, match="required parameters") as plain:
        processors(torch.tensor([[1]]), torch.zeros(1, 4))
    with pytest.raises(ValueError, match="required parameters") as ours:
        ProcessorStack(processors).rows([torch.tensor([1])], torch.zeros(1, 4), [0])
    assert str(ours.value) == str(plain.value)
