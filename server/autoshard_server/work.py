"""A worker on its own: it claims jobs from a store that services on other hosts fill."""

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

import structlog
import uvicorn
from fastapi import FastAPI

from autoshard_server.serve import STARTUP_FAILED
from autoshard_server.settings import Settings
from autoshard_server.solvers.executors import make_executor
from autoshard_server.solvers.workers import Workers
from autoshard_server.stores import open_stores
from autoshard_server.telemetry.logs import configure_logging
from autoshard_server.telemetry.tracing import start_tracing
from autoshard_server.worker_app import create_worker_app
from autoshard_solver_cache import StoreUnavailableError

WORKER_FAILED = 1
"""Exit status where a worker has died, and whoever watches over it should start it again."""

_LAST_ANSWERS = 5
"""Seconds for answers that are under way when the worker ends."""

_log = structlog.get_logger(__name__)


def work(
    *,
    store_url: str | None = None,
    num_workers: int | None = None,
    host: str | None = None,
    port: int | None = None,
    log_level: str = "info",
) -> None:
    """Run jobs until SIGTERM or Ctrl-C; then claim no more, and finish or give back.

    Args:
        store_url: database of the service, as a SQLAlchemy URL; AUTOSHARD_STORE_URL if left out.
        num_workers: solves that run at once; AUTOSHARD_NUM_WORKERS if left out.
        host: address to answer `/livez` and `/metrics` on; AUTOSHARD_WORKER_HOST if left out.
        port: of the same, 0 for none; AUTOSHARD_WORKER_PORT if left out.
        log_level: debug, info, warning or error.

    Raises:
        ValueError: there is no such log level.
        SystemExit: the store or the port cannot be opened, or a worker died; the log says why.
    """
    configure_logging(log_level)
    given = {
        "store_url": store_url,
        "num_workers": num_workers,
        "worker_host": host,
        "worker_port": port,
    }
    told = {name: value for name, value in given.items() if value is not None}
    settings = Settings.model_validate({**Settings().model_dump(), **told})
    asked_to_end = Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: asked_to_end.set())
    start_tracing()
    try:
        listening = _listen(settings)
        stores = open_stores(settings)
        executor = make_executor(settings)
    except (StoreUnavailableError, RuntimeError, ConnectionError, OSError) as error:
        _log.error("startup_failed", reason=str(error))
        raise SystemExit(STARTUP_FAILED) from None
    workers = Workers(stores, executor, settings)
    workers.start()
    _log.info("worker_started", num_workers=settings.num_workers)
    with _shown(create_worker_app(workers, stores, settings), listening):
        have_died = _watch(workers, asked_to_end)
        _log.info("worker_draining", grace=settings.shutdown_grace)
        workers.stop()
    stores.close()
    _log.info("worker_ended")
    if have_died:
        raise SystemExit(WORKER_FAILED)


def _watch(workers: Workers, asked_to_end: Event) -> bool:
    """Wait until the workers are to end; whether it is because one of them has died."""
    were_alive = True
    # In steps: a wait without end would not let signals through on every system.
    while not asked_to_end.wait(1.0):
        if not workers.are_running:
            _log.error("worker_died")
            return True
        if workers.alive != were_alive:
            were_alive = workers.alive
            if were_alive:
                _log.info("worker_recovered")
            else:
                _log.error("worker_unfit", reason="solvers cannot be started, or are lost at once")
    return False


def _listen(settings: Settings) -> socket.socket | None:
    """The socket on which the worker shows how it is; None where none is wanted.

    Raises:
        OSError: it cannot be opened.
    """
    host, port = settings.worker_host, settings.worker_port
    if not port:
        return None
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise OSError(f"{host}:{port} cannot be listened on: {error.strerror}") from error


@contextmanager
def _shown(app: FastAPI, listening: socket.socket | None) -> Iterator[None]:
    """An application on a socket, in a thread, for as long as the context."""
    if listening is None:
        yield
        return
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_LAST_ANSWERS,
    )
    server = uvicorn.Server(config)
    thread = Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    host, port = listening.getsockname()[:2]
    _log.info("worker_shown", host=host, port=port)
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()
