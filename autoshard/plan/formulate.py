"""From graph, mesh and options to the optimization problem.

Every graph input, operator and output becomes a choice among strategies. A value with
several consumers gets a choice of its own, the layout that its consumers share, so that one
conversion can serve them all. Every use of a value becomes an edge that prices the
conversion between the layout it is made in and the layout it is wanted in.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

import numpy as np

from autoshard.graph import DType, Graph, Input, InputKind, Node, Tensor
from autoshard.layouts import Conversions, I, Kind, Layout, R, legal_layouts
from autoshard.plan.active import ActiveAxes
from autoshard.plan.gradients import Gradient, Gradients
from autoshard.plan.legality import without_invariant
from autoshard.plan.lifetimes import input_interval, output_interval
from autoshard.plan.pricing import Prices, Usage
from autoshard.plan.steering import UNSTEERED, Steering
from autoshard.rules import Strategy
from autoshard.solve import Edge, FloatArray, IntArray, Problem
from autoshard.solve import Node as ProblemNode


class Role(StrEnum):
    """What a choice decides."""

    INPUT = "input"
    OPERATOR = "operator"
    SHARED = "shared"
    OUTPUT = "output"


@dataclass(frozen=True)
class Variable:
    """One choice.

    Attributes:
        role: what it decides.
        name: the value (input, shared), the node (operator) or the position (output).
        strategies: what there is to choose from; an input has only outputs, and so on.
        time: seconds of each strategy, shape [S].
        usage: bytes per device of each strategy by kind, each of shape [S].
        interval: when its memory is held, half-open.
    """

    role: Role
    name: str
    strategies: tuple[Strategy, ...]
    time: FloatArray
    usage: Usage = field(default_factory=dict)
    interval: tuple[int, int] = (0, 0)

    @property
    def node(self) -> ProblemNode:
        """This choice in the problem."""
        total = sum(self.usage.values(), np.zeros(len(self.strategies)))
        return ProblemNode(self.time, total, self.interval, f"{self.role}:{self.name}")


@dataclass(frozen=True, slots=True)
class Arc:
    """One use of a value: from output `output` of a choice to input `position` of another."""

    value: str
    source: int
    output: int
    target: int
    position: int
    gradient: Gradient


class Formulation:
    """The problem of one graph on one mesh, and the way back from its solution.

    Args:
        graph: the normalised program.
        axes: the mesh.
        prices: what strategies cost and use.
        steering: what is forbidden.

    Raises:
        OptionError: the steering leaves an operator or a value nothing to choose from.
    """

    def __init__(
        self, graph: Graph, axes: ActiveAxes, prices: Prices, *, steering: Steering = UNSTEERED
    ) -> None:
        self.graph = graph
        self.axes = axes
        self.prices = prices
        self.steering = steering
        self._pricer = steering.pricer(axes)
        self.gradients = Gradients(graph, training=prices.training)
        self.variables: list[Variable] = []
        self.arcs: list[Arc] = []
        self._tables: dict[tuple[object, ...], Conversions] = {}
        self._made_by: dict[str, tuple[int, int]] = {}
        self._partial: set[str] = set()
        self._build()

    @cached_property
    def problem(self) -> Problem:
        """The optimization problem; its nodes are `variables`, its edges are `arcs`."""
        return Problem(
            nodes=tuple(variable.node for variable in self.variables),
            edges=tuple(self._edge(arc) for arc in self.arcs),
            usage_limit=self.prices.memory_budget,
        )

    def layout_at_source(self, arc: Arc, strategy: Strategy) -> Layout:
        """The layout in which a value arrives at an arc."""
        layout = strategy.outputs[arc.output]
        return without_invariant(layout) if arc.gradient is Gradient.NONE else layout

    def table(self, value: str, gradient: Gradient) -> Conversions:
        """The conversions of a value, shared between values of the same shape and type."""
        tensor = self.graph.values[value]
        key = (tensor.shape, tensor.dtype.itemsize, tensor.dtype is DType.BOOL, gradient)
        if key not in self._tables:
            self._tables[key] = Conversions(
                tensor.shape,
                tensor.dtype.itemsize,
                self.axes.sizes,
                differentiable=gradient is not Gradient.NONE,
                partial=tensor.dtype is not DType.BOOL,
                backward=gradient is Gradient.FLOWS,
                pricer=self._pricer,
            )
        return self._tables[key]

    def _build(self) -> None:
        for graph_input in self.graph.inputs:
            if graph_input.kind is not InputKind.LITERAL:
                self._add_input(graph_input)
        for time, node in enumerate(self.graph.nodes):
            self._add_operator(time, node)
        for position, output in enumerate(self.graph.outputs):
            if output.name is not None:
                self._add_output(position, output.name)

    def _add_input(self, graph_input: Input) -> None:
        name = graph_input.name
        tensor = self.graph.values[name]
        layouts = self._resting_layouts(graph_input, tensor)
        shapes = [layout.local_shape(tensor.shape, self.axes.sizes) for layout in layouts]
        time, usage = self.prices.input(graph_input, tensor, shapes)
        variable = Variable(
            Role.INPUT,
            name,
            tuple(Strategy((), (layout,), {}) for layout in layouts),
            time,
            usage,
            input_interval(self.graph, training=self.prices.training),
        )
        self._made_by[name] = self._add(variable), 0
        self._share(name)

    def _resting_layouts(self, graph_input: Input, tensor: Tensor) -> tuple[Layout, ...]:
        """Whole or cut; what the model itself holds without a gradient stays whole."""
        differentiable = self.gradients.exists(graph_input.name)
        whole = I if differentiable else R
        every = legal_layouts(
            tensor.shape, self.axes.sizes, differentiable=differentiable, partial=False
        )
        layouts = (x for x in every if all(t == whole or t.is_shard for t in x.types))
        if graph_input.kind in (InputKind.BUFFER, InputKind.CONSTANT):
            layouts = (x for x in layouts if not any(t.is_shard for t in x.types))
        return tuple(layouts)

    def _add_operator(self, time: int, node: Node) -> None:
        flags = tuple(self.gradients.exists(v) for v in (*node.inputs, *node.outputs))
        operator = self.prices.operator(
            self.graph,
            node,
            flags,
            self.axes.sizes,
            backward=self.gradients.flows(node),
            partial=frozenset(i for i, v in enumerate(node.inputs) if v in self._partial),
        )
        variable = Variable(
            Role.OPERATOR,
            node.name,
            operator.strategies,
            operator.time,
            operator.usage,
            output_interval(self.graph, time, training=self.prices.training),
        )
        target = self._add(variable)
        for position, value in enumerate(node.inputs):
            self._use(value, target, position, self.gradients.of_use(value, node))
        for output, value in enumerate(node.outputs):
            self._made_by[value] = target, output
            if any(_is_partial(s.outputs[output]) for s in operator.strategies):
                self._partial.add(value)
            self._share(value)

    def _share(self, value: str) -> None:
        outputs = sum(output.name == value for output in self.graph.outputs)
        if len(self.graph.consumers[value]) + outputs <= 1:
            return
        gradient = self.gradients.of_value(value)
        every = self.table(value, gradient).layouts
        layouts = [x for x in every if value in self._partial or not _is_partial(x)]
        strategies = tuple(Strategy((layout,), (layout,), {}) for layout in layouts)
        shared = self._add(Variable(Role.SHARED, value, strategies, np.zeros(len(strategies))))
        self._use(value, shared, 0, gradient)
        self._made_by[value] = shared, 0

    def _add_output(self, position: int, value: str) -> None:
        gradient = self.gradients.of_output(position)
        whole = R if gradient is Gradient.NONE else I
        layouts = [
            layout
            for layout in self.table(value, gradient).layouts
            if all(t == whole or t.is_shard for t in layout.types)
        ]
        strategies = tuple(Strategy((layout,), (), {}) for layout in layouts)
        variable = Variable(Role.OUTPUT, str(position), strategies, np.zeros(len(layouts)))
        self._use(value, self._add(variable), 0, gradient)

    def _add(self, variable: Variable) -> int:
        place = (variable.role, variable.name)
        time = self.steering.priced(place, variable.strategies, variable.time)
        self.variables.append(replace(variable, time=time))
        return len(self.variables) - 1

    def _use(self, value: str, target: int, position: int, gradient: Gradient) -> None:
        source, output = self._made_by[value]
        self.arcs.append(Arc(value, source, output, target, position, gradient))

    def _edge(self, arc: Arc) -> Edge:
        table = self.table(arc.value, arc.gradient)
        source, target = self.variables[arc.source], self.variables[arc.target]
        made = [table.index[self.layout_at_source(arc, s)] for s in source.strategies]
        wanted = [table.index[s.inputs[arc.position]] for s in target.strategies]
        distinct_rows, rows = _distinct(made)
        distinct_cols, cols = _distinct(wanted)
        cost = table.cost[np.ix_(distinct_rows, distinct_cols)]
        return Edge(arc.source, arc.target, cost, rows, cols)


def _distinct(numbers: Sequence[int]) -> tuple[IntArray, IntArray]:
    distinct, inverse = np.unique(np.array(numbers, dtype=np.intp), return_inverse=True)
    return distinct, inverse


def _is_partial(layout: Layout) -> bool:
    return any(t.kind is Kind.PARTIAL for t in layout.types)
