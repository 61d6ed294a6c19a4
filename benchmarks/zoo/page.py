"""The tables of docs/zoo.md, and the rows of all families for files of their own."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby

from benchmarks.planning import UNLIMITED, Result
from benchmarks.tables import rows
from benchmarks.zoo.families import FAMILIES

MESHES = ((8,), (2, 4))
MODES = ("training", "inference")
_MOST_GAP = 0.01
_MOST_WHOLE = 0.02


def planned_table(results: Sequence[Result]) -> str:
    """A row per mesh and mode; then the totals, and the families that miss a goal."""
    header = ("mesh", "families", "checked plan", "gap", "replicated", "all three", "longest, s")
    cases: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        cases[_column(result)].append(result)
    table = rows(header, (_totals(*case) for case in cases.items()))
    return "\n\n".join([table, _verdict(_families(results)), _missed(results)]).rstrip()


def _totals(column: str, results: Sequence[Result]) -> list[str]:
    planned = [result for result in results if result.is_legal]
    counts = (
        len(results),
        len(planned),
        sum(r.gap is not None and r.gap < _MOST_GAP for r in planned),
        sum(r.last["share_whole"] < _MOST_WHOLE for r in planned),
        sum(map(_is_good, results)),
    )
    longest = f"{max(r.last['processor'] for r in planned):.1f}" if planned else "-"
    return [column, *map(str, counts), longest]


def _missed(results: Sequence[Result]) -> str:
    """A line per family that misses a goal, with the case that misses it most."""
    lines = []
    for name, found in _families(results):
        missed = [result for result in found if not _is_good(result)]
        if missed:
            worst = max(missed, key=lambda r: (_share_whole(r), r.gap or 0.0))
            lines.append(f"- {name}, {len(missed)} of {len(found)} cases: {_why(worst)}")
    return "\n".join(lines)


def _share_whole(result: Result) -> float:
    return (result.last["share_whole"] or 0.0) if result.runs else 0.0


def _families(results: Sequence[Result]) -> list[tuple[str, list[Result]]]:
    return [(name, list(found)) for name, found in groupby(results, lambda r: r.case.name)]


def planned_rows(results: Sequence[Result]) -> str:
    """A row per family, a column per mesh and mode; then notes on failed goals."""
    columns = list(dict.fromkeys(map(_column, results)))
    header = ("family", "size", "parameters", "nodes", *columns)
    table = rows(header, (_row(*family) for family in _families(results)))
    notes = [f"- {result.case}: {_why(result)}" for result in results if not _is_good(result)]
    return "\n\n".join([table, *filter(None, ["\n".join(notes)])])


def _row(name: str, results: Sequence[Result]) -> list[str]:
    run = next((r.last for r in results if r.runs), None)
    sizes = ["-", "-"] if run is None else [_count(run["parameters"]), f"{run['operators']:,}"]
    return [name, FAMILIES[name].note, *sizes, *map(_cell, results)]


def _cell(result: Result) -> str:
    """Status unless optimal, gap, seconds, share of time in replicated operators."""
    if not result.is_legal:
        return result.status
    words = [] if result.status == "optimal" else [result.status]
    words.append("no bound" if result.gap is None else f"{result.gap:.2%}")
    words += [f"{result.last['processor']:.1f} s", f"{result.last['share_whole']:.2%}"]
    return ", ".join(words) + (" †" if result.case.memory_budget == UNLIMITED else "")


def _verdict(groups: Sequence[tuple[str, Sequence[Result]]]) -> str:
    good = [found for _, found in groups if all(map(_is_good, found))]
    return (
        f"{len(groups)} of {len(FAMILIES)} families measured. In {len(good)} families all "
        f"cases have a checked plan, a gap under {_MOST_GAP:.0%}, and under {_MOST_WHOLE:.0%} "
        "of the time in replicated operators."
    )


def _is_good(result: Result) -> bool:
    gap = result.gap
    is_close = gap is not None and gap < _MOST_GAP
    return result.is_legal and is_close and result.last["share_whole"] < _MOST_WHOLE


def _why(result: Result) -> str:
    """The goal that a case misses."""
    if not result.is_legal:
        return result.note or "no plan"
    run = result.last
    if run["share_whole"] >= _MOST_WHOLE:
        uses = run["coverage"]["operators"]
        total = run["coverage"]["total"]
        dear = [use for use in uses if (use["time_whole"] or 0.0) / total > _MOST_WHOLE / 10]
        named = (f"`{use['operator']}` {use['time_whole'] / total:.1%}" for use in dear)
        return f"replicated on every rank: {', '.join(named)}"
    return f"gap {result.gap:.2%}" if result.gap is not None else "nothing is proven"


def _column(result: Result) -> str:
    return f"{result.case.mesh_text}, {result.case.mode}"


def _count(number: int) -> str:
    for scale, unit in ((10**9, "B"), (10**6, "M")):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number:,}"
