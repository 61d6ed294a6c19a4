"""Families on a mesh of 2x2: a dozen of those that `make zoo-ranks` runs."""

from collections.abc import Callable

import pytest
from zoo.families_on_ranks import cases

NUM_RANKS = 4
CASES = cases(a=2, b=2)
USUAL = (
    *("opt", "gpt-oss", "mamba2", "bart", "convnext", "patchtst"),
    *("clip", "dit", "dlrm", "two-tower", "lstm", "graphsage"),
)


@pytest.mark.ranks
@pytest.mark.parametrize("case", [f"{family} float64 on 4" for family in USUAL])
def test_family(case: str, on_ranks: Callable[[str], None]) -> None:
    on_ranks(case)
