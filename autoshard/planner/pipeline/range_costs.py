"""Seconds and bytes of every contiguous range of a program as a pipeline stage on one sub-mesh.

The whole program is planned once on the sub-mesh, without a memory budget. What an operator and the
reshardings of its inputs cost in that plan is added to the segment between two cut points, so that
a range costs a difference of prefix sums, however many ranges there are. The layouts of the plan at
the cuts are those in which stages exchange activations.

Two ways to save memory are counted beside the fastest plan: stored parameters are sharded further
(a second plan, in which the memory of parameters has a price), and repeated blocks are recomputed
in backward (activation checkpointing).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from autoshard.arrays import FloatArray, IntArray
from autoshard.costs import GATHERED_ONCE, ForwardBackward, Frequency
from autoshard.graph import CutPoint, Graph, InputKind, StageCutter
from autoshard.layouts import I, Kind, Layout, R
from autoshard.mesh import Mesh
from autoshard.ops import Strategy
from autoshard.plan.document import Stage
from autoshard.plan.lowering import lower
from autoshard.plan.memory import MemoryOp, StageMemory
from autoshard.plan.options import PlanOptions
from autoshard.plan.pricing import inner_time
from autoshard.planner.formulation import Formulation, Role
from autoshard.planner.stage_builder import Decisions, StageBuilder
from autoshard.solve import KeyValueStore, solve_problem

_STATIC = ("parameters", "gradients", "optimizer", "buffers")
_MEMORY_PRICE = 0.5
"""Price of storing parameters, gradients and optimizer state on one device in full, relative to the
time of a step, in the plan that saves memory."""


class Segments(NamedTuple):
    """Seconds and bytes of the segments between consecutive cut points, shape [P - 1] each.

    Attributes:
        forward: seconds of forward of a micro-batch.
        backward_input: seconds of the gradients of activations of a micro-batch.
        backward_weight: seconds of the gradients of parameters of a micro-batch.
        end: seconds per step.
        state: bytes of parameters, gradients, optimizer state and buffers.
        saved: bytes that one micro-batch keeps for backward.
        recomputed: seconds of forward that checkpointing repeats in backward.
        kept: bytes of `saved` that checkpointing keeps.
        working: bytes of the largest operator.
    """

    forward: FloatArray
    backward_input: FloatArray
    backward_weight: FloatArray
    end: FloatArray
    state: FloatArray
    saved: FloatArray
    recomputed: FloatArray
    kept: FloatArray
    working: FloatArray


@dataclass(frozen=True)
class RangeCosts:
    """Costs of every range of a program on one sub-mesh.

    Attributes:
        mesh: the sub-mesh.
        variants: segments of the fastest plan, and of the plan that saves memory.
        bound: proven lower bound of the seconds of a step of the whole program on the sub-mesh.
        layouts: layout of each value that can cross a cut, as text.
    """

    mesh: Mesh
    variants: tuple[Segments, ...]
    bound: float
    layouts: Mapping[str, str]


def range_costs(
    cutter: StageCutter,
    points: Sequence[CutPoint],
    mesh: Mesh,
    options: PlanOptions,
    *,
    block_cache: KeyValueStore | None = None,
) -> RangeCosts:
    """Plan the whole program on a sub-mesh, and read off the costs of its segments.

    Args:
        cutter: of the program.
        points: P - 1 places where a stage may begin, ascending; the first stage begins at node 0.
        mesh: the sub-mesh.
        options: as for `make_plan`; `memory_budget` and pins of inputs and outputs do not matter.
        block_cache: as for `make_plan`.

    Raises:
        OptionError: an option forbids all strategies of a variable.
    """
    formulation = Formulation.of(cutter.graph, mesh, options)
    choice, bound = _solved(formulation, options, 0.0, block_cache)
    variants = [_Attribution(formulation, choice, cutter, points).segments()]
    layouts = _layouts(formulation, choice, points)
    if mesh.num_devices > 1 and options.mode == "training":
        frugal, _ = _solved(formulation, options, _MEMORY_PRICE * bound, block_cache)
        if not np.array_equal(frugal, choice):
            variants.append(_Attribution(formulation, frugal, cutter, points).segments())
    return RangeCosts(mesh, tuple(variants), bound, layouts)


def _solved(
    formulation: Formulation, options: PlanOptions, price: float, cache: KeyValueStore | None
) -> tuple[IntArray, float]:
    """The best choice if storing the whole state on a device costs `price`, and a lower bound."""
    problem = formulation.problem
    if price:
        whole = sum(float(_state(v.usage).max(initial=0.0)) for v in formulation.variables)
        prices: dict[tuple[int, int], FloatArray] = {}
        nodes = []
        for node, variable in zip(problem.nodes, formulation.variables, strict=True):
            key = (id(variable.time), id(variable.usage))
            if key not in prices:
                prices[key] = node.cost + price * _state(variable.usage) / max(whole, 1.0)
            nodes.append(replace(node, cost=prices[key]))
        problem = replace(problem, nodes=tuple(nodes))
    solution = solve_problem(
        problem,
        time_limit=options.time_limit,
        relative_gap=options.relative_gap,
        seed=options.seed,
        block_cache=cache,
    )
    if solution.choice is None:
        raise RuntimeError(f"a problem without a limit ended as {solution.status}")
    return solution.choice, solution.bound


def _state(usage: Mapping[str, FloatArray]) -> FloatArray:
    return sum((usage[kind] for kind in _STATIC if kind in usage), np.zeros(1))


def _layouts(
    formulation: Formulation, choice: IntArray, points: Sequence[CutPoint]
) -> dict[str, str]:
    """The layout of each value that can cross a cut: I or R, and S."""
    wanted = {value for point in points for value in point.values}
    candidates: dict[str, list[Layout]] = {value: [] for value in wanted}
    for use in formulation.uses:
        if use.value in wanted:
            source = formulation.variables[use.source].strategies[int(choice[use.source])]
            target = formulation.variables[use.target].strategies[int(choice[use.target])]
            candidates[use.value] += [target.inputs[use.position], source.outputs[use.output]]
    num_axes = len(formulation.axes.sizes)
    found = {}
    for value, layouts in candidates.items():
        has_gradient = formulation.gradients.exists(value)
        whole = Layout((I if has_gradient else R,) * num_axes)
        sent = next((x for x in layouts if _can_be_sent(x)), whole)
        types = tuple(whole.types[0] if t.is_replicated else t for t in sent.types)
        layout = Layout(types, sent.nesting)
        found[value] = str(formulation.axes.widen(layout, differentiable=has_gradient))
    return found


def _can_be_sent(layout: Layout) -> bool:
    return not any(t.kind is Kind.PARTIAL or t.sub_shards for t in layout.types)


class _Attribution:
    """Adds the costs of a choice to the segments of a program."""

    def __init__(
        self,
        formulation: Formulation,
        choice: IntArray,
        cutter: StageCutter,
        points: Sequence[CutPoint],
    ) -> None:
        self._formulation = formulation
        self._choice = choice
        graph = formulation.graph
        self._inputs = {i.name: i for i in graph.inputs}
        starts = np.array([point.node for point in points], dtype=np.intp)
        self._segment_of_node: IntArray = np.searchsorted(
            starts, np.arange(len(graph.nodes)), side="right"
        )
        placed = frozenset(cutter.placed)
        self._segment_of_node = _with_copied(graph, placed, self._segment_of_node)
        number = len(points) + 1
        self._sums = {name: np.zeros(number) for name in Segments._fields}
        self._micro_batches = formulation.prices.micro_batches
        self._known: dict[tuple[int, int], ForwardBackward[float]] = {}

    def segments(self) -> Segments:
        """The costs of each segment."""
        for number, variable in enumerate(self._formulation.variables):
            strategy = variable.strategies[int(self._choice[number])]
            if variable.role is Role.OPERATOR:
                self._add_operator(number, strategy)
            elif variable.role is Role.INPUT:
                self._add_input(number)
        builder = StageBuilder(self._formulation, Decisions(self._choice))
        for number in range(len(self._formulation.uses)):
            self._add_resharding(builder, number)
        if self._formulation.prices.training:
            self._add_saved(builder.stage())
        self._add_checkpoints()
        return Segments(**self._sums)

    def _add(self, name: str, segment: int, amount: float) -> None:
        self._sums[name][segment] += amount

    def _add_operator(self, number: int, strategy: Strategy) -> None:
        formulation = self._formulation
        variable = formulation.variables[number]
        node = formulation.node_of(variable)
        segment = int(self._segment_of_node[formulation.graph.numbers[node.name]])
        compute = self._compute(number, strategy)
        inside = {False: 0.0, True: 0.0}
        for collective in strategy.collectives:
            inside[collective.backward] += inner_time(collective, formulation.axes)
        self._add("forward", segment, compute.forward + inside[False])
        weight = compute.backward * self._weight_share(number)
        self._add("backward_weight", segment, weight)
        self._add("backward_input", segment, compute.backward - weight + inside[True])
        sizes = formulation.axes.sizes
        values = zip(
            (*node.inputs, *node.outputs), (*strategy.inputs, *strategy.outputs), strict=True
        )
        local = 0.0
        for value, layout in values:
            tensor = formulation.graph.values[value]
            local += float(np.prod(layout.local_shape(tensor.shape, sizes))) * tensor.dtype.itemsize
        self._sums["working"][segment] = max(self._sums["working"][segment], 2.0 * local)

    def _compute(self, number: int, strategy: Strategy) -> ForwardBackward[float]:
        """Seconds of an operator; equal nodes share their strategies."""
        formulation = self._formulation
        key = (id(formulation.variables[number].strategies), int(self._choice[number]))
        if key not in self._known:
            node = formulation.node_of(formulation.variables[number])
            self._known[key] = formulation.prices.rank_compute(node, strategy.sizes)
        return self._known[key]

    def _weight_share(self, number: int) -> float:
        """Share of an operator's backward that computes gradients of parameters."""
        formulation = self._formulation
        node = formulation.node_of(formulation.variables[number])
        parameters = formulation.parameters
        differentiable = [v for v in node.inputs if formulation.gradients.exists(v)]
        if not differentiable:
            return 0.0
        return sum(v in parameters for v in differentiable) / len(differentiable)

    def _add_input(self, number: int) -> None:
        formulation = self._formulation
        variable, pick = formulation.variables[number], int(self._choice[number])
        graph_input = self._inputs[variable.name]
        segments = self._users(variable.name)
        if not segments:
            return
        seconds = float(variable.time[pick])
        if graph_input.kind is InputKind.USER:
            self._add("forward", segments[0], seconds / self._micro_batches)
            return
        state = float(_state(variable.usage)[pick]) if variable.usage else 0.0
        # Every stage that uses a parameter holds it; a range counts it where it is used first and
        # last, which differ for tied embeddings only.
        for segment in sorted({segments[0], segments[-1]}):
            self._add("end", segment, seconds)
            self._add("state", segment, state)

    def _users(self, value: str) -> list[int]:
        uses = self._formulation.graph.consumers[value]
        return sorted(int(self._segment_of_node[i]) for i, _ in uses)

    def _add_resharding(self, builder: StageBuilder, number: int) -> None:
        communication = builder.communication(number)
        if communication is None:
            return
        formulation = self._formulation
        use = formulation.uses[number]
        segment = self._segment_of_use(number)
        every = communication.every
        self._add("forward", segment, every.forward)
        part = "backward_weight" if formulation.reads_parameter(use) else "backward_input"
        self._add(part, segment, every.backward)
        once = communication.seconds() - self._micro_batches * (every.forward + every.backward)
        self._add("end", segment, max(once, 0.0))
        if communication.frequency is Frequency.STEP and formulation.gradients.exists(use.value):
            # Full gradients are summed over micro-batches, instead of their shards.
            costs = formulation.edge_costs(use)
            source, target = (int(self._choice[i]) for i in (use.source, use.target))
            growth = float(
                costs.target_bytes[costs.cols[target]] - costs.source_bytes[costs.rows[source]]
            )
            self._add("end", segment, costs.accumulation_time * growth)
            self._add("state", segment, costs.accumulation_factor * growth)

    def _add_saved(self, stage: Stage) -> None:
        """Tensors that autograd saves, in the segment of the operation that makes them."""
        graph = self._formulation.graph
        memory = StageMemory(lower(stage, graph), self._formulation.gradients)
        saved: set[int] = set()
        segment_of = [self._segment_of_operation(op) for op in memory.ops]
        nbytes: dict[int, int] = {}
        for storage, tensor in zip(memory.storages, memory.tensors, strict=True):
            nbytes.setdefault(storage, tensor.nbytes)
        for op, segment in zip(memory.ops, segment_of, strict=True):
            self._add("saved", segment, op.saved_bytes)
            saved.update(memory.storages[tensor] for tensor in op.saved)
        for storage in saved:
            maker = memory.made_by[storage]
            if maker >= 0:
                once = memory.ops[maker].frequency in GATHERED_ONCE
                self._add("state" if once else "saved", segment_of[maker], nbytes[storage])

    def _segment_of_operation(self, op: MemoryOp) -> int:
        graph = self._formulation.graph
        if not op.uses:
            return int(self._segment_of_node[graph.numbers[op.name]])
        value, consumer, _ = op.uses[0]
        if consumer is not None and consumer in graph.numbers:
            return int(self._segment_of_node[graph.numbers[consumer]])
        if value in graph.makers:
            return int(self._segment_of_node[graph.makers[value]])
        return next(iter(self._users(value)), 0)

    def _segment_of_use(self, number: int) -> int:
        formulation = self._formulation
        use = formulation.uses[number]
        reader, maker = formulation.variables[use.target], formulation.variables[use.source]
        for variable in (reader, maker):
            if variable.role is Role.OPERATOR:
                return int(self._segment_of_node[formulation.graph.numbers[variable.name]])
        graph = formulation.graph
        if use.value in graph.makers:
            return int(self._segment_of_node[graph.makers[use.value]])
        users = self._users(use.value)
        return users[0] if users else 0

    def _add_checkpoints(self) -> None:
        """Repeated blocks that are recomputed keep their first segment's crossing values only."""
        formulation = self._formulation
        self._sums["kept"] = self._sums["saved"].copy()
        inside = {i for block in formulation.blocks for x in block.instances() for i in x}
        if not inside or not formulation.prices.training:
            return
        forward = self._sums["forward"]
        for block in formulation.blocks:
            for nodes in block.instances():
                segments = sorted({int(self._segment_of_node[i]) for i in nodes})
                for segment in segments:
                    self._sums["recomputed"][segment] = forward[segment]
                    self._sums["kept"][segment] = 0.0
                self._sums["kept"][segments[0]] = self._bytes_before(nodes.start)

    def _bytes_before(self, node: int) -> float:
        """Local bytes of the activations that enter a block."""
        formulation, graph = self._formulation, self._formulation.graph
        total = 0.0
        makers = graph.makers
        for value in dict.fromkeys(graph.nodes[node].inputs):
            if value in makers and makers[value] < node and formulation.gradients.exists(value):
                tensor = graph.values[value]
                shards = formulation.mesh.num_devices
                total += tensor.nbytes / shards
        return total


def _with_copied(graph: Graph, placed: frozenset[int], segments: IntArray) -> IntArray:
    """Segments of nodes; a copied node counts where it is first used."""
    found = segments.copy()
    for i in reversed(range(len(graph.nodes))):
        if i not in placed:
            users = [u for value in graph.nodes[i].outputs for u, _ in graph.consumers[value]]
            found[i] = min((found[u] for u in users), default=found[i])
    return found
