"""Limits of connections, of headers and of times, on real sockets of a service in a process."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest

from autoshard_server import Settings
from autoshard_server.store.database import Stores
from benchmarks.faults.harness import Service

ELSEWHERE = "127.0.0.2"
"""An address of this machine that the service takes for another one."""

MOST, MOST_OF_ADDRESS = 24, 6


@dataclass
class Edge:
    """A service with low limits, and a key of it."""

    process: Service
    port: int
    key: str

    def open(self, *, source: str = "127.0.0.1") -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), 10, (source, 0))

    def send(self, data: bytes, *, source: str = "127.0.0.1") -> bytes:
        """All bytes that the service sends until it closes the connection."""
        with self.open(source=source) as connection:
            send(connection, data)
            return read_all(connection)


def send(connection: socket.socket, data: bytes) -> None:
    with suppress(ConnectionError):  # refused before all was read
        connection.sendall(data)


def read_all(connection: socket.socket) -> bytes:
    found = b""
    with suppress(ConnectionError):  # closed with unread bytes
        while piece := connection.recv(1 << 16):
            found += piece
    return found


def request(path: str = "/livez", *headers: str, close: bool = True) -> bytes:
    first = [f"GET {path} HTTP/1.1", "Host: localhost"]
    lines = [*first, *(["Connection: close"] if close else []), *headers, "", ""]
    return "\r\n".join(lines).encode()


def status_of(response: bytes) -> int:
    return int(response[9:12]) if response else 0


def problem_of(response: bytes) -> dict[str, Any]:
    head, _, body = response.partition(b"\r\n\r\n")
    assert b"application/problem+json" in head.lower()
    found: dict[str, Any] = json.loads(body)
    return found


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    url = f"sqlite:///{tmp_path_factory.mktemp('edge') / 'store.sqlite3'}"
    stores = Stores(Settings(store_url=url))
    _, key = stores.api_keys.create("ann", ["admin", "metrics"])
    stores.close()
    limits = {
        "auth": "required",
        "num_workers": 0,
        "max_connections": MOST,
        "max_address_connections": MOST_OF_ADDRESS,
        "max_header_bytes": 4096,
        "max_headers": 20,
        "header_timeout": 0.6,
        "transfer_timeout": 0.6,
        "idle_timeout": 1,
        "max_invalid_keys": 3,
    }
    with Service(url, **limits) as process:
        port = urlsplit(process.address).port
        assert port is not None
        yield Edge(process, port, key)


@pytest.mark.parametrize(
    "sent",
    [
        request("/livez", f"X-Long: {'a' * 5000}"),
        request("/livez", *(f"X-{i}: 1" for i in range(30))),
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX-Endless: " + b"a" * 1_000_000,
        b"GET /livez?" + b"a" * 1_000_000,
    ],
)
def test_headers_that_are_too_large_are_refused(edge: Edge, sent: bytes) -> None:
    answer = edge.send(sent)
    # A client that still sends may lose the response, but not the connection's end.
    if len(sent) < 10_000:
        assert status_of(answer) == 431
        assert problem_of(answer)["limit_name"] in (
            "AUTOSHARD_MAX_HEADER_BYTES",
            "AUTOSHARD_MAX_HEADERS",
        )
    else:
        assert status_of(answer) in (0, 431)


def test_usual_headers_and_pipelined_requests_are_answered(edge: Edge) -> None:
    assert status_of(edge.send(request("/livez", *(f"X-{i}: 1" for i in range(15))))) == 200
    answers = edge.send(request(close=False) * 3 + request())
    assert answers.count(b"HTTP/1.1 200 OK") == 4


@pytest.mark.parametrize("sent", [b"GET /livez HTTP/1.1\r\nHost: local", b"\r\n"])
def test_a_header_that_does_not_end_is_refused(edge: Edge, sent: bytes) -> None:
    answer = edge.send(sent)
    assert status_of(answer) == 408
    assert problem_of(answer)["limit_name"] == "AUTOSHARD_HEADER_TIMEOUT"


def test_a_connection_without_a_request_is_closed(edge: Edge) -> None:
    assert edge.send(b"") == b""
    # Also after a response, although it may have more requests.
    assert status_of(edge.send(request(close=False))) == 200


def test_a_body_that_trickles_is_refused(edge: Edge) -> None:
    head = b"POST /v1/plans HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {edge.key}\r\nContent-Length: 1000\r\n\r\n".encode()
    with edge.open() as connection:
        connection.sendall(head)
        for _ in range(8):
            send(connection, b" ")
            time.sleep(0.1)
        answer = read_all(connection)
    assert status_of(answer) == 408
    assert problem_of(answer)["limit_name"] == "AUTOSHARD_TRANSFER_TIMEOUT"


@pytest.mark.parametrize("endless", [b"0\r\nX: ", b"1;"])
def test_endless_trailers_and_chunk_extensions_are_refused(edge: Edge, endless: bytes) -> None:
    head = b"POST /v1/plans HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with edge.open() as connection:
        connection.sendall(head + endless)
        # An application that needs no body may have responded already.
        for _ in range(100):
            send(connection, b"a" * 10_000)
        assert status_of(read_all(connection)) in (0, 401, 431)


def test_many_requests_at_once_end_the_connection(edge: Edge) -> None:
    answers = edge.send(request(close=False) * 2000)
    assert answers.count(b"HTTP/1.1 200 OK") < 100


def test_an_address_with_too_many_connections_is_refused_but_not_others(edge: Edge) -> None:
    with ExitStack() as stack:
        for _ in range(MOST_OF_ADDRESS):
            stack.enter_context(edge.open(source=ELSEWHERE))
        refused = edge.send(request("/version"), source=ELSEWHERE)
        assert status_of(refused) == 503
        assert problem_of(refused)["limit_name"] == "AUTOSHARD_MAX_ADDRESS_CONNECTIONS"
        assert status_of(edge.send(request(), source=ELSEWHERE)) == 200
        assert status_of(edge.send(request("/version"))) == 200
    assert num_refused(edge, "address") >= 1


def test_idle_connections_give_way_to_new_ones(edge: Edge) -> None:
    with ExitStack() as stack:
        idle = [stack.enter_context(edge.open()) for _ in range(2 * MOST)]
        assert status_of(edge.send(request("/version"))) == 200
        assert read_all(idle[0]) == b""
    assert num_refused(edge, "displaced") >= MOST
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and not edge.process.events("connections_refused"):
        time.sleep(0.05)
    assert edge.process.events("connections_refused")[0]["limit"] == MOST


def num_refused(edge: Edge, reason: str) -> float:
    text = edge.send(request("/metrics", f"Authorization: Bearer {edge.key}")).decode()
    prefix = f'autoshard_refused_connections_total{{reason="{reason}"}} '
    return sum(
        float(line.removeprefix(prefix)) for line in text.splitlines() if line.startswith(prefix)
    )


def test_an_address_that_sends_invalid_keys_has_to_wait(edge: Edge) -> None:
    def ask(key: str, source: str = ELSEWHERE) -> bytes:
        return edge.send(request("/v1/plans", f"Authorization: Bearer {key}"), source=source)

    assert status_of(ask(edge.key)) == 200
    statuses = [status_of(ask(f"autoshard_{number}_x")) for number in range(6)]
    assert statuses[:3] == [401, 401, 401]
    assert statuses[-1] == 429
    refused = ask("autoshard_7_x")
    assert b"retry-after: " in refused.lower()
    assert problem_of(refused)["limit_name"] == "AUTOSHARD_MAX_INVALID_KEYS"
    # Neither a key that was valid before, nor another address, has to wait.
    assert status_of(ask(edge.key)) == 200
    assert status_of(ask("autoshard_8_x", source="127.0.0.3")) == 401


def test_a_refused_request_does_not_hold_its_connection(edge: Edge) -> None:
    """Without a key there is 401 at once, and the body that never comes is not awaited."""
    head = b"POST /v1/plans HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n{"
    with ExitStack() as stack:
        held = [stack.enter_context(edge.open()) for _ in range(MOST)]
        for connection in held:
            send(connection, head)
        assert {status_of(read_all(connection)) for connection in held} == {401}
        # They are still open on this side, and another caller is served.
        assert status_of(edge.send(request("/version"))) == 200


def test_a_trailer_is_no_header(edge: Edge) -> None:
    key = f"Authorization: Bearer {edge.key}".encode()
    sent = b"POST /v1/plans:lookup HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    sent += b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
    answer = edge.send(sent + b"\r\n2\r\n{}\r\n0\r\n" + key + b"\r\n\r\n")
    assert status_of(answer) == 401
    answer = edge.send(sent + key + b"\r\n\r\n2\r\n{}\r\n0\r\n\r\n")
    assert status_of(answer) == 422


@pytest.mark.parametrize("hosts", [[], ["Host: a", "Host: b"]])
def test_a_request_has_one_host(edge: Edge, hosts: list[str]) -> None:
    lines = ["GET /version HTTP/1.1", *hosts, "Connection: close", "", ""]
    answer = edge.send("\r\n".join(lines).encode())
    assert status_of(answer) == 400
    assert problem_of(answer)["type"].endswith("#host")


def test_a_caller_that_reads_slowly_gets_everything(edge: Edge) -> None:
    """Longer than the time for a piece of a body, but always some of it."""
    whole = edge.send(request("/openapi.json"))
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(30)
        connection.connect(("127.0.0.1", edge.port))
        send(connection, request("/openapi.json", close=False) * 11 + request("/openapi.json"))
        found = 0
        while piece := connection.recv(1 << 16):
            found += len(piece)
            time.sleep(len(piece) / 2e6)
    assert found > 11 * len(whole)


def test_a_caller_that_does_not_read_is_disconnected(edge: Edge) -> None:
    assert status_of(edge.send(request("/openapi.json"))) == 200
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(10)
        connection.connect(("127.0.0.1", edge.port))
        # More than the buffers of the system hold.
        for _ in range(3):
            send(connection, request("/openapi.json", close=False) * 12)
            time.sleep(0.3)
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and not num_refused(edge, "response"):
            time.sleep(0.1)
    assert num_refused(edge, "response") == 1
