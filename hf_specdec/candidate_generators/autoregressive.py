"""Drafting with a network that goes on from a state of its own, one token after the other.

The network reads entries, each a token and the state that the token before it has left: first those of the text, whose
states are the target's, then those of its own draft. Drafts are chains, static trees and dynamic trees.

On a GPU a cycle is one graph, which reads what was committed and grows the whole draft. It samples chains as well,
where the user's logits processors read scores alone; with others each token of a sampled chain is a graph.

Shapes: R active rows, h hidden size of the network, U its vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..drafting.chain import CapturedDrawing, SteeredChain
from ..drafting.entries import DraftEntries
from ..drafting.graphs import graph_depth
from ..drafting.growth import DepthLimits, DraftNodes, DynamicTree, grow
from ..drafting.shape import confidence_threshold
from ..drafting.slots import Entries, KnownPrompt
from ..drafts import DraftTree, TokenTree
from ..protocol import Commit, DeviceCommit, DraftStep, Prompt, Session
from ..transfers import select_rows
from .base import CandidateGenerator


if TYPE_CHECKING:
    from ..drafts.static import Level
    from ..logits.grammar.masks import GrowingMasks
    from ..settings import SpeculativeConfig


class AutoregressiveCandidateGenerator(CandidateGenerator):
    """Drafts in the shape of `plan`.

    Args:
        config (`SpeculativeConfig`): The settings; its options are [`ExtrapolationOptions`].
        resources (`nn.Module`): The network. It has what [`DraftEntries`] needs, `target_hidden_states`,
            `shared_modules`, `target_ids` and `target_logits`.
        session (`Session`): The call.

    Attributes:
        plan (`TokenTree` or `DynamicTree`): Shape of the drafts.
        threshold (`float`): Probability that a node's path must exceed for the draft to go on there; 0 for any.
        entries (`DraftEntries`): Keys and values of the text.
    """

    def __init__(self, config: SpeculativeConfig, resources: nn.Module, session: Session):
        super().__init__(config, resources, session)
        self.network: Any = resources
        self.device: torch.device = resources.device
        self.target_hidden_states: tuple[int | str, ...] = resources.target_hidden_states
        self.samples_drafts: bool | None = self.asks_to_sample
        self.plan: TokenTree | DynamicTree = self.plan_drafts()
        self.num_reads: int = self.plan.num_reads
        self.shape: DynamicTree | tuple[Level, ...] = self.plan.levels(self.device)
        self.threshold: float = confidence_threshold(config, session)
        self.num_speculative_tokens: int = self.plan.max_depth
        self.check_sampled_length()
        self.most_committed: int = self.plan.max_depth + 1  # entries of a row that a cycle leaves to be read
        self.entries: DraftEntries | None = None
        self.pending: Commit | None = None  # read by the next draft
        self.hidden: torch.Tensor | None = None  # (R, h): states that the last entries hand on
        self.logits: torch.Tensor | None = None  # (R, U): after them
        self._step: DraftStep | None = None  # that of the last draft, if there was room for one

    def plan_drafts(self) -> TokenTree | DynamicTree:
        """Shape of the drafts of the call; a chain if tokens are sampled."""
        raise NotImplementedError(f"{type(self).__name__} must implement plan_drafts().")

    def make_entries(self, **slots: Any) -> DraftEntries:
        """Slots of the text; takes what [`DraftEntries`] takes beside the network."""
        return DraftEntries(self.network, **slots)

    @property
    def num_draft_nodes(self) -> int:
        return len(self.plan)

    # The text

    def prefill(self, prompt: Prompt) -> None:
        """Reads the entries of the prompt but the last one, whose token is still to come.

        There is an entry where the state of a token and the next token are known.
        """
        known = KnownPrompt(prompt)
        slots = known.slots(self.network, self.config, self.session, self.num_reads + self.most_committed)
        self.entries = self.make_entries(**slots)
        for states, tokens, counts in known.chunks():
            new = self.entries.gather(Entries(tokens, states, counts))
            self.entries.read(new.tokens, self.network.fuse(new.states), new.counts)

    def observe(self, commit: Commit) -> None:
        """Keeps what was committed; the next draft reads it, so that a call that ends here pays nothing."""
        if self.pending is not None:
            self._read(self._take_pending())
        self.pending = commit

    def _take_pending(self) -> Entries | None:
        commit, self.pending = self.pending, None
        if commit is None:
            return None
        return Entries(commit.tokens, commit.hidden_states, commit.counts)

    def _read(self, new: Entries | None) -> None:
        if new is not None:
            self.hidden, self.logits = self.entries.read_last(new)

    def keep_rows(self, keep: list[int]) -> None:
        self.entries.keep_rows(keep)
        if self.pending is not None:
            self.pending = self.pending.of_rows(keep)
        if self.hidden is not None:
            self.hidden, self.logits = select_rows(self.hidden, keep), select_rows(self.logits, keep)

    def join(self, other: AutoregressiveCandidateGenerator, numbers: dict[int, int]) -> None:
        if self.pending is None or other.pending is None or self.entries.joins_read:
            for generator in (self, other):
                generator._read(generator._take_pending())
            self.hidden, self.logits = torch.cat([self.hidden, other.hidden]), torch.cat([self.logits, other.logits])
        else:
            self.pending, self.hidden, self.logits = Commit.side_by_side([self.pending, other.pending]), None, None
        self.entries.join(other.entries)

    def close(self) -> None:
        if self.entries is not None:
            self.entries.close()
        self.pending = self.entries = self.hidden = self.logits = None

    # Drafts

    def propose(self, step: DraftStep) -> DraftTree:
        limits = DepthLimits(torch.tensor(self.draft_depths(step), device="cpu"), self.threshold)
        if limits.deepest <= 0:
            # There will never be room again for the rows that are here.
            self.pending = self._step = None
            return DraftTree.empty(len(step.rows), self.session.device)
        new, self._step = self._take_pending(), step
        if self.samples_drafts:
            return self._sample_chain(new, step, limits)
        masks = self.growing_masks(step, limits.depths.tolist()) if self.may_mask else None
        output = None
        # Masks are made on the host, level by level.
        if masks is None and new is not None and self.entries.graphs is not None:
            output = self._launch(new, limits.depths.tolist(), step.depth)
        plan = self.plan if output is None else self._captured_plan(step.depth)
        if output is None:
            output = self._draft(self.entries, new, self.shape, limits, masks)
        self.hidden, self.logits, nodes, depths = output
        # What is deeper than a row's limit is cut off. Only a threshold makes the host wait for a graph, to learn how
        # much has to be verified.
        depths = depths if self.threshold else limits.depths
        return nodes.draft(plan, depths.tolist(), self.session.device)

    def _draft(
        self,
        entries: DraftEntries,
        new: Entries | None,
        shape: DynamicTree | tuple[Level, ...],
        limits: DepthLimits,
        masks: GrowingMasks | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, DraftNodes, torch.LongTensor]:
        """Reads new entries and grows a draft after them: a cycle, in a graph or without.

        Returns:
            `tuple`: States `(R, h)` and logits `(R, U)` after the last entries, nodes, and depths `(R,)` of the rows.
        """
        hidden, logits = (self.hidden, self.logits) if new is None else entries.read_last(new)
        entries.begin_draft(self.num_reads)
        nodes = grow(shape, entries, hidden, logits, limits, masks)
        return hidden, logits, nodes, limits.depths

    def _sample_chain(self, new: Entries | None, step: DraftStep, limits: DepthLimits) -> DraftTree:
        """Samples the tokens one by one from the network's distributions, processed as the target's are."""
        entries, drawn = self.entries, self._sample_in_a_graph(new, step, limits)
        if drawn is not None:
            return drawn
        if new is not None:
            self.hidden, self.logits = entries.begin_chain(new, self.most_committed, self.num_reads)
        lengths = entries.cache.lengths
        chain = SteeredChain(self.session.sampler, step.rows, step.lengths)
        self._sample(chain, entries, self.hidden, self.logits, limits)
        entries.cache.lengths = lengths
        return chain.draft(limits.depths.tolist())

    def _sample(
        self,
        chain: SteeredChain,
        entries: DraftEntries,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        limits: DepthLimits,
    ) -> None:
        """Samples the tokens of chains after states `(R, h)` and logits `(R, U)`, and reads them as entries."""
        log_probs = hidden.new_zeros((len(hidden), 1), dtype=torch.float32)
        while True:
            scores = chain.scores(self.network.target_logits(logits).to(self.session.device))
            tokens = chain.choose(scores)
            if limits.threshold:
                log_probs = log_probs + chain.probs[-1].gather(1, tokens[:, None]).log().to(self.device)
                limits.stop_low_confidence(log_probs, len(chain.tokens))
            if len(chain.tokens) == limits.deepest:
                break
            hidden, logits = entries.read_next(tokens, hidden, self.most_committed, self.num_reads)

    # Graphs

    def _drawing(self, rows: list[int]) -> CapturedDrawing | None:
        return CapturedDrawing.of(self.session, rows, self.device)

    def _with_keys(self, new: Entries, rows: list[int], before: list[int]) -> Entries:
        """Entries of rows of the call, after `before[r]` committed tokens, from which a graph draws, if it does."""
        return new._replace(keys=self.session.sampler.uniforms.keys(rows, before)) if self.samples_drafts else new

    def _sample_in_a_graph(self, new: Entries | None, step: DraftStep, limits: DepthLimits) -> DraftTree | None:
        """Chains that a graph samples; `None` where there is none to run."""
        if new is None or self.entries.graphs is None or self._drawing(step.rows) is None:
            return None
        before = [length - count for length, count in zip(step.lengths, new.counts)]
        output = self._launch(self._with_keys(new, step.rows, before), limits.depths.tolist(), step.depth)
        if output is None:
            return None
        self.hidden, self.logits, tokens, probs, depths = output
        depths = limits.depths if depths is None else depths
        return DraftTree.chain(tokens, probs=probs).shortened(depths.tolist())

    def _captured_plan(self, depth: int | None) -> TokenTree | DynamicTree:
        """The plan as deep as a graph drafts it where this depth was chosen."""
        return self.plan.up_to(graph_depth(depth, self.plan.max_depth))

    def _launch(self, new: Entries, depths: list[int], depth: int | None) -> Any:
        """The output of `_draft`, or of `_captured_chain`, from a graph; `None` where there is none to run.

        Args:
            new (`Entries`): What it reads first.
            depths (`list[int]`): Largest depth of each row.
            depth (`int`, *optional*): That of [`DraftStep`].
        """
        plan = self.plan if self.samples_drafts else self._captured_plan(depth)
        if not (self.threshold or isinstance(plan, DynamicTree)):
            # It drafts the whole plan.
            depths = [plan.max_depth] * len(depths)
        key, read = self._drawn_by_a_graph() if new.keys else ((), partial(self._captured_draft, plan))
        return self.entries.replay(
            (plan, self.threshold, *key),
            new._replace(limits=depths),
            self.most_committed,
            self.num_reads,
            read,
        )

    def _drawn_by_a_graph(self) -> tuple[tuple[Any, ...], Callable[[DraftEntries, Entries], tuple[Any, ...]]]:
        """Parts of the key of a graph that samples, and what it does: `_captured_chain`."""
        drawing = self._drawing(self._step.rows)
        return drawing.key, partial(self._captured_chain, drawing)

    @property
    def drafts_ahead(self) -> bool:
        if self.may_mask or self.pending is not None or self._step is None:
            return False
        is_graph = not self.samples_drafts or self._drawing(self._step.rows) is not None
        return is_graph and self.entries.runs_graphs and self.entries.gathers_ahead

    def draft_ahead(self, commit: DeviceCommit) -> DraftTree | None:
        new = Entries(commit.tokens, commit.hidden_states, commit.counts)
        new, depths = self._with_keys(new, commit.rows, self._step.lengths), commit.max_draft_tokens
        output = self._launch(new, depths, commit.depth)
        if output is None or self.threshold:
            return None
        if new.keys is None:
            return self._drafted(output, self._captured_plan(commit.depth), depths)
        _, _, tokens, probs, _ = output
        return DraftTree.chain(tokens, probs=probs).shortened(depths)

    def _drafted(self, output: tuple[Any, ...], plan: TokenTree | DynamicTree, depths: list[int]) -> DraftTree:
        """The draft in the output of a graph that does not sample."""
        return output[2].draft(plan, depths, self.session.device)

    def _captured_draft(
        self, plan: TokenTree | DynamicTree, entries: DraftEntries, inputs: Entries
    ) -> tuple[torch.Tensor, torch.Tensor, DraftNodes, torch.LongTensor]:
        return self._draft(entries, inputs, plan.levels(self.device), self._limits_of(inputs, plan))

    def _captured_chain(self, drawing: CapturedDrawing, entries: DraftEntries, inputs: Entries) -> tuple[Any, ...]:
        """Reads new entries and samples chains after them.

        Returns:
            `tuple`: States `(R, h)` and logits `(R, U)` after the last entries, tokens `(R, K)`, their distributions
            `(R, K, V)`, and depths `(R,)` of the rows, where a threshold decides on them.
        """
        limits = self._limits_of(inputs, self.plan)
        chain = drawing.chain(inputs.keys, inputs.counts, self.plan.max_depth)
        hidden, logits = entries.read_last(inputs)
        self._sample(chain, entries, hidden, logits, limits)
        return hidden, logits, *chain.stacked(), limits.depths if self.threshold else None

    def _limits_of(self, inputs: Entries, plan: TokenTree | DynamicTree) -> DepthLimits:
        return DepthLimits(inputs.limits, self.threshold, deepest=plan.max_depth)
