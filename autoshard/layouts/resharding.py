"""Reshardings: chains of steps that change the layout of a tensor, with their bytes and prices.

Each step changes the type of one mesh axis, or of adjacent axes of one type that communicate as one
group, where one collective over all their ranks costs less than one over each axis. The table
`STEPS` lists all steps, with the action that runs in forward and the one that autograd runs in
backward.
"""

from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple, Protocol

import numpy as np

from autoshard.base.arrays import BoolArray, FloatArray, IntArray
from autoshard.base.limits import count_entries
from autoshard.errors import LayoutError
from autoshard.layouts.chains import ChainCosts, Chains, LayoutSteps
from autoshard.layouts.layout import (
    AxisType,
    I,
    Kind,
    Layout,
    P,
    R,
    S,
    largest_shard,
    legal_layouts,
    uneven_shards,
)


class Action(StrEnum):
    """Operation that each rank runs for a step, in forward or in backward."""

    NOTHING = "nothing"
    SLICE = "slice"
    PAD = "pad"
    """Write a slice into a tensor of zeros; turns the gradient of a slice into a partial value."""
    MASK = "mask"
    """Keep the value on the first rank of the axis, and set it to zero on the others."""
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    HALO_EXCHANGE = "halo_exchange"
    """Exchange the edges of slices with neighbouring ranks; used by operators, not by steps."""

    @property
    def is_collective(self) -> bool:
        """True if ranks communicate."""
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
"""(source, target) -> (forward, backward). S -> P is valid but never useful, so it is left out."""


def is_bucketable(source: AxisType, target: AxisType) -> bool:
    """True for steps to `R` from a shard (FSDP) or from `I` (DDP), which can share collectives."""
    return target.kind is _R and source.kind in (_I, _S)


def is_padded(source: AxisType, target: AxisType, shape: Sequence[int], num_ranks: int) -> bool:
    """True if a step pads slices, because its ranks do not divide the dim that it shards.

    Args:
        source: type on the axes before the step.
        target: type on the axes after the step.
        shape: global shape.
        num_ranks: number of ranks of its axes.
    """
    return any(t.is_shard and shape[t.dim] % num_ranks != 0 for t in (source, target))


_OFFERED = frozenset(STEPS)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a resharding.

    Attributes:
        axes: the mesh axis; ascending, if several axes communicate as one group.
        source: type on each of the axes before the step.
        target: type on each of the axes after the step.
        nbytes: bytes of a rank's tensor before or after the step, whichever is larger: the output
            of an all-gather, the input of a reduce-scatter. The largest shard counts.
        forward: action in the forward pass.
        backward: action in the backward pass; nothing if no gradient flows.
        padded: True if the axis has uneven shards, which are padded for collectives.
        gradient_nbytes: the same as `nbytes` of the gradient, if that is in another element type.
    """

    axes: tuple[int, ...]
    source: AxisType
    target: AxisType
    nbytes: int
    forward: Action
    backward: Action
    padded: bool = False
    gradient_nbytes: int | None = None

    @property
    def backward_nbytes(self) -> int:
        """Bytes of a rank's gradient after or before the step, whichever is larger."""
        return self.nbytes if self.gradient_nbytes is None else self.gradient_nbytes

    @property
    def reorders(self) -> bool:
        """True if each action also copies, to reorder interleaved sub-shards."""
        return bool(self.source.sub_shards or self.target.sub_shards)

    @property
    def is_inner(self) -> bool:
        """True if a dim other than the first is sharded, so that slices are not contiguous."""
        return self.source.dim > 0 or self.target.dim > 0

    @property
    def copies(self) -> bool:
        """True if each collective needs a copy before or after it."""
        return self.reorders or self.padded

    @property
    def is_bucketable(self) -> bool:
        """True if the step can share collectives with steps of other tensors, in a bucket."""
        return is_bucketable(self.source, self.target) and not self.padded


class Pricer(Protocol):
    """Prices of actions in seconds; `Mesh` implements it."""

    def collective_time(
        self, action: Action, axis: int | tuple[int, ...], nbytes: int, *, inner: bool = False
    ) -> float:
        """Seconds of a collective over an axis, or `Step.axes`; for bytes as in `Step.nbytes`."""
        ...

    def copy_time(self, nbytes: int) -> float:
        """Seconds of a local copy of `nbytes`."""
        ...


class Charge(NamedTuple):
    """What a resharding is charged of the collectives that it takes part in.

    Attributes:
        fill_factor: bytes of a full bucket relative to the tensor's, if a step is bucketable; the
            step is charged its share of the bucket's collective.
        exposed: share of a collective's seconds that computing does not hide.
    """

    fill_factor: float = 1.0
    exposed: float = 1.0


ALONE = Charge()
"""A collective for one tensor, which is waited for."""

STEP_OVERHEAD = 1e-9
"""Seconds added to every step except a slice, so that the shortest of equal chains is chosen."""


class StepPrice(NamedTuple):
    """Seconds of a step.

    Attributes:
        total: forward plus backward.
        forward: the forward action alone.
    """

    total: float
    forward: float


def step_price(step: Step, pricer: Pricer, charge: Charge = ALONE) -> StepPrice:
    """The price of a step.

    Args:
        step: the step.
        pricer: prices of collectives and copies.
        charge: what is charged of its collectives.
    """
    forward = _action_price(step.forward, step, step.nbytes, pricer, charge)
    backward = _action_price(step.backward, step, step.backward_nbytes, pricer, charge)
    is_free = step.forward is Action.SLICE and not step.reorders
    return StepPrice(
        0.0
        if is_free and step.backward is Action.NOTHING
        else STEP_OVERHEAD + (forward + backward),
        0.0 if is_free or step.forward is Action.NOTHING else STEP_OVERHEAD + forward,
    )


def _action_price(action: Action, step: Step, nbytes: int, pricer: Pricer, charge: Charge) -> float:
    if action is Action.NOTHING:
        return 0.0
    reordered = pricer.copy_time(nbytes) if step.reorders else 0.0
    # A slice is a view.
    if action is Action.SLICE:
        return reordered
    if action.is_collective:
        copy = pricer.copy_time(nbytes) if step.copies else 0.0
        factor = charge.fill_factor if step.is_bucketable else 1.0
        bucket_nbytes = round(nbytes * factor)
        seconds = pricer.collective_time(action, step.axes, bucket_nbytes, inner=step.is_inner)
        return copy + charge.exposed * seconds / factor
    return reordered + pricer.copy_time(nbytes)


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


class ReshardingTable:
    """Cheapest reshardings between all layouts of a tensor shape and element size.

    Args:
        shape: global shape.
        itemsize: bytes of an element.
        axis_sizes: size of each mesh axis.
        groups: several axes, ascending, that can communicate as one group.
        differentiable: True if the tensor has a gradient; otherwise I and R are the same, written
            R, and backward costs nothing.
        partial: True if the element type can be summed.
        backward: True if backward runs through the resharding; otherwise only forward is priced.
        interleaved: interleaved shard types that the tensor can have.
        fixed_dims: dims whose sharding no step changes.
        pricer: prices of collectives and copies.
        charge: what is charged of collectives.
        gradient_itemsize: bytes of an element of the gradient; `itemsize` if None.
    """

    def __init__(
        self,
        shape: Sequence[int],
        itemsize: int,
        axis_sizes: Sequence[int],
        *,
        groups: tuple[tuple[int, ...], ...] = (),
        differentiable: bool,
        partial: bool = True,
        backward: bool = True,
        interleaved: Collection[AxisType] = (),
        fixed_dims: Collection[int] = (),
        pricer: Pricer,
        charge: Charge = ALONE,
        gradient_itemsize: int | None = None,
    ) -> None:
        self._gradient_itemsize = gradient_itemsize
        self._shape = tuple(shape)
        self._itemsize = itemsize
        self._axis_sizes = tuple(axis_sizes)
        self._groups = groups
        self._backward = differentiable and backward
        self._pricer = pricer
        self._charge = charge
        self._fixed_dims = frozenset(fixed_dims)
        self.layouts = legal_layouts(
            shape,
            axis_sizes,
            differentiable=differentiable,
            partial=partial,
            interleaved=interleaved,
        )
        self._shards = (*(S(dim) for dim in range(len(shape))), *interleaved)
        self._uneven = uneven_shards(shape, axis_sizes)
        self._steps: dict[tuple[int, int], Step] = {}
        self.index = {layout: i for i, layout in enumerate(self.layouts)}

    def costs(self, sources: IntArray, targets: IntArray) -> ChainCosts:
        """Costs of the cheapest chains between layouts.

        Args:
            sources: indices of R layouts.
            targets: indices of C layouts.
        """
        return self._chains.costs(sources, targets)

    def cost(self, source: Layout, target: Layout) -> float:
        """Seconds of the cheapest chain, forward plus backward; inf if there is none."""
        pair = (np.array([self._index_of(layout)]) for layout in (source, target))
        return float(self.costs(*pair).seconds[0, 0])

    @cached_property
    def steps(self) -> tuple[IntArray, IntArray, FloatArray]:
        """Layout indices before and after each step, and its seconds; each of shape [M]."""
        table = self._step_table
        return table.sources, table.targets, self._prices[table.classes, 0]

    def path(self, source: Layout, target: Layout) -> tuple[Step, ...]:
        """Return the cheapest chain of steps; empty if the layouts are equal.

        Raises:
            LayoutError: a layout is illegal for this tensor, or no chain connects them.
        """
        start, end = self._index_of(source), self._index_of(target)
        before = self.before(start)
        chain = [end]
        while chain[-1] != start:
            chain.append(int(before[chain[-1]]))
            if chain[-1] < 0:
                raise LayoutError(f"no resharding from {source} to {target}")
        chain.reverse()
        return tuple(self.step(*pair) for pair in pairwise(chain))

    def before(self, source: int) -> IntArray:
        """The last layout but one of the cheapest chain from a layout to each, by index.

        It is negative if there is none.
        """
        return self._chains.before(source)

    def step(self, source: int, target: int) -> Step:
        """The step between two layouts, given by index, that one step connects."""
        if (source, target) not in self._steps:
            number = self._step_table.index(source, target)
            self._steps[source, target] = self._step(number)
        return self._steps[source, target]

    def _index_of(self, layout: Layout) -> int:
        if layout not in self.index:
            raise LayoutError(
                f"layout {layout} is illegal for shape {self._shape} "
                f"over axes of {self._axis_sizes}"
            )
        return self.index[layout]

    def _step(self, i: int) -> Step:
        table = self._step_table
        source, target = table.types[table.old[i]], table.types[table.new[i]]
        forward, backward = STEPS[source.kind, target.kind]
        axes, padding = table.groups[table.axes[i]], int(table.padding[i])
        shape, padded = list(self._shape), False
        for bit, (sharding_axis, dim) in enumerate(self._uneven):
            if padding >> bit & 1:
                num_ranks = self._axis_sizes[sharding_axis]
                shape[dim] = largest_shard(self._shape[dim], num_ranks) * num_ranks
                padded = padded or sharding_axis in axes
        parts, gradient = int(table.parts[i]), self._gradient_itemsize
        return Step(
            axes=axes,
            source=source,
            target=target,
            nbytes=prod(shape) * self._itemsize // parts,
            gradient_nbytes=None if gradient is None else prod(shape) * gradient // parts,
            forward=forward,
            backward=backward if self._backward else Action.NOTHING,
            padded=padded,
        )

    @cached_property
    def _step_table(self) -> StepTable:
        return step_table(
            self.layouts,
            self._shards,
            self._axis_sizes,
            _OFFERED,
            groups=self._groups,
            uneven=self._uneven,
            fixed_dims=self._fixed_dims,
        )

    @cached_property
    def _examples(self) -> list[Step]:
        """One step of each class."""
        return [self._step(i) for i in self._step_table.examples.tolist()]

    @cached_property
    def _prices(self) -> FloatArray:
        """The `StepPrice` of the steps of each class, shape [K, 2]."""
        prices = [step_price(step, self._pricer, self._charge) for step in self._examples]
        return np.array(prices).reshape(len(prices), 2)

    @cached_property
    def _chains(self) -> Chains:
        table, examples = self._step_table, self._examples
        sources, targets, seconds = self.steps
        idle = [step.forward is Action.NOTHING for step in examples]
        alike = [step.is_bucketable for step in examples]
        return Chains(
            len(self.layouts),
            LayoutSteps(
                sources,
                targets,
                seconds,
                self._prices[table.classes, 1],
                np.array(idle, dtype=np.bool_)[table.classes],
                np.array(alike, dtype=np.bool_)[table.classes],
            ),
        )
