"""Reshardings: the cheapest chains of steps between all layouts of a tensor."""

from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import pairwise
from math import prod

import numpy as np

from autoshard.base.arrays import FloatArray, IntArray
from autoshard.errors import LayoutError
from autoshard.layouts.chains import ChainCosts, Chains, LayoutSteps
from autoshard.layouts.layout import (
    AxisType,
    Layout,
    S,
    largest_shard,
    legal_layouts,
    uneven_shards,
)
from autoshard.layouts.step_table import StepTable, step_table
from autoshard.layouts.steps import ALONE, STEPS, Action, Charge, Pricer, Step, step_price

_OFFERED = frozenset(STEPS)


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
                # Collectives move parts of one size, so uneven shards are padded to the largest.
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
