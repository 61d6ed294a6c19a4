"""The least usage limit for which a problem is feasible."""

from dataclasses import replace

import numpy as np
from scipy import sparse

from autoshard.base.arrays import FloatArray, IntArray
from autoshard.base.limits import CancelToken
from autoshard.solve.network import Network
from autoshard.solve.presolve import (
    DropDominated,
    EliminateNeighbours,
    EnforceArcConsistency,
    FixVariables,
    MergeTies,
    NormalizeLinks,
    Presolve,
)
from autoshard.solve.problem import Problem
from autoshard.solve.programs.highs import HighsSolver
from autoshard.solve.programs.linear_program import LinearModel, linear_model
from autoshard.solve.runs import RunOutcome, solve_runs
from autoshard.solve.state import Interrupted, SolveState


def minimum_usage(
    problem: Problem, *, time_limit: float | None = None, cancel: CancelToken | None = None
) -> float:
    """Least peak usage of all choices of finite price.

    If no pair of strategies is forbidden, reductions solve it. Otherwise run contraction solves it
    to a relative accuracy of 1e-5, or HiGHS to one of about 1e-9.

    Args:
        problem: the problem; its own usage limit is ignored.
        time_limit: seconds; afterwards the least peak found so far is returned, which is
            an upper bound of the answer: inf if none was found.
        cancel: stops early, as the time limit does.

    Returns:
        the least usage limit that admits a choice; inf if none does.
    """
    state = SolveState(problem, time_limit=time_limit, cancel=cancel)
    free, slack = _unpriced(problem)
    try:
        least = _least_of_runs(free, time_limit, state)
        return _least_of_all(problem, free, slack, state) if least is None else least
    except Interrupted:
        return float("inf")


def _least_of_runs(free: Problem, time_limit: float | None, cancel: CancelToken) -> float | None:
    """Least peak usage by run contraction; None if the problem cannot be solved by it."""
    if not free.repeats:
        return None
    state = SolveState(free.with_limit(0.0), time_limit=time_limit, cancel=cancel)
    outcome = solve_runs(state)
    if state.choice is not None:
        return 0.0
    return state.statistics.get("minimum_usage") if outcome is RunOutcome.INFEASIBLE else None


def _least_of_all(problem: Problem, free: Problem, slack: float, state: SolveState) -> float:
    """Least peak usage by reductions and HiGHS."""
    network = Network.from_problem(free)
    links = NormalizeLinks()
    # `SimplifyLimits` must not be among them: no choice exceeds this limit, so it would drop all
    # checkpoints, whose peak is what is minimised.
    presolve = Presolve(
        (
            MergeTies(),
            EnforceArcConsistency(state.effort),
            FixVariables(),
            links,
            EliminateNeighbours(links),
            DropDominated(),
        ),
        state.effort,
    )
    choice: IntArray = np.zeros(len(problem.nodes), dtype=np.intp)
    inverse = presolve.apply(network)
    picks = {} if network.infeasible else _least_peak(network, slack, state)
    if network.infeasible or picks is None:
        return float("inf")
    for v, variable in network.variables.items():
        choice[v] = variable.labels[picks[v]]
    inverse(choice)
    return problem.peak_usage(choice)


def _unpriced(problem: Problem) -> tuple[Problem, float]:
    """The problem with every finite price zero and a limit that no choice exceeds; the limit."""
    nodes = tuple(replace(node, cost=_zeroed(node.cost)) for node in problem.nodes)
    matrices: dict[int, FloatArray] = {}
    edges = tuple(
        replace(edge, prices=matrices.setdefault(id(edge.cost), _zeroed(edge.cost)))
        for edge in problem.edges
    )
    alive = (node.usage for node in problem.nodes if node.interval[0] < node.interval[1])
    finite = (usage[np.isfinite(usage)] for usage in alive)
    slack = max(sum(float(usage.max(initial=0.0)) for usage in finite), 1.0)
    return Problem(nodes, edges, problem.ties, slack, problem.repeats), slack


def _zeroed(prices: FloatArray) -> FloatArray:
    return np.where(np.isfinite(prices), 0.0, np.inf)


def _least_peak(network: Network, slack: float, state: SolveState) -> dict[int, int] | None:
    """A position per variable with the least peak; None if the time ran out."""
    if not network.variables:
        return {}
    model = linear_model(network)
    # One more column is the peak in units of the slack, subtracted from every usage row: columns of
    # the model lie between 0 and 1, and no peak exceeds the slack.
    peak = sparse.csr_array(np.full((len(model.capacity), 1), -slack))
    model = LinearModel(
        np.append(np.zeros_like(model.cost), slack),
        sparse.hstack([model.matrix, sparse.csr_array((len(model.right), 1))], format="csr"),
        model.right,
        sparse.hstack([model.usage, peak], format="csr"),
        model.capacity - slack,
        np.append(model.starts, len(model.cost) + 1),
        model.variables,
        0.0,
    )
    outcome = HighsSolver(model, state, offer=lambda _: None).branch(None)
    return None if outcome.x is None else model.rounded(outcome.x)
