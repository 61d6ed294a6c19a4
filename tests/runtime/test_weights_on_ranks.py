"""Loading and saving weights and checkpoints on 4 ranks."""

from collections.abc import Callable

import pytest
from runtime.cases import checkpoints, weights
from support.ranks import joined

NUM_RANKS = 4
CASES = joined(weights, checkpoints)


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
def test_case(case: str, on_ranks: Callable[[str], None]) -> None:
    on_ranks(case)
