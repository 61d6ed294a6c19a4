"""Cheapest chains of steps between the layouts of a tensor."""

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import dijkstra

from autoshard.base.arrays import BoolArray, FloatArray, IntArray
from autoshard.base.limits import count_entries, count_made

_ROWS_AT_ONCE = 600
"""Number of layouts from which shortest chains are computed without a look at the time limit."""
_FEW_LAYOUTS = 100
"""Number of layouts up to which chains from all of them are computed at once."""


@dataclass(frozen=True, slots=True, eq=False)
class LayoutSteps:
    """M steps between layouts.

    Attributes:
        sources: index of the layout before each step, ascending, shape [M].
        targets: index of the layout after each step, shape [M].
        seconds: of each step, forward plus backward; inf if it is forbidden. Shape [M].
        forward: seconds of the forward action alone, shape [M].
        is_noop: True if the forward action does nothing, shape [M].
        is_bucketable: True if the step can share collectives in a bucket, shape [M].
    """

    sources: IntArray
    targets: IntArray
    seconds: FloatArray
    forward: FloatArray
    is_noop: BoolArray
    is_bucketable: BoolArray


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """Parts of the cheapest chains from R layouts to all N, shape [R, N] each; see `ChainCosts`."""

    forward: FloatArray
    is_noop: BoolArray
    waiting: FloatArray
    is_bucketable: BoolArray


@dataclass(frozen=True, slots=True, eq=False)
class ChainCosts:
    """Properties of the cheapest chains from R layouts to C layouts, shape [R, C] each.

    They are computed and copied when they are read, so that what nobody needs takes no memory.
    """

    _chains: "Chains"
    _rows: IntArray
    _cols: IntArray

    @property
    def seconds(self) -> FloatArray:
        """Seconds of all steps, forward plus backward; inf if there is no chain."""
        return self._chains.seconds[self._rows, self._cols]

    @property
    def forward(self) -> FloatArray:
        """Seconds of the forward actions; inf if there is no chain."""
        return self._chains.parts.forward[self._rows, self._cols]

    @property
    def is_noop(self) -> BoolArray:
        """True if the forward actions do nothing to the tensor."""
        return self._chains.parts.is_noop[self._rows, self._cols]

    @property
    def waiting(self) -> FloatArray:
        """Seconds of backward of the first steps whose forward does nothing.

        If the tensor is a parameter, these steps only reduce its gradient.
        """
        return self._chains.parts.waiting[self._rows, self._cols]

    @property
    def is_bucketable(self) -> BoolArray:
        """True if all steps can share collectives in a bucket."""
        return self._chains.parts.is_bucketable[self._rows, self._cols]


class Chains:
    """Cheapest chains between N layouts, computed for the layouts from which they are needed.

    Args:
        num_layouts: N.
        steps: all steps.

    Attributes:
        seconds: of the chains from the R layouts that were needed so far to all, shape [R, N].
    """

    def __init__(self, num_layouts: int, steps: LayoutSteps) -> None:
        self._num = num_layouts
        self._steps = steps
        allowed = np.isfinite(steps.seconds)
        ends = steps.sources[allowed], steps.targets[allowed]
        self._graph = csr_array((steps.seconds[allowed], ends), shape=(num_layouts, num_layouts))
        self._row_of: IntArray = np.full(num_layouts, -1)
        self.seconds: FloatArray = np.zeros((0, num_layouts))
        # The last layout but one of each chain, negative if there is none.
        self._before: NDArray[np.int32] = np.zeros((0, num_layouts), dtype=np.int32)
        self._parts: _Parts | None = None

    def costs(self, sources: IntArray, targets: IntArray) -> ChainCosts:
        """Costs of the chains from some layouts to others.

        Args:
            sources: R indices of layouts.
            targets: C indices of layouts.
        """
        return ChainCosts(self, self._rows(sources)[:, None], targets[None, :])

    def before(self, source: int) -> IntArray:
        """The last layout but one of the chain from a layout to each, negative if there is none."""
        row = self._rows(np.array([source]))[0]
        before: IntArray = self._before[row]
        return before

    @property
    def parts(self) -> _Parts:
        """Parts of the chains of `seconds`; those of rows that were added are computed now."""
        known, num_known = self._parts, 0 if self._parts is None else len(self._parts.forward)
        if known is None or num_known < len(self.seconds):
            new = self._parts_from(num_known)
            if known is not None:
                pairs = ((getattr(x, f.name) for x in (known, new)) for f in fields(_Parts))
                new = _Parts(*(np.concatenate([*pair]) for pair in pairs))
            known = self._parts = new
        return known

    def _rows(self, sources: IntArray) -> IntArray:
        """The rows of layouts in the known chains, after they were computed."""
        missing = np.unique(sources[self._row_of[sources] < 0])
        if not len(self.seconds) and (self._num <= _FEW_LAYOUTS or not len(missing)):
            missing = np.arange(self._num)
        if len(missing):
            count_entries(len(missing) * self._num)
            self._row_of[missing] = len(self.seconds) + np.arange(len(missing))
            found = [(self.seconds, self._before)]
            for first in range(0, len(missing), _ROWS_AT_ONCE):
                count_made(0)
                part = missing[first : first + _ROWS_AT_ONCE]
                found.append(dijkstra(self._graph, indices=part, return_predecessors=True))
            seconds, before = zip(*found, strict=True)
            self.seconds, self._before = np.concatenate(seconds), np.concatenate(before)
        return self._row_of[sources]

    def _parts_from(self, first: int) -> _Parts:
        """The parts of the chains of all rows from one on."""
        # Dijkstra minimises the seconds of both passes together. Their parts are those of the chain
        # that it found, summed along it; a chain of its own for forward may be another one.
        steps, num = self._steps, self._num
        before, shape = self._before[first:], self.seconds[first:].shape
        rows = np.flatnonzero(self._row_of >= first)
        starts = (self._row_of[rows] - first) * num + rows
        is_noop = np.zeros(before.size, dtype=np.bool_)
        is_noop[starts] = True
        is_bucketable, is_known = is_noop.copy(), is_noop.copy()
        forward, waiting = np.where(is_noop, 0.0, np.inf), np.zeros(before.size)
        # Chains by the position of their ends in the flattened table, with those they extend.
        ends = np.flatnonzero(before >= 0)
        last, cols = before.ravel()[ends].astype(np.intp), ends % num
        previous, step = ends - cols + last, self._step(last, cols)
        # Extend known chains by one step until all are known.
        while len(ends):
            count_made(0)
            ready = is_known[previous]
            now, old, taken = ends[ready], previous[ready], step[ready]
            forward[now] = forward[old] + steps.forward[taken]
            is_noop[now] = is_noop[old] & steps.is_noop[taken]
            waiting[now] = waiting[old] + is_noop[now] * steps.seconds[taken]
            is_bucketable[now] = is_bucketable[old] & steps.is_bucketable[taken]
            is_known[now] = True
            ends, previous, step = ends[~ready], previous[~ready], step[~ready]
        return _Parts(
            forward.reshape(shape),
            is_noop.reshape(shape),
            waiting.reshape(shape),
            is_bucketable.reshape(shape),
        )

    def _step(self, sources: IntArray, targets: IntArray) -> IntArray:
        """Indices of the steps between pairs of layouts."""
        order, numbers = self._step_numbers
        found: IntArray = order[np.searchsorted(numbers, sources * self._num + targets)]
        return found

    @cached_property
    def _step_numbers(self) -> tuple[IntArray, IntArray]:
        """The steps in ascending order of their layouts, to find the one between two."""
        numbers = self._steps.sources * self._num + self._steps.targets
        order = np.argsort(numbers)
        return order, numbers[order]
