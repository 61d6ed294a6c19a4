"""Uneven shards: allowed dims, sizes, and bytes of reshardings."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.prices import Prices

from autoshard.errors import LayoutError
from autoshard.layouts import (
    Action,
    Layout,
    ReshardingTable,
    S,
    can_be_sharded,
    largest_shard,
    legal_layouts,
    shards_unevenly,
    step_price,
)

SIZES = (2, 4)
SHAPE = (10, 7, 8)
"""Axis 0 divides dims 0 and 2, axis 1 dim 2; all else is uneven."""


@given(st.integers(1, 60), st.integers(1, 9))
def test_slices_are_those_of_torch(size: int, parts: int) -> None:
    """`torch.chunk` is what DTensor cuts with; where it gives fewer chunks, a rank is empty."""
    chunks = torch.arange(size).chunk(parts)
    assert can_be_sharded(size, parts) == (len(chunks) == parts)
    assert shards_unevenly(size, parts) == (len(chunks) == parts and size % parts != 0)
    layout = Layout.parse("S(0)")
    assert layout.is_legal((size,), (parts,)) == (len(chunks) == parts)
    if len(chunks) < parts:
        with pytest.raises(LayoutError, match="does not divide"):
            layout.local_shape((size,), (parts,))
        return
    assert layout.local_shape((size,), (parts,)) == (largest_shard(size, parts),)
    for rank, chunk in enumerate(chunks):
        ((held,),) = layout.local_slices((size,), (parts,), (rank,))
        assert torch.equal(torch.arange(size)[held], chunk)


def test_one_axis_alone_shards_unevenly() -> None:
    """Neither with another axis, nor interleaved, nor so that a rank gets nothing."""
    legal = {str(x) for x in legal_layouts(SHAPE, SIZES, differentiable=False, partial=False)}
    assert {"S(0),S(1)", "S(1),S(0)", "S(1),S(2)", "R,S(0)", "R,S(1)", "S(2),S(2)"} <= legal
    assert not {"S(0),S(0)", "S(1),S(1)"} & legal
    for shape, sharded in (((6,), S(0)), ((10,), S(0, (1, 1))), ((3,), S(0))):
        layout = Layout((sharded,))
        assert not layout.is_legal(shape, (4,))
        assert layout not in legal_layouts(shape, (4,), differentiable=True, interleaved=[sharded])
    # An axis of one rank does not count.
    assert Layout.parse("S(0),S(0)").is_legal((10,), (1, 4))


def test_sizes_that_can_be_sharded_alike_share_their_layouts() -> None:
    """Layouts are made once for all shapes that have the same: the vocabulary may be any."""
    some, other = (legal_layouts((64, n), SIZES, differentiable=True) for n in (50257, 32003))
    assert some is other
    assert some != legal_layouts((64, 50264), SIZES, differentiable=True)


def test_an_uneven_slice_is_free() -> None:
    reshardings = ReshardingTable((10, 4), 4, (4,), differentiable=False, pricer=Prices())
    (step,) = reshardings.path(Layout.parse("R"), Layout.parse("S(0)"))
    assert (step.forward, step.backward) == (Action.SLICE, Action.NOTHING)
    assert step_price(step, Prices()).total == 0
