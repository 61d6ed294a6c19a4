"""Families on a mesh of 2x2: a few of those that `make zoo-ranks` runs."""

from collections.abc import Callable

import pytest
from zoo.families_on_ranks import cases, selected

NUM_RANKS = 4
CASES = cases(a=2, b=2)
USUAL = ("mamba2", "convnext", "dit", "dlrm", "graphsage")
MORE = ("bart", "opt", "gpt-oss", "patchtst", "clip", "two-tower", "lstm")


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.parametrize("case", selected(CASES, USUAL, MORE))
def test_family(case: str, on_ranks: Callable[[str], None]) -> None:
    on_ranks(case)
