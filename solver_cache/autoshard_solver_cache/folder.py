"""A cache of files in a folder: quick to open, for one user on one machine."""

import hashlib
import logging
import os
import tempfile
import time
from collections import Counter
from pathlib import Path
from threading import Lock

import platformdirs

from autoshard_solver_cache.cache import CacheStats
from autoshard_solver_cache.room import Room

_log = logging.getLogger(__name__)

_TOUCH_INTERVAL = 3600.0
"""Seconds by which the time of last use may lag, so that a read is rarely also a write."""

_SEAL_SIZE = hashlib.sha256().digest_size


class FolderCache:
    """One file per entry, written whole or not at all, and checked on every read.

    Safe to share between threads and processes. An entry whose bytes no longer match their
    digest is dropped and counts as a miss.

    Args:
        path: the folder, made when it is first written to; in the user's cache folder if
            left out.
        max_bytes: room for all entries together; the least recently used go first.
    """

    def __init__(self, path: str | Path | None = None, *, max_bytes: int | None = None) -> None:
        self.path = default_folder() if path is None else Path(path)
        self._room = None if max_bytes is None else Room(max_bytes)
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = Lock()

    def get(self, namespace: str, key: str) -> bytes | None:
        """The bytes stored under the key, or None: nothing there, or no longer intact."""
        path = self._path(namespace, key)
        try:
            content = path.read_bytes()
            used_at = path.stat().st_mtime
        except FileNotFoundError:
            self._count(namespace, "misses")
            return None
        seal, body = content[:_SEAL_SIZE], content[_SEAL_SIZE:]
        if hashlib.sha256(body).digest() != seal:
            self._count(namespace, "misses", "corrupted")
            _log.warning("dropped the corrupted cache entry %s", path)
            path.unlink(missing_ok=True)
            return None
        self._count(namespace, "hits")
        if time.time() - used_at > _TOUCH_INTERVAL:
            os.utime(path)
        return body

    def put(self, namespace: str, key: str, body: bytes) -> bool:
        """Store bytes under a key; False if the key is taken, which leaves it as it is."""
        path = self._path(namespace, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent) as file:
            file.write(hashlib.sha256(body).digest() + body)
            file.flush()
            try:
                # The name appears with all of the bytes behind it, and only if it is free.
                path.hardlink_to(file.name)
            except FileExistsError:
                return False
        if self._room is not None and self._room.is_due(_SEAL_SIZE + len(body)):
            self._make_room(self._room.max_bytes)
        return True

    def delete(self, namespace: str, key: str) -> bool:
        """Drop an entry; False if there is none."""
        try:
            self._path(namespace, key).unlink()
        except FileNotFoundError:
            return False
        return True

    def stats(self, namespace: str) -> CacheStats:
        """What a namespace holds, and how it has been used."""
        sizes = [size for _, size, _ in _files(self.path / namespace)]
        with self._lock:
            return CacheStats(
                num_entries=len(sizes),
                nbytes=sum(sizes),
                hits=self._counts[namespace, "hits"],
                misses=self._counts[namespace, "misses"],
                corrupted=self._counts[namespace, "corrupted"],
            )

    def close(self) -> None:
        """Nothing stays open between calls."""

    def _path(self, namespace: str, key: str) -> Path:
        # The name of a file is never what somebody else calls the entry.
        return self.path / namespace / hashlib.sha256(key.encode()).hexdigest()

    def _count(self, namespace: str, *events: str) -> None:
        with self._lock:
            self._counts.update((namespace, event) for event in events)

    def _make_room(self, max_bytes: int) -> None:
        kept = 0
        files = [f for folder in self.path.iterdir() if folder.is_dir() for f in _files(folder)]
        for _, size, path in sorted(files, reverse=True):
            kept += size
            if kept > max_bytes:
                Path(path).unlink(missing_ok=True)


def default_folder() -> Path:
    """Where blocks are kept for this user, unless somebody says otherwise."""
    return platformdirs.user_cache_path("autoshard") / "solved"


def _files(folder: Path) -> list[tuple[float, int, str]]:
    """Time of last use, size and path of each file; those that vanish meanwhile are left out."""
    found = []
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return []
    for entry in entries:
        try:
            status = entry.stat()
        except FileNotFoundError:
            continue
        found.append((status.st_mtime, status.st_size, entry.path))
    return found
