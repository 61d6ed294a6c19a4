"""Pipelines of two stages on 2 ranks."""

from collections.abc import Callable

import pytest
from runtime.cases.pipelines import ON_2

NUM_RANKS = 2
CASES = ON_2


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
def test_case(case: str, on_ranks: Callable[[str], None]) -> None:
    on_ranks(case)
