"""SpeculativeConfig keeps its values through files, changes, hashes and the settings of vLLM."""

import copy
import json
import os
import pickle
import subprocess
import sys
from dataclasses import fields

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_specdec.method import built_in_methods, resolve_candidate_generator
from hf_specdec.settings import CONFIG_NAME, SpeculativeConfig, describe_settings
from tests.helpers.levels import full
from tests.helpers.paths import ROOT
from tests.helpers.toy_method import error_of


pytestmark = pytest.mark.usefixtures("toy_method")

WORDS = st.text("abcdefgh-_./", min_size=1, max_size=12)
LARGE = st.integers(1, 2**31 - 1)
LENGTHS = st.dictionaries(st.integers(2, 99), st.just(1) | st.none(), max_size=3).map(lambda known: {1: 1, **known})
COMMON_VALUES = {
    "num_speculative_tokens": st.integers(1, 1024),
    "quantization": st.sampled_from(["bitsandbytes_4bit", "nf4", "fp4", "8bit"]),
    "dtype": st.sampled_from(["auto", "float32", "float16", "bfloat16"]),
    "device": st.sampled_from(["cpu", "cuda:1"]),
    "token": WORDS | st.booleans(),
    "trusted_owners": st.lists(st.sampled_from(["user", "org"]), max_size=2).map(tuple),
    "num_speculative_tokens_per_batch_size": LENGTHS,
    "rejection_sample_method": st.sampled_from(["standard", "block"]),
    "max_model_len": LARGE,
    **dict.fromkeys(["revision", "code_revision", "subfolder", "cache_dir"], WORDS),
    **dict.fromkeys(["local_files_only", "trust_remote_code", "enforce_eager"], st.booleans()),
}
RATES = st.lists(st.floats(0, 1), min_size=1, max_size=5).map(lambda rates: sorted(rates, reverse=True))
# Settings of one acceptance rule, each of which the rule can do without.
RULE_VALUES = {
    "typical": [{"rejection_sample_options": st.tuples(st.floats(0, 1), st.floats(0, 9))}, {}],
    "synthetic": [{"rejection_sample_options": RATES | st.floats(1, 9)}],
}
TOY_VALUES = {
    "toy_width": st.integers(1, 64),
    "rate": st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.integers(-5, 5),
    "mode": st.sampled_from(["wide", "deep"]),
    "layers": st.lists(st.integers(-3, 3)) | st.tuples(st.integers()),
}
rule_settings = st.one_of(
    st.fixed_dictionaries({"method": st.just("toy"), "rejection_sample_method": st.just(rule), **values})
    for rule, choices in RULE_VALUES.items()
    for values in choices
)
flat_settings = (
    st.fixed_dictionaries({"method": st.just("toy")}, optional={**COMMON_VALUES, **TOY_VALUES}) | rule_settings
)
TREES = st.sampled_from(["[(0,)]", [[0], [1], [1, 0]], ((0,), (0, 0)), "eagle_1"])
tree_settings = st.fixed_dictionaries({"method": st.just("toy"), "model": WORDS, "speculative_token_tree": TREES})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flat=flat_settings | tree_settings, data=st.data())
def test_round_trip(flat, data, tmp_path):
    """Through dicts, JSON, pickles, copies, `repr`, and files; the order of settings does not count."""
    config = SpeculativeConfig(**flat)
    for kept in (config.to_dict(), config.to_dict(defaults=True)):
        assert SpeculativeConfig.from_dict(kept) == config
        assert SpeculativeConfig.resolve(json.dumps(kept)) == config
        shuffled = SpeculativeConfig.from_dict(dict(data.draw(st.permutations(list(kept.items())))))
        assert shuffled.compute_hash() == config.compute_hash()
    for copied in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert copied == config
        assert hash(copied) == hash(config)
    assert eval(repr(config)) == config
    path = config.save_pretrained(tmp_path / "saved")
    assert path.name == CONFIG_NAME
    assert SpeculativeConfig.from_pretrained(path.parent) == SpeculativeConfig.from_pretrained(path) == config
    if "model" not in flat:
        assert SpeculativeConfig.resolve(path) == config


@given(first=flat_settings, second=flat_settings)
def test_hashes_are_equal_where_configurations_are(first, second):
    first, second = SpeculativeConfig(**first), SpeculativeConfig(**second)
    assert (first.compute_hash() == second.compute_hash()) == (first == second)


@full
def test_hash_is_the_same_in_every_process():
    config = "SpeculativeConfig('ngram', prompt_lookup_max=3)"
    code = f"from hf_specdec.settings import SpeculativeConfig; print({config}.compute_hash())"
    # Strings have other hashes in it than here.
    environment = {**os.environ, "PYTHONHASHSEED": "1", "HF_SPECDEC_DISABLE": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [SpeculativeConfig("ngram", prompt_lookup_max=3).compute_hash()]


def test_built_in_methods():
    """Their settings are explained, have names of their own, and survive."""
    common = {item.name for item in fields(SpeculativeConfig)}
    for method in (own.name for own in built_in_methods()):
        config, described = SpeculativeConfig(method), describe_settings(method)
        assert SpeculativeConfig.from_dict(config.to_dict(defaults=True)) == config
        assert config.to_dict() == {"method": method}
        assert all(item.help.strip().endswith(".") for item in described)
        names = {item.name for item in fields(resolve_candidate_generator(method).options_class)}
        assert not ({item.key for item in described} | names) & common


def test_replace():
    config = SpeculativeConfig("toy", num_speculative_tokens=3, width=5)
    changed = config.replace(num_speculative_tokens=4, width=6)
    assert changed == SpeculativeConfig("toy", num_speculative_tokens=4, toy_width=6)
    # Options of the old method stay behind.
    assert config.replace(method="ngram") == SpeculativeConfig("ngram", num_speculative_tokens=3)
    assert "from 1 to 1024" in error_of(config.replace, num_speculative_tokens=0)


@full
def test_what_is_remembered_of_earlier_calls(tmp_path):
    """Neither files, nor equal values of other types."""
    path = tmp_path / "settings.json"
    for width in (3, 5):
        path.write_text(json.dumps({"method": "toy", "toy_width": width}))
        assert SpeculativeConfig.resolve(path).options.width == width
    assert SpeculativeConfig.resolve("toy", num_speculative_tokens=1).num_speculative_tokens == 1
    for other in (True, 1.0):
        error_of(SpeculativeConfig.resolve, "toy", num_speculative_tokens=other)


def test_settings_for_vllm():
    draft, k = {"method": "draft_model", "model": "org/draft"}, "num_speculative_tokens"
    default = resolve_candidate_generator("draft_model").default_num_speculative_tokens
    deep = {"suffix_decoding_max_tree_depth": 32}
    for given_settings, wanted in (
        # The length is always named; a suffix tree has its depth.
        ({"method": "suffix", **deep}, {"method": "suffix", k: 32, **deep}),
        ({**draft, "quantization": "nf4"}, {**draft, k: default, "quantization": "bitsandbytes"}),
        ({**draft, k: 2, "dtype": "float16", "quantization": "8bit"}, {**draft, k: 2}),
    ):
        assert SpeculativeConfig(**given_settings).to_vllm() == wanted
    config = SpeculativeConfig("ngram", num_speculative_tokens=4, prompt_lookup_min=1, prompt_lookup_max=3)
    assert SpeculativeConfig.resolve(json.dumps(config.to_vllm())) == config
    for config, words in (
        (SpeculativeConfig("medusa", model="org/heads"), "vLLM has no method 'medusa'"),
        (SpeculativeConfig("ngram", rejection_sample_method="typical"), "no rejection_sample_method='typical'"),
        (SpeculativeConfig(model="org/draft"), "has not been read yet"),
        (SpeculativeConfig(**draft, subfolder="draft"), "`subfolder`='draft'"),
    ):
        assert words in error_of(config.to_vllm)
