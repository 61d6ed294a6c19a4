"""Plan the families at their published sizes, and write the table into docs/zoo.md.

python -m benchmarks.zoo                      all families
python -m benchmarks.zoo --families gpt2 dit  two families
python -m benchmarks.zoo --again              also what has a result of this code
python -m benchmarks.zoo --ranks 8 4          run the small sizes on gloo ranks instead
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from benchmarks.document import DOCS, RESULTS, caption, write_table
from benchmarks.planning import UNLIMITED, Case, Result, Settings, measure_case
from benchmarks.zoo.families import FAMILIES
from benchmarks.zoo.page import (
    MESHES,
    MODES,
    planned_rows,
    planned_table,
    ranks_rows,
    ranks_table,
)
from benchmarks.zoo.ranks import PRECISIONS, RankSettings, rank_outcomes, run_on_ranks

_DOCUMENT = DOCS / "zoo.md"


def main() -> int:
    """Measure the selected families, and write the table."""
    options = _parser().parse_args()
    families = options.families or list(FAMILIES)
    if options.again:
        shutil.rmtree(
            options.folder / ("ranks" if options.ranks else "results"), ignore_errors=True
        )
    if options.ranks:
        _run_on_ranks(families, options)
    else:
        _plan(families, options)
    return 0


def _run_on_ranks(families: Sequence[str], options: argparse.Namespace) -> None:
    settings = RankSettings(options.folder, tuple(options.ranks), tuple(options.precisions))
    head = caption("gloo; empty cells have not been run")
    for outcomes in run_on_ranks(families, settings):
        print(*outcomes, sep="\n", flush=True)
        known = rank_outcomes(RankSettings(options.folder))
        _write(options, "ranks", head, ranks_table(known), ranks_rows(known))


def _plan(families: Sequence[str], options: argparse.Namespace) -> None:
    settings = Settings(
        options.folder,
        repetitions=1,
        time_limit=options.time_limit,
        timeout=options.timeout,
        most_memory=int(options.most_memory * 1e9),
        resume=True,
    )
    head = caption(f"solver limit {settings.time_limit:g} s, one run each")
    results: list[Result] = []
    for name, mesh, mode in product(families, MESHES, MODES):
        result = measure_case(Case(f"zoo/{name}", mesh, mode), settings)
        if result.needs_memory:
            result = measure_case(replace(result.case, memory_budget=UNLIMITED), settings)
        print(f"{result.case}: {result.status}", flush=True)
        results.append(result)
        _write(options, "planned", head, planned_table(results), planned_rows(results))


def _write(options: argparse.Namespace, name: str, head: str, table: str, rows: str) -> None:
    """Write a summary into the page, and all rows into a file of their own."""
    write_table(options.document, name, head, table)
    (options.details / f"zoo_{name}.md").write_text(f"{head}\n\n{rows}\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description="Measure.")
    add = parser.add_argument
    add("--families", nargs="+", choices=FAMILIES, default=[], help="default: all")
    add("--again", action="store_true", help="discard earlier results")
    ranks = "run the small sizes on these numbers of ranks instead"
    add("--ranks", nargs="+", type=int, choices=(4, 8), default=[], help=ranks)
    add("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS, help="on ranks")
    add("--time-limit", type=float, default=120.0, help="seconds for the solver")
    add("--timeout", type=float, default=1800.0, help="seconds until a case is stopped")
    add("--most-memory", type=float, default=12.0, help="GB that a process may use")
    add("--folder", type=Path, default=Path("build/zoo"), help="exports and results")
    add("--document", type=Path, default=_DOCUMENT, help="file that the tables are written into")
    add("--details", type=Path, default=RESULTS, help="folder for the rows of all families")
    return parser


if __name__ == "__main__":
    sys.exit(main())
