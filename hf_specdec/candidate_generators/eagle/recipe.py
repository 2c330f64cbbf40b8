"""Recipes of EAGLE heads: EAGLE-1, and EAGLE-3 with its training-time test.

A head learns on what it drafts from (EAGLE-3, Li et al. 2025, arXiv:2503.01840, section 3.1; for EAGLE-1 this is HASS,
arXiv:2408.15766). A cycle begins at every anchor t of a row. Its step 0 is the entry of token t + 1 with the target's
state of token t; step s is that of token t + 1 + s with the state that step s - 1 of the same cycle fed back, at
position t + s. It sees step 0 of the anchors up to t, and the steps 1 to s of its own cycle: what drafting sees. Step
s predicts token t + 2 + s, and its loss is weighted with `head_decay`^s.

Shapes as in `recipe.py`; U tokens that the draft knows, h its hidden size, C = T - 1 - s anchors of a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from hf_specdec.candidate_generators.eagle.formats import EagleConfig
from hf_specdec.candidate_generators.eagle.network import Eagle1Network, Eagle3Network, EagleNetwork
from hf_specdec.decoding.masks import FULL, Span
from hf_specdec.errors import SpecConfigError
from hf_specdec.target_facts import decoder_layers, hidden_size, vocabulary_size

from ...training.recipe import (
    IGNORED,
    Reading,
    Recipe,
    check_at_least,
    check_plain_head,
    check_share,
    draft_loss,
    sum_over_chunks,
)


class EagleRecipe(Recipe):
    """What networks have in common whose cycles walk on in their own states."""

    ttt_steps: int
    intermediate_size: int
    head_decay: float
    kl_weight: float
    noise: float = 0.0

    muon = True
    target_hidden_states = ("last",)
    num_drafts = 4

    def _check_common(self) -> None:
        check_at_least("ttt_steps", self.ttt_steps)
        check_at_least("intermediate_size", self.intermediate_size, 0)
        check_share("head_decay", self.head_decay)
        check_share("kl_weight", self.kl_weight)

    def states_for(self, network: EagleNetwork) -> tuple:
        return tuple(dict.fromkeys((*self.target_hidden_states, *network.target_hidden_states)))

    def check(self, target: PreTrainedModel) -> None:
        if target.get_output_embeddings() is None:
            raise SpecConfigError(f"{type(target).__name__} has no lm_head. Pass a causal language model as target.")
        if self.kl_weight:
            check_plain_head(target, "`kl_weight`")

    def step_loss(
        self, network: EagleNetwork, fed: torch.Tensor, token_loss: torch.Tensor, states: torch.Tensor
    ) -> torch.Tensor:
        """
        The loss of a step from that of its tokens; by default this.

        Args:
            fed (`torch.Tensor` of shape `(N, h)`): What the network feeds back at the places that count.
            token_loss (`torch.Tensor`): Mean loss of the tokens predicted there.
            states (`torch.Tensor` of shape `(N, H)`): The target's last states that `fed` stands for.
        """
        return token_loss

    def loss(self, network: EagleNetwork, reading: Reading) -> torch.Tensor:
        # Every process must take part in the step, also with rows in which nothing counts.
        total = sum(parameter.sum() for parameter in network.parameters() if parameter.requires_grad) * 0.0
        anchors = cycle_anchors(reading)
        if not anchors.numel():
            return total
        states = _fused(network, reading, anchors)
        states = states + self.noise * (torch.rand_like(states) - 0.5) if self.noise else states
        weights = self.head_decay ** torch.arange(self.ttt_steps, dtype=torch.float32)
        weights = (weights / weights.sum()).tolist()
        for step, (fed, output) in enumerate(walk_cycles(network, reading.tokens, states, anchors, self.ttt_steps)):
            labels = _draft_ids(network, _labels(reading, anchors, step))
            rows, cycles = (labels != IGNORED).nonzero(as_tuple=True)
            if len(rows):
                # Where the target has the state that the step stands for.
                places = rows * reading.tokens.shape[1] + anchors[rows, cycles] + step + 1
                counting = output[rows, cycles], labels[rows, cycles], places
                token_loss = self._token_loss(network, reading, *counting)
                last = reading.flat_states()[places]
                total = total + weights[step] * self.step_loss(network, fed[rows, cycles], token_loss, last)
        return total

    def _token_loss(self, network, reading, output, labels, places) -> torch.Tensor:
        """Mean loss of N tokens: `output` `(N, h)`, `labels` and `places` `(N,)`."""

        def chunk_loss(rows: slice) -> torch.Tensor:
            target_logits = None
            if self.kl_weight:
                target_logits = reading.target_logits(places[rows]).to(output.device)
                if network.token_ids is not None:
                    target_logits = target_logits[:, network.token_ids]
            return draft_loss(network.logits(output[rows]), labels[rows], target_logits, self.kl_weight).sum()

        vocab_size = reading.vocab_size if network.token_ids is None else len(network.token_ids)
        return sum_over_chunks(chunk_loss, len(labels), vocab_size) / len(labels)

    def hits(self, network: EagleNetwork, reading: Reading) -> tuple[torch.BoolTensor, torch.BoolTensor]:
        anchors = cycle_anchors(reading)
        shape = (self.num_drafts, *reading.tokens.shape)
        hits, known = reading.tokens.new_zeros((2, *shape), dtype=torch.bool)
        if not anchors.numel():
            return hits[:, None], known
        # A draft counts only behind right ones, so that the tokens drafted before it are those of the text.
        states = _fused(network, reading, anchors)
        cycles = walk_cycles(network, reading.tokens, states, anchors, self.num_drafts)
        for draft, (_, output) in enumerate(cycles):
            labels = _labels(reading, anchors, draft)
            best = [network.logits(part).argmax(-1) for part in output.flatten(0, 1).split(512)]
            best = network.target_ids(torch.cat(best)).view(labels.shape)
            known[draft].scatter_(1, anchors, labels != IGNORED)
            hits[draft].scatter_(1, anchors, best == labels)
        return hits[:, None], known


def cycle_anchors(reading: Reading) -> torch.LongTensor:
    """
    Where cycles begin in each row, `(B, C)`: where the first token that a cycle drafts counts. Rows with fewer are
    filled up with other places.
    """
    begins = reading.next_tokens(2) != IGNORED
    most = int(begins.sum(1).max()) if begins.numel() else 0
    return begins.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :most]


def _fused(network: EagleNetwork, reading: Reading, anchors: torch.LongTensor) -> torch.Tensor:
    """What the network's `fuse` makes of the target's states up to the last anchor."""
    last = int(anchors.max())
    return network.fuse({key: state[:, : last + 1] for key, state in reading.states.items()})


def _labels(reading: Reading, anchors: torch.LongTensor, step: int) -> torch.LongTensor:
    """The tokens that a step is to predict, `(B, C)`; -100 where there is none, or no cycle."""
    labels = reading.next_tokens(2 + step).gather(1, anchors)
    return labels.masked_fill(reading.next_tokens(2).gather(1, anchors) == IGNORED, IGNORED)


def walk_cycles(
    network: EagleNetwork, tokens: torch.LongTensor, states: torch.Tensor, anchors: torch.LongTensor, num_steps: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """
    The steps of the cycles that begin at the anchors of unpadded rows.

    Args:
        tokens (`torch.LongTensor` of shape `(B, T)`): Token ids.
        states (`torch.Tensor` of shape `(B, T, h)`): What the network's `fuse` made of the target's states.
        anchors (`torch.LongTensor` of shape `(B, C)`): Places before the last one, at least one.
        num_steps (`int`): Steps. Those that lead out of a row mean nothing.

    Yields:
        For each step both outputs of the network at every anchor, of shape `(B, C, h)`.
    """
    # Later entries are seen by no anchor.
    width = int(anchors.max()) + 1
    cache, seen = _StepCache(), torch.arange(width, device=tokens.device)
    causal = None
    if network.span != FULL:
        causal = _within(network.span, seen <= seen[:, None], seen[None], seen[None])
    read = network(tokens[:, 1 : width + 1], states[:, :width], seen[None], causal, cache)
    hidden, output = (_at(part, anchors) for part in read)
    yield hidden, output
    earlier = seen <= anchors[..., None]
    own = torch.eye(anchors.shape[1], dtype=torch.bool, device=tokens.device).expand(len(tokens), -1, -1)
    places = seen.expand(len(tokens), -1)
    for step in range(1, num_steps):
        next_tokens = tokens.gather(1, (anchors + step + 1).clamp(max=tokens.shape[1] - 1))
        places = torch.cat((places, anchors + step), dim=1)
        mask = _within(network.span, torch.cat((earlier, *[own] * step), dim=2), anchors + step, places)
        hidden, output = network(next_tokens, hidden, anchors + step, mask, cache)
        yield hidden, output


def _within(span: Span, mask: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """A mask `(B, 1, T, S)` of what `mask` `(B, T, S)` allows and the span too, by positions `(B, T)` and `(B, S)`."""
    far = span.hidden(queries[..., None], keys[:, None])
    return (mask if far is None else mask & ~far)[:, None]


def _at(states: torch.Tensor, anchors: torch.LongTensor) -> torch.Tensor:
    """The states `(B, T, h)` at the anchors, `(B, C, h)`."""
    return states.gather(1, anchors[..., None].expand(-1, -1, states.shape[-1]))


class _StepCache:
    """Keys and values of all steps so far, one after the other."""

    def __init__(self):
        self._steps: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int, *args, **kwargs):
        self._steps[layer].append((key, value))
        return tuple(torch.cat(parts, dim=2) for parts in zip(*self._steps[layer]))


def _draft_ids(network: EagleNetwork, labels: torch.LongTensor) -> torch.LongTensor:
    """The draft's ids of tokens, of any shape; -100 for those that it does not know."""
    if network.token_ids is None:
        return labels
    table = labels.new_full((network.config.vocab_size,), IGNORED)
    table[network.token_ids] = torch.arange(len(network.token_ids), device=labels.device)
    return table[labels.clamp(min=0)].masked_fill(labels == IGNORED, IGNORED)


@dataclass(frozen=True)
class Eagle1Recipe(EagleRecipe):
    """
    An EAGLE-1 head, which EAGLE-2 drafts with too: regression of the target's next state, and through the target's
    lm_head the next token (Li et al. 2024, arXiv:2401.15077, section 4.2). Its layer begins as the target's last one.

    Args:
        ttt_steps (`int`): Steps of a cycle; 1 is EAGLE-1, more are HASS.
        num_layers (`int`): Decoder layers.
        intermediate_size (`int`): Of their MLPs; 0 for the target's.
        token_weight (`float`): Weight of the loss of the tokens; that of the states, a smooth L1, has 1.
        noise (`float`): Width of the range around 0 from which noise is added to the target's states.
        head_decay (`float`): Weight of a step's loss relative to the one before it.
        kl_weight (`float`): Share of KL(target || draft) in the loss of the tokens; the rest is the cross-entropy.
    """

    ttt_steps: int = 1
    num_layers: int = 1
    intermediate_size: int = 0
    token_weight: float = 0.1
    noise: float = 0.2
    head_decay: float = 0.8
    kl_weight: float = 1.0

    method = "eagle"

    def __post_init__(self):
        self._check_common()
        check_at_least("num_layers", self.num_layers)
        for name in ("token_weight", "noise"):
            if getattr(self, name) < 0:
                raise SpecConfigError(f"`{name}` must be at least 0, got {getattr(self, name)}.")

    def build(self, target: PreTrainedModel) -> EagleNetwork:
        vocab_size = vocabulary_size(target)
        config = EagleConfig(
            method="eagle",
            **layer_sizes(target, hidden_size(target), self.intermediate_size, self.num_layers),
            draft_vocab_size=vocab_size,
            norms=_layer_norms(self.num_layers),
        )
        network = Eagle1Network(config).attach(target)
        # It reads about what the target's last layer reads: the embedding, and a share of the state.
        begin_as(network.layers[0], decoder_layers(target)[-1])
        begin_near(network.fc, (1.0, 0.3))
        return network

    def step_loss(self, network, fed, token_loss, states) -> torch.Tensor:
        return F.smooth_l1_loss(fed.float(), states.to(fed.device).float()) + self.token_weight * token_loss


@dataclass(frozen=True)
class Eagle3Recipe(EagleRecipe):
    """
    An EAGLE-3 head, on states from between the target's layers and with an lm_head of its own.

    It shares the target's embedding, which is frozen, and its lm_head begins as a copy of the target's rows, or is the
    target's; a head of another hidden size begins with the main directions of both, and trains its own embedding.

    Args:
        ttt_steps (`int`): Steps of a cycle.
        num_layers (`int`): Decoder layers.
        hidden_size (`int`): h; 0 for the target's.
        intermediate_size (`int`): Of the layers' MLPs; 0 for the target's.
        draft_vocab_size (`int`): U: the draft knows the tokens that are most frequent in the rows it is trained on. 0
            for all tokens.
        own_head (`bool`): Train an lm_head; otherwise the target's is shared, which needs its hidden size and all
            tokens.
        aux_layer_ids (`tuple[int, ...]`, *optional*): Which states it reads: k is what enters the target's decoder
            layer k, the number of its layers N what leaves the last one. By default 2, N // 2 and N - 3.
        head_decay (`float`): Weight of a step's loss relative to the one before it.
        kl_weight (`float`): Share of KL(target || draft) over the tokens that the draft knows; the rest is the
            cross-entropy.
    """

    ttt_steps: int = 6
    num_layers: int = 1
    hidden_size: int = 0
    intermediate_size: int = 0
    draft_vocab_size: int = 0
    own_head: bool = True
    aux_layer_ids: tuple[int, ...] | None = None
    head_decay: float = 0.8
    kl_weight: float = 1.0

    method = "eagle3"

    def __post_init__(self):
        self._check_common()
        check_at_least("num_layers", self.num_layers)
        check_at_least("hidden_size", self.hidden_size, 0)
        check_at_least("draft_vocab_size", self.draft_vocab_size, 0)
        if self.aux_layer_ids is not None and not self.aux_layer_ids:
            raise SpecConfigError("`aux_layer_ids` must name at least one state of the target, got none.")
        if not self.own_head and (self.hidden_size or self.draft_vocab_size):
            raise SpecConfigError(
                "`own_head=False` shares the target's lm_head, so that `hidden_size` and `draft_vocab_size` must be "
                f"left out, got {self.hidden_size} and {self.draft_vocab_size}."
            )

    def check(self, target: PreTrainedModel) -> None:
        super().check(target)
        num_layers, vocab_size = len(decoder_layers(target)), vocabulary_size(target)
        outside = [layer for layer in self.aux_layer_ids or () if not 0 <= layer <= num_layers]
        if outside:
            raise SpecConfigError(
                f"`aux_layer_ids` must be from 0 to {num_layers}, the number of layers of {type(target).__name__}, "
                f"got {outside[0]}."
            )
        if self.draft_vocab_size > vocab_size:
            raise SpecConfigError(
                f"`draft_vocab_size` must be at most {vocab_size}, the target's, got {self.draft_vocab_size}."
            )

    def build(self, target: PreTrainedModel) -> EagleNetwork:
        num_layers, vocab_size = len(decoder_layers(target)), vocabulary_size(target)
        size = self.hidden_size or hidden_size(target)
        draft_size = self.draft_vocab_size or vocab_size
        layers = self.aux_layer_ids or (min(2, num_layers), num_layers // 2, max(num_layers - 3, 0))
        config = EagleConfig(
            method="eagle3",
            **layer_sizes(target, size, self.intermediate_size, self.num_layers),
            draft_vocab_size=draft_size,
            aux_layer_ids=tuple(sorted(set(layers))),
            norms=("layers.0.input_layernorm", "layers.0.hidden_norm", *_layer_norms(self.num_layers), "norm"),
            own_embedding=size != hidden_size(target),
            own_head=self.own_head,
            has_token_ids=draft_size != vocab_size,
        )
        network = Eagle3Network(config).attach(target)
        if network.embed_tokens is not None:
            _copy_rows(network.embed_tokens, target.get_input_embeddings())
        if network.lm_head is not None:
            _copy_rows(network.lm_head, target.get_output_embeddings(), network.token_ids)
        return network

    def prepare(self, network: EagleNetwork, target: PreTrainedModel, tokens: torch.LongTensor) -> None:
        if network.token_ids is None:
            return
        counts = torch.bincount(tokens, minlength=network.config.vocab_size)
        frequent = counts.argsort(descending=True, stable=True)[: len(network.token_ids)]
        network.token_ids.copy_(frequent.sort().values)
        _copy_rows(network.lm_head, target.get_output_embeddings(), network.token_ids)


def _layer_norms(num_layers: int) -> tuple[str, ...]:
    """The norms of ordinary layers, of which the first has none before its attention."""
    names = [f"layers.{index}.post_attention_layernorm" for index in range(num_layers)]
    return (*names, *[f"layers.{index}.input_layernorm" for index in range(1, num_layers)])


def layer_sizes(target: PreTrainedModel, size: int, intermediate_size: int, num_layers: int) -> dict[str, Any]:
    """The target's sizes, as far as none are given."""
    text = target.config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    rope = getattr(text, "rope_parameters", None) or {}
    return {
        "hidden_size": size,
        "target_hidden_size": hidden_size(target),
        "vocab_size": vocabulary_size(target),
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
        # Rotary embeddings turn pairs.
        "head_dim": max(2, size // heads // 2 * 2),
        "intermediate_size": intermediate_size or getattr(text, "intermediate_size", None) or 4 * size,
        "rms_norm_eps": getattr(text, "rms_norm_eps", 1e-6),
        "max_position_embeddings": getattr(text, "max_position_embeddings", 2048),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(rope.get("rope_theta") or 10000.0)},
    }


@torch.no_grad()
def begin_as(own_layer: nn.Module, layer: nn.Module) -> None:
    """
    Lets a layer of a draft begin as one of the target's, as far as names and shapes agree; of a wider MLP it takes the
    first part.
    """
    own = dict(own_layer.named_parameters())
    for name, weight in layer.named_parameters():
        if name in own and weight.is_floating_point() and weight.dim() == own[name].dim():
            part = tuple(slice(size) for size in own[name].shape)
            if weight[part].shape == own[name].shape:
                own[name].copy_(weight[part])


@torch.no_grad()
def begin_near(fusion: nn.Linear, shares: Sequence[float]) -> None:
    """Lets a projection of joined vectors of its own size begin as the sum of these shares of them, and some noise."""
    identity = torch.eye(fusion.out_features, device=fusion.weight.device)
    fusion.weight.mul_(0.3)
    fusion.weight += torch.cat([share * identity for share in shares], dim=1)


@torch.no_grad()
def _copy_rows(table: nn.Module, of: nn.Module, ids: torch.LongTensor | None = None) -> None:
    """
    Lets a table of the draft begin as rows of one of the target's, in a narrower draft as their coordinates along the
    main directions of all rows. A wider draft, and one whose target has packed weights, keeps its random weights.
    """
    width = table.weight.shape[1]
    if not of.weight.is_floating_point() or width > of.weight.shape[1]:
        return
    rows = of.weight.float()
    if width < rows.shape[1]:
        rows = rows @ torch.linalg.eigh(rows.T @ rows).eigenvectors[:, -width:].flip(1)
    rows = rows[: table.weight.shape[0]] if ids is None else rows[ids.to(rows.device)]
    table.weight.copy_(rows)
