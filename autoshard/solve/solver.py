"""The solver: computes a certified solution of a problem."""

from collections.abc import Callable, Mapping
from functools import partial
from math import inf

import numpy as np

from autoshard.base.arrays import FloatArray
from autoshard.base.limits import CancelToken, seconds_left
from autoshard.base.outcome import OWN_SOLVER, PLAIN_SOLVER
from autoshard.errors import OptionError, ProblemError
from autoshard.solve.block_cache import KeyValueStore
from autoshard.solve.bounds.forest_search import search_forests
from autoshard.solve.bounds.trws import ascend, is_huge
from autoshard.solve.edge_usage import solution_of, without_edge_usage
from autoshard.solve.local_search import CoordinateDescent
from autoshard.solve.minimum_usage import minimum_usage
from autoshard.solve.network import Network
from autoshard.solve.problem import Problem
from autoshard.solve.programs.highs import HighsSolver, RunStatus
from autoshard.solve.programs.integer_program import solve_integer_program
from autoshard.solve.programs.linear_program import LinearModel, linear_model
from autoshard.solve.programs.restricted_problem import solve_wide
from autoshard.solve.reduced_problem import ReducedProblem
from autoshard.solve.reference import solve_with_cvxpy
from autoshard.solve.runs import RunOutcome, solve_runs
from autoshard.solve.settings import SolverSettings
from autoshard.solve.state import (
    MINIMUM_GAP,
    Interrupted,
    Progress,
    Solution,
    SolveState,
    WarmStart,
)

_MINIMUM_USAGE_SECONDS = 20.0
_NEARLY_ALL = 0.9
"""Share of these seconds after which the limit that was found may not be the least one."""
_PLAIN_ENTRIES = 50_000
"""Entries of matrices up to which plain methods close what run contraction leaves."""

_LEAST_SECONDS = 1e-3


def solve_problem(
    problem: Problem,
    *,
    time_limit: float | None = None,
    relative_gap: float = 1e-6,
    seed: int = 0,
    on_progress: Callable[[Progress], None] | None = None,
    cancel: CancelToken | None = None,
    solver: str = OWN_SOLVER,
    block_cache: KeyValueStore | None = None,
    warm_start: WarmStart | None = None,
    settings: SolverSettings | None = None,
) -> Solution:
    """Find the cheapest choice, with a proof of how good it is.

    Problems with repeated groups are solved by run contraction, problems with many strategies
    through restricted ones. All others are first solved without their usage limit: exact
    reductions often solve them completely, and HiGHS solves the rest. If that choice exceeds the
    limit, the same is done under the limit.

    Args:
        problem: the problem.
        time_limit: seconds after which the best choice so far is returned, a safety net: steps
            are limited by their work. The deadline of `limited` around the call counts too.
            `Solution.reached_time_limit` tells whether it was needed.
        relative_gap: stop once the choice is proven this close to the optimum, relative to the sum
            of its absolute prices; values below 1e-9 count as 1e-9, because of rounding.
        seed: of random numbers.
        on_progress: called at each phase and each improvement, from the solving thread.
        cancel: such as a `threading.Event`; once set, the best choice so far is returned.
        solver: "autoshard"; or a plain solver of the integer program of the problem as it is given,
            without reductions: "ilp" for HiGHS, or the name of a solver that cvxpy finds. It takes
            no caches, warm start and seed; one of cvxpy does not look at `cancel` either.
        block_cache: stores tables of repeated groups for other solves; `Solution.blocks` shows
            which tables were reused.
        warm_start: pass the same one to solves of one problem under several limits; later solves
            reuse the results of earlier ones.
        settings: limits of work; the defaults suit problems of whole models.

    Returns:
        the solution; infeasible is a status, not an error. If the usage limit makes the problem
        infeasible, and the problem has no further limit or cut-off, `statistics["minimum_usage"]`
        is a limit that is feasible: the least one, unless the time for finding it ran out
        (`Solution.reached_time_limit`) or the problem was solved through restricted problems.

    Raises:
        OptionError: an option is out of its range, or the solver is not installed.
        ProblemError: the problem has path costs, and usage of edges or further limits.
    """
    _check_options(time_limit, relative_gap)
    if problem.has_path_costs and (problem.further_limits or problem.using_edges):
        raise ProblemError(
            "a problem with path costs can have one limit, on the usage of nodes; for others, give "
            "the prices of its edges as matrices, `ShortestPathCost.dense`"
        )
    settings = settings or SolverSettings()
    left = seconds_left()
    if left < inf:
        time_limit = max(min(time_limit or inf, left), _LEAST_SECONDS)
    state = SolveState(
        without_edge_usage(problem),
        time_limit=time_limit,
        gap=max(relative_gap, MINIMUM_GAP),
        seed=seed,
        on_progress=on_progress,
        cancel=cancel,
        block_cache=block_cache,
        warm_start=warm_start,
        settings=settings,
    )
    infeasible = False
    try:
        infeasible = not _SOLVERS.get(solver.lower(), partial(solve_with_cvxpy, solver=solver))(
            state
        )
        known = "minimum_usage" in state.statistics
        only_limit = not problem.further_limits and np.isinf(problem.cutoff)
        if infeasible and not known and only_limit and np.isfinite(problem.usage_limit):
            _find_minimum_usage(state)
    except Interrupted:
        state.count("interrupted")
    return solution_of(problem, state.finish(infeasible=infeasible))


def _check_options(time_limit: float | None, relative_gap: float) -> None:
    if time_limit is not None and not time_limit > 0:
        raise OptionError(f"time_limit is {time_limit} s; give a positive number, or None")
    if not 0 <= relative_gap < 1:
        raise OptionError(f"relative_gap is {relative_gap}; give a number from 0 to below 1")


def _find_minimum_usage(state: SolveState) -> None:
    """Find the least feasible usage limit of an infeasible problem; record it if time runs out."""
    state.enter("find the least limit")
    seconds = min(state.remaining, _MINIMUM_USAGE_SECONDS)
    late = state.elapsed + _NEARLY_ALL * seconds
    least = minimum_usage(state.problem, time_limit=seconds, cancel=state)
    state.is_late(late)
    if np.isfinite(least):
        state.statistics["minimum_usage"] = least


def _solve(state: SolveState) -> bool:
    """Run all phases; False if the problem is infeasible."""
    if state.problem.has_negative_limit:
        return False
    state.check()
    state.raise_bound(state.problem.min_price)
    for choice in state.warm_start.known:
        state.offer(choice)
    outcome = _solve_structured(state)
    if outcome is not RunOutcome.SKIPPED:
        return outcome is RunOutcome.UPDATED
    return _flat(state)


def _solve_structured(state: SolveState) -> RunOutcome:
    """Solve by restricted problems and run contraction; SKIPPED unless that is the solution.

    They know the limit on the usage of nodes only, so problems with further limits are skipped.
    """
    if state.problem.further_limits:
        return RunOutcome.SKIPPED
    solve = partial(_solve_restricted, state)
    was_wide = state.warm_start.restricted is not None
    # What was solved through restricted problems under one limit is solved so under others: the
    # warm start has the restricted problem.
    least = 0.0 if was_wide else state.settings.wide_strategies
    wide = solve_wide(state, solve, least_strategies=least)
    if _is_solution(state, wide):
        return wide
    outcome = solve_runs(state)
    if outcome is RunOutcome.SKIPPED and wide is RunOutcome.SKIPPED:
        # Tables are too large for run contraction.
        outcome = solve_wide(state, solve)
        if _is_solution(state, outcome):
            return outcome
    if outcome is RunOutcome.INFEASIBLE or state.closed or not _is_plain(state):
        return outcome
    return RunOutcome.SKIPPED


def _is_plain(state: SolveState) -> bool:
    """True if the whole problem may be solved without run contraction.

    That never closed a gap that run contraction left under a limit for a model's problem, but it
    does for small problems.
    """
    if state.choice is None or not state.problem.can_bind:
        return True
    return state.problem.num_prices <= _PLAIN_ENTRIES


def _is_solution(state: SolveState, wide: RunOutcome) -> bool:
    """True if restricted problems gave the solution, or no other step can improve on it."""
    if wide is RunOutcome.INFEASIBLE or state.closed:
        return True
    problem, is_limited = state.problem, state.warm_start.restricted is not None
    if problem.num_prices < state.settings.large_entries:
        return False
    return is_limited or (wide is RunOutcome.UPDATED and problem.needs_paths(state.settings))


def _solve_restricted(
    state: SolveState,
    restricted: Problem,
    seconds: float,
    *,
    gap: float,
    bound: float,
    warm_start: WarmStart | None,
    runs_only: bool = False,
) -> Solution:
    """Solve a restricted problem, given a lower bound of it."""
    inner = SolveState(
        restricted,
        time_limit=None if np.isinf(seconds) else max(seconds, _LEAST_SECONDS),
        gap=max(gap, MINIMUM_GAP),
        seed=state.seed,
        cancel=state,
        block_cache=state.block_cache,
        warm_start=warm_start,
        settings=state.settings,
    )
    inner.raise_bound(bound)
    infeasible = False
    try:
        outcome = solve_runs(inner)
        infeasible = outcome is RunOutcome.INFEASIBLE
        limit_binds = inner.choice is not None and restricted.can_bind
        ends_with_bound = state.settings.bounds_only
        if not (infeasible or inner.closed or limit_binds or runs_only or ends_with_bound):
            infeasible = not _flat(inner)
    except Interrupted:
        state.count("restricted.interrupted")
    state.blocks = inner.blocks
    solution = inner.finish(infeasible=infeasible)
    if solution.reached_time_limit:
        state.record_time_limit()
    return solution


def _flat(state: SolveState) -> bool:
    """Solve without run contraction; False if the problem is infeasible."""
    state.enter("reduce")
    _offer_greedy(state)
    reduced = ReducedProblem(Network.from_problem(state.problem, limited=False), state)
    reduced.reduce()
    if reduced.network.infeasible:
        return False
    if not state.problem.can_bind:
        return _solve_reduced(reduced)
    # An optimum without the limit that satisfies it is the optimum, and its proof is far cheaper.
    # If it seems to exceed the limit, the solve would be in vain.
    if not state.closed and _seems_unlimited(reduced):
        _solve_reduced(reduced)
    return state.closed or _under_limit(state)


def _seems_unlimited(reduced: ReducedProblem) -> bool:
    """True if a good choice found without the limit satisfies it."""
    reduced.state.enter("try without the limit")
    start = {v: int(x.cost.argmin()) for v, x in reduced.network.variables.items()}
    return reduced.offer(
        CoordinateDescent(reduced.network, effort=reduced.state.effort).improve(start)
    )


def _offer_greedy(state: SolveState) -> None:
    """Offer the choices with least cost and with least usage per node: time may be short."""
    problem = state.problem
    for preferred in ([node.cost for node in problem.nodes], [x.usage for x in problem.nodes]):
        choice = np.array([int(values.argmin()) for values in preferred], dtype=np.intp)
        for group in problem.ties:
            choice[list(group)] = int(np.sum([preferred[v] for v in group], axis=0).argmin())
        state.offer(choice)


def _under_limit(state: SolveState) -> bool:
    """Run all phases under the usage limit; False if the problem is infeasible."""
    state.enter("reduce under the limit")
    reduced = ReducedProblem(Network.from_problem(state.problem), state)
    reduced.reduce()
    return not reduced.network.infeasible and _solve_reduced(reduced)


def _solve_reduced(reduced: ReducedProblem) -> bool:
    """Solve a reduced problem by messages, forests and HiGHS; False if it is infeasible."""
    prices, state = ascend(reduced), reduced.state
    if not reduced.done and is_huge(reduced.network, state.settings):
        search_forests(reduced, prices)
        if state.choice is not None and np.isfinite(state.remaining):
            return True
    return _branch(reduced)


def _branch(reduced: ReducedProblem) -> bool:
    """Close the gap with HiGHS: the relaxation, then branch and bound; False if infeasible."""
    state = reduced.state
    if not (reduced.done or state.closed):
        state.enter("coordinate descent")
        _descend(reduced, {v: int(x.cost.argmin()) for v, x in reduced.network.variables.items()})
    if not (reduced.done or state.closed):
        state.enter("relax")
        if not _relax(reduced):
            return reduced.exhausted()
    if reduced.done or state.closed:
        return state.choice is not None
    return _search_tree(reduced)


def _relax(reduced: ReducedProblem) -> bool:
    """Solve the linear relaxation and drop strategies by its bound; False if it is infeasible."""
    model = linear_model(reduced.network)
    relaxed = _solver(reduced, model).relax()
    if relaxed.status is RunStatus.INFEASIBLE:
        return False
    reduced.state.check()
    if relaxed.x is not None:
        # First choices, then bounds: the better the best choice is, the more strategies are
        # excluded.
        picks = model.rounded(relaxed.x)
        reduced.offer(picks)
        if not reduced.state.closed:
            _descend(reduced, picks, relaxed.prices)
    if relaxed.duals is not None and relaxed.prices is not None:
        bound, excess = model.dual_bound(relaxed.duals, relaxed.prices)
        reduced.raise_bound(bound)
        if not reduced.state.closed:
            reduced.prune(_by_variable(model, bound + excess))
            reduced.reduce()
    return True


def _search_tree(reduced: ReducedProblem) -> bool:
    """Branch and bound until the best choice also fits exactly."""
    state = reduced.state
    state.enter("branch and bound")
    model = linear_model(reduced.network)
    solver = _solver(reduced, model)
    start = None if state.choice is None else reduced.pick_of(state.choice)
    while True:
        outcome = solver.branch(start)
        if outcome.status is RunStatus.INFEASIBLE:
            return reduced.exhausted()
        reduced.raise_bound(outcome.bound)
        if outcome.x is None or outcome.status is RunStatus.STOPPED:
            state.check()
            return True
        picks = model.rounded(outcome.x)
        over = reduced.network.usage(picks) > reduced.network.capacity
        # HiGHS may exceed a limit by its tolerance, and the limit is kept exactly. A cover excludes
        # this choice, no choice that fits, and there are finitely many.
        if reduced.offer(picks) or not over.any():
            return True
        state.count("branch.covers", float(over.sum()))
        solver.forbid(outcome.x, over)


def _solver(reduced: ReducedProblem, model: LinearModel) -> HighsSolver:
    def offer(x: FloatArray) -> None:
        reduced.offer(model.rounded(x))

    return HighsSolver(model, reduced.state, offer=offer, cap=reduced.cap)


def _descend(
    reduced: ReducedProblem, picks: dict[int, int], prices: FloatArray | None = None
) -> None:
    descent = CoordinateDescent(reduced.network, effort=reduced.state.effort)
    if prices is None:
        prices = np.zeros(len(reduced.network.capacity))
    better = descent.repair(descent.improve(picks, prices=prices), prices)
    if better is not None:
        reduced.offer(better)


def _by_variable(model: LinearModel, bounds: FloatArray) -> dict[int, FloatArray]:
    spans = zip(model.variables, model.starts, model.starts[1:], strict=False)
    return {v: bounds[first:last] for v, first, last in spans}


_SOLVERS: Mapping[str, Callable[[SolveState], bool]] = {
    OWN_SOLVER: _solve,
    PLAIN_SOLVER: solve_integer_program,
}
