"""Dims that an axis does not divide: which may be cut, into what, and what conversions move."""

from itertools import product
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoshard.errors import LayoutError
from autoshard.layouts import (
    Action,
    Conversions,
    Layout,
    S,
    can_be_cut,
    cuts_unevenly,
    largest_share,
    legal_layouts,
    step_price,
)

SIZES = (2, 4)
SHAPE = (10, 7, 8)
"""Axis 0 divides dims 0 and 2, axis 1 dim 2; all else is uneven."""


class Prices:
    """Alpha-beta prices, with copies that show."""

    def collective_time(
        self,
        action: str,
        axis: int,
        nbytes: int,
        *,
        inner: bool = False,  # noqa: ARG002  the protocol's
    ) -> float:
        steps = 2.0 if action == "all_reduce" else 1.0
        return steps * (1e-5 + nbytes * 1e-10 * (axis + 1))

    def copy_time(self, nbytes: int) -> float:
        return nbytes * 1e-12


def table(shape: tuple[int, ...] = SHAPE, sizes: tuple[int, ...] = SIZES) -> Conversions:
    return Conversions(shape, 4, sizes, differentiable=True, pricer=Prices())


@given(st.integers(1, 60), st.integers(1, 9))
def test_slices_are_those_of_torch(size: int, parts: int) -> None:
    """`torch.chunk` is what DTensor cuts with; where it gives fewer chunks, a rank is empty."""
    chunks = torch.arange(size).chunk(parts)
    assert can_be_cut(size, parts) == (len(chunks) == parts)
    assert cuts_unevenly(size, parts) == (len(chunks) == parts and size % parts != 0)
    layout = Layout.parse("S(0)")
    assert layout.is_legal((size,), (parts,)) == (len(chunks) == parts)
    if len(chunks) < parts:
        with pytest.raises(LayoutError, match="does not divide"):
            layout.local_shape((size,), (parts,))
        return
    assert layout.local_shape((size,), (parts,)) == (largest_share(size, parts),)
    for rank, chunk in enumerate(chunks):
        ((held,),) = layout.local_slices((size,), (parts,), (rank,))
        assert torch.equal(torch.arange(size)[held], chunk)


@pytest.mark.parametrize("layout", list(legal_layouts(SHAPE, SIZES, differentiable=True)), ids=str)
def test_ranks_hold_the_tensor_exactly(layout: Layout) -> None:
    """Slices of all ranks cover each element once per rank of the axes that do not cut."""
    count = np.zeros(SHAPE, dtype=int)
    largest = [0] * len(SHAPE)
    for coordinate in product(*map(range, SIZES)):
        parts = layout.local_slices(SHAPE, SIZES, coordinate)
        held = np.ix_(*(np.r_[*dim] for dim in parts))
        assert all(count[held].shape)
        largest = [max(pair) for pair in zip(largest, count[held].shape, strict=True)]
        count[held] += 1
    copies = prod(n for n, t in zip(SIZES, layout.types, strict=True) if not t.is_shard)
    assert (count == copies).all()
    assert tuple(largest) == layout.local_shape(SHAPE, SIZES)


def test_one_axis_alone_cuts_unevenly() -> None:
    """Neither with another axis, nor in chunks, nor so that a rank gets nothing."""
    legal = {str(x) for x in legal_layouts(SHAPE, SIZES, differentiable=False, partial=False)}
    assert {"S(0),S(1)", "S(1),S(0)", "S(1),S(2)", "R,S(0)", "R,S(1)", "S(2),S(2)"} <= legal
    assert not {"S(0),S(0)", "S(1),S(1)"} & legal
    for shape, cut in (((6,), S(0)), ((10,), S(0, (1, 1))), ((3,), S(0))):
        layout = Layout((cut,))
        assert not layout.is_legal(shape, (4,))
        assert layout not in legal_layouts(shape, (4,), differentiable=True, chunked=[cut])
    # An axis of one rank does not count.
    assert Layout.parse("S(0),S(0)").is_legal((10,), (1, 4))


def test_sizes_that_can_be_cut_alike_share_their_layouts() -> None:
    """Layouts are made once for all shapes that have the same: the vocabulary may be any."""
    some, other = (legal_layouts((64, n), SIZES, differentiable=True) for n in (50257, 32003))
    assert some is other
    assert some != legal_layouts((64, 50264), SIZES, differentiable=True)


@pytest.mark.parametrize("sizes", [(4,), (2, 4), (4, 2), (3, 2)])
def test_steps_move_slices_as_long_as_the_largest(sizes: tuple[int, ...]) -> None:
    """The bytes of every step, worked out from what each rank sends or receives."""
    conversions = table(SHAPE, sizes)
    for source, target in product(conversions.layouts, repeat=2):
        layout = source
        for step in conversions.path(source, target):
            num_ranks, before = sizes[step.axis], layout.local_shape(SHAPE, sizes)
            layout = layout.replace(step.axis, step.target)
            after = layout.local_shape(SHAPE, sizes)
            if step.source.is_shard and step.target.is_shard:
                # A rank sends every rank the part of its slice that will be theirs.
                part = [min(pair) for pair in zip(before, after, strict=True)]
                elements = num_ranks * prod(part)
            elif step.source.is_shard or step.target.is_shard:
                elements = num_ranks * min(prod(before), prod(after))
            else:
                elements = prod(before)
            assert step.nbytes == 4 * elements, (str(source), str(target), step)
            cut = [t.dim for t in (step.source, step.target) if t.is_shard]
            assert step.padded == any(SHAPE[dim] % num_ranks for dim in cut)
        assert layout == target


def test_filling_up_costs_a_copy_next_to_each_collective() -> None:
    (even,) = table((12, 4), (4,)).path(Layout.parse("S(0)"), Layout.parse("R"))
    (uneven,) = table((10, 4), (4,)).path(Layout.parse("S(0)"), Layout.parse("R"))
    assert even.nbytes == uneven.nbytes
    copies = 2 * Prices().copy_time(even.nbytes)
    assert step_price(uneven, Prices()) == pytest.approx(step_price(even, Prices()) + copies)


def test_an_uneven_slice_is_free() -> None:
    conversions = Conversions((10, 4), 4, (4,), differentiable=False, pricer=Prices())
    (step,) = conversions.path(Layout.parse("R"), Layout.parse("S(0)"))
    assert (step.forward, step.backward) == (Action.SLICE, Action.NOTHING)
    assert step_price(step, Prices()) == 0
