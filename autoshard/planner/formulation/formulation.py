"""Formulation of planning as an optimization problem: variables, strategies and edge costs.

Every graph input, operator and output is a variable whose domain are its strategies. A value with
several uses has an additional variable, the layout that its consumers share, so that one
resharding can serve all of them. Every use of a value is an edge, whose cost is that of the
resharding between the layout of the producer and that of the consumer.

In the program of `autoshard.solve.programs.linear_program`, x_v(s) is the strategy of a variable,
c_v(s) its seconds, and p_e(i, j) the seconds of the resharding from layout i to layout j.
"""

from collections import Counter
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import cached_property
from itertools import groupby

import numpy as np

from autoshard.base.arrays import FloatArray, IntArray
from autoshard.constraints import PlanConstraints, plan_constraints
from autoshard.constraints.nontrivial_axes import NontrivialAxes
from autoshard.costs import (
    ForwardBackward,
    Overlap,
)
from autoshard.graph import DType, Graph, Input, InputKind, Node, Output, Tensor, find_blocks
from autoshard.graph.experts import RAGGED_DIMS, ragged_values
from autoshard.graph.gradients import Gradient
from autoshard.layouts import ALONE, I, Layout, R, ReshardingTable, has_placements, legal_layouts
from autoshard.lowering.recompute import checkpoint_units
from autoshard.mesh import Mesh
from autoshard.ops import Strategy, is_view
from autoshard.ops.rules.legality import without_invariant
from autoshard.plan.options import PlanOptions
from autoshard.plan.stage import Use as UseKey
from autoshard.planner.formulation.edge_costs import EdgeCosts
from autoshard.planner.formulation.saved_tensors import SavedTensors
from autoshard.planner.formulation.variables import Role, Use, Variable
from autoshard.pricing.prices import Prices, Usage
from autoshard.solve import Edge, Problem, Repeat, ShortestPathCost

_MANY_LAYOUTS = 100
"""Number of layouts of a producer or a consumer above which an edge has the steps between layouts
instead of a matrix: a product with a vector then takes less time, and no matrix has to be made."""


class Formulation:
    """The problem of one graph on one mesh.

    Args:
        prices: cost model of the graph on the mesh.
        constraints: constraints on strategies and collectives.
        keeps_forbidden: True if variables keep the strategies that constraints forbid, which then
            cost infinity.

    Raises:
        OptionError: a constraint forbids all strategies of a variable.
    """

    def __init__(
        self, prices: Prices, constraints: PlanConstraints, *, keeps_forbidden: bool = False
    ) -> None:
        self.graph = graph = prices.graph
        self.mesh = mesh = prices.mesh
        self.axes = NontrivialAxes.of(mesh)
        self.prices = prices
        self.constraints = constraints
        self.gradients = prices.gradients
        self.blocks = find_blocks(graph)
        self.checkpoint_units = checkpoint_units(graph, self.blocks, prices.checkpointed_modules)
        self.variables: list[Variable] = []
        self.uses: list[Use] = []
        # Pairs of variables that must have the same layout, and the labels of their strategies.
        self.ties: list[tuple[int, int, IntArray, IntArray]] = []
        self._overlap = Overlap(graph, mesh) if prices.overlaps else None
        again = prices.gathers_activations_again
        self._saved = SavedTensors(prices, self.blocks) if again else None
        self._ragged = ragged_values(graph)
        self._several = self._values_with_several_uses()
        self._input_names = {graph_input.name for graph_input in graph.inputs}
        self.parameters = {parameter.name for parameter in graph.parameters}
        # The variable that produces each value, and the position among its outputs.
        self._made_by: dict[str, tuple[int, int]] = {}
        self._variable_by_node: list[int] = []
        self._variables_by_value: dict[str, list[int]] = {}
        self._partial: set[str] = set()
        # Equal variables share their arrays, since the solver compares arrays by identity.
        self._inputs: dict[tuple[object, ...], tuple[tuple[Strategy, ...], FloatArray, Usage]] = {}
        self._shared: dict[tuple[object, ...], tuple[Strategy, ...]] = {}
        self._zeros: dict[int, FloatArray] = {}
        self._tables: dict[tuple[object, ...], ReshardingTable] = {}
        self._compute: dict[int, ForwardBackward[FloatArray]] = {}
        self._edge_costs: dict[tuple[object, ...], EdgeCosts] = {}
        self._path_costs: dict[int, ShortestPathCost] = {}
        self._keeps_forbidden = keeps_forbidden
        # The variables are stored with the result, so that the ids of their arrays are not reused.
        self._allowed: dict[tuple[int, int], tuple[Variable, Variable]] = {}
        self._kinds: dict[Use, tuple[object, ...]] = {}
        self._last_uses = _last_uses(graph)
        self._build()

    @classmethod
    def of(
        cls, graph: Graph, mesh: Mesh, options: PlanOptions, *, keeps_forbidden: bool = False
    ) -> "Formulation":
        """The problem of planning a graph on a mesh.

        Raises:
            OptionError: an option is invalid, or forbids all strategies of a variable.
        """
        constraints = plan_constraints(graph, mesh, options)
        return cls(Prices(graph, mesh, options), constraints, keeps_forbidden=keeps_forbidden)

    def constrained(self, constraints: PlanConstraints) -> "Formulation":
        """The same problem under other constraints."""
        return Formulation(self.prices, constraints)

    def restricted(self, choice: IntArray) -> "Formulation":
        """The problem with one strategy of each variable only.

        Args:
            choice: strategy index of each variable.
        """
        # Equal variables go on sharing their arrays.
        known: dict[tuple[int, ...], Variable] = {}
        variables = []
        for variable, s in zip(self.variables, choice.tolist(), strict=True):
            key = (s, id(variable.strategies), id(variable.time), *map(id, variable.usage.values()))
            if key not in known:
                known[key] = replace(
                    variable,
                    strategies=(variable.strategies[s],),
                    time=variable.time[[s]],
                    usage={kind: nbytes[[s]] for kind, nbytes in variable.usage.items()},
                )
            own = known[key]
            variables.append(
                replace(variable, strategies=own.strategies, time=own.time, usage=own.usage)
            )
        ties = [
            (target, source, rows[[choice[target]]], cols[[choice[source]]])
            for target, source, rows, cols in self.ties
        ]
        part = copy(self)
        for name in ("problem", "min_input_bytes"):
            vars(part).pop(name, None)
        # The memos are of the strategies.
        memos: dict[str, object] = {
            name: {} for name in ("_kinds", "_edge_costs", "_path_costs", "_compute")
        }
        vars(part).update(variables=variables, ties=ties, **memos)
        return part

    @cached_property
    def problem(self) -> Problem:
        """The optimization problem; its nodes are `variables`, its edges are `uses`.

        Additional edges force the variables in `ties` to equal layouts. Usage is that of inference,
        without a limit.
        """
        totals: dict[int, FloatArray] = {}
        edges: dict[
            tuple[object, ...], tuple[FloatArray | ShortestPathCost, IntArray, IntArray]
        ] = {}
        kinds = [self.kind_of(use) for use in self.uses]
        for use, kind in zip(self.uses, kinds, strict=True):
            if kind not in edges:
                edges[kind] = self._edge(self.edge_costs(use))
        pairs = zip(self.uses, kinds, strict=True)
        return Problem(
            nodes=tuple(variable.problem_node(totals) for variable in self.variables),
            edges=(
                *(Edge(use.source, use.target, *edges[kind]) for use, kind in pairs),
                *(Edge.equal(*tie) for tie in self.ties),
            ),
            repeats=self.repeats(self.variables_of),
        )

    @cached_property
    def min_input_bytes(self) -> int:
        """Lower bound of every plan's peak memory, bytes per device.

        It has all inputs, with gradients and optimizer state, each sharded as far as possible.
        """
        return sum(v.min_bytes for v in self.variables if v.role is Role.INPUT)

    def repeats(self, members_of: Callable[[range], tuple[int, ...]]) -> tuple[Repeat, ...]:
        """The members of each instance of each repeated block, in corresponding order.

        Args:
            members_of: function from the nodes of an instance to its members.
        """
        runs = (
            tuple(run)
            for block in self.blocks
            for size, run in groupby(map(members_of, block.instances()), key=len)
            if size
        )
        return tuple(Repeat(members) for members in runs if len(members) > 1)

    @cached_property
    def unit_of(self) -> dict[int, range]:
        """For each operator variable in a unit of activation checkpointing, the nodes of that."""
        return {self._variable_by_node[i]: unit for unit in self.checkpoint_units for i in unit}

    def first_of(self, nodes: range) -> int:
        """The variable of the first node of a range."""
        return self._variable_by_node[nodes.start]

    @cached_property
    def inside_blocks(self) -> frozenset[int]:
        """The variables that belong to instances of repeated blocks."""
        instances = (nodes for block in self.blocks for nodes in block.instances())
        return frozenset(i for nodes in instances for i in self.variables_of(nodes))

    def variables_of(self, nodes: range) -> tuple[int, ...]:
        """The variables of a range of nodes, of their results, and of inputs that only they use."""
        found: dict[int, None] = {}
        for i in nodes:
            node = self.graph.nodes[i]
            for value in node.inputs:
                users = self.graph.consumers[value]
                if value in self._input_names and all(user in nodes for user, _ in users):
                    found.update(dict.fromkeys(self._variables_by_value[value]))
            found[self._variable_by_node[i]] = None
            for value in node.outputs:
                found.update(dict.fromkeys(self._variables_by_value[value]))
        return tuple(found)

    def node_of(self, variable: Variable) -> Node:
        """The node of an operator variable."""
        return self.graph.nodes[self.graph.numbers[variable.name]]

    def use_key(self, use: Use) -> UseKey:
        """The identification of a use in the plan document: value, consumer and position."""
        consumer = self.variables[use.target]
        if consumer.role is Role.OUTPUT:
            return use.value, "output", int(consumer.name)
        return use.value, None if consumer.role is Role.SHARED else consumer.name, use.position

    def source_layout(self, use: Use, strategy: Strategy) -> Layout:
        """The layout of a value before the resharding for a use."""
        layout = strategy.outputs[use.output]
        return without_invariant(layout) if use.gradient is Gradient.NONE else layout

    def kind_of(self, use: Use) -> tuple[object, ...]:
        """A key that is equal for uses with equal costs."""
        known = self._kinds.get(use)
        if known is None:
            source, target = (self.variables[i].strategies for i in (use.source, use.target))
            # Variables that share their strategies have tensors of equal shapes and dtypes.
            known = self._kinds[use] = (
                *(id(source), use.output, id(target), use.position, use.gradient),
                *(self._overlap_share(use), use.value in self._ragged),
                *(self.prices.charges.get(use.value), self.constraints.forbidden(use.value)),
                self.graph.reduced_dtype(use.value),
                self._keeps_shards(use),
            )
        return known

    def edge_costs(self, use: Use) -> EdgeCosts:
        """Costs of the reshardings of a use."""
        kind = self.kind_of(use)
        if kind not in self._edge_costs:
            table = self.table(use.value, use.gradient)
            source, target = (self.variables[i].strategies for i in (use.source, use.target))
            makes = [table.index[self.source_layout(use, s)] for s in source]
            takes = np.array([table.index[s.inputs[use.position]] for s in target], dtype=np.intp)
            compute = self._overlap_compute(use)
            if compute is None:
                targets, cols = np.unique(takes, return_inverse=True)
            else:
                pairs = np.stack([takes, compute.forward, compute.backward])
                distinct, first, cols = np.unique(
                    pairs, axis=1, return_index=True, return_inverse=True
                )
                targets, cols = takes[first], cols.ravel()
                compute = ForwardBackward(distinct[1], distinct[2])
            sources, rows = np.unique(np.array(makes, dtype=np.intp), return_inverse=True)
            tensor = self.graph.values[use.value]
            has_gradient = self.gradients.exists(use.value)
            prices = self.prices
            reduced = self.graph.reduced_dtype(use.value)
            stored = self.graph.stored_dtype(use.value)
            self._edge_costs[kind] = EdgeCosts(
                table,
                tensor,
                self.axes.sizes,
                sources,
                rows,
                targets,
                cols,
                compute,
                micro_batches=self.prices.micro_batches,
                contention=self.mesh.topology.device.contention,
                of_parameter=self.reads_parameter(use),
                accumulation_time=(
                    prices.accumulation_time(tensor.dtype, reduced) if has_gradient else 0.0
                ),
                accumulation_factor=(
                    prices.accumulation_factor(tensor.dtype, reduced) if has_gradient else 0.0
                ),
                shard_accumulation_factor=(
                    prices.accumulation_factor(tensor.dtype, stored) if has_gradient else 0.0
                ),
                keeps_shards=self._keeps_shards(use),
            )
        return self._edge_costs[kind]

    def reads_parameter(self, use: Use) -> bool:
        """True if a use reads a parameter in the layout in which it is stored."""
        source = self.variables[use.source]
        return source.role is Role.INPUT and source.name in self.parameters

    def _keeps_shards(self, use: Use) -> bool:
        """True if backward gathers what a use reads again, if it is gathered for it."""
        saved, reader = self._saved, self.variables[use.target]
        if saved is None or self.variables[use.source].role is Role.INPUT:
            return False
        if reader.role is Role.OPERATOR:
            return saved.needs(self.graph.numbers[reader.name], use.position)
        return reader.role is Role.SHARED and use.value in saved.needed_in_backward

    def table(self, value: str, gradient: Gradient) -> ReshardingTable:
        """The reshardings of a value; shared between values of equal shape and dtype."""
        tensor = self.graph.values[value]
        fixed_dims = RAGGED_DIMS if value in self._ragged else ()
        charge = self.prices.charges.get(value, ALONE)
        is_bool = tensor.dtype is DType.BOOL
        forbidden = self.constraints.forbidden(value)
        reduced = self.graph.reduced_dtype(value)
        gradient_itemsize = None if reduced is tensor.dtype else reduced.itemsize
        itemsizes = tensor.dtype.itemsize, gradient_itemsize
        key = (
            *(tensor.shape, *itemsizes, is_bool, gradient, fixed_dims, charge),
            forbidden,
        )
        if key not in self._tables:
            self._tables[key] = ReshardingTable(
                tensor.shape,
                tensor.dtype.itemsize,
                self.axes.sizes,
                groups=self.axes.groups,
                differentiable=gradient is not Gradient.NONE,
                partial=not is_bool,
                backward=gradient is Gradient.FLOWS,
                interleaved=self.prices.interleaved.get(tensor.shape, ()),
                fixed_dims=fixed_dims,
                pricer=self.constraints.pricer(self.axes, forbidden),
                charge=charge,
                gradient_itemsize=gradient_itemsize,
            )
        return self._tables[key]

    def _overlap_share(self, use: Use) -> float | None:
        """Share of the reader's compute that can overlap with a resharding; None if none can."""
        reader = self.variables[use.target]
        if self._overlap is None or reader.role is not Role.OPERATOR:
            return None
        return self._overlap.share(self.node_of(reader), use.position)

    def _overlap_compute(self, use: Use) -> ForwardBackward[FloatArray] | None:
        """Seconds of compute that can overlap, by strategy of the reader; None if none can."""
        share = self._overlap_share(use)
        if share is None:
            return None
        reader = self.variables[use.target]
        # Nodes that share their strategies share their costs.
        key = id(reader.strategies)
        if key not in self._compute:
            node = self.node_of(reader)
            self._compute[key] = self.prices.compute(node, reader.strategies)
        compute = self._compute[key]
        return ForwardBackward(share * compute.forward, share * compute.backward)

    def _edge(self, costs: EdgeCosts) -> tuple[FloatArray | ShortestPathCost, IntArray, IntArray]:
        """Cost matrix of an edge, the row of each source strategy, the column of each target's."""
        table = costs.table
        runs_once = costs.of_parameter and costs.micro_batches > 1
        is_path = costs.compute is None and not (runs_once or costs.keeps_shards)
        most = max(len(costs.sources), len(costs.targets))
        if most <= _MANY_LAYOUTS or not is_path:
            return costs.fastest, costs.rows, costs.cols
        if id(table) not in self._path_costs:
            sources, targets, seconds = table.steps
            self._path_costs[id(table)] = ShortestPathCost(
                len(table.layouts), sources, targets, costs.micro_batches * seconds
            )
        return self._path_costs[id(table)], costs.sources[costs.rows], costs.targets[costs.cols]

    def _build(self) -> None:
        for graph_input in self.graph.inputs:
            if graph_input.kind is not InputKind.LITERAL:
                self._add_input(graph_input)
        for time, node in enumerate(self.graph.nodes):
            self._add_operator(time, node)
        for position, output in enumerate(self.graph.outputs):
            if output.updates is not None:
                self._add_update(position, output)
            elif output.name is not None:
                self._add_output(position, output.name)

    def _add_input(self, graph_input: Input) -> None:
        name = graph_input.name
        tensor = self.graph.values[name]
        may_shard = self._may_shard(graph_input)
        stored = self.graph.stored_dtype(name)
        key = (graph_input.kind, tensor, stored, self.gradients.exists(name), may_shard)
        if key not in self._inputs:
            layouts = self._input_layouts(graph_input, tensor)
            shapes = [layout.local_shape(tensor.shape, self.axes.sizes) for layout in layouts]
            strategies = tuple(Strategy((), (layout,), {}) for layout in layouts)
            self._inputs[key] = strategies, *self.prices.input(graph_input, shapes)
        variable = Variable(
            Role.INPUT, name, *self._inputs[key], (0, max(len(self.graph.nodes), 1))
        )
        self._add_maker(name, self._add(variable), 0)

    def _may_shard(self, graph_input: Input) -> bool:
        """False for constants, statistics of batch norms, and buffers only read and not pinned."""
        if graph_input.kind is InputKind.BUFFER:
            name = graph_input.name
            is_named = name in self.graph.updated or bool(self.constraints.of(("input", name)))
            return is_named and name not in self.graph.running_statistics
        return graph_input.kind is not InputKind.CONSTANT

    def _input_layouts(self, graph_input: Input, tensor: Tensor) -> tuple[Layout, ...]:
        """The layouts of a graph input: replicated or sharded, as far as DTensor supports them."""
        differentiable = self.gradients.exists(graph_input.name)
        whole = I if differentiable else R
        may_shard = self._may_shard(graph_input)
        legal = legal_layouts(
            tensor.shape,
            self.axes.sizes,
            differentiable=differentiable,
            partial=False,
            interleaved=self.prices.interleaved.get(tensor.shape, ()),
        )
        return tuple(
            layout
            for layout in legal
            if all(t == whole or (t.is_shard and may_shard) for t in layout.types)
            and has_placements(layout)
        )

    def _add_operator(self, time: int, node: Node) -> None:
        partial = frozenset(i for i, v in enumerate(node.inputs) if v in self._partial)
        constraints = self.constraints.of((Role.OPERATOR, node.name))
        prices = self.prices.operator(time, partial, () if self._keeps_forbidden else constraints)
        if not prices.strategies:
            prices = self.prices.operator(time, partial)
        interval = (time, self._last_uses[time] + 1)
        target = self._add(
            Variable(
                Role.OPERATOR, node.name, prices.strategies, prices.time, prices.usage, interval
            )
        )
        self._variable_by_node.append(target)
        for position, value in enumerate(node.inputs):
            self._add_use(value, target, position, self.gradients.of_use(value, node))
        made = zip(node.outputs, prices.partial, strict=True)
        for output, (value, is_partial) in enumerate(made):
            if is_partial:
                self._partial.add(value)
            self._add_maker(value, target, output)

    def _values_with_several_uses(self) -> frozenset[str]:
        """Values with several uses, in any instance of a repeated block."""
        returned = Counter(output.name for output in self.graph.outputs)
        several = {v for v, uses in self.graph.consumers.items() if len(uses) + returned[v] > 1}
        for block in self.blocks:
            for twins in zip(*block.instances(), strict=True):
                outputs = zip(*(self.graph.nodes[i].outputs for i in twins), strict=True)
                for values in outputs:
                    if not several.isdisjoint(values):
                        several.update(values)
        return frozenset(several)

    def _add_maker(self, value: str, variable: int, output: int) -> None:
        """Record the producer of a value; add a shared variable if it has several uses."""
        self._made_by[value] = variable, output
        role = self.variables[variable].role
        self._variables_by_value[value] = [variable] if role is Role.INPUT else []
        if value not in self._several:
            return
        gradient = self.gradients.of_value(value)
        table = self.table(value, gradient)
        key = (id(table), value in self._partial)
        if key not in self._shared:
            self._shared[key] = tuple(
                Strategy((layout,), (layout,), {})
                for layout in table.layouts
                if value in self._partial or not layout.is_partial
            )
        strategies = self._shared[key]
        free = self._zeros.setdefault(len(strategies), np.zeros(len(strategies)))
        shared = self._add(Variable(Role.SHARED, value, strategies, free))
        self._add_use(value, shared, 0, gradient)
        self._made_by[value] = shared, 0
        self._variables_by_value[value].append(shared)

    def _add_output(self, position: int, value: str) -> None:
        gradient = self.gradients.of_output(position)
        whole = R if gradient is Gradient.NONE else I
        strategies = tuple(
            Strategy((layout,), (), {})
            for layout in self.table(value, gradient).layouts
            if all(t == whole or t.is_shard for t in layout.types) and has_placements(layout)
        )
        variable = Variable(Role.OUTPUT, str(position), strategies, np.zeros(len(strategies)))
        self._add_use(value, self._add(variable), 0, gradient)

    def _add_update(self, position: int, output: Output) -> None:
        """Add the variable of a buffer's new contents, tied to the layout of the buffer."""
        assert output.name is not None
        assert output.updates is not None
        buffer = self._variables_by_value[output.updates][0]
        layouts = [strategy.outputs for strategy in self.variables[buffer].strategies]
        strategies = tuple(Strategy(layout, (), {}) for layout in layouts)
        variable = Variable(Role.OUTPUT, str(position), strategies, np.zeros(len(strategies)))
        target = self._add(variable)
        self._add_use(output.name, target, 0, Gradient.NONE)
        kept = [layouts.index(strategy.inputs) for strategy in self.variables[target].strategies]
        numbers: IntArray = np.arange(len(layouts), dtype=np.intp)
        self.ties.append((target, buffer, numbers[kept], numbers))
        self._variables_by_value[output.name].append(target)

    def _add(self, variable: Variable) -> int:
        choice = (variable.role, variable.name)
        time = self.constraints.apply(choice, variable.strategies, variable.time)
        if time is not variable.time:
            variable = self._without_forbidden(replace(variable, time=time))
        self.variables.append(variable)
        return len(self.variables) - 1

    def _without_forbidden(self, variable: Variable) -> Variable:
        """The variable with the strategies that constraints allow, if there are any."""
        kept = np.flatnonzero(np.isfinite(variable.time))
        if self._keeps_forbidden or len(kept) in (0, len(variable.time)):
            return variable
        key = id(variable.strategies), id(variable.time)
        if key not in self._allowed:
            self._allowed[key] = (
                variable,
                replace(
                    variable,
                    strategies=tuple(variable.strategies[i] for i in kept.tolist()),
                    time=variable.time[kept],
                    usage={kind: nbytes[kept] for kind, nbytes in variable.usage.items()},
                ),
            )
        own = self._allowed[key][-1]
        return replace(variable, strategies=own.strategies, time=own.time, usage=own.usage)

    def _add_use(self, value: str, target: int, position: int, gradient: Gradient) -> None:
        source, output = self._made_by[value]
        self.uses.append(Use(value, source, output, target, position, gradient))


def _last_uses(graph: Graph) -> list[int]:
    """For each node, the last node that reads a result of it, directly or through views."""
    returned = {output.name for output in graph.outputs}
    views = [is_view(node.operator) for node in graph.nodes]
    last = list(range(len(graph.nodes)))
    for number in reversed(range(len(graph.nodes))):
        for value in graph.nodes[number].outputs:
            if value in returned:
                last[number] = len(graph.nodes) - 1
                break
            for reader, _ in graph.consumers[value]:
                last[number] = max(last[number], last[reader] if views[reader] else reader)
    return last
