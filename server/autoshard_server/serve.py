"""Running the service in this process."""

import socket
import time
from contextlib import suppress
from types import FrameType

import structlog
import uvicorn
from fastapi import FastAPI
from sqlalchemy import make_url

from autoshard_server.app import create_app
from autoshard_server.http.auth import is_loopback
from autoshard_server.settings import Settings
from autoshard_server.stores import open_stores
from autoshard_server.telemetry.logs import configure_logging
from autoshard_server.telemetry.tracing import start_tracing
from autoshard_solver_cache import StoreUnavailableError

STARTUP_FAILED = 3
"""Exit status where the service cannot start, as uvicorn's own command has it."""


_log = structlog.get_logger(__name__)


class _Server(uvicorn.Server):
    """Says where it is when it has started; tells the application at once that it is to end."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, store_url: str) -> None:
        super().__init__(config)
        self._app = app
        self._store = make_url(store_url).render_as_string(hide_password=True)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in (s for server in getattr(self, "servers", ()) for s in server.sockets):
            host, port = listening.getsockname()[:2]
            _log.info("serving", url=f"http://{_in_url(host)}:{port}", store=self._store)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        service = getattr(self._app.state, "service", None)
        if service is not None:
            service.drain()
        super().handle_exit(sig, frame)


def serve(
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    cache_url: str | None = None,
    log_level: str = "info",
    auth: bool | None = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C; then finish what is under way, within limits.

    Args:
        host: address to listen on; other machines need one that they can reach.
        port: 0 takes a free one and logs it.
        cache_url: database of plans and jobs; AUTOSHARD_STORE_URL, or the user's cache
            folder, if left out.
        log_level: debug, info, warning or error.
        auth: whether callers need an API key; if left out as AUTOSHARD_AUTH says, and by
            default on every address but loopback.

    Raises:
        ValueError: there is no such log level.
        SystemExit: the service cannot start; the log says why.
    """
    configure_logging(log_level)
    start_tracing()
    settings = Settings() if cache_url is None else Settings(store_url=cache_url)
    settings = settings.model_copy(update={"auth": _auth(host, settings, wanted=auth)})
    if settings.auth == "required":
        _expect_keys(host, settings)
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(settings.shutdown_grace)),
    )
    server = _Server(config, app, settings.store_url)
    with suppress(KeyboardInterrupt):
        server.run()
    if not server.started:
        raise SystemExit(STARTUP_FAILED)


def _auth(host: str, settings: Settings, *, wanted: bool | None) -> str:
    """Whether keys are needed; decided by the address where nobody says."""
    if wanted is not None:
        return "required" if wanted else "off"
    if settings.auth != "auto":
        return settings.auth
    return "off" if is_loopback(host) else "required"


def _expect_keys(host: str, settings: Settings) -> None:
    """Refuse to start where nobody could ask: it would only look as if it worked."""
    try:
        stores = open_stores(settings)
    except StoreUnavailableError as error:
        _log.error("startup_failed", reason=str(error))
        raise SystemExit(STARTUP_FAILED) from None
    try:
        now = time.time()
        if any(key.is_live(now) for key in stores.api_keys.list()):
            return
    finally:
        stores.close()
    _log.error(
        "startup_failed",
        reason=f"on {host} others can reach the service, and there is no API key; make one with "
        "`autoshard keys create NAME`, or let anybody ask with --no-auth",
    )
    raise SystemExit(STARTUP_FAILED)


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
