"""The least usage limit that a problem can live with."""

from dataclasses import replace

import numpy as np
from scipy import sparse

from autoshard.arrays import FloatArray, IntArray
from autoshard.solve.highs import HighsSolver
from autoshard.solve.linear import LinearModel, linear_model
from autoshard.solve.network import Network
from autoshard.solve.problem import Problem
from autoshard.solve.reductions import (
    Chain,
    DropDominated,
    DropForbidden,
    EliminateNeighbours,
    FoldSingles,
    MergeTies,
    SimplifyLinks,
)
from autoshard.solve.repeats import Outcome, solve_repeats
from autoshard.solve.search import CancelToken, Interrupted, Search


def minimum_usage(
    problem: Problem, *, time_limit: float | None = None, cancel: CancelToken | None = None
) -> float:
    """Least peak usage of any choice of finite price, whatever that price.

    Where no pair of strategies is forbidden, reductions answer at once; otherwise runs of
    equal groups are made use of, to a relative accuracy of 1e-5, or HiGHS minimises the peak,
    to one of about 1e-9.

    Args:
        problem: what to look at; its own usage limit is ignored.
        time_limit: seconds; afterwards the least peak found so far is returned, which is
            an upper bound of the answer.
        cancel: ends the search early, as the time limit does.

    Returns:
        the least usage limit that admits a choice; inf where none does.
    """
    search = Search(problem, time_limit=time_limit, cancel=cancel)
    free, room = _unpriced(problem)
    try:
        least = _least_of_runs(free, time_limit, search)
        return _least_of_all(problem, free, room, search) if least is None else least
    except Interrupted:
        return float("inf")


def _least_of_runs(free: Problem, time_limit: float | None, cancel: CancelToken) -> float | None:
    """The answer by runs of equal groups; None where they do not give one."""
    if not free.repeats:
        return None
    search = Search(replace(free, usage_limit=0.0), time_limit=time_limit, cancel=cancel)
    outcome = solve_repeats(search)
    if search.choice is not None:
        return 0.0
    return search.statistics.get("minimum_usage") if outcome is Outcome.INFEASIBLE else None


def _least_of_all(problem: Problem, free: Problem, room: float, search: Search) -> float:
    """The answer by reductions and HiGHS."""
    network = Network.from_problem(free)
    links = SimplifyLinks()
    chain = Chain(
        (
            MergeTies(),
            DropForbidden(),
            FoldSingles(),
            links,
            EliminateNeighbours(links),
            DropDominated(),
        ),
        search.check,
    )
    choice: IntArray = np.zeros(len(problem.nodes), dtype=np.intp)
    inverse = chain.apply(network)
    picks = {} if network.infeasible else _least_peak(network, room, search)
    if network.infeasible or picks is None:
        return float("inf")
    for v, variable in network.variables.items():
        choice[v] = variable.labels[picks[v]]
    inverse(choice)
    return problem.peak_usage(choice)


def _unpriced(problem: Problem) -> tuple[Problem, float]:
    """The problem with every finite price zero and a limit that nobody can reach."""
    nodes = tuple(replace(node, cost=_zeroed(node.cost)) for node in problem.nodes)
    matrices: dict[int, FloatArray] = {}
    edges = tuple(
        replace(edge, prices=matrices.setdefault(id(edge.cost), _zeroed(edge.cost)))
        for edge in problem.edges
    )
    finite = (node.usage[np.isfinite(node.usage)] for node in problem.nodes)
    room = max(sum(float(usage.max(initial=0.0)) for usage in finite), 1e-300)
    return Problem(nodes, edges, problem.ties, room, problem.repeats), room


def _zeroed(prices: FloatArray) -> FloatArray:
    return np.where(np.isfinite(prices), 0.0, np.inf)


def _least_peak(network: Network, room: float, search: Search) -> dict[int, int] | None:
    """A position per variable whose peak is least, or None where the time ran out."""
    if not network.variables:
        return {}
    model = linear_model(network)
    # One more column is the peak in units of the room; it pays for the usage of everybody.
    peak = sparse.csr_array(np.full((len(model.capacity), 1), -room))
    model = LinearModel(
        np.append(np.zeros_like(model.cost), room),
        sparse.hstack([model.matrix, sparse.csr_array((len(model.right), 1))], format="csr"),
        model.right,
        sparse.hstack([model.usage, peak], format="csr"),
        model.capacity - room,
        np.append(model.starts, len(model.cost) + 1),
        model.variables,
        0.0,
    )
    outcome = HighsSolver(model, search, offer=lambda _: None).branch(None)
    return None if outcome.x is None else model.rounded(outcome.x)[0]
