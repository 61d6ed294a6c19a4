"""Plans, comparisons, searches, simulations, calibrations and profiles as tables on a terminal."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.cli.render_pipeline import render_stages
from autoshard.cli.tables import make_table, milliseconds, share_text
from autoshard.cli.wording import in_flags
from autoshard.client import MeshSearch, SearchedMesh
from autoshard.costs import GATHERED_ONCE, Frequency
from autoshard.plan import (
    Change,
    Costs,
    Coverage,
    Figure,
    Memory,
    Plan,
    PlanDifference,
    Simulation,
    fold_parameters,
    mesh_text,
)
from autoshard.plan.choices import Choice
from autoshard.plan.timeline import KINDS
from autoshard.planner import Explanation
from autoshard.quantities import format_bytes, format_flops, format_seconds

if TYPE_CHECKING:  # they need torch
    from autoshard.runtime.calibration import Calibration
    from autoshard.runtime.profiling import Profile

_MAX_CHANGES = 40


def render_plan(plan: Plan) -> RenderableType:
    """Show a plan: parameters, collectives, cost, memory and certificate."""
    header = _bold(
        f"Plan {plan.id[:12]}: {plan.graph.num_nodes} operators, "
        f"{plan.graph.num_parameters:,} parameters on {mesh_text(plan.mesh)} "
        f"({plan.mesh.topology.name}), {plan.options.mode}"
    )
    if not plan.found:
        return Group(header, Text(in_flags(plan.reason), style="bold red"))
    assert plan.costs is not None
    assert plan.memory is not None
    return Group(
        header,
        *(() if plan.pipeline is None else render_stages(plan, plan.pipeline)),
        _parameters(plan),
        _collectives(plan),
        _costs(plan.costs),
        _memory(plan.memory),
        *_recomputation(plan, plan.costs),
        *_micro_batches(plan),
        *(Text(text, style="bold yellow") for text in _idle_axes(plan)),
        _bold(f"Certificate: {plan.certificate_statement}"),
    )


def render_explanation(explanation: Explanation, *, limit: int) -> RenderableType:
    """Show the alternatives of one choice, the cheapest first."""
    subject = f"{explanation.kind} {explanation.name}"
    if explanation.operator:
        subject += f": {explanation.operator} in {explanation.module or 'the root module'}"
    takes = "a step of the plan takes"
    if explanation.stage is not None:
        takes = f"all micro-batches of stage {explanation.stage} take"
    table = make_table(
        f"{subject}; {takes} {milliseconds(explanation.objective)}",
        ["layouts"],
        ["cost", "memory", "regret", "cost if changed alone"],
    )
    for alternative in explanation.alternatives[:limit]:
        regret = "impossible" if alternative.exact else "unknown"
        if alternative.regret is not None:
            regret = f"{'' if alternative.exact else '<= '}{milliseconds(alternative.regret)}"
        table.add_row(
            alternative.layouts,
            "forbidden" if alternative.time is None else milliseconds(alternative.time),
            format_bytes(alternative.memory),
            "chosen" if alternative.chosen else "; ".join(alternative.forbidden) or regret,
            "-" if alternative.override is None else milliseconds(alternative.override),
            style="bold" if alternative.chosen else None,
        )
    left = len(explanation.alternatives) - limit
    return Group(table, Text(f"and {left} more")) if left > 0 else table


def render_choices(name: str, choices: Sequence[Choice], *, limit: int) -> RenderableType:
    """Show the choices that a module path or a pattern stands for, the slowest first."""
    labels = ["name", "kind", "module", "layouts"]
    table = make_table(f"{name} stands for {len(choices)} choices", labels, ["compute"])
    slowest = sorted(choices, key=lambda choice: -choice.time)
    for choice in slowest[:limit]:
        kind = choice.operator.removeprefix("aten.") or choice.kind
        time = milliseconds(choice.time) if choice.operator else ""
        table.add_row(choice.name, kind, choice.module, choice.layouts, time)
    left = len(choices) - limit
    more = [Text(f"and {left} more; raise --limit")] if left > 0 else []
    return Group(table, *more, Text("Explain one of them by its name."))


def render_difference(difference: PlanDifference) -> RenderableType:
    """Show the differences between two plans."""
    before, after = difference.meshes
    if difference.is_empty:
        return _bold("the plans are the same")
    parts: list[RenderableType] = [_bold(f"before: {before}; after: {after}")]
    for title, changes in (
        ("Parts of the pipeline", difference.pipeline),
        ("Inputs and parameters", difference.inputs),
        ("Operators", difference.nodes),
        ("Outputs", difference.outputs),
    ):
        if changes:
            parts.append(_changes(title, changes))
    if difference.collectives:
        table = make_table(
            "Collectives per step that differ",
            ["collective", "axis", "direction"],
            ["before", "after", "bytes before", "bytes after"],
        )
        for row in difference.collectives:
            sizes = format_bytes(row.bytes_before), format_bytes(row.bytes_after)
            counts = str(row.before), str(row.after)
            table.add_row(row.kind, row.axis, row.direction, *counts, *sizes)
        parts.append(table)
    parts.append(_figures("Predicted time of a step", difference.costs, milliseconds))
    parts.append(_figures("Memory per device at the peak", difference.memory, format_bytes))
    return Group(*parts)


def render_search(search: MeshSearch, plans: Sequence[Plan | None]) -> RenderableType:
    """Show the meshes of a search, best first.

    Args:
        search: its meshes.
        plans: the plan of each mesh; None if it was not stored.
    """
    kinds = ["total", "compute", "communication"]
    if any(plan is not None and plan.options.overlap for plan in plans):
        kinds.append("overlapped")
    has_pipelines = any(plan is not None and plan.pipeline is not None for plan in plans)
    if has_pipelines:
        kinds.append("idle")
    table = make_table("Meshes, best first", ["mesh"], [*kinds, "memory"])
    table.add_column("certificate")
    if has_pipelines:
        table.add_column("pipeline")
    for mesh, plan in zip(search.meshes, plans, strict=True):
        name = mesh_text(mesh.mesh)
        if plan is None or plan.costs is None or plan.memory is None:
            reason = _no_plan_reason(mesh) if plan is None else plan.reason
            table.add_row(name, *[""] * (len(kinds) + 1), Text(reason, style="red"))
            continue
        gap = plan.certificate.gap
        table.add_row(
            name,
            *(milliseconds(getattr(plan.costs, kind)) for kind in kinds),
            format_bytes(plan.memory.peak),
            f"{plan.certificate.status}, {'no bound' if gap is None else f'gap {gap:.2%}'}",
            *([_pipeline(plan)] if has_pipelines else []),
        )
    return table


def _pipeline(plan: Plan) -> str:
    if plan.pipeline is None:
        return "one stage"
    return f"{len(plan.stages)} stages, {plan.pipeline.schedule}"


def render_coverage(coverage: Coverage) -> RenderableType:
    """Show the operators of a graph, replicated ones first, and their cost under a plan."""
    total = coverage.total
    figures = ["calls", "replicated"]
    if total is not None:
        figures += ["time", "time replicated", "resharding"]
    title = f"{len(coverage.operators)} operators, {coverage.num_calls} calls"
    table = make_table(title, ["operator", "rule"], figures)
    table.columns[0].min_width = 24
    for use in coverage.operators:
        times = () if total is None else (use.time, use.time_whole, use.time_around)
        table.add_row(
            use.operator.removeprefix("aten."),
            "yes" if use.has_rule else "found" if use.found_rule else "none",
            str(use.num_calls),
            str(use.num_whole),
            *(share_text(time or 0.0, total or 0.0, digits=2) for time in times),
            style=None if use.has_rule or use.found_rule else "bold",
        )
    text = f"{coverage.num_whole} of {coverage.num_calls} calls are replicated on every rank"
    if total is not None and coverage.share_whole is not None and coverage.share_around is not None:
        text += (
            f": {coverage.share_whole:.2%} of a step of {milliseconds(total)}, and "
            f"{coverage.share_around:.2%} for resharding their inputs and outputs"
        )
    reasons = (f"{use.operator}: {' '.join(use.reasons)}" for use in coverage.operators)
    return Group(table, _bold(text), *(Text(r) for r in reasons if not r.endswith(": ")))


def render_simulation(simulation: Simulation, *, limit: int) -> RenderableType:
    """Show the time of a step by lane, phase and operation, and the peak of memory.

    Args:
        simulation: of the step.
        limit: maximum rows of the longest operations.
    """
    moment = simulation.memory.peak_moment
    phase, name = simulation.memory.moments[moment]
    start = simulation.moments[simulation.numbers == moment][-1]
    return Group(
        _bold(f"One step takes {milliseconds(simulation.seconds)}"),
        _lanes(simulation),
        _phases(simulation),
        _longest(simulation, limit),
        _bold(
            f"Memory peaks at {format_bytes(simulation.memory.peak)}, "
            f"{milliseconds(float(start))} into the step "
            f"({f'{phase} of {name}' if name else phase.value})"
        ),
    )


def render_calibration(calibration: "Calibration") -> RenderableType:
    """Show the measured device, and the error on collectives that were not used in the fit."""
    topology = calibration.topology
    device = topology.device
    peaks = ", ".join(
        f"{format_flops(flops)} {dtype}" for dtype, flops in device.peak_flops.items()
    )
    table = make_table(
        "Collectives not used in the fit",
        ["axis", "collective"],
        ["bytes", "measured", "predicted", "error"],
    )
    for comparison in calibration.comparisons:
        sample = comparison.sample
        table.add_row(
            comparison.axis,
            sample.action,
            format_bytes(sample.nbytes),
            milliseconds(sample.seconds),
            milliseconds(comparison.predicted),
            f"{comparison.error:+.0%}",
        )
    return Group(
        _bold(f"{topology.name}: {topology.source}"),
        Text(
            f"{device.name}: {peaks}, memory bandwidth "
            f"{format_bytes(device.memory_bandwidth)}/s, {format_seconds(device.launch_overhead)} "
            f"launch overhead per operator"
        ),
        *(Text(text) for text in _remarks_of(calibration)),
        *([table] if calibration.comparisons else []),
    )


def _remarks_of(calibration: "Calibration") -> Iterator[str]:
    if calibration.num_kept:
        yield f"{calibration.num_kept} measurements are of an interrupted calibration"
    if calibration.comparisons:
        yield (
            f"next to compute, a collective takes {format_seconds(calibration.skew)} more, because "
            f"ranks wait for the slowest one"
        )
    if calibration.remarks:
        yield "other work has disturbed the measurements: calibrate again, or use --busy"


def render_profile(profile: "Profile", *, limit: int) -> RenderableType:
    """Show predicted and measured times of a step's operations, at most `limit` rows."""
    table = make_table(
        "Operations of a step, each measured by itself",
        ["operation", "lane"],
        ["predicted", "measured", "measured/predicted"],
    )
    rows = profile.rows()
    for row in rows[:limit]:
        name = row.name.removeprefix("aten.")
        table.add_row(name, row.lane, *_predicted_measured(row.predicted, row.measured))
    left = rows[limit:]
    if left:
        sums = sum(row.predicted for row in left), sum(row.measured for row in left)
        table.add_row(f"{len(left)} more", "", *_predicted_measured(*sums))
    predicted, measured, ratio = _predicted_measured(profile.predicted, profile.seconds)
    header = f"One step takes {measured}, predicted {predicted}: {ratio} times as long"
    return Group(_bold(header), table)


def _bold(text: str) -> Text:
    return Text(text, style="bold")


def _parameters(plan: Plan) -> Table:
    axes = {tuple(name for name, _ in stage.axes) for stage in plan.stages}
    names = ", ".join(next(iter(axes))) if len(axes) == 1 else "the axes of its stage"
    table = make_table(
        "Parameters: I = Replicate (gradient all-reduced), R = Replicate, S(d) = Shard(d), "
        "S(d)/1+1+1 = Shard(d), interleaved (fused QKV)",
        ["parameter", "shape", "per rank", f"over {names}"],
        ["count"],
    )
    for row in fold_parameters(plan):
        shapes = _shape(row.shape), _shape(row.local_shape)
        table.add_row(row.name, *shapes, row.layout.replace(",", ", "), str(row.count))
    return table


def _collectives(plan: Plan) -> Table:
    labels, figures = ["collective", "axis", "direction"], ["count", "bytes"]
    table = make_table("Collectives per step", labels, figures)
    for row in plan.collectives:
        table.add_row(row.kind, row.axis, row.direction, str(row.count), format_bytes(row.nbytes))
    if not plan.collectives:
        table.add_row("none", "", "", "0", "0 B")
    return table


def _costs(costs: Costs) -> Table:
    kinds = ("compute", "communication", "optimizer")
    figures = {kind: milliseconds(getattr(costs, kind)) for kind in kinds}
    if costs.recompute:
        figures["recompute"] = milliseconds(costs.recompute)
    if costs.overlapped:
        figures["overlapped"] = f"-{milliseconds(costs.overlapped)}"
    if costs.idle:
        figures["waiting"] = milliseconds(costs.idle)
    figures["total"] = milliseconds(costs.total)
    table = make_table("Predicted time of a step", list(figures))
    table.add_row(*figures.values())
    return table


def _memory(memory: Memory) -> Table:
    where = f"{memory.phase} of {memory.at}" if memory.at else memory.phase
    title = f"Predicted memory per device at the peak ({where})"
    table = make_table(title, ["kind"], ["bytes"])
    for kind in (*KINDS, "peak"):
        table.add_row(kind, format_bytes(getattr(memory, kind)))
    table.add_row("budget", "none" if memory.budget is None else format_bytes(memory.budget))
    return table


def _recomputation(plan: Plan, costs: Costs) -> Iterator[Text]:
    """List activation checkpointing and re-gathering in backward, if the plan has any."""
    num_blocks = sum(len(stage.checkpoints) for stage in plan.stages)
    moved = [resharding for stage in plan.stages for resharding in stage.reshardings]
    regathers = [resharding for resharding in moved if resharding.regather]
    if regathers or num_blocks:
        parameters = {parameter.name for stage in plan.stages for parameter in stage.parameters}
        num_parameters = sum(resharding.value in parameters for resharding in regathers)
        yield _bold(
            f"Activation checkpointing on {num_blocks} blocks to fit memory; backward "
            f"re-gathers {num_parameters} parameters and {len(regathers) - num_parameters} "
            f"activations: {milliseconds(costs.recompute)}"
        )


def _micro_batches(plan: Plan) -> Iterator[Text]:
    """Say which communication of parameters runs once per step, if there are micro-batches."""
    number = plan.stages[0].micro_batches
    if number == 1:
        return
    parameters = {parameter.name for stage in plan.stages for parameter in stage.parameters}
    moved = [c for stage in plan.stages for c in stage.reshardings if c.value in parameters]
    gathered = {c.value for c in moved if c.frequency in GATHERED_ONCE}
    reduced = {c.value for c in moved if c.frequency is Frequency.STEP}
    yield _bold(
        f"{number} micro-batches per step: {len(gathered)} of {len(parameters)} "
        f"parameters are gathered once per step, and the gradients of {len(reduced)} of them are "
        f"reduced once"
    )


def _idle_axes(plan: Plan) -> Iterator[str]:
    for number, stage in enumerate(plan.stages):
        if text := stage.idle_text:
            yield text if plan.pipeline is None else f"stage {number}: {text}"


def _no_plan_reason(mesh: SearchedMesh) -> str:
    if mesh.certificate is None:
        return mesh.error
    sizes = ",".join(map(str, mesh.mesh.axis_sizes))
    return f"{mesh.certificate.status}, and no plan was stored: run plan --mesh {sizes}"


def _changes(title: str, changes: Sequence[Change]) -> Table:
    table = make_table(f"{title} that differ: {len(changes)}", ["name"])
    for side in ("before", "after"):
        table.add_column(side, style="green", overflow="fold")
    for change in changes[:_MAX_CHANGES]:
        table.add_row(change.name, change.before, change.after)
    left = len(changes) - _MAX_CHANGES
    if left > 0:
        table.add_row(f"and {left} more", "", "")
    return table


def _figures(title: str, figures: Sequence[Figure], text: Callable[[float], str]) -> Table:
    table = make_table(title, ["kind"], ["before", "after", "difference"])
    for figure in figures:
        sign = "-" if figure.difference < 0 else "+"
        change = f"{sign}{text(abs(figure.difference))}" if figure.difference else "0"
        table.add_row(figure.name, text(figure.before), text(figure.after), change)
    return table


def _lanes(simulation: Simulation) -> Table:
    table = make_table("Lanes", ["lane"], ["events", "busy", "share of step", "overlapped"])
    for lane in simulation.lanes:
        events = [event for event in simulation.events if event.lane == lane]
        busy = sum(event.seconds for event in events)
        overlapped = sum(event.seconds for event in events if event.overlapped)
        share = share_text(busy, simulation.seconds)
        table.add_row(lane, str(len(events)), milliseconds(busy), share, milliseconds(overlapped))
    return table


def _phases(simulation: Simulation) -> Table:
    table = make_table("Phases of the step", ["phase"], ["compute", "communication"])
    for phase in dict.fromkeys(event.phase for event in simulation.events):
        events = [event for event in simulation.events if event.phase is phase]
        compute = sum(event.seconds for event in events if event.axis is None)
        communication = sum(event.seconds for event in events if event.axis is not None)
        table.add_row(phase.value, milliseconds(compute), milliseconds(communication))
    return table


def _longest(simulation: Simulation, limit: int) -> Table:
    labels, figures = ["operation", "lane"], ["count", "time", "share of step"]
    table = make_table("Longest operations", labels, figures)
    found: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for event in simulation.events:
        found[event.name, event.lane].append(event.seconds)
    longest = sorted(found.items(), key=lambda item: -sum(item[1]))
    for (name, lane), times in longest[:limit]:
        seconds = sum(times)
        share = share_text(seconds, simulation.seconds)
        count = str(len(times))
        table.add_row(name.removeprefix("aten."), lane, count, milliseconds(seconds), share)
    return table


def _predicted_measured(predicted: float, measured: float) -> tuple[str, str, str]:
    ratio = f"{measured / predicted:.2f}" if predicted else "-"
    return format_seconds(predicted), format_seconds(measured), ratio


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
