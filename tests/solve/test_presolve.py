from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.base.arrays import IntArray
from autoshard.solve import Edge, Problem, ProblemNode, brute_force
from autoshard.solve.network import Network, Term
from autoshard.solve.presolve import (
    DropDominated,
    EliminateNeighbours,
    EnforceArcConsistency,
    MergeTies,
    NormalizeLinks,
    Presolve,
    Reduction,
    SimplifyLimits,
    default_reductions,
    sequence,
)
from autoshard.solve.settings import Effort

RandomProblem = Callable[[int], Problem]
REDUCTIONS = tuple(reduction.name for reduction in default_reductions(Effort()))
some_seeds = st.integers(0, 2**32 - 1)


def named(*names: str) -> list[Reduction]:
    """New reductions of the default chain, by name."""
    chain = {reduction.name: reduction for reduction in default_reductions(Effort())}
    return [chain[name] for name in names]


def as_problem(network: Network) -> tuple[Problem, IntArray]:
    """The problem of a network without the constant, and the variable of each node.

    A variable with several terms becomes several tied nodes. Constant usage is added at each
    checkpoint whose capacity is less than the largest one, so that one limit suffices; such
    nodes have the variable -1.
    """
    nodes: list[ProblemNode] = []
    owners: list[int] = []
    ties: list[tuple[int, ...]] = []
    for v, variable in network.variables.items():
        terms = variable.terms or (Term(0, 0, np.zeros(len(variable.cost))),)
        cost = variable.cost
        if len(terms) > 1:
            ties.append(tuple(range(len(nodes), len(nodes) + len(terms))))
        for term in terms:
            nodes.append(ProblemNode(cost, term.usage, (term.first, term.last)))
            owners.append(v)
            cost = np.zeros(len(cost))
    place: dict[int, int] = {}
    for i, v in enumerate(owners):
        place.setdefault(v, i)
    edges = [
        Edge(place[u], place[v], link.matrix.values, link.rows, link.cols)
        for u, v, link in network.pairs()
    ]
    limit = float(network.capacity.max(initial=0.0)) if len(network.capacity) else np.inf
    for time, slack in enumerate(network.capacity):
        nodes.append(ProblemNode(np.zeros(1), np.array([limit - slack]), (time, time + 1)))
        owners.append(-1)
    return Problem(tuple(nodes), tuple(edges), tuple(ties), limit), np.array(owners, np.intp)


def assert_reduces_exactly(problem: Problem, reductions: Sequence[Reduction]) -> None:
    """The least price is the same, and the inverse of a best choice is a best choice."""
    truth = brute_force(problem)
    network = Network.from_problem(problem)
    steps = [MergeTies(), *reductions]
    inverse = sequence([step.apply(network) for step in steps if not network.infeasible])
    if network.infeasible:
        assert truth.choice is None
        return
    rest, owners = as_problem(network)
    best = brute_force(rest)
    assert (best.choice is None) == (truth.choice is None)
    if truth.choice is None:
        return
    magnitude = sum(abs(n.cost[np.isfinite(n.cost)]).max(initial=0) for n in problem.nodes)
    magnitude += sum(abs(e.cost[np.isfinite(e.cost)]).max(initial=0) for e in problem.edges)
    assert abs(best.objective + network.constant - truth.objective) <= 1e-12 * magnitude
    choice = np.full(len(problem.nodes), -1)
    for v, s in zip(owners, best.choice, strict=True):
        if v >= 0:
            choice[v] = network.variables[v].labels[s]
    inverse(choice)
    assert choice.min() >= 0
    assert problem.is_feasible(choice)
    assert abs(problem.objective(choice) - truth.objective) <= 1e-12 * magnitude


@pytest.mark.parametrize("name", REDUCTIONS)
@settings(max_examples=60, derandomize=True, deadline=None)
@given(seed=some_seeds)
def test_each_reduction_keeps_the_optimum(
    random_problem: RandomProblem, name: str, seed: int
) -> None:
    assert_reduces_exactly(random_problem(seed), named(name))


@pytest.mark.parametrize("name", REDUCTIONS)
def test_random_problems_need_each_reduction(random_problem: RandomProblem, name: str) -> None:
    assert any(is_changed(random_problem(seed), *named("merge_ties", name)) for seed in range(200))


def is_changed(problem: Problem, first: Reduction, second: Reduction) -> bool:
    """Whether a reduction still finds something to do after another one."""
    network = Network.from_problem(problem)
    first.apply(network)
    before = network.num_strategies, len(network.capacity), dict(network.changes)
    second.apply(network)
    after = network.num_strategies, len(network.capacity), dict(network.changes)
    return first.name == second.name or before != after


@settings(max_examples=60, derandomize=True, deadline=None)
@given(seed=some_seeds, order=st.permutations(REDUCTIONS))
def test_reductions_may_come_in_any_order(
    random_problem: RandomProblem, seed: int, order: list[str]
) -> None:
    assert_reduces_exactly(random_problem(seed), named(*order))


@settings(max_examples=60, derandomize=True, deadline=None)
@given(seed=some_seeds)
def test_the_chain_keeps_the_optimum(contested_problem: RandomProblem, seed: int) -> None:
    assert_reduces_exactly(contested_problem(seed), [Presolve(default_reductions(Effort()))])


def free_node(*costs: float) -> ProblemNode:
    return ProblemNode(np.array(costs), np.zeros(len(costs)))


def test_tied_nodes_keep_their_own_live_intervals() -> None:
    """The members never live together, so the pair fits although the sum of both would not."""
    nodes = tuple(
        ProblemNode(np.array([0.0, 9.0]), np.array([5.0, 1.0]), (t, t + 1)) for t in (0, 1)
    )
    network = Network.from_problem(Problem(nodes, (), ((0, 1),), usage_limit=5.0))
    MergeTies().apply(network)
    (merged,) = network.variables.values()
    assert [(term.first, term.last) for term in merged.terms] == [(0, 1), (1, 2)]
    SimplifyLimits().apply(network)
    assert len(network.capacity) == 0
    assert len(merged.cost) == 2


def test_a_link_inside_a_tie_becomes_its_diagonal() -> None:
    cost = np.array([[1.0, 50.0], [50.0, 2.0]])
    index = np.arange(2)
    problem = Problem(
        (free_node(0, 0), free_node(10, 20)), (Edge(0, 1, cost, index, index),), ((0, 1),)
    )
    network = Network.from_problem(problem)
    MergeTies().apply(network)
    assert network.variables[0].cost.tolist() == [11.0, 22.0]
    assert list(network.pairs()) == []


def test_parallel_edges_add_up_on_their_common_classes() -> None:
    index = np.arange(3)
    coarse = Edge(1, 0, np.array([[10.0, 20.0]]), np.zeros(3, np.intp), np.array([0, 1, 1]))
    fine = Edge(0, 1, np.arange(9.0).reshape(3, 3), index, index)
    problem = Problem((free_node(0, 0, 0), free_node(0, 0, 0)), (fine, coarse))
    ((u, v, link),) = Network.from_problem(problem).pairs()
    assert (u, v) == (0, 1)
    assert (link.dense() == fine.dense() + coarse.dense().T).all()


def test_a_strategy_without_partner_is_forbidden_along_the_whole_chain() -> None:
    same = np.where(np.eye(3) > 0, 0.0, np.inf)
    index = np.arange(3)
    nodes = (free_node(np.inf, 1, 2), free_node(0, 0, 0), free_node(5, 0, np.inf))
    edges = tuple(Edge(i, i + 1, same, index, index) for i in range(2))
    network = Network.from_problem(Problem(nodes, edges))
    EnforceArcConsistency().apply(network)
    assert [x.labels.tolist() for x in network.variables.values()] == [[1], [1], [1]]


def test_a_link_that_depends_on_one_end_only_becomes_a_cost() -> None:
    cost = np.array([[3.0, 3.0], [7.0, 7.0]])
    index = np.arange(2)
    problem = Problem((free_node(0, 0), free_node(0, 0)), (Edge(0, 1, cost, index, index),))
    network = Network.from_problem(problem)
    NormalizeLinks().apply(network)
    assert network.variables[0].cost.tolist() == [3.0, 7.0]
    assert list(network.pairs()) == []


def test_equal_rows_of_a_link_become_one() -> None:
    cost = np.array([[0.0, 5.0], [5.0, 0.0], [1.0, 6.0]])
    problem = Problem(
        (free_node(0, 0, 0), free_node(0, 0)), (Edge(0, 1, cost, np.arange(3), np.arange(2)),)
    )
    network = Network.from_problem(problem)
    NormalizeLinks().apply(network)
    ((_, _, link),) = network.pairs()
    assert link.matrix.values.shape == (2, 2)
    assert link.rows.tolist() == [0, 1, 0], "rows 0 and 2 differ by a constant"


def test_dominance_sees_through_links() -> None:
    """Strategy 1 costs 3 more, but saves at least 4 whatever the neighbour does."""
    cost = np.array([[4.0, 9.0], [0.0, 5.0]])
    index = np.arange(2)
    nodes = (free_node(0, 3), free_node(0, 0))
    network = Network.from_problem(Problem(nodes, (Edge(0, 1, cost, index, index),)))
    DropDominated().apply(network)
    assert network.variables[0].labels.tolist() == [1]


def test_a_strategy_that_uses_less_is_not_dominated() -> None:
    node = ProblemNode(np.array([0.0, 1.0]), np.array([2.0, 1.0]), (0, 1))
    network = Network.from_problem(Problem((node, node), usage_limit=3.0))
    DropDominated().apply(network)
    assert [len(x.cost) for x in network.variables.values()] == [2, 2]


def test_of_equal_strategies_the_first_stays() -> None:
    network = Network.from_problem(Problem((free_node(1, 1, 1),)))
    DropDominated().apply(network)
    assert network.variables[0].labels.tolist() == [0]


def test_limits_that_cannot_bind_are_forgotten() -> None:
    low = ProblemNode(np.zeros(2), np.array([1.0, 2.0]), (0, 1))
    high = ProblemNode(np.zeros(2), np.array([1.0, 8.0]), (1, 2))
    network = Network.from_problem(Problem((low, high, high), usage_limit=10.0))
    SimplifyLimits().apply(network)
    assert len(network.capacity) == 1
    assert network.variables[0].terms == ()
    assert network.capacity[0] == pytest.approx(8.0), "what all use in any case is taken off"


def test_equal_products_are_computed_once() -> None:
    """Ten equal layers between two ends: one product per distinct content."""
    rng = np.random.default_rng(0)
    cost, index = rng.random((4, 4)), np.arange(4)
    ends = [ProblemNode(rng.random(4), np.array([1.0, 2, 3, 4]), (0, 1)) for _ in range(11)]
    layers = [free_node(1, 2, 3, 4) for _ in range(10)]
    edges = [Edge(i, 11 + i, cost, index, index) for i in range(10)]
    edges += [Edge(11 + i, i + 1, cost, index, index) for i in range(10)]
    network = Network.from_problem(Problem((*ends, *layers), tuple(edges), usage_limit=20.0))
    step = EliminateNeighbours(NormalizeLinks())
    step.apply(network)
    assert len(network.variables) == 11
    assert len(step.products) == 1


def test_the_chain_reports_what_each_reduction_removed() -> None:
    problem = Problem((free_node(1, 2), free_node(np.inf, 2), free_node(3, 4)), (), ((0, 2),))
    chain = Presolve(default_reductions(Effort()))
    chain.apply(Network.from_problem(problem))
    assert chain.statistics["merge_ties.nodes"] == 1
    assert chain.statistics["arc_consistency.strategies"] == 1
    assert chain.statistics["fix_variables.nodes"] == 1
    assert chain.statistics["eliminate_neighbours.nodes"] == 1
