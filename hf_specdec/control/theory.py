"""Equations of speculative decoding, as plain functions of rates and seconds.

Symbols: k draft tokens of a chain, a acceptance rate, tau tokens committed per verification. Leviathan et al. 2023
(arXiv:2211.17192), Chen et al. 2023 (arXiv:2302.01318).
"""

from __future__ import annotations

from collections.abc import Callable

from ..validation import Bounds, checked


def expected_tokens(acceptance_rate: float, num_draft_tokens: int) -> float:
    """Tokens committed per cycle by chains of k tokens, each accepted with probability a: Leviathan et al., eq. 1.

    tau = 1 + a + a^2 + ... + a^k = (1 - a^(k + 1)) / (1 - a)
    """
    checked("acceptance_rate", acceptance_rate, float, Bounds(0, 1))
    if acceptance_rate == 1:
        return num_draft_tokens + 1.0
    return (1 - acceptance_rate ** (num_draft_tokens + 1)) / (1 - acceptance_rate)


def break_even_acceptance(
    num_draft_tokens: int, draft_seconds: float, verify_seconds: float, plain_seconds: float
) -> float | None:
    """The acceptance rate from which on chains of k tokens are faster than plain decoding.

        (1 - a^(k + 1)) / (1 - a) = (T_draft + T_verify) / T_plain

    `None` if not even a = 1 is enough.
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

        argmax over k <= most of (1 - a^(k + 1)) / ((1 - a) (T_draft(k) + T_verify(k)))

    Of equally good ones it is the smallest.
    """

    def tokens_per_second(k: int) -> float:
        return expected_tokens(acceptance_rate, k) / (draft_seconds(k) + verify_seconds(k))

    return max(range(most + 1), key=tokens_per_second)
