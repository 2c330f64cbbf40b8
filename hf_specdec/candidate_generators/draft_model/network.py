"""Draft models: any causal language model that transformers loads.

Shapes: B rows, T tokens, h hidden size of the draft, H that of the target.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from ...checkpoints.files import RepoFiles, is_pickled
from ...checkpoints.format import Format
from ...checkpoints.header import Header, TargetNeeds
from ...checkpoints.loading import checkpoint_errors, named_checkpoint, warn_of_dead_weights
from ...checkpoints.quantised import check_four_bits, quantization_config
from ...checkpoints.reader import CheckpointReader
from ...checkpoints.schema import COUNT, FLAG, INDEX, INDICES, MOST, NUMBER, Key, Tensor
from ...checkpoints.weights import WEIGHT_FILES, TensorTable, shards_of
from ...errors import MOST_SHOWN, CheckpointFormatError, SpecConfigError, shown
from ...settings import SpeculativeConfig
from ...settings.checks import is_int
from ...target_facts import decoder_layers, draft_device, hidden_size, num_embeddings
from ...threads import Lock
from .vocabularies import load_tokenizer


# Beside the weights of PARD-2 models, for the target's states.
PROJECTION_FILE = "warp_model.bin"


class DraftModelReader(CheckpointReader):
    """A causal language model, or one with an encoder, which transformers loads."""

    noun = "draft model"
    blocks: ClassVar[tuple[str, ...]] = ("", "text_config")
    keys: ClassVar[tuple[Key, ...]] = (
        *CheckpointReader.keys,
        Key("pard2_target_layers", INDICES),
        Key("pard2_target_dim", COUNT, size="s"),
        Key("pard2_proj_bias", FLAG),
        Key("sliding_window", INDEX),
        # Factor of the projected states of the target.
        Key("pard2_scale pard_scale feat_scale", NUMBER, 0.02),
    )

    def rename(self, stored: str) -> str:
        return stored

    @property
    def needs(self) -> TargetNeeds:
        return TargetNeeds(vocab_size=self.setting("vocab_size"))

    def check(self) -> None:
        # What it computes is for transformers to know; masks are made here.
        self.setting("sliding_window")
        token, size = self.stated("pard_token"), self.setting("vocab_size")
        if token is not None and not (is_int(token) and -1 <= token < (size or MOST)):
            raise self.wrong(
                f"has `pard_token`={shown(token)} in its config.json, and its vocabulary has {size} tokens",
                "Correct it, or remove it to draft token by token.",
            )
        if self.stated("pard2") or self.stated("spd_type") == "pard2":
            _ = self.target_layers

    @property
    def target_layers(self) -> list[int]:
        """States of the target that a PARD-2 model reads, by their indices in transformers' `hidden_states`."""
        layers = self.setting("pard2_target_layers")
        if not layers:
            raise self.wrong(
                "is a PARD-2 model, and its config.json does not say `pard2_target_layers`",
                "Add it, or remove `pard2` and `spd_type` to draft from the tokens alone.",
            )
        return layers


class ProjectionReader(DraftModelReader):
    """The projection of a PARD-2 model: h its hidden size, s the width of the target's states side by side."""

    noun = "projection"

    @property
    def table(self) -> tuple[Tensor, ...]:
        has_bias = bool(self.setting("pard2_proj_bias"))
        return (Tensor("target_proj.weight", "h s"), Tensor("target_proj.bias", "h", has_bias))


_format = partial(Format, method="draft_model", reader=DraftModelReader, is_hint=True)

FORMATS = (
    _format(
        "pard2",
        "AMD",
        tuple(f"pard_token=.*&{mark}&architectures=.*ForCausalLM" for mark in ("pard2=True", "spd_type=pard2")),
    ),
    _format("pard", "AMD", ("pard_token=.*&architectures=.*ForCausalLM",)),
    _format(
        "causal-lm",
        "transformers",
        ("architectures=.*(ForCausalLM|LMHeadModel)", "architectures=.*ForConditionalGeneration&text_config=.*"),
    ),
    _format(
        "encoder-decoder",
        "transformers",
        ("architectures=.*(ForConditionalGeneration|MTModel)&is_encoder_decoder=True",),
    ),
)


logger = logging.get_logger(__name__)

# While transformers builds a model, torch's default dtype is that of the model, in all threads: two at a time would
# leave the wrong one behind.
_building = Lock()


def load_draft_model(config: Any, target_model: torch.nn.Module) -> torch.nn.Module:
    """Loads `config.model` in the target's dtype, on its device, unless the settings say otherwise."""
    with checkpoint_errors(name := named_checkpoint(config)):
        model = _from_pretrained(name, _checked_weights(RepoFiles.of(config)), config, target_model)
        check_four_bits(model, name)
    warn_of_dead_weights(name, model)
    return model.eval()


def mask_token_of(model: torch.nn.Module, wanted: bool | None = None) -> int | None:
    """The mask token of a PARD model (`pard_token`), unless none is wanted; `None` for a model that has none."""
    if wanted is False:
        return None
    token = getattr(model.config.get_text_config(decoder=True), "pard_token", None)
    token = getattr(model.config, "pard_token", None) if token is None else token
    # -1 says that it was trained without.
    if token is None or token == -1:
        if wanted:
            raise SpecConfigError(
                f"`parallel_drafting`=True needs a draft model that was trained with mask tokens, and the config of "
                f"'{model.config.name_or_path}' has no `pard_token`. Leave it out to draft token by token."
            )
        return None
    readable = num_embeddings(model.get_input_embeddings())
    if not is_int(token) or not 0 <= token < readable:
        raise CheckpointFormatError(
            f"The draft model '{model.config.name_or_path}' has `pard_token`={shown(token)} in its config.json, and "
            f"its embedding has the tokens 0 to {readable - 1}. Correct it, or remove it to draft token by token."
        )
    return token


def _checked_weights(files: RepoFiles) -> str:
    """The weight file of a model, or its index, when all that transformers will read has been checked and is here."""
    try:
        files.path("config.json")
        weights = files.first_of(WEIGHT_FILES)
        if weights is None:
            raise CheckpointFormatError(
                f"'{files.name}' has none of the weight files that are read: {', '.join(WEIGHT_FILES)}. Pass a "
                "complete causal language model, and name it as `spec_model` where its weights are pickled."
            )
        _check_sizes(files, weights)
        for part in shards_of(files, weights):
            files.path(part)
            TensorTable(files, part)
        if files.folder is None and "adapter_config.json" in files:
            raise CheckpointFormatError(
                f"'{files.name}' holds an adapter (adapter_config.json), and transformers would load the model "
                "that it names in the place of this one. Merge the adapter, and pass the whole model."
            )
        for name in files.sizes if files.folder is not None else ():
            # What transformers may read beside the weights: settings, tokenizer, code, adapters.
            if name.endswith((".json", ".jinja", ".model", ".py", ".txt")) or name.startswith("adapter_"):
                files.path(name)
    except CheckpointFormatError as error:
        raise type(error)(f"The draft model {error}") from error
    return weights


# Keys of configs for the number of layers and for the widths of weights. All else is no bound here.
_DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers", "decoder_layers")
_WIDTHS = re.compile(
    r".*_(size|dim|heads|experts|rank|channels)|(n|num|d)_(embd|head|inner|model|ff|kv)|(hidden|intermediate).*"
)


def _check_sizes(files: RepoFiles, weights: str) -> None:
    """Refuses a config whose model would be far larger than its files, before it is downloaded and built."""
    sizes = [files.sizes.get(part) for part in shards_of(files, weights)]
    if None in sizes:
        # Not all of it is in the cache, which is said where it is read.
        return
    num_bytes, num_tensors = sum(sizes), len(TensorTable(files, weights))
    for name, value in _integers(files.config):
        key = name.rpartition(".")[2]
        # An element has at least four bits, and a layer a tensor.
        if key in _DEPTHS:
            most = num_tensors
        elif _WIDTHS.fullmatch(key):
            most = 2 * num_bytes
        else:
            most = MOST if "position" in key else value
        if value > most or (value < 1 and name in _DEPTHS):
            raise CheckpointFormatError(
                f"'{files.name}' has `{name}`={shown(value)} in its config.json, and {num_tensors} tensors of "
                f"{num_bytes} bytes in {weights}: no such model can be made of them. Pass an intact checkpoint."
            )


def _integers(config: Any, place: str = "") -> Iterator[tuple[str, int]]:
    """All integers in a config, with the way to each."""
    items = config.items() if isinstance(config, dict) else enumerate(config) if isinstance(config, list) else ()
    for key, value in items:
        name = f"{place}.{key}" if place and isinstance(config, dict) else place or str(key)
        if is_int(value):
            yield name, value
        else:
            yield from _integers(value, name)


def checkpoint_location(config: Any) -> dict[str, Any]:
    """Arguments of `from_pretrained` that say where in a repository a checkpoint and its tokenizer lie."""
    places = {name: getattr(config, name) for name in ("revision", "code_revision", "subfolder", "cache_dir", "token")}
    location = {name: value for name, value in places.items() if value not in (None, "")}
    return location | {"trust_remote_code": config.trust_remote_code, "local_files_only": config.local_files_only}


def draft_tokenizer(
    config: Any, beside: str | None, location: dict[str, Any] | None = None
) -> PreTrainedTokenizerBase | None:
    """The draft model's tokenizer: the named one, or that `beside` it, in its `location`; `None` for none."""
    named = getattr(config.options, "draft_tokenizer", None)
    if named is None:
        return load_tokenizer(beside, location)
    of_model = ("revision", "code_revision", "subfolder")
    access = {name: value for name, value in checkpoint_location(config).items() if name not in of_model}
    tokenizer = load_tokenizer(named, access)
    if tokenizer is None:
        raise SpecConfigError(
            f"`draft_tokenizer`={shown(named)} holds no tokenizer that can be loaded. Name a folder or repository "
            "that has one, or pass both tokenizers to generate() as `tokenizer` and `assistant_tokenizer`."
        )
    return tokenizer


def _from_pretrained(name: str, weights: str, config: Any, target_model: Any) -> torch.nn.Module:
    """The model, loaded completely: transformers would give weights that are missing random values."""
    location, device = checkpoint_location(config), draft_device(config, target_model)
    arguments = {"dtype": config.dtype or target_model.dtype, "use_safetensors": not is_pickled(weights)}
    if config.quantization:
        compute_dtype = target_model.dtype if config.dtype in (None, "auto") else config.dtype
        arguments["quantization_config"] = quantization_config(config.quantization, compute_dtype)
    try:
        model_config = AutoConfig.from_pretrained(name, **location)
        if getattr(model_config, "transformers_weights", None) not in (None, weights):
            raise ValueError(f"its config.json names other weights than {weights} (`transformers_weights`).")
        window = getattr(model_config.get_text_config(decoder=True), "sliding_window", None)
        if window is not None and not INDEX.is_valid(window):
            raise ValueError(f"its config.json has `sliding_window`={shown(window)}, which must be {INDEX.what}.")
        if model_config.is_encoder_decoder and not target_model.config.is_encoder_decoder:
            raise ValueError(f"{type(model_config).__name__} is of an encoder-decoder model. Use a decoder-only one.")
        model_class: Any = AutoModelForCausalLM
        if model_config.is_encoder_decoder:
            is_text = model_config.model_type in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
            model_class = AutoModelForSeq2SeqLM if is_text else AutoModelForSpeechSeq2Seq
        own_packing = getattr(model_config, "quantization_config", None)
        is_packed = "quantization_config" in arguments or own_packing is not None
        if is_packed:
            # Packed weights cannot always be moved.
            arguments["device_map"] = {"": device}
        if not os.path.isdir(name):
            # Where PEFT is installed an adapter is looked for, with arguments of its own.
            places = ("revision", "subfolder", "cache_dir", "local_files_only")
            arguments["adapter_kwargs"] = {key: location[key] for key in places if key in location}
        with _building:
            # Transformers does not annotate what `output_loading_info` adds.
            model, loading = model_class.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
                name, config=model_config, output_loading_info=True, **location, **arguments
            )
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        # Further lines list everything that transformers knows.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:MOST_SHOWN]
        if isinstance(error, KeyError):
            reason = f"transformers does not know {reason}, or misses it in its config.json."
        if "custom code" in reason:
            reason += " Pass trust_remote_code=True if you trust it."
        raise CheckpointFormatError(f"The draft model '{name}' cannot be loaded: {reason}") from error
    missing = sorted(loading["missing_keys"])
    if missing:
        raise CheckpointFormatError(
            f"The draft model '{name}' lacks {len(missing)} of the weights of {type(model).__name__}: "
            f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}. Pass a complete causal language model."
        )
    if is_packed and not getattr(model, "is_quantized", False):
        # Dequantised weights have the type of their factors.
        return model.to(model.dtype)
    return model if is_packed else model.to(device)


class TargetStates:
    """States of the target that a draft model reads beside the tokens (PARD-2, An et al. 2026, arXiv:2605.08632).

    The embedding of each token gets `scale * target_proj(states)` added: the states from which the target predicted
    the token, those after several layers side by side. The first token of a text has none; masks have the anchor's.
    """

    def __init__(
        self,
        keys: Sequence[int | str],  # the L states, as candidate generators ask for them
        weight: torch.Tensor,  # (h, L * H)
        bias: torch.Tensor | None,  # (h,), added also where a token has no states
        scale: float,  # factor of the sum of both
        embedding: torch.nn.Module,
    ):
        self.keys: tuple[int | str, ...] = tuple(keys)
        self._parts: tuple[torch.Tensor, ...] = (weight * scale).chunk(len(keys), dim=1)
        self._bias: torch.Tensor | None = None if bias is None else bias * scale
        self._embedding = embedding

    def embed(
        self,
        tokens: torch.LongTensor,
        states: Mapping[int | str, torch.Tensor],
        starts: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Embeddings `(B, T, h)` of tokens, with what their states `(B, T, H)` add.

        Of left-padded prompts, which begin at `starts`, the states are those after their last tokens, not before.
        """
        parts = zip(self.keys, self._parts)
        projected = sum(F.linear(states[key].to(part.device, part.dtype), part) for key, part in parts)
        if starts is not None:
            length = tokens.shape[1]
            has_none = torch.arange(length, device="cpu") <= torch.tensor(starts, device="cpu")[:, None]
            projected = F.pad(projected[:, :-1], (0, 0, length + 1 - projected.shape[1], 0))
            projected = projected.masked_fill(has_none.to(projected.device)[..., None], 0)
        return self._embedding(tokens) + (projected if self._bias is None else projected + self._bias)


def load_target_states(
    config: SpeculativeConfig, draft_model: Any, target_model: Any
) -> tuple[TargetStates | None, str | None]:
    """The projection of a PARD-2 checkpoint, without which it drafts as PARD does; and why it is not read, if so."""
    if not (getattr(draft_model.config, "pard2", False) or getattr(draft_model.config, "spd_type", None) == "pard2"):
        return None, None
    if config.model is None:
        return None, f"{PROJECTION_FILE} lies beside models that are passed by their name"
    if RepoFiles.of(config).first_of([PROJECTION_FILE]) is None:
        return None, f"there is no {PROJECTION_FILE} that may be read"
    reader = ProjectionReader(Header.of(config, [PROJECTION_FILE]))
    layers, width = reader.target_layers, hidden_size(target_model)
    columns, embedding = reader.sizes["s"], draft_model.get_input_embeddings()
    table = embedding.weight
    if reader.sizes["h"] != table.shape[1]:
        raise reader.wrong_shape("target_proj.weight", (table.shape[1], columns))
    count = len(decoder_layers(target_model))
    if columns != len(layers) * width or not -count - 1 <= min(layers) <= max(layers) <= count:
        return None, (
            f"it reads {columns} values of the states {list(layers)}, and {type(target_model).__name__} has {count} "
            f"layers with {width}"
        )
    names = [row.name for row in reader.table if row.needed]
    weight, bias = ([reader.weight(name, table.dtype, table.device) for name in names] + [None])[:2]
    # Those of transformers begin with the embeddings, and the last ones are after the final norm.
    ends = [layer % (count + 1) for layer in layers]
    keys = ["last" if end == count else end for end in ends]
    return TargetStates(keys, weight, bias, float(reader.setting("pard2_scale")), embedding), None
