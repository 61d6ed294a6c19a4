"""Pipelines of two and four stages on 4 ranks."""

from collections.abc import Callable

import pytest
from runtime.cases.pipelines import ON_4

NUM_RANKS = 4
CASES = ON_4


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
def test_case(case: str, on_ranks: Callable[[str], None]) -> None:
    on_ranks(case)
