"""Python's search for unreachable cycles, kept from looking where there are none."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Lock


@contextmanager
def collection_paused() -> Iterator[None]:
    """Keep the cyclic garbage collector from running, in a `with` or a decorated function.

    Graphs and plans are trees of very many small objects that all stay alive. While one is
    built, the collector would look through all of them again and again and find nothing,
    which can take longer than the building. What has no more references is freed as always.
    Afterwards all objects count as old, and old ones are looked through least often.

    The collector belongs to the whole process: where several threads pause it, the pause
    ends for all when the first of them is done.
    """
    was_running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_running:
            _make_old()
            gc.enable()


_LOCK = Lock()
"""Held to set objects aside or put them back: what is set aside in between would stay there."""


_SET_ASIDE = Event()
"""Set while `collection_of_new` keeps objects aside; counting them would take long."""


def _make_old() -> None:
    """Count all objects as old, unless somebody else has set some aside."""
    with _LOCK:
        if _SET_ASIDE.is_set():
            gc.freeze()
        elif not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()


@contextmanager
def collection_of_new() -> Iterator[None]:
    """Let the cyclic garbage collector look at nothing but what is made from now on.

    A solver makes and drops many objects, cycles among them, for as long as it may take; so
    the collector has to run. But it need not look through modules, graph and problem each
    time. What exists is set aside, and put back at the end. Where somebody has set objects
    aside already, theirs are left as they are, and nothing is done.
    """
    with _LOCK:
        is_first = not (_SET_ASIDE.is_set() or gc.get_freeze_count())
        if is_first:
            _SET_ASIDE.set()
            gc.freeze()
    try:
        yield
    finally:
        if is_first:
            with _LOCK:
                _SET_ASIDE.clear()
                gc.unfreeze()
