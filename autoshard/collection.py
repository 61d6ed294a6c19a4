"""Python's search for unreachable cycles, put off while something large is built."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Keep the cyclic garbage collector from running, in a `with` or a decorated function.

    Graphs and plans are trees of very many small objects that all stay alive. While one is
    built, the collector would look through all of them again and again and find nothing,
    which can take longer than the building. What has no more references is freed as always.

    The collector belongs to the whole process: where several threads pause it, the pause
    ends for all when the first of them is done.
    """
    was_running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_running:
            gc.enable()
