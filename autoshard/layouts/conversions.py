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


def again_price(step: Step, pricer: Pricer) -> float:
    """Seconds that the forward action of a step takes once more."""
    if step.forward in (Action.NOTHING, Action.SLICE):
        return 0.0
    return STEP_OVERHEAD + _action_price(step.forward, step, pricer)


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
        self._before: dict[int, NDArray[np.int32]] = {}
        self.layouts = tuple(
            legal_layouts(shape, axis_sizes, differentiable=differentiable, partial=partial)
        )
        self.index = {layout: i for i, layout in enumerate(self.layouts)}

    @property
    def cost(self) -> NDArray[np.float64]:
        """Seconds from each layout (row) to each layout (column); inf where there is no way."""
        return self._shortest[0]

    @property
    def again_cost(self) -> NDArray[np.float64]:
        """Seconds of the forward actions of each chain alone; inf where there is no way."""
        return self._forward[0]

    @property
    def stays(self) -> NDArray[np.bool_]:
        """Whether the forward pass of each chain does nothing: the tensor stays what it is."""
        return self._forward[1]

    @cached_property
    def steps(self) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.float64]]:
        """Every step by the numbers of the layouts before and after it, and its seconds."""
        # Few moves differ in what is priced.
        priced_as = list(zip(self._moves.kinds, self._nbytes, strict=True))
        examples = {key: i for i, key in enumerate(priced_as)}
        price = {key: step_price(self._step(i), self._pricer) for key, i in examples.items()}
        pairs = np.array(list(self._moves.arcs), dtype=np.intp).reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1], np.array([price[key] for key in priced_as])

    def path(self, source: Layout, target: Layout) -> tuple[Step, ...]:
        """The cheapest chain of steps; empty where the layouts are the same.

        Raises:
            LayoutError: a layout is illegal for this tensor, or there is no way.
        """
        start, end = self._number(source), self._number(target)
        predecessors = self._predecessors(start)
        chain = [end]
        while chain[-1] != start:
            chain.append(int(predecessors[chain[-1]]))
            if chain[-1] < 0:
                raise LayoutError(f"there is no conversion from {source} to {target}")
        chain.reverse()
        return tuple(self._step(self._moves.arcs[pair]) for pair in pairwise(chain))

    def _number(self, layout: Layout) -> int:
        if layout not in self.index:
            raise LayoutError(
                f"layout {layout} is illegal for shape {self._shape} "
                f"over axes of {self._axis_sizes}"
            )
        return self.index[layout]

    def _step(self, i: int) -> Step:
        move = self._moves.moves[i]
        forward, backward = STEPS[move.source.kind, move.target.kind]
        return Step(
            axis=move.axis,
            source=move.source,
            target=move.target,
            nbytes=self._nbytes[i],
            forward=forward,
            backward=backward if self._backward else Action.NOTHING,
        )

    @cached_property
    def _moves(self) -> "_Moves":
        return _moves_between(self.layouts, len(self._shape), self._axis_sizes)

    @cached_property
    def _nbytes(self) -> list[int]:
        """`Step.nbytes` of each move."""
        whole = prod(self._shape) * self._itemsize
        return [whole // parts for parts in self._moves.parts]

    @cached_property
    def _shortest(self) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
        cost, predecessors = dijkstra(self._graph, return_predecessors=True)
        return cost, predecessors

    def _predecessors(self, start: int) -> NDArray[np.int32]:
        """The layout before each one on the cheapest chain from one layout, shape [N]."""
        if start not in self._before:
            indices = np.array([start])
            _, before = dijkstra(self._graph, indices=indices, return_predecessors=True)
            self._before[start] = before[0]
        return self._before[start]

    @cached_property
    def _graph(self) -> csr_array:
        n = len(self.layouts)
        sources, targets, prices = self.steps
        return csr_array((prices, (sources, targets)), shape=(n, n))

    @cached_property
    def _forward(self) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        n = len(self.layouts)
        seconds, nothing = np.zeros((n, n)), np.zeros((n, n), dtype=np.bool_)
        for pair, i in self._moves.arcs.items():
            step = self._step(i)
            seconds[pair] = again_price(step, self._pricer)
            nothing[pair] = step.forward is Action.NOTHING
        cost, predecessors = self._shortest
        stays = np.eye(n, dtype=np.bool_)
        total = np.where(stays, 0.0, np.inf)
        known = stays.copy()
        # A chain is known once the chain that it prolongs is.
        while True:
            rows, cols = np.nonzero(np.isfinite(cost) & ~known)
            before = predecessors[rows, cols]
            ready = known[rows, before]
            if not ready.any():
                return total, stays
            rows, cols, before = rows[ready], cols[ready], before[ready]
            total[rows, cols] = total[rows, before] + seconds[before, cols]
            stays[rows, cols] = stays[rows, before] & nothing[before, cols]
            known[rows, cols] = True


@dataclass(frozen=True, slots=True)
class _Move:
    """One axis changes its type."""

    axis: int
    source: AxisType
    target: AxisType


@dataclass(frozen=True, slots=True)
class _Moves:
    """Every move between some layouts; A of them.

    Attributes:
        arcs: number of each move by the numbers of the layouts before and after.
        moves: what moves, A of them.
        kinds: equal where the axis and the kinds of both types are, A of them.
        parts: how many of the larger tensor, before or after, make a whole one, A of them.
    """

    arcs: dict[tuple[int, int], int]
    moves: tuple[_Move, ...]
    kinds: tuple[int, ...]
    parts: tuple[int, ...]


@lru_cache(maxsize=1 << 10)
def _moves_between(
    layouts: tuple[Layout, ...], num_dims: int, axis_sizes: tuple[int, ...]
) -> _Moves:
    """The moves are those of all tensors that can have these layouts."""
    index = {layout: i for i, layout in enumerate(layouts)}
    arcs: dict[tuple[int, int], int] = {}
    numbers: dict[tuple[int, Kind, Kind], int] = {}
    moves: list[_Move] = []
    kinds: list[int] = []
    parts: list[int] = []
    for number, layout in enumerate(layouts):
        slices = prod(axis_sizes[a] for a, t in enumerate(layout.types) if t.is_shard)
        for axis, new, after in _moves(layout, num_dims):
            if after in index:
                old = layout.types[axis]
                arcs[number, index[after]] = len(moves)
                moves.append(_Move(axis, old, new))
                kinds.append(numbers.setdefault((axis, old.kind, new.kind), len(numbers)))
                grows = old.is_shard and not new.is_shard
                parts.append(slices // axis_sizes[axis] if grows else slices)
    return _Moves(arcs, tuple(moves), tuple(kinds), tuple(parts))


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
