"""Reference solvers for tests: brute force, and the integer program stated in cvxpy."""

import importlib
import time
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import sparse

from autoshard.arrays import FloatArray, IntArray
from autoshard.errors import OptionError
from autoshard.outcome import SolveStatus
from autoshard.solve.edge_usage import without_edge_usage
from autoshard.solve.linear_program import LinearModel, linear_model
from autoshard.solve.network import Network
from autoshard.solve.presolve.drop_strategies import subtract_least
from autoshard.solve.problem import Problem, UsageLimit
from autoshard.solve.state import Solution

MAX_CHOICES = 1 << 21


def brute_force(problem: Problem) -> Solution:
    """Price every choice and return the cheapest that is allowed.

    Args:
        problem: a small problem: the product of the numbers of strategies, where tied
            nodes count once, must not exceed `MAX_CHOICES`.

    Raises:
        OptionError: there are too many choices.
    """
    start = time.perf_counter()
    choices = _all_choices(problem)
    prices: FloatArray = np.zeros(len(choices))
    for i, node in enumerate(problem.nodes):
        prices = prices + node.cost[choices[:, i]]
    for edge in problem.edges:
        rows, cols = edge.rows[choices[:, edge.source]], edge.cols[choices[:, edge.target]]
        prices = prices + edge.cost[rows, cols]
    for limit in problem.resources:
        prices = np.where(_peaks(problem, limit, choices) <= limit.limit, prices, np.inf)
    prices = np.where(prices <= problem.cutoff, prices, np.inf)
    best = int(prices.argmin())
    value, elapsed = float(prices[best]), time.perf_counter() - start
    if not np.isfinite(value):
        return Solution(SolveStatus.INFEASIBLE, None, value, value, elapsed)
    return Solution(SolveStatus.OPTIMAL, choices[best], value, value, elapsed)


def _all_choices(problem: Problem) -> IntArray:
    """Every choice that keeps the ties, shape [number of choices, N]."""
    head = np.arange(len(problem.nodes))
    for group in problem.ties:
        head[list(group)] = min(group)
    heads, place = np.unique(head, return_inverse=True)
    sizes = [problem.nodes[v].num_strategies for v in heads]
    total = float(np.prod(np.array(sizes, dtype=np.float64)))
    if total > MAX_CHOICES:
        raise OptionError(
            f"brute_force would price {total:.3g} choices, more than {MAX_CHOICES}; "
            "use solve_problem"
        )
    grid = np.indices(sizes, dtype=np.intp).reshape(len(sizes), int(total))
    return grid[place].T


def _peaks(problem: Problem, limit: UsageLimit, choices: IntArray) -> FloatArray:
    """Largest usage over time of a resource by each choice, shape [number of choices]."""
    uses = [(problem.nodes[i].interval, x[choices[:, i]]) for i, x in limit.nodes.items()]
    for i, usage in limit.edges.items():
        edge = problem.edges[i]
        rows, cols = edge.rows[choices[:, edge.source]], edge.cols[choices[:, edge.target]]
        uses.append((edge.interval, usage[rows, cols]))
    peaks: FloatArray = np.zeros(len(choices))
    for t in {first for (first, last), _ in uses if first < last}:
        alive = [use for (first, last), use in uses if first <= t < last]
        peaks = np.maximum(peaks, np.add.reduce(alive))
    return peaks


_SLACK = 1e-6
"""Relative tolerance of another solver's optimum."""
_LARGEST_COST = 1e4
_EXACT: dict[str, dict[str, float]] = {
    "HIGHS": {"mip_rel_gap": 0.0, "mip_feasibility_tolerance": 1e-9},
    "GUROBI": {"MIPGap": 0.0, "FeasibilityTol": 1e-9, "IntFeasTol": 1e-9},
}
_TIME_OPTIONS = {"CBC": "maximumSeconds", "GUROBI": "TimeLimit", "HIGHS": "time_limit"}


def solve_reference(
    problem: Problem, *, solver: str = "HIGHS", time_limit: float | None = None
) -> Solution:
    """State the problem as one integer program, without reductions, and solve it.

    Args:
        problem: the problem.
        solver: name of an installed mixed-integer solver that cvxpy supports.
        time_limit: seconds; for CBC, GUROBI and HIGHS.

    Returns:
        the solution. cvxpy does not report the bound of a solver, so the bound is 1e-6 (relative)
        below the objective if the solver reports an optimum, else -inf.

    Raises:
        OptionError: cvxpy or the solver is not installed, or it takes no time limit here.
    """
    start = time.perf_counter()
    solver = solver.upper()
    cvxpy = _cvxpy_with(solver)
    options: dict[str, Any] = dict(_EXACT.get(solver, {}))
    if time_limit is not None:
        if solver not in _TIME_OPTIONS:
            known = ", ".join(sorted(_TIME_OPTIONS))
            raise OptionError(
                f"no time limit can be set for {solver}; leave time_limit out, or use {known}"
            )
        options[_TIME_OPTIONS[solver]] = float(time_limit)
    network = Network.from_problem(without_edge_usage(problem))
    # Large numbers that differ in the last digits only would be equal within tolerances.
    subtract_least(network)
    model = linear_model(network)
    covers: list[FloatArray] = []
    while True:
        strategies, status = _solved(
            cvxpy, network, model, solver=solver, options=options, covers=covers
        )
        over = _exceeded(model, strategies)
        if not len(over):
            break
        covers.extend(over)
    elapsed = time.perf_counter() - start
    if status == cvxpy.INFEASIBLE or min(x.limit for x in problem.resources) < 0:
        return Solution(SolveStatus.INFEASIBLE, None, np.inf, np.inf, elapsed)
    choice = None if strategies is None else _choice(model, strategies)[: len(problem.nodes)]
    if choice is None or not problem.fits(choice):
        return Solution(SolveStatus.TIMED_OUT, None, np.inf, -np.inf, elapsed)
    value = problem.objective(choice)
    if value > problem.cutoff:
        proven = status == cvxpy.OPTIMAL
        none = SolveStatus.INFEASIBLE if proven else SolveStatus.TIMED_OUT
        return Solution(none, None, np.inf, np.inf if proven else -np.inf, elapsed)
    if status != cvxpy.OPTIMAL:
        return Solution(SolveStatus.FEASIBLE, choice, value, -np.inf, elapsed)
    finite = model.cost[np.isfinite(model.cost)]
    slack = _SLACK * max(abs(value), float(np.abs(finite).max(initial=0.0)))
    return Solution(SolveStatus.OPTIMAL, choice, value, value - slack, elapsed)


def _cvxpy_with(solver: str) -> Any:
    try:
        cvxpy = importlib.import_module("cvxpy")
    except ImportError as error:
        raise OptionError(
            "the reference model needs cvxpy; install autoshard[reference]"
        ) from error
    installed = cvxpy.installed_solvers()
    if solver not in installed:
        raise OptionError(
            f"cvxpy does not find the solver {solver}; install it, or use one of {installed}"
        )
    return cvxpy


def _exceeded(model: LinearModel, strategies: FloatArray | None) -> FloatArray:
    """Rows of the strategies that exceed the limit together, one per time, shape [C, S].

    A solver counts usage with a tolerance. Usage is not negative, so these strategies cannot all
    be chosen, and a constraint excludes them.
    """
    if strategies is None:
        return np.zeros((0, 0))
    picks, _ = model.rounded(strategies)
    chosen = np.zeros(model.num_strategies)
    chosen[[start + s for start, s in zip(model.starts.tolist(), picks.values(), strict=False)]] = 1
    usage = model.usage[:, : model.num_strategies]
    users = usage[np.flatnonzero(usage @ chosen > model.capacity)].toarray()
    return np.where(users > 0, chosen, 0.0)


def _solved(
    cvxpy: Any,
    network: Network,
    model: LinearModel,
    *,
    solver: str,
    options: dict[str, Any],
    covers: Sequence[FloatArray],
) -> tuple[np.ndarray[Any, np.dtype[np.float64]] | None, str]:
    """Value of each strategy's column, and the status that the solver reports."""
    split = model.num_strategies
    allowed = np.isfinite(model.cost)
    cost = np.where(allowed, model.cost, 0.0)
    scale = _LARGEST_COST / max(float(np.abs(cost).max(initial=0.0)), 1e-300)
    strategies = cvxpy.Variable(split, boolean=True)
    flows = cvxpy.Variable(max(len(cost) - split, 1), nonneg=True)
    usage = model.usage[:, :split]
    row_scale = np.maximum(abs(usage).max(axis=1).toarray().ravel(), 1.0)
    rows = [
        model.matrix[:, :split] @ strategies + _padded(model.matrix[:, split:]) @ flows
        == model.right,
        strategies <= allowed[:split].astype(np.float64),
        sparse.diags_array(1.0 / row_scale) @ usage @ strategies <= model.capacity / row_scale,
        _tie_rows(network, model) @ strategies == 0.0,
        *(cover @ strategies <= cover.sum() - 1.0 for cover in covers),
    ]
    rows = [row for row in rows if row.size]
    total = scale * (cost[:split] @ strategies)
    if len(cost) > split:
        total = total + scale * (cost[split:] @ flows)
    program = cvxpy.Problem(cvxpy.Minimize(total), rows)
    with warnings.catch_warnings():
        # cvxpy warns if a solver stops early; the status shows it too.
        warnings.simplefilter("ignore")
        try:
            program.solve(solver=solver, **options)
        except cvxpy.error.SolverError:
            return None, "solver_error"
    return strategies.value, program.status


def _padded(matrix: sparse.csr_array) -> sparse.csr_array:
    """Add a column of zeros to a matrix without columns: cvxpy has no empty variables."""
    return matrix if matrix.shape[1] else sparse.csr_array((matrix.shape[0], 1))


def _tie_rows(network: Network, model: LinearModel) -> sparse.csr_array:
    """Rows that are zero if and only if tied nodes pick the same strategy."""
    start = dict(zip(model.variables, model.starts.tolist(), strict=False))
    heads, others = [np.zeros(0, np.intp)], [np.zeros(0, np.intp)]
    for head, *rest in network.ties:
        for v in rest:
            span = np.arange(len(network.variables[v].cost))
            heads.append(start[head] + span)
            others.append(start[v] + span)
    plus, minus = np.concatenate(heads), np.concatenate(others)
    row = np.arange(len(plus))
    values = np.concatenate([np.ones(len(plus)), -np.ones(len(plus))])
    index = (np.concatenate([row, row]), np.concatenate([plus, minus]))
    return sparse.csr_array((values, index), shape=(len(plus), model.num_strategies))


def _choice(model: LinearModel, strategies: np.ndarray[Any, np.dtype[np.float64]]) -> IntArray:
    picks, _ = model.rounded(strategies)
    choice = np.zeros(len(model.variables), dtype=np.intp)
    for v, s in picks.items():
        choice[v] = s
    return choice
