"""Pipelines of two and four stages on 4 ranks."""

from collections.abc import Callable

import pytest
from runtime.cases import (
    own_schedules,
    pipeline_edges,
    pipeline_habits,
    pipeline_states,
    pipelines,
    stage_messages,
)
from support.long_cases import long_of, with_long
from support.ranks import joined

NUM_RANKS = 4
CASES = joined(
    stage_messages, pipelines, pipeline_states, pipeline_habits, pipeline_edges, own_schedules
)
LONG = long_of(pipelines)


@pytest.mark.matrix(4)
@pytest.mark.ranks
@pytest.mark.parametrize("case", with_long(CASES, LONG))
def test_case(case: str, on_ranks: Callable[[str], None]) -> None:
    on_ranks(case)
