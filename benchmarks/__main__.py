"""Measure, and write the tables into docs/performance.md.

    python -m benchmarks                                   everything
    python -m benchmarks --tables headline depth           two tables
    python -m benchmarks --tables shares --models gpt2     one model of a table

The table of the contest needs its instances: `--instances PATH[:SECONDS] ...`.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.document import DOCS, RESULTS, caption, write_table
from benchmarks.planning import Settings, code_digest
from benchmarks.tables import REPETITIONS, TABLES, TIME_LIMITS, Long, Selection

_DOCUMENT = DOCS / "performance.md"
_LIMIT, _GAP = 120.0, 1e-3
"""Limit of the solver in seconds, and gap at which it stops, unless a caption says otherwise."""


def main() -> int:
    """Measure the selected tables, and write each as soon as it is measured."""
    options = _parser().parse_args()
    selection = Selection(
        models=tuple(options.models),
        meshes=tuple(options.meshes),
        instances=tuple(options.instances),
    )
    for name in options.tables or _possible(selection):
        settings = _settings(options, name)
        conditions = _conditions(name, settings, selection)
        code = code_digest()
        head = caption(conditions)
        made = TABLES[name](settings, selection)
        if code_digest() != code:
            head += "\n\n**The code changed while this was measured: rows may not be comparable.**"
        if isinstance(made, Long):
            path = options.details / f"planning_{name}.md"
            path.write_text(f"{head}\n\n{made.rows}\n", encoding="utf-8")
        table = made.summary if isinstance(made, Long) else made
        write_table(options.document, name, head, table)
    return 0


def _possible(selection: Selection) -> list[str]:
    """All tables; that of the contest only if its instances are given."""
    return [name for name in TABLES if name != "contest" or selection.instances]


def _conditions(name: str, settings: Settings, selection: Selection) -> str:
    if name == "contest":
        return "one run"
    if name == "startup":
        return f"medians of {settings.repetitions} runs"
    part = ", a part of the models and meshes" if selection.models or selection.meshes else ""
    resumed = ", results of an earlier run taken where there were any" if settings.resume else ""
    times = "one run" if settings.repetitions == 1 else f"medians of {settings.repetitions} runs"
    limit = f", solver limit {settings.time_limit:g} s" if settings.time_limit != _LIMIT else ""
    gap = f", relative_gap {settings.relative_gap:g}" if settings.relative_gap != _GAP else ""
    return f"{times}{part}{resumed}{limit}{gap}"


def _settings(options: argparse.Namespace, table: str) -> Settings:
    return Settings(
        options.folder,
        repetitions=options.repetitions or REPETITIONS.get(table, 5),
        time_limit=options.time_limit or TIME_LIMITS.get(table, _LIMIT),
        relative_gap=options.relative_gap,
        timeout=options.timeout,
        most_memory=int(options.most_memory * 1e9),
        resume=options.resume,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure planning.")
    add = parser.add_argument
    add("--tables", nargs="+", choices=TABLES, default=[], help="default: all")
    add("--models", nargs="+", default=[], help="of the table of budgets, or .pt2; default: all")
    add("--meshes", nargs="+", type=_mesh, default=[], help="such as 8 2x4; default: all")
    add("--instances", nargs="+", default=[], help="contest files, PATH or PATH:SECONDS")
    add("--repetitions", type=int, help="measurements per case; default: 5, fewer of long tables")
    add("--time-limit", type=float, help="seconds for the solver; default: that of the table")
    add("--relative-gap", type=float, default=_GAP, help="at which the solver stops")
    add("--timeout", type=float, default=600.0, help="seconds until a measurement is stopped")
    add("--most-memory", type=float, default=12.0, help="GB that a measurement may use")
    add("--folder", type=Path, default=Path("build/benchmarks"), help="exports and results")
    add("--document", type=Path, default=_DOCUMENT, help="file that the tables are written into")
    add("--details", type=Path, default=RESULTS, help="folder for the rows of long tables")
    add("--resume", action="store_true", help="reuse results of the same code and settings")
    return parser


def _mesh(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split("x"))


if __name__ == "__main__":
    sys.exit(main())
