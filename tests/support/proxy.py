"""A proxy on real sockets, that does what networks and gateways do on bad days."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import httpx2

_OF_A_HOP = frozenset({"connection", "content-length", "host", "keep-alive", "transfer-encoding"})


@dataclass
class Passed:
    """A request that went through the proxy, or got stuck in it."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Say:
    """Answer in the service's place."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b"<html>a gateway</html>"


@dataclass(frozen=True)
class Drop:
    """Close the connection without a word."""


@dataclass(frozen=True)
class Cut:
    """Pass the answer on, and close the connection after its first part."""


@dataclass(frozen=True)
class Lose:
    """Pass the request on, and close the connection without the answer."""


Fault = Say | Drop | Cut | Lose


@dataclass
class Proxy:
    """Where it listens, what it still does wrong, and what it has seen."""

    url: str = ""
    faults: deque[Fault] = field(default_factory=deque)
    only: Callable[[Passed], bool] = lambda _: True
    passed: list[Passed] = field(default_factory=list)

    def paths(self, method: str) -> list[str]:
        return [request.path for request in self.passed if request.method == method]


@contextmanager
def proxied(upstream: str) -> Iterator[Proxy]:
    """A proxy in front of a service; faults come one per request, oldest first."""
    proxy = Proxy()

    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(proxy, upstream))
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    proxy.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield proxy
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _handler(proxy: Proxy, upstream: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_any(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            headers = dict(self.headers.items())
            request = Passed(self.command, self.path, headers, self.rfile.read(length))
            proxy.passed.append(request)
            # One connection for each request, as a gateway that restarts has it.
            self.close_connection = True
            fault = proxy.faults.popleft() if proxy.faults and proxy.only(request) else None
            if isinstance(fault, Say):
                _answer(self, fault.status, fault.headers, [fault.body], length=len(fault.body))
            elif not isinstance(fault, Drop):
                self.pass_on(request, fault)

        do_GET = do_POST = do_PUT = do_DELETE = do_any  # noqa: N815  names that the base class asks for

        def pass_on(self, request: Passed, fault: Fault | None) -> None:
            given = {k: v for k, v in request.headers.items() if k.lower() not in _OF_A_HOP}
            with (
                httpx2.Client(timeout=300) as http,
                http.stream(
                    request.method,
                    upstream + request.path,
                    headers=given,
                    content=request.body or None,
                ) as answer,
            ):
                if isinstance(fault, Lose):
                    return
                length = answer.headers.get("Content-Length")
                _answer(
                    self,
                    answer.status_code,
                    {k: v for k, v in answer.headers.items() if k.lower() not in _OF_A_HOP},
                    answer.iter_raw(),
                    length=None if length is None else int(length),
                    cut=isinstance(fault, Cut),
                )

        def log_message(self, *_args: object) -> None:
            pass

    return Handler


def _answer(
    handler: BaseHTTPRequestHandler,
    status: int,
    headers: Mapping[str, str],
    parts: Any,
    *,
    length: int | None,
    cut: bool = False,
) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    is_chunked = length is None
    handler.send_header(*_framing(length))
    handler.send_header("Connection", "close")
    handler.end_headers()
    for part in parts:
        sent = part[: len(part) // 2] if cut and not is_chunked else part
        handler.wfile.write(b"%x\r\n%s\r\n" % (len(sent), sent) if is_chunked else sent)
        if cut:
            return
    if is_chunked:
        handler.wfile.write(b"0\r\n\r\n")


def _framing(length: int | None) -> tuple[str, str]:
    return ("Transfer-Encoding", "chunked") if length is None else ("Content-Length", str(length))
