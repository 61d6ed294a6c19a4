"""Upgrade a pool of servers and workers to another release, and go back, while requests arrive.

python -m benchmarks.upgrade               this commit, and it with another version and migration
python -m benchmarks.upgrade --old COMMIT  from that commit to this one

Both releases are wheels, installed in folders of their own, on one PostgreSQL. The outcome is
written into docs/reliability.md.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx2

from autoshard.graph import load_graph
from autoshard.mesh import make_mesh
from autoshard.planner import make_plan
from benchmarks.document import caption, write_table
from benchmarks.faults.harness import Service, Worker, graph_of
from benchmarks.faults.postgres import binaries, running_cluster

_ROOT = Path(__file__).parent.parent
_DOCUMENT = _ROOT / "docs" / "reliability.md"
_NEW_VERSION = "99.0"
_MIGRATIONS = "server/autoshard_server/store/migrations/versions"
_MIGRATION = '''"""A column that the release before does not know."""

import sqlalchemy as sa
from alembic import op

revision = "9999"
down_revision = "{before}"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.add_column("jobs", sa.Column("colour", sa.String(8)))
'''
_HEAD = (
    "| step | requests | plans of the old release | plans of the new release | correct plan "
    "| failed | checks of readiness | not ready |\n|---|--:|--:|--:|--:|--:|--:|--:|\n"
)
_CLIENTS = 4
_RELATIVE_ERROR = 1e-9


@dataclass(frozen=True)
class Release:
    """A wheel that is installed in a folder.

    Attributes:
        folder: with its packages.
        version: of autoshard.
    """

    folder: Path
    version: str

    @contextmanager
    def running(self, url: str) -> Iterator[str]:
        """Run a server, which does not solve, and a worker; yields the server's address."""
        # Older releases do not know all settings.
        found = {"PYTHONPATH": self.folder, "PYTHONSAFEPATH": 1, "shutdown_delay": None}
        with Service(url, num_workers=0, **found) as server, Worker(url, num_workers=1, **found):
            yield server.address


@dataclass
class Step:
    """Outcomes of the requests of one step.

    Attributes:
        name: for the table.
        versions: number of plans by the release that made them.
        right: number of correct plans.
        failures: number of other responses, by status.
        checks: number of checks of readiness.
        unready: number of those that failed.
    """

    name: str
    versions: Counter[str] = field(default_factory=Counter)
    right: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    checks: int = 0
    unready: int = 0


class Pool:
    """Sends requests to the servers of a pool, and checks their readiness.

    Args:
        num_requests: of each step.
    """

    def __init__(self, num_requests: int) -> None:
        self._num_requests = num_requests
        self._numbers = count(1)
        self.steps: list[Step] = []

    def run(self, name: str, addresses: Sequence[str], until: Event | None = None) -> None:
        """Send the requests of a step to all servers in turn, at least until an event is set."""
        step = Step(name)
        self.steps.append(step)
        is_over = Event()
        prober = Thread(target=_probe, args=(step, addresses, is_over))
        prober.start()
        try:
            with ThreadPoolExecutor(_CLIENTS) as clients:
                while True:
                    numbers = [next(self._numbers) for _ in range(self._num_requests)]
                    chosen = [addresses[number % len(addresses)] for number in numbers]
                    list(clients.map(partial(_request, step), chosen, numbers))
                    if until is None or until.is_set():
                        break
        finally:
            is_over.set()
            prober.join()
        sys.stdout.write(_HEAD + _row(step) if len(self.steps) == 1 else _row(step))
        sys.stdout.flush()


def main() -> int:
    """Run the steps; return 1 if a request failed or a server was not ready."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--old", default="HEAD", help="commit of the old release")
    parser.add_argument("--new", default="HEAD", help="commit of the new release")
    parser.add_argument("--requests", type=int, default=20, help="of each step, at least")
    parser.add_argument("--document", type=Path, default=_DOCUMENT)
    options = parser.parse_args()
    programs = binaries()
    if programs is None:
        sys.exit("PostgreSQL is not installed")
    conditions = caption(f"{_CLIENTS} clients, a server and a worker of each release")
    with tempfile.TemporaryDirectory() as name, running_cluster(programs) as cluster:
        old = install(options.old, Path(name) / "old")
        new = install(options.new, Path(name) / "new", _NEW_VERSION)
        graph_of(1)  # exporting is not thread-safe
        pool = Pool(options.requests)
        change_releases(pool, old, new, cluster.create_database())
    write_table(options.document, "upgrade", f"{conditions}\n\n{_totals(pool.steps)}")
    return int(any(step.failures or step.unready for step in pool.steps))


def change_releases(pool: Pool, old: Release, new: Release, url: str) -> None:
    """Upgrade a pool, and go back to the old release on the database of the new one."""
    with ExitStack() as first:
        one = first.enter_context(old.running(url))
        pool.run("the old release", [one])
        with ExitStack() as second:
            with _sending(pool, "the new one starts, and migrates", one):
                other = second.enter_context(new.running(url))
            pool.run("both", [one, other])
            first.close()
            pool.run("the old one has ended", [other])
            with _sending(pool, "the old one starts again", other):
                again = first.enter_context(old.running(url))
            pool.run("both", [other, again])
            second.close()
            pool.run("the new one has ended", [again])


def install(commit: str, folder: Path, version: str = "") -> Release:
    """Build the wheel of a commit, and install it in a folder.

    Args:
        commit: of this repository.
        folder: to install it in; made here.
        version: of the wheel, which then also has one more migration; that of the commit if empty.
    """
    source, wheels = folder / "source", folder / "wheels"
    source.mkdir(parents=True)
    archive = _run("git", "archive", "--format=tar", commit)
    subprocess.run(["tar", "-x", "-C", str(source)], input=archive, check=True)  # noqa: S603, S607  constant
    project = source / "pyproject.toml"
    text = project.read_text(encoding="utf-8")
    if version:
        text = re.sub(r'(?m)^version = ".*"$', f'version = "{version}"', text, count=1)
        project.write_text(text, encoding="utf-8")
        _add_migration(source / _MIGRATIONS)
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    _run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(source))
    (wheel,) = wheels.glob("*.whl")
    _run(*pip, "install", "--no-deps", "--target", str(folder / "installed"), str(wheel))
    return Release(folder / "installed", wheel.name.split("-")[1])


def _add_migration(folder: Path) -> None:
    text = "".join(file.read_text(encoding="utf-8") for file in folder.glob("m*.py"))
    before = max(re.findall(r'(?m)^revision = "(\d+)"$', text))
    (folder / "m9999_colour.py").write_text(_MIGRATION.format(before=before), encoding="utf-8")


@contextmanager
def _sending(pool: Pool, name: str, address: str) -> Iterator[None]:
    """Send the requests of a step to a server, at least within the `with` block."""
    is_over = Event()
    sender = Thread(target=pool.run, args=(name, [address], is_over))
    sender.start()
    try:
        yield
    finally:
        is_over.set()
        sender.join()


def _request(step: Step, address: str, number: int) -> None:
    """Request a plan that nobody has requested before."""
    bandwidths = {"intra_bandwidth": 1e9 * (100 + number), "inter_bandwidth": 1e10}
    request = json.dumps({"mesh": {"shape": [2, 2], **bandwidths}})
    files = {
        "graph": ("g.pt2", graph_of(1), "application/octet-stream"),
        "request": (None, request, "application/json"),
    }
    try:
        answer = httpx2.post(
            f"{address}/v1/plans", files=files, headers={"Prefer": "wait=60"}, timeout=90
        )
    except httpx2.TransportError as error:
        step.failures[type(error).__name__] += 1
        return
    if answer.status_code != httpx2.codes.OK:
        step.failures[f"{answer.status_code} {answer.json().get('type', '')}"] += 1
        return
    plan: dict[str, Any] = answer.json()
    step.versions[plan["provenance"]["versions"]["autoshard"]] += 1
    expected = make_plan(load_graph(graph_of(1)), make_mesh((2, 2), **bandwidths)).costs.total
    step.right += abs(plan["costs"]["total"] - expected) <= _RELATIVE_ERROR * expected


def _probe(step: Step, addresses: Sequence[str], is_over: Event) -> None:
    """Check the readiness of servers, as a load balancer does, until an event is set."""
    while not is_over.wait(0.1):
        for address in addresses:
            step.checks += 1
            try:
                is_ready = httpx2.get(f"{address}/readyz", timeout=30).is_success
            except httpx2.TransportError:
                is_ready = False
            step.unready += not is_ready


def _totals(steps: Sequence[Step]) -> str:
    """The outcome of all steps, for the page."""
    right, checks = sum(step.right for step in steps), sum(step.checks for step in steps)
    failures, unready = (
        sum(step.failures.total() for step in steps),
        sum(step.unready for step in steps),
    )
    requests = sum(step.versions.total() for step in steps) + failures
    return (
        f"{requests} requests in {len(steps)} steps: {right} got a correct plan, {failures} failed."
        f" Of {checks} checks of readiness {unready} failed."
    )


def _row(step: Step) -> str:
    new = step.versions[_NEW_VERSION]
    total = step.versions.total()
    failures = ", ".join(f"{n} {kind}" for kind, n in step.failures.items()) or "0"
    cells = [total + step.failures.total(), total - new, new, step.right, failures]
    figures = " | ".join(map(str, [*cells, step.checks, step.unready]))
    return f"| {step.name} | {figures} |\n"


def _run(*command: str) -> bytes:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(  # noqa: S603  a constant command
        command, cwd=_ROOT, env=environment, check=True, stdout=subprocess.PIPE
    )
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
