"""The decoding loop: prefill, then cycles of draft -> verify -> accept -> commit until every row stops.

A cycle on a GPU waits for it once, for the verdict. What the next forward does not depend on (statistics, traces,
streamers) is done in front of the next wait, while the GPU works.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import Cache, DynamicCache, StaticCache

from ..drafts import DraftTree, chain_topology
from ..errors import SpecConfigError
from ..logits.processors import ProcessorStack
from ..logits.randomness import RowUniforms, seed_from_torch
from ..logits.rules import acceptance_rule
from ..logits.sampling import DraftSampler
from ..logits.verifier import Verdict, Verifier, take_nodes
from ..metrics import CycleTrace, RowTrace, SpecDecodingStats, begin_call, watch_acceptance
from ..metrics.listeners import CallProgress
from ..protocol import Commit, DraftStep, Session
from ..settings import AUTO
from ..target_facts import vocabulary_size
from ..transfers import select_rows, upload
from .cache import SlotCache, check_room, compact, fill_cache
from .continuation import Continuation, ContinuationCheck, next_inputs, watched_prefill
from .functional import slot_model
from .graphs import CallGraphs
from .output import OutputRecorder, SpeculativeOutput
from .profile import REPEATED_INPUTS, check_reach, is_text_only, model_profile
from .recurrent import store_states
from .sequences import Sequences, StopRules
from .target import SlotModel, SlotOutput, call_graphs


if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..candidate_generators.base import CandidateGenerator


# Padding tokens that one forward reads of a row that has ended, where outputs hold them.
_PADDING_AT_ONCE = 64


@dataclass
class Request:
    """One `generate()` call as the host has prepared it.

    Attributes:
        model (`PreTrainedModel`): The target.
        input_ids (`torch.LongTensor` of shape `(B, P)`): Prompts, left-padded (P is 0 with `inputs_embeds` alone).
        logits_processor, stopping_criteria, generation_config: As `generate()` prepared them.
        model_kwargs (`dict`): Arguments of the target's forward: mask, positions, multimodal inputs.
        streamer (`BaseStreamer`, *optional*): Has seen nothing yet.
        synced_gpus (`bool`): Go on with forwards until all ranks have finished.
        past_key_values (`DynamicCache` or `StaticCache`, *optional*): The user's; read at the start, and brought up to
            date at the end.
        began (`float`): `perf_counter()` when `generate()` was called.
    """

    model: torch.nn.Module
    input_ids: torch.LongTensor
    logits_processor: list
    stopping_criteria: list
    generation_config: object
    model_kwargs: dict
    streamer: object | None = None
    synced_gpus: bool = False
    past_key_values: object | None = None
    began: float = field(default_factory=perf_counter)


class DecodingLoop:
    """Runs one request.

    Args:
        request (`Request`): The call.
        speculator (`Speculator`): Makes the call's candidate generator.
    """

    def __init__(self, request: Request, speculator):
        config = request.generation_config
        self.request = request
        self.model = request.model
        self.device = request.input_ids.device
        self.batch_size = request.input_ids.shape[0]
        self.rows = list(range(self.batch_size))

        self.sequences = Sequences(request.input_ids, _pad_token(config))
        self.recorder = OutputRecorder(self.batch_size, config)
        self.stop = StopRules(request.stopping_criteria, self.sequences, self.recorder.scores)
        origin = dict(getattr(speculator, "origin", {}))
        self.stats = SpecDecodingStats(method=speculator.method, batch_size=self.batch_size, drafter=origin)
        self.keeps_cache = bool(config.return_dict_in_generate) or request.past_key_values is not None
        self.finished_states: dict[int, list] = {}
        self.num_read: dict[int, int] = {}
        self.streamed = 0
        self.has_shown = False  # a streamer has seen something of the call, which cannot begin anew from then on
        self.num_unknown = 0
        self.row_inputs = _row_inputs(request)
        self.deferred: deque[Callable[[], None]] = deque()
        self.check: ContinuationCheck | None = None

        self.stack = stack = ProcessorStack(request.logits_processor)
        uniforms = self._uniforms() if config.do_sample else None
        self.generator: CandidateGenerator = speculator.candidate_generator(self._session(stack, uniforms))
        self.stats.num_spec_tokens = self.generator.num_speculative_tokens
        self.settings = getattr(speculator, "config", None)
        with ExitStack() as if_it_fails:
            if_it_fails.callback(self.generator.close)
            self.verifier = self._verifier(stack, uniforms)
            self.target = self._slot_target()
            if_it_fails.pop_all()

    def _verifier(self, stack: ProcessorStack, uniforms: RowUniforms | None) -> Verifier:
        rule = acceptance_rule(self.generator.config, self.generator.samples_drafts, uniforms, self._uniforms)
        self.stats.rejection_sample_method = rule.name
        if rule.note:
            self.stats.notes.append(rule.note)
        verifier = Verifier(
            stack,
            self.stop,
            rule,
            recorder=self.recorder.scores,
            why_equal=self._why_equal(),
        )
        if verifier.why_equal:
            self.stats.notes.append(f"The rows wait for the slowest one in every cycle: {verifier.why_equal}.")
        return verifier

    def _why_equal(self) -> str | None:
        """What of the target makes all rows advance by the same number of tokens, in words."""
        profile = model_profile(self.model)
        if self.batch_size > 1 and profile.counts_slots:
            return "the target model tells positions from the order of its cache"
        if self.keeps_cache and profile.is_recurrent and self.stop.may_cut_back:
            return (
                "stopping criteria may end a row before its last tokens, and the cache to be returned has a recurrent "
                "state, which cannot be cut back"
            )
        return None

    def _uniforms(self) -> RowUniforms:
        return RowUniforms(_shared_seed(self.model), self.device)

    def _session(self, stack: ProcessorStack, uniforms: RowUniforms | None) -> Session:
        return Session(
            batch_size=self.batch_size,
            max_length=self.stop.max_length,
            device=self.device,
            sampler=DraftSampler(stack, self.sequences, uniforms, vocabulary_size(self.model)),
            supports_trees=model_profile(self.model).takes_trees,
            notes=self.stats.notes,
            group=_processes_of(self.model),
        )

    def _slot_target(self) -> SlotModel:
        prompt_length = max(self.sequences.prompt_length, _embeds_length(self.request.model_kwargs))
        nodes = self.generator.num_draft_nodes + 1
        most = self.stop.max_length - self.sequences.prompt_length
        # Room for the whole generation, but not for a maximum that is only there as a limit.
        cache = SlotCache(prompt_length + min(most, 1024) + nodes, limit=prompt_length + most + nodes)
        target = slot_model(
            self.model,
            cache,
            states=self.generator.target_hidden_states,
            forward_kwargs={"output_hidden_states": True} if self.recorder.wants_states else None,
        )
        target.row_inputs = dict(self.row_inputs)
        return target

    def _graphs(self) -> CallGraphs | None:
        """CUDA graphs of verifications, where there are any."""
        config = self.generator.config
        return call_graphs(
            self.model,
            largest=self.generator.num_draft_nodes + 1,
            enforce_eager=config is not None and config.enforce_eager,
            all_hidden_states=self.recorder.wants_states,
            row_inputs=tuple(self.row_inputs),
        )

    def run(self):
        """Generates. Returns token ids `(B, L)`, or a `SpeculativeOutput` if the config asks for a dict."""
        try:
            return self._run()
        finally:
            self.target.close()

    def _run(self):
        began = perf_counter()
        self.stats.setup_seconds = began - self.request.began
        try:
            self.target.use_graphs(self._graphs())
            self.verifier.rule.check_depth(self.generator.num_speculative_tokens)
            with self._begin_call() as self.progress:
                self._decode()
        finally:
            self.generator.close()
        self._stream(end=True)
        self.stats.total_seconds = perf_counter() - began
        self.stats.attention = self.target.attention
        if self.stop.num_cut_back:
            self.stats.notes.append(
                f"{self.stop.num_cut_back} tokens behind the ends of rows have been generated and cut off: a stopping "
                "criterion is shown a column when all rows have reached it."
            )
        self._count_graphs()
        self._watch_acceptance()
        return self._output()

    def _watch_acceptance(self) -> None:
        # With an adaptive length, drafts that do not pay are not made for long.
        if self.settings is not None and self.settings.num_speculative_tokens != AUTO:
            watch_acceptance(self.model, self.settings.compute_hash(), self.stats)

    def _begin_call(self) -> CallProgress:
        return begin_call(self.stats, _model_name(self.model))

    def _decode(self) -> None:
        self.verifier.reads_drafts = bool(self.progress.traces)
        try:
            self._prefill()
            self.progress.end_prefill()
            while self.model._has_unfinished_sequences(self.stop.all_finished, self.request.synced_gpus, self.device):
                if self.stop.all_finished:
                    self._idle_forward()
                else:
                    self._cycle()
        finally:
            # Also where a forward has failed: what was committed before is counted and streamed.
            self._catch_up()

    # Prefill

    def _prefill(self) -> None:
        """The target reads the prompts and gives each row its first token; then the drafter reads them."""
        began = perf_counter()
        output, states = self._read_prompts()
        if self.request.streamer is not None:
            self.request.streamer.put(self.request.input_ids.cpu())
            self.has_shown = True
        # The first token is committed like every other: a verification without drafts, of the prompt's last node.
        logits = output.logits[:, -1:].to(self.device)
        draft = DraftTree.empty(self.batch_size, self.device)
        verdict = self.verifier.verify(draft, logits, self.rows, self._positions(0))
        self.stats.num_committed_tokens += self.batch_size
        self._record(verdict, logits, output.get("hidden_states"))
        self.anchors = verdict.tokens[:, 0]
        if not (self.stop.all_finished or self.request.synced_gpus):
            self.check = ContinuationCheck.begin(self.model, self.target.cache, self.continuation, self.anchors)
        self._stream()
        self.stats.prefill_seconds = perf_counter() - began
        if not self.stop.all_finished:
            self._start_drafting(verdict, states)

    def _read_prompts(self):
        """The target's own prefill into the slots; its output, and the hidden states the drafter asked for."""
        request, target = self.request, self.target
        kwargs = dict(request.model_kwargs)
        if request.past_key_values is not None:
            target.cache.load(request.past_key_values)
        room = self.stop.max_length - request.input_ids.shape[1]
        given, mask = _prompt_slots(request, target.cache.get_seq_length()), kwargs.get("attention_mask")
        check_reach(self.model, [given] if mask is None else mask.ne(0).sum(1).tolist(), room)
        check_room(kwargs.get("past_key_values"), self.batch_size, given + room)
        kwargs["past_key_values"] = target.cache
        # The prompts may be read in chunks.
        with target.captured(joined=True) as states, watched_prefill(self.model) as received:
            output = self.model._prefill(request.input_ids, request.generation_config, kwargs)
        self.stats.num_target_forwards += 1
        if received.cache not in (None, target.cache):
            # The model has put a beginning of its own in front of the prompts.
            target.cache.load(received.cache)
            output.past_key_values = target.cache
        target.check_prefilled()
        inputs = next_inputs(self.model, output, request.input_ids, kwargs)
        num_slots = target.cache.get_seq_length()
        self.continuation = where = Continuation.read(self.model, inputs, received, num_slots, given, self.batch_size)
        check_reach(self.model, where.next_positions, room)
        where.start_slots(target, range(self.batch_size))
        # The slots may begin before the given tokens: a continued cache, or embeddings.
        self.num_unknown = num_slots - request.input_ids.shape[1]
        # The last token is never read.
        target.max_position = max(where.next_positions) + room - 2
        return output, states

    def _start_drafting(self, verdict: Verdict, states: dict) -> None:
        began = perf_counter()
        prompt = self.continuation.prompt(self.request.input_ids, states)
        self.generator.prefill(prompt)
        self._observe(verdict, {key: value[:, -1:] for key, value in prompt.hidden_states.items()})
        self.stats.draft_seconds += perf_counter() - began
        self._drop_finished_rows()

    # One cycle

    def _cycle(self) -> None:
        began = perf_counter()
        draft = self._propose()
        drafted = perf_counter()
        output = self._verify(draft)
        # On a GPU the forward has only been launched; the verdict waits for it.
        verdict = self.verifier.verify(draft, output.logits, self.rows, self._positions(1), self._catch_up)
        verified = perf_counter()
        self._commit(draft, output, verdict)
        self.stats.draft_seconds += drafted - began
        self.stats.verify_seconds += verified - drafted
        self._afterwards(self.progress.end_cycle)

    def _afterwards(self, work: Callable[[], None]) -> None:
        """Does what the next forward does not depend on: at once, or beside that forward where it runs by itself."""
        if _runs_by_itself(self.device) and not self.stop.all_finished:
            self.deferred.append(work)
        else:
            work()

    def _catch_up(self) -> None:
        while self.deferred:
            self.deferred.popleft()()

    def _positions(self, ahead: int) -> list[int]:
        """Position of each row's anchor plus `ahead`, masked tokens not counted."""
        num_others = self.continuation.num_others
        return [length - num_others[row] + ahead for length, row in zip(self.target.cache.lengths, self.rows)]

    def _step(self) -> DraftStep:
        depth = self.generator.num_speculative_tokens
        room = [self.stop.max_length - self.sequences.lengths[row] - 1 for row in self.rows]
        return DraftStep(self.rows, self.anchors, self._positions(1), [max(min(depth, free), 0) for free in room])

    def _propose(self) -> DraftTree:
        step = self._step()
        draft = self.generator.propose(step)
        if not isinstance(draft, DraftTree) or draft.batch_size != len(self.rows):
            found = f"one of {draft.batch_size}" if isinstance(draft, DraftTree) else f"a {type(draft).__name__}"
            raise SpecConfigError(
                f"{type(self.generator).__name__}.propose() must return a DraftTree of {len(self.rows)} rows, those "
                f"of `step.rows`, and has returned {found}. Give rows without a draft an empty one."
            )
        if max(step.max_draft_tokens) == 0 < self.generator.num_speculative_tokens:
            draft.why_empty = "length_limit"
        else:
            self._note_long_rows(step, draft)
        self._count_lookups()
        return draft

    def _note_long_rows(self, step: DraftStep, draft: DraftTree) -> None:
        limit = self.generator.longest_row
        if limit is None or max(step.lengths) < limit[0]:
            return
        self.generator.note_longest_row()
        if min(step.lengths) >= limit[0]:
            draft.why_empty = "max_model_len"

    def _count_lookups(self) -> None:
        found, stats = self.generator.lookups, self.stats
        if found is not None:
            stats.num_lookups, stats.num_lookup_hits = found.num_rows, found.num_hits
            stats.cache_tokens, stats.cache_bytes = found.num_tokens, found.num_bytes

    def _verify(self, draft: DraftTree) -> SlotOutput:
        tokens = self.anchors[:, None] if draft.size == 0 else torch.cat([self.anchors[:, None], draft.tokens], dim=1)
        output = self.target.forward(tokens, draft.topology)
        self.stats.num_target_forwards += 1
        output.logits = output.logits.to(self.device)
        if self.check is not None:
            self.check.compare(output.logits[:, 0], self.rows)
            self.check = None
        return output

    def _commit(self, draft: DraftTree, output: SlotOutput, verdict: Verdict) -> None:
        """Makes the accepted path part of the text, of the target's cache and of the drafter's state."""
        counts = list(map(len, verdict.token_lists))
        self.target.commit(counts, None if draft.is_chain else verdict.path)
        self._record(verdict, output.logits, output.all_hidden_states)
        self._afterwards(partial(self._count, draft.without_probs(), verdict, self.rows))
        self._afterwards(self._stream)
        self.anchors = _last_tokens(verdict)
        began = perf_counter()
        self._observe(verdict, {key: take_nodes(value, verdict.path) for key, value in output.hidden_states.items()})
        self.stats.draft_seconds += perf_counter() - began
        if not self.stop.all_finished:
            self._drop_finished_rows()

    def _record(self, verdict: Verdict, logits: torch.Tensor, hidden_states: tuple | None) -> None:
        self.recorder.add(self.rows, verdict.path, list(map(len, verdict.token_lists)), logits, hidden_states)

    def _observe(self, verdict: Verdict, states: dict) -> None:
        self.generator.observe(Commit(self.rows, verdict.tokens, verdict.token_lists, verdict.num_accepted, states))

    def _drop_finished_rows(self) -> None:
        """Finished rows leave the batch, so that they cost no more compute."""
        finished = [self.stop.has_left(row) for row in self.rows]
        if not any(finished) or all(finished):
            return
        if self.keeps_cache:
            self._store_states([index for index, done in enumerate(finished) if done])
        keep = compact(finished)
        self.target.keep_rows(keep)
        self.generator.keep_rows(keep)
        self.rows = [self.rows[index] for index in keep]
        self.anchors = select_rows(self.anchors, keep)

    def _store_states(self, indices: list[int]) -> None:
        for index in indices:
            self.finished_states[self.rows[index]] = self.target.row_states(index)

    def _idle_forward(self) -> None:
        """A forward whose result is not used: other ranks still need this one's shards."""
        self.target.forward(self.anchors[:, None], chain_topology(0, self.device))

    # What others see

    def _count(self, draft: DraftTree, verdict: Verdict, rows: list[int]) -> None:
        drafted = draft.counts()
        counts = zip(drafted, draft.max_depths(), verdict.num_accepted, verdict.token_lists)
        for nodes, depth, accepted, committed in counts:
            self.stats.count(nodes, depth, accepted, len(committed))
        if not any(drafted):
            self.stats.count_without_drafts(draft.why_empty)
        if self.progress.traces:
            drafts = draft.token_lists(), draft.parent_lists()
            traced = zip(rows, *drafts, verdict.num_accepted, verdict.token_lists)
            cycle = CycleTrace([RowTrace(row, list(t), list(p), n, list(c)) for row, t, p, n, c in traced])
            for trace in self.progress.traces:
                trace.append(cycle)

    def _count_graphs(self) -> None:
        graphs, device = self.target.graphs, self.model.device
        if graphs is not None:
            self.stats.graphs = str(graphs)
            self.stats.num_graph_replays, self.stats.num_graph_captures = graphs.num_replays, graphs.num_captures
        drafts = self.generator.session.draft_graphs
        self.stats.draft_graphs = "; ".join(dict.fromkeys(map(str, drafts)))
        self.stats.num_draft_graph_replays = sum(graphs.num_replays for graphs in drafts)
        self.stats.num_draft_graph_captures = sum(graphs.num_captures for graphs in drafts)
        if device.type == "cuda":
            self.stats.peak_memory_bytes = torch.cuda.max_memory_allocated(device)

    def _stream(self, end: bool = False) -> None:
        """Hands over every column that all rows have reached or ended before, one token a row at a time."""
        streamer = self.request.streamer
        # Nothing is shown before it is known to be right.
        if streamer is None or self.check is not None:
            return
        ready = self.stop.num_settled - self.sequences.prompt_length
        for column in self.sequences.new_columns(self.streamed, ready).unbind(1):
            streamer.put(column.clone())
        self.streamed = max(self.streamed, ready)
        if end:
            streamer.end()

    def _output(self):
        config, sequences = self.request.generation_config, self.sequences.output()
        if self.keeps_cache:
            self._store_states(range(len(self.rows)))
        if self.recorder.wants_steps:
            self.recorder.cut(self.sequences.num_generated)
        if (self.recorder.wants_steps or self.keeps_cache) and len(set(self.sequences.lengths)) > 1:
            if self.request.synced_gpus:
                self.stats.notes.append(
                    "What is returned has zeros where rows had ended before others: reading on takes forwards, which "
                    "processes that wait for each other must make together."
                )
            else:
                self._read_padding()
        cache = self._final_cache() if self.keeps_cache else None
        if not config.return_dict_in_generate:
            return sequences
        return SpeculativeOutput(
            sequences=sequences,
            scores=self.recorder.scores and self.recorder.scores.steps(),
            logits=self.recorder.logits and self.recorder.logits.steps(),
            hidden_states=self.recorder.hidden_states(),
            past_key_values=cache,
            speculative=self.stats,
        )

    def _read_padding(self) -> None:
        """Reads what plain generation feeds to rows that have ended, and records what it says there.

        Such rows have left the batch, so this costs forwards of their own: of calls that return something per token,
        and one for the last tokens of rows, where only the cache is returned.
        """
        lengths, last = self.sequences.lengths, max(self.sequences.lengths)
        for length in sorted(set(lengths) - {last}):
            rows = [row for row, own in enumerate(lengths) if own == length]
            target = self._continued(rows)
            # The last token has not been read, and what is behind the last padding is not wanted.
            end = last - 1 if self.recorder.wants_steps else length
            for first in range(length - 1, end, _PADDING_AT_ONCE):
                nodes = min(_PADDING_AT_ONCE, end - first)
                tokens = self.sequences.prefix(first + nodes)[rows, first:]
                output = target.forward(tokens, chain_topology(nodes - 1, self.device))
                target.commit([nodes] * len(rows))
                self.stats.num_target_forwards += 1
                logits = output.logits.to(self.device)
                path = torch.arange(nodes, device=self.device).expand(len(rows), -1)
                self.recorder.add(rows, path, [nodes] * len(rows), logits, output.all_hidden_states)
                if self.recorder.scores is not None and self.stack.knows_all:
                    self.recorder.scores.add(rows, self._scores_behind(rows, first + 1, logits), [nodes] * len(rows))
            for index, row in enumerate(rows):
                self.finished_states[row], self.num_read[row] = target.row_states(index), end

    def _scores_behind(self, rows: list[int], length: int, logits: torch.Tensor) -> torch.Tensor:
        """Processed scores of logits `(R, T, V)`, the first of which follow `length` columns of the rows."""
        nodes = range(logits.shape[1])
        steps = [
            self.stack.rows([self.sequences.prefix(length + node, row)[0] for row in rows], logits[:, node], rows)
            for node in nodes
        ]
        return torch.stack(steps, dim=1)

    def _continued(self, rows: list[int]) -> SlotModel:
        """The target with rows of equal length in its slots, which have left the batch."""
        cache = SlotCache(self.target.cache.capacity, limit=self.target.cache.limit)
        target = SlotModel(self.model, cache, forward_kwargs=self.target.forward_kwargs)
        cache.load(self._filled(self._empty_cache(), rows))
        self.continuation.start_slots(target, rows)
        target.max_position = self.target.max_position
        target.row_inputs = {name: values[rows] for name, values in self.row_inputs.items()}
        return target

    def _empty_cache(self) -> DynamicCache:
        return DynamicCache(config=self.model.config.get_text_config(decoder=True))

    def _filled(self, cache: Cache, rows: list[int]) -> Cache:
        """An empty cache with keys and values of all tokens of these rows but the last."""
        slots, recurrent = zip(*(self.finished_states[row] for row in rows))
        # The last token has not been read; of rows that were cut back, more than is left has.
        read = [self.num_unknown + self.num_read.get(row, self.sequences.lengths[row] - 1) for row in rows]
        slots = [[tuple(b[:, :end] for b in layer) for layer in row] for row, end in zip(slots, read)]
        fill_cache(cache, slots)
        store_states(cache, list(recurrent))
        return cache

    def _final_cache(self) -> Cache:
        """Keys and values of all tokens but the last: in the user's cache object, or in the static one asked for.

        transformers has made the latter before it called the loop.
        """
        rows, prepared = list(range(self.batch_size)), self.request.model_kwargs.get("past_key_values")
        if type(prepared) is StaticCache:
            # Compiled code may know the addresses of its tensors, which stay.
            prepared.reset()
            return self._filled(prepared, rows)
        cache, user_cache = self._filled(self._empty_cache(), rows), self.request.past_key_values
        if user_cache is None:
            return cache
        user_cache.layers = cache.layers
        return user_cache


def _runs_by_itself(device: torch.device) -> bool:
    """Whether a forward goes on when its call has returned. On a CPU there is nothing to be done beside it."""
    return device.type != "cpu"


def _model_name(model) -> str:
    """Repo id or folder of the model; of one that was made from a config alone, its class."""
    return model.config._name_or_path or type(model).__name__


def _processes_of(model) -> ProcessGroup | None:
    """The processes that hold parts of a model; `None` where each has all of it."""
    if (getattr(model, "tp_size", None) or 1) == 1:
        return None
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None:
        return torch.distributed.group.WORLD
    return mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")


def _shared_seed(model) -> int:
    """A seed from torch's generator. Ranks that hold parts of one model draw the same tokens: rank 0's seed counts."""
    shared, group = [seed_from_torch()], _processes_of(model)
    if group is not None:
        torch.distributed.broadcast_object_list(shared, group=group, group_src=0)
    return shared[0]


def _last_tokens(verdict: Verdict) -> torch.LongTensor:
    """The last committed token of each row, `(R,)`."""
    tokens = verdict.token_lists
    if len(tokens) == 1:
        return verdict.tokens[:, len(tokens[0]) - 1]
    return upload([row[-1] for row in tokens], verdict.tokens.device)


def _pad_token(config) -> int:
    pad = getattr(config, "_pad_token_tensor", None)
    # Without an end-of-sequence token no row ends before the others, and padding is never written.
    return 0 if pad is None else int(pad)


def _row_inputs(request: Request) -> dict[str, torch.Tensor]:
    """What the target reads for each token beside it, as it goes for new tokens, `(B, 1)`."""
    if not is_text_only(request.model):
        # Models with images read it of the prompt alone.
        return {}
    given = {name: request.model_kwargs.get(name) for name in REPEATED_INPUTS}
    return {name: values[:, -1:] for name, values in given.items() if values is not None}


def _embeds_length(model_kwargs: dict) -> int:
    embeds = model_kwargs.get("inputs_embeds")
    return 0 if embeds is None else embeds.shape[1]


def _prompt_slots(request: Request, past_length: int) -> int:
    """Slots that the prompts fill: tokens or embeddings, and what a continued cache holds before them."""
    kwargs, given = request.model_kwargs, request.input_ids.shape[1]
    mask = kwargs.get("attention_mask")
    if mask is not None:
        return mask.shape[1]
    # transformers drops a mask of ones, and remembers its length where that is needed.
    given = max(given, _embeds_length(kwargs), getattr(request.generation_config, "_mask_length", 0))
    return given if given > past_length else past_length + given
