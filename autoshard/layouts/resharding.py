"""Changing a tensor from one layout to another: steps, collectives, bytes and price.

A resharding is a chain of steps, each on one axis. The table `STEPS` is the whole truth
about a step: what runs forward, and what autograd runs backward.
"""

from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
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

from autoshard.arrays import BoolArray, FloatArray, IntArray
from autoshard.errors import LayoutError
from autoshard.layouts.layout import (
    AxisType,
    I,
    Kind,
    Layout,
    P,
    R,
    S,
    largest_share,
    legal_layouts,
    uneven_shards,
)


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
    HALO_EXCHANGE = "halo_exchange"
    """Ranks give the edges of their slices to those next to them: no step, but operators do."""

    @property
    def is_collective(self) -> bool:
        """Whether ranks communicate."""
        return self in _COLLECTIVES


_COLLECTIVES = frozenset(Action) - {Action.NOTHING, Action.SLICE, Action.PAD, Action.MASK}

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


def makes_whole(source: AxisType, target: AxisType) -> bool:
    """Whether a step makes what is cut, or the same on all ranks, whole for use."""
    return target.kind is _R and source.kind in (_I, _S)


def is_padded(source: AxisType, target: AxisType, shape: Sequence[int], num_ranks: int) -> bool:
    """Whether slices of unequal length meet in a step: its axis does not divide the dim.

    Args:
        source: type on the axis before.
        target: type on the axis after.
        shape: of the whole tensor.
        num_ranks: of the axis.
    """
    return any(t.is_shard and shape[t.dim] % num_ranks != 0 for t in (source, target))


_OFFERED = frozenset(STEPS)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a resharding.

    Attributes:
        axis: the mesh axis.
        source: type on the axis before.
        target: type on the axis after.
        nbytes: size of the larger of a rank's tensor before and after: what an all-gather
            makes, what a reduce-scatter takes, and the tensor itself otherwise. Of ranks with
            different shares it is that of the largest.
        forward: what runs in the forward pass.
        backward: what runs in the backward pass; nothing where no gradient flows.
        padded: whether the axis cuts a dim into slices of unequal length: collectives have all
            of them as long as the largest.
    """

    axis: int
    source: AxisType
    target: AxisType
    nbytes: int
    forward: Action
    backward: Action
    padded: bool = False

    @property
    def reorders(self) -> bool:
        """Whether the slices of chunks are put in order by a copy, next to each action."""
        return bool(self.source.chunks or self.target.chunks)

    @property
    def is_inner(self) -> bool:
        """Whether a dim is cut that is not the first, so that slices do not lie in one piece."""
        return self.source.dim > 0 or self.target.dim > 0

    @property
    def copies(self) -> bool:
        """Whether a copy stands next to each collective."""
        return self.reorders or self.padded

    @property
    def shareable(self) -> bool:
        """Whether it can share its collectives with like steps of other tensors."""
        return makes_whole(self.source, self.target) and not self.padded


class Pricer(Protocol):
    """Prices in seconds; a mesh is one."""

    def collective_time(
        self, action: Action, axis: int, nbytes: int, *, inner: bool = False
    ) -> float:
        """Seconds that a collective over one axis takes, with `Step.nbytes` and `is_inner`."""
        ...

    def copy_time(self, nbytes: int) -> float:
        """Seconds that a local copy takes that makes `nbytes`."""
        ...


STEP_OVERHEAD = 1e-9
"""Seconds added to every step but a mere slice, so that among equal chains the shortest wins."""


def step_price(step: Step, pricer: Pricer, carried: float = 1.0) -> float:
    """Seconds that a step takes, forward plus backward.

    Args:
        step: the step.
        pricer: prices of collectives and copies.
        carried: how many times its own bytes the collectives carry that it can share; it takes
            its part of their time.
    """
    if (step.forward, step.backward) == (Action.SLICE, Action.NOTHING) and not step.reorders:
        return 0.0
    return STEP_OVERHEAD + sum(
        _action_price(action, step, pricer, carried) for action in (step.forward, step.backward)
    )


def again_price(step: Step, pricer: Pricer, carried: float = 1.0) -> float:
    """Seconds that the forward action of a step takes once more; arguments of `step_price`."""
    if step.forward is Action.NOTHING or (step.forward is Action.SLICE and not step.reorders):
        return 0.0
    return STEP_OVERHEAD + _action_price(step.forward, step, pricer, carried)


def _action_price(action: Action, step: Step, pricer: Pricer, carried: float) -> float:
    if action is Action.NOTHING:
        return 0.0
    reordered = pricer.copy_time(step.nbytes) if step.reorders else 0.0
    # A slice is a view of what is there.
    if action is Action.SLICE:
        return reordered
    if action.is_collective:
        beside = pricer.copy_time(step.nbytes) if step.copies else 0.0
        parts = carried if step.shareable else 1.0
        together = round(step.nbytes * parts)
        seconds = pricer.collective_time(action, step.axis, together, inner=step.is_inner)
        return beside + seconds / parts
    return reordered + pricer.copy_time(step.nbytes)


_KINDS = tuple(Kind)


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """Every move between some layouts; A of them, by the layout before, axis and new type.

    Attributes:
        types: the types there are.
        sources: number of the layout before each move, ascending, shape [A].
        targets: number of the layout after it, shape [A].
        axes: the axis that changes its type, shape [A].
        old: number of the type that it has before, shape [A].
        new: number of the type that it has after, shape [A].
        parts: how many of the larger tensor, before or after, make a whole one, shape [A]; one
            whose dims are padded where they are cut into slices of unequal length.
        padding: bit i is set where the i-th of the uneven cuts is there before or after, shape
            [A].
        classes: equal where the axis, the kinds of both types, whether slices of chunks are
            put in order, whether the first dim is cut or another, the parts and the padding are,
            shape [A]; counted from 0.
        examples: a move of each class, shape [K].
    """

    types: tuple[AxisType, ...]
    sources: IntArray
    targets: IntArray
    axes: IntArray
    old: IntArray
    new: IntArray
    parts: IntArray
    padding: IntArray
    classes: IntArray
    examples: IntArray

    def number(self, source: int, target: int) -> int:
        """The move from one layout to another; there must be one."""
        first, last = np.searchsorted(self.sources, (source, source + 1))
        return int(first + np.flatnonzero(self.targets[first:last] == target)[0])


@lru_cache(maxsize=1 << 10)
def moves_between(
    layouts: tuple[Layout, ...],
    cuts: tuple[AxisType, ...],
    axis_sizes: tuple[int, ...],
    offered: AbstractSet[tuple[Kind, Kind]],
    *,
    uneven: tuple[tuple[int, int], ...] = (),
    still: AbstractSet[int] = frozenset(),
) -> Moves:
    """The moves are those of all tensors that can have these layouts.

    Only the innermost axis of a dim can be moved, and a new cut goes innermost.

    Args:
        layouts: the layouts.
        cuts: types that cut, in the order in which they are listed.
        axis_sizes: size of each mesh axis.
        offered: kinds of type before and after a move.
        uneven: the axes that cut a dim into slices of unequal length, as (axis, dim).
        still: dims that no move cuts, gathers or exchanges for another.
    """
    types = (I, R, P, *cuts)
    held = _held(layouts, types)
    dims = np.array([t.dim for t in types])
    ranks, counts, mixed = _nested(layouts, held, dims)
    steps = np.array([[s != t and (s.kind, t.kind) in offered for t in types] for s in types])
    steps[np.isin(dims, list(still))] = False
    steps[:, np.isin(dims, list(still))] = False
    at_dim = np.arange(len(layouts))[:, None], dims[held]
    innermost = (dims[held] < 0) | (ranks == counts[at_dim] - 1)
    allowed = innermost[:, :, None] & steps[held] & ~mixed[:, None, :]
    sources, axes, new = np.nonzero(allowed)
    old = held[sources, axes]
    # A number for each layout: what each axis has, and its place among those that cut the dim.
    num_axes = len(axis_sizes)
    weights = (len(types) * num_axes) ** np.arange(num_axes)
    numbers = (held * num_axes + ranks) @ weights
    ranks_after = np.where(dims[new] < 0, 0, counts[sources, dims[new]])
    change = (new - old) * num_axes + ranks_after - ranks[sources, axes]
    wanted = numbers[sources] + change * weights[axes]
    order = np.argsort(numbers)
    places = np.searchsorted(numbers, wanted, sorter=order)
    targets = order[np.minimum(places, len(order) - 1)]
    legal = numbers[targets] == wanted
    sources, targets, axes, old, new = (x[legal] for x in (sources, targets, axes, old, new))
    sizes = np.array(axis_sizes, dtype=np.intp)
    slices = np.where(dims[held] < 0, 1, sizes).prod(axis=1, dtype=np.intp)
    grows = (dims[old] >= 0) & (dims[new] < 0)
    parts = slices[sources] // np.where(grows, sizes[axes], 1)
    padding = np.zeros_like(sources)
    for bit, (axis, dim) in enumerate(uneven):
        before = dims[held[sources, axis]] == dim
        padding |= (before | ((axes == axis) & (dims[new] == dim))).astype(np.intp) << bit
    inner = ((dims[old] > 0) | (dims[new] > 0)).astype(np.intp)
    classes, examples = _classes(types, axes, old, new, (parts, padding, inner))
    return Moves(types, sources, targets, axes, old, new, parts, padding, classes, examples)


def _held(layouts: Sequence[Layout], types: Sequence[AxisType]) -> IntArray:
    """Number of the type that each layout has on each axis, shape [N, A]."""
    number = {t: i for i, t in enumerate(types)}
    held = np.array([[number[t] for t in layout.types] for layout in layouts], dtype=np.intp)
    return held.reshape(len(layouts), -1)


def _nested(
    layouts: Sequence[Layout], held: IntArray, dims: IntArray
) -> tuple[IntArray, IntArray, BoolArray]:
    """How axes nest in each layout.

    Returns:
        the place of each axis among those that cut its dim, outermost first, shape [N, A];
        how many axes cut each dim, shape [N, D + 1], the last for none; and whether a dim
        that a type cuts is cut in other chunks already, shape [N, T].
    """
    num_layouts, num_axes = held.shape
    ranks = np.zeros_like(held)
    counts = np.zeros((num_layouts, int(dims.max(initial=0)) + 2), dtype=np.intp)
    mixed = np.zeros((num_layouts, len(dims)), dtype=np.bool_)
    every = np.arange(num_layouts)
    for axis in range(num_axes):
        cut = dims[held[:, axis]]
        ranks[:, axis] = np.where(cut < 0, 0, counts[every, cut])
        counts[every, cut] += 1
        same = (cut[:, None] == dims) & (dims >= 0)
        mixed |= same & (held[:, axis, None] != np.arange(len(dims)))
    for i, layout in enumerate(layouts):
        for nesting in layout.nesting:
            ranks[i, list(nesting)] = np.arange(len(nesting))
    return ranks, counts, mixed


def _classes(
    types: Sequence[AxisType],
    axes: IntArray,
    old: IntArray,
    new: IntArray,
    others: Sequence[IntArray],
) -> tuple[IntArray, IntArray]:
    """Class of each move, shape [A], and a move of each class, shape [K].

    Args:
        types: the types there are.
        axes: the axis that changes its type, shape [A].
        old: number of the type before, shape [A].
        new: number of the type after, shape [A].
        others: what else tells moves apart, each of shape [A].
    """
    kinds = np.array([_KINDS.index(t.kind) for t in types])
    chunked = np.array([bool(t.chunks) for t in types])
    like = (axes * len(_KINDS) + kinds[old]) * len(_KINDS) + kinds[new]
    like = 2 * like + (chunked[old] | chunked[new])
    for numbers in others:
        like = like * (int(numbers.max(initial=0)) + 1) + numbers
    _, examples, classes = np.unique(like, return_index=True, return_inverse=True)
    return classes, examples


class ReshardingTable:
    """Cheapest reshardings between all layouts of one kind of tensor.

    Args:
        shape: global shape.
        itemsize: bytes of an element.
        axis_sizes: size of each mesh axis.
        differentiable: whether the tensor has a gradient; without one I and R are the same,
            written R, and backward costs nothing.
        partial: whether the element type can be summed.
        backward: whether the backward pass will run through the resharding; if not, only
            forward is priced, though the types still say what the gradient would be.
        chunked: the types with chunks that the tensor can have.
        still: dims whose slices stay where they are: no step cuts one, gathers it, or exchanges
            it for another.
        pricer: prices of collectives and copies.
        carried: how many times the tensor's bytes the collectives carry that it can share.
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
        chunked: Collection[AxisType] = (),
        still: Collection[int] = (),
        pricer: Pricer,
        carried: float = 1.0,
    ) -> None:
        self._shape = tuple(shape)
        self._itemsize = itemsize
        self._axis_sizes = tuple(axis_sizes)
        self._backward = differentiable and backward
        self._pricer = pricer
        self._carried = carried
        self._still = frozenset(still)
        self._before: dict[int, NDArray[np.int32]] = {}
        self.layouts = legal_layouts(
            shape, axis_sizes, differentiable=differentiable, partial=partial, chunked=chunked
        )
        self._cuts = (*(S(dim) for dim in range(len(shape))), *chunked)
        self._uneven = uneven_shards(shape, axis_sizes)
        self.index = {layout: i for i, layout in enumerate(self.layouts)}

    @property
    def cost(self) -> FloatArray:
        """Seconds from each layout (row) to each layout (column); inf where there is no way."""
        return self._shortest[0]

    @property
    def again_cost(self) -> FloatArray:
        """Seconds of the forward actions of each chain alone; inf where there is no way."""
        return self._forward[0]

    @property
    def stays(self) -> BoolArray:
        """Whether the forward pass of each chain does nothing: the tensor stays what it is."""
        return self._forward[1]

    @cached_property
    def steps(self) -> tuple[IntArray, IntArray, FloatArray]:
        """Every step by the numbers of the layouts before and after it, and its seconds."""
        moves = self._moves
        # Few moves differ in what is priced.
        prices = [step_price(step, self._pricer, self._carried) for step in self._examples]
        return moves.sources, moves.targets, np.array(prices)[moves.classes]

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
                raise LayoutError(f"there is no resharding from {source} to {target}")
        chain.reverse()
        return tuple(self._step(self._moves.number(*pair)) for pair in pairwise(chain))

    def _number(self, layout: Layout) -> int:
        if layout not in self.index:
            raise LayoutError(
                f"layout {layout} is illegal for shape {self._shape} "
                f"over axes of {self._axis_sizes}"
            )
        return self.index[layout]

    def _step(self, i: int) -> Step:
        moves = self._moves
        source, target = moves.types[moves.old[i]], moves.types[moves.new[i]]
        forward, backward = STEPS[source.kind, target.kind]
        axis, padding = int(moves.axes[i]), int(moves.padding[i])
        shape, padded = list(self._shape), False
        for bit, (cutting, dim) in enumerate(self._uneven):
            if padding >> bit & 1:
                num_ranks = self._axis_sizes[cutting]
                shape[dim] = largest_share(self._shape[dim], num_ranks) * num_ranks
                padded = padded or cutting == axis
        return Step(
            axis=axis,
            source=source,
            target=target,
            nbytes=prod(shape) * self._itemsize // int(moves.parts[i]),
            forward=forward,
            backward=backward if self._backward else Action.NOTHING,
            padded=padded,
        )

    @cached_property
    def _moves(self) -> Moves:
        return moves_between(
            self.layouts,
            self._cuts,
            self._axis_sizes,
            _OFFERED,
            uneven=self._uneven,
            still=self._still,
        )

    @property
    def _examples(self) -> list[Step]:
        """A step of each class of moves."""
        return [self._step(i) for i in self._moves.examples.tolist()]

    @cached_property
    def _shortest(self) -> tuple[FloatArray, NDArray[np.int32]]:
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
    def _forward(self) -> tuple[FloatArray, BoolArray]:
        n = len(self.layouts)
        seconds, nothing = np.zeros((n, n)), np.zeros((n, n), dtype=np.bool_)
        moves, examples = self._moves, self._examples
        pairs = moves.sources, moves.targets
        again = [again_price(step, self._pricer, self._carried) for step in examples]
        idle = [step.forward is Action.NOTHING for step in examples]
        seconds[pairs] = np.array(again)[moves.classes]
        nothing[pairs] = np.array(idle, dtype=np.bool_)[moves.classes]
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
