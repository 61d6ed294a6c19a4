"""Running a step of a plan, and measuring its parts beside what is predicted."""

from autoshard.runtime.profiling.profile import Profile, Row, profile
from autoshard.runtime.profiling.step import MadeUpStep

__all__ = ["MadeUpStep", "Profile", "Row", "profile"]
