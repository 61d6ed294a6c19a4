"""Attacks by number: many requests, connections and records of one caller, or of none."""

import hashlib
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import httpx2
import zstandard

from benchmarks.faults.harness import graph_of
from benchmarks.hostile import archives
from benchmarks.hostile.target import Outcome, Target

ATTACKER, OTHER = "attacker", "other"
"""Callers of two projects."""

_UNREAD = 2060
_LEAVES = (120.0, 1.0)
"""Seconds after which callers hang up, in turn."""
_POLLS = 400
_FRAMES = 3000
_CANCELLED = 150
_PIN_BYTES = 900_000
_OK, _ERROR = 200, 500
_TOO_MANY, _UNAUTHORIZED = 429, 401
_FAIR = 2.0
"""Seconds that another caller may wait, at most."""
_KEPT = 5e6
"""Bytes of requests that cancelled jobs may leave."""


def slow_uploads(attacked: Target) -> Outcome:
    """40 uploads of graphs that take long to read, half of them hung up; then one of another."""

    def upload(number: int) -> int:
        body = archives.slow_graph(number)
        path = f"/v1/graphs/{hashlib.sha256(body).hexdigest()}"
        with attacked.http(ATTACKER) as http:
            try:
                return http.put(path, content=body, timeout=_LEAVES[number % 2]).status_code
            except httpx2.TimeoutException:
                return 0

    with ThreadPoolExecutor(40) as pool:
        sent = [pool.submit(upload, number) for number in range(40)]
        time.sleep(1.0)
        small, seconds = graph_of(archives.SMALL + 7), []
        with attacked.http(OTHER) as http:
            path = f"/v1/graphs/{hashlib.sha256(small).hexdigest()}"
            begun = time.perf_counter()
            status = http.put(path, content=small).status_code
            seconds.append(time.perf_counter() - begun)
        statuses = Counter(one.result() for one in sent)
    text = f"{_counts(statuses)}; the other's {status} after {seconds[0]:.2f} s"
    return Outcome(text, status < _ERROR and seconds[0] < _FAIR)


def unread_bodies(attacked: Target) -> Outcome:
    """2,060 requests without a key whose bodies never come; then one with a key."""
    head = b"POST /v1/plans HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n{"
    with ExitStack() as stack:
        for _ in range(_UNREAD):
            with suppress(OSError):
                connection = stack.enter_context(attacked.connect(5.0))
                connection.sendall(head)
        with attacked.http(OTHER) as http:
            begun = time.perf_counter()
            status = http.get("/v1/plans").status_code
        seconds = time.perf_counter() - begun
    return Outcome(f"{status} after {seconds:.2f} s", status == _OK and seconds < _FAIR)


def long_polls(attacked: Target) -> Outcome:
    """400 requests of one key that wait for a job."""
    body = archives.gpt2()
    digest = hashlib.sha256(body).hexdigest()
    asked = {
        "graph_sha256": digest,
        "mesh": {"shape": [2, 4]},
        "options": {"solver": {"seed": 424_242, "relative_gap": 0}},
    }

    def wait(_: int) -> int:
        with attacked.http(ATTACKER) as http:
            return http.post("/v1/plans", json=asked, headers={"Prefer": "wait=10"}).status_code

    with attacked.http(ATTACKER) as http:
        http.put(f"/v1/graphs/{digest}", content=body).raise_for_status()
    with ThreadPoolExecutor(_POLLS) as pool:
        statuses = Counter(pool.map(wait, range(_POLLS)))
    return Outcome(_counts(statuses), not any(status >= _ERROR for status in statuses))


def empty_frames(attacked: Target) -> Outcome:
    """20 bodies of 3,000 empty compressed streams."""
    body = zstandard.ZstdCompressor().compress(b"") * _FRAMES
    headers = {"Content-Encoding": "zstd", "Content-Type": "application/json"}
    with attacked.http(ATTACKER) as http:
        sent = (http.post("/v1/plans", content=body, headers=headers) for _ in range(20))
        statuses = Counter(response.status_code for response in sent)
    return Outcome(_counts(statuses), set(statuses) == {415})


def cancelled_jobs(attacked: Target) -> Outcome:
    """150 jobs with pins of 900 KB, each cancelled at once."""
    small = graph_of(archives.SMALL)
    digest = hashlib.sha256(small).hexdigest()
    before = archives.stored_bytes(attacked.url)
    statuses = Counter[int]()
    with attacked.http(ATTACKER) as http:
        http.put(f"/v1/graphs/{digest}", content=small).raise_for_status()
        for number in range(_CANCELLED):
            pins = {f"x{number}-{i}-{'y' * 400}": "R" for i in range(1000)}
            asked = {
                "graph_sha256": digest,
                "mesh": {"shape": [2]},
                "options": {"constraints": {"pins": {"parameters": pins}}},
            }
            response = http.post("/v1/plans", json=asked)
            statuses[response.status_code] += 1
            if response.status_code == httpx2.codes.ACCEPTED:
                http.post(f"{response.headers['Location']}:cancel")
    added = archives.stored_bytes(attacked.url) - before
    text = f"{_counts(statuses)}; {added / 1e6:.1f} MB of requests stored"
    return Outcome(text, added < _KEPT and max(statuses) < _ERROR)


def strangers_keys(attacked: Target) -> Outcome:
    """300 invalid keys of the address of a caller, whose own key goes on."""
    with attacked.http(OTHER) as http:
        refused = Counter[int]()
        for number in range(300):
            headers = {"Authorization": f"Bearer autoshard_{number}_x"}
            refused[http.get("/v1/plans", headers=headers).status_code] += 1
        begun = time.perf_counter()
        status = http.get("/v1/plans").status_code
        seconds = time.perf_counter() - begun
    text = f"{_counts(refused)}; the valid key {status} after {seconds:.2f} s"
    return Outcome(text, status == _OK and set(refused) <= {_UNAUTHORIZED, _TOO_MANY})


FLOODS = (slow_uploads, unread_bodies, long_polls, empty_frames, cancelled_jobs, strangers_keys)
"""Attacks by number, all at the same time as the others."""


def _counts(statuses: Counter[int]) -> str:
    return ", ".join(f"{count}x {status}" for status, count in sorted(statuses.items()))
