"""Settings in a generation config: what is written names a drafter for calls that ask, objects ask themselves."""

import copy
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, GenerationMixin

import hf_specdec
from hf_specdec import SpecConfigError, SpeculativeConfig, hook, record
from tests.helpers.levels import full
from tests.helpers.models import prompts, tiny_llama


SETTINGS = {"do_sample": False, "max_new_tokens": 24}
NGRAM = {"method": "ngram", "num_speculative_tokens": 6}


@pytest.fixture
def inputs():
    return prompts(2, length=9)


def generate(model, inputs, **arguments):
    """The text, and the statistics of the speculative calls."""
    with record() as made:
        output = model.generate(**inputs, **{**SETTINGS, **arguments})
    return output, [call.stats for call in made.calls]


def test_written_settings_switch_nothing_on(inputs, tmp_path, warnings):
    model = tiny_llama()
    plain = model.generate(**inputs, **SETTINGS)
    hf_specdec.store_settings(model.generation_config, NGRAM)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["speculative"] == NGRAM
    configured = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    config = {**SETTINGS, "pad_token_id": 0}
    for call in (
        {},
        {"spec_method": "off"},
        {"generation_config": GenerationConfig(**config, speculative="ngram")},
        {"generation_config": GenerationConfig(**config, spec_method="ngram", spec_model="a/b")},
    ):
        output, stats = generate(configured, inputs, **call)
        assert torch.equal(output, plain)
        assert stats == []
    assert warnings == []
    with pytest.raises(SpecConfigError, match="needs a method or a model"):
        configured.generate(**inputs, **SETTINGS, num_speculative_tokens=1)
    # "auto" takes them.
    assert hf_specdec.load_speculator(configured, "auto").config == SpeculativeConfig(**NGRAM)
    _, (stats,) = generate(configured, inputs, spec_method="auto", num_speculative_tokens=2)
    assert (stats.method, len(stats.num_accepted_tokens_per_pos)) == ("ngram", 2)


# What a stranger's file may not set.
DANGEROUS = {
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_rates": [1.0, 1.0],
    "control_profile": "/etc/passwd",
    **{"device": "cuda:7", "token": "hf_secret", "cache_dir": "/etc", "code_revision": "main"},
    **{"quantization": "bitsandbytes_4bit", "dtype": "float16", "top_k": 3, "of_a_later_version": 1},
    "suffix_decoding_max_cached_tokens": 10**12,
    "options": {"prompt_lookup_max_indexed_tokens": 10**12},
}


def test_auto_takes_only_the_shape_of_drafts(inputs, warnings):
    model = tiny_llama()
    plain = model.generate(**inputs, **SETTINGS)
    model.generation_config.speculative = {"method": "ngram", "prompt_lookup_max": 4, **DANGEROUS}
    output, (stats,) = generate(model, inputs, spec_method="auto")
    assert torch.equal(output, plain)
    assert (stats.method, stats.is_lossless) == ("ngram", True)
    assert hf_specdec.load_speculator(model, "auto").config == SpeculativeConfig("ngram", prompt_lookup_max=4)
    assert any("cache_dir, code_revision, control_profile, device" in warning for warning in warnings)


def test_stored_settings(tmp_path):
    config = GenerationConfig()
    for given, stored in (
        ("ngram", "ngram"),
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
    code, folder = {"model": "a/b", "trust_remote_code": True}, {"model": str(tmp_path)}
    for wrong in (tmp_path, folder, {"method": "ngrm"}, code, 3, '{"method": "ngram"}'):
        with pytest.raises(SpecConfigError):
            hf_specdec.store_settings(config, wrong)
    assert not hasattr(config, "speculative")


def test_objects_count_as_arguments(inputs, tmp_path):
    """No file and no client can have set them."""
    model, draft = tiny_llama(), tiny_llama(seed=1)
    draft.save_pretrained(tmp_path)
    plain, ngram = model.generate(**inputs, **SETTINGS), SpeculativeConfig("ngram")
    for names, method in (
        ({"assistant": hf_specdec.load_speculator(model, "ngram")}, "ngram"),
        ({"assistant": draft}, "draft_model"),
        ({"spec_model": draft}, "draft_model"),
        ({"spec_model": Path(tmp_path)}, "draft_model"),
        # What is written beside them may come from a file.
        ({"speculative": ngram, "spec_method": "suffix", "spec_model": "a/b"}, "ngram"),
        ({"speculative": ngram}, "ngram"),
    ):
        config = GenerationConfig(**SETTINGS, pad_token_id=0)
        vars(config).update(names)
        for call in ({"generation_config": config}, {}):
            model.generation_config = GenerationConfig(pad_token_id=0) if call else config
            output, (stats,) = generate(model, inputs, **call)
            assert torch.equal(output, plain)
            assert stats.method == method
            assert {name: getattr(config, name) for name in names} == names
            # The call has the last word.
            assert generate(model, inputs, **call, spec_method="off")[1] == []
            _, (stats,) = generate(model, inputs, **call, spec_method="recycling")
            assert stats.method == "recycling"
    _, (stats,) = generate(model, inputs, num_speculative_tokens=1)
    assert len(stats.num_accepted_tokens_per_pos) <= 1
    with pytest.raises(SpecConfigError, match="num_beams"):
        model.generate(**inputs, **SETTINGS, num_beams=2)


@full
def test_config_with_objects_is_shown_and_saved(inputs, tmp_path):
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
    assert generate(model, prompts(1))[1] == []


def test_generate_batch_speculates_where_the_call_asks(model):
    requests, length = [[5, 6, 7], [8, 9]], {"max_new_tokens": 6, "do_sample": False}
    alone = [model.generate(torch.tensor([ids]), **length)[0, len(ids) :].tolist() for ids in requests]
    config = GenerationConfig(speculative=SpeculativeConfig("ngram"), pad_token_id=0)
    for own in ({"spec_method": "ngram"}, {"generation_config": config}):
        outputs = model.generate_batch(requests, **own, **length)
        assert [output.generated_tokens for output in outputs.values()] == alone
        assert all(output.speculative.method == "ngram" for output in outputs.values())
    # Other calls go through.
    assert model.generate_batch([]) == model.generate_batch([], spec_method="off") == {}
    before = GenerationMixin.generate_batch
    hook.uninstall()
    try:
        assert "generate_batch" not in vars(GenerationMixin)
        assert before.__wrapped__ is GenerationMixin.generate_batch
    finally:
        hook.install()
