"""Equations of speculative decoding, as plain functions of rates and seconds.

Symbols: k draft tokens of a chain, a acceptance rate, tau tokens committed per verification, c seconds of one draft
forward over seconds of one target forward. Leviathan et al. 2023 (arXiv:2211.17192), Chen et al. 2023
(arXiv:2302.01318).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

from ..errors import SpecConfigError, shown


def expected_tokens(acceptance_rate: float, num_draft_tokens: int) -> float:
    """Tokens committed per cycle by chains of k tokens, each accepted with probability a: Leviathan et al., eq. 1.

        tau = 1 + a + a^2 + ... + a^k = (1 - a^(k + 1)) / (1 - a)

    Args:
        acceptance_rate (`float`): a, from 0 to 1, of a token whose predecessors were accepted.
        num_draft_tokens (`int`): k.

    Returns:
        `float`: Tokens, from 1 to k + 1.
    """
    _check_rate("acceptance_rate", acceptance_rate)
    if acceptance_rate == 1:
        return num_draft_tokens + 1.0
    return (1 - acceptance_rate ** (num_draft_tokens + 1)) / (1 - acceptance_rate)


def expected_tokens_of_chain(position_rates: Sequence[float]) -> float:
    """Tokens committed per cycle by chains whose positions differ.

        tau = 1 + sum over i of a_1 a_2 ... a_i

    Args:
        position_rates (`Sequence[float]`): a_i, how often token i is accepted where those before it were.
    """
    for rate in position_rates:
        _check_rate("position_rates", rate)
    return 1.0 + sum(accumulate(position_rates, mul))


def expected_tokens_of_tree(parents: Sequence[int], node_rates: Sequence[float]) -> float:
    """Tokens committed per cycle by trees.

        tau = 1 + sum over nodes of the product of the rates on the path to the node

    Args:
        parents (`Sequence[int]`): Each node's parent, -1 for a child of the anchor; parents come first.
        node_rates (`Sequence[float]`): How often the node is the one that is accepted after its parent, where the
            parent was accepted. Those of siblings add up to 1 at most.
    """
    if len(parents) != len(node_rates):
        raise SpecConfigError(f"Every node needs a rate, got {len(parents)} parents and {len(node_rates)} rates.")
    probabilities: list[float] = []
    for parent, rate in zip(parents, node_rates):
        _check_rate("node_rates", rate)
        probabilities.append(rate * (1.0 if parent < 0 else probabilities[parent]))
    return 1.0 + sum(probabilities)


def block_efficiency(num_committed_tokens: int, num_verifications: int) -> float:
    """tau as measured: tokens committed per verification of a row. 1 without any verification."""
    return num_committed_tokens / num_verifications if num_verifications else 1.0


def memory_bound_speedup(tau: float, cost_ratio: float, num_draft_tokens: int) -> float:
    """Speed-up where a verification costs as much as plain decoding of one token: Leviathan et al., theorem 3.8.

        speed-up = tau / (c k + 1)

    Args:
        tau (`float`): Tokens committed per cycle.
        cost_ratio (`float`): c.
        num_draft_tokens (`int`): k.
    """
    return tau / (cost_ratio * num_draft_tokens + 1)


def speedup(tau: float, draft_seconds: float, verify_seconds: float, plain_seconds: float) -> float:
    """Speed-up over plain decoding, with measured costs.

        speed-up = tau T_plain / (T_draft + T_verify)

    Args:
        tau (`float`): Tokens committed per cycle.
        draft_seconds, verify_seconds (`float`): Of one cycle.
        plain_seconds (`float`): Of one token in plain decoding.
    """
    return tau * plain_seconds / (draft_seconds + verify_seconds)


def cost_per_token(tau: float, draft_seconds: float, verify_seconds: float) -> float:
    """Seconds per committed token: (T_draft + T_verify) / tau."""
    return (draft_seconds + verify_seconds) / tau


def break_even_acceptance(
    num_draft_tokens: int, draft_seconds: float, verify_seconds: float, plain_seconds: float
) -> float | None:
    """The acceptance rate from which on chains of k tokens are faster than plain decoding.

        (1 - a^(k + 1)) / (1 - a) = (T_draft + T_verify) / T_plain

    Args:
        num_draft_tokens (`int`): k, at least 1.
        draft_seconds, verify_seconds (`float`): Of a cycle with k draft tokens.
        plain_seconds (`float`): Of one token in plain decoding.

    Returns:
        `float`: The rate; `None` if not even a = 1 is enough.
    """
    needed = (draft_seconds + verify_seconds) / plain_seconds
    if needed > num_draft_tokens + 1:
        return None
    low, high = 0.0, 1.0
    # The left side grows with a; 50 halvings reach the last bit of a float.
    for _ in range(50):
        middle = (low + high) / 2
        if expected_tokens(middle, num_draft_tokens) < needed:
            low = middle
        else:
            high = middle
    return high if needed > 1 else 0.0


def optimal_length(
    acceptance_rate: float,
    draft_seconds: Callable[[int], float],
    verify_seconds: Callable[[int], float],
    most: int,
) -> int:
    """The speculation length with the most committed tokens per second, 0 included.

        argmax over k of (1 - a^(k + 1)) / ((1 - a) (T_draft(k) + T_verify(k)))

    Args:
        acceptance_rate (`float`): a.
        draft_seconds (`Callable`): T_draft: k -> seconds; T_d k for a drafter that writes one token after the other.
        verify_seconds (`Callable`): T_verify: k -> seconds of the forward over anchor and k draft tokens.
        most (`int`): Largest k to consider. Of equally good ones the smallest is returned.
    """

    def tokens_per_second(k: int) -> float:
        return expected_tokens(acceptance_rate, k) / (draft_seconds(k) + verify_seconds(k))

    return max(range(most + 1), key=tokens_per_second)


def _check_rate(name: str, rate: float) -> None:
    if not 0 <= rate <= 1:
        raise SpecConfigError(f"`{name}` must be from 0 to 1, got {shown(rate)}.")
