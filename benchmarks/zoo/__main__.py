"""Plan the families at their published sizes, and write the table into docs/zoo.md.

python -m benchmarks.zoo                      all families
python -m benchmarks.zoo --families gpt2 dit  two families
python -m benchmarks.zoo --again              also what has a result of this code
"""

import argparse
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

from benchmarks.document import DOCS, RESULTS, caption, write_table
from benchmarks.planning import UNLIMITED, Case, Result, Settings, measure_case
from benchmarks.zoo.families import FAMILIES
from benchmarks.zoo.page import MESHES, MODES, planned_rows, planned_table


def main() -> int:
    """Measure the selected families, and write the table whenever a case is done."""
    options = _parser().parse_args()
    settings = Settings(
        options.folder,
        repetitions=1,
        time_limit=options.time_limit,
        timeout=options.timeout,
        most_memory=int(options.most_memory * 1e9),
        resume=not options.again,
    )
    head = caption(f"solver limit {settings.time_limit:g} s, one run each")
    results: list[Result] = []
    for name, mesh, mode in product(options.families or FAMILIES, MESHES, MODES):
        result = measure_case(Case(f"zoo/{name}", mesh, mode), settings)
        if result.needs_memory:
            result = measure_case(replace(result.case, memory_budget=UNLIMITED), settings)
        print(f"{result.case}: {result.status}", flush=True)
        results.append(result)
        write_table(options.document, "planned", head, planned_table(results))
        rows = f"{head}\n\n{planned_rows(results)}\n"
        (options.details / "zoo_planned.md").write_text(rows, encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description="Measure.")
    add = parser.add_argument
    add("--families", nargs="+", choices=FAMILIES, default=[], help="default: all")
    add("--again", action="store_true", help="do not use earlier results")
    add("--time-limit", type=float, default=120.0, help="seconds for the solver")
    add("--timeout", type=float, default=1800.0, help="seconds until a case is stopped")
    add("--most-memory", type=float, default=12.0, help="GB that a process may use")
    add("--folder", type=Path, default=Path("build/zoo"), help="exports and results")
    add(
        "--document",
        type=Path,
        default=DOCS / "zoo.md",
        help="file that the tables are written into",
    )
    add("--details", type=Path, default=RESULTS, help="folder for the rows of all families")
    return parser


if __name__ == "__main__":
    sys.exit(main())
