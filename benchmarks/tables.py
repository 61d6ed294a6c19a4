"""The tables of docs/performance.md: which cases they measure, and how they read."""

import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from types import MappingProxyType

from benchmarks.archives import ExportFailedError, archive
from benchmarks.planning import UNLIMITED, Case, Result, Settings, measure_case, run_module

LLAMA = "llama3-8b"
MODES = ("training", "inference")
MESHES = ((8,), (2, 4), (2, 2, 2))
SMALL = (
    "gpt2",
    "gpt2-xl",
    "bert-base",
    "t5-base",
    "vit-base",
    "resnet-50",
    "qwen2-7b",
    LLAMA,
    "llama3-70b",
    "mixtral-8x7b",
    "deepseek-v3-6-layers",
)
_DEPTHS = ("llama3-8b-8-layers", LLAMA, "llama3-8b-128-layers")
_BUDGETS = (30, 20, 12)
_PHASES = ("load", "formulate", "solve", "find conflict", "assemble", "check")
_SLOW = 30.0
_WIDE = 0.01


@dataclass(frozen=True, slots=True)
class Selection:
    """What a run is restricted to, and what it is given.

    Attributes:
        models: of the table of models; all where empty.
        meshes: likewise.
        instances: files of the contest, each PATH or PATH:SECONDS.
        num_problems: random problems compared with brute force.
    """

    models: tuple[str, ...] = ()
    meshes: tuple[tuple[int, ...], ...] = ()
    instances: tuple[str, ...] = ()
    num_problems: int = 10_000


Table = Callable[[Settings, Selection], str]


def rows(header: Sequence[str], cells: Iterable[Sequence[str]]) -> str:
    """A table in markdown; the first column to the left, the others to the right."""
    rule = [":--", *["--:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *cells])


def headline(settings: Settings, _: Selection) -> str:
    """Llama-3-8B in training on 8x8, phase by phase: all solved anew, and with blocks known."""
    cases = (Case(LLAMA, (8, 8), cached=cached) for cached in (False, True))
    return _phases([_measure(case, settings) for case in cases])


def depth(settings: Settings, _: Selection) -> str:
    """The same layers, 8, 32 and 128 of them.

    Once as they are and once without a memory limit: only then do all depths ask the same
    question, and only plans are compared with plans.
    """
    as_is = [_measure(Case(name, (8, 8)), settings) for name in _DEPTHS]
    lifted = [_measure(Case(name, (8, 8), memory_budget=UNLIMITED), settings) for name in _DEPTHS]
    return f"{_phases([*as_is, *lifted])}\n\n{_ratio(lifted[0], lifted[-1])}"


def _ratio(least: Result, most: Result) -> str:
    if not (least.found and most.found):
        return "No ratio: a depth has no plan, and a plan is not compared with the lack of one."
    total = most.seconds("total") / least.seconds("total")
    planned = (most.seconds("total") - most.seconds("load")) / (
        least.seconds("total") - least.seconds("load")
    )
    return (
        f"From 8 to 128 layers with memory lifted, 16 times as many, the total grows by "
        f"{total:.1f}x, and by {planned:.1f}x with loading left out."
    )


def axes(settings: Settings, _: Selection) -> str:
    """Meshes of three and four axes."""
    return _phases([_measure(Case(LLAMA, mesh), settings) for mesh in ((2, 4, 8), (2, 2, 4, 8))])


def memory(settings: Settings, _: Selection) -> str:
    """Llama-3-70B, for the memory that planning it takes."""
    return _phases([_measure(Case("llama3-70b", (8, 8), mode), settings) for mode in MODES])


def budgets(settings: Settings, _: Selection) -> str:
    """Llama-3-8B in less and less memory."""
    given = (UNLIMITED, *(size * 10**9 for size in _BUDGETS))
    cases = (Case(LLAMA, (8, 8), memory_budget=budget) for budget in given)
    results = [_measure(case, settings) for case in cases]
    header = ("case", "status", "gap", "step, ms", "peak of the plan, GB", "total, s", "MB")
    table = rows(header, (_budget_row(result) for result in results))
    return f"{table}\n\n{_notes(results)}".rstrip()


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


def models(settings: Settings, selection: Selection) -> str:
    """Every model, on 8 devices in three shapes, in training and inference."""
    results: list[Result] = []
    for name in selection.models or SMALL:
        for mesh in selection.meshes or MESHES:
            for mode in MODES:
                results += _with_lifted(Case(name, mesh, mode), settings)
    header = ("case", "memory", "status", "gap", "step, ms", "formulate", "solve", "total, s", "MB")
    table = rows(header, (_model_row(result) for result in results))
    return "\n\n".join([table, _verdict(results), _notes(results)]).rstrip()


def _with_lifted(case: Case, settings: Settings) -> list[Result]:
    """The case; and once more without its memory limit where it has no plan within it."""
    result = _measure(case, settings)
    if not result.runs or result.found:
        return [result]
    return [result, _measure(replace(case, memory_budget=UNLIMITED), settings)]


def service(settings: Settings, _: Selection) -> str:
    """The same request again, answered from the service's cache."""
    try:
        path = archive(LLAMA, settings.folder / "models")
    except ExportFailedError as error:
        return f"**Failed**: {LLAMA} cannot be exported: {error}"
    asked = {
        "archive": str(path),
        "mesh": [8, 8],
        "options": {
            "time_limit": settings.time_limit,
            "relative_gap": settings.relative_gap,
        },
        "repetitions": settings.repetitions,
    }
    _say(f"service: {LLAMA} on 8x8")
    got = run_module("benchmarks.service", asked, patience=settings.patience)
    if "error" in got:
        return f"**Failed**: {got['error']}"
    megabytes = f"{got['archive_bytes'] / 1e6:.1f} MB sent, {got['answer_bytes'] / 1e6:.1f} MB back"
    header = (f"request ({megabytes})", "seconds")
    again = "same request, whole answer" + ("" if got["hits"] else " (**not from the cache**)")
    lines = [
        ("first request, cache empty, until the client has the plan", f"{got['first']:.3f}"),
        (again, f"{median(got['answer']):.3f}"),
        ("same request, until another client has read the plan", f"{median(got['plan']):.3f}"),
        ("same request once more, by a client that has read it", f"{median(got['again']):.3f}"),
    ]
    return rows(header, lines)


def contest(_: Settings, selection: Selection) -> str:
    """Instances of the contest, by the script beside this one."""
    _say(f"contest: {' '.join(selection.instances)}")
    return _script("iopddl.py", *selection.instances)


def random(_: Settings, selection: Selection) -> str:
    """Random small problems against brute force, by the script beside this one."""
    _say(f"random: {selection.num_problems} problems")
    return _script("random_problems.py", "--count", str(selection.num_problems))


def _script(name: str, *arguments: str) -> str:
    """What a script prints, and its complaint if it has one."""
    path = Path(__file__).with_name(name)
    done = subprocess.run(  # noqa: S603  our own script
        [sys.executable, str(path), *arguments], capture_output=True, text=True, check=False
    )
    if not done.returncode:
        return done.stdout.strip()
    return f"**Failed with status {done.returncode}**\n\n{done.stdout}\n\n{done.stderr[-500:]}"


TABLES: Mapping[str, Table] = MappingProxyType(
    {
        "headline": headline,
        "depth": depth,
        "axes": axes,
        "models": models,
        "memory": memory,
        "budgets": budgets,
        "service": service,
        "random": random,
        "contest": contest,
    }
)
"""By name, which is also that of its place in the document."""

REPETITIONS: Mapping[str, int] = MappingProxyType({"models": 1, "memory": 3, "budgets": 1})
"""Measurements of each case, for tables of so many or so long ones that 5 take too long."""

TIME_LIMITS: Mapping[str, float] = MappingProxyType({"models": 30.0, "budgets": 60.0})
"""Seconds for the solver, for tables that say what it finds within them."""


def _measure(case: Case, settings: Settings) -> Result:
    result = measure_case(case, settings)
    seconds = f" {result.seconds('total'):.2f} s" if result.runs else ""
    _say(f"{case}: {result.status}{seconds} {result.note}".strip())
    return result


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _phases(results: Sequence[Result]) -> str:
    shown = [phase for phase in _PHASES if any(r.runs and r.seconds(phase) for r in results)]
    header = ("case", "status", "gap", *(f"{phase}, s" for phase in shown))
    cells = (_phase_row(result, shown) for result in results)
    table = rows((*header, "total, s", "least to most", "peak MB"), cells)
    return f"{table}\n\n{_notes(results)}".rstrip()


def _phase_row(result: Result, shown: Sequence[str]) -> tuple[str, ...]:
    start = (str(result.case), result.status, _gap_text(result))
    if not result.runs:
        return (*start, *["-"] * (len(shown) + 3))
    seconds = (f"{result.seconds(phase):.2f}" for phase in (*shown, "total"))
    least, most = result.spread
    return (*start, *seconds, f"{least:.2f} to {most:.2f}", f"{result.peak / 1e6:.0f}")


def _model_row(result: Result) -> tuple[str, ...]:
    lifted = result.case.memory_budget is not None
    start = str(result.case).removesuffix(", memory lifted")
    if not result.runs:
        return (start, "lifted" if lifted else "", result.status, *["-"] * 6)
    objective = result.last["certificate"]["objective"]
    return (
        start,
        "lifted" if lifted else f"{result.last['budget'] / 1e9:.0f} GB",
        result.status,
        _gap_text(result),
        "-" if objective is None else f"{objective * 1e3:.2f}",
        f"{result.seconds('formulate'):.2f}",
        f"{result.seconds('solve'):.2f}",
        f"{result.seconds('total'):.2f}",
        f"{result.peak / 1e6:.0f}",
    )


def _gap_text(result: Result) -> str:
    return "-" if result.gap is None else f"{result.gap:.3%}"


def _verdict(results: Sequence[Result]) -> str:
    """How many cases have a plan, a small gap, and are fast."""
    found = [r for r in results if r.runs and r.gap is not None]
    close = [r for r in found if r.gap is not None and r.gap <= _WIDE]
    fast = [r for r in results if r.runs and r.seconds("total") <= _SLOW]
    no_room = [r for r in results if r.needs_memory]
    return (
        f"{len(results)} cases: {len(found)} have a plan with a bound, {len(close)} of them within "
        f"{_WIDE:.0%} of it; {len(no_room)} are proven not to fit into memory; "
        f"{len(fast)} took at most {_SLOW:.0f} s."
    )


def _notes(results: Sequence[Result]) -> str:
    """Reasons of the cases that have no plan, or not a whole set of measurements."""
    return "\n".join(f"- {result.case}: {result.note}" for result in results if result.note)
