"""Draft networks: the parts that they share with the target, their vocabulary, and their loading.

Shapes: R rows, T tokens, h hidden size, V vocabulary of the target, U that of the draft.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar
from weakref import ref

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ..checkpoints.draft_reader import DraftConfig
from ..checkpoints.header import TargetNeeds
from ..checkpoints.loading import LoadedNetwork
from ..checkpoints.reader import CheckpointReader
from ..errors import CheckpointFormatError
from ..settings import SpeculativeConfig
from ..target_facts import device_of, is_packed, numbers_of
from .llama import RotaryAngles
from .plan import Way, bind_linears, is_hooked, project, way_of


class TargetParts:
    """Embedding and lm_head of a target. No module: they are no part of a draft, and copies of a draft share them.

    They are looked up when they are used, because adapters and new vocabularies put others in their place. The target
    is not kept alive; once it is gone, the last ones that it had remain.
    """

    # What finds each part in a target, by its name.
    finders: ClassVar[dict[str, Callable[[nn.Module], Any]]] = {
        "embedding": lambda target: target.get_input_embeddings(),
        "head": lambda target: target.get_output_embeddings(),
    }

    def __init__(self, target_model: nn.Module):
        self._target: Callable[[], nn.Module | None] | None = ref(target_model)
        self._last = {name: find(target_model) for name, find in self.finders.items()}

    def __getattr__(self, name: str) -> Any:
        find = self.finders.get(name)
        if find is None:
            raise AttributeError(f"{type(self).__name__} has no part '{name}'.")
        target = None if self._target is None else self._target()
        if target is not None:
            self._last[name] = find(target)
        return self._last[name]

    def __deepcopy__(self, memo: dict[int, Any]) -> TargetParts:
        return self

    def __getstate__(self) -> dict[str, Any]:
        # In another process the last parts are left.
        return {**vars(self), "_target": None}

    def bind_embedding(self) -> Callable[[torch.LongTensor], torch.Tensor]:
        """What gives rows `(R, T, h)` of the embedding that the target has now, without scaling after it."""
        embedding = find_rows = self.embedding
        if isinstance(embedding, nn.Embedding):
            weight = embedding.weight
            # Rows that are packed into integers are known to their own module alone.
            is_plain = type(embedding).forward is nn.Embedding.forward or not weight.is_floating_point()
            if is_distributed(weight):
                # Hooks of the table may collect its rows.
                find_rows = embedding if is_plain and is_hooked(embedding) else partial(_distributed_rows, weight)
            elif not is_plain:
                find_rows = partial(F.embedding, weight=weight)
        else:
            # Of an adapter, which also scales what the embedding inside of it does.
            scale = getattr(getattr(embedding, "base_layer", None), "embed_scale", None)
            find_rows = embedding if scale is None else lambda tokens: embedding(tokens) / scale
        device = embedding_device(embedding)
        return lambda tokens: find_rows(tokens.to(device))

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """Logits `(..., V)` of an output `(..., h)`, for networks of one's own."""
        return self.bind_head(way_of(output), output)(output)

    def bind_head(self, way: Way, like: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """Logits `(..., V)` by the lm_head that the target has now, of outputs `(..., h)` like a tensor."""
        head = self.head
        weight = getattr(head, "weight", None)
        if not torch.is_tensor(weight):
            # Packed for torch's own integer kernels.
            return lambda output: head(output.to("cpu", torch.float32))
        device = _device_of(head, weight)
        # Other packed weights are of integers, and take states as they are.
        dtype = weight.dtype if weight.is_floating_point() else None
        if (weight.device.type, weight.dtype) != (like.device.type, like.dtype):
            return lambda output: project(head, output.to(device, dtype))
        run, _ = bind_linears(way, weight.dtype, [head])
        return lambda output: run(output.to(device))[0]


def embedding_device(embedding: nn.Module) -> torch.device | None:
    """Where an embedding computes; one without weights of its own, such as a packed one, says nothing of it."""
    weight = getattr(embedding, "weight", None)
    return _device_of(embedding, weight) if torch.is_tensor(weight) else None


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


def is_copy(weight: torch.Tensor, of_target: Any) -> bool:
    """Tells whether a tensor of a draft is a copy of one of the target's, of its dtype and on its device."""
    if not torch.is_tensor(of_target) or is_distributed(of_target) or is_packed(of_target):
        return False
    alike = (weight.shape, weight.dtype, weight.device) == (of_target.shape, of_target.dtype, of_target.device)
    return alike and torch.equal(weight, of_target)


class DraftModule(LoadedNetwork):
    """Network whose dtype and device are those of one of its weights, and that may share embedding and lm_head."""

    _weight: torch.Tensor
    _target: Any  # its [`TargetParts`]
    token_ids: torch.LongTensor | None  # (U,): the target's ids of draft ids, where they are others
    embed_tokens: Any
    lm_head: Any

    @property
    def dtype(self) -> torch.dtype:
        return self._weight.dtype

    @property
    def device(self) -> torch.device:
        return self._weight.device

    def embed(self, tokens: torch.LongTensor) -> torch.Tensor:
        """Embeddings `(R, T, h)` of the target's tokens `(R, T)`, in the dtype and on the device of the draft."""
        return self.bind_embedding()(tokens)

    def bind_embedding(self) -> Callable[[torch.LongTensor], torch.Tensor]:
        """`embed` by the draft's own embedding, or the one that the target has now."""
        embedding, like = self.embed_tokens, self._weight
        if embedding is not None:
            return lambda tokens: embedding(tokens.to(like.device))
        embed = self._target.bind_embedding()
        return lambda tokens: embed(tokens).to(like)

    def bind_head(self, way: Way, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
        """Logits by the draft's own lm_head, or the one that the target has now."""
        if self.lm_head is not None:
            project, _ = bind_linears(way, dtype, [self.lm_head])
            return lambda output: project(output)[0]
        head = self._target.bind_head(way, self._weight)
        return lambda output: head(output).to(output)

    @property
    def shared_modules(self) -> tuple[nn.Module, ...]:
        """Modules of the target that the draft goes through: its embedding and lm_head, unless it has its own."""
        shared = {"embedding": self.embed_tokens, "head": self.lm_head}
        return tuple(getattr(self._target, name) for name, own in shared.items() if own is None)

    def target_ids(self, draft_ids: torch.LongTensor) -> torch.LongTensor:
        """The target's ids of draft ids, of any shape."""
        return draft_ids if self.token_ids is None else self.token_ids[draft_ids]


class DraftNetwork(DraftModule):
    """A draft with layers, and maybe a vocabulary, of its own."""

    # The tables of a draft are as long as the vocabulary.
    most_gap: ClassVar[float] = 0
    config: DraftConfig
    has_targets_embedding: bool = False  # also where it was stored again

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.config = config
        self.head_size: int = config.head_dim
        sizes = Qwen3Config(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=dict(config.rope_parameters),
        )
        # Its frequencies are in no checkpoint.
        with torch.device("cpu"):
            self.rotary_emb: LlamaRotaryEmbedding = LlamaRotaryEmbedding(sizes)
        self.angles: RotaryAngles = RotaryAngles(self.rotary_emb)

    def fitted(
        self, config: SpeculativeConfig, target_model: nn.Module, reader: CheckpointReader | None = None
    ) -> DraftNetwork:
        self.rotary_emb.to(self.device)
        self.attach(target_model)
        embedding, of_target = self.embed_tokens, target_model.get_input_embeddings().weight
        if reader is None or not reader.stated("tie_word_embeddings") or self.lm_head is not None:
            return self
        # Configs are copied from targets, and what is said of these is no news; so is what EAGLE-1 has of the target.
        if not (embedding is None or self.has_targets_embedding or is_close(embedding.weight, of_target)):
            raise CheckpointFormatError(
                f"'{reader.name}' has `tie_word_embeddings`=true in its config.json, an embedding of its own, and no "
                "`lm_head.weight`: a draft with its embedding as lm_head is not supported. Pass one with an lm_head."
            )
        return self

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

    def target_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits `(..., V)` over the target's vocabulary, -inf for what the draft lacks, from those of `logits`."""
        return over_vocabulary(logits, self.token_ids, self.config.vocab_size)


def over_vocabulary(logits: torch.Tensor, ids: torch.LongTensor | None, size: int) -> torch.Tensor:
    """Logits `(..., size)` from those of the tokens `ids`, by default the first ones; -inf for the others."""
    missing = size - logits.shape[-1]
    if ids is None:
        return F.pad(logits, (0, missing), value=-torch.inf) if missing else logits
    return logits.new_full((*logits.shape[:-1], size), -torch.inf).index_copy_(-1, ids, logits)


def is_close(weight: torch.Tensor, of_target: Any) -> bool:
    """Tells whether a tensor of a draft is one of the target's but for rounding."""
    if of_target.is_meta or (of_target := numbers_of(of_target)) is None or weight.shape[1:] != of_target.shape[1:]:
        return False
    rows = min(len(weight), len(of_target))
    return torch.allclose(weight[:rows].float(), of_target[:rows].to(weight.device).float(), rtol=2e-2, atol=1e-3)
