"""Plain solvers: brute force for small problems, and the solvers that cvxpy finds."""

import importlib
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse

from autoshard.base.arrays import FloatArray, IntArray
from autoshard.base.outcome import SolveStatus
from autoshard.errors import OptionError
from autoshard.solve.problem import Problem, UsageLimit
from autoshard.solve.programs.integer_program import IntegerProgram
from autoshard.solve.programs.linear_program import LinearModel
from autoshard.solve.state import Interrupted, Solution, SolveState

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
    heads, place = np.unique(problem.tie_heads, return_inverse=True)
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


_SLACK = 5e-7
"""Relative tolerance of another solver's optimum."""


class _OptionNames(NamedTuple):
    """Names of the options of a solver in cvxpy.

    Attributes:
        seconds: of the time limit.
        gap: of the relative gap; empty if the default is exact.
        group: the argument that holds these options as a dictionary; empty if they are arguments.
    """

    seconds: str
    gap: str = ""
    group: str = ""


_OPTIONS: Mapping[str, _OptionNames] = {
    "CBC": _OptionNames("maximumSeconds"),
    "COPT": _OptionNames("TimeLimit", "RelGap"),
    "CPLEX": _OptionNames("timelimit", "mip.tolerances.mipgap", "cplex_params"),
    "GUROBI": _OptionNames("TimeLimit", "MIPGap"),
    "HIGHS": _OptionNames("time_limit", "mip_rel_gap"),
    "MOSEK": _OptionNames("MSK_DPAR_MIO_MAX_TIME", "MSK_DPAR_MIO_TOL_REL_GAP", "mosek_params"),
    "SCIP": _OptionNames("limits/time", "limits/gap", "scip_params"),
    "SCIPY": _OptionNames("time_limit", "mip_rel_gap", "scipy_options"),
}
_EXACT: Mapping[str, dict[str, float]] = {
    "HIGHS": {"mip_feasibility_tolerance": 1e-9},
    "GUROBI": {"FeasibilityTol": 1e-9, "IntFeasTol": 1e-9},
}


def solve_with_cvxpy(state: SolveState, *, solver: str) -> bool:
    """State the problem as one integer program, without reductions, and solve it.

    cvxpy does not report the bound of a solver: if the solver reports an optimum, the bound is 5e-7
    (relative to the sum of absolute prices), or half of the gap, below the objective.

    Args:
        state: of the solve of the problem; it is not looked at while the solver runs.
        solver: name of an installed mixed-integer solver that cvxpy supports.

    Returns:
        False if the problem is infeasible.

    Raises:
        OptionError: cvxpy or the solver is not installed, or it takes no time limit here.
        Interrupted: the solver stopped without an optimum.
    """
    solver = solver.upper()
    cvxpy = _cvxpy_with(solver)
    options = _options(solver, state)
    if state.problem.has_negative_limit:
        return False
    state.enter("state the integer program")
    program = IntegerProgram(state.problem)
    if not program.has_choices:
        return False
    state.enter(f"solve with {solver}")
    covers: list[FloatArray] = []
    while True:
        columns, status = _solved(
            cvxpy, program.model, solver=solver, options=options, covers=covers
        )
        over = [] if columns is None else program.covers(columns)
        if not over:
            break
        covers += over
    if status == cvxpy.INFEASIBLE:
        return False
    if columns is None or not state.offer(program.choice(columns)) or status != cvxpy.OPTIMAL:
        raise Interrupted
    slack = max(0.5 * state.gap, _SLACK)
    state.raise_bound(state.objective - slack * state.magnitude)
    return True


def _options(solver: str, state: SolveState) -> dict[str, Any]:
    """Options of a solver, for exactness, gap and time.

    Raises:
        OptionError: the state has a time limit, which cannot be set here.
    """
    if solver not in _OPTIONS:
        if np.isinf(state.remaining):
            return {}
        known = ", ".join(sorted(_OPTIONS))
        raise OptionError(f"no time limit can be set for {solver}; use {known}, or ilp")
    names, options = _OPTIONS[solver], dict(_EXACT.get(solver, {}))
    if names.gap:
        options[names.gap] = 0.5 * state.gap
    if np.isfinite(state.remaining):
        options[names.seconds] = float(state.remaining)
    return {names.group: options} if names.group else options


def _cvxpy_with(solver: str) -> Any:
    try:
        cvxpy = importlib.import_module("cvxpy")
    except ImportError as error:
        raise OptionError(
            f"the solver {solver} needs cvxpy: install autoshard[reference], or use ilp, which "
            f"needs nothing more"
        ) from error
    installed = importlib.import_module("cvxpy.reductions.solvers.defines").INSTALLED_MI_SOLVERS
    if solver not in installed:
        raise OptionError(
            f"cvxpy finds no solver {solver} of integer programs; install it, or use ilp, "
            f"{', '.join(installed)}"
        )
    return cvxpy


def _solved(
    cvxpy: Any,
    model: LinearModel,
    *,
    solver: str,
    options: dict[str, Any],
    covers: Sequence[FloatArray],
) -> tuple[FloatArray | None, str]:
    """The value of each binary column, and the status that the solver reports."""
    split = model.num_strategies
    scale, row_scale = model.cost_scale, model.row_scale
    strategies = cvxpy.Variable(split, boolean=True)
    flows = cvxpy.Variable(max(len(model.cost) - split, 1), nonneg=True)
    usage = model.usage[:, :split]
    rows = [
        model.matrix[:, :split] @ strategies + _padded(model.matrix[:, split:]) @ flows
        == model.right,
        sparse.diags_array(1.0 / row_scale) @ usage @ strategies <= model.capacity / row_scale,
        *(cover @ strategies <= cover.sum() - 1.0 for cover in covers),
    ]
    rows = [row for row in rows if row.size]
    total = scale * (model.cost[:split] @ strategies)
    if len(model.cost) > split:
        total = total + scale * (model.cost[split:] @ flows)
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
