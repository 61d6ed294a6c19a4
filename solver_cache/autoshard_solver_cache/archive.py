"""Cache entries as a tar file: export, import and verification."""

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
"""Largest entry in bytes; larger members are not read."""

_MAX_KEY = 255
"""Length of the key column in a database."""

_NAME = re.compile(r"(?P<namespace>[a-z0-9_-]{1,64})/(?P<key>[^/]+)/(?P<sha256>[0-9a-f]{64})")

_UNREADABLE = (tarfile.TarError, EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error)
"""Errors of a damaged file, by its compression."""


class CacheFileError(ValueError):
    """A file cannot be read as a tar file of entries."""


@dataclass(frozen=True, slots=True)
class ImportResult:
    """Outcome of an import.

    Attributes:
        num_added: new entries.
        num_existing: entries that existed before and are unchanged.
        rejected: names of members that are not entries, or that do not match their digest.
    """

    num_added: int
    num_existing: int
    rejected: tuple[str, ...]


def verify_entries(cache: Cache, namespaces: Iterable[str] | None = None) -> Iterator[EntryInfo]:
    """Read all entries; yield the corrupted ones, which are dropped."""
    for entry in _entries(cache, namespaces):
        if cache.read(entry.namespace, entry.key) is None:
            yield entry


def export_entries(cache: Cache, path: Path, namespaces: Iterable[str] | None = None) -> int:
    """Write entries to a tar file, compressed if its name ends in .gz.

    Each member is named NAMESPACE/KEY/SHA256 and contains the bytes of one entry.

    Args:
        cache: with the entries.
        path: of the file; an existing one is replaced when all entries are written.
        namespaces: only these; all if left out.

    Returns:
        number of entries written.
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


def import_entries(cache: Cache, path: Path) -> ImportResult:
    """Put the entries of a tar file into a cache, if their bytes match their digests.

    This detects damage, not forgery: import only files of people whose plans you would use.

    Raises:
        CacheFileError: the file is not a tar file, or is truncated; entries before are imported.
    """
    added = existing = 0
    rejected: list[str] = []
    try:
        with tarfile.open(path, "r:*") as file:
            for member in file:
                found = _NAME.fullmatch(member.name)
                key = "" if found is None else unquote(found["key"])
                body = _body(file, member) if _is_key(key) else None
                if found is None or body is None or not _is_intact(body, found["sha256"]):
                    rejected.append(member.name)
                elif cache.put(found["namespace"], key, body):
                    added += 1
                else:
                    existing += 1
    except _UNREADABLE as error:
        raise CacheFileError(
            f"{path} cannot be read as a tar file of cache entries: {_first_line(error)}; "
            f"{added} new entries before that were imported"
        ) from error
    return ImportResult(added, existing, tuple(rejected))


def _first_line(error: Exception) -> str:
    """Why a file is no tar file; tarfile lists each kind of compression that it has tried."""
    return "it is damaged, or of another kind" if "\n" in str(error) else str(error)


def _entries(cache: Cache, namespaces: Iterable[str] | None) -> Iterator[EntryInfo]:
    for namespace in cache.namespaces() if namespaces is None else namespaces:
        yield from cache.entries(namespace)


def _quoted(key: str) -> str:
    return quote(key, safe="").replace(".", "%2E")


def _is_key(key: str) -> bool:
    return 0 < len(key) <= _MAX_KEY and "\0" not in key


def _body(file: tarfile.TarFile, member: tarfile.TarInfo) -> bytes | None:
    # A sparse member can be a few bytes in the file, and of any length in memory.
    if not member.isreg() or member.issparse() or member.size > MAX_ENTRY:
        return None
    stream = file.extractfile(member)
    return None if stream is None else stream.read()


def _is_intact(body: bytes, sha256: str) -> bool:
    return hashlib.sha256(body).hexdigest() == sha256
