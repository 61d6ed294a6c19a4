"""Families on a mesh of 2x2: a few of those that `make zoo-ranks` runs."""

from collections.abc import Callable

import pytest
from support.long_cases import with_long
from zoo.families_on_ranks import cases

NUM_RANKS = 4
CASES = cases(a=2, b=2)
USUAL = ("mamba2", "convnext", "dit", "dlrm", "graphsage")
MORE = ("bart", "opt", "gpt-oss", "patchtst", "clip", "two-tower", "lstm")


def named(families: tuple[str, ...]) -> list[str]:
    return [f"{family} float64 on 4" for family in families]


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.parametrize("case", with_long(named(USUAL + MORE), named(MORE)))
def test_family(case: str, on_ranks: Callable[[str], None]) -> None:
    on_ranks(case)
