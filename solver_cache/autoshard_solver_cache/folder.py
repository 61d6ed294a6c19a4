"""A cache of files in a folder: fast to open, for one user on one machine."""

import hashlib
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, unquote

import platformdirs

from autoshard_solver_cache.batches import never
from autoshard_solver_cache.cache import Cache, EntryInfo, NamespaceError, Usage

_log = logging.getLogger(__name__)

_DIGEST_SIZE = hashlib.sha256().digest_size

_MAX_NAME = 200
"""Longer keys are stored under their digest, and cannot be listed by name."""

_HASHED = "="
"""First character of the names of such files: a quoted key has no such character."""

_UNFINISHED = "+"
"""First character of the names of files that are being written."""

_NAMESPACE = re.compile(r"[a-z0-9_-]{1,64}")

_TAG = "CACHEDIR.TAG"
"""File in every folder that a cache has made; nothing is deleted in folders without it."""

_TAG_TEXT = """Signature: 8a477f597d28d172789f06886806bc55
# Made by autoshard: whatever is in this folder can be made again, and may be deleted.
# See https://bford.info/cachedir/
"""


class FolderCache(Cache):
    """One file per entry, written atomically and checked on every read.

    Safe to share between threads and processes. An entry whose bytes no longer match their
    digest is dropped and counts as a miss. Each namespace is a sub-folder. In a sub-folder that
    already has files of another program, nothing is written or deleted.

    Args:
        path: the folder, made by the first write; in the user's cache folder if left out.
        max_bytes: budget for all entries together; the least recently used are evicted first.
    """

    def __init__(self, path: str | Path | None = None, *, max_bytes: int | None = None) -> None:
        super().__init__(max_bytes)
        self.path = _default_folder() if path is None else Path(path)

    def put(self, namespace: str, key: str, body: bytes) -> bool:
        """Store bytes under a key; False if the key exists, which leaves its entry unchanged.

        Raises:
            OSError: the folder cannot be written, or has files of another program.
        """
        path = self._path(namespace, key)
        self._make_folder(namespace)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=_UNFINISHED) as file:
            file.write(hashlib.sha256(body).digest() + body)
            file.flush()
            try:
                # Atomic: the name appears with all bytes, and only if it does not exist.
                path.hardlink_to(file.name)
            except FileExistsError:
                return False
        self._wrote(_DIGEST_SIZE + len(body))
        return True

    def delete(self, namespace: str, key: str) -> bool:
        """Delete an entry; False if there is none."""
        path = self._path(namespace, key)
        if not self._is_made_by_cache(namespace):
            return False
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        return True

    def info(self, namespace: str, key: str) -> EntryInfo | None:
        """Metadata of an entry, or None; does not count as a use."""
        try:
            return _info(namespace, key, self._path(namespace, key).stat())
        except FileNotFoundError:
            return None

    def namespaces(self) -> list[str]:
        """Namespaces that have entries, sorted."""
        if not self.path.is_dir():
            return []
        names = (f.name for f in self.path.iterdir() if _NAMESPACE.fullmatch(f.name))
        return sorted(name for name in names if self._files(name))

    def entries(self, namespace: str) -> Iterator[EntryInfo]:
        """Entries of a namespace, ordered by key; those with very long keys are left out."""
        found = [(path.name, status) for path, status in self._files(namespace)]
        named = ((unquote(name), s) for name, s in found if not name.startswith(_HASHED))
        for key, status in sorted(named, key=lambda pair: pair[0]):
            yield _info(namespace, key, status)

    def usage(self) -> Mapping[str, Usage]:
        """Contents of the namespaces that have entries."""
        sizes = {n: [status.st_size for _, status in self._files(n)] for n in self.namespaces()}
        return {n: Usage(len(found), sum(found)) for n, found in sizes.items() if found}

    def evict(
        self,
        *,
        max_bytes: int | None = None,
        max_age: float | None = None,
        namespaces: Collection[str] | None = None,
        is_over: Callable[[], bool] = never,
    ) -> int:
        """Delete the least recently used entries until both limits are met; return the number."""
        oldest = 0.0 if max_age is None else time.time() - max_age
        names = self.namespaces() if namespaces is None else namespaces
        files = [file for namespace in names for file in self._files(namespace)]
        nbytes, deleted = 0, 0
        for path, status in sorted(files, key=lambda file: file[1].st_mtime, reverse=True):
            if is_over():
                break
            nbytes += status.st_size
            if (max_bytes is not None and nbytes > max_bytes) or status.st_mtime < oldest:
                path.unlink(missing_ok=True)
                deleted += 1
        return deleted

    def _load(self, namespace: str, key: str) -> tuple[bytes, float] | None:
        path = self._path(namespace, key)
        try:
            content, used_at = path.read_bytes(), path.stat().st_mtime
        except FileNotFoundError:
            return None
        digest, body = content[:_DIGEST_SIZE], content[_DIGEST_SIZE:]
        if hashlib.sha256(body).digest() == digest:
            return body, used_at
        if self._is_made_by_cache(namespace):
            self._count(namespace, "corrupted")
            _log.warning("dropped the corrupted cache entry %s", path)
            path.unlink(missing_ok=True)
        return None

    def _touch(self, namespace: str, key: str) -> None:
        # Another process may delete it at this moment.
        with suppress(FileNotFoundError):
            os.utime(self._path(namespace, key))

    def _folder(self, namespace: str) -> Path:
        if not _NAMESPACE.fullmatch(namespace):
            raise NamespaceError(
                f"{namespace!r} is not a valid cache namespace: use up to 64 lower-case letters, "
                "digits, '-' and '_', such as 'plans' or 'blocks'"
            )
        return self.path / namespace

    def _path(self, namespace: str, key: str) -> Path:
        return self._folder(namespace) / _file_name(key)

    def _is_made_by_cache(self, namespace: str) -> bool:
        """True if a cache made the folder of a namespace, so that files may be deleted in it."""
        # The default folder is recognised by its path: older releases wrote no tag.
        return (self._folder(namespace) / _TAG).is_file() or self.path == _default_folder()

    def _make_folder(self, namespace: str) -> None:
        """Make the folder of a namespace, with its tag."""
        folder, is_made_by_cache = self._folder(namespace), self._is_made_by_cache(namespace)
        folder.mkdir(parents=True, exist_ok=True)
        if is_made_by_cache:
            return
        is_used = any(folder.iterdir())
        # Another process may have made it meanwhile: it writes the tag before any entry.
        if is_used and not self._is_made_by_cache(namespace):
            raise FileExistsError(
                f"{folder} has files that no cache has written (there is no {_TAG}); "
                "choose another folder for the cache"
            )
        (folder / _TAG).write_text(_TAG_TEXT, encoding="utf-8")

    def _files(self, namespace: str) -> list[tuple[Path, os.stat_result]]:
        """Path and status of each entry; files that are deleted meanwhile are left out."""
        if not self._is_made_by_cache(namespace):
            return []
        found = []
        with suppress(FileNotFoundError), os.scandir(self._folder(namespace)) as files:
            for file in files:
                with suppress(FileNotFoundError):
                    if _is_entry(file.name) and file.is_file(follow_symlinks=False):
                        found.append((Path(file.path), file.stat()))
        return found


def _default_folder() -> Path:
    """The folder of this user's solved blocks, if no other is given."""
    return platformdirs.user_cache_path("autoshard") / "solved"


def _info(namespace: str, key: str, status: os.stat_result) -> EntryInfo:
    size = max(0, status.st_size - _DIGEST_SIZE)
    # The content is never modified, so mtime is the last use; not all systems have a birth time.
    born = getattr(status, "st_birthtime", status.st_ctime)
    created_at = min(born, status.st_mtime)
    return EntryInfo(namespace, key, size, status.st_size, created_at, status.st_mtime)


def _file_name(key: str) -> str:
    # Characters with a meaning in paths are quoted, so no key leads out of the folder.
    name = quote(key, safe="").replace(".", "%2E")
    if len(name) > _MAX_NAME:
        return _HASHED + hashlib.sha256(key.encode()).hexdigest()
    return name


def _is_entry(name: str) -> bool:
    """True if a file has a name that an entry can have."""
    if name.startswith(_HASHED):
        return re.fullmatch(r"[0-9a-f]{64}", name[len(_HASHED) :]) is not None
    return _file_name(unquote(name)) == name
