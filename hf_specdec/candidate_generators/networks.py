"""Methods whose drafts are made by a network: one function drafts, and everything around it is here.

    class Followers(NetworkGenerator):
        target_hidden_states = ("last",)

        def shape(self) -> TokenTree:                          # of all drafts of the call
            return TokenTree.chain(self.config.fixed_length or 4)

        def draft(self, state, new, limits, draw) -> DraftNodes:
            hidden, tokens = new.last(new.states["last"]), new.last(new.tokens)
            return grow(self.plan, self.step, hidden, self.network(hidden, tokens), limits, draw)

`draft` is a function of its arguments and of what is constant in a call. It runs eagerly on a CPU. On a GPU it is
recorded in a graph, which is launched before the host knows the verdict on the draft before. It gets

    state     what is kept of the rows ([`NetworkState`]): `slots` of keys and values, which `make_slots` has made, and
              `kept` tensors, which it may replace
    new       what was committed since ([`Entries`]): tokens, and the states of the target from which they were
              predicted. A network without slots gets the last token of each row alone, the anchor
    limits    how deep to draft ([`DepthLimits`])
    draw      how tokens are chosen from logits ([`Draw`]): the best ones, those that a grammar allows, or sampled ones

and returns tensors, [`DraftNodes`]. [`~drafting.growth.grow`] makes chains and trees of all shapes from a step of the
network, [`~drafting.growth.Positions`] from logits of a whole block.

Shapes: R active rows, h hidden size of the network, U its vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch

from ..drafting.draw import DepthLimits, Draw, MaskedDraw, SteeredDraw
from ..drafting.growth import DraftNodes, DynamicTree, draft_chain, grow
from ..drafting.runner import Runner, graph_depth
from ..drafting.shape import confidence_threshold
from ..drafting.slots import DRAFT_STATE, DraftEntries, DraftSlots, KnownPrompt
from ..drafting.state import Entries, NetworkState
from ..drafts import DraftTree, TokenTree
from ..errors import SpecConfigError
from ..logits.randomness import NODES_PER_ANCHOR
from ..protocol import Commit, DeviceCommit, DraftStep, Prompt, Session
from ..settings import SpeculativeConfig
from ..target.graphs import CallGraphs, Variant, graphs_for
from ..target.model import SlotModel
from .base import CandidateGenerator


class NetworkGenerator(CandidateGenerator):
    """Drafts with a network.

    Attributes:
        network (`nn.Module`, *optional*): What `network(resources)` finds. Where its tokens are not the target's it
            has `token_ids` and `target_logits`, see [`DraftNetwork`].
        plan (`TokenTree` or `DynamicTree`): Shape of the drafts.
        threshold (`float`): Probability that a node's path must exceed for the draft to go on there; 0 for any.
        state (`NetworkState`): What is kept of the rows.
        has_steps (`bool`): `read` is implemented.
    """

    steers_chains: bool = False  # the call's processors change logits of chains also where the best are drafted
    drafts_whole: bool = False  # a graph drafts in full depth, whatever depth was chosen
    has_steps: bool = False
    reads_tokens: ClassVar[bool] = True  # a draft depends on the committed tokens, not on states alone
    rates_tokens: ClassVar[bool] = False  # the threshold is about each token by itself
    threshold: float = 0.0

    def __init__(self, config: SpeculativeConfig, resources: Any, session: Session):
        super().__init__(config, resources, session)
        self.network: Any = type(self).network(resources)
        self.device: torch.device = session.device if self.network is None else next(self.network.parameters()).device
        self.samples_drafts: bool | None = self.asks_to_sample
        self.token_ids: torch.LongTensor | None = getattr(self.network, "token_ids", None)
        self.target_logits: Callable | None = getattr(self.network, "target_logits", None)
        self.plan: TokenTree | DynamicTree = self.shape()
        self.num_speculative_tokens: int = self.plan.max_depth
        if self.samples_drafts and self.num_speculative_tokens > NODES_PER_ANCHOR:
            raise SpecConfigError(
                f"`num_speculative_tokens` must be at most {NODES_PER_ANCHOR} where draft tokens are sampled, got "
                f"{self.num_speculative_tokens}. Draft fewer, or set draft_sample_method='greedy'."
            )
        self.state: NetworkState = NetworkState()
        self.runner: Runner | None = None
        self._step: DraftStep | None = None  # that of the last draft, if there was room for one

    # What a method says

    def shape(self) -> TokenTree | DynamicTree:
        """Shape of the drafts of the call; by default, and if tokens are sampled, a chain."""
        return TokenTree.chain(self.config.fixed_length or self.default_num_speculative_tokens)

    def make_slots(self, **places: Any) -> DraftSlots | None:
        """Slots of the text, with the arguments of [`DraftSlots`] beside the network; `None` for none."""

    def take_in(self, state: NetworkState, new: Entries) -> None:
        """Reads into the slots what is not drafted after."""

    def draft(self, state: NetworkState, new: Entries, limits: DepthLimits, draw: Draw) -> DraftNodes:
        """Drafts after what is new of the rows."""
        raise NotImplementedError(f"{type(self).__name__} must implement draft().")

    def read(self, state: NetworkState, new: Entries, stage: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads and keeps entries; states `(R, h)` that the last ones hand on, and logits `(R, U)` after them.

        A network that can do it for its own tokens, with states `DRAFT_STATE`, has a graph of each token of a chain
        where processors look at each of them.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement read(), or say has_steps = False.")

    def stage(self, depth: int) -> int:
        """Which stage of the network reads a drafted token of that depth, 0 being the anchor's."""
        return 0

    def can_replay(self, new: Entries) -> bool:
        """Tells whether a graph can read these entries, as far as the method knows."""
        return True

    @property
    def graph_key(self) -> tuple[Any, ...]:
        """Whatever is built into graphs beside the network, the depth of drafts and the draw."""
        return (self.plan,)

    @property
    def shared_modules(self) -> tuple[torch.nn.Module, ...]:
        """Modules of the target that the network goes through."""
        return getattr(self.network, "shared_modules", ())

    def make_graphs(self) -> CallGraphs | None:
        """The graphs of the network in this call; `None` where its device has none."""
        return graphs_for(self.network, {"enforce_eager=True": self.config.enforce_eager}, self.shared_modules)

    def drafted(self, nodes: DraftNodes, limits: list[int]) -> DraftTree:
        """The draft of rows with these limits."""
        return nodes.draft(self.plan, limits, self.session.device)

    @property
    def num_draft_nodes(self) -> int:
        return len(self.plan)

    # The text

    @property
    def num_ahead(self) -> int:
        """Most slots that a draft writes after those of what is new."""
        return self.plan.num_reads

    @property
    def _most_new(self) -> int:
        """Entries of a row that a cycle leaves to be read."""
        return 1 if self.state.slots is None else self.num_speculative_tokens + 1

    def prefill(self, prompt: Prompt) -> None:
        """Reads the entries of the prompt but the last one, whose token is still to come.

        There is an entry where the state of a token and the next token are known.
        """
        self.runner = Runner.of(self.make_graphs(), self.device, self.session)
        if not prompt.hidden_states:
            return
        text = KnownPrompt(prompt)
        places = text.places(self.session.max_length, self.num_ahead + self.num_speculative_tokens + 1)
        self.state.slots = self.make_slots(**places, store=None if self.runner is None else self.runner.graphs.store)
        if self.state.slots is not None:
            for new in text.chunks():
                self.take_in(self.state, new)

    def observe(self, commit: Commit) -> None:
        """Keeps what was committed; the next draft reads it, so that a call that ends here pays nothing."""
        before, self.state.pending = self.state.pending, commit
        if before is not None and self.state.slots is not None:
            self.take_in(self.state, Entries(before.tokens, before.hidden_states, before.counts))

    def close(self) -> None:
        super().close()
        if self.runner is not None:
            self.runner.graphs.close()

    # Drafts

    def propose(self, step: DraftStep) -> DraftTree:
        is_steered, depths = self._is_steered(step.rows), self.draft_depths(step)
        commit, self.state.pending = self.state.pending, None
        if max(depths) <= 0 or commit is None:
            # There will never be room again for the rows that are here.
            self._step = None
            return DraftTree.empty(len(step.rows), self.session.device)
        self._step = step
        masks = None if is_steered else self.growing_masks(step, depths)
        state, new = self.lent_state(commit), self._new(commit, step.anchor_tokens)
        nodes = None
        if masks is None and self._draws_in_graphs(step.rows) and self.can_replay(new):
            before = [length - count for length, count in zip(step.lengths, new.counts)]
            nodes = self._replay(state, new, step.rows, before, depths, step.depth)
        if nodes is None:
            limits = DepthLimits(torch.tensor(depths, device="cpu"), self.threshold, by_token=self.rates_tokens)
            if is_steered:
                nodes = self._draft_steered(state, new, step, limits)
            else:
                draw = Draw(self.token_ids) if masks is None else MaskedDraw(masks, self.token_ids)
                nodes = self.draft(state, new, limits, draw)
        return self.drafted(nodes, depths)

    def lent_state(self, commit: Commit | DeviceCommit) -> NetworkState:
        """What a draft after a commit goes on from: what is kept of the rows, or lent by the target."""
        return self.state

    def _new(self, commit: Commit | DeviceCommit, anchors: torch.LongTensor) -> Entries:
        """What the network reads of a commit whose last tokens are the anchors `(R,)`."""
        if self.state.slots is not None:
            return Entries(commit.tokens, commit.hidden_states, commit.counts)
        states = {key: commit.anchor_states(key)[:, None].to(self.device) for key in commit.hidden_states}
        return Entries(anchors[:, None].to(self.device), states, commit.counts)

    def _is_steered(self, rows: list[int]) -> bool:
        """Tells whether the host chooses tokens by what processors leave of logits, at random or the best."""
        sampler = self.session.sampler
        if not (self.steers_chains and self.plan.is_chain) or self.samples_drafts or sampler is None:
            return bool(self.samples_drafts)
        return sampler.in_graphs(rows) is None

    def _draft_steered(self, state: NetworkState, new: Entries, step: DraftStep, limits: DepthLimits) -> DraftNodes:
        """Chooses the tokens of chains one by one, after the call's processors, on the host."""
        sampler, rows = self.session.sampler, step.rows
        uniforms = sampler.numbers(rows, step.lengths, self.plan.max_depth) if self.samples_drafts else None
        how = self.target_logits, self.session.device, sampler.reads_tokens(rows)
        draw = SteeredDraw(partial(sampler.scores, rows), uniforms, *how)
        if not (self.has_steps and self.runner is not None and self.runner.has_graphs):
            return self.draft(state, new, limits, draw)
        depth = 0

        def read(new: Entries, width: int) -> tuple[torch.Tensor, torch.Tensor]:
            nonlocal depth
            stage, depth = self.stage(depth), depth + 1
            run, key = partial(self.read, stage=stage), ("step", stage, *self.graph_key)
            return self.runner.replay(run, state, new, key, width, self.plan.num_reads) or run(state, new)

        def read_node(tokens: torch.LongTensor, hidden: torch.Tensor, _: Any) -> tuple[torch.Tensor, torch.Tensor]:
            node = Entries(tokens.to(self.device), {DRAFT_STATE: hidden}, [1] * len(tokens))
            hidden, logits = read(node, 1)
            return hidden[:, None], logits[:, None]

        hidden, logits = read(new, self._most_new)
        lengths = None if state.slots is None else list(state.slots.cache.lengths)
        nodes = grow(self.plan, read_node, hidden, logits, limits, draw)
        if state.slots is not None:
            # The tokens of the chain were read as if they had been committed.
            state.slots.cache.lengths = lengths
        return nodes

    # Graphs

    def _draws_in_graphs(self, rows: list[int]) -> bool:
        """Tells whether a graph can choose the tokens of these rows."""
        if self.runner is None or not self.runner.has_graphs:
            return False
        if self.samples_drafts:
            return self.device == self.session.device and self.session.sampler.in_graphs(rows) is not None
        return not self._is_steered(rows)

    def _replay(
        self,
        state: NetworkState,
        new: Entries,
        rows: list[int],
        before: list[int],  # tokens of the rows in front of these entries
        depths: list[int],
        chosen: int | None,  # that of [`DraftStep`]
    ) -> DraftNodes | None:
        """What a graph drafts after new entries of rows, `None` where there is none to run."""
        plan, sampler, deepest, key = self.plan, self.session.sampler, self.plan.max_depth, self.graph_key
        stack = sampler.in_graphs(rows) if self.samples_drafts else None
        if stack is not None:
            key = (*key, Variant(stack.signature), sampler.vocab_size)
            new = new._replace(keys=sampler.uniforms.keys(rows, before))
        elif isinstance(plan, DynamicTree) and plan.cuts_chosen:
            # The best nodes of a depth are not the first ones of those to a larger depth.
            deepest = max(depths)
        elif not self.drafts_whole:
            deepest = graph_depth(chosen, deepest)
        if self.threshold or (isinstance(plan, DynamicTree) and not plan.cuts_chosen):
            new = new._replace(limits=depths)

        def read(state: NetworkState, new: Entries) -> DraftNodes:
            draw = Draw(self.token_ids)
            if stack is not None:
                uniforms = new.keys.drafts_after(new.counts, deepest)
                draw = SteeredDraw(partial(sampler.scores_by, stack), uniforms, self.target_logits)
            limits = DepthLimits(new.limits, self.threshold, deepest, self.rates_tokens)
            return self.draft(state, new, limits, draw)

        if not self.reads_tokens:
            new = new._replace(tokens=None)
        key = (deepest, self.threshold, *key)
        return self.runner.replay(read, state, new, key, self._most_new, self.num_ahead)

    @property
    def drafts_ahead(self) -> bool:
        if self._step is None or self.state.pending is not None or self.may_mask:
            return False
        return self._draws_in_graphs(self._step.rows)

    def draft_ahead(self, commit: DeviceCommit) -> DraftTree | None:
        limits, state, new = commit.max_draft_tokens, self.lent_state(commit), self._new(commit, commit.anchors)
        nodes = self._replay(state, new, commit.rows, self._step.lengths, limits, commit.depth)
        # How deep rows are by their confidence the host does not know.
        return None if nodes is None or self.threshold else self.drafted(nodes, limits)


class AutoregressiveCandidateGenerator(NetworkGenerator):
    """Drafts with a network that goes on from a state of its own, one token after the other.

    The network reads entries, see [`DraftEntries`], first those of the text, whose states are the target's, then those
    of its own draft. Drafts are chains, static trees and dynamic trees; the options are [`ExtrapolationOptions`].
    """

    has_steps = True

    def __init__(self, config: SpeculativeConfig, resources: torch.nn.Module, session: Session):
        self.target_hidden_states: tuple[int | str, ...] = resources.target_hidden_states
        super().__init__(config, resources, session)
        self.threshold: float = confidence_threshold(config, session)

    def make_slots(self, **places: Any) -> DraftEntries:
        return DraftEntries(self.network, num_nodes=self.plan.num_reads, **places)

    def take_in(self, state: NetworkState, new: Entries) -> None:
        state.slots.read(new)

    def read(self, state: NetworkState, new: Entries, stage: int) -> tuple[torch.Tensor, torch.Tensor]:
        return state.slots.read(new, predicts=True)

    def logits_at_once(self, state: NetworkState, new: Entries, count: int) -> torch.Tensor:
        """Logits `(R, count, U)` after new entries and the masks that follow them, of a network that has masks."""
        raise NotImplementedError(f"{type(self).__name__} drafts no tokens at once.")

    def draft(self, state: NetworkState, new: Entries, limits: DepthLimits, draw: Draw) -> DraftNodes:
        if self.drafts_whole:
            return draft_chain(self.plan, self.logits_at_once(state, new, limits.deepest), new, limits, draw)
        hidden, logits = state.slots.read(new, predicts=True)
        return grow(self.plan, state.slots.step, hidden, logits, limits, draw)


class OverTargetGenerator(NetworkGenerator):
    """Drafts chains over the slots of the target itself, after anchors, which it alone has not read.

    Those slots follow the rows by themselves: nothing is kept here.
    """

    steers_chains = True
    masks_drafts = False

    def lent_slots(self, target: SlotModel, lengths: list[int]) -> Any:
        """The target's slots, whose rows have these lengths without what is new, as a [`Runner`] takes them."""
        raise NotImplementedError

    def propose(self, step: DraftStep) -> DraftTree:
        if self.session.target is None:
            raise SpecConfigError(
                f"{type(self).__name__} drafts with the keys and values of its target, which transformers' own "
                "assisted decoding does not hand over. Pass it to generate() as `assistant`, or name `spec_method`."
            )
        return super().propose(step)

    def lent_state(self, commit: Commit | DeviceCommit) -> NetworkState:
        # What is new is counted by the draft: the anchor, or what the device alone knows.
        target, num_new = self.session.target, int(isinstance(commit, Commit))
        return NetworkState(self.lent_slots(target, [length - num_new for length in target.cache.lengths]))

    def _new(self, commit: Commit | DeviceCommit, anchors: torch.LongTensor) -> Entries:
        new = super()._new(commit, anchors)
        return new._replace(counts=[1] * len(anchors)) if isinstance(commit, Commit) else new
