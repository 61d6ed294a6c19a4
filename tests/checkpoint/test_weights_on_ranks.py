"""Loading and saving weights and checkpoints on 4 ranks."""

from collections.abc import Callable

import pytest
from runtime.cases import checkpoints, weights
from support.long_cases import long_of, with_long
from support.ranks import joined

NUM_RANKS = 4
CASES = joined(weights, checkpoints)
LONG = long_of(checkpoints)


@pytest.mark.matrix(3)
@pytest.mark.ranks
@pytest.mark.parametrize("case", with_long(CASES, LONG))
def test_case(case: str, on_ranks: Callable[[str], None]) -> None:
    on_ranks(case)
