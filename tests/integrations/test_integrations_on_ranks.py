"""Training libraries with planned models on 4 ranks."""

from collections.abc import Callable

import pytest
from integrations.cases import accelerated, adapters, generated, trained
from support.ranks import joined

NUM_RANKS = 4
CASES = joined(accelerated, adapters, generated, trained)


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
def test_case(case: str, on_ranks: Callable[[str], None]) -> None:
    on_ranks(case)
