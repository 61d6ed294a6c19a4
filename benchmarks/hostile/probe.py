"""Asks a service for /livez on a new connection every 50 ms, until its standard input ends.

    python -m benchmarks.hostile.probe HOST PORT

A process of its own, so that the load on the one that attacks does not count. Prints the seconds of
each response as a JSON list; one without a response within 30 s counts as 30 s.
"""

import json
import socket
import sys
import time
from threading import Event, Thread

_PAUSE = 0.05
_TIMEOUT = 30.0
_REQUEST = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def ask(host: str, port: int) -> float:
    """Seconds from the connection to the end of the response."""
    begun = time.perf_counter()
    answer = b""
    try:
        with socket.create_connection((host, port), _TIMEOUT) as connection:
            connection.sendall(_REQUEST)
            while piece := connection.recv(4096):
                answer += piece
    except OSError:
        return _TIMEOUT
    seconds = time.perf_counter() - begun
    return seconds if answer.startswith(b"HTTP/1.1 200") else _TIMEOUT


def main() -> None:
    """Probe until standard input ends."""
    host, port = sys.argv[1], int(sys.argv[2])
    is_over = Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        is_over.set()

    Thread(target=wait_for_end, daemon=True).start()
    seconds = []
    while not is_over.wait(_PAUSE):
        seconds.append(ask(host, port))
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
