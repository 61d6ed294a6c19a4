"""A content-addressed store of bytes: plans, solved blocks, cost tables.

It knows neither what the bytes mean nor who asks. Entries never change: a key is the
digest of everything that determines the bytes, so the first writer is as right as any
other.
"""

from autoshard_solver_cache.cache import Cache, CacheStats
from autoshard_solver_cache.engine import (
    StoreUnavailableError,
    create_tables,
    default_url,
    open_engine,
    reader,
)
from autoshard_solver_cache.memory import MemoryCache
from autoshard_solver_cache.sql import SolverCache

__all__ = [
    "Cache",
    "CacheStats",
    "MemoryCache",
    "SolverCache",
    "StoreUnavailableError",
    "create_tables",
    "default_url",
    "open_engine",
    "reader",
]
