"""Walks over the groups of a run, against all of them."""

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.solve.repeats.walks import Steps

NUM_STATES = 3


def every_walk(
    matrix: np.ndarray, length: int, first: int, last: int
) -> dict[tuple[int, ...], float]:
    """Price of each walk from one state to another."""
    between = product(range(NUM_STATES), repeat=length - 1)
    walks = ((first, *states, last) for states in between)
    return {walk: float(sum(matrix[a, b] for a, b in pairwise(walk))) for walk in walks}


def check(steps: Steps, wanted: dict[tuple[int, int], dict[tuple[int, ...], float]]) -> None:
    total = steps.joined()[0]
    for (first, last), walks in wanted.items():
        least = min(walks.values(), default=np.inf)
        assert total[first, last] == pytest.approx(least)
        if np.isfinite(least):
            walk = tuple(steps.cheapest(0, first, last))
            assert walks[walk] == pytest.approx(least)


def drawn(seed: int) -> tuple[np.ndarray, np.ndarray, list[tuple[int, int]]]:
    rng = np.random.default_rng(seed)
    matrix = np.where(rng.random((NUM_STATES, NUM_STATES)) < 0.1, np.inf, rng.random((3, 3)))
    inside = rng.random(NUM_STATES) < 0.5
    return matrix, inside, [(a, b) for a in range(NUM_STATES) for b in range(NUM_STATES)]


@given(seed=st.integers(0, 10**6), length=st.integers(1, 4))
def test_free_walks(seed: int, length: int) -> None:
    matrix, _, ends = drawn(seed)
    wanted = {pair: every_walk(matrix, length, *pair) for pair in ends}
    check(Steps.free([(matrix[None], length)]), wanted)


@given(seed=st.integers(0, 10**6), length=st.integers(1, 4))
def test_walks_that_leave_a_set(seed: int, length: int) -> None:
    matrix, inside, ends = drawn(seed)
    wanted = {
        pair: {
            walk: price
            for walk, price in every_walk(matrix, length, *pair).items()
            if not all(inside[state] for state in walk)
        }
        for pair in ends
    }
    check(Steps.leaving([(matrix[None], length)], inside), wanted)


@given(seed=st.integers(0, 10**6), length=st.integers(1, 4), data=st.data())
def test_walks_that_change_over(seed: int, length: int, data: st.DataObject) -> None:
    matrix, inside, ends = drawn(seed)
    num_first = data.draw(st.integers(0, length))
    wanted = {
        pair: {
            walk: price
            for walk, price in every_walk(matrix, length, *pair).items()
            if all(inside[state] for state in walk[1 : num_first + 1])
            and not any(inside[state] for state in walk[num_first + 1 :])
        }
        for pair in ends
    }
    parts = ((inside, num_first), (~inside, length - num_first))
    check(Steps.changing([(matrix[None], sum(num for _, num in parts))], parts), wanted)
