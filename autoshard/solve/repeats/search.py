"""Solving a problem with runs: exactly where the tables are small, with bounds elsewhere."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import partial

import numpy as np

from autoshard.solve.problem import BoolArray, FloatArray, IntArray, Problem
from autoshard.solve.repeats.condensed import Answer, Condensed
from autoshard.solve.repeats.limited import price_usage
from autoshard.solve.repeats.runs import find_runs
from autoshard.solve.repeats.template import Open
from autoshard.solve.search import Search

_EAGER_WORK = 2e8
"""Additions up to which hubs are not relaxed first: some tenths of a second."""
_EXACT_SECONDS = 3.0
"""How long to insist on the optimum itself."""
_SLACK = 1e-6
"""Relative difference below which two prices count as the same."""


class Outcome(StrEnum):
    """What solving through runs came to."""

    NOTHING = "nothing"
    """There are no runs, or the tables would be too large."""
    TOLD = "told"
    """The search has been told choices and bounds."""
    INFEASIBLE = "infeasible"
    """No choice keeps the usage limit."""


def solve_repeats(search: Search) -> Outcome:
    """Solve a problem through its runs.

    The search is told the best choice that was found, and the bound that every choice obeys.
    A usage limit is dealt with where usage can peak at one time only.
    """
    problem = search.problem
    runs = find_runs(problem)
    condensed = Condensed(problem, runs, check=search.check)
    if problem.ties or not condensed.worthwhile:
        return Outcome.NOTHING
    search.enter("solve repeated groups")
    answer = _minimise(search, condensed, [node.cost for node in problem.nodes])
    if answer is None:
        return Outcome.NOTHING
    bound, choice = answer
    search.raise_bound(bound)
    if choice is not None and not search.offer(choice) and len(problem.peak_times) == 1:
        minimise = partial(_minimise, search, condensed)
        if not price_usage(search, runs, minimise, choice):
            return Outcome.INFEASIBLE
    return Outcome.TOLD


def _minimise(
    search: Search, condensed: Condensed, costs: Sequence[FloatArray]
) -> tuple[float, IntArray | None] | None:
    """A lower bound, and the best choice that was found.

    Hubs make tables large. If they are too large, hubs are first relaxed. What that leaves
    of their strategies (those that some choice as good as the best one might take) is
    usually a handful, and then the tables are small.
    """
    problem = search.problem
    every = {hub: np.ones(problem.nodes[hub].num_strategies, bool) for hub in condensed.hubs}
    exact = condensed.minimise(costs, every, most_work=_EAGER_WORK)
    if exact is not None:
        return exact.value, exact.choice
    hubs = condensed.hubs
    relaxed = condensed.minimise(costs, dict.fromkeys(hubs), bounds_of=hubs)
    if relaxed is None:
        return None
    best = _fixed_at_best(problem, condensed, costs, relaxed, {})
    if best is None:
        return relaxed.value, None
    if _close(search, best.value, relaxed.value):
        return relaxed.value, best.choice
    return _narrowed(search, condensed, costs, relaxed, best)


def _close(search: Search, value: float, bound: float) -> bool:
    """Whether a price is as good as the bound, or good enough after some time."""
    slack = _SLACK if search.elapsed < _EXACT_SECONDS else max(_SLACK, search.gap)
    return value <= bound + slack * abs(value)


def _narrowed(
    search: Search,
    condensed: Condensed,
    costs: Sequence[FloatArray],
    relaxed: Answer,
    best: Answer,
) -> tuple[float, IntArray]:
    """Drop what no choice as good as the best one takes, hub by hub, then solve the rest."""
    bound = relaxed.value
    every_hub: Open = dict.fromkeys(condensed.hubs)
    cutoff = best.value * (1 + np.sign(best.value) * _SLACK)
    least = {**relaxed.hub_bounds, **(condensed.port_bounds(costs, every_hub) or {})}
    left = {v: bounds <= cutoff for v, bounds in least.items()}
    ports = {v: mask for v, mask in left.items() if v not in every_hub}
    for hub in condensed.hubs:
        trial = {**every_hub, **ports, hub: left[hub]}
        answer = condensed.minimise(costs, trial, bounds_of=(hub,))
        if answer is None:
            return bound, best.choice
        bound = max(bound, min(answer.value, best.value))
        better = _fixed_at_best(search.problem, condensed, costs, answer, ports)
        if better is not None and better.value < best.value:
            best = better
        if _close(search, best.value, bound):
            return bound, best.choice
        left[hub] = answer.hub_bounds[hub] <= best.value * (1 + np.sign(best.value) * _SLACK)
    exact = condensed.minimise(costs, left)
    if exact is None:
        return bound, best.choice
    if exact.value < best.value:
        return exact.value, exact.choice
    return best.value, best.choice


def _fixed_at_best(
    problem: Problem,
    condensed: Condensed,
    costs: Sequence[FloatArray],
    relaxed: Answer,
    ports: Open,
) -> Answer | None:
    """The best choice with every hub at the strategy that suits the relaxed choice most."""
    suits = {hub: costs[hub].copy() for hub in condensed.hubs}
    for edge in problem.edges:
        if edge.source in suits:
            column = edge.cols[relaxed.choice[edge.target]]
            suits[edge.source] += edge.cost[edge.rows, column]
        if edge.target in suits:
            row = edge.rows[relaxed.choice[edge.source]]
            suits[edge.target] += edge.cost[row, edge.cols]
    fixed: Mapping[int, BoolArray] = {
        hub: np.arange(len(prices)) == int(prices.argmin()) for hub, prices in suits.items()
    }
    return condensed.minimise(costs, {**fixed, **ports})
