"""Random problems that brute force can still solve."""

from collections.abc import Callable

import numpy as np
import pytest

from autoshard.solve import Problem
from benchmarks.random_families import contested, mixed

RandomProblem = Callable[[int], Problem]


@pytest.fixture(scope="session")
def random_problem() -> RandomProblem:
    return lambda seed: mixed(np.random.default_rng(seed))


@pytest.fixture(scope="session")
def contested_problem() -> RandomProblem:
    return lambda seed: contested(np.random.default_rng(seed))
