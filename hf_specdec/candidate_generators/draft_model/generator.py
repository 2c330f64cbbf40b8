"""Draft model: a small causal language model writes a few tokens ahead of the target.

Leviathan et al. 2023 (arXiv:2211.17192) and Chen et al. 2023 (arXiv:2302.01318). Checkpoint: any causal language model
of transformers. Its tokenizer may be another than the target's, see `vocabularies.py`.
Its keys and values stay in slots of their own from cycle to cycle: a cycle feeds the one or two tokens that the target
has added, then one token a draft.

PARD (An et al. 2025, arXiv:2504.18583) trains such a model to predict several tokens at once: a cycle feeds all tokens
that the target has added, then K - 1 mask tokens in the same forward, and drafts K tokens from the last K logits. The
masks are forgotten. Each token has a distribution of its own, whatever is drawn before it. PARD-2 models read states
of the target beside the tokens, see `target_states.py`.

Shapes: R rows that are drafted for, B active rows of the loop, T tokens fed, K drafted tokens, V vocabulary of the
target, W width of the draft's logits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from transformers.utils import logging

from ...checkpoints.loading import checkpoint_errors
from ...drafting.chain import SteeredChain
from ...drafting.graphs import graph_depth
from ...drafts import DraftTree, chain_topology
from ...errors import SpecConfigError, shown
from ...logits.sampling import DraftSampler
from ...protocol import Commit, DeviceCommit, DraftStep, Prompt, Session
from ...settings.values import plain_path
from ...target.cache import SlotCache, compact
from ...target.facts import model_profile
from ...target.following import Choose, Continuing, Following
from ...target.graphs import call_graphs
from ...target.lean import slot_model
from ...target.model import SlotModel
from ...target.parts.recurrent import RecurrentLayers
from ...target.parts.source import Source
from ...transfers import PendingRead, last_of_each, upload
from ...validation import Options, draft_sample_method_field, parallel_drafting_field, setting
from ..base import CandidateGenerator
from .network import checkpoint_location, draft_tokenizer, load_draft_model, mask_token_of
from .source import SourceReader
from .target_states import TargetStates, load_target_states
from .vocabularies import RowText, SameTokens, match_vocabularies
from .vocabulary import is_one_tokenizer, load_tokenizer


if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

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
    parallel_drafting: bool | None = parallel_drafting_field()
    same_tokenizer: bool = setting(
        False,
        "Do not compare the tokenizers: you know that they are the same.",
    )
    draft_tokenizer: str | None = setting(
        None,
        "Repo id or folder of the draft model's tokenizer, where it does not lie beside the draft model.",
        normalize=plain_path,
    )
    draft_vocabulary: Literal["auto", "shared_tokens", "text"] = setting(
        "auto",
        "For draft models with another tokenizer: `shared_tokens` drafts among the tokens that both have (TLI), "
        "`text` re-encodes what the draft writes (SLEM, universal assisted generation). `auto` takes the text where "
        "few tokens are shared.",
    )


# Settings of transformers' assisted decoding about drafts, and those that stand for them here.
_SETTINGS_HERE = {
    "num_assistant_tokens": "num_speculative_tokens",
    "assistant_confidence_threshold": "draft_confidence_threshold",
}

# Tokens of a row that a cycle leaves to be fed: one more where it has accepted the whole draft.
_MOST_PENDING = 2

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
        vocabularies (`SameTokens`): Relation of its vocabulary to the target's.
        mask_token (`int`, *optional*): The token in whose places it drafts all tokens at once; `None`: it drafts one
            token after the other.
        sources (`SourceReader`): Its way to the sources of a target with an encoder.
        states (`TargetStates`, *optional*): Its way to the states of the target, where it reads them.
        note (`str`, *optional*): For the statistics.
    """

    model: torch.nn.Module
    vocabularies: SameTokens
    mask_token: int | None
    sources: SourceReader
    states: TargetStates | None = None
    note: str | None = None


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
    return DraftSampler(None, None, vocab_size)


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
    loaded_by: ClassVar[tuple[str, ...]] = (
        *_LOADING,
        "parallel_drafting",
        "same_tokenizer",
        "draft_tokenizer",
        "draft_vocabulary",
    )

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
        else:
            _check_nothing_to_load(config)
        with nullcontext() if location is None else checkpoint_errors(config.model):
            model_profile(draft_model, role="draft model")
            if location is not None and not draft_model.config.is_encoder_decoder:
                # What is made of a stranger's config may fail only when it is used.
                with torch.inference_mode():
                    draft_model(torch.zeros((1, 2), dtype=torch.long, device=draft_model.device))
            sources = SourceReader(draft_model, target_model)
            names = target_model.config.name_or_path, draft_model.config.name_or_path
            is_same = config.options.same_tokenizer or (
                config.options.draft_tokenizer is None and is_one_tokenizer(*names)
            )
            if tokenizers is None and not is_same:
                tokenizers = load_tokenizer(names[0]), draft_tokenizer(config, names[1], location)
            vocabularies = match_vocabularies(draft_model, target_model, config.options.draft_vocabulary, tokenizers)
            mask_token, states, unread = mask_token_of(draft_model, config.options.parallel_drafting), None, None
            if mask_token is not None:
                states, unread = load_target_states(config, draft_model, target_model)
            if states is not None and type(vocabularies) is not SameTokens:
                states, unread = None, "its tokens are not the target's"
        note = None
        if unread:
            note = f"the PARD-2 draft model drafts from the tokens alone, without the target's states: {unread}"
            logger.warning_once(f"Fewer drafts may be accepted: {note}.")
        return DraftModel(draft_model, vocabularies, mask_token, sources, states, note)

    @classmethod
    def network(cls, resources: DraftModel) -> torch.nn.Module:
        return resources.model

    def __init__(self, config: SpeculativeConfig, resources: DraftModel, session: Session):
        super().__init__(config, resources, session)
        model = resources.model
        self.device: torch.device = model.device
        self._tokens_ahead = 0 if session.device.type == "cpu" else 1
        self.vocabularies: SameTokens = resources.vocabularies
        self._sources: SourceReader = resources.sources
        self.mask_token: int | None = resources.mask_token
        self.states: TargetStates | None = resources.states
        if self.states is not None:
            self.target_hidden_states: tuple[int | str, ...] = self.states.keys
        if self.mask_token is not None and config.fixed_length is None:
            self.num_speculative_tokens = _TOKENS_AT_ONCE
        # The stock protocol has no sampler; it verifies drafts as point masses.
        self.sampler: DraftSampler = session.sampler or _plain_sampler(self.vocabularies.target_size)
        if not self.vocabularies.drafts_target_tokens:
            self.sampler = _plain_sampler(self.vocabularies.draft_size)
        own_limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if own_limit and config.max_model_len and config.max_model_len > own_limit:
            raise SpecConfigError(
                f"`max_model_len`={config.max_model_len} is longer than the draft model's context of {own_limit} "
                f"tokens. Use at most {own_limit}, or leave it out."
            )
        limits = {"max_model_len": config.max_model_len, "the draft model's max_position_embeddings": own_limit}
        limits = {name: limit for name, limit in limits.items() if limit} or {"max_length": session.max_length}
        for note in filter(None, (_ignored_settings(model, config), self.vocabularies.note, resources.note)):
            self._note(note)
        self._limiting = min(limits, key=limits.get)
        self.longest = limits[self._limiting]
        self.samples_drafts: bool | None = not self.sampler.is_greedy and self.options.draft_sample_method != "greedy"
        self.check_sampled_length()
        self.model: SlotModel = slot_model(model, SlotCache(0))
        self.model.max_position = self.longest - 1
        self.rows: list[int] = []  # the rows that are drafted for; one leaves when it gets too long
        self.texts: list[RowText] = []  # what it has of each of them
        self.mark: tuple[Any, ...] | None = None  # where a recurrent draft model stood before them
        self._lengths: list[int] = []  # committed tokens of each of them at the last draft

    def prefill(self, prompt: Prompt) -> None:
        count = len(prompt.starts)
        if prompt.input_ids.shape[1] == 0:
            # Of a prompt of embeddings nothing can be read: the draft model begins a text.
            tokens = prompt.input_ids.new_full((count, 1), _first_token(self.model.model.config))
            starts, texts = [0] * count, [RowText() for _ in range(count)]
        else:
            tokens, starts, texts = self.vocabularies.prompts(prompt)
        length = tokens.shape[1]
        # One more: the target's first token.
        self.rows = [row for row in range(count) if not self._is_too_long(length - starts[row] + 1)]
        if missing := self._sources.missing(prompt.source):
            self._note(f"no drafts: the draft model's own encoder reads `{missing}`, which the call does not have")
            self.rows = []
        if not self.rows:
            return
        self.texts = [texts[row] for row in self.rows]
        if (source := self._sources.source(prompt.source, self.rows)) is not None:
            source.attach(self.model)
        ahead = 2 * self.num_speculative_tokens + 1
        self.model.cache.capacity = length + min(self.session.max_length - length, 1024) + ahead
        most_fed = _MOST_PENDING if self.mask_token is None else 2 * self.num_speculative_tokens
        eager = self.config.enforce_eager or self.model.find(Source) is not None
        graphs = call_graphs(self.model.model, largest=most_fed, enforce_eager=eager)
        self.model.use_graphs(graphs)
        if graphs is not None:
            self.session.draft_graphs.append(graphs)
        tokens = (tokens[self.rows] if len(self.rows) < count else tokens).to(self.device)
        if self.states is not None:
            added = self.states.of_prompt(prompt.hidden_states, starts, length)
            tokens = self.states.embed_projected(tokens, added[self.rows])
        self.model.prefill(tokens, [starts[row] for row in self.rows])

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
        for index, (row, text) in enumerate(zip(self.rows, self.texts)):
            position, num_fed = where[row], text.num_fed
            if self.mark is not None:
                text.num_fed = 0
            kept = self.vocabularies.commit(text, commit.token_lists[position], commit.num_accepted[position])
            if self.states is not None:
                count = len(commit.token_lists[position])
                text.states.append(
                    {key: commit.hidden_states[key][position, :count] for key in self.target_hidden_states}
                )
            self.model.cache.lengths[index] -= num_fed - kept
            text.num_fed = 0
        if self.mark is not None:
            self.model.find(RecurrentLayers).return_to(self.mark)
            self.mark = None

    def propose(self, step: DraftStep) -> DraftTree:
        where = {row: index for index, row in enumerate(step.rows)}
        self._drop(
            [
                row not in where or self._is_too_long(max(step.lengths[where[row]], own))
                for row, own in zip(self.rows, self._own_lengths())
            ]
        )
        self._drop_rows_out_of_step()
        order = [where[row] for row in self.rows]
        most = self.draft_depths(step)
        depths = [min(most[index], self.longest - own) for index, own in zip(order, self._own_lengths())]
        if max(depths, default=0) == 0:
            return DraftTree.empty(len(step.rows), self.session.device)
        self._lengths = [step.lengths[index] for index in order]
        following = self._draft_at_once(step.depth)
        if following is not None:
            return self._for_all_rows(step, order, self._drafted(following, depths))
        chain, counts = self._draft(self._lengths, depths)
        draft = self.vocabularies.draft(Following(*chain.stacked()), counts, depths, self.texts)
        return self._for_all_rows(step, order, draft)

    def _own_lengths(self) -> list[int]:
        """Tokens of each row in the draft's segmentation, the anchor included."""
        places = zip(self.model.cache.lengths, self.model.starts, self.texts)
        return [length - start + len(text.pending) for length, start, text in places]

    def _draft_at_once(self, depth: int | None) -> Following | None:
        """A whole draft from one graph, as deep as was chosen; `None` where each token is chosen by itself."""
        choose = self._choice()
        if choose is None:
            return None
        tokens, counts = self._pending_tokens()
        before = [length - count for length, count in zip(self._lengths, counts)]
        states = partial(self._pending_states, tokens.shape[1])
        following = self._continue(choose, depth, tokens, counts, before, states)
        if following is not None:
            for text in self.texts:
                text.pending, text.states = [], []
        return following

    def _choice(self) -> Choose | None:
        """The choice of tokens inside of the graph of a whole draft; `None` where there is no such graph."""
        graphs, sampler, sizes = self.model.graphs, self.sampler, self.vocabularies
        if graphs is None or graphs.why_eager is not None or self.options.confidence_threshold:
            return None
        stack = sampler.in_graphs(self.rows)
        if self.samples_drafts:
            can_choose = stack is not None and self.device == self.session.device
        else:
            can_choose = sampler.is_greedy and stack is not None and not stack
        if not can_choose:
            return None
        stack = stack if self.samples_drafts else None
        return Choose(sizes.num_choices, sizes.readable, sampler.vocab_size, stack, sizes.translation(self.device))

    def _continue(
        self,
        choose: Choose,
        depth: int | None,
        tokens: torch.LongTensor,
        counts: list[int] | torch.LongTensor,
        before: list[int],
        states: Callable[[], dict[int | str, torch.Tensor]],
    ) -> Following | None:
        """Reads tokens that follow `before[r]` others, and drafts.

        All that a cycle commits is read again: how many drafted tokens may stay is known too late.
        """
        keys = None if choose.stack is None else self.sampler.uniforms.keys(self.rows, before)
        embed = None if self.states is None else self.states.embed
        most = self.num_speculative_tokens
        depth = graph_depth(depth, most) if self.mask_token is None else most
        continuing = Continuing(depth, choose, most + 1, self.mask_token, embed=embed)
        return continuing.run(self.model, tokens, counts, keys, states)

    @property
    def drafts_ahead(self) -> bool:
        if type(self.vocabularies) is not SameTokens:
            # The host alone knows the text in the draft's tokens.
            return False
        # Drafted tokens that were fed one by one lie where the next draft would begin.
        is_read = len(self._lengths) == len(self.rows) and not any(text.pending or text.num_fed for text in self.texts)
        return is_read and self._choice() is not None

    def draft_ahead(self, commit: DeviceCommit) -> DraftTree | None:
        choose = self._choice()
        if self.rows != commit.rows or choose is None:
            return None
        tokens = self.vocabularies.inputs(commit.tokens.to(self.device))
        states = {key: commit.hidden_states[key] for key in self.target_hidden_states}
        following = self._continue(choose, commit.depth, tokens, commit.counts, self._lengths, lambda: states)
        return following and self._drafted(following, commit.max_draft_tokens)

    def _drafted(self, following: Following, depths: list[int]) -> DraftTree:
        drafted = DraftTree.chain(following.tokens.to(self.session.device), probs=following.probs).shortened(depths)
        return self.vocabularies.draft(Following(drafted.tokens, drafted.probs), depths, depths, self.texts)

    def _drop_rows_out_of_step(self) -> None:
        """A draft that takes slots for positions would misread rows of different lengths."""
        if not self.rows or not self.model.profile.counts_slots:
            return
        ends = {length + len(text.pending) for length, text in zip(self.model.cache.lengths, self.texts)}
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
            scores = chain.scores(self.vocabularies.logits(logits.to(self.session.device)))
            tokens = chain.choose(scores)
            if stops:
                counts = self._stop_low_confidence(counts, scores, tokens, depth + 1)
                have_stopped.append(PendingRead((counts <= depth + 1).all()))
                # A GPU is asked about the token before, so that it always has one more to work on.
                if len(have_stopped) > self._tokens_ahead and have_stopped.popleft().get():
                    break
        for text in self.texts:
            text.num_fed = 0 if self.mask_token is not None else len(chain.tokens) - 1
        return chain, counts

    def _logits_one_by_one(self) -> Callable[[list[torch.LongTensor]], torch.Tensor]:
        """The logits after drafted tokens, each fed when it has been chosen."""

        def after(tokens: list[torch.LongTensor]) -> torch.Tensor:
            if not tokens:
                return self._feed_pending()[:, 0]
            return self._feed(self.vocabularies.inputs(tokens[-1].to(self.device))[:, None])

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
        tokens, counts = self._pending_tokens(num_masks)
        width = tokens.shape[1]
        # Logits of what was committed in a pause would cost more than reading it.
        known = min(counts) - 1
        if self.states is not None:
            tokens = self.states.embed(tokens, self._pending_states(width))
        output = self.model.forward(tokens, chain_topology(width - 1, self.device), logits_from=known)
        self.model.commit(counts)
        if (recurrent := self.model.find(RecurrentLayers)) is not None:
            self.mark = recurrent.mark()
        for text in self.texts:
            text.pending, text.states = [], []
        if not num_masks:
            return last_of_each(output.logits, [count - known for count in counts])[:, None]
        places = upload(
            [[count - known - 1 + index for index in range(num_masks + 1)] for count in counts], self.device
        )
        return output.logits.gather(1, places[..., None].expand(-1, -1, output.logits.shape[-1]))

    def _pending_tokens(self, num_masks: int = 0) -> tuple[torch.LongTensor, list[int]]:
        """Committed tokens that have not been fed, with masks after them `(R, t)`, and how many each row has."""
        pending, masks = [text.pending for text in self.texts], [self.mask_token] * num_masks
        counts = list(map(len, pending))
        width = max(counts) + num_masks
        # Shorter rows are padded on the right: those slots lie after the row and are written again.
        rows = [row + (masks or row[-1:]) for row in pending]
        return upload([(row + row[-1:] * width)[:width] for row in rows], self.device), counts

    def _pending_states(self, width: int) -> dict[int | str, torch.Tensor]:
        """The states of the pending tokens, and of masks after them, each `(R, width, H)`, where they are read."""
        found = {}
        for key in self.target_hidden_states:
            rows = [torch.cat([states[key] for states in text.states]) for text in self.texts]
            found[key] = torch.stack([torch.cat([row, row[-1:].expand(width - len(row), -1)]) for row in rows])
        return found

    def _feed(self, tokens: torch.LongTensor) -> torch.Tensor:
        """Feeds one token a row; logits `(R, W)` after it."""
        output = self.model.forward(tokens, chain_topology(0, self.device))
        self.model.commit([1] * len(self.rows))
        return output.logits[:, -1]

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
        self.texts = [self.texts[index] for index in keep]
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
        self.texts = self.texts + other.texts

    def close(self) -> None:
        self.model.close()
        self.model = None
