"""Parts of a network's links, and orders of elimination, against brute force."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.solve import Problem, brute_force, thinning
from autoshard.solve.ascent import Ascent
from autoshard.solve.network import Network
from autoshard.solve.orders import best_order
from autoshard.solve.reductions import Chain, DropForbidden, MergeTies
from autoshard.solve.search import Search
from autoshard.solve.stage import Stage

RandomProblem = Callable[[int], Problem]
seeds = st.integers(0, 2**32 - 1)
thorough = settings(max_examples=100, derandomize=True, deadline=None)


def staged(problem: Problem) -> tuple[Stage, Search]:
    """A stage without ties or forbidden strategies."""
    network = Network.from_problem(problem)
    Chain((MergeTies(), DropForbidden())).apply(network)
    search = Search(problem)
    return Stage(network, search), search


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
    stage, search = staged(problem)
    if stage.network.infeasible or truth.choice is None:
        return
    ascent = Ascent(stage)
    ascent.run()
    left, slack = ascent.remaining()
    part = thinning._Part(left, work, room=truth.objective - search.bound, check=search.check)
    bounds = part.solve(slack)
    assert bounds is not None
    allowed = truth.objective + 1e-12 * scale_of(problem)
    assert part.bound <= allowed
    for v, least in bounds.items():
        place = stage.network.variables[v].labels.tolist().index(int(truth.choice[v]))
        assert least[place] <= allowed
    if np.isinf(problem.usage_limit) and not part.num_left_out:
        assert part.bound == pytest.approx(truth.objective, abs=1e-9 * scale_of(problem))


@thorough
@given(seed=seeds)
def test_thinning_ends_with_the_optimum(random_problem: RandomProblem, seed: int) -> None:
    problem = replace(random_problem(seed), ties=(), usage_limit=np.inf)
    truth = brute_force(problem)
    stage, search = staged(problem)
    if stage.network.infeasible or truth.choice is None:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thinning, "_LEAST_PAIRS", 0)
        patch.setattr(thinning, "_FIRST_WORK", 4.0)
        # Without it, what is left is so small that it is solved outright.
        patch.setattr("autoshard.solve.reductions.width.SolveNarrow._solve", lambda *_: None)
        thinning.thin(stage)
    allowed = 1e-9 * scale_of(problem)
    assert search.bound <= truth.objective + allowed
    assert search.objective == pytest.approx(truth.objective, abs=allowed)


def test_an_order_has_every_variable_once_and_is_the_same_again() -> None:
    """A cycle of five variables of two strategies: two neighbours each until three are left."""
    neighbours = {v: {(v - 1) % 5, (v + 1) % 5} for v in range(5)}
    sizes = dict.fromkeys(neighbours, 2)
    order = best_order(sizes, neighbours, 3, check=lambda: None)
    assert sorted(order.variables) == list(range(5))
    assert order.work == 3 * 8 + 4 + 2
    assert order.entries == 3 * 4 + 2 + 1
    assert best_order(sizes, neighbours, 3, check=lambda: None) == order
