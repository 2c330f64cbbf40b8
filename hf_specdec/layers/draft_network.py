"""Draft networks: the parts that they share with the target, their vocabulary, and their loading.

Shapes: R rows, T tokens, h hidden size, V vocabulary of the target, U that of the draft.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container
from dataclasses import replace
from typing import Any, ClassVar
from weakref import ref

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen3Config
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.draft_reader import DraftConfig, DraftReader
from ..checkpoints.header import TargetNeeds
from ..checkpoints.loading import filled
from ..checkpoints.quantised import quantise_layers
from ..errors import CheckpointFormatError, shown
from ..target_facts import device_of, is_packed, numbers_of
from .llama import DirectModule, GatedMLP, RMSNorm, RotaryAttention, is_hooked, project
from .protocols import LayerSizes
from .rope import RotaryAngles


class TargetParts:
    """Embedding and lm_head of a target. No module: they are no part of a draft, and copies of a draft share them.

    They are looked up when they are used, because adapters and new vocabularies put others in their place. The target
    is not kept alive; once it is gone, the last ones that it had remain.

    Attributes:
        finders (`dict[str, Callable]`): For the name of each part what finds it in a target.
    """

    finders: ClassVar[dict[str, Callable[[nn.Module], Any]]] = {
        "embedding": lambda target: target.get_input_embeddings(),
        "head": lambda target: target.get_output_embeddings(),
    }

    def __init__(self, target_model: nn.Module):
        self._target: Callable[[], nn.Module | None] = ref(target_model)
        self._last = {name: find(target_model) for name, find in self.finders.items()}

    def __getattr__(self, name: str) -> Any:
        find = self.finders.get(name)
        if find is None:
            raise AttributeError(f"{type(self).__name__} has no part '{name}'.")
        target = self._target()
        if target is not None:
            self._last[name] = find(target)
        return self._last[name]

    def __deepcopy__(self, memo: dict[int, Any]) -> TargetParts:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_target": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _target=_gone)

    def embed(self, tokens: torch.LongTensor) -> torch.Tensor:
        """Rows `(R, T, h)` of the embedding; what some targets do after it, such as scaling, is left out."""
        embedding = self.embedding
        tokens = on_device_of(embedding, tokens)
        if isinstance(embedding, nn.Embedding):
            weight = embedding.weight
            # Rows that are packed into integers are known to their own module alone.
            is_plain = type(embedding).forward is nn.Embedding.forward or not weight.is_floating_point()
            if is_distributed(weight):
                # Hooks of the table may collect its rows.
                return embedding(tokens) if is_plain and is_hooked(embedding) else _distributed_rows(weight, tokens)
            return embedding(tokens) if is_plain else F.embedding(tokens, weight)
        # Of an adapter, which also scales what the embedding inside of it does.
        scale = getattr(getattr(embedding, "base_layer", None), "embed_scale", None)
        rows = embedding(tokens)
        return rows if scale is None else rows / scale

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """Logits `(..., V)` that the target's lm_head computes from an output `(..., h)`."""
        head = self.head
        weight = getattr(head, "weight", None)
        if not torch.is_tensor(weight):
            # Packed for torch's own integer kernels.
            return head(output.to("cpu", torch.float32))
        # Other packed weights are of integers, and take states as they are.
        dtype = weight.dtype if weight.is_floating_point() else None
        return project(head, output.to(_device_of(head, weight), dtype))


def _gone() -> None:
    """Stands in the place of a weak reference whose target is in another process."""


def on_device_of(embedding: nn.Module, tokens: torch.LongTensor) -> torch.LongTensor:
    """Tokens where an embedding computes; one without weights of its own, such as a packed one, says nothing of it."""
    weight = getattr(embedding, "weight", None)
    return tokens.to(_device_of(embedding, weight)) if torch.is_tensor(weight) else tokens


def _device_of(module: nn.Module, weight: torch.Tensor) -> torch.device:
    """Device where a module computes; offloaded modules have their weights nowhere between their forwards."""
    return device_of(module, weight.device) if weight.is_meta else weight.device


def _distributed_rows(weight: torch.Tensor, tokens: torch.LongTensor) -> torch.Tensor:
    """Rows of a table that is spread over processes."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = weight.device_mesh
    everywhere = DTensor.from_local(tokens, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return F.embedding(everywhere, weight).full_tensor()


def is_distributed(tensor: torch.Tensor) -> bool:
    """Tells whether the processes of a group have a part of a tensor each."""
    return hasattr(tensor, "full_tensor")


def is_copy(own: torch.Tensor, given: Any) -> bool:
    """Tells whether a tensor of a draft is a copy of one of the target's, of its dtype and on its device."""
    if not torch.is_tensor(given) or is_distributed(given) or is_packed(given):
        return False
    alike = (own.shape, own.dtype, own.device) == (given.shape, given.dtype, given.device)
    return alike and torch.equal(own, given)


def rotary_embedding(config: DraftConfig) -> LlamaRotaryEmbedding:
    """transformers' rotary embedding of a draft, on the CPU: its frequencies are in no checkpoint."""
    sizes = Qwen3Config(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=dict(config.rope_parameters),
    )
    with torch.device("cpu"):
        return LlamaRotaryEmbedding(sizes)


class DraftModule(DirectModule):
    """Network whose dtype and device are those of one of its weights."""

    _weight: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self._weight.dtype

    @property
    def device(self) -> torch.device:
        return self._weight.device


class DraftNetwork(DraftModule):
    """A draft with layers, and maybe a vocabulary, of its own.

    Args:
        config (`DraftConfig`): What it consists of.

    Attributes:
        token_ids (`torch.LongTensor` of shape `(U,)`): The target's id of each draft id; `None` where they are equal.
        head_size (`int`): Size of an attention head.
        rotary_emb (`nn.Module`): Its rotary embedding, whose frequencies are in no checkpoint.
        angles (`RotaryAngles`): Those of that embedding.
        unreliable_flags (`tuple[str, ...]`): Flags of the config that checkpoints are known to have the wrong way.
        states_keys (`tuple[str, ...]`): Keys with which configs name the states of the target that it reads.
        states_setting (`str`, *optional*): Setting that names them.
        has_targets_embedding (`bool`): Its embedding is the target's, also where it was stored again.
    """

    config: DraftConfig
    token_ids: torch.LongTensor | None
    unreliable_flags: tuple[str, ...] = ()
    states_keys: tuple[str, ...] = ()
    states_setting: str | None = None
    has_targets_embedding: bool = False

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.config = config
        self.head_size: int = config.head_dim
        self.rotary_emb: LlamaRotaryEmbedding = rotary_embedding(config)
        self.angles: RotaryAngles = RotaryAngles(self.rotary_emb)

    def with_settings(self, **settings: Any) -> DraftNetwork:
        """Copies the network with other settings in its config; the copy shares its weights."""
        changed = copy.copy(self)
        changed.config = replace(self.config, **settings)
        if "rope_parameters" in settings:
            made = rotary_embedding(changed.config).to(self.rotary_emb.inv_freq.device)
            changed._modules, changed.angles = {**self._modules, "rotary_emb": made}, RotaryAngles(made)
        return changed

    def attach(self, target_model: nn.Module) -> DraftNetwork:
        """Reads from `target_model` what the draft has not itself."""
        raise NotImplementedError(f"{type(self).__name__} must implement attach().")

    @property
    def needs(self) -> TargetNeeds:
        """The target that it was made for."""
        return self.config.needs

    @property
    def _weight(self) -> torch.Tensor:
        """A weight that every draft has, and that stays as it is where its matrices are packed."""
        first = next(iter(self._modules["layers"]))
        return first.post_attention_layernorm.weight

    def embed(self, tokens: torch.LongTensor) -> torch.Tensor:
        """Embeddings `(R, T, h)` of the target's tokens `(R, T)`, in the dtype and on the device of the draft."""
        if self.embed_tokens is not None:
            return self.embed_tokens(tokens.to(self.device))
        return self._target.embed(tokens).to(self._weight)

    @property
    def shared_modules(self) -> tuple[nn.Module, ...]:
        """Modules of the target that the draft goes through: its embedding and lm_head, unless it has its own."""
        shared = {"embedding": self.embed_tokens, "head": self.lm_head}
        return tuple(getattr(self._target, name) for name, own in shared.items() if own is None)

    def target_ids(self, draft_ids: torch.LongTensor) -> torch.LongTensor:
        """The target's ids of draft ids, of any shape."""
        return draft_ids if self.token_ids is None else self.token_ids[draft_ids]

    def target_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits `(..., V)` over the target's vocabulary, -inf for what the draft lacks, from those of `logits`."""
        size = self.config.vocab_size
        if self.token_ids is None and logits.shape[-1] == size:
            return logits
        full = logits.new_full((*logits.shape[:-1], size), -torch.inf)
        if self.token_ids is None:
            full[..., : logits.shape[-1]] = logits
            return full
        return full.index_copy_(-1, self.token_ids, logits)


def loaded_network(
    make: Callable[[], DraftNetwork],
    reader: DraftReader,
    checkpoint: Checkpoint,
    target_model: nn.Module,
    placement: tuple[torch.dtype | None, torch.device],
    quantization: str | None = None,
) -> DraftNetwork:
    """Loads the network of a checkpoint and attaches it to the target.

    Args:
        make (`Callable`): Makes the network from its record.
        reader (`DraftReader`): What has made the record, and knows the tensors.
        checkpoint (`Checkpoint`): Where they are.
        target_model (`PreTrainedModel`): The target.
        placement (`tuple`): Dtype of the weights (`None`: as stored) and device.
        quantization (`str`, *optional*): The setting, for its decoder layers.

    Raises:
        SpecConfigError: The layers do not fit the quantisation.
        CheckpointFormatError: The settings of its rotary embedding make no sense, or tensors are missing, not known
            or of other shapes.
    """

    def made() -> DraftNetwork:
        try:
            return make()
        except (ArithmeticError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointFormatError(
                f"'{reader.name}': no rotary embedding can be made of {shown(reader.rope_parameters())}: "
                f"{shown(error)}. Correct `rope_parameters` or `rope_scaling` in its config.json."
            ) from error

    network = filled(made, reader, checkpoint, placement)
    network.rotary_emb.to(placement[1])
    network.attach(target_model)
    _check_tied(reader, network, target_model)
    if quantization is not None:
        quantise_layers((network.layers,), quantization)
    return network


def _check_tied(reader: DraftReader, network: DraftNetwork, target_model: nn.Module) -> None:
    """Refuses a draft whose lm_head is its own embedding: without an lm_head in the file, the target's is used."""
    if not reader.stated("tie_word_embeddings") or network.lm_head is not None:
        return
    own = network.embed_tokens
    given = target_model.get_input_embeddings().weight
    # Configs are copied from targets, and what is said of these is no news; so is what EAGLE-1 has of the target.
    if own is None or network.has_targets_embedding or is_close(own.weight, given):
        return
    raise CheckpointFormatError(
        f"'{reader.name}' has `tie_word_embeddings`=true in its config.json, an embedding of its own, and no "
        "`lm_head.weight`: a draft with its embedding as lm_head is not supported. Pass one with an lm_head."
    )


def is_close(own: torch.Tensor, given: Any) -> bool:
    """Tells whether a tensor of a draft is one of the target's but for rounding."""
    if given.is_meta or (given := numbers_of(given)) is None or own.shape[1:] != given.shape[1:]:
        return False
    rows = min(len(own), len(given))
    return torch.allclose(own[:rows].float(), given[:rows].to(own.device).float(), rtol=2e-2, atol=1e-3)


def new_attention(
    config: LayerSizes,
    layer_idx: int,
    biases: Container[str] = (),
    has_head_norms: bool = False,
    width: int | None = None,
    is_causal: bool = True,
) -> RotaryAttention:
    """Attention with random weights.

    Args:
        config (`LayerSizes`): Has the sizes.
        layer_idx (`int`): Which layer of the cache it is.
        biases (`Container[str]`): Names of the linear layers that have a bias.
        has_head_norms (`bool`): Queries and keys are normed.
        width (`int`, *optional*): Of what it reads, by default the hidden size.
        is_causal (`bool`): See the class.
    """
    size, head_dim = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    shapes = {name: (width or size, keys) for name in ("k_proj", "v_proj")}
    shapes |= {"q_proj": (width or size, queries), "o_proj": (queries, size)}
    norms = (RMSNorm(head_dim, config.rms_norm_eps), RMSNorm(head_dim, config.rms_norm_eps))
    return RotaryAttention(
        **{name: nn.Linear(*shape, bias=name in biases) for name, shape in shapes.items()},
        head_dim=head_dim,
        groups=config.num_attention_heads // config.num_key_value_heads,
        layer_idx=layer_idx,
        head_norms=norms if has_head_norms else None,
        is_causal=is_causal,
    )


def new_mlp(config: LayerSizes, biases: Container[str] = ()) -> GatedMLP:
    """An MLP with random weights; `biases` names the linear layers that have a bias."""
    outer, inner = config.hidden_size, config.intermediate_size
    shapes = {"gate_proj": (outer, inner), "up_proj": (outer, inner), "down_proj": (inner, outer)}
    linears = {name: nn.Linear(*shape, bias=name in biases) for name, shape in shapes.items()}
    return GatedMLP(**linears, act_fn=ACT2FN[config.hidden_act])
