"""Fixtures of the tests of the integrations."""

from support.on_ranks import on_ranks

__all__ = ["on_ranks"]
