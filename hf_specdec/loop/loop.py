"""The decoding loop: prefill, then cycles of draft -> verify -> accept -> commit until every row stops.

A cycle on a GPU waits for it once, for the verdict. Before it waits, it launches the next draft, where that needs
nothing but tensors of the device, and for a single row its verification: the host reads a cycle late then, and what it
turns out to have launched for nothing, as at the end of a text, is dropped. What the next forward does not depend on
(statistics, traces, streamers) is done in that time, too, while the GPU works.

Shapes: B rows of the call of which R are active, N draft nodes, T = N + 1 verified nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import ref

import torch

from ..drafts import DraftTree, chain_topology
from ..errors import SpecConfigError
from ..kernels.acceptance import Acceptance
from ..logits.acceptance import with_successors
from ..logits.processors import ProcessorStack
from ..logits.randomness import RowUniforms
from ..logits.rules import StandardRule, acceptance_rule
from ..logits.sampling import DraftSampler
from ..logits.verifier import Verdict, Verifier, masked_nodes, take_nodes
from ..metrics import SpecDecodingStats, begin_call, watch_acceptance
from ..metrics.listeners import CallProgress
from ..protocol import Commit, DeviceCommit, DrafterSource, DraftStep, Session, VerifiedNodes
from ..target.attention import describe_layers
from ..target.cache import SlotCache, compact
from ..target.check import ContinuationCheck
from ..target.facts import ModelProfile, model_profile
from ..target.forward import SlotOutput
from ..target.graphs import call_graphs
from ..target.lean import slot_model
from ..target.model import SlotModel
from ..target.parts.adapters import ADAPTED_ROW, RowAdapters, RowInputs
from ..target.parts.rotary import ChangingRotary
from ..target.prompts import read_prompts
from ..target.request import Request
from ..target_facts import vocabulary_size
from ..transfers import last_of_each, select_rows
from .ended_rows import EndedRows
from .output import CACHE_FIELD, OutputRecorder, SpeculativeEncoderDecoderOutput, SpeculativeOutput
from .reporting import ColumnStreamer, DeferredWork, count_cycle, count_graphs, count_lookups, explain_empty
from .sequences import Sequences, StopRules
from .tracing import Tracer


if TYPE_CHECKING:
    from torch import nn

    from ..candidate_generators.base import CandidateGenerator
    from ..target.prompts import Continuation


_WAITING = "The rows wait for the slowest one in every cycle: {}."


class DecodingLoop:
    """Runs one request.

    Args:
        request (`Request`): The call.
        speculator (`Speculator`): Makes the call's candidate generator.
        texts (`tuple`, *optional*): `Sequences`, `StopRules` and `ProcessorStack`, or what stands for them, where
            they do not follow from the request.
        num_places (`int`, *optional*): Rows that the call may come to have at a time, if more than it begins with.

    Attributes:
        rows (`list[int]`): Numbers of the active rows in the call.
        anchors (`torch.LongTensor` of shape `(R,)`): Last committed token of each, which the target has not read.
        stats (`SpecDecodingStats`): What the call drafted, accepted and spent.
        may_use_ahead (`bool`): What was launched ahead is of the rows as they have come to be.
    """

    may_use_ahead: bool = True

    # Listeners are told of the call, and users of drafts that are hardly ever accepted.
    is_reported: ClassVar[bool] = True
    sampler_class: ClassVar[type[DraftSampler]] = DraftSampler
    # Rows are judged one by one where the verdict on all of them is an error.
    judges_again: ClassVar[bool] = False

    def __init__(
        self,
        request: Request,
        speculator: DrafterSource,
        texts: tuple[Any, Any, ProcessorStack] | None = None,
        num_places: int | None = None,
    ):
        config = request.generation_config
        self.request = request
        self.model: nn.Module = request.model
        self.device: torch.device = request.device
        self.rows = list(range(request.batch_size))
        self.recorder: OutputRecorder = OutputRecorder(request.batch_size, config)
        if texts is None:
            sequences = Sequences(request.input_ids, request.pad_token)
            stop = StopRules(request.stopping_criteria, sequences, self.recorder.scores)
            texts = sequences, stop, request.processor_stack(stop.eos_tokens)
        self.sequences: Any
        self.stop: Any
        self.stack: ProcessorStack
        self.sequences, self.stop, self.stack = texts
        self.streamer: ColumnStreamer = ColumnStreamer(request.streamer, self.sequences, self.stop)
        self.deferred: DeferredWork = DeferredWork(self.device)
        # The draft whose verification was launched ahead, and how many graphs of drafts had run by then.
        self._verified_ahead: tuple[DraftTree, int] | None = None
        self.tracer: Tracer | None = None

        origin = dict(getattr(speculator, "origin", {}))
        self.settings: Any = getattr(speculator, "config", None)
        self.is_adaptive: bool = getattr(speculator, "is_adaptive", False)
        self.stats: SpecDecodingStats = SpecDecodingStats(
            method=speculator.method, batch_size=request.batch_size, drafter=origin
        )
        profile = model_profile(self.model)
        uniforms = self._uniforms() if config.do_sample else None
        self.sampler = self.sampler_class(self.stack, self.sequences, uniforms, vocabulary_size(self.model))
        self.session: Session = Session(
            batch_size=num_places or request.batch_size,
            max_length=self.stop.max_length,
            device=self.device,
            sampler=self.sampler,
            supports_trees=profile.supports_trees,
            notes=self.stats.notes,
            group=request.processes,
        )
        self.generator: CandidateGenerator = speculator.candidate_generator(self.session)
        self.stats.num_spec_tokens = self.generator.num_speculative_tokens
        with ExitStack() as if_it_fails:
            if_it_fails.callback(self.generator.close)
            self.verifier: Verifier = self._verifier(uniforms, profile)
            self.target: SlotModel = self._slot_target()
            self.session.target_ref = ref(self.target)
            # Around calls of the drafter: layers that it shares with the target have their active adapters.
            by_row = ADAPTED_ROW in self.target.row_inputs
            self._drafting: Callable[[], AbstractContextManager[Any]] = (
                partial(RowAdapters(self.model).telling, None) if by_row else nullcontext
            )
            if_it_fails.pop_all()

    def run(self) -> torch.LongTensor | SpeculativeOutput:
        """Generates: token ids `(B, L)`, or a `SpeculativeOutput` if the config asks for a dict."""
        began = perf_counter()
        self.stats.setup_seconds = began - self.request.began
        with closing(self.target):
            with closing(self.generator):
                self._use_graphs()
                self.verifier.rule.check_depth(self.generator.num_speculative_tokens)
                with self._begin_call() as self.progress:
                    self._decode()
            self.streamer.end()
            self.stats.total_seconds = perf_counter() - began
            self._close_account()
            return self._output()

    def _decode(self) -> None:
        """Prefill; then draft, verify, accept and commit until every row has ended."""
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
            self.deferred.flush()
        if self.tracer is not None:
            self.tracer.read_scores()

    def _cycle(self) -> None:
        began = perf_counter()
        self.stats.num_target_forwards += self.target.prepare(self._prefix)
        step = DraftStep(self.rows, self.anchors, self._positions(1), self._depths())
        draft = self.sampler.constrained(self._propose(step), self.rows)
        drafted = perf_counter()
        output = self._verify(draft)
        # On a CPU, which has no graphs, there is nothing to do then.
        has_time = self.deferred.is_async or self.session.draft_graphs or self.target.graphs is not None
        meanwhile = partial(self._meanwhile, draft, step, output) if has_time else None
        # Waits for the device.
        known = output.outcome, output.successors
        verdict = self.verifier.verify(draft, output.logits, self.rows, step.lengths, meanwhile, *known)
        verified = perf_counter()
        self._commit(draft, output, verdict)
        self.stats.draft_seconds += drafted - began
        self.stats.verify_seconds += verified - drafted
        if self.progress.observers:
            self.deferred.add(self.progress.end_cycle)

    # Prefill

    def _prefill(self) -> None:
        """The target reads the prompts and gives each row its first token; then the drafter reads them."""
        began = perf_counter()
        self.continuation: Continuation
        output, states, self.continuation = read_prompts(self.request, self.target, self.stop.max_length)
        if (rotary := self.target.find(ChangingRotary)) is not None:
            self._follow(rotary)
        self.ended: EndedRows = EndedRows(self.request, self.target, self.sequences)
        self.stats.num_target_forwards += 1
        self.streamer.put_prompts(self.request.input_ids)
        # The first token is committed like every other: a verification without drafts, of the prompt's last node.
        logits = output.logits[:, -1:].to(self.device)
        draft = self.sampler.constrained(DraftTree.empty(self.request.batch_size, self.device), self.rows)
        verdict = self.verifier.verify(draft, logits, self.rows, self._positions(0))
        self.stats.num_committed_tokens += self.request.batch_size
        self._record(verdict, logits, output.get(self.target.profile.of_decoder("hidden_states")))
        self.anchors = verdict.tokens[:, 0]
        if self.progress.traces:
            self._begin_trace(draft, verdict, logits)
        check = None
        if not (self.stop.all_finished or self.request.synced_gpus):
            # The last token is never read.
            most = self.stop.max_length - self.request.input_ids.shape[1] - 1
            check = ContinuationCheck.begin(self.target, self.continuation, self.anchors, most)
        # With a check under way, nothing is shown before the first verification has been compared with it.
        if check is None:
            self.streamer.put_columns()
        self.stats.prefill_seconds = perf_counter() - began
        if not self.stop.all_finished:
            self._start_drafting(verdict, states)

    def _follow(self, rotary: ChangingRotary) -> None:
        if self.request.batch_size > 1:
            self.verifier.keep_equal(rotary.why_equal)
            self.stats.notes.append(_WAITING.format(self.verifier.why_equal))
        if rotary.longest_drafted is not None:
            self.stats.notes.append(
                f"Nothing is drafted above {rotary.longest_drafted} tokens, where each changes the target's rotary "
                "embedding."
            )

    def _begin_trace(self, draft: DraftTree, verdict: Verdict, logits: torch.Tensor) -> None:
        prompts = self.continuation.prompt(self.request.input_ids, {}).token_lists
        self.tracer = Tracer(self.progress.traces, self.stats.method, prompts)
        self.tracer.score(draft, verdict, logits)
        self.tracer.add_cycle(draft, verdict, self.rows)

    def _start_drafting(self, verdict: Verdict, states: dict) -> None:
        began = perf_counter()
        source = self.target.source and self.target.source.without_keys()
        prompt = self.continuation.prompt(self.request.input_ids, states, source)
        with self._drafting():
            self.generator.prefill(prompt)
        self._observe(verdict, {key: value[:, -1:] for key, value in prompt.hidden_states.items()})
        self.stats.draft_seconds += perf_counter() - began
        self._drop_finished_rows()

    # One cycle: draft, verify, accept, commit

    def _depths(self, more: int = 0) -> list[int]:
        """Most depth of each row's draft, once it has `more` tokens: one more is committed with every draft."""
        depth, room = self.generator.num_speculative_tokens, self.stop.max_length - 1 - more
        depths = [max(min(depth, room - self.sequences.lengths[row]), 0) for row in self.rows]
        return self.target.depths(depths, more)

    def _prefix(self, length: int, places: list[int]) -> torch.LongTensor:
        """The first tokens `(len(places), length)` of the active rows at these places."""
        return self.sequences.prefix(length)[[self.rows[place] for place in places]]

    def _propose(self, step: DraftStep) -> DraftTree:
        for graphs in self.session.draft_graphs if not self.may_use_ahead else ():
            graphs.forget_ahead()
        with self._drafting():
            draft = self.generator.propose(step)
        for graphs in self.session.draft_graphs:
            graphs.forget_ahead()
        if self._verified_ahead is not None:
            self._check_verified(draft, *self._verified_ahead)
        self.may_use_ahead = True
        if not isinstance(draft, DraftTree) or draft.batch_size != len(self.rows):
            found = f"one of {draft.batch_size}" if isinstance(draft, DraftTree) else f"a {type(draft).__name__}"
            raise SpecConfigError(
                f"{type(self.generator).__name__}.propose() must return a DraftTree of {len(self.rows)} rows, those "
                f"of `step.rows`, and has returned {found}. Give rows without a draft an empty one."
            )
        explain_empty(draft, step, self.generator)
        if self.generator.lookups is not None:
            count_lookups(self.stats, self.generator.lookups)
        return draft

    def _check_verified(self, draft: DraftTree, known: DraftTree, num_runs: int) -> None:
        """Drops the verification that was launched ahead, if that was one of other rows, or of another draft."""
        # A graph that has run ahead does not run again where its output is found.
        is_known = self._num_draft_runs == num_runs and draft.node_counts == known.node_counts
        if self.may_use_ahead and is_known:
            self._verified_ahead = None
        else:
            self._drop_verified()

    def _drop_verified(self) -> None:
        self._verified_ahead = None
        self.stats.num_target_forwards += self.target.graphs.forget_ahead()

    @property
    def _num_draft_runs(self) -> int:
        return sum(graphs.num_replays for graphs in self.session.draft_graphs)

    def _verify(self, draft: DraftTree) -> SlotOutput:
        """One forward of the target over the anchors and all draft nodes; on a GPU it is only launched."""
        has_graphs = self.target.graphs is not None
        judge = self.verifier.in_a_graph(draft, self.rows, self._positions(1)) if has_graphs else None
        output = self.target.verify(self.anchors, draft, judge)
        self.stats.num_target_forwards += 1
        output.logits = output.logits.to(self.device)
        if self.target.num_successors and output.successors is None:
            tokens = torch.cat([self.anchors[:, None], draft.tokens], dim=1)
            logits = output.logits if draft.masks is None else masked_nodes(draft, output.logits)
            output.successors = with_successors(tokens, logits, self.target.num_successors)
        return output

    def _meanwhile(self, draft: DraftTree, step: DraftStep, output: SlotOutput, acceptance: Acceptance | None) -> None:
        """Launches the next draft, where it needs nothing that the device does not know, and does what was put off."""
        if acceptance is not None and self.generator.drafts_ahead:
            began = perf_counter()
            following = self._draft_ahead(draft, step, output, acceptance)
            seconds = perf_counter() - began
            self.stats.draft_seconds += seconds
            self.stats.verify_seconds -= seconds
            if following is not None:
                self._verify_ahead(output, following)
        self.deferred.flush()

    def _draft_ahead(
        self, draft: DraftTree, step: DraftStep, output: SlotOutput, acceptance: Acceptance
    ) -> DraftTree | None:
        most, depth = self.target.most_committed, self.generator.num_speculative_tokens
        limit = self.generator.longest_row
        # Near the end of a row, the depth of its draft depends on how much is accepted.
        if min(self._depths(most)) < depth or (limit and max(step.lengths) + most + depth > limit[0]):
            return None
        may_judge_again = self.judges_again and len(self.rows) > 1 and output.may_fail
        if self.tracer is not None or may_judge_again:
            # The draft's own memory is written again.
            draft.tokens, draft.parents = draft.tokens.clone(), draft.parents.clone()
            draft.num_nodes = draft.num_nodes.clone()
            draft.probs = None if draft.probs is None else draft.probs.clone()
        path, tokens, states = acceptance.path[:, :most], acceptance.tokens[:, :most], output.hidden_states
        if output.outcome is None:
            # Where nothing could be drawn, the verdict will be an error, and no token may be read that there is not.
            counts, tokens = acceptance.num_accepted + 1, tokens.clamp(min=0)
            anchors = last_of_each(tokens, counts)
            states = {key: take_nodes(value, path) for key, value in states.items()}
        else:
            tokens = output.outcome["readable"]
            counts, anchors = (output.outcome[name][:, 0] for name in ("counts", "anchor"))
        with ExitStack() as ahead:
            for graphs in self.session.draft_graphs:
                ahead.enter_context(graphs.ahead())
            ahead.enter_context(self._drafting())
            limits, is_free = [depth] * len(self.rows), self._is_done_with(output) and not may_judge_again
            commit = DeviceCommit(self.rows, tokens, counts, anchors, states, limits, is_free)
            return self.generator.draft_ahead(commit)

    def _verify_ahead(self, output: SlotOutput, following: DraftTree) -> None:
        """Launches the verification of the draft that follows one which is being judged."""
        outcome = output.outcome
        if outcome is None or not self._is_done_with(output):
            return
        # Of several rows one ends often, and the forward of all would be for nothing.
        if len(self.rows) > 1 or self._may_end_within(self.target.most_committed):
            return
        judge = self.verifier.in_a_graph(following, self.rows, self._positions(1))
        if judge is not None:
            self.target.verify_ahead(outcome["anchor"][:, 0], following, judge, outcome["counts"][:, 0])
            self._verified_ahead = following, self._num_draft_runs

    def _is_done_with(self, output: SlotOutput) -> bool:
        """Tells whether nothing is read of a verification, once it is launched, that the next forward overwrites."""
        return output.outcome is not None and not self._reads_logits

    @property
    def _reads_logits(self) -> bool:
        """Tells whether logits are kept, or looked at, once the verdict is known: the next forward overwrites them."""
        return self.recorder.wants_steps or self.tracer is not None

    def _may_end_within(self, more: int) -> bool:
        """Tells whether a row is as long as it may get, once it has `more` tokens."""
        return any(self.sequences.lengths[row] + more >= self.stop.max_length for row in self.rows)

    def _commit(self, draft: DraftTree, output: SlotOutput, verdict: Verdict) -> None:
        """Makes the accepted path part of the target's cache and of the drafter's state; the text has it already."""
        counts, outcome, states = verdict.counts, output.outcome, output.hidden_states
        self.target.commit(counts, None if draft.is_chain or outcome is not None else verdict.path)
        self._record(verdict, output.logits, output.all_hidden_states)
        if self.tracer is not None:
            self.tracer.score(draft, verdict, output.logits)
        report = partial(count_cycle, self.stats, self.tracer, draft.without_probs(), verdict, self.rows)
        self.deferred.add(report)
        self.deferred.add(self.streamer.put_columns)
        began = perf_counter()
        if output.successors is not None:
            # Drafts that are judged row by row, or node by node, are read here.
            self._learn(draft, output.successors.cpu() if verdict.successors is None else verdict.successors)
        if outcome is None:
            states = {key: take_nodes(value, verdict.path) for key, value in states.items()}
        else:
            states = {key: value[:, : verdict.path.shape[1]] for key, value in states.items()}
        if outcome is not None and verdict.is_whole:
            self.anchors: torch.Tensor = outcome["anchor"][:, 0]
        else:
            self.anchors = last_of_each(verdict.tokens, counts)
        if (self.session.draft_graphs or outcome is not None) and not verdict.is_whole:
            self.may_use_ahead = False
        self._observe(verdict, states)
        self.stats.draft_seconds += perf_counter() - began
        if not self.stop.all_finished:
            self._drop_finished_rows()

    def _record(self, verdict: Verdict, logits: torch.Tensor, hidden_states: Any) -> None:
        """Keeps what is returned for each token."""
        self.recorder.add(self.rows, verdict.path, verdict.counts, logits, hidden_states)

    def _learn(self, draft: DraftTree, successors: torch.LongTensor) -> None:
        """Tells the drafter of the target's best tokens after the anchors and all draft nodes."""
        tokens = [row[: count + 1] for row, count in zip(successors[..., 0].tolist(), draft.counts())]
        self.generator.learn(VerifiedNodes(tokens, successors[..., 1:]))

    def _observe(self, verdict: Verdict, states: dict) -> None:
        with self._drafting():
            self.generator.observe(
                Commit(self.rows, verdict.tokens, verdict.token_lists, verdict.num_accepted, states)
            )

    def _drop_finished_rows(self) -> None:
        """Finished rows leave the batch, so that they cost no more compute."""
        finished = [self.stop.has_left(row) for row in self.rows]
        if not any(finished) or all(finished):
            return
        keep, behind = compact(finished), []
        if self.request.keeps_cache:
            behind = self.ended.leave(self.rows, [index for index, done in enumerate(finished) if done])
        self.may_use_ahead = False
        self.target.keep_rows(keep, behind)
        self.generator.keep_rows(keep)
        self.rows: list[int] = [self.rows[index] for index in keep]
        self.anchors = select_rows(self.anchors, keep)

    def _idle_forward(self) -> None:
        """A forward whose result is not used: other ranks still need this one's shards."""
        self.target.forward(self.anchors[:, None], chain_topology(0, self.device))

    def _positions(self, ahead: int) -> list[int]:
        """Position of each row's anchor plus `ahead`, masked tokens not counted."""
        num_others = self.continuation.num_others
        return [length - num_others[row] + ahead for length, row in zip(self.target.cache.lengths, self.rows)]

    # What is returned

    def _output(self) -> torch.LongTensor | SpeculativeOutput:
        if self.recorder.wants_steps:
            self.recorder.cut(self.sequences.num_generated)
        cache = self.ended.cache(self.rows) if self.request.keeps_cache else None
        sequences = self.sequences.output()
        if not self.request.generation_config.return_dict_in_generate:
            return sequences
        fields = {
            "sequences": sequences,
            "scores": self.recorder.scores and self.recorder.scores.steps(),
            "logits": self.recorder.logits and self.recorder.logits.steps(),
            CACHE_FIELD: cache,
        }
        states, source = self.recorder.hidden_states(), self.target.source
        if source is not None:
            encoded = self.request.model_kwargs["encoder_outputs"]
            return SpeculativeEncoderDecoderOutput.of(encoded, states, self.stats, **fields)
        return SpeculativeOutput(hidden_states=states, speculative=self.stats, **fields)

    # The parts of a call

    def _uniforms(self) -> RowUniforms:
        return RowUniforms(self.request.draw_seed(), self.device)

    def _acceptance_rule(self, uniforms: RowUniforms | None) -> StandardRule:
        generator = self.generator
        return acceptance_rule(
            generator.config, generator.samples_drafts, uniforms, self._uniforms, self.request.model.training
        )

    def _verifier(self, uniforms: RowUniforms | None, profile: ModelProfile) -> Verifier:
        rule = self._acceptance_rule(uniforms)
        self.stats.rejection_sample_method = rule.name
        if rule.note:
            self.stats.notes.append(rule.note)
        # What makes all rows advance by the same number of tokens, in words.
        why_equal = None
        if self.request.batch_size > 1 and profile.counts_slots:
            why_equal = "the target model tells positions from the order of its cache"
        elif self.request.keeps_cache and profile.is_recurrent and self.stop.may_cut_back:
            why_equal = (
                "stopping criteria may end a row before its last tokens, and the cache to be returned has a recurrent "
                "state, which cannot be cut back"
            )
        verifier = Verifier(self.stack, self.stop, rule, recorder=self.recorder.scores, why_equal=why_equal)
        if verifier.why_equal:
            self.stats.notes.append(_WAITING.format(verifier.why_equal))
        return verifier

    def _slot_target(self) -> SlotModel:
        prompt_length, nodes = self.request.prompt_length, self.generator.num_draft_nodes + 1
        most = self.stop.max_length - self.sequences.prompt_length
        # Room for the whole generation, but not for a maximum that is only there as a limit.
        cache = SlotCache(prompt_length + min(most, 1024) + nodes, limit=prompt_length + most + nodes)
        forward_kwargs = {"output_hidden_states": True} if self.recorder.wants_states else None
        target = slot_model(self.model, cache, self.generator.target_hidden_states, forward_kwargs)
        target.most_committed = self.generator.num_speculative_tokens + 1
        target.num_successors = min(self.generator.num_best_tokens, vocabulary_size(self.model))
        if row_inputs := self.request.row_inputs():
            target.parts.append(RowInputs(self.model, row_inputs))
        return target

    def _use_graphs(self) -> None:
        """Lets verifications run as CUDA graphs, where there are any."""
        graphs = call_graphs(
            self.model,
            largest=self.generator.num_draft_nodes + 1,
            enforce_eager=getattr(self.settings, "enforce_eager", False),
            all_hidden_states=self.recorder.wants_states,
            row_inputs=tuple(self.target.row_inputs),
        )
        self.target.use_graphs(graphs)

    def _begin_call(self) -> CallProgress:
        if not self.is_reported:
            return CallProgress(self.stats, [])
        # A model that was made from a config alone has no name but its class.
        return begin_call(self.stats, self.model.config._name_or_path or type(self.model).__name__)

    def _close_account(self) -> None:
        """Completes the statistics."""
        if self._verified_ahead is not None:
            self._drop_verified()
        self.stats.attention = describe_layers(self.target.attention_layers)
        if self.generator.lookups is not None:
            count_lookups(self.stats, self.generator.lookups)
        if self.stop.num_cut_back:
            self.stats.notes.append(
                f"{self.stop.num_cut_back} tokens after the ends of rows have been generated and cut off: a stopping "
                "criterion is shown a column when all rows have reached it."
            )
        count_graphs(self.stats, self.target, self.generator)
        # With an adaptive length, drafts that do not pay are not made for long.
        if self.is_reported and self.settings is not None and not self.is_adaptive:
            watch_acceptance(self.model, self.settings.compute_hash(), self.stats)
