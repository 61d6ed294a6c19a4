"""From graph, mesh and options to the optimization problem.

Every graph input, operator and output becomes a choice among strategies. A value with
several consumers gets a choice of its own, the layout that its consumers share, so that one
resharding can serve them all. Every use of a value becomes an edge that prices the
resharding between the layout it is made in and the layout it is wanted in.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from math import prod

import numpy as np

from autoshard.arrays import FloatArray
from autoshard.graph import DType, Graph, Input, InputKind, Node, Tensor, find_blocks
from autoshard.graph.experts import RAGGED_DIMS, ragged_values
from autoshard.layouts import I, Kind, Layout, R, ReshardingTable, has_placements, legal_layouts
from autoshard.ops import Strategy, chunked_types
from autoshard.plan.buckets import carried_beside
from autoshard.plan.constraints import UNCONSTRAINED, PlanConstraints
from autoshard.plan.gradients import Gradient, Gradients
from autoshard.plan.legality import without_invariant
from autoshard.plan.memory.lifetimes import input_interval, output_interval
from autoshard.plan.nontrivial_axes import NontrivialAxes
from autoshard.plan.pricing import OperatorPrices, Prices, Usage
from autoshard.planner.formulation.edge_costs import Ends, Priced
from autoshard.planner.formulation.overlap import Hiding
from autoshard.planner.formulation.variables import Arc, Role, Variable
from autoshard.solve import Edge, Problem, Repeat, ShortestPathCost
from autoshard.solve import Node as ProblemNode


@dataclass(frozen=True, slots=True)
class _Alike:
    """What nodes have in common that are alike in themselves and in their surroundings.

    Attributes:
        prices: their strategies.
        uses: how backward meets the use of each input.
        sums: whether each output can be a sum over ranks.
    """

    prices: OperatorPrices
    uses: tuple[Gradient, ...]
    sums: tuple[bool, ...]


_Resting = tuple[tuple[Strategy, ...], FloatArray, Usage]
"""Strategies of an input at rest, with the time and usage of each."""


class Formulation:
    """The problem of one graph on one mesh, and the way back from its solution.

    Args:
        graph: the normalised program.
        axes: the mesh.
        prices: what strategies cost and use.
        constraints: what is forbidden.

    Raises:
        OptionError: the constraints leaves an operator or a value nothing to choose from.
    """

    def __init__(
        self,
        graph: Graph,
        axes: NontrivialAxes,
        prices: Prices,
        *,
        constraints: PlanConstraints = UNCONSTRAINED,
    ) -> None:
        self.graph = graph
        self.axes = axes
        self.prices = prices
        self.constraints = constraints
        self._pricer = constraints.pricer(axes)
        self.gradients = Gradients(graph, training=prices.training)
        self._chunked = chunked_types(graph)
        self._ragged = ragged_values(graph)
        self.carried = carried_beside(graph, axes.mesh)
        self.hiding = Hiding(graph, axes.mesh, prices, self.gradients)
        self.variables: list[Variable] = []
        self.arcs: list[Arc] = []
        self._tables: dict[tuple[object, ...], ReshardingTable] = {}
        self._made_by: dict[str, tuple[int, int]] = {}
        self._partial: set[str] = set()
        self.blocks = find_blocks(graph)
        self._several = self._with_several_users()
        self._alike: dict[tuple[object, ...], _Alike] = {}
        self._choice_by_node: list[int] = []
        self._choices_by_value: dict[str, list[int]] = {}
        self._resting_names = {graph_input.name for graph_input in graph.inputs}
        self._totals: dict[int, FloatArray] = {}
        self._edges: dict[tuple[object, ...], Priced] = {}
        self._ends: dict[tuple[object, ...], Ends] = {}
        self._path_costs: dict[int, ShortestPathCost] = {}
        self._shared: dict[tuple[object, ...], tuple[Strategy, ...]] = {}
        self._resting: dict[tuple[object, ...], _Resting] = {}
        self._build()

    @cached_property
    def problem(self) -> Problem:
        """The optimization problem; its nodes are `variables`, its edges are `arcs`.

        Without a limit on usage, which is that of inference.
        """
        return Problem(
            nodes=tuple(self._node(variable) for variable in self.variables),
            edges=tuple(self._edge(arc) for arc in self.arcs),
            repeats=self.repeats(self.choices_of),
        )

    def _node(self, variable: Variable) -> ProblemNode:
        total = self._totals.get(id(variable.usage))
        if total is None:
            total = sum(variable.usage.values(), np.zeros(len(variable.strategies)))
            self._totals[id(variable.usage)] = total
        name = f"{variable.role}:{variable.name}"
        return ProblemNode(variable.time, total, variable.interval, name)

    def repeats(self, choices_of: Callable[[range], tuple[int, ...]]) -> tuple[Repeat, ...]:
        """The choices of each instance of each block, place by place.

        Args:
            choices_of: the choices that belong to the nodes of an instance.
        """
        runs = (
            tuple(run)
            for block in self.blocks
            for alike, run in groupby(map(choices_of, block.instances()), key=len)
            if alike
        )
        return tuple(Repeat(members) for members in runs if len(members) > 1)

    @cached_property
    def instance_of(self) -> dict[int, range]:
        """The instance of a repeated block that an operator's choice belongs to, as nodes."""
        instances = (nodes for block in self.blocks for nodes in block.instances())
        return {self._choice_by_node[i]: nodes for nodes in instances for i in nodes}

    def first_of(self, nodes: range) -> int:
        """The choice of the first of some nodes."""
        return self._choice_by_node[nodes.start]

    @cached_property
    def inside_blocks(self) -> frozenset[int]:
        """The choices that belong to instances of repeated blocks."""
        instances = (nodes for block in self.blocks for nodes in block.instances())
        return frozenset(i for nodes in instances for i in self.choices_of(nodes))

    def choices_of(self, nodes: range) -> tuple[int, ...]:
        """The choices that belong to some nodes, and to the inputs that only they use."""
        chosen: dict[int, None] = {}
        for i in nodes:
            node = self.graph.nodes[i]
            for value in node.inputs:
                users = self.graph.consumers[value]
                if value in self._resting_names and all(user in nodes for user, _ in users):
                    chosen.update(dict.fromkeys(self._choices_by_value[value]))
            chosen[self._choice_by_node[i]] = None
            for value in node.outputs:
                chosen.update(dict.fromkeys(self._choices_by_value[value]))
        return tuple(chosen)

    def layout_at_source(self, arc: Arc, strategy: Strategy) -> Layout:
        """The layout in which a value arrives at an arc."""
        layout = strategy.outputs[arc.output]
        return without_invariant(layout) if arc.gradient is Gradient.NONE else layout

    def kind_of(self, arc: Arc) -> tuple[object, ...]:
        """A key that is equal for arcs with equal prices."""
        source, target = (self.variables[i].strategies for i in (arc.source, arc.target))
        reader = self._reader(arc)
        share = None if reader is None else self.hiding.share(reader, arc.position)
        # Choices that share their strategies are about tensors of the same shape and type.
        ragged = arc.value in self._ragged
        carried = self.carried.get(arc.value)
        return (
            *(id(source), arc.output, id(target), arc.position),
            *(arc.gradient, share, ragged, carried),
        )

    def ends(self, arc: Arc) -> Ends:
        """The ends of an arc, by layout and by the compute beside it."""
        key = self.kind_of(arc)
        if key not in self._ends:
            index = self.table(arc.value, arc.gradient).index
            source, target = (self.variables[i].strategies for i in (arc.source, arc.target))
            reader = self._reader(arc)
            self._ends[key] = Ends.of(
                [index[self.layout_at_source(arc, s)] for s in source],
                [index[s.inputs[arc.position]] for s in target],
                None if reader is None else self.hiding.compute(reader, arc.position, target),
            )
        return self._ends[key]

    def _reader(self, arc: Arc) -> Node | None:
        reader = self.variables[arc.target]
        if reader.role is not Role.OPERATOR:
            return None
        return self.graph.nodes[self.graph.numbers[reader.name]]

    def local_bytes(self, value: str, layouts: Iterable[Layout]) -> FloatArray:
        """Bytes of a rank's part of a value, in each of some layouts."""
        tensor, sizes = self.graph.values[value], self.axes.sizes
        elements = [prod(layout.local_shape(tensor.shape, sizes)) for layout in layouts]
        return np.array(elements, dtype=float) * tensor.dtype.itemsize

    def table(self, value: str, gradient: Gradient) -> ReshardingTable:
        """The reshardings of a value, shared between values of the same shape and type."""
        tensor = self.graph.values[value]
        still = RAGGED_DIMS if value in self._ragged else ()
        carried = self.carried.get(value, 1.0)
        kind = tensor.shape, tensor.dtype.itemsize, tensor.dtype is DType.BOOL
        key = (*kind, gradient, still, carried)
        if key not in self._tables:
            self._tables[key] = ReshardingTable(
                tensor.shape,
                tensor.dtype.itemsize,
                self.axes.sizes,
                differentiable=gradient is not Gradient.NONE,
                partial=tensor.dtype is not DType.BOOL,
                backward=gradient is Gradient.FLOWS,
                chunked=self._chunked.get(tensor.shape, ()),
                still=still,
                pricer=self._pricer,
                carried=carried,
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
        key = (graph_input.kind, tensor, self.gradients.exists(name))
        if key not in self._resting:
            layouts = self._resting_layouts(graph_input, tensor)
            shapes = [layout.local_shape(tensor.shape, self.axes.sizes) for layout in layouts]
            strategies = tuple(Strategy((), (layout,), {}) for layout in layouts)
            self._resting[key] = strategies, *self.prices.input(graph_input, tensor, shapes)
        variable = Variable(Role.INPUT, name, *self._resting[key], input_interval(self.graph))
        self._made_by[name] = self._add(variable), 0
        self._choices_by_value[name] = [self._made_by[name][0]]
        self._share(name)

    def _resting_layouts(self, graph_input: Input, tensor: Tensor) -> tuple[Layout, ...]:
        """Whole, or cut as DTensor can; what the model holds without a gradient stays whole."""
        differentiable = self.gradients.exists(graph_input.name)
        whole = I if differentiable else R
        every = legal_layouts(
            tensor.shape,
            self.axes.sizes,
            differentiable=differentiable,
            partial=False,
            chunked=self._chunked.get(tensor.shape, ()),
        )
        layouts = (
            x for x in every if all(t == whole or t.is_shard for t in x.types) and has_placements(x)
        )
        if graph_input.kind in (InputKind.BUFFER, InputKind.CONSTANT):
            layouts = (x for x in layouts if not any(t.is_shard for t in x.types))
        return tuple(layouts)

    def _add_operator(self, time: int, node: Node) -> None:
        alike = self._alike_to(time, node)
        variable = Variable(
            Role.OPERATOR,
            node.name,
            alike.prices.strategies,
            alike.prices.time,
            alike.prices.usage,
            output_interval(self.graph, time),
        )
        target = self._add(variable)
        self._choice_by_node.append(target)
        for position, (value, gradient) in enumerate(zip(node.inputs, alike.uses, strict=True)):
            self._use(value, target, position, gradient)
        for output, (value, is_sum) in enumerate(zip(node.outputs, alike.sums, strict=True)):
            self._made_by[value] = target, output
            self._choices_by_value[value] = []
            if is_sum:
                self._partial.add(value)
            self._share(value)

    def _alike_to(self, time: int, node: Node) -> _Alike:
        backward = self.gradients.flows(node)
        partial = frozenset(i for i, v in enumerate(node.inputs) if v in self._partial)
        key = (self.graph.kinds[time], backward, partial)
        if key not in self._alike:
            flags = tuple(self.gradients.exists(v) for v in (*node.inputs, *node.outputs))
            prices = self.prices.operator(
                self.graph,
                node,
                flags,
                self.axes.sizes,
                backward=backward,
                partial=partial,
                chunked=self._chunked,
            )
            uses = tuple(self.gradients.of_use(v, node) for v in node.inputs)
            made = zip(*(s.outputs for s in prices.strategies), strict=True)
            sums = tuple(any(map(_is_partial, layouts)) for layouts in made)
            self._alike[key] = _Alike(prices, uses, sums)
        return self._alike[key]

    def _with_several_users(self) -> frozenset[str]:
        """Values with several users, or whose twin in another instance of a block has them."""
        leaving = Counter(output.name for output in self.graph.outputs)
        several = {v for v, uses in self.graph.consumers.items() if len(uses) + leaving[v] > 1}
        for block in self.blocks:
            for twins in zip(*block.instances(), strict=True):
                outputs = zip(*(self.graph.nodes[i].outputs for i in twins), strict=True)
                for values in outputs:
                    if not several.isdisjoint(values):
                        several.update(values)
        return frozenset(several)

    def _share(self, value: str) -> None:
        if value not in self._several:
            return
        gradient = self.gradients.of_value(value)
        table = self.table(value, gradient)
        key = (id(table), value in self._partial)
        if key not in self._shared:
            self._shared[key] = tuple(
                Strategy((layout,), (layout,), {})
                for layout in table.layouts
                if value in self._partial or not _is_partial(layout)
            )
        strategies = self._shared[key]
        free = self._totals.setdefault(len(strategies), np.zeros(len(strategies)))
        shared = self._add(Variable(Role.SHARED, value, strategies, free))
        self._use(value, shared, 0, gradient)
        self._made_by[value] = shared, 0
        self._choices_by_value[value].append(shared)

    def _add_output(self, position: int, value: str) -> None:
        gradient = self.gradients.of_output(position)
        whole = R if gradient is Gradient.NONE else I
        layouts = [
            layout
            for layout in self.table(value, gradient).layouts
            if all(t == whole or t.is_shard for t in layout.types) and has_placements(layout)
        ]
        strategies = tuple(Strategy((layout,), (), {}) for layout in layouts)
        variable = Variable(Role.OUTPUT, str(position), strategies, np.zeros(len(layouts)))
        self._use(value, self._add(variable), 0, gradient)

    def _add(self, variable: Variable) -> int:
        place = (variable.role, variable.name)
        time = self.constraints.apply(place, variable.strategies, variable.time)
        self.variables.append(variable if time is variable.time else replace(variable, time=time))
        return len(self.variables) - 1

    def _use(self, value: str, target: int, position: int, gradient: Gradient) -> None:
        source, output = self._made_by[value]
        self.arcs.append(Arc(value, source, output, target, position, gradient))

    def _edge(self, arc: Arc) -> Edge:
        key = self.kind_of(arc)
        if key not in self._edges:
            table = self.table(arc.value, arc.gradient)
            self._edges[key] = self.ends(arc).priced(table, self._path_costs)
        return Edge(arc.source, arc.target, *self._edges[key])


def _is_partial(layout: Layout) -> bool:
    return any(t.kind is Kind.PARTIAL for t in layout.types)
