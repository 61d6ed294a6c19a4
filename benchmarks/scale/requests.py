"""Times of requests to a service whose database has many rows."""

import hashlib
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

from autoshard_server.http.paging import token_of
from autoshard_server.store.tables import Cursor
from benchmarks.faults.harness import Service, graph_of
from benchmarks.scale.rows import CALLERS, QUEUED, Filled, graph_digest, job_id, plan_id

_REPETITIONS = 40
_GRAPHS = 4
_MESH = {"shape": [2, 2]}
_UNUSED = b"a graph that nobody has uploaded"


@dataclass(frozen=True, slots=True)
class Timed:
    """A measured request.

    Attributes:
        name: method and path.
        seconds: of each repetition.
    """

    name: str
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median, in seconds."""
        return statistics.median(self.seconds)

    @property
    def slow(self) -> float:
        """95th percentile, in seconds."""
        return sorted(self.seconds)[int(0.95 * (len(self.seconds) - 1))]


@dataclass
class _Caller:
    """A client with the key of a caller, and the rows that it may read."""

    http: httpx2.Client
    filled: Filled
    random: random.Random

    def __post_init__(self) -> None:
        """Choose the rows that are read: each is read once, and is in no memory."""
        finished = range(0, self.filled.rows - QUEUED, len(CALLERS))
        self._numbers = iter(self.random.sample(finished, len(finished)))

    def number(self) -> int:
        """The number of another finished row of the caller, which has every twentieth."""
        return next(self._numbers)

    def deep(self) -> str:
        """A token of a page in the middle of a list."""
        middle = self.filled.rows // 2
        return token_of(Cursor(self.filled.created_at(middle), "0"))


_Send = Callable[[_Caller], httpx2.Response]


def timed_requests(address: str, token: str, filled: Filled) -> Iterator[Timed]:
    """Send each request repeatedly, one after the other.

    Args:
        address: of the service.
        token: key of the first caller, with all scopes.
        filled: what the database contains.
    """
    headers = {"Authorization": f"Bearer {token}"}
    with httpx2.Client(base_url=address, headers=headers, timeout=300) as http:
        caller = _Caller(http, filled, random.Random(0))
        for number in range(_GRAPHS):
            archive = graph_of(number)
            digest = hashlib.sha256(archive).hexdigest()
            http.put(f"/v1/graphs/{digest}", content=archive).raise_for_status()
        for name, (status, send) in _REQUESTS.items():
            seconds = []
            for _ in range(_REPETITIONS):
                started = time.perf_counter()
                response = send(caller)
                seconds.append(time.perf_counter() - started)
                if response.status_code != status:
                    raise RuntimeError(f"{name}: {response.status_code} {response.text[:300]}")
            yield Timed(name, tuple(seconds))


def _get(path: str, **parameters: Any) -> _Send:
    return lambda caller: caller.http.get(path, params=parameters)


def _request(caller: _Caller, **options: Any) -> dict[str, Any]:
    number = caller.random.randrange(_GRAPHS)
    digest = hashlib.sha256(graph_of(number)).hexdigest()
    return {"graph_sha256": digest, "mesh": _MESH, **options}


def _look_up_unknown(caller: _Caller) -> httpx2.Response:
    digest = hashlib.sha256(_UNUSED + caller.random.randbytes(8)).hexdigest()
    body = {"graph_sha256": digest, "mesh": _MESH}
    return caller.http.post("/v1/plans:lookup", json=body)


def _submit(caller: _Caller) -> httpx2.Response:
    budget = {"memory_budget": caller.random.randrange(1 << 30, 1 << 36)}
    return caller.http.post("/v1/plans", json=_request(caller, options=budget))


def _submit_known_graph_again(caller: _Caller) -> httpx2.Response:
    return caller.http.post("/v1/plans", json=_request(caller))


def _cancel(caller: _Caller) -> httpx2.Response:
    number = caller.filled.rows - QUEUED + caller.random.randrange(QUEUED // 20) * 20
    return caller.http.post(f"/v1/jobs/{job_id(number)}:cancel")


def _upload(caller: _Caller) -> httpx2.Response:
    archive = graph_of(caller.random.randrange(_GRAPHS))
    digest = hashlib.sha256(archive).hexdigest()
    return caller.http.put(f"/v1/graphs/{digest}", content=archive)


def _delete_plan(caller: _Caller) -> httpx2.Response:
    return caller.http.delete(f"/v1/plans/{plan_id(caller.number())}")


_REQUESTS: Mapping[str, tuple[int, _Send]] = {
    "GET /livez, for comparison": (200, _get("/livez")),
    "POST /v1/plans:lookup, unknown": (404, _look_up_unknown),
    "POST /v1/plans, new": (202, _submit),
    "POST /v1/plans, queued before": (202, _submit_known_graph_again),
    "PUT /v1/graphs/{digest}": (200, _upload),
    "GET /v1/graphs/{digest}": (
        200,
        lambda c: c.http.get(f"/v1/graphs/{_request(c)['graph_sha256']}"),
    ),
    "GET /v1/plans/{id}": (200, lambda c: c.http.get(f"/v1/plans/{plan_id(c.number())}")),
    "GET /v1/plans": (200, _get("/v1/plans", page_size=50)),
    "GET /v1/plans, in the middle": (
        200,
        lambda c: c.http.get("/v1/plans", params={"page_size": 50, "page_token": c.deep()}),
    ),
    "GET /v1/plans, of one graph": (
        200,
        lambda c: c.http.get("/v1/plans", params={"graph_digest": graph_digest(c.number())}),
    ),
    "DELETE /v1/plans/{id}": (204, _delete_plan),
    "GET /v1/jobs/{id}": (200, lambda c: c.http.get(f"/v1/jobs/{job_id(c.number())}")),
    "GET /v1/jobs/{id}/events": (
        200,
        lambda c: c.http.get(f"/v1/jobs/{job_id(c.number())}/events"),
    ),
    "GET /v1/jobs": (200, _get("/v1/jobs", page_size=50)),
    "GET /v1/jobs, in the middle": (
        200,
        lambda c: c.http.get("/v1/jobs", params={"page_size": 50, "page_token": c.deep()}),
    ),
    "GET /v1/jobs, failed": (200, _get("/v1/jobs", page_size=50, state="failed")),
    "GET /v1/jobs, cancelled: there are none": (
        200,
        _get("/v1/jobs", page_size=50, state="cancelled"),
    ),
    "GET /v1/jobs, queued": (200, _get("/v1/jobs", page_size=50, state="queued")),
    "POST /v1/jobs/{id}:cancel": (200, _cancel),
    "GET /v1/topologies": (200, _get("/v1/topologies")),
    "GET /v1/audit": (200, _get("/v1/audit")),
    "GET /metrics": (200, _get("/metrics")),
    "GET /readyz": (200, _get("/readyz")),
}


def service(url: str) -> Service:
    """A service that queues jobs only, with keys required."""
    return Service(
        url,
        auth="required",
        num_workers=0,
        max_queued_jobs=100_000,
        max_caller_jobs=100_000,
    )
