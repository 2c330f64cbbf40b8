"""The way from target logits to committed tokens: processors, choice of a token at each node, acceptance, stop rules.

Two ways lead to the same tokens. All nodes are judged at once; or the path is walked node by node, and every processor
sees what it would have seen in plain generation, once per position. It is walked where a processor needs that, and on
a CPU where the other nodes would cost more than the steps. Rules that judge a draft as a whole cannot be walked; for
them processors see every node of the draft with the tokens on its own path.

Shapes: R active rows, N draft nodes, T = N + 1 verified nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from ..drafts import DraftTree
from ..errors import SpecConfigError, SpecDecError
from ..kernels.acceptance import Acceptance, reject_chain, reject_tree
from ..kernels.best import best_tokens
from ..kernels.sampling import sample_from_probs
from ..transfers import PackedTables, read_together, upload
from .captured import CapturedJudge
from .grammar.masks import GrammarMask
from .grammar.rows import NodeMasks
from .processors import ProcessorStack
from .randomness import ACCEPT, TARGET
from .recorder import StepRecorder
from .rules import StandardRule


@dataclass
class Verdict:
    """Outcome of one verification.

    Attributes:
        token_lists (`list[list[int]]` of length R): Committed tokens of each row, cut where the row ends.
        counts (`list[int]`): How many they are.
        num_accepted (`list[int]`): Draft tokens among them.
        path (`torch.LongTensor` of shape `(R, M)`): Verified nodes that the tokens were predicted from, the anchor
            first; columns from a row's number of tokens on are padding.
        tokens (`torch.LongTensor` of shape `(R, M)`): The committed tokens, padded.
        successors (`torch.LongTensor` of shape `(R, T, 1 + K)`, *optional*): Of [`with_successors`], on the host, if
            they came with the verdict; nodes of padding may follow.
    """

    token_lists: list[list[int]]
    counts: list[int]
    num_accepted: list[int]
    path: torch.LongTensor
    tokens: torch.LongTensor
    successors: torch.LongTensor | None = None

    @property
    def is_whole(self) -> bool:
        """Tells whether every row keeps the target's own token after what it has accepted: none was cut."""
        return all(count > accepted for count, accepted in zip(self.counts, self.num_accepted))


# Scores that cost as much as a step along the path, on a CPU: as they are, and where processors change them.
_SCORES_OF_A_STEP, _PROCESSED_OF_A_STEP = 200_000, 30_000


@dataclass
class Verifier:
    """Judges drafts.

    Args:
        stack (`ProcessorStack`): Logits processors of the call.
        stop (`StopRules`): Stopping rules of the call; they append the kept tokens to the sequences.
        rule (`StandardRule`): The acceptance rule, with the random numbers of the call.
        recorder (`StepRecorder`, *optional*): Takes the processed scores along the path, those of tokens that are cut
            off included. It has those of a token when the stopping rules see the token.
        why_equal (`str`, *optional*): What makes all rows advance by the same number of tokens, in words.
        reads_drafts (`bool`): Someone wants to know the draft tokens; they come with the verdict.

    Raises:
        SpecConfigError: The rule judges whole drafts, and something must see one position after the other.
    """

    stack: ProcessorStack
    stop: object
    rule: StandardRule
    recorder: StepRecorder | None = None
    why_equal: str | None = None
    reads_drafts: bool = False

    def __post_init__(self) -> None:
        if self.rule.judges_whole_drafts:
            self._check_whole_drafts()
        if not self.stack.knows_all and len(self.stop.ends) > 1:
            names = ", ".join(self.stack.unknown_names)
            self.why_equal = f"logits processors that this package does not know ({names}) see the whole batch at once"
        needs_walk = self.why_equal is not None or self.stack.walks
        self._walks = needs_walk and not self.rule.judges_whole_drafts
        self._scores_of_a_step = _PROCESSED_OF_A_STEP if self.stack else _SCORES_OF_A_STEP
        self._needs_scores = self.rule.uniforms is not None or bool(self.stack) or self.recorder is not None

    def keep_equal(self, why: str) -> None:
        """Makes all rows advance by the same number of tokens from now on."""
        self.why_equal = why
        self.__post_init__()

    def _check_whole_drafts(self) -> None:
        problem = self.why_equal
        if not self.stack.knows_all:
            names = ", ".join(self.stack.unknown_names)
            problem = f"logits processors that this package does not know ({names}) must see one after the other"
        if problem:
            raise SpecConfigError(
                f"rejection_sample_method='{self.rule.name}' judges the positions of a draft together, but {problem}. "
                "Use rejection_sample_method='standard'."
            )

    def verify(
        self,
        draft: DraftTree,
        logits: torch.Tensor,
        rows: list[int],
        positions: list[int],
        meanwhile: Callable[[Acceptance | None], None] | None = None,
        outcome: PackedTables | None = None,
        successors: torch.LongTensor | None = None,
    ) -> Verdict:
        """Commits what the target accepts of a draft, and one more token. Waits for the device.

        Args:
            draft (`DraftTree`): The drafts of the active rows.
            logits (`torch.Tensor` of shape `(R, T, V)`): The target's logits after the anchor and every node.
            rows (`list[int]` of length R): Which row of the call each active row is.
            positions (`list[int]` of length R): Position of the first token to commit, padding not counted.
            meanwhile (`Callable`, *optional*): What the host does before it waits, and before anything of this
                verification is shown to processors and criteria. Takes what is accepted, where the device knows it.
            outcome (`PackedTables`, *optional*): What is accepted, where that is known: that of `SlotOutput`.
            successors (`torch.LongTensor` of shape `(R, T, 1 + K)`, *optional*): Those of `SlotOutput`, which the host
                reads too.
        """
        if outcome is None and (self._walks or self._saves_by_walking(draft, logits)):
            if meanwhile is not None:
                meanwhile(None)
            return _Walk(self, draft, logits, rows, positions).run()
        needs_scores = self._needs_scores if outcome is None else self.recorder is not None
        scores = self._node_scores(draft, logits, rows) if needs_scores else logits
        unknown, is_known = draft.unknown_tables(self.reads_drafts), outcome is not None
        if outcome is None:
            acceptance = self.rule.judge(draft, scores, rows, positions)
            tables = {"accepted": acceptance.num_accepted[:, None], "committed": acceptance.tokens, **unknown}
            if successors is not None:
                tables["successors"] = successors.flatten(1)
            outcome = PackedTables.of(tables)
        else:
            acceptance = Acceptance(outcome["accepted"][:, 0], outcome["path"], outcome["committed"])
        path, tokens = acceptance.path, acceptance.tokens
        # The one synchronisation of a cycle. Whatever the host does not know of the draft comes with it.
        found = outcome.read(meanwhile and partial(meanwhile, acceptance))
        if unknown:
            draft.learn({name: found[name].tolist() for name in unknown})
        accepted = [row[0] for row in found["accepted"].tolist()]
        token_lists = [_checked(row)[: count + 1] for row, count in zip(found["committed"].tolist(), accepted)]
        if self.recorder is not None:
            self.recorder.add(rows, take_nodes(scores, path[:, : max(accepted) + 1]), list(map(len, token_lists)))
        kept = self.stop.append(rows, token_lists)
        counts = list(map(len, kept))
        num_accepted = list(map(min, accepted, counts))
        # Graphs read tables of one width; others read no more than they must.
        width = path.shape[1] if is_known else max(counts)
        verdict = Verdict(kept, counts, num_accepted, path[:, :width], tokens[:, :width])
        if successors is not None:
            verdict.successors = found["successors"].unflatten(1, (-1, successors.shape[-1]))
        return verdict

    def in_a_graph(self, draft: DraftTree, rows: list[int], positions: list[int]) -> CapturedJudge | None:
        """Judges drafts in the graph that verifies them; `None` where that takes the host. Arguments: `verify`."""
        if self._walks or self.stack.grammar is not None or not self.stack.runs_in_graphs:
            return None
        return CapturedJudge.of(self.rule, self.stack, draft, rows, positions)

    def _saves_by_walking(self, draft: DraftTree, logits: torch.Tensor) -> bool:
        """Tells whether the path of a draft that was not drawn is found in less time than all nodes are judged."""
        if logits.device.type != "cpu" or draft.probs is not None or self.rule.judges_whole_drafts:
            return False
        # As if half of the longest path were accepted.
        num_steps = draft.topology.max_depth // 2 + 1
        return (logits.shape[1] - num_steps) * len(logits) * logits.shape[-1] > num_steps * self._scores_of_a_step

    def _node_scores(self, draft, logits, rows) -> torch.Tensor:
        """Scores of all nodes; processors that read tokens see each node after the tokens on its own path."""
        masks = None if self.stack.grammar is None else _padded_masks(draft, logits.shape[1])
        if not self.stack.walks:
            return self.stack.all_nodes(logits, masks)
        committed = [self.stop.sequences.row(row) for row in rows]
        sequences = [
            torch.cat([tokens, tokens.new_tensor(path)])
            for tokens, paths in zip(committed, _node_paths(draft))
            for path in paths
        ]
        rows_of_nodes = [row for row in rows for _ in range(logits.shape[1])]
        masks = None if masks is None else masks.reshape(-1, masks.shape[-1])
        return self.stack.rows(sequences, logits.flatten(0, 1), rows_of_nodes, masks).view(logits.shape)


class _Walk:
    """One verification along the path: at each depth the rows that still follow their draft are judged together."""

    def __init__(self, verifier: Verifier, draft: DraftTree, logits, rows, positions):
        self.verifier, self.draft, self.logits = verifier, draft, logits
        self.rows, self.positions = rows, positions
        self.children = [
            _children(tokens, parents) for tokens, parents in zip(draft.token_lists(), draft.parent_lists())
        ]
        self.nodes = [0] * len(rows)
        self.token_lists: list[list[int]] = [[] for _ in rows]
        self.paths: list[list[int]] = [[] for _ in rows]

    def run(self) -> Verdict:
        stop, active = self.verifier.stop, list(range(len(self.rows)))
        while active:
            scores = self._scores(active)
            rows = [self.rows[i] for i in active]
            if self.verifier.recorder is not None:
                self.verifier.recorder.add(rows, scores[:, None], [1] * len(rows))
            tokens, next_nodes = self._choose(active, scores)
            for index, token in zip(active, tokens):
                self.paths[index].append(self.nodes[index])
                self.token_lists[index].append(token)
            stop.append(rows, [[t] for t in tokens])
            active = self._follow(active, next_nodes)
        return self._verdict()

    def _scores(self, active) -> torch.Tensor:
        places = upload([active, [self.nodes[i] for i in active]], self.logits.device)
        logits = self.logits[places[0], places[1]]
        stack, sequences = self.verifier.stack, self.verifier.stop.sequences
        masks = None
        if stack.grammar is not None:
            assert self.draft.masks is not None, "a draft without the masks of its grammar"
            masks = np.stack([self.draft.masks[i][self.nodes[i]] for i in active])
        if not stack.walks:
            return stack.all_nodes(logits, masks)
        rows = [self.rows[i] for i in active]
        if stack.knows_all or len(sequences.lengths) == 1:
            return stack.rows([sequences.row(row) for row in rows], logits, rows, masks)
        length = max(sequences.lengths[row] for row in rows)
        return stack.whole_batch(sequences.prefix(length), logits, rows)

    def _choose(self, active, scores) -> tuple[list[int], list[int | None]]:
        """A token for each active row, and the draft node that carries it (`None`: no node does)."""
        verifier = self.verifier
        if verifier.rule.uniforms is None:
            tokens = best_tokens(scores).tolist()
        elif self.draft.probs is None:
            tokens = self._draw(active, scores.softmax(-1))
        else:
            return self._choose_by_rejection(active, scores.softmax(-1), self.draft.probs)
        return tokens, [self.children[i][self.nodes[i]].get(token) for i, token in zip(active, tokens)]

    def _draw(self, active, probs) -> list[int]:
        return _checked(sample_from_probs(probs, self._uniforms(TARGET, active)).tolist())

    def _choose_by_rejection(self, active, probs, draft_probs):
        """Rejection sampling at one depth: the children of each row's node as a star below it."""
        stars = [list(self.children[i][self.nodes[i]].values()) for i in active]
        width = max(map(len, stars))
        if width == 0:
            return self._draw(active, probs), [None] * len(active)
        device = probs.device
        picks = upload([star + [1] * (width - len(star)) for star in stars], device) - 1
        index = upload(active, device)[:, None]
        star = DraftTree(
            self.draft.tokens[index, picks],
            torch.full((width,), -1, device=device),
            list(map(len, stars)),
            draft_probs[index, picks],
        )
        # Only the first row of target probabilities is looked at; the token after an accepted child comes later.
        target = probs[:, None].expand(-1, width + 1, -1)
        target_uniforms = self._uniforms(TARGET, active)[:, None].expand(-1, width + 1)
        accept_uniforms = self._accept_uniforms(active, picks)
        star.is_chain = width == 1
        reject = reject_chain if star.is_chain else reject_tree
        accepted = reject(star, target, accept_uniforms, target_uniforms)
        tables = {
            "counts": accepted.num_accepted[:, None],
            "new": accepted.tokens[:, :1],
            "path": accepted.path[:, :2],
        }
        found = read_together(tables)
        counts, children = ([row[-1] for row in found[name]] for name in ("counts", "path"))
        tokens = _checked([row[0] for row in found["new"]])
        nodes = [star[child - 1] if count else None for star, count, child in zip(stars, counts, children)]
        return tokens, nodes

    def _accept_uniforms(self, active, picks):
        rows, positions = [self.rows[i] for i in active], [self.positions[i] for i in active]
        if self.draft.is_chain:
            return self._uniforms(ACCEPT, active)[:, None]
        return self.verifier.rule.uniforms.for_nodes(rows, positions, self.draft.size).gather(1, picks)

    def _uniforms(self, purpose, active) -> torch.Tensor:
        rows = [self.rows[i] for i in active]
        return self.verifier.rule.uniforms.at(
            purpose, rows, [self.positions[i] + len(self.token_lists[i]) for i in active], 1
        )[:, 0]

    def _follow(self, active, next_nodes) -> list[int]:
        """The rows that go on: those whose token has a node, or nobody if rows must keep equal lengths."""
        if self.verifier.stop.all_finished:
            return []
        ended = [self.verifier.stop.has_left(self.rows[i]) for i in active]
        going = {i: node for i, node, end in zip(active, next_nodes, ended) if node is not None and not end}
        if self.verifier.why_equal and len(going) < len(active) - sum(ended):
            return []
        for i, node in going.items():
            self.nodes[i] = node
        return list(going)

    def _verdict(self) -> Verdict:
        device = self.logits.device
        width = max(map(len, self.paths))
        path = upload([p + [p[-1]] * (width - len(p)) for p in self.paths], device)
        tokens = upload([t + [0] * (width - len(t)) for t in self.token_lists], device)
        accepted = [
            sum(self.children[i][node].get(token) is not None for node, token in zip(path_i, tokens_i))
            for i, (path_i, tokens_i) in enumerate(zip(self.paths, self.token_lists))
        ]
        return Verdict(self.token_lists, list(map(len, self.token_lists)), accepted, path, tokens)


def take_nodes(values: torch.Tensor, path: torch.LongTensor) -> torch.Tensor:
    """Values `(R, T, ...)` of the nodes `path` `(R, M)`."""
    path = path.to(values.device)
    return values[torch.arange(path.shape[0], device=path.device)[:, None], path]


def _children(tokens: list[int], parents: list[int]) -> list[dict[int, int]]:
    """Children of each verified node as {token: verified node}; of equal siblings the first counts."""
    children: list[dict[int, int]] = [{} for _ in range(len(tokens) + 1)]
    for index, (token, parent) in enumerate(zip(tokens, parents)):
        children[parent + 1].setdefault(token, index + 1)
    return children


def _node_paths(draft: DraftTree) -> list[list[list[int]]]:
    """Draft tokens of each row and verified node, from the anchor down to it; none for padding."""
    all_paths = []
    for tokens, parents in zip(draft.token_lists(), draft.parent_lists()):
        paths: list[list[int]] = [[]]
        for token, parent in zip(tokens, parents):
            paths.append([*paths[parent + 1], token])
        all_paths.append(paths + [[]] * (draft.size - len(tokens)))
    return all_paths


def masked_nodes(draft: DraftTree, logits: torch.Tensor) -> torch.Tensor:
    """Logits `(R, T, V)` of all nodes with -inf for what the grammars of their rows forbid."""
    masked = logits.clone()
    for row, masks in zip(masked, NodeMasks.all_of(draft.masks)):
        if masks is not None:
            GrammarMask(masks, allows_rest=False)(None, row[: len(masks)])
    return masked


def _padded_masks(draft: DraftTree, num_nodes: int) -> np.ndarray:
    """The masks of all rows, `(R, T, W)`; padding may be followed by anything."""
    assert draft.masks is not None, "a draft without the masks of its grammar"
    found = NodeMasks.all_of(draft.masks)
    masks = np.full((draft.batch_size, num_nodes, found[0].shape[1]), -1, dtype=np.int32)
    for row, own in zip(masks, found):
        row[: len(own)] = own
    return masks


def _checked(tokens: list[int]) -> list[int]:
    if min(tokens) < 0:
        raise SpecDecError(
            "The target's scores have no token to draw: they hold NaN, or processors left no token possible. Check "
            "the logits processors, and the model's dtype for overflow."
        )
    return tokens
