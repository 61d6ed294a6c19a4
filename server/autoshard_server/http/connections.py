"""Connections: limits of their number, of the size of headers, and of the time that clients take.

uvicorn limits none of these before an application is called. A protocol of it counts the bytes
of a header while they arrive, and one check for all connections closes those that take too long.
"""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from http import HTTPStatus
from itertools import islice
from typing import Any

import prometheus_client
import structlog
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from autoshard_server.http.request_heads import head_fault, split_target
from autoshard_server.problems import (
    PROBLEM_MEDIA_TYPE,
    ProblemType,
    ServerError,
    limit_error,
    problem_of,
)
from autoshard_server.settings import Settings
from autoshard_server.telemetry import count_limit, refused_connections_total

LIVENESS_PATH = b"/livez"
"""Path that is answered on connections beyond the limit, so that health checks pass."""

_RESERVE = 64
"""Connections beyond the limit, for health checks and for responses of 503."""

_ADDRESS_RESERVE = 8
"""The same for the limit of an address."""

_THIS_MACHINE = frozenset({"", "127.0.0.1", "::1"})
"""Addresses without a limit of their own: a reverse proxy may have everybody's connections."""

_FILES = 256
"""Files that a process opens besides connections."""

_PROGRESS = 16 * 1024
"""Bytes of a body that must arrive in every AUTOSHARD_TRANSFER_TIMEOUT seconds."""

_LINGER_SECONDS = 5.0
"""Time for which a connection is read after its last response: a client that still sends would
lose the response if it was closed at once (RFC 9112, section 9.6)."""

_MAX_PIPELINED = 16
"""Requests of one connection that may wait for the response to an earlier one."""

_CHECKED_AT_ONCE = 128
"""Connections whose times are checked without a pause: each that ends takes up to 0.1 ms, and all
other requests wait for those that a flood has opened at the same moment."""

_PAUSE = 0.002
"""Seconds after each of these, in which the event loop serves requests."""

_LOG_SECONDS = 10.0
"""Connections that are refused within this time are logged as one line."""

_log = structlog.get_logger(__name__)


class _Phase(Enum):
    """State of a connection, by what it waits for."""

    IDLE = "the next request"
    HEADER = "the rest of a header"
    BODY = "the rest of a body"
    RESPONSE = "the application"
    CLOSING = "the client, which still sends after the last response"


class _RefusedError(Exception):
    """Raised in callbacks of the parser; it stops parsing."""


@dataclass(frozen=True, slots=True)
class _Refusal:
    reason: str
    error: ServerError


class Connections:
    """The open connections of a server, and their limits.

    Args:
        settings: with the limits.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.limit = min(settings.max_connections, _open_files(settings.max_connections))
        self.max_discarded = settings.max_body_bytes
        self._keys_required = settings.auth == "required"
        root = settings.root_path.encode()
        self._api = (b"/v1/", root + b"/v1/")
        self._open: dict[LimitedProtocol, str] = {}
        self._by_address: Counter[str] = Counter()
        self._waiting: dict[LimitedProtocol, None] = {}
        self._refused: Counter[str] = Counter()
        self._refused_address = ""
        self._logged_at = -_LOG_SECONDS
        self._timer: asyncio.TimerHandle | None = None
        shortest = min(settings.header_timeout, settings.idle_timeout, settings.transfer_timeout)
        self._interval = min(1.0, shortest / 4)

    def add(self, connection: "LimitedProtocol", address: str) -> _Refusal | None:
        """Count a connection; the reason why it may only ask for /livez, or None.

        If there are too many, the one that has waited longest for a request is closed.
        """
        self._open[connection] = address
        self._by_address[address] += 1
        self.wait(connection)
        if self._timer is None:
            self._timer = connection.loop.call_later(self._interval, self._check, connection.loop)
        limit = self.settings.max_address_connections
        if self._by_address[address] > limit and address not in _THIS_MACHINE:
            detail = f"{address} has more than {limit} connections"
            return _too_many("address", detail, "max_address_connections", limit)
        if len(self._open) <= self.limit:
            return None
        oldest = next(iter(self._waiting))
        if oldest is not connection:
            self.count("displaced", address)
            oldest.drop()
            return None
        detail = f"the service has {self.limit} connections, all with requests"
        return _too_many("total", detail, "max_connections", self.limit)

    def needs_key(self, path: bytes) -> bool:
        """True if a request for a path without a key is refused in any case."""
        return self._keys_required and path.startswith(self._api)

    def is_exhausted(self, address: str) -> bool:
        """True if there are too many connections even for refusals."""
        most = self.settings.max_address_connections + _ADDRESS_RESERVE
        is_flood = self._by_address[address] > most and address not in _THIS_MACHINE
        return is_flood or len(self._open) > self.limit + _RESERVE

    def remove(self, connection: "LimitedProtocol") -> None:
        """Forget a connection that was closed."""
        address = self._open.pop(connection, None)
        self._waiting.pop(connection, None)
        if address is not None:
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]

    def wait(self, connection: "LimitedProtocol") -> None:
        """Note that a connection waits for a request from now on."""
        self._waiting.pop(connection, None)
        self._waiting[connection] = None

    def serve(self, connection: "LimitedProtocol") -> None:
        """Note that a connection has a request."""
        self._waiting.pop(connection, None)

    def count(self, reason: str, address: str) -> None:
        """Count a connection that was refused or closed; a log line reports several."""
        _refused_total(reason).inc()
        self._refused[reason] += 1
        self._refused_address = address

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin a round: each connection is checked once, and then the next round is planned."""
        self._check_some(loop, iter(list(self._open)))

    def _check_some(
        self, loop: asyncio.AbstractEventLoop, others: Iterator["LimitedProtocol"]
    ) -> None:
        some = list(islice(others, _CHECKED_AT_ONCE))
        now = loop.time()
        for connection in some:
            # It may have been closed since the round began.
            if connection in self._open:
                connection.check(now)
        if some:
            self._timer = loop.call_later(_PAUSE, self._check_some, loop, others)
        else:
            self._end_round(loop, now)

    def _end_round(self, loop: asyncio.AbstractEventLoop, now: float) -> None:
        if self._refused and now - self._logged_at >= _LOG_SECONDS:
            _log.warning(
                "connections_refused",
                reasons=dict(self._refused),
                last_address=self._refused_address,
                open=len(self._open),
                limit=self.limit,
            )
            self._refused.clear()
            self._logged_at = now
        is_needed = bool(self._open or self._refused)
        self._timer = loop.call_later(self._interval, self._check, loop) if is_needed else None


class Config(uvicorn.Config):
    """Configuration of uvicorn with limits of connections.

    Args:
        app: the ASGI application.
        settings: with the limits.
        **given: options of uvicorn.
    """

    def __init__(self, app: Any, settings: Settings, **given: Any) -> None:
        idle = max(1, round(settings.idle_timeout))
        # Otherwise a pipelined request starts in the context of the one before it, and is logged
        # and traced as one of its caller.
        given["reset_contextvars"] = True
        super().__init__(app, http=LimitedProtocol, ws="none", timeout_keep_alive=idle, **given)
        self.connections = Connections(settings)


class LimitedProtocol(HttpToolsProtocol):
    """HTTP/1.1 with limits of headers, of times, and of connections.

    Args:
        config: with the connections of the server.
        server_state: of uvicorn.
        app_state: of the application.
        _loop: the event loop.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._all = config.connections
        self._limits = config.connections.settings
        self._only_liveness: _Refusal | None = None
        self._refusal: _Refusal | None = None
        self._phase = _Phase.HEADER
        self._since = self.loop.time()
        self._unfinished = 0
        self._header_bytes = self._num_headers = self._body_bytes = 0
        self._discarded = 0
        self._stalled_since: float | None = None
        self._unsent = 0
        self._has_key = False
        self._closing_since: float | None = None

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn
        """Count the connection; close it if there are far too many."""
        super().connection_made(transport)
        self._only_liveness = self._all.add(self, self._address)
        if self._only_liveness is not None and self._all.is_exhausted(self._address):
            count_limit(problem_of(self._only_liveness.error))
            self._all.count(self._only_liveness.reason, self._address)
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._all.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse bytes, and refuse a header that is too long before it has ended."""
        if self._phase is _Phase.CLOSING:
            self._discarded += len(data)
            if self._discarded > self._all.max_discarded:
                self.transport.abort()
            return
        if self._phase is _Phase.IDLE:
            self._enter(_Phase.HEADER)
        self._unfinished += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        # Bytes after which neither a header, nor a piece of a body, nor a message has ended.
        if self._unfinished > self._limits.max_header_bytes:
            self._refuse(self._too_large())

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._has_key = False
        self._header_bytes = self._num_headers = 0
        if self._phase is not _Phase.HEADER:
            self._enter(_Phase.HEADER)

    def on_url(self, url: bytes) -> None:
        """Count a part of the request line."""
        super().on_url(url)
        self._count(len(url), 0)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header, or a trailer of a body, which is dropped.

        A trailer must not be taken for a header, such as `Authorization` (RFC 9110, section 6.5.1).
        """
        self._count(len(name) + len(value), 1)
        if self._phase is _Phase.HEADER:
            self._has_key |= name.lower() == b"authorization"
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request."""
        self._unfinished = 0
        fault = head_fault(self.parser.get_http_version(), self.url, self.headers)
        _, self.url = split_target(self.url)
        if self._only_liveness is not None and self.url != LIVENESS_PATH:
            self._refusal = self._only_liveness
            raise _RefusedError
        if fault is not None:
            self._refusal = _Refusal("ambiguous", fault)
            raise _RefusedError
        if self._all.needs_key(self.url) and not self._has_key and self._is_first:
            self._refusal = _NO_KEY
            raise _RefusedError
        if len(self.pipeline) >= _MAX_PIPELINED:
            self._stop("pipelined", "too many requests are waiting on this connection")
        self._enter(_Phase.BODY)
        self._all.serve(self)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Count a piece of a body; after the response, only some more are read."""
        self._unfinished = 0
        self._body_bytes += len(body)
        if self.cycle.response_complete:
            self._discarded += len(body)
            if self._discarded > self._all.max_discarded:
                self._stop("body", "the body goes on after the response")
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request has arrived."""
        self._unfinished = 0
        is_answered = self.cycle is not None and self.cycle.response_complete
        self._enter(_Phase.IDLE if is_answered else _Phase.RESPONSE)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The response was sent; wait for the next request.

        If the rest of this request has not arrived, as of one that was refused, there is none: the
        connection is closed, so that it is not held by a body that nobody reads.
        """
        if self._phase is _Phase.BODY and not self.transport.is_closing():
            self._all.count("unread-body", self._address)
            self._linger()
            return
        super().on_response_complete()
        if self._phase is _Phase.RESPONSE and not self.pipeline:
            self._enter(_Phase.IDLE)

    def send_400_response(self, msg: str) -> None:
        """Respond to a request that cannot be parsed, or was refused while it was parsed."""
        refusal, self._refusal = self._refusal, None
        if refusal is _NO_KEY:
            self._all.count(refusal.reason, self._address)
            self.transport.write(_NO_KEY_RESPONSE)
            self._linger()
        elif refusal is not None:
            self._refuse(refusal)
        elif self._is_waiting or self.transport.is_closing():
            self.transport.close()
        else:
            self._refuse(_Refusal("malformed", ServerError(ProblemType.HTTP, msg)))

    def pause_writing(self) -> None:
        """The client does not read."""
        super().pause_writing()
        self._stalled_since = self.loop.time()
        self._unsent = self.transport.get_write_buffer_size()

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        self._stalled_since = None

    def drop(self) -> None:
        """Close the connection without a response."""
        self._all.remove(self)
        self.transport.abort()

    def check(self, now: float) -> None:
        """Close the connection if the client takes too long."""
        if self._does_not_read(now):
            self._all.count("response", self._address)
            self.transport.abort()
        elif not self.transport.is_closing():
            self._check_request(now - self._since, now)

    def _check_request(self, waited: float, now: float) -> None:
        limits = self._limits
        if self._phase is _Phase.CLOSING:
            if waited > _LINGER_SECONDS:
                self.transport.abort()
        elif self._phase is _Phase.IDLE and waited > limits.idle_timeout:
            self.transport.close()
        elif self._phase is _Phase.HEADER and self._is_waiting:
            self._since = now
        elif self._phase is _Phase.HEADER and waited > limits.header_timeout:
            self._time_out("header", "header_timeout", limits.header_timeout)
        elif self._phase is _Phase.BODY and waited > limits.transfer_timeout:
            if self._body_bytes < _PROGRESS and not self.flow.read_paused:
                self._time_out("body", "transfer_timeout", limits.transfer_timeout)
            else:
                self._enter(_Phase.BODY)

    def _does_not_read(self, now: float) -> bool:
        """True if the client has read too little of a response within the time for it."""
        limit = self._limits.transfer_timeout
        if self.transport.is_closing():
            # What was written before may be unsent, and a client that reads nothing keeps it so.
            self._closing_since = self._closing_since or now
            return now - self._closing_since > limit
        if self._stalled_since is None or now - self._stalled_since <= limit:
            return False
        unsent = self.transport.get_write_buffer_size()
        has_progress = unsent <= max(self._unsent - _PROGRESS, 0)
        self._stalled_since, self._unsent = now, unsent
        return not has_progress

    def _linger(self) -> None:
        """Send nothing more, and read for a short time what the client still sends."""
        self._enter(_Phase.CLOSING)
        self._all.wait(self)
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.flow.resume_reading()
        else:
            self.transport.close()

    @property
    def _is_first(self) -> bool:
        """True for a request that no other one of the connection is before, and for no preflight.

        Browsers send OPTIONS without a key (CORS).
        """
        method = self.parser.get_method()
        return not (self.pipeline or self._is_waiting) and method != b"OPTIONS"

    @property
    def _is_waiting(self) -> bool:
        """True if a response to an earlier request is being made."""
        is_serving = self.cycle is not None and not self.cycle.response_complete
        return bool(self.pipeline) or (is_serving and self._phase is not _Phase.BODY)

    def _enter(self, phase: _Phase) -> None:
        self._phase = phase
        self._since = self.loop.time()
        self._body_bytes = 0
        if phase is _Phase.IDLE:
            self._discarded = 0
            self._all.wait(self)

    def _count(self, nbytes: int, headers: int) -> None:
        self._unfinished = 0
        self._header_bytes += nbytes
        self._num_headers += headers
        limits = self._limits
        if self._header_bytes > limits.max_header_bytes or self._num_headers > limits.max_headers:
            self._refusal = self._too_large()
            raise _RefusedError

    def _too_large(self) -> _Refusal:
        limits = self._limits
        if self._num_headers > limits.max_headers:
            detail, name = f"the request has more than {limits.max_headers} headers", "max_headers"
        else:
            detail = f"the header of the request exceeds {limits.max_header_bytes:,} bytes"
            name = "max_header_bytes"
        limit = getattr(limits, name)
        return _Refusal("header", limit_error(ProblemType.HEADER_TOO_LARGE, detail, name, limit))

    def _stop(self, reason: str, detail: str) -> None:
        """Stop parsing, and close the connection."""
        self._refusal = _Refusal(reason, ServerError(ProblemType.REQUEST, detail))
        raise _RefusedError

    def _time_out(self, what: str, setting: str, seconds: float) -> None:
        if self._phase is _Phase.BODY or self._unfinished or self._header_bytes:
            detail = f"the {what} of the request did not arrive within {seconds:g} seconds"
            error = limit_error(ProblemType.REQUEST_TIMEOUT, detail, setting, seconds)
            self._refuse(_Refusal(f"{what}-timeout", error))
        else:
            self._all.count("no-request", self._address)
            self.transport.close()

    def _refuse(self, refusal: _Refusal) -> None:
        """Send a refusal, unless another response is being sent, and close the connection."""
        count_limit(problem_of(refusal.error))
        self._all.count(refusal.reason, self._address)
        cycle = self.cycle
        is_sending = cycle is not None and cycle.response_started
        if not (is_sending or self._is_waiting or self.transport.is_closing()):
            self.transport.write(_response(refusal.error))
        self.transport.close()


@cache
def _refused_total(reason: str) -> prometheus_client.Counter:
    """Counter of a reason; looking it up by its label takes longer than closing a connection."""
    return refused_connections_total.labels(reason)


def _too_many(reason: str, detail: str, setting: str, limit: int) -> _Refusal:
    headers = {"Retry-After": "5"}
    kind = ProblemType.TOO_MANY_CONNECTIONS
    return _Refusal(reason, limit_error(kind, detail, setting, limit, headers))


def _response(error: ServerError) -> bytes:
    """A whole HTTP response, after which the connection is closed."""
    problem = problem_of(error)
    body = json.dumps(problem).encode()
    status = HTTPStatus(problem["status"])
    headers = {
        "Content-Type": PROBLEM_MEDIA_TYPE,
        "Content-Length": str(len(body)),
        "Connection": "close",
        **error.headers,
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status.value} {status.phrase}\r\n{lines}\r\n".encode() + body


def _open_files(connections: int) -> int:
    """Raise the limit of open files of this process; the connections that it allows."""
    if sys.platform == "win32":
        return connections
    import resource  # noqa: PLC0415  only on Unix

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _RESERVE + _FILES
    if soft < wanted and soft != resource.RLIM_INFINITY:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    allowed = connections if soft == resource.RLIM_INFINITY else soft - _RESERVE - _FILES
    if allowed < connections:
        _log.warning("connections_limited", by="open files (ulimit -n)", limit=max(allowed, 1))
    return max(allowed, 1)


_NO_KEY = _Refusal(
    "no-key",
    ServerError(
        ProblemType.UNAUTHENTICATED,
        "send 'Authorization: Bearer KEY'",
        headers={"WWW-Authenticate": "Bearer"},
    ),
)
"""Refusal of a request without a key where each needs one: made here, since it costs a hundredth of
the application's, and strangers may send thousands."""
_NO_KEY_RESPONSE = _response(_NO_KEY.error)
