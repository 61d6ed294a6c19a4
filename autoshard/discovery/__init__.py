"""Discovery of sharding rules for operators that have none, by running them on small tensors."""

from autoshard.discovery.program import Discovery, Finding, discover

__all__ = ["Discovery", "Finding", "discover"]
