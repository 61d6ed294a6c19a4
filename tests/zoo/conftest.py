"""Gloo ranks, as the tests of the runtime have them."""

from runtime.conftest import on_ranks

__all__ = ["on_ranks"]
