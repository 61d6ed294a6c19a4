"""A cache of files in a folder: quick to open, for one user on one machine."""

import hashlib
import logging
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from urllib.parse import quote, unquote

import platformdirs

from autoshard_solver_cache.cache import CacheStats, EntryInfo, NamespaceError
from autoshard_solver_cache.room import Room

_log = logging.getLogger(__name__)

_TOUCH_INTERVAL = 3600.0
"""Seconds by which the time of last use may lag, so that a read is rarely also a write."""

_SEAL_SIZE = hashlib.sha256().digest_size

_LONGEST_NAME = 200
"""Longer keys are found by their digest, and cannot be listed by name."""

_HASHED = "="
"""Begins the names of those: a quoted key has no such character."""

_UNFINISHED = "+"
"""Begins the names of files that are being written."""

_NAMESPACE = re.compile(r"[a-z0-9_-]{1,64}")

_TAG = "CACHEDIR.TAG"
"""Stands in every folder of entries that we made: without it nothing is deleted there."""

_TAG_TEXT = """Signature: 8a477f597d28d172789f06886806bc55
# Made by autoshard: whatever is in this folder can be made again, and may be deleted.
# See https://bford.info/cachedir/
"""


class FolderCache:
    """One file per entry, written whole or not at all, and checked on every read.

    Safe to share between threads and processes. An entry whose bytes no longer match their
    digest is dropped and counts as a miss. Each namespace is a folder inside; one that was there
    before, with something in it, is somebody else's: nothing is written or deleted there.

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
        body = self.read(namespace, key)
        if body is None:
            self._count(namespace, "misses")
            return None
        self._count(namespace, "hits")
        self._touch(self._path(namespace, key))
        return body

    def read(self, namespace: str, key: str) -> bytes | None:
        """What `get` gives; does not count as a use."""
        path = self._path(namespace, key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        seal, body = content[:_SEAL_SIZE], content[_SEAL_SIZE:]
        if hashlib.sha256(body).digest() != seal:
            if not self._is_ours(namespace):
                return None
            self._count(namespace, "corrupted")
            _log.warning("dropped the corrupted cache entry %s", path)
            path.unlink(missing_ok=True)
            return None
        return body

    def put(self, namespace: str, key: str, body: bytes) -> bool:
        """Store bytes under a key; False if the key is taken, which leaves it as it is.

        Raises:
            OSError: the folder cannot be written, or somebody else's files are in it.
        """
        path = self._path(namespace, key)
        self._prepare(namespace)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=_UNFINISHED) as file:
            file.write(hashlib.sha256(body).digest() + body)
            file.flush()
            try:
                # The name appears with all of the bytes behind it, and only if it is free.
                path.hardlink_to(file.name)
            except FileExistsError:
                return False
        if self._room is not None and self._room.is_due(_SEAL_SIZE + len(body)):
            self.collect(max_bytes=self._room.max_bytes)
        return True

    def delete(self, namespace: str, key: str) -> bool:
        """Drop an entry; False if there is none."""
        path = self._path(namespace, key)
        if not self._is_ours(namespace):
            return False
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        return True

    def info(self, namespace: str, key: str) -> EntryInfo | None:
        """What is known of an entry, or None; does not count as a use."""
        try:
            return _info(namespace, key, self._path(namespace, key).stat())
        except FileNotFoundError:
            return None

    def held(self, namespace: str, keys: Sequence[str]) -> frozenset[str]:
        """Those of the keys that have an entry; does not count as a use."""
        return frozenset(key for key in keys if self._path(namespace, key).exists())

    def namespaces(self) -> list[str]:
        """Namespaces that hold something, sorted."""
        if not self.path.is_dir():
            return []
        names = (f.name for f in self.path.iterdir() if _NAMESPACE.fullmatch(f.name))
        return sorted(name for name in names if self._files(name))

    def entries(self, namespace: str) -> Iterator[EntryInfo]:
        """What a namespace holds, by key; entries with very long keys are left out."""
        found = [(Path(path).name, status) for path, status in self._files(namespace)]
        named = ((unquote(name), s) for name, s in found if not name.startswith(_HASHED))
        for key, status in sorted(named, key=lambda pair: pair[0]):
            yield _info(namespace, key, status)

    def collect(self, *, max_bytes: int | None = None, max_age: float | None = None) -> int:
        """Drop what was used longest ago until both limits hold; how many entries."""
        oldest = 0.0 if max_age is None else time.time() - max_age
        files = [file for namespace in self.namespaces() for file in self._files(namespace)]
        kept, dropped = 0, 0
        for path, status in sorted(files, key=lambda file: file[1].st_mtime, reverse=True):
            kept += status.st_size
            if (max_bytes is not None and kept > max_bytes) or status.st_mtime < oldest:
                Path(path).unlink(missing_ok=True)
                dropped += 1
        return dropped

    def stats(self, namespace: str) -> CacheStats:
        """What a namespace holds, and how it has been used."""
        sizes = [status.st_size for _, status in self._files(namespace)]
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

    def _folder(self, namespace: str) -> Path:
        if not _NAMESPACE.fullmatch(namespace):
            raise NamespaceError(
                f"{namespace!r} is no namespace of a cache: give up to 64 small letters, digits, "
                "'-' and '_', such as 'plans' or 'blocks'"
            )
        return self.path / namespace

    def _path(self, namespace: str, key: str) -> Path:
        return self._folder(namespace) / _name(key)

    def _is_ours(self, namespace: str) -> bool:
        """Whether we made the folder of a namespace, so that we may delete in it."""
        # The one of the user's cache folder is ours by its place: releases before had no tag.
        return (self._folder(namespace) / _TAG).is_file() or self.path == default_folder()

    def _prepare(self, namespace: str) -> None:
        """Make the folder of a namespace, with its tag."""
        if self._is_ours(namespace):
            self._folder(namespace).mkdir(parents=True, exist_ok=True)
            return
        folder = self._folder(namespace)
        folder.mkdir(parents=True, exist_ok=True)
        is_used = any(folder.iterdir())
        # Others may make it in this moment: the tag comes before anything else.
        if is_used and not self._is_ours(namespace):
            raise FileExistsError(
                f"{folder} holds files that no cache has written (it has no {_TAG}); "
                "give another folder for the cache"
            )
        (folder / _TAG).write_text(_TAG_TEXT, encoding="utf-8")

    def _files(self, namespace: str) -> list[tuple[str, os.stat_result]]:
        """Path and status of each entry."""
        return _entry_files(self._folder(namespace)) if self._is_ours(namespace) else []

    def _count(self, namespace: str, event: str) -> None:
        with self._lock:
            self._counts[namespace, event] += 1

    def _touch(self, path: Path) -> None:
        # Somebody may drop it in this very moment.
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _TOUCH_INTERVAL:
                os.utime(path)


def default_folder() -> Path:
    """Where blocks are kept for this user, unless somebody says otherwise."""
    return platformdirs.user_cache_path("autoshard") / "solved"


def _info(namespace: str, key: str, status: os.stat_result) -> EntryInfo:
    size = max(0, status.st_size - _SEAL_SIZE)
    # Written once, its times are those of its uses; not all systems know of its birth.
    born = getattr(status, "st_birthtime", status.st_ctime)
    made_at = min(born, status.st_mtime)
    return EntryInfo(namespace, key, size, status.st_size, made_at, status.st_mtime)


def _name(key: str) -> str:
    # No key leads out of the folder: what has a meaning in paths is quoted.
    name = quote(key, safe="").replace(".", "%2E")
    if len(name) > _LONGEST_NAME:
        return _HASHED + hashlib.sha256(key.encode()).hexdigest()
    return name


def _is_name(name: str) -> bool:
    """Whether a file may be an entry: it has a name that we give."""
    if name.startswith(_HASHED):
        return re.fullmatch(r"[0-9a-f]{64}", name[len(_HASHED) :]) is not None
    return _name(unquote(name)) == name


def _entry_files(folder: Path) -> list[tuple[str, os.stat_result]]:
    """Path and status of each whole file; those that vanish meanwhile are left out."""
    found = []
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return []
    for entry in entries:
        try:
            if _is_name(entry.name) and entry.is_file(follow_symlinks=False):
                found.append((entry.path, entry.stat()))
        except FileNotFoundError:
            continue
    return found
