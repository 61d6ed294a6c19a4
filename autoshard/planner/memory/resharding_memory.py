"""Memory that a device needs while the reshardings of a use run."""

from functools import cached_property

import numpy as np

from autoshard.base.arrays import BoolArray, FloatArray
from autoshard.layouts import Action
from autoshard.lowering.memory import step_working
from autoshard.planner.formulation.edge_costs import EdgeCosts, local_bytes


class EdgeMemory:
    """Bytes that the reshardings between R source and C target layouts need while they run.

    Args:
        costs: of the reshardings.
    """

    def __init__(self, costs: EdgeCosts) -> None:
        self._costs = costs

    @cached_property
    def forward(self) -> FloatArray:
        """Working memory of forward, without the source and the target, shape [R, C]."""
        return self._working(backward=False)[0]

    @cached_property
    def backward(self) -> FloatArray:
        """Memory of backward: working memory and the gradients of both, shape [R, C].

        If backward does nothing, both are one tensor.
        """
        costs = self._costs
        working, runs = self._working(backward=True)
        given = costs.target_bytes[None, :]
        needed = np.where(runs, given + costs.source_bytes[:, None] + working, given)
        return np.where(costs.is_possible, needed, 0.0)

    def _working(self, *, backward: bool) -> tuple[FloatArray, BoolArray]:
        """Working memory, and whether a pass runs any action, both of shape [R, C]."""
        costs = self._costs
        steps, possible = _StepMemory(costs, backward=backward), costs.is_possible
        working = np.zeros((len(costs.sources), len(costs.targets)))
        runs = np.zeros(working.shape, dtype=np.bool_)
        for i, source in enumerate(costs.sources.tolist()):
            chains = _ChainsOf(source, steps)
            for j in np.flatnonzero(possible[i]).tolist():
                working[i, j], runs[i, j] = chains.to(int(costs.targets[j]))
        return working, runs


class _StepMemory:
    """Working memory of single steps between layouts of a table, each computed once."""

    def __init__(self, costs: EdgeCosts, *, backward: bool) -> None:
        self.table = costs.table
        self._costs, self._backward = costs, backward
        self._sizes: dict[int, int] = {}
        self._known: dict[tuple[int, int], tuple[int, bool]] = {}

    def size(self, layout: int) -> int:
        """Bytes of a rank's part of the tensor in a layout."""
        if layout not in self._sizes:
            layouts = [self.table.layouts[layout]]
            nbytes = local_bytes(self._costs.tensor, layouts, self._costs.axis_sizes)
            self._sizes[layout] = int(nbytes[0])
        return self._sizes[layout]

    def of(self, source: int, target: int) -> tuple[int, bool]:
        """Bytes of a step without its input and output, and whether it runs an action."""
        pair = source, target
        if pair not in self._known:
            step = self.table.step(source, target)
            ends, sizes = (str(step.source), str(step.target)), [self.size(x) for x in pair]
            action = step.forward
            if self._backward:
                action, ends, sizes = step.backward, ends[::-1], sizes[::-1]
            self._known[pair] = step_working(action, *ends, *sizes), action is not Action.NOTHING
        return self._known[pair]


class _ChainsOf:
    """The cheapest chains of steps from one layout: a tree, of which chains share the beginnings.

    A step needs its working memory, and its input and output where these are neither the source
    nor the target of the chain, as in `ReshardingMemory.of` for the steps of one chain. There are
    millions of chains here, and prices of their common beginnings make them five times as fast.
    """

    def __init__(self, source: int, steps: _StepMemory) -> None:
        self._source, self._steps = source, steps
        self._before = steps.table.before(source)
        # By layout: bytes of the chain to it where it goes on, and whether an action has run.
        self._inside: dict[int, tuple[int, bool]] = {source: (0, False)}

    def to(self, target: int) -> tuple[int, bool]:
        """Most working memory of the chain to a layout, and whether it runs an action."""
        if target == self._source:
            return 0, False
        return self._joined(target, is_last=True)

    def _joined(self, layout: int, *, is_last: bool) -> tuple[int, bool]:
        before = int(self._before[layout])
        most, ran = self._until(before)
        working, runs = self._steps.of(before, layout)
        ends = self._steps.size(before) if before != self._source else 0
        ends += 0 if is_last else self._steps.size(layout)
        return max(most, working + ends), ran or runs

    def _until(self, layout: int) -> tuple[int, bool]:
        if layout not in self._inside:
            self._inside[layout] = self._joined(layout, is_last=False)
        return self._inside[layout]
