"""What decoding takes of transformers beyond its documented interface, tried before anything is decoded.

Names are no proof: a renamed argument leaves them all in place. So a tiny model reads a prompt here as the loop lets a
target read one, and what comes of it is looked at.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from ..arguments import original_generate
from ..errors import MissingDependencyError
from ..target_facts import cache_name_among


logger = logging.get_logger(__name__)

# The versions that the tests run on.
OLDEST, NEWEST = "5.17", "5.24"


def check_transformers() -> None:
    """Tries what decoding relies on, and warns of a version that is newer than the tests."""
    installed = transformers.__version__
    try:
        # All that is imported of transformers for a target, too. Nothing above this room: it may be what imports it.
        import_module("hf_specdec.target.prompts")
        _read_prompt()
    except Exception as error:
        if isinstance(error, ImportError) and not (error.name or "").startswith("transformers"):
            raise
        raise MissingDependencyError(
            f"transformers {installed} does not work as hf_specdec relies on ({type(error).__name__}: {error}). "
            f"Versions {OLDEST} to {NEWEST} do: pip install 'transformers~={NEWEST}.0'. A newer hf_specdec may know "
            "the installed one."
        ) from error
    if Version(installed).release[:2] > Version(NEWEST).release:
        logger.warning_once(
            f"transformers {installed} is newer than all versions that hf_specdec was tested with ({OLDEST} to "
            f"{NEWEST}). Compare a text with that of plain generate(), or: pip install 'transformers~={NEWEST}.0'."
        )


def _read_prompt() -> None:
    """Lets a tiny model read three tokens, and prepares its next forward; asserts what the loop expects of both."""
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=2, bos_token_id=None, eos_token_id=None)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        model = LlamaForCausalLM(config).eval()
    cache_name = cache_name_among(inspect.signature(model.forward).parameters)
    fields = transformers.generation.utils.GenerateDecoderOnlyOutput.__dataclass_fields__
    assert cache_name is not None, "no argument of a forward takes a cache"
    assert cache_name_among(fields) is not None, "no field of generate()'s output is a cache"

    def decode(model: Any, input_ids: torch.Tensor, generation_config: Any, **kwargs: Any) -> torch.Tensor:
        cache = kwargs.get(cache_name)
        assert isinstance(cache, transformers.DynamicCache), f"generate() prepares no `{cache_name}`"
        output = model._prefill(input_ids, generation_config, kwargs)
        assert output.logits.shape[:2] == (1, 1), f"a prompt's logits are {list(output.logits.shape)}"
        assert cache.get_seq_length() == 3, "a prompt leaves no keys and values in the cache"
        kwargs = model._update_model_kwargs_for_generation(output, kwargs, is_encoder_decoder=False)
        text = torch.cat([input_ids, input_ids[:, :1]], dim=1)
        inputs = model.prepare_inputs_for_generation(text, next_sequence_length=1, **kwargs)
        assert inputs[cache_name] is cache, "the next forward gets another cache"
        assert inputs["input_ids"].shape == (1, 1), "the next forward gets more than one token"
        assert inputs["position_ids"].tolist() == [[3]], "the next forward gets another position"
        assert not model._has_unfinished_sequences(True, False, device=input_ids.device), "ended rows go on"
        return text

    tokens = torch.ones((1, 3), dtype=torch.long, device="cpu")
    text = original_generate(LlamaForCausalLM)(
        model, tokens, custom_generate=decode, max_new_tokens=1, do_sample=False
    )
    assert text.shape == (1, 4), "generate() does not return what `custom_generate` does"
