"""Time points of a training step at which the optimization problem counts memory.

At the turn from forward to backward, all tensors that backward needs are in memory; at the
optimizer's step, all gradients of parameters are. In between, memory changes with the backward of
each operator and each resharding; the timelines of plans show which of these time points matter.
The memory counted at a time point is a lower bound of the true memory there.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.base.arrays import FloatArray
from autoshard.costs import halo_bytes, saved_bytes
from autoshard.graph.gradients import Gradient
from autoshard.ops import SavedByAutograd, call_of, passes_gradient, rule_for
from autoshard.planner.formulation.edge_costs import EdgeCosts
from autoshard.planner.formulation.formulation import Formulation
from autoshard.planner.formulation.variables import Role, Use
from autoshard.planner.memory.resharding_memory import EdgeMemory

Interval = tuple[int, int]
"""Half-open interval of time points."""


@dataclass(frozen=True, slots=True)
class BackwardPoint:
    """A time point of backward: of an operator, of a resharding, or at the start of a block.

    Attributes:
        variable: index of the variable of the operator, or of the block's first operator; -1 for
            a resharding.
        use: index of the resharded use; -1 for an operator.
        starts_block: True for the start of the backward of the block instance, or other unit of
            activation checkpointing, whose first operator is `variable`.
    """

    variable: int = -1
    use: int = -1
    starts_block: bool = False


class TimePoints:
    """The time points in order: the turn, time points of backward, the optimizer's step.

    Args:
        formulation: a formulation in training mode.
        points: time points of backward, in any order.
    """

    def __init__(self, formulation: Formulation, points: Sequence[BackwardPoint]) -> None:
        self._formulation = formulation
        self._graph = formulation.graph
        self._memory_of: dict[EdgeCosts, EdgeMemory] = {}
        placed = sorted((-self._place(point), i) for i, point in enumerate(points))
        self.backward = tuple(points[i] for _, i in placed)
        self._places = [place for place, _ in placed]

    @property
    def counts_operations(self) -> bool:
        """True if there is a time point of an operator or a resharding."""
        return not all(point.starts_block for point in self.backward)

    @property
    def always(self) -> Interval:
        """The interval from the turn to the end."""
        return (0, len(self.backward) + 2)

    @property
    def before_optimizer(self) -> Interval:
        """The interval from the turn to the end of backward."""
        return (0, len(self.backward) + 1)

    @property
    def optimizer(self) -> Interval:
        """The interval of the optimizer's step."""
        return (len(self.backward) + 1, len(self.backward) + 2)

    def at(self, number: int) -> Interval:
        """The interval of a single time point of backward."""
        return (number + 1, number + 2)

    def until(self, reader: int) -> Interval:
        """The interval from the turn until the end of the backward of a node; -1 for the end."""
        if reader < 0:
            return self.always
        return (0, 1 + bisect_right(self._places, -reader))

    def after(self, reader: int) -> Interval:
        """The interval from the end of the backward of a node and its reshardings to the end."""
        return (1 + bisect_right(self._places, 0.5 - reader), len(self.backward) + 2)

    def operator_bytes(self, variable: int) -> FloatArray:
        """Gradients and working memory during an operator's backward, shape [S]."""
        graph, gradients = self._graph, self._formulation.gradients
        chosen = self._formulation.variables[variable]
        node = self._formulation.node_of(chosen)
        call = call_of(graph, node)
        inputs = [graph.values[v] for v in node.inputs]
        outputs = [graph.values[v] for v in node.outputs]
        flags = [gradients.exists(v) for v in node.inputs]
        saving = self._formulation.prices.saving
        made = {
            i
            for i, value in enumerate(node.inputs)
            if flags[i] and value not in saving.unwritten and not passes_gradient(call, i)
        }
        given = {i for i, v in enumerate(node.outputs) if self._has_full_gradient(v)}
        counted = SavedByAutograd(
            frozenset(made), frozenset(given), saving.workspace(node, call, flags)
        )
        rule = rule_for(call)
        nbytes = saved_bytes(rule, chosen.strategies, inputs, outputs, counted)
        largest = np.max([np.zeros(len(chosen.strategies)), *nbytes.outputs.values()], axis=0)
        working = nbytes.extra + halo_bytes(rule, chosen.strategies)[1]
        return sum(nbytes.inputs.values(), working + largest)

    def resharding_bytes(self, use: Use, costs: EdgeCosts) -> FloatArray:
        """Gradients and working memory during a resharding's backward.

        Args:
            use: the use.
            costs: its costs, between R source and C target layouts.

        Returns:
            Bytes, shape [R, C].
        """
        if use.gradient is not Gradient.FLOWS or not self._has_full_gradient(use.value):
            return np.zeros((len(costs.sources), len(costs.targets)))
        return self._memory(costs).backward

    def gathered_bytes(self, use: Use, costs: EdgeCosts) -> FloatArray:
        """Bytes of the all-gathers that backward repeats for the reader of a use.

        They include working memory where no bucket has it.

        Args:
            use: the use.
            costs: its costs, between R source and C target layouts.

        Returns:
            Bytes, shape [R, C].
        """
        nbytes = np.where(costs.is_noop | ~costs.is_possible, 0.0, costs.target_bytes)
        if self._formulation.reads_parameter(use):
            return nbytes  # A bucket may need no working memory.
        return nbytes + np.where(nbytes > 0, self._memory(costs).forward, 0.0)

    def _memory(self, costs: EdgeCosts) -> EdgeMemory:
        if costs not in self._memory_of:
            self._memory_of[costs] = EdgeMemory(costs)
        return self._memory_of[costs]

    def _place(self, point: BackwardPoint) -> float:
        """Position of a time point in the program; backward runs from the end to the start."""
        numbers, variables = self._graph.numbers, self._formulation.variables
        if point.starts_block:
            return self._formulation.unit_of[point.variable].stop - 0.5
        if point.variable >= 0:
            return numbers[variables[point.variable].name]
        use = self._formulation.uses[point.use]
        target = variables[use.target]
        if target.role is Role.OPERATOR:
            return numbers[target.name] - 0.5
        readers = [i for i, _ in self._graph.consumers[use.value]]
        if target.role is Role.SHARED and readers:
            return min(readers) - 0.5
        return len(self._graph.nodes) - 0.5

    def _has_full_gradient(self, value: str) -> bool:
        """True if the gradient of a value needs as much memory as the value.

        The gradient of the operand of a sum, for example, is an expanded scalar.
        """
        graph, gradients = self._graph, self._formulation.gradients
        if value in self._formulation.prices.saving.unwritten:
            return False
        returned = [i for i, output in enumerate(graph.outputs) if output.name == value]
        if any(gradients.of_output(i) is Gradient.FLOWS for i in returned):
            return True
        for i, position in graph.consumers[value]:
            node = graph.nodes[i]
            if gradients.of_use(value, node) is not Gradient.FLOWS:
                continue
            if not passes_gradient(call_of(graph, node), position):
                return True
            made = node.outputs[0]
            same = graph.values[made].numel == graph.values[value].numel
            if same and len(node.outputs) == 1 and self._has_full_gradient(made):
                return True
        return False
