"""Work on many rows in small transactions, so that other writers never wait for long."""

import time
from collections.abc import Callable

_TARGET = 0.01
"""Seconds that a batch should take."""

_FIRST, _SMALLEST, _LARGEST = 50, 20, 2000
"""Rows of the first batch, and of the smallest and the largest one.

The times of smaller ones are those of waiting for the disk or a processor, whatever their size."""

_MAX_GROWTH = 1.5

_MAX_PAUSE = 0.25


def never() -> bool:
    """For work that is not interrupted."""
    return False


def in_batches(step: Callable[[int], int], *, is_over: Callable[[], bool] = never) -> int:
    """Call `step` until nothing is left; its batches get as large as the database is fast.

    After each batch it pauses for as long as the batch took: SQLite gives its lock to whoever
    asks first, and waiting writers ask only from time to time.

    Args:
        step: handles at most the given number of rows in one transaction, and returns their
            number; 0 if none is left.
        is_over: returns true to end before everything is done.

    Returns:
        number of rows of all batches.
    """
    total, size = 0, _FIRST
    while not is_over():
        started = time.monotonic()
        done = step(size)
        if not done:
            break
        total += done
        took = max(time.monotonic() - started, 1e-4)
        size = max(_SMALLEST, min(_LARGEST, int(size * min(_TARGET / took, _MAX_GROWTH))))
        time.sleep(min(took, _MAX_PAUSE))
    return total
