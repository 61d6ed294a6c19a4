"""The tables of docs/zoo.md, and the rows of all families for files of their own."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby

from benchmarks.tables import rows
from benchmarks.zoo.families import FAMILIES
from benchmarks.zoo.measure import MESHES, MODES, Outcome
from benchmarks.zoo.ranks import RankOutcome

_MOST_GAP = 0.01
_MOST_WHOLE = 0.02


def planned_table(outcomes: Sequence[Outcome]) -> str:
    """A row per mesh and mode; then the totals, and the families that miss a goal."""
    header = ("mesh", "families", "checked plan", "gap", "replicated", "all three", "longest, s")
    cases: dict[tuple[tuple[int, ...], str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        cases[outcome.mesh, outcome.mode].append(outcome)
    table = rows(header, (_totals(*case, found) for case, found in cases.items()))
    return "\n\n".join([table, _verdict(_families(outcomes)), _missed(outcomes)]).rstrip()


def _totals(mesh: tuple[int, ...], mode: str, outcomes: Sequence[Outcome]) -> list[str]:
    planned = [o for o in outcomes if o.found]
    counts = (
        len(outcomes),
        len(planned),
        sum(o.gap is not None and o.gap < _MOST_GAP for o in planned),
        sum(o.run["share_whole"] < _MOST_WHOLE for o in planned),
        sum(map(_is_good, outcomes)),
    )
    longest = f"{max(o.cpu for o in planned):.1f}" if planned else "-"
    return [f"{_mesh(mesh)}, {mode}", *map(str, counts), longest]


def _missed(outcomes: Sequence[Outcome]) -> str:
    """A line per family that misses a goal, with the case that misses it most."""
    lines = []
    for name, found in _families(outcomes):
        missed = [outcome for outcome in found if not _is_good(outcome)]
        if missed:
            worst = max(missed, key=lambda o: (o.run.get("share_whole", 0.0), o.gap or 0.0))
            lines.append(f"- {name}, {len(missed)} of {len(found)} cases: {_why(worst)}")
    return "\n".join(lines)


def _families(outcomes: Sequence[Outcome]) -> list[tuple[str, list[Outcome]]]:
    return [(name, list(found)) for name, found in groupby(outcomes, lambda o: o.family)]


def planned_rows(outcomes: Sequence[Outcome]) -> str:
    """A row per family, a column per mesh and mode; then notes on failed goals."""
    columns = [f"{_mesh(mesh)}, {mode}" for mesh in MESHES for mode in MODES]
    header = ("family", "size", "parameters", "nodes", *columns)
    table = rows(header, (_row(name, found) for name, found in _families(outcomes)))
    return f"{table}\n\n{_notes(outcomes)}"


def _row(name: str, outcomes: Sequence[Outcome]) -> list[str]:
    known = {(outcome.mesh, outcome.mode): outcome for outcome in outcomes}
    run = next((o.run for o in outcomes if "error" not in o.run), None)
    sizes = ["-", "-"] if run is None else [_count(run["parameters"]), f"{run['operators']:,}"]
    cells = [known.get((mesh, mode)) for mesh in MESHES for mode in MODES]
    return [name, FAMILIES[name].note, *sizes, *("" if c is None else _cell(c) for c in cells)]


def _cell(outcome: Outcome) -> str:
    """Status unless optimal, gap, seconds, share of time in replicated operators."""
    run = outcome.run
    if "error" in run:
        return "**failed**"
    if not outcome.found:
        return f"**{run['certificate']['status'] if not run['legal'] else 'invalid'}**"
    status = run["certificate"]["status"]
    words = [] if status == "optimal" else [status]
    words.append("no bound" if outcome.gap is None else f"{outcome.gap:.2%}")
    words += [f"{outcome.cpu:.1f} s", f"{run['share_whole']:.2%}"]
    return ", ".join(words) + (" †" if outcome.lifted else "")


def _verdict(groups: Sequence[tuple[str, Sequence[Outcome]]]) -> str:
    wanted = len(MESHES) * len(MODES)
    full = [found for _, found in groups if len(found) == wanted]
    good = [found for found in full if all(map(_is_good, found))]
    return (
        f"{len(groups)} of {len(FAMILIES)} families measured, {len(full)} of them in all "
        f"{wanted} cases. In {len(good)} families all cases have a checked plan, a gap under "
        f"{_MOST_GAP:.0%}, and under {_MOST_WHOLE:.0%} of the time in replicated operators."
    )


def _is_good(outcome: Outcome) -> bool:
    gap = outcome.gap
    return (
        outcome.found
        and gap is not None
        and gap < _MOST_GAP
        and outcome.run["share_whole"] < _MOST_WHOLE
    )


def _notes(outcomes: Sequence[Outcome]) -> str:
    lines = [f"- {_name(o)}: {_why(o)}" for o in outcomes if not _is_good(o)]
    codes = sorted({outcome.code for outcome in outcomes})
    return "\n".join([*lines, "", _codes(codes)])


def _why(outcome: Outcome) -> str:
    """The goal that a case misses."""
    run = outcome.run
    if "error" in run or not outcome.found:
        return run.get("error") or run["reason"] or "no plan"
    if run["share_whole"] >= _MOST_WHOLE:
        uses = run["coverage"]["operators"]
        total = run["coverage"]["total"]
        dear = [use for use in uses if (use["time_whole"] or 0.0) / total > _MOST_WHOLE / 10]
        named = (f"`{use['operator']}` {use['time_whole'] / total:.1%}" for use in dear)
        return f"replicated on every rank: {', '.join(named)}"
    return f"gap {outcome.gap:.2%}" if outcome.gap is not None else "nothing is proven"


def ranks_table(outcomes: Sequence[RankOutcome]) -> str:
    """A row per precision and number of ranks, with the families that failed."""
    columns = sorted({outcome.column for outcome in outcomes})
    lines = []
    for column in columns:
        found = [outcome for outcome in outcomes if outcome.column == column]
        failed = [outcome.family for outcome in found if outcome.error]
        equal = str(len(found) - len(failed))
        lines.append((column, str(len(found)), equal, ", ".join(failed) or "-"))
    return rows(("case", "families", "equal", "failed"), lines)


def ranks_rows(outcomes: Sequence[RankOutcome]) -> str:
    """A row per family, a column per precision and number of ranks; then the failures."""
    columns = sorted({outcome.column for outcome in outcomes})
    families = dict.fromkeys(outcome.family for outcome in outcomes)
    known = {(outcome.family, outcome.column): outcome.error for outcome in outcomes}
    table = rows(
        ("family", *columns),
        ([family, *(_word(known.get((family, c))) for c in columns)] for family in families),
    )
    lines = [f"- {outcome}" for outcome in outcomes if outcome.error]
    codes = sorted({outcome.code for outcome in outcomes})
    return "\n\n".join([table, *filter(None, ["\n".join(lines)]), _codes(codes)])


def _word(error: str | None) -> str:
    return "" if error is None else "**failed**" if error else "equal"


def _codes(codes: Sequence[str]) -> str:
    return f"Code: {', '.join(codes)}."


def _mesh(mesh: tuple[int, ...]) -> str:
    return "x".join(map(str, mesh))


def _name(outcome: Outcome) -> str:
    return f"{outcome.family} on {_mesh(outcome.mesh)}, {outcome.mode}"


def _count(number: int) -> str:
    for scale, unit in ((10**9, "B"), (10**6, "M")):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number:,}"
