"""Usage of edges, stated as usage of nodes."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from autoshard.solve.problem import Edge, Problem, ProblemNode, UsageLimit
from autoshard.solve.state import Solution


def without_edge_usage(problem: Problem) -> Problem:
    """An equivalent problem in which only nodes use resources.

    An edge with usage becomes a node with a strategy for each entry of its matrix, which must be
    the entry at the strategies of the two ends. These nodes follow those of the problem, so the
    first strategies of a choice are a choice of the problem. Hints of repeated structure are
    dropped.
    """
    if not problem.using_edges:
        return problem
    first = len(problem.nodes)
    place = {i: first + number for number, i in enumerate(problem.using_edges)}
    added = [_node(problem.edges[i]) for i in place]
    kept = [edge for i, edge in enumerate(problem.edges) if i not in place]
    joined = [edge for i, v in place.items() for edge in _joins(problem.edges[i], v)]
    main = problem.resources[0]
    for i, usage in main.edges.items():
        node = added[place[i] - first]
        added[place[i] - first] = replace(node, usage=usage.ravel())
    further = (
        UsageLimit(x.limit, {**x.nodes, **{place[i]: u.ravel() for i, u in x.edges.items()}})
        for x in problem.further_limits
    )
    return Problem(
        (*problem.nodes, *added),
        (*kept, *joined),
        problem.ties,
        problem.usage_limit,
        further_limits=tuple(further),
        cutoff=problem.cutoff,
    )


def solution_of(problem: Problem, solution: Solution) -> Solution:
    """The solution of a problem from that of the problem `without_edge_usage`."""
    if solution.choice is None:
        return solution
    return replace(solution, choice=solution.choice[: len(problem.nodes)])


def _node(edge: Edge) -> ProblemNode:
    """A node with a strategy for each entry of an edge's matrix, without usage."""
    return ProblemNode(edge.cost.ravel(), np.zeros(edge.cost.size), edge.interval)


def _joins(edge: Edge, v: int) -> Iterator[Edge]:
    """Edges that make the node of an edge pick the entry at the strategies of the ends."""
    row, col = np.divmod(np.arange(edge.cost.size), edge.cost.shape[1])
    yield Edge.equal(edge.source, v, edge.rows, row)
    yield Edge.equal(edge.target, v, edge.cols, col)
