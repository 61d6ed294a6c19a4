"""What strategies cost and use: where rules, costs, mesh and options meet."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.costs import (
    OptimizerSpec,
    activation_bytes,
    operator_times,
    optimizer_time,
    parameter_bytes,
)
from autoshard.graph import Graph, Input, InputKind, Node, Tensor
from autoshard.mesh import Mesh
from autoshard.plan.legality import without_invariant
from autoshard.plan.lifetimes import keeps_output
from autoshard.plan.options import PlanOptions
from autoshard.rules import (
    OperatorRule,
    Strategy,
    call_of,
    is_view,
    rule_for,
    strategies,
)
from autoshard.solve import FloatArray

Usage = Mapping[str, FloatArray]
"""Bytes per device of each strategy, by kind."""


@dataclass(frozen=True)
class OperatorPrices:
    """An operator's strategies with what each costs and uses.

    Attributes:
        strategies: S of them.
        time: seconds of compute, forward plus backward, shape [S].
        usage: bytes per device, each of shape [S].
    """

    strategies: tuple[Strategy, ...]
    time: FloatArray
    usage: Usage


_TIE_BREAK = 1e-6
"""Share of the time to read what is held that holding it costs: of layouts that take equal
time, the one that holds less wins."""

_HELD_AS = {
    InputKind.PARAMETER: "parameters",
    InputKind.BUFFER: "buffers",
    InputKind.CONSTANT: "buffers",
    InputKind.USER: "inputs",
}


class Prices:
    """Prices and memory of everything that a plan chooses between.

    Args:
        mesh: the devices.
        options: mode, optimizer and budget.

    Raises:
        OptionError: the optimizer is unknown.
    """

    def __init__(self, mesh: Mesh, options: PlanOptions) -> None:
        self._device = mesh.topology.device
        self._optimizer = OptimizerSpec.named(options.optimizer)
        self._cache: dict[tuple[object, ...], OperatorPrices] = {}
        self.training = options.mode == "training"
        self.budget_bytes = options.memory_budget or self._device.memory

    @property
    def memory_budget(self) -> float:
        """Bytes per device that the peak must obey."""
        return float(self.budget_bytes)

    def input(
        self, graph_input: Input, tensor: Tensor, local_shapes: Sequence[tuple[int, ...]]
    ) -> tuple[FloatArray, Usage]:
        """Seconds that an input costs in a step, and bytes by kind.

        A parameter that is trained takes the optimizer's update, and what the caller passes
        is written to memory.
        """
        trained = self.training and tensor.requires_grad and graph_input.kind is InputKind.PARAMETER
        optimizer = self._optimizer if trained else None
        held = [parameter_bytes(shape, tensor.dtype, optimizer) for shape in local_shapes]
        usage = {_HELD_AS[graph_input.kind]: np.array([h.parameter for h in held], dtype=float)}
        if graph_input.kind is InputKind.USER:
            return usage["inputs"] / self._device.memory_bandwidth, usage
        if not trained:
            parameter = next(iter(usage.values()))
            return _TIE_BREAK * parameter / self._device.memory_bandwidth, usage
        usage["gradients"] = np.array([h.gradient for h in held], dtype=float)
        usage["optimizer"] = np.array([h.optimizer for h in held], dtype=float)
        time = [
            optimizer_time(self._optimizer, shape, tensor.dtype, self._device)
            for shape in local_shapes
        ]
        return np.array(time), usage

    def operator(
        self,
        graph: Graph,
        node: Node,
        gradients: tuple[bool, ...],
        axis_sizes: tuple[int, ...],
        *,
        backward: bool,
        partial: frozenset[int],
    ) -> OperatorPrices:
        """The strategies of an operator, each once, with their prices.

        Args:
            graph: where the node is.
            node: the operator.
            gradients: whether a gradient flows through each input, then to each output.
            axis_sizes: size of each axis to plan over.
            backward: whether the backward pass runs through the node.
            partial: inputs that can arrive as sums over ranks.
        """
        rule = rule_for(call_of(graph, node))
        tensors = tuple(graph.values[v] for v in (*node.inputs, *node.outputs))
        kept = keeps_output(graph, node, training=self.training)
        key = (*_key(rule), tensors, node.operator, gradients, axis_sizes, kept, backward, partial)
        if key not in self._cache:
            self._cache[key] = self._price(
                graph, node, rule, gradients, axis_sizes, backward=backward, partial=partial
            )
        return self._cache[key]

    def strategy(
        self, graph: Graph, node: Node, sizes: Mapping[str, int], *, backward: bool
    ) -> tuple[float, float]:
        """Seconds, and bytes of activations, of an operator by the letter sizes on a rank."""
        rule = rule_for(call_of(graph, node))
        chosen = [Strategy((), (), sizes)]
        time = self._times(graph, node, rule, chosen, backward=backward)
        return float(time[0]), float(self._activations(graph, node, rule, chosen)[0])

    def _price(
        self,
        graph: Graph,
        node: Node,
        rule: OperatorRule,
        gradients: tuple[bool, ...],
        axis_sizes: tuple[int, ...],
        *,
        backward: bool,
        partial: frozenset[int],
    ) -> OperatorPrices:
        every = strategies(rule, axis_sizes, partial=partial)
        seen = [_without_gradient(s, gradients) for s in every]
        times = self._times(graph, node, rule, every, backward=backward)
        cheapest: dict[Strategy, int] = {}
        for i, strategy in enumerate(seen):
            if strategy not in cheapest or times[i] < times[cheapest[strategy]]:
                cheapest[strategy] = i
        unique = tuple(seen[i] for i in cheapest.values())
        held = self._activations(graph, node, rule, unique)
        return OperatorPrices(unique, times[list(cheapest.values())], {"activations": held})

    def _activations(
        self, graph: Graph, node: Node, rule: OperatorRule, chosen: Sequence[Strategy]
    ) -> FloatArray:
        kept = keeps_output(graph, node, training=self.training)
        outputs = [graph.values[v] for v in node.outputs]
        return activation_bytes(rule, chosen, outputs, is_view=not kept)

    def _times(
        self,
        graph: Graph,
        node: Node,
        rule: OperatorRule,
        chosen: Sequence[Strategy],
        *,
        backward: bool,
    ) -> FloatArray:
        return operator_times(
            rule,
            chosen,
            inputs=[graph.values[v] for v in node.inputs],
            outputs=[graph.values[v] for v in node.outputs],
            device=self._device,
            training=backward,
            is_view=is_view(node.operator),
        )


def _key(rule: OperatorRule) -> tuple[object, ...]:
    return (
        tuple(sorted(rule.sizes.items())),
        rule.inputs,
        rule.outputs,
        frozenset(rule.contracted),
        frozenset(rule.whole),
        tuple(frozenset(group) for group in rule.linear),
        frozenset(rule.addends),
        rule.flops_per_point,
    )


def _without_gradient(strategy: Strategy, gradients: tuple[bool, ...]) -> Strategy:
    """The strategy as its tensors show it: without a gradient, I is R."""
    num_inputs = len(strategy.inputs)
    flows = any(gradients[num_inputs:])
    return Strategy(
        tuple(
            layout if gradient and flows else without_invariant(layout)
            for layout, gradient in zip(strategy.inputs, gradients, strict=False)
        ),
        tuple(
            layout if gradient else without_invariant(layout)
            for layout, gradient in zip(strategy.outputs, gradients[num_inputs:], strict=True)
        ),
        strategy.sizes,
    )
