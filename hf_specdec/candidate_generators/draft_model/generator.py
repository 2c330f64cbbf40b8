"""Draft model: a small causal language model writes a few tokens ahead of the target.

Leviathan et al. 2023 (arXiv:2211.17192) and Chen et al. 2023 (arXiv:2302.01318). Checkpoint: any causal language model
of transformers. Its tokenizer may be another than the target's, see `vocabularies.py`.
Its keys and values stay in slots of their own from cycle to cycle: a cycle feeds the one or two tokens that the target
has added, then one token a draft.

PARD (An et al. 2025, arXiv:2504.18583) trains such a model to predict several tokens at once: a cycle feeds all tokens
that the target has added, then K - 1 mask tokens in the same forward, and drafts K tokens from the last K logits. The
masks are forgotten. Each token has a distribution of its own, whatever is drawn before it. PARD-2 models read states
of the target beside the tokens, see `TargetStates`.

Shapes: R rows that are drafted for, B active rows of the loop, T tokens fed, K drafted tokens, V vocabulary of the
target, W width of the draft's logits; N tokens or frames of a source, H hidden size of its encoder.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import logging

from ...checkpoints.loading import LOADED_BY, checkpoint_errors
from ...drafting.draw import DepthLimits, Draw
from ...drafting.growth import DraftNodes, draft_chain, grow
from ...drafting.runner import Runner
from ...drafting.slots import DRAFT_STATE
from ...drafting.state import Entries, NetworkState
from ...drafts import DraftTree, TokenTree
from ...errors import SpecConfigError, UnsupportedModelError, shown
from ...kernels.tree_attention import MAX_NODES
from ...protocol import Commit, DeviceCommit, DraftStep, Prompt, Session
from ...settings import SpeculativeConfig
from ...settings.checks import Options, draft_sample_method_field, parallel_drafting_field, setting
from ...settings.spellings import plain_path
from ...target.cache import SlotCache
from ...target.facts import model_profile
from ...target.graphs import CallGraphs, Variant, call_graphs
from ...target.lean import slot_model
from ...target.model_slots import ModelSlots
from ...target.parts.source import Source
from ...transfers import take_nodes, upload
from ..networks import NetworkGenerator
from .network import (
    TargetStates,
    checkpoint_location,
    draft_tokenizer,
    load_draft_model,
    load_target_states,
    mask_token_of,
)
from .vocabularies import RowText, SameTokens, is_one_tokenizer, load_tokenizer, match_vocabularies


class SourceReader:
    """Sources of a target with an encoder: what that has read, or what a draft model with another encoder reads."""

    def __init__(self, draft_model: Any, target_model: Any):
        self.model = draft_model
        self.has_encoder: bool = model_profile(draft_model).has_encoder
        has_sources = model_profile(target_model).has_encoder
        if self.has_encoder and not has_sources:
            raise UnsupportedModelError(
                f"{type(draft_model).__name__} is an encoder-decoder model, and {type(target_model).__name__} has no "
                "encoder. Use a decoder-only draft model."
            )
        self._states_name = _states_name(draft_model) if has_sources and not self.has_encoder else None
        if self._states_name is not None:
            size = draft_model.config.get_text_config(decoder=True).hidden_size
            encoded = target_model.config.get_text_config(encoder=True).hidden_size
            if size != encoded:
                raise UnsupportedModelError(
                    f"{type(draft_model).__name__} has no encoder and reads states of {size} numbers, and the encoder "
                    f"of {type(target_model).__name__} returns {encoded}. Load the draft model with its own encoder."
                )
        # As distil-whisper with Whisper.
        self.shares_encoder: bool = self.has_encoder and have_same_encoder(draft_model, target_model)

    def missing(self, source: Source | None) -> str | None:
        """The argument that the draft model's own encoder reads, where the call does not have it."""
        if source is None or not self.has_encoder or self.shares_encoder:
            return None
        name = getattr(self.model.get_encoder(), "main_input_name", "input_ids")
        return None if name in source.encoder_inputs else name

    def source(self, of_target: Source | None) -> Source | None:
        """The sources for the draft model, from the target's; `None` where it reads none."""
        if of_target is None or not (self.has_encoder or self._states_name):
            return None
        if self.has_encoder and not self.shares_encoder:
            encoder, read = self.model.get_encoder(), of_target.encoder_inputs
            names = inspect.signature(encoder.forward).parameters
            moved = {name: self._moved(value) for name, value in read.items() if name in names}
            inputs = {"encoder_outputs": BaseModelOutput(encoder(**moved, return_dict=True)[0])}
        else:
            states, read = self._moved(of_target.states), of_target.inputs
            name = self._states_name or "encoder_outputs"
            inputs = {name: (states,) if name == "encoder_outputs" else states}
        mask = read.get("attention_mask")
        # Whisper's decoder sees all of its window.
        if mask is not None and self._states_name != "encoder_outputs":
            inputs["attention_mask" if self.has_encoder else "encoder_attention_mask"] = self._moved(mask)
        return Source(inputs)

    def _moved(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.model.device, self.model.dtype if values.is_floating_point() else values.dtype)


def have_same_encoder(draft_model: Any, target_model: Any) -> bool:
    """Tells whether the encoders of two models are one, or copies of each other; none that is offloaded is."""
    mine, other = draft_model.get_encoder(), target_model.get_encoder()
    if mine is other:
        return True
    weights, others = mine.state_dict(), other.state_dict()
    if type(mine) is not type(other) or weights.keys() != others.keys():
        return False
    pairs = [(weight, others[name]) for name, weight in weights.items()]
    are_alike = all((one.shape, one.dtype) == (copy.shape, copy.dtype) for one, copy in pairs)
    are_here = not any(part.is_meta for pair in pairs for part in pair)
    return are_alike and are_here and all(one.equal(copy.to(one.device)) for one, copy in pairs)


def _states_name(model: Any) -> str | None:
    """The argument through which a decoder without an encoder takes states (`WhisperForCausalLM`); `None` for none."""
    names = inspect.signature(model.forward).parameters
    if "encoder_outputs" in names:
        return "encoder_outputs"
    attends = getattr(model.config, "add_cross_attention", False) or any(
        name.endswith("encoder_attn") for name, _ in model.named_modules()
    )
    return "encoder_hidden_states" if attends and "encoder_hidden_states" in names else None


logger = logging.get_logger(__name__)

# Default probability below which drafting stops, by device type: elsewhere the host would wait for every token.
_THRESHOLDS = {"cpu": 0.5}


@dataclass(frozen=True)
class DraftModelOptions(Options):
    """Options of `spec_method="draft_model"`."""

    draft_sample_method: Literal["greedy", "probabilistic"] | None = draft_sample_method_field("probabilistic")
    confidence_threshold: float | None = setting(
        None,
        "A row stops drafting after a token that the draft gives less probability than this, in [0, 1]. "
        "0 always drafts `num_speculative_tokens`. Default: 0; on a CPU, where drafts are greedy and their length "
        f"adapts, {_THRESHOLDS['cpu']}.",
        least=0,
        most=1,
        key="draft_confidence_threshold",
        published=True,
    )
    parallel_drafting: bool | None = parallel_drafting_field()
    draft_tokenizer: str | None = setting(
        None,
        "Repo id or folder of the draft model's tokenizer, if it is not next to the draft model.",
        normalize=plain_path,
    )
    draft_vocabulary: Literal["auto", "same", "shared_tokens", "text"] = setting(
        "auto",
        "`same`: the tokenizers are known to be the same, and not compared. For others, `shared_tokens` drafts "
        "among the tokens that both have (TLI), and `text` re-encodes what the draft writes (SLEM, universal assisted "
        "generation). `auto` compares them, and uses `text` where few tokens are shared.",
    )
    draft_vocabulary_size: int | None = setting(
        None,
        "Draft only this many first tokens of the vocabulary, such as 32768, which saves most of the time of the "
        "draft's lm_head. Tokenizers number tokens by frequency, mostly in English text and code: of other texts "
        "fewer drafts are accepted. Default: all tokens.",
        least=1,
        published=True,
    )


# Settings of transformers' assisted decoding about drafts, and those that stand for them here.
_SETTINGS_HERE = {
    "num_assistant_tokens": "num_speculative_tokens",
    "assistant_confidence_threshold": "draft_confidence_threshold",
}

# Tokens that a model with masks drafts where the settings name no number: published ones were trained with 8 to 16.
_TOKENS_AT_ONCE = 8

# Settings that say what to load and how.
_LOADING = (*LOADED_BY, "code_revision", "trust_remote_code")


@dataclass
class DraftModel:
    """Outlives a call."""

    model: torch.nn.Module
    vocabularies: SameTokens
    mask_token: int | None  # in whose places it drafts all tokens at once; `None`: it drafts one after the other
    sources: SourceReader
    states: TargetStates | None = None  # of the target, where it reads them
    note: str | None = None  # for the statistics


def _ignored_settings(model: torch.nn.Module, config: SpeculativeConfig, adapts: bool) -> str | None:
    """Settings of drafting in the draft model's generation config, which only transformers' own loop goes by."""
    generation_config = getattr(model, "generation_config", None)
    values = {name: getattr(generation_config, name, None) for name in _SETTINGS_HERE}
    if config.num_speculative_tokens is not None and not adapts:
        values["num_assistant_tokens"] = None
    if config.options.confidence_threshold:
        values["assistant_confidence_threshold"] = None
    values = {name: value for name, value in values.items() if value is not None}
    ignored = ", ".join(f"{name}={shown(value)}" for name, value in values.items())
    here = ", ".join(map(_SETTINGS_HERE.__getitem__, values))
    return f"the draft model's generation config has {ignored}, which is not read: set {here}" if values else None


def _first_token(config: PreTrainedConfig) -> int:
    """First token of the model's texts; where there is none, the one that ends a text."""
    config = config.get_text_config(decoder=True)
    first = getattr(config, "bos_token_id", None)
    first = getattr(config, "eos_token_id", None) if first is None else first
    first = first[0] if isinstance(first, list) and first else first
    return first if isinstance(first, int) and 0 <= first < config.vocab_size else 0


class DraftModelCandidateGenerator(NetworkGenerator):
    """Drafts chains, one token after the other, or with a model that was trained for it all tokens at once."""

    options_class = DraftModelOptions
    default_num_speculative_tokens = 5
    most_speculative_tokens: int | None = 12
    default_sample_method = "probabilistic"
    masks_drafts = False
    rates_tokens = True
    loaded_by: ClassVar[tuple[str, ...]] = (*_LOADING, "parallel_drafting", "draft_tokenizer", "draft_vocabulary")

    @classmethod
    def load(
        cls,
        config: SpeculativeConfig,
        target_model: torch.nn.Module,
        draft_model: torch.nn.Module | None = None,
        tokenizers: tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase] | None = None,
    ) -> DraftModel:
        location = None
        if draft_model is None:
            draft_model = load_draft_model(config, target_model)
            location = checkpoint_location(config)
        elif settings := [f"`{name}`={getattr(config, name)!r}" for name in _LOADING if getattr(config, name)]:
            raise SpecConfigError(
                f"A loaded draft model was passed together with {', '.join(settings)}, which is about loading one. "
                "Pass the model as you want it, or its name."
            )
        with nullcontext() if location is None else checkpoint_errors(config.model):
            model_profile(draft_model, role="draft model")
            if location is not None and not draft_model.config.is_encoder_decoder:
                # What is made of a stranger's config may fail only when it is used.
                with torch.inference_mode():
                    draft_model(torch.zeros((1, 2), dtype=torch.long, device=draft_model.device))
            sources = SourceReader(draft_model, target_model)
            names = target_model.config.name_or_path, draft_model.config.name_or_path
            options = config.options
            is_known = options.draft_tokenizer is None and is_one_tokenizer(*names)
            is_same = options.draft_vocabulary == "same" or is_known
            if tokenizers is None and not is_same:
                tokenizers = load_tokenizer(names[0]), draft_tokenizer(config, names[1], location)
            vocabularies = match_vocabularies(draft_model, target_model, options.draft_vocabulary, tokenizers)
            mask_token, states, unread = mask_token_of(draft_model, options.parallel_drafting), None, None
            if mask_token is not None:
                states, unread = load_target_states(config, draft_model, target_model)
            if states is not None and not vocabularies.is_one:
                states, unread = None, "its tokens are not the target's"
        note = None
        if unread:
            note = f"the PARD-2 draft model drafts from the tokens alone, without the target's states: {unread}"
            logger.warning_once(f"Fewer drafts may be accepted: {note}.")
        return DraftModel(draft_model, vocabularies, mask_token, sources, states, note)

    @classmethod
    def draft_cost(cls, resources: DraftModel, target_model: torch.nn.Module) -> float | None:
        models = resources.model, target_model
        draft_bytes, target_bytes = (sum(weight.nbytes for weight in model.parameters()) for model in models)
        return draft_bytes / max(target_bytes, 1) if resources.mask_token is None else None

    @classmethod
    def network(cls, resources: DraftModel) -> torch.nn.Module:
        return resources.model

    def __init__(self, config: SpeculativeConfig, resources: DraftModel, session: Session):
        model = resources.model
        size, vocabularies = config.options.draft_vocabulary_size, resources.vocabularies
        self.vocabularies: SameTokens = vocabularies if size is None else vocabularies.shortened(size)
        self.steers_chains: bool = vocabularies.drafts_target_tokens
        self.mask_token: int | None = resources.mask_token
        self.states: TargetStates | None = resources.states
        if self.states is not None:
            self.target_hidden_states: tuple[int | str, ...] = self.states.keys
        self.drafts_whole: bool = self.mask_token is not None
        self.has_steps: bool = not self.drafts_whole
        super().__init__(config, resources, session)
        stops = session.adapts and self.has_steps and not self.samples_drafts
        usual, threshold = _THRESHOLDS.get(self.device.type, 0.0) if stops else 0.0, self.options.confidence_threshold
        self.threshold: float = usual if threshold is None else threshold
        self._sources: SourceReader = resources.sources
        own_limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if own_limit and config.max_model_len and config.max_model_len > own_limit:
            raise SpecConfigError(
                f"`max_model_len`={config.max_model_len} is longer than the draft model's context of {own_limit} "
                f"tokens. Use at most {own_limit}, or leave it out."
            )
        limits = (config.max_model_len, "max_model_len"), (own_limit, "the draft model's max_position_embeddings")
        self.longest_row: tuple[int, str] | None = min((limit for limit in limits if limit[0]), default=None)
        ignored = _ignored_settings(model, config, session.adapts)
        for note in filter(None, (ignored, self.vocabularies.note, resources.note)):
            self.note(note)
        slots = slot_model(model, SlotCache(0))
        slots.num_logits = size
        slots.max_position = None if self.longest_row is None else self.longest_row[0] - 1
        self.state.slots = ModelSlots(slots)
        self.state.texts = []  # of the rows, where segmentations differ
        self._has_stopped = False  # what it would draft from is not to be had

    def shape(self) -> TokenTree:
        default = self.default_num_speculative_tokens if self.mask_token is None else _TOKENS_AT_ONCE
        return TokenTree.chain(self.config.fixed_length or default)

    @property
    def asks_to_sample(self) -> bool:
        return self.vocabularies.drafts_target_tokens and super().asks_to_sample

    # The text

    def prefill(self, prompt: Prompt) -> None:
        model, state = self.state.slots.model, self.state
        if missing := self._sources.missing(prompt.source):
            self.note(f"no drafts: the draft model's own encoder reads `{missing}`, which the call does not have")
            self._has_stopped = True
            return
        count = len(prompt.starts)
        if prompt.input_ids.shape[1] == 0:
            # Of a prompt of embeddings nothing can be read: the draft model begins a text.
            tokens = prompt.input_ids.new_full((count, 1), _first_token(model.model.config))
            starts, state.texts = [0] * count, [RowText() for _ in range(count)]
        else:
            tokens, starts, state.texts = self.vocabularies.prompts(prompt)
        length = tokens.shape[1]
        if (source := self._sources.source(prompt.source)) is not None:
            source.attach(model)
        self.runner = Runner.of(self.make_graphs(), self.device, self.session)
        if self.options.confidence_threshold is None and self.runner is not None and self.runner.has_graphs:
            # They draft to the full depth, and are not waited for.
            self.threshold = 0.0
        model.use_graphs(None if self.runner is None else self.runner.graphs)
        room = min(self.session.max_length - length, 1024)
        model.cache.capacity = length + room + 2 * self.num_speculative_tokens + 1
        tokens = tokens.to(self.device)
        if self.states is not None:
            tokens = self.states.embed(tokens, prompt.hidden_states, starts)
        if self.longest_row is not None:
            # Nothing will be drafted for rows that are too long; of these it reads what it can.
            starts = [max(start, length - self.longest_row[0]) for start in starts]
        first = min(starts)
        model.prefill(tokens[:, first:], [start - first for start in starts])
        # Drafts are graphs, not single forwards.
        model.graphs = None

    def make_graphs(self) -> CallGraphs | None:
        is_eager = self.config.enforce_eager or self.state.slots.model.find(Source) is not None
        return call_graphs(self.network, enforce_eager=is_eager)

    def observe(self, commit: Commit) -> None:
        if not self._has_stopped:
            slots = self.state.slots
            unread, kept = self.vocabularies.commit(commit, self.state.texts, slots.num_read)
            slots.skip(kept)
            super().observe(unread)

    def take_in(self, state: NetworkState, new: Entries) -> None:
        state.slots.read_last(self._embedded(new), new.counts)

    def _embedded(self, new: Entries) -> torch.Tensor:
        """Tokens as the model reads them: with the states that belong to them, where it reads these."""
        return new.tokens if self.states is None else self.states.embed(new.tokens, new.states)

    def draft_depths(self, step: DraftStep) -> list[int]:
        depths, pending = super().draft_depths(step), self.state.pending
        if pending is None:
            return depths
        model = self.state.slots.model
        ends = [length + count for length, count in zip(model.cache.lengths, pending.counts)]
        if model.profile.counts_slots and len(set(ends)) > 1:
            # A draft that takes slots for positions would misread them.
            name = type(model.model).__name__
            self.note(f"no drafts once rows differ in length ({name} tells positions from the order of its cache)")
            self._has_stopped = True
            return [0] * len(depths)
        if self.longest_row is None:
            return depths
        # A row's tokens may be more in the draft's own segmentation.
        longest = self.longest_row[0]
        lengths = [max(length, end - start) for length, end, start in zip(step.lengths, ends, model.starts)]
        if max(lengths) >= longest:
            self.note_longest_row()
        return [max(min(depth, longest - length), 0) for depth, length in zip(depths, lengths)]

    # Drafts

    def draft(self, state: NetworkState, new: Entries, limits: DepthLimits, draw: Draw) -> DraftNodes:
        if self.mask_token is not None:
            logits, most = None, self.num_speculative_tokens
            if isinstance(new.counts, list) and self.runner is not None and self.can_replay(new):
                # The host looks at them.
                read, key = partial(self._read_masks, most), ("masks", *self.graph_key)
                logits = self.runner.replay(read, state, new, key, self._most_new, most - 1)
            if logits is None:
                logits = self._read_masks(limits.deepest, state, new)
            return draft_chain(self.plan, logits, new, limits, draw)
        hidden, logits = self.read(state, new, 0)

        def step(tokens: torch.LongTensor, hidden: torch.Tensor, parents: Any) -> tuple[torch.Tensor, torch.Tensor]:
            hidden, logits = state.slots.step(self.vocabularies.inputs(tokens), hidden, parents)
            return hidden, self.vocabularies.logits(logits)

        with state.slots.drafting():
            return grow(self.plan, step, hidden, logits, limits, draw)

    def read(self, state: NetworkState, new: Entries, stage: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self.vocabularies.inputs(new.tokens) if DRAFT_STATE in new.states else self._embedded(new)
        logits = self.vocabularies.logits(state.slots.read_last(tokens, new.counts))
        # Nothing but the tokens is handed on.
        return logits.new_empty((len(logits), 0)), logits

    def _read_masks(self, count: int, state: NetworkState, new: Entries) -> torch.Tensor:
        """Reads what is new, and masks in the places of drafted tokens; logits `(R, count, W)` after both."""
        ends = upload(new.counts, self.device)[:, None]
        tokens = F.pad(new.tokens.to(self.device), (0, count - 1))
        places = torch.arange(tokens.shape[1], device=self.device)
        tokens = torch.where(places < ends, tokens, self.mask_token)
        if self.states is not None:
            # Masks have the states of the anchor.
            index = torch.minimum(places, ends - 1)
            tokens = self.states.embed(tokens, {key: take_nodes(one, index) for key, one in new.states.items()})
        logits_from = min(new.counts) - 1 if isinstance(new.counts, list) else 0
        logits = self.vocabularies.logits(state.slots.read(tokens, new.counts, logits_from).logits)
        return take_nodes(logits, ends - 1 - logits_from + torch.arange(count, device=self.device))

    def can_replay(self, new: Entries) -> bool:
        num_masks = 0 if self.mask_token is None else self.num_speculative_tokens - 1
        return self._most_new + num_masks <= MAX_NODES

    @property
    def graph_key(self) -> tuple[Any, ...]:
        states = () if self.states is None else (Variant(self.states),)
        return (*super().graph_key, self.mask_token, *states, *self.vocabularies.key)

    def drafted(self, nodes: DraftNodes, limits: list[int]) -> DraftTree:
        return self.vocabularies.draft(super().drafted(nodes, limits), limits, self.state.texts)

    @property
    def drafts_ahead(self) -> bool:
        # Of another vocabulary the host alone knows the text. What was read token by token lies where the next draft
        # would begin.
        return super().drafts_ahead and self.vocabularies.is_one and not self.state.slots.num_read

    def draft_ahead(self, commit: DeviceCommit) -> DraftTree | None:
        return super().draft_ahead(replace(commit, tokens=self.vocabularies.inputs(commit.tokens)))
