"""Decoding of many requests in one loop: rows of different calls beside each other, and new ones in freed places.

Each row is a `generate()` call of its own, prepared by transformers for a batch of one: its criteria and processors
see that row alone, and its random numbers are named after the request, not after its place. The loop shares what costs
time, the forwards of target and drafter, and judges rows together where the same is done to their scores.

New rows are read by a loop of their own, which makes no cycle, and join the one that runs.

Shapes: R active rows, V vocabulary.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import cached_property, partial
from time import perf_counter
from typing import Any, NamedTuple

import torch

from ..drafts import DraftTree
from ..errors import SpecDecError
from ..logits.grammar.growth import GrowingMasks
from ..logits.grammar.matchers import GrammarMatcher
from ..logits.grammar.rows import constrained
from ..logits.processors import ProcessorStack
from ..logits.randomness import RowUniforms
from ..logits.sampling import DraftSampler, fit_width
from ..logits.verifier import Verdict, take_nodes
from ..metrics import SpecDecodingStats
from ..metrics.listeners import CallProgress
from ..protocol import DrafterSource
from ..target.facts import ModelProfile
from ..target.forward import SlotOutput
from ..target.request import Request
from ..transfers import upload
from .joint_verifier import JointVerifier, Judge
from .loop import DecodingLoop
from .sequences import Sequences, StopRules


class TokenLogprobs(NamedTuple):
    """Natural logarithms of the target's probabilities at one position, before any logits processor.

    Attributes:
        own (`float`): Of the token that was generated.
        top (`list[tuple[int, float]]`): The most probable tokens, the best first, and theirs.
    """

    own: float
    top: list[tuple[int, float]]


class Row:
    """One request while it is decoded.

    Args:
        request (`Request`): Prepared for a batch of one, without padding.
        seed, number (`int`): Its random numbers are those of row `number` in a call with this seed.
        most_draft_tokens (`int`, *optional*): Depth that its drafts may have at most; 0 for none.
        top_logprobs (`int`, *optional*): Keep log-probabilities of its tokens, and of so many of the most probable.

    Attributes:
        sequences, stop, stack: Its text, its stopping rules and its processors.
        signature (`tuple`, *optional*): Of the processors, as [`ProcessorStack.signature`].
        stats (`SpecDecodingStats`): What was drafted and accepted for it; forwards and seconds belong to all rows.
        logprobs (`list[TokenLogprobs]`): Of its tokens, if they are kept.
        error (`Exception`, *optional*): Why it has failed.
        is_cancelled (`bool`): It ends where it stands.
        arrival (`int`): How many have come before it.
        judge (`Judge`): Judges its drafts, once it is in a loop.
    """

    judge: Judge
    arrival: int = 0

    def __init__(
        self,
        request: Request,
        seed: int,
        number: int,
        most_draft_tokens: int | None = None,
        top_logprobs: int | None = None,
    ):
        self.request = request
        self.seed = seed
        self.number = number
        self.most_draft_tokens = most_draft_tokens
        self.top_logprobs = top_logprobs
        self.samples: bool = bool(request.generation_config.do_sample)
        self.is_cancelled = False
        self.restart()
        self.stack: ProcessorStack = request.processor_stack(self.stop.eos_tokens)
        self.signature: tuple[Any, ...] | None = self.stack.signature

    def restart(self) -> None:
        """Forgets all but the prompt."""
        self.sequences: Sequences = Sequences(self.request.input_ids, self.request.pad_token)
        self.stop: StopRules = StopRules(self.request.stopping_criteria, self.sequences)
        # The first token comes from the prompt.
        self.stats: SpecDecodingStats = SpecDecodingStats(batch_size=1, num_committed_tokens=1)
        self.logprobs: list[TokenLogprobs] = []
        self.error = None

    def read_again(self) -> None:
        """Makes its text so far the prompt of another loop; where that cannot be, it begins anew."""
        if self.top_logprobs is not None and len(self.logprobs) != len(self.tokens):
            self.restart()
        # One token more comes from what is read.
        self.stats.num_committed_tokens = len(self.tokens) + 1

    @property
    def length(self) -> int:
        return self.sequences.lengths[0]

    @property
    def most_tokens(self) -> int:
        """Tokens that it may come to, the prompt included."""
        return self.stop.max_length

    def depth(self, depth: int, more: int = 0) -> int:
        """Depth that its next draft may have, of a drafter's: one token more is committed with every draft.

        Args:
            more (`int`): Tokens that it gets before.
        """
        if self.most_draft_tokens is not None:
            depth = min(depth, self.most_draft_tokens)
        return max(min(depth, self.most_tokens - 1 - self.length - more), 0)

    @property
    def has_ended(self) -> bool:
        return self.stop.all_finished or self.error is not None or self.is_cancelled

    @property
    def tokens(self) -> list[int]:
        """The generated tokens."""
        return self.tokens_from(0)

    def tokens_from(self, first: int) -> list[int]:
        """The generated tokens without so many of the first ones."""
        return self.sequences.tokens(0, self.sequences.prompt_length + first)

    @cached_property
    def prompt(self) -> list[int]:
        """The tokens of the prompt."""
        return self.sequences.tokens(0)[: self.sequences.prompt_length]

    @property
    def finish_reason(self) -> str:
        """Why it has ended: "stop", "length", "error" or "cancelled"."""
        if self.error is not None:
            return "error"
        if self.stop.all_finished:
            is_full = self.length >= self.stop.max_length and self.tokens[-1] not in self.stop.eos_tokens
            return "length" if is_full else "stop"
        return "cancelled"

    def append(self, tokens: list[int]) -> list[int]:
        """Appends what its stopping rules keep of some tokens; an error of theirs is the row's."""
        try:
            return self.stop.append([0], [tokens])[0]
        except Exception as error:  # noqa: BLE001 - of any kind: the user's criteria raise what they like
            self.error: None | Exception = error
            return tokens[:1]


class JointSequences:
    """The texts of the rows in a table, as the loop and its parts ask for them.

    Args:
        table (`list[Row | None]`): The rows by their number.
        prompt_length (`int`): Columns of the prompts that are read together.
    """

    def __init__(self, table: list[Row | None], prompt_length: int):
        self.table = table
        self.prompt_length = prompt_length

    def row(self, row: int) -> torch.LongTensor:
        return self.table[row].sequences.row(0)

    def tokens(self, row: int) -> list[int]:
        return self.table[row].sequences.tokens(0)


class JointStop:
    """The stopping rules of the rows in a table.

    Args:
        sequences (`JointSequences`), table (`list[Row | None]`): The rows.
        max_length (`int`): Columns that one of the prompts that are read together may fill.
    """

    num_cut_back = 0

    def __init__(self, sequences: JointSequences, table: list[Row | None], max_length: int):
        self.sequences = sequences
        self.max_length = max_length
        self._table = table

    @property
    def ends(self) -> list[None]:
        return [None] * len(self._table)

    @property
    def all_finished(self) -> bool:
        return all(row is None or row.has_ended for row in self._table)

    def has_left(self, row: int) -> bool:
        return self._table[row] is None or self._table[row].has_ended

    def append(self, rows: list[int], token_lists: list[list[int]]) -> list[list[int]]:
        return [self._table[row].append(tokens) for row, tokens in zip(rows, token_lists)]


class JointSampler(DraftSampler):
    """Draws draft tokens for rows of different requests, each from what its own processors leave."""

    @property
    def may_mask(self) -> bool:
        return any(row is not None and row.stack.grammar is not None for row in self.sequences.table)

    def matchers(self, rows: list[int]) -> list[GrammarMatcher | None]:
        return [self._matcher(self.sequences.table[row]) for row in rows]

    @staticmethod
    def _matcher(row: Row) -> GrammarMatcher | None:
        if row.stack.grammar is None:
            return None
        try:
            return row.stack.grammar.at(0, row.sequences.tokens(0))
        except SpecDecError as error:
            row.error = error
            return None

    def growing(self, rows: list[int], limits: list[int]) -> GrowingMasks | None:
        return GrowingMasks.of(self.matchers(rows), limits, self.vocab_size)

    def constrained(self, draft: DraftTree, rows: list[int]) -> DraftTree:
        matchers = self.matchers(rows)
        return constrained(draft, matchers) if any(matchers) else draft

    def scores(self, logits: torch.Tensor, rows: list[int], drafted: list[torch.LongTensor]) -> torch.Tensor:
        table = self.sequences.table
        signatures = [table[row].signature for row in rows]
        logits = fit_width(logits, self.vocab_size)
        if signatures[0] is not None and len(set(signatures)) == 1:
            return table[rows[0]].stack.all_nodes(logits)
        scores = logits.float()
        return torch.stack([self._own(table[row], index, scores, drafted) for index, row in enumerate(rows)])

    def reads_tokens(self, rows: list[int]) -> bool:
        return any(self.sequences.table[row].signature is None for row in rows)

    def in_graphs(self, rows: list[int]) -> ProcessorStack | None:
        own = [self.sequences.table[row] for row in rows]
        is_one = len({row.signature for row in own}) == 1 and own[0].stack.runs_in_graphs
        return own[0].stack if is_one else None

    @staticmethod
    def _own(row: Row, index: int, scores: torch.Tensor, drafted: list[torch.LongTensor]) -> torch.Tensor:
        if row.signature is not None:
            return row.stack.all_nodes(scores[index])
        if scores.dim() > 2:
            # Of several positions at once the tokens in between are not known.
            return scores[index]
        tail = torch.stack([tokens[index] for tokens in drafted]) if drafted else None
        text = row.sequences.row(0)
        text = text if tail is None else torch.cat([text, tail.to(text)])
        return row.stack.known_only().rows([text], scores[index : index + 1], [0])[0]


class JointLoop(DecodingLoop):
    """Decodes requests that begin together; those of other loops may join them.

    Args:
        request (`Request`): All prompts as one batch, for the forward that reads them.
        speculator (`DrafterSource`): Makes the candidate generator.
        rows (`list[Row]`): The requests, in the order of the batch.
        num_places (`int`): Most rows at a time.

    Raises:
        SpecConfigError: The acceptance rule cannot do what a request wants.
    """

    sampler_class = JointSampler
    judges_again = True

    def __init__(self, request: Request, speculator: DrafterSource, rows: list[Row], num_places: int):
        self.table: list[Row | None] = [None] * num_places
        self.progress: CallProgress | None = None
        self.uniforms: RowUniforms = RowUniforms(0, request.device)
        sequences = JointSequences(self.table, request.input_ids.shape[1])
        most = max(row.most_tokens - row.length for row in rows)
        stop = JointStop(sequences, self.table, sequences.prompt_length + most)
        super().__init__(request, speculator, (sequences, stop, rows[0].stack), num_places)
        with ExitStack() as if_it_fails:
            if_it_fails.callback(self.close)
            for number, row in enumerate(rows):
                self.verifier.enter(row, number)
                row.stats.method = self.stats.method
                row.stats.rejection_sample_method = self.stats.rejection_sample_method
                row.stats.num_spec_tokens = self.stats.num_spec_tokens
            if_it_fails.pop_all()

    @property
    def free_numbers(self) -> list[int]:
        return [number for number, row in enumerate(self.table) if row is None and number not in self.rows]

    @property
    def active(self) -> list[Row]:
        """The rows that have a place."""
        return [row for row in self.table if row is not None]

    def begin(self, is_first: bool) -> None:
        """Reads the prompts.

        Args:
            is_first (`bool`): There is no other loop, so this one goes on by itself. It alone is reported to those who
                listen, and has graphs.
        """
        self.began: float = perf_counter()
        if is_first:
            self._use_graphs()
        self.verifier.rule.check_depth(self.generator.num_speculative_tokens)
        self.progress = self._begin_call() if is_first else CallProgress(self.stats, [])
        self.verifier.reads_drafts = bool(self.progress.traces)
        self._prefill()
        self.progress.end_prefill()

    def cycle(self) -> None:
        """Drafts, verifies and commits once."""
        self._cycle()

    def drop_ended(self) -> list[Row]:
        """Rows that have ended leave; those that were cancelled, too. Not between a draft and its commit."""
        if any(row.has_ended for row in self.active):
            self._tell()
        if not self.stop.all_finished:
            self._drop_finished_rows()
        ended = []
        for number, row in enumerate(self.table):
            if row is not None and row.has_ended:
                self.table[number] = None
                ended.append(row)
        return ended

    def join(self, other: JointLoop) -> None:
        """Takes over the unfinished rows of another loop, which has read their prompts, and closes it.

        Raises:
            UnsupportedModelError: They cannot stand beside others.
        """
        self.may_use_ahead = False
        numbers = dict(zip(other.rows, self.free_numbers))
        self.target.join(other.target)
        self.generator.join(other.generator, numbers)
        for theirs, number in numbers.items():
            self.verifier.enter(other.table[theirs], number)
        self.rows: list[int] = [*self.rows, *numbers.values()]
        self.anchors: torch.Tensor = torch.cat([self.anchors, other.anchors])
        self.stats.add(other.stats)
        self.stats.notes += [note for note in other.stats.notes if note not in self.stats.notes]
        other.close()
        # While a long prompt was read, all others may have ended.
        self._drop_finished_rows()

    def close(self) -> None:
        """Ends the loop, with the rows that it still has."""
        with ExitStack() as parts:
            parts.callback(self.target.close)
            parts.callback(self.generator.close)
            if self.progress is not None:
                parts.push(self.progress)
            parts.callback(self.deferred.flush)

    def end(self) -> None:
        """Closes a loop that went on by itself, and its account."""
        try:
            self._tell()
            self.stats.total_seconds = perf_counter() - self.began
            self._close_account()
        finally:
            self.close()

    def _tell(self) -> None:
        """Does what was deferred. Scores of a trace are read at once: the loop may go on for ever."""
        self.deferred.flush()
        if self.tracer is not None:
            self.tracer.read_scores()

    # What rows of different requests change in the loop

    def _begin_trace(self, draft: DraftTree, verdict: Verdict, logits: torch.Tensor) -> None:
        super()._begin_trace(draft, verdict, logits)
        for trace in self.progress.traces:
            trace.is_joint = True

    def _uniforms(self) -> RowUniforms:
        return self.uniforms

    def _verifier(self, uniforms: RowUniforms | None, profile: ModelProfile) -> JointVerifier:
        verifier = JointVerifier(
            self.table, self.stop, self._acceptance_rule, self.uniforms, self._acceptance_rule(uniforms)
        )
        self.stats.rejection_sample_method = verifier.rule.name
        if verifier.rule.note:
            self.stats.notes.append(verifier.rule.note)
        return verifier

    def _depths(self, more: int = 0) -> list[int]:
        return [self.table[row].depth(self.generator.num_speculative_tokens, more) for row in self.rows]

    @property
    def _reads_logits(self) -> bool:
        return super()._reads_logits or any(self.table[row].top_logprobs is not None for row in self.rows)

    def _may_end_within(self, more: int) -> bool:
        return any(self.table[row].length + more >= self.table[row].most_tokens for row in self.rows)

    def _commit(self, draft: DraftTree, output: SlotOutput, verdict: Verdict) -> None:
        rows = [self.table[row] for row in self.rows]
        self.deferred.add(partial(_count, rows, draft.without_probs(), verdict))
        super()._commit(draft, output, verdict)

    def _record(self, verdict: Verdict, logits: torch.Tensor, hidden_states: Any) -> None:
        rows = [self.table[number] for number in self.rows]
        asking = [index for index, row in enumerate(rows) if row.top_logprobs is not None]
        if not asking:
            return
        most = max(rows[index].top_logprobs or 0 for index in asking)
        places = upload(asking, logits.device)
        nodes, tokens = (values.to(logits.device)[places] for values in (verdict.path, verdict.tokens))
        # A wait of its own, for those who ask: the device has nothing else to do here.
        values = _log_probs(take_nodes(logits[places], nodes), tokens, most).tolist()
        for index, positions in zip(asking, values):
            row = rows[index]
            for own, *top in positions[: verdict.counts[index]]:
                pairs = [(int(token), value) for value, token in zip(top, top[len(top) // 2 :])]
                row.logprobs.append(TokenLogprobs(own, pairs[: row.top_logprobs]))

    def _positions(self, ahead: int) -> list[int]:
        # Each text is whole: what was committed, the anchor included, is in front of the next token.
        return [self.table[row].length for row in self.rows]


def _log_probs(logits: torch.Tensor, tokens: torch.LongTensor, most: int) -> torch.DoubleTensor:
    """Log-probabilities of tokens `(R, M)` and of the K best, then the K best: `(R, M, 1 + 2 K)`.

    Args:
        logits (`torch.Tensor` of shape `(R, M, V)`): The target's.
        tokens (`torch.LongTensor` of shape `(R, M)`): The tokens.
        most (`int`): K, or more than there are tokens.
    """
    logs = logits.float().log_softmax(-1)
    best = logs.topk(min(most, logs.shape[-1]), dim=-1)
    # Doubles hold both.
    return torch.cat([values.double() for values in (logs.gather(-1, tokens[..., None]), *best)], dim=-1)


def _count(rows: list[Row], draft: DraftTree, verdict: Verdict) -> None:
    """Adds a cycle to the statistics of each row."""
    counts = zip(rows, draft.counts(), draft.max_depths(), verdict.num_accepted, verdict.counts)
    for row, nodes, depth, accepted, committed in counts:
        row.stats.count(nodes, depth, accepted, committed)
