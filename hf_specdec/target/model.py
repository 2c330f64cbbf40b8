"""A causal language model as the loop sees it: it reads tokens into slots and returns logits for every node.

The target and a draft model are both driven through `SlotModel`. The model runs through its own forward with a
`SlotCache`, explicit positions and ready-made masks; nothing of it is copied, replaced or left changed. What rare
models and calls need beside that follows the rows in a list of parts, which is empty for a plain one.

Shapes: R active rows, T nodes (anchor included), P prompt length, H hidden size. In a graph lengths, starts, leads and
positions are tensors, and R and T those of its buffers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from ..drafts import DraftTree, TreeTopology
from ..errors import UnsupportedModelError
from ..kernels._triton import use_triton
from ..kernels.best import with_successors
from ..kernels.products import fast_products
from ..kernels.tree_attention import MAX_NODES, Beginning
from ..logits.grammar.masks import masked_nodes
from ..logits.rules import CapturedJudge
from ..threads import StandIns, cached_property
from ..transfers import upload
from .attention import TREE_KERNEL, attention_switch, name_masks
from .cache import SlotCache
from .facts import ModelProfile, model_profile
from .forward import Part, SlotForward, SlotOutput, told
from .graphed import graphed_forward, graphed_verification
from .graphs import CallGraphs
from .masks import RowPlaces, TreeMask, node_masks, slot_tree
from .parts.recurrent import RecurrentLayers
from .states import captured_states, state_taps


AnyPart = TypeVar("AnyPart", bound=Part)


class SlotModel:
    """Drives any model whose decoder has a key/value cache over one `SlotCache` during one call.

    Forwards get further arguments `forward_kwargs`, and return the hidden `states` asked for, see [`captured_states`].
    """

    # Attention that the tree kernel cannot compute falls back to masks by itself.
    _fits_kernel = True
    # Where all of it can, prompts that would need a mask, such as padded ones, are read without any.
    _reads_prompts_by_kernel = False
    num_logits: int | None = None  # the first ones are enough, where a forward can leave out the others
    beginning: Beginning | None = None  # first slots that nodes of a graph see in front of `starts`

    def __init__(
        self,
        model: torch.nn.Module,
        cache: SlotCache,
        states: tuple[int | str, ...] = (),
        forward_kwargs: dict[str, Any] | None = None,
    ):
        self.model = model
        self.cache = cache
        self.forward_cache: Any = cache  # as the model's forward takes it
        self.profile: ModelProfile = model_profile(model)
        self.parts: list[Part] = []
        self.graphs: CallGraphs | None = None  # run in the place of forwards whose shapes repeat
        # Where the rows stand, see `RowPlaces`.
        self.starts: Any = []
        self.leads: Any = []
        self.max_position: Any = None
        self.most_committed: int = 1  # tokens that a row may commit in a cycle
        self.num_successors: int = 0  # the best tokens after each node that a verification returns
        self.attention_layers: Counter[str] = Counter()  # what computed the last forward's attention
        self.states = states
        self._taps = cache.plans.get(states) or state_taps(model, states)
        if all(module is not model for _, module, _ in self._taps):
            cache.plans[states] = self._taps  # for other calls; what is kept for them does not hold the model
        self.forward_kwargs: dict[str, Any] = forward_kwargs or {}
        if self.profile.is_recurrent:
            cache.last_recurrent_layer, cache.has_slots = self.profile.last_recurrent_layer, self.profile.attends
        # That of the hidden states; a model's first parameter may belong to a vision tower of another type.
        embedding = model.get_input_embeddings().weight
        self._mask_dtype = embedding.dtype if embedding.is_floating_point() else model.dtype
        self._has_kernel: bool = use_triton(embedding)

    @cached_property
    def _attention(self) -> StandIns:
        return attention_switch(self.model)

    # What a call has

    def find(self, kind: type[AnyPart]) -> AnyPart | None:
        return next((part for part in self.parts if isinstance(part, kind)), None)

    def use_graphs(self, graphs: CallGraphs | None) -> None:
        """Lets forwards whose shapes repeat run as graphs from now on. To be called in front of the prefill."""
        self.graphs = graphs
        self.cache.store = None if graphs is None else graphs.store

    def close(self) -> None:
        """Ends the call."""
        if self.graphs is not None:
            self.graphs.close()
        for part in self.parts:
            part.close()

    # The prefill

    def check_prefilled(self) -> None:
        """Raises an `UnsupportedModelError` if the prompt has left nothing in the cache."""
        if self.cache.get_seq_length():
            return
        remedy = "Leave the speculative arguments out to use plain generate()."
        if self.model.training and any(
            getattr(module, "gradient_checkpointing", False) for module in self.model.modules()
        ):
            remedy = (
                "In training mode gradient checkpointing turns the cache off. Disable it, or call model.eval(), "
                "for the time of the call."
            )
        raise UnsupportedModelError(
            f"{type(self.model).__name__} has put no keys and values of the prompt into the cache it was given, "
            f"which speculation needs. {remedy}"
        )

    def start_slots(self, starts: list[int], offsets: list[int] | None = None, parts: Sequence[Part] = ()) -> None:
        """Ends the prefill, with each row's first slot that is not padding, and its position id there (0).

        The parts come to those that all calls of the model have.
        """
        self.check_prefilled()
        self.starts = list(starts)
        self.leads = [offset - start for start, offset in zip(starts, offsets or [0] * len(starts))]
        reasons = [part.why_eager for part in parts if part.why_eager is not None]
        if self.graphs is not None and reasons:
            self.graphs.switch_off(reasons[0])
        self.cache.start_slots(len(starts))
        if self.profile.counted is not None:
            self.parts.append(self.profile.counted)
        if self.profile.is_recurrent:
            self.parts.append(RecurrentLayers(self.model, self.cache))
        self.parts += parts

    def prefill(self, input_ids: torch.LongTensor, starts: list[int]) -> None:
        """Reads left-padded prompts `(R, P)`, or their embeddings `(R, P, H)`, into empty slots, without logits."""
        positions, name = torch.arange(input_ids.shape[1], device=input_ids.device), self.profile.of_decoder
        inputs = self._inputs(input_ids)
        if any(starts):
            first = upload(starts, input_ids.device)[:, None]
            inputs[name("attention_mask")] = (positions >= first).long()
            positions = (positions - first).clamp_(min=0)
        if self.profile.takes_position_ids:
            # Some models view them.
            inputs[name("position_ids")] = positions.expand(input_ids.shape[:2]).contiguous()
        if self.profile.takes_logits_to_keep:
            inputs["logits_to_keep"] = 1
        nodes = SlotForward(input_ids)
        with self.reading_prompts(nodes):
            self.model(**inputs, **nodes.inputs)
        # Padding is counted where slots are.
        self.start_slots(starts, None if self.profile.counted is None else starts)

    @contextmanager
    def reading_prompts(self, nodes: SlotForward) -> Iterator[None]:
        """The context of forwards of the model itself that read prompts into the slots."""
        with fast_products(self.model), self.reading(nodes), ExitStack() as by_kernel:
            if self._reads_prompts_by_kernel:
                nodes.reads_by_kernel = True
                by_kernel.enter_context(self._attention.in_place())
                by_kernel.enter_context(told(nodes))
            yield

    @contextmanager
    def reading(self, nodes: SlotForward) -> Iterator[None]:
        """The context of any forward, as the parts want it."""
        with ExitStack() as contexts:
            for part in self.parts:
                contexts.enter_context(part.reading(nodes))
            yield

    def capturing(self, joined: bool = False) -> AbstractContextManager[dict[int | str, torch.Tensor]]:
        """The states of the model's own forwards inside of the block, see [`captured_states`]."""
        return captured_states(self.model, self.states, joined, self._taps)

    # Forwards over slots

    def verify(self, anchors: torch.LongTensor, draft: DraftTree, judge: CapturedJudge | None = None) -> SlotOutput:
        """Reads anchors `(R,)` and drafts after each row's committed slots; a judge is for graphs."""
        output = None if self.graphs is None else graphed_verification(self, anchors, draft, judge)
        if output is None:
            output = self.forward(torch.cat([anchors[:, None], draft.tokens], dim=1), draft.topology)
        # The last layers may be on another device.
        output.logits = output.logits.to(anchors.device)
        if self.num_successors and output.successors is None:
            logits = output.logits if draft.masks is None else masked_nodes(draft.masks, output.logits)
            tokens = torch.cat([anchors[:, None], draft.tokens], dim=1)
            output.successors = with_successors(tokens, logits, self.num_successors)
        return output

    def forward(self, tokens: torch.LongTensor, topology: TreeTopology, logits_from: int = 0) -> SlotOutput:
        """Reads nodes after each row's committed slots: their states, and logits from one node on.

        The tokens are `(R, T)`, or embeddings `(R, T, H)`.
        """
        if self.profile.counts_slots and not topology.is_chain:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} tells positions from the order of its cache, so it can verify chains, "
                "and got a draft tree. Draft without branches."
            )
        output = None if self.graphs is None else graphed_forward(self, tokens, topology, logits_from)
        if output is not None:
            return output
        rows, plan = self.places, self.cache.plan_write(tokens.shape[1])
        # Nodes go after the committed slots: one copy of the lengths to the device serves both.
        rows.device_lengths = plan.device_starts
        by_kernel = self._has_kernel and self._fits_kernel and tokens.shape[1] <= MAX_NODES
        tree = slot_tree(topology, rows) if by_kernel else None
        nodes = SlotForward(tokens, topology, rows, plan.columns, tree)
        with self.reading(nodes) if self.parts else nullcontext():
            return self.run(nodes, logits_from)

    def run(self, nodes: SlotForward, logits_from: int) -> SlotOutput:
        """Runs the model's own forward over placed nodes."""
        profile, inputs = self.profile, self._inputs(nodes.tokens)
        inputs[profile.of_decoder("attention_mask")] = self._masks(nodes)
        if logits_from and profile.takes_logits_to_keep:
            inputs["logits_to_keep"] = nodes.tokens.shape[1] - logits_from
        if profile.takes_position_ids:
            inputs[profile.of_decoder("position_ids")] = nodes.positions.contiguous()
        with self.capturing() as states, self._attention.in_place(), told(nodes), fast_products(self.model):
            output = self.model(**inputs, **nodes.inputs, **self.forward_kwargs)
        self.attention_layers = nodes.layers
        all_states = output.get(profile.of_decoder("hidden_states"))
        return SlotOutput(output.logits[:, logits_from - nodes.tokens.shape[1] :], states, all_states)

    def _inputs(self, tokens: torch.LongTensor) -> dict[str, Any]:
        """Arguments that every forward of the model has, for these tokens or embeddings."""
        name = self.profile.of_decoder("inputs_embeds" if tokens.is_floating_point() else "input_ids")
        return {name: tokens, "use_cache": True, "return_dict": True, self.profile.cache_name: self.forward_cache}

    def _masks(self, nodes: SlotForward) -> Any:
        """The masks of all spans as the model expects them."""
        profile, rows, columns, topology = self.profile, nodes.rows, nodes.columns, nodes.topology
        if not profile.attends:
            return None
        if profile.takes_flat_mask:
            slots = torch.arange(columns, device=topology.depths.device)
            starts, lengths = rows.starts_on(slots.device)[:, None], rows.lengths_on(slots.device)[:, None]
            return ((slots >= starts) & (slots < lengths + topology.depths.shape[-1])).long()
        # Whether a layer looks at masks has been shown by the last forward. One runs before a forward is captured.
        num_layers = sum(layer.is_initialized for layer in self.cache.layers)
        kernel_alone = set(self.attention_layers) == {TREE_KERNEL} and self.attention_layers.total() >= num_layers
        if nodes.tree is not None and not rows.are_known and kernel_alone:
            masks = [TreeMask(nodes.tree, span).stand_in(columns, self._mask_dtype) for span in profile.spans]
        else:
            masks = node_masks(topology, rows, columns, profile.spans, self._mask_dtype)
        # Some models insist on a mask for every row; one that all rows share is only seen so often, not copied.
        masks = [mask.expand(len(rows.lengths), -1, -1, -1) for mask in masks]
        if nodes.tree is not None:
            name_masks(nodes, masks, profile.spans)
        return profile.named_masks(masks)

    # The rows between two forwards

    @property
    def places(self) -> RowPlaces:
        return RowPlaces(self.cache.lengths, self.starts, self.leads, self.max_position, self.beginning)

    def depths(self, depths: list[int], more: int = 0) -> list[int]:
        """How deep the rows may draft, of what they may otherwise, once they have `more` tokens."""
        for part in self.parts:
            depths = part.depths(depths, more)
        return depths

    def prepare(self, prefix: Callable[[int, list[int]], torch.LongTensor]) -> int:
        """Brings rows up to date in front of a cycle, see [`Part.prepare`]; counts the forwards that this takes."""
        return sum(part.prepare(prefix) for part in self.parts)

    def commit(self, counts: list[int], path: torch.LongTensor | None = None) -> None:
        """Keeps what was accepted of the last forward; the arguments are those of [`SlotCache.commit`]."""
        self.cache.commit(counts, path)
        for part in self.parts:
            part.commit(counts, path)

    def keep_rows(self, keep: list[int], behind: Sequence[int] = ()) -> None:
        """Goes on with these rows; the arguments are those of [`SlotCache.keep_rows`]."""
        self.cache.keep_rows(keep, behind)
        for part in self.parts:
            part.keep_rows(keep)
        self.starts = [self.starts[row] for row in keep]
        self.leads = [self.leads[row] for row in keep]

    def join(self, other: SlotModel) -> None:
        """Takes over the rows of another call of the model after its own, without the padding in front of them."""
        self.cache.join(other.cache, other.starts)
        for part in list(other.parts):
            if (joined := self.find(type(part))) is not None:
                joined.join(part)
            else:
                # It goes on here, and is closed with the others.
                other.parts.remove(part)
                self.parts.append(part)
        self.starts = self.starts + [0] * len(other.starts)
        self.leads = self.leads + [lead + start for lead, start in zip(other.leads, other.starts)]
        if self.max_position is not None:
            self.max_position = max(self.max_position, other.max_position)
