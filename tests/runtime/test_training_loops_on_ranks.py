"""Training and decoding loops with a planned model on 4 ranks."""

from collections.abc import Callable

import pytest
from runtime.cases import (
    criteria,
    micro_batches,
    misuse,
    opaque_modules,
    several_programs,
    updated_buffers,
)
from support.ranks import joined

NUM_RANKS = 4
CASES = joined(updated_buffers, misuse, several_programs, criteria, micro_batches, opaque_modules)


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
def test_case(case: str, on_ranks: Callable[[str], None]) -> None:
    on_ranks(case)
