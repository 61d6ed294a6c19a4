"""Families on a mesh of 2x4: two of those that `make zoo-ranks` runs."""

from collections.abc import Callable

import pytest
from zoo.families_on_ranks import cases, selected

NUM_RANKS = 8
CASES = cases(a=2, b=4)


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.parametrize("case", selected(CASES, ["swin"], ["llama"]))
def test_family(case: str, on_ranks: Callable[[str], None]) -> None:
    on_ranks(case)
