"""The way from target logits to committed tokens: processors, acceptance rule, stop rules.

A verification is judged in two steps: `begin` launches what the device can do, and what it returns is waited for. In
between the loop launches the next forwards. Rows are judged together where the same is done to their scores.

Two ways lead to the same tokens. All nodes are judged at once; or the path is walked node by node (walk.py), and every
processor sees what it would have seen in plain generation, once per position. It is walked where a processor needs
that, and on a CPU where the other nodes would cost more than the steps. Rules that judge a draft as a whole cannot be
walked; for them processors see every node of the draft with the tokens on its own path.

Shapes: R active rows, N draft nodes, T = N + 1 verified nodes, M most committed tokens of a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..drafts import DraftTree
from ..errors import SpecConfigError
from ..kernels.acceptance import Acceptance
from ..logits.captured import CapturedJudge
from ..logits.grammar.masks import GrammarMask
from ..logits.grammar.rows import NodeMasks
from ..logits.processors import ProcessorStack
from ..logits.randomness import RowUniforms
from ..logits.rules import StandardRule
from ..protocol import DraftStep
from ..target.forward import SlotOutput
from ..transfers import PackedTables, PendingRead, take_nodes, upload, widened
from .recorder import StepRecorder
from .rows import Group, Rows
from .verdict import Pending, Verdict, check_drawn
from .walk import Walk


# Scores that cost as much as a step along the path, on a CPU: as they are, and where processors change them.
_SCORES_OF_A_STEP, _PROCESSED_OF_A_STEP = 200_000, 30_000

# A note of calls whose rows advance by the same number of tokens, with the reason.
WAITING = "The rows wait for the slowest one in every cycle: {}."

# Verifiers that are kept for groups to come.
_MOST_VERIFIERS = 64


class Judging:
    """Judges the drafts of a loop, those of each group of rows as its request wants it.

    `make_rule` makes an acceptance rule for some random numbers, or for none where a group is greedy; `rule` is that
    of most groups, which may sample. `reads_drafts`: draft tokens come with the verdict, also where the host need not
    know them.
    """

    reads_drafts: bool = False

    def __init__(
        self,
        rows: Rows,
        make_rule: Callable[[RowUniforms | None], StandardRule],
        uniforms: RowUniforms | None,
        samples: bool,
    ):
        self.rule: StandardRule = make_rule(uniforms if samples else None)
        self._rows, self._make_rule, self._uniforms = rows, make_rule, uniforms
        self._shared: dict[tuple, Verifier] = {}

    def enter(self, group: Group, number: int) -> None:
        """Gives a group of one row, under this number, its random numbers and its verifier.

        Raises:
            SpecConfigError: The acceptance rule cannot do what its request wants.
        """
        assert self._uniforms is not None, "a loop of one call"
        self._uniforms.name(number, group.seed, group.seed_row)
        key = None if group.signature is None else (group.samples, group.signature)
        if key in self._shared:
            group.verifier = self._shared[key]
            return
        rule = self._make_rule(self._uniforms if group.samples else None)
        group.verifier = Verifier(group.stack, self._rows, rule)
        if key is not None:
            if len(self._shared) >= _MOST_VERIFIERS:
                self._shared.clear()
            self._shared[key] = group.verifier

    def keep_equal(self, why: str) -> None:
        """Makes the rows of one call advance by the same number of tokens from now on."""
        for group in self._rows.groups:
            group.verifier.keep_equal(why)

    def begin(self, draft: DraftTree, output: SlotOutput, step: DraftStep) -> Pending:
        """Begins to judge drafts; `step.lengths` are the positions of the first tokens to commit."""
        group = self._rows.group(step.rows[0])
        if group.fails_alone:
            return OfRequests(self._rows, draft, output, step.rows, step.lengths, self.reads_drafts)
        return group.verifier.begin(draft, output, step.rows, step.lengths, self.reads_drafts)

    def for_graph(self, draft: DraftTree, rows: list[int], positions: list[int]) -> CapturedJudge | None:
        """Judges drafts in the graph that verifies them; `None` where that takes the host, or several verifiers."""
        parts = parts_of(self._rows, rows)
        return parts[0][0].for_graph(draft, rows, positions) if len(parts) == 1 else None


def parts_of(rows: Rows, numbers: list[int]) -> list[tuple[Verifier, list[int]]]:
    """The verifiers of these rows, each with the places of its rows in the batch."""
    parts: dict[int, tuple[Verifier, list[int]]] = {}
    for index, row in enumerate(numbers):
        verifier = rows.group(row).verifier
        parts.setdefault(id(verifier), (verifier, []))[1].append(index)
    return list(parts.values())


class OfRequests:
    """Rows of groups that fail alone: judged together where one verifier can, and one by one after an error."""

    def __init__(
        self,
        table: Rows,
        draft: DraftTree,
        output: SlotOutput,
        rows: list[int],
        positions: list[int],
        reads_drafts: bool,
    ):
        self._table, self._draft, self._output = table, draft, output
        self._rows, self._positions, self._reads_drafts = rows, positions, reads_drafts
        self._lengths: list[int] = _lengths(table, rows)
        self._parts = [places for _, places in parts_of(table, rows)]
        self._error: Exception | None = None
        self.acceptance: Acceptance | None = None
        if len(self._parts) == 1:
            try:
                verifier = table.group(rows[0]).verifier
                self._pending: Pending = verifier.begin(draft, output, rows, positions, reads_drafts)
                self.acceptance = self._pending.acceptance
            except Exception as error:  # noqa: BLE001 - of any kind: the user's processors raise what they like
                self._error = error

    def wait(self) -> Verdict:
        if len(self._parts) > 1:
            return self._in_parts(self._parts)
        if self._error is not None:
            return self._after(self._error)
        try:
            return self._pending.wait()
        except Exception as error:  # noqa: BLE001 - as above
            return self._after(error)

    def _after(self, error: Exception) -> Verdict:
        """Judges each row alone after an error for all of them; of a single one it is the row's."""
        if len(self._rows) > 1 and self._lengths == _lengths(self._table, self._rows):
            return self._in_parts([[index] for index in range(len(self._rows))])
        for row in self._rows:
            # What has failed before is the cause.
            self._table.group(row).error = self._table.group(row).error or error
        count, device = len(self._rows), self._output.logits.device
        nodes = torch.zeros((count, 1), dtype=torch.long, device=device)
        return Verdict([[0] for _ in self._rows], [1] * count, [0] * count, nodes, nodes)

    def _in_parts(self, parts: list[list[int]]) -> Verdict:
        """Judges these places in the batch one part after the other."""
        device = self._output.logits.device
        verdicts = []
        for part in parts:
            logits = self._output.logits.index_select(0, upload(part, device))
            rows, positions = ([values[index] for index in part] for values in (self._rows, self._positions))
            pending = OfRequests(self._table, self._draft.of_rows(part), SlotOutput(logits), rows, positions, False)
            verdicts.append(pending.wait())
        order = [index for part in parts for index in part]
        places = sorted(range(len(order)), key=order.__getitem__)
        width = max(verdict.path.shape[1] for verdict in verdicts)
        index = upload(places, device)

        def in_order(name: str) -> list:
            values = [value for verdict in verdicts for value in getattr(verdict, name)]
            return [values[place] for place in places]

        def stacked(name: str) -> torch.LongTensor:
            padded = [widened(getattr(verdict, name), width) for verdict in verdicts]
            return torch.cat(padded).index_select(0, index)

        lists = (in_order(name) for name in ("token_lists", "counts", "num_accepted"))
        return Verdict(*lists, stacked("path"), stacked("tokens"))


def _lengths(table: Rows, rows: list[int]) -> list[int]:
    return [group.sequences.lengths[index] for group, index in map(table.at, rows)]


class Verifier:
    """Judges rows to whose scores the same processors and the same rule are applied.

    `recorder` takes the processed scores along the path, those of tokens that are cut off included; it has those of a
    token when the stopping rules see the token. `why_equal` says what makes all rows of the one group advance by the
    same number of tokens.

    Raises:
        SpecConfigError: The rule judges whole drafts, and something must see one position after the other.
    """

    def __init__(
        self,
        stack: ProcessorStack,
        rows: Rows,
        rule: StandardRule,
        recorder: StepRecorder | None = None,
        why_equal: str | None = None,
        num_rows: int = 1,
    ):
        self.stack: ProcessorStack = stack
        self.rows: Rows = rows
        self.rule: StandardRule = rule
        self.recorder: StepRecorder | None = recorder
        self.why_equal: str | None = None
        self.walks: bool = stack.walks and not rule.judges_whole_drafts
        if not stack.knows_all:
            names = ", ".join(stack.unknown_names)
            unknown = f"logits processors that this package does not know ({names})"
            self._check_order(f"{unknown} must see one after the other")
            if num_rows > 1:
                why_equal = f"{unknown} see the whole batch at once"
        if why_equal is not None:
            self.keep_equal(why_equal)
        self._scores_of_a_step = _PROCESSED_OF_A_STEP if stack else _SCORES_OF_A_STEP
        self._needs_scores = rule.uniforms is not None or bool(stack) or recorder is not None

    def keep_equal(self, why: str) -> None:
        """Makes all rows advance by the same number of tokens from now on, and says why."""
        self._check_order(why)
        self.why_equal = why
        self.walks = True

    def _check_order(self, problem: str) -> None:
        if self.rule.judges_whole_drafts:
            raise SpecConfigError(
                f"rejection_sample_method='{self.rule.name}' judges the positions of a draft together, but {problem}. "
                "Use rejection_sample_method='standard'."
            )

    def begin(
        self, draft: DraftTree, output: SlotOutput, rows: list[int], positions: list[int], reads_drafts: bool
    ) -> AllNodes | Walk:
        """Begins to judge the drafts of some rows; `positions` are those of the first tokens to commit."""
        if output.outcome is None and (self.walks or self._saves_by_walking(draft, output.logits)):
            return Walk(self, draft, output.logits, rows, positions)
        return AllNodes(self, draft, output, rows, positions, reads_drafts)

    def for_graph(self, draft: DraftTree, rows: list[int], positions: list[int]) -> CapturedJudge | None:
        if self.walks or self.stack.grammar is not None or not self.stack.runs_in_graphs:
            return None
        return CapturedJudge.of(self.rule, self.stack, draft, rows, positions)

    def _saves_by_walking(self, draft: DraftTree, logits: torch.Tensor) -> bool:
        """Tells whether the path of a draft that was not drawn is found in less time than all nodes are judged."""
        if logits.device.type != "cpu" or draft.probs is not None or self.rule.judges_whole_drafts:
            return False
        # As if half of the longest path were accepted.
        num_steps = draft.topology.max_depth // 2 + 1
        return (logits.shape[1] - num_steps) * len(logits) * logits.shape[-1] > num_steps * self._scores_of_a_step

    def scores(self, draft: DraftTree, output: SlotOutput, rows: list[int]) -> torch.Tensor:
        """Scores `(R, T, V)` that nodes are judged by, or the logits where nothing changes them.

        Processors that read tokens see each node after the tokens on its own path.
        """
        logits = output.logits
        if not (self._needs_scores if output.outcome is None else self.recorder is not None):
            return logits
        masks = None if self.stack.grammar is None else _padded_masks(draft, logits.shape[1])
        if not self.stack.walks:
            return self.stack.all_nodes(logits, masks)
        sequences = [
            torch.cat([tokens, tokens.new_tensor(path)])
            for tokens, paths in zip(map(self.rows.row, rows), _node_paths(draft))
            for path in paths
        ]
        indices = [self.rows.at(row)[1] for row in rows for _ in range(logits.shape[1])]
        masks = None if masks is None else masks.reshape(-1, masks.shape[-1])
        return self.stack.rows(sequences, logits.flatten(0, 1), indices, masks).view(logits.shape)


class AllNodes:
    """All nodes are judged at once, by the device; the tables that say what it found are on their way to the host."""

    def __init__(
        self,
        verifier: Verifier,
        draft: DraftTree,
        output: SlotOutput,
        rows: list[int],
        positions: list[int],
        reads_drafts: bool,
    ):
        self._verifier, self._draft, self._output, self._rows = verifier, draft, output, rows
        scores = verifier.scores(draft, output, rows)
        # Of all nodes; the memory is free for others as soon as they are judged.
        self._scores = None if verifier.recorder is None else scores
        # Whatever the host does not know of the draft comes with the verdict.
        self._unknown = draft.unknown_tables(reads_drafts)
        if output.outcome is None:
            self.acceptance: Acceptance = verifier.rule.judge(draft, scores, rows, positions)
            committed = {"accepted": self.acceptance.num_accepted[:, None], "committed": self.acceptance.tokens}
            tables = {**committed, **self._unknown}
            if output.successors is not None:
                tables["successors"] = output.successors.flatten(1)
            self._tables = PackedTables.of(tables)
        else:
            self._tables: PackedTables = output.outcome
            accepted, path, tokens = (self._tables[name] for name in ("accepted", "path", "committed"))
            self.acceptance = Acceptance(accepted[:, 0], path, tokens)
        self._arrival = PendingRead(self._tables.values)

    def wait(self) -> Verdict:
        """The one wait of a cycle; then the stopping rules see the tokens."""
        tables = self._tables.split(self._arrival.get().cpu())
        if self._unknown:
            self._draft.learn({name: tables[name].tolist() for name in self._unknown})
        path, tokens = self.acceptance.path, self.acceptance.tokens
        accepted = [row[0] for row in tables["accepted"].tolist()]
        token_lists = [check_drawn(row)[: count + 1] for row, count in zip(tables["committed"].tolist(), accepted)]
        verifier = self._verifier
        if verifier.recorder is not None:
            scores = take_nodes(self._scores, path[:, : max(accepted) + 1])
            verifier.recorder.add(self._rows, scores, list(map(len, token_lists)))
        kept = verifier.rows.append(self._rows, token_lists)
        counts = list(map(len, kept))
        # Graphs read tables of one width; others read no more than they must.
        width = max(counts) if self._output.outcome is None else path.shape[1]
        verdict = Verdict(kept, counts, list(map(min, accepted, counts)), path[:, :width], tokens[:, :width])
        if self._output.successors is not None:
            verdict.successors = tables["successors"].unflatten(1, (-1, self._output.successors.shape[-1]))
        return verdict


def masked_nodes(draft: DraftTree, logits: torch.Tensor) -> torch.Tensor:
    """Logits `(R, T, V)` of all nodes with -inf for what the grammars of their rows forbid."""
    masked = logits.clone()
    for row, masks in zip(masked, NodeMasks.all_of(draft.masks)):
        if masks is not None:
            GrammarMask(masks, allows_rest=False)(None, row[: len(masks)])
    return masked


def _node_paths(draft: DraftTree) -> list[list[list[int]]]:
    """Draft tokens of each row and verified node, from the anchor down to it; none for padding."""
    all_paths = []
    for tokens, parents in zip(draft.token_lists(), draft.parent_lists()):
        paths: list[list[int]] = [[]]
        for token, parent in zip(tokens, parents):
            paths.append([*paths[parent + 1], token])
        all_paths.append(paths + [[]] * (draft.size - len(tokens)))
    return all_paths


def _padded_masks(draft: DraftTree, num_nodes: int) -> np.ndarray:
    """The masks of all rows, `(R, T, W)`; padding may be followed by anything."""
    assert draft.masks is not None, "a draft without the masks of its grammar"
    rows = NodeMasks.all_of(draft.masks)
    masks = np.full((draft.batch_size, num_nodes, rows[0].shape[1]), -1, dtype=np.int32)
    for padded, row in zip(masks, rows):
        padded[: len(row)] = row
    return masks
