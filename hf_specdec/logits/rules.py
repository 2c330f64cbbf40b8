"""Acceptance rules, of which `rejection_sample_method` chooses the one that judges the drafts of a call.

`standard` decides position by position, so the verifier can also apply it node by node. The others judge a draft as a
whole: they need the target's processed scores after all of its nodes.

Shapes: R active rows, N draft nodes, T = N + 1 verified nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers.utils import logging

from ..drafts import DraftTree
from ..errors import SpecConfigError
from ..kernels.acceptance import Acceptance, follow, reject_chain, reject_tree
from ..kernels.best import best_tokens
from ..kernels.sampling import sample_from_probs
from .acceptance import accept_synthetic, accept_typical, reject_block
from .randomness import ACCEPT, TARGET, CapturedUniforms, RowUniforms


if TYPE_CHECKING:
    from ..settings import SpeculativeConfig


logger = logging.get_logger(__name__)


class StandardRule:
    """Follows the target's own choices; rejection sampling for drafts that were drawn. Exact.

    Attributes:
        name (`str`): The rule's `rejection_sample_method`.
        judges_whole_drafts (`bool`): A node's fate depends on nodes after or beside it.
        note (`str`, *optional*): What becomes of the text, if it is not the target's any more.

    Args:
        uniforms (`RowUniforms`, *optional*): Random numbers of the call; `None` for a greedy target.
    """

    name: ClassVar[str] = "standard"
    judges_whole_drafts: ClassVar[bool] = False
    note: ClassVar[str | None] = None

    def __init__(self, uniforms: RowUniforms | None):
        self.uniforms = uniforms

    def check_depth(self, depth: int) -> None:
        """Raises a `SpecConfigError` if drafts of at most `depth` tokens cannot do what was asked."""

    def judge(self, draft: DraftTree, scores: torch.Tensor, rows: list[int], positions: list[int]) -> Acceptance:
        """Judges which nodes of a draft the target accepts.

        Args:
            draft (`DraftTree`): The drafts of the active rows.
            scores (`torch.Tensor` of shape `(R, T, V)`): The target's processed scores after each node.
            rows (`list[int]` of length R): Which row of the call each active row is.
            positions (`list[int]` of length R): Position of the first token to commit, padding not counted.
        """
        if self.uniforms is None or draft.probs is None:
            return follow(draft, self.choices(draft, scores, rows, positions))
        probs, target_uniforms = scores.softmax(-1), self.target_uniforms(draft, rows, positions)
        if draft.is_chain:
            return reject_chain(draft, probs, self.uniforms.at(ACCEPT, rows, positions, draft.size), target_uniforms)
        return reject_tree(draft, probs, self.uniforms.for_nodes(rows, positions, draft.size), target_uniforms)

    def choices(
        self, draft: DraftTree, scores: torch.Tensor, rows: list[int], positions: list[int]
    ) -> torch.LongTensor:
        """The target's own token after each node, `(R, T)`."""
        if self.uniforms is None:
            return best_tokens(scores)
        return sample_from_probs(scores.softmax(-1), self.target_uniforms(draft, rows, positions))

    def target_uniforms(self, draft: DraftTree, rows: list[int], positions: list[int]) -> torch.FloatTensor:
        """The number of each node's draw, `(R, T)`: that of the position after it."""
        return self.uniforms.at_depths(TARGET, rows, positions, draft.topology)

    @property
    def stream(self) -> RowUniforms | None:
        """The random numbers that it reads; `None` where it reads none."""
        return self.uniforms

    @property
    def signature(self) -> tuple[Any, ...]:
        """Equal for rules that judge alike, their random numbers apart."""
        return type(self), self.uniforms is not None

    def in_a_graph(self, uniforms: CapturedUniforms | None) -> StandardRule:
        """The rule with random numbers that a graph makes, where it reads any."""
        rule = copy(self)
        rule.uniforms = self.uniforms and uniforms
        return rule


class BlockRule(StandardRule):
    """Block verification of drawn chains, see `reject_block`. Exact.

    All other drafts are judged as `standard` does: of chains that were not drawn no exact rule accepts more, and for
    drawn trees there is no such rule.
    """

    name = "block"
    judges_whole_drafts = True

    def judge(self, draft: DraftTree, scores: torch.Tensor, rows: list[int], positions: list[int]) -> Acceptance:
        if draft.probs is None or not draft.is_chain:
            return super().judge(draft, scores, rows, positions)
        # By node and not by position: a position that a later test gave up is judged again in the next cycle.
        accept_uniforms = self.uniforms.for_nodes(rows, positions, draft.size)
        return reject_block(draft, scores.softmax(-1), accept_uniforms, self.target_uniforms(draft, rows, positions))


class TypicalRule(StandardRule):
    """Typical acceptance, see `accept_typical`. Changes the distribution.

    Args:
        uniforms (`RowUniforms`): Random numbers of the call; the rule draws none.
        threshold (`float`): Probability that is always enough.
        alpha (`float`): Factor of exp(-entropy).
    """

    name = "typical"
    judges_whole_drafts = True
    note: str = "typical acceptance changes the distribution of the text"

    def __init__(self, uniforms: RowUniforms | None, threshold: float, alpha: float):
        super().__init__(uniforms)
        self.threshold = threshold
        self.alpha = alpha

    @property
    def stream(self) -> None:
        return None

    @property
    def signature(self) -> tuple[Any, ...]:
        return *super().signature, self.threshold, self.alpha

    def judge(self, draft: DraftTree, scores: torch.Tensor, rows: list[int], positions: list[int]) -> Acceptance:
        return accept_typical(draft, scores, self.threshold, self.alpha)


class SyntheticRule(StandardRule):
    """Accepts at given rates, see `accept_synthetic`, also for a greedy target. The text is meaningless.

    Args:
        uniforms (`RowUniforms`, *optional*): Random numbers of the call; `None` for a greedy target.
        accept_uniforms (`RowUniforms`): Those of the acceptance.
        rates (`tuple[float, ...]`): Entry i is the probability that the first i + 1 draft tokens are accepted.
        least_depth (`int`): Drafts must be able to be this deep.
    """

    name = "synthetic"
    judges_whole_drafts = True
    note: str = "synthetic acceptance: the text is meaningless, only the time counts"

    def __init__(
        self,
        uniforms: RowUniforms | None,
        accept_uniforms: RowUniforms,
        rates: tuple[float, ...],
        least_depth: int = 0,
    ):
        super().__init__(uniforms)
        self.accept_uniforms = accept_uniforms
        self._rates = rates
        self.rates: torch.Tensor = torch.tensor(conditional_rates(rates), device=accept_uniforms.device)
        self.least_depth = least_depth

    @classmethod
    def from_config(
        cls, config: SpeculativeConfig, uniforms: RowUniforms | None, new_uniforms: Callable[[], RowUniforms]
    ) -> SyntheticRule:
        """A rule by the rates or the mean length of the settings; `new_uniforms` serves a greedy target."""
        accept_uniforms = new_uniforms() if uniforms is None else uniforms
        rates = config.synthetic_acceptance_rates
        if rates is not None:
            return cls(uniforms, accept_uniforms, rates)
        rates = rates_of_length(config.synthetic_acceptance_length)
        return cls(uniforms, accept_uniforms, rates, least_depth=len(rates))

    @property
    def stream(self) -> RowUniforms:
        return self.accept_uniforms

    @property
    def signature(self) -> tuple[Any, ...]:
        return *super().signature, self._rates

    def in_a_graph(self, uniforms: CapturedUniforms | None) -> SyntheticRule:
        rule = copy(self)
        rule.uniforms, rule.accept_uniforms = self.uniforms and uniforms, uniforms
        return rule

    def check_depth(self, depth: int) -> None:
        if depth < self.least_depth:
            raise SpecConfigError(
                f"`synthetic_acceptance_length` needs drafts of at least {self.least_depth} tokens, got drafts of at "
                f"most {depth}. Raise `num_speculative_tokens`, or set `synthetic_acceptance_length` to at most "
                f"{depth + 1}."
            )

    def judge(self, draft: DraftTree, scores: torch.Tensor, rows: list[int], positions: list[int]) -> Acceptance:
        accept_uniforms = self.accept_uniforms.at(ACCEPT, rows, positions, len(self.rates))
        return accept_synthetic(draft, self.rates, accept_uniforms, self.choices(draft, scores, rows, positions))


def acceptance_rule(
    config: SpeculativeConfig | None,
    draws: bool | None,
    uniforms: RowUniforms | None,
    new_uniforms: Callable[[], RowUniforms],
    is_training: bool = False,
) -> StandardRule:
    """The rule of one call. For a greedy target `block` and `typical` are the standard rule.

    Args:
        config (`SpeculativeConfig`, *optional*): The settings; `None` for the standard rule.
        draws (`bool`, *optional*): Drafts are drawn; where they are not, `block` is the standard rule.
        uniforms (`RowUniforms`, *optional*): Random numbers of the call; `None` for a greedy target.
        new_uniforms (`Callable`): Makes random numbers where a greedy call needs some.
        is_training (`bool`): The target is in training mode.

    Raises:
        SpecConfigError: The text of a target that is trained would not be its own.
    """
    rule = _make_rule(config, draws, uniforms, new_uniforms)
    if rule.note and is_training:
        raise SpecConfigError(
            f"rejection_sample_method='{rule.name}' is not for a model in training mode: its text would be off policy "
            f"({rule.note}). Use 'standard' or 'block', or call model.eval() if nothing is trained on the text."
        )
    if rule.note:
        logger.warning_once(f"rejection_sample_method='{rule.name}': {rule.note}.")
    return rule


def _make_rule(config, draws, uniforms, new_uniforms) -> StandardRule:
    name = "standard" if config is None else config.rejection_sample_method
    if name == "synthetic":
        return SyntheticRule.from_config(config, uniforms, new_uniforms)
    if name == "standard" or uniforms is None:
        return StandardRule(uniforms)
    if name == "block":
        return StandardRule(uniforms) if draws is False else BlockRule(uniforms)
    return TypicalRule(uniforms, config.posterior_threshold, config.posterior_alpha)


def rates_of_length(length: float) -> tuple[float, ...]:
    """Unconditional acceptance rates that commit `length` tokens per verification: 1, 1, .., then the fraction."""
    whole, fraction = divmod(length - 1, 1)
    return (1.0,) * int(whole) + ((fraction,) if fraction else ())


def conditional_rates(rates: tuple[float, ...]) -> list[float]:
    """Acceptance rates of draft tokens whose predecessor is accepted, from rates for the first 1, 2, ... tokens."""
    return [rate / before if before else 0.0 for before, rate in zip((1.0, *rates), rates)]
