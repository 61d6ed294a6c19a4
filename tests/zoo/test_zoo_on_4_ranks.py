"""All families on a mesh of 2x2; a dozen of them in every run of the suite."""

from collections.abc import Callable

import pytest
from zoo.families_on_ranks import cases, parameters

NUM_RANKS = 4
TIMEOUT = 3600
CASES = cases(a=2, b=2)
_USUAL = {
    *("opt", "gpt-oss", "mamba2", "bart", "convnext", "patchtst"),
    *("clip", "dit", "dlrm", "two-tower", "lstm", "graphsage"),
}


@pytest.mark.parametrize(
    "case", parameters(CASES, [f"{family} float64 on 4" for family in sorted(_USUAL)])
)
def test_family(case: str, on_ranks: Callable[[str], None]) -> None:
    on_ranks(case)
