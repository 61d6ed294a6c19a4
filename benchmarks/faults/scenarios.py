"""What goes wrong, and when; each scenario ends when every accepted job has ended."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from autoshard_server.store.artifacts import PLANS
from autoshard_solver_cache import SolverCache
from benchmarks.faults.harness import (
    LEASE,
    Asked,
    Service,
    Settled,
    Worker,
    await_ended,
    graph_of,
    right_answer,
    settle,
    small_disk,
)
from benchmarks.faults.postgres import Cluster

_OUTAGE = 10.0
_JUMP = 6 * 3600
_CLIENTS = 200
_DISK_MEGABYTES = 24
_MOST_ACCEPTED = 60
"""Requests that a database on a full disk may have room for."""
_FAKETIME = "libfaketime.so.1"
_BEGUN = 0.2
"""Seconds of a processor after which a solver certainly has its work."""


@dataclass(frozen=True)
class Place:
    """Where a scenario runs.

    Attributes:
        folder: empty, and its own.
        cluster: a PostgreSQL; None where none is installed.
        num_jobs: requests to make.
    """

    folder: Path
    cluster: Cluster | None
    num_jobs: int

    @property
    def sqlite(self) -> str:
        """A database in the folder."""
        return f"sqlite:///{self.folder / 'store.sqlite3'}"

    @property
    def postgres(self) -> str:
        """A database of the cluster.

        Raises:
            NotPossibleError: there is no cluster.
        """
        if self.cluster is None:
            raise NotPossibleError("PostgreSQL is not installed")
        return self.cluster.create_database()


class NotPossibleError(Exception):
    """A scenario needs something that is not here."""


@dataclass(frozen=True)
class Outcome:
    """What a scenario shows.

    Attributes:
        asked: what was accepted, and what was not.
        settled: what became of it.
        note: what else was seen.
        sound: whether that was as it should be.
    """

    asked: Asked
    settled: Settled
    note: str = ""
    sound: bool = True

    @property
    def holds(self) -> bool:
        """Whether nothing was lost, wrong or done twice."""
        s = self.settled
        return self.sound and s.wrong == s.lost == s.doubled == 0 and bool(self.asked.jobs)


def server_killed(place: Place) -> Outcome:
    """The server is killed (SIGKILL) with a fifth of the jobs done, and started again."""
    asked, url = Asked(), place.sqlite
    with Service(url) as service:
        _post_all(asked, service.address, range(place.num_jobs))
        await_ended(asked, service.address, max(1, place.num_jobs // 5))
        service.kill()
    with Service(url) as service:
        return Outcome(asked, settle(asked, service.address, url))


def worker_killed(place: Place) -> Outcome:
    """One of two workers on one PostgreSQL is killed in the middle of a solve."""
    asked, url = Asked(), place.postgres
    with Service(url, num_workers=0) as service, ExitStack() as stack:
        workers = [stack.enter_context(Worker(url, num_workers=1)) for _ in range(2)]
        _post_all(asked, service.address, range(place.num_jobs))
        _await(lambda: bool(workers[0].events("solver_process")))
        solver = workers[0].events("solver_process")[-1]["pid"]
        workers[0].kill()
        _await(lambda: not _runs(solver))
        settled = settle(asked, service.address, url)
        started = len(workers[1].events("job_started"))
    drained = bool(workers[1].events("worker_ended"))
    note = f"the other worker ran {started}"
    return Outcome(asked, settled, note, drained and settled.again >= 1)


def solver_killed(place: Place) -> Outcome:
    """The process of a solve is killed, as the kernel does when memory runs out."""
    asked, url = Asked(), place.sqlite
    with Service(url) as service:
        _post_all(asked, service.address, range(place.num_jobs))
        hit: set[str] = set()
        for _ in range(min(3, place.num_jobs)):
            _await(lambda: bool(_solving(service, hit)))
            job_id, pid = _solving(service, hit)[-1]
            os.kill(pid, signal.SIGKILL)
            hit.add(job_id)
        settled = settle(asked, service.address, url)
    return Outcome(asked, settled, sound=settled.again >= 1)


def database_gone(place: Place) -> Outcome:
    """PostgreSQL crashes in the middle of the jobs, and is back after 10 s."""
    asked, url = Asked(), place.postgres
    assert place.cluster is not None
    with Service(url) as service:
        _post_all(asked, service.address, range(place.num_jobs))
        await_ended(asked, service.address, max(1, place.num_jobs // 5))
        place.cluster.stop()
        began = time.monotonic()
        asked.post(service.address, place.num_jobs)
        time.sleep(max(0.0, _OUTAGE - (time.monotonic() - began)))
        place.cluster.start()
        asked.post_until_accepted(service.address, place.num_jobs)
        settled = settle(asked, service.address, url)
    refused = ", ".join(asked.refused)
    return Outcome(asked, settled, f"requests meanwhile: {refused}", settled.right > 0)


def disk_full(place: Place) -> Outcome:
    """The disk of the database is full in the middle of the jobs, until somebody makes room."""
    if os.geteuid() != 0:
        raise NotPossibleError("only root may mount a small disk")
    asked = Asked()
    with small_disk(place.folder / "disk", _DISK_MEGABYTES) as disk:
        url = f"sqlite:///{disk / 'store.sqlite3'}"
        with Service(url) as service:
            _post_all(asked, service.address, range(place.num_jobs))
            await_ended(asked, service.address, max(1, place.num_jobs // 5))
            _fill(disk / "ballast")
            _post_until_refused(asked, service.address, place.num_jobs)
            _await(lambda: bool(service.events("store_unavailable")))
            time.sleep(2 * LEASE)
            (disk / "ballast").unlink()
            settled = settle(asked, service.address, url)
            intact = _is_intact(url)
    refused = ", ".join(asked.refused)
    return Outcome(asked, settled, f"requests meanwhile: {refused}", bool(refused) and intact)


def clock_jumps(place: Place) -> Outcome:
    """The clock of the machine jumps by 6 hours, forward and back, while jobs run."""
    library = next(Path("/usr/lib").glob(f"*/faketime/{_FAKETIME}"), None)
    if library is None:
        raise NotPossibleError("libfaketime is not installed")
    asked, url = Asked(), place.sqlite
    offset = place.folder / "offset"
    offset.write_text("+0s")
    fake = {
        "LD_PRELOAD": library,
        "FAKETIME_TIMESTAMP_FILE": offset,
        "FAKETIME_NO_CACHE": 1,
        # Leases count by the monotonic clock, which no real jump moves either.
        "FAKETIME_DONT_FAKE_MONOTONIC": 1,
    }
    with Service(url, **fake) as service:
        _post_all(asked, service.address, range(place.num_jobs))
        for number, jump in enumerate((_JUMP, -_JUMP, 0)):
            await_ended(asked, service.address, (number + 1) * max(1, place.num_jobs // 5))
            offset.write_text(f"{jump:+d}s")
        settled = settle(asked, service.address, url)
        stamps = [line["timestamp"][:13] for line in service.events("job_finished")]
    note = f"the service saw {len(set(stamps))} different hours"
    return Outcome(asked, settled, note, settled.again == 0 and len(set(stamps)) > 1)


def two_servers(place: Place) -> Outcome:
    """200 clients ask two servers on one PostgreSQL the same 20 questions at once."""
    asked, url = Asked(), place.postgres
    questions = max(1, place.num_jobs * 2 // 5)
    # Exporting is not for threads.
    for question in range(questions):
        graph_of(question)
        right_answer(question)
    with Service(url) as one, Service(url) as other, ThreadPoolExecutor(_CLIENTS) as pool:
        addresses = (one.address, other.address)
        clients = [
            pool.submit(asked.post, addresses[client % 2], client % questions)
            for client in range(_CLIENTS)
        ]
        for client in clients:
            client.result()
        settled = settle(asked, other.address, url)
        started = sum(len(server.events("job_started")) for server in (one, other))
    answered = asked.accepted + asked.known
    note = (
        f"{answered} of {_CLIENTS} requests answered, {asked.known} of them with the plan at once; "
        f"{started} solves for {questions} plans"
    )
    sound = started == questions == settled.right and answered == _CLIENTS
    return Outcome(asked, settled, note, sound)


def ray_worker_killed(place: Place) -> Outcome:
    """Solves run on Ray, and the Ray worker of one is killed."""
    try:
        import ray  # noqa: F401, PLC0415  an extra
    except ImportError:
        raise NotPossibleError("Ray is not installed") from None
    asked, url = Asked(), place.sqlite
    with Service(url, executor="ray") as service:
        _post_all(asked, service.address, range(place.num_jobs))
        _await(lambda: bool(_ray_workers(service.pid)))
        os.kill(_ray_workers(service.pid)[0], signal.SIGKILL)
        settled = settle(asked, service.address, url)
    return Outcome(asked, settled, sound=settled.again >= 1)


Scenario = Callable[[Place], Outcome]

SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        server_killed,
        worker_killed,
        solver_killed,
        database_gone,
        disk_full,
        clock_jumps,
        two_servers,
        ray_worker_killed,
    )
}
"""Every scenario by its name."""


def _post_all(asked: Asked, address: str, numbers: range) -> None:
    for number in numbers:
        asked.post(address, number)


def _post_until_refused(asked: Asked, address: str, first: int) -> None:
    """Ask for further plans; what the database has room for in its own files is accepted."""
    for number in range(first, first + _MOST_ACCEPTED):
        asked.post(address, number)
        if asked.refused:
            return


def _await(condition: Callable[[], bool], *, patience: float = 300.0) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("what the scenario waits for did not happen")
        time.sleep(0.02)


def _solving(service: Service, but: set[str]) -> list[tuple[str, int]]:
    """Jobs whose solver runs, with its process, but for some."""
    found = [(e["job_id"], e["pid"]) for e in service.events("solver_process")]
    return [(job_id, pid) for job_id, pid in found if job_id not in but and _runs(pid)]


def _runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def _ray_workers(service: int) -> list[int]:
    """Actors below a service that have a solver with work."""
    found = []
    for process in psutil.Process(service).children(recursive=True):
        with suppress(psutil.Error):
            is_waiting = process.cmdline()[:1] == ["ray::Host.receive"]
            if is_waiting and any(c.cpu_times().user > _BEGUN for c in process.children()):
                found.append(process.pid)
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
