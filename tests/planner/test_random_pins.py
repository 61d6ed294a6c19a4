"""A part of the random pins of `benchmarks/random_pins`: none is faster than the free plan."""

import pytest

from benchmarks.random_pins import compare


@pytest.mark.parametrize("seed", [0, 3])
def test_no_pinned_plan_is_faster_than_the_free_one(seed: int) -> None:
    """`make prove-layouts` compares 100 models."""
    pinned, faster = compare(seed)
    assert pinned
    assert not faster
