"""How much to speculate: what drafts and verifications cost, what is accepted, and the length that pays."""

from .controller import ControlProfile, SpeculationController
from .latency import LatencyModel
from .schedule import ScheduledLength


__all__ = ["ControlProfile", "LatencyModel", "ScheduledLength", "SpeculationController"]
