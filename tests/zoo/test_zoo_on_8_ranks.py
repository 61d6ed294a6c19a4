"""All families on a mesh of 2x4."""

from collections.abc import Callable

import pytest
from zoo.families_on_ranks import cases, parameters

NUM_RANKS = 8
TIMEOUT = 3600
CASES = cases(a=2, b=4)


@pytest.mark.parametrize("case", parameters(CASES))
def test_family(case: str, on_ranks: Callable[[str], None]) -> None:
    on_ranks(case)
