"""Settings in a generation config: what is written names a drafter for calls that ask, objects ask themselves."""

import copy
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, GenerationMixin

import hf_specdec
from hf_specdec import SpecConfigError, SpeculativeConfig, hook, record
from tests.helpers.models import prompts, tiny_llama


SETTINGS = {"do_sample": False, "max_new_tokens": 24}
NGRAM = {"method": "ngram", "num_speculative_tokens": 6}


@pytest.fixture
def inputs():
    return prompts(2, length=9)


@pytest.fixture
def configured(tmp_path):
    """A model of its own whose saved generation config has settings."""
    model = tiny_llama()
    hf_specdec.store_settings(model.generation_config, NGRAM)
    model.save_pretrained(tmp_path / "model")
    saved = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert saved["speculative"] == NGRAM
    return AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()


def calls(run):
    """The result of `run`, and the statistics of the speculative calls in it."""
    with record() as made:
        output = run()
    return output, [call.stats for call in made.calls]


def test_what_is_written_switches_nothing_on(model, configured, inputs, warnings):
    plain = model.generate(**inputs, **SETTINGS)
    for call in (
        {},
        {"spec_method": "off"},
        {"generation_config": GenerationConfig(**SETTINGS, pad_token_id=0, speculative="ngram")},
        {"generation_config": GenerationConfig(**SETTINGS, pad_token_id=0, spec_method="ngram", spec_model="a/b")},
    ):
        output, stats = calls(lambda call=call: configured.generate(**inputs, **SETTINGS, **call))
        assert torch.equal(output, plain)
        assert stats == []
    assert warnings == []


def test_auto_takes_it(configured, inputs):
    assert hf_specdec.load_speculator(configured, "auto").config == SpeculativeConfig(**NGRAM)
    call = {**SETTINGS, "spec_method": "auto", "num_speculative_tokens": 2}
    _, (stats,) = calls(lambda: configured.generate(**inputs, **call))
    assert (stats.method, len(stats.num_accepted_tokens_per_pos)) == ("ngram", 2)


@pytest.mark.parametrize(
    "dangerous",
    [
        {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [1.0, 1.0]},
        {"rejection_sample_method": "typical", "posterior_threshold": 0.01},
        {"control_profile": "/etc/passwd", "num_speculative_tokens": "auto"},
        {"device": "cuda:7", "token": "hf_secret", "cache_dir": "/etc", "code_revision": "main"},
        {"quantization": "bitsandbytes_4bit", "dtype": "float16", "top_k": 3, "of_a_later_version": 1},
        {"suffix_decoding_max_cached_tokens": 10**12, "options": {"prompt_lookup_max_indexed_tokens": 10**12}},
    ],
    ids=["synthetic", "typical", "profile", "account", "weights", "memory"],
)
def test_only_the_shape_of_drafts_is_taken(inputs, dangerous, warnings):
    model = tiny_llama()
    plain = model.generate(**inputs, **SETTINGS)
    model.generation_config.speculative = {"method": "ngram", "prompt_lookup_max": 4, **dangerous}
    output, (stats,) = calls(lambda: model.generate(**inputs, **SETTINGS, spec_method="auto"))
    assert torch.equal(output, plain)
    assert (stats.method, stats.is_lossless) == ("ngram", True)
    names = {*dangerous, *dangerous.get("options", {})} - {"options", "num_speculative_tokens"}
    assert all(name in warnings[0] for name in names)
    assert "prompt_lookup_max," not in warnings[0]


def test_stored_settings(model, tmp_path):
    config = GenerationConfig()
    for given, stored in (
        ("ngram", "ngram"),
        ("off", "off"),
        ("user/head", "user/head"),
        (NGRAM, NGRAM),
        # What only concerns this machine is not stored, and what would not be obeyed.
        (SpeculativeConfig(model="user/head", device="cuda:1"), {"model": "user/head"}),
        (SpeculativeConfig("ngram", rejection_sample_method="typical"), {"method": "ngram"}),
    ):
        hf_specdec.store_settings(config, given)
        assert config.speculative == stored
        config.save_pretrained(tmp_path)
        assert GenerationConfig.from_pretrained(tmp_path).speculative == stored
    hf_specdec.store_settings(config, None)
    assert not hasattr(config, "speculative")
    for wrong in (
        tmp_path,
        {"model": str(tmp_path)},
        {"method": "ngrm"},
        {"model": "a/b", "trust_remote_code": True},
        3,
        '{"method": "ngram"}',
    ):
        with pytest.raises(SpecConfigError):
            hf_specdec.store_settings(config, wrong)
    assert not hasattr(config, "speculative")


@pytest.mark.parametrize("is_given", [True, False], ids=["given", "the model's own"])
def test_objects_count_as_arguments(inputs, tmp_path, is_given):
    """No file and no client can have set them."""
    model, draft = tiny_llama(), tiny_llama(seed=1)
    draft.save_pretrained(tmp_path)
    plain = model.generate(**inputs, **SETTINGS)
    for names, method in (
        ({"assistant": hf_specdec.load_speculator(model, "ngram")}, "ngram"),
        ({"assistant": draft}, "draft_model"),
        ({"spec_model": draft}, "draft_model"),
        ({"spec_model": tmp_path}, "draft_model"),
        ({"speculative": SpeculativeConfig("ngram")}, "ngram"),
        # What is written beside them may come from a file.
        ({"speculative": SpeculativeConfig("ngram"), "spec_method": "suffix", "spec_model": "a/b"}, "ngram"),
    ):
        config = GenerationConfig(**SETTINGS, pad_token_id=0)
        vars(config).update(names)
        call = {"generation_config": config}
        if not is_given:
            model.generation_config, call = config, {}
        output, (stats,) = calls(lambda call=call: model.generate(**inputs, **call))
        assert torch.equal(output, plain)
        assert stats.method == method
        assert {name: getattr(config, name) for name in names} == names
        # The call has the last word.
        assert calls(lambda call=call: model.generate(**inputs, **call, spec_method="off"))[1] == []
        _, (stats,) = calls(lambda call=call: model.generate(**inputs, **call, spec_method="recycling"))
        assert stats.method == "recycling"


def test_a_length_beside_an_object(inputs):
    model = tiny_llama()
    model.generation_config.speculative = SpeculativeConfig("ngram")
    _, (stats,) = calls(lambda: model.generate(**inputs, **SETTINGS, num_speculative_tokens=1))
    assert len(stats.num_accepted_tokens_per_pos) <= 1
    model.generation_config.speculative = {"method": "ngram"}
    with pytest.raises(SpecConfigError, match="needs a method or a model"):
        model.generate(**inputs, **SETTINGS, num_speculative_tokens=1)


def test_what_an_object_asks_for_is_asked_for(inputs):
    model = tiny_llama()
    model.generation_config.speculative = SpeculativeConfig("ngram")
    with pytest.raises(SpecConfigError, match="num_beams"):
        model.generate(**inputs, **SETTINGS, num_beams=2)


def test_a_config_with_objects_is_shown_and_saved(tmp_path):
    model, config = tiny_llama(), GenerationConfig(**SETTINGS)
    config.assistant = hf_specdec.load_speculator(model, "draft_model", draft_model=tiny_llama(seed=1))
    config.speculative = SpeculativeConfig("ngram", num_speculative_tokens=4)
    assert "draft_model" in repr(config)
    assert copy.deepcopy(config).assistant is config.assistant
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    assert saved["assistant"] == {"method": "draft_model"}
    assert saved["speculative"] == {"method": "ngram", "num_speculative_tokens": 4}
    # What is read is written, not an object.
    model.generation_config = GenerationConfig.from_pretrained(tmp_path)
    assert calls(lambda: model.generate(**prompts(1), **SETTINGS))[1] == []


class TestContinuousBatching:
    def test_speculates_where_the_call_asks(self, model):
        prompts, length = [[5, 6, 7], [8, 9]], {"max_new_tokens": 6, "do_sample": False}
        alone = [model.generate(torch.tensor([ids]), **length)[0, len(ids) :].tolist() for ids in prompts]
        asked = [
            {"spec_method": "ngram"},
            {"generation_config": GenerationConfig(speculative=SpeculativeConfig("ngram"), pad_token_id=0)},
        ]
        for own in asked:
            outputs = model.generate_batch(prompts, **own, **length)
            assert [output.generated_tokens for output in outputs.values()] == alone
            assert all(output.speculative.method == "ngram" for output in outputs.values())
        with pytest.raises(SpecConfigError):
            model.generate_batch(prompts, spec_model="a/b", spec_method="ngram")

    def test_other_calls_go_on(self, model, configured, warnings):
        # Nothing to decode: what is tested is that the call goes through.
        for asked in ({}, {"spec_method": "off"}, {"speculative": False}, {"spec_method": None}):
            assert model.generate_batch([], **asked) == {}
        assert configured.generate_batch([]) == {}
        assert warnings == []

    def test_is_taken_back(self, model):
        before = GenerationMixin.generate_batch
        hook.uninstall()
        try:
            assert "generate_batch" not in vars(GenerationMixin)
            assert before.__wrapped__ is GenerationMixin.generate_batch
        finally:
            hook.install()
        assert GenerationMixin.generate_batch is not before.__wrapped__
