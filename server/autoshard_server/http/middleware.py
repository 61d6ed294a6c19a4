"""Middleware: an id, a log line and metrics for every request; the path of a proxy; the start."""

import re
import time
from uuid import uuid4

import anyio
import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from autoshard.errors import InputError, MissingPackageError
from autoshard_server.disconnection import CallerGoneError, calling
from autoshard_server.http.deprecation import deprecation_headers
from autoshard_server.http.errors import problem_response, root_path
from autoshard_server.phases import PhaseTimes, timing
from autoshard_server.problems import problem_of
from autoshard_server.telemetry import request_seconds, requests_total, trace_id
from autoshard_solver_cache import StoreUnavailableError

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})

STARTUP_ERRORS = (StoreUnavailableError, InputError, MissingPackageError, ConnectionError)
"""Errors of the start that are the environment's: the message is enough, without a traceback."""

_ADDRESS_HEADERS = ("location", "content-location")

_log = structlog.get_logger("autoshard_server.access")


class StartupErrors:
    """Logs an error of the start in one line, without a traceback."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection (ASGI)."""
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        failures: list[Message] = []

        async def send_later(message: Message) -> None:
            if message["type"] == "lifespan.startup.failed":
                failures.append(message)
            else:
                await send(message)

        try:
            await self._app(scope, receive, send_later)
        except BaseException as error:
            for message in failures:
                if isinstance(error, STARTUP_ERRORS):
                    _log.error("startup_failed", reason=str(error))
                    message["message"] = ""
                await send(message)
            raise


class RootPath:
    """Serves the application under the path at which a reverse proxy publishes it.

    The proxy may remove the path from requests or not. Addresses in headers of responses, which
    start with a slash, get it.

    Args:
        app: the wrapped application.
        root_path: such as `/plan`.
    """

    def __init__(self, app: ASGIApp, *, root_path: str) -> None:
        self._app = app
        self._root = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        if not f"{path}/".startswith(f"{self._root}/"):
            path = self._root + path

        async def send_with_root(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._complete(MutableHeaders(scope=message))
            await send(message)

        root_path.set(self._root)
        await self._app({**scope, "path": path, "root_path": self._root}, receive, send_with_root)

    def _complete(self, headers: MutableHeaders) -> None:
        for name in _ADDRESS_HEADERS:
            if headers.get(name, "").startswith("/"):
                headers[name] = self._root + headers[name]
        if "link" in headers:
            headers["link"] = headers["link"].replace("</", f"<{self._root}/")


class HeadRequests:
    """Serves HEAD where GET is served: the same header, at which the response ends.

    Otherwise a stream of events, whose body is not sent, would last until its job is finished.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection (ASGI)."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        head: Message | None = None

        async def keep_head(message: Message) -> None:
            nonlocal head
            if message["type"] == "http.response.start":
                head = message
                if "content-length" not in Headers(raw=message["headers"]):
                    stream.cancel()

        scope["state"]["is_head"] = True
        with anyio.CancelScope() as stream:
            await self._app({**scope, "method": "GET"}, receive, keep_head)
        # When the caller has it, nothing of the stream is left, which counts among the caller's.
        if head is not None:
            await send(head)
            await send({"type": "http.response.body"})


class WeakTags:
    """Makes the ETag of a compressed response a weak one: its bytes are others.

    A strong one stands for the same bytes in each response (RFC 9110, section 8.8.1).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection (ASGI)."""

        async def send_with_tag(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                tag = headers.get("etag", "")
                if tag.startswith('"') and "content-encoding" in headers:
                    headers["etag"] = f"W/{tag}"
            await send(message)

        await self._app(scope, receive, send_with_tag)


class RequestLog:
    """Gives each request an id, unless the caller sends one, and records its outcome.

    Unexpected exceptions are logged, and the response is a problem document. The id is in the
    response's `X-Request-ID` and in every log line of the request. The last one also has the trace,
    the project, the job, the status and the seconds of each phase.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._has_warned = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        self._check_proxy(headers, scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid4().hex
        with structlog.contextvars.bound_contextvars(request_id=request_id, **trace_id()):
            await self._serve(scope, receive, send, request_id)

    def _check_proxy(self, headers: Headers, scope: Scope) -> None:
        """Log once that a proxy's headers are not used, which make all callers one address."""
        forwarded = headers.get("x-forwarded-for", "")
        if not forwarded or self._has_warned:
            return
        address = scope["client"][0] if scope.get("client") else ""
        # Of a proxy that is trusted, the address is one of these.
        if address not in {one.strip() for one in forwarded.split(",")}:
            self._has_warned = True
            _log.warning(
                "forwarded_headers_ignored",
                address=address,
                setting="AUTOSHARD_FORWARDED_ALLOW_IPS",
            )

    async def _serve(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        started, times = time.monotonic(), PhaseTimes()
        status = 0
        # Created here, so that layers below, which copy the scope, write into the same table.
        scope.setdefault("state", {})

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-ID"] = request_id
                headers.update(deprecation_headers(scope["state"]))
            await send(message)

        try:
            with calling(receive), timing(times):
                await self._app(scope, receive, send_with_id)
        except (ClientDisconnect, CallerGoneError):
            _log.info("client_gone")
        except Exception as error:
            _log.exception("request_failed")
            if status:
                # The response has started: the only way to report an error is to abort it.
                raise
            await problem_response(problem_of(error))(scope, receive, send_with_id)
        finally:
            _record(scope, int(status), time.monotonic() - started, times)


def _record(scope: Scope, status: int, seconds: float, times: PhaseTimes) -> None:
    method = scope["method"] if scope["method"] in _METHODS else "other"
    route = getattr(scope.get("route"), "path", "none")
    client = scope.get("client")
    requests_total.labels(method, route, status).inc()
    request_seconds.labels(method, route).observe(seconds)
    _log.info(
        "request",
        method=scope["method"],
        path=scope["path"],
        client=client[0] if client else None,
        status=status,
        seconds=round(seconds, 4),
        phases=times.rounded,
    )
