"""SpeculativeConfig: what it accepts, what it refuses and how it says so, and that nothing is lost on a round trip.

`python tests/loop/test_settings.py` writes the tables of docs/configuration.md anew from the fields.
"""

import copy
import json
import os
import pickle
import re
import subprocess
import sys
from dataclasses import dataclass, field, fields, make_dataclass, replace
from typing import Literal, get_args, get_origin

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hf_specdec.hub.engines as engines_module
from hf_specdec.candidate_generators import register_candidate_generator, unregister_candidate_generator
from hf_specdec.candidate_generators.base import CandidateGenerator
from hf_specdec.errors import SpecConfigError, SpecDecError
from hf_specdec.hub.published import published_config
from hf_specdec.method import built_in_methods, resolve_candidate_generator, takes_model
from hf_specdec.settings import CONFIG_NAME, SpeculativeConfig, conflicts, describe_settings
from hf_specdec.settings.names import PendingOptions, key_of, option_fields, options_class
from hf_specdec.validation import Bounds, hints_of, setting, types_of
from tests.helpers.paths import ROOT


BUILT_IN = tuple(method.name for method in built_in_methods())
COMMON = [item.name for item in fields(SpeculativeConfig) if item.name != "options"]


@dataclass(frozen=True)
class ToyOptions:
    width: int = setting(2, "Children of a node.", key="toy_width", least=1, most=64)
    rate: float | None = field(default=0.5, metadata={"help": "Share of cycles with drafts; `None` for all."})
    mode: Literal["wide", "deep"] = field(default="wide", metadata={"help": "What grows first."})
    layers: tuple[int, ...] = field(default=(), metadata={"help": "Layers that are read."})


class ToyGenerator(CandidateGenerator):
    options_class = ToyOptions
    default_num_speculative_tokens = 3


@pytest.fixture(scope="module", autouse=True)
def toy_method():
    register_candidate_generator("toy", ToyGenerator)
    yield
    unregister_candidate_generator("toy")


@pytest.fixture
def detected(monkeypatch):
    """Replaces the reading of checkpoints; `detected(name)` says which method every checkpoint has."""
    calls = []

    def detect_as(name):
        def detect_method(config, target_config=None):
            calls.append((config, target_config))
            return name

        monkeypatch.setattr("hf_specdec.resolve.detect_method", detect_method)
        return calls

    return detect_as


def error_of(action, *args, **kwargs) -> str:
    with pytest.raises(SpecConfigError) as caught:
        action(*args, **kwargs)
    return str(caught.value)


class TestWhatIsAccepted:
    def test_every_spelling_of_one_configuration(self):
        wanted = SpeculativeConfig(method="toy", num_speculative_tokens=4, toy_width=3, rate=1)
        flat = {"method": "toy", "num_speculative_tokens": 4, "toy_width": 3, "rate": 1.0}
        spellings = [
            SpeculativeConfig.resolve(wanted),
            SpeculativeConfig.resolve(flat),
            SpeculativeConfig.resolve(**flat),
            SpeculativeConfig.resolve(json.dumps(flat)),
            SpeculativeConfig.resolve("toy", num_speculative_tokens=4, toy_width=3, rate=1),
            SpeculativeConfig.resolve({"method": "toy", "toy_width": 9}, num_speculative_tokens=4, width=3, rate=1),
            SpeculativeConfig(method="toy", num_speculative_tokens=4, options=ToyOptions(width=3, rate=1)),
            SpeculativeConfig(method="toy", num_speculative_tokens=4, options={"width": 3, "rate": 1}),
            SpeculativeConfig.from_dict(flat),
        ]
        for config in spellings:
            assert config == wanted
            assert hash(config) == hash(wanted)
            assert config.compute_hash() == wanted.compute_hash()
        assert wanted.options == ToyOptions(width=3, rate=1.0)
        assert SpeculativeConfig.resolve(wanted) is wanted

    def test_serving_engine_spelling(self):
        ngram = SpeculativeConfig.resolve({"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4})
        assert (ngram.options.prompt_lookup_min, ngram.options.prompt_lookup_max) == (2, 4)
        suffix = SpeculativeConfig.resolve("suffix").options
        assert (suffix.max_tree_depth, suffix.max_cached_requests) == (24, 10000)
        assert (suffix.max_spec_factor, suffix.min_token_prob) == (None, 0.1)
        changed = SpeculativeConfig.resolve(
            {
                "method": "suffix",
                "suffix_decoding_max_tree_depth": 64,
                "suffix_decoding_max_cached_requests": 0,
                "suffix_decoding_max_spec_factor": 2,
                "suffix_decoding_min_token_prob": 0.2,
            }
        ).options
        assert (changed.max_tree_depth, changed.max_cached_requests) == (64, 0)
        assert (changed.max_spec_factor, changed.min_token_prob) == (2.0, 0.2)
        for sampled in ("greedy", "probabilistic"):
            draft = SpeculativeConfig(method="draft_model", model="org/draft", draft_sample_method=sampled)
            assert draft.options.draft_sample_method == sampled

    def test_common_keys_of_serving_engines(self):
        settings = {
            "method": "draft_model",
            "model": "org/draft",
            "num_speculative_tokens": 3,
            "draft_tensor_parallel_size": 1,
            "quantization": "bitsandbytes",
            "max_model_len": 512,
            "revision": "main",
            "code_revision": "main",
            "enforce_eager": True,
            "disable_by_batch_size": 8,
            "disable_padded_drafter_batch": True,
            "rejection_sample_method": "standard",
            "trust_remote_code": True,
        }
        config = SpeculativeConfig.resolve(settings)
        assert config.quantization == "bitsandbytes_4bit"
        for key in settings.keys() - {"quantization"}:
            assert getattr(config, key) == settings[key]

    def test_aliases_name_the_same_method(self):
        assert SpeculativeConfig.resolve("prompt_lookup") == SpeculativeConfig(method="ngram")
        assert SpeculativeConfig(method="assistant_model", model="x/y").method == "draft_model"

    @pytest.mark.parametrize("model", ["ngram", "[ngram]"])
    def test_method_name_in_place_of_a_model(self, model):
        assert SpeculativeConfig.resolve({"model": model}) == SpeculativeConfig(method="ngram")
        assert SpeculativeConfig.resolve({"method": "ngram", "model": model}) == SpeculativeConfig(method="ngram")

    def test_null_stands_for_the_default(self):
        nulls = dict.fromkeys(COMMON, None)
        assert SpeculativeConfig.resolve({**nulls, "method": "toy", "toy_width": None}) == SpeculativeConfig("toy")
        assert SpeculativeConfig("toy", rate=None).options.rate is None  # None is a value of this option

    @pytest.mark.parametrize(
        ("given", "wanted"), [("4bit", "4bit"), ("nf4", "4bit"), ("fp4", "fp4"), ("int8", "8bit")]
    )
    def test_quantization_aliases(self, given, wanted):
        assert SpeculativeConfig("toy", quantization=given).quantization == f"bitsandbytes_{wanted}"

    def test_torch_objects_and_numpy_numbers(self):
        import numpy as np
        import torch

        config = SpeculativeConfig(
            "toy", dtype=torch.bfloat16, device=torch.device("cuda", 1), num_speculative_tokens=np.int64(4)
        )
        assert (config.dtype, config.device, config.num_speculative_tokens) == ("bfloat16", "cuda:1", 4)
        assert type(config.num_speculative_tokens) is int

    @pytest.mark.parametrize(
        "tree", ["[(0, 0), (0,), (1,)]", [[0], [1], [0, 0]], ((0,), (1,), (0, 0)), [0, 0, 1], "[0, 1, 0]"], ids=str
    )
    def test_token_tree(self, tree):
        config = SpeculativeConfig("toy", speculative_token_tree=tree)
        assert config.speculative_token_tree == ((0,), (1,), (0, 0))
        assert SpeculativeConfig.resolve(json.dumps({"method": "toy", "speculative_token_tree": tree})) == config
        assert config.to_dict() == {"method": "toy", "speculative_token_tree": [[0], [1], [0, 0]]}
        assert SpeculativeConfig("toy", speculative_token_tree=tree, num_speculative_tokens=3)

    @pytest.mark.parametrize(
        ("tree", "num_nodes"),
        [("mc_sim_7b_63", 63), ("eagle_1", 25), ({"num_steps": 3, "topk": 4, "num_draft_tokens": 16}, 15)],
        ids=str,
    )
    def test_token_tree_by_name_and_numbers(self, tree, num_nodes):
        config = SpeculativeConfig.resolve({"method": "toy", "speculative_token_tree": tree})
        assert len(config.speculative_token_tree) == num_nodes
        assert SpeculativeConfig("toy", speculative_token_tree=tree) == config
        assert SpeculativeConfig.from_dict(config.to_dict()) == config

    def test_acceptance_rules(self):
        assert SpeculativeConfig("toy").rejection_sample_method == "standard"
        assert SpeculativeConfig("toy", rejection_sample_method="block").rejection_sample_method == "block"
        typical = SpeculativeConfig("toy", rejection_sample_method="typical")
        assert (typical.posterior_threshold, typical.posterior_alpha) == (0.09, 0.3)
        # The default of a rule's setting may be spelt for every rule.
        assert SpeculativeConfig("toy", posterior_alpha=0.3) == SpeculativeConfig("toy")
        rates = SpeculativeConfig("toy", rejection_sample_method="synthetic", synthetic_acceptance_rates=[1, 0.5, 0.5])
        assert rates.synthetic_acceptance_rates == (1.0, 0.5, 0.5)
        length = SpeculativeConfig("toy", rejection_sample_method="synthetic", synthetic_acceptance_length=3)
        assert length.synthetic_acceptance_length == 3.0


class TestModelStrings:
    def test_repo_id_reads_the_method_from_the_checkpoint(self, detected):
        calls = detected("draft_model")
        config = SpeculativeConfig.resolve("org/draft", revision="v2", draft_sample_method="greedy")
        assert (config.method, config.model, config.revision) == ("draft_model", "org/draft", "v2")
        assert config.options.draft_sample_method == "greedy"
        (asked, target_config), *rest = calls
        assert not rest
        assert asked.model == "org/draft"
        assert asked.revision == "v2"
        assert target_config is None

    def test_named_method_is_not_detected(self, detected):
        calls = detected("draft_model")
        assert SpeculativeConfig.resolve("org/draft", method="toy").method == "toy"
        assert not calls

    def test_options_wait_for_the_method(self, detected):
        pending = SpeculativeConfig(model="org/draft", toy_width=3, layers=[1, 2])
        assert isinstance(pending.options, PendingOptions)
        assert SpeculativeConfig.from_dict(pending.to_dict()) == pending
        detected("toy")
        assert SpeculativeConfig.resolve(pending).options == ToyOptions(width=3, layers=(1, 2))
        detected("draft_model")
        message = error_of(SpeculativeConfig.resolve, pending)
        assert "belongs to method 'toy'" in message
        assert "method='draft_model'" in message

    def test_unknown_option_of_an_undetected_method(self):
        assert "Did you mean 'num_speculative_tokens'?" in error_of(
            SpeculativeConfig, model="org/draft", num_spec_tokens=3
        )

    def test_local_folder(self, detected, tmp_path):
        detected("draft_model")
        assert SpeculativeConfig.resolve(tmp_path).model == str(tmp_path)
        assert SpeculativeConfig.resolve(str(tmp_path)).model == str(tmp_path)

    def test_saved_settings_beside_the_weights(self, tmp_path):
        SpeculativeConfig("draft_model", num_speculative_tokens=7).save_pretrained(tmp_path)
        assert SpeculativeConfig.resolve(tmp_path).model is None
        (tmp_path / "config.json").write_text("{}")
        config = SpeculativeConfig.resolve(tmp_path)
        assert (config.model, config.num_speculative_tokens) == (str(tmp_path), 7)
        assert SpeculativeConfig.resolve(tmp_path, num_speculative_tokens=2).num_speculative_tokens == 2

    @pytest.mark.parametrize(
        ("saved", "given", "shape"),
        [
            ({"draft_tree_depth": 4}, {"num_speculative_tokens": 3}, {"num_speculative_tokens": 3}),
            ({"speculative_token_tree": [(0,)]}, {"num_speculative_tokens": 3}, {"num_speculative_tokens": 3}),
            ({"num_speculative_tokens": 3}, {"draft_tree_top_k": 2}, {"draft_tree_top_k": 2}),
            (
                {"draft_tree_depth": 4, "num_draft_nodes": 9},
                {"draft_tree_depth": 2},
                {"draft_tree_depth": 2, "num_draft_nodes": 9},
            ),
            (
                {"draft_tree_depth": 4},
                {"num_speculative_tokens": "auto"},
                {"draft_tree_depth": 4, "num_speculative_tokens": "auto"},
            ),
        ],
    )
    def test_the_calls_shape_replaces_the_saved_one(self, saved, given, shape, tmp_path):
        SpeculativeConfig("eagle3", draft_min_path_prob=0.1, **saved).save_pretrained(tmp_path)
        (tmp_path / "config.json").write_text("{}")
        found = SpeculativeConfig.resolve(tmp_path, **given).to_dict()
        about = {"method": "eagle3", "model": str(tmp_path), "draft_min_path_prob": 0.1}
        assert found == about | shape

    def test_plain_generation_is_no_drafter(self):
        message = error_of(SpeculativeConfig.resolve, "off")
        assert "is plain generation, and names no drafter" in message

    def test_misspelt_method_is_not_taken_for_a_repository(self):
        for misspelt, meant in (("sufix", "suffix"), ("OFF", "off")):
            message = error_of(SpeculativeConfig.resolve, misspelt)
            assert f"Did you mean '{meant}'?" in message
            assert "`model`" in message


def test_what_changes_nothing_is_said(monkeypatch):
    said = []
    monkeypatch.setattr(conflicts.logger, "warning_once", said.append)
    SpeculativeConfig("ngram", disable_padded_drafter_batch=False)
    assert said == []
    SpeculativeConfig("ngram", disable_padded_drafter_batch=True)
    assert "`disable_padded_drafter_batch` changes nothing" in said[0]


class TestErrors:
    """Every message has what was asked, what was found, and what to do."""

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"num_speculative_tokens": 0}, ["`num_speculative_tokens` must be an integer from 1 to 1024", "got 0"]),
            ({"num_speculative_tokens": True}, ["an integer", "True (bool)"]),
            ({"num_speculative_tokens": "5"}, ["an integer", "'5' (str)", "without quotes"]),
            ({"num_speculative_tokens": 2.0}, ["an integer", "2.0 (float)"]),
            ({"trust_remote_code": "true"}, ["True or False", "without quotes"]),
            ({"trust_remote_code": 1}, ["True or False", "1 (int)"]),
            ({"model": 5}, ["`model`", "a string", "5 (int)"]),
            ({"max_model_len": -1}, ["`max_model_len`", "at least 1", "-1"]),
            ({"disable_by_batch_size": 0}, ["at least 1", "got 0"]),
            ({"dtype": "bf16"}, ["'float32'", "Did you mean 'bfloat16'?"]),
            ({"quantization": "awq"}, ["'bitsandbytes_4bit'", "'awq'"]),
            ({"draft_tensor_parallel_size": 0}, ["at least 1", "got 0"]),
            ({"rejection_sample_method": "standart"}, ["Did you mean 'standard'?"]),
            ({"rejection_sample_method": True}, ["'synthetic'", "True (bool)"]),
            ({"posterior_threshold": 0.2}, ["`posterior_threshold`=0.2", "='typical'", "got 'standard'"]),
            ({"posterior_alpha": 1, "rejection_sample_method": "block"}, ["`posterior_alpha`=1.0", "got 'block'"]),
            ({"posterior_threshold": 1.5, "rejection_sample_method": "typical"}, ["a number from 0 to 1", "got 1.5"]),
            (
                {"posterior_threshold": -0.1, "rejection_sample_method": "typical"},
                ["a number from 0 to 1", "got -0.1"],
            ),
            ({"posterior_alpha": -1, "rejection_sample_method": "typical"}, ["`posterior_alpha`", "at least 0"]),
            ({"synthetic_acceptance_length": 2}, ["`synthetic_acceptance_length`=2.0", "='synthetic'"]),
            ({"synthetic_acceptance_rates": [0.5], "rejection_sample_method": "typical"}, ["(0.5,)", "'synthetic'"]),
            ({"rejection_sample_method": "synthetic"}, ["`synthetic_acceptance_rates`", "neither"]),
            (
                {
                    "rejection_sample_method": "synthetic",
                    "synthetic_acceptance_rates": [0.5],
                    "synthetic_acceptance_length": 2,
                },
                ["`synthetic_acceptance_length`", "both"],
            ),
            ({"synthetic_acceptance_rates": [0.5, 0.6]}, ["must not increase", "[0.5, 0.6]"]),
            ({"synthetic_acceptance_rates": [1.5]}, ["from 0 to 1", "got [1.5]"]),
            ({"synthetic_acceptance_rates": []}, ["list of numbers", "got []"]),
            ({"synthetic_acceptance_rates": [0.5] * 1025}, ["list of numbers", "at most 1024 of them"]),
            ({"synthetic_acceptance_rates": 0.5}, ["list of numbers", "got 0.5"]),
            ({"synthetic_acceptance_rates": ["0.5"]}, ["list of numbers", "'0.5'"]),
            ({"synthetic_acceptance_rates": [float("nan")]}, ["list of numbers", "nan"]),
            (
                {"synthetic_acceptance_length": 0.5, "rejection_sample_method": "synthetic"},
                ["`synthetic_acceptance_length`", "from 1 to 1025", "0.5"],
            ),
            ({"rate": "0.5"}, ["a number", "without quotes"]),
            ({"rate": float("nan")}, ["a number", "nan"]),
            ({"rate": False}, ["a number", "False (bool)"]),
            ({"mode": "wiede"}, ["'wide' or 'deep'", "Did you mean 'wide'?"]),
            ({"layers": 3}, ["a list", "3 (int)"]),
            ({"toy_width": 65}, ["`toy_width`", "from 1 to 64", "got 65"]),
            ({"toy_widht": 3}, ["method='toy'", "Did you mean 'toy_width'?", "rate", "mode"]),
            ({"num_spec_tokens": 3}, ["Did you mean 'num_speculative_tokens'?"]),
            ({"tensor_parallel_size": 1}, ["Did you mean 'draft_tensor_parallel_size'?"]),
            ({"width": 1, "toy_width": 2}, ["`width` and `toy_width`", "Keep one"]),
            ({"toy_width": 1, "options": {"toy_width": 2}}, ["given twice", "toy_width"]),
            ({"options": 3}, ["`options`", "got 3"]),
            ({"options": {3: 1}}, ["must be strings", "got 3"]),
            ({"suffix_decoding_max_tree_depth": 3}, ["belongs to method 'suffix'", "method='toy'"]),
            ({"dflash_block_size": 8}, ["belongs to method 'dflash'", "method='toy'"]),
            ({"speculative_token_tree": "[(0), (0, 0)]"}, ["list of paths", "[(0), (0, 0)]"]),
            ({"speculative_token_tree": "medusa"}, ["mc_sim_7b_63", "got 'medusa'"]),
            ({"speculative_token_tree": [0, 2]}, ["has 2 for node 2"]),
            ({"speculative_token_tree": {"num_steps": 3}}, ["topk", "got {'num_steps': 3}"]),
            ({"speculative_token_tree": "(0"}, ["list of paths"]),
            ({"speculative_token_tree": []}, ["list of paths"]),
            ({"speculative_token_tree": [[0], [10**9]]}, ["rank 1000000000", "from 0 to 1023"]),
            ({"speculative_token_tree": [[0] * n for n in range(1, 1030)]}, ["1029 nodes", "at most 1024"]),
            ({"speculative_token_tree": [[0], [1, 0]]}, ["(1, 0)", "(1,)", "parent"]),
            ({"speculative_token_tree": [[0]], "num_speculative_tokens": 2}, ["=2", "1 nodes"]),
        ],
    )
    def test_setting(self, settings, words):
        message = error_of(SpeculativeConfig, "toy", **settings)
        assert [word for word in words if word not in message] == []
        assert error_of(SpeculativeConfig.resolve, {"method": "toy", **settings}) == message

    @pytest.mark.parametrize(
        ("value", "words"),
        [
            ({}, ["neither", "`method`", "`model`"]),
            (None, ["neither"]),
            ("", ["empty"]),
            ("{'method': 'toy'}", ["not valid JSON", "double quotes"]),
            ('{"method": ', ["not valid JSON"]),
            ("no/such/file.json", ["no/such/file.json", "cannot be read"]),
            (3, ["int", "`assistant=`"]),
            (["toy"], ["list"]),
            ({"method": 3}, ["`method`", "3 (int)"]),
            ({3: "toy"}, ["must be strings", "3"]),
            ({"method": "ngrm"}, ["'ngrm'", "Did you mean 'ngram'?"]),
            ({"method": "mtp", "mode": "loop"}, ["`mtp_mode`", "'loop'", "'chain'"]),
            ({"method": "ngram", "model": "org/draft"}, ["'org/draft'", "'ngram'", "without"]),
            ({"method": "suffix", "quantization": "4bit"}, ["`quantization`", "'suffix'"]),
            ({"method": "ngram", "suffix_decoding_max_tree_depth": 3}, ["belongs to method 'suffix'", "'ngram'"]),
            ({"method": "ngram", "speculative_token_tree": "[(0,)]"}, ["medusa", "eagle3", "method='ngram'"]),
            ({"method": "draft_model", "draft_sample_method": "gready"}, ["Did you mean 'greedy'?"]),
        ],
    )
    def test_value(self, value, words):
        message = error_of(SpeculativeConfig.resolve, value)
        assert [word for word in words if word not in message] == []

    def test_json_that_is_no_object(self, tmp_path):
        path = tmp_path / "settings.json"
        path.write_text("[1, 2]")
        message = error_of(SpeculativeConfig.resolve, path)
        assert str(path) in message
        assert "object" in message

    def test_nothing_can_be_set(self):
        with pytest.raises(AttributeError):
            SpeculativeConfig("toy").num_speculative_tokens = 3

    def test_check_against_target(self):
        config = SpeculativeConfig("toy", num_speculative_tokens=6, max_model_len=100)
        config.check_against_target(max_position_embeddings=100, num_heads=6)
        config.check_against_target()
        message = error_of(config.check_against_target, num_heads=5)
        assert "=6" in message
        assert "5 heads" in message
        message = error_of(config.check_against_target, 6)
        assert "`num_speculative_tokens`=6" in message
        assert "context of 6" in message
        message = error_of(config.check_against_target, 99)
        assert "`max_model_len`=100" in message
        assert "99 tokens" in message

    def test_target_config_is_checked(self):
        from transformers import GPT2Config, LlamaConfig

        small = LlamaConfig(max_position_embeddings=16)
        assert SpeculativeConfig.resolve("toy", num_speculative_tokens=15, target_config=small)
        for target_config in (small, GPT2Config(n_positions=16)):
            message = error_of(
                SpeculativeConfig.resolve, "toy", num_speculative_tokens=16, target_config=target_config
            )
            assert "context of 16" in message


# Least and largest value of the methods' options.
_GROWTH = {"draft_tree_depth": (1, 129), "draft_tree_top_k": (1, 64), "num_draft_nodes": (1, 1024)}
_GROWTH["draft_min_path_prob"] = (0, 1)
BOUNDS = {
    "ngram": {
        "prompt_lookup_min": (1, 2_000_000),
        "prompt_lookup_max": (1, 2_000_000),
        "prompt_lookup_num_matches": (1, 64),
        "prompt_lookup_max_indexed_tokens": (64, 2_000_000),
    },
    "suffix": {
        "suffix_decoding_max_tree_depth": (2, 1024),
        "suffix_decoding_max_cached_requests": (0, 10**9),
        "suffix_decoding_max_spec_factor": (0, 1024),
        "suffix_decoding_min_token_prob": (0, 1),
        "suffix_decoding_max_cached_tokens": (0, 10**9),
    },
    "draft_model": {"draft_confidence_threshold": (0, 1)},
    "recycling": {"num_draft_nodes": (1, 1024)},
    "medusa": {"num_draft_nodes": (1, 1024)},
    "mlp_speculator": {
        "top_k_tokens_per_head": (1, 1024),
        "mlp_speculator_num_candidates": (1, 1024),
        "num_draft_nodes": (1, 1024),
    },
    "eagle": {**_GROWTH, "aux_layer_ids": (0, 1024)},
    "eagle3": {**_GROWTH, "aux_layer_ids": (0, 1024)},
    "dflash": {
        "dflash_block_size": (1, 1025),
        "dflash_num_denoising_steps": (1, 1024),
        "dflash_mask_token_id": (0, None),
        "num_draft_nodes": (0, 1024),
        "draft_tree_top_k": (1, 64),
        "draft_confidence_threshold": (0, 1),
    },
    "mtp": _GROWTH,
    "toy+eagle3": {"retrieval_num_speculative_tokens": (1, 1024)},
}


class TestOptionsOfMethods:
    @pytest.mark.parametrize("method", [method for method in BUILT_IN if method in BOUNDS])
    def test_all_bounds_are_tested(self, method):
        declared = {key_of(item) for item in option_fields(method) if item.metadata["bounds"] != Bounds()}
        assert declared == set(BOUNDS[method])

    @pytest.mark.parametrize(
        ("method", "key", "least", "most"),
        [(method, key, *bounds) for method, keys in BOUNDS.items() for key, bounds in keys.items()],
    )
    def test_bounds(self, method, key, least, most, monkeypatch):
        monkeypatch.setattr(ToyGenerator, "estimates_acceptance", "+" in method)
        model = {"model": "folder"} if takes_model(method) else {}
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        wrong = (
            [least - 1, True, "5", float("nan")] if most is None else [least - 1, most + 1, True, "5", float("nan")]
        )
        if key in ("top_k_tokens_per_head", "aux_layer_ids"):
            wrong = [[], [least - 1], [least, most + 1], [True], 5]
        for value in wrong:
            message = error_of(SpeculativeConfig, method, **model, **{key: value})
            assert message.startswith(f"`{key}` must be a")
            assert limits in message or value == 5

    @pytest.mark.parametrize("method", BUILT_IN)
    def test_choices_and_switches(self, method):
        options = options_class(method)
        for name, hint in hints_of(options).items():
            choices = [choice for kind in types_of(hint) for choice in get_args(kind) if get_origin(kind) is Literal]
            for choice in choices:
                assert getattr(options(**{name: choice}), name) == choice
            if choices or hint is bool:
                wanted = "True or False" if hint is bool else repr(choices[0])
                assert error_of(options, **{name: "other"}).startswith(f"`{name}` must be {wanted}")

    def test_objects_are_checked_by_themselves(self):
        assert error_of(options_class("suffix"), max_tree_depth=1) == (
            "`max_tree_depth` must be an integer from 2 to 1024, got 1."
        )
        assert options_class("eagle3")(aux_layer_ids=[1, 2]).aux_layer_ids == (1, 2)


class TestReplace:
    def test_changes_and_keeps(self):
        config = SpeculativeConfig("toy", num_speculative_tokens=3, width=5)
        changed = config.replace(num_speculative_tokens=4, width=6)
        assert changed == SpeculativeConfig("toy", num_speculative_tokens=4, toy_width=6)
        assert config.options.width == 5
        assert replace(config, enforce_eager=True) == config.replace(enforce_eager=True)
        assert config.replace() == config

    def test_new_method_leaves_the_old_options_behind(self):
        config = SpeculativeConfig("toy", num_speculative_tokens=3, width=5).replace(method="ngram")
        assert config == SpeculativeConfig("ngram", num_speculative_tokens=3)

    def test_changes_are_checked(self):
        assert "from 1 to 1024" in error_of(SpeculativeConfig("toy").replace, num_speculative_tokens=0)


class TestToken:
    """An access token goes along wherever settings go, and nowhere else."""

    TOKEN = "hf_secret"
    CONFIG = SpeculativeConfig("draft_model", model="user/draft", token=TOKEN, dtype="float32")

    def test_it_is_in_nothing_that_is_kept_or_shown(self, tmp_path):
        config = self.CONFIG
        saved = config.save_pretrained(tmp_path).read_text()
        shown = [repr(config), str(config), saved, str(config.to_dict()), str(config.to_dict(defaults=True))]
        assert not [text for text in (*shown, str(config.to_vllm())) if self.TOKEN in text]
        without = SpeculativeConfig("draft_model", model="user/draft", dtype="float32")
        assert config == without
        assert hash(config) == hash(without)
        assert config.compute_hash() == without.compute_hash()

    def test_it_survives_changes(self):
        config = self.CONFIG
        assert config.replace(dtype="auto").token == self.TOKEN
        assert config.replace(method="eagle3").token == self.TOKEN
        assert config.replace(token=None).token is None
        assert SpeculativeConfig.resolve(config).token == self.TOKEN
        assert SpeculativeConfig.resolve(config, dtype="auto").token == self.TOKEN
        assert SpeculativeConfig.resolve({"method": "eagle3", "model": "x"}, token=False).token is False
        assert SpeculativeConfig.from_dict(config.to_dict(secrets=True)).token == self.TOKEN
        assert SpeculativeConfig.from_dict(config.to_dict()).token is None
        for copied in (copy.copy(config), copy.deepcopy(config), replace(config, dtype="auto")):
            assert copied.token == self.TOKEN

    def test_pickles_leave_it_out(self):
        pickled = pickle.dumps(self.CONFIG)
        assert self.TOKEN.encode() not in pickled
        assert pickle.loads(pickled) == self.CONFIG
        assert pickle.loads(pickled).token is None

    @pytest.mark.parametrize("token", [b"hf_secret", ["hf_secret"], {"hf_secret": 1}])
    def test_errors_do_not_show_it(self, token):
        message = error_of(SpeculativeConfig, "draft_model", "x", token=token)
        assert "`token` must be a string" in message
        assert self.TOKEN not in message

    REAL = "hf_" + "aB3dE" * 7

    @pytest.mark.parametrize(
        "settings",
        [
            {"revision": REAL},
            {"model": REAL},
            {"num_speculative_tokens": REAL},
            {"dtype": f"x{REAL}"[1:]},
            {"options": REAL},
            {"options": {"revision": {"token": "s3cret"}}},
            {"quantization": {"token": "s3cret"}, "token": "s3cret"},
            {"token": "s3cret", "revision": ["s3cret"]},
            {REAL: 1},
            {"subfolder": [{"hf_token": "s3cret"}, REAL]},
            {"hf_token": "s3cret"},
        ],
    )
    def test_errors_do_not_show_what_was_misplaced(self, settings):
        message = error_of(SpeculativeConfig.resolve, {"method": "draft_model", "model": "x/y", **settings})
        assert not [secret for secret in (self.REAL, "s3cret") if secret in message]

    @pytest.mark.parametrize("value", [REAL, json.dumps([REAL]), {"method": REAL}, [REAL], {"model": f"x/{REAL}"}])
    def test_errors_do_not_show_one_in_the_place_of_a_name(self, value):
        with pytest.raises(SpecDecError) as caught:
            SpeculativeConfig.resolve(value)
        assert self.REAL not in str(caught.value)

    def test_a_setting_that_holds_one_is_told_where_it_belongs(self):
        assert "`token`" in error_of(SpeculativeConfig, "draft_model", "x/y", revision=self.REAL)

    def test_methods_without_a_model_need_none(self):
        message = error_of(SpeculativeConfig, "ngram", token=self.TOKEN)
        assert "`token` is about a draft model" in message
        assert self.TOKEN not in message


WORDS = st.text("abcdefgh-_./", min_size=1, max_size=12)
COMMON_VALUES = {
    "num_speculative_tokens": st.integers(1, 1024),
    "draft_tensor_parallel_size": st.integers(1, 4),
    "quantization": st.sampled_from(["bitsandbytes_4bit", "nf4", "fp4", "8bit"]),
    "dtype": st.sampled_from(["auto", "float32", "float16", "bfloat16"]),
    "device": st.sampled_from(["cpu", "cuda:1"]),
    "max_model_len": st.integers(1, 2**31 - 1),
    "revision": WORDS,
    "code_revision": WORDS,
    "subfolder": WORDS,
    "cache_dir": WORDS,
    "local_files_only": st.booleans(),
    "token": WORDS | st.booleans(),
    "trust_remote_code": st.booleans(),
    "trusted_owners": st.lists(st.sampled_from(["user", "org"]), max_size=2).map(tuple),
    "enforce_eager": st.booleans(),
    "num_speculative_tokens_per_batch_size": st.dictionaries(st.integers(2, 99), st.just(1), max_size=3).map(
        lambda lengths: {1: 1, **lengths}
    ),
    "disable_by_batch_size": st.integers(1, 2**31 - 1),
    "disable_padded_drafter_batch": st.booleans(),
    "rejection_sample_method": st.sampled_from(["standard", "block"]),
}
RATES = st.lists(st.floats(0, 1), min_size=1, max_size=5).map(lambda rates: sorted(rates, reverse=True))
# Settings of one acceptance rule, each of which the rule can do without.
RULE_VALUES = {
    "typical": [{"posterior_threshold": st.floats(0, 1)}, {"posterior_alpha": st.floats(0, 9)}, {}],
    "synthetic": [{"synthetic_acceptance_rates": RATES}, {"synthetic_acceptance_length": st.floats(1, 9)}],
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
tree_settings = st.fixed_dictionaries(
    {"method": st.just("toy"), "model": WORDS},
    optional={
        "speculative_token_tree": st.sampled_from(["[(0,)]", [[0], [1], [1, 0]], ((0,), (0, 0)), [0, 0, 2], "eagle_1"])
    },
)


class TestRoundTrips:
    def test_strategies_cover_every_setting(self):
        of_rules = {key for choices in RULE_VALUES.values() for values in choices for key in values}
        others = {"method", "model", "speculative_token_tree", "control_profile"}
        assert {*others, *COMMON_VALUES, *of_rules} == set(COMMON)
        assert {item.key for item in describe_settings("toy")} == set(TOY_VALUES)

    @settings(max_examples=60)
    @given(flat=flat_settings | tree_settings)
    def test_dict_json_pickle(self, flat):
        config = SpeculativeConfig(**flat)
        for kept in (config.to_dict(), config.to_dict(defaults=True)):
            assert SpeculativeConfig.from_dict(kept) == config
            assert SpeculativeConfig.resolve(json.dumps(kept)) == config
        for copied in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
            assert copied == config
            assert hash(copied) == hash(config)
        assert eval(repr(config)) == config

    @settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(flat=flat_settings)
    def test_files(self, flat, tmp_path):
        config = SpeculativeConfig(**flat)
        path = config.save_pretrained(tmp_path / "saved")
        assert path.name == CONFIG_NAME
        assert SpeculativeConfig.from_pretrained(path.parent) == config
        assert SpeculativeConfig.from_pretrained(path) == config
        assert SpeculativeConfig.resolve(path) == config

    def test_real_methods(self):
        for method in BUILT_IN:
            config = SpeculativeConfig(method)
            assert SpeculativeConfig.from_dict(config.to_dict(defaults=True)) == config
            assert config.to_dict() == {"method": method}

    def test_missing_file_says_what_to_do(self, tmp_path):
        message = error_of(SpeculativeConfig.from_pretrained, tmp_path)
        assert CONFIG_NAME in message
        assert str(tmp_path) in message
        assert "save_pretrained" in message


class TestTheSameWords:
    """Calls that repeat their settings get the configuration of the first one, which is not validated again."""

    @pytest.mark.parametrize(
        ("value", "overrides"),
        [
            ("toy", {}),
            ('{"method": "toy", "toy_width": 3}', {"num_speculative_tokens": 4}),
            ({"method": "toy", "speculative_token_tree": [[0], [1], [0, 0]]}, {}),
            (None, {"method": "toy", "num_speculative_tokens": "auto"}),
            ({"method": "suffix+eagle3", "model": "org/head"}, {}),
        ],
    )
    def test_one_configuration(self, value, overrides):
        config = SpeculativeConfig.resolve(value, **overrides)
        assert SpeculativeConfig.resolve(copy.deepcopy(value), **overrides) is config

    @pytest.mark.parametrize(("one", "other"), [(1, True), (1.0, 1), ("auto", 1)])
    def test_values_of_other_types_are_other_words(self, one, other):
        def outcome(k):
            try:
                return SpeculativeConfig.resolve("toy", num_speculative_tokens=k)
            except SpecConfigError as error:
                return str(error)

        first = [outcome(one), outcome(other)]
        assert [outcome(one), outcome(other)] == first
        assert first[0] != first[1]

    def test_a_token_is_part_of_them(self):
        settings = {"method": "eagle3", "model": "org/head"}
        for token in ("hf_" + "a" * 30, "hf_" + "b" * 30, None):
            config = SpeculativeConfig(**settings, token=token)
            assert SpeculativeConfig.resolve(config, dtype="auto").token == token
            assert SpeculativeConfig.resolve(settings, token=token).token == token

    def test_files_are_read_again(self, tmp_path):
        path = tmp_path / "settings.json"
        for width in (3, 5):
            path.write_text(json.dumps({"method": "toy", "toy_width": width}))
            assert SpeculativeConfig.resolve(path).options.width == width
            assert SpeculativeConfig.resolve(str(path)).options.width == width

    def test_a_method_of_the_same_name_has_its_own_options(self):
        found = []
        for default in (1, 2):
            options = make_dataclass("Options", [("size", int, default)], frozen=True)
            register_candidate_generator("reborn", type("Reborn", (CandidateGenerator,), {"options_class": options}))
            found.append(SpeculativeConfig.resolve({"method": "reborn", "num_speculative_tokens": 4}).options.size)
            unregister_candidate_generator("reborn")
        assert found == [1, 2]


class TestOtherNames:
    """Options under the names of SGLang; sizes there count the anchor."""

    SGLANG = {"speculative_num_steps": 8, "speculative_eagle_topk": 10, "speculative_num_draft_tokens": 60}
    OWN = {"draft_tree_depth": 8, "draft_tree_top_k": 10, "num_draft_nodes": 59}

    @pytest.mark.parametrize("method", ["eagle", "mtp", "suffix+eagle3"])
    def test_they_are_the_same(self, method):
        config = SpeculativeConfig(method, "org/head", **self.SGLANG)
        assert config == SpeculativeConfig(method, "org/head", **self.OWN)
        assert config.to_dict() == {"method": method, "model": "org/head", **self.OWN}

    def test_a_block(self):
        config = SpeculativeConfig("dflash", "org/draft", speculative_num_draft_tokens=16)
        assert config == SpeculativeConfig("dflash", "org/draft", dflash_block_size=16)

    def test_files(self, tmp_path):
        settings = {"method": "eagle3", "model": "org/head", **self.SGLANG}
        path = tmp_path / CONFIG_NAME
        path.write_text(json.dumps(settings))
        wanted = SpeculativeConfig("eagle3", "org/head", **self.OWN)
        assert SpeculativeConfig.resolve(path) == SpeculativeConfig.from_pretrained(tmp_path) == wanted
        assert published_config(settings, "a card", with_place=True) == wanted

    def test_before_the_method_is_known(self):
        config = SpeculativeConfig(model="org/head", speculative_num_draft_tokens=60)
        assert config.replace(method="eagle3").options.num_draft_nodes == 59
        assert config.for_method("mtp").options.num_draft_nodes == 59

    def test_one_name_at_a_time(self):
        message = error_of(
            SpeculativeConfig, "eagle3", "org/head", speculative_num_draft_tokens=60, num_draft_nodes=59
        )
        assert message.startswith("`speculative_num_draft_tokens` and `num_draft_nodes` are two names of one setting.")

    def test_values_are_checked(self):
        message = error_of(SpeculativeConfig, "eagle3", "org/head", speculative_num_draft_tokens=1)
        assert message == "`num_draft_nodes` must be an integer from 1 to 1024, got 0."
        message = error_of(SpeculativeConfig, "eagle3", "org/head", speculative_num_draft_tokens="60")
        assert (
            "`num_draft_nodes` must be an integer from 1 to 1024 or None, got '60' (str). Write it without quotes."
            in message
        )


class TestHash:
    @settings(max_examples=60)
    @given(flat=flat_settings, data=st.data())
    def test_order_and_spelt_defaults_do_not_matter(self, flat, data):
        config = SpeculativeConfig(**flat)
        shuffled = dict(data.draw(st.permutations(list(config.to_dict(defaults=True).items()))))
        assert SpeculativeConfig.from_dict(shuffled).compute_hash() == config.compute_hash()

    @settings(max_examples=60)
    @given(first=flat_settings, second=flat_settings)
    def test_equal_exactly_when_the_configurations_are(self, first, second):
        first, second = SpeculativeConfig(**first), SpeculativeConfig(**second)
        assert (first.compute_hash() == second.compute_hash()) == (first == second)

    def test_signed_zero(self):
        assert SpeculativeConfig("toy", rate=-0.0).compute_hash() == SpeculativeConfig("toy", rate=0).compute_hash()

    def test_same_in_every_process(self):
        code = (
            "from hf_specdec.settings import SpeculativeConfig as C;"
            "print(C('ngram', prompt_lookup_max=4, num_speculative_tokens=3).compute_hash())"
        )
        # Strings have other hashes in it than here.
        environment = {**os.environ, "PYTHONHASHSEED": "1", "HF_SPECDEC_DISABLE": "1"}
        command = [sys.executable, "-c", code]
        printed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
        here = SpeculativeConfig.resolve({"num_speculative_tokens": 3, "prompt_lookup_max": 4, "method": "ngram"})
        assert printed.strip() == here.compute_hash()
        assert re.fullmatch("[0-9a-f]{16}", here.compute_hash())


class TestVllm:
    def warnings_of(self, monkeypatch, config):
        warned = []
        monkeypatch.setattr(engines_module.logger, "warning", warned.append)
        return config.to_vllm(), warned

    def test_known_keys_pass(self, monkeypatch):
        config = SpeculativeConfig("suffix", num_speculative_tokens=16, suffix_decoding_max_tree_depth=32)
        assert self.warnings_of(monkeypatch, config) == (
            {"method": "suffix", "num_speculative_tokens": 16, "suffix_decoding_max_tree_depth": 32},
            [],
        )

    def test_k_is_always_named(self):
        wanted = resolve_candidate_generator("draft_model").default_num_speculative_tokens
        settings = SpeculativeConfig("draft_model", model="org/draft", quantization="nf4").to_vllm()
        assert settings == {
            "method": "draft_model",
            "model": "org/draft",
            "num_speculative_tokens": wanted,
            "quantization": "bitsandbytes",
        }

    def test_others_are_left_out_with_one_warning(self, monkeypatch):
        config = SpeculativeConfig(
            "draft_model", model="org/draft", num_speculative_tokens=2, dtype="float16", quantization="8bit"
        )
        settings, warned = self.warnings_of(monkeypatch, config)
        assert settings == {"method": "draft_model", "model": "org/draft", "num_speculative_tokens": 2}
        assert len(warned) == 1
        assert "dtype, quantization" in warned[0]

    def test_what_vllm_could_not_run_is_refused(self):
        assert "vLLM has no method 'toy'" in error_of(SpeculativeConfig("toy").to_vllm)
        assert "vLLM has no method 'medusa'" in error_of(SpeculativeConfig("medusa", model="org/heads").to_vllm)
        typical = SpeculativeConfig("ngram", rejection_sample_method="typical")
        assert "no rejection_sample_method='typical'" in error_of(typical.to_vllm)
        assert "has not been read yet" in error_of(SpeculativeConfig(model="org/draft").to_vllm)
        config = SpeculativeConfig("draft_model", model="org/draft", subfolder="draft")
        assert "`subfolder`='draft'" in error_of(config.to_vllm)

    def test_result_is_json_and_reads_back(self):
        config = SpeculativeConfig("ngram", num_speculative_tokens=4, prompt_lookup_min=1, prompt_lookup_max=3)
        assert SpeculativeConfig.resolve(json.dumps(config.to_vllm())) == config


class TestDocumentation:
    @pytest.mark.parametrize("method", [None, *BUILT_IN])
    def test_every_setting_is_explained(self, method):
        for item in describe_settings(method):
            assert item.help.strip().endswith("."), f"{item.key}: {item.help!r}"

    @pytest.mark.parametrize("method", BUILT_IN)
    def test_names_of_options_are_not_names_of_common_settings(self, method):
        keys = {setting.key for setting in describe_settings(method)}
        names = {item.name for item in fields(resolve_candidate_generator(method).options_class)}
        assert not (keys | names) & set(COMMON)


def test_to_vllm_names_the_depth_of_a_suffix_tree_as_the_draft_length():
    config = SpeculativeConfig(method="suffix", suffix_decoding_max_tree_depth=64)
    assert config.to_vllm()["num_speculative_tokens"] == 64


def test_a_misspelt_method_key_is_named():
    with pytest.raises(SpecConfigError, match="`metod`. Did you mean `method`"):
        SpeculativeConfig.resolve({"metod": "ngram"})


def test_import_loads_no_method():
    code = (
        "import sys, hf_specdec.settings;"
        "names = [f'hf_specdec.candidate_generators.{name}' for name in ('base', 'ngram.generator')];"
        "print([name for name in [*names, 'torch', 'triton', 'arctic_inference', 'numba'] if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("settings", "adaptive"),
    [
        ({}, True),
        ({"num_speculative_tokens": "auto"}, True),
        ({"num_speculative_tokens": "fixed"}, False),
        ({"num_speculative_tokens": 4}, False),
        ({"draft_tree_depth": 4, "draft_tree_top_k": 2, "num_draft_nodes": 6}, True),
        ({"speculative_token_tree": [[0], [1]]}, False),
        ({"num_speculative_tokens_per_batch_size": {1: 3}}, False),
        ({"num_speculative_tokens": "auto", "num_speculative_tokens_per_batch_size": {1: 3}}, True),
        ({"rejection_sample_method": "block"}, False),
        ({"draft_sample_method": "probabilistic"}, False),
        ({"draft_sample_method": "greedy"}, True),
        ({"rejection_sample_method": "typical"}, False),
        ({"rejection_sample_method": "typical", "num_speculative_tokens": "auto"}, True),
    ],
)
def test_lengths_are_adaptive_where_nothing_says_otherwise(settings, adaptive, monkeypatch):
    monkeypatch.delenv("HF_SPECDEC_ADAPTIVE")
    config = SpeculativeConfig("eagle3", "a/b", **settings)
    assert config.is_adaptive == adaptive
    monkeypatch.setenv("HF_SPECDEC_ADAPTIVE", "0")
    assert config.is_adaptive == (settings.get("num_speculative_tokens") == "auto")
