"""The independent checker: is a plan legal, and does it cost what it says?

It shares with the planner the rules, the table of steps and the prices of single things,
and nothing else: no problem, no solver, no strategy enumeration. It walks the program as a
runtime would, from layout to layout.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from math import isclose, prod
from types import MappingProxyType

from autoshard.errors import InputError, LayoutError
from autoshard.graph import Graph, Node, graph_digest, graph_from_json, node_kind
from autoshard.layouts import (
    STEPS,
    Action,
    AxisType,
    Kind,
    Layout,
    Step,
    parse_type,
    placement_texts,
    step_price,
)
from autoshard.plan.active import ActiveAxes
from autoshard.plan.document import (
    Conversion,
    PlacedNode,
    Plan,
    PlannedStep,
    Stage,
    count_collectives,
)
from autoshard.plan.gradients import Gradient, Gradients
from autoshard.plan.legality import local_sizes, without_invariant
from autoshard.plan.lifetimes import Interval, input_interval, keeps_output, output_interval
from autoshard.plan.pricing import Prices
from autoshard.plan.steering import Steering
from autoshard.rules import Strategy, call_of, rule_for
from autoshard.solve import Status

_TOLERANCE = 1e-6


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
    for stage in plan.stages:
        program = graph_from_json(stage.program)
        if graph_digest(program) != plan.graph.digest:
            yield f"{stage.name}: the program inside is not the one the plan names"
        if graph is not None and graph_digest(graph) != plan.graph.digest:
            yield "the plan was made for another graph"
        yield from _StageCheck(plan, stage, program).findings()
    if plan.collectives != count_collectives(plan.stages):
        yield "the table of collectives does not add up to the conversions"
    yield from _certificate_findings(plan)


def _certificate_findings(plan: Plan) -> Iterator[str]:
    assert plan.costs is not None
    certificate = plan.certificate
    parts = plan.costs.compute + plan.costs.communication + plan.costs.optimizer
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


_Work = tuple[dict[str, int], float, float]
"""Letter sizes on a rank, seconds, and bytes of activations."""


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
        self.work: dict[Hashable, _Work | str] = {}
        self.made: dict[str, Layout] = {}
        self.by_use = {(c.value, c.consumer, c.position): c for c in stage.conversions}
        self.used: set[tuple[str, str | None, int]] = set()
        self.held: list[tuple[Interval, float]] = []
        self.optimizer_time = 0.0
        self.loading_time = 0.0

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
        for value, consumer, position in self.by_use.keys() - self.used:
            yield f"conversion of {value} for {consumer} at {position} serves no use"
        yield from self._costs()

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
            time, usage = self.prices.input(
                expected[placed.name], tensor, [layout.local_shape(tensor.shape, self.sizes)]
            )
            if placed.kind == "parameter" and self.gradients.exists(placed.name):
                self.optimizer_time += float(time[0])
            else:
                self.loading_time += float(time[0])
            interval = input_interval(self.graph, training=self.prices.training)
            self.held.extend((interval, float(held[0])) for held in usage.values())
            yield from self._steering("input", placed.name, (), (layout,))
            self.made[placed.name] = layout
            yield from self._shared(placed.name)

    def _shared(self, value: str) -> Iterator[str]:
        conversion = self.by_use.get((value, None, 0))
        if conversion is not None:
            yield from self._convert(conversion, self.made[value])
            self.made[value] = Layout.parse(conversion.target)

    def _node(self, time: int, node: Node, placed: PlacedNode) -> Iterator[str]:
        inputs = tuple(Layout.parse(text) for text in placed.inputs)
        outputs = tuple(Layout.parse(text) for text in placed.outputs)
        if (len(inputs), len(outputs)) != (len(node.inputs), len(node.outputs)):
            yield f"node {node.name}: wrong number of layouts"
            return
        for position, (value, wanted) in enumerate(zip(node.inputs, inputs, strict=True)):
            yield from self._use(value, node.name, position, wanted)
        work = self._work(node, inputs, outputs)
        if isinstance(work, str):
            yield f"node {node.name}: {work}"
            return
        sizes, seconds, activations = work
        yield from self._steering("operator", node.name, inputs, outputs, sizes)
        interval = output_interval(self.graph, time, training=self.prices.training)
        self.held.append((interval, activations))
        if not isclose(seconds, placed.time, rel_tol=_TOLERANCE):
            yield f"node {node.name} takes {seconds} s, not {placed.time}"
        for value, layout in zip(node.outputs, outputs, strict=True):
            self.made[value] = layout
            yield from self._shared(value)

    def _work(
        self, node: Node, inputs: tuple[Layout, ...], outputs: tuple[Layout, ...]
    ) -> _Work | str:
        """What a rank does for a node, or what is wrong; alike nodes are looked at once."""
        gradients = (
            *(self.gradients.of_use(v, node) is not Gradient.NONE for v in node.inputs),
            *(self.gradients.exists(v) for v in node.outputs),
        )
        flows = self.gradients.flows(node)
        kept = keeps_output(self.graph, node, training=self.prices.training)
        key = (node_kind(self.graph, node), inputs, outputs, gradients, flows, kept)
        if key not in self.work:
            self.work[key] = self._new_work(node, (*inputs, *outputs), gradients)
        return self.work[key]

    def _new_work(
        self, node: Node, layouts: tuple[Layout, ...], gradients: tuple[bool, ...]
    ) -> _Work | str:
        for value, layout in zip((*node.inputs, *node.outputs), layouts, strict=True):
            if not layout.is_legal(self.graph.values[value].shape, self.sizes):
                return f"{layout} is illegal for {self.graph.values[value]}"
        rule = rule_for(call_of(self.graph, node))
        sizes = local_sizes(rule, layouts, gradients, self.sizes)
        if sizes is None:
            return f"no rule of {node.operator} allows {', '.join(map(str, layouts))}"
        flows = self.gradients.flows(node)
        return sizes, *self.prices.strategy(self.graph, node, sizes, backward=flows)

    def _use(self, value: str, consumer: str, position: int, wanted: Layout) -> Iterator[str]:
        if value not in self.made:
            yield f"{consumer} uses {value} before it is made"
            return
        conversion = self.by_use.get((value, consumer, position))
        if conversion is not None:
            yield from self._convert(conversion, self.made[value])
            arrived = Layout.parse(conversion.target)
        else:
            arrived = self.made[value]
        gradient = self._gradient(value, consumer, position)
        if _as_seen(arrived, gradient) != _as_seen(wanted, gradient):
            yield f"{consumer} wants {value} as {wanted}, but it arrives as {arrived}"

    def _gradient(self, value: str, consumer: str | None, position: int) -> Gradient:
        if consumer is None:
            return self.gradients.of_value(value)
        if consumer in self.nodes:
            return self.gradients.of_use(value, self.nodes[consumer])
        return self.gradients.of_output(position)

    def _convert(self, conversion: Conversion, source: Layout) -> Iterator[str]:
        self.used.add((conversion.value, conversion.consumer, conversion.position))
        where = f"conversion of {conversion.value} for {conversion.consumer or 'all'}"
        tensor = self.graph.values[conversion.value]
        layout = Layout.parse(conversion.source)
        gradient = self._gradient(conversion.value, conversion.consumer, conversion.position)
        if _as_seen(layout, gradient) != _as_seen(source, gradient):
            yield f"{where} starts from {layout}, but the value is made as {source}"
        for step in conversion.steps:
            try:
                axis = self.mesh.axis_names.index(step.axis)
                after = layout.replace(axis, parse_type(step.target))
                shapes = [x.local_shape(tensor.shape, self.sizes) for x in (layout, after)]
            except (ValueError, LayoutError) as error:
                yield f"{where}: {error}"
                return
            nbytes = max(prod(shape) for shape in shapes) * tensor.dtype.itemsize
            yield from _step_findings(where, step, layout.types[axis], nbytes, gradient)
            yield from self._price_findings(where, step, axis)
            for action in (step.forward, step.backward):
                for label in self.steering.forbidding(action, self.axes, axis):
                    yield f"{where}: a step runs {action} on {step.axis} against the {label}"
            layout = after
        if str(layout) != conversion.target:
            yield f"{where} ends in {layout}, not {conversion.target}"

    def _price_findings(self, where: str, step: PlannedStep, axis: int) -> Iterator[str]:
        priced = Step(
            axis,
            parse_type(step.source),
            parse_type(step.target),
            step.nbytes,
            Action(step.forward),
            Action(step.backward),
        )
        time = step_price(priced, self.mesh)
        if not isclose(time, step.time, rel_tol=_TOLERANCE):
            yield f"{where}: a step takes {time} s, not {step.time}"

    def _outputs(self) -> Iterator[str]:
        for placed in self.stage.outputs:
            layout = Layout.parse(placed.layout)
            yield from self._use(placed.name, "output", placed.position, layout)
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
        )
        for name, found, stated in sums:
            if not isclose(found, stated, rel_tol=_TOLERANCE, abs_tol=1e-15):
                yield f"{name} adds up to {found} s, not {stated}"
        memory = self.plan.memory
        peak = self._peak()
        if abs(peak - memory.peak) > 1:
            yield f"memory peaks at {peak} bytes, not {memory.peak}"
        if memory.budget is not None and memory.peak > memory.budget:
            yield f"peak memory {memory.peak} is over the budget {memory.budget}"

    def _peak(self) -> float:
        starts = {interval[0] for interval, _ in self.held}
        return max(
            (
                sum(held for (first, last), held in self.held if first <= time < last)
                for time in starts
            ),
            default=0.0,
        )


def _step_findings(
    where: str, step: PlannedStep, before: AxisType, nbytes: int, gradient: Gradient
) -> Iterator[str]:
    source, target = parse_type(step.source), parse_type(step.target)
    if before != source:
        yield f"{where}: a step on {step.axis} starts from {source}, not {before}"
    actions = STEPS.get((source.kind, target.kind))
    if actions is None:
        yield f"{where}: there is no step from {source} to {target}"
        return
    backward = actions[1] if gradient is Gradient.FLOWS else Action.NOTHING
    if (step.forward, step.backward) != (actions[0], backward):
        yield f"{where}: {source} -> {target} runs {actions[0]} and {backward}, not as stated"
    if step.nbytes != nbytes:
        yield f"{where}: a step moves {nbytes} bytes, not {step.nbytes}"


def _as_seen(layout: Layout, gradient: Gradient) -> Layout:
    return without_invariant(layout) if gradient is Gradient.NONE else layout
