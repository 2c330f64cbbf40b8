"""A tiny Gemma 4 and an assistant for it, which reads its keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4ForCausalLM, Gemma4TextConfig

from tests.helpers.models import TINY


@contextmanager
def tiny_gemma4() -> Iterator[tuple[Gemma4ForCausalLM, Gemma4AssistantForCausalLM]]:
    layers = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    sizes = {**TINY, **layers, "head_dim": 8, "global_head_dim": 8, "sliding_window": 8, "pad_token_id": 0}
    layers = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "num_kv_shared_layers": 2}
    torch.manual_seed(0)
    target = Gemma4ForCausalLM(Gemma4TextConfig(**sizes, **layers)).eval()
    layers = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 4}
    text_config = Gemma4TextConfig(**sizes, enable_moe_block=False, **layers)
    config = Gemma4AssistantConfig(text_config=text_config, backbone_hidden_size=32)
    with pytest.MonkeyPatch.context() as monkeypatch:
        modes = getattr(Gemma4TextConfig, "kv_sharing_modes", None)
        if modes is not None:
            # Some versions of transformers refuse to build any assistant: no layer of its own has keys to share.
            def shared(config):
                is_whole = config.num_kv_shared_layers == config.num_hidden_layers
                return ["reuse"] * config.num_hidden_layers if is_whole else modes.fget(config)

            monkeypatch.setattr(Gemma4TextConfig, "kv_sharing_modes", property(shared))
        yield target, Gemma4AssistantForCausalLM(config).eval()
