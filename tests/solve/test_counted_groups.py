"""Least prices by the number of groups in one component, against every way to assign them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from itertools import product

import numpy as np
import pytest
from support.layered import layered, with_modes

from autoshard.base.arrays import FloatArray
from autoshard.solve import Problem, SolverSettings, restrict, solve_problem
from autoshard.solve.runs import counted_groups, find_runs, solve_runs
from autoshard.solve.runs.block_table import Component, RunBlock
from autoshard.solve.runs.contraction import ContractedProblem
from autoshard.solve.runs.run_tables import batched_min_plus, power
from autoshard.solve.settings import Effort
from autoshard.solve.state import SolveState

ANY_SHARED = Effort(SolverSettings(max_group_work=0.0))
"""Shared nodes make all tables too large."""


def moded(seed: int, *, num_layers: int = 3, num_shared: int = 0) -> Problem:
    plain = layered(seed, num_layers=num_layers, num_inner=2, num_shared=num_shared)
    return with_modes(plain, seed, 2)


def components(problem: Problem) -> tuple[Component, ...]:
    (run,) = find_runs(problem)
    return RunBlock(problem, run, None).components


def with_parts(problem: Problem, inside: Sequence[int]) -> Problem:
    """The problem with each group in a given component."""
    (run,) = find_runs(problem)
    masks = [np.ones(node.num_strategies, dtype=np.bool_) for node in problem.nodes]
    for group, part in zip(run.instances, inside, strict=True):
        for v, mask in components(problem)[part].items():
            masks[group[run.instances[1].index(v)]] = mask
    return restrict(problem, masks).problem


def number_inside(problem: Problem, choice: Sequence[int]) -> int:
    """Number of groups of a choice in the component that is counted."""
    (run,) = find_runs(problem)
    inside = components(problem)[1]
    return sum(
        all(mask[choice[group[run.instances[1].index(v)]]] for v, mask in inside.items())
        for group in run.instances
    )


def least_by_number(problem: Problem) -> list[float]:
    """The least price for each number of groups in the component, by trying all assignments."""
    (run,) = find_runs(problem)
    least = [np.inf] * (len(run.instances) + 1)
    for inside in product((0, 1), repeat=len(run.instances)):
        plain = replace(with_parts(problem, inside), repeats=())
        number = sum(inside)
        least[number] = min(least[number], solve_problem(plain).objective)
    return least


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_shared", [0, 1])
def test_every_number_of_groups_has_its_least_price(seed: int, num_shared: int) -> None:
    problem = moded(seed, num_shared=num_shared)
    costs = [node.cost for node in problem.nodes]
    found = ContractedProblem(problem).minimise_by_count(costs, np.inf)
    assert found is not None
    expected = least_by_number(problem)
    assert found.values == pytest.approx(expected)
    for number, price in enumerate(expected):
        if np.isfinite(price):
            choice = found.choice((number,))
            assert problem.objective(choice) == pytest.approx(price)
            assert number_inside(problem, choice) == number


@pytest.mark.parametrize("number", range(1, 12))
def test_a_power_is_one_group_after_the_other(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(number)
    group = [rng.integers(0, 99, (2, 3, 3)).astype(float) for _ in range(2)]
    expected = reduce(counted_groups._joined, [group] * number)
    products = []

    def counted(left: FloatArray, right: FloatArray) -> FloatArray:
        products.append(left.shape)
        return batched_min_plus(left, right)

    monkeypatch.setattr(counted_groups, "batched_min_plus", counted)
    np.testing.assert_array_equal(power(group, number, counted_groups._joined), expected)
    assert len(products) == counted_groups._num_products([number])


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(6))
def test_prices_that_do_not_matter_are_told_apart(seed: int) -> None:
    problem = moded(seed, num_shared=1)
    costs = [node.cost for node in problem.nodes]
    expected = least_by_number(problem)
    most = float(np.median([price for price in expected if np.isfinite(price)]))
    found = ContractedProblem(problem).minimise_by_count(costs, most)
    assert found is not None
    assert found.least_of_others > most
    for value, price in zip(found.values, expected, strict=True):
        assert min(value, found.least_of_others) <= price + 1e-9
        assert price > most or value == pytest.approx(price)


@pytest.mark.parametrize("seed", range(6))
def test_without_axes_for_shared_nodes_prices_are_lower_bounds(seed: int) -> None:
    problem = moded(seed, num_shared=1)
    costs = [node.cost for node in problem.nodes]
    found = ContractedProblem(problem, effort=ANY_SHARED).minimise_by_count(costs, np.inf)
    assert found is not None
    for number, price in enumerate(least_by_number(problem)):
        assert found.values[number] <= price + 1e-9
        if np.isfinite(price):
            choice = found.choice((number,))
            assert problem.objective(choice) >= price - 1e-9


@pytest.mark.parametrize("seed", range(6))
def test_given_strategies_of_shared_nodes_are_kept(seed: int) -> None:
    problem = moded(seed, num_shared=1)
    costs = [node.cost for node in problem.nodes]
    contracted = ContractedProblem(problem)
    free = contracted.minimise_by_count(costs, np.inf)
    assert free is not None
    like = free.choice((int(np.argmin(free.values)),))
    fixed = contracted.minimise_by_count(costs, np.inf, shared=like)
    assert fixed is not None
    assert fixed.values.min() == pytest.approx(free.values.min())
    assert (fixed.values >= free.values - 1e-9).all()


def test_runs_without_components_are_not_counted() -> None:
    problem = layered(1, num_layers=3, num_inner=3, num_shared=1)
    costs = [node.cost for node in problem.nodes]
    assert ContractedProblem(problem).minimise_by_count(costs, np.inf) is None


@pytest.mark.parametrize("seed", range(12))
def test_branches_prove_what_prices_of_usage_cannot(seed: int) -> None:
    """One component uses much and the other little; the limit admits a fraction of a group more."""
    problem = moded(seed, num_layers=6)
    inside = components(problem)[1]
    (run,) = find_runs(problem)
    nodes = list(problem.nodes)
    for group in run.instances:
        for p, v in enumerate(run.instances[1]):
            usage = np.zeros(nodes[group[p]].num_strategies)
            if v in inside:
                usage = np.where(inside[v], 0.0, 10.0) if v == next(iter(inside)) else usage
            nodes[group[p]] = replace(nodes[group[p]], usage=usage, interval=(0, 1))
    problem = replace(problem, nodes=tuple(nodes), usage_limit=25.0)
    expected = solve_problem(replace(problem, repeats=()), relative_gap=0)
    state = SolveState(problem, gap=1e-9)
    solve_runs(state)
    assert state.objective == pytest.approx(expected.objective)
    assert state.bound == pytest.approx(expected.objective)


def test_prices_that_all_do_not_matter_are_told_apart() -> None:
    problem = moded(0, num_shared=1)
    costs = [node.cost for node in problem.nodes]
    found = ContractedProblem(problem).minimise_by_count(costs, -np.inf)
    assert found is not None
    assert np.isinf(found.values).all()
    assert found.least_of_others == pytest.approx(min(least_by_number(problem)))
