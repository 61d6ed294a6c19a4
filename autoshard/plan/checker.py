"""The independent checker: is a plan legal, and does it cost what it says?

It shares with the planner the rules, the table of steps and the prices of single things,
and nothing else: no problem, no solver, no strategy enumeration. It walks the program as a
runtime would, from layout to layout.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isclose, prod
from types import MappingProxyType

from autoshard.collection import collection_paused
from autoshard.errors import InputError, LayoutError
from autoshard.graph import Graph, Node, Tensor, graph_digest, graph_from_json
from autoshard.layouts import (
    STEPS,
    Action,
    AxisType,
    Kind,
    Layout,
    Step,
    again_price,
    parse_type,
    placement_texts,
    step_price,
)
from autoshard.plan.active import ActiveAxes
from autoshard.plan.document import (
    Conversion,
    Memory,
    PlacedNode,
    Plan,
    PlannedStep,
    Stage,
    Use,
)
from autoshard.plan.gradients import Gradient, Gradients
from autoshard.plan.legality import local_sizes, without_invariant
from autoshard.plan.pricing import Prices
from autoshard.plan.recompute import count_collectives, recomputed
from autoshard.plan.steering import Steering
from autoshard.plan.timeline import timeline
from autoshard.rules import Strategy, call_of, rule_for
from autoshard.solve import Status

_TOLERANCE = 1e-6


@collection_paused()
def check_plan(plan: Plan, graph: Graph | None = None) -> tuple[str, ...]:
    """Everything that is wrong with a plan; empty if it is right.

    Args:
        plan: the plan.
        graph: the program that it should be a plan of; the one inside the plan if None.
    """
    if not plan.found:
        return (f"there is no plan to check: {plan.reason}",)
    try:
        return tuple(_findings(plan, graph))
    except InputError as error:
        return (str(error),)


def _findings(plan: Plan, graph: Graph | None) -> Iterator[str]:
    programs = [graph_from_json(stage.program) for stage in plan.stages]
    for stage, program in zip(plan.stages, programs, strict=True):
        if graph_digest(program) != plan.graph.digest:
            yield f"{stage.name}: the program inside is not the one the plan names"
        if graph is not None and graph_digest(graph) != plan.graph.digest:
            yield "the plan was made for another graph"
        yield from _StageCheck(plan, stage, program).findings()
    if plan.collectives != count_collectives(plan.stages, programs):
        yield "the table of collectives does not add up to the conversions"
    yield from _certificate_findings(plan)


def _certificate_findings(plan: Plan) -> Iterator[str]:
    assert plan.costs is not None
    certificate = plan.certificate
    costs = plan.costs
    parts = costs.compute + costs.communication + costs.optimizer + costs.recompute
    if not isclose(plan.costs.total, parts, rel_tol=_TOLERANCE):
        yield f"total cost {plan.costs.total} is not the sum of its parts {parts}"
    if certificate.objective is None:
        yield "a plan needs a certificate with an objective"
        return
    if not isclose(certificate.objective, plan.costs.total, rel_tol=_TOLERANCE):
        yield f"objective {certificate.objective} is not the total cost {plan.costs.total}"
    if certificate.bound is None or certificate.gap is None:
        if certificate.bound is not certificate.gap or certificate.status is Status.OPTIMAL:
            yield "a gap needs a bound, a bound has a gap, and an optimum has both"
        return
    if certificate.bound > certificate.objective * (1 + _TOLERANCE):
        yield f"bound {certificate.bound} is above the objective {certificate.objective}"
    gap = max(0.0, 1 - certificate.bound / certificate.objective) if certificate.objective else 0.0
    if abs(gap - certificate.gap) > _TOLERANCE:
        yield f"gap {certificate.gap} does not follow from objective and bound ({gap})"


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
    """

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    uses: tuple[Gradient, ...]
    fault: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    forward: float = 0.0


@dataclass(frozen=True, slots=True)
class _Change:
    """A conversion looked at by itself.

    Attributes:
        source: where it starts.
        findings: what is wrong with its steps.
        forward: time that its forward part takes.
    """

    source: Layout
    findings: tuple[str, ...]
    forward: float


class _StageCheck:
    def __init__(self, plan: Plan, stage: Stage, graph: Graph) -> None:
        self.plan = plan
        self.stage = stage
        self.graph = graph
        self.mesh = plan.mesh
        self.sizes = plan.mesh.axis_sizes
        self.prices = Prices(plan.mesh, plan.options)
        self.gradients = Gradients(graph, training=self.prices.training)
        self.axes = ActiveAxes.of(plan.mesh)
        self.steering = Steering.of(graph, plan.mesh, plan.options)
        self.nodes = {node.name: node for node in graph.nodes}
        self.work: dict[Hashable, _Work] = {}
        self.changes: dict[Hashable, _Change] = {}
        self.made: dict[str, Layout] = {}
        self.by_use = {c.use: c for c in stage.conversions}
        self.used: set[Use] = set()
        self.again = recomputed(graph, stage)
        self.is_sound = True  # enough to follow its memory
        self.optimizer_time = 0.0
        self.loading_time = 0.0
        self.recompute_time = 0.0

    def findings(self) -> Iterator[str]:
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
            yield f"conversion of {value} for {consumer} at {position} serves no use"
        yield from self._costs()

    def _recomputing(self) -> Iterator[str]:
        options = self.plan.options
        if options.checkpointing == "never" and self.stage.checkpoints:
            yield f"{self.stage.name}: it has checkpoints, which the options rule out"
        if options.reconversion == "never" and any(c.again for c in self.stage.conversions):
            yield f"{self.stage.name}: it converts again, which the options rule out"

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
                expected[placed.name], tensor, [layout.local_shape(tensor.shape, self.sizes)]
            )
            if placed.kind == "parameter" and self.gradients.exists(placed.name):
                self.optimizer_time += float(time[0])
            else:
                self.loading_time += float(time[0])
            yield from self._steering("input", placed.name, (), (layout,))
            self.made[placed.name] = layout
            yield from self._shared(placed.name)

    def _shared(self, value: str) -> Iterator[str]:
        conversion = self.by_use.get((value, None, 0))
        if conversion is not None:
            yield from self._convert(conversion, self.made[value])
            self.made[value] = Layout.parse(conversion.target)

    def _node(self, time: int, node: Node, placed: PlacedNode) -> Iterator[str]:
        if (len(placed.inputs), len(placed.outputs)) != (len(node.inputs), len(node.outputs)):
            yield f"node {node.name}: wrong number of layouts"
            self.is_sound = False
            return
        work = self._work(time, node, placed)
        uses = zip(node.inputs, work.inputs, work.uses, strict=True)
        for position, (value, wanted, gradient) in enumerate(uses):
            yield from self._use(value, node.name, position, wanted, gradient)
        if work.fault:
            yield f"node {node.name}: {work.fault}"
            return
        yield from self._steering("operator", node.name, work.inputs, work.outputs, work.sizes)
        if node.name in self.again.nodes:
            self.recompute_time += work.forward
        if not isclose(work.seconds, placed.time, rel_tol=_TOLERANCE):
            yield f"node {node.name} takes {work.seconds} s, not {placed.time}"
        for value, layout in zip(node.outputs, work.outputs, strict=True):
            self.made[value] = layout
            yield from self._shared(value)

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
        sizes = local_sizes(rule, layouts, gradients, self.sizes)
        if sizes is None:
            fault = f"no rule of {node.operator} allows {', '.join(map(str, layouts))}"
            return _Work(inputs, outputs, uses, fault)
        seconds, forward = self.prices.strategy(self.graph, node, sizes, backward=backward)
        return _Work(inputs, outputs, uses, "", sizes, seconds, forward)

    def _use(
        self, value: str, consumer: str, position: int, wanted: Layout, gradient: Gradient
    ) -> Iterator[str]:
        if value not in self.made:
            yield f"{consumer} uses {value} before it is made"
            return
        conversion = self.by_use.get((value, consumer, position))
        if conversion is not None:
            yield from self._convert(conversion, self.made[value])
            arrived = Layout.parse(conversion.target)
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

    def _convert(self, conversion: Conversion, source: Layout) -> Iterator[str]:
        self.used.add(conversion.use)
        where = f"conversion of {conversion.value} for {conversion.consumer or 'all'}"
        gradient = self._gradient(*conversion.use)
        tensor = self.graph.values[conversion.value]
        key = (tensor, gradient, conversion.source, conversion.target, conversion.steps)
        if key not in self.changes:
            self.changes[key] = self._new_change(conversion, tensor, gradient)
        change = self.changes[key]
        if _as_seen(change.source, gradient) != _as_seen(source, gradient):
            yield f"{where} starts from {change.source}, but the value is made as {source}"
        yield from (f"{where}: {finding}" for finding in change.findings)
        if conversion.use in self.again.conversions:
            self.recompute_time += change.forward

    def _new_change(self, conversion: Conversion, tensor: Tensor, gradient: Gradient) -> _Change:
        source = Layout.parse(conversion.source)
        findings = tuple(self._walk(conversion, source, tensor, gradient))
        axes = self.mesh.axis_names
        priced = [_priced(step, axes) for step in conversion.steps if step.axis in axes]
        forward = sum(again_price(step, self.mesh) for step in priced)
        return _Change(source, findings, forward)

    def _walk(
        self, conversion: Conversion, layout: Layout, tensor: Tensor, gradient: Gradient
    ) -> Iterator[str]:
        """What is wrong with the steps of a conversion."""
        for step in conversion.steps:
            try:
                axis = self.mesh.axis_names.index(step.axis)
                after = layout.replace(axis, parse_type(step.target))
                shapes = [x.local_shape(tensor.shape, self.sizes) for x in (layout, after)]
            except (ValueError, LayoutError) as error:
                yield str(error)
                self.is_sound = False
                return
            nbytes = max(prod(shape) for shape in shapes) * tensor.dtype.itemsize
            yield from _step_findings(step, layout.types[axis], nbytes, gradient)
            yield from self._price_findings(step)
            for action in (step.forward, step.backward):
                for label in self.steering.forbidding(action, self.axes, axis):
                    yield f"a step runs {action} on {step.axis} against the {label}"
            layout = after
        if str(layout) != conversion.target:
            yield f"it ends in {layout}, not {conversion.target}"

    def _price_findings(self, step: PlannedStep) -> Iterator[str]:
        time = step_price(_priced(step, self.mesh.axis_names), self.mesh)
        if not isclose(time, step.time, rel_tol=_TOLERANCE):
            yield f"a step takes {time} s, not {step.time}"

    def _outputs(self) -> Iterator[str]:
        for placed in self.stage.outputs:
            layout = Layout.parse(placed.layout)
            gradient = self.gradients.of_output(placed.position)
            yield from self._use(placed.name, "output", placed.position, layout, gradient)
            if any(t.kind is Kind.PARTIAL for t in layout.types):
                yield f"output {placed.name} leaves as {layout}: it is not summed"
            yield from self._steering("output", str(placed.position), (layout,), ())

    def _steering(
        self,
        role: str,
        name: str,
        inputs: Sequence[Layout],
        outputs: Sequence[Layout],
        sizes: Mapping[str, int] = MappingProxyType({}),
    ) -> Iterator[str]:
        if not self.steering.restrictions:
            return
        taken, made = (tuple(self.axes.narrow(x) for x in side) for side in (inputs, outputs))
        for label in self.steering.violated((role, name), Strategy(taken, made, sizes)):
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
                sum(c.time for c in self.stage.conversions),
                self.plan.costs.communication,
            ),
            ("optimizer", self.optimizer_time, self.plan.costs.optimizer),
            ("recompute", self.recompute_time, self.plan.costs.recompute),
        )
        for name, found, stated in sums:
            if not isclose(found, stated, rel_tol=_TOLERANCE, abs_tol=1e-15):
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
            yield f"conversion of {value} for {where}: it is again, but backward does not need it"
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
        if stated.budget != self.prices.budget_bytes:
            yield f"the budget is {self.prices.budget_bytes} bytes, not {stated.budget}"
        budget = min(self.prices.budget_bytes, stated.budget or self.prices.budget_bytes)
        if found.peak > budget:
            yield f"peak memory {found.peak} is over the budget {budget}"


def _priced(step: PlannedStep, axes: Sequence[str]) -> Step:
    """A step as it is priced."""
    return Step(
        axes.index(step.axis),
        parse_type(step.source),
        parse_type(step.target),
        step.nbytes,
        Action(step.forward),
        Action(step.backward),
    )


def _step_findings(
    step: PlannedStep, before: AxisType, nbytes: int, gradient: Gradient
) -> Iterator[str]:
    source, target = parse_type(step.source), parse_type(step.target)
    if before != source:
        yield f"a step on {step.axis} starts from {source}, not {before}"
    actions = STEPS.get((source.kind, target.kind))
    if actions is None:
        yield f"there is no step from {source} to {target}"
        return
    backward = actions[1] if gradient is Gradient.FLOWS else Action.NOTHING
    if (step.forward, step.backward) != (actions[0], backward):
        yield f"{source} -> {target} runs {actions[0]} and {backward}, not as stated"
    if step.nbytes != nbytes:
        yield f"a step moves {nbytes} bytes, not {step.nbytes}"


def _as_seen(layout: Layout, gradient: Gradient) -> Layout:
    return without_invariant(layout) if gradient is Gradient.NONE else layout
