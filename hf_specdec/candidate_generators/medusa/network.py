"""Medusa heads: residual blocks on the target's last hidden state, each with the logits of one further position.

Cai et al. 2024 (arXiv:2401.10774), section 2.1. With h the output of the target's final norm at position t, head i
predicts the token at position t + 2 + i:

    x_0 = h;    x_{j+1} = x_j + SiLU(W_ij x_j + b_ij);    logits_i = U_i x_L

U_i is the head's own lm_head, or the target's ("version 2" of the format). Checkpoints, told apart by their keys:

    medusa_lm_head.{safetensors,pt}          {i}.{j}.linear.{weight,bias}, {i}.{L}.weight (absent in version 2)
    merged into the target's own weights     the same behind `medusa_head.`
    converted for vLLM, model.safetensors    blocks.{i}.layers.{j}.{weight,bias}, lm_heads.{i}.weight, token_map, each
                                             behind `medusa_heads.` or nothing

Shapes: K heads, L layers, H hidden size, V vocabulary of the target, U rows of an own lm_head.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn

from ...checkpoints.checkpoint import Checkpoint, check_target, head_placement, save_checkpoint
from ...checkpoints.config_keys import refused_key
from ...checkpoints.loading import loads_checkpoint
from ...checkpoints.settings import COUNT, FLAG, NAME, is_number
from ...errors import CheckpointFormatError, SpecConfigError
from ...hub.files import MEDUSA_FILES
from ...target_facts import vocabulary_size


if TYPE_CHECKING:
    from ...settings import SpeculativeConfig


# Ranks of a head's candidates whose accuracy a checkpoint may tell; no published tree asks for more.
NUM_RANKS = 10

_INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64)


class MedusaHeads(nn.Module):
    """All heads of a checkpoint, their weights stacked.

    Args:
        hidden_size (`int`): H.
        vocab_size (`int`): V, the width of the logits.
        num_heads (`int`): K.
        num_layers (`int`, defaults to 1): L, residual blocks of a head.
        own_lm_heads (`bool`, defaults to `True`): Each head has an lm_head; otherwise `forward` needs the target's.
        bias (`bool`, defaults to `True`): The blocks have biases.
        one_lm_head (`bool`, defaults to `False`): All heads share the one lm_head that is stored with them.
        lm_head_size (`int`, *optional*): U; `None`: V.
        has_token_map (`bool`, defaults to `False`): Row u of an own lm_head is for token `token_map[u]`, not u.
        logit_scale (`float`, defaults to 1.0): Factor of the logits.

    Attributes:
        weights (`ParameterList` of L tensors of shape `(K, H, H)`): The blocks, at first zero, which is the identity.
        biases (`ParameterList` of L tensors of shape `(K, H)`): Empty without biases.
        lm_heads (`Parameter` of shape `(K, U, H)`): `(1, U, H)` where all heads share it, `None` for the target's.
        token_map (`torch.LongTensor` of shape `(U,)`): `None` where row u is for token u.
        accuracies (`list[list[float]]`, *optional*): `[i][r]`: how often head i's candidate of rank r was right.
        base_model (`str`, *optional*): The model that the heads were trained for.
    """

    spec_method = "medusa"

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        num_heads: int,
        num_layers: int = 1,
        own_lm_heads: bool = True,
        bias: bool = True,
        *,
        one_lm_head: bool = False,
        lm_head_size: int | None = None,
        has_token_map: bool = False,
        logit_scale: float = 1.0,
    ):
        super().__init__()
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.num_heads, self.num_layers = num_heads, num_layers
        self.lm_head_size = lm_head_size or vocab_size
        self.logit_scale = logit_scale
        self.weights = nn.ParameterList(torch.zeros(num_heads, hidden_size, hidden_size) for _ in range(num_layers))
        self.biases = nn.ParameterList(torch.zeros(num_heads, hidden_size) for _ in range(num_layers if bias else 0))
        num_lm_heads = 1 if one_lm_head else num_heads
        shape = (num_lm_heads, self.lm_head_size, hidden_size)
        self.lm_heads = nn.Parameter(torch.zeros(shape)) if own_lm_heads else None
        token_map = torch.arange(self.lm_head_size) if has_token_map else None
        self.register_buffer("token_map", token_map)
        self.accuracies: list[list[float]] | None = None
        self.base_model: str | None = None

    @torch.no_grad()
    def start_from(self, lm_head: torch.Tensor) -> None:
        """Sets every own lm_head to the target's, of shape `(V, H)`: where training starts."""
        self.lm_heads.copy_(lm_head if self.token_map is None else lm_head[self.token_map])

    def forward(
        self, hidden: torch.Tensor, lm_head: nn.Module | torch.Tensor | None = None, num_heads: int | None = None
    ) -> torch.Tensor:
        """Logits of the heads.

        Args:
            hidden (`torch.Tensor` of shape `(..., H)`): What the target's lm_head reads.
            lm_head (`nn.Module` or `torch.Tensor` of shape `(V, H)`, *optional*): The target's, for heads without own.
            num_heads (`int`, *optional*): Only the first heads.

        Returns:
            `torch.Tensor` of shape `(K, ..., V)`; -inf for tokens that an own lm_head lacks.
        """
        logits = self.short_logits(hidden, lm_head, num_heads)
        if self.logit_scale != 1:
            logits = logits * self.logit_scale
        if self.lm_heads is None or (self.token_map is None and self.lm_head_size == self.vocab_size):
            return logits
        full = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        if self.token_map is None:
            full[..., : self.lm_head_size] = logits
            return full
        return full.index_copy_(-1, self.token_map, logits)

    def top_tokens(
        self,
        hidden: torch.Tensor,
        count: int,
        lm_head: nn.Module | torch.Tensor | None = None,
        num_heads: int | None = None,
    ) -> torch.LongTensor:
        """The `count` best tokens of each head, best first: `(K, ..., count)`."""
        best = self.short_logits(hidden, lm_head, num_heads).topk(count, dim=-1).indices
        return best if self.token_map is None else self.token_map[best]

    def states(self, hidden: torch.Tensor, num_heads: int | None = None) -> torch.Tensor:
        """The last residual stream of each head: `(K, ..., H)` for `hidden` of shape `(..., H)`."""
        stream = hidden.reshape(-1, self.hidden_size)
        heads = slice(num_heads)
        for layer, weight in enumerate(self.weights):
            bias = self.biases[layer][heads] if self.biases else None
            stream = stream + F.silu(_linear(stream, weight[heads], bias))
        return stream.reshape(-1, *hidden.shape)

    def short_logits(
        self, hidden: torch.Tensor, lm_head: nn.Module | torch.Tensor | None = None, num_heads: int | None = None
    ) -> torch.Tensor:
        """Logits over the rows of the lm_heads, `(K, ..., U)`, not scaled."""
        weight = self.weights[0]
        states = self.states(hidden.to(weight.device, weight.dtype), num_heads)
        if self.lm_heads is None:
            states = states.to(hidden.device, hidden.dtype)
            return lm_head(states) if isinstance(lm_head, nn.Module) else F.linear(states, lm_head)
        if len(self.lm_heads) == 1:
            return F.linear(states, self.lm_heads[0])
        logits = _linear(states.reshape(len(states), -1, self.hidden_size), self.lm_heads[: len(states)])
        return logits.reshape(*states.shape[:-1], self.lm_head_size)

    def for_vocabulary(self, vocab_size: int) -> MedusaHeads:
        """Heads with these weights that draft tokens below `vocab_size` only."""
        if vocab_size == self.vocab_size:
            return self
        heads = copy.copy(self)
        heads.vocab_size = vocab_size
        if self.lm_heads is None:
            heads.lm_head_size = vocab_size
        elif self.token_map is None and vocab_size < self.lm_head_size:
            heads.lm_head_size = vocab_size
            rows = nn.Parameter(self.lm_heads.detach()[:, :vocab_size], requires_grad=False)
            # A copied module shares this table with the original.
            heads._parameters = {**self._parameters, "lm_heads": rows}
        return heads

    def save(
        self,
        folder: str | os.PathLike,
        base_model: str | None = None,
        accuracies: Sequence[Sequence[float]] | None = None,
    ) -> None:
        """Writes `config.json` and `medusa_lm_head.safetensors` in the published layout.

        Args:
            folder (`str` or `os.PathLike`): Made if needed.
            base_model (`str`, *optional*): Name or folder of the target; `None`: as loaded.
            accuracies (`Sequence[Sequence[float]]`, *optional*): `[i][r]`: how often head i's candidate of rank r was
                right, 10 ranks a head; the default draft tree is made from them. `None`: as loaded.

        Raises:
            SpecConfigError: The heads have a token map, which the layout has no place for.
        """
        if self.token_map is not None:
            raise SpecConfigError(
                "Medusa heads with a cut vocabulary (`token_map`) cannot be saved: the published layout has no place "
                "for the map. Keep the checkpoint that they were loaded from."
            )
        accuracies = self.accuracies if accuracies is None else accuracies
        config = {
            "base_model_name_or_path": base_model or self.base_model,
            "medusa_num_heads": self.num_heads,
            "medusa_num_layers": self.num_layers,
            "transformers_version": transformers.__version__,
        }
        if self.lm_heads is None:
            config["version"] = "2"
        if accuracies is not None:
            config["medusa_accuracies"] = [[round(float(share), 4) for share in ranks] for ranks in accuracies]
        save_checkpoint(folder, config, self._published_tensors(), MEDUSA_FILES[0])

    def _published_tensors(self) -> dict[str, torch.Tensor]:
        """One tensor a head, under the published names. Readers count on the biases, so there are always some."""
        tensors = {}
        for head in range(self.num_heads):
            for layer, weight in enumerate(self.weights):
                bias = self.biases[layer][head] if self.biases else weight.new_zeros(self.hidden_size)
                tensors[f"{head}.{layer}.linear.weight"] = weight[head]
                tensors[f"{head}.{layer}.linear.bias"] = bias
            if self.lm_heads is not None:
                own = self.lm_heads[min(head, len(self.lm_heads) - 1)]
                tensors[f"{head}.{self.num_layers}.weight"] = own if self.logit_scale == 1 else own * self.logit_scale
        return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def _linear(stream: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Every head's linear map: `(K, R, out)` for a stream `(R, in)` that all heads read, or `(K, R, in)`."""
    if stream.dim() == 2:
        flat = F.linear(stream, weight.flatten(0, 1), None if bias is None else bias.flatten())
        return flat.unflatten(1, weight.shape[:2]).transpose(0, 1)
    product = stream @ weight.transpose(1, 2)
    return product if bias is None else product + bias[:, None]


# Loading


@loads_checkpoint
def load_medusa(config: SpeculativeConfig, target_model: nn.Module) -> MedusaHeads:
    """Loads the heads of `config.model` in the target's dtype, on its device, unless the settings say otherwise.

    Heads and layers are counted in the weights: published configs are wrong about them. Only the heads' own tensors
    are read.

    Args:
        config (`SpeculativeConfig`): `model`, `revision`, `subfolder`, `dtype`, `device`.
        target_model (`PreTrainedModel`): The target.

    Raises:
        SpecConfigError: No checkpoint was named, or quantisation was asked for.
        CheckpointFormatError: The checkpoint holds no Medusa heads, is incomplete, contradicts itself, or belongs to
            a target of another width or vocabulary.
    """
    if config.model is None:
        raise SpecConfigError(
            "spec_method='medusa' needs the checkpoint of the heads. Pass its folder or repo id as `spec_model`."
        )
    dtype, device = head_placement(config, target_model)
    checkpoint = Checkpoint(config, MEDUSA_FILES, unwrap=True)
    plan = _Plan(checkpoint)
    plan.check_shapes()
    plan.check_target(target_model)
    return plan.heads(vocabulary_size(target_model), dtype, device)


def fitting_heads(heads: nn.Module, target_model: nn.Module) -> MedusaHeads:
    """Heads that were not loaded here, such as those in training, checked against the target.

    Raises:
        SpecConfigError: They are no Medusa heads, or for a target of another width or vocabulary.
    """
    if not isinstance(heads, MedusaHeads):
        raise SpecConfigError(
            f"spec_method='medusa' drafts with MedusaHeads, got a {type(heads).__name__}. Pass heads, or the folder "
            "or repo id of their checkpoint as `spec_model`."
        )
    own_size = None if heads.lm_heads is None else heads.vocab_size
    check_target("The Medusa heads", heads.hidden_size, own_size, target_model, SpecConfigError)
    _check_tokens("The Medusa heads", heads.token_map, target_model, SpecConfigError)
    return heads.for_vocabulary(vocabulary_size(target_model))


def _check_tokens(heads: str, token_map: torch.LongTensor | None, target_model: nn.Module, error: type) -> None:
    """A token map must not lead out of the target's vocabulary."""
    last, vocab_size = 0 if token_map is None else int(token_map.max()), vocabulary_size(target_model)
    if last >= vocab_size:
        raise error(
            f"{heads} draft the token {last} (`token_map`), the target has {vocab_size} tokens. Pass those that were "
            "trained for this target."
        )


@dataclass(frozen=True)
class _Names:
    """How a format names its tensors. The lm_head of the original format counts as the layer behind the last one."""

    prefix: str
    block: str
    lm_head: str

    def weight(self, head: int, layer: int) -> str:
        return self.prefix + self.block.format(head=head, layer=layer) + ".weight"

    def bias(self, head: int, layer: int) -> str:
        return self.prefix + self.block.format(head=head, layer=layer) + ".bias"

    def lm_head_weight(self, head: int, num_layers: int) -> str:
        return self.prefix + self.lm_head.format(head=head, layer=num_layers)

    def heads_and_layers(self, template: str, names: Sequence[str]) -> list[tuple[int, int]]:
        """Head and layer of every name that a template of this format gives."""
        parts = map(re.escape, re.split(r"\{\w+\}", self.prefix + template))
        pattern = re.compile("([0-9]{1,9})".join(parts))
        found = [match.groups() for match in map(pattern.fullmatch, names) if match]
        return [(int(indices[0]), int(indices[-1])) for indices in found]


_FORMATS = (
    _Names("", "blocks.{head}.layers.{layer}", "lm_heads.{head}.weight"),
    _Names("medusa_head.", "{head}.{layer}.linear", "{head}.{layer}.weight"),
    _Names("", "{head}.{layer}.linear", "{head}.{layer}.weight"),
)


def _counted(names: Sequence[str]) -> tuple[_Names, int, int] | None:
    """How the heads among tensors of these names are named, how many they are, and layers of each."""
    for form in _FORMATS:
        if blocks := form.heads_and_layers(form.block + ".weight", names):
            own = form.heads_and_layers(form.lm_head, names)
            return form, 1 + max(head for head, _ in [*blocks, *own]), 1 + max(layer for _, layer in blocks)
    return None


def count_heads(names: Iterable[str]) -> int | None:
    """Heads among tensors of these names, without the wrappers of files; `None` where there are none."""
    found = _counted(list(names))
    return found and found[1]


# Keys of configs that are read here.
_READ = frozenset("logit_scale medusa_accuracies medusa_fc_bias original_lm_head truncated_vocab_size".split())


def refusal(names: Iterable[str], config: Mapping[str, Any]) -> str | None:
    """Why heads with this config are not supported, whatever their tensors are called; `None` where they are."""
    return refused_key(config, "medusa", _READ)


class _Plan:
    """What a checkpoint holds, and how it becomes `MedusaHeads`."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint, self.config = checkpoint, checkpoint.config
        if reason := refusal(checkpoint.shapes, self.config):
            raise CheckpointFormatError(f"'{checkpoint.name}' {reason}")
        names = list(checkpoint.shapes)
        found = _counted(names)
        if found is None:
            raise CheckpointFormatError(
                f"'{checkpoint.name}' holds no Medusa heads: {checkpoint.file} has {len(names)} tensors"
                f"{' such as ' + names[0] if names else ''}, none of them named like '0.0.linear.weight', "
                "'medusa_head.0.0.linear.weight' or 'blocks.0.layers.0.weight'. Pass a checkpoint of Medusa heads."
            )
        self.names, self.num_heads, self.num_layers = found
        own = self.names.heads_and_layers(self.names.lm_head, names)
        self.has_bias = bool(self.names.heads_and_layers(self.names.block + ".bias", names))
        one_lm_head = checkpoint.setting("original_lm_head", *FLAG)
        self.num_lm_heads = 0 if not own else 1 if one_lm_head else self.num_heads
        self._require_all()
        self.hidden_size = checkpoint.matrix(self.names.weight(0, 0))[1]
        self.token_map = self._token_map()
        self._read_settings()

    def _token_map(self) -> torch.LongTensor | None:
        """The tokens of a cut vocabulary."""
        size, whole = (self.checkpoint.setting(key, *COUNT) for key in ("truncated_vocab_size", "vocab_size"))
        if size is None or whole is None or size >= whole:
            return None
        name = self.names.prefix + "token_map"
        self.checkpoint.require([name], "a cut vocabulary")
        self._check_shape(name, (size,))
        tokens = self.checkpoint.read([name])[name]
        if tokens.dtype not in _INTEGERS or tokens.min() < 0 or len(tokens.unique()) < size:
            found = f"{len(tokens.unique())}, from {tokens.min()} on" if tokens.dtype in _INTEGERS else tokens.dtype
            raise CheckpointFormatError(
                f"'{self.checkpoint.name}': {name} must hold the ids of {size} different tokens, got {found}. Pass an "
                "intact checkpoint."
            )
        return tokens.long()

    def _read_settings(self) -> None:
        setting = self.checkpoint.setting
        self.base_model = setting("base_model_name_or_path", NAME.is_valid, "a name or a path")
        scale = setting("logit_scale", lambda value: is_number(value) and 0 < value < 1e38, "a positive number")
        self.logit_scale = 1.0 if scale is None else float(scale)
        self.accuracies = setting(
            "medusa_accuracies",
            lambda value: _is_table(value, self.num_heads),
            f"a list of numbers from 0 to 1 for each of the {self.num_heads} heads",
        )

    def _require_all(self) -> None:
        what = f"{self.num_heads} Medusa heads with {self.num_layers} layers"
        self.checkpoint.check_count(self.num_heads * self.num_layers, what)
        heads, layers = range(self.num_heads), range(self.num_layers)
        wanted = [self.names.weight(head, layer) for head in heads for layer in layers]
        if self.has_bias:
            wanted += [self.names.bias(head, layer) for head in heads for layer in layers]
        wanted += self.lm_head_names
        self.checkpoint.require(wanted, what)

    @property
    def lm_head_names(self) -> list[str]:
        return [self.names.lm_head_weight(head, self.num_layers) for head in range(self.num_lm_heads)]

    def check_shapes(self) -> None:
        """All heads must be of one size."""
        width = self.hidden_size
        for head in range(self.num_heads):
            for layer in range(self.num_layers):
                self._check_shape(self.names.weight(head, layer), (width, width))
                if self.has_bias:
                    self._check_shape(self.names.bias(head, layer), (width,))
        for name in self.lm_head_names:
            self._check_shape(name, (self._expected_rows(self._rows(name)), width))

    def _expected_rows(self, rows: int) -> int:
        """`rows` if an lm_head may have that many, otherwise how many it must have."""
        if self.token_map is None:
            return self._rows(self.lm_head_names[0])
        # Not every lm_head is stored cut.
        return rows if rows > int(self.token_map.max()) else len(self.token_map)

    def _rows(self, name: str) -> int:
        return self.checkpoint.matrix(name)[0]

    def _check_shape(self, name: str, expected: tuple[int, ...]) -> None:
        found = self.checkpoint.shapes[name]
        if found != expected:
            raise CheckpointFormatError(
                f"'{self.checkpoint.name}': {name} has the shape {found}, and the other tensors of its heads ask for "
                f"{expected}. Pass an intact checkpoint."
            )

    def check_target(self, target_model: nn.Module) -> None:
        """The heads must read the target's states and speak its tokens."""
        base = f" (trained for '{self.base_model}')" if self.base_model else ""
        heads, size = f"'{self.checkpoint.name}': the Medusa heads{base}", None
        if self.num_lm_heads:
            size = self._rows(self.lm_head_names[0]) if self.token_map is None else self.config["vocab_size"]
            _check_tokens(heads, self.token_map, target_model, CheckpointFormatError)
        check_target(heads, self.hidden_size, size, target_model)

    def heads(self, vocab_size: int, dtype: torch.dtype | None, device: torch.device) -> MedusaHeads:
        rows = None
        if self.num_lm_heads:
            stored = self._rows(self.lm_head_names[0])
            rows = min(stored, vocab_size) if self.token_map is None else len(self.token_map)
        with torch.device("meta"):
            heads = MedusaHeads(
                self.hidden_size,
                vocab_size,
                self.num_heads,
                self.num_layers,
                own_lm_heads=rows is not None,
                bias=self.has_bias,
                one_lm_head=self.num_lm_heads == 1,
                lm_head_size=rows,
                has_token_map=rows is not None and self.token_map is not None,
                logit_scale=self.logit_scale,
            )
        self._fill(heads, dtype, device)
        heads.accuracies, heads.base_model = self.accuracies, self.base_model
        return heads.requires_grad_(False).eval()

    def _fill(self, heads: MedusaHeads, dtype: torch.dtype | None, device: torch.device) -> None:
        each = range(self.num_heads)

        def stacked(names: Sequence[str], cut: Callable = lambda tensor: tensor) -> nn.Parameter:
            # One at a time: the lm_heads of large targets are gigabytes.
            whole = None
            for index, name in enumerate(names):
                tensor = cut(self.checkpoint.read_weights([name], dtype, device)[name])
                whole = tensor.new_empty((len(names), *tensor.shape)) if whole is None else whole
                whole[index] = tensor
            return nn.Parameter(whole, requires_grad=False)

        for layer in range(self.num_layers):
            heads.weights[layer] = stacked([self.names.weight(head, layer) for head in each])
            if self.has_bias:
                heads.biases[layer] = stacked([self.names.bias(head, layer) for head in each])
        if heads.lm_heads is not None:
            heads.lm_heads = stacked(self.lm_head_names, lambda rows: self._cut(rows, heads.lm_head_size))
        if heads.token_map is not None:
            heads.token_map = self.token_map.to(device)

    def _cut(self, rows: torch.Tensor, size: int) -> torch.Tensor:
        """The rows of an lm_head that are used: those of the target's tokens, or of the cut vocabulary."""
        if self.token_map is not None and len(rows) > size:
            return rows[self.token_map.to(rows.device)]
        return rows[:size]


def _is_table(value: Any, num_rows: int) -> bool:
    """Whether it is a list of accuracies for each head."""
    rows = value if isinstance(value, list) and len(value) == num_rows else [None]
    return all(isinstance(row, list) and row and all(is_number(x) and 0 <= x <= 1 for x in row) for row in rows)
