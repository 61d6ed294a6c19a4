"""Running the service, or workers without a service, in this process."""

import asyncio
import gc
import signal
import socket
import ssl
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Event, Thread
from types import FrameType
from typing import Any, Literal, NoReturn

import structlog
import uvicorn
from fastapi import FastAPI
from sqlalchemy import make_url

from autoshard.errors import OptionError
from autoshard_server.app import create_app, create_worker_app
from autoshard_server.environment import load_settings
from autoshard_server.http.auth import is_loopback
from autoshard_server.http.connections import Config
from autoshard_server.http.middleware import STARTUP_ERRORS
from autoshard_server.listeners import address_of, tcp_listeners, unix_listener
from autoshard_server.settings import Settings
from autoshard_server.solvers import make_executor
from autoshard_server.solvers.workers import Workers
from autoshard_server.store.database import Stores
from autoshard_server.telemetry import configure_logging, start_tracing
from autoshard_solver_cache import StoreUnavailableError

STARTUP_FAILED = 3
"""Exit status if the service or a worker cannot start; that of uvicorn's command."""

WORKER_FAILED = 1
"""Exit status if a worker has died and should be started again."""

_WORKER_GRACE = 5
"""Seconds for HTTP requests in progress when a worker ends."""

_SWITCH_INTERVAL = 0.001
"""Seconds after which a thread lets another have the interpreter; Python's default is 0.005. The
event loop gives it up at each call of the system, so it waits for a thread many times a request."""

_log = structlog.get_logger(__name__)

LogLevel = Literal["debug", "info", "warning", "error"]


def serve(
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    uds: str | None = None,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    root_path: str | None = None,
    forwarded_allow_ips: str | None = None,
    store_url: str | None = None,
    log_level: LogLevel = "info",
    auth: bool | None = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C; then finish requests and jobs, within time limits.

    Args:
        host: address to listen on; 0.0.0.0 for requests from other machines.
        port: 0 chooses a free one and logs it.
        uds: path of a Unix socket to listen on, instead of an address.
        tls_cert: file with the certificate and its chain (PEM), to serve https.
        tls_key: file with the private key of the certificate (PEM), if that file lacks it.
        root_path: path under which a reverse proxy publishes the service; AUTOSHARD_ROOT_PATH if
            left out.
        forwarded_allow_ips: addresses of the reverse proxies whose X-Forwarded-For and
            X-Forwarded-Proto are used; AUTOSHARD_FORWARDED_ALLOW_IPS if left out, and all with
            `uds`.
        store_url: database of plans and jobs; AUTOSHARD_STORE_URL, or the user's cache
            folder, if left out.
        log_level: debug, info, warning or error.
        auth: true if callers need an API key; AUTOSHARD_AUTH if left out, which by default
            requires one on every address but loopback.

    Raises:
        OptionError: an option or a setting is invalid, or the address cannot be listened on.
        SystemExit: the service cannot start; the log has the reason.
    """
    settings = load_settings(
        store_url=store_url,
        root_path=root_path,
        forwarded_allow_ips=forwarded_allow_ips or ("*" if uds else None),
    )
    _check_certificate(tls_cert, tls_key)
    mode = _auth_mode(uds, host, settings, auth=auth)
    settings = settings.model_copy(update={"auth": mode})
    with unix_listener(uds) if uds else nullcontext(tcp_listeners(host, port)) as listeners:
        configure_logging(log_level)
        start_tracing()
        _check_database(uds or host, settings)
        app = create_app(settings)
        # Made before there are requests, which would wait for it: it takes a third of a second.
        app.state.specification()
        config = _config(
            app,
            settings,
            max(1, round(settings.shutdown_grace)),
            forwarded_allow_ips=settings.forwarded_allow_ips,
            ssl_certfile=tls_cert,
            ssl_keyfile=tls_key,
        )
        server = _Server(config, app, settings)
        # What is loaded now lives as long as the process; going through it stops every request.
        gc.collect()
        gc.freeze()
        sys.setswitchinterval(_SWITCH_INTERVAL)
        with suppress(KeyboardInterrupt):
            server.run(sockets=listeners)
    if not server.started:
        raise SystemExit(STARTUP_FAILED)


def run_workers(
    *,
    store_url: str | None = None,
    num_workers: int | None = None,
    host: str | None = None,
    port: int | None = None,
    log_level: str = "info",
) -> None:
    """Run jobs of services on other hosts until SIGTERM or Ctrl-C; then finish or release them.

    Args:
        store_url: database of the service, as a SQLAlchemy URL; AUTOSHARD_STORE_URL if left out.
        num_workers: concurrent solves; AUTOSHARD_NUM_WORKERS if left out.
        host: address of `/livez` and `/metrics`; AUTOSHARD_WORKER_HOST if left out.
        port: of `/livez` and `/metrics`, 0 for none; AUTOSHARD_WORKER_PORT if left out.
        log_level: debug, info, warning or error.

    Raises:
        ValueError: there is no such log level.
        OptionError: an option or a setting is invalid.
        SystemExit: the database or the port cannot be opened, or a worker died; see the log.
    """
    configure_logging(log_level)
    settings = load_settings(
        store_url=store_url, num_workers=num_workers, worker_host=host, worker_port=port
    )
    should_end = Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: should_end.set())
    start_tracing()
    try:
        address = (settings.worker_host, settings.worker_port)
        listeners = tcp_listeners(*address) if settings.worker_port else []
        stores = Stores(settings)
        executor = make_executor(settings)
    except (*STARTUP_ERRORS, OSError) as error:
        _fail_startup(str(error))
    workers = Workers(stores, executor, settings)
    workers.start()
    _log.info("worker_started", num_workers=settings.num_workers)
    with _serving(create_worker_app(workers, stores, settings), settings, listeners):
        have_died = _supervise(workers, should_end)
        _log.info("worker_draining", grace=settings.shutdown_grace)
        workers.stop()
    stores.close()
    _log.info("worker_ended")
    if have_died:
        raise SystemExit(WORKER_FAILED)


class _Server(uvicorn.Server):
    """Logs its address when it has started, and drains the service on SIGTERM.

    After SIGTERM the service is not ready, and goes on for a while: a load balancer sends requests
    until it has seen that.
    """

    def __init__(self, config: uvicorn.Config, app: FastAPI, settings: Settings) -> None:
        super().__init__(config)
        self._app = app
        self._store = make_url(settings.store_url).render_as_string(hide_password=True)
        self._delay = settings.shutdown_delay
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_draining = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        for listener in (s for server in getattr(self, "servers", ()) for s in server.sockets):
            url = address_of(listener, "https" if self.config.is_ssl else "http")
            _log.info("serving", url=url, store=self._store)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        service = getattr(self._app.state, "service", None)
        if service is not None:
            service.drain()
        is_first, self._is_draining = not self._is_draining, True
        if self._loop is None or sig != signal.SIGTERM or not (is_first and self._delay):
            super().handle_exit(sig, frame)
            return
        _log.info("draining", seconds=self._delay)
        # A signal's handler runs between two steps of the loop, and has to wake it.
        self._loop.call_soon_threadsafe(self._loop.call_later, self._delay, self._end, sig, frame)

    def _end(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)


def _config(app: FastAPI, settings: Settings, grace: int, **options: Any) -> Config:
    return Config(
        app,
        settings,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=grace,
        **options,
    )


def _check_certificate(certificate: Path | None, key: Path | None) -> None:
    """Check that the files of a certificate can be used.

    Raises:
        OptionError: they cannot.
    """
    if certificate is None:
        if key is not None:
            raise OptionError("--tls-key needs --tls-cert, the file with the certificate")
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
    except OSError as error:
        missing = [str(file) for file in (certificate, key) if file and not file.is_file()]
        named = " and ".join(missing or [str(file) for file in (certificate, key) if file])
        reason = "no such file" if missing else error.strerror or str(error)
        raise OptionError(
            f"cannot use {named}: {reason}; --tls-cert and --tls-key are a certificate and its "
            "private key, in PEM"
        ) from None


def _fail_startup(reason: str) -> NoReturn:
    _log.error("startup_failed", reason=reason)
    raise SystemExit(STARTUP_FAILED) from None


def _auth_mode(uds: str | None, host: str, settings: Settings, *, auth: bool | None) -> str:
    """The mode of authentication; by default it depends on the address.

    A Unix socket is usually that of a reverse proxy, which hides where requests come from.
    """
    if auth is not None:
        return "required" if auth else "off"
    if settings.auth != "auto":
        return settings.auth
    return "auto" if uds is None and is_loopback(host) else "required"


def _check_database(address: str, settings: Settings) -> None:
    """Refuse to start without the database, or without a valid key if every request needs one."""
    try:
        stores = Stores(settings)
    except StoreUnavailableError as error:
        _fail_startup(str(error))
    try:
        now = time.time()
        if settings.auth != "required" or any(k.is_valid(now) for k in stores.api_keys.list()):
            return
    finally:
        stores.close()
    _fail_startup(
        f"on {address} others can reach the service, and there is no API key; create one with "
        "`autoshard keys create NAME`, or allow everybody with --no-auth"
    )


def _supervise(workers: Workers, should_end: Event) -> bool:
    """Wait until the workers should end; return True if one has died."""
    were_alive = True
    # With a timeout: on some systems, signals are not handled during a wait without one.
    while not should_end.wait(1.0):
        if not workers.are_running:
            _log.error("worker_died")
            return True
        if workers.alive != were_alive:
            were_alive = workers.alive
            if were_alive:
                _log.info("worker_recovered")
            else:
                _log.error("worker_unfit", reason="solvers cannot be started, or die immediately")
    return False


@contextmanager
def _serving(app: FastAPI, settings: Settings, listeners: list[socket.socket]) -> Iterator[None]:
    """Serve an application in a thread, within a `with` block."""
    if not listeners:
        yield
        return
    server = uvicorn.Server(_config(app, settings, _WORKER_GRACE))
    thread = Thread(target=server.run, kwargs={"sockets": listeners}, daemon=True)
    thread.start()
    host, port = listeners[0].getsockname()[:2]
    _log.info("worker_serving", host=host, port=port)
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()
