"""Min-plus products without the infinite and the repeated parts of a matrix."""

import numpy as np
import pytest
from numpy.typing import NDArray

from autoshard.solve.bounds.min_plus_table import MinPlusTable

Matrix = NDArray[np.float64]


def blocks(random: np.random.Generator, size: int) -> Matrix:
    """Blocks as of two residencies: dense, repeated, a diagonal, infinite."""
    once = random.random((size, size))
    twice = once + random.random((size, size))
    diagonal = np.where(np.eye(size, dtype=bool), 0.0, np.inf)
    nothing = nowhere(random, size)
    return np.block([[once, twice, nothing, once], [once, nothing, diagonal, once]])


def scattered(random: np.random.Generator, size: int) -> Matrix:
    """Entries of which any may be infinite: all rows are finite in other columns."""
    return np.where(random.random((size, size + 3)) < 0.5, random.random((size, size + 3)), np.inf)


def nowhere(random: np.random.Generator, size: int) -> Matrix:
    """Infinite everywhere."""
    return np.inf * (1.0 + random.random((size, size)))


@pytest.mark.parametrize("make", [blocks, scattered, nowhere])
@pytest.mark.parametrize("size", [1, 5, 40, 200])
def test_products_are_those_of_the_whole_matrix(make: object, size: int) -> None:
    random = np.random.default_rng(size)
    assert callable(make)
    matrix: Matrix = make(random, size)
    table = MinPlusTable(matrix)
    for infinite in (0.0, 0.3):
        before, after = (
            np.where(random.random(length) < infinite, np.inf, random.normal(size=length))
            for length in matrix.shape
        )
        assert np.array_equal(table.rows(after), (matrix + after).min(axis=1))
        assert np.array_equal(table.columns(before), (matrix + before[:, None]).min(axis=0))
