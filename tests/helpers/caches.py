"""The name of the cache, as an argument and as a field of outputs, in the transformers that the tests run on."""

from __future__ import annotations

import inspect

from transformers import LlamaForCausalLM


_NAMES = inspect.signature(LlamaForCausalLM.forward).parameters

CACHE = "cache" if "cache" in _NAMES else "past_key_values"
