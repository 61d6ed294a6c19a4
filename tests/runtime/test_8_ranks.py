"""Models and training on 8 ranks."""

from collections.abc import Callable

import pytest
from runtime.cases import mase, training_on_8
from support.long_cases import long_of, with_long
from support.ranks import joined

NUM_RANKS = 8
CASES = joined(mase, training_on_8)
LONG = long_of(mase, training_on_8)


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.parametrize("case", with_long(CASES, LONG))
def test_case(case: str, on_ranks: Callable[[str], None]) -> None:
    on_ranks(case)
