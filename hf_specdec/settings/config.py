"""The settings of speculative decoding: one validated object, spelled as in serving engines.

`SpeculativeConfig` holds what every method understands; `options` holds what only the chosen method understands, as
the frozen dataclass that is declared beside the method. From outside both are one flat set of names, those of vLLM's
`--speculative-config` where vLLM has the setting.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..environment import is_switched_on
from ..errors import SpecConfigError, shown
from ..method import NO_DRAFTS, drafting_method, methods, takes_model
from ..reading import reading_settings
from ..threads import cached_property
from .checks import MOST_DRAFT_TOKENS, hints_of, setting, thawed
from .conflicts import check_combinations
from .names import (
    AUTO,
    FIXED,
    PendingOptions,
    build_options,
    canonical_method,
    check_is_named,
    default_of,
    flattened,
    key_of,
    merged,
    options_class,
    options_in,
    spellings_of,
    value_of,
)
from .spellings import QUANTIZATION_ALIASES, lengths_by_batch_size, owners, plain_path, token_tree, torch_name


CONFIG_NAME = "speculation_config.json"


class Setting(NamedTuple):
    """One documented setting: its flat name, its type and default as text, and what it does."""

    key: str
    type: str
    default: str
    help: str


@dataclass(frozen=True, init=False, repr=False)
class SpeculativeConfig:
    """The method, its draft model, and their settings. Immutable, comparable and hashable.

    The constructor takes all settings by their flat names, those of the method included; `SpeculativeConfig.resolve`
    also takes a dict, JSON, the name of a method, a repo id or a path.

    ```python
    SpeculativeConfig(method="ngram", num_speculative_tokens=8, prompt_lookup_max=4)
    SpeculativeConfig.resolve({"method": "suffix", "suffix_decoding_max_tree_depth": 64})
    SpeculativeConfig.resolve("path/to/draft-model")
    ```

    The settings are the fields below: their `help` says what each does, and `describe_settings()` and
    docs/configuration.md list them.

    Attributes:
        options (`Any`):
            The method's own options, an instance of its `options_class` ([`PendingOptions`] while `method` is `None`).

    Raises:
        SpecConfigError: A setting is unknown, has the wrong type, is out of range or contradicts another.
    """

    method: str | None = setting(
        None,
        "Name of the method. Default: read from the checkpoint of `model`. `auto` finds a drafter for the "
        "target. `suffix+eagle3` combines one that retrieves (`suffix`, `ngram`) with one that drafts everywhere.",
    )
    model: str | None = setting(
        None, "Repo id or local folder of the draft model or draft head.", normalize=plain_path, describes_model=True
    )
    num_speculative_tokens: int | Literal["auto", "fixed"] | None = setting(
        None,
        "Speculation length k: draft tokens of a chain per cycle, from 1 to 1024. `auto`: in each cycle the fastest "
        "length, down to plain decoding; `fixed`: the method's own in every cycle. Default: `auto`, unless a "
        "tree, lengths by batch size, sampled drafts or another rule than `standard` are set.",
        least=1,
        most=MOST_DRAFT_TOKENS,
    )
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int | None], ...] | None = setting(
        None,
        "Most draft tokens by the number of active rows: `[[1, 8, 5], [9, 32, 2], [33, 128, 0]]` (first, last, k) or "
        "`{1: 5, 9: 2, 33: 0}` (from this many rows on); of trees, the depth. 0: none; `None`, and below the first "
        "number: no limit. The last k holds for all larger batches.",
        normalize=lengths_by_batch_size,
    )
    speculative_token_tree: tuple[tuple[int, ...], ...] | None = setting(
        None,
        "Static draft tree: paths of child ranks `[(0,), (1,), (0, 0)]` or their text, or the name of a published "
        "tree. For the methods that draft static trees.",
        normalize=token_tree,
    )
    quantization: Literal["bitsandbytes_4bit", "bitsandbytes_fp4", "bitsandbytes_8bit"] | None = setting(
        None,
        "Quantise the draft model on loading: `bitsandbytes_4bit` (NF4; also `bitsandbytes`, `4bit`, `nf4`), "
        "`bitsandbytes_fp4` (`fp4`) or `bitsandbytes_8bit` (`8bit`, `int8`).",
        aliases=QUANTIZATION_ALIASES,
        describes_model=True,
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] | None = setting(
        None,
        "Data type of the draft model; `auto` takes the checkpoint's. Default: the target's.",
        normalize=torch_name,
        describes_model=True,
    )
    device: str | None = setting(
        None,
        "Device of the draft model, e.g. `cuda:1`. Default: the target's.",
        normalize=torch_name,
        describes_model=True,
    )
    max_model_len: int | None = setting(
        None,
        "Longest sequence in tokens that is drafted for; longer rows continue without drafts. "
        "Default: the limits of the models.",
        least=1,
    )
    revision: str | None = setting(
        None, "Branch, tag or commit of the draft model's repository.", describes_model=True
    )
    code_revision: str | None = setting(
        None,
        "Branch, tag or commit of the draft model's remote code, if that is kept in another repository.",
        describes_model=True,
    )
    subfolder: str | None = setting(
        None, "Folder inside the repository that holds the draft model.", describes_model=True
    )
    cache_dir: str | None = setting(
        None, "Folder where downloads are kept. Default: the Hub's cache.", normalize=plain_path, describes_model=True
    )
    local_files_only: bool = setting(
        False, "Load the draft model from the cache, without asking the Hub.", describes_model=True
    )
    token: str | bool | None = setting(
        None,
        "Access token for private and gated repositories. Default: that of the login. It is never saved.",
        describes_model=True,
        is_secret=True,
    )
    trust_remote_code: bool = setting(False, "Let code from the draft model's repository run.", describes_model=True)
    trusted_owners: tuple[str, ...] | None = setting(
        None,
        "Owners on the Hub whose drafters may be used where no `model` is named, such as `['google', 'Qwen']`. "
        "Default: all that the environment variable HF_SPECDEC_TRUSTED_OWNERS allows.",
        normalize=owners,
        describes_model=True,
    )
    enforce_eager: bool = setting(
        False, "Launch every forward from Python, and capture nothing in CUDA graphs. Nothing is captured on a CPU."
    )
    rejection_sample_method: Literal["standard", "block", "typical", "synthetic"] = setting(
        "standard",
        "Acceptance rule. `standard` and `block` keep the target's distribution exactly; `block` judges a sampled "
        "chain as a whole and accepts at least as much. `typical` (Medusa's) changes the distribution; `synthetic` "
        "accepts at given rates whatever the tokens are, for timing: its text is meaningless.",
    )
    rejection_sample_options: float | tuple[float, ...] | None = setting(
        None,
        "What the acceptance rule needs. `typical`: a pair, by default `[0.09, 0.3]`; a draft token is kept if its "
        "probability is above the first, or above the second times exp(-entropy). `synthetic`: the tokens committed "
        "per verification, at least 1, or a list of the probabilities that the first 1, 2, ... draft tokens are "
        "accepted, such as `[0.8, 0.6, 0.5]`, never increasing, 0 after the last one.",
        least=0,
        most=MOST_DRAFT_TOKENS + 1,
    )
    options: Any = field(default=PendingOptions(), metadata={"help": "The options of the method, as an object."})

    def __init__(self, /, method: str | None = None, model: str | os.PathLike[str] | None = None, **settings: Any):
        with reading_settings(settings):
            flat = flattened({"method": method, "model": model, **settings})
            flat.update(_without_placeholder(flat["method"], flat["model"]))
            check_is_named(flat)
            hints = hints_of(SpeculativeConfig)
            for item in _common_fields():
                value = value_of(item, flat.pop(item.name, None), hints[item.name])
                object.__setattr__(self, item.name, value)
            check_combinations(self)
            common = [item.name for item in _common_fields()]
            object.__setattr__(self, "options", build_options(self.method, flat, common))

    def __reduce__(self) -> tuple[Any, ...]:
        # Not even a process of the same user is handed the token.
        return SpeculativeConfig.from_dict, (self.to_dict(),)

    def __copy__(self) -> SpeculativeConfig:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> SpeculativeConfig:
        return self

    @classmethod
    def resolve(cls, /, value: Any = None, *, target_config: Any = None, **overrides: Any) -> SpeculativeConfig:
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
        from ..resolve import resolve

        return resolve(value, overrides, target_config)

    @property
    def fixed_length(self) -> int | None:
        """`num_speculative_tokens` where it is a number; `None` where it is left out, "auto" or "fixed"."""
        return None if self.num_speculative_tokens in (AUTO, FIXED) else self.num_speculative_tokens

    @property
    def is_adaptive(self) -> bool:
        """The length is chosen in each cycle, by what pays, where nothing fixes it and the text does not depend on it.

        The environment variable HF_SPECDEC_ADAPTIVE=0 leaves that to `num_speculative_tokens="auto"`.
        """
        if self.method == NO_DRAFTS or self.num_speculative_tokens is not None:
            return self.num_speculative_tokens == AUTO and self.method != NO_DRAFTS
        lengths = self.num_speculative_tokens_per_batch_size or ()
        is_shaped = self.speculative_token_tree or any(k for _, k in lengths)
        # The text of drawn drafts, and under other rules, depends on what is drafted. It must not depend on a clock.
        is_drawn = getattr(self.options, "draft_sample_method", None) == "probabilistic"
        may_adapt = not (is_shaped or is_drawn) and self.rejection_sample_method == "standard"
        return may_adapt and is_switched_on("ADAPTIVE", default=True)

    def most_tokens(self, num_rows: int) -> int:
        """Most draft tokens with so many active rows, by `num_speculative_tokens_per_batch_size`."""
        lengths = self.num_speculative_tokens_per_batch_size or ((1, None),)
        most = next(k for first, k in reversed(lengths) if first <= num_rows)
        return MOST_DRAFT_TOKENS if most is None else most

    def replace(self, /, **changes: Any) -> SpeculativeConfig:
        """A copy with some settings changed.

        When the method or the acceptance rule changes, the options of the old one are dropped.
        """
        base, changes = self.to_dict(secrets=True), flattened(changes, self.method)
        new_method = canonical_method(changes.get("method", self.method))
        if self.method not in (None, AUTO) and new_method != self.method:
            common = {item.name for item in _common_fields()}
            base = {key: value for key, value in base.items() if key in common}
        if changes.get("rejection_sample_method", self.rejection_sample_method) != self.rejection_sample_method:
            base.pop("rejection_sample_options", None)
        return type(self)(**merged(base, changes))

    def for_method(self, method: str, **defaults: Any) -> SpeculativeConfig:
        """The settings of a configuration that named no method, as far as this one has them, above `defaults`."""
        names = {
            *spellings_of(options_class(method)),
            *(item.name for item in _common_fields() if _concerns(item, method)),
        }
        settings = merged(defaults, {**self.to_dict(secrets=True), "method": method})
        return type(self)(**{key: value for key, value in settings.items() if key in names})

    def with_greedy_drafts(self) -> SpeculativeConfig:
        """Sets `draft_sample_method="greedy"` where the settings leave open how draft tokens are chosen."""
        is_open = getattr(self.options, "draft_sample_method", "") is None
        return self.replace(draft_sample_method="greedy") if is_open else self

    def check_against_target(self, max_position_embeddings: int | None = None, num_heads: int | None = None) -> None:
        """Refuses settings beyond the target's context, or the heads of a method that drafts one token a head."""
        k, longest, positions = self.fixed_length, self.max_model_len, max_position_embeddings
        context = f"the target's context of {positions} tokens"
        for name, value, most, limit in (
            ("num_speculative_tokens", k, num_heads, f"the {num_heads} heads of the {self.method} checkpoint"),
            ("num_speculative_tokens", k, positions and positions - 1, f"fits {context}"),
            ("max_model_len", longest, positions, context),
        ):
            if value is not None and most is not None and value > most:
                raise SpecConfigError(f"`{name}`={value} is more than {limit}. Use at most {most}, or leave it out.")

    def to_dict(self, *, defaults: bool = False, secrets: bool = False) -> dict[str, Any]:
        """The flat settings as plain Python and JSON types. `from_dict` gives back an equal configuration.

        Args:
            defaults (`bool`, defaults to `False`): Also settings that have their default value.
            secrets (`bool`, defaults to `False`): Also `token`, which must not get into files and logs.
        """
        items = [item for item in _common_fields() if secrets or not item.metadata.get("is_secret")]
        rows = [(item.name, getattr(self, item.name), item.default) for item in items]
        if isinstance(self.options, PendingOptions):
            # These have no defaults yet.
            rows += [(key, value, MISSING) for key, value in self.options.values]
        else:
            options = options_in(self.options)
            rows += [(key_of(item), getattr(self.options, item.name), default_of(item)) for item in options]
        return {
            key: thawed(value) for key, value, default in rows if defaults or default is MISSING or value != default
        }

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> SpeculativeConfig:
        """The configuration of a dict of flat settings."""
        if not isinstance(settings, Mapping):
            raise SpecConfigError(f"from_dict() needs a dict of settings, got {type(settings).__name__}.")
        with reading_settings(settings):
            return cls(**merged(settings, {}))

    def save_pretrained(self, save_directory: str | os.PathLike[str]) -> Path:
        """Writes `speculation_config.json` to a folder, which is made if needed, and returns the file's path."""
        path = Path(save_directory) / CONFIG_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n", encoding="utf-8")
        return path

    @classmethod
    def from_pretrained(
        cls, path_or_repo: str | os.PathLike[str], *, revision: str | None = None
    ) -> SpeculativeConfig:
        """Reads what [`~SpeculativeConfig.save_pretrained`] wrote.

        Of settings on the Hub and of those beside a checkpoint only the shape of drafts is taken.

        Args:
            path_or_repo (`str` or `os.PathLike`): A folder, the file itself, or the id of a repository on the Hub.
            revision (`str`, *optional*): Branch, tag or commit of the repository.
        """
        from ..resolve import read_pretrained

        return read_pretrained(path_or_repo, revision)

    def to_vllm(self) -> dict[str, Any]:
        """Returns the settings for vLLM's `--speculative-config`.

        A setting that vLLM has no key for is left out with a warning; it changes speed, not text. k is always named,
        because vLLM has no default for most methods.

        Raises:
            SpecConfigError: The method is unknown to vLLM or not yet resolved, or vLLM would not find the draft model.
        """
        from ..hub.engines import to_vllm

        return to_vllm(self)

    def compute_hash(self) -> str:
        """A name for this configuration in caches and logs: 16 hexadecimal digits.

        Equal configurations have equal names, in every process and whichever way they were spelled.
        """
        return self._hash

    def written(self, names: Iterable[str] | None = None) -> str:
        """Some settings as JSON, by flat name, defaults included: equal for equal values. `None`: all but secrets."""
        flat = self._flat if names is None else {name: self._flat[name] for name in names}
        return json.dumps(flat, sort_keys=True, separators=(",", ":"))

    @cached_property
    def _flat(self) -> dict[str, Any]:
        return self.to_dict(defaults=True)

    @cached_property
    def _hash(self) -> str:
        return hashlib.sha256(self.written().encode()).hexdigest()[:16]

    def __repr__(self) -> str:
        return f"SpeculativeConfig({', '.join(f'{key}={value!r}' for key, value in self.to_dict().items())})"

    @property
    def is_to_be_found(self) -> bool:
        """`True` where a drafter has to be found: the method has weights, and no model is named for it."""
        if self.method in (None, AUTO) or self.model is not None:
            return self.method == AUTO
        drafting = drafting_method(self.method)
        if drafting is None or drafting.weights is None:
            return False
        # Layers of the target itself lie where the call says.
        return not (drafting.in_target_checkpoint and (self.revision or self.subfolder))

    def check_can_be_found(self) -> None:
        """Refuses places and code of a drafter that is yet to be found."""
        for name in ("revision", "code_revision", "subfolder", "trust_remote_code"):
            if getattr(self, name) not in (None, False):
                raise SpecConfigError(
                    f"`{name}`={shown(getattr(self, name))} is about a named `model`, and method='{self.method}' "
                    f"finds one. Name the `model`, or leave out `{name}`."
                )


def describe_settings(method: str | None = None) -> list[Setting]:
    """The documented settings of a method's own options, or without `method` those that all methods share."""
    settings = []
    for item in _common_fields() if method is None else options_in(options_class(method)):
        kind = item.type.__name__ if type(item.type) is type else str(item.type).replace("typing.", "")
        settings.append(Setting(key_of(item), kind, repr(default_of(item)), item.metadata.get("help", "")))
    return settings


def _without_placeholder(method: Any, model: Any) -> dict[str, Any]:
    """Method and model, where the model may be the method's own name ("ngram", "[ngram]") for lack of a real one."""
    method = canonical_method(method)
    if method == AUTO and model is not None:
        method = None
    name = model.strip("[]") if isinstance(model, str) else None
    if name in methods() and not takes_model(name) and method in (None, name):
        return {"method": name, "model": None}
    return {"method": method, "model": model}


@cache
def _common_fields() -> list[Field]:
    """The settings of all methods."""
    return [item for item in fields(SpeculativeConfig) if item.name != "options"]


def _concerns(item: Field, method: str) -> bool:
    """`True` for settings of all methods that can be given together with this one."""
    if item.metadata.get("describes_model") and not takes_model(method):
        return False
    drafting = drafting_method(method)
    return item.name != "speculative_token_tree" or drafting is None or drafting.drafts_static_trees
