"""Plans with several stages, cut by hand: each stage is planned on its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from support.meshes import slow_devices

from autoshard.graph import Graph, InputKind, graph_digest
from autoshard.graph.stages import StageCutter
from autoshard.mesh import Mesh
from autoshard.outcome import SolveStatus
from autoshard.plan import (
    Certificate,
    GraphSummary,
    Plan,
    PlanOptions,
    Stage,
)
from autoshard.plan.document import (
    Pipeline,
    PipelineArgument,
    ScheduleName,
    StageSummary,
    StageTimes,
    TiedParameter,
    Transfer,
)
from autoshard.plan.transfers import largest_load, messages
from autoshard.planner import make_plan
from autoshard.runtime.kernels import draws_random_numbers

LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


@dataclass(frozen=True)
class Cut:
    """How a program is cut into stages.

    Attributes:
        stages: number of stages, of about as many nodes each.
        schedule: its name.
        micro_batches: per step.
        axes: the axes of each stage, by name.
        options: of the plans of stages.
        first_layout: of what the even stages send, and of what they receive; of odd ones it is I.
    """

    stages: int
    schedule: ScheduleName = "GPipe"
    micro_batches: int = 4
    axes: Mapping[str, int] = field(default_factory=lambda: {"dp": 1})
    options: Mapping[str, Any] = field(default_factory=dict)

    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each pipeline rank."""
        if self.schedule in LOOPED:
            number = self.stages // 2
            return tuple((i, i + number) for i in range(number))
        if self.schedule in V_SHAPED:
            return tuple((i, self.stages - 1 - i) for i in range(self.stages // 2))
        return tuple((i,) for i in range(self.stages))

    def mesh(self) -> Mesh:
        """All devices."""
        return slow_devices(pp=len(self.ranks()), **self.axes)


def pipeline_plan(graph: Graph, cut: Cut) -> Plan:
    """A plan of a program for one micro-batch."""
    cutter = StageCutter(graph, runs_once=draws_random_numbers)
    parts = cutter.split(cut_places(cutter, cut.stages))
    options = PlanOptions.model_validate(dict(cut.options))
    training = options.mode == "training"
    plans = [_stage_plan(part, cut, options) for part in parts]
    ranks, mesh = cut.ranks(), cut.mesh()
    size = prod(cut.axes.values())
    holder = {stage: number for number, held in enumerate(ranks) for stage in held}
    stages = [
        plan.stages[0].model_copy(
            update={"name": f"stage{number}", "first_device": holder[number] * size}
        )
        for number, plan in enumerate(plans)
    ]
    transfers = tuple(
        tuple(
            _transfer(part, str(output.name), stages[i : i + 2], training=training)
            for output in part.outputs
            if output.sent
        )
        for i, part in enumerate(parts[:-1])
    )
    first = plans[0]
    return Plan(
        id=first.id,
        certificate=Certificate(status=SolveStatus.FEASIBLE, objective=None, bound=None, gap=None),
        graph=GraphSummary(
            digest=graph_digest(graph),
            num_nodes=len(graph.nodes),
            num_parameters=sum(graph.values[p.name].numel for p in graph.parameters),
        ),
        mesh=mesh,
        options=options,
        costs=first.costs,
        memory=first.memory,
        collectives=(),
        stages=tuple(stages),
        pipeline=Pipeline(
            schedule=cut.schedule,
            micro_batches=cut.micro_batches,
            ranks=ranks,
            arguments=_arguments(graph),
            in_spec=graph.in_spec,
            stages=tuple(map(_summary, plans)),
            transfers=transfers,
            tied=_tied(stages),
            bubble=0.0,
            proof="made by hand",
        ),
        provenance=first.provenance,
    )


def cut_places(cutter: StageCutter, stages: int) -> list[int]:
    """Nodes at which stages begin: cuts with few crossing bytes, of about as many nodes each."""
    points = cutter.cut_points
    total = len(cutter.placed)
    places: list[int] = []
    for number in range(1, stages):
        wanted = cutter.placed[total * number // stages]
        free = [p for p in points if not places or p.node > places[-1]]
        near = sorted(free, key=lambda p: abs(p.node - wanted))[:12]
        places.append(min(near, key=lambda p: (p.nbytes, abs(p.node - wanted))).node)
    return places


def _stage_plan(part: Graph, cut: Cut, options: PlanOptions) -> Plan:
    """The plan of one stage; what crosses a cut is whole, or sharded as the inputs are."""
    training = options.mode == "training"
    update = {"micro_batches": cut.micro_batches} if training else {}
    plan = make_plan(part, slow_devices(**cut.axes), options.model_copy(update=update))
    assert plan.found, plan.reason
    return plan


def _transfer(part: Graph, name: str, stages: Sequence[Stage], *, training: bool) -> Transfer:
    source, target = stages
    tensor = part.values[name]
    layouts = [
        next(o.layout for o in source.outputs if o.name == name),
        next(i.layout for i in target.inputs if i.name == name),
    ]
    back = training and tensor.requires_grad
    have, want = (tuple(size for _, size in stage.axes) for stage in stages)
    sent = messages(tensor.shape, layouts[0], have, layouts[1], want)
    returned = messages(tensor.shape, layouts[1], want, layouts[0], have) if back else ()
    if source.first_device == target.first_device:
        sent, returned = (), ()
    return Transfer(
        value=name,
        dtype=tensor.dtype.value,
        shape=tensor.shape,
        source=layouts[0],
        target=layouts[1],
        has_gradient=back,
        nbytes=largest_load(sent, tensor.dtype.itemsize),
        gradient_nbytes=largest_load(returned, tensor.dtype.itemsize),
        messages=len(sent),
        gradient_messages=len(returned),
    )


def _arguments(graph: Graph) -> tuple[PipelineArgument, ...]:
    return tuple(
        PipelineArgument(
            name=i.name,
            target=i.target,
            shape=graph.values[i.name].shape if i.kind is InputKind.USER else None,
            dtype=graph.values[i.name].dtype.value if i.kind is InputKind.USER else None,
            literal=i.literal,
        )
        for i in graph.inputs
        if i.kind in (InputKind.USER, InputKind.LITERAL)
    )


def _tied(stages: Sequence[Stage]) -> tuple[TiedParameter, ...]:
    held: dict[str, list[int]] = {}
    for number, stage in enumerate(stages):
        for placed in stage.parameters:
            held.setdefault(placed.target, []).append(number)
    return tuple(
        TiedParameter(target=target, stages=tuple(numbers), time=0.0)
        for target, numbers in held.items()
        if len(numbers) > 1
    )


def _summary(plan: Plan) -> StageSummary:
    assert plan.costs is not None
    assert plan.memory is not None
    times = StageTimes(forward=0, backward_input=0, backward_weight=0, end=0)
    return StageSummary(
        certificate=plan.certificate,
        times=times,
        costs=plan.costs,
        memory=plan.memory,
        collectives=plan.collectives,
    )
