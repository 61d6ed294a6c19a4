"""Rules for operators that have none, found by running them on small tensors."""

from autoshard.discovery.program import Discovery, Finding, discover

__all__ = ["Discovery", "Finding", "discover"]
