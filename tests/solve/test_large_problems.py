"""TRW-S and substitution, on small problems."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.solve import Edge, Problem, ProblemNode, SolverSettings, brute_force, solve_problem
from autoshard.solve.bounds.trws import TRWS, FlatNetwork
from autoshard.solve.network import Network
from autoshard.solve.presolve import EnforceArcConsistency, MergeTies, Presolve, SubstituteVariables
from autoshard.solve.reduced_problem import ReducedProblem
from autoshard.solve.state import SolveState

RandomProblem = Callable[[int], Problem]
seeds = st.integers(0, 2**32 - 1)
thorough = settings(max_examples=100, derandomize=True, deadline=None)


def cleared(problem: Problem) -> Network:
    """A network as the messages want it: no ties, no forbidden strategies."""
    network = Network.from_problem(problem)
    Presolve((MergeTies(), EnforceArcConsistency())).apply(network)
    return network


@thorough
@given(seed=seeds)
def test_flat_arrays_price_like_the_network(random_problem: RandomProblem, seed: int) -> None:
    network = cleared(random_problem(seed))
    if network.infeasible:
        return
    flat = FlatNetwork(network)
    rng = np.random.default_rng(seed)
    picks = rng.integers(0, np.diff(flat.starts))
    by_variable = dict(zip(flat.variables, picks.tolist(), strict=True))
    assert flat.price(picks) == pytest.approx(network.price(by_variable), rel=1e-12)
    assert flat.usage(picks) == pytest.approx(network.usage(by_variable), rel=1e-12)
    prices = rng.random(len(flat.capacity))
    picked = flat.starts[:-1] + picks
    paid = flat.cost[picked].sum() + float(prices @ flat.usage(picks))
    assert flat.priced(prices)[picked].sum() == pytest.approx(paid, rel=1e-9, abs=1e-9)


@thorough
@given(seed=seeds)
def test_messages_bound_every_choice_from_below(random_problem: RandomProblem, seed: int) -> None:
    problem = random_problem(seed)
    truth = brute_force(problem)
    state = SolveState(problem)
    reduced = ReducedProblem(cleared(problem), state)
    if reduced.network.infeasible or truth.choice is None:
        return
    least = TRWS(reduced).run()
    scale = sum(float(np.abs(x.cost[np.isfinite(x.cost)]).sum()) for x in problem.nodes)
    scale += sum(float(np.abs(e.cost[np.isfinite(e.cost)]).sum()) for e in problem.edges)
    assert state.bound <= truth.objective + 1e-12 * scale
    for v, bounds in least.items():
        # The optimum itself pays at least the bound of each strategy that it picks.
        place = reduced.network.variables[v].labels.tolist().index(int(truth.choice[v]))
        assert bounds[place] <= truth.objective + 1e-12 * scale


def test_messages_are_exact_on_a_tree() -> None:
    rng = np.random.default_rng(3)
    index = np.arange(4)
    nodes = tuple(ProblemNode(rng.random(4), np.zeros(4)) for _ in range(8))
    edges = tuple(
        Edge(int(rng.integers(0, v)), v, rng.random((4, 4)), index, index) for v in range(1, 8)
    )
    problem = Problem(nodes, edges)
    state = SolveState(problem)
    TRWS(ReducedProblem(Network.from_problem(problem), state)).run()
    optimum = brute_force(problem).objective
    assert state.bound == pytest.approx(optimum, rel=1e-9)
    assert state.objective == pytest.approx(optimum, rel=1e-12)


@pytest.mark.thorough
@thorough
@given(seed=seeds)
def test_large_problems_find_what_brute_force_finds(
    contested_problem: RandomProblem, seed: int
) -> None:
    problem = contested_problem(seed)
    found = solve_problem(problem, settings=SolverSettings(large_entries=0))
    truth = brute_force(problem)
    assert found.status is truth.status
    assert found.objective == pytest.approx(truth.objective, rel=1e-6)
    assert found.bound <= truth.objective * (1 + 1e-12)


def permuted(rng: np.random.Generator, source: int, target: int, size: int) -> Edge:
    """An edge that allows one partner per strategy."""
    cost = np.full((size, size), np.inf)
    cost[np.arange(size), rng.permutation(size)] = rng.random(size)
    return Edge(source, target, cost, np.arange(size), np.arange(size))


def test_aliases_merge_into_one_variable_with_all_their_usage() -> None:
    rng = np.random.default_rng(4)
    nodes = tuple(
        ProblemNode(rng.random(4), rng.permutation(4) * 1.0, (v, v + 2)) for v in range(5)
    )
    edges = tuple(permuted(rng, v, v + 1, 4) for v in range(4))
    network = Network.from_problem(Problem(nodes, edges, usage_limit=10.0))
    SubstituteVariables().apply(network)
    (variable,) = network.variables.values()
    assert len(variable.terms) == 5
    assert not any(network.links.values())


def test_a_follower_of_two_leaders_ties_them() -> None:
    rng = np.random.default_rng(5)
    nodes = tuple(
        ProblemNode(rng.random(3), np.rint(100 * rng.random(3)), (0, 1)) for _ in range(3)
    )
    edges = (permuted(rng, 0, 2, 3), permuted(rng, 1, 2, 3))
    problem = Problem(nodes, edges, usage_limit=200.0)
    found, truth = solve_problem(problem), brute_force(problem)
    assert found.status is truth.status
    assert found.objective == pytest.approx(truth.objective, rel=1e-12)


def test_a_free_choice_on_one_side_only_merges_the_other() -> None:
    """Every strategy of the first leaves the second one choice; not the other way round."""
    cost = np.array([[1.0, np.inf], [2.0, np.inf], [np.inf, 3.0]])
    edge = Edge(0, 1, cost, np.arange(3), np.arange(2))
    nodes = (
        ProblemNode(np.array([5.0, 1.0, 2.0]), np.zeros(3)),
        ProblemNode(np.array([1.0, 2.0]), np.zeros(2)),
    )
    network = Network.from_problem(Problem(nodes, (edge,)))
    inverse = SubstituteVariables().apply(network)
    assert list(network.variables) == [0]
    assert network.variables[0].cost.tolist() == [7.0, 4.0, 7.0]
    choice = np.array([2, -1])
    inverse(choice)
    assert choice.tolist() == [2, 1]
