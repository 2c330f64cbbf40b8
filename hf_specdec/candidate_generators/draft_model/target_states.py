"""States of the target that a draft model reads beside the tokens (PARD-2, An et al. 2026, arXiv:2605.08632).

The embedding of each token gets `scale * target_proj(states)` added: the states from which the target predicted the
token, those after several layers side by side. The first token of a text has none, zeros in their place. Masks have
those of the anchor.

Checkpoint: a PARD model and beside it `warp_model.bin` with `target_proj.weight` (h, L * H) and, where
`pard2_proj_bias` says so, `target_proj.bias` (h,). Its config has `pard2_target_layers`, the L indices of
transformers' `hidden_states`; `pard2_scale`; `pard2_target_dim` (L * H).

Shapes: B rows, T tokens, h hidden size of the draft, H that of the target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.files import RepoFiles
from ...target_facts import decoder_layers, hidden_size
from .formats import PROJECTION_FILE, DraftModelReader, reads_target


if TYPE_CHECKING:
    from ...settings import SpeculativeConfig


class TargetStates:
    """Projection of the target's states into the embeddings of a draft model.

    Args:
        keys (`Sequence[int | str]` of length L): The states, as candidate generators ask for them.
        weight (`torch.Tensor` of shape `(h, L * H)`): Of the projection.
        bias (`torch.Tensor` of shape `(h,)`, *optional*): Added also where a token has no states.
        scale (`float`): Factor of the sum of both.
        embedding (`nn.Module`): The draft model's.
    """

    def __init__(
        self,
        keys: Sequence[int | str],
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        scale: float,
        embedding: torch.nn.Module,
    ):
        self.keys: tuple[int | str, ...] = tuple(keys)
        self._parts: tuple[torch.Tensor, ...] = (weight * scale).chunk(len(keys), dim=1)
        self._bias: torch.Tensor | None = None if bias is None else bias * scale
        self._embedding = embedding

    def projected(self, states: Mapping[int | str, torch.Tensor]) -> torch.Tensor:
        """What the states of tokens `(B, T, H)` add to the embeddings, without the bias: `(B, T, h)`."""
        parts = zip(self.keys, self._parts)
        return sum(F.linear(states[key].to(part.device, part.dtype), part) for key, part in parts)

    def of_prompt(self, states: Mapping[int | str, torch.Tensor], starts: Sequence[int], length: int) -> torch.Tensor:
        """Those of left-padded prompts, `(B, length, h)`.

        Args:
            states (`dict`): As a [`Prompt`] has them: after each token, of the last tokens at least.
            starts (`list[int]`): Index of each row's first token.
            length (`int`): Tokens of a prompt, padding included.
        """
        projected = self.projected(states)
        shifted = F.pad(projected[:, :-1], (0, 0, length + 1 - projected.shape[1], 0))
        has_none = torch.arange(length, device="cpu") <= torch.tensor(starts, device="cpu")[:, None]
        return shifted.masked_fill(has_none.to(shifted.device)[..., None], 0)

    def embed(self, tokens: torch.LongTensor, states: Mapping[int | str, torch.Tensor]) -> torch.Tensor:
        """Embeddings `(B, T, h)` of tokens, with what their states `(B, T, H)` add."""
        return self.embed_projected(tokens, self.projected(states))

    def embed_projected(self, tokens: torch.LongTensor, projected: torch.Tensor) -> torch.Tensor:
        """Those with what has been projected `(B, T, h)`."""
        return self._embedding(tokens) + (projected if self._bias is None else projected + self._bias)


def load_target_states(
    config: SpeculativeConfig, draft_model: Any, target_model: Any
) -> tuple[TargetStates | None, str | None]:
    """The projection of a PARD-2 checkpoint, in the draft model's dtype and on its device.

    Without it such a model drafts as PARD does, and fewer of its drafts are accepted.

    Args:
        config (`SpeculativeConfig`): Names the checkpoint; without a `model` the user has loaded the draft model.

    Returns:
        `tuple`: The projection, `None` where there is none or it does not fit; and why it is not read, if it should.

    Raises:
        CheckpointFormatError: The projection is damaged, or contradicts the config.
    """
    if not reads_target(draft_model.config):
        return None, None
    if config.model is None:
        return None, f"{PROJECTION_FILE} lies beside models that are passed by their name"
    if RepoFiles.of(config).first_of([PROJECTION_FILE]) is None:
        return None, f"there is no {PROJECTION_FILE} that may be read"
    checkpoint = Checkpoint(config, [PROJECTION_FILE])
    reader = DraftModelReader(checkpoint.header)
    layers, width = reader.target_layers, hidden_size(target_model)
    rows, columns = reader.matrix("target_proj.weight")
    embedding = draft_model.get_input_embeddings()
    own = embedding.weight
    if rows != own.shape[1] or columns != (reader.setting("pard2_target_dim") or columns):
        stated = reader.setting("pard2_target_dim")
        raise reader.wrong(
            f"has target_proj.weight of the shape {[rows, columns]}, where its other tensors and its config.json "
            f"(`pard2_target_dim`) ask for {[own.shape[1], stated or columns]}",
            reader.fitting,
        )
    count = len(decoder_layers(target_model))
    if columns != len(layers) * width or not -count - 1 <= min(layers) <= max(layers) <= count:
        return None, (
            f"it reads {columns} values of the states {list(layers)}, and {type(target_model).__name__} has {count} "
            f"layers with {width}"
        )
    names = ["target_proj.weight", *(["target_proj.bias"] if reader.setting("pard2_proj_bias") else [])]
    reader.require(names, "the projection")
    weight, bias = ([checkpoint.read_weight(name, own.dtype, own.device) for name in names] + [None])[:2]
    # Those of transformers begin with the embeddings, and the last ones are after the final norm.
    ends = [layer % (count + 1) for layer in layers]
    keys = ["last" if end == count else end for end in ends]
    return TargetStates(keys, weight, bias, reader.target_scale, embedding), None
