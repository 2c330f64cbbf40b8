"""Settings in the generation config: honoured where the call names none, and no more."""

import copy
import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, GenerationMixin, pipeline

import hf_specdec
from hf_specdec import SpecConfigError, SpeculativeConfig, hook, record
from tests.models import letter_tokenizer, prompts, tiny_llama


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


def test_a_saved_config_is_honoured(model, configured, inputs):
    plain = model.generate(**inputs, **SETTINGS)
    output, stats = calls(lambda: configured.generate(**inputs, **SETTINGS))
    assert torch.equal(output, plain)
    assert [stat.method for stat in stats] == ["ngram"]
    assert stats[0].num_draft_tokens > 0


@pytest.mark.parametrize("explicit", [False, True])
def test_the_explicit_form_and_the_method(configured, inputs, explicit):
    generate = hf_specdec.generate if explicit else type(configured).generate
    _, stats = calls(lambda: generate(configured, **inputs, **SETTINGS))
    assert len(stats) == 1


def test_the_call_has_the_last_word(configured, inputs):
    for off in ({"spec_method": "off"}, {"speculative": False}, {"speculative": "off"}):
        assert calls(lambda off=off: configured.generate(**inputs, **SETTINGS, **off))[1] == []
    _, (stats,) = calls(lambda: configured.generate(**inputs, **SETTINGS, num_speculative_tokens=2))
    _, (default,) = calls(lambda: configured.generate(**inputs, **SETTINGS))
    assert stats.method == "ngram"
    assert stats.num_draft_tokens < default.num_draft_tokens
    draft = tiny_llama(seed=1)
    _, (stats,) = calls(lambda: configured.generate(**inputs, **SETTINGS, assistant=draft))
    assert stats.method == "draft_model"


@pytest.mark.parametrize("as_position", [False, True])
def test_a_config_of_the_call(model, configured, inputs, as_position):
    def generate(target, **settings):
        config = GenerationConfig(**SETTINGS, pad_token_id=0, **settings)
        if as_position:
            return target.generate(inputs["input_ids"], config, attention_mask=inputs["attention_mask"])
        return target.generate(**inputs, generation_config=config)

    plain = model.generate(**inputs, **SETTINGS)
    for target, settings, methods in (
        (model, {}, []),
        (model, {"speculative": "ngram"}, ["ngram"]),
        (model, {"speculative": SpeculativeConfig(method="ngram")}, ["ngram"]),
        (configured, {}, ["ngram"]),
        (configured, {"speculative": "off"}, []),
        (configured, {"speculative": {"method": "suffix"}}, ["suffix"]),
    ):
        output, stats = calls(lambda target=target, settings=settings: generate(target, **settings))
        assert torch.equal(output, plain)
        assert [stat.method for stat in stats] == methods


def test_a_drafter_in_a_folder(inputs, tmp_path, monkeypatch):
    model, folder = tiny_llama(), str(tmp_path / "draft")
    tiny_llama(seed=1).save_pretrained(folder)
    for value in (folder, {"model": folder, "num_speculative_tokens": 3}):
        config = GenerationConfig(**SETTINGS, pad_token_id=0, speculative=value)
        for allowed in (None, f"user/*, {tmp_path}/dr*"):
            if allowed is not None:
                monkeypatch.setenv("HF_SPECDEC_ALLOWED_MODELS", allowed)
            _, (stats,) = calls(lambda config=config: model.generate(**inputs, generation_config=config))
            assert stats.method == "draft_model"
            assert stats.num_draft_tokens > 0
            assert stats.drafter["place"] == "entry"
        # Whoever sends a generation config to a server shall not look around in its folders.
        monkeypatch.setenv("HF_SPECDEC_ALLOWED_MODELS", "user/*")
        with pytest.raises(SpecConfigError, match="is no id of a repository. Name folders in the call"):
            model.generate(**inputs, generation_config=config)
        monkeypatch.delenv("HF_SPECDEC_ALLOWED_MODELS")


def test_a_folder_that_the_files_of_a_target_name(inputs, tmp_path, warnings):
    """A stranger who publishes a target does not choose among the folders of its users; who runs the program may."""
    folder, target = str(tmp_path / "draft"), tmp_path / "target"
    tiny_llama(seed=1).save_pretrained(folder)
    published = tiny_llama()
    hf_specdec.store_settings(published.generation_config, {"model": folder})
    published.save_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    model.generation_config.pad_token_id = 0
    plain = model.generate(**inputs, **SETTINGS, spec_method="off")
    output, stats = calls(lambda: model.generate(**inputs, **SETTINGS))
    assert torch.equal(output, plain)
    assert stats == []
    assert "Once this generation config is saved" in warnings[0]
    assert "is no id of a repository" in warnings[1]
    # The same, set by the program.
    (target / "generation_config.json").unlink()
    model.generation_config.speculative = {"model": folder, "num_speculative_tokens": 3}
    output, (stats,) = calls(lambda: model.generate(**inputs, **SETTINGS))
    assert torch.equal(output, plain)
    assert stats.num_draft_tokens > 0


@pytest.mark.parametrize(
    "settings",
    [{"num_beams": 2}, {"use_cache": False}, {"custom_generate": lambda model, input_ids, **kwargs: input_ids}],
    ids=["beams", "no cache", "own loop"],
)
def test_calls_that_cannot_speculate_are_plain(model, configured, inputs, settings, caplog):
    output, stats = calls(lambda: configured.generate(**inputs, **SETTINGS, **settings))
    assert stats == []
    assert torch.equal(output, model.generate(**inputs, **SETTINGS, **settings))
    # The same, asked for in the call, is an error.
    with pytest.raises(SpecConfigError):
        model.generate(**inputs, **SETTINGS, **settings, speculative=NGRAM)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"method": "ngrm"}, "Unknown spec_method='ngrm'.*off"),
        ({"num_speculative_tokens": 3}, "in the generation config: .*method or a model"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "in the generation config: .*num_speculative_tokens"),
        (["ngram"], "in the generation config: .*got list"),
        (True, "in the generation config: .*got bool"),
        ('{"method": "ngram"}', "must be an object of settings"),
        ({"model": "a/b", "trust_remote_code": True}, "must not let code run"),
        ({"model": "a/b", "options": {"trust_remote_code": True}}, "must not let code run"),
    ],
)
def test_wrong_settings(inputs, settings, match, warnings):
    """Whoever passes them in a call hears of it; what came with a model is no reason to fail."""
    model = tiny_llama()
    plain = model.generate(**inputs, **SETTINGS)
    config = GenerationConfig(**SETTINGS, pad_token_id=0, speculative=settings)
    with pytest.raises(SpecConfigError, match=match):
        model.generate(**inputs, generation_config=config)
    model.generation_config.speculative = settings
    # Pipelines and servers pass copies of the model's own.
    own = copy.deepcopy(model.generation_config)
    own.update(**SETTINGS)
    for arguments in (SETTINGS, SETTINGS, {"generation_config": own}):
        output, stats = calls(lambda arguments=arguments: model.generate(**inputs, **arguments))
        assert torch.equal(output, plain)
        assert stats == []
    (warning,) = warnings
    assert "generates without speculation" in warning
    assert re.search(match.removesuffix(".*off"), warning)
    # Speculation is asked for.
    with pytest.raises(SpecConfigError, match=match):
        model.generate(**inputs, **SETTINGS, num_speculative_tokens=3)


def test_a_saved_drafter_cannot_bring_code_along(inputs, tmp_path, monkeypatch):
    draft = tmp_path / "draft"
    tiny_llama(seed=1).save_pretrained(draft)
    (draft / "speculation_config.json").write_text('{"method": "draft_model", "trust_remote_code": true}')
    monkeypatch.setenv("HF_SPECDEC_ALLOWED_MODELS", str(tmp_path / "*"))
    config = GenerationConfig(**SETTINGS, pad_token_id=0, speculative=str(draft))
    with pytest.raises(SpecConfigError, match="must not let code run"):
        tiny_llama().generate(**inputs, generation_config=config)


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
@pytest.mark.parametrize("of_the_call", [False, True])
def test_only_the_shape_of_drafts_is_taken(inputs, dangerous, of_the_call, warnings):
    model = tiny_llama()
    plain = model.generate(**inputs, **SETTINGS)
    entry = {"method": "ngram", "prompt_lookup_max": 4, **dangerous}
    config = GenerationConfig(**SETTINGS, pad_token_id=0, speculative=entry) if of_the_call else None
    if not of_the_call:
        model.generation_config.speculative = entry
    arguments = {"generation_config": config} if of_the_call else SETTINGS
    output, (stats,) = calls(lambda: model.generate(**inputs, **arguments))
    assert torch.equal(output, plain)
    assert (stats.method, stats.is_lossless) == ("ngram", True)
    names = {*dangerous, *dangerous.get("options", {})} - {"options", "num_speculative_tokens"}
    assert all(name in warnings[0] for name in names)
    assert "prompt_lookup_max," not in warnings[0]
    # What a call says itself counts.
    rule = {"rejection_sample_method": "typical"}
    _, (stats,) = calls(
        lambda: model.generate(**inputs, max_new_tokens=4, do_sample=True, speculative={**NGRAM, **rule})
    )
    assert not stats.is_lossless


def test_pipelines_honour_it(configured):
    tokenizer = letter_tokenizer()
    text, settings = "abcabcabc", {"do_sample": False, "max_new_tokens": 12}
    plain = pipeline("text-generation", model=tiny_llama(), tokenizer=tokenizer)(text, **settings)
    output, stats = calls(lambda: pipeline("text-generation", model=configured, tokenizer=tokenizer)(text, **settings))
    assert output == plain
    assert len(stats) == 1


def test_stored_settings(model, tmp_path):
    config = GenerationConfig()
    for given, stored in (
        ("ngram", "ngram"),
        ("off", "off"),
        ("user/head", "user/head"),
        (tmp_path, str(tmp_path)),
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
    for wrong in ({"method": "ngrm"}, {"model": "a/b", "trust_remote_code": True}, 3, '{"method": "ngram"}'):
        with pytest.raises(SpecConfigError):
            hf_specdec.store_settings(config, wrong)
    assert not hasattr(config, "speculative")


def test_without_the_package_the_entry_does_nothing(configured, inputs):
    hook.uninstall()
    try:
        output, stats = calls(lambda: configured.generate(**inputs, **SETTINGS))
    finally:
        hook.install()
    assert stats == []
    assert output.shape == (2, 33)


def test_the_config_and_the_model_stay_as_they_are(configured, inputs):
    before = configured.generation_config.to_dict()
    configured.generate(**inputs, **SETTINGS)
    assert configured.generation_config.to_dict() == before


@pytest.mark.parametrize("is_given", [True, False], ids=["given", "the model's own"])
@pytest.mark.parametrize(
    ("names", "method", "most"),
    [
        ({"spec_method": "ngram"}, "ngram", 24),
        ({"spec_method": "ngram", "num_speculative_tokens": 2}, "ngram", 2),
        ({"speculative": "ngram", "num_speculative_tokens": 2}, "ngram", 2),
        ({"speculative": {"method": "suffix"}, "spec_method": "ngram"}, "ngram", 24),
        ({"speculative": SpeculativeConfig(method="ngram"), "num_speculative_tokens": 3}, "ngram", 3),
        ({"spec_method": "off", "speculative": "ngram"}, None, 0),
    ],
)
def test_every_speculative_argument_may_stand_there(inputs, names, method, most, is_given):
    """Arguments as `GenerationConfig(**generation_kwargs)` makes them of what training loops are given."""
    model = tiny_llama()
    plain = model.generate(**inputs, **SETTINGS)
    call = {"generation_config": GenerationConfig(**SETTINGS, **names, pad_token_id=0)} if is_given else SETTINGS
    if not is_given:
        model.generation_config.update(**names)
        vars(model.generation_config).update(names)
    output, stats = calls(lambda: model.generate(**inputs, **call))
    assert torch.equal(output, plain)
    assert [stat.method for stat in stats] == ([] if method is None else [method])
    assert all(len(stat.num_accepted_tokens_per_pos) <= most for stat in stats)


def test_arguments_of_the_call_come_before_all_of_them(inputs):
    model = tiny_llama()
    config = GenerationConfig(**SETTINGS, spec_method="ngram", num_speculative_tokens=3, pad_token_id=0)
    for asked, methods in (({"spec_method": "suffix"}, ["suffix"]), ({"spec_method": "off"}, [])):
        _, stats = calls(lambda asked=asked: model.generate(**inputs, generation_config=config, **asked))
        assert [stat.method for stat in stats] == methods
    _, (stats,) = calls(lambda: model.generate(**inputs, generation_config=config, num_speculative_tokens=1))
    assert len(stats.num_accepted_tokens_per_pos) <= 1


def test_a_length_alone_asks_for_nothing_that_could_be_done(model, inputs):
    config = GenerationConfig(**SETTINGS, num_speculative_tokens=3, pad_token_id=0)
    with pytest.raises(SpecConfigError, match="in the generation config"):
        model.generate(**inputs, generation_config=config)


@pytest.mark.parametrize("is_given", [True, False], ids=["given", "the model's own"])
def test_objects_may_stand_there(inputs, is_given):
    model, draft = tiny_llama(), tiny_llama(seed=1)
    plain = model.generate(**inputs, **SETTINGS)
    speculator = hf_specdec.load_speculator(model, "ngram")
    for names, method in (
        ({"assistant": speculator}, "ngram"),
        ({"assistant": draft}, "draft_model"),
        ({"spec_model": draft, "num_speculative_tokens": 2}, "draft_model"),
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


def test_settings_beside_an_object_are_still_those_of_a_stranger(inputs, warnings):
    model, draft = tiny_llama(), tiny_llama(seed=1)
    plain = model.generate(**inputs, **SETTINGS)
    settings = {
        "num_speculative_tokens": 2,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 2.0,
    }
    vars(model.generation_config).update(assistant=draft, speculative=settings)
    output, (stats,) = calls(lambda: model.generate(**inputs, **SETTINGS))
    assert torch.equal(output, plain)
    assert stats.rejection_sample_method == "standard"
    assert any("rejection_sample_method" in line for line in warnings)


@pytest.mark.parametrize("value", [{}, [], 3, {"method": "ngram"}, "some/model", True])
@pytest.mark.parametrize("name", ["assistant", "spec_model"])
def test_what_a_file_can_hold_is_no_object(inputs, warnings, name, value):
    """A file may be a stranger's: what is beside it does not count as said by the call, and nothing fails."""
    model = tiny_llama()
    plain = model.generate(**inputs, **SETTINGS)
    settings = {"method": "ngram", "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.0}
    vars(model.generation_config).update({name: value, "speculative": settings})
    assert torch.equal(model.generate(**inputs, **SETTINGS), plain)
    assert warnings


class TestContinuousBatching:
    def test_speculates_where_the_call_asks(self, model):
        prompts, length = [[5, 6, 7], [8, 9]], {"max_new_tokens": 6, "do_sample": False}
        alone = [model.generate(torch.tensor([ids]), **length)[0, len(ids) :].tolist() for ids in prompts]
        asked = [
            {"spec_method": "ngram"},
            {"generation_config": GenerationConfig(spec_method="ngram", pad_token_id=0)},
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
        assert warnings == []
        for _ in range(2):
            assert configured.generate_batch([]) == {}
        assert len(warnings) == 1
        assert "decodes without speculation" in warnings[0]

    def test_is_taken_back(self, model):
        before = GenerationMixin.generate_batch
        hook.uninstall()
        try:
            assert "generate_batch" not in vars(GenerationMixin)
            assert before.__wrapped__ is GenerationMixin.generate_batch
        finally:
            hook.install()
        assert GenerationMixin.generate_batch is not before.__wrapped__
