"""What strategies cost and use: where rules, costs, mesh and options meet."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.arrays import FloatArray
from autoshard.costs import (
    OptimizerSpec,
    Passes,
    activation_bytes,
    border_bytes,
    operator_times,
    optimizer_time,
    pace_name,
    parameter_bytes,
    saved_bytes,
)
from autoshard.graph import DType, Graph, Input, InputKind, Node, Tensor
from autoshard.layouts import AxisType, Pricer
from autoshard.mesh import Mesh
from autoshard.ops import (
    Chunked,
    InnerCollective,
    OperatorRule,
    Strategy,
    call_of,
    is_view,
    rule_for,
    saved_by,
    strategies,
)
from autoshard.plan.active_axes import ActiveAxes
from autoshard.plan.legality import without_invariant
from autoshard.plan.options import PlanOptions


def inner_time(collective: InnerCollective, pricer: Pricer) -> float:
    """Seconds of a collective inside an operator, with the copies beside it."""
    seconds = pricer.collective_time(
        collective.operation.action, collective.axis, collective.nbytes
    )
    return seconds + (pricer.copy_time(collective.copied) if collective.copied else 0.0)


Usage = Mapping[str, FloatArray]
"""Bytes per device of each strategy, by kind."""


@dataclass(frozen=True)
class OperatorPrices:
    """An operator's strategies with what each costs and uses.

    Attributes:
        strategies: S of them.
        time: seconds, forward plus backward, with what ranks run inside, shape [S].
        usage: bytes per device, each of shape [S]: in training what the operator itself
            makes and holds until its backward, in inference its outputs.
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
    InputKind.PREPARED: "buffers",
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
        self._axes = ActiveAxes.of(mesh)
        self.optimizer = replace(
            OptimizerSpec.named(options.optimizer),
            state_dtype=None if options.state_dtype is None else DType(options.state_dtype),
            master_weights=options.master_weights,
        )
        self._cache: dict[tuple[object, ...], OperatorPrices] = {}
        self.training = options.mode == "training"
        self.overlaps = options.overlap
        self.budget_bytes = options.memory_budget or self._device.memory

    def input(
        self, graph_input: Input, tensor: Tensor, local_shapes: Sequence[tuple[int, ...]]
    ) -> tuple[FloatArray, Usage]:
        """Seconds that an input costs in a step, and bytes by kind.

        A parameter that is trained takes the optimizer's update, and what the caller passes
        is written to memory.
        """
        trained = self.training and tensor.requires_grad and graph_input.kind is InputKind.PARAMETER
        optimizer = self.optimizer if trained else None
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
            optimizer_time(self.optimizer, shape, tensor.dtype, self._device)
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
        chunked: Mapping[tuple[int, ...], tuple[AxisType, ...]],
    ) -> OperatorPrices:
        """The strategies of an operator, each once, with their prices.

        Args:
            graph: where the node is.
            node: the operator.
            gradients: whether a gradient flows through each input, then to each output.
            axis_sizes: size of each axis to plan over.
            backward: whether the backward pass runs through the node.
            partial: inputs that can arrive as sums over ranks.
            chunked: the types with chunks that a tensor can have, by shape.
        """
        tensors = (graph.values[value] for value in (*node.inputs, *node.outputs))
        types = tuple(chunked.get(tensor.shape, ()) for tensor in tensors)
        key = (graph.kind(node), gradients, axis_sizes, backward, partial, types)
        if key not in self._cache:
            self._cache[key] = self._price(
                graph,
                node,
                gradients,
                axis_sizes,
                backward=backward,
                partial=partial,
                chunked=types if any(types) else (),
            )
        return self._cache[key]

    def strategy(
        self, graph: Graph, node: Node, sizes: Mapping[str, int], *, backward: bool
    ) -> tuple[float, float]:
        """Seconds of an operator by the letter sizes on a rank: all of it, forward alone."""
        rule = rule_for(call_of(graph, node))
        chosen = [Strategy((), (), sizes)]
        both = self._times(graph, node, rule, chosen, backward=backward)
        return float(both[0]), float(self.forward(graph, node, chosen)[0])

    def passes(
        self, graph: Graph, node: Node, chosen: Sequence[Strategy], *, backward: bool
    ) -> Passes[FloatArray]:
        """Seconds that strategies of an operator take forward and backward, shape [S] each."""
        rule = rule_for(call_of(graph, node))
        both = self._times(graph, node, rule, chosen, backward=backward)
        forward = self._times(graph, node, rule, chosen, backward=False)
        return Passes(forward, both - forward)

    def forward(self, graph: Graph, node: Node, chosen: Sequence[Strategy]) -> FloatArray:
        """Seconds of strategies of an operator forward, with what runs inside, shape [S]."""
        rule = rule_for(call_of(graph, node))
        compute = self._times(graph, node, rule, chosen, backward=False)
        return compute + self._inside(chosen, backward=False)

    def inside(self, collective: InnerCollective) -> float:
        """Seconds of a collective inside an operator, over an axis of more than one rank."""
        return inner_time(collective, self._axes)

    def _inside(self, chosen: Sequence[Strategy], *, backward: bool) -> FloatArray:
        """Seconds of what strategies run inside, forward or both ways, shape [S]."""
        return np.array(
            [
                sum(self.inside(c) for c in strategy.collectives if backward or not c.backward)
                for strategy in chosen
            ]
        )

    def _price(
        self,
        graph: Graph,
        node: Node,
        gradients: tuple[bool, ...],
        axis_sizes: tuple[int, ...],
        *,
        backward: bool,
        partial: frozenset[int],
        chunked: Chunked,
    ) -> OperatorPrices:
        rule = rule_for(call_of(graph, node))
        every = strategies(rule, axis_sizes, partial=partial, chunked=chunked)
        seen = [_without_gradient(s, gradients, backward=backward) for s in every]
        times = self._times(graph, node, rule, every, backward=backward)
        if rule.communicates:
            times = times + self._inside(seen, backward=backward)
        cheapest: dict[Strategy, int] = {}
        for i, strategy in enumerate(seen):
            if strategy not in cheapest or times[i] < times[cheapest[strategy]]:
                cheapest[strategy] = i
        unique = tuple(seen[i] for i in cheapest.values())
        flags = gradients[: len(node.inputs)] if backward else ()
        held = self._activations(graph, node, rule, unique, flags)
        return OperatorPrices(unique, times[list(cheapest.values())], {"activations": held})

    def _activations(
        self,
        graph: Graph,
        node: Node,
        rule: OperatorRule,
        chosen: Sequence[Strategy],
        gradients: Sequence[bool],
    ) -> FloatArray:
        outputs = [graph.values[v] for v in node.outputs]
        if not self.training:
            return activation_bytes(rule, chosen, outputs, is_view=is_view(node.operator))
        if not gradients:
            return np.zeros(len(chosen))
        inputs = [graph.values[v] for v in node.inputs]
        saved = saved_by(call_of(graph, node), gradients)
        held = saved_bytes(rule, chosen, inputs, outputs, saved)
        return sum(held.outputs.values(), held.extra + border_bytes(rule, chosen).kept)

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
            name=pace_name(call_of(graph, node)) if self._device.operators else "",
            is_view=is_view(node.operator),
        )


def _without_gradient(
    strategy: Strategy, gradients: tuple[bool, ...], *, backward: bool
) -> Strategy:
    """The strategy as its tensors show it: without a gradient, I is R and nothing runs back."""
    wanted = backward and gradients[0]
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
        tuple(c for c in strategy.collectives if wanted or not c.backward),
    )
