"""A sample of `make prove`: every route of the solver, on every family of random problems."""

from dataclasses import replace

import numpy as np
import pytest

from autoshard.base.outcome import SolveStatus
from autoshard.solve import (
    Edge,
    Problem,
    ProblemNode,
    Repeat,
    brute_force,
    minimum_usage,
    solve_problem,
)
from benchmarks.random_problems import ROUTES, examine
from tests.support.layered import layered


@pytest.mark.matrix
@pytest.mark.parametrize("route", range(len(ROUTES)), ids=[*ROUTES])
def test_every_route_finds_what_brute_force_finds(route: int) -> None:
    examined = [examine(seed) for seed in range(route, 12 * len(ROUTES), len(ROUTES))]
    assert {e.route for e in examined} == {[*ROUTES][route]}
    assert "runs" in {e.family for e in examined}
    assert [(e.seed, e.failure) for e in examined if e.failure] == []


def test_a_choice_with_a_pair_that_reductions_dropped_does_not_start_branch_and_bound() -> None:
    assert examine(15_603).failure == ""


def test_choices_of_infinite_price_have_no_groups_to_combine() -> None:
    assert examine(6_701).failure == ""


def test_relaxed_choices_of_infinite_price_give_no_least_limit() -> None:
    assert examine(88_718).failure == ""


def test_runs_without_an_allowed_choice_are_infeasible() -> None:
    forbidden, index = np.full((2, 2), np.inf), np.arange(2)
    node = ProblemNode(np.zeros(2), np.array([0.0, 1.0]), (0, 1))
    edges = tuple(Edge(v, v + 1, forbidden, index, index) for v in range(3))
    problem = Problem((node,) * 4, edges, (), 3.0, (Repeat(((0,), (1,), (2,), (3,))),))
    assert solve_problem(problem).status is SolveStatus.INFEASIBLE


def test_usage_that_is_never_alive_does_not_count() -> None:
    usage = np.array([5.0, 4.0])
    nodes = (
        ProblemNode(np.zeros(2), usage, (0, 1)),
        ProblemNode(np.zeros(2), 2.0**40 * usage, (1, 1)),
    )
    index, differ = np.arange(2), np.array([[0.0, np.inf], [np.inf, 0.0]])
    assert minimum_usage(Problem(nodes, (Edge(0, 1, differ, index, index),))) == 4.0


@pytest.mark.parametrize("seed", range(8))
def test_small_problems_with_wrong_hints_are_proven_optimal(seed: int) -> None:
    problem = layered(seed, num_layers=3, num_inner=1, num_shared=1)
    rng = np.random.default_rng(seed)
    nodes = tuple(
        replace(n, usage=rng.integers(0, 6, n.num_strategies).astype(float), interval=(0, 1))
        for n in problem.nodes
    )
    order = rng.permutation(6).reshape(3, 2).tolist()
    hints = (Repeat(tuple(map(tuple, order))),)
    most = sum(node.usage.max() for node in nodes)
    wrong = replace(problem, nodes=nodes, repeats=hints, usage_limit=most / 2)
    found, truth = solve_problem(wrong), brute_force(wrong)
    assert found.status is truth.status
    assert found.objective == pytest.approx(truth.objective)


@pytest.mark.parametrize(("later", "earlier"), [(3, 2), (2, 1), (1, 0)])
@pytest.mark.parametrize("seed", range(4))
def test_a_link_of_one_group_to_an_inner_node_of_another_is_kept(
    seed: int, later: int, earlier: int
) -> None:
    problem = layered(seed, num_layers=4, num_inner=1, num_shared=0)
    groups = problem.repeats[0].instances
    source, target = groups[later][1], groups[earlier][0]
    best = brute_force(problem).choice
    assert best is not None
    # The link makes a pair cheapest that the best choice without it does not have.
    prices = np.zeros((3, 3))
    prices[(best[source] + 1) % 3, (best[target] + 1) % 3] = -50.0
    extra = Edge(source, target, prices, np.arange(3), np.arange(3))
    linked = replace(problem, edges=(*problem.edges, extra))
    found, truth = solve_problem(linked), brute_force(linked)
    assert found.status is SolveStatus.OPTIMAL
    assert found.objective == pytest.approx(truth.objective)
