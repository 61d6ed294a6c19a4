"""All steps between the layouts of a tensor, as arrays, and the classes of equal prices."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from autoshard.base.arrays import BoolArray, IntArray
from autoshard.base.limits import count_entries
from autoshard.layouts.layout import AxisType, I, Kind, Layout, P, R
from autoshard.layouts.steps import STEPS

_KINDS = tuple(Kind)


@dataclass(frozen=True, slots=True, eq=False)
class StepTable:
    """All steps between a set of layouts; M steps, sorted by source layout.

    Attributes:
        types: the SPMD types.
        sources: index of the layout before each step, ascending, shape [M].
        targets: index of the layout after each step, shape [M].
        groups: groups of axes whose type a step changes: every axis alone, and several that
            communicate as one group.
        axes: index of the group of axes of each step, shape [M].
        old: index of the type before the step, shape [M].
        new: index of the type after the step, shape [M].
        parts: bytes of the (padded) global tensor divided by `Step.nbytes`, shape [M].
        padding: bit i is set if the i-th uneven shard is present before or after the step,
            shape [M].
        classes: class of each step, shape [M]. Steps of a class have the same axes, kinds, parts,
            padding, `Step.reorders` and `Step.is_inner`, and so the same price.
        examples: index of one step of each class, shape [K].
    """

    types: tuple[AxisType, ...]
    groups: tuple[tuple[int, ...], ...]
    sources: IntArray
    targets: IntArray
    axes: IntArray
    old: IntArray
    new: IntArray
    parts: IntArray
    padding: IntArray
    classes: IntArray
    examples: IntArray

    def index(self, source: int, target: int) -> int:
        """Index of the step from one layout to another, which must exist."""
        first, last = np.searchsorted(self.sources, (source, source + 1))
        return int(first + np.flatnonzero(self.targets[first:last] == target)[0])


@lru_cache(maxsize=1 << 10)
def step_table(
    layouts: tuple[Layout, ...],
    shards: tuple[AxisType, ...],
    axis_sizes: tuple[int, ...],
    offered: AbstractSet[tuple[Kind, Kind]],
    *,
    groups: tuple[tuple[int, ...], ...] = (),
    uneven: tuple[tuple[int, int], ...] = (),
    fixed_dims: AbstractSet[int] = frozenset(),
) -> StepTable:
    """All steps between layouts, shared by all tensors that can have these layouts.

    Only the innermost axes of a dim can change, and axes that start to shard a dim become its
    innermost ones.

    Args:
        layouts: the layouts.
        shards: the shard types that occur in them.
        axis_sizes: size of each mesh axis.
        offered: (source, target) kinds of the steps to include.
        groups: several axes, ascending, that can communicate as one group.
        uneven: (axis, dim) pairs with uneven shards.
        fixed_dims: dims whose sharding no step changes.
    """
    types = (I, R, P, *shards)
    every = (*((axis,) for axis in range(len(axis_sizes))), *groups)
    count_entries(len(layouts) * len(every) * len(types))
    coded = _CodedLayouts.of(layouts, types)
    dims, type_of = coded.dims, coded.type_of
    steps = np.array([[s != t and (s.kind, t.kind) in offered for t in types] for s in types])
    steps[np.isin(dims, list(fixed_dims))] = False
    steps[:, np.isin(dims, list(fixed_dims))] = False
    sources, axes, new, targets = coded.steps(every, steps, uneven)
    firsts = np.array([group[0] for group in every], dtype=np.intp)
    old = type_of[sources, firsts[axes]]
    ranks = np.array([prod(axis_sizes[a] for a in group) for group in every], dtype=np.intp)
    sizes = np.array(axis_sizes, dtype=np.intp)
    slices = np.where(dims[type_of] < 0, 1, sizes).prod(axis=1, dtype=np.intp)
    grows = (dims[old] >= 0) & (dims[new] < 0)
    parts = slices[sources] // np.where(grows, ranks[axes], 1)
    padding = np.zeros_like(sources)
    for bit, (axis, dim) in enumerate(uneven):
        before = dims[type_of[sources, axis]] == dim
        padding |= (before | ((axes == axis) & (dims[new] == dim))).astype(np.intp) << bit
    inner = ((dims[old] > 0) | (dims[new] > 0)).astype(np.intp)
    classes, examples = _classes(types, axes, old, new, (parts, padding, inner))
    return StepTable(
        types, every, sources, targets, axes, old, new, parts, padding, classes, examples
    )


@dataclass(frozen=True, slots=True)
class _CodedLayouts:
    """Layouts as arrays; N layouts over A axes, T types and D dims.

    Attributes:
        type_of: index of the type that each layout has on each axis, shape [N, A].
        dims: the dim that each type shards; -1 if none, shape [T].
        communicates: True where a step from one type to another has a collective, shape [T, T].
        ranks: rank of each axis in the nesting order of its dim, outermost first, shape [N, A].
        counts: number of axes that shard each dim, shape [N, D + 1] (last column: none).
        mixed: True if the layout shards the dim of a type with different sub-shards, shape [N, T].
    """

    type_of: IntArray
    dims: IntArray
    communicates: BoolArray
    ranks: IntArray
    counts: IntArray
    mixed: BoolArray

    @classmethod
    def of(cls, layouts: Sequence[Layout], types: Sequence[AxisType]) -> "_CodedLayouts":
        """The arrays of layouts with these types."""
        type_of = _type_indices(layouts, types)
        dims = np.array([t.dim for t in types])
        moves = [
            [any(a.is_collective for a in STEPS.get((s.kind, t.kind), ())) for t in types]
            for s in types
        ]
        return cls(type_of, dims, np.array(moves), *_nested(layouts, type_of, dims))

    def steps(
        self,
        groups: Sequence[tuple[int, ...]],
        offered: BoolArray,
        uneven: tuple[tuple[int, int], ...],
    ) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Layout before, group of axes, new type and layout after each step, each of shape [M].

        Args:
            groups: the axes that change together, ascending.
            offered: True where a step exists from one type to another, shape [T, T].
            uneven: (axis, dim) pairs with uneven shards.
        """
        found = [self._group_steps(group, offered, uneven) for group in groups]
        axes = np.repeat(np.arange(len(found)), [len(sources) for sources, _, _ in found])
        empty = np.zeros(0, dtype=np.intp)
        sources, new, changes = (
            np.concatenate([empty, *(part[i] for part in found)]) for i in range(3)
        )
        # A layout is a number with a digit for each axis: its type and its place in the nesting. A
        # step adds to some digits, so one binary search finds the layouts after all steps, and
        # tells which steps lead to no legal layout: their numbers are missing.
        numbers = (self.type_of * self.ranks.shape[1] + self.ranks) @ self._weights
        numbers_after = numbers[sources] + changes
        order = np.argsort(numbers)
        places = np.searchsorted(numbers, numbers_after, sorter=order)
        targets = order[np.minimum(places, len(order) - 1)]
        legal = np.flatnonzero(numbers[targets] == numbers_after)
        legal = legal[np.argsort(sources[legal], kind="stable")]
        return sources[legal], axes[legal], new[legal], targets[legal]

    @property
    def _weights(self) -> IntArray:
        """Weights that encode a layout as a number, with the type and rank of each axis."""
        num_axes = self.type_of.shape[1]
        weights: IntArray = (len(self.dims) * num_axes) ** np.arange(num_axes)
        return weights

    def _group_steps(
        self, group: tuple[int, ...], offered: BoolArray, uneven: tuple[tuple[int, int], ...]
    ) -> tuple[IntArray, IntArray, IntArray]:
        """Layout before, new type, and change of the layout's number of steps of one group."""
        old, dims = self.type_of[:, group[0]], self.dims
        alike = (self.type_of[:, group] == old[:, None]).all(axis=1)
        first = self.counts[np.arange(len(old)), dims[old]] - len(group)
        places = first[:, None] + np.arange(len(group))
        innermost = (dims[old] < 0) | (self.ranks[:, group] == places).all(axis=1)
        allowed = (alike & innermost)[:, None] & offered[old] & ~self.mixed
        if len(group) > 1:
            # Uneven slices of slices are not those of the whole dim.
            is_uneven = np.isin(dims, [dim for axis, dim in uneven if axis in group])
            allowed &= self.communicates[old] & ~is_uneven & ~is_uneven[old][:, None]
        sources, new = np.nonzero(allowed)
        changes = np.zeros_like(sources)
        for place, axis in enumerate(group):
            after = np.where(dims[new] < 0, 0, self.counts[sources, dims[new]] + place)
            change = (new - old[sources]) * self.ranks.shape[1] + after - self.ranks[sources, axis]
            changes += change * self._weights[axis]
        return sources, new, changes


def _type_indices(layouts: Sequence[Layout], types: Sequence[AxisType]) -> IntArray:
    """Index of the type that each layout has on each axis, shape [N, A]."""
    index = {t: i for i, t in enumerate(types)}
    type_of = np.array([[index[t] for t in layout.types] for layout in layouts], dtype=np.intp)
    return type_of.reshape(len(layouts), -1)


def _nested(
    layouts: Sequence[Layout], type_of: IntArray, dims: IntArray
) -> tuple[IntArray, IntArray, BoolArray]:
    """Nesting of the axes in each layout.

    Returns:
        the rank of each axis in the nesting order of its dim, outermost first, shape [N, A];
        the number of axes that shard each dim, shape [N, D + 1] (last column: none); and
        True if the layout shards the dim of a type with different sub-shards, shape [N, T].
    """
    num_layouts, num_axes = type_of.shape
    ranks = np.zeros_like(type_of)
    counts = np.zeros((num_layouts, int(dims.max(initial=0)) + 2), dtype=np.intp)
    mixed = np.zeros((num_layouts, len(dims)), dtype=np.bool_)
    every = np.arange(num_layouts)
    for axis in range(num_axes):
        sharded = dims[type_of[:, axis]]
        ranks[:, axis] = np.where(sharded < 0, 0, counts[every, sharded])
        counts[every, sharded] += 1
        same = (sharded[:, None] == dims) & (dims >= 0)
        mixed |= same & (type_of[:, axis, None] != np.arange(len(dims)))
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
    """Class of each step, shape [M], and the index of a step of each class, shape [K].

    Args:
        types: the SPMD types.
        axes: index of the axes whose type changes, shape [M].
        old: index of the type before, shape [M].
        new: index of the type after, shape [M].
        others: further properties that distinguish classes, each of shape [M].
    """
    kinds = np.array([_KINDS.index(t.kind) for t in types])
    is_interleaved = np.array([bool(t.sub_shards) for t in types])
    codes = (axes * len(_KINDS) + kinds[old]) * len(_KINDS) + kinds[new]
    codes = 2 * codes + (is_interleaved[old] | is_interleaved[new])
    for numbers in others:
        codes = codes * (int(numbers.max(initial=0)) + 1) + numbers
    _, examples, classes = np.unique(codes, return_index=True, return_inverse=True)
    return classes, examples
