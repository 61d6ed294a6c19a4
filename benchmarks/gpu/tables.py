"""Tables of results, for docs/measured.md."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.document import replace_table
from benchmarks.gpu.goals import goals_of
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


def _goals(records: Sequence[Record]) -> Iterator[Any]:
    for record in records:
        yield from goals_of(record.part, record.results, record.failures)


def _missing(records: Sequence[Record]) -> Iterator[str]:
    """What failed, with the last line of each error."""
    for record in records:
        for name, error in record.failures.items():
            yield f"{record.part}, {name}: {error.strip().rpartition(chr(10))[2]}"


def _models(results: Results) -> list[str]:
    lines = [
        "| model | step | time | predicted | ratio | memory | predicted | ratio | kernels | gaps "
        "| graph breaks |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, one in results.items():
        model, _, variant = name.partition(": ")
        time, memory = _compared(one, "seconds", 1e3, "ms"), _compared(one, "peak", 1e-9, "GB")
        lines.append(
            f"| {model} | {variant} | {time} | {memory} | {one['kernels']} "
            f"| {1e3 * one['gaps']:.1f} ms | {one['graph_breaks']} |"
        )
    return ["\n".join(lines), *_slowest(results)]


def _compared(one: Results, quantity: str, scale: float, unit: str) -> str:
    """Cells: measured, predicted, and the ratio of the two."""
    measured, predicted = one[quantity], one[f"predicted_{quantity}"]
    ratio = predicted / max(measured, 1e-12)
    return f"{scale * measured:.2f} {unit} | {scale * predicted:.2f} {unit} | {ratio:.3f}"


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
    lines = [f"| kernels of {name} | number | time |", "|---|---:|---:|"]
    for title, rows in (("", one["longest"]), ("gap before ", one["gaps_before"])):
        lines += [
            f"| {title}`{row['name'].replace('|', '/')}` | {row['count']} "
            f"| {1e3 * row['seconds']:.2f} ms |"
            for row in rows[:_ROWS]
        ]
    text = f"The slowest planned step beside the same as written is {name} ({ratios[name]:.3f}):"
    return [text, "\n".join(lines)]


def _ranks(results: Results) -> list[str]:
    lines = [
        "| model | 4 ranks | time | memory | collectives | bytes | as planned |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    words = {None: "", True: "yes", False: "**no**"}
    for name, one in results.items():
        model, _, variant = name.partition(": ")
        count = sum(c["count"] for c in one["collectives"])
        nbytes = sum(c["nbytes"] for c in one["collectives"])
        lines.append(
            f"| {model} | {variant} | {1e3 * one['seconds']:.1f} ms | {one['peak'] / 1e9:.2f} GB "
            f"| {count} | {nbytes / 1e6:.1f} MB | {words[one['as_planned']]} |"
        )
    return ["\n".join(lines)]


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
        counts.setdefault(name.partition(": ")[0], Counter())[_outcome(one)] += 1
    lines = [
        "| file | passed | failed on CPUs too | failed here only |",
        "|---|---:|---:|---:|",
        *(
            f"| {file} | {found['passed']} | {found['on CPUs too']} | {found['here only']} |"
            for file, found in counts.items()
        ),
    ]
    failed = [
        f"* {name} ({_outcome(one)}): {one['error'].strip().rpartition(chr(10))[2]}"
        for name, one in results.items()
        if one["error"]
    ]
    return ["\n".join(lines), *(["\n".join(failed)] if failed else [])]


def _outcome(one: Results) -> str:
    if not one["error"]:
        return "passed"
    return "on CPUs too" if one.get("error_on_cpu") else "here only"


def _device(results: Results) -> list[str]:
    """Figures of the device, then predicted steps, under both prices."""
    rows = results["device"]["figures"] | {k: v for k, v in results.items() if k != "device"}
    lines = ["| price | preset | calibrated | ratio |", "|---|---:|---:|---:|"]
    for name, one in rows.items():
        ratio = one["calibrated"] / one["preset"]
        lines.append(f"| {name} | {one['preset']:.4g} | {one['calibrated']:.4g} | {ratio:.3f} |")
    return ["\n".join(lines)]


_TABLES: Mapping[str, Callable[[Results], list[str]]] = {
    "models": _models,
    "ranks": _ranks,
    "unexplained": _unexplained,
    "cases": _cases,
    "device": _device,
}
