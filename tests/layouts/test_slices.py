"""Slices of ranks, and bytes of reshardings, with even and uneven shards."""

from dataclasses import dataclass
from itertools import product
from math import isfinite, prod

import numpy as np
import pytest
from support.prices import Prices

from autoshard.layouts import AxisType, Layout, ReshardingTable, S, legal_layouts, step_price


@dataclass(frozen=True)
class Tensor:
    """A shape on a mesh.

    Attributes:
        shape: of the tensor.
        sizes: of the axes.
        interleaved: interleaved types that its layouts may have.
        differentiable: whether it has a gradient.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    interleaved: tuple[AxisType, ...] = ()
    differentiable: bool = True

    @property
    def layouts(self) -> list[Layout]:
        """All that it can have."""
        return list(
            legal_layouts(
                self.shape,
                self.sizes,
                differentiable=self.differentiable,
                interleaved=self.interleaved,
            )
        )

    def is_even(self, layout: Layout) -> bool:
        """Whether all ranks hold as much."""
        shards = [(n, t) for n, t in zip(self.sizes, layout.types, strict=True) if t.is_shard]
        return all(self.shape[t.dim] % n == 0 for n, t in shards)


UNEVEN = (10, 7, 8)
"""An axis of 2 divides dims 0 and 2, one of 4 dim 2; all else is uneven."""

HELD = {
    "even": Tensor((16, 24), (2, 4), (S(0, (1, 1)), S(1, (2, 1)))),
    "uneven": Tensor(UNEVEN, (2, 4)),
}


@pytest.mark.parametrize(
    ("name", "layout"),
    [pytest.param(n, x, id=f"{n} {x}") for n, tensor in HELD.items() for x in tensor.layouts],
)
def test_ranks_hold_the_tensor_exactly(name: str, layout: Layout) -> None:
    """Slices of all ranks cover each element once per rank of the axes that do not shard it."""
    shape, sizes = HELD[name].shape, HELD[name].sizes
    local, is_even = layout.local_shape(shape, sizes), HELD[name].is_even(layout)
    count = np.zeros(shape, dtype=int)
    largest = [0] * len(shape)
    for coordinate in product(*map(range, sizes)):
        parts = layout.local_slices(shape, sizes, coordinate)
        held = np.ix_(*(np.r_[*dim] for dim in parts))
        assert all(count[held].shape)
        assert not is_even or count[held].shape == local
        largest = [max(pair) for pair in zip(largest, count[held].shape, strict=True)]
        count[held] += 1
    copies = prod(n for n, t in zip(sizes, layout.types, strict=True) if not t.is_shard)
    assert (count == copies).all()
    assert tuple(largest) == local


def test_some_layouts_are_uneven() -> None:
    """The cases above are what they are said to be."""
    assert all(HELD["even"].is_even(layout) for layout in HELD["even"].layouts)
    assert not all(HELD["uneven"].is_even(layout) for layout in HELD["uneven"].layouts)


INTERLEAVED = (S(1, (1, 1)), S(1, (2, 1, 1)))
MOVED = {
    "even": Tensor((8, 16), (2, 4)),
    "even, no gradient": Tensor((8, 16), (2, 4), differentiable=False),
    "even, interleaved": Tensor((8, 16), (2, 4), INTERLEAVED),
    "even, interleaved, no gradient": Tensor((8, 16), (2, 4), INTERLEAVED, differentiable=False),
    "uneven on 4": Tensor(UNEVEN, (4,)),
    "uneven on 2x4": Tensor(UNEVEN, (2, 4)),
    "uneven on 4x2": Tensor(UNEVEN, (4, 2)),
    "uneven on 3x2": Tensor(UNEVEN, (3, 2)),
}


@pytest.mark.parametrize("name", MOVED)
def test_every_path_leads_where_it_should_at_the_price_it_says(name: str) -> None:
    """With the bytes of every step worked out from what each rank sends or receives."""
    tensor = MOVED[name]
    shape, sizes = tensor.shape, tensor.sizes
    table = ReshardingTable(
        shape,
        4,
        sizes,
        differentiable=tensor.differentiable,
        interleaved=tensor.interleaved,
        pricer=Prices(),
    )
    for source, target in product(table.layouts, repeat=2):
        cost = table.cost(source, target)
        assert isfinite(cost)
        layout, steps = source, table.path(source, target)
        for step in steps:
            (axis,) = step.axes
            assert layout.types[axis] == step.source
            num_ranks, before = sizes[axis], layout.local_shape(shape, sizes)
            is_even = tensor.is_even(layout)
            layout = layout.replace(axis, step.target)
            after = layout.local_shape(shape, sizes)
            if step.source.is_shard and step.target.is_shard:
                # A rank sends every rank the part of its slice that will be theirs.
                part = [min(pair) for pair in zip(before, after, strict=True)]
                elements = num_ranks * prod(part)
            elif step.source.is_shard or step.target.is_shard:
                elements = num_ranks * min(prod(before), prod(after))
            else:
                elements = prod(before)
            assert step.nbytes == 4 * elements, (str(source), str(target), step)
            if is_even and tensor.is_even(layout):
                assert step.nbytes == 4 * max(prod(before), prod(after))
            sharded = [t.dim for t in (step.source, step.target) if t.is_shard]
            assert step.padded == any(shape[dim] % num_ranks for dim in sharded)
        assert layout == target
        assert sum(step_price(step, Prices()).total for step in steps) == pytest.approx(cost)


COPIED = {
    "interleaved": (Tensor((8, 16), (2, 4), INTERLEAVED), "I,S(1)", "I,S(1)/1+1", "I,R"),
    "filling up": (Tensor((10, 4), (4,)), "S(0)", "S(0)", "R"),
}


@pytest.mark.parametrize("name", COPIED)
def test_what_is_put_in_order_costs_a_copy_next_to_each_collective(name: str) -> None:
    tensor, plain, copied, whole = COPIED[name]
    # What is filled up is as long as a dim of 12 that 4 ranks divide.
    even = tensor.shape if tensor.interleaved else (12, 4)
    found = []
    for shape, source in ((even, plain), (tensor.shape, copied)):
        table = ReshardingTable(
            shape,
            4,
            tensor.sizes,
            differentiable=True,
            interleaved=tensor.interleaved,
            pricer=Prices(),
        )
        (step,) = table.path(Layout.parse(source), Layout.parse(whole))
        found.append(step)
    without, with_copies = found
    assert without.nbytes == with_copies.nbytes
    copies = 2 * Prices().copy_time(with_copies.nbytes)
    expected = step_price(without, Prices()).total + copies
    assert step_price(with_copies, Prices()).total == pytest.approx(expected)
