"""The cache of the service, and its budget."""

from sqlalchemy import Engine

from autoshard_server.projects import project_of
from autoshard_server.settings import Settings
from autoshard_solver_cache import SolverCache


def open_cache(engine: Engine, settings: Settings) -> SolverCache:
    """The cache of a database; if it exceeds its budget, the largest projects lose entries.

    Raises:
        StoreUnavailableError: it cannot be read or written.
    """
    return SolverCache(
        engine,
        max_bytes=settings.cache_max_bytes,
        group_of=project_of,
        max_group_bytes=settings.project_max_bytes,
    )
