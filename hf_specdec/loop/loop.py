"""The decoding loop: prefill, then cycles of draft -> verify -> accept -> commit until every row has ended.

One loop decodes a call of `generate()`, whose rows begin together, and many requests, whose rows join while others are
decoded. `call/build.py` says which parts a call has.

On a GPU a cycle waits once, in `pending.wait()`; what is launched before that is the business of `ahead.py`.

Shapes: R active rows, N draft nodes, T = N + 1 verified nodes, V vocabulary.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

from ..drafts import DraftTree, chain_topology
from ..metrics import SpecDecodingStats
from ..protocol import DraftStep, Session
from ..target.cache import compact
from ..target.check import check_continuation
from ..target.forward import SlotOutput
from ..target.model import SlotModel
from ..target.prompts import read_prompts
from .ahead import Ahead
from .cycle import Cycle, no_draft_error
from .judging import Judging
from .observers import Observers
from .rows import Rows


if TYPE_CHECKING:
    from ..candidate_generators.base import CandidateGenerator
    from ..target.prompts import Request


@dataclass(eq=False)
class DecodingLoop:
    """Rows that are decoded together, until every one has ended.

    rows       texts, stopping rules, anchors: rows.py, texts.py
    drafter    the method's candidate generator
    target     the model over its slots: target/model.py
    judging    processors and acceptance rules: judging.py, walk.py
    ahead      launches before the verdict, on a GPU: ahead.py
    observers  statistics, streamer, traces, what is returned for each token: observers.py
    """

    request: Request
    session: Session
    rows: Rows
    drafter: CandidateGenerator
    target: SlotModel
    judging: Judging
    observers: Observers
    stats: SpecDecodingStats
    ahead: Ahead | None = None
    _began: float = field(default_factory=perf_counter)

    def run(self) -> None:
        """Decodes rows that all begin together."""
        self.stats.setup_seconds = self._began - self.request.began
        self.begin()
        model, synced_gpus, device = self.request.model, self.request.synced_gpus, self.session.device
        while model._has_unfinished_sequences(is_over := self.rows.all_finished, synced_gpus, device):
            if is_over:
                # A forward whose result is not used: other ranks still need this one's shards.
                self.target.forward(self.rows.anchors[:, None], chain_topology(0, device))
            else:
                self.cycle()

    def begin(self) -> None:
        """The target reads the prompts, and each row gets its first token; then the drafter reads them."""
        began = perf_counter()
        prompt, output, continuation = read_prompts(self.request, self.target, self.session.max_length)
        self.stats.num_target_forwards += 1
        self.judging.heed(self.target.parts)
        self.rows.start(continuation.text_lengths)
        for observer in self.observers.of("begin"):
            observer.begin(prompt)
        # The first token is committed like every other: a verification without drafts, of the prompt's last node.
        draft = DraftTree.empty(len(self.rows.active), self.session.device)
        if self.rows.has_grammar:
            draft = self.session.sampler.constrained(draft, self.rows.active)
        cycle = Cycle(self.rows.active, self.rows.positions, draft, output, is_first=True)
        cycle.verdict = self.judging.begin(cycle).wait()
        self.rows.anchors = cycle.verdict.tokens[:, 0]
        if not self.rows.all_finished:
            check_continuation(self.request, self.target, self.session.max_length, continuation, self.rows.anchors)
        self.observers.see(cycle)
        has_read = perf_counter()
        self.stats.prefill_seconds += has_read - began
        if not self.rows.all_finished:
            self.drafter.prefill(prompt)
            self.drafter.observe(cycle.commit()[1])
            self.stats.draft_seconds += perf_counter() - has_read
            self.drop_finished()
        self.observers.tell()

    def cycle(self) -> None:
        """Drafts, verifies, accepts and commits once."""
        began = perf_counter()
        step = self.rows.step(self.drafter.num_speculative_tokens)
        if self.target.parts:
            self.stats.num_target_forwards += self.target.prepare(self.rows.prefix)
            step.max_draft_tokens = self.target.depths(step.max_draft_tokens)
        draft = (self.ahead or self.drafter).propose(step)
        if not isinstance(draft, DraftTree) or draft.batch_size != len(step.rows):
            raise no_draft_error(self.drafter, step, draft)
        if self.rows.has_grammar:
            draft = self.session.sampler.constrained(draft, step.rows)
        has_drafted = perf_counter()
        self.stats.draft_seconds += has_drafted - began
        output = self.verify(step, draft)
        cycle = Cycle(step.rows, step.lengths, draft, output, step.max_draft_tokens)
        pending = self.judging.begin(cycle)
        if self.ahead is not None:
            self.ahead.launch(cycle, pending)
            # Of the cycle before, while the device works.
            self.observers.tell()
        verdict = cycle.verdict = pending.wait()
        self.stats.verify_seconds += perf_counter() - has_drafted
        # The accepted path becomes part of the target's cache and of the drafter's state; the texts have it already.
        self.observers.see(cycle)
        is_in_place = draft.is_chain or output.outcome is not None
        self.target.commit(verdict.counts, None if is_in_place else verdict.path)
        has_committed = perf_counter()
        if output.successors is not None:
            self.drafter.learn(cycle.verified_nodes())
        self.rows.anchors, commit = cycle.commit()
        self.drafter.observe(commit)
        self.stats.draft_seconds += perf_counter() - has_committed
        if any(self.rows.finished(self.rows.members)):
            self.drop_finished()
        if self.ahead is None:
            self.observers.tell()

    def verify(self, step: DraftStep, draft: DraftTree) -> SlotOutput:
        """One forward of the target over the anchors and all draft nodes; on a GPU it is only launched."""
        self.stats.num_target_forwards += 1
        # The graph that verifies drafts also judges them, where it can.
        judge = None if self.target.graphs is None else self.judging.for_graph(draft, step.rows, step.lengths)
        return self.target.verify(step.anchor_tokens, draft, judge)

    def drop_finished(self) -> None:
        """Rows that have ended leave the batch, so that they cost no more compute, unless all have ended."""
        finished = self.rows.finished(self.rows.members)
        if not any(finished) or all(finished):
            return
        keep, behind = compact(finished), []
        for observer in self.observers:
            behind += observer.leave(self.rows.active, [index for index, done in enumerate(finished) if done])
        self.target.keep_rows(keep, behind)
        self.drafter.keep_rows(keep)
        self.rows.keep(keep)

    def join(self, other: DecodingLoop) -> None:
        """Takes over the rows of a loop that has only begun, under free numbers, and closes it."""
        self.target.join(other.target)
        numbers = self.rows.join(other.rows)
        self.drafter.join(other.drafter, numbers)
        for number in numbers.values():
            self.judging.enter(self.rows.group(number), number)
        self.stats.add(other.stats)
        self.stats.notes += [note for note in other.stats.notes if note not in self.stats.notes]
        other.close()
        # While a long prompt was read, all others may have ended.
        self.drop_finished()

    def end(self) -> None:
        """Closes the account of a loop that has not failed."""
        self.observers.tell()
        if self.ahead is not None:
            self.ahead.forget_verification()
        for observer in self.observers.of("end"):
            observer.end()
        self.stats.total_seconds = perf_counter() - self._began

    def close(self) -> None:
        """Ends the loop, with the rows that it still has."""
        with ExitStack() as parts:
            for part in (self.rows, self.target, self.drafter, *self.observers.of("close")):
                parts.callback(part.close)
            # Also where a forward has failed: what was committed before is counted and streamed.
            parts.callback(self.observers.tell)
