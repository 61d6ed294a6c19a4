"""Checks one stage of a plan by following its layouts through its program.

It shares only the operator rules, the table of resharding steps and the prices of single
operators and steps with the planner. It builds no optimization problem and enumerates no
strategies.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isclose, prod
from types import MappingProxyType

from autoshard.base.outcome import SolveStatus, relative_gap
from autoshard.checker.reshardings import TOLERANCE, ReshardedValue, ReshardingCheck
from autoshard.constraints import plan_constraints
from autoshard.constraints.nontrivial_axes import NontrivialAxes
from autoshard.costs import (
    GATHERED_ONCE,
    ForwardBackward,
    Overlap,
)
from autoshard.graph import (
    Graph,
    InputKind,
    Node,
    find_blocks,
)
from autoshard.graph.experts import RAGGED_DIMS, ragged_values
from autoshard.graph.gradients import Gradient
from autoshard.layouts import (
    ALONE,
    Kind,
    Layout,
    has_placements,
    placement_texts,
)
from autoshard.lowering.recompute import checkpoint_spans, checkpoint_units, recomputed, saved_for
from autoshard.lowering.timeline import Timeline, timeline
from autoshard.mesh import Mesh
from autoshard.ops import (
    InnerCollective,
    SavedByAutograd,
    Strategy,
    call_of,
    rule_for,
)
from autoshard.ops.rules.legality import share_of, without_invariant
from autoshard.plan.options import PlanOptions
from autoshard.plan.predictions import Certificate, Costs, Memory
from autoshard.plan.stage import InnerStep, PlacedInput, PlacedNode, Resharding, Stage, Use
from autoshard.pricing.prices import Prices

NOTHING = 1e-15
"""Maximum absolute difference between stated and computed seconds."""

_NO_COMPUTE = ForwardBackward(0.0, 0.0)


def certificate_findings(certificate: Certificate, costs: Costs) -> Iterator[str]:
    """Errors of a certificate, and of the total cost that it is about."""
    spent = costs.compute + costs.communication + costs.optimizer + costs.recompute + costs.idle
    parts = spent - costs.overlapped
    if not isclose(costs.total, parts, rel_tol=TOLERANCE):
        yield f"total cost {costs.total} is not the sum of its parts {parts}"
    if certificate.objective is None:
        yield "a plan needs a certificate with an objective"
        return
    if not isclose(certificate.objective, costs.total, rel_tol=TOLERANCE):
        yield f"objective {certificate.objective} is not the total cost {costs.total}"
    if certificate.bound is None or certificate.gap is None:
        if certificate.bound is not certificate.gap or certificate.status is SolveStatus.OPTIMAL:
            yield "a gap needs a bound, a bound has a gap, and an optimum has both"
        return
    if certificate.bound > certificate.objective * (1 + TOLERANCE):
        yield f"bound {certificate.bound} is above the objective {certificate.objective}"
    gap = relative_gap(certificate.objective, certificate.bound)
    if abs(gap - certificate.gap) > TOLERANCE:
        yield f"gap {certificate.gap} does not follow from objective and bound ({gap})"


@dataclass(frozen=True, slots=True)
class _LocalWork:
    """The work of a rank for a node.

    Attributes:
        inputs: layout of each input.
        outputs: layout of each output.
        uses: gradient of the use of each input.
        fault: reason why the layouts are invalid; empty if they are valid.
        sizes: size of each index letter on the rank.
        compute: seconds in a micro-batch, without the collectives inside the operator.
        inside: the collectives inside the operator.
    """

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    uses: tuple[Gradient, ...]
    fault: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    compute: ForwardBackward[float] = _NO_COMPUTE
    inside: tuple[InnerStep, ...] = ()


class StageCheck:
    """Checks one stage by following the layouts through its program.

    Args:
        stage: the stage.
        graph: its program.
        mesh: its devices.
        options: of its plan.
        costs: its stated costs.
        memory: its stated memory.

    Raises:
        PlanError: the stage's checkpoints do not fit the program.
    """

    def __init__(
        self,
        stage: Stage,
        graph: Graph,
        mesh: Mesh,
        options: PlanOptions,
        *,
        costs: Costs,
        memory: Memory,
    ) -> None:
        self._stage = stage
        self._options = options
        self._costs, self._memory = costs, memory
        self._graph = graph
        self._mesh = mesh
        self._sizes = mesh.axis_sizes
        self._prices = Prices(graph, mesh, options)
        self._gradients = self._prices.gradients
        self._num = self._prices.micro_batches
        self._axes = NontrivialAxes.of(mesh)
        self._constraints = plan_constraints(graph, mesh, options)
        self._inputs = {i.name: i for i in graph.inputs if i.name in graph.values}
        self._nodes = {node.name: node for node in graph.nodes}
        self._work: dict[Hashable, _LocalWork] = {}
        self._reshardings = ReshardingCheck(mesh, self._constraints, self._num)
        self._ragged = ragged_values(graph)
        self._made: dict[str, Layout] = {}
        self._by_use = {c.use: c for c in stage.reshardings}
        self._used: set[Use] = set()
        self._again = recomputed(graph, stage)
        self._is_sound = True  # its memory timeline can be computed
        self._optimizer_time = self._loading_time = self._recompute_time = 0.0
        self._overlap = Overlap(graph, mesh) if self._prices.overlaps else None

    def findings(self) -> Iterator[str]:
        """The errors of the stage."""
        stage = self._stage
        if tuple(stage.axes) != tuple(zip(self._mesh.axis_names, self._sizes, strict=True)):
            yield f"{stage.name}: its axes are not the mesh's"
            return
        if stage.micro_batches != self._num:
            yield f"{stage.name}: it runs {stage.micro_batches} micro-batches, not {self._num}"
            return
        yield from self._check_micro_batches()
        if {i.name for i in stage.inputs} != self._inputs.keys():
            yield f"{stage.name}: its inputs are not the program's"
            return
        for placed_input in stage.inputs:
            yield from self._check_input(placed_input)
        if [n.name for n in stage.nodes] != [n.name for n in self._graph.nodes]:
            yield f"{stage.name}: its nodes are not the program's"
            return
        for node, placed in zip(self._graph.nodes, stage.nodes, strict=True):
            yield from self._check_node(node, placed)
        values = [n for n, output in enumerate(self._graph.outputs) if output.name is not None]
        if [output.position for output in stage.outputs] != values:
            yield f"{stage.name}: its outputs are not the program's"
            return
        yield from self._check_outputs()
        yield from self._check_recompute()
        for value, consumer, position in self._by_use.keys() - self._used:
            self._is_sound = False
            yield f"resharding of {value} for {consumer} at {position} serves no use"
        yield from self._check_costs(self._costs)
        # A stage that is inconsistent cannot be lowered, and so has no timeline.
        if self._is_sound:
            yield from self._check_memory(self._memory)

    def _check_micro_batches(self) -> Iterator[str]:
        stage = self._stage
        if stage.in_flight != self._prices.in_flight:
            yield (
                f"{stage.name}: {stage.in_flight} micro-batches are in flight, "
                f"not {self._prices.in_flight}"
            )
        if stage.accumulation_dtype != self._options.training.accumulation_dtype:
            yield f"{stage.name}: it sums gradients in {stage.accumulation_dtype}"

    def _check_recompute(self) -> Iterator[str]:
        options, stage = self._options, self._stage
        if options.memory.activation_checkpointing == "never" and stage.checkpoints:
            yield f"{stage.name}: it has checkpoints, which the options rule out"
        again = [c for c in stage.reshardings if c.regather and not self._keeps_shards(c)]
        if options.memory.reshard_after_forward == "never" and again:
            yield f"{stage.name}: it re-gathers in backward, which the options rule out"
        kept = any(c.frequency in GATHERED_ONCE for c in stage.reshardings)
        if options.memory.reshard_after_forward == "always" and kept:
            yield f"{stage.name}: parameters stay gathered, which the options rule out"
        for c, reader in zip(stage.reshardings, self._again.readers, strict=True):
            stays = reader is None and not c.regather and self._is_saved(c)
            if stays and self._keeps_shards(c):
                yield f"{stage.name}: {c.value} stays gathered, which the options rule out"
        yield from self._check_checkpoints()

    def _keeps_shards(self, resharding: Resharding) -> bool:
        """True for an all-gather of an activation that `regather_activations` has run again."""
        source, target = Layout.parse(resharding.source), Layout.parse(resharding.target)
        if not self._prices.gathers_activations_again or resharding.value in self._inputs:
            return False
        shape = self._graph.values[resharding.value].shape
        before, after = (prod(x.local_shape(shape, self._sizes)) for x in (source, target))
        return not source.is_partial and before < after

    def _is_saved(self, resharding: Resharding) -> bool:
        """True if an operator saves the result of a resharding for backward."""
        graph, value = self._graph, resharding.value
        for i, position in graph.consumers.get(value, ()):
            node = graph.nodes[i]
            own = value, node.name, position
            reads = own == resharding.use or (
                resharding.consumer is None and own not in self._by_use
            )
            saved = saved_for(graph, node, self._prices.saving).inputs
            if reads and position in saved and self._gradients.flows(node):
                return True
        return False

    def _check_checkpoints(self) -> Iterator[str]:
        graph, stage, options = self._graph, self._stage, self._options
        modules, is_forced = options.memory.checkpointed_modules, False
        if self._prices.training:
            is_forced = options.memory.activation_checkpointing == "always"
        if not is_forced and not (modules and stage.checkpoints):
            return
        spans = checkpoint_spans(graph, stage)
        units = checkpoint_units(graph, find_blocks(graph), modules)
        for nodes in units if is_forced else ():
            saves = any(saved_for(graph, graph.nodes[i]) != SavedByAutograd() for i in nodes)
            if saves and nodes not in spans:
                first, last = (graph.nodes[i].name for i in (nodes[0], nodes[-1]))
                what = "module" if modules else "block"
                yield f"the {what} from {first!r} to {last!r} is not checkpointed as asked for"
        for one, span in zip(stage.checkpoints, spans, strict=True):
            if modules and span not in units:
                yield f"the checkpoint from {one.first!r} to {one.last!r} is no module named for it"

    def _check_input(self, placed: PlacedInput) -> Iterator[str]:
        tensor = self._graph.values[placed.name]
        layout = Layout.parse(placed.layout)
        local_shape = layout.local_shape(tensor.shape, self._sizes)
        has_gradient = self._gradients.exists(placed.name)
        dtype = self._graph.stored_dtype(placed.name)
        if placed.shape != tensor.shape or placed.dtype != dtype:
            yield f"input {placed.name} is {placed.dtype}{placed.shape}, not {dtype}{tensor.shape}"
        if placed.local_shape != local_shape:
            yield f"input {placed.name}: local shape {placed.local_shape} does not follow"
        if placed.placements != placement_texts(layout, self._sizes):
            yield f"input {placed.name}: placements {placed.placements} do not follow"
        seen = layout if has_gradient else without_invariant(layout)
        at_rest = Kind.INVARIANT if has_gradient else Kind.REPLICATE
        if not {t.kind for t in seen.types} <= {at_rest, Kind.SHARD}:
            yield f"input {placed.name} cannot be stored as {layout}: its gradient is incomplete"
        seconds, _ = self._prices.input(self._inputs[placed.name], [local_shape])
        if placed.kind == "parameter" and has_gradient:
            self._optimizer_time += float(seconds[0])
        else:
            self._loading_time += float(seconds[0])
        yield from self._check_constraints("input", placed.name, (), (layout,))
        self._made[placed.name] = layout
        yield from self._check_shared(placed.name)

    def _check_shared(self, value: str) -> Iterator[str]:
        resharding = self._by_use.get((value, None, 0))
        if resharding is not None:
            yield from self._check_resharding(resharding, self._made[value], _NO_COMPUTE)
            self._made[value] = Layout.parse(resharding.target)

    def _check_node(self, node: Node, placed: PlacedNode) -> Iterator[str]:
        if (len(placed.inputs), len(placed.outputs)) != (len(node.inputs), len(node.outputs)):
            yield f"node {node.name}: wrong number of layouts"
            self._is_sound = False
            return
        work = self._local_work(node, placed)
        uses = zip(node.inputs, work.inputs, work.uses, strict=True)
        for position, (value, wanted, gradient) in enumerate(uses):
            compute = self._compute_beside(node, position, work)
            yield from self._check_use((value, node.name, position), wanted, gradient, compute)
        if work.fault:
            yield f"node {node.name}: {work.fault}"
            return
        yield from self._check_constraints(
            "operator", node.name, work.inputs, work.outputs, work.sizes
        )
        if node.name in self._again.nodes:
            self._recompute_time += self._num * work.compute.forward + sum(
                step.time for step in work.inside if step.direction == "forward"
            )
        if placed.inside != work.inside:
            yield f"node {node.name} runs {work.inside} inside, not {placed.inside}"
        for step in work.inside:
            axis = self._mesh.axis_names.index(step.axis)
            for label in self._constraints.forbidding(step.action, self._axes, (axis,)):
                yield f"node {node.name} runs {step.action} on {step.axis} against the {label}"
        seconds = self._num * (work.compute.forward + work.compute.backward)
        if not isclose(seconds, placed.time, rel_tol=TOLERANCE):
            yield f"node {node.name} takes {seconds} s, not {placed.time}"
        for value, layout in zip(node.outputs, work.outputs, strict=True):
            self._made[value] = layout
            yield from self._check_shared(value)

    def _compute_beside(
        self, node: Node, position: int, work: _LocalWork
    ) -> ForwardBackward[float]:
        """Compute that the resharding of an input can overlap with."""
        share = None if self._overlap is None else self._overlap.share(node, position)
        if share is None:
            return _NO_COMPUTE
        return ForwardBackward(share * work.compute.forward, share * work.compute.backward)

    def _local_work(self, node: Node, placed: PlacedNode) -> _LocalWork:
        """The work of a rank for a node, computed once for equal nodes."""
        flows = self._gradients.flows(node)
        key = (self._prices.kind(node), placed.inputs, placed.outputs, flows)
        if key not in self._work:
            self._work[key] = self._new_work(node, placed, backward=flows)
        return self._work[key]

    def _new_work(self, node: Node, placed: PlacedNode, *, backward: bool) -> _LocalWork:
        inputs = tuple(Layout.parse(text) for text in placed.inputs)
        outputs = tuple(Layout.parse(text) for text in placed.outputs)
        uses = tuple(self._gradients.of_use(value, node) for value in node.inputs)
        layouts = (*inputs, *outputs)
        for value, layout in zip((*node.inputs, *node.outputs), layouts, strict=True):
            if not layout.is_legal(self._graph.values[value].shape, self._sizes):
                self._is_sound = False
                fault = f"{layout} is illegal for {self._graph.values[value]}"
                return _LocalWork(inputs, outputs, uses, fault)
        gradients = (
            *(gradient is not Gradient.NONE for gradient in uses),
            *(self._gradients.exists(value) for value in node.outputs),
        )
        rule = rule_for(call_of(self._graph, node))
        share = share_of(rule, layouts, gradients, self._sizes)
        if share is None:
            fault = f"no rule of {node.operator} allows {', '.join(map(str, layouts))}"
            return _LocalWork(inputs, outputs, uses, fault)
        compute = self._prices.rank_compute(node, share.sizes)
        wanted = backward and gradients[0]
        inside = tuple(self._inner_step(c) for c in share.collectives if wanted or not c.backward)
        return _LocalWork(inputs, outputs, uses, "", share.sizes, compute, inside)

    def _inner_step(self, collective: InnerCollective) -> InnerStep:
        return InnerStep(
            axis=self._mesh.axis_names[collective.axis],
            action=collective.operation.action.value,
            operation=collective.operation.value,
            direction="backward" if collective.backward else "forward",
            nbytes=collective.nbytes,
            time=self._num * self._prices.inner_time(collective, self._mesh),
        )

    def _check_use(
        self, use: Use, wanted: Layout, gradient: Gradient, compute: ForwardBackward[float]
    ) -> Iterator[str]:
        value, consumer, _ = use
        if value not in self._made:
            yield f"{consumer} uses {value} before it is made"
            return
        arrived, resharding = self._made[value], self._by_use.get(use)
        if resharding is not None:
            yield from self._check_resharding(resharding, arrived, compute)
            arrived = Layout.parse(resharding.target)
        if _as_seen(arrived, gradient) != _as_seen(wanted, gradient):
            yield f"{consumer} wants {value} as {wanted}, but it arrives as {arrived}"

    def _gradient(self, value: str, consumer: str | None, position: int) -> Gradient:
        if consumer is None:
            return self._gradients.of_value(value)
        if consumer in self._nodes:
            return self._gradients.of_use(value, self._nodes[consumer])
        return self._gradients.of_output(position)

    def _check_resharding(
        self, resharding: Resharding, source: Layout, compute: ForwardBackward[float]
    ) -> Iterator[str]:
        self._used.add(resharding.use)
        where = f"resharding of {resharding.value} for {resharding.consumer or 'all'}"
        gradient = self._gradient(*resharding.use)
        value = ReshardedValue(
            self._graph.values[resharding.value],
            gradient,
            fixed_dims=RAGGED_DIMS if resharding.value in self._ragged else frozenset(),
            charge=self._prices.charges.get(resharding.value, ALONE),
            of_parameter=self._reads_parameter(resharding),
            reduced=self._graph.reduced_dtype(resharding.value),
        )
        found = self._reshardings.check(resharding, value)
        if _as_seen(found.source, gradient) != _as_seen(source, gradient):
            yield f"{where} starts from {found.source}, but the value is made as {source}"
        yield from (f"{where}: {finding}" for finding in found.findings)
        self._is_sound &= found.is_sound
        again = resharding.use in self._again.reshardings
        if again:
            self._recompute_time += found.communication.again()
        overlapped = float(found.communication.overlapped(compute, again=again))
        if not isclose(overlapped, resharding.overlapped, rel_tol=TOLERANCE, abs_tol=NOTHING):
            yield f"{where} overlaps {overlapped} s with compute, not {resharding.overlapped}"

    def _reads_parameter(self, resharding: Resharding) -> bool:
        """True if a resharding reads a parameter in the layout in which it is stored."""
        entering = self._inputs.get(resharding.value)
        first = resharding.consumer is None or (resharding.value, None, 0) not in self._by_use
        return entering is not None and entering.kind is InputKind.PARAMETER and first

    def _check_outputs(self) -> Iterator[str]:
        stored = {placed.name: placed.layout for placed in self._stage.inputs}
        for placed in self._stage.outputs:
            layout = Layout.parse(placed.layout)
            gradient = self._gradients.of_output(placed.position)
            use = placed.name, "output", placed.position
            yield from self._check_use(use, layout, gradient, _NO_COMPUTE)
            updates = self._graph.outputs[placed.position].updates
            if placed.updates != updates:
                yield f"output {placed.name} updates {updates}, not {placed.updates}"
            if updates is not None and placed.layout != stored[updates]:
                yield (
                    f"output {placed.name} leaves as {layout}, and the buffer {updates} that it "
                    f"updates is stored as {stored[updates]}"
                )
            if layout.is_partial:
                yield f"output {placed.name} leaves as {layout}: it is not summed"
            if not has_placements(layout):
                yield f"output {placed.name} leaves as {layout}: DTensor has no placement for it"
            yield from self._check_constraints("output", str(placed.position), (layout,), ())

    def _check_constraints(
        self,
        role: str,
        name: str,
        inputs: Sequence[Layout],
        outputs: Sequence[Layout],
        sizes: Mapping[str, int] = MappingProxyType({}),
    ) -> Iterator[str]:
        if not self._constraints.constraints:
            return
        taken, made = (tuple(self._axes.narrow(x) for x in side) for side in (inputs, outputs))
        for label in self._constraints.violated((role, name), Strategy(taken, made, sizes)):
            yield f"{role} {name} does not obey the {label}"

    def _check_costs(self, stated: Costs) -> Iterator[str]:
        nodes, reshardings = self._stage.nodes, self._stage.reshardings
        inside = sum(node.communication for node in nodes)
        full_gradients = self._prices.full_accumulation(reshardings)
        sums = {
            "compute": self._loading_time + sum(node.time for node in nodes),
            "communication": sum(resharding.time for resharding in reshardings) + inside,
            "optimizer": self._optimizer_time + full_gradients,
            "recompute": self._recompute_time,
            "overlapped": sum(resharding.overlapped for resharding in reshardings),
            "idle": 0.0,
        }
        for name, found in sums.items():
            seconds = getattr(stated, name)
            if not isclose(found, seconds, rel_tol=TOLERANCE, abs_tol=NOTHING):
                yield f"{name} adds up to {found} s, not {seconds}"

    def _check_memory(self, stated: Memory) -> Iterator[str]:
        found = timeline(
            self._stage,
            self._graph,
            training=self._prices.training,
            optimizer=self._prices.optimizer,
            saving=self._prices.saving,
        )
        for value, consumer, _ in sorted(found.unneeded, key=str):
            where = f"resharding of {value} for {consumer or 'all'}"
            yield f"{where}: it is re-gathered, but backward does not need it"
        if found.peak != stated.peak:
            yield f"memory peaks at {found.peak} bytes, not {stated.peak}"
        for kind, nbytes in found.at_peak.items():
            if nbytes != getattr(stated, kind):
                yield f"{kind} take {nbytes} bytes at the peak, not {getattr(stated, kind)}"
        moment = found.moments[found.peak_moment]
        if (stated.phase, stated.at) != moment:
            yield f"the peak is in {moment[0]} at {moment[1]!r}, not as stated"
        yield from _check_moments(stated, found)
        budget = self._prices.memory_budget
        if stated.budget != budget:
            yield f"the budget is {budget} bytes, not {stated.budget}"
        budget = min(budget, stated.budget or budget)
        if found.peak > budget:
            yield f"peak memory {found.peak} is over the budget {budget}"


def _check_moments(stated: Memory, found: Timeline) -> Iterator[str]:
    """Errors in the bytes at other moments than the peak."""
    if stated.turn != found.at_turn:
        yield f"{stated.turn} bytes at the turn from forward to backward do not follow"
    if stated.per_micro_batch != found.per_micro_batch:
        yield f"{stated.per_micro_batch} bytes per micro-batch in flight do not follow"
    if stated.optimizer_step != found.at_optimizer_step:
        yield f"{stated.optimizer_step} bytes at the optimizer's step do not follow"


def _as_seen(layout: Layout, gradient: Gradient) -> Layout:
    # I and R differ in their gradients only.
    return without_invariant(layout) if gradient is Gradient.NONE else layout
