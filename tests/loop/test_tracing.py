"""The target's opinion of every token in a trace is that of an ordinary forward over the same text."""

import pytest
import torch

from hf_specdec import demo, load_speculator, record
from hf_specdec.loop.tracing import token_scores
from tests.helpers.levels import full, in_full
from tests.helpers.models import prompts, scripted_for


GREEDY = {"max_new_tokens": 12, "do_sample": False}


def assert_score(score, model, text, token):
    logits = model(torch.tensor([text])).logits[0, -1].detach()
    others = logits.clone()
    others[token] = -torch.inf
    rank = 1 + int((logits > logits[token]).sum())
    expected = (float(logits.softmax(-1)[token]), rank, float(logits[token] - others.max()))
    assert score == pytest.approx(expected, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize(
    ("batch_size", "tree"),
    [(3, "random"), *in_full((1, None), (3, None), (1, "random"), (3, (-1, -1, 0, 1, 1)))],
)
def test_scores_are_those_of_a_plain_forward(model, tree, batch_size):
    inputs = prompts(batch_size)
    plain = model.generate(**inputs, **GREEDY)
    with record(trace=True) as made:
        model.generate(**inputs, **GREEDY, assistant=scripted_for(plain, inputs, accuracy=0.6, tree=tree))
    trace = made.calls[0].trace
    unpadded = [row[mask.bool()].tolist() for row, mask in zip(inputs["input_ids"], inputs["attention_mask"])]
    assert trace.prompts == unpadded
    texts = [list(prompt) for prompt in unpadded]
    for row in (row for cycle in [trace.first, *trace.cycles] for row in cycle.rows):
        text, paths = texts[row.row], []
        for token, parent, score in zip(row.draft_tokens, row.parents, row.draft_scores, strict=True):
            before = paths[parent] if parent >= 0 else text
            assert_score(score, model, before, token)
            paths.append([*before, token])
        for token, score in zip(row.committed_tokens, row.committed_scores, strict=True):
            assert_score(score, model, text, token)
            assert score.rank == 1
            assert score.margin > 0
            text.append(token)
        assert row.draft_probs == []
        assert row.drafter == "scripted"
    new = [text[len(prompt) :] for text, prompt in zip(texts, unpadded)]
    assert new == [row[inputs["input_ids"].shape[1] :] for row in plain.tolist()]


@full
def test_sampled_drafts_have_the_probability_of_their_draw():
    target, inputs = demo.load_target(), demo.load_tokenizer()("def read(path):\n", return_tensors="pt")
    model = demo.drafter_path("draft_model")
    drafter = load_speculator(target, "draft_model", model=model, draft_sample_method="probabilistic")
    with record(trace=True) as made:
        target.generate(**inputs, do_sample=True, temperature=0.9, max_new_tokens=16, assistant=drafter)
    rows = [row for cycle in made.calls[0].cycles for row in cycle.rows if row.draft_tokens]
    assert rows
    for row in rows:
        assert len(row.draft_probs) == len(row.draft_tokens)
        assert all(0 < prob <= 1 for prob in row.draft_probs)


def test_cycles_without_drafts(model):
    with record(trace=True) as made:
        model.generate(input_ids=torch.tensor([[1, 2, 3]]), do_sample=False, max_new_tokens=3, spec_method="ngram")
    assert [cycle.why_empty for cycle in made.calls[0].cycles] == ["nothing_found", "length_limit"]


def test_scores_of_ties_small_vocabularies_and_half_precision():
    logits = torch.tensor([[[2.0, 2.0, -torch.inf], [0.0, -torch.inf, -torch.inf]]])
    scores = token_scores(logits, torch.tensor([[0, 0, 0, 1]]), torch.tensor([[0, 1, 2, 0]]))[0]
    assert scores[:, 0].tolist() == pytest.approx([0.5, 0.5, 0, 1])
    assert scores[:, 1].tolist() == [1, 1, 3, 1]
    assert scores[:2, 2].tolist() == [0, 0]
    zero = torch.zeros(1, 1).long()
    assert token_scores(torch.zeros(1, 1, 1), zero, zero)[0, 0, 0] == 1
    assert token_scores(torch.tensor([[[1.0, 2.0]]]).bfloat16(), zero, zero + 1).dtype == torch.float32
