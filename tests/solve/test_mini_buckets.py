"""Mini-bucket relaxations and elimination orders, compared with brute force."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.solve import Problem, SolverSettings, brute_force
from autoshard.solve.mini_buckets import MiniBucketRelaxation, best_order, solve_by_mini_buckets
from autoshard.solve.network import Network
from autoshard.solve.presolve import EnforceArcConsistency, MergeTies, Presolve, SolveLowTreewidth
from autoshard.solve.reduced_problem import ReducedProblem
from autoshard.solve.state import SolveState
from autoshard.solve.trws import TRWS

RandomProblem = Callable[[int], Problem]
seeds = st.integers(0, 2**32 - 1)
thorough = settings(max_examples=100, derandomize=True, deadline=None)


def staged(
    problem: Problem, settings: SolverSettings | None = None
) -> tuple[ReducedProblem, SolveState]:
    """A stage without ties or forbidden strategies."""
    network = Network.from_problem(problem)
    Presolve((MergeTies(), EnforceArcConsistency())).apply(network)
    state = SolveState(problem, settings=settings)
    return ReducedProblem(network, state), state


def scale_of(problem: Problem) -> float:
    arrays = [x.cost for x in problem.nodes] + [x.cost for x in problem.edges]
    return sum(float(np.abs(a[np.isfinite(a)]).sum()) for a in arrays)


@thorough
@given(seed=seeds, work=st.sampled_from([1.0, 30.0, 100.0, 1e6]))
def test_a_part_bounds_every_strategy(
    random_problem: RandomProblem, seed: int, work: float
) -> None:
    """Under a limit, too: prices of usage are part of what messages leave."""
    problem = random_problem(seed)
    truth = brute_force(problem)
    reduced, state = staged(problem)
    if reduced.network.infeasible or truth.choice is None:
        return
    trws = TRWS(reduced)
    trws.run()
    left, slack = trws.remaining()
    part = MiniBucketRelaxation(
        left, work, cutoff=truth.objective - state.bound, effort=state.effort
    )
    bounds = part.solve(slack)
    assert bounds is not None
    allowed = truth.objective + 1e-12 * scale_of(problem)
    assert part.bound <= allowed
    for v, least in bounds.items():
        place = reduced.network.variables[v].labels.tolist().index(int(truth.choice[v]))
        assert least[place] <= allowed
    if np.isinf(problem.usage_limit) and not part.num_left_out:
        assert part.bound == pytest.approx(truth.objective, abs=1e-9 * scale_of(problem))


@thorough
@given(seed=seeds)
def test_mini_buckets_end_with_the_optimum(random_problem: RandomProblem, seed: int) -> None:
    problem = replace(random_problem(seed), ties=(), usage_limit=np.inf)
    truth = brute_force(problem)
    reduced, state = staged(
        problem, SolverSettings(mini_bucket_min_entries=0, mini_bucket_work=4.0)
    )
    if reduced.network.infeasible or truth.choice is None:
        return
    with pytest.MonkeyPatch.context() as patch:
        # Without it, what is left is so small that it is solved outright.
        patch.setattr(SolveLowTreewidth, "_solve", lambda *_: None)
        solve_by_mini_buckets(reduced)
    allowed = 1e-9 * scale_of(problem)
    assert state.bound <= truth.objective + allowed
    assert state.objective == pytest.approx(truth.objective, abs=allowed)


def test_an_order_has_every_variable_once_and_is_the_same_again() -> None:
    """A cycle of five variables of two strategies: two neighbours each until three are left."""
    neighbours = {v: {(v - 1) % 5, (v + 1) % 5} for v in range(5)}
    sizes = dict.fromkeys(neighbours, 2)
    order = best_order(sizes, neighbours, 3)
    assert sorted(order.variables) == list(range(5))
    assert order.work == 3 * 8 + 4 + 2
    assert order.entries == 3 * 4 + 2 + 1
    assert best_order(sizes, neighbours, 3) == order
