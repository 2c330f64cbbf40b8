"""Many requests to models with an encoder: each is decoded as alone, beside sources of other lengths."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec import SpecConfigError, SpeculativeBatchingManager, generate_batch, generate_many, load_speculator
from hf_specdec.candidate_generators.combined.policy import DrafterChoice
from hf_specdec.many.engine import Engine
from hf_specdec.many.requests import RequestReader
from tests.helpers.arrivals import ANY_ORDER, arrivals, check_each_for_itself
from tests.helpers.encoder_decoders import (
    CHAINS_ONLY,
    SETTINGS,
    CopySource,
    changed,
    supported,
    text_model,
    tiny_model,
)
from tests.helpers.levels import full, in_full, slow, split
from tests.helpers.models import nothing_runs


NEW = 14
# New tokens of the requests, one after the other.
LENGTHS = (NEW, 5, 9, 1, 12, 3, NEW, 7)
RECYCLING = {"spec_method": "recycling", "num_speculative_tokens": 3}


def sources_of(name: str, source: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Each row's source; texts of different lengths, without their padding."""
    rows = [{key: value[row : row + 1] for key, value in source.items()} for row in range(4)]
    if source.keys() != {"input_ids", "attention_mask"}:
        return rows
    lengths = [int(row["attention_mask"].sum()) - index for index, row in enumerate(rows)]
    return [{key: value[:, :length] for key, value in row.items()} for row, length in zip(rows, lengths)]


def tokens_of(results: list) -> list[list[int]]:
    return [result.tokens for result in results]


@dataclass
class Case:
    """A model, requests to it, and what plain generation writes for each of them."""

    name: str
    model: torch.nn.Module
    requests: list[dict]
    alone: list[list[int]]

    @classmethod
    @cache
    def of(cls, name: str, **changes) -> Case:
        model, source = text_model(name, **changes) if changes else tiny_model(name)
        four = sources_of(name, source)
        # Without what the decoder begins with.
        texts = [model.generate(**own, do_sample=False, max_new_tokens=NEW)[0, -NEW:].tolist() for own in four]
        order = [0, 1, 2, 3, 2, 1, 0, 3]
        requests = [{**four[kind], "max_new_tokens": length} for kind, length in zip(order, LENGTHS)]
        return cls(name, model, requests, [texts[kind][:length] for kind, length in zip(order, LENGTHS)])

    def run(self, requests: list[dict] | None = None, batch_size: int = 3, **settings) -> list:
        given = self.requests if requests is None else requests
        return list(generate_many(self.model, given, batch_size, **{"in_order": True, "do_sample": False, **settings}))


@pytest.mark.parametrize("name", split(supported(), short=["t5", "whisper"]))
def test_each_request_is_decoded_as_alone(name):
    case = Case.of(name)
    results = case.run(batch_size=1 if name in CHAINS_ONLY else 3, **RECYCLING)
    assert [result.error for result in results] == [None] * len(LENGTHS)
    assert tokens_of(results) == case.alone
    assert sum(result.stats.num_accepted_tokens for result in results) > 0


@pytest.fixture(params=["t5", *in_full("bart")])
def text_case(request) -> Case:
    """A model whose encoder and decoder embed tokens by the same weights."""
    return Case.of(request.param, tie_word_embeddings=True)


def test_drafts_are_looked_up_in_the_source(text_case):
    """Also of rows that join, by the model that has learnt to repeat its source."""
    for method in ("ngram", "suffix", "recycling", "suffix+recycling", "auto", "off"):
        assert tokens_of(text_case.run(spec_method=method)) == text_case.alone, method
    copies = [torch.randperm(90, generator=torch.Generator().manual_seed(seed))[:24] + 3 for seed in range(6)]
    requests = [
        {"input_ids": ids[: 24 - seed], "max_new_tokens": 20 - seed, "logits_processor": [CopySource(ids)]}
        for seed, ids in enumerate(copies)
    ]
    for method in ("ngram", "suffix"):
        results = text_case.run(requests, spec_method=method, num_speculative_tokens=4)
        assert tokens_of(results) == [ids[: 20 - seed].tolist() for seed, ids in enumerate(copies)]
        # All tokens of a source differ, so the text itself has nothing to offer.
        assert min(result.stats.num_accepted_tokens for result in results) > 8


@pytest.mark.parametrize("name", ["t5", *in_full("bart", "whisper", "speech_to_text")])
def test_draft_models(name):
    """A copy shares what the encoder has read, another model has an encoder of its own."""
    case = Case.of(name)
    draft = copy.deepcopy(case.model)
    # What the target has read is not read again.
    draft.get_encoder().forward = None
    for model, is_copy in ((draft, True), (changed(case.model, 0.01), False)):
        results = case.run(spec_model=model, num_speculative_tokens=4)
        assert tokens_of(results) == case.alone
        drafted = sum(result.stats.num_draft_tokens for result in results)
        accepted = sum(result.stats.num_accepted_tokens for result in results)
        assert drafted / 4 < accepted <= drafted
        assert not is_copy or accepted == drafted > 30


@full
def test_sources_of_drafters_that_have_read_nothing_yet(text_case, monkeypatch):
    """In a combination a draft model reads when it is asked, by then for rows that have joined, too."""

    def asks(choice, rows, probs, num_retrieved, lengths, num_unread):
        choice.turn = getattr(choice, "turn", 0) + 1
        return [length > 0 and choice.turn > 5 for length in lengths]

    monkeypatch.setattr(DrafterChoice, "asks", asks)
    draft = copy.deepcopy(text_case.model)
    draft.get_encoder().forward = None
    settings = {"num_speculative_tokens": 4, "prompt_lookup_min": 9, "prompt_lookup_max": 9}
    speculator = load_speculator(text_case.model, "ngram+draft_model", draft_model=draft, **settings)
    results = text_case.run(assistant=speculator)
    assert tokens_of(results) == text_case.alone
    stats = [result.stats for result in results]
    assert sum(own.num_accepted_tokens for own in stats) == sum(own.num_draft_tokens for own in stats) > 10


@full
def test_forms_of_requests(text_case):
    model, ids = text_case.model, text_case.requests[0]["input_ids"]
    padded = {"input_ids": torch.nn.functional.pad(ids, (0, 3)), "attention_mask": [1] * 12 + [0] * 3}
    result = model.get_encoder()(ids, return_dict=True)
    forms = [ids, ids[0].tolist(), {"input_ids": ids}, padded, {"encoder_outputs": result}]
    forms.append({"encoder_outputs": result, "attention_mask": torch.ones(1, 12)})
    results = text_case.run(forms, max_new_tokens=NEW, **RECYCLING)
    # Encoded sources without a mask stand beside others without one.
    wrong = results.pop(4)
    assert isinstance(wrong.error, SpecConfigError)
    assert "Pass `attention_mask` with every request" in str(wrong.error)
    assert tokens_of(results) == [text_case.alone[0]] * 5
    assert [result.num_prompt_tokens for result in results] == [12, 12, 12, 15, 0]
    assert text_case.run(forms[4:5], 1, max_new_tokens=NEW)[0].tokens == text_case.alone[0]


def test_settings_of_single_requests(text_case):
    """Beside each other, with texts that begin with different numbers of tokens, also without the first one."""
    begun = [{"decoder_input_ids": torch.tensor([ids])} for ids in ([1, 9, 30, 31], [9, 30])]
    settings = [*SETTINGS.values(), {"decoder_start_token_id": 9}, *begun, {}, {}]
    given = [{**own, **more} for own, more in zip(text_case.requests, settings)]
    results = text_case.run(given, pad_token_id=0, **RECYCLING)
    assert [result.error for result in results] == [None] * len(given)
    for result, request in zip(results, given):
        text = text_case.model.generate(**request, do_sample=False, pad_token_id=0)[0].tolist()
        assert result.tokens == text[-len(result.tokens) :]
        begun = request.get("decoder_input_ids", torch.zeros(1, 1)).shape[1]
        assert len(text) - len(result.tokens) in (begun, begun + 1)


@full
def test_what_is_wrong_with_one_request_concerns_no_other(text_case):
    good, ids = text_case.requests[1], text_case.requests[1]["input_ids"]
    wrong = [
        ({"input_ids": ids, "attention_mask": [1, 1]}, "has a number for each of"),
        ({"input_ids": [3, 99]}, "all from 0 to 98"),
        ({"input_ids": ids, "decoder_attention_mask": [[1]]}, "has no padding"),
        ({"input_ids": ids, "decoder_input_ids": torch.ones(2, 1, dtype=torch.long)}, "takes one row"),
        *(({"encoder_outputs": one}, "takes what the encoder returns") for one in (2.0, [True], "x", ())),
        ({"encoder_outputs": (torch.zeros(2, 3, 5),)}, "for one source"),
        # The decoder cannot read it.
        ({"encoder_outputs": (torch.zeros(1, 3, 5),), "attention_mask": [1, 1, 1]}, ""),
    ]
    results = text_case.run([part for one, _ in wrong for part in (one, good)])
    for result, (_, message) in zip(results[::2], wrong):
        assert message in str(result.error)
        assert result.finish_reason == "error"
    assert tokens_of(results[1::2]) == [text_case.alone[1]] * len(wrong)
    with nothing_runs(text_case.model), pytest.raises(SpecConfigError, match="with one adapter"):
        generate_many(text_case.model, [], adapter_names=["french"])


def check_arrivals(name: str, arrived: list[tuple[int, int, str]], places: int) -> None:
    case = Case.of(name)
    reader = RequestReader(case.model, {"do_sample": False}, num_places=places)
    drafts = load_speculator(case.model, "recycling", num_speculative_tokens=3)
    check_each_for_itself(reader, Engine(case.model, drafts, reader, places), case.requests, case.alone, arrived)


@ANY_ORDER
@given(arrived=arrivals(12, len(LENGTHS)), places=st.sampled_from([2, 3, 8]))
@pytest.mark.parametrize("name", ["t5", *in_full("bart", "whisper")])
def test_arrivals_cancellations_and_errors(name, arrived, places):
    check_arrivals(name, arrived, places)


@slow
@pytest.mark.parametrize("name", ["t5", "bart", "whisper", "speech_to_text"])
@ANY_ORDER
@given(arrived=arrivals(40, len(LENGTHS)), places=st.sampled_from([3, 8]))
def test_many_arrivals_cancellations_and_errors(name, places, arrived):
    check_arrivals(name, arrived, places)


def test_sampled_texts_are_those_of_generate(text_case):
    requests = [{**own, "seed": index} for index, own in enumerate(text_case.requests)]
    results = text_case.run(requests, do_sample=True, temperature=1.5, **RECYCLING)
    for index, (result, own) in enumerate(zip(results, text_case.requests)):
        torch.manual_seed(index)
        expected = text_case.model.generate(**own, do_sample=True, temperature=1.5, **RECYCLING)
        assert result.tokens == expected[0, 1:].tolist()
    assert tokens_of(results) != text_case.alone


@full
def test_batches_and_managers(text_case):
    ids = [own["input_ids"][0].tolist() for own in text_case.requests[:4]]
    outputs = list(generate_batch(text_case.model, ids, max_new_tokens=5, do_sample=False, **RECYCLING).values())
    assert [output.generated_tokens for output in outputs[:3]] == [text[:5] for text in text_case.alone[:3]]
    with SpeculativeBatchingManager(text_case.model, batch_size=2, do_sample=False, **RECYCLING) as manager:
        shown = list(manager.request_id_iter(manager.add_request(text_case.requests[0], streaming=True)))
        manager.add_request(ids[0], "long", max_new_tokens=100)
        manager.cancel_request("long")
        name = manager.add_request(text_case.requests[2])
        assert manager.get_result(name, timeout=60).generated_tokens == text_case.alone[2]
    assert len(shown) > 1
    assert shown[-1].generated_tokens == text_case.alone[0]
    assert shown[-1].prompt_ids == ids[0]


@full
def test_journals_tell_sources_apart(tmp_path):
    case, path = Case.of("whisper"), tmp_path / "results.jsonl"
    assert tokens_of(case.run(journal=path)) == case.alone
    with nothing_runs(case.model):
        assert tokens_of(case.run(journal=path)) == case.alone
    other = [{**own, "input_features": own["input_features"] + 1} for own in case.requests]
    with pytest.raises(SpecConfigError, match="the result of another prompt"):
        case.run(other, journal=path)
