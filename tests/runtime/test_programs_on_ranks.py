"""Hand-written plans and single resharding steps on 4 ranks."""

from collections.abc import Callable

import pytest
from runtime.cases import parallelisms, programs, resharding, uneven
from support.long_cases import long_of, with_long
from support.ranks import joined

from autoshard.layouts import STEPS, Kind, Layout

NUM_RANKS = 4
CASES = joined(parallelisms, programs, uneven, resharding)
LONG = long_of(resharding)


@pytest.mark.matrix(8)
@pytest.mark.ranks
@pytest.mark.parametrize("case", with_long(CASES, LONG))
def test_case(case: str, on_ranks: Callable[[str], None]) -> None:
    on_ranks(case)


def test_every_pair_of_the_table_is_a_case() -> None:
    assert {(Kind(s[0]), Kind(t[0])) for s, t in resharding.PAIRS} == set(STEPS)


def test_layouts_of_the_shape_have_uneven_cuts() -> None:
    """The cases that are said to be uneven are."""
    for dim, mine in ((0, slice(9, 10)), (2, slice(6, 7))):
        layout = Layout.parse(f"S({dim})")
        assert layout.local_slices(resharding.UNEVEN.shape, resharding.UNEVEN.mesh, (3,))[dim] == (
            mine,
        )
