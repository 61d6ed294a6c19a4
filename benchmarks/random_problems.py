"""Random small problems: every route of the solver is compared with brute force.

For each seed a problem is drawn, enumerated (`brute_force`) and solved. The solution must have the
same status, an allowed choice with the optimal price, and a bound that is not above the optimum.
A route disables steps or starves them, so that the others are tested alone ("plain" routes get no
hints which nodes repeat):

    everything       all steps, as in production
    no products      plain: no elimination; linear relaxation, and branch and bound
    no rounding      the same with a requested gap of zero
    messages         plain: every problem counts as large: TRW-S first, no products
    narrow           restricted problems of a few strategies, whatever the number of strategies;
                     no path costs are made matrices
    shared relaxed   shared nodes of runs are never axes of tables
    runs alone       run contraction and its prices on usage, without the steps that close a gap
    several limits   the same problem under several limits, each with the results of the others;
                     no path costs are made matrices
    short of time    stops after a few milliseconds; large-neighbourhood search if there is time

Some solutions may stay open (feasible, but not proven optimal): those on the routes "narrow",
"runs alone" and "short of time", and those of problems with path costs on "several limits". Their
choices and bounds are checked all the same. Run `python -m benchmarks.random_problems --count
100000`; the exit status is 1 if any problem failed, and the seed of each failure is printed.
"""

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from autoshard.base.outcome import SolveStatus
from autoshard.solve import (
    Problem,
    Solution,
    SolverSettings,
    WarmStart,
    brute_force,
    solve_problem,
)
from autoshard.solve.runs import RunOutcome, solve_runs
from autoshard.solve.state import SolveState
from benchmarks.random_families import draw

_GAP = 1e-6
_ROUNDING = 1e-12
_NEWS_EVERY = 5000
_SHORT = 0.02
_LEAST_ACCURACY = 1e-4


@dataclass(frozen=True, slots=True)
class Route:
    """Route by which a problem is solved.

    Attributes:
        settings: limits of work.
        gap: requested.
        with_hints: true if the solver is told which nodes repeat.
        may_stay_open: true if the solution need not be proven optimal.
        finds_least: true if the least limit of an infeasible problem is always found.
        time_limit: seconds, or None.
    """

    settings: SolverSettings
    gap: float = _GAP
    with_hints: bool = True
    may_stay_open: bool = False
    finds_least: bool = True
    time_limit: float | None = None


_DEFAULT = SolverSettings()
_NO_PRODUCTS = SolverSettings(max_product_work=0.0)
_NARROW = SolverSettings(wide_strategies=0.0, first_width=1, last_width=2, max_matrix_states=0)
_PATHS = SolverSettings(max_matrix_states=0)
_RELAXED = SolverSettings(max_group_work=0.0)
_HUGE = replace(_NO_PRODUCTS, large_entries=0, huge_entries=0, forest_patience=20)

ROUTES = MappingProxyType(
    {
        "everything": Route(_DEFAULT),
        "no products": Route(_NO_PRODUCTS, with_hints=False),
        "no rounding": Route(_NO_PRODUCTS, gap=0.0, with_hints=False),
        "messages": Route(replace(_NO_PRODUCTS, large_entries=0), with_hints=False),
        "narrow": Route(_NARROW, may_stay_open=True),
        "shared relaxed": Route(_RELAXED),
        "runs alone": Route(_DEFAULT, may_stay_open=True, finds_least=False),
        "several limits": Route(_PATHS),
        "short of time": Route(_HUGE, may_stay_open=True, time_limit=_SHORT),
    }
)
_LIMIT_SHARES = (1.0, 0.9, 0.6, 0.95)


@dataclass(frozen=True, slots=True)
class Examined:
    """Result of one seed.

    Attributes:
        seed: of the problem and the route.
        family: of the problem.
        route: name of the route.
        labels: status, and the phases and steps that ran.
        failure: the error; empty without one.
    """

    seed: int
    family: str
    route: str
    labels: tuple[str, ...]
    failure: str


def examine(seed: int) -> Examined:
    """Solve the problem of a seed on the seed's route and compare with brute force."""
    family, problem = draw(seed)
    name = [*ROUTES][seed % len(ROUTES)]
    labels: set[str] = set()
    try:
        failure = next(_failures(problem, name, labels), "")
    except (ArithmeticError, AssertionError, LookupError, ValueError) as error:
        failure = f"raised {error!r}"
    return Examined(seed, family, name, tuple(sorted(labels)), failure)


def _failures(problem: Problem, name: str, labels: set[str]) -> Iterator[str]:
    """The errors of the solutions on a route; adds labels of all that ran."""
    for limited, found in _solved(problem, name, labels):
        truth = brute_force(limited)
        labels.add(f"status: {found.status}")
        if limited.has_path_costs:
            labels.add("edges priced by paths")
        labels.update(f"step: {step.split('.')[0]}" for step in found.statistics)
        yield from _wrong(limited, found, truth, ROUTES[name])


def _solved(problem: Problem, name: str, labels: set[str]) -> Iterator[tuple[Problem, Solution]]:
    """Solutions of a problem, or of the same problem under several limits."""
    route = ROUTES[name]
    if not route.with_hints:
        problem = replace(problem, repeats=())
    if name == "runs alone":
        yield problem, _solved_by_runs(problem, route)
        return
    several = name == "several limits" and np.isfinite(problem.usage_limit)
    warm_start = WarmStart() if several else None
    for share in _LIMIT_SHARES if several else (1.0,):
        limited = replace(problem, usage_limit=share * problem.usage_limit) if several else problem
        yield (
            limited,
            solve_problem(
                limited,
                relative_gap=route.gap,
                time_limit=route.time_limit,
                on_progress=lambda p: labels.add(f"phase: {p.phase}"),
                warm_start=warm_start,
                settings=route.settings,
            ),
        )


def _solved_by_runs(problem: Problem, route: Route) -> Solution:
    """Solution of run contraction alone."""
    state = SolveState(problem, gap=route.gap, settings=route.settings)
    outcome = solve_runs(state)
    if outcome is RunOutcome.SKIPPED:
        state.count("no_runs")
    return state.finish(infeasible=outcome is RunOutcome.INFEASIBLE)


def _wrong(problem: Problem, found: Solution, truth: Solution, route: Route) -> Iterator[str]:
    """The errors of a solution."""
    may_stay_open = route.may_stay_open or problem.needs_paths(route.settings)
    open_statuses = (SolveStatus.FEASIBLE, SolveStatus.TIMED_OUT) if may_stay_open else ()
    if found.status not in (truth.status, *open_statuses):
        yield f"status {found.status} instead of {truth.status}"
    if found.choice is not None:
        yield from _wrong_choice(problem, found, truth, route)
    if truth.choice is None:
        if found.status is SolveStatus.INFEASIBLE:
            yield from _wrong_minimum(problem, found, route)
        return
    if found.bound > truth.objective + _ROUNDING * _paid(problem, truth.choice):
        yield f"bound {found.bound!r} above the optimum {truth.objective!r}"


def _wrong_choice(
    problem: Problem, found: Solution, truth: Solution, route: Route
) -> Iterator[str]:
    assert found.choice is not None
    if truth.choice is None or not _is_allowed(problem, found.choice):
        yield "the choice is not allowed"
        return
    scale = _paid(problem, truth.choice)
    if abs(found.objective - problem.objective(found.choice)) > _ROUNDING * scale:
        yield f"objective {found.objective!r} of a choice of another price"
    allowed = max(route.gap, 1e-9) * scale
    if found.objective < truth.objective - allowed:
        yield f"objective {found.objective!r} below the optimum {truth.objective!r}"
    if found.status is SolveStatus.OPTIMAL and found.objective > truth.objective + allowed:
        yield f"objective {found.objective!r} instead of {truth.objective!r}"


def _is_allowed(problem: Problem, choice: Sequence[int] | np.ndarray) -> bool:
    """True if a choice keeps ties and limit; usage is added up as integers of Python."""
    tied = all(len({int(choice[v]) for v in group}) == 1 for group in problem.ties)
    if not tied or not np.isfinite(problem.objective(choice)):
        return False
    if np.isinf(problem.usage_limit):
        return True
    spans = [node.interval for node in problem.nodes]
    used = [int(node.usage[s]) for node, s in zip(problem.nodes, choice, strict=True)]
    peaks = (
        sum(u for u, (first, last) in zip(used, spans, strict=True) if first <= time < last)
        for time in {first for first, last in spans if first < last}
    )
    return all(peak <= problem.usage_limit for peak in peaks)


def _wrong_minimum(problem: Problem, found: Solution, route: Route) -> Iterator[str]:
    """Errors of the least feasible limit of an infeasible problem."""
    least = found.statistics.get("minimum_usage")
    if least is None:
        must_know = route.finds_least and route.time_limit is None
        if must_know and _is_feasible_at(problem, np.inf):
            yield "no least limit"
        return
    if not _is_feasible_at(problem, least):
        yield f"no choice satisfies the least limit {least!r}"
    is_least = not (found.reached_time_limit or "restricted.problems" in found.statistics)
    if is_least and _is_feasible_at(problem, least * (1 - _LEAST_ACCURACY) - 0.5):
        yield f"the least limit is less than {least!r}"


def _is_feasible_at(problem: Problem, limit: float) -> bool:
    return limit >= 0 and brute_force(replace(problem, usage_limit=limit)).choice is not None


def _paid(problem: Problem, choice: Sequence[int] | np.ndarray) -> float:
    """Sum of the absolute prices of a choice, the scale of rounding errors."""
    return float(np.abs(problem.prices(choice)).sum())


def main() -> int:
    """Examine a range of seeds on several processes and print a report in markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000, help="number of problems")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.count)
    start, tally, failures = time.perf_counter(), Counter[str](), 0
    pairs = Counter[tuple[str, str]]()
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        answers = pool.imap_unordered(examine, seeds, chunksize=50)
        for done, examined in enumerate(answers, start=1):
            tally.update(examined.labels)
            pairs[examined.route, examined.family] += 1
            if done % _NEWS_EVERY == 0:
                print(f"{done} done, {failures} failures", file=sys.stderr, flush=True)
            if examined.failure:
                failures += 1
                print(f"seed {examined.seed}: {examined.route}: {examined.failure}", flush=True)
    seconds = time.perf_counter() - start
    print(f"{len(seeds)} problems, seeds {seeds.start} to {seeds.stop - 1}: {failures} failures")
    print(f"in {seconds:.0f} s on {options.processes} processes\n")
    _print_tables(tally, pairs)
    return int(failures > 0)


def _print_tables(tally: Counter[str], pairs: Counter[tuple[str, str]]) -> None:
    families = sorted({family for _, family in pairs})
    print(f"| route | {' | '.join(families)} |\n|---|{'---|' * len(families)}")
    for route in ROUTES:
        numbers = (str(pairs[route, family]) for family in families)
        print(f"| {route} | {' | '.join(numbers)} |")
    print("\n| label | problems |\n|---|---|")
    for label, number in sorted(tally.items()):
        print(f"| {label} | {number} |")


if __name__ == "__main__":
    sys.exit(main())
