"""Cheapest chains of steps between the layouts of a tensor."""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import dijkstra

from autoshard.arrays import BoolArray, FloatArray, IntArray
from autoshard.limits import count_entries, count_made

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
class _Table:
    """The cheapest chains from R layouts to all N, shape [R, N] each; see `ChainCosts`.

    Attributes:
        before: index of the last layout but one, negative if there is none.
    """

    seconds: FloatArray
    forward: FloatArray
    is_noop: BoolArray
    waiting: FloatArray
    is_bucketable: BoolArray
    before: NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class ChainCosts:
    """Properties of the cheapest chains from R layouts to C layouts, shape [R, C] each.

    They are copied when they are read, so that what nobody needs takes no memory.
    """

    _table: _Table
    _rows: IntArray
    _cols: IntArray

    @property
    def seconds(self) -> FloatArray:
        """Seconds of all steps, forward plus backward; inf if there is no chain."""
        return self._table.seconds[self._rows, self._cols]

    @property
    def forward(self) -> FloatArray:
        """Seconds of the forward actions; inf if there is no chain."""
        return self._table.forward[self._rows, self._cols]

    @property
    def is_noop(self) -> BoolArray:
        """True if the forward actions do nothing to the tensor."""
        return self._table.is_noop[self._rows, self._cols]

    @property
    def waiting(self) -> FloatArray:
        """Seconds of backward of the first steps whose forward does nothing.

        If the tensor is a parameter, these steps only reduce its gradient.
        """
        return self._table.waiting[self._rows, self._cols]

    @property
    def is_bucketable(self) -> BoolArray:
        """True if all steps can share collectives in a bucket."""
        return self._table.is_bucketable[self._rows, self._cols]


class Chains:
    """Cheapest chains between N layouts, computed for the layouts from which they are needed.

    Args:
        num_layouts: N.
        steps: all steps.
    """

    def __init__(self, num_layouts: int, steps: LayoutSteps) -> None:
        self._num = num_layouts
        self._steps = steps
        allowed = np.isfinite(steps.seconds)
        ends = steps.sources[allowed], steps.targets[allowed]
        self._graph = csr_array((steps.seconds[allowed], ends), shape=(num_layouts, num_layouts))
        # Steps in ascending order of their layouts, to find the one between two.
        numbers = steps.sources * num_layouts + steps.targets
        self._order = np.argsort(numbers)
        self._numbers = numbers[self._order]
        self._row_of: IntArray = np.full(num_layouts, -1)
        self._known: list[_Table] = []

    def costs(self, sources: IntArray, targets: IntArray) -> ChainCosts:
        """Costs of the chains from some layouts to others.

        Args:
            sources: R indices of layouts.
            targets: C indices of layouts.
        """
        rows, cols = self._rows(sources)[:, None], targets[None, :]
        return ChainCosts(self._known[0], rows, cols)

    def before(self, source: int) -> NDArray[np.int32]:
        """The last layout but one of the chain from a layout to each, negative if there is none."""
        row = self._rows(np.array([source]))[0]
        before: NDArray[np.int32] = self._known[0].before[row]
        return before

    def _rows(self, sources: IntArray) -> IntArray:
        """The rows of layouts in the known chains, after they were computed."""
        missing = np.unique(sources[self._row_of[sources] < 0])
        if not self._known and (self._num <= _FEW_LAYOUTS or not len(missing)):
            missing = np.arange(self._num)
        if len(missing):
            count_entries(len(missing) * self._num)
            self._row_of[missing] = np.count_nonzero(self._row_of >= 0) + np.arange(len(missing))
            for first in range(0, len(missing), _ROWS_AT_ONCE):
                count_made(0)
                self._known.append(self._from(missing[first : first + _ROWS_AT_ONCE]))
        if len(self._known) > 1:
            names = (field.name for field in fields(_Table))
            columns = ([getattr(one, name) for one in self._known] for name in names)
            self._known = [_Table(*map(np.concatenate, columns))]
        return self._row_of[sources]

    def _from(self, sources: IntArray) -> _Table:
        """The chains from some layouts to all."""
        steps, num = self._steps, self._num
        seconds, before = dijkstra(self._graph, indices=sources, return_predecessors=True)
        starts = np.arange(len(sources)) * num + sources
        is_noop = np.zeros(seconds.size, dtype=np.bool_)
        is_noop[starts] = True
        is_bucketable, is_known = is_noop.copy(), is_noop.copy()
        forward, waiting = np.where(is_noop, 0.0, np.inf), np.zeros(seconds.size)
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
        shape = seconds.shape
        return _Table(
            seconds,
            forward.reshape(shape),
            is_noop.reshape(shape),
            waiting.reshape(shape),
            is_bucketable.reshape(shape),
            before,
        )

    def _step(self, sources: IntArray, targets: IntArray) -> IntArray:
        """Indices of the steps between pairs of layouts."""
        wanted = sources * self._num + targets
        found: IntArray = self._order[np.searchsorted(self._numbers, wanted)]
        return found
