"""When to look whether what is stored still has room."""

from threading import Lock

_CHECKS = 50
"""How often room is checked while as much is written as there is room for."""


class Room:
    """Counts what is written, since looking takes longer than writing.

    Safe to share between threads.

    Args:
        max_bytes: room for all entries together.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        # What others wrote before is unknown, so the first write is due.
        self._unchecked = max_bytes
        self._lock = Lock()

    def is_due(self, written: int) -> bool:
        """Whether to look now, after so many more bytes were written."""
        with self._lock:
            self._unchecked += written
            if self._unchecked * _CHECKS < self.max_bytes:
                return False
            self._unchecked = 0
            return True
