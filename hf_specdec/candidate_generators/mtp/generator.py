"""MTP: the target's own multi-token-prediction layers draft.

DeepSeek-V3 (arXiv:2412.19437, section 2.2) and its successors have them; what a layer computes is in
[`~candidate_generators.mtp.network`]. Two ways lead to more than one draft token:

    reuse   one layer again and again, each time with the token it has drafted and the state it has left. Checkpoints
            with one layer are run like this; trees can be drafted, see [`~candidate_generators.networks`]
    chain   layer j drafts token j + 1, as the layers were trained, see [`LayerEntries`]

Gemma 4's assistants draft with an [`AssistantCandidateGenerator`].

Shapes: R active rows, T new entries, W entries of the window, h hidden size, X size of a state, K layers, S slots.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F

from ...checkpoints.files import RepoFiles
from ...checkpoints.loading import LOADED_BY, load
from ...drafting.draw import DepthLimits, Draw
from ...drafting.growth import DraftNodes, DynamicTree, grow
from ...drafting.shape import ExtrapolationOptions, draft_shape, growth_option
from ...drafting.slots import DraftEntries
from ...drafting.state import Entries, NetworkState
from ...drafts import DraftTree, TokenTree
from ...errors import SpecConfigError, UnsupportedModelError
from ...kernels.tree_attention import SlotTree
from ...protocol import Prompt, Session
from ...settings import SpeculativeConfig
from ...settings.checks import setting
from ...target.graphs import CallGraphs, Variant, graphs_for
from ...target.masks import FULL, Span, TreeMask
from ...target.model import SlotModel
from ...target_facts import CACHE_READERS, decoder_layers, reads_target_cache
from ...transfers import RowNumbers, last_of_each, upload
from ..draft_model.network import load_draft_model
from ..networks import AutoregressiveCandidateGenerator, OverTargetGenerator
from .network import MtpNetwork, check_family


def refuse_trees(config: SpeculativeConfig, why: str, todo: str = "Leave it out.") -> None:
    """Raises a [`SpecConfigError`] where the settings name a tree, for a drafter of chains."""
    option = "speculative_token_tree" if config.speculative_token_tree else growth_option(config)
    if option:
        raise SpecConfigError(f"`{option}` is about trees, and {why}. {todo}")


def lending_layers(target_model: torch.nn.Module) -> dict[str, int]:
    """By type of attention the target's layer whose keys and values an assistant reads."""
    attention = [getattr(layer, "self_attn", None) for layer in decoder_layers(target_model)]
    lending = {
        module.layer_type: index
        for index, module in enumerate(attention)
        if getattr(module, "store_full_length_kv", False)
    }
    if not lending:
        raise UnsupportedModelError(
            f"{type(target_model).__name__} has no layers that share their keys and values, which a Gemma 4 assistant "
            "reads. Use it with the Gemma 4 model that it was made for."
        )
    return lending


class LentKeys:
    """Keys and values of a target's layers that an assistant reads, by type of attention; it writes none."""

    is_allocated = True
    cache = None

    def __init__(self, target: SlotModel, lending: dict[str, int], lengths: RowNumbers):
        self.layers: dict[str, Any] = {kind: target.cache.layers[index] for kind, index in lending.items()}
        self.numbers: dict[str, RowNumbers] = {"ends": lengths, "starts": target.starts, "leads": target.leads}

    @property
    def place(self) -> tuple[Any, ...]:
        """Where in memory they lie."""
        buffers = [states for layer in self.layers.values() for states in (layer.keys, layer.values)]
        return tuple((states.data_ptr(), states.shape, states.stride()) for states in buffers)

    def in_a_graph(self, numbers: dict[str, torch.LongTensor], columns: int) -> LentKeys:
        keys = copy(self)
        keys.numbers = dict(numbers)
        return keys

    def skip(self, counts: list[int]) -> None:
        """The target has read them."""

    def seen(
        self, counts: RowNumbers, window: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[torch.LongTensor, dict[str, tuple[torch.Tensor, torch.Tensor]], dict[str, torch.Tensor]]:
        """Positions of the anchors `(R, 1)`; by type of attention keys and values, and their masks `(R, 1, 1, S)`."""
        starts, leads = (upload(self.numbers[name], device) for name in ("starts", "leads"))
        ends, columns = self.numbers["ends"], None
        if isinstance(ends, list) and isinstance(counts, list):
            ends = [end + count for end, count in zip(ends, counts)]
            columns, ends = max(ends), upload(ends, device)
        else:
            ends = upload(ends, device) + upload(counts, device)
        last = SlotTree(ends - 1, starts, num_queries=1)
        keys_and_values, masks = {}, {}
        for kind, layer in self.layers.items():
            lent = keys, _ = [states[: len(ends), :, :columns].to(device) for states in (layer.keys, layer.values)]
            keys_and_values[kind] = tuple(lent)
            # The distance from the last token that was read may be as long as the window.
            span = Span("sliding", window + 1) if kind == "sliding_attention" else FULL
            masks[kind] = TreeMask(last, span).additive(keys.shape[2], dtype)
        return (ends + leads)[:, None], keys_and_values, masks


class AssistantCandidateGenerator(OverTargetGenerator):
    """Drafts chains with Gemma 4's assistant, whose layers read keys and values of the target, and keep none.

    All tokens of a draft have the position of the anchor, and see what the target has read, as in transformers'
    `SinglePositionMultiTokenCandidateGenerator`.
    """

    target_hidden_states: ClassVar[tuple[int | str, ...]] = ("last",)
    default_num_speculative_tokens = 3
    _lending: dict[str, int] | None = None

    def shape(self) -> TokenTree | DynamicTree:
        refuse_trees(self.config, f"a {type(self.network).__name__} drafts chains")
        return super().shape()

    def lent_slots(self, target: SlotModel, lengths: list[int]) -> LentKeys:
        if self._lending is None:
            self._lending = lending_layers(target.model)
        return LentKeys(target, self._lending, lengths)

    def draft(self, state: NetworkState, new: Entries, limits: DepthLimits, draw: Draw) -> DraftNodes:
        assistant, embedding = self.network, self.session.target.model.get_input_embeddings()
        window, dtype = assistant.config.get_text_config().sliding_window, assistant.pre_projection.weight.dtype
        positions, keys_and_values, masks = state.slots.seen(new.counts, window, dtype, self.device)

        def step(tokens: torch.LongTensor, hidden: torch.Tensor, _: Any) -> tuple[torch.Tensor, torch.Tensor]:
            embedded = embedding(tokens.to(embedding.weight.device)).to(self.device)
            states = assistant.model(
                inputs_embeds=assistant.pre_projection(torch.cat([embedded, hidden.to(embedded)], dim=-1).to(dtype)),
                attention_mask=masks,
                position_ids=positions,
                shared_kv_states=keys_and_values,
                use_cache=False,
            ).last_hidden_state
            if assistant.config.use_ordered_embeddings:
                logits = assistant.masked_embedding(states, assistant.lm_head.weight)
            else:
                logits = assistant.lm_head(states)
            return assistant.post_projection(states), logits

        hidden, logits = step(new.tokens, new.states["last"], None)
        return grow(self.plan, step, hidden[:, 0], logits[:, 0], limits, draw)

    # Graphs of the assistant, which read the keys and values where they lie

    def make_graphs(self) -> CallGraphs | None:
        target, embedding = self.session.target, self.session.target.model.get_input_embeddings()
        reasons = {
            "enforce_eager=True": self.config.enforce_eager,
            "its target runs without graphs": target.graphs is None or target.graphs.why_eager is not None,
            "its target is on another device": embedding.weight.device != self.device,
        }
        return graphs_for(self.network, reasons, (embedding,))

    @property
    def graph_key(self) -> tuple[Any, ...]:
        return (*super().graph_key, Variant(self.lent_slots(self.session.target, []).place))


TOKENS = "tokens"


class LayerEntries(DraftEntries):
    """Keys and values of a chain of MTP layers, of which layer j drafts token j + 1; K, the `depth`, are used.

    Entry t is made of a state and the token t + 1; layer j reads as its entry t the token t + 1 + j. So the last j
    entries of layer j have drafted tokens in them: with K = 3 layers, and a text of tokens 0 to 9, entry 8 is the last
    one, and

        layer 0 reads (state 8, token 9), layer 1 (its state, draft 1), layer 2 (its state, draft 2)

    Where the target accepts a of the drafted tokens, the last K - 1 - a entries of some layer are wrong. They are read
    again together with the new ones: the window.
    """

    def __init__(self, network: MtpNetwork, depth: int, **places: Any):
        super().__init__(network, num_layers=depth, **places)
        self.depth = depth

    def read_window(
        self, state: NetworkState, new: Entries, has_drafted: list[bool]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads the window with the first layer, and keeps its last K entries; both outputs `(R, h)` after it."""
        added: Any = new.counts
        network: Any = self.network
        depth, states = self.depth, {key: new.states[key] for key in network.target_hidden_states}
        parts = {key: part.to(self.device) for key, part in {TOKENS: new.tokens.unsqueeze(-1), **states}.items()}
        both = {key: torch.cat((state.kept[key], part), dim=1) for key, part in parts.items()}
        if isinstance(added, list):
            read = [length - start for length, start in zip(self.cache.lengths, self.starts)]
            wrong = [depth - (count if drafted else 1) for count, drafted in zip(added, has_drafted)]
            again = [max(min(pair), 0) for pair in zip(wrong, read)]
            first, counts = [depth - count for count in again], [sum(pair) for pair in zip(again, added)]
            width = max(counts)
            self.cache.commit([-count for count in again])
        else:
            again = torch.minimum(depth - added, self.cache.lengths - self.first_slots[:, 0]).clamp(min=0)
            first, counts, width = depth - again, again + added, depth + 1
            self.cache.commit(-again)
        window = {key: _columns(values, first, width) for key, values in both.items()}
        self._tokens, self._counts = window.pop(TOKENS)[..., 0], counts
        self._here = self.plan_read(width)
        self._mask = self.causal_mask(self._here)
        self.layer: int = -1
        self._handed_on = self.network.fuse(window)
        outputs = self._read_next()
        self.cache.commit(counts)
        state.kept = {key: _columns(values, added, depth) for key, values in both.items()}
        return outputs

    def step(
        self, tokens: torch.LongTensor, hidden: torch.Tensor, parents: torch.LongTensor | slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads the window with the next layer, after tokens `(R, 1)`; see [`~drafting.growth.Step`]."""
        hidden, output = self._read_next(tokens)
        return hidden[:, None], self.network.logits(output, self.cache)[:, None]

    def read_rest(self, drafted: torch.LongTensor | None = None) -> None:
        """Reads the window with the layers that have not, after the token `(R, 1)` drafted last, if it is known."""
        tokens = self._tokens[:, :1] if drafted is None else drafted
        while self.layer < self.depth - 1:
            self._read_next(tokens)

    def _read_next(self, drafted: torch.LongTensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Both outputs `(R, h)` of the next layer after the window, which ends with the tokens drafted before."""
        if drafted is not None:
            last = upload(self._counts, self.device)[:, None] - 1
            self._tokens = F.pad(self._tokens[:, 1:], (0, 1)).scatter(1, last, drafted.to(self.device))
        self.layer += 1
        here, read = self._here, (self._tokens, self._handed_on)
        outputs = self.network(*read, here.positions, self._mask, self.cache, self.layer, here.bound)
        self._handed_on = outputs[0]
        return tuple(last_of_each(output, self._counts) for output in outputs)


def _columns(values: torch.Tensor, first: RowNumbers, width: int) -> torch.Tensor:
    """Columns `first[r]` to `first[r] + width - 1` of each row of `(R, C, X)`; the last one where there are fewer."""
    if isinstance(first, list):
        if min(first) == max(first):
            return values[:, first[0] : first[0] + width]
        first = upload(first, values.device)
    columns = first[:, None] + torch.arange(width, device=values.device)
    return values[torch.arange(len(values), device=values.device)[:, None], columns.clamp(max=values.shape[1] - 1)]


@dataclass(frozen=True)
class MtpOptions(ExtrapolationOptions):
    """Options of `spec_method="mtp"`."""

    draft_confidence_threshold: float = setting(
        0.0,
        "A row's draft is not continued after nodes whose probability, along the whole path, is at most "
        "this. 0 always drafts the full depth.",
        least=0,
        most=1,
        published=True,
    )
    mode: Literal["chain", "reuse"] | None = setting(
        None,
        "`chain` drafts one token with each MTP layer, `reuse` all of them with the first layer, trees "
        "among them. Default: `chain` where the checkpoint has several layers.",
        key="mtp_mode",
        published=True,
    )


class MtpCandidateGenerator(AutoregressiveCandidateGenerator):
    """Drafts chains and trees with one MTP layer; with several it is an [`MtpChainGenerator`]."""

    options_class = MtpOptions
    default_num_speculative_tokens = 3
    loaded_by: ClassVar[tuple[str, ...]] = LOADED_BY

    @classmethod
    def load(
        cls, config: SpeculativeConfig, target_model: torch.nn.Module, draft_model: torch.nn.Module | None = None
    ) -> torch.nn.Module:
        if draft_model is not None:
            if reads_target_cache(draft_model):
                lending_layers(target_model)
                return draft_model
            return load(MtpNetwork, config, target_model, draft_model)
        if config.model is not None and RepoFiles.of(config).config.get("model_type") in CACHE_READERS:
            lending_layers(target_model)
            return load_draft_model(config, target_model)
        check_family(target_model)
        if (placed := cls.loaded_from(config, target_model)) is None:
            raise SpecConfigError(
                f"This {type(target_model).__name__} was not loaded from a checkpoint, so there is none to read its "
                "MTP layers from. Pass the folder or repo id of one as `spec_model`."
            )
        return load(MtpNetwork, placed, target_model)

    @classmethod
    def loaded_from(cls, config: SpeculativeConfig, target_model: torch.nn.Module) -> SpeculativeConfig | None:
        source = target_model.config
        if config.model is not None or not getattr(source, "_name_or_path", None):
            return super().loaded_from(config, target_model)
        # The checkpoint of the target itself.
        revision = config.revision or getattr(source, "_commit_hash", None)
        return config.replace(model=str(source._name_or_path), revision=revision)

    def __new__(cls, config: SpeculativeConfig, resources: Any, session: Session) -> Any:
        """Makes the generator of a call, which for an assistant that reads the target's keys and values is another."""
        if reads_target_cache(resources):
            return AssistantCandidateGenerator(config, resources, session)
        mode = config.options.mode or ("chain" if resources.config.num_layers > 1 else "reuse")
        return super().__new__(MtpChainGenerator if mode == "chain" else cls)

    def shape(self) -> TokenTree | DynamicTree:
        length, vocab_size = self.default_num_speculative_tokens, self.network.needs.vocab_size
        return draft_shape(self.config, vocab_size, self.session, self.chain_only_reason, length)

    def make_slots(self, **places: Any) -> DraftEntries:
        return DraftEntries(self.network, num_nodes=self.plan.num_reads, num_layers=1, **places)


class MtpChainGenerator(MtpCandidateGenerator):
    """Drafts chains with a token of each MTP layer."""

    has_steps = False
    drafts_whole = True

    def shape(self) -> TokenTree | DynamicTree:
        num_layers = self.network.config.num_layers
        refuse_trees(
            self.config,
            f"the {num_layers} MTP layers draft a chain, one token each",
            "Leave it out, or set mtp_mode='reuse' to draft with the first layer alone.",
        )
        length = self.config.fixed_length or num_layers
        if length > num_layers:
            self.note(
                f"{num_layers} draft tokens instead of {length}: each of the MTP layers drafts one; mtp_mode='reuse' "
                "drafts more"
            )
        return TokenTree.chain(min(length, num_layers))

    def make_slots(self, **places: Any) -> DraftEntries:
        return LayerEntries(self.network, self.plan.max_depth, **places)

    def prefill(self, prompt: Prompt) -> None:
        states = {key: prompt.hidden_states[key] for key in self.network.target_hidden_states}
        parts = {TOKENS: prompt.input_ids[..., None], **states}
        shape = len(prompt.starts), self.plan.max_depth
        # Tokens `(R, K, 1)` and states `(R, K, X)`, zeros in front of a shorter text.
        self.state.kept = {
            key: part.new_zeros((*shape, part.shape[2]), device=self.device) for key, part in parts.items()
        }
        # There was a draft after a row's last entries.
        self.state.has_drafted = [False] * len(prompt.starts)
        super().prefill(prompt)

    def take_in(self, state: NetworkState, new: Entries) -> None:
        state.slots.read_window(state, new, state.has_drafted)
        state.slots.read_rest()
        state.has_drafted = [False] * len(new.counts)

    def draft(self, state: NetworkState, new: Entries, limits: DepthLimits, draw: Draw) -> DraftNodes:
        hidden, output = state.slots.read_window(state, new, self.state.has_drafted)
        nodes = grow(self.plan, state.slots.step, hidden, self.network.logits(output, state.slots.cache), limits, draw)
        state.slots.read_rest(nodes.tokens[:, -1:])
        return nodes

    def drafted(self, nodes: DraftNodes, limits: list[int]) -> DraftTree:
        self.state.has_drafted = [True] * len(limits)
        return super().drafted(nodes, limits)

    def can_replay(self, new: Entries) -> bool:
        # Graphs read as many entries again as there are to be read after a draft.
        counts = new.counts if isinstance(new.counts, list) else []
        return all(count == 1 or drafted for count, drafted in zip(counts, self.state.has_drafted))
