"""The settings of speculative decoding: one validated object, spelled as in serving engines.

`SpeculativeConfig` holds what every method understands; `options` holds what only the chosen method understands, as
the frozen dataclass that is declared beside the method. From outside both are one flat set of names, those of vLLM's
`--speculative-config` where vLLM has the setting.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import numbers
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from transformers.utils import logging

from .errors import HIDDEN, SpecConfigError, SpecDecError, is_access_token, is_secret_key, shown
from .reading import parse_json, read_text


logger = logging.get_logger(__name__)

CONFIG_NAME = "speculation_config.json"

# In a method's place: the drafter that is found for the target, or the method of the `model` that is named.
AUTO = "auto"

METHODS_WITHOUT_MODEL = ("ngram", "suffix")
TREE_METHODS = ("medusa", "mlp_speculator", "eagle", "eagle3", "mtp")

# Of a draft: as many as a static tree may have nodes.
MOST_DRAFT_TOKENS = 1024
MOST_INTEGER = 2**31 - 1

# Of a name or path.
_MOST_CHARACTERS = 4096

# Values inside of one setting, and how deep they may lie; a chain as paths has half a million.
_MOST_VALUES, _MOST_LEVELS = 1_000_000, 8

# Settings that only one acceptance rule reads.
_RULE_OF_SETTING = {
    "posterior_threshold": "typical",
    "posterior_alpha": "typical",
    "synthetic_acceptance_rates": "synthetic",
    "synthetic_acceptance_length": "synthetic",
}

_QUANTIZATION_ALIASES = {
    "bitsandbytes": "bitsandbytes_4bit",
    "4bit": "bitsandbytes_4bit",
    "nf4": "bitsandbytes_4bit",
    "fp4": "bitsandbytes_fp4",
    "8bit": "bitsandbytes_8bit",
    "int8": "bitsandbytes_8bit",
}

# Names that other engines, older versions of them, and transformers have for a setting.
_NAMES_ELSEWHERE = {
    "method": "speculative_method speculative_algorithm speculative_decoding_mode decoding_type spec_method spec_type",
    "model": "speculative_model speculative_draft_model_path speculative_model_dir draft_model_path draft_model "
    "assistant_model spec_model",
    "num_speculative_tokens": "speculative_num_steps num_speculative_steps speculative_tokens max_draft_len draft_max "
    "num_assistant_tokens prompt_lookup_num_tokens max_verification_set_size",
    "speculative_token_tree": "speculative_num_draft_tokens speculative_eagle_topk medusa_choices eagle_choices",
    "draft_tensor_parallel_size": "speculative_draft_tensor_parallel_size",
    "quantization": "speculative_model_quantization speculative_draft_model_quantization",
    "max_model_len": "speculative_max_model_len",
    "revision": "speculative_model_revision speculative_draft_model_revision",
    "disable_by_batch_size": "speculative_disable_by_batch_size",
    "rejection_sample_method": "spec_decoding_acceptance_method acceptance_method",
    "posterior_threshold": "typical_acceptance_sampler_posterior_threshold",
    "posterior_alpha": "typical_acceptance_sampler_posterior_alpha",
    "prompt_lookup_max": "ngram_prompt_lookup_max speculative_ngram_max_match_window_size max_matching_ngram_size",
    "prompt_lookup_min": "ngram_prompt_lookup_min speculative_ngram_min_match_window_size",
    "draft_confidence_threshold": "assistant_confidence_threshold",
    "token": "use_auth_token hf_token",
}
_OTHER_NAMES = {other: name for name, others in _NAMES_ELSEWHERE.items() for other in others.split()}

# Methods of vLLM 0.33 and its keys of --speculative-config; it refuses all others.
_VLLM_METHODS = ("ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp", "dflash")
_VLLM_KEYS = frozenset(
    {
        "method",
        "model",
        "num_speculative_tokens",
        "draft_tensor_parallel_size",
        "quantization",
        "num_speculative_tokens_per_batch_size",
        "max_model_len",
        "revision",
        "code_revision",
        "enforce_eager",
        "disable_padded_drafter_batch",
        "rejection_sample_method",
        "draft_sample_method",
        "prompt_lookup_min",
        "prompt_lookup_max",
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_cached_requests",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
        "synthetic_acceptance_rates",
        "synthetic_acceptance_length",
    }
)


_KIND_NAMES = {bool: "True or False", int: "an integer", float: "a number", str: "a string", type(None): "None"}


class Setting(NamedTuple):
    """One documented setting: its flat name, its type and default as text, and what it does."""

    key: str
    type: str
    default: str
    help: str


@dataclass(frozen=True)
class PendingOptions:
    """Options given before the method is known; they are checked once it has been read from the checkpoint."""

    values: tuple[tuple[str, Any], ...] = ()


def _setting(
    default: Any,
    help: str,
    *,
    minimum=None,
    maximum=None,
    normalize=None,
    aliases: Mapping[str, str] | None = None,
    describes_model: bool = False,
    is_secret: bool = False,
) -> Any:
    metadata = {"help": help, "normalize": normalize, "aliases": aliases or {}, "minimum": minimum, "maximum": maximum}
    metadata |= {"describes_model": describes_model, "is_secret": is_secret}
    return field(default=default, metadata=metadata, compare=not is_secret)


def _plain_path(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _torch_name(value: Any) -> Any:
    """`torch.bfloat16` -> "bfloat16", `torch.device("cuda", 0)` -> "cuda:0"; anything else as it is."""
    return str(value).removeprefix("torch.") if type(value).__module__ == "torch" else value


def _canonical_method(name: Any) -> str | None:
    from .candidate_generators import COMBINING, parts_of

    if name is not None and not isinstance(name, str):
        raise SpecConfigError(f"`method` must be the name of a method, got {shown(name)} ({type(name).__name__}).")
    return None if name is None else COMBINING.join(parts_of(name))


def _token_tree(value: Any) -> Any:
    if value is None:
        return None
    from .token_trees import parse_token_tree

    return parse_token_tree(value)


def _lengths_by_batch_size(value: Any) -> Any:
    """Pairs of a number of rows and the length from there on, in increasing order; neighbours differ in length."""
    if value is None:
        return None
    is_mapping = isinstance(value, Mapping)
    entries = list(value.items()) if is_mapping else value
    if not isinstance(entries, (list, tuple)) or not entries:
        raise _no_lengths_by_batch_size(value)
    ranges = sorted(_range_of_rows(entry, value) for entry in entries)
    last, pairs = 0, []
    for first, end, length in ranges:
        if first <= last:
            raise SpecConfigError(
                f"`num_speculative_tokens_per_batch_size` says twice what holds for {first} rows, got {shown(value)}. "
                "Let its ranges not overlap."
            )
        last = end
        if not pairs or pairs[-1][1] != length:
            pairs.append((first, length))
    if pairs[0][0] != 1:
        raise SpecConfigError(
            f"`num_speculative_tokens_per_batch_size` must begin at 1 row, got {shown(value)}, which begins at "
            f"{pairs[0][0]}."
        )
    if not any(length for _, length in pairs):
        raise SpecConfigError(
            f"`num_speculative_tokens_per_batch_size` must allow drafts somewhere, got {shown(value)}. Leave "
            "speculation out to generate without drafts."
        )
    return tuple(pairs)


def _range_of_rows(entry: Any, value: Any) -> tuple[int, int, int]:
    """First and last number of rows, and the length, of `(rows, k)` or `(first, last, k)`."""
    if not isinstance(entry, (list, tuple)) or len(entry) not in (2, 3):
        raise _no_lengths_by_batch_size(value)
    # JSON has only strings for the keys of a mapping.
    numbers_given = [int(item) if isinstance(item, str) and item.isdecimal() else item for item in entry]
    if not all(map(_is_int, numbers_given)):
        raise _no_lengths_by_batch_size(value)
    first, last, length = numbers_given if len(entry) == 3 else (numbers_given[0], *numbers_given)
    if not 1 <= first <= last <= MOST_INTEGER or not 0 <= length <= MOST_DRAFT_TOKENS:
        raise _no_lengths_by_batch_size(value)
    return int(first), int(last), int(length)


def _no_lengths_by_batch_size(value: Any) -> SpecConfigError:
    return SpecConfigError(
        "`num_speculative_tokens_per_batch_size` must be a list of [first, last, k], such as [[1, 8, 5], [9, 32, 2], "
        "[33, 128, 0]] for numbers of rows and the draft tokens there, or a mapping from the number of rows from "
        f"which on a k holds, {{1: 5, 9: 2, 33: 0}}; rows are at least 1, k is from 0 to {MOST_DRAFT_TOKENS}. "
        f"Got {shown(value)}."
    )


def _owners(value: Any) -> Any:
    if value is None:
        return None
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise SpecConfigError(f"`trusted_owners` must be a list of users and organisations, got {shown(value)}.")
    return tuple(filter(None, map(str.strip, names)))


def _acceptance_rates(value: Any) -> Any:
    if value is None:
        return None
    is_list = isinstance(value, (list, tuple)) and len(value) > 0
    is_list = is_list and len(value) <= MOST_DRAFT_TOKENS
    if not is_list or not all(_is_number(rate) and 0 <= rate <= 1 for rate in value):
        raise SpecConfigError(
            "`synthetic_acceptance_rates` must be a list of numbers from 0 to 1, at most "
            f"{MOST_DRAFT_TOKENS} of them, got {shown(value)}."
        )
    if any(later > earlier for earlier, later in zip(value, value[1:])):
        raise SpecConfigError(
            f"`synthetic_acceptance_rates` must not increase, got {shown(list(value))}: more draft tokens cannot be "
            "accepted more often than fewer."
        )
    return tuple(float(rate) for rate in value)


@dataclass(frozen=True, init=False, repr=False)
class SpeculativeConfig:
    """How to speculate: the method, its draft model, and their settings. Immutable, comparable and hashable.

    The constructor takes all settings by their flat names, those of the method included; `SpeculativeConfig.resolve`
    also takes a dict, JSON, the name of a method, a repo id or a path.

    ```python
    SpeculativeConfig(method="ngram", num_speculative_tokens=8, prompt_lookup_max=4)
    SpeculativeConfig.resolve({"method": "suffix", "suffix_decoding_max_tree_depth": 64})
    SpeculativeConfig.resolve("path/to/draft-model")
    ```

    Attributes:
        method (`str`, *optional*):
            Name of the method, or "auto" for a drafter that is found for the target. "suffix+eagle3" combines a
            method that retrieves with one that drafts with weights. `None` only while it has yet to be read from the
            checkpoint of `model`, which is also what "auto" beside a `model` means.
        model (`str`, *optional*):
            Repo id or local folder of the draft model or draft head.
        num_speculative_tokens (`int` or "auto", *optional*):
            Speculation length k: draft tokens of a chain per cycle, from 1 to 1024. "auto": each cycle the length that
            pays, down to plain decoding. `None`: the method's default.
        num_speculative_tokens_per_batch_size (`tuple[tuple[int, int], ...]`, *optional*):
            Most draft tokens by the number of active rows: pairs of a number of rows and the k that holds from there
            on, 0 for none. vLLM's `[[first, last, k], ...]` and mappings `{rows: k}` are taken. Of trees, the depth.
        speculative_token_tree (`tuple[tuple[int, ...], ...]`, *optional*):
            Static draft tree as paths of child ranks, for the methods that draft trees. All spellings of
            [`~token_trees.parse_token_tree`] are taken.
        draft_tensor_parallel_size (`int`, defaults to 1):
            Processes that hold parts of the draft model: 1, or those of a loaded draft model that is passed.
        quantization (`str`, *optional*):
            "bitsandbytes_4bit" (NF4), "bitsandbytes_fp4" or "bitsandbytes_8bit": quantise the draft model on loading.
        dtype (`str`, *optional*):
            Data type of the draft model; "auto" takes the checkpoint's. `None`: the target's.
        device (`str`, *optional*):
            Device of the draft model. `None`: the target's.
        max_model_len (`int`, *optional*):
            Longest sequence in tokens that is drafted for; longer rows go on without drafts.
        revision (`str`, *optional*):
            Branch, tag or commit of the draft model's repository.
        code_revision (`str`, *optional*):
            Branch, tag or commit of the draft model's remote code.
        subfolder (`str`, *optional*):
            Folder inside the repository that holds the draft model.
        cache_dir (`str`, *optional*):
            Folder where downloads are kept. `None`: the Hub's cache.
        local_files_only (`bool`, defaults to `False`):
            Take the draft model from the cache, and ask nothing of the Hub.
        token (`str` or `bool`, *optional*):
            Access token for private and gated repositories. `None`: that of the login. It is part of no comparison,
            dict, file, pickle, hash or text of this object, and of no error.
        trust_remote_code (`bool`, defaults to `False`):
            Whether code from the draft model's repository may run.
        trusted_owners (`tuple[str, ...]`, *optional*):
            Owners on the Hub whose drafters may be taken where no `model` is named; text with commas is taken. `None`:
            all that HF_SPECDEC_TRUSTED_OWNERS allows.
        enforce_eager (`bool`, defaults to `False`):
            Launch every forward from Python, and capture nothing in CUDA graphs. Nothing is captured on a CPU.
        control_profile (`str`, *optional*):
            For "auto": file of `hf-specdec calibrate` to begin with. `None`: that of the cache folder, if there is
            one.
        disable_by_batch_size (`int`, *optional*):
            Generate without drafts where the batch has more rows than this.
        disable_padded_drafter_batch (`bool`, defaults to `False`):
            Accepted for configurations of serving engines; rows are never padded to each other here.
        rejection_sample_method (`str`, defaults to "standard"):
            Acceptance rule. "standard" and "block" keep the target's distribution exactly; "typical" changes it, and
            "synthetic" makes the text meaningless.
        posterior_threshold (`float`, defaults to 0.09):
            Epsilon of "typical": a draft token of more probability is always kept. 0 to 1.
        posterior_alpha (`float`, defaults to 0.3):
            Delta of "typical": so is one of more probability than this times exp(-entropy). At least 0.
        synthetic_acceptance_rates (`tuple[float, ...]`, *optional*):
            For "synthetic": entry i is the chance that the first i + 1 draft tokens are accepted. Never increasing.
        synthetic_acceptance_length (`float`, *optional*):
            For "synthetic", instead of the rates: tokens committed per verification, at least 1.
        options (`Any`):
            The method's own options, an instance of its `options_class` ([`PendingOptions`] while `method` is `None`).

    Raises:
        SpecConfigError: A setting is unknown, has the wrong type, is out of range or contradicts another.
    """

    method: str | None = _setting(
        None,
        "Name of the method. Left out, it is read from the checkpoint of `model`. `auto` finds a drafter for the "
        "target. `suffix+eagle3` combines one that retrieves (`suffix`, `ngram`) with one that drafts with weights.",
    )
    model: str | None = _setting(
        None,
        "Repo id or local folder of the draft model or draft head.",
        normalize=_plain_path,
        describes_model=True,
    )
    num_speculative_tokens: int | Literal["auto"] | None = _setting(
        None,
        "Speculation length k: draft tokens of a chain per cycle, from 1 to 1024. `auto`: in each cycle the length "
        "that pays, down to plain decoding. Left out, the method's default.",
        minimum=1,
        maximum=MOST_DRAFT_TOKENS,
    )
    num_speculative_tokens_per_batch_size: tuple | None = _setting(
        None,
        "Most draft tokens by the number of active rows: `[[1, 8, 5], [9, 32, 2], [33, 128, 0]]` (first, last, k; 0: "
        "none) or `{1: 5, 9: 2, 33: 0}` (from so many rows on). The last k holds for all larger batches. Of trees, "
        "the depth.",
        normalize=_lengths_by_batch_size,
    )
    speculative_token_tree: tuple | None = _setting(
        None,
        "Static draft tree: paths of child ranks `[(0,), (1,), (0, 0)]`, parents `[0, 0, 1]` (0: the anchor), "
        "SGLang's `{'num_steps': 3, 'topk': 4, 'num_draft_tokens': 16}`, text of one of these, or the name of a "
        f"published tree. For the methods that draft trees: {', '.join(TREE_METHODS)}.",
        normalize=_token_tree,
    )
    draft_tensor_parallel_size: int = _setting(
        1,
        "Processes that hold parts of the draft model: 1, every process has all of it, or those of a loaded draft "
        "model that is passed as `assistant`.",
        minimum=1,
    )
    quantization: Literal["bitsandbytes_4bit", "bitsandbytes_fp4", "bitsandbytes_8bit"] | None = _setting(
        None,
        "Quantise the draft model on loading: `bitsandbytes_4bit` (NF4; also `bitsandbytes`, `4bit`, `nf4`), "
        "`bitsandbytes_fp4` (`fp4`) or `bitsandbytes_8bit` (`8bit`, `int8`).",
        aliases=_QUANTIZATION_ALIASES,
        describes_model=True,
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] | None = _setting(
        None,
        "Data type of the draft model; `auto` takes the checkpoint's. Left out, the target's.",
        normalize=_torch_name,
        describes_model=True,
    )
    device: str | None = _setting(
        None,
        "Device of the draft model, e.g. `cuda:1`. Left out, the target's.",
        normalize=_torch_name,
        describes_model=True,
    )
    max_model_len: int | None = _setting(
        None,
        "Longest sequence in tokens that is drafted for; a longer row goes on without drafts. "
        "Left out, the limits of the models.",
        minimum=1,
    )
    revision: str | None = _setting(
        None,
        "Branch, tag or commit of the draft model's repository.",
        describes_model=True,
    )
    code_revision: str | None = _setting(
        None,
        "Branch, tag or commit of the draft model's remote code, if that is kept in another repository.",
        describes_model=True,
    )
    subfolder: str | None = _setting(
        None,
        "Folder inside the repository that holds the draft model.",
        describes_model=True,
    )
    cache_dir: str | None = _setting(
        None,
        "Folder where downloads are kept. Left out, the Hub's cache.",
        normalize=_plain_path,
        describes_model=True,
    )
    local_files_only: bool = _setting(
        False,
        "Take the draft model from the cache, and ask nothing of the Hub.",
        describes_model=True,
    )
    token: str | bool | None = _setting(
        None,
        "Access token for private and gated repositories. Left out, that of the login. It is never saved.",
        describes_model=True,
        is_secret=True,
    )
    trust_remote_code: bool = _setting(
        False,
        "Whether code from the draft model's repository may run.",
        describes_model=True,
    )
    trusted_owners: tuple | None = _setting(
        None,
        "Owners on the Hub whose drafters may be taken where no `model` is named, e.g. `['google', 'Qwen']`. Left "
        "out, all, as far as the environment variable HF_SPECDEC_TRUSTED_OWNERS allows them.",
        normalize=_owners,
        describes_model=True,
    )
    enforce_eager: bool = _setting(
        False,
        "Launch every forward from Python, and capture nothing in CUDA graphs. Nothing is captured on a CPU.",
    )
    control_profile: str | None = _setting(
        None,
        "For `num_speculative_tokens='auto'`: file of `hf-specdec calibrate` to begin with. Left out, that of the "
        "cache folder, if there is one.",
        normalize=_plain_path,
    )
    disable_by_batch_size: int | None = _setting(
        None,
        "Generate without drafts where the batch has more rows than this.",
        minimum=1,
    )
    disable_padded_drafter_batch: bool = _setting(
        False,
        "Accepted for configurations of serving engines. Rows are never padded to each other here, so it changes "
        "nothing.",
    )
    rejection_sample_method: Literal["standard", "block", "typical", "synthetic"] = _setting(
        "standard",
        "Acceptance rule. `standard` and `block` keep the target's distribution exactly; `block` judges a sampled "
        "chain as a whole and accepts at least as much. `typical` (Medusa's) changes the distribution; `synthetic` "
        "accepts at given rates whatever the tokens are, for timing: its text is meaningless.",
    )
    posterior_threshold: float = _setting(
        0.09,
        "Epsilon of `typical`: a draft token of more probability is always kept. From 0 to 1.",
        minimum=0,
        maximum=1,
    )
    posterior_alpha: float = _setting(
        0.3,
        "Delta of `typical`: so is a draft token of more probability than this times exp(-entropy).",
        minimum=0,
    )
    synthetic_acceptance_rates: tuple | None = _setting(
        None,
        "For `synthetic`: the chance that the first 1, 2, ... draft tokens are accepted, e.g. `[0.8, 0.6, 0.5]`. "
        "Never increasing; 0 behind the last one.",
        normalize=_acceptance_rates,
    )
    synthetic_acceptance_length: float | None = _setting(
        None,
        "For `synthetic`, instead of the rates: tokens committed per verification, at least 1.",
        minimum=1,
        maximum=MOST_DRAFT_TOKENS + 1,
    )
    options: Any = field(default=PendingOptions(), metadata={"help": "The options of the method, as an object."})

    def __init__(self, /, method: str | None = None, model: str | os.PathLike | None = None, **settings):
        with _reading_settings(settings):
            flat = _expand({"method": method, "model": model, **settings})
            flat.update(_without_placeholder(flat["method"], flat["model"]))
            _check_is_named(flat)
            hints = _type_hints(SpeculativeConfig)
            for setting in _common_fields():
                value = _checked(setting, flat.pop(setting.name, None), hints[setting.name])
                object.__setattr__(self, setting.name, value)
            self._check_combinations()
            object.__setattr__(self, "options", _build_options(self.method, flat))

    def __reduce__(self):
        # Not even a process of the same user is handed the token.
        return SpeculativeConfig.from_dict, (self.to_dict(),)

    def __copy__(self) -> SpeculativeConfig:
        return self

    def __deepcopy__(self, memo: dict) -> SpeculativeConfig:
        return self

    @classmethod
    def resolve(cls, /, value: Any = None, *, target_config: Any = None, **overrides) -> SpeculativeConfig:
        """The configuration that a user's `value` means.

        Args:
            value (`SpeculativeConfig`, `dict`, `str` or `os.PathLike`, *optional*):
                A configuration; a dict of flat settings, or the same as JSON text; the name of a method; a folder or
                file written by [`~SpeculativeConfig.save_pretrained`]; or the repo id or folder of a draft model.
            target_config (`PretrainedConfig`, *optional*):
                The target's configuration. Given, the settings are checked against it.
            overrides:
                Flat settings that take precedence over those of `value`; `None` means not given.

        Returns:
            `SpeculativeConfig` with a method. Where none was named it is read from the checkpoint of `model`, with the
            other settings that were saved there; "auto" stays until there is a target, see [`load_speculator`].

        Raises:
            SpecConfigError: `value` cannot be understood, or a setting is wrong.
        """
        overrides = {key: item for key, item in overrides.items() if item is not None}
        with _reading_settings(value, overrides):
            if isinstance(value, cls) and not overrides:
                config = value
            else:
                config = cls(**_merged(_read_settings(value), overrides))
            if config.method is None:
                from .hub.published import with_saved_settings

                config = with_saved_settings(config)
            if config.method is None:
                from .hub.detect import detect_method
                from .hub.inspect import method_for_target

                method = detect_method(config, target_config=target_config)
                config = config.replace(method=method_for_target(config, method, target_config))
            if target_config is not None:
                config.check_against_target(_context_length(target_config))
            return config

    @property
    def fixed_length(self) -> int | None:
        """`num_speculative_tokens` where it is a number; `None` where it is left out or "auto"."""
        return None if self.num_speculative_tokens == AUTO else self.num_speculative_tokens

    def most_tokens(self, num_rows: int) -> int | None:
        """What `num_speculative_tokens_per_batch_size` says for so many active rows; `None` without it."""
        lengths = self.num_speculative_tokens_per_batch_size
        return None if lengths is None else next(k for first, k in reversed(lengths) if first <= num_rows)

    def replace(self, /, **changes) -> SpeculativeConfig:
        """A copy with some settings changed.

        When the method changes, the options of the old one are left behind, and so are the settings of the old
        acceptance rule when that changes.
        """
        base, changes = self.to_dict(secrets=True), _expand(changes)
        new_method = _canonical_method(changes.get("method", self.method))
        if self.method not in (None, AUTO) and new_method != self.method:
            common = {setting.name for setting in _common_fields()}
            base = {key: value for key, value in base.items() if key in common}
        new_rule = changes.get("rejection_sample_method", self.rejection_sample_method)
        base = {key: value for key, value in base.items() if _RULE_OF_SETTING.get(key, new_rule) == new_rule}
        return type(self)(**_merged(base, changes))

    def for_method(self, method: str, **defaults) -> SpeculativeConfig:
        """The settings of a configuration that named no method, as far as this one has them.

        Args:
            method (`str`): The method.
            defaults: Flat settings that hold where this configuration says nothing, as far as the method has them.
        """
        known = {name for item in _option_fields(_options_class(method)) for name in (item.name, _key(item))}
        known |= {setting.name for setting in _common_fields() if _concerns(setting, method)}
        settings = {key: value for key, value in self.to_dict(secrets=True).items() if key in known}
        defaults = {key: value for key, value in defaults.items() if key in known}
        return type(self)(**_merged(defaults, {**settings, "method": method}))

    def check_against_target(self, max_position_embeddings: int | None = None, num_heads: int | None = None) -> None:
        """Checks the settings against the numbers of loaded models.

        Args:
            max_position_embeddings (`int`, *optional*): Longest context of the target in tokens; `None` if unlimited.
            num_heads (`int`, *optional*): Draft heads of the checkpoint, for methods that draft one token a head.

        Raises:
            SpecConfigError: A setting does not fit; the message has both numbers.
        """
        k, longest = self.fixed_length, self.max_model_len
        if num_heads is not None and k is not None and k > num_heads:
            raise SpecConfigError(
                f"`num_speculative_tokens`={k} is more than the {num_heads} heads of the {self.method} checkpoint. "
                f"Use at most {num_heads}, or leave it out."
            )
        if max_position_embeddings is None:
            return
        if k is not None and k >= max_position_embeddings:
            raise SpecConfigError(
                f"`num_speculative_tokens`={k} does not fit the target's context of {max_position_embeddings} tokens. "
                f"Use at most {max_position_embeddings - 1}."
            )
        if longest is not None and longest > max_position_embeddings:
            raise SpecConfigError(
                f"`max_model_len`={longest} is longer than the target's context of {max_position_embeddings} tokens. "
                f"Use at most {max_position_embeddings}, or leave it out."
            )

    def to_dict(self, *, defaults: bool = False, secrets: bool = False) -> dict[str, Any]:
        """The flat settings as plain Python and JSON types. `from_dict` gives back an equal configuration.

        Args:
            defaults (`bool`, defaults to `False`): Also settings that have their default value.
            secrets (`bool`, defaults to `False`): Also `token`, which must not get into files and logs.
        """
        return {
            key: _thawed(value)
            for key, value, default in self._flat_items(secrets)
            if defaults or default is MISSING or value != default
        }

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> SpeculativeConfig:
        """The configuration of a dict of flat settings."""
        if not isinstance(settings, Mapping):
            raise SpecConfigError(f"from_dict() needs a dict of settings, got {type(settings).__name__}.")
        with _reading_settings(settings):
            return cls(**_merged(settings, {}))

    def save_pretrained(self, save_directory: str | os.PathLike) -> Path:
        """Writes `speculation_config.json` to a folder, which is made if needed, and returns the file's path."""
        path = Path(save_directory) / CONFIG_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n", encoding="utf-8")
        return path

    @classmethod
    def from_pretrained(cls, path_or_repo: str | os.PathLike, *, revision: str | None = None) -> SpeculativeConfig:
        """Reads what [`~SpeculativeConfig.save_pretrained`] wrote.

        Of settings on the Hub and of those beside a checkpoint only the shape of drafts is taken.

        Args:
            path_or_repo (`str` or `os.PathLike`): A folder, the file itself, or the id of a repository on the Hub.
            revision (`str`, *optional*): Branch, tag or commit of the repository.
        """
        with _reading_settings(path_or_repo):
            path, is_published = Path(path_or_repo), False
            if not path.is_file():
                from transformers.utils.hub import cached_file

                # Beside a checkpoint and on the Hub they are those of whoever made it.
                is_published = not path.is_dir() or (path / "config.json").is_file()
                try:
                    path = Path(cached_file(str(path_or_repo), CONFIG_NAME, revision=revision))
                except OSError as error:
                    raise SpecConfigError(
                        f"No {CONFIG_NAME} found in {shown(path_or_repo)}: {error} Pass a folder written by "
                        "save_pretrained(), or name the method."
                    ) from error
            settings = _read_json_file(path)
            if is_published:
                from .hub.published import published_config

                return published_config(settings, f"{CONFIG_NAME} of '{path_or_repo}'")
            return cls.from_dict(settings)

    def compute_hash(self) -> str:
        """A name for this configuration in caches and logs: 16 hexadecimal digits.

        Equal configurations have equal names, in every process and whichever way they were spelled.
        """
        text = json.dumps(self.to_dict(defaults=True), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_vllm(self) -> dict[str, Any]:
        """The same settings for vLLM's `--speculative-config`.

        A setting that vLLM has no key for is left out with a warning; it changes speed, not text. k is always named,
        because vLLM has no default for most methods.

        Raises:
            SpecConfigError: The method is unknown to vLLM or not yet resolved, or vLLM would not find the draft model.
        """
        from .candidate_generators import resolve_candidate_generator

        if self.method is None:
            raise SpecConfigError(
                f"The method of `model`={shown(self.model)} has not been read yet. Name it, or call "
                "SpeculativeConfig.resolve() first."
            )
        if self.method not in _VLLM_METHODS:
            raise SpecConfigError(f"vLLM has no method {shown(self.method)}. It knows: {', '.join(_VLLM_METHODS)}.")
        if self.rejection_sample_method == "typical":
            raise SpecConfigError("vLLM has no rejection_sample_method='typical'. Use 'standard' or 'block'.")
        if self.subfolder is not None:
            raise SpecConfigError(
                f"vLLM cannot load a draft model from `subfolder`={shown(self.subfolder)} of a repository. "
                "Save it to a folder of its own and name that as `model`."
            )
        settings = self.to_dict()
        if self.num_speculative_tokens == AUTO:
            logger.warning("vLLM does not adapt `num_speculative_tokens`; the method's default is given.")
            del settings["num_speculative_tokens"]
        settings.setdefault(
            "num_speculative_tokens", resolve_candidate_generator(self.method).default_length(self.options)
        )
        lengths = self.num_speculative_tokens_per_batch_size
        if lengths is not None:
            # vLLM wants ranges; the last one holds for everything above it there, too.
            ends = [first - 1 for first, _ in lengths[1:]] + [lengths[-1][0]]
            settings["num_speculative_tokens_per_batch_size"] = [[a, b, k] for (a, k), b in zip(lengths, ends)]
            settings["num_speculative_tokens"] = max(settings["num_speculative_tokens"], max(k for _, k in lengths))
        if self.quantization == "bitsandbytes_4bit":
            settings["quantization"] = "bitsandbytes"
        unknown = settings.keys() - _VLLM_KEYS
        if self.quantization in ("bitsandbytes_fp4", "bitsandbytes_8bit"):
            unknown |= {"quantization"}
        if unknown:
            logger.warning(f"vLLM has no counterpart of these settings, they are left out: {_listed(unknown)}.")
        return {key: value for key, value in settings.items() if key not in unknown}

    def __repr__(self) -> str:
        return f"SpeculativeConfig({', '.join(f'{key}={value!r}' for key, value in self.to_dict().items())})"

    def _flat_items(self, secrets: bool = False) -> Iterator[tuple[str, Any, Any]]:
        """Flat name, value and default of every setting; pending options have no default."""
        for setting in _common_fields():
            if setting.metadata["is_secret"] and not secrets:
                continue
            yield setting.name, getattr(self, setting.name), setting.default
        if isinstance(self.options, PendingOptions):
            yield from ((key, value, MISSING) for key, value in self.options.values)
        else:
            for option in _option_fields(self.options):
                yield _key(option), getattr(self.options, option.name), _default(option)

    def _check_combinations(self) -> None:
        self._check_acceptance_rule()
        self._check_model_settings()
        self._check_token_tree()
        self._check_lengths()

    def _check_acceptance_rule(self) -> None:
        rule = self.rejection_sample_method
        for setting in _common_fields():
            owner = _RULE_OF_SETTING.get(setting.name)
            value = getattr(self, setting.name)
            if owner not in (None, rule) and value != setting.default:
                raise SpecConfigError(
                    f"`{setting.name}`={shown(value)} belongs to rejection_sample_method='{owner}', got '{rule}'. "
                    "Leave it out, or change the rule."
                )
        given = [self.synthetic_acceptance_rates is not None, self.synthetic_acceptance_length is not None]
        if rule == "synthetic" and sum(given) != 1:
            raise SpecConfigError(
                "rejection_sample_method='synthetic' needs either `synthetic_acceptance_rates` or "
                f"`synthetic_acceptance_length`, got {'both' if all(given) else 'neither'}."
            )

    def _check_model_settings(self) -> None:
        if self.method == AUTO:
            self.check_can_be_found()
        if self.method not in METHODS_WITHOUT_MODEL:
            return
        for setting in _common_fields():
            value = getattr(self, setting.name)
            if setting.metadata["describes_model"] and value != setting.default:
                given = "" if setting.metadata["is_secret"] else f"={shown(value)}"
                raise SpecConfigError(
                    f"`{setting.name}`{given} is about a draft model, and method='{self.method}' drafts without "
                    f"one. Leave out `{setting.name}`, or choose a method that has a draft model."
                )

    @property
    def is_to_be_found(self) -> bool:
        """Whether a drafter has to be found: the method has weights, and no model is named for it."""
        from .candidate_generators import KNOWN_METHODS, parts_of

        if self.method in (None, AUTO) or self.model is not None:
            return self.method == AUTO
        drafting = parts_of(self.method)[-1]
        # Layers of the target itself lie where the call says.
        is_placed = drafting == "mtp" and (self.revision or self.subfolder)
        return drafting in KNOWN_METHODS and drafting not in METHODS_WITHOUT_MODEL and not is_placed

    def check_can_be_found(self) -> None:
        """A drafter that is yet to be found has no place that could be named, and nobody knows its code.

        Raises:
            SpecConfigError: The settings speak of one.
        """
        for name in ("revision", "code_revision", "subfolder", "trust_remote_code"):
            if getattr(self, name) not in (None, False):
                raise SpecConfigError(
                    f"`{name}`={shown(getattr(self, name))} is about a named `model`, and method='{self.method}' "
                    f"finds one. Name the `model`, or leave out `{name}`."
                )

    def _check_lengths(self) -> None:
        if self.control_profile is not None and self.num_speculative_tokens != AUTO:
            raise SpecConfigError(
                f"`control_profile`={shown(self.control_profile)} is for num_speculative_tokens='auto', got "
                f"{shown(self.num_speculative_tokens)}. Leave it out, or set 'auto'."
            )
        k, lengths = self.fixed_length, self.num_speculative_tokens_per_batch_size
        if lengths is None or k is None or self.speculative_token_tree is not None:
            return
        longest = max(length for _, length in lengths)
        if longest > k:
            raise SpecConfigError(
                f"`num_speculative_tokens_per_batch_size` has k={longest}, more than `num_speculative_tokens`={k}, "
                "which is the most. Raise or leave out `num_speculative_tokens`."
            )

    def _check_token_tree(self) -> None:
        from .candidate_generators import KNOWN_METHODS, parts_of

        tree, k = self.speculative_token_tree, self.fixed_length
        if tree is None:
            return
        # Of a combination the one with weights.
        method = None if self.method is None else parts_of(self.method)[-1]
        if method in KNOWN_METHODS and method not in TREE_METHODS:
            raise SpecConfigError(
                f"`speculative_token_tree` belongs to the methods that draft trees ({', '.join(TREE_METHODS)}), got "
                f"method='{self.method}'. Leave it out and set `num_speculative_tokens`."
            )
        if k is not None and k != len(tree):
            raise SpecConfigError(
                f"`num_speculative_tokens`={k} and `speculative_token_tree` with {len(tree)} nodes contradict each "
                "other. Leave out `num_speculative_tokens`, or give the tree's number of nodes."
            )


def describe_settings(method: str | None = None) -> list[Setting]:
    """The documented settings of a method's own options, or without `method` those that all methods share."""
    described = _common_fields() if method is None else _option_fields(_options_class(method))
    return [
        Setting(_key(item), _type_name(item), repr(_default(item)), item.metadata.get("help", ""))
        for item in described
    ]


def option_fields(method: str) -> list[Field]:
    """The fields of a method's own options; none of a method that does not exist."""
    try:
        return _option_fields(_options_class(method))
    except SpecDecError:
        return []


# ---------------------------------------------------------------------------------------- what the user's value means


def _read_settings(value: Any) -> dict[str, Any]:
    """The flat settings of anything that `SpeculativeConfig.resolve` takes."""
    if value is None:
        return {}
    if isinstance(value, SpeculativeConfig):
        return value.to_dict(secrets=True)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, os.PathLike):
        return _read_path(os.fspath(value))
    if isinstance(value, str):
        return _read_text(value.strip())
    raise SpecConfigError(
        "Speculation is set by a SpeculativeConfig, a dict, JSON text, the name of a method, a repo id or a path, got "
        f"{type(value).__name__}. A loaded draft model or speculator goes to `assistant=`."
    )


@contextmanager
def _reading_settings(*given: Any) -> Iterator[None]:
    """Any failure to make something of what the user has given is an error of this package, without his secrets."""
    try:
        yield
    except SpecDecError as error:
        for secret in _secrets_in(given):
            error.args = tuple(item.replace(secret, HIDDEN) if isinstance(item, str) else item for item in error.args)
        raise
    except Exception as error:
        what = " and ".join(
            shown(item) for item in given if item is not None and not (type(item) is dict and not item)
        )
        raise SpecConfigError(
            f"These settings cannot be read: {what} ({shown(error)}). Give a dict of plain texts, numbers, lists and "
            "dicts, JSON text, or the name of a method or of a draft model."
        ) from error


def _secrets_in(value: Any, levels: int = 4) -> Iterator[str]:
    if isinstance(value, (list, tuple)) and levels:
        for item in value:
            yield from _secrets_in(item, levels - 1)
    elif isinstance(value, dict) and levels:
        for key, item in dict.items(value):
            if is_secret_key(key) and isinstance(item, str) and len(item) > 3:
                yield str.__str__(item)
            else:
                yield from _secrets_in(item, levels - 1)


def _plain(key: str, value: Any) -> Any:
    """A value of Python's own types: what arrays, tensors, mappings and subclasses stand for. Other objects stay."""
    num_left = _MOST_VALUES

    def convert(value: Any, level: int) -> Any:
        nonlocal num_left
        num_left -= 1
        if num_left < 0 or level > _MOST_LEVELS:
            what = f"more than {_MOST_VALUES} values" if num_left < 0 else f"more than {_MOST_LEVELS} levels of lists"
            raise SpecConfigError(f"`{key}` has {what}. It is not read.")
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, numbers.Integral):
            return int(value)
        if hasattr(value, "tolist") and hasattr(value, "shape"):
            num_left -= math.prod(value.shape)
            return convert(value.tolist() if num_left >= 0 else None, level)
        if isinstance(value, Mapping):
            return {convert(name, level + 1): convert(item, level + 1) for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            items = [convert(item, level + 1) for item in value]
            return items if isinstance(value, list) else tuple(items)
        return value

    try:
        return convert(value, 0)
    except SpecDecError:
        raise
    except Exception as error:
        raise SpecConfigError(
            f"`{key}` cannot be read from {shown(value)} ({type(value).__name__}): {shown(error)}. Give a plain text, "
            "number, list or dict."
        ) from error


def _check_is_named(flat: Mapping[str, Any]) -> None:
    if flat["method"] is not None or flat["model"] is not None:
        return
    for key in flat.keys() - {"method", "model"}:
        if key in _OTHER_NAMES:
            raise SpecConfigError(_called_otherwise(key))
        close = difflib.get_close_matches(key, ("method", "model"), n=1) if len(key) < 100 else []
        if close:
            raise SpecConfigError(f"Unknown setting `{key}`. Did you mean `{close[0]}`?")
    raise SpecConfigError(
        "Speculation needs a method or a model, got neither. Name a `method` such as 'ngram', or a draft `model` from "
        "whose checkpoint the method is read."
    )


def _read_text(text: str) -> dict[str, Any]:
    from .candidate_generators import is_method_name

    if text.startswith("{"):
        return _read_json(text, "the JSON text")
    if not text:
        raise SpecConfigError("Speculation needs a method or a model, got an empty string.")
    if text == AUTO or is_method_name(text):
        return {"method": text}
    if "/" not in text and not os.path.exists(text):
        close = difflib.get_close_matches(text.lower(), _method_names(), n=1, cutoff=0.8)
        if close:
            raise SpecConfigError(
                f"{shown(text)} is neither a method nor a local path. Did you mean '{close[0]}'? If it is a repo id, "
                "pass it as `model`."
            )
    return _read_path(text)


def _read_path(path: str) -> dict[str, Any]:
    """The settings in a file, or a folder or repository as the model; what was saved in it is read with its method."""
    return _read_json_file(Path(path)) if path.endswith(".json") else {"model": path}


def _read_json_file(path: Path) -> dict[str, Any]:
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise SpecConfigError(
            f"The settings in {shown(str(path))} cannot be read: {error}. Name a JSON file of settings."
        ) from error
    return _read_json(text, shown(str(path)))


def _read_json(text: str, source: str) -> dict[str, Any]:
    try:
        settings = parse_json(text)
    except ValueError as error:
        raise SpecConfigError(
            f"{source[0].upper()}{source[1:]} is not valid JSON: {error}. Names and texts stand in double quotes, and "
            "true, false and null are lower case."
        ) from error
    if not isinstance(settings, dict):
        raise SpecConfigError(
            f"{source[0].upper()}{source[1:]} must hold an object of settings, got {shown(settings)}."
        )
    return settings


def _without_placeholder(method: Any, model: Any) -> dict[str, Any]:
    """Method and model, where the model may be the method's own name ("ngram", "[ngram]") for lack of a real one."""
    method = _canonical_method(method)
    if method == AUTO and model is not None:
        method = None
    name = model.strip("[]") if isinstance(model, str) else None
    if name in METHODS_WITHOUT_MODEL and method in (None, name):
        return {"method": name, "model": None}
    return {"method": method, "model": model}


def _context_length(target_config: Any) -> int | None:
    return getattr(target_config.get_text_config(), "max_position_embeddings", None)


# ------------------------------------------------------------------------------------------------ flat names and types


def _common_fields() -> list[Field]:
    return [item for item in fields(SpeculativeConfig) if item.name != "options"]


def _concerns(setting: Field, method: str) -> bool:
    """Whether a setting of all methods can be given together with this one."""
    if method in METHODS_WITHOUT_MODEL and setting.metadata["describes_model"]:
        return False
    from .candidate_generators import KNOWN_METHODS, parts_of

    last = parts_of(method)[-1]
    return setting.name != "speculative_token_tree" or last in TREE_METHODS or last not in KNOWN_METHODS


def _option_fields(options: Any) -> list[Field]:
    return [item for item in fields(options) if item.init]


def _options_class(method: str) -> type:
    from .candidate_generators import resolve_candidate_generator

    return resolve_candidate_generator(method).options_class


def _method_names() -> list[str]:
    from .candidate_generators import KNOWN_METHODS, METHOD_ALIASES, available_methods

    return [*dict.fromkeys([*KNOWN_METHODS, *available_methods(), *METHOD_ALIASES]), AUTO]


def _key(item: Field) -> str:
    return item.metadata.get("key", item.name)


def _default(item: Field) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()


def _type_name(item: Field) -> str:
    if isinstance(item.type, str):
        return item.type
    return item.type.__name__ if type(item.type) is type else str(item.type).replace("typing.", "")


def _expand(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Flat settings with the content of `options` (an options object or a mapping) among them."""
    flat = dict(settings.items())
    options = flat.pop("options", None)
    if options is None:
        options = {}
    if isinstance(options, PendingOptions):
        options = dict(options.values)
    elif hasattr(options, "__dataclass_fields__"):
        options = {_key(item): getattr(options, item.name) for item in _option_fields(options)}
    elif not isinstance(options, Mapping):
        raise SpecConfigError(f"`options` must be a dict or the options object of a method, got {shown(options)}.")
    unnamed = next((key for key in (*flat, *options) if not isinstance(key, str)), None)
    if unnamed is not None:
        raise SpecConfigError(f"The names of settings must be strings, got {shown(unnamed)}.")
    twice = options.keys() & flat.keys()
    if twice:
        raise SpecConfigError(f"These settings are given twice, beside and inside `options`: {_listed(twice)}.")
    flat.update(options)
    return {str.__str__(key): _plain(key[:100], value) for key, value in flat.items()}


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes` on top, whichever of its two names an option is given by."""
    base, changes = _expand(base), _expand(changes)
    method = _canonical_method(changes.get("method", base.get("method")))
    if method in (None, AUTO):
        return {**base, **changes}
    return {**_by_key(method, base), **_by_key(method, changes)}


def _by_key(method: str, flat: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings with the options under their flat names, not under the names of the dataclass fields."""
    keys = {item.name: _key(item) for item in _option_fields(_options_class(method))}
    named = {}
    for name, value in flat.items():
        key = keys.get(name, name)
        if key in named:
            both = " and ".join(f"`{other}`" for other in flat if keys.get(other, other) == key)
            raise SpecConfigError(f"{both} are two names of one setting. Keep one.")
        named[key] = value
    return named


def _build_options(method: str | None, flat: Mapping[str, Any]) -> Any:
    """The options object of a method, from all settings that are not common ones."""
    if method in (None, AUTO):
        return _pending_options(flat)
    options_class = _options_class(method)
    by_key = {_key(item): item for item in _option_fields(options_class)}
    hints = _type_hints(options_class)
    values = {}
    for key, value in _by_key(method, flat).items():
        if key not in by_key:
            raise SpecConfigError(_unknown_setting(method, key, by_key))
        item = by_key[key]
        values[item.name] = _checked(item, value, hints[item.name])
    try:
        return options_class(**values)
    except SpecConfigError as error:
        raise SpecConfigError(_with_flat_names(str(error), by_key.values())) from error


def _with_flat_names(message: str, options: Iterable[Field]) -> str:
    """A message of an options class about its fields (in backticks), in the names that the user writes."""
    for item in options:
        message = message.replace(f"`{item.name}`", f"`{_key(item)}`")
    return message


def _pending_options(flat: Mapping[str, Any]) -> PendingOptions:
    if flat:
        owners = _option_owners()
        for key, value in flat.items():
            if key not in owners:
                raise SpecConfigError(_unknown_setting(None, key, owners))
            if not _is_json_value(value):
                raise SpecConfigError(
                    f"`{key}` must be a text, a finite number or a list of them, got {shown(value)} "
                    f"({type(value).__name__})."
                )
    return PendingOptions(tuple(sorted((key, _frozen(value)) for key, value in flat.items())))


def _called_otherwise(key: str) -> str:
    name = _OTHER_NAMES[key]
    argument = f" (an argument of generate(): `spec_{name}`)" if name in ("method", "model") else ""
    owners = [f"'{owner}'" for owner in _option_owners().get(name, [])]
    whose = f", a setting of method {' and '.join(owners)}" if owners else ""
    return f"`{key}` is called `{name}` here{argument}{whose}. Rename it."


def _unknown_setting(method: str | None, key: str, options: Iterable[str]) -> str:
    owners = _option_owners().get(key, [])
    whose = f"method='{method}'" if method else "Speculation"
    if owners:
        belongs = " and ".join(f"'{owner}'" for owner in owners)
        return f"`{key}` belongs to method {belongs}, got {whose}. Leave it out, or change the method."
    if key in _OTHER_NAMES:
        return _called_otherwise(key)
    common = [item.name for item in _common_fields()]
    close = difflib.get_close_matches(key[:100], [*common, *options], n=1)
    hint = f" Did you mean '{close[0]}'?" if close else ""
    own = f" Its own options are: {', '.join(options)}." if method and options else ""
    return f"{whose} has no setting {shown(key)}.{hint}{own} The settings of all methods are: {', '.join(common)}."


def _option_owners() -> dict[str, list[str]]:
    """Which methods have an option of this name; for messages, because it imports every method."""
    from .candidate_generators import available_methods

    owners: dict[str, list[str]] = {}
    for method in available_methods():
        try:
            options = _option_fields(_options_class(method))
        except SpecDecError:
            continue
        for name in sorted({name for item in options for name in (item.name, _key(item))}):
            owners.setdefault(name, []).append(method)
    return owners


def _checked(item: Field, value: Any, hint: Any) -> Any:
    """The value in the type of the field, or an error; `None` stands for the default where it is no value itself."""
    kinds = _kinds(hint)
    if value is None and type(None) not in kinds:
        return _default(item)
    if normalize := item.metadata.get("normalize"):
        value = normalize(value)
    is_secret, aliases = item.metadata.get("is_secret"), item.metadata.get("aliases", {})
    if is_secret and not isinstance(value, kinds):
        raise SpecConfigError(f"`{_key(item)}` must be a string, True, False or None, got a {type(value).__name__}.")
    if isinstance(value, str) and len(value) > _MOST_CHARACTERS:
        raise SpecConfigError(f"`{_key(item)}` must have at most {_MOST_CHARACTERS} characters, got {len(value)}.")
    if is_access_token(value) and not is_secret:
        raise SpecConfigError(f"`{_key(item)}` has the form of an access token. Give that as `token`.")
    value = _as_one_of(kinds, _key(item), aliases.get(value, value) if isinstance(value, str) else value, aliases)
    if _is_number(value):
        minimum, maximum = item.metadata.get("minimum"), item.metadata.get("maximum")
        maximum = MOST_INTEGER if maximum is None and isinstance(value, int) else maximum
        if minimum is not None and value < minimum:
            raise SpecConfigError(f"`{_key(item)}` must be at least {minimum}, got {shown(value)}.")
        if maximum is not None and value > maximum:
            raise SpecConfigError(f"`{_key(item)}` must be at most {maximum}, got {shown(value)}.")
    return value


@cache
def _type_hints(dataclass_type: type) -> dict[str, Any]:
    return get_type_hints(dataclass_type)


def _kinds(hint: Any) -> tuple:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _as_one_of(kinds: tuple, name: str, value: Any, aliases: Iterable[str] = ()) -> Any:
    for kind in kinds:
        if get_origin(kind) is Literal:
            if any(type(value) is type(choice) and value == choice for choice in get_args(kind)):
                return value
        elif kind is bool or kind is str:
            if isinstance(value, kind):
                return value
        elif kind is type(None):
            if value is None:
                return None
        elif kind is int:
            if _is_int(value):
                return int(value)
        elif kind is float:
            if _is_number(value) and _is_finite(value):
                return float(value) + 0.0  # -0.0 equals 0.0 and must not be another configuration in a hash
        elif kind is tuple or get_origin(kind) is tuple:
            if isinstance(value, (list, tuple)):
                return _frozen(value)
        else:
            return value
    raise SpecConfigError(_wrong_type(kinds, name, value, aliases))


def _wrong_type(kinds: tuple, name: str, value: Any, aliases: Iterable[str]) -> str:
    choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    plain = [_KIND_NAMES.get(kind, "a list") for kind in kinds if get_origin(kind) is not Literal]
    *others, last = [*map(repr, choices), *plain]
    expected = f"{', '.join(others)} or {last}" if others else last
    expected += f" (short: {', '.join(map(repr, aliases))})" if aliases else ""
    message = f"`{name}` must be {expected}, got {shown(value)} ({type(value).__name__})."
    close = difflib.get_close_matches(value[:100], choices, n=1) if isinstance(value, str) else []
    if close:
        return f"{message} Did you mean '{close[0]}'?"
    if isinstance(value, str) and {int, float, bool} & set(kinds) and _is_json_number(value):
        return f"{message} Write it without quotes."
    return message


def _is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_finite(value: numbers.Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _is_json_value(value: Any) -> bool:
    """Whether it is what options may be, whichever method has them."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_json_value, value))
    if isinstance(value, str):
        return len(value) <= _MOST_CHARACTERS
    return value is None or (isinstance(value, (int, float)) and _is_finite(value))


def _is_json_number(text: str) -> bool:
    """Whether a string holds what JSON writes without quotes: a number, true or false."""
    try:
        return isinstance(parse_json(text.lower()), (int, float))
    except ValueError:
        return False


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


def _thawed(value: Any) -> Any:
    return list(map(_thawed, value)) if isinstance(value, tuple) else value


def _listed(names: Iterable[str]) -> str:
    return ", ".join(name[:100] for name in sorted(names))
