"""Everything that a drafting method of one's own is written with, see docs/write_your_own_method.md.

A method that drafts on the host is a [`CandidateGenerator`]; one that drafts with a network is a [`NetworkGenerator`],
whose drafts run in CUDA graphs and are launched ahead.
"""

from .candidate_generators import register_candidate_generator, unregister_candidate_generator
from .candidate_generators.base import CandidateGenerator
from .candidate_generators.networks import NetworkGenerator
from .drafting.draw import DepthLimits, Draw
from .drafting.growth import DraftNodes, DynamicTree, Positions, grow
from .drafting.slots import DraftSlots
from .drafting.state import Entries, NetworkState, RowState
from .drafts import DraftTree, TokenTree
from .layers.draft_network import TargetParts
from .protocol import Commit, DeviceCommit, DraftStep, Prompt, Session, VerifiedNodes
from .settings.checks import setting


__all__ = [
    "CandidateGenerator",
    "Commit",
    "DepthLimits",
    "DeviceCommit",
    "DraftNodes",
    "DraftSlots",
    "DraftStep",
    "DraftTree",
    "Draw",
    "DynamicTree",
    "Entries",
    "NetworkGenerator",
    "NetworkState",
    "Positions",
    "Prompt",
    "RowState",
    "Session",
    "TargetParts",
    "TokenTree",
    "VerifiedNodes",
    "grow",
    "register_candidate_generator",
    "setting",
    "unregister_candidate_generator",
]
