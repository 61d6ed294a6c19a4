"""Profiling: runs steps of a plan, and compares the time of their parts with the prediction."""

from autoshard.measure.profiling.profile import Profile, Row, SyntheticStep, profile

__all__ = ["Profile", "Row", "SyntheticStep", "profile"]
