"""Which draft networks have a lean forward, and when it may stand in for their own."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ..candidate_generators.eagle.functional import FunctionalEagle1, FunctionalEagle3
from ..candidate_generators.eagle.network import Eagle1Network, Eagle3Network
from ..candidate_generators.mtp.functional import FunctionalMtp
from ..candidate_generators.mtp.network import MtpNetwork


_FORWARDS = ((Eagle1Network, FunctionalEagle1), (Eagle3Network, FunctionalEagle3), (MtpNetwork, FunctionalMtp))


def lean_forward(network: nn.Module, lead: int = 0) -> Callable:
    """The network's forward over slots, the lean one where it is known to be the same; for arguments see there.

    Args:
        network (`nn.Module`): The draft.
        lead (`int`): How far a position may be ahead of its slot.
    """
    forward = next((forward for kind, forward in _FORWARDS if isinstance(network, kind)), None)
    return forward(network, lead) if forward and forward.fits(network) else network
