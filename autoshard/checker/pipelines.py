"""Checks a pipeline: its stages, what they exchange, its schedule, step time and memory."""

from collections.abc import Iterator, Sequence
from math import isclose

from autoshard.checker.programs import exchange_findings, program_findings
from autoshard.checker.reshardings import TOLERANCE
from autoshard.checker.stages import NOTHING, StageCheck, certificate_findings
from autoshard.graph import Graph, Input, InputKind, graph_from_json
from autoshard.layouts import Kind, Layout
from autoshard.lowering.instructions import count_collectives
from autoshard.plan.document import (
    Pipeline,
    PipelineArgument,
    Plan,
    StageSummary,
    StageTimes,
    Transfer,
)
from autoshard.plan.options import PlanOptions
from autoshard.plan.options.of_stages import stage_options
from autoshard.plan.predictions import Costs, Document
from autoshard.plan.sub_meshes import is_aligned, stage_devices, stage_mesh
from autoshard.pricing.stage_times import stage_times
from autoshard.schedules.rank_memory import largest_rank_memory
from autoshard.schedules.schedule import Schedule, planned_schedule
from autoshard.schedules.simulation import simulate_schedule
from autoshard.schedules.transfers import largest_load, messages, transfer_seconds


def pipeline_findings(plan: Plan, pipeline: Pipeline, graph: Graph | None) -> Iterator[str]:
    """Errors of a plan of several stages.

    Args:
        plan: the plan.
        pipeline: its pipeline.
        graph: the whole program; None if it is not known, so that the parts are not compared.

    Raises:
        InputError: a schedule, sub-mesh, layout or program does not exist.
    """
    schedule = planned_schedule(plan, pipeline)
    wrong = [*_schedule_findings(plan, pipeline, schedule), *_device_findings(plan, schedule)]
    programs = [graph_from_json(stage.program) for stage in plan.stages]
    wrong += exchange_findings(programs)
    yield from wrong
    if graph is not None:
        yield from program_findings(programs, graph)
        yield from _argument_findings(pipeline, graph)
    elif len({n.name for x in programs for n in x.nodes}) != plan.graph.num_nodes:
        yield f"the stages do not have {plan.graph.num_nodes} nodes together"
    if not wrong:
        yield from _PipelineCheck(plan, pipeline, schedule, programs).findings()


def _schedule_findings(plan: Plan, pipeline: Pipeline, schedule: Schedule) -> Iterator[str]:
    """Errors in the schedule, and in its numbers of ranks, stages and micro-batches."""
    options, number = plan.options, len(plan.stages)
    if pipeline.ranks != schedule.ranks:
        yield f"ranks hold the stages {pipeline.ranks}, which {schedule.name} does not"
    if pipeline.micro_batches != options.training.micro_batches:
        yield f"{pipeline.micro_batches} micro-batches run, not {options.training.micro_batches}"
    if len(pipeline.transfers) != number - 1:
        yield f"there are {len(pipeline.transfers)} cuts with transfers between {number} stages"
    listed = (
        len(options.pipeline.balance) if isinstance(options.pipeline.balance, tuple) else number
    )
    for asked, name, found in (
        (options.pipeline.schedule, "schedule", pipeline.schedule),
        (options.pipeline.stages_per_rank, "stages_per_rank", schedule.stages_per_rank),
        (options.pipeline.stages or "auto", "stages", number),
        (listed, "balance", number),
    ):
        if asked not in ("auto", found):
            yield f"option {name} asks for {asked}, but the pipeline has {found}"


def _device_findings(plan: Plan, schedule: Schedule) -> Iterator[str]:
    """Errors in the devices of stages: each rank has its own, and together they have all."""
    free = set(range(plan.mesh.num_devices))
    for number, stage in enumerate(plan.stages):
        devices = stage_devices(stage)
        expected = stage_mesh(plan.mesh, stage)
        if stage.axes != tuple(zip(expected.axis_names, expected.axis_sizes, strict=True)):
            yield f"stage {number}: its axes {stage.axes} are not a part of the mesh"
        elif not is_aligned(plan.mesh, stage.first_device, len(devices)):
            yield f"stage {number}: device {stage.first_device} begins no part of the mesh"
    for rank, held in enumerate(schedule.ranks):
        places = {stage_devices(plan.stages[number]) for number in held}
        if len(places) > 1:
            yield f"the stages of pipeline rank {rank} have different devices"
        own = set(next(iter(places)))
        if not own <= free:
            yield f"pipeline rank {rank} has devices of another one, or none"
        free -= own
    if free:
        yield f"no stage has the devices {sorted(free)}"
    sizes = {len(stage_devices(stage)) for stage in plan.stages}
    if plan.options.pipeline.sub_meshes == "equal" and len(sizes) > 1:
        yield f"stages have {sorted(sizes)} devices, but the options ask for equal sub-meshes"


def _argument_findings(pipeline: Pipeline, graph: Graph) -> Iterator[str]:
    found = tuple(
        _argument(given, graph)
        for given in graph.inputs
        if given.kind in (InputKind.USER, InputKind.LITERAL)
    )
    if pipeline.arguments != found or pipeline.in_spec != graph.in_spec:
        yield "the arguments of the pipeline are not those of the program"


def _argument(given: Input, graph: Graph) -> PipelineArgument:
    tensor = graph.values.get(given.name)
    return PipelineArgument(
        name=given.name,
        target=given.target,
        shape=None if tensor is None else tensor.shape,
        dtype=None if tensor is None else tensor.dtype.value,
        literal=given.literal,
    )


class _PipelineCheck:
    """Recomputes what a pipeline states.

    Args:
        plan: the plan; its stages exchange what they should, and use all devices.
        pipeline: its pipeline.
        schedule: its schedule.
        programs: the programs of its stages.
    """

    def __init__(
        self, plan: Plan, pipeline: Pipeline, schedule: Schedule, programs: Sequence[Graph]
    ) -> None:
        self._plan, self._mesh = plan, plan.mesh
        self._pipeline = pipeline
        self._schedule = schedule
        self._programs = programs
        self._training = schedule.training
        self._budget = plan.options.memory.budget or plan.mesh.topology.device.memory
        self._devices = [stage_devices(stage) for stage in plan.stages]
        self._meshes = [stage_mesh(plan.mesh, stage) for stage in plan.stages]

    def findings(self) -> Iterator[str]:
        for cut in range(len(self._plan.stages) - 1):
            yield from self._check_transfers(cut)
        yield from self._check_tied()
        for number, summary in enumerate(self._pipeline.stages):
            found = list(self._check_stage(number, summary))
            yield from (f"stage {number}: {finding}" for finding in found)
            if not found:
                yield from self._check_times(number, summary.times)
        yield from self._check_step()
        yield from self._check_memory()
        if self._plan.collectives != count_collectives(self._plan.stages, self._programs):
            yield "the table of collectives does not add up to those of the stages"

    def _options(self, number: int) -> PlanOptions:
        return stage_options(
            self._plan.options,
            self._programs[number],
            self._meshes[number],
            in_flight=self._schedule.in_flight[number],
            # Stages of a rank share its memory; what they need together is checked.
            budget=self._pipeline.stages[number].memory.budget or self._budget,
        )

    def _check_stage(self, number: int, summary: StageSummary) -> Iterator[str]:
        """Errors of a stage as the plan of its own program on its own devices."""
        stage, program = self._plan.stages[number], self._programs[number]
        yield from StageCheck(
            stage,
            program,
            self._meshes[number],
            self._options(number),
            costs=summary.costs,
            memory=summary.memory,
        ).findings()
        yield from certificate_findings(summary.certificate, summary.costs)
        if summary.collectives != count_collectives([stage], [program]):
            yield "its table of collectives does not add up to the reshardings"

    def _check_transfers(self, cut: int) -> Iterator[str]:
        stated, program = self._pipeline.transfers[cut], self._programs[cut]
        num_sent = sum(output.sent for output in program.outputs)
        sent = [o for o in self._plan.stages[cut].outputs if o.position < num_sent]
        targets = {i.name: i.layout for i in self._plan.stages[cut + 1].inputs}
        values = [output.name for output in sent]
        if [t.value for t in stated] != values or not targets.keys() >= set(values):
            yield f"cut {cut}: transfers are of {[t.value for t in stated]}, not of what is sent"
            return
        for transfer, output in zip(stated, sent, strict=True):
            found = self._transfer(cut, output.name, output.layout, targets[output.name])
            where = f"cut {cut}: transfer of {transfer.value}"
            yield from _differences(where, transfer, found)
            wanted = {Kind.INVARIANT, Kind.SHARD} if found.has_gradient else set(Kind)
            for text in (found.source, found.target):
                if not {t.kind for t in Layout.parse(text).types} <= wanted:
                    yield f"{where}: the gradient of layout {text} is incomplete"

    def _transfer(self, cut: int, value: str, source: str, target: str) -> Transfer:
        """A transfer as the stages on both sides say."""
        tensor = self._programs[cut].values[value]
        sender, receiver = (mesh.axis_sizes for mesh in self._meshes[cut : cut + 2])
        has_gradient = self._training and tensor.requires_grad
        forward = messages(tensor.shape, source, sender, target, receiver)
        backward = messages(tensor.shape, target, receiver, source, sender)
        if self._devices[cut] == self._devices[cut + 1]:
            forward = backward = ()
        if not has_gradient:
            backward = ()
        return Transfer(
            value=value,
            dtype=tensor.dtype.value,
            shape=tensor.shape,
            source=source,
            target=target,
            has_gradient=has_gradient,
            nbytes=largest_load(forward, tensor.dtype.itemsize),
            gradient_nbytes=largest_load(backward, tensor.dtype.itemsize),
            messages=len(forward),
            gradient_messages=len(backward),
        )

    def _check_tied(self) -> Iterator[str]:
        held: dict[str, list[int]] = {}
        for number, stage in enumerate(self._plan.stages):
            for parameter in stage.parameters:
                held.setdefault(parameter.target, []).append(number)
        shared = {target: tuple(numbers) for target, numbers in held.items() if len(numbers) > 1}
        stated = {tied.target: tied for tied in self._pipeline.tied}
        for target in shared.keys() | stated.keys():
            found = stated[target].stages if target in stated else ()
            if found != shared.get(target, ()):
                yield f"parameter {target} is held by stages {shared.get(target)}, not {found}"
                continue
            seconds = self._tied_seconds(target, found)
            if not _is_close(seconds, stated[target].time):
                yield f"parameter {target}: its sum takes {seconds} s, not {stated[target].time}"

    def _tied_seconds(self, target: str, numbers: Sequence[int]) -> float:
        """Seconds to send a gradient from all other stages to the first one, and the sum back."""
        first = numbers[0]
        places = {
            number: next(p for p in self._plan.stages[number].parameters if p.target == target)
            for number in numbers
        }
        tensor = self._programs[first].values[places[first].name]
        stored = self._programs[first].stored_dtype(places[first].name)
        if not self._training or not tensor.requires_grad:
            return 0.0
        seconds = 0.0
        for other in numbers[1:]:
            for source, receiver in ((other, first), (first, other)):
                sent = messages(
                    tensor.shape,
                    places[source].layout,
                    self._meshes[source].axis_sizes,
                    places[receiver].layout,
                    self._meshes[receiver].axis_sizes,
                )
                load = largest_load(sent, stored.itemsize)
                seconds += self._seconds(source, receiver, [load])
        return seconds

    def _seconds(self, sender: int, receiver: int, loads: Sequence[int]) -> float:
        return transfer_seconds(self._mesh, self._devices[sender], self._devices[receiver], loads)

    def _check_times(self, number: int, stated: StageTimes) -> Iterator[str]:
        own = stage_times(
            self._plan.stages[number],
            self._programs[number],
            self._meshes[number],
            self._options(number),
        )
        sums = sum(tied.time for tied in self._pipeline.tied if number in tied.stages)
        found = own.model_dump() | {"end": own.end + sums}
        if number + 1 < len(self._plan.stages):
            loads = [transfer.nbytes for transfer in self._pipeline.transfers[number]]
            found["send"] = self._seconds(number, number + 1, loads)
        if number > 0:
            before = self._pipeline.transfers[number - 1]
            loads = [t.gradient_nbytes for t in before if t.has_gradient]
            found["send_gradient"] = self._seconds(number, number - 1, loads)
        for name, seconds in found.items():
            if not _is_close(seconds, getattr(stated, name)):
                yield (f"stage {number}: {name} takes {seconds} s, not {getattr(stated, name)}")

    def _check_step(self) -> Iterator[str]:
        """Errors in step time and idle time, which follow from the times of stages."""
        costs = self._plan.costs
        assert costs is not None
        times = [summary.times for summary in self._pipeline.stages]
        step = simulate_schedule(self._schedule, times)
        if not _is_close(step.seconds, costs.total):
            yield f"a step takes {step.seconds} s under {self._schedule.name}, not {costs.total}"
        if not isclose(step.bubble, self._pipeline.bubble, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
            yield f"ranks are idle for {step.bubble} of a step, not {self._pipeline.bubble}"
        ranks = [self._rank_costs(held) for held in self._schedule.ranks]
        most = max(rank["total"] for rank in ranks)
        names = [name for name in Costs.model_fields if name not in ("total", "idle")]
        # Several ranks may have the most work; the costs may be those of any of them.
        if not any(
            _is_close(rank["total"], most)
            and all(_is_close(rank[name], getattr(costs, name)) for name in names)
            for rank in ranks
        ):
            yield "the costs are not those of the pipeline rank with the most work"
        if not _is_close(max(step.seconds - most, 0.0), costs.idle):
            yield f"the rank with the most work waits {step.seconds - most} s, not {costs.idle}"

    def _rank_costs(self, held: Sequence[int]) -> dict[str, float]:
        parts = [self._pipeline.stages[number].costs for number in held]
        return {name: sum(getattr(x, name) for x in parts) for name in Costs.model_fields}

    def _check_memory(self) -> Iterator[str]:
        """Errors in the memory of the rank with the largest peak."""
        stated = self._plan.memory
        assert stated is not None
        stages = [summary.memory for summary in self._pipeline.stages]
        found = largest_rank_memory(self._schedule, stages, self._budget)
        yield from _differences("memory", stated, found)
        if found.peak > self._budget:
            yield f"peak memory {found.peak} of a rank is over the budget {self._budget}"


def _differences(where: str, stated: Document, found: Document) -> Iterator[str]:
    for name in type(found).model_fields:
        if getattr(stated, name) != getattr(found, name):
            yield f"{where}: {name} is {getattr(found, name)}, not {getattr(stated, name)}"


def _is_close(found: float, stated: float) -> bool:
    return isclose(found, stated, rel_tol=TOLERANCE, abs_tol=NOTHING)
