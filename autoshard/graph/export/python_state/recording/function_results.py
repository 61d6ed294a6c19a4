"""Results that functions keep of their calls, as by `functools.cache`; a trace leaves none."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class FunctionResults:
    """Functions that keep results of their calls.

    The results of calls in a trace are tensors without memory, of that trace alone. A later call
    would get them: another export, a module that is run again in another mode, or the model itself.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, int]] = {}

    def add(self, function: Any) -> None:
        """Add a function, before it is called."""
        self._known.setdefault(id(function), (function, function.cache_info().misses))

    @contextmanager
    def forgotten(self) -> Iterator[None]:
        """A context at whose end the functions that have run in it have no results.

        Results cannot be forgotten one by one: those from before are computed again, too.
        """
        try:
            yield
        finally:
            for number, (function, misses) in self._known.items():
                if function.cache_info().misses > misses:
                    function.cache_clear()
                    self._known[number] = function, 0
