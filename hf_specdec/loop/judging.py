"""The way from target logits to committed tokens: processors, acceptance rule, stop rules.

A verification is judged in two steps: `begin` launches what the device can do, and what it returns is waited for. In
between the loop launches the next forwards. Rows are judged together where the same is done to their scores.

Two ways lead to the same tokens. All nodes are judged at once; or the path is walked node by node (walk.py), and every
processor sees what it would have seen in plain generation, once per position. It is walked where a processor needs
that, and on a CPU where the other nodes would cost more than the steps. Rules that judge a draft as a whole cannot be
walked; for them processors see every node of the draft with the tokens on its own path.

On a GPU the graph that verifies a draft judges it as well, where nothing of the host is asked for (`for_graph`).

Shapes: R active rows, N draft nodes, T = N + 1 verified nodes, M most committed tokens of a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from ..drafts import DraftTree
from ..errors import SpecConfigError
from ..kernels.acceptance import Acceptance
from ..logits.grammar.matchers import NodeMasks
from ..logits.processors import ProcessorStack
from ..logits.randomness import RowUniforms
from ..logits.rules import CapturedJudge, StandardRule
from ..target.facts import model_profile
from ..target.forward import Part
from ..transfers import PackedTables, PendingRead, take_nodes
from .cycle import Cycle, Pending, Verdict, no_token_error
from .requests import PendingRequests, by_verifier
from .rows import Group, Rows
from .walk import Walk


if TYPE_CHECKING:
    from .recorder import StepRecorder


# Scores that cost as much as a step along the path, on a CPU: as they are, and where processors change them.
_SCORES_OF_A_STEP, _PROCESSED_OF_A_STEP = 200_000, 30_000


class Judging:
    """Judges the drafts of a loop, those of each group of rows as its request wants it.

    `make_rule` makes an acceptance rule for some random numbers, or for none where a group is greedy; `rule` is that
    of most groups, which may sample.
    """

    def __init__(
        self,
        rows: Rows,
        make_rule: Callable[[RowUniforms | None], StandardRule],
        uniforms: RowUniforms | None,
        samples: bool,
        notes: list[str],
    ):
        self._rows, self._uniforms, self._notes = rows, uniforms, notes
        self._rule: Callable[[bool], StandardRule] = cache(lambda samples: make_rule(uniforms if samples else None))
        # By what groups have in common; each lives as long as one of them.
        self._shared: WeakValueDictionary[tuple[Any, ...], Verifier] = WeakValueDictionary()
        self.rule: StandardRule = self._rule(samples)

    def enter(self, group: Group, number: int, recorder: StepRecorder | None = None) -> None:
        """Gives a group its verifier, and a row of many requests, under this number, its random numbers."""
        if group.fails_alone:
            self._uniforms.name(number, group.seed, group.seed_row)
        key = None if group.signature is None else (group.samples, group.signature)
        group.verifier = self._shared.get(key) or Verifier(group, self._rows, self._rule(group.samples), recorder)
        if key is not None:
            self._shared[key] = group.verifier

    def keep_equal(self, why: str) -> None:
        """Makes the rows of a call advance by the same number of tokens from now on, and says why."""
        for group in self._rows.groups:
            group.verifier.keep_equal(why)
        self._notes.append(f"The rows wait for the slowest one in every cycle: {why}.")

    def heed(self, parts: list[Part]) -> None:
        """Judges as parts of the target want it, and notes their limits."""
        for part in parts:
            if part.why_equal is not None and len(self._rows.active) > 1:
                self.keep_equal(part.why_equal)
            if part.note is not None:
                self._notes.append(part.note)

    def begin(self, cycle: Cycle) -> Pending:
        """Launches what the device can judge of a verification."""
        group = self._rows.members[0][0]
        return PendingRequests(self._rows, cycle) if group.fails_alone else group.verifier.begin(cycle)

    def for_graph(self, draft: DraftTree, rows: list[int], positions: list[int]) -> CapturedJudge | None:
        """Judges drafts in the graph that verifies them; `None` where that takes the host, or several verifiers."""
        verifier, *others = by_verifier(self._rows, rows)
        stack = verifier.stack
        if others or verifier.walks or stack.grammar is not None or not stack.runs_in_graphs:
            return None
        rule, is_drawn = verifier.rule, draft.probs is not None and verifier.rule.samples
        return CapturedJudge(rule, stack, is_drawn, is_drawn and draft.is_chain, rule.keys(rows, positions))


class Verifier:
    """Judges rows to whose scores the processors of one group and the same rule are applied.

    `recorder` takes the processed scores along the path, those of tokens that are cut off included; it has those of a
    token when the stopping rules see the token. `why_equal` says what makes all rows of a call advance by the same
    number of tokens.
    """

    def __init__(self, group: Group, rows: Rows, rule: StandardRule, recorder: StepRecorder | None = None):
        stack = group.stack
        self.stack: ProcessorStack = stack
        self.rows: Rows = rows
        self.rule: StandardRule = rule
        self.recorder: StepRecorder | None = recorder
        self.why_equal: str | None = None
        self.walks: bool = stack.walks and not rule.judges_whole_drafts
        self._scores_of_a_step = _PROCESSED_OF_A_STEP if stack.processors else _SCORES_OF_A_STEP
        self._needs_scores = rule.samples or bool(stack.processors) or recorder is not None
        request, profile = group.request, model_profile(group.request.model)
        if stack.unknown_names:
            unknown = f"logits processors that this package does not know ({', '.join(stack.unknown_names)})"
            self._check_order(f"{unknown} must see one after the other")
            if request.batch_size > 1:
                self.keep_equal(f"{unknown} see the whole batch at once")
        elif request.batch_size > 1 and profile.counts_slots:
            self.keep_equal("the target model tells positions from the order of its cache")
        elif request.keeps_cache and profile.is_recurrent and group.texts.may_cut_back:
            self.keep_equal(
                "stopping criteria may end a row before its last tokens, and the cache to be returned has a recurrent "
                "state, which cannot be cut back"
            )

    def keep_equal(self, why: str) -> None:
        """Makes all rows advance by the same number of tokens from now on."""
        self._check_order(why)
        self.why_equal = why
        self.walks = True

    def _check_order(self, problem: str) -> None:
        if self.rule.judges_whole_drafts:
            raise SpecConfigError(
                f"rejection_sample_method='{self.rule.name}' judges the positions of a draft together, but {problem}. "
                "Use rejection_sample_method='standard'."
            )

    def begin(self, cycle: Cycle) -> AllNodes | Walk:
        """Begins to judge the drafts of a cycle."""
        draft, output, walks = cycle.draft, cycle.output, self.walks
        if output.outcome is not None:
            return AllNodes(self, cycle)
        if output.logits.device.type == "cpu" and draft.probs is None and not self.rule.judges_whole_drafts:
            # The path may be found in less time than all nodes are judged, as if half of the longest were accepted.
            num_steps, (num_rows, num_nodes, width) = draft.topology.max_depth // 2 + 1, output.logits.shape
            walks = walks or (num_nodes - num_steps) * num_rows * width > num_steps * self._scores_of_a_step
        return Walk(self, cycle) if walks else AllNodes(self, cycle)

    def scores(self, cycle: Cycle) -> torch.Tensor:
        """Scores `(R, T, V)` that nodes are judged by, or the logits where nothing changes them.

        Processors that read tokens see each node after the tokens on its own path.
        """
        logits, draft, stack = cycle.output.logits, cycle.draft, self.stack
        if not (self._needs_scores if cycle.output.outcome is None else self.recorder is not None):
            return logits
        masks = None
        if stack.grammar is not None:
            masks = NodeMasks.padded(draft.masks, logits.shape[1], stack.grammar.grammar.num_words)
        if not stack.walks:
            return stack.all_nodes(logits, masks)
        sequences = []
        for row, tokens, parents in zip(cycle.rows, draft.token_lists(), draft.parent_lists()):
            paths: list[list[int]] = [[]]
            for token, parent in zip(tokens, parents):
                paths.append([*paths[parent + 1], token])
            text = self.rows.row(row)
            paths += [[]] * (draft.size - len(tokens))
            sequences += [torch.cat([text, text.new_tensor(path)]) for path in paths]
        indices = [self.rows.at(row)[1] for row in cycle.rows for _ in range(logits.shape[1])]
        masks = None if masks is None else masks.reshape(-1, masks.shape[-1])
        return stack.rows(sequences, logits.flatten(0, 1), indices, masks).view(logits.shape)


class AllNodes:
    """All nodes are judged at once, by the device; the tables that say what it found are on their way to the host."""

    def __init__(self, verifier: Verifier, cycle: Cycle):
        self._verifier, self._cycle = verifier, cycle
        rule, draft, output = verifier.rule, cycle.draft, cycle.output
        scores = verifier.scores(cycle)
        # Of all nodes; the memory is free for others as soon as they are judged.
        self._scores = None if verifier.recorder is None else scores
        # Whatever the host does not know of the draft comes with the verdict.
        self._unknown = draft.unknown_tables()
        if output.outcome is None:
            self.acceptance: Acceptance = rule.judge(draft, scores, rule.keys(cycle.rows, cycle.positions))
            tables = {"accepted": self.acceptance.num_accepted[:, None], "committed": self.acceptance.tokens}
            tables |= self._unknown
            if output.successors is not None:
                tables["successors"] = output.successors.flatten(1)
            self._tables = PackedTables.of(tables)
        else:
            self._tables = output.outcome
            accepted, path, tokens = (self._tables[name] for name in ("accepted", "path", "committed"))
            self.acceptance = Acceptance(accepted[:, 0], path, tokens)
        self._arrival = PendingRead(self._tables.values)

    def wait(self) -> Verdict:
        """The one wait of a cycle; then the stopping rules see the tokens."""
        cycle, verifier, tables = self._cycle, self._verifier, self._tables.split(self._arrival.get().cpu())
        if self._unknown:
            cycle.draft.learn({name: tables[name].tolist() for name in self._unknown})
        path, tokens = self.acceptance.path, self.acceptance.tokens
        accepted, committed = tables["accepted"][:, 0].tolist(), tables["committed"].tolist()
        token_lists = [row[: count + 1] for row, count in zip(committed, accepted)]
        if min(map(min, token_lists)) < 0:
            raise no_token_error()
        if verifier.recorder is not None:
            scores = take_nodes(self._scores, path[:, : max(accepted) + 1])
            verifier.recorder.add(cycle.rows, scores, list(map(len, token_lists)))
        kept = verifier.rows.append(cycle.rows, token_lists)
        counts = list(map(len, kept))
        # Graphs read tables of one width; others read no more than they must.
        width = max(counts) if cycle.output.outcome is None else path.shape[1]
        verdict = Verdict(kept, counts, list(map(min, accepted, counts)), path[:, :width], tokens[:, :width])
        if cycle.output.successors is not None:
            verdict.successors = tables["successors"].unflatten(1, (-1, cycle.output.successors.shape[-1]))
        return verdict
