"""Control of Python's cyclic garbage collector around computations with many objects."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Lock


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause the cyclic garbage collector, in a `with` block or a decorated function.

    Graphs and plans are trees of very many small objects that all stay alive. While one is built,
    the collector would traverse all of them again and again and find nothing, which can take
    longer than the building. Reference counting still frees objects. Afterwards all objects are in
    the oldest generation, which is traversed least often.

    The collector belongs to the whole process: if several threads pause it, the pause ends for all
    when the first of them is done.
    """
    was_running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_running:
            _promote_all()
            gc.enable()


_LOCK = Lock()
"""Protects freezing and unfreezing, which must not interleave."""


_FROZEN = Event()
"""Set while `collection_of_new` has objects frozen; `gc.get_freeze_count` would take long."""


def _promote_all() -> None:
    """Move all objects to the oldest generation, unless other code has frozen objects."""
    with _LOCK:
        if _FROZEN.is_set():
            gc.freeze()
        elif not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()


@contextmanager
def collection_of_new() -> Iterator[None]:
    """Let the cyclic garbage collector traverse only objects that are made from now on.

    A long solve makes and drops many objects with reference cycles, so the collector has to run,
    but it need not traverse modules, graph and problem each time. Existing objects are frozen
    (`gc.freeze`), and unfrozen at the end. If other code has frozen objects, nothing is done.
    """
    with _LOCK:
        is_first = not (_FROZEN.is_set() or gc.get_freeze_count())
        if is_first:
            _FROZEN.set()
            gc.freeze()
    try:
        yield
    finally:
        if is_first:
            with _LOCK:
                _FROZEN.clear()
                gc.unfreeze()
