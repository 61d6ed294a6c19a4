"""Seconds and bytes of every contiguous range of a program as a pipeline stage on one sub-mesh.

The whole program is planned once on the sub-mesh, without a memory budget. What an operator and the
reshardings of its inputs cost in that plan is added to the segment between two cut points, so that
a range costs a difference of prefix sums, however many ranges there are. The layouts of the plan at
the cuts are those in which stages exchange activations.

Two ways to save memory are counted beside the fastest plan: parameters are sharded further and
gathered more often (other plans, in which what is kept over micro-batches has a price), and
repeated blocks are recomputed in backward (activation checkpointing).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import numpy as np

from autoshard.base.arrays import FloatArray, IntArray
from autoshard.costs import GATHERED_ONCE, Frequency
from autoshard.graph import CutPoint, Graph, InputKind, Node, Shortened, StageCutter, shorten
from autoshard.layouts import I, Kind, Layout, R
from autoshard.lowering.instructions import lower
from autoshard.lowering.memory import MemoryOp, StageMemory
from autoshard.mesh import Mesh
from autoshard.ops import Strategy, weights_of
from autoshard.plan.options import PlanOptions
from autoshard.plan.stage import Stage
from autoshard.planner.formulation.edge_costs import EdgeCosts
from autoshard.planner.formulation.formulation import Formulation
from autoshard.planner.formulation.stage_builder import Decisions, StageBuilder, with_gathers_again
from autoshard.planner.formulation.variables import Role
from autoshard.planner.pipeline.limits import SearchLimits
from autoshard.planner.planner import plan_id
from autoshard.solve import (
    Edge,
    KeyValueStore,
    content_key,
    read_sealed,
    write_sealed,
)

_LARGEST = frozenset({"working", "block"})
"""Members of `Segments` that are maxima instead of sums."""
_STATIC = ("parameters", "gradients", "optimizer", "buffers")
SHARES_OF_TIME = (0.3, 3.0)
"""Costs of using the whole memory budget, relative to the time of a step, in the plans that save
memory."""


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
        block: bytes that one micro-batch keeps of the largest block that can be recomputed.
        blocks: number of blocks that can be recomputed.
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
    block: FloatArray
    blocks: FloatArray

    def most_bytes(self, micro_batches: int) -> float:
        """Bytes of the whole program on one rank that holds all micro-batches of a step."""
        return float(self.state.sum() + micro_batches * self.saved.sum() + self.working.max())


@dataclass(frozen=True)
class RangeCosts:
    """Costs of every range of a program on one sub-mesh.

    Attributes:
        mesh: the sub-mesh.
        variants: segments of the fastest plan, and of plans that save memory.
        layouts: layout of each value that can cross a cut, as text.
    """

    mesh: Mesh
    variants: tuple[Segments, ...]
    layouts: Mapping[str, str]


def range_costs(
    cutter: StageCutter,
    points: Sequence[CutPoint],
    mesh: Mesh,
    options: PlanOptions,
    limits: SearchLimits,
    *,
    num_ranks: int,
    block_cache: KeyValueStore | None = None,
) -> RangeCosts:
    """Plan the whole program on a sub-mesh, and read off the costs of its segments.

    Repeated blocks are planned with four instances; the others cost as much as the second.

    Args:
        cutter: of the program.
        points: P - 2 places where a stage may begin, ascending; the first stage begins at node 0.
        mesh: the sub-mesh.
        options: as for `make_plan`; `memory_budget` and pins of inputs and outputs do not matter.
        limits: of the search.
        num_ranks: number of such sub-meshes.
        block_cache: as for `make_plan`.

    Raises:
        OptionError: an option forbids all strategies of a variable, or the problem is too large.
        Stopped: the search ended before there was a plan.
    """
    cuts = [num_ranks, *(point.node for point in points)]
    key = _store_key(cutter.graph, cuts, mesh, options)
    stored = None if block_cache is None else read_sealed(block_cache, key)
    if stored is not None:
        return _from_json(mesh, stored)
    short = shorten(cutter.graph)
    formulation = limits.formulated(short.graph, mesh, options)
    solution = limits.solve(formulation.problem, options, block_cache)
    choice, bound = solution.choice, solution.bound
    assert choice is not None
    segments = _SegmentSums(cutter, points, short)
    variants = [segments.of(_NodeCosts(formulation, Decisions(choice)))]
    memory = options.memory.budget or mesh.topology.device.memory
    may_need_less = variants[0].most_bytes(options.training.micro_batches) > memory
    if mesh.num_devices > 1 and options.mode == "training" and may_need_less:
        # The budget of all stages together, each on a sub-mesh.
        budget = num_ranks * memory
        for share in SHARES_OF_TIME:
            saving = frugal(formulation, options, share * bound / budget, limits, block_cache)
            variants.append(segments.of(_NodeCosts(formulation, saving)))
    layouts = _layouts(formulation, choice, cutter, points, short)
    found = RangeCosts(mesh, tuple(variants), layouts)
    if block_cache is not None and not limits.is_over:
        write_sealed(block_cache, key, _to_json(found))
    return found


def _store_key(graph: Graph, cuts: Sequence[int], mesh: Mesh, options: PlanOptions) -> str:
    texts = (plan_id(graph, mesh, options), repr(list(cuts)))
    return content_key(b"range costs", *(text.encode() for text in texts))


def _to_json(costs: RangeCosts) -> bytes:
    variants = [{k: v.tolist() for k, v in part._asdict().items()} for part in costs.variants]
    return json.dumps({"variants": variants, "layouts": dict(costs.layouts)}).encode()


def _from_json(mesh: Mesh, body: bytes) -> RangeCosts:
    document = json.loads(body)
    variants = tuple(
        Segments(**{name: np.array(values) for name, values in part.items()})
        for part in document["variants"]
    )
    return RangeCosts(mesh, variants, document["layouts"])


def whole_bound(
    graph: Graph,
    mesh: Mesh,
    options: PlanOptions,
    limits: SearchLimits,
    block_cache: KeyValueStore | None = None,
) -> float:
    """A lower bound of the seconds of a step of a program on a mesh, without a memory budget.

    The stages of a pipeline on sub-meshes of one shape do at least as much work together.
    """
    key = content_key(b"whole bound", plan_id(graph, mesh, options).encode())
    stored = None if block_cache is None else read_sealed(block_cache, key)
    if stored is not None:
        return float(stored)
    formulation = limits.formulated(graph, mesh, options)
    bound = limits.solve(formulation.problem, options, block_cache).bound
    if block_cache is not None and not limits.is_over:
        write_sealed(block_cache, key, repr(bound).encode())
    return bound


def frugal(
    formulation: Formulation,
    options: PlanOptions,
    price: float,
    limits: SearchLimits,
    cache: KeyValueStore | None,
) -> Decisions:
    """The best decisions if a byte that is kept over micro-batches costs `price` seconds.

    These are bytes of parameters, gradients and optimizer state, of parameters that stay gathered,
    and of sums of full gradients.

    Raises:
        Stopped: the search ended before there was a choice.
    """
    problem, edges = formulation.problem, list(formulation.problem.edges)
    nodes: dict[tuple[int, int], FloatArray] = {}
    for node, variable in zip(problem.nodes, formulation.variables, strict=True):
        key = (id(variable.time), id(variable.usage))
        if key not in nodes:
            nodes[key] = node.cost + price * _state(variable.usage)
    priced: dict[int, FloatArray] = {}
    reading = [
        (number, formulation.edge_costs(use))
        for number, use in enumerate(formulation.uses)
        if formulation.reads_parameter(use) and formulation.prices.micro_batches > 1
    ]
    for number, costs in reading:
        if id(costs) not in priced:
            every = [costs.seconds_of(f) + price * _kept(costs, f) for f in Frequency]
            # How often a resharding runs concerns no other variable, so the best frequency can be
            # picked for each pair of layouts beforehand.
            priced[id(costs)] = np.minimum.reduce(every)
        edge = edges[number]
        edges[number] = Edge(edge.source, edge.target, priced[id(costs)], costs.rows, costs.cols)
    changed = replace(
        problem,
        nodes=tuple(
            replace(node, cost=nodes[id(variable.time), id(variable.usage)])
            for node, variable in zip(problem.nodes, formulation.variables, strict=True)
        ),
        edges=tuple(edges),
    )
    choice = limits.solve(changed, options, cache).choice
    assert choice is not None
    frequencies = {}
    for number, costs in reading:
        use = formulation.uses[number]
        source, target = int(choice[use.source]), int(choice[use.target])
        pair = costs.rows[source], costs.cols[target]
        frequencies[number] = min(
            costs.frequencies(source, target),
            key=lambda f: float((costs.seconds_of(f) + price * _kept(costs, f))[pair]),
        )
    return Decisions(choice, frequencies=frequencies)


def _kept(costs: EdgeCosts, frequency: Frequency) -> FloatArray:
    """Bytes that a resharding keeps over micro-batches, shape [R, C]."""
    gathered = np.broadcast_to(costs.target_bytes[None, :], costs.seconds.shape)
    if frequency not in GATHERED_ONCE:
        return np.zeros_like(gathered)
    if frequency is Frequency.GATHER_STEP:
        return gathered
    return gathered + costs.accumulation_growth


def _state(usage: Mapping[str, FloatArray]) -> FloatArray:
    return sum((usage[kind] for kind in _STATIC if kind in usage), np.zeros(1))


def _layouts(
    formulation: Formulation,
    choice: IntArray,
    cutter: StageCutter,
    points: Sequence[CutPoint],
    short: Shortened,
) -> dict[str, str]:
    """The layout of each value that can cross a cut: I or R, and S."""
    graph = cutter.graph
    twins: dict[str, str] = {}
    for value in dict.fromkeys(value for point in points for value in point.values):
        twins[value] = value
        if value in graph.makers:
            number = graph.makers[value]
            position = graph.nodes[number].outputs.index(value)
            twins[value] = short.graph.nodes[int(short.node_of[number])].outputs[position]
    wanted = set(twins.values())
    candidates: dict[str, list[Layout]] = {value: [] for value in wanted}
    for use in formulation.uses:
        if use.value in wanted:
            source = formulation.variables[use.source].strategies[int(choice[use.source])]
            target = formulation.variables[use.target].strategies[int(choice[use.target])]
            candidates[use.value] += [target.inputs[use.position], source.outputs[use.output]]
    found = {value: _sent_layout(formulation, value, x) for value, x in candidates.items()}
    return {value: found[twin] for value, twin in twins.items()}


def _sent_layout(formulation: Formulation, value: str, candidates: Sequence[Layout]) -> str:
    """The first layout that can be sent, with the types of a value between stages."""
    has_gradient = formulation.gradients.exists(value)
    whole = I if has_gradient else R
    plain = Layout((whole,) * len(formulation.axes.sizes))
    layout = next((x for x in candidates if _can_be_sent(x)), plain)
    types = tuple(whole if t.is_replicated else t for t in layout.types)
    widened = formulation.axes.widen(Layout(types, layout.nesting), differentiable=has_gradient)
    return str(widened)


def _can_be_sent(layout: Layout) -> bool:
    # Ranks send slices: the sum of partial values would need a collective across stages, and an
    # interleaved shard is not one slice.
    return not any(t.kind is Kind.PARTIAL or t.sub_shards for t in layout.types)


class _NodeCosts:
    """Costs of each node of a formulation's program for a choice, shape [nodes] each.

    Attributes:
        graph: the program.
        sums: the members of `Segments` by name, for each node instead of each segment; `recomputed`
            and `kept` are those of nodes in repeated blocks.
    """

    def __init__(self, formulation: Formulation, decisions: Decisions) -> None:
        self._formulation = formulation
        self._choice = decisions.choice
        self.graph = graph = formulation.graph
        self._inputs = {i.name: i for i in graph.inputs}
        self._micro_batches = formulation.prices.micro_batches
        self._weights = weights_of(graph)
        self._known: dict[tuple[object, ...], tuple[float, ...]] = {}
        self.sums = {name: np.zeros(len(graph.nodes)) for name in Segments._fields}
        for number, variable in enumerate(formulation.variables):
            if variable.role is Role.OPERATOR:
                self._add_operator(number)
            elif variable.role is Role.INPUT:
                self._add_input(number)
        decisions = with_gathers_again(formulation, decisions)
        self._again = decisions.regathered
        builder = StageBuilder(formulation, decisions)
        for number in range(len(formulation.uses)):
            self._add_resharding(builder, number)
        if formulation.prices.training:
            self._add_saved(builder.stage())
        self._add_checkpoints()

    def _add(self, name: str, node: int, amount: float) -> None:
        self.sums[name][node] += amount

    def _add_operator(self, number: int) -> None:
        variable = self._formulation.variables[number]
        # Equal nodes share their strategies.
        node = self._formulation.node_of(variable)
        weights = tuple(value in self._weights for value in node.inputs)
        key = (id(variable.strategies), int(self._choice[number]), weights)
        if key not in self._known:
            self._known[key] = self._operator(node, variable.strategies[key[1]])
        place = self.graph.numbers[node.name]
        names = ("forward", "backward_input", "backward_weight", "working")
        for name, amount in zip(names, self._known[key], strict=True):
            self._add(name, place, amount)

    def _operator(self, node: Node, strategy: Strategy) -> tuple[float, float, float, float]:
        """Seconds of forward, of gradients of inputs and of weights, and bytes of its tensors."""
        formulation = self._formulation
        compute = formulation.prices.rank_compute(node, strategy.sizes)
        inside = {False: 0.0, True: 0.0}
        for collective in strategy.collectives:
            seconds = formulation.prices.inner_time(collective, formulation.axes)
            inside[collective.backward] += seconds
        weights, weight = frozenset(v for v in node.inputs if v in self._weights), 0.0
        if weights and formulation.gradients.flows(node):
            seconds = formulation.prices.weight_gradients(node, strategy.sizes, weights)
            weight = min(seconds, compute.backward)
        nbytes = 0.0
        pairs = zip(
            (*node.inputs, *node.outputs), (*strategy.inputs, *strategy.outputs), strict=True
        )
        for value, layout in pairs:
            tensor = self.graph.values[value]
            local = layout.local_shape(tensor.shape, formulation.axes.sizes)
            nbytes += prod(local) * tensor.dtype.itemsize
        backward = compute.backward - weight + inside[True]
        # In backward, a gradient of each tensor as well.
        return compute.forward + inside[False], backward, weight, 2.0 * nbytes

    def _add_input(self, number: int) -> None:
        variable, pick = self._formulation.variables[number], int(self._choice[number])
        users = sorted(i for i, _ in self.graph.consumers[variable.name])
        if not users:
            return
        seconds = float(variable.time[pick])
        if self._inputs[variable.name].kind is InputKind.USER:
            self._add("forward", users[0], seconds / self._micro_batches)
            return
        state = float(_state(variable.usage)[pick]) if variable.usage else 0.0
        # Stages far apart each hold a parameter that both use, such as a tied embedding.
        is_tied = users[-1] - users[0] > len(self.graph.nodes) // 2
        for place in (users[0], users[-1]) if is_tied else users[:1]:
            self._add("end", place, seconds)
            self._add("state", place, state)

    def _add_resharding(self, builder: StageBuilder, number: int) -> None:
        communication = builder.communication(number)
        if communication is None:
            return
        formulation = self._formulation
        use, place, every = formulation.uses[number], self._place(number), communication.every
        self._add("forward", place, every.forward)
        part = "backward_weight" if formulation.reads_parameter(use) else "backward_input"
        self._add(part, place, every.backward)
        if number in self._again:
            self._add(part, place, every.forward)
        once = communication.seconds() - self._micro_batches * (every.forward + every.backward)
        self._add("end", place, max(once, 0.0))
        if communication.frequency is Frequency.STEP and formulation.gradients.exists(use.value):
            # Full gradients are summed over micro-batches, instead of their shards.
            costs = formulation.edge_costs(use)
            source, target = (int(self._choice[i]) for i in (use.source, use.target))
            row, col = costs.rows[source], costs.cols[target]
            growth = float(costs.target_bytes[col] - costs.source_bytes[row])
            self._add("end", place, costs.accumulation_time * growth)
            self._add("state", place, float(costs.accumulation_growth[row, col]))

    def _place(self, number: int) -> int:
        """The node to which the resharding for a use belongs: its reader, or else its maker."""
        use = self._formulation.uses[number]
        for end in (use.target, use.source):
            variable = self._formulation.variables[end]
            if variable.role is Role.OPERATOR:
                return self.graph.numbers[variable.name]
        return self._maker_or_reader(use.value)

    def _maker_or_reader(self, value: str) -> int:
        if value in self.graph.makers:
            return self.graph.makers[value]
        return next((i for i, _ in self.graph.consumers[value]), 0)

    def _add_saved(self, stage: Stage) -> None:
        """Tensors that autograd saves, at the operation that makes them."""
        formulation = self._formulation
        saving = formulation.prices.saving
        memory = StageMemory(lower(stage, self.graph), formulation.gradients, saving)
        places = [self._place_of_operation(op) for op in memory.ops]
        saved: set[tuple[int, bool]] = set()
        for op, place in zip(memory.ops, places, strict=True):
            self._add("saved", place, op.saved_bytes)
            saved.update(memory.saved_by(op))
        for storage, in_float8 in saved:
            maker = memory.made_by[storage]
            if maker >= 0 and not memory.ops[maker].regather:
                kind = "state" if storage in memory.gathered_once else "saved"
                self._add(
                    kind, places[maker], memory.storage_bytes[storage] / (2 if in_float8 else 1)
                )

    def _place_of_operation(self, op: MemoryOp) -> int:
        numbers = self.graph.numbers
        if not op.uses:
            # The cast of a parameter belongs to its reader.
            return numbers[op.name] if op.name in numbers else self._maker_or_reader(op.name)
        value, consumer, _ = op.uses[0]
        if consumer is not None and consumer in numbers:
            return numbers[consumer]
        return self._maker_or_reader(value)

    def _add_checkpoints(self) -> None:
        """A recomputed block keeps what enters it, and runs forward again."""
        sums, formulation = self.sums, self._formulation
        sums["kept"] = sums["saved"].copy()
        if not formulation.prices.training:
            return
        for nodes in formulation.checkpoint_units:
            inside = slice(nodes.start, nodes.stop)
            sums["recomputed"][inside] = sums["forward"][inside]
            sums["block"][nodes.start] = sums["saved"][inside].sum()
            sums["blocks"][nodes.start] = 1.0
            sums["kept"][inside] = 0.0
            sums["kept"][nodes.start] = self._bytes_before(nodes.start)

    def _bytes_before(self, node: int) -> float:
        """Bytes of a rank's shards of the activations that enter a block, sharded fully."""
        total = 0
        for value in dict.fromkeys(self.graph.nodes[node].inputs):
            maker = self.graph.makers.get(value)
            if maker is not None and maker < node and self._formulation.gradients.exists(value):
                total += self.graph.values[value].nbytes
        return total / self._formulation.mesh.num_devices


class _SegmentSums:
    """Sums costs of nodes over the segments between cut points.

    Args:
        cutter: of the whole program.
        points: the cut points.
        short: the program whose nodes have costs.
    """

    def __init__(self, cutter: StageCutter, points: Sequence[CutPoint], short: Shortened) -> None:
        graph = cutter.graph
        starts = np.array([point.node for point in points], dtype=np.intp)
        segments: IntArray = np.searchsorted(starts, np.arange(len(graph.nodes)), side="right")
        placed = frozenset(cutter.placed)
        # A copied node counts where it is first used.
        for i in reversed(range(len(graph.nodes))):
            if i not in placed:
                users = [u for value in graph.nodes[i].outputs for u, _ in graph.consumers[value]]
                segments[i] = min((segments[u] for u in users), default=segments[i])
        self._segments = segments
        self._number = len(points) + 1
        self._node_of = short.node_of

    def of(self, costs: _NodeCosts) -> Segments:
        found: dict[str, FloatArray] = {}
        for name, values in costs.sums.items():
            whole = values[self._node_of]
            found[name] = np.zeros(self._number)
            if name in _LARGEST:
                np.maximum.at(found[name], self._segments, whole)
            else:
                np.add.at(found[name], self._segments, whole)
        return Segments(**found)
