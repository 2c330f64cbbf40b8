"""Targets with an encoder: what the decoder writes over slots equals plain `generate()`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor

import hf_specdec
from hf_specdec import SpecConfigError, UnsupportedModelError
from hf_specdec.decoding.profile import model_profile
from tests.helpers.caches import CACHE
from tests.helpers.distribution import no_drafts
from tests.helpers.encoder_decoders import CHAINS_ONLY, UNSUPPORTED, supported, text_model, tiny_model
from tests.helpers.sampled import sampled_speculator
from tests.helpers.scripted import scripted_speculator
from tests.helpers.statistics import chi_square_pvalue


NEW_TOKENS = 16
CHAIN = {"num_speculative_tokens": 5}
TREE = {"num_speculative_tokens": 3, "tree": (-1, -1, 0, 0, 1, 2)}


def assert_alike(values: torch.Tensor, expected: torch.Tensor) -> None:
    """Equality up to rounding, which grows with the spread of the values."""
    spread = float(expected[expected.isfinite()].std())
    torch.testing.assert_close(values, expected, rtol=1e-3, atol=2e-3 * spread)


def lengths(sequences: torch.Tensor) -> torch.Tensor:
    """Tokens of each row; those after its last one that is no zero are padding."""
    return sequences.ne(0).cumsum(1).argmax(1) + 1


@dataclass
class Case:
    """A model, its sources, and what plain generation writes for them."""

    name: str
    model: torch.nn.Module
    source: dict[str, torch.Tensor]
    plain: dict[int, Any] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        return self.model.config.get_text_config(decoder=True).vocab_size

    def inputs(self, batch_size: int) -> dict[str, torch.Tensor]:
        return {name: value[:batch_size] for name, value in self.source.items()}

    def generate(self, batch_size: int, **settings):
        call = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True}
        return self.model.generate(**self.inputs(batch_size), **{**call, "output_logits": True, **settings})

    def expected(self, batch_size: int) -> Any:
        if batch_size not in self.plain:
            self.plain[batch_size] = self.generate(batch_size)
        return self.plain[batch_size]

    def assert_same(self, batch_size: int, script: dict) -> None:
        """Drafts that are right now and then are accepted as far as they are, and change nothing."""
        expected = self.expected(batch_size).sequences
        # Whisper's own generate() leaves out the token that its texts begin with.
        begin = expected.new_full((batch_size, NEW_TOKENS + 1 - expected.shape[1]), 1)
        texts = torch.cat([begin, expected], dim=1)
        speculator = scripted_speculator(texts, [0] * batch_size, self.vocab_size, **script)
        with hf_specdec.record() as made:
            output = self.generate(batch_size, assistant=speculator)
        assert output.sequences.tolist() == expected.tolist()
        # A model may write one token all the time, wherever it thinks that the token stands.
        for logits, own in zip(output.logits, self.expected(batch_size).logits, strict=True):
            assert_alike(logits, own)
        stats = made.calls[0].stats
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
        assert stats.num_target_forwards < NEW_TOKENS
        # Nobody waits for the slowest row, where positions can be told.
        assert bool(stats.notes) == (batch_size > 1 and self.name in CHAINS_ONLY)


@pytest.fixture(scope="module", params=supported())
def case(request) -> Case:
    return Case(request.param, *tiny_model(request.param))


def test_chains_equal_plain_generate(case):
    before = {id(module): dict(vars(module)) for module in case.model.modules()}
    case.assert_same(4, CHAIN)
    for module in case.model.modules():
        assert vars(module).keys() == before[id(module)].keys()


def test_trees_equal_plain_generate(case):
    assert model_profile(case.model).supports_trees == (case.name not in CHAINS_ONLY)
    for batch_size in (1, 4):
        if case.name in CHAINS_ONLY:
            with pytest.raises(UnsupportedModelError, match="Draft without branches"):
                case.assert_same(batch_size, TREE)
        else:
            case.assert_same(batch_size, TREE)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_architectures_say_why(name):
    model, source = text_model(name)
    with pytest.raises(UnsupportedModelError, match=UNSUPPORTED[name]):
        model.generate(**source, num_beams=1, max_new_tokens=4, spec_method="ngram")


@pytest.fixture(scope="module", params=["t5", "bart"])
def text_case(request) -> Case:
    """A model whose encoder and decoder embed tokens by the same weights."""
    return Case(request.param, *text_model(request.param, tie_word_embeddings=True))


METHODS = pytest.mark.parametrize("method", ["ngram", "suffix", "recycling"])


@METHODS
@pytest.mark.parametrize("batch_size", [1, 4])
def test_methods_without_a_model(text_case, method, batch_size):
    settings = {"max_new_tokens": 32, "no_repeat_ngram_size": 9}
    output = text_case.generate(batch_size, **settings, spec_method=method)
    assert torch.equal(output.sequences, text_case.generate(batch_size, **settings).sequences)
    assert output.speculative.num_accepted_tokens > 0


class Copy(LogitsProcessor):
    """Lets a model write its source."""

    def __init__(self, source: torch.LongTensor):
        self.source = source

    def __call__(self, input_ids, scores):
        place = input_ids.shape[1] - 1
        return scores.scatter_add(1, self.source[:, place : place + 1], scores.new_full((len(scores), 1), 1e4))


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_are_looked_up_in_the_source(text_case, method):
    source = torch.randperm(90)[:40][None] + 3
    call = {"input_ids": source, "max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True}
    found = text_case.model.generate(**call, logits_processor=[Copy(source)], spec_method=method)
    assert found.sequences[0, 1:].tolist() == source[0, :30].tolist()
    # All tokens differ, so the text itself has nothing to offer.
    assert found.speculative.num_accepted_tokens > 15
    assert found.speculative.num_target_forwards < 15


def test_sources_of_other_tokens_are_not_looked_up():
    model, _ = text_model("bart", tie_word_embeddings=False)
    source = torch.randperm(90)[:40][None] + 3
    call = {"input_ids": source, "max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True}
    found = model.generate(**call, logits_processor=[Copy(source)], spec_method="ngram")
    assert found.speculative.num_accepted_tokens == 0


SETTINGS = {
    "ends": {"eos_token_id": [7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47], "no_repeat_ngram_size": 2},
    "forced": {"forced_bos_token_id": 5, "forced_eos_token_id": 2, "no_repeat_ngram_size": 3},
    "least": {"min_new_tokens": 9, "eos_token_id": [7, 11, 13, 17, 19, 23], "suppress_tokens": [8]},
    "source": {"encoder_no_repeat_ngram_size": 1, "encoder_repetition_penalty": 1.5, "repetition_penalty": 1.3},
    "sequences": {"num_return_sequences": 2, "do_sample": True, "top_k": 1},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_honoured(text_case, name):
    settings = {"output_scores": True, "output_hidden_states": True, "pad_token_id": 0, **SETTINGS[name]}
    expected = text_case.generate(4, **settings)
    output = text_case.generate(4, **settings, spec_method="recycling", num_speculative_tokens=3)
    assert torch.equal(output.sequences, expected.sequences)
    assert output.keys() == expected.keys()
    assert output.speculative.num_accepted_tokens > 0
    ends = lengths(expected.sequences)
    for step, (mine, own) in enumerate(zip(output.scores, expected.scores, strict=True), 1):
        assert_alike(mine[ends > step], own[ends > step])
        assert not mine[ends <= step].any()
    states = zip(output.decoder_hidden_states, expected.decoder_hidden_states, strict=True)
    for step, (mine, own) in enumerate(states, 1):
        for layer, own_layer in zip(mine, own, strict=True):
            assert_alike(layer[ends > step], own_layer[ends > step])
    for mine, own in zip(output.encoder_hidden_states, expected.encoder_hidden_states, strict=True):
        assert torch.equal(mine, own)


def test_the_cache_of_all_rows_is_returned(text_case):
    """Also of rows that have left the batch."""
    settings = {**SETTINGS["ends"], "pad_token_id": 0}
    expected = text_case.generate(4, **settings)
    cache, ends = text_case.generate(4, **settings, spec_method="ngram")[CACHE], lengths(expected.sequences) - 1
    for part, is_own in {"self_attention_cache": True, "cross_attention_cache": False}.items():
        caches = cache, expected[CACHE]
        layers = [[one for one in getattr(each, part).layers if one.is_initialized] for each in caches]
        for mine, own in zip(*layers, strict=True):
            for row, end in enumerate(ends.tolist() if is_own else [None] * 4):
                assert_alike(mine.keys[row, :, :end], own.keys[row, :, :end])
                assert_alike(mine.values[row, :, :end], own.values[row, :, :end])


def test_texts_may_begin_with_more_than_one_token(text_case):
    begin = torch.tensor([[0, 0, 1, 9], [1, 8, 7, 6], [0, 1, 9, 9], [1, 5, 5, 8]])
    for given in ({}, {"decoder_attention_mask": begin.ne(0).long()}):
        settings = {"decoder_input_ids": begin, "no_repeat_ngram_size": 6, **given}
        output = text_case.generate(4, **settings, spec_method="recycling", num_speculative_tokens=3)
        assert torch.equal(output.sequences, text_case.generate(4, **settings).sequences)
        assert output.speculative.num_accepted_tokens > 0


def test_sources_may_come_encoded(text_case):
    inputs = text_case.inputs(2)
    encoded = text_case.model.get_encoder()(**inputs, return_dict=True)
    call = {"encoder_outputs": encoded, "attention_mask": inputs["attention_mask"], "max_new_tokens": 16}
    expected = text_case.model.generate(**call, do_sample=False)
    assert torch.equal(text_case.model.generate(**call, do_sample=False, spec_method="ngram"), expected)


def test_sampled_texts_follow_from_the_seed_alone(text_case):
    texts = []
    for method in ("ngram", "recycling", None):
        drafts = no_drafts() if method is None else None
        torch.manual_seed(3)
        texts.append(text_case.generate(4, do_sample=True, assistant=drafts, spec_method=method).sequences)
    assert torch.equal(texts[0], texts[2])
    assert torch.equal(texts[1], texts[2])
    assert len(set(texts[0][:, 1:].flatten().tolist())) > 4


@pytest.mark.parametrize("tree", [False, True])
def test_sampling_follows_the_distribution(tree):
    """Three tokens of many rows of one source, against their enumerated probabilities."""
    model, source = text_model("t5", tie_word_embeddings=True)
    one = {name: value[1:2] for name, value in source.items()}
    suppressed = [token for token in range(model.config.vocab_size) if token not in (5, 6, 7)]
    settings = {"do_sample": True, "max_new_tokens": 4, "suppress_tokens": suppressed, "temperature": 3.0}
    encoded = model.get_encoder()(**one)
    probs = {(): 1.0}
    for _ in range(3):
        texts = torch.tensor([[model.generation_config.decoder_start_token_id, *path] for path in probs])
        states = encoded.last_hidden_state.expand(len(texts), -1, -1)
        mask = one["attention_mask"].expand(len(texts), -1)
        with torch.no_grad():
            logits = model(encoder_outputs=(states,), attention_mask=mask, decoder_input_ids=texts).logits[:, -1]
        nexts = (logits[:, 5:8].double() / 3.0).softmax(-1).tolist()
        probs = {(*p, t): probs[p] * q for p, row in zip(list(probs), nexts) for t, q in zip((5, 6, 7), row)}
    torch.manual_seed(0)
    speculator = sampled_speculator(3, widths=(2, 1, 1) if tree else (1, 1, 1), processed=True)
    model.generation_config.eos_token_id = None
    output = model.generate(
        **one, **settings, num_return_sequences=600, assistant=speculator, return_dict_in_generate=True
    )
    counts = dict.fromkeys(probs, 0)
    for text in output.sequences[:, 1:4].tolist():
        counts[tuple(text)] += 1
    assert min(output.speculative.num_accepted_tokens, output.speculative.num_draft_tokens) > 100
    assert chi_square_pvalue(list(counts.values()), list(probs.values())) > 1e-3


def test_requests_that_cannot_be_honoured(text_case):
    inputs = text_case.inputs(1)
    with pytest.raises(SpecConfigError, match="no cache is continued beside an encoder"):
        text_case.model.generate(**inputs, **{CACHE: DynamicCache()}, spec_method="ngram")
    with pytest.raises(SpecConfigError, match="Beam search"):
        text_case.model.generate(**inputs, num_beams=2, spec_method="ngram")
