"""Pipelines as tables on a terminal: stages, transfers, and the schedule of a step."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.cli.tables import make_table, milliseconds, share_text
from autoshard.plan import (
    Pipeline,
    Plan,
    ScheduleSimulation,
    stage_devices,
    stage_modules,
)
from autoshard.quantities import format_bytes


def render_stages(plan: Plan, pipeline: Pipeline) -> Iterator[RenderableType]:
    """Show the stages of a plan, what they exchange, and the schedule."""
    num_ranks, number = len(pipeline.ranks), len(plan.stages)
    yield Text(
        f"Pipeline of {number} stages on {num_ranks} pipeline ranks, schedule {pipeline.schedule}, "
        f"{pipeline.micro_batches} micro-batches: ranks are idle for {pipeline.bubble:.1%} of a "
        f"step",
        style="bold",
    )
    yield _stages(plan, pipeline)
    yield _transfers(pipeline)
    for tied in pipeline.tied:
        held = ", ".join(map(str, tied.stages))
        yield Text(
            f"{tied.target} is held by stages {held}; summing its gradients takes "
            f"{milliseconds(tied.time)} per step"
        )


def _stages(plan: Plan, pipeline: Pipeline) -> Table:
    rank_of = {stage: rank for rank, held in enumerate(pipeline.ranks) for stage in held}
    table = make_table(
        "Stages: times per micro-batch, and at the end of the step; memory per device",
        ["first", "last", "stage", "rank", "devices"],
        ["forward", "backward", "end", "in flight", "memory"],
    )
    table.columns[1].no_wrap, table.columns[1].overflow = False, "fold"
    rows = zip(plan.stages, pipeline.stages, stage_modules(plan), strict=True)
    for number, (stage, summary, modules) in enumerate(rows):
        devices, times = stage_devices(stage), summary.times
        table.add_row(
            modules.first,
            modules.last,
            str(number),
            str(rank_of[number]),
            str(devices.start) if len(devices) == 1 else f"{devices.start}-{devices[-1]}",
            milliseconds(times.forward),
            milliseconds(times.backward_input + times.backward_weight),
            milliseconds(times.end),
            str(stage.in_flight),
            format_bytes(summary.memory.peak),
        )
    return table


def _transfers(pipeline: Pipeline) -> Table:
    """One row for each cut."""
    table = make_table(
        "Transfers per micro-batch; bytes of the rank that sends or receives the most",
        ["cut"],
        ["tensors", "messages", "bytes", "time", "gradient bytes", "time back"],
    )
    for cut, transfers in enumerate(pipeline.transfers):
        sender, receiver = (summary.times for summary in pipeline.stages[cut : cut + 2])
        table.add_row(
            f"{cut} to {cut + 1}",
            str(len(transfers)),
            str(sum(t.messages + t.gradient_messages for t in transfers)),
            format_bytes(sum(t.nbytes for t in transfers)),
            milliseconds(sender.send),
            format_bytes(sum(t.gradient_nbytes for t in transfers)),
            milliseconds(receiver.send_gradient),
        )
    return table


def render_schedule(pipeline: Pipeline, simulation: ScheduleSimulation) -> RenderableType:
    """Show the step of a pipeline: times and memory of its stages, and idle time of its ranks."""
    schedule = simulation.schedule
    stages = make_table(
        "Stages: times of a micro-batch, and of the end of the step",
        ["stage"],
        ["forward", "backward", "end", "in flight", "memory"],
    )
    for stage, (summary, times) in enumerate(zip(pipeline.stages, simulation.times, strict=True)):
        stages.add_row(
            f"{stage} on rank {schedule.rank_of_stage[stage]}",
            milliseconds(times.forward),
            milliseconds(times.backward_input + times.backward_weight),
            milliseconds(times.end),
            str(schedule.in_flight[stage]),
            format_bytes(summary.memory.peak),
        )
    ranks = make_table("Pipeline ranks", ["rank", "stages"], ["idle", "share of step"])
    for rank, held in enumerate(schedule.ranks):
        idle = float(simulation.idle[rank])
        share = share_text(idle, simulation.seconds)
        ranks.add_row(str(rank), ", ".join(map(str, held)), milliseconds(idle), share)
    return Group(
        Text(f"One step takes {milliseconds(simulation.seconds)}", style="bold"),
        Text(
            f"Schedule {schedule.name}, {schedule.micro_batches} micro-batches: ranks are idle for "
            f"{simulation.bubble:.1%} of the step"
        ),
        stages,
        ranks,
    )
