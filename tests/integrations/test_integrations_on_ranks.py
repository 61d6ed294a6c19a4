"""Training libraries with planned models on 4 ranks."""

from collections.abc import Callable

import pytest
from integrations.cases import (
    accelerated,
    adapters,
    checkpoint_matrix,
    generated,
    trained,
    trainer_settings,
)
from support.long_cases import all_but_one, with_long
from support.ranks import joined

NUM_RANKS = 4
CASES = joined(*(accelerated, adapters, checkpoint_matrix, generated, trained, trainer_settings))
LONG = set(all_but_one(CASES, ("4", "2x2")))


@pytest.mark.matrix(1)
@pytest.mark.ranks
@pytest.mark.parametrize("case", with_long(CASES, LONG))
def test_case(case: str, on_ranks: Callable[[str], None]) -> None:
    on_ranks(case)
