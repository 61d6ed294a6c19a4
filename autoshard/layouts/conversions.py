"""Changing a tensor from one layout to another: steps, collectives, bytes and price.

A conversion is a chain of steps, each on one axis. The table `STEPS` is the whole truth
about a step: what runs forward, and what autograd runs backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from itertools import pairwise
from math import prod
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import dijkstra

from autoshard.errors import LayoutError
from autoshard.layouts.layout import Layout, legal_layouts
from autoshard.layouts.types import AxisType, I, Kind, P, R, S


class Action(StrEnum):
    """What a step runs on each rank, in one direction."""

    NOTHING = "nothing"
    SLICE = "slice"
    PAD = "pad"
    """A slice is written into zeros: the slice's gradient as a partial value."""
    MASK = "mask"
    """Kept on the axis's first rank, zero on the others."""
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"

    @property
    def is_collective(self) -> bool:
        """Whether ranks communicate."""
        return self in _COLLECTIVES


_COLLECTIVES = frozenset(
    {Action.ALL_REDUCE, Action.ALL_GATHER, Action.REDUCE_SCATTER, Action.ALL_TO_ALL}
)

_I, _R, _S, _P = Kind.INVARIANT, Kind.REPLICATE, Kind.SHARD, Kind.PARTIAL

STEPS: dict[tuple[Kind, Kind], tuple[Action, Action]] = {
    (_I, _R): (Action.NOTHING, Action.ALL_REDUCE),
    (_I, _S): (Action.SLICE, Action.ALL_GATHER),
    (_I, _P): (Action.MASK, Action.NOTHING),
    (_R, _I): (Action.NOTHING, Action.MASK),
    (_R, _S): (Action.SLICE, Action.PAD),
    (_R, _P): (Action.MASK, Action.MASK),
    (_S, _I): (Action.ALL_GATHER, Action.SLICE),
    (_S, _R): (Action.ALL_GATHER, Action.REDUCE_SCATTER),
    (_S, _S): (Action.ALL_TO_ALL, Action.ALL_TO_ALL),
    (_P, _I): (Action.ALL_REDUCE, Action.NOTHING),
    (_P, _R): (Action.ALL_REDUCE, Action.ALL_REDUCE),
    (_P, _S): (Action.REDUCE_SCATTER, Action.ALL_GATHER),
}
"""(from, to) -> (forward, backward). S -> P is legal but never pays, so it is not offered."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a conversion.

    Attributes:
        axis: the mesh axis.
        source: type on the axis before.
        target: type on the axis after.
        nbytes: size of the larger of a rank's tensor before and after: what an all-gather
            makes, what a reduce-scatter takes, and the tensor itself otherwise.
        forward: what runs in the forward pass.
        backward: what runs in the backward pass; nothing where no gradient flows.
    """

    axis: int
    source: AxisType
    target: AxisType
    nbytes: int
    forward: Action
    backward: Action


class Pricer(Protocol):
    """Prices in seconds; a mesh is one."""

    def collective_time(self, action: Action, axis: int, nbytes: int) -> float:
        """Seconds that a collective over one axis takes, with `Step.nbytes`."""
        ...

    def copy_time(self, nbytes: int) -> float:
        """Seconds that a local copy takes that makes `nbytes`."""
        ...


STEP_OVERHEAD = 1e-9
"""Seconds added to every step but a mere slice, so that among equal chains the shortest wins."""


def step_price(step: Step, pricer: Pricer) -> float:
    """Seconds that a step takes, forward plus backward."""
    if (step.forward, step.backward) == (Action.SLICE, Action.NOTHING):
        return 0.0
    return STEP_OVERHEAD + sum(
        _action_price(action, step, pricer) for action in (step.forward, step.backward)
    )


def _action_price(action: Action, step: Step, pricer: Pricer) -> float:
    # A slice is a view of what is there.
    if action in (Action.NOTHING, Action.SLICE):
        return 0.0
    if action.is_collective:
        return pricer.collective_time(action, step.axis, step.nbytes)
    return pricer.copy_time(step.nbytes)


class Conversions:
    """Cheapest conversions between all layouts of one kind of tensor.

    Args:
        shape: global shape.
        itemsize: bytes of an element.
        axis_sizes: size of each mesh axis.
        differentiable: whether the tensor has a gradient; without one I and R are the same,
            written R, and backward costs nothing.
        partial: whether the element type can be summed.
        backward: whether the backward pass will run through the conversion; if not, only
            forward is priced, though the types still say what the gradient would be.
        pricer: prices of collectives and copies.
    """

    def __init__(
        self,
        shape: Sequence[int],
        itemsize: int,
        axis_sizes: Sequence[int],
        *,
        differentiable: bool,
        partial: bool = True,
        backward: bool = True,
        pricer: Pricer,
    ) -> None:
        self._shape = tuple(shape)
        self._itemsize = itemsize
        self._axis_sizes = tuple(axis_sizes)
        self._backward = differentiable and backward
        self._pricer = pricer
        self._prices: dict[tuple[int, Action, Action, int], float] = {}
        self.layouts = tuple(
            legal_layouts(shape, axis_sizes, differentiable=differentiable, partial=partial)
        )
        self.index = {layout: i for i, layout in enumerate(self.layouts)}

    @property
    def cost(self) -> NDArray[np.float64]:
        """Seconds from each layout (row) to each layout (column); inf where there is no way."""
        return self._shortest[0]

    def path(self, source: Layout, target: Layout) -> tuple[Step, ...]:
        """The cheapest chain of steps; empty where the layouts are the same.

        Raises:
            LayoutError: a layout is illegal for this tensor, or there is no way.
        """
        start, end = self._number(source), self._number(target)
        predecessors = self._shortest[1]
        chain = [end]
        while chain[-1] != start:
            chain.append(int(predecessors[start, chain[-1]]))
            if chain[-1] < 0:
                raise LayoutError(f"there is no conversion from {source} to {target}")
        chain.reverse()
        return tuple(self._arcs[a, b] for a, b in pairwise(chain))

    def _number(self, layout: Layout) -> int:
        if layout not in self.index:
            raise LayoutError(
                f"layout {layout} is illegal for shape {self._shape} "
                f"over axes of {self._axis_sizes}"
            )
        return self.index[layout]

    @cached_property
    def _arcs(self) -> dict[tuple[int, int], Step]:
        arcs = {}
        for number, layout in enumerate(self.layouts):
            elements = prod(layout.local_shape(self._shape, self._axis_sizes))
            for axis, new, after in _moves(layout, len(self._shape)):
                target = self.index.get(after)
                if target is not None:
                    arcs[number, target] = self._step(layout.types[axis], axis, new, elements)
        return arcs

    def _step(self, old: AxisType, axis: int, new: AxisType, elements: int) -> Step:
        forward, backward = STEPS[old.kind, new.kind]
        grows = old.is_shard and not new.is_shard
        return Step(
            axis=axis,
            source=old,
            target=new,
            nbytes=elements * self._itemsize * (self._axis_sizes[axis] if grows else 1),
            forward=forward,
            backward=backward if self._backward else Action.NOTHING,
        )

    @cached_property
    def _shortest(self) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
        n = len(self.layouts)
        pairs = np.array(list(self._arcs), dtype=np.intp).reshape(-1, 2)
        prices = np.array([self._price(step) for step in self._arcs.values()])
        arcs = csr_array((prices, (pairs[:, 0], pairs[:, 1])), shape=(n, n))
        cost, predecessors = dijkstra(arcs, return_predecessors=True)
        return cost, predecessors

    def _price(self, step: Step) -> float:
        # Few steps differ in what is priced.
        key = (step.axis, step.forward, step.backward, step.nbytes)
        if key not in self._prices:
            self._prices[key] = step_price(step, self._pricer)
        return self._prices[key]


@lru_cache(maxsize=1 << 16)
def _moves(layout: Layout, num_dims: int) -> tuple[tuple[int, AxisType, Layout], ...]:
    """Every step from a layout, whatever the shape: axis, new type, layout after it."""
    innermost = [
        (axis, old)
        for axis, old in enumerate(layout.types)
        if not old.is_shard or layout.cutting_axes(old.dim)[-1] == axis
    ]
    return tuple(
        (axis, new, layout.replace(axis, new))
        for axis, old in innermost
        for new in (I, R, P, *(S(d) for d in range(num_dims)))
        if new != old and (old.kind, new.kind) in STEPS
    )
