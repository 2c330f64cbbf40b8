"""MTP: the target's own multi-token-prediction layers draft.

DeepSeek-V3 (arXiv:2412.19437, section 2.2) and its successors have them; what a layer computes is in [`~models.mtp`].
Two ways lead to more than one draft token:

    reuse   one layer again and again, each time with the token it has drafted and the state it has left. Checkpoints
            with one layer are run like this; it is how an EAGLE head drafts, and so are its trees
    chain   layer j drafts token j + 1, as the layers were trained

In a chain, layer j reads as its entry t the token t + 1 + j, so the last entries of all layers but the first contain
drafted tokens, and are wrong if these are not accepted. They are read again together with the next ones.

On a GPU a cycle is one graph; where tokens of a chain are drawn, each layer is one.

Shapes: R active rows, T entries, W entries of the window that is read again, h hidden size, K layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F

from ...drafting.slots import DraftInputs, Entries
from ...drafts import TokenTree
from ...errors import SpecConfigError, UnsupportedModelError
from ...hub import detect
from ...protocol import Session
from ...transfers import last_of_each, select_rows, upload
from ...validation import check_choice
from ..draft_model.network import load_draft_model
from ..eagle.generator import OWN, DraftEntries, DynamicTree, EagleCandidateGenerator, ExtrapolationOptions
from .network import MtpNetwork, fitting_network, load_mtp, placed


@dataclass(frozen=True)
class MtpOptions(ExtrapolationOptions):
    """Options of `spec_method="mtp"`.

    Raises:
        SpecConfigError: A value is out of range.
    """

    adaptive_threshold: float = field(
        default=0.0,
        metadata={
            "published": True,
            "help": "A row's draft is not continued behind nodes whose probability, along the whole path, is at most "
            "this. 0 always drafts the full depth.",
        },
    )
    mode: Literal["chain", "reuse"] | None = field(
        default=None,
        metadata={
            "published": True,
            "help": "`chain` drafts one token with each MTP layer, `reuse` all of them with the first layer, trees "
            "among them. Left out, `chain` where the checkpoint has several layers.",
        },
    )

    def __post_init__(self):
        super().__post_init__()
        check_choice("mode", self.mode, ("chain", "reuse"))


class MtpCandidateGenerator(EagleCandidateGenerator):
    """Drafts with MTP layers: chains, and with one layer trees as well."""

    options_class = MtpOptions
    default_num_speculative_tokens = 3
    prefers_trees = False
    loaded_by = ("model", "revision", "subfolder", "cache_dir", "dtype", "device", "quantization")

    @classmethod
    def load(cls, config, target_model, draft_model: torch.nn.Module | None = None) -> torch.nn.Module:
        if draft_model is not None:
            return (
                draft_model if detect.reads_target_cache(draft_model) else fitting_network(draft_model, target_model)
            )
        if config.model is not None and detect.is_cache_reader(config):
            return load_draft_model(config, target_model)
        return load_mtp(config, target_model)

    @classmethod
    def loaded_from(cls, config, target_model):
        is_stored = config.model or getattr(target_model.config, "_name_or_path", None)
        return placed(config, target_model) if is_stored else None

    @classmethod
    def stock_assistant(cls, resources: torch.nn.Module) -> torch.nn.Module | None:
        return None if isinstance(resources, MtpNetwork) else resources

    def __init__(self, config, resources: MtpNetwork, session: Session):
        if not isinstance(resources, MtpNetwork):
            raise UnsupportedModelError(
                f"A {type(resources).__name__} reads the keys and values of its target, which only transformers' own "
                "assisted decoding hands over. Pass it to generate(), as `assistant` or `spec_model`."
            )
        several = resources.config.num_layers > 1
        self.mode = config.options.mode or ("chain" if several else "reuse")
        super().__init__(config, resources, session)

    @property
    def draft_vocab_size(self) -> int:
        return self.network.target.vocab_size

    def make_plan(self) -> TokenTree | DynamicTree:
        return super().make_plan() if self.mode == "reuse" else self._layer_chain()

    def _layer_chain(self) -> TokenTree:
        options, num_layers = self.options, self.network.config.num_layers
        names = ("depth", "top_k", "total_tokens")
        branching = next((name for name in names if getattr(options, name) is not None), None)
        if self.config.speculative_token_tree:
            branching = "speculative_token_tree"
        if branching:
            raise SpecConfigError(
                f"`{branching}` is about trees, and the {num_layers} MTP layers draft a chain, one token each. Leave "
                "it out, or set mode='reuse' to draft with the first layer alone."
            )
        length = self.config.num_speculative_tokens or num_layers
        if length > num_layers:
            self.session.notes.append(
                f"{num_layers} draft tokens instead of {length}: each of the MTP layers drafts one; mode='reuse' "
                "drafts more"
            )
        return TokenTree.chain(min(length, num_layers))

    def static_depth(self, deepest: int) -> int:
        # A chain of layers reads with all of them, sooner or later.
        return super().static_depth(deepest) if self.mode == "reuse" else self.plan.max_depth

    def make_entries(self, **slots) -> DraftEntries:
        if self.mode == "reuse":
            return super().make_entries(**slots, num_layers=1)
        return LayerEntries(self.network, self.plan.max_depth, **slots)

    def _begin_replayed_chain(self, new: Entries) -> Callable:
        if self.mode == "reuse":
            return super()._begin_replayed_chain(new)
        entries = self.entries
        self.hidden, self.logits = self._replay_layer(0, new)
        return lambda tokens, hidden: self._replay_layer(entries.layer + 1, entries.shifted_window(tokens))

    def _replay_layer(self, layer: int, window: Entries) -> tuple[torch.Tensor, torch.Tensor]:
        """What a layer hands on behind the window `(R, h)`, and the logits there `(R, V)`."""
        key, read = ("layer", layer), partial(self._read_window_statically, layer)
        output = self.entries.replay(key, window, self.most_committed, 0, window.counts, read)
        if output is None:
            return self._read_window(self.entries, layer, window)[1:]
        handed_on, hidden, logits = (values[: len(window.tokens)] for values in output)
        self.entries.keep_read(layer, window, handed_on)
        return hidden, logits

    def _read_window_statically(self, layer: int, inputs: DraftInputs, columns: int) -> tuple[torch.Tensor, ...]:
        return self._read_window(self.entries.static(inputs, columns), layer, inputs)

    def _read_window(
        self, entries: LayerEntries, layer: int, window: Entries | DraftInputs
    ) -> tuple[torch.Tensor, ...]:
        """What a layer hands on in the window `(R, W, h)`, and behind it `(R, h)`; and the logits there `(R, V)`."""
        handed_on, output = entries.read_window(layer, window.tokens, self._entry_states(window), window.counts)
        last, last_output = (last_of_each(values, window.counts) for values in (handed_on, output))
        return handed_on, last, self.network.logits(last_output)


class LayerEntries(DraftEntries):
    """Keys and values of a chain of layers.

    It is used like the entries of one layer: `read` takes what was committed, and a level of the draft is read by the
    next layer, which has to read all entries since the last that is right in all layers: the window.

    Args:
        network (`MtpNetwork`): The layers.
        depth (`int`): K, how many of them are used.
        starts, offsets, capacity, options: As for one layer.

    Attributes:
        layer (`int`): The one that has read the window last.
    """

    def __init__(
        self, network: MtpNetwork, depth: int, starts: list[int], offsets: list[int], capacity: int, **options
    ):
        super().__init__(network, starts, offsets, capacity, **options, num_layers=depth)
        self.depth = depth
        self.layer = depth - 1
        # The window, and what this layer has handed on.
        nothing = torch.zeros((len(starts), 0), dtype=torch.long, device=self.device)
        self._window = Entries(nothing, {}, [0] * len(starts))
        self._handed_on: torch.Tensor | None = None

    def gather(self, new: Entries) -> Entries:
        """The window that ends with the new entries, which goes back to what is right in all layers."""
        old = self._window
        self._catch_up(new)
        # Entry t from the end, counted before these, was read by layer j with t - j drafted tokens too many.
        again = [min(max(self.depth - added, 0), known) for added, known in zip(new.counts, old.counts)]
        self._go_back(again)
        self._window = new._replace(tokens=new.tokens.to(self.device))
        if any(again):
            first = [known - count for known, count in zip(old.counts, again)]
            places = _Places(first, old.counts, new.counts, self.device)
            states = {key: places.of(old.states[key], value) for key, value in new.states.items()}
            counts = [count + added for count, added in zip(again, new.counts)]
            self._window = Entries(places.of(old.tokens, new.tokens), states, counts)
        return self._window

    def read(self, tokens: torch.LongTensor, hidden: torch.Tensor, counts: list[int] | torch.LongTensor):
        """Reads the window with the first layer; the arguments are those of one layer."""
        return self.read_window(0, tokens, hidden, counts)

    def read_window(self, layer: int, tokens: torch.LongTensor, hidden: torch.Tensor, counts):
        """Reads the window with a layer, behind each row's length, and keeps it; the arguments are those of `read`."""
        self._begin_window(tokens, counts)
        outputs = self._read_layer(layer, tokens, hidden)
        self.rows.commit(counts)
        return outputs

    def shifted_window(self, tokens: torch.LongTensor) -> Entries:
        """The window as the next layer reads it, with the tokens `(R,)` at its end; it is taken back for that."""
        self._go_back(self._counts)
        return Entries(self._shift(self._tokens, tokens[:, None]), {OWN: self._handed_on}, self._counts)

    def keep_read(self, layer: int, window: Entries, handed_on: torch.Tensor) -> None:
        """Keeps what a layer has made of the window in a graph, `(R, T, h)` with T at least W."""
        self._tokens, _, self._counts = window
        self.layer, self._handed_on = layer, handed_on[:, : window.tokens.shape[1]]

    def skip(self, counts: list[int]) -> None:
        # A graph of a whole draft reads with all layers.
        self.layer = self.depth - 1
        super().skip(counts)

    def begin_draft(self, num_nodes: int) -> None:
        self._shifted, self.num_read = self._tokens, 0

    def read_nodes(self, tokens: torch.LongTensor, hidden: torch.Tensor, parents: torch.LongTensor):
        """Reads the window with the next layer; the arguments are those of one node behind the one read before."""
        self.num_read += 1
        self._shifted = self._shift(self._shifted, tokens)
        outputs = self._read_layer(self.layer + 1, self._shifted, self._handed_on)
        return tuple(last_of_each(output, self._counts)[:, None] for output in outputs)

    def _shift(self, window: torch.LongTensor, tokens: torch.LongTensor) -> torch.LongTensor:
        """The window `(R, W)` one token on, which ends with the tokens `(R, 1)`."""
        counts = self._counts if torch.is_tensor(self._counts) else upload(self._counts, self.device)
        return F.pad(window[:, 1:], (0, 1)).scatter(1, counts[:, None] - 1, tokens.to(self.device))

    def keep_rows(self, keep: list[int]) -> None:
        super().keep_rows(keep)
        tokens, states, counts = self._window
        states = {key: select_rows(value, keep) for key, value in states.items()}
        self._window = Entries(select_rows(tokens, keep), states, [counts[row] for row in keep])
        if self._handed_on is not None:
            self._handed_on = select_rows(self._handed_on, keep)

    def _catch_up(self, new: Entries) -> None:
        """Lets the layers read the window that no draft has needed; what they lack of tokens will be read again."""
        if self.layer == self.depth - 1:
            return
        tokens, _, counts = self._window
        ends = self.cache.lengths
        self._go_back(counts)
        self._begin_window(tokens, counts)
        known = _Places([0] * len(counts), counts, new.counts, self.device).of(tokens, new.tokens)
        known, width = F.pad(known, (0, self.depth)), tokens.shape[1]
        for layer in range(self.layer + 1, self.depth):
            self._read_layer(layer, known[:, layer : layer + width], self._handed_on)
        self.cache.lengths = ends

    def _go_back(self, counts: list[int]) -> None:
        self.cache.lengths = [length - count for length, count in zip(self.cache.lengths, counts)]

    def _begin_window(self, tokens: torch.LongTensor, counts: list[int] | torch.LongTensor) -> None:
        """Prepares for reading the window behind each row's length."""
        count = tokens.shape[1]
        plan = self.rows.plan_write(count)
        self._mask = self._mask_behind(count, plan.columns)
        self._positions = self.rows.positions + torch.arange(count, device=self.device)
        self._tokens, self._counts = tokens, counts

    def _read_layer(self, layer: int, tokens: torch.LongTensor, hidden: torch.Tensor):
        outputs = self._forward(tokens, hidden, self._positions, self._mask, self.cache, layer)
        self.layer, self._handed_on = layer, outputs[0]
        return outputs


class _Places:
    """Entries `first[r]` to `ends[r]` of each row of an old tensor, and behind them the first `counts[r]` of a new."""

    def __init__(self, first: list[int], ends: list[int], counts: list[int], device: torch.device):
        # Numbers from -1 downwards stand for the entries of the new tensor.
        rows = [[*range(begin, end), *range(-1, -count - 1, -1)] for begin, end, count in zip(first, ends, counts)]
        self.size = max(map(len, rows))
        self.index = upload([row + [-1] * (self.size - len(row)) for row in rows], device)

    def of(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        places = torch.where(self.index < 0, old.shape[1] - 1 - self.index, self.index)
        rows = torch.arange(len(places), device=places.device)[:, None]
        return torch.cat((old, new.to(old)), dim=1)[rows, places]
