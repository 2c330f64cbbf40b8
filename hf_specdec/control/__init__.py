"""Adaptive speculation: costs of drafts and verifications, rates of acceptance, and the length that pays."""

from .controller import SpeculationController
from .latency import LatencyModel
from .profile import ControlProfile
from .schedule import ScheduledLength


__all__ = ["ControlProfile", "LatencyModel", "ScheduledLength", "SpeculationController"]
