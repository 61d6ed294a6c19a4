"""Services in separate processes, requests with known plans, and the outcomes of their jobs."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, Self

import httpx2
import torch

from autoshard.graph import export_model, load_graph
from autoshard.mesh import make_mesh
from autoshard.plan import Plan
from autoshard.planner import make_plan
from autoshard_server.store.job_store import JobStore
from autoshard_server.store.jobs import EventKind, JobState
from autoshard_solver_cache import open_engine

LEASE = 4.0
"""Seconds; short, so that dead workers are detected soon."""

_START_TIMEOUT = 120.0
_REQUEST_TIMEOUT = 60.0
_POLL = 0.2
_HEALTH_PERIOD = 0.5


class _Mlp(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(16, width)
        self.down = torch.nn.Linear(width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down(torch.relu(self.up(x)))
        return down.sum()


@cache
def graph_of(number: int) -> bytes:
    """A small program, different for each number."""
    return export_model(_Mlp(16 * (number + 1)), (torch.zeros(8, 16),))


@cache
def expected_plan(number: int) -> str:
    """The plan of a program, made in this process, without its provenance."""
    plan = make_plan(load_graph(graph_of(number)), make_mesh((2, 2)))
    return _comparable(plan)


def _comparable(plan: Plan) -> str:
    return plan.model_dump_json(exclude={"provenance"})


@dataclass
class Process:
    """A process with its log.

    Attributes:
        command: to run.
        environment: additional environment variables.
        ready: text of the log line of a process that has started.
        prefix: of the command, such as one that enters a namespace and then is replaced by it.
        log: lines of the log.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    ready: str
    prefix: Sequence[str] = ()
    log: list[dict[str, Any]] = field(default_factory=list)

    def __enter__(self) -> Self:
        """Start it, and wait until it is ready."""
        self._process = subprocess.Popen(  # noqa: S603  a constant command
            [*self.prefix, *self.command],
            env={**os.environ, **self.environment},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()
        deadline = time.monotonic() + _START_TIMEOUT
        while not self._has_logged(self.ready):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"it did not start: {self.log[-5:]}")
            time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        """Send SIGTERM, and wait."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        self._process.wait()
        self._reader.join()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def kill(self) -> None:
        """Send SIGKILL, and wait."""
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def events(self, name: str) -> list[dict[str, Any]]:
        """Lines of its log of one kind."""
        return [line for line in list(self.log) if line.get("event") == name]

    def _has_logged(self, text: str) -> bool:
        return any(text in str(line.get("event", "")) for line in list(self.log))

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            try:
                self.log.append(json.loads(line))
            except json.JSONDecodeError:
                self.log.append({"event": "", "text": line})
        self._process.stderr.close()


class Service(Process):
    """`python -m autoshard_server` on a port that it chooses."""

    def __init__(self, url: str, *, host: str = "127.0.0.1", **settings: object) -> None:
        command = [sys.executable, "-m", "autoshard_server", "--host", host, "--port", "0"]
        super().__init__(command, _environment(url, settings), "serving")

    @property
    def address(self) -> str:
        """Its URL."""
        (line,) = self.events("serving")
        url: str = line["url"]
        return url


class Worker(Process):
    """`autoshard worker`."""

    def __init__(self, url: str, *, prefix: Sequence[str] = (), **settings: object) -> None:
        command = [sys.executable, "-m", "autoshard.cli", "worker"]
        super().__init__(command, _environment(url, settings), "worker_started", prefix)


def _environment(url: str, settings: Mapping[str, object]) -> dict[str, str]:
    """Environment variables of settings; those that are None are left out."""
    chosen = {"store_url": url, "lease": LEASE, "retry_after": 1, "shutdown_delay": 0, **settings}
    given = {name: value for name, value in chosen.items() if value is not None}
    special = {name: str(value) for name, value in given.items() if name.isupper()}
    renamed = {f"AUTOSHARD_{n.upper()}": str(v) for n, v in given.items() if not n.isupper()}
    return {**renamed, **special}


class Balancer:
    """Sends each request to the next of the servers that are ready, as a load balancer does."""

    def __init__(self) -> None:
        self._servers: list[Service] = []
        self._ready: list[str] = []
        self._numbers = count()

    @contextmanager
    def balancing(self, servers: Sequence[Service]) -> Iterator[None]:
        """Ask servers every half second whether they are ready, within a `with` block."""
        is_over = Event()
        for server in servers:
            self.add(server)

        def check() -> None:
            while not is_over.wait(_HEALTH_PERIOD):
                self._ready = [s.address for s in self._servers if _is_ready(s.address)]

        checker = Thread(target=check)
        checker.start()
        try:
            yield
        finally:
            is_over.set()
            checker.join()

    def add(self, server: Service) -> None:
        """Add a server that is ready."""
        self._servers.append(server)
        self._ready = [*self._ready, server.address]

    def choose(self) -> str:
        """Address of a server that was ready at the last check."""
        ready = self._ready
        return ready[next(self._numbers) % len(ready)]


def _is_ready(address: str) -> bool:
    with suppress(httpx2.TransportError):
        return httpx2.get(f"{address}/readyz", timeout=_REQUEST_TIMEOUT).is_success
    return False


@dataclass
class Submissions:
    """Requests that were sent, by their first response.

    Attributes:
        jobs: number of the program of each accepted job, by the job's id.
        accepted: number of responses with a job, new or shared.
        known: number of responses with the correct plan.
        refused: number of other responses, by status and type.
    """

    jobs: dict[str, int] = field(default_factory=dict)
    accepted: int = 0
    known: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    _lock: Lock = field(default_factory=Lock)

    def post(self, address: str, number: int) -> None:
        """Request the plan of a program."""
        files = {
            "graph": ("g.pt2", graph_of(number), "application/octet-stream"),
            "request": (None, json.dumps({"mesh": {"shape": [2, 2]}}), "application/json"),
        }
        try:
            answer = httpx2.post(f"{address}/v1/plans", files=files, timeout=_REQUEST_TIMEOUT)
        except httpx2.TransportError as error:
            self.refused[type(error).__name__] += 1
            return
        if answer.status_code == httpx2.codes.ACCEPTED:
            with self._lock:
                self.jobs[answer.json()["id"]] = number
                self.accepted += 1
        elif answer.status_code == httpx2.codes.OK and _is_right(answer.json(), number):
            with self._lock:
                self.known += 1
        else:
            kind = str(answer.json().get("type", "")).rpartition("#")[2]
            self.refused[f"{answer.status_code} {kind}".strip()] += 1

    def post_until_accepted(self, address: str, number: int) -> None:
        """Request the plan of a program until it is accepted."""
        before = len(self.jobs) + self.known
        while len(self.jobs) + self.known == before:
            self.post(address, number)
            time.sleep(_POLL)


@dataclass(frozen=True)
class Settled:
    """Outcome of accepted jobs.

    Attributes:
        right: number of jobs that ended with the correct plan.
        errors: number of jobs that ended with problem details, by their type.
        wrong: number of jobs that ended with another plan.
        lost: number of jobs that did not end, or are unknown.
        restarts: number of restarts of jobs.
        doubled: number of jobs that ended more than once.
        seconds: until all jobs had ended.
    """

    right: int
    errors: Counter[str]
    wrong: int
    lost: int
    restarts: int
    doubled: int
    seconds: float


def settle(submitted: Submissions, address: str, url: str, *, timeout: float = 1200.0) -> Settled:
    """Wait until all jobs have ended, and compare their plans with the expected ones.

    Args:
        submitted: with the accepted jobs.
        address: of a service.
        url: of its database.
        timeout: seconds after which unfinished jobs count as lost.
    """
    began = time.monotonic()
    waiting = set(submitted.jobs)
    ended: dict[str, dict[str, Any]] = {}
    with httpx2.Client(base_url=address, timeout=_REQUEST_TIMEOUT) as http:
        while waiting and time.monotonic() - began < timeout:
            for job_id in sorted(waiting):
                job = _job(http, job_id)
                if job is not None and job["done"]:
                    ended[job_id] = job
                    waiting.discard(job_id)
            time.sleep(_POLL)
    seconds = time.monotonic() - began
    states_of = _states(url, list(submitted.jobs))
    made = {i: job["result"] for i, job in ended.items() if "result" in job}
    rights = {job_id: _is_right(plan, submitted.jobs[job_id]) for job_id, plan in made.items()}
    return Settled(
        right=sum(rights.values()),
        errors=Counter(
            job["error"]["type"].rpartition("#")[2] for job in ended.values() if "error" in job
        ),
        wrong=len(rights) - sum(rights.values()),
        lost=len(waiting),
        restarts=sum(max(0, states.count("running") - 1) for states in states_of.values()),
        doubled=sum(sum(JobState(s).done for s in states) > 1 for states in states_of.values()),
        seconds=seconds,
    )


def count_ended(submitted: Submissions, address: str) -> int:
    """Number of jobs that have ended."""
    with httpx2.Client(base_url=address, timeout=_REQUEST_TIMEOUT) as http:
        found = [_job(http, job_id) for job_id in submitted.jobs]
    return sum(job is not None and job["done"] for job in found)


def await_true(
    condition: Callable[[], bool],
    otherwise: str = "a condition was not met in time",
    *,
    timeout: float = 300.0,
) -> None:
    """Wait until a condition holds.

    Raises:
        TimeoutError: it did not within the time, with the text of `otherwise`.
    """
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(otherwise)
        time.sleep(0.02)


def await_ended(submitted: Submissions, address: str, number: int) -> None:
    """Wait until a number of jobs have ended."""
    while count_ended(submitted, address) < number:
        time.sleep(_POLL)


def _job(http: httpx2.Client, job_id: str) -> dict[str, Any] | None:
    with suppress(httpx2.TransportError):
        answer = http.get(f"/v1/jobs/{job_id}")
        if answer.status_code == httpx2.codes.OK:
            found: dict[str, Any] = answer.json()
            return found
    return None


def _states(url: str, jobs: Sequence[str]) -> dict[str, list[str]]:
    """The states that each job was in, from its events in the database."""
    engine = open_engine(url)
    store = JobStore(engine, lease=LEASE, max_attempts=1)
    states_of = {job_id: store.events(job_id, limit=10_000) for job_id in jobs}
    engine.dispose()
    return {
        job_id: [str(e.data["state"]) for e in events if e.kind is EventKind.STATE]
        for job_id, events in states_of.items()
    }


def _is_right(plan: Mapping[str, Any], number: int) -> bool:
    return _comparable(Plan.from_document(plan)) == expected_plan(number)


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """Mount a small file system in memory; only root may do so."""
    folder.mkdir()
    size = f"size={megabytes}m"
    mount = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)]
    subprocess.run(mount, check=True)  # noqa: S603  a constant command
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)  # noqa: S603, S607  as above
