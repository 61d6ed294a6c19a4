"""Plans of all stages of a pipeline, and the plan document that joins them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from autoshard.base.outcome import SolveStatus, relative_gap
from autoshard.graph import Graph, InputKind
from autoshard.lowering.instructions import count_collectives
from autoshard.mesh import Mesh
from autoshard.plan.certificate import with_statement
from autoshard.plan.document import (
    GraphSummary,
    Pipeline,
    PipelineArgument,
    Plan,
    StageSummary,
    StageTimes,
    TiedParameter,
    Transfer,
)
from autoshard.plan.options import PlanOptions
from autoshard.plan.predictions import Certificate, Costs
from autoshard.plan.stage import Stage
from autoshard.planner.pipeline.bounds import ProvenBound
from autoshard.planner.pipeline.search import StagePlace
from autoshard.planner.planner import plan_id, plan_without_stages, provenance
from autoshard.schedules.rank_memory import largest_rank_memory
from autoshard.schedules.schedule import Schedule
from autoshard.schedules.simulation import ScheduleSimulation, simulate_schedule
from autoshard.schedules.transfers import largest_load, messages, transfer_seconds


@dataclass(frozen=True)
class PlannedStage:
    """A stage with its own plan.

    Attributes:
        place: where it begins, and its devices.
        graph: its program.
        mesh: its sub-mesh.
        plan: the plan of its program on its sub-mesh.
        times: its seconds, without transfers.
        bound: lower bound of the seconds of all its plans in a step; None if it is not known.
    """

    place: StagePlace
    graph: Graph
    mesh: Mesh
    plan: Plan
    times: StageTimes
    bound: float | None = None

    @property
    def devices(self) -> range:
        """Numbers of its devices."""
        first = self.place.first_device
        return range(first, first + self.place.devices)

    @property
    def stage(self) -> Stage:
        """The only stage of its own plan."""
        return self.plan.stages[0]


def with_stored_layouts(
    options: PlanOptions, place: StagePlace, graph: Graph, earlier: Iterable[PlannedStage]
) -> PlanOptions:
    """Options that store parameters as earlier stages on the same devices do.

    A rank has one copy of a parameter, whichever of its stages use it.

    Args:
        options: of the stage.
        place: of the stage.
        graph: its program.
        earlier: stages that are planned.
    """
    read = {parameter.target for parameter in graph.parameters}
    stored = {
        placed.target: placed.layout
        for one in earlier
        if one.place[1:] == place[1:]
        for placed in one.stage.parameters
        if placed.target in read
    }
    if not stored:
        return options
    parameters = {**options.constraints.pins.parameters, **stored}
    pins = options.constraints.pins.model_copy(update={"parameters": parameters})
    return options.with_values(pins=pins)


def pipeline_transfers(stages: Sequence[PlannedStage]) -> list[tuple[Transfer, ...]]:
    """Transfers of each stage but the last to the next one."""
    return [tuple(_transfers(one, following)) for one, following in pairwise(stages)]


def _transfers(sender: PlannedStage, receiver: PlannedStage) -> Iterable[Transfer]:
    layouts = {i.name: i.layout for i in receiver.stage.inputs if i.kind == "received"}
    training = sender.plan.options.mode == "training"
    local = sender.devices == receiver.devices
    for placed in sender.stage.outputs:
        if not sender.graph.outputs[placed.position].sent:
            continue
        tensor = sender.graph.values[placed.name]
        source, target = placed.layout, layouts[placed.name]
        sizes = sender.mesh.axis_sizes, receiver.mesh.axis_sizes
        has_gradient = training and tensor.requires_grad
        forth = messages(tensor.shape, source, sizes[0], target, sizes[1])
        back = messages(tensor.shape, target, sizes[1], source, sizes[0]) if has_gradient else ()
        size = tensor.dtype.itemsize
        yield Transfer(
            value=placed.name,
            dtype=tensor.dtype.value,
            shape=tensor.shape,
            source=source,
            target=target,
            has_gradient=has_gradient,
            nbytes=0 if local else largest_load(forth, size),
            gradient_nbytes=0 if local else largest_load(back, size),
            messages=0 if local else len(forth),
            gradient_messages=0 if local else len(back),
        )


def tied_parameters(mesh: Mesh, stages: Sequence[PlannedStage]) -> tuple[TiedParameter, ...]:
    """Parameters that several stages hold, with the seconds to sum their gradients."""
    held: dict[str, list[int]] = {}
    for number, one in enumerate(stages):
        for placed in one.stage.parameters:
            held.setdefault(placed.target, []).append(number)
    return tuple(
        TiedParameter(
            target=target,
            stages=tuple(numbers),
            time=_tied_seconds(mesh, [stages[number] for number in numbers], target),
        )
        for target, numbers in held.items()
        if len(numbers) > 1
    )


def _tied_seconds(mesh: Mesh, stages: Sequence[PlannedStage], target: str) -> float:
    """Every other stage sends its gradient to the first one, which sends back the sum."""
    first, *others = stages
    if first.plan.options.mode != "training":
        return 0.0
    placed = [next(p for p in one.stage.parameters if p.target == target) for one in stages]
    tensor = first.graph.values[placed[0].name]
    if not tensor.requires_grad:
        return 0.0
    seconds, size = 0.0, first.graph.stored_dtype(placed[0].name).itemsize
    for one, layout in zip(others, placed[1:], strict=True):
        ends = (layout.layout, one.mesh.axis_sizes), (placed[0].layout, first.mesh.axis_sizes)
        for (source, senders), (goal, receivers) in (ends, ends[::-1]):
            sent = messages(tensor.shape, source, senders, goal, receivers)
            seconds += transfer_seconds(
                mesh, one.devices, first.devices, [largest_load(sent, size)]
            )
    return seconds


def planned_times(
    mesh: Mesh,
    stages: Sequence[PlannedStage],
    transfers: Sequence[Sequence[Transfer]],
    tied: Sequence[TiedParameter],
) -> list[StageTimes]:
    """Predicted seconds of each stage."""
    times = []
    for number, one in enumerate(stages):
        own = one.times
        send = gradient = 0.0
        if number + 1 < len(stages):
            loads = [transfer.nbytes for transfer in transfers[number]]
            send = transfer_seconds(mesh, one.devices, stages[number + 1].devices, loads)
        if number > 0:
            loads = [t.gradient_nbytes for t in transfers[number - 1] if t.has_gradient]
            gradient = transfer_seconds(mesh, one.devices, stages[number - 1].devices, loads)
        sums = sum(parameter.time for parameter in tied if number in parameter.stages)
        times.append(
            own.model_copy(update={"send": send, "send_gradient": gradient, "end": own.end + sums})
        )
    return times


def pipeline_document(
    whole: Graph,
    mesh: Mesh,
    schedule: Schedule,
    stages: Sequence[PlannedStage],
    proof: str,
) -> tuple[Pipeline, ScheduleSimulation]:
    """The description of a pipeline of planned stages, and the simulation of a step."""
    transfers = pipeline_transfers(stages)
    tied = tied_parameters(mesh, stages)
    times = planned_times(mesh, stages, transfers, tied)
    simulation = simulate_schedule(schedule, times)
    summaries = []
    for one, seconds in zip(stages, times, strict=True):
        assert one.plan.costs is not None
        assert one.plan.memory is not None
        summaries.append(
            StageSummary(
                certificate=one.plan.certificate,
                times=seconds,
                costs=one.plan.costs,
                memory=one.plan.memory,
                collectives=one.plan.collectives,
            )
        )
    pipeline = Pipeline(
        schedule=schedule.name,
        micro_batches=schedule.micro_batches,
        ranks=schedule.ranks,
        arguments=tuple(_arguments(whole)),
        in_spec=whole.in_spec,
        stages=tuple(summaries),
        transfers=tuple(transfers),
        tied=tied,
        bubble=min(max(float(simulation.bubble), 0.0), 1.0),
        proof=proof,
    )
    return pipeline, simulation


def _arguments(whole: Graph) -> Iterable[PipelineArgument]:
    for given in whole.inputs:
        if given.kind is InputKind.USER:
            tensor = whole.values[given.name]
            yield PipelineArgument(
                name=given.name, target=given.target, shape=tensor.shape, dtype=tensor.dtype.value
            )
        elif given.kind is InputKind.LITERAL:
            yield PipelineArgument(
                name=given.name,
                target=given.target,
                shape=None,
                dtype=None,
                literal=given.literal,
            )


@dataclass(frozen=True)
class DocumentBuilder:
    """Makes the plan document of a request."""

    graph: Graph
    mesh: Mesh
    options: PlanOptions
    seconds: Mapping[str, float]

    @property
    def budget(self) -> int:
        """Bytes per device."""
        return self.options.memory.budget or self.mesh.topology.device.memory

    def with_stages(
        self, schedule: Schedule, stages: Sequence[PlannedStage], proven: ProvenBound
    ) -> Plan:
        """The plan of some stages under a schedule."""
        proof = proven.proof
        pipeline, simulation = pipeline_document(self.graph, self.mesh, schedule, stages, proof)
        costs = _costs(stages, schedule, simulation)
        bound = min(proven.seconds, costs.total)
        gap = relative_gap(costs.total, bound)
        is_optimal = gap <= self.options.solver.relative_gap
        own = tuple(one.stage for one in stages)
        memory = [summary.memory for summary in pipeline.stages]
        certificate = Certificate(
            status=SolveStatus.OPTIMAL if is_optimal else SolveStatus.FEASIBLE,
            objective=costs.total,
            bound=bound,
            gap=gap,
        )
        return Plan(
            id=plan_id(self.graph, self.mesh, self.options),
            graph=GraphSummary.of(self.graph),
            mesh=self.mesh,
            options=self.options,
            provenance=provenance(self.seconds),
            certificate=with_statement(certificate, self.options, self.mesh, proof),
            costs=costs,
            memory=largest_rank_memory(schedule, memory, self.budget),
            collectives=count_collectives(own, [one.graph for one in stages]),
            stages=own,
            pipeline=pipeline,
        )

    def without_stages(self, reason: str, status: SolveStatus = SolveStatus.INFEASIBLE) -> Plan:
        """A document that says why there is no plan."""
        return plan_without_stages(
            self.graph,
            self.mesh,
            self.options,
            reason=reason,
            status=status,
            seconds=self.seconds,
        )


def _costs(
    stages: Sequence[PlannedStage], schedule: Schedule, simulation: ScheduleSimulation
) -> Costs:
    """Costs of the rank that works the longest; the rest of the step it is idle."""
    busiest = max(
        schedule.ranks,
        key=lambda held: sum(c.total for s in held if (c := stages[s].plan.costs) is not None),
    )
    parts = [c for s in busiest if (c := stages[s].plan.costs) is not None]
    sums = {name: sum(getattr(part, name) for part in parts) for name in Costs.model_fields}
    idle = max(simulation.seconds - sums["total"], 0.0)
    return Costs.model_validate({**sums, "total": simulation.seconds, "idle": idle})
