"""Moments of a training step at which a problem counts memory.

At the turn from forward to backward everything that backward needs is there, and at the
optimizer's step all gradients are. In between there are moments at which much comes and goes:
the backward of an operator, or of a resharding. A plan's timeline shows which of these matter.
What is counted at a moment is alive then in every plan with these choices, and perhaps more is.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autoshard.arrays import FloatArray
from autoshard.costs import border_bytes, saved_bytes
from autoshard.layouts import Action, Layout, Step
from autoshard.ops import Saved, backward_working, call_of, passes_gradient, rule_for
from autoshard.plan.gradients import Gradient
from autoshard.plan.memory.moves import step_working
from autoshard.planner.formulation.formulation import Formulation
from autoshard.planner.formulation.variables import Role
from autoshard.planner.memory_budget.saved_tensors import Retention

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Backward:
    """The backward of an operator, of a repeated block, or of the resharding for a use.

    Attributes:
        variable: the formulation's variable that is the operator; -1 for a resharding.
        arc: the formulation's arc that is the use; -1 for an operator.
        reaches: whether it is when backward comes to the instance of a block that begins with
            the operator.
    """

    variable: int = -1
    arc: int = -1
    reaches: bool = False


class Moments:
    """Moments in order: the turn, some of backward, the optimizer's step.

    Args:
        formulation: in training.
        retention: of its program.
        backward: the moments between, in any order.
    """

    def __init__(
        self, formulation: Formulation, retention: Retention, backward: Sequence[Backward]
    ) -> None:
        self._plain = formulation
        self._graph = formulation.graph
        self._retention = retention
        placed = sorted(((-self._place(m), i) for i, m in enumerate(backward)))
        self.backward = tuple(backward[i] for _, i in placed)
        self._places = [place for place, _ in placed]

    @property
    def always(self) -> Interval:
        """From the turn to the end."""
        return (0, len(self.backward) + 2)

    def at(self, number: int) -> Interval:
        """One of the moments of backward alone."""
        return (number + 1, number + 2)

    def until(self, reader: int) -> Interval:
        """From the turn until the backward of a node is done; of -1, to the end."""
        if reader < 0:
            return self.always
        return (0, 1 + bisect_right(self._places, -reader))

    def after(self, reader: int) -> Interval:
        """From when the backward of a node and of its reshardings is done until the end."""
        return (1 + bisect_right(self._places, 0.5 - reader), len(self.backward) + 2)

    def _place(self, moment: Backward) -> float:
        """Where in the program a moment is: backward goes from the end to the start."""
        if moment.reaches:
            return self._plain.instance_of[moment.variable].stop - 0.5
        if moment.variable >= 0:
            return self._graph.numbers[self._plain.variables[moment.variable].name]
        arc = self._plain.arcs[moment.arc]
        target = self._plain.variables[arc.target]
        if target.role is Role.OPERATOR:
            return self._graph.numbers[target.name] - 0.5
        readers = [i for i, _ in self._graph.consumers[arc.value]]
        if target.role is Role.SHARED and readers:
            return min(readers) - 0.5
        return len(self._graph.nodes) - 0.5

    def operator_bytes(self, variable: int) -> FloatArray:
        """Gradients and working memory while an operator's backward runs, by strategy."""
        plain, graph = self._plain, self._graph
        chosen = plain.variables[variable]
        node = graph.nodes[self._graph.numbers[chosen.name]]
        call = call_of(graph, node)
        inputs = [graph.values[v] for v in node.inputs]
        outputs = [graph.values[v] for v in node.outputs]
        flags = [plain.gradients.exists(v) for v in node.inputs]
        made = {i for i, flag in enumerate(flags) if flag and not passes_gradient(call, i)}
        given = {i for i, v in enumerate(node.outputs) if self._has_full_gradient(v)}
        counted = Saved(frozenset(made), frozenset(given), tuple(backward_working(call, flags)))
        rule = rule_for(call)
        nbytes = saved_bytes(rule, chosen.strategies, inputs, outputs, counted)
        largest = np.max([np.zeros(len(chosen.strategies)), *nbytes.outputs.values()], axis=0)
        working = nbytes.extra + border_bytes(rule, chosen.strategies).working_backward
        return sum(nbytes.inputs.values(), working + largest)

    def resharding_bytes(
        self, arc: int, sources: Sequence[Layout], targets: Sequence[Layout]
    ) -> FloatArray:
        """Gradients and working memory while a resharding's backward runs.

        Args:
            arc: the use.
            sources: R layouts in which the value is made.
            targets: C layouts in which it is taken.

        Returns:
            Bytes, shape [R, C].
        """
        use = self._plain.arcs[arc]
        table = self._plain.table(use.value, use.gradient)
        nbytes = np.zeros((len(sources), len(targets)))
        if use.gradient is not Gradient.FLOWS or not self._has_full_gradient(use.value):
            return nbytes
        for i, source in enumerate(sources):
            for j, target in enumerate(targets):
                if np.isfinite(table.cost[table.index[source], table.index[target]]):
                    path = table.path(source, target)
                    nbytes[i, j] = self._while_going_back(use.value, source, target, path)
        return nbytes

    def _while_going_back(
        self, value: str, source: Layout, target: Layout, path: Sequence[Step]
    ) -> float:
        (given,) = self._plain.local_bytes(value, [target]).tolist()
        if all(step.backward is Action.NOTHING for step in path):
            return float(given)
        layouts = [source]
        for step in path:
            layouts.append(layouts[-1].replace(step.axis, step.target))
        sizes = self._plain.local_bytes(value, layouts).tolist()
        between = [0.0, *sizes[1:-1], 0.0]
        working = [
            step_working(step.backward, str(step.target), str(step.source), int(b), int(a))
            + sum(around)
            for step, (a, b), around in zip(path, pairwise(sizes), pairwise(between), strict=True)
        ]
        return float(given + sizes[0] + max(working))

    def _has_full_gradient(self, value: str) -> bool:
        """Whether the gradient of a value takes as much memory as the value.

        That of what is summed, say, is one element seen many times.
        """
        graph, gradients = self._graph, self._plain.gradients
        leaving = [i for i, output in enumerate(graph.outputs) if output.name == value]
        if any(gradients.of_output(i) is Gradient.FLOWS for i in leaving):
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
