"""Every step between the layouts of one kind of tensor, as arrays."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autoshard.arrays import BoolArray, IntArray
from autoshard.layouts.layout import Layout
from autoshard.layouts.types import AxisType, I, Kind, P, R

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
