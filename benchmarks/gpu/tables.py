"""Tables of results, for docs/measured.md."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.document import replace_table
from benchmarks.gpu.goals import Goal
from benchmarks.gpu.records import Header, Record

_ROWS = 8
"""Rows of the tables of kernels and of gaps."""

Results = Mapping[str, Any]


def page(document: str, records: Sequence[Record]) -> str:
    """The page with the tables of all records that have results."""
    found = [record for record in records if record.results]
    if not found:
        return document
    parts = [caption(found[0].header), "\n".join(f"* {goal}" for goal in _goals(found))]
    for record in found:
        parts += _TABLES[record.part](record.results)
    parts += [f"* {line}" for line in _missing(found)]
    return replace_table(document, "gpu", "\n\n".join(parts))


def summary(records: Sequence[Record]) -> list[str]:
    """Goals, and what could not be measured, for a terminal."""
    return [*map(str, _goals(records)), *_missing(records)]


def caption(header: Header) -> str:
    """Card, versions, commit and date."""
    versions = {"driver": header["driver"], "torch": header["torch"], "NCCL": header["nccl"]}
    named = [f"{name} {found}" for name, found in (versions | header["packages"]).items() if found]
    of = f"commit {header['commit']}, " * bool(header["commit"])
    return (
        f"*{header['date']}; {header['card']}, Python {header['python']}, {', '.join(named)}; "
        f"{of}code {header['code']}.*"
    )


def _goals(records: Sequence[Record]) -> Iterator[Goal]:
    for record in records:
        yield from record.goals


def _missing(records: Sequence[Record]) -> Iterator[str]:
    """What failed, with the last line of each error."""
    for record in records:
        for name, error in record.failures.items():
            yield f"{record.part}, {name}: {error.strip().rpartition(chr(10))[2]}"


def _table(columns: str, rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown; columns whose names follow a colon are aligned to the right."""
    names = [name.strip() for name in columns.split("|")]
    marks = ["---:" if name.startswith(":") else "---" for name in names]
    cells = [[name.lstrip(":") for name in names], marks, *rows]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in cells)


def _models(results: Results) -> list[str]:
    columns = "model | step | :time | :predicted | :ratio | :memory | :predicted | :ratio"
    rows = [
        [
            *name.split(": ", 1),
            *_compared(one, "seconds", 1e3, "ms"),
            *_compared(one, "peak", 1e-9, "GB"),
            one["kernels"],
            f"{1e3 * one['gaps']:.1f} ms",
            one["graph_breaks"],
        ]
        for name, one in results.items()
    ]
    return [_table(f"{columns} | :kernels | :gaps | :graph breaks", rows), *_slowest(results)]


def _compared(one: Results, quantity: str, scale: float, unit: str) -> tuple[str, str, str]:
    """Cells: measured, predicted, and the ratio of the two."""
    measured, predicted = one[quantity], one[f"predicted_{quantity}"]
    if predicted is None:
        return f"{scale * measured:.2f} {unit}", "", ""
    ratio = f"{predicted / measured:.3f}"
    return f"{scale * measured:.2f} {unit}", f"{scale * predicted:.2f} {unit}", ratio


def _slowest(results: Results) -> list[str]:
    """The kernels and gaps of the planned step that is slowest beside the step as written."""
    ratios = {
        name: one["seconds"] / results[written]["seconds"]
        for name, one in results.items()
        if (written := name.replace("planned", "as written")) in results and written != name
    }
    if not ratios:
        return []
    name = max(ratios, key=ratios.__getitem__)
    one = results[name]
    rows = [
        (
            f"{title}`{row['name'].replace('|', '/')}`",
            row["count"],
            f"{1e3 * row['seconds']:.2f} ms",
        )
        for title, found in (("", one["longest"]), ("gap before ", one["gaps_before"]))
        for row in found[:_ROWS]
    ]
    text = f"The slowest planned step beside the same as written is {name} ({ratios[name]:.3f}):"
    return [text, _table(f"kernels of {name} | :number | :time", rows)]


def _ranks(results: Results) -> list[str]:
    words = {None: "", True: "yes", False: "**no**"}
    rows = [
        [
            *name.split(": ", 1),
            f"{1e3 * one['seconds']:.1f} ms",
            f"{one['peak'] / 1e9:.2f} GB",
            sum(c["count"] for c in one["collectives"]),
            f"{sum(c['nbytes'] for c in one['collectives']) / 1e6:.1f} MB",
            words[one["as_planned"]],
        ]
        for name, one in results.items()
    ]
    columns = "model | 4 ranks | :time | :memory | :collectives | :bytes | as planned"
    return [_table(columns, rows)]


def _unexplained(results: Results) -> list[str]:
    """Whether each case did as planned in each of its runs on each rank."""
    lines = []
    for name, one in results.items():
        runs = [run for rank in one["ranks"] for run in rank["runs"]]
        if "executed" in runs[0]:
            found = f"collectives as planned in {sum(r['as_planned'] for r in runs)} of {len(runs)}"
        else:
            planned = one["ranks"][0]["planned"]["activations"]["at_turn"]
            alive = sorted({sum(nbytes for _, nbytes in run["at_turn"]) for run in runs})
            found = f"{planned} bytes planned, {', '.join(map(str, alive))} alive"
        lines.append(f"* {name}: {found}")
    return ["\n".join(lines)]


def _cases(results: Results) -> list[str]:
    counts: dict[str, Counter[str]] = {}
    for name, one in results.items():
        file = name.removeprefix("cases_on_4_ranks: ").partition(": ")[0]
        counts.setdefault(file, Counter())[_outcome(one)] += 1
    outcomes = ("passed", "on CPUs too", "here only")
    rows = [[file, *(found[name] for name in outcomes)] for file, found in counts.items()]
    table = _table("file | :passed | :failed on CPUs too | :failed here only", rows)
    failed = [
        f"* {name} ({_outcome(one)}): {one['error'].strip().rpartition(chr(10))[2]}"
        for name, one in results.items()
        if one["error"]
    ]
    return [table, *(["\n".join(failed)] if failed else [])]


def _outcome(one: Results) -> str:
    if not one["error"]:
        return "passed"
    return "on CPUs too" if one.get("error_on_cpu") else "here only"


def _device(results: Results) -> list[str]:
    """Figures of the device, then predicted steps, under both prices."""
    prices = results["device"]["figures"] | {k: v for k, v in results.items() if k != "device"}
    rows = [
        (name, f"{one['preset']:.4g}", f"{one['calibrated']:.4g}", f"{_ratio(one):.3f}")
        for name, one in prices.items()
    ]
    return [_table("price | :preset | :calibrated | :ratio", rows)]


def _ratio(one: Results) -> float:
    ratio: float = one["calibrated"] / one["preset"]
    return ratio


_TABLES: Mapping[str, Callable[[Results], list[str]]] = {
    "models": _models,
    "ranks": _ranks,
    "unexplained": _unexplained,
    "cases": _cases,
    "device": _device,
}
