"""Times of requests and of housekeeping with many rows, on SQLite and PostgreSQL.

    python -m benchmarks.scale                    1,000,000 rows, into docs/reliability.md
    python -m benchmarks.scale --rows 50000 --databases sqlite

Each table gets that many rows: plans, jobs (with three events each), audit events; and cached
documents, which are small, so that the databases fit on any disk (2 GB each).
"""

import argparse
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg

from autoshard_server.settings import Settings
from autoshard_server.store.database import Stores
from benchmarks.document import RESULTS, caption, replace_table
from benchmarks.faults.postgres import binaries, running_cluster
from benchmarks.scale.housekeeping import Step, housekeeping
from benchmarks.scale.requests import Timed, service, timed_requests
from benchmarks.scale.rows import CALLERS, fill

_DOCUMENT = Path(__file__).parents[2] / "docs" / "reliability.md"


@dataclass(frozen=True, slots=True)
class Measured:
    """Times on one database.

    Attributes:
        requests: to a service.
        steps: of housekeeping.
        filled: seconds in which the rows were inserted.
        nbytes: of the database.
    """

    requests: Sequence[Timed]
    steps: Sequence[Step]
    filled: float
    nbytes: int


@contextmanager
def _sqlite() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield f"sqlite:///{folder}/store.sqlite3"


@contextmanager
def _postgresql() -> Iterator[str]:
    programs = binaries()
    if programs is None:
        raise SystemExit("PostgreSQL is not installed: on Debian, apt-get install postgresql")
    with running_cluster(programs) as cluster:
        url = cluster.create_database()
        yield url


def _size(url: str) -> int:
    if url.startswith("sqlite"):
        return Path(url.removeprefix("sqlite:///")).stat().st_size
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
        row = connection.execute("SELECT pg_database_size(current_database())").fetchone()
        # Commits are on the disk before they are reported, from now on.
        connection.execute("ALTER SYSTEM SET fsync = on")
        connection.execute("SELECT pg_reload_conf()")
        # Otherwise the rows that were just inserted would be written during the measurement.
        connection.execute("CHECKPOINT")
        assert row is not None
        return int(row[0])


def measure(url: str, rows: int) -> Measured:
    """Fill a database, and measure requests and housekeeping."""
    settings = Settings(store_url=url)
    filled = fill(settings, rows)
    print(f"filled in {filled.seconds:.0f} s", flush=True)
    nbytes = _size(url)
    with closing(Stores(settings)) as stores:
        _, token = stores.api_keys.create(CALLERS[0], ["admin", "plan", "read", "metrics"])
    # A collection would stop the transactions that are measured here.
    gc.collect()
    gc.freeze()
    requests, steps = [], []
    with service(url) as started:
        for timed in timed_requests(started.address, token, filled):
            print(f"{timed.name}: {timed.median * 1e3:.1f} / {timed.slow * 1e3:.1f} ms", flush=True)
            requests.append(timed)
    for step in housekeeping(settings, filled):
        print(step, flush=True)
        steps.append(step)
    return Measured(requests, steps, filled.seconds, nbytes)


_DATABASES: Mapping[str, Callable[[], object]] = {"sqlite": _sqlite, "postgresql": _postgresql}
_TITLES = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}


def _requests_table(found: Mapping[str, Measured]) -> str:
    titles = [f"{_TITLES[name]}, {what}" for name in found for what in ("median", "95 % below")]
    rows = [f"| request | {' | '.join(titles)} |", "|---|" + "--:|" * len(titles)]
    for together in zip(*(measured.requests for measured in found.values()), strict=True):
        times = [f"{s * 1e3:.1f} ms" for timed in together for s in (timed.median, timed.slow)]
        rows.append(f"| `{together[0].name}` | {' | '.join(times)} |")
    return "\n".join(rows)


def _steps_table(found: Mapping[str, Measured]) -> str:
    columns = ("rows", "in all", "longest transaction", "another write took at most")
    titles = [f"{_TITLES[name]}: {columns[0]}" for name in found]
    titles = [t for name in found for t in (f"{_TITLES[name]}: {columns[0]}", *columns[1:])]
    rows = [f"| step | {' | '.join(titles)} |", "|---|" + "--:|" * len(titles)]
    for together in zip(*(measured.steps for measured in found.values()), strict=True):
        cells = [
            cell
            for step in together
            for cell in (
                f"{step.rows:,}",
                f"{step.seconds:.2f} s",
                f"{step.longest * 1e3:.0f} ms",
                f"{step.waited * 1e3:.0f} ms",
            )
        ]
        rows.append(f"| {together[0].name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _tables(found: Mapping[str, Measured]) -> str:
    sizes = ", ".join(
        f"{_TITLES[name]} {measured.nbytes / 1e9:.1f} GB" for name, measured in found.items()
    )
    return f"{sizes}.\n\n{_requests_table(found)}\n\n{_steps_table(found)}"


def _summary(found: Mapping[str, Measured]) -> str:
    """The slowest requests and transactions of each database, for the page."""
    rows = [
        "| database | size | slowest request, median | 95 % below | longest transaction |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, measured in found.items():
        median = max(measured.requests, key=lambda timed: timed.median)
        slow = max(timed.slow for timed in measured.requests)
        longest = max(step.longest for step in measured.steps)
        rows.append(
            f"| {_TITLES[name]} | {measured.nbytes / 1e9:.1f} GB | {median.median * 1e3:.1f} ms "
            f"(`{median.name}`) | {slow * 1e3:.1f} ms | {longest * 1e3:.0f} ms |"
        )
    return "\n".join(rows)


def main() -> int:
    """Measure, and write the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--databases", nargs="+", choices=[*_DATABASES], default=[*_DATABASES])
    parser.add_argument("--document", type=Path, default=_DOCUMENT)
    parser.add_argument("--details", type=Path, default=RESULTS / "scale.md")
    options = parser.parse_args()
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if free < options.rows * 6000:
        raise SystemExit(f"{options.rows:,} rows need {options.rows * 6000:,} bytes of disk")
    priority = os.getpriority(os.PRIO_PROCESS, 0)
    head = caption(f"{options.rows:,} rows, niceness {priority}")
    found: dict[str, Measured] = {}
    for name in options.databases:
        with _DATABASES[name]() as url:  # type: ignore[attr-defined]  a context manager
            found[name] = measure(url, options.rows)
    tables = _tables(found)
    print(tables)
    options.details.write_text(f"{head}\n\n{tables}\n", encoding="utf-8")
    text = options.document.read_text(encoding="utf-8")
    changed = replace_table(text, "scale", f"{head}\n\n{_summary(found)}")
    options.document.write_text(changed, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
