"""A content-addressed store of bytes: plans, solved blocks, cost tables.

It knows neither what the bytes mean nor who asks. Entries never change: a key is the
digest of everything that determines the bytes, so the first writer is as right as any
other.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoshard_solver_cache.cache import Cache, CacheStats, EntryInfo, NamespaceError
    from autoshard_solver_cache.engine import (
        StoreFullError,
        StoreUnavailableError,
        create_tables,
        default_url,
        lock,
        open_engine,
        reader,
    )
    from autoshard_solver_cache.exchange import (
        ExchangeError,
        Imported,
        export_entries,
        import_entries,
        verify_entries,
    )
    from autoshard_solver_cache.folder import FolderCache
    from autoshard_solver_cache.memory import MemoryCache
    from autoshard_solver_cache.shelf import Shelf
    from autoshard_solver_cache.sql import SolverCache

__all__ = [
    "Cache",
    "CacheStats",
    "EntryInfo",
    "ExchangeError",
    "FolderCache",
    "Imported",
    "MemoryCache",
    "NamespaceError",
    "Shelf",
    "SolverCache",
    "StoreFullError",
    "StoreUnavailableError",
    "create_tables",
    "default_url",
    "export_entries",
    "import_entries",
    "lock",
    "open_engine",
    "reader",
    "verify_entries",
]

_HOMES = {
    "Cache": "cache",
    "CacheStats": "cache",
    "EntryInfo": "cache",
    "ExchangeError": "exchange",
    "FolderCache": "folder",
    "Imported": "exchange",
    "MemoryCache": "memory",
    "NamespaceError": "cache",
    "Shelf": "shelf",
    "SolverCache": "sql",
    "StoreFullError": "engine",
    "StoreUnavailableError": "engine",
    "create_tables": "engine",
    "default_url": "engine",
    "export_entries": "exchange",
    "import_entries": "exchange",
    "lock": "engine",
    "open_engine": "engine",
    "reader": "engine",
    "verify_entries": "exchange",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is asked for: a folder needs no database library."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
