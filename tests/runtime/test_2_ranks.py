"""Pipelines of two stages, and compiled models, on 2 ranks."""

from collections.abc import Callable

import pytest
from runtime.cases import compiled, pipeline_cuts
from runtime.cases.pipelines import ON_2
from support.ranks import joined

NUM_RANKS = 2
CASES = {**ON_2, **pipeline_cuts.CASES, **joined(compiled)}


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
def test_case(case: str, on_ranks: Callable[[str], None]) -> None:
    on_ranks(case)
