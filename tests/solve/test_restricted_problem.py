"""Wide problems: valid bounds, restricted problems, and the optimum."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.base.outcome import SolveStatus
from autoshard.errors import ProblemError
from autoshard.solve import (
    Edge,
    MinMarginals,
    Problem,
    ProblemNode,
    Repeat,
    ShortestPathCost,
    SolverSettings,
    WarmStart,
    brute_force,
    solve_problem,
)
from autoshard.solve.bounds.quotient_bounds import QuotientMessages, strategy_bounds
from autoshard.solve.bounds.quotient_graph import QuotientGraph
from autoshard.solve.programs.restricted_problem import one_per_run, restrict
from autoshard.solve.runs import find_runs, independent_runs
from autoshard.solve.settings import Effort

SIZES = st.sampled_from([(2, 1, 1), (3, 2, 0), (4, 1, 0), (5, 1, 1), (6, 1, 0)])
"""Layers, nodes inside a layer, shared nodes."""


def link(rng: np.random.Generator, source: int, target: int, *, path_cost: bool) -> Edge:
    """A link of prices on three states, as a matrix or as the path cost of some steps."""
    states = np.arange(3)
    if not path_cost:
        prices = rng.integers(-2, 9, (3, 3)) / 2
        prices[rng.random((3, 3)) < 0.1] = np.inf
        return Edge(source, target, prices, states, states)
    steps = [(a, b) for a in range(3) for b in range(3) if a != b and rng.random() < 0.8]
    ends = np.array(steps, dtype=np.intp).reshape(-1, 2)
    steps = ShortestPathCost(3, ends[:, 0], ends[:, 1], rng.integers(0, 9, len(steps)) / 2)
    return Edge(source, target, steps, states, states)


def layered(seed: int, num_layers: int, num_inner: int, num_shared: int) -> Problem:
    """A head, equal layers in a row, a tail; shared nodes are linked to every layer."""
    rng = np.random.default_rng(seed)

    def node() -> ProblemNode:
        return ProblemNode(rng.integers(0, 12, 3) / 2, rng.integers(0, 6, 3).astype(float), (0, 1))

    def copy(edge: Edge, source: int, target: int) -> Edge:
        return Edge(source, target, edge.prices, edge.rows, edge.cols)

    nodes = [node() for _ in range(1 + num_shared)]
    layer = [node() for _ in range(num_inner + 1)]
    inside = [link(rng, i, num_inner, path_cost=i % 2 == 0) for i in range(num_inner)]
    entry, skip = (link(rng, 0, 0, path_cost=path_cost) for path_cost in (True, False))
    spokes = [link(rng, 0, 0, path_cost=False) for _ in range(num_shared)]
    edges: list[Edge] = []
    instances, before = [], 0
    for _ in range(num_layers):
        first = len(nodes)
        nodes.extend(layer)
        edges.extend(copy(edge, first + edge.source, first + num_inner) for edge in inside)
        edges.extend([copy(entry, before, first), copy(skip, before, first + num_inner)])
        edges.extend(copy(spoke, 1 + h, first) for h, spoke in enumerate(spokes))
        instances.append(tuple(range(first, len(nodes))))
        before = len(nodes) - 1
    nodes.append(node())
    edges.append(link(rng, before, len(nodes) - 1, path_cost=True))
    return Problem(tuple(nodes), tuple(edges), repeats=(Repeat(tuple(instances)),))


def written_down(problem: Problem) -> Problem:
    """The same problem with a matrix for every edge."""
    edges = (Edge(e.source, e.target, e.cost, e.rows, e.cols) for e in problem.edges)
    return replace(problem, edges=tuple(edges))


def quotient_messages(problem: Problem) -> QuotientMessages:
    graph = QuotientGraph(problem, independent_runs(problem))
    costs = [problem.nodes[node_class.nodes[0]].cost for node_class in graph.node_classes]
    return QuotientMessages(graph, costs)


NARROW = SolverSettings(
    wide_strategies=0.0,
    first_width=1,
    last_width=2,
    limited_width=1,
    max_matrix_states=0,
)
"""Every problem counts as wide, and restricted problems start with one strategy per class."""


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 9))
def test_shortest_path_cost_is_the_matrix_of_shortest_paths(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    steps = np.where(rng.random((size, size)) < 0.4, rng.integers(0, 9, (size, size)), np.inf)
    sources, targets = np.nonzero(np.isfinite(steps))
    path_cost = ShortestPathCost(size, sources, targets, steps[sources, targets])
    ways = np.where(np.eye(size, dtype=bool), 0.0, steps)
    for middle in range(size):
        ways = np.minimum(ways, ways[:, [middle]] + ways[[middle]])
    vector = np.where(rng.random(size) < 0.7, rng.integers(-9, 9, size), np.inf)
    some = rng.integers(0, size, 3)

    np.testing.assert_array_equal(path_cost.forwards(vector), (vector[:, None] + ways).min(axis=0))
    np.testing.assert_array_equal(path_cost.backwards(vector), (ways + vector).min(axis=1))
    np.testing.assert_array_equal(path_cost.between(some, some), ways[np.ix_(some, some)])
    np.testing.assert_array_equal(path_cost.dense, ways)
    np.testing.assert_array_equal(path_cost.between(some, some), ways[np.ix_(some, some)])
    assert path_cost.price(int(some[0]), int(some[1])) == ways[some[0], some[1]]


def test_shortest_path_cost_prices_choices_as_its_matrix_does() -> None:
    problem = layered(3, num_layers=3, num_inner=1, num_shared=1)
    dense = written_down(problem)
    rng = np.random.default_rng(0)
    for choice in rng.integers(0, 3, (50, len(problem.nodes))):
        np.testing.assert_array_equal(problem.prices(choice), dense.prices(choice))


def test_shortest_path_cost_of_a_nan_step_is_refused() -> None:
    steps = ShortestPathCost(2, np.array([0]), np.array([1]), np.array([np.nan]))
    node = ProblemNode(np.zeros(2), np.zeros(2))
    with pytest.raises(ProblemError, match="NaN"):
        Problem((node, node), (Edge(0, 1, steps, np.arange(2), np.arange(2)),))


def least_by_strategy(problem: Problem) -> list[np.ndarray]:
    """The least objective with each strategy of each node."""
    found = [MinMarginals.of(problem, v) for v in range(len(problem.nodes))]
    return [marginals.least for marginals in found if marginals is not None]


@pytest.mark.thorough
@settings(max_examples=80)
@given(seed=st.integers(0, 10**6), sizes=SIZES)
def test_bounds_of_messages_hold_and_never_fall(seed: int, sizes: tuple[int, int, int]) -> None:
    problem = layered(seed, *sizes)
    messages = quotient_messages(problem)
    exact = least_by_strategy(written_down(problem))
    optimum = float(exact[0].min())
    before = -np.inf
    for _ in range(6):
        messages.sweep()
        bound, least = strategy_bounds(messages)
        slack = 1e-9 * max(1.0, abs(optimum))
        assert before - slack <= messages.bound <= optimum + slack
        assert messages.bound - slack <= bound <= optimum + slack
        for node_class, bounds in zip(messages.graph.node_classes, least, strict=True):
            for v in node_class.nodes:
                assert (bounds <= exact[v] + slack).all()
        before = messages.bound


def test_a_quotient_graph_has_the_same_size_at_any_depth() -> None:
    shapes = set()
    for num_layers in (5, 7, 40):
        graph = QuotientGraph(problem := layered(5, num_layers, 2, 1), independent_runs(problem))
        shapes.add((len(graph.node_classes), len(graph.ports), len(graph.edge_classes)))
        assert sorted(v for p in graph.node_classes for v in p.nodes) == list(
            range(len(problem.nodes))
        )
        ends = sum(port.num_edges for port in graph.ports)
        assert ends == 2 * len(problem.edges)
    assert len(shapes) == 1


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), sizes=SIZES)
def test_core_is_the_problem_with_fewer_strategies(seed: int, sizes: tuple[int, int, int]) -> None:
    problem = layered(seed, *sizes)
    graph = QuotientGraph(problem, independent_runs(problem))
    rng = np.random.default_rng(seed)
    masks = [rng.random(3) < 0.5 for _ in graph.node_classes]
    masks = one_per_run(graph, [mask | (np.arange(3) == 1) for mask in masks])
    restricted = restrict(problem, graph.by_node(masks))
    picks = np.array([int(rng.integers(0, len(kept))) for kept in restricted.kept])
    whole = np.array([kept[s] for kept, s in zip(restricted.kept, picks, strict=True)])

    assert all(masks[graph.class_of[v]][s] for v, s in enumerate(whole))
    np.testing.assert_array_equal(restricted.problem.prices(picks), problem.prices(whole))
    assert [run.instances for run in find_runs(restricted.problem)] == [
        run.instances for run in find_runs(problem)
    ]


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(30))
def test_restriction_gives_a_choice_and_a_bound_around_the_optimum(seed: int) -> None:
    problem = layered(seed, *[(3, 2, 0), (4, 1, 0), (5, 1, 1), (6, 1, 0)][seed % 4])
    exact = least_by_strategy(written_down(problem))
    optimum = float(exact[0].min())
    solution = solve_problem(problem, relative_gap=0.0, settings=NARROW)
    assert solution.statistics["restricted.sweeps"] > 0
    if not np.isfinite(optimum):
        assert solution.status in (SolveStatus.INFEASIBLE, SolveStatus.TIMED_OUT)
        return
    assert solution.choice is not None
    assert solution.objective == pytest.approx(problem.objective(solution.choice))
    assert solution.bound <= optimum + 1e-9
    assert solution.objective >= optimum - 1e-9


@pytest.mark.parametrize("seed", range(20))
def test_restriction_without_path_costs_ends_at_the_optimum(seed: int) -> None:
    problem = written_down(layered(seed, 4, 1, 1))
    expected = brute_force(problem)
    solution = solve_problem(problem, relative_gap=0.0, settings=NARROW)
    assert solution.status is expected.status
    assert solution.objective == pytest.approx(expected.objective)


@pytest.mark.matrix
@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, -0.1])
@pytest.mark.parametrize("seed", range(6))
def test_restriction_keeps_a_limit(seed: int, share: float) -> None:
    free = layered(seed, 4, 1, 0)
    peaks = [
        free.peak_usage([int(pick(node.usage)) for node in free.nodes])
        for pick in (np.argmin, np.argmax)
    ]
    problem = replace(free, usage_limit=peaks[0] + share * (peaks[1] - peaks[0]))
    expected = brute_force(problem)
    solution = solve_problem(problem, relative_gap=0.0, settings=NARROW)
    if solution.status is SolveStatus.INFEASIBLE:
        assert expected.status is SolveStatus.INFEASIBLE
        return
    assert solution.bound <= expected.objective + 1e-9
    if solution.choice is not None:
        assert problem.is_feasible(solution.choice)
        assert solution.objective >= expected.objective - 1e-9


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(8))
def test_restriction_keeps_one_limit_after_another(seed: int) -> None:
    """Whatever a warm_start says is likely, bounds hold and choices keep the limit."""
    free = layered(seed, 5, 1, 0)
    optimum = brute_force(free)
    if optimum.choice is None:
        return
    rng = np.random.default_rng(seed)
    warm_start = WarmStart(unlimited_bound=optimum.objective)
    warm_start.candidates = [
        (rng.random(node.num_strategies) < 0.5) | (np.arange(node.num_strategies) == 0)
        for node in free.nodes
    ]
    least = free.peak_usage([int(node.usage.argmin()) for node in free.nodes])
    most = free.peak_usage(optimum.choice)
    for share in (0.8, 0.5, 0.3, 0.9):
        problem = replace(free, usage_limit=least + share * (most - least))
        expected = brute_force(problem)
        solution = solve_problem(problem, relative_gap=0.0, warm_start=warm_start, settings=NARROW)
        if solution.status is SolveStatus.INFEASIBLE:
            assert expected.status is SolveStatus.INFEASIBLE
            continue
        assert solution.bound <= expected.objective + 1e-9
        if solution.choice is not None:
            assert problem.is_feasible(solution.choice)
            assert solution.objective >= expected.objective - 1e-9


def test_min_marginals_need_matrices() -> None:
    problem = layered(1, 3, 1, 0)
    small = Effort(SolverSettings(max_matrix_states=2))
    assert MinMarginals.of(problem, 0, effort=small) is None
    of_paths = MinMarginals.of(problem, 0)
    of_matrices = MinMarginals.of(written_down(problem), 0, effort=small)
    assert of_paths is not None
    assert of_matrices is not None
    np.testing.assert_array_equal(of_paths.least, of_matrices.least)


@pytest.mark.parametrize("seed", range(10))
def test_path_costs_are_solved_without_repeats(seed: int) -> None:
    problem = replace(layered(seed, 3, 1, 1), repeats=())
    expected = brute_force(problem)
    for limits in (SolverSettings(), SolverSettings(max_matrix_states=0)):
        solution = solve_problem(problem, relative_gap=0.0, settings=limits)
        assert solution.objective == pytest.approx(expected.objective)
        assert solution.bound <= expected.objective + 1e-9
        is_restricted = "restricted.problems" in solution.statistics
        assert is_restricted is (limits.max_matrix_states == 0)
