"""Settings and environment variables: what they accept, what they refuse, and what the error says."""

import copy
import json
import pickle
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args, get_origin

import numpy as np
import pytest
import torch
from transformers import GPT2Config, LlamaConfig
from transformers.utils.import_utils import ENV_VARS_TRUE_VALUES

from hf_specdec import environment, register_candidate_generator
from hf_specdec.candidate_generators import unregister_candidate_generator
from hf_specdec.errors import SpecConfigError, SpecDecError
from hf_specdec.hub.published import published_config
from hf_specdec.hub.trust import sifted
from hf_specdec.method import built_in_methods, takes_model
from hf_specdec.settings import CONFIG_NAME, SpeculativeConfig
from hf_specdec.settings.checks import Bounds, hints_of, types_of
from hf_specdec.settings.names import PendingOptions, key_of, option_fields, options_class
from tests.helpers.levels import full
from tests.helpers.toy_method import ToyGenerator, ToyOptions, error_of


pytestmark = pytest.mark.usefixtures("toy_method")

BUILT_IN = tuple(method.name for method in built_in_methods())
COMMON = [item.name for item in fields(SpeculativeConfig) if item.name != "options"]


@pytest.fixture
def detected(monkeypatch):
    """Replaces the reading of checkpoints; `detected(name)` says which method every checkpoint has."""
    return lambda name: monkeypatch.setattr("hf_specdec.resolve.detect_method", lambda *given, **named: name)


def test_every_spelling_of_one_configuration():
    wanted = SpeculativeConfig(method="toy", num_speculative_tokens=4, toy_width=3, rate=1)
    flat = {"method": "toy", "num_speculative_tokens": 4, "toy_width": 3, "rate": 1.0}
    for config in (
        SpeculativeConfig.resolve(wanted),
        SpeculativeConfig.resolve(flat),
        SpeculativeConfig.resolve(**flat),
        SpeculativeConfig.resolve(json.dumps(flat)),
        SpeculativeConfig.resolve("toy", num_speculative_tokens=4, toy_width=3, rate=1),
        SpeculativeConfig.resolve({"method": "toy", "toy_width": 9}, num_speculative_tokens=4, width=3, rate=1),
        SpeculativeConfig(method="toy", num_speculative_tokens=4, options=ToyOptions(width=3, rate=1)),
        SpeculativeConfig(method="toy", num_speculative_tokens=4, options={"width": 3, "rate": 1}),
        SpeculativeConfig.from_dict(flat),
        # None stands for the default, and is a value of some options.
        SpeculativeConfig.resolve({**dict.fromkeys(COMMON, None), **flat}),
    ):
        assert config == wanted
        assert hash(config) == hash(wanted)
        assert config.compute_hash() == wanted.compute_hash()
    assert wanted.options == ToyOptions(width=3, rate=1.0)
    assert SpeculativeConfig.resolve(wanted) is wanted
    assert SpeculativeConfig("toy", rate=None).options.rate is None
    assert SpeculativeConfig.resolve({"method": "toy", "toy_width": None}) == SpeculativeConfig("toy")
    with pytest.raises(AttributeError):
        wanted.num_speculative_tokens = 3


def test_aliases_and_objects():
    assert SpeculativeConfig("toy", quantization="nf4").quantization == "bitsandbytes_4bit"
    assert SpeculativeConfig(method="assistant_model", model="x/y").method == "draft_model"
    for name in ("prompt_lookup", {"model": "[ngram]"}, {"method": "ngram", "model": "ngram"}):
        assert SpeculativeConfig.resolve(name) == SpeculativeConfig(method="ngram")
    objects = {"dtype": torch.bfloat16, "device": torch.device("cuda", 1), "num_speculative_tokens": np.int64(4)}
    config = SpeculativeConfig("toy", **objects)
    assert (config.dtype, config.device, config.num_speculative_tokens) == ("bfloat16", "cuda:1", 4)
    assert type(config.num_speculative_tokens) is int


def test_keys_of_serving_engines():
    common = {"method": "draft_model", "model": "org/draft", "num_speculative_tokens": 3, "max_model_len": 512}
    common |= dict.fromkeys(("revision", "code_revision"), "main")
    common |= {"enforce_eager": True, "trust_remote_code": True, "rejection_sample_method": "standard"}
    ignored = {"draft_tensor_parallel_size": 2, "disable_padded_drafter_batch": True}
    config = SpeculativeConfig.resolve({**common, **ignored, "quantization": "bitsandbytes"})
    assert {key: getattr(config, key) for key in common} == common
    assert config.quantization == "bitsandbytes_4bit"
    ngram = SpeculativeConfig.resolve({"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}).options
    assert (ngram.prompt_lookup_min, ngram.prompt_lookup_max) == (2, 4)
    own = {"max_tree_depth": 64, "max_cached_requests": 0, "max_spec_factor": 2, "min_token_prob": 0.2}
    suffix = SpeculativeConfig.resolve({"method": "suffix", **{f"suffix_decoding_{k}": v for k, v in own.items()}})
    assert {key: getattr(suffix.options, key) for key in own} == own


def test_names_of_sglang(tmp_path):
    """Sizes count the anchor there."""
    sglang = {"speculative_num_steps": 8, "speculative_eagle_topk": 10, "speculative_num_draft_tokens": 60}
    own = {"draft_tree_depth": 8, "draft_tree_top_k": 10, "num_draft_nodes": 59}
    for method in ("eagle", "mtp", "suffix+eagle3"):
        config = SpeculativeConfig(method, "org/head", **sglang)
        assert config.to_dict() == {"method": method, "model": "org/head", **own}
    block = SpeculativeConfig("dflash", "org/draft", speculative_num_draft_tokens=16)
    assert block == SpeculativeConfig("dflash", "org/draft", dflash_block_size=16)
    head = {"method": "eagle3", "model": "org/head"}
    path = tmp_path / CONFIG_NAME
    path.write_text(json.dumps({**head, **sglang}))
    assert SpeculativeConfig.resolve(path) == SpeculativeConfig.from_pretrained(tmp_path)
    assert SpeculativeConfig.resolve(path) == SpeculativeConfig(**head, **own)
    assert published_config({**head, **sglang}, "a card", with_place=True) == SpeculativeConfig(**head, **own)
    unread = SpeculativeConfig(model="org/head", speculative_num_draft_tokens=60)
    assert unread.replace(method="eagle3").options.num_draft_nodes == 59


def test_static_trees_and_acceptance_rules():
    """A tree by paths and name; a rule with its defaults."""
    for tree in ("[(0, 0), (0,), (1,)]", [[0], [1], [0, 0]]):
        config = SpeculativeConfig("toy", speculative_token_tree=tree, num_speculative_tokens=3)
        assert config.speculative_token_tree == ((0,), (1,), (0, 0))
        assert config.to_dict()["speculative_token_tree"] == [[0], [1], [0, 0]]
    for tree, num_nodes in (("mc_sim_7b_63", 63), ("eagle_1", 25)):
        assert len(SpeculativeConfig("toy", speculative_token_tree=tree).speculative_token_tree) == num_nodes
    typical = SpeculativeConfig("toy", rejection_sample_method="typical")
    assert typical.rejection_sample_options is None
    assert typical.replace(rejection_sample_options=[0.2, 1]).rejection_sample_options == (0.2, 1.0)


@full
def test_lengths_adapt_where_nothing_says_otherwise(monkeypatch):
    for given_settings, adaptive in (
        ({}, True),
        ({"num_speculative_tokens": "fixed"}, False),
        ({"num_speculative_tokens": 4}, False),
        ({"draft_tree_depth": 4, "draft_tree_top_k": 2, "num_draft_nodes": 6}, True),
        ({"speculative_token_tree": [[0], [1]]}, False),
        ({"num_speculative_tokens_per_batch_size": {1: 3}}, False),
        ({"num_speculative_tokens": "auto", "num_speculative_tokens_per_batch_size": {1: 3}}, True),
        ({"draft_sample_method": "probabilistic"}, False),
        ({"rejection_sample_method": "typical"}, False),
        ({"rejection_sample_method": "typical", "num_speculative_tokens": "auto"}, True),
    ):
        config = SpeculativeConfig("eagle3", "a/b", **given_settings)
        monkeypatch.delenv("HF_SPECDEC_ADAPTIVE", raising=False)
        assert config.is_adaptive == adaptive, given_settings
        monkeypatch.setenv("HF_SPECDEC_ADAPTIVE", "off")
        assert config.is_adaptive == (given_settings.get("num_speculative_tokens") == "auto")


def test_method_is_read_from_the_checkpoint(detected):
    pending = SpeculativeConfig(model="org/draft", toy_width=3, layers=[1, 2])
    assert isinstance(pending.options, PendingOptions)
    assert SpeculativeConfig.from_dict(pending.to_dict()) == pending
    detected("toy")
    assert SpeculativeConfig.resolve(pending).options == ToyOptions(width=3, layers=(1, 2))
    detected("draft_model")
    config = SpeculativeConfig.resolve("org/draft", revision="v2", draft_sample_method="greedy")
    assert (config.method, config.model, config.revision) == ("draft_model", "org/draft", "v2")
    assert config.options.draft_sample_method == "greedy"
    assert "belongs to method 'toy'" in error_of(SpeculativeConfig.resolve, pending)
    assert SpeculativeConfig.resolve("org/draft", method="toy").method == "toy"


K, DEPTH, NODES = "num_speculative_tokens", "draft_tree_depth", "num_draft_nodes"
# What is saved beside the weights, what the call says, and the shape of drafts of both.
SHAPES = [
    ({DEPTH: 4}, {K: 3}, {K: 3}),
    ({"speculative_token_tree": [(0,)]}, {K: 3}, {K: 3}),
    ({K: 3}, {"draft_tree_top_k": 2}, {"draft_tree_top_k": 2}),
    ({DEPTH: 4, NODES: 9}, {DEPTH: 2}, {DEPTH: 2, NODES: 9}),
    ({DEPTH: 4}, {K: "auto"}, {DEPTH: 4, K: "auto"}),
]


def test_settings_saved_beside_the_weights(tmp_path):
    SpeculativeConfig("draft_model", num_speculative_tokens=7).save_pretrained(tmp_path)
    assert SpeculativeConfig.resolve(tmp_path).model is None
    (tmp_path / "config.json").write_text("{}")
    config = SpeculativeConfig.resolve(tmp_path)
    assert (config.model, config.num_speculative_tokens) == (str(tmp_path), 7)
    for saved, own, shape in SHAPES:
        SpeculativeConfig("eagle3", draft_confidence_threshold=0.1, **saved).save_pretrained(tmp_path)
        about = {"method": "eagle3", "model": str(tmp_path), "draft_confidence_threshold": 0.1}
        assert SpeculativeConfig.resolve(tmp_path, **own).to_dict() == about | shape


RULE, RULE_OPTIONS = "rejection_sample_method", "rejection_sample_options"
# By the method, settings as they were once written, and as they are today.
RESPELLED = [
    ("ngram", {"disable_by_batch_size": 8}, {"num_speculative_tokens_per_batch_size": {9: 0}}),
    (
        "ngram",
        {"disable_by_batch_size": 8, "num_speculative_tokens_per_batch_size": {1: 5, 4: 2, 9: 1}},
        {"num_speculative_tokens_per_batch_size": {1: 5, 4: 2, 9: 0}},
    ),
    ("ngram", {"prompt_lookup_max_indexed_tokens": 64, "draft_tensor_parallel_size": 1}, {}),
    ("ngram", {"disable_by_batch_size": None}, {"num_speculative_tokens_per_batch_size": None}),
    ("ngram", {"prompt_lookup_match": "last"}, {"prompt_lookup_num_matches": None}),
    ("ngram", {"prompt_lookup_match": "first"}, {"prompt_lookup_num_matches": "first"}),
    (
        "ngram",
        {"prompt_lookup_match": "last", "prompt_lookup_max": 3},
        {"prompt_lookup_num_matches": 1, "prompt_lookup_max": 3},
    ),
    ("ngram", {RULE: "typical", "posterior_alpha": 0.5}, {RULE: "typical", RULE_OPTIONS: [0.09, 0.5]}),
    (
        "ngram",
        {RULE: "typical", "posterior_threshold": 0.2, "posterior_alpha": 0.5},
        {RULE: "typical", RULE_OPTIONS: [0.2, 0.5]},
    ),
    # Their defaults, which go with every rule.
    ("ngram", {"posterior_threshold": 0.09, "posterior_alpha": 0.3}, {}),
    ("ngram", {RULE: "synthetic", "synthetic_acceptance_length": 2}, {RULE: "synthetic", RULE_OPTIONS: 2.0}),
    ("ngram", {RULE: "synthetic", "synthetic_acceptance_rates": [1]}, {RULE: "synthetic", RULE_OPTIONS: [1]}),
    ("eagle3", {"draft_min_path_prob": 0.1}, {"draft_confidence_threshold": 0.1}),
    ("grammar", {"grammar_guesses_ends": False, "grammar_most_alternatives": 5}, {"grammar_most_alternatives": 0}),
    ("grammar", {"grammar_guesses_ends": True, "grammar_most_alternatives": 5}, {"grammar_most_alternatives": 5}),
    ("draft_model", {"same_tokenizer": True}, {"draft_vocabulary": "same"}),
    ("draft_model", {"same_tokenizer": False}, {}),
    ("sparse_kv", {"sparse_kv_window": 64}, {"sparse_kv_window": [4, 64]}),
    ("sparse_kv", {"sparse_kv_window": 64, "sparse_kv_sinks": 2}, {"sparse_kv_window": [2, 64]}),
    ("sparse_kv", {"sparse_kv_sinks": 2}, {"sparse_kv_window": [2, 512]}),
    ("suffix", {"suffix_decoding_max_cached_tokens": 1000}, {"suffix_decoding_max_cached_requests": 5}),
    ("mlp_speculator", {"top_k_tokens_per_head": [3, 2]}, {"draft_tree_top_k": [3, 2]}),
    # Names of fields, which have others beside the settings of all methods.
    ("ngram", {"match": "first", "max_indexed_tokens": 64}, {"prompt_lookup_num_matches": "first"}),
    ("grammar", {"guesses_ends": False}, {"grammar_most_alternatives": 0}),
    ("suffix", {"max_cached_tokens": 1000}, {"suffix_decoding_max_cached_requests": 5}),
]


@pytest.mark.parametrize(("method", "once", "today"), RESPELLED, ids=str)
def test_former_spellings(method, once, today):
    config = SpeculativeConfig(method, **today)
    assert SpeculativeConfig(method, **once) == config
    assert SpeculativeConfig(method, options=once) == config
    assert SpeculativeConfig.resolve(method, **once) == config
    assert SpeculativeConfig(method).replace(**once) == config
    # A card may say as much in these as in today's.
    assert sifted({"method": method, **once}, "a card")[0].keys() == sifted({"method": method, **today}, "")[0].keys()


@dataclass(frozen=True)
class OptionsOfFormerNames:
    same_tokenizer: int = 1
    sparse_kv_window: int = 1


class MethodWithFormerNames(ToyGenerator):
    options_class = OptionsOfFormerNames


@pytest.fixture
def method_with_former_names():
    register_candidate_generator("mine", MethodWithFormerNames)
    yield
    unregister_candidate_generator("mine")


@pytest.mark.usefixtures("method_with_former_names")
def test_what_a_method_itself_calls_so_is_no_former_spelling():
    given = {"same_tokenizer": 3, "sparse_kv_window": 5}
    for config in (
        SpeculativeConfig("mine", **given),
        SpeculativeConfig("mine", options=given),
        SpeculativeConfig("mine").replace(**given),
        SpeculativeConfig.resolve("mine", **given),
        SpeculativeConfig(model="org/draft", **given).for_method("mine"),
    ):
        assert config.options == OptionsOfFormerNames(3, 5)
    pending = SpeculativeConfig(model="org/draft", same_tokenizer=True)
    assert pending.for_method("draft_model").options.draft_vocabulary == "same"
    assert SpeculativeConfig("suffix+draft_model", same_tokenizer=True).options.draft_vocabulary == "same"


# Settings of the toy method, or whatever else is resolved, and what the message has.
REFUSED = [
    ({"num_speculative_tokens": 0}, "`num_speculative_tokens` must be an integer from 1 to 1024, got 0"),
    ({"num_speculative_tokens": "5"}, "without quotes"),
    ({"trust_remote_code": "true"}, "True or False"),
    ({"dtype": "bf16"}, "Did you mean 'bfloat16'?"),
    ({RULE_OPTIONS: [0.2, 0.3]}, "belongs to 'typical' and 'synthetic'"),
    ({RULE: "typical", RULE_OPTIONS: [0.2]}, "a pair of numbers"),
    ({RULE: "synthetic"}, "tokens per verification, from 1 to 1025, or rates"),
    ({RULE: "synthetic", RULE_OPTIONS: 0.5}, "tokens per verification, from 1 to 1025, or rates"),
    ({RULE: "synthetic", RULE_OPTIONS: [0.5, 0.6]}, "never rise"),
    *(({RULE: "synthetic", RULE_OPTIONS: rates}, "list of numbers") for rates in ([], [0.5] * 1025, ["0.5"])),
    ({RULE: "synthetic", "synthetic_acceptance_rates": [1], "synthetic_acceptance_length": 2}, "are one setting"),
    ({"disable_by_batch_size": "8"}, "`disable_by_batch_size` must be a number, got '8'"),
    ({"toy_width": 65}, "from 1 to 64"),
    ({"toy_widht": 3}, "Did you mean 'toy_width'?"),
    ({"width": 1, "toy_width": 2}, "`width` and `toy_width`"),
    ({"toy_width": 1, "options": {"toy_width": 2}}, "given twice"),
    ({"suffix_decoding_max_tree_depth": 3}, "belongs to method 'suffix'"),
    ({"speculative_token_tree": [[0] * depth for depth in range(1, 1030)]}, "1029 nodes"),
    ({"speculative_token_tree": [[0]], "num_speculative_tokens": 2}, "1 nodes"),
    (None, "neither"),
    ("{'method': 'toy'}", "not valid JSON"),
    ("no/such/file.json", "cannot be read"),
    ("off", "is plain generation, and names no drafter"),
    # Not taken for a repository.
    ("sufix", "Did you mean 'suffix'?"),
    ({3: "toy"}, "must be strings"),
    ({"method": "ngrm"}, "Did you mean 'ngram'?"),
    ({"method": "ngram", "model": "org/draft"}, "without"),
    ({"method": "ngram", "speculative_token_tree": "[(0,)]"}, "medusa"),
]


def test_errors_say_what_was_asked_and_what_to_do(tmp_path):
    for value, words in REFUSED:
        message = error_of(SpeculativeConfig.resolve, {"method": "toy", **value} if isinstance(value, dict) else value)
        assert words in message, (value, message)
    path = tmp_path / "settings.json"
    path.write_text("[1, 2]")
    assert str(path) in error_of(SpeculativeConfig.resolve, path)
    assert CONFIG_NAME in error_of(SpeculativeConfig.from_pretrained, tmp_path)


def test_check_against_the_target():
    config = SpeculativeConfig("toy", num_speculative_tokens=6, max_model_len=100)
    config.check_against_target(max_position_embeddings=100, num_heads=6)
    for target in ({"num_heads": 5}, {"max_position_embeddings": 6}, {"max_position_embeddings": 99}):
        error_of(config.check_against_target, **target)
    small = LlamaConfig(max_position_embeddings=16)
    assert SpeculativeConfig.resolve("toy", num_speculative_tokens=15, target_config=small)
    for other in (small, GPT2Config(n_positions=16)):
        error_of(SpeculativeConfig.resolve, "toy", num_speculative_tokens=16, target_config=other)


def wrong_numbers(hint, bounds: Bounds) -> list:
    """Values that a number or a list of numbers with these bounds cannot have."""
    beyond = [bounds.least - 1] if bounds.most is None else [bounds.least - 1, bounds.most + 1]
    if any(get_origin(kind) is tuple for kind in types_of(hint)):
        return [[], [True], 5, *([bounds.least, number] for number in beyond)]
    return [True, "5", float("nan"), *beyond]


def test_bounds_and_choices_of_methods():
    """Every number has bounds."""
    for method in BUILT_IN:
        model = {"model": "folder"} if takes_model(method) else {}
        hints = hints_of(options_class(method))
        for item in option_fields(method):
            key, hint, bounds = key_of(item), hints[item.name], item.metadata.get("bounds", Bounds())
            choices = [choice for kind in types_of(hint) for choice in get_args(kind) if get_origin(kind) is Literal]
            for choice in choices:
                assert getattr(options_class(method)(**{item.name: choice}), item.name) == choice
            if choices or bool in types_of(hint):
                wrong = ["other"]
            elif str in types_of(hint):
                wrong = []
            else:
                assert bounds.least is not None, key
                # There a number alone is a former spelling.
                wrong = [value for value in wrong_numbers(hint, bounds) if (key, value) != ("sparse_kv_window", 5)]
            for value in wrong:
                message = error_of(SpeculativeConfig, method, **model, **{key: value})
                assert message.startswith(f"`{key}` must be ")
    assert options_class("eagle3")(aux_layer_ids=[1, 2]).aux_layer_ids == (1, 2)


TOKEN, REAL = "hf_secret", "hf_" + "aB3dE" * 7
DRAFT = {"method": "draft_model", "model": "user/draft"}


def test_token_is_in_nothing_that_is_kept_or_shown(tmp_path):
    config, without = SpeculativeConfig(**DRAFT, token=TOKEN), SpeculativeConfig(**DRAFT)
    saved, pickled = config.save_pretrained(tmp_path).read_text(), pickle.dumps(config)
    shown = [repr(config), str(config), saved, str(config.to_dict()), str(config.to_dict(defaults=True))]
    assert not [text for text in (*shown, str(config.to_vllm()), str(pickled)) if TOKEN in text]
    assert config == without == pickle.loads(pickled)
    assert pickle.loads(pickled).token is None
    assert (hash(config), config.compute_hash()) == (hash(without), without.compute_hash())


def test_token_survives_changes():
    config = SpeculativeConfig(**DRAFT, token=TOKEN)
    for changed in (
        config.replace(method="eagle3"),
        SpeculativeConfig.resolve(config, dtype="auto"),
        SpeculativeConfig.from_dict(config.to_dict(secrets=True)),
        copy.copy(config),
        copy.deepcopy(config),
        replace(config, dtype="auto"),
    ):
        assert changed.token == TOKEN
    assert config.replace(token=None).token is None
    assert SpeculativeConfig.from_dict(config.to_dict()).token is None
    # What is remembered for the same words is of the same token.
    for token in ("hf_" + "a" * 30, "hf_" + "b" * 30, None, False):
        assert SpeculativeConfig.resolve(SpeculativeConfig(**DRAFT, token=token), dtype="auto").token == token
        assert SpeculativeConfig.resolve(DRAFT, token=token).token == token


def test_errors_do_not_show_a_token():
    for misplaced in (
        *({name: REAL} for name in ("revision", "model", "num_speculative_tokens", "dtype", "options")),
        {"options": {"revision": {"token": "s3cret"}}},
        {"quantization": {"token": "s3cret"}, "token": "s3cret"},
        {"token": "s3cret", "revision": ["s3cret"]},
        {REAL: 1},
        {"subfolder": [{"hf_token": "s3cret"}, REAL]},
        {"hf_token": "s3cret"},
        *({"token": token} for token in (b"s3cret", ["s3cret"], {"s3cret": 1})),
    ):
        message = error_of(SpeculativeConfig.resolve, {**DRAFT, **misplaced})
        assert not [secret for secret in (REAL, "s3cret") if secret in message], misplaced
    for value in (REAL, json.dumps([REAL]), {"method": REAL}, [REAL], {"model": f"x/{REAL}"}):
        with pytest.raises(SpecDecError) as caught:
            SpeculativeConfig.resolve(value)
        assert REAL not in str(caught.value)
    assert TOKEN not in error_of(SpeculativeConfig, "ngram", token=TOKEN)


@full
def test_environment_variables(monkeypatch):
    assert {word.upper() for word in environment._TRUE} == ENV_VARS_TRUE_VALUES
    for default in (True, False):
        assert environment.is_switched_on("CHECK", default=default) == default
        for word, wanted in ((" On ", True), ("0", False), ("off", False), ("2", False), (" ", default)):
            monkeypatch.setenv("HF_SPECDEC_CHECK", word)
            assert environment.is_switched_on("CHECK", default=default) == wanted
        monkeypatch.delenv("HF_SPECDEC_CHECK")
    monkeypatch.setenv("HF_SPECDEC_KERNELS", "TRITON")
    assert environment.kernel_choice() == "triton"
    monkeypatch.setenv("HF_SPECDEC_KERNELS", "off")
    with pytest.raises(SpecConfigError, match="got 'off'. Unset it"):
        environment.kernel_choice()
