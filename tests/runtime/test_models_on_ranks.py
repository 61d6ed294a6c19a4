"""Planned models on 4 ranks: the outputs, gradients and collectives of the plan."""

from collections.abc import Callable

import pytest
from runtime.cases import constrained, custom, exports, interleaved, transformers
from support.long_cases import long_of, with_long
from support.ranks import joined

NUM_RANKS = 4
CASES = joined(transformers, constrained, interleaved, custom, exports)
LONG = long_of(transformers, exports)


@pytest.mark.matrix(3)
@pytest.mark.ranks
@pytest.mark.parametrize("case", with_long(CASES, LONG))
def test_case(case: str, on_ranks: Callable[[str], None]) -> None:
    on_ranks(case)
