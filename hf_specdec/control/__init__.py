"""Adaptive speculation: costs of drafts and verifications, rates of acceptance, and the length that pays."""

from .controller import SpeculationController
from .profile import ControlProfile
from .schedule import ScheduledLength
from .times import LatencyModel


__all__ = ["ControlProfile", "LatencyModel", "ScheduledLength", "SpeculationController"]
