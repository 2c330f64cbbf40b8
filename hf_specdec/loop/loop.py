"""The decoding loop: prefill, then cycles of draft -> verify -> accept -> commit until every row has ended.

One loop decodes a call of `generate()`, whose rows begin together, and many requests, whose rows join while others are
decoded. `call/build.py` says which parts a call has.

On a GPU a cycle waits once, in `pending.wait()`; what is launched before that is the business of `ahead.py`.

Shapes: R active rows, N draft nodes, T = N + 1 verified nodes, V vocabulary.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from ..drafts import DraftTree, chain_topology
from ..errors import SpecConfigError
from ..kernels.best import with_successors
from ..metrics import SpecDecodingStats
from ..protocol import Commit, DraftStep, Session, VerifiedNodes
from ..target.cache import compact
from ..target.check import ContinuationCheck
from ..target.forward import SlotOutput
from ..target.model import SlotModel
from ..target.prompts import read_prompts
from ..transfers import last_of_each, take_nodes
from .ahead import Ahead
from .judging import WAITING, Judging, masked_nodes
from .observers import Cycle, Observer, explain_empty
from .rows import Group, Rows
from .verdict import Verdict


if TYPE_CHECKING:
    from ..candidate_generators.base import CandidateGenerator
    from ..target.request import Request


class DecodingLoop:
    """Rows that are decoded together, until every one has ended.

    rows       texts, stopping rules, anchors: rows.py
    drafter    the method's candidate generator, with its session
    target     the model over its slots: target/model.py
    judging    processors and acceptance rules: judging.py, walk.py
    ahead      launches before the verdict, and work that is put off: ahead.py
    observers  statistics, streamer, traces, what is returned for each token: observers.py
    """

    def __init__(
        self,
        request: Request,
        session: Session,
        rows: Rows,
        drafter: CandidateGenerator,
        target: SlotModel,
        judging: Judging,
        observers: list[Observer],
        stats: SpecDecodingStats,
    ):
        self.request: Request = request
        self.session: Session = session
        self.rows: Rows = rows
        self.drafter: CandidateGenerator = drafter
        self.target: SlotModel = target
        self.judging: Judging = judging
        self.observers: list[Observer] = observers
        self.stats: SpecDecodingStats = stats
        self.device: torch.device = session.device
        self.ahead: Ahead = Ahead(rows, drafter, target, judging, session, stats, observers)
        self.began: float = perf_counter()

    def run(self) -> None:
        """Decodes rows that all begin together."""
        self.stats.setup_seconds = self.began - self.request.began
        self.begin()
        model, synced_gpus = self.request.model, self.request.synced_gpus
        while model._has_unfinished_sequences(is_over := self.rows.all_finished, synced_gpus, self.device):
            if is_over:
                # A forward whose result is not used: other ranks still need this one's shards.
                self.target.forward(self.rows.anchors[:, None], chain_topology(0, self.device))
            else:
                self.cycle()

    def begin(self) -> None:
        """The target reads the prompts and gives each row its first token; then the drafter reads them."""
        began, rows, request = perf_counter(), self.rows, self.request
        prefill, prompt, continuation = read_prompts(request, self.target, self.session.max_length)
        self.stats.num_target_forwards += 1
        for part in self.target.parts:
            if part.why_equal is not None and len(rows.active) > 1:
                self.judging.keep_equal(part.why_equal)
                self.stats.notes.append(WAITING.format(part.why_equal))
            if part.note is not None:
                self.stats.notes.append(part.note)
        rows.start([length - other for length, other in zip(self.target.cache.lengths, continuation.num_others)])
        for observer in self.observers:
            observer.begin(prompt)
        # The first token is committed like every other: a verification without drafts, of the prompt's last node.
        all_states = prefill.get(self.target.profile.of_decoder("hidden_states"))
        output = SlotOutput(prefill.logits[:, -1:].to(self.device), all_hidden_states=all_states)
        draft = self.session.sampler.constrained(DraftTree.empty(len(rows.active), self.device), rows.active)
        step = rows.step([0] * len(rows.active))
        verdict = self.judging.begin(draft, output, step).wait()
        rows.anchors = verdict.tokens[:, 0]
        # The last token is never read.
        most = self.session.max_length - request.input_ids.shape[1] - 1
        check = None
        if not (rows.all_finished or request.synced_gpus):
            # Plain generation's next forward, which the first verification is compared with.
            check = ContinuationCheck.begin(self.target, continuation, rows.anchors, most)
        cycle = Cycle(rows.active, draft, output, verdict, is_provisional=check is not None)
        for observer in self.observers:
            observer.see_first(cycle)
        self.stats.prefill_seconds = perf_counter() - began
        if not rows.all_finished:
            began = perf_counter()
            self.drafter.prefill(prompt)
            self._observe(verdict, {key: value[:, -1:] for key, value in prompt.hidden_states.items()})
            self.stats.draft_seconds += perf_counter() - began
            self.drop_finished()
        for observer in self.observers:
            observer.end_prefill()

    def cycle(self) -> None:
        """Drafts, verifies, accepts and commits once."""
        began = perf_counter()
        self.stats.num_target_forwards += self.target.prepare(self.rows.prefix)
        depths = self.target.depths(self.rows.depths(self.drafter.num_speculative_tokens))
        step = self.rows.step(depths)
        draft = self.session.sampler.constrained(self.propose(step), step.rows)
        drafted = perf_counter()
        output = self.verify(step, draft)
        pending = self.judging.begin(draft, output, step)
        self.ahead.launch(step, draft, output, pending)
        verdict = pending.wait()
        verified = perf_counter()
        self.commit(Cycle(step.rows, draft, output, verdict))
        self.stats.draft_seconds += drafted - began
        self.stats.verify_seconds += verified - drafted
        self.ahead.later(self._end_cycle)

    def propose(self, step: DraftStep) -> DraftTree:
        draft = self.ahead.propose(step)
        if not isinstance(draft, DraftTree) or draft.batch_size != len(step.rows):
            what = f"one of {draft.batch_size}" if isinstance(draft, DraftTree) else f"a {type(draft).__name__}"
            raise SpecConfigError(
                f"{type(self.drafter).__name__}.propose() must return a DraftTree of {len(step.rows)} rows, those of "
                f"`step.rows`, and has returned {what}. Give rows without a draft an empty one."
            )
        explain_empty(draft, step, self.drafter)
        return draft

    def verify(self, step: DraftStep, draft: DraftTree) -> SlotOutput:
        """One forward of the target over the anchors and all draft nodes; on a GPU it is only launched."""
        has_graphs = self.target.graphs is not None
        judge = self.judging.for_graph(draft, step.rows, step.lengths) if has_graphs else None
        output = self.target.verify(step.anchor_tokens, draft, judge)
        self.stats.num_target_forwards += 1
        output.logits = output.logits.to(self.device)
        if self.target.num_successors and output.successors is None:
            tokens = torch.cat([step.anchor_tokens[:, None], draft.tokens], dim=1)
            logits = output.logits if draft.masks is None else masked_nodes(draft, output.logits)
            output.successors = with_successors(tokens, logits, self.target.num_successors)
        return output

    def commit(self, cycle: Cycle) -> None:
        """Makes the accepted path part of the target's cache and of the drafter's state; the texts have it already."""
        draft, output, verdict = cycle.draft, cycle.output, cycle.verdict
        self.target.commit(verdict.counts, None if draft.is_chain or output.outcome is not None else verdict.path)
        for observer in self.observers:
            observer.see(cycle)
        self.ahead.later(partial(self._tell, cycle.without_logits()))
        began = perf_counter()
        if output.successors is not None:
            # Drafts that are judged part by part, or node by node, are read here.
            successors = output.successors.cpu() if verdict.successors is None else verdict.successors
            tokens = [row[: count + 1] for row, count in zip(successors[..., 0].tolist(), draft.counts())]
            self.drafter.learn(VerifiedNodes(tokens, successors[..., 1:]))
        if output.outcome is None:
            states = {key: take_nodes(value, verdict.path) for key, value in output.hidden_states.items()}
        else:
            # A graph has taken them along the path.
            states = {key: value[:, : verdict.path.shape[1]] for key, value in output.hidden_states.items()}
        if output.outcome is not None and verdict.is_whole:
            self.rows.anchors = output.outcome["anchor"][:, 0]
        else:
            self.rows.anchors = last_of_each(verdict.tokens, verdict.counts)
        self.ahead.check(output, verdict)
        self._observe(verdict, states)
        self.stats.draft_seconds += perf_counter() - began
        self.drop_finished()

    def _tell(self, cycle: Cycle) -> None:
        for observer in self.observers:
            observer.tell(cycle)

    def _end_cycle(self) -> None:
        for observer in self.observers:
            observer.end_cycle()

    def _observe(self, verdict: Verdict, states: dict[int | str, torch.Tensor]) -> None:
        self.drafter.observe(
            Commit(self.rows.active, verdict.tokens, verdict.token_lists, verdict.num_accepted, states)
        )

    def drop_finished(self) -> None:
        """Finished rows leave the batch, unless all have finished, so that they cost no more compute."""
        finished = [self.rows.has_left(row) for row in self.rows.active]
        if not any(finished) or all(finished):
            return
        keep = compact(finished)
        behind = []
        for observer in self.observers:
            behind += observer.leave(self.rows.active, [index for index, done in enumerate(finished) if done])
        self.ahead.drop()
        self.target.keep_rows(keep, behind)
        self.drafter.keep_rows(keep)
        self.rows.keep(keep)

    def drop_ended(self) -> list[Group]:
        """Groups that have ended, or were cancelled, leave. Not between a draft and its commit."""
        ended = [group for group in self.rows.groups if group.has_ended]
        if ended:
            self.read()
        self.drop_finished()
        self.rows.leave(ended)
        return ended

    def join(self, other: DecodingLoop) -> None:
        """Takes over the rows of a loop that has only begun, under free numbers, and closes it.

        Raises:
            UnsupportedModelError: They cannot stand beside others.
        """
        self.ahead.drop()
        numbers = self.rows.numbers_for(other.rows)
        self.target.join(other.target)
        self.drafter.join(other.drafter, numbers)
        self.rows.join(other.rows, numbers)
        for number in numbers.values():
            self.judging.enter(self.rows.group(number), number)
        self.stats.add(other.stats)
        self.stats.notes += [note for note in other.stats.notes if note not in self.stats.notes]
        other.close()
        # While a long prompt was read, all others may have ended.
        self.drop_finished()

    def read(self) -> None:
        """Does what was put off, so that everything about the rows is known."""
        self.ahead.flush()
        for observer in self.observers:
            observer.read()

    def end(self) -> None:
        """Closes the account of a loop that has not failed."""
        self.read()
        self.ahead.forget_verification()
        for observer in self.observers:
            observer.end()
        self.stats.total_seconds = perf_counter() - self.began

    def close(self) -> None:
        """Ends the loop, with the rows that it still has."""
        with ExitStack() as parts:
            # Groups hold their verifiers, and these the rows: without that a call would be garbage to be collected.
            parts.callback(self.rows.leave, self.rows.groups)
            parts.callback(self.target.close)
            parts.callback(self.drafter.close)
            for observer in self.observers:
                parts.callback(observer.close)
            # Also where a forward has failed: what was committed before is counted and streamed.
            parts.callback(self.ahead.flush)
