"""Operators along sharded dims on 4 ranks."""

from collections.abc import Callable

import pytest
from runtime.cases import attention, experts, operators, sharded_dims
from support.long_cases import long_of, with_long
from support.ranks import joined

NUM_RANKS = 4
CASES = joined(sharded_dims, attention, operators, experts)
LONG = long_of(experts, attention, operators)


@pytest.mark.matrix(4)
@pytest.mark.ranks
@pytest.mark.parametrize("case", with_long(CASES, LONG))
def test_case(case: str, on_ranks: Callable[[str], None]) -> None:
    on_ranks(case)
