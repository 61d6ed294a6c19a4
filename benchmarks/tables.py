"""The tables of docs/performance.md: their cases and their formatting."""

import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks import answers as config_answers
from benchmarks.planning import UNLIMITED, Case, Result, Settings, measure_case, run_model
from benchmarks.startup import measure_startup

LLAMA = "llama3-8b"
MESHES = ((8,), (2, 4), (2, 2, 2))
MODELS = (
    *("gpt2", "bert-base", "t5-base", "resnet-50"),
    *("qwen2-7b", LLAMA, "llama3-70b", "mixtral-8x7b"),
)
_SEARCHED = "deepseek-v3-micro-batch"
_NUM_DEVICES = 2048
_WORKERS = (1, 2, 4)
_CLIENTS = 8
_DEPTHS = ("llama3-8b-8-layers", LLAMA, "llama3-8b-128-layers")
_SHARES = (0.6, 0.4)
_CLOSE = 0.005
_LARGE = "llama-3-405b-micro-batch"
_PIPELINES: Mapping[str, tuple[str, Mapping[str, int], Mapping[str, Any]]] = MappingProxyType(
    {
        "Llama-3-70B, 64 H100": ("llama3-70b", {"dp": 8, "tp": 8}, {"micro_batches": 32}),
        "Llama-3-405B, 16,384 H100": (_LARGE, {"dp": 2048, "tp": 8}, {"micro_batches": 16}),
        "Llama-3-405B, as published: pp 16, dp 128, tp 8, interleaved": (
            _LARGE,
            {"pp": 16, "dp": 128, "tp": 8},
            {"micro_batches": 16, "schedule": "Interleaved1F1B"},
        ),
        "DeepSeek-V3, 2,048 H100": (_SEARCHED, {"dp": 256, "tp": 8}, {"micro_batches": 120}),
        "DeepSeek-V3, as published: pp 16, dp 128, bidirectional": (
            _SEARCHED,
            {"pp": 16, "dp": 128},
            {"micro_batches": 120, "schedule": "DualPipeV"},
        ),
    }
)
"""Titles of pipelines with model, axes and options."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The selected cases.

    Attributes:
        models: of the tables of budgets and answers; all if empty.
        meshes: of the table of budgets; all if empty.
        instances: files of the contest, each PATH or PATH:SECONDS.
    """

    models: tuple[str, ...] = ()
    meshes: tuple[tuple[int, ...], ...] = ()
    instances: tuple[str, ...] = ()


class Long(NamedTuple):
    """A table of many cases: its summary for the page, and all rows for a file of their own."""

    summary: str
    rows: str


Table = Callable[[Settings, Selection], str | Long]


def rows(header: Sequence[str], cells: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; the first column is left-aligned, the others right-aligned."""
    rule = [":--", *["--:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *cells])


def headline(settings: Settings, _: Selection) -> str:
    """Llama-3-8B in training on 8x8, by phase: without and with cached blocks."""
    cases = (Case(LLAMA, (8, 8), cached=cached) for cached in (False, True))
    return _phases([_measure(case, settings) for case in cases])


def depth(settings: Settings, _: Selection) -> str:
    """Llama-3-8B with 8, 32 and 128 layers, without a memory limit and under one."""
    lifted = [_measure(Case(name, (8, 8), memory_budget=UNLIMITED), settings) for name in _DEPTHS]
    limited = [
        _measure(replace(free.case, memory_budget=int(_SHARES[0] * free.last["held"])), settings)
        for free in lifted
        if free.found
    ]
    return f"{_phases([*lifted, *limited])}\n\n{_ratio(lifted)}"


def _ratio(results: Sequence[Result]) -> str:
    if not all(result.found for result in results):
        return "No ratio: one of the depths has no plan."
    least, most = results[0], results[-1]
    total = most.seconds("total") / least.seconds("total")
    planned = (most.seconds("total") - most.seconds("load")) / (
        least.seconds("total") - least.seconds("load")
    )
    solved = most.seconds("solve") / least.seconds("solve")
    return (
        f"From 8 to 128 layers with memory lifted, the total grows by {total:.1f}x, by "
        f"{planned:.1f}x with loading left out, and solving by {solved:.1f}x."
    )


def axes(settings: Settings, _: Selection) -> str:
    """Meshes of three and four axes."""
    return _phases([_measure(Case(LLAMA, mesh), settings) for mesh in ((2, 4, 8), (2, 2, 4, 8))])


def large(settings: Settings, _: Selection) -> str:
    """DeepSeek-V3 on meshes of 2,048 devices."""
    cases = (Case(_SEARCHED, mesh, memory_budget=UNLIMITED) for mesh in ((256, 8), (32, 8, 8)))
    return _phases([_measure(case, settings) for case in cases])


def _budget_row(result: Result) -> tuple[str, ...]:
    start = (str(result.case), result.status, _gap_text(result))
    if not result.runs:
        return (*start, *["-"] * 4)
    objective, held = result.last["certificate"]["objective"], result.last["held"]
    return (
        *start,
        "-" if objective is None else f"{objective * 1e3:.2f}",
        "-" if held is None else f"{held / 1e9:.2f}",
        f"{result.seconds('total'):.2f}",
        f"{result.peak / 1e6:.0f}",
    )


def shares(settings: Settings, selection: Selection) -> Long:
    """Models in training under the device's memory, and under shares of what they need freely."""
    results: list[Result] = []
    for name in selection.models or MODELS:
        for mesh in selection.meshes or MESHES:
            lifted = _measure(Case(name, mesh, memory_budget=UNLIMITED), settings)
            results.append(lifted)
            free = lifted.last["held"] if lifted.found else None
            if free is not None:
                given = [None, *(int(share * free) for share in _SHARES)]
                own = [
                    _measure(Case(name, mesh, memory_budget=budget), settings) for budget in given
                ]
                results += own
    header = (
        *("case", "status", "gap", "step, ms", "peak of the plan, GB"),
        *("total, s", "of the processor, s", "MB"),
    )
    table = rows(header, (_share_row(result) for result in results))
    summary = f"{_by_mesh(results)}\n\n{_within(results)}"
    return Long(summary, f"{table}\n\n{_notes(results)}".rstrip())


def _share_row(result: Result) -> tuple[str, ...]:
    *start, peak = _budget_row(result)
    processor = f"{result.last['processor']:.1f}" if result.runs else "-"
    return (*start, processor, peak)


def _within(results: Sequence[Result]) -> str:
    """Number of cases with a gap of at most `_CLOSE`."""
    close = [r for r in results if r.runs and r.gap is not None and r.gap <= _CLOSE]
    return f"{len(results)} cases: {len(close)} have a gap of at most {_CLOSE:.1%}."


def _by_mesh(results: Sequence[Result]) -> str:
    """The worst of the cases of each mesh and mode."""
    groups: dict[tuple[tuple[int, ...], str], list[Result]] = defaultdict(list)
    for result in results:
        groups[result.case.mesh, result.case.mode].append(result)
    header = ("mesh", "cases", "with a plan", "largest gap", "longest, s", "largest process, MB")
    return rows(header, (_worst(*group, found) for group, found in groups.items()))


def _worst(mesh: tuple[int, ...], mode: str, results: Sequence[Result]) -> tuple[str, ...]:
    run = [result for result in results if result.runs]
    gaps = [result.gap for result in run if result.gap is not None]
    return (
        f"{'x'.join(map(str, mesh))}, {mode}",
        str(len(results)),
        str(sum(result.found for result in run)),
        f"{max(gaps):.3%}" if gaps else "-",
        f"{max(result.seconds('total') for result in run):.1f}" if run else "-",
        f"{max(result.peak for result in run) / 1e6:.0f}" if run else "-",
    )


def pipelines(settings: Settings, _: Selection) -> str:
    """Pipelines of large models, without and with cached blocks."""
    header = ("case", "cold, s", "cached, s", "pipeline", "step", "idle", "memory", "gap")
    lines, results = [], []
    for title, (model, axes, options) in _PIPELINES.items():
        given = {"stages": "auto", **options}
        case = Case(model, tuple(axes.values()), axes=tuple(axes), options=given)
        cold, warm = (_measure(replace(case, cached=c), settings) for c in (False, True))
        lines.append((title, *_pipeline_cells(cold, warm)))
        results.append(cold)
    return f"{rows(header, lines)}\n\n{_notes(results)}".rstrip()


def _pipeline_cells(cold: Result, warm: Result) -> tuple[str, ...]:
    if not (cold.runs and warm.runs):
        return ("-", "-", "**failed**", *["-"] * 4)
    times = (f"{result.seconds('total'):.1f}" for result in (cold, warm))
    made = cold.last["pipeline"]
    if made is None:
        return (*times, "one stage" if cold.found else "no plan", *["-"] * 4)
    axes = " x ".join(f"{name} {size}" for name, size in made["axes"].items())
    return (
        *times,
        f"{made['schedule']}, {made['ranks']} ranks, {made['stages']} stages, {axes}",
        f"{cold.last['step']:.2f} s",
        f"{made['idle']:.1%}",
        f"{cold.last['held'] / 1e9:.0f} GB",
        f"{cold.gap or 0.0:.1%}",
    )


def service(settings: Settings, _: Selection) -> str:
    """A request to the service, and the same request answered from its cache."""
    request = {"mesh": [8, 8], "repetitions": settings.repetitions}
    got = _run("benchmarks.service", LLAMA, request, settings)
    if "error" in got:
        return f"**Failed**: {got['error']}"
    megabytes = f"{got['archive_bytes'] / 1e6:.1f} MB sent, {got['answer_bytes'] / 1e6:.1f} MB back"
    header = (f"request ({megabytes})", "seconds")
    again = "same request, HTTP response" + ("" if got["hits"] else " (**not from the cache**)")
    lines = [
        (
            "first request, with an empty cache, until the client has the plan",
            f"{got['first']:.3f}",
        ),
        (again, f"{median(got['answer']):.3f}"),
        ("same request, until another client has read the plan", f"{median(got['plan']):.3f}"),
        ("same request once more, by a client that has read it", f"{median(got['again']):.3f}"),
    ]
    return rows(header, lines)


def misses(settings: Settings, _: Selection) -> str:
    """Plans of GPT-2 that are not cached: per second, and the time of one."""
    lines, got = [], {}
    for workers in _WORKERS:
        number = 2 * settings.repetitions
        request = {"mesh": [2, 4], "workers": workers, "clients": _CLIENTS, "requests": number}
        got = _run("benchmarks.service", "gpt2", request, settings)
        if "error" in got:
            return f"**Failed**: {got['error']}"
        lines.append((str(workers), f"{got['rate']:.2f}", f"{got['processor']:.2f}"))
    header = ("workers", "plans per second", "of the processors for one plan, s")
    return f"{rows(header, lines)}\n\nOne plan at a time takes {got['total']:.3f} s."


def search(settings: Settings, _: Selection) -> str:
    """All meshes of up to three axes with memory lifted."""
    request = {
        "num_devices": _NUM_DEVICES,
        "num_workers": 2,
        "options": {"memory_budget": UNLIMITED},
    }
    run = _run("benchmarks.measure", _SEARCHED, request, settings)
    if "error" in run:
        return f"**Failed**: {run['error']}"
    header = (
        *("meshes", "planned", "best", "gap", "step, ms"),
        *("total, s", "of the processor, s", "largest process, MB"),
    )
    cells = [
        *(str(run["meshes"]), str(run["planned"]), "x".join(map(str, run["best"]))),
        *("-" if run["gap"] is None else f"{run['gap']:.3%}", f"{run['objective'] * 1e3:.2f}"),
        *(f"{run['seconds']:.1f}", f"{run['processor']:.1f}", f"{run['peak'] / 1e6:.0f}"),
    ]
    return rows(header, [cells])


def startup(settings: Settings, _: Selection) -> str:
    """Seconds until commands and imports are done, by `benchmarks/startup.py`."""
    _log("startup")
    header = ("command", "median s", "of the processor, s")
    return rows(header, measure_startup(settings.repetitions))


def answers(_: Settings, selection: Selection) -> str:
    """Ten configs on 8, 64 and 1,024 GPUs, by `benchmarks/answers.py`."""
    _log(f"answers: {' '.join(selection.models) or 'all configs'}")
    return rows(config_answers.HEADER, config_answers.measure_answers(selection.models))


def contest(_: Settings, selection: Selection) -> str:
    """Instances of the contest, by `benchmarks/iopddl.py`."""
    _log(f"contest: {' '.join(selection.instances)}")
    return _script("iopddl", *selection.instances)


def _script(name: str, *arguments: str) -> str:
    """Output of a module's command, with its errors if it fails."""
    done = subprocess.run(  # noqa: S603  a constant command
        [sys.executable, "-m", f"benchmarks.{name}", *arguments],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    if not done.returncode:
        return done.stdout.strip()
    return f"**Failed with status {done.returncode}**\n\n{done.stdout}\n\n{done.stderr[-500:]}"


TABLES: Mapping[str, Table] = MappingProxyType(
    {
        "headline": headline,
        "depth": depth,
        "axes": axes,
        "large": large,
        "shares": shares,
        "service": service,
        "misses": misses,
        "search": search,
        "startup": startup,
        "answers": answers,
        "pipelines": pipelines,
        "contest": contest,
    }
)
"""Tables by name, which is also that of the markers in the document."""

REPETITIONS: Mapping[str, int] = MappingProxyType(
    {"large": 3, "shares": 1, "search": 1, "pipelines": 1, "startup": 20, "answers": 1}
)
"""Measurements of each case, for tables with many or slow cases; the others have 5."""

TIME_LIMITS: Mapping[str, float] = MappingProxyType({"shares": 30.0})
"""Time limit of the solver in seconds, for tables with another one than the default."""


def _measure(case: Case, settings: Settings) -> Result:
    result = measure_case(case, settings)
    seconds = f" {result.seconds('total'):.2f} s" if result.runs else ""
    _log(f"{case}: {result.status}{seconds} {result.note}".strip())
    return result


def _run(module: str, model: str, request: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    _log(f"{module}: {model}, {request}")
    return run_model(module, model, request, settings)


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _phases(results: Sequence[Result]) -> str:
    header = ("case", "status", "gap", "solve, s", "total, s", "peak MB")
    return f"{rows(header, map(_phase_row, results))}\n\n{_notes(results)}".rstrip()


def _phase_row(result: Result) -> tuple[str, ...]:
    start = (str(result.case), result.status, _gap_text(result))
    if not result.runs:
        return (*start, "-", "-", "-")
    seconds = (f"{result.seconds(phase):.2f}" for phase in ("solve", "total"))
    return (*start, *seconds, f"{result.peak / 1e6:.0f}")


def _gap_text(result: Result) -> str:
    return "-" if result.gap is None else f"{result.gap:.3%}"


def _notes(results: Sequence[Result]) -> str:
    """Notes of the cases that have one, such as the reason why there is no plan."""
    return "\n".join(f"- {result.case}: {result.note}" for result in results if result.note)
