"""The checker's walk over one stage of a plan."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isclose
from types import MappingProxyType

from autoshard.costs import Overlap, Passes, hidden_seconds
from autoshard.graph import Graph, Node, find_blocks
from autoshard.graph.experts import RAGGED_DIMS, ragged_values
from autoshard.layouts import Kind, Layout, has_placements, placement_texts
from autoshard.ops import InnerCollective, Saved, Strategy, call_of, rule_for, saved_by
from autoshard.plan.buckets import carried_beside
from autoshard.plan.checking.resharding_check import TOLERANCE, ReshardingCheck
from autoshard.plan.constraints import plan_constraints
from autoshard.plan.document import InnerStep, Memory, PlacedNode, Plan, Resharding, Stage, Use
from autoshard.plan.gradients import Gradient
from autoshard.plan.legality import share_of, without_invariant
from autoshard.plan.memory.recompute import recomputed
from autoshard.plan.memory.spans import checkpoint_spans
from autoshard.plan.memory.timeline import timeline
from autoshard.plan.nontrivial_axes import NontrivialAxes
from autoshard.plan.pricing import Prices, inner_time

_NOTHING = 1e-15
"""Seconds by which sums near zero may differ."""

_NO_COMPUTE = Passes(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class _Work:
    """What a rank does for a node.

    Attributes:
        inputs: layout of each input.
        outputs: layout of each output.
        uses: how backward meets the use of each input.
        fault: why it cannot be done; empty if it can.
        sizes: letter sizes on the rank.
        seconds: time it takes.
        forward: time that forward alone takes.
        inside: the collectives inside.
    """

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    uses: tuple[Gradient, ...]
    fault: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    forward: float = 0.0
    inside: tuple[InnerStep, ...] = ()

    @property
    def again(self) -> float:
        """Seconds of running forward once more."""
        inside = sum(step.time for step in self.inside if step.direction == "forward")
        return self.forward + inside


class StageCheck:
    """Walks one stage as a runtime would, from layout to layout.

    Args:
        plan: the plan.
        stage: one of its stages.
        graph: the program of that stage.

    Raises:
        PlanError: the stage's checkpoints do not fit the program.
    """

    def __init__(self, plan: Plan, stage: Stage, graph: Graph) -> None:
        self.plan = plan
        self.stage = stage
        self.graph = graph
        self.mesh = plan.mesh
        self.sizes = plan.mesh.axis_sizes
        self.prices = Prices(graph, plan.mesh, plan.options)
        self.gradients = self.prices.gradients
        self.axes = NontrivialAxes.of(plan.mesh)
        self.constraints = plan_constraints(graph, plan.mesh, plan.options)
        self.nodes = {node.name: node for node in graph.nodes}
        self.work: dict[Hashable, _Work] = {}
        self.reshardings = ReshardingCheck(plan.mesh, self.constraints)
        self.ragged = ragged_values(graph)
        self.carried = carried_beside(graph, plan.mesh)
        self.made: dict[str, Layout] = {}
        self.by_use = {c.use: c for c in stage.reshardings}
        self.used: set[Use] = set()
        self.again = recomputed(graph, stage)
        self.is_sound = True  # enough to follow its memory
        self.optimizer_time = 0.0
        self.loading_time = 0.0
        self.recompute_time = 0.0
        self.overlap = Overlap(graph, plan.mesh) if plan.options.overlap else None

    def findings(self) -> Iterator[str]:
        """Everything that is wrong with the stage."""
        if tuple(self.stage.axes) != tuple(zip(self.mesh.axis_names, self.sizes, strict=True)):
            yield f"{self.stage.name}: its axes are not the mesh's"
            return
        yield from self._inputs()
        if [n.name for n in self.stage.nodes] != [n.name for n in self.graph.nodes]:
            yield f"{self.stage.name}: its nodes are not the program's"
            return
        pairs = zip(self.graph.nodes, self.stage.nodes, strict=True)
        for time, (node, placed) in enumerate(pairs):
            yield from self._node(time, node, placed)
        yield from self._outputs()
        yield from self._recomputing()
        for value, consumer, position in self.by_use.keys() - self.used:
            yield f"resharding of {value} for {consumer} at {position} serves no use"
        yield from self._costs()

    def _recomputing(self) -> Iterator[str]:
        options = self.plan.options
        if options.activation_checkpointing == "never" and self.stage.checkpoints:
            yield f"{self.stage.name}: it has checkpoints, which the options rule out"
        if options.reshard_after_forward == "never" and any(
            c.regather for c in self.stage.reshardings
        ):
            yield f"{self.stage.name}: it re-gathers in backward, which the options rule out"
        if options.activation_checkpointing == "always" and self.prices.training:
            spans = checkpoint_spans(self.graph, self.stage)
            for nodes in self._blocks():
                if nodes not in spans:
                    first, last = (self.graph.nodes[i].name for i in (nodes[0], nodes[-1]))
                    yield f"the block from {first!r} to {last!r} is not checkpointed as asked for"

    def _blocks(self) -> Iterator[range]:
        """Repetitions of blocks of which autograd keeps something."""
        for block in find_blocks(self.graph):
            for nodes in block.instances():
                if any(self._keeps_something(self.graph.nodes[i]) for i in nodes):
                    yield nodes

    def _keeps_something(self, node: Node) -> bool:
        flags = [self.gradients.exists(value) for value in node.inputs]
        return saved_by(call_of(self.graph, node), flags) != Saved()

    def _seen(self, value: str, layout: Layout) -> Layout:
        if self.gradients.exists(value):
            return layout
        return without_invariant(layout)

    def _inputs(self) -> Iterator[str]:
        expected = {i.name: i for i in self.graph.inputs if i.name in self.graph.values}
        if {i.name for i in self.stage.inputs} != set(expected):
            yield f"{self.stage.name}: its inputs are not the program's"
        for placed in self.stage.inputs:
            tensor = self.graph.values[placed.name]
            layout = Layout.parse(placed.layout)
            if placed.shape != tensor.shape or placed.dtype != tensor.dtype:
                yield f"input {placed.name} is {placed.dtype}{placed.shape}, not {tensor}"
            if placed.local_shape != layout.local_shape(tensor.shape, self.sizes):
                yield f"input {placed.name}: local shape {placed.local_shape} does not follow"
            if placed.placements != placement_texts(layout, self.sizes):
                yield f"input {placed.name}: placements {placed.placements} do not follow"
            kinds = {t.kind for t in self._seen(placed.name, layout).types}
            at_rest = Kind.INVARIANT if self.gradients.exists(placed.name) else Kind.REPLICATE
            if not kinds <= {at_rest, Kind.SHARD}:
                yield f"input {placed.name} cannot rest as {layout}: its gradient is incomplete"
            time, _ = self.prices.input(
                expected[placed.name], [layout.local_shape(tensor.shape, self.sizes)]
            )
            if placed.kind == "parameter" and self.gradients.exists(placed.name):
                self.optimizer_time += float(time[0])
            else:
                self.loading_time += float(time[0])
            yield from self._constraints("input", placed.name, (), (layout,))
            self.made[placed.name] = layout
            yield from self._shared(placed.name)

    def _shared(self, value: str) -> Iterator[str]:
        resharding = self.by_use.get((value, None, 0))
        if resharding is not None:
            yield from self._reshard(resharding, self.made[value], _NO_COMPUTE)
            self.made[value] = Layout.parse(resharding.target)

    def _node(self, time: int, node: Node, placed: PlacedNode) -> Iterator[str]:
        if (len(placed.inputs), len(placed.outputs)) != (len(node.inputs), len(node.outputs)):
            yield f"node {node.name}: wrong number of layouts"
            self.is_sound = False
            return
        work = self._work(time, node, placed)
        uses = zip(node.inputs, work.inputs, work.uses, strict=True)
        for position, (value, wanted, gradient) in enumerate(uses):
            beside = self._beside(node, position, work)
            yield from self._use((value, node.name, position), wanted, gradient, beside)
        if work.fault:
            yield f"node {node.name}: {work.fault}"
            return
        yield from self._constraints("operator", node.name, work.inputs, work.outputs, work.sizes)
        if node.name in self.again.nodes:
            self.recompute_time += work.again
        if placed.inside != work.inside:
            yield f"node {node.name} runs {work.inside} inside, not {placed.inside}"
        yield from self._inside(node, work)
        if not isclose(work.seconds, placed.time, rel_tol=TOLERANCE):
            yield f"node {node.name} takes {work.seconds} s, not {placed.time}"
        for value, layout in zip(node.outputs, work.outputs, strict=True):
            self.made[value] = layout
            yield from self._shared(value)

    def _inside(self, node: Node, work: _Work) -> Iterator[str]:
        for step in work.inside:
            axis = self.mesh.axis_names.index(step.axis)
            for label in self.constraints.forbidding(step.action, self.axes, axis):
                yield f"node {node.name} runs {step.action} on {step.axis} against the {label}"

    def _beside(self, node: Node, position: int, work: _Work) -> Passes[float]:
        """Compute that hides the resharding of an input."""
        share = None if self.overlap is None else self.overlap.share(node, position)
        if share is None:
            return _NO_COMPUTE
        return Passes(share * work.forward, share * (work.seconds - work.forward))

    def _work(self, time: int, node: Node, placed: PlacedNode) -> _Work:
        """What a rank does for a node; alike nodes are looked at once."""
        flows = self.gradients.flows(node)
        key = (self.graph.kinds[time], placed.inputs, placed.outputs, flows)
        if key not in self.work:
            self.work[key] = self._new_work(node, placed, backward=flows)
        return self.work[key]

    def _new_work(self, node: Node, placed: PlacedNode, *, backward: bool) -> _Work:
        inputs = tuple(Layout.parse(text) for text in placed.inputs)
        outputs = tuple(Layout.parse(text) for text in placed.outputs)
        uses = tuple(self.gradients.of_use(value, node) for value in node.inputs)
        layouts = (*inputs, *outputs)
        for value, layout in zip((*node.inputs, *node.outputs), layouts, strict=True):
            if not layout.is_legal(self.graph.values[value].shape, self.sizes):
                self.is_sound = False
                fault = f"{layout} is illegal for {self.graph.values[value]}"
                return _Work(inputs, outputs, uses, fault)
        gradients = (
            *(gradient is not Gradient.NONE for gradient in uses),
            *(self.gradients.exists(value) for value in node.outputs),
        )
        rule = rule_for(call_of(self.graph, node))
        share = share_of(rule, layouts, gradients, self.sizes)
        if share is None:
            fault = f"no rule of {node.operator} allows {', '.join(map(str, layouts))}"
            return _Work(inputs, outputs, uses, fault)
        compute = self.prices.rank_compute(node, share.sizes)
        seconds, forward = compute.forward + compute.backward, compute.forward
        wanted = backward and gradients[0]
        inside = tuple(self._inner_step(c) for c in share.collectives if wanted or not c.backward)
        return _Work(inputs, outputs, uses, "", share.sizes, seconds, forward, inside)

    def _inner_step(self, collective: InnerCollective) -> InnerStep:
        return InnerStep(
            axis=self.mesh.axis_names[collective.axis],
            action=collective.operation.action.value,
            operation=collective.operation.value,
            direction="backward" if collective.backward else "forward",
            nbytes=collective.nbytes,
            time=inner_time(collective, self.mesh),
        )

    def _use(
        self, use: Use, wanted: Layout, gradient: Gradient, beside: Passes[float]
    ) -> Iterator[str]:
        value, consumer, _ = use
        if value not in self.made:
            yield f"{consumer} uses {value} before it is made"
            return
        resharding = self.by_use.get(use)
        if resharding is not None:
            yield from self._reshard(resharding, self.made[value], beside)
            arrived = Layout.parse(resharding.target)
        else:
            arrived = self.made[value]
        if _as_seen(arrived, gradient) != _as_seen(wanted, gradient):
            yield f"{consumer} wants {value} as {wanted}, but it arrives as {arrived}"

    def _gradient(self, value: str, consumer: str | None, position: int) -> Gradient:
        if consumer is None:
            return self.gradients.of_value(value)
        if consumer in self.nodes:
            return self.gradients.of_use(value, self.nodes[consumer])
        return self.gradients.of_output(position)

    def _reshard(
        self, resharding: Resharding, source: Layout, beside: Passes[float]
    ) -> Iterator[str]:
        self.used.add(resharding.use)
        where = f"resharding of {resharding.value} for {resharding.consumer or 'all'}"
        gradient = self._gradient(*resharding.use)
        still = RAGGED_DIMS if resharding.value in self.ragged else frozenset[int]()
        tensor = self.graph.values[resharding.value]
        carried = self.carried.get(resharding.value, 1.0)
        found = self.reshardings.of(resharding, tensor, gradient, still=still, carried=carried)
        if _as_seen(found.source, gradient) != _as_seen(source, gradient):
            yield f"{where} starts from {found.source}, but the value is made as {source}"
        yield from (f"{where}: {finding}" for finding in found.findings)
        self.is_sound &= found.is_sound
        again = resharding.use in self.again.reshardings
        if again:
            self.recompute_time += found.passes.forward
        hidden = float(hidden_seconds(found.passes, beside, again=again))
        if not isclose(hidden, resharding.overlapped, rel_tol=TOLERANCE, abs_tol=_NOTHING):
            yield f"{where} has {hidden} s beside compute, not {resharding.overlapped}"

    def _outputs(self) -> Iterator[str]:
        for placed in self.stage.outputs:
            layout = Layout.parse(placed.layout)
            gradient = self.gradients.of_output(placed.position)
            use = placed.name, "output", placed.position
            yield from self._use(use, layout, gradient, _NO_COMPUTE)
            if layout.is_partial:
                yield f"output {placed.name} leaves as {layout}: it is not summed"
            if not has_placements(layout):
                yield f"output {placed.name} leaves as {layout}: DTensor has no placement for it"
            yield from self._constraints("output", str(placed.position), (layout,), ())

    def _constraints(
        self,
        role: str,
        name: str,
        inputs: Sequence[Layout],
        outputs: Sequence[Layout],
        sizes: Mapping[str, int] = MappingProxyType({}),
    ) -> Iterator[str]:
        if not self.constraints.constraints:
            return
        taken, made = (tuple(self.axes.narrow(x) for x in side) for side in (inputs, outputs))
        for label in self.constraints.violated((role, name), Strategy(taken, made, sizes)):
            yield f"{role} {name} does not obey the {label}"

    def _costs(self) -> Iterator[str]:
        assert self.plan.costs is not None
        assert self.plan.memory is not None
        sums = (
            (
                "compute",
                self.loading_time + sum(n.time for n in self.stage.nodes),
                self.plan.costs.compute,
            ),
            (
                "communication",
                sum(c.time for c in self.stage.reshardings)
                + sum(n.communication for n in self.stage.nodes),
                self.plan.costs.communication,
            ),
            ("optimizer", self.optimizer_time, self.plan.costs.optimizer),
            ("recompute", self.recompute_time, self.plan.costs.recompute),
            (
                "overlapped",
                sum(c.overlapped for c in self.stage.reshardings),
                self.plan.costs.overlapped,
            ),
        )
        for name, found, stated in sums:
            if not isclose(found, stated, rel_tol=TOLERANCE, abs_tol=_NOTHING):
                yield f"{name} adds up to {found} s, not {stated}"
        yield from self._memory(self.plan.memory)

    def _memory(self, stated: Memory) -> Iterator[str]:
        if not self.is_sound:
            return
        found = timeline(
            self.stage,
            self.graph,
            training=self.prices.training,
            optimizer=self.prices.optimizer,
        )
        for value, consumer, _ in sorted(found.idle, key=str):
            where = consumer or "all"
            yield (
                f"resharding of {value} for {where}: it is re-gathered, but backward does not "
                f"need it"
            )
        if found.peak != stated.peak:
            yield f"memory peaks at {found.peak} bytes, not {stated.peak}"
        for kind, nbytes in found.at_peak.items():
            if nbytes != getattr(stated, kind):
                yield f"{kind} take {nbytes} bytes at the peak, not {getattr(stated, kind)}"
        moment, turn = found.moments[found.peak_moment], found.turn
        if (stated.phase, stated.at) != moment:
            yield f"the peak is in {moment[0]} at {moment[1]!r}, not as stated"
        if stated.turn != (None if turn is None else found.total[turn]):
            yield f"{stated.turn} bytes at the turn from forward to backward do not follow"
        if stated.budget != self.prices.memory_budget:
            yield f"the budget is {self.prices.memory_budget} bytes, not {stated.budget}"
        budget = min(self.prices.memory_budget, stated.budget or self.prices.memory_budget)
        if found.peak > budget:
            yield f"peak memory {found.peak} is over the budget {budget}"


def _as_seen(layout: Layout, gradient: Gradient) -> Layout:
    return without_invariant(layout) if gradient is Gradient.NONE else layout
