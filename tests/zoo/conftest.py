"""Fixtures of the tests of the zoo."""

from support.on_ranks import on_ranks

__all__ = ["on_ranks"]
