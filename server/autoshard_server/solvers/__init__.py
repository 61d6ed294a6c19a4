"""Running jobs: workers, executors, and solver processes."""

from typing import Any

from autoshard.errors import MissingPackageError
from autoshard_server.settings import Settings
from autoshard_server.solvers.executor import Executor, ProcessExecutor

__all__ = ["make_executor"]


def make_executor(settings: Settings) -> Executor:
    """The executor of a service or a worker.

    Raises:
        MissingPackageError: the settings require Ray, which is not installed.
        ConnectionError: there is no Ray cluster at the address.
    """
    options: dict[str, Any] = {
        "environment": settings.environment,
        "max_bytes": settings.max_job_bytes,
    }
    if settings.executor == "process":
        return ProcessExecutor(**options)
    try:
        from autoshard_server.solvers.ray_executor import RayExecutor  # noqa: PLC0415  an extra
    except ImportError as error:
        raise MissingPackageError(
            "AUTOSHARD_EXECUTOR is 'ray', but Ray is not installed: pip install 'autoshard[ray]'"
        ) from error
    return RayExecutor(settings.ray_address, **options)
