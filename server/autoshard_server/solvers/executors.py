"""Which executor the settings ask for."""

from autoshard_server.settings import Settings
from autoshard_server.solvers.executor import Executor, ProcessExecutor


def make_executor(settings: Settings) -> Executor:
    """Where solves of a service or a worker run.

    Raises:
        RuntimeError: Ray is asked for, but not installed.
        ConnectionError: there is no Ray cluster at the address.
    """
    if settings.executor == "process":
        return ProcessExecutor(environment=settings.environment, max_bytes=settings.max_job_bytes)
    try:
        from autoshard_server.solvers.ray_executor import RayExecutor  # noqa: PLC0415  an extra
    except ImportError as error:
        raise RuntimeError(
            "AUTOSHARD_EXECUTOR is 'ray', but Ray is not installed: pip install 'autoshard[ray]'"
        ) from error
    return RayExecutor(
        settings.ray_address,
        environment=settings.environment,
        max_bytes=settings.max_job_bytes,
    )
