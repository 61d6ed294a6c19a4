"""Plans for numbers of ranks that are no power of two."""

from collections.abc import Callable

import pytest
from runtime.cases import odd_axes
from support.ranks import joined

NUM_RANKS = 6
CASES = joined(odd_axes)


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
def test_case(case: str, on_ranks: Callable[[str], None]) -> None:
    on_ranks(case)
