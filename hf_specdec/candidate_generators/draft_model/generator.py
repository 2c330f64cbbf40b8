"""Draft model: a small causal language model writes a few tokens ahead of the target.

Leviathan et al. 2023 (arXiv:2211.17192) and Chen et al. 2023 (arXiv:2302.01318). Checkpoint: any causal language model
of transformers with the target's tokenizer; the widths of the two vocabularies may be padded differently.
Its keys and values stay in slots of their own from cycle to cycle: a cycle feeds the one or two tokens that the target
has added, then one token a draft.

PARD (An et al. 2025, arXiv:2504.18583) trains such a model to predict several tokens at once: a cycle feeds all tokens
that the target has added, then K - 1 mask tokens in the same forward, and drafts K tokens from the last K logits. The
masks are forgotten. Each token has a distribution of its own, whatever is drawn before it.

Shapes: R rows that are drafted for, B active rows of the loop, T tokens fed, K drafted tokens, V vocabulary of the
target, W width of the draft's logits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from transformers.generation.logits_process import LogitsProcessorList
from transformers.utils import logging

from ...checkpoints.loading import checkpoint_errors
from ...decoding.cache import SlotCache, compact
from ...decoding.functional import slot_model
from ...decoding.profile import model_profile
from ...decoding.target import SlotModel, call_graphs
from ...drafting.chain import SteeredChain
from ...drafts import DraftTree, chain_topology
from ...errors import SpecConfigError, shown
from ...logits.processors import ProcessorStack
from ...logits.sampling import DraftSampler
from ...protocol import Commit, DraftStep, Prompt, Session
from ...transfers import PendingRead, last_of_each, upload
from ...validation import Options, draft_sample_method_field, setting
from ..base import CandidateGenerator
from .network import Vocabularies, checkpoint_location, load_draft_model, mask_token_of, match_vocabularies
from .source import SourceReader


if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from ...settings import SpeculativeConfig


logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class DraftModelOptions(Options):
    """Options of `spec_method="draft_model"`.

    Raises:
        SpecConfigError: A value is out of range.
    """

    draft_sample_method: Literal["greedy", "probabilistic"] | None = draft_sample_method_field("probabilistic")
    confidence_threshold: float = setting(
        0.0,
        "A row stops drafting after a token that the draft gives less probability than this, in [0, 1]. "
        "0 drafts always `num_speculative_tokens`.",
        least=0,
        most=1,
        key="draft_confidence_threshold",
        published=True,
    )
    same_tokenizer: bool = setting(
        False,
        "Do not compare the tokenizers: you know that they are the same.",
    )


# Settings of transformers' assisted decoding about drafts, and those that stand for them here.
_SETTINGS_HERE = {
    "num_assistant_tokens": "num_speculative_tokens",
    "assistant_confidence_threshold": "draft_confidence_threshold",
}

# Tokens that a model with masks drafts where the settings name no number: published ones were trained with 8 to 16.
_TOKENS_AT_ONCE = 8

# Settings that say what to load and how.
_LOADING = ("model", "revision", "code_revision", "subfolder", "cache_dir", "trust_remote_code")
_LOADING += ("dtype", "device", "quantization")


def _check_nothing_to_load(config: SpeculativeConfig) -> None:
    given = [f"`{name}`={getattr(config, name)!r}" for name in _LOADING if getattr(config, name)]
    if given:
        raise SpecConfigError(
            f"A loaded draft model was passed together with {', '.join(given)}, which is about loading one. Pass the "
            "model as you want it, or its name."
        )


@dataclass
class DraftModel:
    """Outlives a call.

    Attributes:
        model (`PreTrainedModel`): The loaded model.
        vocabularies (`Vocabularies`): Relation of its vocabulary to the target's.
        mask_token (`int`, *optional*): The token in whose places it drafts all tokens at once; `None`: it drafts one
            token after the other.
        sources (`SourceReader`): Its way to the sources of a target with an encoder.
    """

    model: torch.nn.Module
    vocabularies: Vocabularies
    mask_token: int | None
    sources: SourceReader


def _ignored_settings(model: torch.nn.Module, config: SpeculativeConfig) -> str | None:
    """Settings of drafting in the draft model's generation config, which only transformers' own loop goes by."""
    own = getattr(model, "generation_config", None)
    given = {name: getattr(own, name, None) for name in _SETTINGS_HERE}
    # Lengths that adapt have the most of them.
    if config.num_speculative_tokens not in (None, DraftModelCandidateGenerator.most_speculative_tokens):
        given["num_assistant_tokens"] = None
    if config.options.confidence_threshold:
        given["assistant_confidence_threshold"] = None
    ignored = [f"{name}={shown(value)}" for name, value in given.items() if value is not None]
    if not ignored:
        return None
    here = dict.fromkeys(_SETTINGS_HERE[name] for name, value in given.items() if value is not None)
    return f"the draft model's generation config has {', '.join(ignored)}, which is not read: set {', '.join(here)}"


def _plain_sampler(vocab_size: int) -> DraftSampler:
    """The best token of the draft's own logits."""
    return DraftSampler(ProcessorStack(LogitsProcessorList()), None, None, vocab_size)


def _first_token(config: PreTrainedConfig) -> int:
    """First token of the model's texts; where there is none, the one that ends a text."""
    config = config.get_text_config(decoder=True)
    first = getattr(config, "bos_token_id", None)
    first = getattr(config, "eos_token_id", None) if first is None else first
    first = first[0] if isinstance(first, list) and first else first
    return first if isinstance(first, int) and 0 <= first < config.vocab_size else 0


class DraftModelCandidateGenerator(CandidateGenerator):
    """Drafts chains, one token after the other, or with a model that was trained for it all tokens at once."""

    options_class = DraftModelOptions
    default_num_speculative_tokens = 5
    most_speculative_tokens: int | None = 12
    loaded_by: ClassVar[tuple[str, ...]] = (*_LOADING, "same_tokenizer")

    @classmethod
    def load(
        cls, config: SpeculativeConfig, target_model: torch.nn.Module, draft_model: torch.nn.Module | None = None
    ) -> DraftModel:
        location = None
        if draft_model is None:
            draft_model = load_draft_model(config, target_model)
            location = checkpoint_location(config)
        else:
            _check_nothing_to_load(config)
        with nullcontext() if location is None else checkpoint_errors(config.model):
            model_profile(draft_model, role="draft model")
            sources = SourceReader(draft_model, target_model)
            vocabularies = match_vocabularies(draft_model, target_model, config.options.same_tokenizer, location)
        return DraftModel(draft_model, vocabularies, mask_token_of(draft_model), sources)

    @classmethod
    def network(cls, resources: DraftModel) -> torch.nn.Module:
        return resources.model

    def __init__(self, config: SpeculativeConfig, resources: DraftModel, session: Session):
        super().__init__(config, resources, session)
        model = resources.model
        self.device: torch.device = model.device
        self._tokens_ahead = 0 if session.device.type == "cpu" else 1
        self.vocabularies: Vocabularies = resources.vocabularies
        self._sources: SourceReader = resources.sources
        self.mask_token: int | None = resources.mask_token
        if self.mask_token is not None and config.fixed_length is None:
            self.num_speculative_tokens = _TOKENS_AT_ONCE
        # The stock protocol has no sampler; it verifies drafts as point masses.
        self.sampler: DraftSampler = session.sampler or _plain_sampler(self.vocabularies.target_size)
        own_limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if own_limit and config.max_model_len and config.max_model_len > own_limit:
            raise SpecConfigError(
                f"`max_model_len`={config.max_model_len} is longer than the draft model's context of {own_limit} "
                f"tokens. Use at most {own_limit}, or leave it out."
            )
        limits = {"max_model_len": config.max_model_len, "the draft model's max_position_embeddings": own_limit}
        limits = {name: limit for name, limit in limits.items() if limit} or {"max_length": session.max_length}
        if ignored := _ignored_settings(model, config):
            self._note(ignored)
        self._limiting = min(limits, key=limits.get)
        self.longest = limits[self._limiting]
        self.samples_drafts: bool | None = not self.sampler.is_greedy and self.options.draft_sample_method != "greedy"
        self.check_sampled_length()
        self.model: SlotModel = slot_model(model, SlotCache(0))
        self.model.max_position = self.longest - 1
        self.rows: list[int] = []  # the rows that are drafted for; one leaves when it gets too long
        self.pending: list[list[int]] = []  # committed tokens of each that have not been fed
        self.num_fed_drafts: list[int] = []  # draft tokens of the last cycle in the cache
        self.mark: tuple[Any, ...] | None = None  # where a recurrent draft model stood before them

    def prefill(self, prompt: Prompt) -> None:
        tokens = prompt.input_ids
        if tokens.shape[1] == 0:
            # Of a prompt of embeddings nothing can be read: the draft model begins a text.
            tokens = tokens.new_full((len(prompt.starts), 1), _first_token(self.model.model.config))
        length = tokens.shape[1]
        # One more: the target's first token.
        fits = [not self._is_too_long(length - start + 1) for start in prompt.starts]
        self.rows = [row for row, fit in enumerate(fits) if fit]
        if missing := self._sources.missing(prompt.source):
            self._note(f"no drafts: the draft model's own encoder reads `{missing}`, which the call does not have")
            self.rows = []
        if not self.rows:
            return
        self.model.see(self._sources.source(prompt.source, self.rows))
        self.model.cache.capacity = length + min(self.session.max_length - length, 1024) + 1
        reads_source = self.model.source is not None
        graphs = call_graphs(self.model.model, enforce_eager=self.config.enforce_eager or reads_source)
        self.model.use_graphs(graphs)
        if graphs is not None:
            self.session.draft_graphs.append(graphs)
        tokens = tokens[self.rows] if len(self.rows) < len(fits) else tokens
        self.model.prefill(self._readable(tokens), [prompt.starts[row] for row in self.rows])
        self.pending = [[] for _ in self.rows]
        self.num_fed_drafts = [0] * len(self.rows)

    def _is_too_long(self, length: int) -> bool:
        """A row of `length` tokens, the anchor included, leaves no room for drafts; noted once."""
        if length < self.longest:
            return False
        self.note_longest_row()
        return True

    @property
    def longest_row(self) -> tuple[int, str] | None:
        return self.longest, self._limiting

    def _note(self, text: str) -> None:
        if text not in self.session.notes:
            self.session.notes.append(text)
            logger.info(f"{text}.")

    def observe(self, commit: Commit) -> None:
        """Keeps the keys and values of accepted draft tokens and remembers which tokens are still to be fed.

        A recurrent draft model goes back to the anchor, and is fed the accepted tokens again with the next one.
        """
        where = {row: index for index, row in enumerate(commit.rows)}
        # Rows may have finished while nothing was drafted.
        self._drop([row not in where for row in self.rows])
        lengths = self.model.cache.lengths
        for index, row in enumerate(self.rows):
            position = where[row]
            committed = commit.token_lists[position]
            # The last token is the next anchor. It is fed in any case, for its logits; where rows are held to equal
            # lengths, it may be an accepted draft token.
            kept = min(commit.num_accepted[position], self.num_fed_drafts[index], len(committed) - 1)
            if self.mark is not None:
                kept = 0
            lengths[index] -= self.num_fed_drafts[index] - kept
            self.num_fed_drafts[index] = 0
            self.pending[index].extend(committed[kept:])
        if self.mark is not None:
            self.model.recurrent.return_to(self.mark)
            self.mark = None

    def propose(self, step: DraftStep) -> DraftTree:
        where = {row: index for index, row in enumerate(step.rows)}
        self._drop([row not in where or self._is_too_long(step.lengths[where[row]]) for row in self.rows])
        self._drop_rows_out_of_step()
        order = [where[row] for row in self.rows]
        most = self.draft_depths(step)
        depths = [most[index] for index in order]
        if max(depths, default=0) == 0:
            return DraftTree.empty(len(step.rows), self.session.device)
        chain, counts = self._draft([step.lengths[index] for index in order], depths)
        return self._for_all_rows(step, order, chain.draft(counts))

    def _drop_rows_out_of_step(self) -> None:
        """A draft that takes slots for positions would misread rows of different lengths."""
        if not self.rows or not self.model.profile.counts_slots:
            return
        ends = {length + len(tokens) for length, tokens in zip(self.model.cache.lengths, self.pending)}
        if len(ends) > 1:
            name = type(self.model.model).__name__
            self._note(f"no drafts once rows differ in length ({name} tells positions from the order of its cache)")
            self.rows = []

    def _draft(self, lengths: list[int], depths: list[int]) -> tuple[SteeredChain, list[int] | torch.LongTensor]:
        """Drafts for rows of these lengths: the chains, and how many of their tokens are valid in each row `(R,)`.

        Waits for the device where rows may stop before their limits, for nothing else.
        """
        stops = self.options.confidence_threshold > 0
        # The host knows the limits; where rows stop by themselves, the device does.
        counts = upload(depths, self.session.device) if stops else depths
        chain = SteeredChain(self.sampler, self.rows, lengths, self.samples_drafts)
        have_stopped: deque[PendingRead] = deque()
        next_logits = self._logits_at_once(max(depths)) if self.mask_token is not None else self._logits_one_by_one()
        for depth in range(max(depths)):
            logits = next_logits(chain.tokens)
            scores = chain.scores(logits.to(self.session.device))
            tokens = chain.choose(scores)
            if stops:
                counts = self._stop_low_confidence(counts, scores, tokens, depth + 1)
                have_stopped.append(PendingRead((counts <= depth + 1).all()))
                # A GPU is asked about the token before, so that it always has one more to work on.
                if len(have_stopped) > self._tokens_ahead and have_stopped.popleft().get():
                    break
        self.num_fed_drafts = [0 if self.mask_token is not None else len(chain.tokens) - 1] * len(self.rows)
        return chain, counts

    def _logits_one_by_one(self) -> Callable[[list[torch.LongTensor]], torch.Tensor]:
        """The logits after drafted tokens, each fed when it has been chosen."""

        def after(tokens: list[torch.LongTensor]) -> torch.Tensor:
            return self._feed(self._readable(tokens[-1])[:, None]) if tokens else self._feed_pending()[:, 0]

        return after

    def _logits_at_once(self, count: int) -> Callable[[list[torch.LongTensor]], torch.Tensor]:
        """The logits of all positions, from one forward with masks in the places of the drafted tokens."""
        logits = self._feed_pending(count - 1)
        return lambda tokens: logits[:, len(tokens)]

    def _stop_low_confidence(
        self, counts: torch.LongTensor, scores: torch.FloatTensor, tokens: torch.LongTensor, drafted: int
    ) -> torch.LongTensor:
        """Ends rows after a token of low probability. The token itself stays: dropping it would bias the output."""
        confidence = (scores.gather(1, tokens[:, None])[:, 0] - scores.logsumexp(-1)).exp()
        is_low = confidence < self.options.confidence_threshold
        return torch.where(is_low, counts.clamp(max=drafted), counts)

    def _feed_pending(self, num_masks: int = 0) -> torch.Tensor:
        """Feeds what the target has committed since the last cycle, and masks after it.

        Returns:
            `torch.Tensor` of shape `(R, num_masks + 1, W)`: Logits after each row's anchor and after the masks.
        """
        counts = list(map(len, self.pending))
        masks = [self.mask_token] * num_masks
        width = max(counts) + num_masks
        # Shorter rows are padded on the right: those slots lie after the row and are written again.
        rows = [row + (masks or row[-1:]) for row in self.pending]
        tokens = upload([(row + row[-1:] * width)[:width] for row in rows], self.device)
        # Logits of what was committed in a pause would cost more than reading it.
        known = min(counts) - 1
        output = self.model.forward(self._readable(tokens), chain_topology(width - 1, self.device), logits_from=known)
        self.model.commit(counts)
        if self.model.recurrent is not None:
            self.mark = self.model.recurrent.mark()
        self.pending = [[] for _ in self.rows]
        if not num_masks:
            return last_of_each(output.logits, [count - known for count in counts])[:, None]
        places = upload(
            [[count - known - 1 + index for index in range(num_masks + 1)] for count in counts], self.device
        )
        return output.logits.gather(1, places[..., None].expand(-1, -1, output.logits.shape[-1]))

    def _feed(self, tokens: torch.LongTensor) -> torch.Tensor:
        """Feeds one token a row; logits `(R, W)` after it."""
        output = self.model.forward(tokens, chain_topology(0, self.device))
        self.model.commit([1] * len(self.rows))
        return output.logits[:, -1]

    def _readable(self, tokens: torch.LongTensor) -> torch.LongTensor:
        """Tokens on the draft's device; ids that its embedding lacks are replaced, which costs acceptance only."""
        tokens = tokens.to(self.device)
        readable = self.vocabularies.draft_embedding_size
        if readable < self.vocabularies.target_size:
            tokens = tokens.masked_fill(tokens >= readable, 0)
        return tokens

    def _for_all_rows(self, step: DraftStep, order: list[int], draft: DraftTree) -> DraftTree:
        """The drafts in the loop's order of rows; rows that are not drafted for get none."""
        if order == list(range(len(step.rows))):
            return draft
        index = upload(order, draft.tokens.device)

        def spread(values: torch.Tensor) -> torch.Tensor:
            return values.new_zeros((len(step.rows), *values.shape[1:])).index_copy_(0, index, values)

        if draft.node_counts is None:
            counts = spread(draft.num_nodes)
        else:
            known = dict(zip(order, draft.node_counts))
            counts = [known.get(index, 0) for index in range(len(step.rows))]
        return DraftTree.chain(spread(draft.tokens), counts, None if draft.probs is None else spread(draft.probs))

    def keep_rows(self, keep: list[int]) -> None:
        """Waits: the next `propose` names the rows that are left."""

    def _drop(self, gone: list[bool]) -> None:
        if not any(gone):
            return
        keep = compact(gone)
        self.rows = [self.rows[index] for index in keep]
        self.pending = [self.pending[index] for index in keep]
        self.num_fed_drafts = [self.num_fed_drafts[index] for index in keep]
        if keep:
            self.model.keep_rows(keep)

    def join(self, other: DraftModelCandidateGenerator, numbers: dict[int, int]) -> None:
        # Rows that have finished may be here still, under numbers that are given anew.
        self._drop([row in numbers.values() for row in self.rows])
        other._drop([row not in numbers for row in other.rows])
        if not self.rows:
            self.model, other.model = other.model, self.model
        elif other.rows:
            self.model.join(other.model)
        self.longest = max(self.longest, other.longest)
        self.rows = self.rows + [numbers[row] for row in other.rows]
        self.pending = self.pending + other.pending
        self.num_fed_drafts = self.num_fed_drafts + other.num_fed_drafts

    def close(self) -> None:
        self.model.close()
        self.model = None
