"""Reports on pipelines: stages, transfers, and the schedule of a step."""

from collections.abc import Iterator

from autoshard.plan import Pipeline, Plan, stage_devices, stage_modules
from autoshard.report.tables import Column, Report, Sentence, Table, Unit, milliseconds, share_of
from autoshard.schedules import ScheduleSimulation

_TIMES = (
    Column("forward", Unit.SECONDS),
    Column("backward", Unit.SECONDS),
    Column("end", Unit.SECONDS),
    Column("in flight", Unit.COUNT),
    Column("memory", Unit.BYTES),
)


def pipeline_parts(plan: Plan) -> Iterator[Table | Sentence]:
    """The stages of a plan, what they exchange, and the schedule; nothing for one stage."""
    pipeline = plan.pipeline
    if pipeline is None:
        return
    num_ranks, number = len(pipeline.ranks), len(plan.stages)
    text = (
        f"Pipeline of {number} stages on {num_ranks} pipeline ranks, schedule {pipeline.schedule}, "
        f"{pipeline.micro_batches} micro-batches: ranks are idle for {pipeline.bubble:.1%} of a "
        f"step"
    )
    yield Sentence(text, "bold")
    yield _stages(plan, pipeline)
    yield _transfers(pipeline)
    for tied in pipeline.tied:
        held = ", ".join(map(str, tied.stages))
        yield Sentence(
            f"{tied.target} is held by stages {held}; summing its gradients takes "
            f"{milliseconds(tied.time)} per step"
        )


def _stages(plan: Plan, pipeline: Pipeline) -> Table:
    rank_of = {stage: rank for rank, held in enumerate(pipeline.ranks) for stage in held}
    modules_columns = Column("first", Unit.NAME), Column("last", Unit.NAME)
    labels = *modules_columns, *(Column(name) for name in ("stage", "rank", "devices"))
    title = "Stages: times per micro-batch, and at the end of the step; memory per device"
    table = Table("stages", title, (*labels, *_TIMES))
    rows = zip(plan.stages, pipeline.stages, stage_modules(plan), strict=True)
    for number, (stage, summary, modules) in enumerate(rows):
        devices, times = stage_devices(stage), summary.times
        table.add(
            modules.first,
            modules.last,
            number,
            rank_of[number],
            str(devices.start) if len(devices) == 1 else f"{devices.start}-{devices[-1]}",
            times.forward,
            times.backward_input + times.backward_weight,
            times.end,
            stage.in_flight,
            summary.memory.peak,
        )
    return table


def _transfers(pipeline: Pipeline) -> Table:
    """One row for each cut."""
    columns = (
        Column("cut"),
        Column("tensors", Unit.COUNT),
        Column("messages", Unit.COUNT),
        Column("size", Unit.BYTES),
        Column("time", Unit.SECONDS),
        Column("gradient size", Unit.BYTES),
        Column("time back", Unit.SECONDS),
    )
    title = "Transfers per micro-batch; bytes of the rank that sends or receives the most"
    table = Table("transfers", title, columns)
    for cut, transfers in enumerate(pipeline.transfers):
        sender, receiver = (summary.times for summary in pipeline.stages[cut : cut + 2])
        table.add(
            f"{cut} to {cut + 1}",
            len(transfers),
            sum(t.messages + t.gradient_messages for t in transfers),
            sum(t.nbytes for t in transfers),
            sender.send,
            sum(t.gradient_nbytes for t in transfers),
            receiver.send_gradient,
        )
    return table


def schedule_report(pipeline: Pipeline, simulation: ScheduleSimulation) -> Report:
    """The step of a pipeline: times and memory of its stages, and idle time of its ranks."""
    schedule = simulation.schedule
    title = "Stages: times of a micro-batch, and of the end of the step"
    stages = Table("stages", title, (Column("stage"), *_TIMES))
    for stage, (summary, times) in enumerate(zip(pipeline.stages, simulation.times, strict=True)):
        stages.add(
            f"{stage} on rank {schedule.rank_of_stage[stage]}",
            times.forward,
            times.backward_input + times.backward_weight,
            times.end,
            schedule.in_flight[stage],
            summary.memory.peak,
        )
    idle_columns = Column("idle", Unit.SECONDS), Column("share of step", Unit.SHARE)
    ranks = Table("ranks", "Pipeline ranks", (Column("rank"), Column("stages"), *idle_columns))
    for rank, held in enumerate(schedule.ranks):
        idle = float(simulation.idle[rank])
        ranks.add(rank, ", ".join(map(str, held)), idle, share_of(idle, simulation.seconds))
    text = (
        f"Schedule {schedule.name}, {schedule.micro_batches} micro-batches: ranks are idle for "
        f"{simulation.bubble:.1%} of the step"
    )
    return Report.of(
        Sentence(f"One step takes {milliseconds(simulation.seconds)}", "bold"),
        Sentence(text),
        stages,
        ranks,
    )
