"""Attack a service in all ways at the same time, and write the outcomes into docs/reliability.md.

python -m benchmarks.hostile                       everything
python -m benchmarks.hostile --only slips          some rows; the others keep theirs
"""

import argparse
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from sqlalchemy import delete

from autoshard_server import Settings
from autoshard_server.store import tables
from autoshard_server.store.database import Stores
from benchmarks.document import RESULTS, caption, replace_table
from benchmarks.hostile import archives
from benchmarks.hostile.quiet import AFTER_STORM, BEFORE_STORM
from benchmarks.hostile.storm import ATTACKER, ATTACKS, OTHER, raise_open_files
from benchmarks.hostile.target import Outcome, Target, Watched, target, watching
from benchmarks.scale.rows import fill

_DOCUMENT = Path(__file__).parents[2] / "docs" / "reliability.md"
_ROWS = 20_000
_MEMORY = 600_000_000
_LATENCY = 0.1
_NICENESS = 10
_TOGETHER = "all attacks at the same time"

Row = Callable[[Target], Outcome]


def main() -> int:
    """Run the campaign; return 1 if a row is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    rows = {row.__name__: row for row in (*BEFORE_STORM, *ATTACKS, *AFTER_STORM)}
    parser.add_argument("--only", nargs="+", choices=sorted(rows), help="not all")
    parser.add_argument("--rows", type=int, default=_ROWS, help="plans and jobs of the database")
    parser.add_argument("--document", type=Path, default=_DOCUMENT)
    parser.add_argument("--details", type=Path, default=RESULTS / "hostile.md")
    options = parser.parse_args()
    raise_open_files()
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    head = caption(f"a database with {options.rows:,} plans and jobs; niceness {niceness}")
    chosen = {name for name in rows if options.only is None or name in options.only}
    with tempfile.TemporaryDirectory() as folder:
        found = _campaign(Path(folder), chosen, options.rows)
    _write(options.document, options.details, head, found)
    return 0 if all(line.endswith("yes |") for line in found.values()) else 1


def _campaign(folder: Path, chosen: set[str], rows: int) -> dict[str, str]:
    """The lines of the rows that were chosen."""
    url = f"sqlite:///{folder / 'store.sqlite3'}"
    _fill(url, rows)
    found: dict[str, str] = {}

    def note(outcomes: Iterable[Outcome], names: Iterable[Row]) -> None:
        for row, outcome in zip(names, outcomes, strict=True):
            found[row.__name__] = _line(str(row.__doc__), outcome)
            sys.stdout.write(found[row.__name__] + "\n")
            sys.stdout.flush()

    def selected(table: Iterable[Row]) -> list[Row]:
        return [row for row in table if row.__name__ in chosen]

    callers = {ATTACKER: "one", OTHER: "two"}
    with ExitStack() as stack:
        attacked = stack.enter_context(target(folder, url, callers))
        for row in selected(BEFORE_STORM):
            note([_run(row, attacked)], [row])
        attacks = selected(ATTACKS)
        if attacks:
            archives.prepare()
            with (
                watching(attacked) as watched,
                _lower_priority(),
                ThreadPoolExecutor(len(attacks)) as pool,
            ):
                outcomes = list(pool.map(lambda row: _run(row, attacked), attacks))
            note(outcomes, attacks)
            found[_TOGETHER] = _line(_TOGETHER, _judge(watched))
            sys.stdout.write(found[_TOGETHER] + "\n")
        for row in selected(AFTER_STORM):
            note([_run(row, attacked)], [row])
    return found


@contextmanager
def _lower_priority() -> Iterator[None]:
    """Leave the processors to the service: strangers attack from machines of their own."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    _set_niceness(max(before, _NICENESS))
    try:
        yield
    finally:
        with suppress(PermissionError):
            _set_niceness(before)


def _set_niceness(niceness: int) -> None:
    """Set the niceness of this process and, where Linux compares sessions, of its session."""
    os.setpriority(os.PRIO_PROCESS, 0, niceness)
    with suppress(FileNotFoundError):
        Path("/proc/self/autogroup").write_text(str(niceness))


def _fill(url: str, rows: int) -> None:
    """Fill a database; no job of it waits."""
    settings = Settings(store_url=url)
    if rows:
        fill(settings, rows)
    stores = Stores(settings)
    with stores.engine.begin() as connection:
        connection.execute(delete(tables.jobs).where(tables.jobs.c.state == "queued"))
    stores.close()


def _run(row: Row, attacked: Target) -> Outcome:
    try:
        return row(attacked)
    except Exception as error:  # noqa: BLE001  the other rows go on
        traceback.print_exc()
        return Outcome(f"{type(error).__name__}: {error}"[:160], holds=False)


def _judge(watched: Watched) -> Outcome:
    p50, p99 = (watched.quantile(share) * 1e3 for share in (0.5, 0.99))
    text = (
        f"{watched.seconds:.0f} s; /livez {p50:.0f} ms (median), {p99:.0f} ms (99th percentile), "
        f"{max(watched.liveness) * 1e3:.0f} ms (largest of {len(watched.liveness)}); "
        f"the server {watched.server / 1e6:.0f} MB, all processes {watched.total / 1e6:.0f} MB"
    )
    is_quick = watched.quantile(0.99) < _LATENCY
    return Outcome(text, is_quick and watched.server < _MEMORY)


def _line(tried: str, outcome: Outcome) -> str:
    now = " ".join(outcome.text.split()).replace("|", "\\|")
    cells = (tried.splitlines()[0].rstrip("."), now, "yes" if outcome.holds else "**no**")
    return f"| {' | '.join(cells)} |"


def _write(document: Path, details: Path, head: str, found: Mapping[str, str]) -> None:
    """Replace the lines of the rows that ran, and count all of them on the page."""
    known = [line for line in details.read_text(encoding="utf-8").splitlines() if line[:2] == "| "]
    tried = {line.split("|")[1]: line for line in [*known[1:], *found.values()]}
    table = ["| tried | outcome | as it should be |", "|---|---|---|", *tried.values()]
    details.write_text("\n".join([head, "", *table]) + "\n", encoding="utf-8")
    missed = [line for line in tried.values() if not line.endswith("| yes |")]
    summary = f"{len(tried) - len(missed)} of {len(tried)} are as they should be."
    rows = ["", *table[:2], *missed] if missed else []
    text = document.read_text(encoding="utf-8")
    changed = replace_table(text, "hostile", "\n".join([head, "", summary, *rows]))
    document.write_text(changed, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
