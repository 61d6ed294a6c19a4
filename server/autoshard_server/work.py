"""A worker on its own: it claims jobs from a store that services on other hosts fill."""

import signal
from threading import Event

import structlog

from autoshard_server.serve import STARTUP_FAILED
from autoshard_server.settings import Settings
from autoshard_server.solvers.executors import make_executor
from autoshard_server.solvers.workers import Workers
from autoshard_server.stores import open_stores
from autoshard_server.telemetry.logs import configure_logging
from autoshard_server.telemetry.tracing import start_tracing
from autoshard_solver_cache import StoreUnavailableError

_log = structlog.get_logger(__name__)


def work(
    *,
    store_url: str | None = None,
    num_workers: int | None = None,
    log_level: str = "info",
) -> None:
    """Run jobs until SIGTERM or Ctrl-C; then claim no more, and finish or give back.

    Args:
        store_url: database of the service, as a SQLAlchemy URL; AUTOSHARD_STORE_URL if left out.
        num_workers: solves that run at once; AUTOSHARD_NUM_WORKERS if left out.
        log_level: debug, info, warning or error.

    Raises:
        ValueError: there is no such log level.
        SystemExit: the store cannot be opened; the log says why.
    """
    configure_logging(log_level)
    given = {"store_url": store_url, "num_workers": num_workers}
    told = {name: value for name, value in given.items() if value is not None}
    settings = Settings.model_validate({**Settings().model_dump(), **told})
    asked_to_end = Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: asked_to_end.set())
    start_tracing()
    try:
        stores = open_stores(settings)
        executor = make_executor(settings)
    except (StoreUnavailableError, RuntimeError, ConnectionError) as error:
        _log.error("startup_failed", reason=str(error))
        raise SystemExit(STARTUP_FAILED) from None
    workers = Workers(stores, executor, settings)
    workers.start()
    _log.info("worker_started", num_workers=settings.num_workers)
    # In steps: a wait without end would not let signals through on every system.
    while not asked_to_end.wait(1.0):
        pass
    _log.info("worker_draining", grace=settings.shutdown_grace)
    workers.stop()
    stores.close()
    _log.info("worker_ended")
