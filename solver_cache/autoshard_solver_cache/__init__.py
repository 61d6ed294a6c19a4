"""A content-addressed store of bytes: plans, solved blocks, cost tables.

It does not interpret the bytes. Entries never change: a key is the digest of everything that
determines the bytes, so the order of writers does not matter.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autoshard_solver_cache.archive import (
    CacheFileError,
    ImportResult,
    export_entries,
    import_entries,
    verify_entries,
)
from autoshard_solver_cache.batches import in_batches, never
from autoshard_solver_cache.cache import (
    Cache,
    CacheStats,
    EntryInfo,
    NamespacedCache,
    NamespaceError,
    Usage,
)
from autoshard_solver_cache.folder import FolderCache

if TYPE_CHECKING:
    from autoshard_solver_cache.engine import (
        StoreFullError,
        StoreUnavailableError,
        default_url,
        lock,
        open_engine,
        reader,
    )
    from autoshard_solver_cache.sql import SolverCache

__all__ = [
    "Cache",
    "CacheFileError",
    "CacheStats",
    "EntryInfo",
    "FolderCache",
    "ImportResult",
    "NamespaceError",
    "NamespacedCache",
    "SolverCache",
    "StoreFullError",
    "StoreUnavailableError",
    "Usage",
    "default_url",
    "export_entries",
    "import_entries",
    "in_batches",
    "lock",
    "never",
    "open_engine",
    "reader",
    "verify_entries",
]


def __getattr__(name: str) -> Any:
    """Import the names of the SQL cache on first use: a folder needs no database library."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "sql" if name == "SolverCache" else "engine"
    return getattr(import_module(f"{__name__}.{module}"), name)
