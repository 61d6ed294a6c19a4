"""Entries as a tar file: taken along, checked, and put into another cache."""

import gzip
import hashlib
import lzma
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Literal
from urllib.parse import quote, unquote

from autoshard_solver_cache.cache import Cache, EntryInfo

MAX_ENTRY = 512 << 20
"""No entry is longer; a member that says so is not read."""

_LONGEST_KEY = 255
"""What a database has room for."""

_NAME = re.compile(r"(?P<namespace>[a-z0-9_-]{1,64})/(?P<key>[^/]+)/(?P<sha256>[0-9a-f]{64})")

_UNREADABLE = (tarfile.TarError, EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error)
"""What a damaged file raises, by the way in which it is compressed."""


class ExchangeError(ValueError):
    """A file cannot be read as a tar file of entries."""


@dataclass(frozen=True, slots=True)
class Imported:
    """What became of the entries of a file.

    Attributes:
        num_added: entries that are new here.
        num_known: entries that were here before, and stay as they were.
        refused: names of members that are no entries, or whose bytes are not those of their
            digest.
    """

    num_added: int
    num_known: int
    refused: tuple[str, ...]


def verify_entries(cache: Cache, namespaces: Iterable[str] | None = None) -> Iterator[EntryInfo]:
    """Read everything; yields the entries that were no longer intact, which are dropped."""
    for entry in _entries(cache, namespaces):
        if cache.read(entry.namespace, entry.key) is None:
            yield entry


def export_entries(cache: Cache, path: Path, namespaces: Iterable[str] | None = None) -> int:
    """Write entries to a tar file, compressed if its name ends in .gz.

    A member is named NAMESPACE/KEY/SHA256 and holds the bytes; there is nothing else in it.

    Args:
        cache: whose entries.
        path: of the file; whatever is there is replaced when all is written.
        namespaces: only these; all if left out.

    Returns:
        how many entries were written.
    """
    unfinished = path.with_name(path.name + ".part")
    mode: Literal["w:gz", "w:"] = "w:gz" if path.suffix == ".gz" else "w:"
    count = 0
    try:
        with tarfile.open(unfinished, mode) as file:
            for entry in _entries(cache, namespaces):
                body = cache.read(entry.namespace, entry.key)
                if body is None:
                    continue
                digest = hashlib.sha256(body).hexdigest()
                member = tarfile.TarInfo(f"{entry.namespace}/{_quoted(entry.key)}/{digest}")
                member.size, member.mtime = len(body), int(entry.created_at)
                file.addfile(member, BytesIO(body))
                count += 1
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return count


def import_entries(cache: Cache, path: Path) -> Imported:
    """Put the entries of a tar file into a cache, each only if its bytes are those of its digest.

    That shows that nothing was damaged on the way. What an entry says is up to whoever wrote
    it: import only from those whose plans you would use.

    Raises:
        ExchangeError: the file is no tar file, or ends too early; entries before that are in.
    """
    added = known = 0
    refused: list[str] = []
    try:
        with tarfile.open(path, "r:*") as file:
            for member in file:
                found = _NAME.fullmatch(member.name)
                key = "" if found is None else unquote(found["key"])
                body = _body(file, member) if _is_key(key) else None
                if found is None or body is None or not _is_intact(body, found["sha256"]):
                    refused.append(member.name)
                elif cache.put(found["namespace"], key, body):
                    added += 1
                else:
                    known += 1
    except _UNREADABLE as error:
        raise ExchangeError(
            f"{path} cannot be read as a tar file of cache entries: {error}; "
            f"{added} new entries before that were imported"
        ) from error
    return Imported(added, known, tuple(refused))


def _entries(cache: Cache, namespaces: Iterable[str] | None) -> Iterator[EntryInfo]:
    for namespace in cache.namespaces() if namespaces is None else namespaces:
        yield from cache.entries(namespace)


def _quoted(key: str) -> str:
    return quote(key, safe="").replace(".", "%2E")


def _is_key(key: str) -> bool:
    return 0 < len(key) <= _LONGEST_KEY and "\0" not in key


def _body(file: tarfile.TarFile, member: tarfile.TarInfo) -> bytes | None:
    # A sparse one is a few bytes in the file, and as long as it likes in memory.
    if not member.isreg() or member.issparse() or member.size > MAX_ENTRY:
        return None
    stream = file.extractfile(member)
    return None if stream is None else stream.read()


def _is_intact(body: bytes, sha256: str) -> bool:
    return hashlib.sha256(body).hexdigest() == sha256
