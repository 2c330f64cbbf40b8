"""Settings for other engines: vLLM's `--speculative-config`, SGLang's flags, and the commands that serve with them."""

from __future__ import annotations

import json
import shlex
from typing import Any

from transformers.utils import logging

from ..errors import SpecConfigError, shown
from ..method import built_in_methods, methods
from ..settings import AUTO, FIXED, SpeculativeConfig


logger = logging.get_logger(__name__)

# vLLM 0.33's keys of --speculative-config that a configuration may hold; it refuses all others.
_VLLM_KEYS = frozenset(
    "method model num_speculative_tokens quantization num_speculative_tokens_per_batch_size max_model_len revision "
    "code_revision enforce_eager parallel_drafting rejection_sample_method draft_sample_method prompt_lookup_min "
    "prompt_lookup_max suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests "
    "suffix_decoding_max_spec_factor suffix_decoding_min_token_prob synthetic_acceptance_rates "
    "synthetic_acceptance_length".split()
)


def to_vllm(config: SpeculativeConfig) -> dict[str, Any]:
    """A configuration as vLLM's `--speculative-config` takes it; see [`SpeculativeConfig.to_vllm`]."""
    if config.method is None:
        raise SpecConfigError(
            f"The method of `model`={shown(config.model)} has not been read yet. Name it, or call "
            "SpeculativeConfig.resolve() first."
        )
    method = methods().get(config.method)
    if method is None or method.vllm is None:
        known = ", ".join(method.vllm for method in built_in_methods() if method.vllm)
        raise SpecConfigError(f"vLLM has no method {shown(config.method)}. It knows: {known}.")
    if config.rejection_sample_method == "typical":
        raise SpecConfigError("vLLM has no rejection_sample_method='typical'. Use 'standard' or 'block'.")
    if config.subfolder is not None:
        raise SpecConfigError(
            f"vLLM cannot load a draft model from `subfolder`={shown(config.subfolder)} of a repository. "
            "Save it to a folder of its own and name that as `model`."
        )
    settings = config.to_dict()
    if config.num_speculative_tokens in (AUTO, FIXED):
        if config.num_speculative_tokens == AUTO:
            logger.warning("vLLM does not adapt `num_speculative_tokens`; the method's default is given.")
        del settings["num_speculative_tokens"]
    settings["method"] = method.vllm
    settings.setdefault("num_speculative_tokens", method.generator_class.default_length(config.options))
    lengths = config.num_speculative_tokens_per_batch_size
    if lengths is not None:
        # vLLM wants ranges; the last one holds for everything above it there, too.
        ends = [first - 1 for first, _ in lengths[1:]] + [lengths[-1][0]]
        usual = settings["num_speculative_tokens"]
        ranges = [[first, end, usual if k is None else k] for (first, k), end in zip(lengths, ends)]
        settings["num_speculative_tokens_per_batch_size"] = ranges
        settings["num_speculative_tokens"] = max(usual, *(k for *_, k in ranges))
    if (accepted := settings.pop("rejection_sample_options", None)) is not None:
        settings[f"synthetic_acceptance_{'rates' if isinstance(accepted, list) else 'length'}"] = accepted
    if config.quantization == "bitsandbytes_4bit":
        settings["quantization"] = "bitsandbytes"
    unknown = settings.keys() - _VLLM_KEYS
    if config.quantization in ("bitsandbytes_fp4", "bitsandbytes_8bit"):
        unknown |= {"quantization"}
    if unknown:
        logger.warning(f"vLLM has no counterpart of these settings, they are left out: {', '.join(sorted(unknown))}.")
    return {key: value for key, value in settings.items() if key not in unknown}


def vllm_command(config: SpeculativeConfig, name: str, target: str | None) -> str | None:
    """The command that serves a target with the drafter `name`; `None` where vLLM cannot, or needs none."""
    method = methods().get(config.method)
    if method is None or method.in_target_checkpoint:
        return None
    try:
        settings = json.dumps(to_vllm(config.replace(model=name) if method.takes_model else config))
    except SpecConfigError:
        return None
    return f"vllm serve {shlex.quote(target or 'path/to/target')} --speculative-config {shlex.quote(settings)}"


def sglang_command(config: SpeculativeConfig, name: str, target: str | None) -> str | None:
    """The command that serves a target with the drafter `name`; `None` where SGLang has no such method."""
    method = methods().get(config.method)
    if method is None or method.sglang is None:
        return None
    length = config.fixed_length or method.generator_class.default_length(config.options)
    options = [f"--model-path {shlex.quote(target or 'path/to/target')}", f"--speculative-algorithm {method.sglang}"]
    if method.takes_model:
        options.append(f"--speculative-draft-model-path {shlex.quote(name)}")
    if method.sglang_counts_steps:
        options += [f"--speculative-num-steps {length}", "--speculative-eagle-topk 1"]
    # The last committed token counts there, too.
    options.append(f"--speculative-num-draft-tokens {length + 1}")
    return " \\\n    ".join(["python -m sglang.launch_server", *options])
