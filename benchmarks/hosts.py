"""Misses per second of a service whose solves run on other hosts, into docs/reliability.md.

The hosts are network namespaces of this machine, connected by a bridge, with a fixed share of its
processors each. The host of the service has PostgreSQL, which is reached with a password over TCP,
a server, and the clients. On each further host runs `autoshard worker`, or a node of a Ray cluster.
Then a host vanishes in the middle of its solves: its network first, so that nobody is told.

python -m benchmarks.hosts                            everything, as root on Linux
python -m benchmarks.hosts --engines ray --hosts 1    one row; the others stay

All runs in namespaces of its own, which end with it: nothing of it stays, even after `kill -9`,
but empty cgroups.
"""

import argparse
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from ipaddress import IPv4Interface
from pathlib import Path

from benchmarks.document import DOCS, caption, write_table
from benchmarks.faults.harness import (
    Process,
    Service,
    Settled,
    Submissions,
    Worker,
    await_true,
    expected_plan,
    settle,
)
from benchmarks.faults.postgres import Cluster, binaries, running_cluster

_CGROUPS = Path("/sys/fs/cgroup/cpu")
_NETWORK = IPv4Interface("10.213.0.1/24")
"""Of the host of the service; the others have the next addresses."""

_RAY_PORT = 6379
_RAY_MEMORY = 100 << 20
_PERIOD = 100_000
"""Microseconds in which a host has its share of a processor."""

_JOBS = {"worker": 12, "ray": 3}
"""Jobs of a host in a row: about half a minute."""

_INTO_THE_NEXT = 0.5
"""Seconds after the end of a job in which its host is in the middle of another."""

_ROWS = ("rates", "loss")
_ACTOR = "ray::SolverActor.receive"
"""Name of the process of a Ray actor that has a job."""

_CLIENTS = 2
_POLL = 0.05
_TIMEOUT = 200.0
_ONE_EACH = {"num_quick_workers": 0, "num_reserve_workers": 0}
_HEAD = (
    "| solves run on | hosts | accepted | correct plan | wrong, lost, or ended twice "
    "| restarted | misses/s |\n|---|--:|--:|--:|--:|--:|--:|"
)


@dataclass(frozen=True)
class Host:
    """A network namespace and a cgroup.

    Attributes:
        name: of the namespace, and of its cable at the bridge.
        cgroup: folder of the cgroup of all its processes.
    """

    name: str
    cgroup: Path

    @property
    def prefix(self) -> list[str]:
        """Beginning of a command that runs on the host."""
        join = f'echo $$ > {self.cgroup}/cgroup.procs && exec "$@"'
        return ["sh", "-c", join, "sh", "nsenter", f"--net=/run/netns/{self.name}"]

    @property
    def pids(self) -> list[int]:
        """Its processes."""
        return [int(pid) for pid in (self.cgroup / "cgroup.procs").read_text("ascii").split()]

    def runs(self, program: str) -> bool:
        """True if the command line of one of its processes begins so."""
        for pid in self.pids:
            with suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(program.encode()):
                    return True
        return False

    def limit(self, share: float) -> None:
        """Let all its processes together have a share of a processor."""
        quota = self.cgroup / "cpu.cfs_quota_us"
        quota.write_text(str(int(share * _PERIOD)), encoding="ascii")

    def vanish(self) -> None:
        """Unplug its cable, then kill its processes, which can tell nobody."""
        _run("ip", "link", "set", self.name, "down")
        self.kill()

    def kill(self) -> None:
        """Kill all its processes."""
        while pids := self.pids:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL)


@contextmanager
def plugged_hosts(number: int) -> Iterator[list[Host]]:
    """Hosts at the bridge, which are gone after the `with` block."""
    with ExitStack() as stack:
        yield [stack.enter_context(_plugged_host(place)) for place in range(1, number + 1)]


@contextmanager
def _plugged_host(place: int) -> Iterator[Host]:
    cgroup = Path(tempfile.mkdtemp(prefix="autoshard-host-", dir=_CGROUPS))
    host = Host(f"host{place}", cgroup)
    address = IPv4Interface((int(_NETWORK.ip) + place, _NETWORK.network.prefixlen))
    inside = ["ip", "-n", host.name]
    try:
        _run("ip", "netns", "add", host.name)
        cable = ["name", host.name, "type", "veth", "peer", "name", "eth0", "netns", host.name]
        _run("ip", "link", "add", *cable)
        _run("ip", "link", "set", host.name, "master", "bridge", "up")
        _run(*inside, "address", "add", str(address), "dev", "eth0")
        _run(*inside, "link", "set", "lo", "up")
        _run(*inside, "link", "set", "eth0", "up")
        yield host
    finally:
        host.kill()
        _run("ip", "netns", "delete", host.name)
        cgroup.rmdir()


@contextmanager
def solving_on_workers(url: str, hosts: Sequence[Host]) -> Iterator[tuple[Service, list[Process]]]:
    """A server, and the processes whose logs have the ends of jobs: a worker on each host."""
    with ExitStack() as stack:
        for host in hosts:
            stack.callback(host.kill)
        service = stack.enter_context(_server(url, num_workers=0))
        workers = [Worker(url, prefix=host.prefix, num_workers=1, **_ONE_EACH) for host in hosts]
        with ThreadPoolExecutor(len(hosts)) as pool:
            started: list[Process] = list(pool.map(Process.__enter__, workers))
        yield service, started


@contextmanager
def solving_on_ray(url: str, hosts: Sequence[Host]) -> Iterator[tuple[Service, list[Process]]]:
    """A server, which logs the ends of jobs, and a Ray cluster with a node on each host."""
    # Of all processes from here on, on all hosts.
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    ray = [str(Path(sys.executable).parent / "ray"), "start", "--disable-usage-stats"]
    memory = f"--object-store-memory={_RAY_MEMORY}"
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        head = ["--head", f"--node-ip-address={_NETWORK.ip}", f"--port={_RAY_PORT}"]
        own = ["--num-cpus=0", "--include-dashboard=false", f"--temp-dir={folder}"]
        with ExitStack() as stack:
            # This sees the processes of its namespace only.
            stack.callback(_run, ray[0], "stop", "--force")
            _run(*ray, *head, *own, memory)
            address = f"{_NETWORK.ip}:{_RAY_PORT}"
            for place, host in enumerate(hosts, 1):
                mine = f"--node-ip-address={_NETWORK.ip + place}"
                joined = [f"--address={address}", mine, "--num-cpus=1", memory]
                _run(*host.prefix, *ray, *joined)
            asked = {"executor": "ray", "ray_address": address, "num_workers": len(hosts)}
            service = stack.enter_context(_server(url, **asked, **_ONE_EACH))
            yield service, [service]


Engine = Callable[[str, Sequence[Host]], AbstractContextManager[tuple[Service, list[Process]]]]
ENGINES: dict[str, Engine] = {"worker": solving_on_workers, "ray": solving_on_ray}
_NAMES = {"worker": "`autoshard worker`", "ray": "Ray"}


def _server(url: str, **settings: object) -> Service:
    return Service(url, host=str(_NETWORK.ip), auth="off", max_caller_jobs=1000, **settings)


@dataclass(frozen=True)
class Measured:
    """Jobs of a row of the table, and the plans per second if they were measured."""

    submitted: Submissions
    settled: Settled
    rate: str = ""

    @property
    def holds(self) -> bool:
        """True if every job ended once, with the correct plan."""
        s = self.settled
        return s.right == len(self.submitted.jobs) and s.doubled == 0


def measure(engine: Engine, url: str, number: int, jobs: int, share: float) -> Measured:
    """Submit the jobs of some hosts, and wait for the last; the first are not measured."""
    submitted = Submissions()
    # After the first, all processes have been started.
    warm = max(number, jobs // 4)
    with plugged_hosts(number) as hosts, engine(url, hosts) as (service, logs):
        _submit(submitted, service, range(warm))
        _await_finished(logs, warm)
        for host in hosts:
            host.limit(share)
        began = time.monotonic()
        _submit(submitted, service, range(warm, warm + jobs))
        _await_finished(logs, warm + jobs)
        seconds = time.monotonic() - began
        return Measured(submitted, settle(submitted, service.address, url), f"{jobs / seconds:.2f}")


def lose_a_host(engine: Engine, url: str, number: int, jobs: int, share: float) -> Measured:
    """Do so while one of the hosts vanishes after half of the jobs."""
    submitted = Submissions()
    with plugged_hosts(number) as hosts, engine(url, hosts) as (service, logs):
        for host in hosts:
            host.limit(share)
        _submit(submitted, service, range(jobs))
        _await_finished(logs, jobs // 2)
        if engine is solving_on_ray:
            await_true(lambda: hosts[0].runs(_ACTOR), "no actor runs on the host", timeout=_TIMEOUT)
        time.sleep(_INTO_THE_NEXT)
        hosts[0].vanish()
        settled = settle(submitted, service.address, url, timeout=_TIMEOUT)
        return Measured(submitted, settled)


def _submit(submitted: Submissions, service: Service, numbers: range) -> None:
    with ThreadPoolExecutor(_CLIENTS) as pool:
        for sent in [pool.submit(submitted.post, service.address, n) for n in numbers]:
            sent.result()
    if submitted.refused:
        raise RuntimeError(f"requests were refused: {dict(submitted.refused)}")


def _await_finished(logs: Sequence[Process], number: int) -> None:
    def have_ended() -> bool:
        return sum(len(log.events("job_finished")) for log in logs) >= number

    await_true(have_ended, f"not all of {number} jobs ended", timeout=_TIMEOUT)


def _rows(cluster: Cluster, options: argparse.Namespace) -> Iterator[tuple[str, str, bool]]:
    """The beginning of each row, its figures, and whether all jobs ended as they should."""
    for name in options.engines:
        asked = {number: (options.jobs or _JOBS[name]) * number for number in options.hosts}
        for number, jobs in asked.items() if "rates" in options.rows else ():
            url = cluster.create_database()
            found = measure(ENGINES[name], url, number, jobs, options.share)
            yield f"| {_NAMES[name]} | {number} |", _figures(found), found.holds
        if "loss" in options.rows:
            most = max(options.hosts)
            url = cluster.create_database()
            found = lose_a_host(ENGINES[name], url, most, asked[most], options.share)
            holds = found.holds and found.settled.restarts > 0
            yield f"| {_NAMES[name]} | {most}, one vanishes |", _figures(found), holds


def _figures(found: Measured) -> str:
    s, accepted = found.settled, len(found.submitted.jobs)
    figures = (accepted, s.right, s.wrong + s.lost + s.doubled, s.restarts, found.rate)
    return f" {' | '.join(map(str, figures))} |"


def _place(beginning: str) -> tuple[bool, str]:
    return beginning.startswith(f"| {_NAMES['ray']} "), beginning


def _rows_of(document: Path) -> dict[str, str]:
    """Figures of the rows that the document has, by their beginnings."""
    text = document.read_text(encoding="utf-8")
    names = "|".join(map(re.escape, _NAMES.values()))
    found = re.finditer(rf"^(\| (?:{names}) \| \d[^|]* \|)(.*)$", text, re.MULTILINE)
    return {row[1]: row[2] for row in found}


def _enter_namespaces(arguments: Sequence[str]) -> None:
    """Become a process in namespaces of networks, mounts and processes."""
    unshare = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    again = [sys.executable, "-m", "benchmarks.hosts", "--inside", *arguments]
    os.execvp(unshare[0], [*unshare, *again])  # noqa: S606  a constant command


def _connect() -> None:
    """Make the bridge, in the namespaces."""
    netns = Path("/run/netns")
    netns.mkdir(exist_ok=True)
    _run("mount", "-t", "tmpfs", "tmpfs", str(netns))
    _run("ip", "link", "add", "bridge", "type", "bridge")
    _run("ip", "address", "add", str(_NETWORK), "dev", "bridge")
    for name in ("lo", "bridge"):
        _run("ip", "link", "set", name, "up")


def _run(*command: str) -> None:
    done = subprocess.run(  # noqa: S603  constant commands
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout[-2000:]}")


def main() -> int:
    """Measure, and write the table; return 1 if a job did not end once with the correct plan."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--engines", nargs="+", choices=sorted(ENGINES), default=list(ENGINES))
    parser.add_argument("--hosts", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--jobs", type=int, help="of each host in a row")
    parser.add_argument("--share", type=float, default=0.35, help="of a processor, for each host")
    parser.add_argument("--rows", nargs="+", choices=_ROWS, default=_ROWS, help="not all")
    parser.add_argument("--document", type=Path, default=DOCS / "reliability.md")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if reason := missing_requirement():
        parser.error(reason)
    if "ray" in options.engines and find_spec("ray") is None:
        parser.error("Ray is not installed: pip install 'autoshard[ray]'")
    if not options.inside:
        _enter_namespaces(sys.argv[1:])
    return _write_rows(options)


def missing_requirement() -> str:
    """The reason for which this machine cannot have hosts; empty if it can."""
    if os.geteuid() or shutil.which("ip") is None:
        return "this needs root and the program `ip`"
    if binaries() is None:
        return "PostgreSQL is not installed"
    if not (_CGROUPS / "cgroup.procs").exists():
        return "there is no controller `cpu` of cgroups version 1"
    return ""


def _write_rows(options: argparse.Namespace) -> int:
    # The first process of a namespace gets no other signals than those it handles.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    _connect()
    conditions = caption(
        f"hosts with {options.share:g} of a processor each; the last row that was measured"
    )
    for number in range(max(options.hosts) * (options.jobs or max(_JOBS.values())) * 2):
        expected_plan(number)
    programs, holds, rows = binaries(), True, _rows_of(options.document)
    assert programs is not None
    with running_cluster(programs, _NETWORK) as cluster:
        for beginning, figures, is_right in _rows(cluster, options):
            sys.stdout.write(f"{beginning}{figures}\n")
            sys.stdout.flush()
            rows[beginning] = figures
            holds = holds and is_right
            table = [_HEAD, *(f"{row}{rows[row]}" for row in sorted(rows, key=_place))]
            write_table(options.document, "hosts", conditions, "\n".join(table))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
