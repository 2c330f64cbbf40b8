"""Targets with an encoder: what the decoder writes over slots equals plain `generate()`."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

import hf_specdec
from hf_specdec import UnsupportedModelError
from hf_specdec.decoding.profile import model_profile

from .encoder_decoders import CHAINS_ONLY, UNSUPPORTED, _text_model, supported, tiny_model
from .scripted import scripted_speculator


NEW_TOKENS = 16
CHAIN = {"num_speculative_tokens": 5}
TREE = {"num_speculative_tokens": 3, "tree": (-1, -1, 0, 0, 1, 2)}


@dataclass
class Case:
    """A model, its sources, and what plain generation writes for them."""

    name: str
    model: torch.nn.Module
    source: dict[str, torch.Tensor]
    plain: dict[int, torch.LongTensor] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        return self.model.config.get_text_config(decoder=True).vocab_size

    def inputs(self, batch_size: int) -> dict[str, torch.Tensor]:
        return {name: value[:batch_size] for name, value in self.source.items()}

    def generate(self, batch_size: int, **settings):
        call = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True, **settings}
        return self.model.generate(**self.inputs(batch_size), **call)

    def expected(self, batch_size: int) -> torch.LongTensor:
        if batch_size not in self.plain:
            self.plain[batch_size] = self.generate(batch_size).sequences
        return self.plain[batch_size]

    def assert_same(self, batch_size: int, script: dict) -> None:
        """Drafts that are right now and then are accepted as far as they are, and change nothing."""
        expected = self.expected(batch_size)
        # Whisper's own generate() leaves out the token that its texts begin with.
        begin = expected.new_full((batch_size, NEW_TOKENS + 1 - expected.shape[1]), 1)
        texts = torch.cat([begin, expected], dim=1)
        speculator = scripted_speculator(texts, [0] * batch_size, self.vocab_size, **script)
        with hf_specdec.record() as made:
            output = self.generate(batch_size, assistant=speculator)
        assert output.sequences.tolist() == expected.tolist()
        stats = made.calls[0].stats
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
        assert stats.num_target_forwards < NEW_TOKENS
        # Nobody waits for the slowest row, where positions can be told.
        assert bool(stats.notes) == (batch_size > 1 and self.name in CHAINS_ONLY)


@pytest.fixture(scope="module", params=supported())
def case(request) -> Case:
    return Case(request.param, *tiny_model(request.param))


@pytest.mark.parametrize("batch_size", [1, 4])
def test_chains_equal_plain_generate(case, batch_size):
    before = {id(module): dict(vars(module)) for module in case.model.modules()}
    case.assert_same(batch_size, CHAIN)
    for module in case.model.modules():
        assert vars(module).keys() == before[id(module)].keys()


@pytest.mark.parametrize("batch_size", [1, 4])
def test_trees_equal_plain_generate(case, batch_size):
    assert model_profile(case.model).supports_trees == (case.name not in CHAINS_ONLY)
    if case.name in CHAINS_ONLY:
        with pytest.raises(UnsupportedModelError, match="Draft without branches"):
            case.assert_same(batch_size, TREE)
    else:
        case.assert_same(batch_size, TREE)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_architectures_say_why(name):
    model, source = _text_model(name)
    with pytest.raises(UnsupportedModelError, match=UNSUPPORTED[name]):
        model.generate(**source, num_beams=1, max_new_tokens=4, spec_method="ngram")
