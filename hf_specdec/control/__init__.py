"""Adaptive speculation: costs of drafts and verifications, rates of acceptance, and the length that pays."""

from .controller import ControlProfile, ScheduledLength, SpeculationController
from .times import LatencyModel


__all__ = ["ControlProfile", "LatencyModel", "ScheduledLength", "SpeculationController"]
