"""Inject faults while jobs run, and write the outcome of the jobs into docs/reliability.md.

python -m benchmarks.faults                        everything, as root
python -m benchmarks.faults --only disk_full       one scenario; the others keep their rows
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.document import caption, replace_table
from benchmarks.faults.postgres import Cluster, binaries, running_cluster
from benchmarks.faults.scenarios import SCENARIOS, NotPossibleError, Outcome, Place, Scenario

_DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "reliability.md"
_HEAD = (
    "| fault | accepted | correct plan | problem | wrong, lost, or ended twice | observed |\n"
    "|---|--:|--:|--:|--:|---|\n"
)


def main() -> int:
    """Run the scenarios; return 1 if any job was lost, wrong, or ended twice."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=50, help="requests of each scenario")
    parser.add_argument("--only", nargs="+", choices=sorted(SCENARIOS), help="not all")
    parser.add_argument("--document", type=Path, default=_DOCUMENT)
    options = parser.parse_args()
    conditions = caption("the last row that was measured; accepted are the jobs of each")
    holds = True
    with _cluster() as cluster:
        for name in options.only or SCENARIOS:
            row, sound = _row(SCENARIOS[name], cluster, options.jobs)
            sys.stdout.write(row)
            sys.stdout.flush()
            holds = holds and sound
            rows = {**_rows_of(options.document), name: row}
            _write(options.document, conditions, rows)
    return 0 if holds else 1


def _rows_of(document: Path) -> dict[str, str]:
    """Rows of the document, by scenario."""
    lines = document.read_text(encoding="utf-8").splitlines(keepends=True)
    named = ((name, f"| {scenario.__doc__} |") for name, scenario in SCENARIOS.items())
    found = {name: [line for line in lines if line.startswith(start)] for name, start in named}
    return {name: lines[0] for name, lines in found.items() if lines}


def _write(document: Path, conditions: str, rows: dict[str, str]) -> None:
    text = document.read_text(encoding="utf-8")
    ordered = "".join(rows[name] for name in SCENARIOS if name in rows)
    changed = replace_table(text, "faults", f"{conditions}\n\n{_HEAD}{ordered}".rstrip())
    document.write_text(changed, encoding="utf-8")


def _row(scenario: Scenario, cluster: Cluster | None, num_jobs: int) -> tuple[str, bool]:
    fault = str(scenario.__doc__)
    try:
        with tempfile.TemporaryDirectory() as folder:
            outcome = scenario(Place(Path(folder), cluster, num_jobs))
    except NotPossibleError as error:
        return f"| {fault} | | | | | not run: {error} |\n", True
    return _figures(fault, outcome), outcome.holds


def _figures(fault: str, outcome: Outcome) -> str:
    s = outcome.settled
    errors = ", ".join(f"{count} {kind}" for kind, count in sorted(s.errors.items())) or "0"
    cells = [len(outcome.submitted.jobs), s.right, errors, s.wrong + s.lost + s.doubled]
    figures = " | ".join(map(str, cells))
    note = outcome.note if outcome.holds else f"**DOES NOT HOLD** {outcome.note}"
    return f"| {fault} | {figures} | {note} |\n"


@contextmanager
def _cluster() -> Iterator[Cluster | None]:
    programs = binaries()
    if programs is None:
        yield None
        return
    with running_cluster(programs) as cluster:
        yield cluster


if __name__ == "__main__":
    sys.exit(main())
