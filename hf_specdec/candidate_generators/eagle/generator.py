"""EAGLE: a decoder layer walks on in the target's hidden states and drafts chains and trees from them.

EAGLE-1 (Li et al. 2024, arXiv:2401.15077) has static trees, EAGLE-2 (arXiv:2406.16858, section 4) grows a tree from
the draft's own confidence, EAGLE-3 (arXiv:2503.01840) has another network. The checkpoint decides the network
([`~models.eagle`]); every network drafts every shape.

The draft reads entries, each a token and the state that the token before it left. Entries with states of the target
are kept; those of drafted nodes, which have the draft's own states, are forgotten at the end of the cycle. The last
kept entry is the anchor's, and its logits propose the first drafted tokens.

On a GPU a cycle is one graph, which reads what was committed and grows the whole draft. Of drawn chains each token is
one, since processors of the user's come in between.

Shapes: R active rows, T entries, F nodes of a level that are read, W candidates of each, C candidates of a whole tree,
S slots of the draft's cache, h hidden size of the draft, U its vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from ...decoding.cache import padded_size
from ...decoding.masks import FULL
from ...drafting.graphs import begin_graphs
from ...drafting.slots import DraftInputs, DraftSlots, Entries, KnownPrompt
from ...drafts import DraftTree, TokenTree, renumbered
from ...drafts.static import MAX_NODES
from ...errors import SpecConfigError
from ...layers.lean import lean_forward
from ...logits.acceptance import best_tokens
from ...protocol import Commit, DraftStep, Prompt, Session
from ...transfers import last_of_each, select_rows, upload
from ...validation import check_bounds, check_draft_sample_method, check_integers
from ..base import CandidateGenerator
from .network import EagleNetwork, fitting_network, load_eagle


# Draft tokens of the default chain.
_CHAIN_LENGTH = 4

# Most rows whose default is a tree, here and by device type: nodes must ride along with the weights.
_TREE_BATCH_SIZE = 4
_TREE_BATCH_SIZES = {"cpu": 0}

# Where the settings name no shape, by device type, drafts end behind nodes as doubtful as this.
_DOUBTS = {"cpu": 0.2}

# Positions of the prompt that one forward reads.
_CHUNK_SIZE = 1024

# Options that say how a dynamic tree is grown, with the smallest and the largest value of each.
_GROWTH_OPTIONS = {"depth": (0, 128), "top_k": (1, 64), "total_tokens": (2, MAX_NODES + 1)}


@dataclass(frozen=True)
class DynamicTree:
    """How EAGLE-2 grows a tree, and how much of it is drafted.

    Args:
        depth (`int`): How often the best nodes of a level are continued.
        top_k (`int`): Continuations of each node, and nodes of a level that are continued.
        total_tokens (`int`): Verified tokens, the anchor included.
    """

    depth: int
    top_k: int
    total_tokens: int

    is_chain = False

    @property
    def max_depth(self) -> int:
        # A deeper node would need more nodes above it than there are.
        return min(self.depth + 1, self.total_tokens - 1)

    def __len__(self) -> int:
        """Most nodes that are drafted."""
        return min(self.total_tokens - 1, self.top_k + (self.max_depth - 1) * self.top_k**2)

    @property
    def num_reads(self) -> int:
        """Most nodes that are continued; many of them need not be drafted."""
        return (self.max_depth - 1) * self.top_k


# Where the settings name nothing, by device type: the published tree needs a device where nodes cost little.
_TREE = DynamicTree(depth=7, top_k=10, total_tokens=60)
_TREES = {"cpu": DynamicTree(depth=4, top_k=4, total_tokens=12)}


@dataclass(frozen=True)
class ExtrapolationOptions:
    """How drafts are grown by networks that read the states of entries and hand on their own.

    Raises:
        SpecConfigError: A value is out of range.
    """

    depth: int | None = field(
        default=None,
        metadata={
            "published": True,
            "help": "For the dynamic tree: how often its best nodes are continued; it is one token deeper. Left out, "
            f"{_TREE.depth}, on a CPU {_TREES['cpu'].depth}.",
        },
    )
    top_k: int | None = field(
        default=None,
        metadata={
            "published": True,
            "help": "For the dynamic tree: continuations of each node, and nodes of a level that are continued. Left "
            f"out, {_TREE.top_k}, on a CPU {_TREES['cpu'].top_k}.",
        },
    )
    total_tokens: int | None = field(
        default=None,
        metadata={
            "published": True,
            "help": "For the dynamic tree: verified tokens, the anchor included, so one more than are drafted. Left "
            f"out, {_TREE.total_tokens}, on a CPU {_TREES['cpu'].total_tokens}.",
        },
    )
    adaptive_threshold: float | None = field(
        default=None,
        metadata={
            "published": True,
            "help": "A row's draft is not continued behind nodes whose probability, along the whole path, is at most "
            "this. 0 always drafts the full depth. Left out, 0; on a CPU, where no shape is asked for, "
            f"{_DOUBTS['cpu']}.",
        },
    )
    draft_sample_method: Literal["greedy", "probabilistic"] | None = field(
        default=None,
        metadata={
            "help": "How draft tokens are chosen when the target samples: `greedy` takes the best ones, "
            "`probabilistic` draws a chain from the draft's distribution. Left out, `greedy`. A greedy target gets "
            "the best tokens always."
        },
    )

    def __post_init__(self):
        check_bounds(self, **_GROWTH_OPTIONS, adaptive_threshold=(0.0, 1.0))
        if self.adaptive_threshold == 1:
            raise SpecConfigError("`adaptive_threshold` must be below 1, got 1: nothing would be continued.")
        check_draft_sample_method(self.draft_sample_method)


@dataclass(frozen=True)
class EagleOptions(ExtrapolationOptions):
    """Options of `spec_method="eagle"` and `spec_method="eagle3"`.

    Raises:
        SpecConfigError: A value is out of range.
    """

    aux_layer_ids: tuple[int, ...] | None = field(
        default=None,
        metadata={
            "published": True,
            "help": "Which states of the target an EAGLE-3 head reads: k is what enters its decoder layer k, the "
            "number of its layers what leaves the last one. Left out, what the checkpoint says.",
        },
    )

    def __post_init__(self):
        super().__post_init__()
        check_integers("aux_layer_ids", self.aux_layer_ids, 0)


class EagleCandidateGenerator(CandidateGenerator):
    """Drafts chains, static trees and dynamic trees.

    Attributes:
        prefers_trees (`bool`): Small batches get a dynamic tree where the settings name nothing.
    """

    options_class = EagleOptions
    default_num_speculative_tokens = _CHAIN_LENGTH
    prefers_trees = True
    loaded_by = ("model", "revision", "subfolder", "cache_dir", "dtype", "device", "quantization", "aux_layer_ids")

    @classmethod
    def load(cls, config, target_model, draft_model: EagleNetwork | None = None) -> EagleNetwork:
        if draft_model is None:
            return load_eagle(config, target_model)
        return fitting_network(draft_model, config, target_model)

    def __init__(self, config, resources: EagleNetwork, session: Session):
        super().__init__(config, resources, session)
        self.network = resources
        self.device = resources.device
        self.target_hidden_states = resources.target_hidden_states
        self.samples_drafts = self.asks_to_sample
        self.plan = self.make_plan()
        self.threshold = self.options.adaptive_threshold
        if self.threshold is None:
            self.threshold = 0.0 if _names_shape(config) else _DOUBTS.get(session.device.type, 0.0)
        self.num_speculative_tokens = self.plan.max_depth
        self.num_reads = self.plan.num_reads if isinstance(self.plan, DynamicTree) else len(self.plan)
        self.check_sampled_length()
        self.entries: DraftEntries | None = None
        self.pending: Commit | None = None  # committed, and not yet read
        self.hidden: torch.Tensor | None = None  # (R, h): what the last entry of each row hands on
        self.logits: torch.Tensor | None = None  # (R, U): behind it

    @property
    def num_draft_nodes(self) -> int:
        return len(self.plan)

    def make_plan(self) -> TokenTree | DynamicTree:
        """What is drafted in the call."""
        length, reason = self.default_num_speculative_tokens, self.chain_only_reason
        return _plan(self.config, self.draft_vocab_size, self.session, reason, length, self.prefers_trees)

    @property
    def draft_vocab_size(self) -> int:
        """Tokens that the draft knows."""
        return self.network.config.draft_vocab_size

    def make_entries(self, **slots) -> DraftEntries:
        """Room for what the draft reads; the arguments are those of [`DraftEntries`]."""
        return DraftEntries(self.network, **slots)

    # What the target has read

    def prefill(self, prompt: Prompt) -> None:
        """Reads the entries of the prompt but the last one, whose token is still to come.

        There is an entry where the state of a token and the next token are known.
        """
        known, network = KnownPrompt(prompt), self.network
        slots = known.slots(self.session.max_length, self.num_reads + self.most_committed)
        graphs = begin_graphs(network, network.shared_modules, self.config, self.session)
        self.entries = self.make_entries(**slots, graphs=graphs)
        for states, tokens, counts in known.chunks(_CHUNK_SIZE):
            new = self.entries.gather(Entries(tokens, states, counts))
            self.entries.read(new.tokens, network.fuse(new.states), new.counts)

    def observe(self, commit: Commit) -> None:
        """Keeps what was committed; the next draft reads it, so that a call that ends here pays nothing."""
        self._read_pending()
        self.pending = commit

    def _take_pending(self) -> Entries | None:
        """What is still to be read."""
        new, self.pending = self.pending, None
        return None if new is None else self.entries.gather(Entries(new.tokens, new.hidden_states, new.counts))

    def _read_pending(self) -> None:
        self._read_new(self._take_pending())

    def _read_new(self, new: Entries | None) -> None:
        if new is not None:
            self.hidden, self.logits = self._read(self.entries, new)

    def _read(self, entries: DraftEntries, new: Entries) -> tuple[torch.Tensor, torch.Tensor]:
        """What the last entry of each row hands on `(R, h)`, and the logits behind it `(R, U)`."""
        hidden, output = entries.read(new.tokens, self._entry_states(new), new.counts)
        return last_of_each(hidden, new.counts), self.network.logits(last_of_each(output, new.counts))

    def _entry_states(self, new: Entries) -> torch.Tensor:
        """What the network takes for entries: the target's states, or what it has handed on itself `(R, T, h)`."""
        return new.states[OWN] if OWN in new.states else self.network.fuse(new.states)

    def keep_rows(self, keep: list[int]) -> None:
        self.entries.keep_rows(keep)
        if self.pending is not None:
            self.pending = self.pending.of_rows(keep)
        if self.hidden is not None:
            self.hidden, self.logits = select_rows(self.hidden, keep), select_rows(self.logits, keep)

    def close(self) -> None:
        if self.entries is not None:
            self.entries.close()
        self.entries = self.pending = self.hidden = self.logits = None

    # Drafting

    def propose(self, step: DraftStep) -> DraftTree:
        limits = RowLimits(self.draft_depths(step), self.threshold)
        if limits.deepest <= 0:
            # There will never be room again.
            self.pending = None
            return DraftTree.empty(len(step.rows), self.session.device)
        new = self._take_pending()
        if self.samples_drafts:
            return self._draw_chain(new, step, limits)
        return self._replay_draft(new, limits) or self._draft(new, limits)

    def _draft(self, new: Entries | None, limits: RowLimits) -> DraftTree:
        self._read_new(new)
        self.entries.begin_draft(self.num_reads)
        grown = self._grow(self.entries, self.hidden, self.logits, limits)
        return self._tree(grown, limits.depths)

    def _draw_chain(self, new: Entries | None, step: DraftStep, limits: RowLimits) -> DraftTree:
        """Tokens drawn from the draft's law, processed as the target's is."""
        sampler, device = self.session.sampler, self.session.device
        read = self._begin_chain(new)
        hidden, logits, lengths = self.hidden, self.logits, self.entries.cache.lengths
        chances = hidden.new_zeros((len(step.rows), 1), dtype=torch.float32)
        positions = [length - 1 for length in step.lengths]
        drafted, laws = [], []
        while True:
            scores = sampler.scores(self.network.target_logits(logits).to(device), step.rows, drafted)
            tokens, law = sampler.draw(scores, step.rows, positions, len(drafted))
            drafted.append(tokens)
            laws.append(law)
            chances = chances + law.gather(1, tokens[:, None]).log().to(self.device)
            limits.end_doubtful(chances, len(drafted))
            if len(drafted) == limits.deepest:
                break
            hidden, logits = read(tokens, hidden)
        self.entries.cache.lengths = lengths
        return DraftTree.chain(torch.stack(drafted, dim=1), limits.depths, torch.stack(laws, dim=1))

    def _begin_chain(self, new: Entries | None) -> Callable:
        """Reads new entries. Returns what reads the next token of a chain.

        It takes tokens `(R,)` and what the entries before them have handed on `(R, h)`, and returns what they hand on
        themselves and the logits behind them `(R, U)`.
        """
        entries = self.entries
        if entries.graphs is not None and new is not None:
            return self._begin_replayed_chain(new)
        self._read_new(new)
        entries.begin_draft(self.num_reads)
        parent = torch.zeros(1, dtype=torch.long, device=self.device)

        def read(tokens: torch.LongTensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden, output = entries.read_nodes(tokens[:, None], hidden[:, None], parent)
            return hidden[:, 0], self.network.logits(output)[:, 0]

        return read

    def _grow(self, entries: DraftEntries, hidden, logits, limits: RowLimits | StaticLimits) -> Grown:
        """The draft behind the last entries.

        Args:
            entries (`DraftEntries`): Ready for a draft.
            hidden (`torch.Tensor` of shape `(R, h)`): What the last entries hand on.
            logits (`torch.Tensor` of shape `(R, U)`): Behind them.
            limits (`RowLimits` or `StaticLimits`): How deep each row is drafted.
        """
        grow = self._grow_dynamic if isinstance(self.plan, DynamicTree) else self._grow_static
        return grow(entries, hidden[:, None], logits[:, None], limits)

    def _grow_static(self, entries, hidden, logits, limits) -> Grown:
        """The candidates of the given ranks; only nodes that have children are read."""
        chances = hidden.new_zeros(hidden.shape[:2], dtype=torch.float32) if self.threshold else None
        drafted = []
        for depth, level in enumerate(self.plan.up_to(limits.deepest).levels(self.device), start=1):
            tokens, chances = self._candidates(logits, level.width, chances)
            drafted.append(tokens[:, level.picks])
            if depth < limits.deepest and chances is not None:
                chances = chances[:, level.read_picks]
                limits.end_doubtful(chances, depth)
            if depth == limits.deepest:
                break
            parents = level.read_parents
            hidden, output = entries.read_nodes(tokens[:, level.read_picks], _of(hidden, parents), parents)
            logits = self.network.logits(output)
        return Grown(torch.cat(drafted, dim=1))

    def _grow_dynamic(self, entries, hidden, logits, limits) -> Grown:
        """Level by level the best nodes are continued, and the best of all that were looked at are drafted."""
        width = self.plan.top_k
        chances = hidden.new_zeros(hidden.shape[:2], dtype=torch.float32)
        # The anchor, and the nodes that were read, each with its place among the candidates.
        read = [torch.full_like(chances, -1, dtype=torch.long)]
        grown: list[tuple[torch.Tensor, torch.Tensor]] = []
        sizes = [0]
        while True:
            tokens, chances = self._candidates(logits, width, chances)
            grown.append((tokens, chances))
            sizes.append(sizes[-1] + tokens.shape[1])
            # Stable: of equally probable nodes the first one counts, so that a parent comes before its child.
            chances, order = chances.sort(dim=1, descending=True, stable=True)
            if len(grown) < limits.deepest:
                limits.end_doubtful(chances, len(grown))
            if len(grown) == limits.deepest:
                break
            count = width if entries.rows.is_static else self._num_fruitful(grown, chances[:, :width])
            if not count:
                break
            best, chances = order[:, :count], chances[:, :count]
            parents = best // width
            read.append(best + sizes[-2])
            hidden, output = entries.read_nodes(tokens.gather(1, best), _of(hidden, parents), parents)
            logits = self.network.logits(output)
        tokens, chances, read = (torch.cat(parts, dim=1) for parts in (*zip(*grown), read))
        return self._best_nodes(tokens, limits.within(chances, sizes), read, sizes)

    def _num_fruitful(self, grown: list[tuple[torch.Tensor, torch.Tensor]], chances: torch.Tensor) -> int:
        """How many of the nodes that could be continued next are; what is drafted does not depend on it.

        A child is never more probable than its parent. So it can be drafted only if its parent is among the most
        probable of all candidates so far, one place of the draft being the child's own.

        Args:
            grown (`list[tuple]`): Tokens and log-probabilities of the candidates of each level.
            chances (`torch.FloatTensor` of shape `(R, W)`): Log-probabilities of the nodes, in decreasing order.
        """
        places = self.plan.total_tokens - 2
        found = torch.cat([values for _, values in grown], dim=1)
        # Elsewhere asking costs more than reading the nodes.
        if self.device.type != "cpu" or found.shape[1] <= places:
            return chances.shape[1]
        least = found.topk(places, dim=1).values[:, -1:]
        return int((chances >= least).sum(1).max())

    def _best_nodes(self, tokens, chances, read, sizes: list[int]) -> Grown:
        """The most probable candidates of each row.

        Args:
            tokens (`torch.LongTensor` of shape `(R, C)`): The candidates, level by level.
            chances (`torch.FloatTensor` of shape `(R, C)`): Log-probability of the path to each, -inf where the row
                has no room for it.
            read (`torch.LongTensor` of shape `(R, C / W)`): What they continue, W candidates after the other: places
                among the candidates, -1 for the anchor.
            sizes (`list[int]`): Candidates of the first 0, 1, ... levels together.
        """
        count = min(sizes[-1], self.plan.total_tokens - 1)
        order = chances.sort(dim=1, descending=True, stable=True).indices
        chosen = order[:, :count].sort(dim=1).values
        parents = renumbered(read.gather(1, chosen // self.plan.top_k), chosen, tokens.shape[1])
        return Grown(tokens.gather(1, chosen), parents, sizes, chances.gather(1, chosen))

    def _tree(self, grown: Grown, limits: list[int]) -> DraftTree:
        """What was grown, as far as each row may draft."""
        device = self.session.device
        tokens, parents, sizes, chances = grown
        if sizes is None:
            plan = self.plan.up_to(max(limits))
            return DraftTree.of_shape(plan, tokens[:, : len(plan)].to(device), limits)
        deepest = len(sizes) - 1
        counts = [min(sizes[min(limit, deepest)], self.plan.total_tokens - 1) for limit in limits]
        tokens, parents, chances = (values[:, : max(counts)].to(device) for values in (tokens, parents, chances))
        return DraftTree(tokens, parents, counts, chances=chances)

    def _candidates(self, logits: torch.Tensor, width: int, chances: torch.Tensor | None):
        """The best continuations of each node.

        Args:
            logits (`torch.Tensor` of shape `(R, F, U)`): Behind the nodes.
            width (`int`): W.
            chances (`torch.FloatTensor` of shape `(R, F)`, *optional*): Log-probability of the path to each node.

        Returns:
            `tuple`: The target's ids `(R, F * W)`, and the log-probability of the path to each, if wanted.
        """
        if width == 1 and chances is None:
            return self.network.target_ids(best_tokens(logits)), None
        if chances is not None:
            logits = F.log_softmax(logits, -1, dtype=torch.float32)
        best = logits.topk(width)
        tokens = self.network.target_ids(best.indices).flatten(1)
        return tokens, None if chances is None else (chances[..., None] + best.values).flatten(1)

    # Drafting in graphs

    def _begin_replayed_chain(self, new: Entries) -> Callable:
        """What `_begin_chain` does, with a graph for each token, which is an entry that is taken back later."""
        self.hidden, self.logits = self._replay_read(new, self.most_committed)
        return lambda tokens, hidden: self._replay_read(
            Entries(tokens[:, None], {OWN: hidden[:, None]}, [1] * len(tokens)), 1
        )

    def _replay_read(self, new: Entries, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What `_read` returns, from a graph if there is one."""
        output = self.entries.replay(("read",), new, width, self.num_reads, new.counts, self._read_statically)
        if output is None:
            return self._read(self.entries, new)
        hidden, logits = output
        return hidden[: len(new.tokens)], logits[: len(new.tokens)]

    def _read_statically(self, inputs: DraftInputs, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._read(self.entries.static(inputs, columns), inputs)

    def _replay_draft(self, new: Entries | None, limits: RowLimits) -> DraftTree | None:
        """The cycle as one graph.

        The graph drafts as deep as its size is, and what is deeper than a row's limit is cut off. Only a threshold
        lets the host wait for it, to learn how much has to be verified.
        """
        if self.entries.graphs is None or new is None:
            return None
        depth, num_rows = self.static_depth(limits.deepest), len(limits.depths)
        output = self.entries.replay(
            (self.plan, depth, self.threshold),
            new,
            self.most_committed,
            self.num_reads,
            limits.depths,
            partial(self._draft_statically, depth),
            None if isinstance(self.plan, DynamicTree) else self.plan.up_to(depth).levels(self.device),
        )
        if output is None:
            return None
        self.hidden, self.logits, grown, depths = output
        self.hidden, self.logits = self.hidden[:num_rows], self.logits[:num_rows]
        depths = depths[:num_rows].tolist() if self.threshold else limits.depths
        return self._tree(grown.of_rows(num_rows), depths)

    def _draft_statically(self, depth: int, inputs: DraftInputs, columns: int):
        entries, limits = self.entries.static(inputs, columns), StaticLimits(inputs.limits, depth, self.threshold)
        hidden, logits = self._read(entries, inputs)
        entries.begin_draft(self.num_reads)
        return hidden, logits, self._grow(entries, hidden, logits, limits), limits.depths

    def static_depth(self, deepest: int) -> int:
        """How deep a graph drafts that serves limits of up to `deepest`."""
        return min(padded_size(deepest), self.plan.max_depth)

    @property
    def most_committed(self) -> int:
        """Most entries of a row that a cycle leaves to be read."""
        return self.plan.max_depth + 1


# The key of what the draft itself has handed on, in the place of the target's states.
OWN = "own"


class Grown(NamedTuple):
    """A draft as deep as it was grown; rows may have room for less.

    Attributes:
        tokens (`torch.LongTensor` of shape `(R, N)`): Its nodes' tokens.
        parents (`torch.LongTensor` of shape `(R, N)`, *optional*): Their parents, of a dynamic tree.
        sizes (`list[int]`, *optional*): How many nodes of it are at most 0, 1, ... deep, if so many are drafted.
        chances (`torch.FloatTensor` of shape `(R, N)`, *optional*): Log-probability of the path to each node.
    """

    tokens: torch.LongTensor
    parents: torch.LongTensor | None = None
    sizes: list[int] | None = None
    chances: torch.FloatTensor | None = None

    def of_rows(self, count: int) -> Grown:
        if self.parents is None:
            return Grown(self.tokens[:count])
        return Grown(self.tokens[:count], self.parents[:count], self.sizes, self.chances[:count])


class RowLimits:
    """How deep each row is drafted.

    Args:
        depths (`list[int]`): At most so deep.
        threshold (`float`): Probability that a node must exceed to be continued; 0 for any.
    """

    def __init__(self, depths: list[int], threshold: float):
        self.depths, self.threshold = depths, threshold

    @property
    def deepest(self) -> int:
        return max(self.depths)

    def end_doubtful(self, chances: torch.FloatTensor, depth: int) -> None:
        """Ends rows at `depth` where no node that would be continued is likely enough.

        Args:
            chances (`torch.FloatTensor` of shape `(R, F)`): Log-probability of the path to each of these nodes.
        """
        if not self.threshold:
            return
        # Waits for the device: what is not continued need not be launched.
        likely = (chances.amax(1) > math.log(self.threshold)).tolist()
        self.depths = [limit if is_likely else min(limit, depth) for limit, is_likely in zip(self.depths, likely)]

    def within(self, chances: torch.FloatTensor, sizes: list[int]) -> torch.FloatTensor:
        """The log-probabilities `(R, C)` of candidates, -inf for those that are too deep for their row.

        Args:
            sizes (`list[int]`): Candidates of the first 0, 1, ... levels together.
        """
        ends = [sizes[min(depth, len(sizes) - 1)] for depth in self.depths]
        if min(ends) == max(ends):
            return chances
        return _cut(chances, upload(ends, chances.device))


class StaticLimits:
    """The same for a capture, in a tensor; the draft is as deep as the graph, whatever the rows' limits are.

    Args:
        depths (`torch.LongTensor` of shape `(R,)`): At most so deep.
        deepest (`int`): The depth of the graph.
        threshold (`float`): As for [`RowLimits`].
    """

    def __init__(self, depths: torch.LongTensor, deepest: int, threshold: float):
        self.depths, self.deepest, self.threshold = depths, deepest, threshold

    def end_doubtful(self, chances: torch.FloatTensor, depth: int) -> None:
        if self.threshold:
            likely = chances.amax(1) > math.log(self.threshold)
            self.depths = torch.where(likely, self.depths, self.depths.clamp(max=depth))

    def within(self, chances: torch.FloatTensor, sizes: list[int]) -> torch.FloatTensor:
        ends = torch.zeros_like(self.depths)
        for depth, (before, size) in enumerate(pairwise(sizes), start=1):
            ends = ends + (size - before) * (self.depths >= depth)
        return _cut(chances, ends)


def _cut(chances: torch.FloatTensor, ends: torch.LongTensor) -> torch.FloatTensor:
    places = torch.arange(chances.shape[1], device=chances.device)
    return chances.masked_fill(places >= ends[:, None], -math.inf)


class DraftEntries(DraftSlots):
    """The draft's keys and values: kept entries of each row, and behind them the nodes of the current draft.

    Args:
        network (`EagleNetwork`): The draft.
        starts, offsets, capacity, options: As for [`DraftSlots`].

    Attributes:
        num_read (`int`): Nodes of the current draft that have been read.
    """

    num_read = 0

    def __init__(self, network: EagleNetwork, starts: list[int], offsets: list[int], capacity: int, **options):
        super().__init__(network, starts, offsets, capacity, **options)
        self.dtype, self.span = network.dtype, network.span
        self._forward = lean_forward(network, max(offsets))

    def static(self, inputs: DraftInputs, columns: int) -> DraftEntries:
        static = super().static(inputs, columns)
        # Calls are not launched again, and the lean forward has a table that ends with this call.
        static._forward = self.network
        return static

    def gather(self, new: Entries) -> Entries:
        """What has to be read when there are new entries: these."""
        return new

    def read(self, tokens: torch.LongTensor, hidden: torch.Tensor, counts: list[int] | torch.LongTensor):
        """Reads entries behind those of each row and keeps the first `counts[r]` of them.

        Args:
            tokens (`torch.LongTensor` of shape `(R, T)`): Tokens, padded on the right.
            hidden (`torch.Tensor` of shape `(R, T, h)`): States.

        Returns:
            Both outputs of the network, of shape `(R, T, h)`.
        """
        count = tokens.shape[1]
        plan = self.rows.plan_write(count)
        mask = self._mask_behind(count, plan.columns)
        positions = self.rows.positions + torch.arange(count, device=self.device)
        outputs = self._forward(tokens.to(self.device), hidden, positions, mask, self.cache)
        self.rows.commit(counts)
        return outputs

    def begin_draft(self, num_nodes: int) -> None:
        """Prepares for a draft of which at most `num_nodes` nodes are read."""
        ends, columns = self.rows.ends, self.rows.columns(num_nodes)
        # A node sees what its parent sees, and itself. At first, that is what the last entry of each row sees.
        self._mask = self._mask_behind(1, columns, back=1)[:, 0]
        self._slots = ends + torch.arange(num_nodes, device=self.device)
        self._keys = torch.arange(columns, device=self.device).expand(len(ends), -1)
        self._ends, self._positions = ends, self.rows.positions
        self._depth = self.num_read = 0

    def read_nodes(self, tokens: torch.LongTensor, hidden: torch.Tensor, parents: torch.LongTensor):
        """Reads the next level of the draft.

        Args:
            tokens (`torch.LongTensor` of shape `(R, F)`): The nodes' tokens.
            hidden (`torch.Tensor` of shape `(R, F, h)`): What their parents handed on.
            parents (`torch.LongTensor` of shape `(F,)` or `(R, F)`): Which nodes of the level before these are; of
                the first level, the anchor.

        Returns:
            Both outputs of the network, of shape `(R, F, h)`.
        """
        first, self.num_read = self.num_read, self.num_read + tokens.shape[1]
        plan = self.rows.plan_write(tokens.shape[1], ahead=first)
        self._mask = _of(self._mask, parents)
        slots = self._slots[:, first : self.num_read]
        self._mask.scatter_(2, slots[..., None].expand(len(self._mask), -1, 1), 0.0)
        if self.span != FULL:
            self._hide_distant(slots)
        positions, self._depth = self._positions + self._depth, self._depth + 1
        mask = self._mask[:, None, :, : plan.columns]
        return self._forward(tokens.to(self.device), hidden, positions, mask, self.cache)

    def _hide_distant(self, slots: torch.LongTensor) -> None:
        """Takes what lies outside of the draft's window from the nodes in these slots; they have equal positions."""
        query = self._ends + self._depth
        self._keys = self._keys.scatter(1, slots, query.expand_as(slots))
        hidden = self.span.hidden(query, self._keys)
        self._mask.masked_fill_(hidden[:, None], torch.finfo(self._mask.dtype).min)

    def _mask_behind(self, count: int, columns: int, back: int = 0) -> torch.Tensor:
        """Additive mask `(R | 1, 1, count, columns)` of entries in `count` slots from `back` before each row's end"""
        lowest = torch.finfo(self.dtype).min
        mask = torch.zeros((1, 1, count, columns), dtype=self.dtype, device=self.device)
        if self.span == FULL and self.rows.is_uniform:
            first = self.cache.lengths[0] - back
            mask[..., first:] = torch.full_like(mask[..., first:], lowest).triu_(1)
            return mask
        own = (self.rows.ends - back)[..., None] + torch.arange(count, device=self.device)[:, None]
        slots = torch.arange(columns, device=self.device)
        # Padding sees itself: something without any weight would be no number.
        hidden = (slots > own) | ((slots < self.rows.first_slots[..., None]) & (slots != own))
        distant = self.span.hidden(own, slots)
        return torch.where(hidden if distant is None else hidden | distant, lowest, mask[0])[:, None]


def _of(values: torch.Tensor, nodes: torch.LongTensor) -> torch.Tensor:
    """Of each row's values `(R | 1, F', X)` those of the nodes `(F,)` or `(R, F)`, as a new tensor `(R | 1, F, X)`."""
    if nodes.dim() == 1:
        return values.index_select(1, nodes)
    values = values.expand(len(nodes), -1, -1)
    return values.gather(1, nodes[..., None].expand(-1, -1, values.shape[-1]))


def _plan(
    config, vocab_size: int, session: Session, chain_only_reason: str | None, chain_length: int, prefers_trees: bool
) -> TokenTree | DynamicTree:
    """What is drafted in a call: a static tree, chains among them, or a dynamic one.

    Args:
        config (`SpeculativeConfig`): The settings.
        vocab_size (`int`): Tokens that the draft knows.
        session (`Session`): The call.
        chain_only_reason (`str`, *optional*): Why it can only have chains.
        chain_length (`int`): Of the chain that is drafted where the settings name nothing.
        prefers_trees (`bool`): A small batch gets a tree then.

    Raises:
        SpecConfigError: Settings contradict each other, or ask for more candidates than there are tokens.
    """
    paths, length = config.speculative_token_tree, config.num_speculative_tokens
    growth = next((name for name in _GROWTH_OPTIONS if getattr(config.options, name) is not None), None)
    if growth and (paths or length):
        name, shape = ("speculative_token_tree", "a static tree") if paths else ("num_speculative_tokens", "a chain")
        raise SpecConfigError(f"`{name}` asks for {shape}, and `{growth}` is about a dynamic one. Leave one out.")
    if paths:
        plan = _static_tree(paths, vocab_size)
    elif length or not (growth or (prefers_trees and _is_small(session))):
        return TokenTree.chain(length or chain_length)
    else:
        plan = _dynamic_tree(config.options, vocab_size, session.device)
    if not chain_only_reason or plan.is_chain:
        return plan
    session.notes.append(f"chains instead of trees: {chain_only_reason}")
    return TokenTree.chain(plan.max_depth if paths or growth else chain_length)


def _names_shape(config) -> bool:
    """Whether the settings say what is drafted."""
    growth = any(getattr(config.options, name) is not None for name in _GROWTH_OPTIONS)
    return bool(growth or config.speculative_token_tree or config.num_speculative_tokens)


def _is_small(session: Session) -> bool:
    """Whether there are so few rows that trees are the default."""
    return session.batch_size <= _TREE_BATCH_SIZES.get(session.device.type, _TREE_BATCH_SIZE)


def _static_tree(paths: tuple[tuple[int, ...], ...], vocab_size: int) -> TokenTree:
    tree = TokenTree(paths)
    if max(tree.widths) > vocab_size:
        raise SpecConfigError(
            f"`speculative_token_tree` has the rank {max(tree.widths) - 1}, and the draft knows {vocab_size} tokens. "
            "Pass a narrower tree."
        )
    return tree


def _dynamic_tree(options: ExtrapolationOptions, vocab_size: int, device: torch.device) -> TokenTree | DynamicTree:
    default = _TREES.get(device.type, _TREE)
    given = {name: getattr(options, name) for name in _GROWTH_OPTIONS}
    depth, top_k, total_tokens = (getattr(default, name) if value is None else value for name, value in given.items())
    tree = DynamicTree(depth, min(top_k, vocab_size), total_tokens)
    return TokenTree.chain(tree.max_depth) if tree.top_k == 1 else tree
