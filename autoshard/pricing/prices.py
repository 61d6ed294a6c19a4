"""Cost model: seconds and bytes of graph inputs by layout, and of operators by strategy."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np

from autoshard.base.arrays import FloatArray
from autoshard.constraints import ShardingConstraint, StrategyConstraint, pinned_sub_shards
from autoshard.constraints.nontrivial_axes import NontrivialAxes
from autoshard.costs import (
    Execution,
    ForwardBackward,
    Frequency,
    OptimizerSpec,
    StepCommunication,
    activation_bytes,
    efficiency_key,
    halo_bytes,
    inputs_held,
    num_waiting,
    operator_times,
    optimizer_time,
    parameter_bytes,
    runs_per_step,
    saved_bytes,
)
from autoshard.errors import OptionError
from autoshard.graph import DType, Graph, Input, InputKind, Node
from autoshard.graph.gradients import Gradients
from autoshard.layouts import AxisType, Charge, Layout, Pricer, Step, step_price
from autoshard.lowering.recompute import Saving, saved_by
from autoshard.mesh import Device, Mesh
from autoshard.ops import (
    AxisRule,
    InnerCollective,
    Operation,
    Strategy,
    call_of,
    interleaved_types,
    is_view,
    rule_for,
    strategies,
)
from autoshard.ops.rules.legality import without_invariant
from autoshard.plan.options import PlanOptions
from autoshard.plan.stage import Resharding
from autoshard.pricing.charges import charges
from autoshard.pricing.execution import check_float8, executions, saving_of

Usage = Mapping[str, FloatArray]
"""Bytes per device of each strategy, by kind."""

_TIE_BREAK = 1e-6
"""Cost of storing a tensor, as a fraction of the time to read it: prefers smaller shards among
layouts of equal time."""

_MEMORY_KINDS = {
    InputKind.PARAMETER: "parameters",
    InputKind.BUFFER: "buffers",
    InputKind.CONSTANT: "buffers",
    InputKind.PREPARED: "buffers",
    InputKind.RECEIVED: "inputs",
    InputKind.USER: "inputs",
}


def optimizer_of(options: PlanOptions) -> OptimizerSpec:
    """The optimizer that options name.

    Raises:
        OptionError: it is unknown.
    """
    return replace(
        OptimizerSpec.named(options.training.optimizer),
        state_dtype=None
        if options.training.state_dtype is None
        else DType(options.training.state_dtype),
        master_weights=options.training.master_weights,
        foreach=options.runtime.foreach_optimizer,
        clips=options.training.clip_gradients,
    )


def communication_of(
    path: Sequence[Step],
    pricer: Pricer,
    *,
    charge: Charge,
    of_parameter: bool,
    micro_batches: int,
    frequency: Frequency,
    contention: float,
) -> tuple[StepCommunication[float], list[float]]:
    """Seconds of a resharding in a training step, in total and of each of its steps.

    Args:
        path: its steps.
        pricer: prices of collectives and copies.
        charge: what is charged of its collectives.
        of_parameter: True if it reshards a parameter from the layout in which it is stored.
        micro_batches: number of micro-batches of the training step.
        frequency: how often it runs.
        contention: fraction of overlapped seconds by which compute takes longer.
    """
    prices = [step_price(step, pricer, charge) for step in path]
    both, forward = [p.total for p in prices], [p.forward for p in prices]
    in_bucket = of_parameter and all(step.is_bucketable for step in path)
    actions = [step.forward for step in path]
    waiting = num_waiting(actions) if in_bucket else 0
    runs = [(micro_batches, micro_batches)] * len(path)
    if in_bucket:
        runs = runs_per_step(actions, frequency, micro_batches)
    communication = StepCommunication(
        sum(both),
        ForwardBackward(sum(forward), max(sum(both) - sum(forward), 0.0)),
        sum(both[:waiting]),
        micro_batches,
        frequency,
        contention,
    )
    # `gathers` times forward and `reductions` times backward, which is the total less forward.
    return communication, [
        reductions * total + (gathers - reductions) * moved
        for (gathers, reductions), total, moved in zip(runs, both, forward, strict=True)
    ]


@dataclass(frozen=True)
class OperatorPrices:
    """An operator's strategies with their costs.

    Attributes:
        strategies: S strategies.
        time: seconds per training step, forward plus backward, with the collectives inside,
            shape [S].
        usage: bytes per device by kind, each of shape [S]: in training its outputs and internal
            tensors that are saved for backward, in inference its outputs.
        partial: True if each output can be a partial sum.
    """

    strategies: tuple[Strategy, ...]
    time: FloatArray
    usage: Usage
    partial: tuple[bool, ...]


class Prices:
    """Seconds and bytes of every variable of the planning problem.

    Args:
        graph: the program.
        mesh: the devices.
        options: mode, optimizer and memory budget.

    Raises:
        OptionError: the optimizer is unknown, or the parameters are master weights already.
    """

    def __init__(self, graph: Graph, mesh: Mesh, options: PlanOptions) -> None:
        self.graph = graph
        self.mesh = mesh
        self._options = options
        self.training = options.mode == "training"
        self.micro_batches = options.training.micro_batches
        self.in_flight = options.pipeline.in_flight
        self.accumulation_dtype = options.training.accumulation_dtype
        has_rates = mesh.topology.device.kernels is not None
        self.overlaps = has_rates if options.runtime.overlap is None else options.runtime.overlap
        self.checkpointed_modules = options.memory.checkpointed_modules
        self.gathers_activations_again = self.training and options.memory.regather_activations
        self.memory_budget = options.memory.budget or mesh.topology.device.memory
        if options.training.master_weights and graph.converted:
            raise OptionError(
                "master_weights is set, but under the mixed precision of the model the parameters "
                "are the master weights already: leave it out"
            )
        self.optimizer = optimizer_of(options)
        self.gradients = Gradients(graph, training=self.training)
        check_float8(options, mesh.topology.device)
        self._device = with_attention(mesh.topology.device, options.runtime.attention_kernel)
        self._sizes = mesh.axis_sizes
        self._axes = NontrivialAxes.of(mesh)
        self._operators: dict[tuple[object, ...], OperatorPrices] = {}

    @cached_property
    def _executions(self) -> tuple[Execution, ...]:
        return executions(self.graph, self._options)

    @cached_property
    def saving(self) -> Saving:
        """How the tensors that are saved for backward differ from those of eager mode."""
        return saving_of(self.graph, self._executions, self._options)

    @cached_property
    def charges(self) -> Mapping[str, Charge]:
        """What reshardings of a value are charged of collectives, where that is not all."""
        return charges(self.graph, self.mesh, self._options)

    def kind(self, node: Node) -> tuple[int, Execution]:
        """What nodes of equal price have in common."""
        number = self.graph.numbers[node.name]
        return self.graph.kinds[number], self._executions[number]

    @cached_property
    def interleaved(self) -> Mapping[tuple[int, ...], tuple[AxisType, ...]]:
        """The interleaved shard types that a tensor can have, by shape."""
        pinned = pinned_sub_shards(self.graph, self._axes, self._options)
        return interleaved_types(self.graph, pinned)

    def input(
        self, graph_input: Input, local_shapes: Sequence[tuple[int, ...]]
    ) -> tuple[FloatArray, Usage]:
        """Seconds per training step and bytes by kind of an input, for each of its local shapes.

        A trained parameter costs its optimizer update and the sum of its gradients over
        micro-batches, a user input the time to write it for each micro-batch.
        """
        tensor = self.graph.values[graph_input.name]
        trained = self.training and tensor.requires_grad and graph_input.kind is InputKind.PARAMETER
        optimizer = self.optimizer if trained else None
        stored = self.graph.stored_dtype(graph_input.name)
        nbytes = [parameter_bytes(shape, stored, optimizer) for shape in local_shapes]
        own = np.array([x.parameter for x in nbytes], dtype=float)
        held = inputs_held(graph_input.kind, self.micro_batches, self.in_flight)
        usage = {_MEMORY_KINDS[graph_input.kind]: held * own}
        if graph_input.kind is InputKind.USER:
            return self.micro_batches * own / self._device.input_bandwidth, usage
        casts = self._cast_time(tensor.dtype, stored, backward=trained)
        if not trained:
            return (_TIE_BREAK / self._device.memory_bandwidth + casts) * own, usage
        usage["gradients"] = np.array([x.gradient for x in nbytes], dtype=float)
        usage["optimizer"] = np.array([x.optimizer for x in nbytes], dtype=float)
        time = [
            optimizer_time(self.optimizer, shape, stored, self._device) for shape in local_shapes
        ]
        sums = self.accumulation_time(stored) * usage["gradients"]
        return np.array(time) + casts * own + sums, usage

    def _cast_time(self, read: DType, stored: DType, *, backward: bool) -> float:
        """Seconds per training step to convert one byte of a stored parameter, and its gradient."""
        if read is stored:
            return 0.0
        moved = self.micro_batches * (1 + backward) * (1 + read.itemsize / stored.itemsize)
        return moved / self._device.stream_bandwidth

    def accumulation_factor(self, dtype: DType, reduced: DType | None = None) -> float:
        """Bytes of a sum of gradients over micro-batches, relative to one of the gradients.

        Args:
            dtype: element type of the gradients.
            reduced: element type in which they are reduced; that of the gradients if None.
        """
        summed = reduced or dtype
        if self.accumulation_dtype is not None:
            summed = DType(self.accumulation_dtype)
        return summed.itemsize / dtype.itemsize

    def accumulation_time(self, dtype: DType, reduced: DType | None = None) -> float:
        """Seconds to sum one byte of gradients over the micro-batches of a step.

        Every micro-batch after the first reads the sum and its own gradient, and writes the sum. If
        the product that computes the gradient adds it to the sum, it writes the sum instead of the
        gradient, and reads it while it computes. Arguments are those of `accumulation_factor`.
        """
        factor = self.accumulation_factor(dtype, reduced)
        is_fused = self._options.runtime.fused_gradient_accumulation
        moved = (self.micro_batches - 1) * (max(factor - 1, 0.0) if is_fused else 2 * factor + 1)
        return moved / self._device.stream_bandwidth

    def full_accumulation(self, reshardings: Iterable[Resharding]) -> float:
        """Seconds to sum full gradients, where they are reduced once, instead of their shards."""
        seconds = 0.0
        for resharding in reshardings:
            tensor = self.graph.values[resharding.value]
            if resharding.frequency is Frequency.STEP and self.gradients.exists(resharding.value):
                layouts = map(Layout.parse, (resharding.source, resharding.target))
                shard, full = (prod(x.local_shape(tensor.shape, self._sizes)) for x in layouts)
                growth = (full - shard) * tensor.dtype.itemsize
                reduced = self.graph.reduced_dtype(resharding.value)
                seconds += self.accumulation_time(tensor.dtype, reduced) * growth
        return seconds

    def operator(
        self,
        number: int,
        partial: frozenset[int],
        constraints: tuple[StrategyConstraint, ...] = (),
    ) -> OperatorPrices:
        """The distinct strategies of a node with their costs; equal nodes share the result.

        Args:
            number: index of the node.
            partial: positions of the inputs that can be partial sums.
            constraints: only strategies that they all allow are listed; there may be none.
        """
        node = self.graph.nodes[number]
        kind = *self.kind(node), self.saving.cache_key(node)
        key = (*kind, self.gradients.flows(node), partial, constraints)
        if key not in self._operators:
            self._operators[key] = self._price(node, partial, constraints)
        return self._operators[key]

    def compute(self, node: Node, chosen: Sequence[Strategy]) -> ForwardBackward[FloatArray]:
        """Seconds of compute of an operator forward and backward, shape [S] each.

        Args:
            node: the operator.
            chosen: S strategies; only their letter sizes matter.
        """
        forward = self._times(node, chosen, backward=False)
        both = forward
        if self.gradients.flows(node):
            both = self._times(node, chosen, backward=True)
        return ForwardBackward(forward, both - forward)

    def rank_compute(self, node: Node, sizes: Mapping[str, int]) -> ForwardBackward[float]:
        """Seconds of compute of an operator forward and backward, by the letter sizes on a rank."""
        found = self.compute(node, [Strategy((), (), sizes)])
        return ForwardBackward(float(found.forward[0]), float(found.backward[0]))

    def weight_gradients(
        self, node: Node, sizes: Mapping[str, int], weights: Collection[str]
    ) -> float:
        """Seconds of an operator's backward on a rank that compute gradients of weights.

        Args:
            node: an operator with a backward pass.
            sizes: size of each index letter on the rank.
            weights: the inputs that are weights.
        """
        chosen = [Strategy((), (), sizes)]
        both = self._times(node, chosen, backward=True)
        return float((both - self._times(node, chosen, backward=True, without=weights))[0])

    def inner_time(self, collective: InnerCollective, pricer: Pricer) -> float:
        """Seconds of a collective inside an operator, with the copies that it needs."""
        is_move = collective.operation is Operation.MOVE
        share = self._options.runtime.dispatch_share if is_move else 1.0
        action, nbytes = collective.operation.action, round(share * collective.nbytes)
        seconds = pricer.collective_time(action, collective.axis, nbytes)
        return seconds + (pricer.copy_time(collective.copied) if collective.copied else 0.0)

    def forward(self, node: Node, chosen: Sequence[Strategy]) -> FloatArray:
        """Seconds of an operator in forward per step, with the collectives inside, shape [S]."""
        once = self._times(node, chosen, backward=False) + self._inside(chosen, backward=False)
        return self.micro_batches * once

    def _price(
        self, node: Node, partial: frozenset[int], constraints: tuple[StrategyConstraint, ...]
    ) -> OperatorPrices:
        backward = self.gradients.flows(node)
        flags = tuple(self.gradients.exists(v) for v in (*node.inputs, *node.outputs))
        rule = rule_for(call_of(self.graph, node))
        values = (self.graph.values[value] for value in (*node.inputs, *node.outputs))
        types = tuple(self.interleaved.get(tensor.shape, ()) for tensor in values)
        interleaved = types if any(types) else ()
        by_axis = [c for c in constraints if isinstance(c, ShardingConstraint)]

        def allows(axis: int, option: AxisRule) -> bool:
            return all(constraint.allows(axis, option) for constraint in by_axis)

        every = strategies(
            rule,
            self._axes.sizes,
            partial=partial,
            interleaved=interleaved,
            has_gradients=any(flags),
            allows=allows if by_axis else None,
        )
        pairs = [(s, _without_gradient(s, flags, backward=backward)) for s in every]
        pairs = [(s, own) for s, own in pairs if all(allowed(own) for allowed in constraints)]
        if not pairs:
            return OperatorPrices((), np.zeros(0), {}, ())
        found, seen = [s for s, _ in pairs], [own for _, own in pairs]
        times = self.micro_batches * self._times(node, found, backward=backward)
        if rule.communicates:
            times = times + self.micro_batches * self._inside(seen, backward=backward)
        # Strategies that differed in gradients that nothing computes are equal now. One of each is
        # left, the cheapest: every strategy is a column of the integer program.
        cheapest: dict[Strategy, int] = {}
        for i, strategy in enumerate(seen):
            if strategy not in cheapest or times[i] < times[cheapest[strategy]]:
                cheapest[strategy] = i
        numbers = list(cheapest.values())
        unique = tuple(seen[i] for i in numbers)
        outputs = zip(*(s.outputs for s in unique), strict=True)
        return OperatorPrices(
            unique,
            times[numbers],
            {"activations": self._activations(node, unique, flags[: len(node.inputs)])},
            tuple(any(layout.is_partial for layout in layouts) for layouts in outputs),
        )

    def _activations(
        self, node: Node, chosen: Sequence[Strategy], gradients: Sequence[bool]
    ) -> FloatArray:
        call = call_of(self.graph, node)
        rule = rule_for(call)
        inputs = [self.graph.values[v] for v in node.inputs]
        outputs = [self.graph.values[v] for v in node.outputs]
        if not self.training:
            if not self.saving.unwritten.isdisjoint(node.outputs):
                return np.zeros(len(chosen))
            return activation_bytes(rule, chosen, outputs, is_view=is_view(node.operator))
        if not gradients or not self.gradients.flows(node):
            return np.zeros(len(chosen))
        saved = saved_by(self.graph, node, gradients, self.saving)
        nbytes = saved_bytes(rule, chosen, inputs, outputs, saved)
        return sum(nbytes.outputs.values(), nbytes.extra + halo_bytes(rule, chosen)[0])

    def _inside(self, chosen: Sequence[Strategy], *, backward: bool) -> FloatArray:
        """Seconds of the collectives inside an operator, forward or in both passes, shape [S]."""
        return np.array(
            [
                sum(
                    self.inner_time(c, self._axes)
                    for c in s.collectives
                    if backward or not c.backward
                )
                for s in chosen
            ]
        )

    def _times(
        self,
        node: Node,
        chosen: Sequence[Strategy],
        *,
        backward: bool,
        without: Collection[str] = (),
    ) -> FloatArray:
        """Seconds of an operator, without the gradients of some inputs, shape [S]."""
        call = call_of(self.graph, node)
        inputs = [
            replace(self.graph.values[v], requires_grad=False)
            if v in without
            else self.graph.values[v]
            for v in node.inputs
        ]
        return operator_times(
            rule_for(call),
            chosen,
            inputs=inputs,
            outputs=[self.graph.values[v] for v in node.outputs],
            device=self._device,
            training=backward,
            name=efficiency_key(call) if self._device.operators else "",
            is_view=is_view(node.operator),
            execution=self.kind(node)[1],
        )


def with_attention(device: Device, kernel: str) -> Device:
    """The device with the rates of one kernel of attention alone, if it has rates of kernels.

    Args:
        device: the device.
        kernel: name of the kernel, auto for the device's default, or math for none that is fused.

    Raises:
        OptionError: the device has no rates of this kernel.
    """
    rates = device.kernels
    if kernel == "auto":
        return device
    if rates is not None and kernel == "math":
        return replace(device, kernels=replace(rates, attention={}))
    if rates is None or kernel not in rates.attention:
        known = ", ".join(rates.attention) if rates else "none"
        raise OptionError(
            f"attention_kernel {kernel!r}: {device.name} has rates of {known}; leave it out"
        )
    return replace(device, kernels=replace(rates, attention={kernel: rates.attention[kernel]}))


def _without_gradient(
    strategy: Strategy, gradients: tuple[bool, ...], *, backward: bool
) -> Strategy:
    """Normalise a strategy: R instead of I for tensors without a gradient.

    Collectives of backward are removed if there is no backward pass.
    """
    if backward and all(gradients):
        return strategy
    runs_backward = backward and gradients[0]
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
        tuple(c for c in strategy.collectives if runs_backward or not c.backward),
    )
