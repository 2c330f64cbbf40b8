"""What the loop cannot honour, each with its remedy: in a call of `generate()`, and in requests that share a loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from numbers import Real
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, StaticCache

from ..errors import SpecConfigError, shown
from ..target.facts import REPEATED_INPUTS, is_text_only
from ..target_facts import CACHE_NAMES


# Arguments and settings of the generation config: values that ask for nothing, and the remedy for all others.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "assistant_model": ((None,), "Pass the draft model as `assistant` or `spec_model` instead."),
    "custom_generate": ((None,), "It replaces the decoding loop, and so does speculation."),
    "num_beams": ((None, 1), "Beam search does not verify drafts; use num_beams=1."),
    "use_cache": ((None, True), "Speculation keeps keys and values; leave `use_cache` out."),
    "output_attentions": ((None, False), "Attention weights of verified drafts are not kept; leave it out."),
    "penalty_alpha": ((None, 0, 0.0), "Contrastive search cannot be combined with speculation."),
    "dola_layers": ((None,), "DoLa decoding cannot be combined with speculation."),
    "constraints": ((None,), "Constrained beam search cannot be combined with speculation."),
    "force_words_ids": ((None,), "Constrained beam search cannot be combined with speculation."),
    "token_healing": ((None, False), "Heal the prompt beforehand, with `model.heal_tokens()`."),
    "prompt_lookup_num_tokens": ((None,), "Use spec_method='ngram' instead of it, not together with it."),
    "assistant_early_exit": ((None,), "Pass it to generate() itself, with spec_method='early_exit'."),
    "use_mtp": ((None, False), "Leave out transformers' own assisted generation."),
    "speculation_type": ((None,), "Leave out transformers' own assisted generation."),
    "cache_implementation": (
        (None, "dynamic", "dynamic_full", "static", "hybrid", "hybrid_chunked", "sliding_window"),
        "Keys and values are kept in slots of the model's dtype on its device.",
    ),
}

# As well, where requests share a loop.
_REFUSED_TOGETHER: dict[str, tuple[tuple[Any, ...], str]] = {
    "streamer": ((None,), "Results arrive as they end; for single tokens call generate()."),
    **dict.fromkeys(
        CACHE_NAMES, ((None,), "Each request begins with its prompt; for a continued cache call generate().")
    ),
    "inputs_embeds": ((None,), "Requests are tokens, texts or chats; for embeddings call generate()."),
    "num_return_sequences": ((None, 1), "Pass the request several times."),
    "output_scores": ((None, False), "Scores are not kept; call generate()."),
    "output_logits": ((None, False), "Logits are not kept; call generate()."),
    "output_hidden_states": ((None, False), "Hidden states are not kept; call generate()."),
    "is_assistant": ((None, False), "Drafters draft inside of the loop. Leave it out."),
    "synced_gpus": ((None, False), "Processes that wait for each other must make the same forwards; call generate()."),
    "attention_mask": ((None,), "Prompts have no padding; leave it out."),
}

# Arguments of the target's forward that the loop sets itself, or that only concern its output.
_SET_BY_THE_LOOP = (
    *CACHE_NAMES,
    *("attention_mask", "cache_position", "inputs_embeds", "logits_to_keep", "position_ids"),
    *("output_attentions", "output_hidden_states", "use_cache"),
)


def effective(model: PreTrainedModel, arguments: Mapping[str, Any], name: str) -> Any:
    """A generation setting as `generate()` will see it: argument, then given config, then the model's own."""
    if name in arguments:
        return arguments[name]
    value = getattr(arguments.get("generation_config"), name, None)
    return getattr(model.generation_config, name, None) if value is None else value


def check_call(model: PreTrainedModel, arguments: Mapping[str, Any]) -> None:
    """Refuses a call of which speculation excludes a part, and names all such parts with their remedies."""
    refused = _refused(_REFUSED, partial(effective, model, arguments))
    problems = [f"{what}: {remedy}" for what, remedy in refused]
    seconds = effective(model, arguments, "max_time")
    if not (seconds is None or isinstance(seconds, Real) or torch.is_tensor(seconds)):
        problems.append(f"`max_time`={shown(seconds)}: a number of seconds, got {type(seconds).__name__}.")
    caches = {name: arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None}
    if len(caches) > 1:
        problems.append(f"`{'` and `'.join(caches)}` are names for one cache to continue. Pass one of them.")
    for name, cache in caches.items():
        is_offloaded = getattr(cache, "offloading", False)
        if model.config.is_encoder_decoder:
            problems.append(f"`{name}`: no cache is continued beside an encoder. Pass `decoder_input_ids`.")
        elif type(cache) not in (DynamicCache, StaticCache) or is_offloaded:
            kind = f"offloaded {type(cache).__name__}" if is_offloaded else type(cache).__name__
            problems.append(f"`{name}`: a DynamicCache or a StaticCache can be continued, got {kind}.")
    mask = arguments.get("attention_mask")
    if torch.is_tensor(mask) and mask.dim() != 2:
        problems.append(f"`attention_mask`: one number for every token, got the shape {list(mask.shape)}.")
    if problems:
        raise SpecConfigError(f"This request cannot be decoded speculatively. {' '.join(problems)}")


def check_sharing(arguments: Mapping[str, Any]) -> None:
    """Refuses what the rows of one loop cannot have."""
    config = arguments.get("generation_config")
    for what, remedy in _refused(_REFUSED_TOGETHER, lambda name: arguments.get(name, getattr(config, name, None))):
        raise SpecConfigError(f"{what} is not for requests that share a loop. {remedy}")


def check_forward_inputs(model: PreTrainedModel, model_kwargs: Mapping[str, Any]) -> None:
    """Refuses what the target would need for drafts too. What goes with the prompt alone (images) is no problem."""
    handled = (*_SET_BY_THE_LOOP, *REPEATED_INPUTS)
    lost = [name for name, value in model_kwargs.items() if name not in handled and value is not None]
    if model.config.is_encoder_decoder:
        # All else is the encoder's, which has read it.
        handled = ("decoder_attention_mask", "decoder_position_ids")
        lost = [name for name in lost if name.startswith("decoder_") and name not in handled]
    elif not is_text_only(model):
        lost = []
    if lost:
        names = ", ".join(f"`{name}`" for name in lost)
        raise SpecConfigError(
            f"{type(model).__name__} reads {names} for every token, and drafts have masks and positions only. Leave "
            "it out, or use plain generate()."
        )


def _refused(
    table: Mapping[str, tuple[tuple[Any, ...], str]], value_of: Callable[[str], Any]
) -> Iterator[tuple[str, str]]:
    """What is asked for of a table, with its value, and the remedy."""
    for name, (harmless, remedy) in table.items():
        value = value_of(name)
        if not any(value is item or (type(value) is type(item) and value == item) for item in harmless):
            # Models and functions are not written out.
            yield (f"`{name}`" if callable(value) else f"`{name}`={shown(value)}"), remedy
