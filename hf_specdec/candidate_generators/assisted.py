"""The protocol of transformers' own assisted decoding, both ways.

[`AssistedSide`] lets transformers drive a candidate generator of this package, and [`StockCandidateGenerator`] lets
this package's loop drive one of transformers. The protocol knows one row, drafts without branches, and no end.

Shapes: L tokens of the text, P of the prompt, N draft tokens, H hidden size.
"""

from __future__ import annotations

from contextlib import ExitStack
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation.candidate_generator import CandidateGenerator as HfCandidateGenerator

from ..drafts import DraftTree
from ..errors import SpecConfigError, UnsupportedModelError
from ..kernels.best import with_successors
from ..protocol import Commit, DraftStep, Prompt, Session, VerifiedNodes
from ..settings.config import SpeculativeConfig
from ..threads import cached_property
from .base import CandidateGenerator
from .row_trees import first_path


if TYPE_CHECKING:
    from ..speculator import Speculator


# The host does not say where a text ends at the latest; it cuts what goes beyond.
_UNKNOWN_LENGTH = 2**31 - 1


class AssistedSide:
    """Tells a candidate generator as prefill and commits what transformers only shows as a text that grows."""

    # Nothing is drafted before the target has read the prompt, as in this package's loop, so that both have the same
    # cycles. Hidden states are captured in forwards of the `target`, by hooks that leave with each of them; without it
    # they are those that the host hands over, which lack what enters the final norm.
    def __init__(self, generator: CandidateGenerator, target: torch.nn.Module | None = None):
        self.unbound = generator
        self.target = target
        self.generator: CandidateGenerator | None = None  # what drafts, once the call has begun
        self.num_matches = 0
        self._seen_length = self._start = 0
        self._nodes: list[int] = []  # the anchor and the draft that the target is verifying
        self._captured: dict | None = None
        self._hooks = ExitStack()

    def candidates(
        self,
        input_ids: torch.LongTensor,
        *,
        model_outputs: Any = None,
        is_first_iteration: bool = False,
        model_kwargs: dict[str, Any] | None = None,
        **others: Any,
    ) -> torch.LongTensor:
        """Text and draft `(1, L + N)` after a text `(1, L)`; the arguments are those of transformers' protocol."""
        length = input_ids.shape[1]
        if self.generator is None or is_first_iteration or length < self._seen_length:
            self._begin(input_ids, (model_kwargs or {}).get("attention_mask"))
        if is_first_iteration:
            return input_ids
        generator, logits = self.generator, getattr(model_outputs, "logits", None)
        if generator.num_best_tokens and self._nodes and logits is not None:
            verified, count = logits[:, -len(self._nodes) :], min(generator.num_best_tokens, logits.shape[-1])
            successors = with_successors(verified.new_tensor([self._nodes], dtype=torch.long), verified, count)
            generator.learn(VerifiedNodes([self._nodes], successors[..., 1:].cpu()))
        # What has been committed since the last request.
        states = self._states(model_outputs)
        if self._seen_length == 0:
            self._seen_length = length - 1
            generator.prefill(Prompt(input_ids[:, :-1], [self._start], states))
            states = {key: value[:, -1:] for key, value in states.items()}
        new, self._seen_length = input_ids[:, self._seen_length :], length
        if count := new.shape[1]:
            states = {key: value[:, :count] for key, value in states.items()}
            generator.observe(Commit([0], new, new.tolist(), [min(self.num_matches, count - 1)], states))
        depth = min(max(generator.session.max_length - length - 1, 0), generator.num_speculative_tokens)
        draft = generator.propose(DraftStep([0], input_ids[:, -1], [length - self._start], [depth]))
        # The chain for those who can only verify chains.
        path = first_path(draft.token_lists()[0], draft.parent_lists()[0])
        self._nodes = [*input_ids[0, -1:].tolist(), *path]
        return torch.cat([input_ids, input_ids.new_tensor([path])], dim=1)

    def _begin(self, input_ids: torch.LongTensor, mask: Any) -> None:
        if len(input_ids) != 1:
            raise SpecConfigError(
                f"transformers' assisted decoding takes one row, and the batch has {len(input_ids)}. Pass the "
                "candidate generator as generate(assistant=...), which takes batches."
            )
        session = self.unbound.session or Session(1, _UNKNOWN_LENGTH, input_ids.device, supports_trees=False)
        self.generator, self._nodes = self.unbound.bind(session), []
        if torch.is_tensor(mask) and mask.dim() == 2:
            self._start = int(mask[0].ne(0).int().argmax())

    # Hidden states

    def forward_kwargs(self) -> dict[str, Any]:
        """Arguments of the target's next forward, before which this is called; states are captured in it."""
        from ..target.states import captured_states
        from ..target.uncompiled import Uncompiled

        keys = () if self.generator is None else self.generator.target_hidden_states
        if not keys or self.target is None:
            return {"output_hidden_states": True} if keys else {}
        thread = get_ident()

        def end(*forward) -> None:
            # Another thread may run a forward of its own on the same model.
            if get_ident() == thread:
                self._hooks.close()

        self._hooks.close()
        with ExitStack() as hooks:
            # Also where the forward fails.
            handle = self.target.register_forward_hook(end, always_call=True)
            hooks.callback(handle.remove)
            # Compiled code runs no hooks.
            hooks.callback(Uncompiled(self.target).close)
            self._captured = hooks.enter_context(captured_states(self.target, keys))
            self._hooks = hooks.pop_all()
        return {}

    def close(self) -> None:
        """Ends the call, where one has begun here; the host does not say when that is."""
        self._hooks.close()
        generator, self.generator = self.generator, None
        if generator is not None:
            generator.close()

    def _states(self, model_outputs: Any) -> dict:
        """Hidden states that the generator has asked for, each `(1, T, H)`."""
        keys = self.generator.target_hidden_states
        if not keys:
            return {}
        if self._captured is not None:
            captured, self._captured = self._captured, {}
            if len(captured) < len(keys):
                raise UnsupportedModelError(
                    f"The drafter reads hidden states of the {type(self.target).__name__} it was loaded for, and that "
                    "has made no forward: another model is decoded. Load the speculator for that one."
                )
            return captured
        # transformers' tuple has what enters each layer, and what the head reads.
        states = getattr(model_outputs, "hidden_states", None)
        if states is None:
            raise UnsupportedModelError(
                "The drafter reads hidden states of the target, and the host hands over none. Use "
                "generate(..., spec_method=...), which captures them."
            )
        if len(states) - 1 in keys:
            raise UnsupportedModelError(
                "The drafter reads what enters the target's final norm, and transformers' assisted decoding hands "
                "over what leaves it. Make the speculator with `load_speculator(target, ...)`, which knows the target "
                "and captures the state."
            )
        return {key: states[-1] if key == "last" else states[key] for key in keys}


class UnboundCandidateGenerator(CandidateGenerator):
    """A generator that `generate(assistant=...)` binds to its call, or transformers' loop, where `close()` ends it."""

    def __init__(self, speculator: Speculator):
        self.speculator = speculator
        self.config: SpeculativeConfig = speculator.config

    def bind(self, session: Session) -> CandidateGenerator:
        super().bind(session)
        return self.speculator.candidate_generator(session)

    @cached_property
    def assisted_side(self) -> AssistedSide:
        return AssistedSide(self, self.speculator.target)

    def close(self) -> None:
        self.assisted_side.close()


class StockCandidateGenerator(CandidateGenerator):
    """Lets a generator of transformers' own protocol draft for the loop, one row, whose drafts are point masses."""

    # Upper bound only; stock generators choose their own length.
    default_num_speculative_tokens = 256

    def __init__(self, generator: HfCandidateGenerator):
        super().__init__()
        self.generator = generator

    def bind(self, session: Session) -> CandidateGenerator:
        name = type(self.generator).__name__
        if session.batch_size != 1:
            raise SpecConfigError(
                f"{name} proposes for one row, the batch has {session.batch_size}. Name a `spec_method` instead, or "
                "generate row by row."
            )
        if self.generator.requires_model_outputs:
            raise SpecConfigError(
                f"{name} reads outputs of the target, which only transformers' own assisted decoding hands over. Name "
                "a `spec_method` instead, such as 'mtp' or 'dflash'."
            )
        return super().bind(session)

    def prefill(self, prompt: Prompt) -> None:
        self.input_ids = prompt.input_ids
        # The host's first call shows the prompt alone, and its generators with a model of their own count on it.
        self.generator.get_candidates(prompt.input_ids)

    def observe(self, commit: Commit) -> None:
        self.input_ids: torch.Tensor = torch.cat([self.input_ids, commit.tokens], dim=1)
        # The scores are not kept; transformers' own generators decide by the number of matches.
        self.generator.update_candidate_strategy(self.input_ids, None, commit.num_accepted[0])

    def propose(self, step: DraftStep) -> DraftTree:
        candidates, _ = self.generator.get_candidates(self.input_ids)
        draft = candidates[:, self.input_ids.shape[1] :][:, : step.max_draft_tokens[0]]
        return DraftTree.chain(draft.to(self.session.device))
