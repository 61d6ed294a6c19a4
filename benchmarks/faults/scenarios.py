"""Fault scenarios; each ends when every accepted job has ended."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from threading import Event

import psutil

from autoshard_server.store.artifacts import PLANS
from autoshard_solver_cache import SolverCache
from benchmarks.faults.harness import (
    LEASE,
    Balancer,
    Service,
    Settled,
    Submissions,
    Worker,
    await_ended,
    await_true,
    expected_plan,
    graph_of,
    settle,
    small_disk,
)
from benchmarks.faults.postgres import Cluster

_OUTAGE = 10.0
_UNAVAILABLE = "503 unavailable"
_JUMP = 6 * 3600
_FAR_JUMP = 100 * 24 * 3600
"""Further than anything is kept: nothing may be deleted."""
_SENDERS = 4
_AFTERWARDS = 3.0
"""Seconds for which requests come after the last server was replaced."""
_SHUTDOWN_DELAY = 2
_CLIENTS = 200
_DISK_MEGABYTES = 24
_MOST_ACCEPTED = 60
"""Largest number of requests until a database on a full disk refuses one."""
_FAKETIME = "libfaketime.so.1"
_RAY_WORKERS = 3
"""Number of Ray workers that are killed; a solve may end before its worker does."""


@dataclass(frozen=True)
class Place:
    """Resources of a scenario.

    Attributes:
        folder: an empty one.
        cluster: a PostgreSQL cluster; None if PostgreSQL is not installed.
        num_jobs: number of requests.
    """

    folder: Path
    cluster: Cluster | None
    num_jobs: int

    @property
    def sqlite(self) -> str:
        """URL of a database in the folder."""
        return f"sqlite:///{self.folder / 'store.sqlite3'}"

    @property
    def postgres(self) -> str:
        """URL of a new database of the cluster.

        Raises:
            NotPossibleError: there is no cluster.
        """
        if self.cluster is None:
            raise NotPossibleError("PostgreSQL is not installed")
        return self.cluster.create_database()


class NotPossibleError(Exception):
    """A requirement of a scenario is missing."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a scenario.

    Attributes:
        submitted: requests by their first response.
        settled: outcome of the accepted jobs.
        note: other observations.
        sound: true if these are as expected.
    """

    submitted: Submissions
    settled: Settled
    note: str = ""
    sound: bool = True

    @property
    def holds(self) -> bool:
        """True if no job was lost, wrong or ended twice."""
        s = self.settled
        return self.sound and s.wrong == s.lost == s.doubled == 0 and bool(self.submitted.jobs)


def server_killed(place: Place) -> Outcome:
    """The server is killed (SIGKILL) after a fifth of the jobs, and restarted."""
    submitted, url = Submissions(), place.sqlite
    with Service(url) as service:
        _post_all(submitted, service.address, range(place.num_jobs))
        await_ended(submitted, service.address, max(1, place.num_jobs // 5))
        service.kill()
    with Service(url) as service:
        return Outcome(submitted, settle(submitted, service.address, url))


def worker_killed(place: Place) -> Outcome:
    """One of two workers on one PostgreSQL is killed in the middle of a solve."""
    submitted, url = Submissions(), place.postgres
    with Service(url, num_workers=0) as service, ExitStack() as stack:
        workers = [stack.enter_context(Worker(url, num_workers=1)) for _ in range(2)]
        _post_all(submitted, service.address, range(place.num_jobs))
        solver = _stopped_solver(workers[0])
        workers[0].kill()
        await_true(lambda: not _runs(solver))
        settled = settle(submitted, service.address, url)
        started = len(workers[1].events("job_started"))
    drained = bool(workers[1].events("worker_ended"))
    note = f"the other worker ran {started}"
    return Outcome(submitted, settled, note, drained and settled.restarts >= 1)


def solver_killed(place: Place) -> Outcome:
    """The process of a solve is killed, as the kernel does when memory runs out."""
    submitted, url = Submissions(), place.sqlite
    with Service(url) as service:
        _post_all(submitted, service.address, range(place.num_jobs))
        hit: set[str] = set()
        for _ in range(min(3, place.num_jobs)):
            await_true(lambda: bool(_solving(service, hit)))
            job_id, pid = _solving(service, hit)[-1]
            os.kill(pid, signal.SIGKILL)
            hit.add(job_id)
        settled = settle(submitted, service.address, url)
    return Outcome(submitted, settled, sound=settled.restarts >= 1)


def database_gone(place: Place) -> Outcome:
    """PostgreSQL crashes while jobs run, and is restarted after 10 s."""
    return _outage(place, Cluster.stop, Cluster.start)


def failover(place: Place) -> Outcome:
    """PostgreSQL fails over to a standby, which is read-only for 10 s, while jobs run."""
    found = _outage(place, Cluster.become_standby, Cluster.promote)
    return replace(found, sound=found.sound and set(found.submitted.refused) == {_UNAVAILABLE})


def _outage(
    place: Place, begin: Callable[[Cluster], None], end: Callable[[Cluster], None]
) -> Outcome:
    """Requests come for 10 s in which the database of a service cannot be written."""
    submitted, url = Submissions(), place.postgres
    assert place.cluster is not None
    with Service(url) as service:
        _post_all(submitted, service.address, range(place.num_jobs))
        await_ended(submitted, service.address, max(1, place.num_jobs // 5))
        begin(place.cluster)
        latest = time.monotonic() + _OUTAGE
        while time.monotonic() < latest:
            submitted.post(service.address, place.num_jobs)
        end(place.cluster)
        submitted.post_until_accepted(service.address, place.num_jobs)
        settled = settle(submitted, service.address, url)
    refused = ", ".join(submitted.refused)
    return Outcome(submitted, settled, f"requests meanwhile: {refused}", settled.right > 0)


def rolling_restart(place: Place) -> Outcome:
    """Two servers on one PostgreSQL are replaced one after the other while requests come."""
    submitted, url = Submissions(), place.postgres
    # Exporting is not thread-safe.
    for number in range(place.num_jobs):
        graph_of(number)
        expected_plan(number)
    balancer, is_over = Balancer(), Event()

    def send() -> None:
        for number in count():
            if is_over.is_set():
                return
            submitted.post(balancer.choose(), number % place.num_jobs)

    with ExitStack() as stack:
        servers = [stack.enter_context(_rolled(url)) for _ in range(2)]
        stack.enter_context(balancer.balancing(servers))
        pool = stack.enter_context(ThreadPoolExecutor(_SENDERS))
        stack.callback(is_over.set)
        clients = [pool.submit(send) for _ in range(_SENDERS)]
        for number in range(2):
            new = stack.enter_context(_rolled(url))
            balancer.add(new)
            servers[number].__exit__()
            servers.append(new)
        time.sleep(_AFTERWARDS)
        is_over.set()
        for client in clients:
            client.result()
        settled = settle(submitted, servers[-1].address, url)
    answered = submitted.accepted + submitted.known
    refused = ", ".join(f"{number} {kind}" for kind, number in submitted.refused.items())
    note = f"{answered} requests answered, refused: {refused or 'none'}"
    return Outcome(submitted, settled, note, not submitted.refused)


def _rolled(url: str) -> Service:
    return Service(url, shutdown_delay=_SHUTDOWN_DELAY)


def disk_full(place: Place) -> Outcome:
    """The disk of the database is full while jobs run, until space is freed."""
    if os.geteuid() != 0:
        raise NotPossibleError("only root may mount a small disk")
    submitted = Submissions()
    with small_disk(place.folder / "disk", _DISK_MEGABYTES) as disk:
        url = f"sqlite:///{disk / 'store.sqlite3'}"
        with Service(url) as service:
            _post_all(submitted, service.address, range(place.num_jobs))
            await_ended(submitted, service.address, max(1, place.num_jobs // 5))
            _fill(disk / "ballast")
            _post_until_refused(submitted, service.address, place.num_jobs)
            await_true(lambda: bool(service.events("store_unavailable")))
            time.sleep(2 * LEASE)
            (disk / "ballast").unlink()
            settled = settle(submitted, service.address, url)
            intact = _is_intact(url)
    refused = ", ".join(submitted.refused)
    return Outcome(submitted, settled, f"requests meanwhile: {refused}", bool(refused) and intact)


def clock_jumps(place: Place) -> Outcome:
    """The clock of the machine jumps by 6 hours, forward and back, and by 100 days, with jobs."""
    library = next(Path("/usr/lib").glob(f"*/faketime/{_FAKETIME}"), None)
    if library is None:
        raise NotPossibleError("libfaketime is not installed")
    submitted, url, jumps = Submissions(), place.sqlite, (_JUMP, -_JUMP, 0, _FAR_JUMP)
    offset = place.folder / "offset"
    offset.write_text("+0s")
    fake = {
        "LD_PRELOAD": library,
        "FAKETIME_TIMESTAMP_FILE": offset,
        "FAKETIME_NO_CACHE": 1,
        # Leases use the monotonic clock, which real jumps do not change either.
        "FAKETIME_DONT_FAKE_MONOTONIC": 1,
    }
    with Service(url, **fake) as service:
        first = 0
        for number, jump in enumerate(jumps):
            # Others are queued and running when the clock jumps, and more arrive after it.
            last = (number + 1) * place.num_jobs // len(jumps)
            _post_all(submitted, service.address, range(first, last))
            await_ended(submitted, service.address, first + 1)
            offset.write_text(f"{jump:+d}s")
            first = last
        settled = settle(submitted, service.address, url)
        stamps = [line["timestamp"][:13] for line in service.events("job_finished")]
    note = f"the service saw {len(set(stamps))} different hours"
    return Outcome(submitted, settled, note, settled.restarts == 0 and len(set(stamps)) > 1)


def two_servers(place: Place) -> Outcome:
    """200 clients concurrently send the same 20 requests to two servers on one PostgreSQL."""
    submitted, url = Submissions(), place.postgres
    num_programs = max(1, place.num_jobs * 2 // 5)
    # Exporting is not thread-safe.
    for number in range(num_programs):
        graph_of(number)
        expected_plan(number)
    with Service(url) as one, Service(url) as other, ThreadPoolExecutor(_CLIENTS) as pool:
        addresses = (one.address, other.address)
        clients = [
            pool.submit(submitted.post, addresses[client % 2], client % num_programs)
            for client in range(_CLIENTS)
        ]
        for client in clients:
            client.result()
        settled = settle(submitted, other.address, url)
        started = sum(len(server.events("job_started")) for server in (one, other))
    answered = submitted.accepted + submitted.known
    note = (
        f"{answered} of {_CLIENTS} requests answered, {submitted.known} of them with the plan; "
        f"{started} solves for {num_programs} plans"
    )
    # A request that comes between the look-up and the end of a solve gets a job of its own, which
    # ends with the cached plan.
    sound = started == num_programs <= settled.right and answered == _CLIENTS
    return Outcome(submitted, settled, note, sound)


def ray_worker_killed(place: Place) -> Outcome:
    """Solves run on Ray, and the Ray workers of three are killed."""
    try:
        import ray  # noqa: F401, PLC0415  an extra
    except ImportError:
        raise NotPossibleError("Ray is not installed") from None
    submitted, url = Submissions(), place.sqlite
    with Service(url, executor="ray") as service:
        _post_all(submitted, service.address, range(place.num_jobs))
        killed: set[int] = set()
        while len(killed) < _RAY_WORKERS:
            await_true(lambda: bool(_ray_workers(service.pid) - killed))
            for worker in _ray_workers(service.pid) - killed:
                with suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)
                killed.add(worker)
        settled = settle(submitted, service.address, url)
    return Outcome(submitted, settled, sound=settled.restarts >= 1)


Scenario = Callable[[Place], Outcome]

SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        server_killed,
        worker_killed,
        solver_killed,
        database_gone,
        failover,
        rolling_restart,
        disk_full,
        clock_jumps,
        two_servers,
        ray_worker_killed,
    )
}
"""Every scenario by its name."""


def _post_all(submitted: Submissions, address: str, numbers: range) -> None:
    for number in numbers:
        submitted.post(address, number)


def _post_until_refused(submitted: Submissions, address: str, first: int) -> None:
    """Request further plans until one is refused: the database may have free space in its files."""
    for number in range(first, first + _MOST_ACCEPTED):
        submitted.post(address, number)
        if submitted.refused:
            return


def _stopped_solver(worker: Worker) -> int:
    """Stop a solver process of `worker` in the middle of its solve; its process id."""
    stopped: set[int] = set()

    def stop() -> bool:
        for _, pid in _solving(worker, set()):
            with suppress(psutil.NoSuchProcess):
                solver = psutil.Process(pid)
                solver.suspend()
                if solver.status() == psutil.STATUS_STOPPED:
                    stopped.add(solver.pid)
        return bool(stopped)

    await_true(stop)
    return stopped.pop()


def _solving(service: Service | Worker, but: set[str]) -> list[tuple[str, int]]:
    """Jobs whose solver runs, with its process id, except some jobs."""
    found = [(e["job_id"], e["pid"]) for e in service.events("solver_process")]
    return [(job_id, pid) for job_id, pid in found if job_id not in but and _runs(pid)]


def _runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def _ray_workers(service: int) -> set[int]:
    """Process ids of the Ray actors of a service that have a job."""
    found = set()
    for process in psutil.Process(service).children(recursive=True):
        with suppress(psutil.Error):
            if process.cmdline()[:1] == ["ray::SolverActor.receive"]:
                found.add(process.pid)
    return found


def _fill(path: Path) -> None:
    with path.open("wb") as file:
        subprocess.run(["cat", "/dev/zero"], stdout=file, stderr=subprocess.DEVNULL, check=False)  # noqa: S607  ours


def _is_intact(url: str) -> bool:
    cache = SolverCache(url)
    plans = list(cache.entries(PLANS))
    intact = all(cache.read(PLANS, entry.key) is not None for entry in plans)
    cache.close()
    return intact and bool(plans)
