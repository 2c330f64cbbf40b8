"""Targets with an encoder: what the decoder writes over slots equals plain `generate()`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import hf_specdec
from hf_specdec import (
    SpecConfigError,
    SpeculativeBatchingManager,
    UnsupportedModelError,
    generate_batch,
    generate_many,
)
from hf_specdec.target.facts import model_profile
from tests.helpers.caches import CACHE
from tests.helpers.chi_square import chi_square_pvalue
from tests.helpers.distribution import P_VALUE, no_drafts
from tests.helpers.encoder_decoders import (
    CHAINS_ONLY,
    SETTINGS,
    UNSUPPORTED,
    CopySource,
    probabilities_of_three,
    sampling_of_three,
    supported,
    text_model,
    tiny_model,
)
from tests.helpers.levels import full, in_full, split
from tests.helpers.models import nothing_runs
from tests.helpers.sampled import sampled_speculator
from tests.helpers.scripted import scripted_speculator


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


# Relative and learned positions, sound, and a pair that counts slots.
@pytest.mark.parametrize("name", split(supported(), short=["t5", "bart", "whisper", "bert2gpt2"]))
def test_greedy_matches_generate(name):
    case = Case(name, *tiny_model(name))
    before = {id(module): dict(vars(module)) for module in case.model.modules()}
    case.assert_same(4, CHAIN)
    assert model_profile(case.model).supports_trees == (name not in CHAINS_ONLY)
    for batch_size in (1, 4):
        if name in CHAINS_ONLY:
            with pytest.raises(UnsupportedModelError, match="Draft without branches"):
                case.assert_same(batch_size, TREE)
        else:
            case.assert_same(batch_size, TREE)
    for module in case.model.modules():
        assert vars(module).keys() == before[id(module)].keys()


@pytest.fixture(scope="module", params=["t5", *in_full("bart")])
def text_case(request) -> Case:
    """A model whose encoder and decoder embed tokens by the same weights."""
    return Case(request.param, *text_model(request.param, tie_word_embeddings=True))


@full
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_are_looked_up_in_the_source(text_case, method):
    source = torch.randperm(90, generator=torch.Generator().manual_seed(0))[:40][None] + 3
    call = {"input_ids": source, "max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True}
    call |= {"logits_processor": [CopySource(source[0])], "spec_method": method}
    found = text_case.model.generate(**call)
    assert found.sequences[0, 1:].tolist() == source[0, :30].tolist()
    # All tokens differ, so the text itself has nothing to offer.
    assert found.speculative.num_accepted_tokens > 15
    assert found.speculative.num_target_forwards < 15
    # Tokens of another vocabulary than the text's.
    model, _ = text_model("bart", tie_word_embeddings=False)
    assert model.generate(**call).speculative.num_accepted_tokens == 0


MORE_SETTINGS = {**SETTINGS, "sequences": {"num_return_sequences": 2, "do_sample": True, "top_k": 1}}


@pytest.mark.parametrize("name", split(MORE_SETTINGS, short=["ends"]))
def test_settings_scores_and_states(text_case, name):
    settings = {"output_scores": True, "output_hidden_states": True, "pad_token_id": 0, **MORE_SETTINGS[name]}
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
    # The cache has also the rows that have left the batch.
    for part in ("self_attention_cache", "cross_attention_cache"):
        caches = output[CACHE], expected[CACHE]
        layers = [[one for one in getattr(each, part).layers if one.is_initialized] for each in caches]
        for mine, own in zip(*layers, strict=True):
            for row, end in enumerate((ends - 1).tolist()):
                read = slice(end if part.startswith("self") else None)
                assert_alike(mine.keys[row, :, read], own.keys[row, :, read])
                assert_alike(mine.values[row, :, read], own.values[row, :, read])


def test_begun_texts_and_encoded_sources(text_case):
    begin = torch.tensor([[0, 0, 1, 9], [1, 8, 7, 6], [0, 1, 9, 9], [1, 5, 5, 8]])
    encoded = text_case.model.get_encoder()(**text_case.inputs(4), return_dict=True)
    for given in ({}, {"decoder_attention_mask": begin.ne(0).long()}, {"encoder_outputs": encoded, "input_ids": None}):
        settings = {"decoder_input_ids": begin, "no_repeat_ngram_size": 6, **given}
        call = {**text_case.inputs(4), "max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True, **settings}
        output = text_case.model.generate(**call, spec_method="recycling", num_speculative_tokens=3)
        assert torch.equal(output.sequences, text_case.model.generate(**call).sequences)
        assert output.speculative.num_accepted_tokens > 0


def test_sampled_texts_follow_from_the_seed_alone(text_case):
    texts = []
    for drafts in ({"spec_method": "ngram"}, {"spec_method": "recycling"}, {"assistant": no_drafts()}):
        torch.manual_seed(3)
        texts.append(text_case.generate(4, do_sample=True, **drafts).sequences.tolist())
    assert texts[0] == texts[1] == texts[2]
    assert len({token for row in texts[0] for token in row[1:]}) > 4


@pytest.mark.parametrize("widths", [(2, 1, 1), *in_full(((1, 1, 1),))], ids=["tree", "chain"])
def test_sampling_follows_the_distribution(widths):
    """Three tokens of many rows of one source, against their enumerated probabilities."""
    model, source = text_model("t5", tie_word_embeddings=True)
    one = {name: value[1:2] for name, value in source.items()}
    model.generation_config.eos_token_id = None
    probs = probabilities_of_three(model, one, 3.0)
    torch.manual_seed(0)
    speculator = sampled_speculator(3, widths=widths, processed=True)
    settings = {**sampling_of_three(model, 3.0), "num_return_sequences": 600, "return_dict_in_generate": True}
    output = model.generate(**one, **settings, assistant=speculator)
    counts = dict.fromkeys(probs, 0)
    for text in output.sequences[:, 1:4].tolist():
        counts[tuple(text)] += 1
    assert min(output.speculative.num_accepted_tokens, output.speculative.num_draft_tokens) > 100
    assert chi_square_pvalue(list(counts.values()), list(probs.values())) > P_VALUE


@full
def test_types_and_requests_that_cannot_be_used_say_why(text_case):
    for name, message in UNSUPPORTED.items():
        model, source = text_model(name)
        with pytest.raises(UnsupportedModelError, match=message):
            model.generate(**source, num_beams=1, max_new_tokens=4, spec_method="ngram")
    for wrong, message in (
        ({CACHE: DynamicCache()}, "no cache is continued beside an encoder"),
        ({"num_beams": 2}, "Beam search"),
    ):
        with pytest.raises(SpecConfigError, match=message):
            text_case.model.generate(**text_case.inputs(1), **wrong, spec_method="ngram")


@pytest.mark.parametrize("call", [generate_many, generate_batch, SpeculativeBatchingManager])
def test_loops_of_many_requests_send_to_generate(call):
    model, _ = text_model("t5")
    requests = [] if call is SpeculativeBatchingManager else [[[5]]]
    with nothing_runs(model), pytest.raises(UnsupportedModelError, match="has an encoder, .* with batches of sources"):
        call(model, *requests, spec_method="ngram")
