"""Recomputation and memory on 4 ranks."""

from collections.abc import Callable

import pytest
from runtime.cases import budgets, recomputation, timeline
from support.long_cases import long_of, with_long
from support.ranks import joined

NUM_RANKS = 4
CASES = joined(recomputation, budgets, timeline)
LONG = long_of(recomputation, timeline)


@pytest.mark.matrix(1)
@pytest.mark.ranks
@pytest.mark.parametrize("case", with_long(CASES, LONG))
def test_case(case: str, on_ranks: Callable[[str], None]) -> None:
    on_ranks(case)


@pytest.mark.thorough
def test_the_second_case_has_both() -> None:
    case = budgets.CASES["gathered again and checkpointed"]
    case.prepare()
    assert case.plan.stages[0].checkpoints
