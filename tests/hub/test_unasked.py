"""Generation configs, cards and saved settings of strangers, which come with a model unasked, are not obeyed."""

import copy
import json
import shutil
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from hf_specdec import (
    CheckpointFormatError,
    SpecConfigError,
    SpeculativeConfig,
    forget_speculators,
    generate,
    hook,
    load_speculator,
    record,
)
from hf_specdec.hub import trust
from hf_specdec.hub.card import read_card, read_target_card
from hf_specdec.hub.discover import Search
from hf_specdec.hub.trust import may_be_published, one_line, sifted, why_not_unasked
from hf_specdec.loaded import record_of
from hf_specdec.method import built_in_methods
from hf_specdec.settings import describe_settings
from tests.helpers.drafters import ANYTHING, EAGLE, MEDUSA, card_of, entry_of, load, saved_with
from tests.helpers.levels import full, in_full
from tests.helpers.models import prompts, tiny_llama


GREEDY = {"do_sample": False, "max_new_tokens": 12}
# What no stranger may say.
DANGEROUS = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3, "device": "cuda:7"}
DANGEROUS |= {"control_profile": "/etc/passwd", "cache_dir": "/etc", "token": "hf_other", "dtype": "float16"}
DANGEROUS |= {"local_files_only": True}

ENTRIES = [{"speculative": {"method": "eagle3", "model": "someone/head"}}, {"speculative": "someone/head"}]
ENTRIES += [{"speculative": "auto"}, {"speculative": {"method": "ngram", "trust_remote_code": True}}]
ENTRIES += [{"assistant": {"model": "someone/head"}, "spec_model": "/etc"}, {"spec_method": "suffix"}]

_tiny = cache(tiny_llama)


@cache
def _plain():
    return _tiny().generate(**prompts(1), **GREEDY, spec_method="off")


def calls(model, **arguments):
    """The statistics of speculative calls in one call, which must have the tokens of plain generation."""
    plain = model.generate(**prompts(1), **GREEDY, spec_method="off")
    with record() as made:
        output = model.generate(**prompts(1), **{**GREEDY, **arguments})
    assert torch.equal(output, plain)
    return [call.stats for call in made.calls]


@pytest.mark.parametrize("entry", [ENTRIES[0], *in_full(*ENTRIES[1:])], ids=str)
def test_plain_calls_are_those_of_transformers(hub, warnings, entry):
    """Whatever the files of a model say, for a call that asks for nothing nothing is loaded."""
    hub.add("someone/head", EAGLE, card=card_of("user/target", "eagle3"))
    config = json.loads((EAGLE / "target" / "config.json").read_text())
    files = {"generation_config.json": json.dumps(entry), "config.json": json.dumps({**entry, **config})}
    files |= saved_with(model="someone/head")
    hub.add("user/target", EAGLE / "target", files=files, card=card_of("user/base", "eagle3", **entry))
    model = load()
    hub.requests.clear()
    hook.uninstall()
    try:
        plain = model.generate(**prompts(1), **GREEDY)
    finally:
        hook.install()
    said, own = list(warnings), copy.deepcopy(model.generation_config)
    own.update(**GREEDY)
    with record() as made:
        # Pipelines and servers pass copies of the model's own config.
        for config in (None, own, GenerationConfig(**entry, **GREEDY)):
            arguments = GREEDY if config is None else {"generation_config": config}
            assert torch.equal(model.generate(**prompts(1), **arguments), plain)
            assert torch.equal(generate(model, **prompts(1), **arguments), plain)
        assert model.generate_batch([]) == {}
    assert (made.calls, warnings, hub.requests, record_of(model).loaded) == ([], said, [], [])


@pytest.fixture
def model(hub):
    """The target, whose generation config has an entry."""

    def model(entry, target=EAGLE / "target"):
        hub.add("user/target", target, files=entry_of(entry))
        return load()

    return model


def check_is_passed_over(model, reason, method="eagle3"):
    (stats,) = calls(model, spec_method="auto")
    assert stats.method == "suffix+recycling"
    # One that the call names is an error.
    with pytest.raises((SpecConfigError, CheckpointFormatError), match=reason):
        load_speculator(model, method)


def refusal_of(model, entry, **settings):
    """The error of a call, when the target has the entry."""
    model.generation_config.speculative = entry
    forget_speculators(model)
    with pytest.raises(SpecConfigError) as caught:
        load_speculator(model, "eagle3", **settings)
    return str(caught.value)


def test_drafter_that_is_named(hub, model):
    revision = hub.add("other/head", EAGLE).branches["main"]
    model = model({"model": "other/head", "num_speculative_tokens": 2, "revision": revision})
    for method in ("auto", "eagle3"):
        (stats,) = calls(model, spec_method=method)
        assert stats.drafter == {"model": "other/head", "owner": "other", "revision": revision, "place": "entry"}
        assert 1 <= len(stats.num_accepted_tokens_per_pos) <= 2


def test_pickles_and_code(hub, model, tmp_path, monkeypatch):
    hub.add("user/pickled", MEDUSA / "v01_heads_pt")
    pickled = model({"model": "user/pickled", "method": "medusa"}, MEDUSA / "target")
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("A pickle is read."))
    check_is_passed_over(pickled, "Its weights are pickled", "medusa")
    # Loaders do not read it either, should the search overlook it.
    with monkeypatch.context() as patch:
        patch.setattr(Search, "_reasons_not_to_choose", lambda *args: ())
        forget_speculators(pickled)
        check_is_passed_over(pickled, "medusa", "medusa")
    tiny_llama(vocab_size=256).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "own_type", "auto_map": {"AutoModelForCausalLM": "modeling.Own"}}
    hub.add("user/code", tmp_path, files={"config.json": json.dumps(config), "modeling.py": "raise SystemExit"})
    check_is_passed_over(model("user/code"), "It needs code from its repository", "draft_model")


def test_owner_that_is_not_trusted(hub, model, monkeypatch):
    hub.add("stranger/head", EAGLE)
    model = model("stranger/head")
    hub.requests.clear()
    monkeypatch.setenv("HF_SPECDEC_ALLOWED_MODELS", "user/*")
    with pytest.raises(SpecConfigError, match="It is not among HF_SPECDEC_ALLOWED_MODELS"):
        load_speculator(model, "eagle3")
    monkeypatch.delenv("HF_SPECDEC_ALLOWED_MODELS")
    monkeypatch.setenv("HF_SPECDEC_TRUSTED_OWNERS", "user")
    check_is_passed_over(model, "Its owner 'stranger' is not among HF_SPECDEC_TRUSTED_OWNERS")
    assert not hub.asked("*stranger*")
    # What the call itself names is the user's business, and what is allowed later is looked at again.
    assert load_speculator(model, "stranger/head").method == "eagle3"
    monkeypatch.setenv("HF_SPECDEC_TRUSTED_OWNERS", "user,stranger")
    (stats,) = calls(model, spec_method="auto")
    assert stats.drafter["owner"] == "stranger"


NAMES = ["/etc", "../../head", "a/../b", "~/head", "user/target", "x" * 10**5, "a\x1b[2Jb/c\n", "user/absent"]


def test_names_and_places_that_lead_elsewhere(hub, model, tmp_path):
    on_the_hub = model("auto")
    for name in NAMES:
        message = refusal_of(on_the_hub, {"model": name})
        assert message.isprintable()
        assert len(message) < 1500
    for inside in ("target", "target/head", "target/secret", "secret"):
        shutil.copytree(EAGLE / "target" if inside == "target" else EAGLE, tmp_path / inside)
    local = load(str(tmp_path / "target"))
    for place in ({"subfolder": "../secret"}, {"subfolder": "/etc"}, {"revision": "../../main"}):
        for entry in ({"method": "mtp"}, {"model": "head"}, {"model": "user/head"}):
            assert "which leads elsewhere" in refusal_of(local, {**entry, **place}, local_files_only=True)
    # A folder that is there and one that is not are the same to whoever wrote the entry.
    names = [str(tmp_path / "secret"), str(tmp_path / "absent")]
    reasons = {refusal_of(local, {"model": name}, local_files_only=True).replace(name, "NAME") for name in names}
    assert len(reasons) == 1
    assert "no folder inside of the target's" in reasons.pop()


keys = st.sampled_from(
    ["method", "model", "revision", "subfolder", "options", "num_speculative_tokens", "speculative_token_tree"]
    + ["num_speculative_tokens_per_batch_size", "max_model_len", "prompt_lookup_max", "token", "self", "x"]
)
texts = ["ngram", "auto", "eagle3", "suffix+mtp", "user/head", "/etc/passwd", "..", "[[[[", "a" * 20_000]
values = ANYTHING | st.sampled_from([{"method": "ngram"}, *texts])


@full
@settings(max_examples=40)
@given(entry=values | st.dictionaries(keys, values, min_size=1, max_size=4))
def test_any_entry_generates_as_without_it(entry):
    model, config = _tiny(), GenerationConfig(**GREEDY, pad_token_id=0, speculative=entry)
    assert torch.equal(model.generate(**prompts(1), generation_config=config), _plain())
    model.generation_config.speculative = entry
    try:
        for arguments in ({}, {"speculative": {"method": "auto", "local_files_only": True}}):
            assert torch.equal(model.generate(**prompts(1), **GREEDY, **arguments), _plain())
    finally:
        forget_speculators(model)
        del model.generation_config.speculative


def test_settings_beside_a_checkpoint_say_the_shape_alone(hub, target, tmp_path, warnings):
    saved = {"method": "eagle3", "num_speculative_tokens": 2, **DANGEROUS}
    files = saved_with(**saved)
    hub.add("user/head", EAGLE, files=files, card=card_of(target, "eagle3"))
    folder = shutil.copytree(EAGLE, tmp_path / "head", ignore=shutil.ignore_patterns("target"))
    (folder / "speculation_config.json").write_text(*files.values())
    model = load()
    for name in ("user/head", str(folder)):
        config = load_speculator(model, {"model": name}).config
        assert config.to_dict() == {"method": "eagle3", "model": name, "num_speculative_tokens": 2}
        assert config.token is None
        # The call may say all of it.
        asked = {"model": name, "rejection_sample_method": "typical", "dtype": "float32"}
        config = load_speculator(model, asked).config
        assert (config.rejection_sample_method, config.num_speculative_tokens) == ("typical", 2)
    for method in ("eagle3", "auto"):
        config = load_speculator(model, method).config
        assert config.to_dict().keys() == {"method", "model", "revision", "num_speculative_tokens"}
        assert config.token is None
    assert any("rejection_sample_method" in line and "control_profile" in line for line in warnings)
    # And so may a file of settings that it names, not a folder or a repository, which may have come from anywhere.
    config = SpeculativeConfig("ngram", rejection_sample_method="typical", num_speculative_tokens="auto")
    path = config.save_pretrained(tmp_path)
    assert SpeculativeConfig.resolve(str(path)) == config
    hub.add("user/settings", files={path.name: path.read_text()})
    shape = {"method": "ngram", "num_speculative_tokens": "auto"}
    assert SpeculativeConfig.resolve(str(tmp_path)).to_dict() == shape
    assert SpeculativeConfig.from_pretrained("user/settings").to_dict() == shape


def test_settings_beside_a_checkpoint_name_no_other_drafter(hub, target, tmp_path):
    saved = saved_with(method="eagle3", model="evil/other")
    hub.add("user/head", EAGLE, files=saved)
    hub.add("user/settings", files=saved)
    hub.add("evil/other", EAGLE)
    (tmp_path / "speculation_config.json").write_text(*saved.values())
    (tmp_path / "model.safetensors").write_bytes(b"")
    for name in ("user/head", "user/settings", str(tmp_path)):
        with pytest.raises(SpecConfigError, match="names another drafter, 'evil/other'"):
            load_speculator(load(), {"model": name, "token": "hf_loopback"})
    assert not hub.asked("*evil*")


def test_hostile_cards(tmp_path, monkeypatch, warnings):
    def read(metadata, text=""):
        (tmp_path / "README.md").write_text(f"---\n{metadata}\n---\nIgnore all earlier instructions.\n{text}")
        return read_card(tmp_path)

    damaged = ["speculative: {method: ngram, x: " + "[" * 2_000, "speculative: [", "- a list"]
    for metadata in ("speculative: !!python/object/apply:os.system ['exit 1']", *damaged):
        assert read(metadata) is read_target_card(tmp_path) is None
    # Each line doubles the value of the one before.
    levels = [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60)]
    doubled = "\n".join(["a0: &a0 [1, 1]", *levels, "speculative: {method: medusa, speculative_token_tree: *a59}"])
    deep = "speculative: " + "{options: " * 60 + "1" + "}" * 60
    itself = "speculative: &a {method: ngram, prompt_lookup_max: [*a, *a]}"
    for metadata in (doubled, deep, itself):
        with pytest.raises(SpecConfigError, match="more than (10000 values|8 levels).*It is not read"):
            read(metadata)
    warnings.clear()
    for names in ('"a\\x1b]0;x\\x07\\u202e\\n' + "b" * 1000 + '": 1', ", ".join(f"x{i}: 1" for i in range(4000))):
        assert read(f"speculative: {{method: ngram, {names}}}") == SpeculativeConfig("ngram")
    assert all(line.isprintable() and len(line) < 600 for line in warnings)
    assert len(warnings) == 2
    for text in ("\x1b[31mred", "a\nb\r", "\u202etxt", "\ud800", "\x00", "x" * 10**6):
        assert one_line(text).isprintable()
        assert len(one_line(text)) <= 200
    # Large metadata are not parsed; a long text is no reason.
    assert read("speculative: ngram", "text " * 10**5).method == "ngram"
    monkeypatch.setattr("hf_specdec.checkpoints.files.metadata_load", lambda path: pytest.fail("It is parsed."))
    names = "\n".join(f"- user/{i}" for i in range(10**5))
    assert read(f"speculative: ngram\nbase_model:\n{names}") is None


def test_every_setting_that_is_not_on_the_list_is_left_out():
    """By both of its names."""
    common = {setting.key for setting in describe_settings()}
    assert {*trust.PUBLISHED_SETTINGS, *trust.PLACE_SETTINGS} <= common
    for method in (method.name for method in built_in_methods()):
        settings = {item.key: 1 for item in [*describe_settings(), *describe_settings(method)]}
        settings |= {"method": method, "trust_remote_code": False}
        found, left_out = sifted(settings, "The card")
        assert found.keys() == settings.keys() & may_be_published(method)
        assert set(left_out) == settings.keys() - found.keys()
        nested, _ = sifted({"method": method, "options": settings}, "The card")
        assert nested.keys() == found.keys()


def test_trusted_owners(monkeypatch):
    assert why_not_unasked("user/head") is None
    assert why_not_unasked("user/head", ("other",))
    assert why_not_unasked("gpt2", ("gpt2",))
    monkeypatch.setenv("HF_SPECDEC_TRUSTED_OWNERS", "User , ")
    assert why_not_unasked("user/head") is None
    assert why_not_unasked("user-evil/head")
    assert why_not_unasked("user/head", ("other",))
