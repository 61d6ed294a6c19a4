"""Random small problems: every route of the solver is compared with brute force.

For each seed a problem is drawn, enumerated (`brute_force`) and solved. The solution must have the
same status, an allowed choice with the optimal price, and a bound that is not above the optimum.
The route disables steps, so that the later ones are tested alone:

    everything   all steps, as in production
    no products  no elimination of variables with few neighbours
    no tables    no elimination: linear relaxation, and branch and bound
    no rounding  elimination and prices on usage, with a requested gap of zero
    messages     every problem counts as large: TRW-S first, no products, no tables

Run `python benchmarks/random_problems.py --count 100000`; the exit status is 1 if any
problem failed, and the seed of each failure is printed.
"""

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from autoshard.arrays import FloatArray
from autoshard.outcome import SolveStatus
from autoshard.solve import (
    Edge,
    Node,
    Problem,
    Solution,
    SolverSettings,
    brute_force,
    solve_problem,
)

ROUTES = ("everything", "no products", "no tables", "no rounding", "messages")
FAMILIES = ("mixed", "contested", "layered", "followers")
_GAP = 1e-6
_ROUNDING = 1e-12
_MOST_TIED = 3
_NEWS_EVERY = 5000


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """Result of one seed.

    Attributes:
        seed: of the problem and the route.
        labels: family, route, and the steps that ran.
        failure: the error; empty without one.
    """

    seed: int
    labels: tuple[str, ...]
    failure: str


def draw(seed: int) -> tuple[str, Problem]:
    """The problem of a seed, with the name of its family."""
    rng = np.random.default_rng(seed)
    family = FAMILIES[int(rng.choice(len(FAMILIES), p=[0.55, 0.2, 0.1, 0.15]))]
    makers = {
        "mixed": _mixed,
        "contested": _contested,
        "layered": _layered,
        "followers": _followers,
    }
    return family, makers[family](rng)


def _mixed(rng: np.random.Generator) -> Problem:
    """At most 8 nodes with ties, intervals, parallel edges, infinities and negative prices."""
    num_nodes = int(rng.integers(1, 9))
    sizes = rng.integers(1, 5, num_nodes)
    ties = _ties(rng, num_nodes)
    for group in ties:
        sizes[list(group)] = sizes[group[0]]
    unit, lowest = float(10.0 ** rng.integers(-9, 12)), (-3.0 if _chance(rng, 0.3) else 0.0)
    nodes = [
        Node(_prices(rng, (int(n),), unit, lowest), _usage(rng, int(n)), _interval(rng, 6))
        for n in sizes
    ]
    edges = []
    for _ in range(int(rng.integers(0, 3 * num_nodes)) if num_nodes > 1 else 0):
        source, target = (int(v) for v in rng.choice(num_nodes, 2, replace=False))
        num_rows, num_cols = (int(n) for n in rng.integers(1, 5, 2))
        rows = rng.integers(0, num_rows, sizes[source])
        cols = rng.integers(0, num_cols, sizes[target])
        cost = _prices(rng, (num_rows, num_cols), unit, lowest)
        edges.append(Edge(source, target, cost, rows, cols))
    return _limited(rng, Problem(tuple(nodes), tuple(edges), ties), always=False)


def _contested(rng: np.random.Generator) -> Problem:
    """Dense, without ties; cheap strategies use most, and the limit allows few of them."""
    sizes = [int(n) for n in rng.integers(3, 5, int(rng.integers(5, 8)))]
    nodes = []
    for size in sizes:
        usage = rng.integers(1, 40, size).astype(np.float64)
        nodes.append(Node(8.0 / usage + rng.random(size), usage, _interval(rng, 4)))
    edges = [
        _dense(rng, source, target, sizes)
        for target in range(len(sizes))
        for source in range(target)
        if _chance(rng, 0.7)
    ]
    return _limited(rng, Problem(tuple(nodes), tuple(edges)), always=True)


def _layered(rng: np.random.Generator) -> Problem:
    """Equal layers around a shared node under one limit: symmetric, with many equal optima."""
    num_layers, size = int(rng.integers(2, 7)), int(rng.integers(2, 4))
    step, spoke = rng.random((size, size)), rng.random((size, size))
    usage = rng.integers(1, 9, size).astype(np.float64)
    layer = Node(4.0 / usage, usage, (0, 1))
    shared_node = Node(rng.random(size), np.zeros(size))
    index = np.arange(size)
    edges = [Edge(0, i, spoke, index, index) for i in range(1, num_layers + 1)]
    edges += [Edge(i, i + 1, step, index, index) for i in range(1, num_layers)]
    return _limited(rng, Problem((shared_node, *[layer] * num_layers), tuple(edges)), always=True)


def _followers(rng: np.random.Generator) -> Problem:
    """Chains in which a strategy determines that of the next node, as aliases do, with prices."""
    num_nodes = int(rng.integers(3, 9))
    sizes = [int(n) for n in rng.integers(2, 5, num_nodes)]
    edges = []
    for target in range(1, num_nodes):
        source = int(rng.integers(0, target))
        edge = _dense(rng, source, target, sizes)
        if _chance(rng, 0.6):
            image = rng.integers(0, sizes[target], sizes[source])
            if sizes[source] == sizes[target]:
                image = rng.permutation(sizes[source])
            cost = np.full(edge.cost.shape, np.inf)
            cost[np.arange(sizes[source]), image] = edge.cost[np.arange(sizes[source]), image]
            edge = Edge(source, target, cost, edge.rows, edge.cols)
        edges.append(edge)
    nodes = [Node(rng.random(n) * 9, _usage(rng, n), _interval(rng, 4)) for n in sizes]
    return _limited(rng, Problem(tuple(nodes), tuple(edges)), always=False)


def _chance(rng: np.random.Generator, share: float) -> bool:
    return bool(rng.random() < share)


def _dense(rng: np.random.Generator, source: int, target: int, sizes: list[int]) -> Edge:
    shape = (sizes[source], sizes[target])
    return Edge(source, target, rng.random(shape), np.arange(shape[0]), np.arange(shape[1]))


def _limited(rng: np.random.Generator, free: Problem, *, always: bool) -> Problem:
    """The problem with a limit between the least and the largest peak, or a bit below."""
    if not always and _chance(rng, 0.3):
        return free
    least = free.peak_usage([int(node.usage.argmin()) for node in free.nodes])
    most = free.peak_usage([int(node.usage.argmax()) for node in free.nodes])
    limit = least + (most - least) * float(rng.random()) ** 2 - (_chance(rng, 0.05))
    return Problem(free.nodes, free.edges, free.ties, max(limit, 0.0))


def _ties(rng: np.random.Generator, num_nodes: int) -> tuple[tuple[int, ...], ...]:
    order = [int(v) for v in rng.permutation(num_nodes)]
    if num_nodes < _MOST_TIED or _chance(rng, 0.5):
        return ()
    return (
        (tuple(order[:2]),) if num_nodes < 2 * _MOST_TIED else (tuple(order[:3]), tuple(order[3:5]))
    )


def _interval(rng: np.random.Generator, horizon: int) -> tuple[int, int]:
    first = int(rng.integers(0, horizon))
    return first, first + int(rng.integers(0, horizon))


def _usage(rng: np.random.Generator, size: int) -> FloatArray:
    """Usage with sums far apart, or in bytes, with sums that differ in the last digits only."""
    usage = rng.integers(0, 9, size).astype(np.float64)
    if _chance(rng, 0.3):
        usage = usage * 2.0**34 + rng.integers(0, 9, size)
    return usage


def _prices(
    rng: np.random.Generator, shape: tuple[int, ...], unit: float, lowest: float
) -> FloatArray:
    """Random prices in a unit; half of the time integers, so that equal prices occur."""
    prices = rng.uniform(lowest, 9.0, shape)
    if _chance(rng, 0.5):
        prices = np.rint(prices)
    forbidden = rng.random(shape) < rng.choice([0.0, 0.0, 0.15])
    priced: FloatArray = np.where(forbidden, np.inf, prices * unit)
    return priced


def _route(name: str) -> tuple[SolverSettings, float]:
    """Settings that disable steps, and the requested gap."""
    limits: dict[str, float] = {}
    if name != "everything":
        limits["max_product_work"] = 0.0
    if name in {"no tables", "messages"}:
        limits["max_table_entries"] = 0.0
    settings = SolverSettings(**limits)
    if name == "messages":
        settings = replace(settings, large_entries=0)
    return settings, 0.0 if name == "no rounding" else _GAP


def examine(seed: int) -> RunOutcome:
    """Solve the problem of a seed on the seed's route and compare with brute force."""
    family, problem = draw(seed)
    route = ROUTES[seed % len(ROUTES)]
    phases: set[str] = set()
    truth = brute_force(problem)
    settings, gap = _route(route)
    found = solve_problem(
        problem,
        relative_gap=gap,
        on_progress=lambda p: phases.add(f"phase: {p.phase}"),
        settings=settings,
    )
    steps = {f"step: {name.split('.')[0]}" for name in found.statistics}
    labels = (f"family: {family}", f"route: {route}", f"status: {truth.status}", *phases, *steps)
    return RunOutcome(seed, labels, _failure(problem, found, truth, gap))


def _failure(problem: Problem, found: Solution, truth: Solution, gap: float) -> str:
    """The error of a solution; empty without one."""
    if found.status is not truth.status:
        return f"status {found.status} instead of {truth.status}"
    if truth.status is SolveStatus.INFEASIBLE:
        return ""
    if found.choice is None or truth.choice is None or not problem.is_feasible(found.choice):
        return "the choice is not allowed"
    paid = _paid(problem, truth)
    if found.bound > truth.objective + _ROUNDING * paid:
        return f"bound {found.bound!r} above the optimum {truth.objective!r}"
    if abs(found.objective - truth.objective) > max(gap, 1e-9) * paid:
        return f"objective {found.objective!r} instead of {truth.objective!r}"
    return ""


def _paid(problem: Problem, solution: Solution) -> float:
    """Sum of the absolute prices of a choice, the scale of rounding errors."""
    choice = solution.choice
    if choice is None:
        return 0.0
    total = sum(abs(float(x.cost[s])) for x, s in zip(problem.nodes, choice, strict=True))
    for edge in problem.edges:
        price = edge.cost[edge.rows[choice[edge.source]], edge.cols[choice[edge.target]]]
        total += abs(float(price))
    return total


def main() -> int:
    """Examine a range of seeds on several processes and print a report in markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000, help="number of problems")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.count)
    start, tally, failures = time.perf_counter(), Counter[str](), 0
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        answers = pool.imap_unordered(examine, seeds, chunksize=50)
        for done, outcome in enumerate(answers, start=1):
            tally.update(outcome.labels)
            if done % _NEWS_EVERY == 0:
                print(f"{done} done, {failures} failures", file=sys.stderr, flush=True)
            if outcome.failure:
                failures += 1
                print(f"seed {outcome.seed}: {outcome.failure}", flush=True)
    seconds = time.perf_counter() - start
    print(f"{len(seeds)} problems, seeds {seeds.start} to {seeds.stop - 1}: {failures} failures")
    print(f"in {seconds:.0f} s on {options.processes} processes\n")
    print("| label | problems |\n|---|---|")
    for label, number in sorted(tally.items()):
        print(f"| {label} | {number} |")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
