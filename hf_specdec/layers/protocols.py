"""What layers ask of configs, and of masks."""

from __future__ import annotations

from typing import Protocol

import torch


class LayerSizes(Protocol):
    """Sizes of layers, as configs name them."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def hidden_act(self) -> str: ...
    @property
    def rms_norm_eps(self) -> float: ...


class SlotMask(Protocol):
    """Attention that needs no mask tensor, such as a [`TreeMask`]."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, softcap: float, /
    ) -> torch.Tensor: ...
