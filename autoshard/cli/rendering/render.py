"""Reports on plans, comparisons, searches, simulations, calibrations and profiles."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from autoshard.base.quantities import format_bytes, format_flops, format_rate, format_seconds
from autoshard.cli.rendering.wording import in_flags
from autoshard.client import MeshSearch, SearchedMesh
from autoshard.layouts import Notation, legend, text_words, texts_words
from autoshard.mesh import mesh_text
from autoshard.plan import Performance, Plan
from autoshard.plan.predictions import step_time
from autoshard.pricing import Simulation
from autoshard.report import Change, Coverage, Figure, PlanDifference
from autoshard.report.choices import Choice
from autoshard.report.parameter_rows import fold_changes
from autoshard.report.tables import Column, Report, Sentence, Table, Unit, milliseconds, share_of

if TYPE_CHECKING:  # they need torch, or the solver
    from autoshard.measure.calibration import Calibration
    from autoshard.measure.profiling import Profile
    from autoshard.planner import Explanation, OptimalityCheck

_PLAIN = ("pipeline", "settings")
"""Changes that are no layouts."""

_MAX_CHANGES = 40
_BOLD = "bold"


def explanation_report(
    explanation: "Explanation",
    performance: Performance | None,
    *,
    limit: int,
    notation: Notation = "dtensor",
) -> Report:
    """The alternatives of one choice, the cheapest first.

    Args:
        explanation: of the choice.
        performance: of the plan, if known.
        limit: maximum rows as text.
        notation: of layouts.
    """
    subject = f"{explanation.kind} {explanation.name}"
    if explanation.operator:
        subject += f": {explanation.operator} in {explanation.module or 'the root module'}"
    is_step = explanation.stage is None
    takes = "a step of the plan takes"
    if not is_step:
        takes = f"all micro-batches of stage {explanation.stage} take"
    error = performance.error_bar if is_step and performance is not None else ""
    table = Table(
        "alternatives",
        f"{subject}; {takes} {milliseconds(explanation.objective)}{error}",
        (
            Column("layouts"),
            Column("cost", Unit.SECONDS),
            Column("memory", Unit.BYTES),
            Column("regret"),
            Column("cost if changed alone", Unit.SECONDS),
        ),
        limit=limit,
    )
    layouts = [alternative.layouts for alternative in explanation.alternatives]
    words = texts_words(layouts, notation=notation)
    for alternative, shown in zip(explanation.alternatives, words, strict=True):
        regret = "impossible" if alternative.exact else "unknown"
        if alternative.regret is not None:
            regret = f"{'' if alternative.exact else '<= '}{milliseconds(alternative.regret)}"
        table.add(
            shown,
            alternative.time,
            alternative.memory,
            "chosen" if alternative.chosen else "; ".join(alternative.forbidden) or regret,
            alternative.override,
            bold=alternative.chosen,
        )
    return Report((table, *legend_lines(layouts, notation)))


def check_report(
    findings: Sequence[str], checks: "Sequence[OptimalityCheck]", *, as_text: bool
) -> Report:
    """The result of checking a plan.

    Args:
        findings: what is wrong; as text, they are printed as errors.
        checks: of its optimality; empty if that was not asked for.
        as_text: True for sentences, False for tables.
    """
    if as_text:
        valid = () if findings else (Sentence("the plan is valid; predicted cost verified"),)
        return Report.of(*valid, *(Sentence(check.statement) for check in checks))
    wrong = Table("findings", "", (Column("finding"),))
    for finding in findings:
        wrong.add(finding)
    if not checks:
        return Report.of(wrong)
    columns = (
        *(Column("stage", Unit.COUNT), Column("solver"), Column("whole problem")),
        *(Column("columns", Unit.COUNT), Column("objective", Unit.SECONDS)),
        *(Column("certificate bound", Unit.SECONDS), Column("found", Unit.SECONDS)),
        *(Column("bound", Unit.SECONDS), Column("confirmed"), Column("statement")),
    )
    table = Table("optimality", "", columns)
    for check in checks:
        table.add(
            *(check.stage, check.solver, check.is_whole, check.size.columns, check.objective),
            *(check.certified, check.found, check.bound, check.is_confirmed, check.statement),
        )
    return Report.of(wrong, table)


def choices_report(
    name: str, choices: Sequence[Choice], *, limit: int, notation: Notation = "dtensor"
) -> Report:
    """The choices that a module path or a pattern stands for, the slowest first."""
    columns = [Column("name", Unit.NAME), Column("kind"), Column("module", Unit.NAME)]
    columns += [Column("layouts"), Column("compute", Unit.SECONDS)]
    title = f"{name} stands for {len(choices)} choices"
    table = Table("choices", title, tuple(columns), limit=limit)
    for choice in sorted(choices, key=lambda choice: -choice.time):
        kind = choice.operator.removeprefix("aten.") or choice.kind
        layouts = text_words(choice.layouts, notation=notation)
        time = choice.time if choice.operator else None
        table.add(choice.name, kind, choice.module, layouts, time)
    texts = [choice.layouts for choice in choices]
    last = Sentence("Explain one of them by its name.")
    return Report((table, *legend_lines(texts, notation), last))


def difference_report(difference: PlanDifference, *, notation: Notation = "dtensor") -> Report:
    """The differences between two plans; equal changes of all layers are one row."""
    before, after = difference.meshes
    settings = [
        _changes("settings", "Made for other devices or options", difference.settings, notation)
        for _ in difference.settings[:1]
    ]
    if difference.is_empty:
        return Report.of(*settings, Sentence("the plans are the same", _BOLD))
    parts: list[Table | Sentence] = [
        *settings,
        Sentence(f"before: {before}; after: {after}", _BOLD),
    ]
    parts += [
        Sentence(f"{which}: {step_time(seconds, performance)}, {', '.join(performance.rates)}")
        for which, seconds, performance in zip(
            ("before", "after"), _totals(difference), difference.performance, strict=True
        )
        if performance is not None
    ]
    for key, title, changes in (
        ("pipeline", "Parts of the pipeline that differ", difference.pipeline),
        ("inputs", "Inputs and parameters that differ", difference.inputs),
        ("nodes", "Operators that differ", difference.nodes),
        ("outputs", "Outputs that differ", difference.outputs),
    ):
        if changes:
            parts.append(_changes(key, title, changes, notation))
    if difference.collectives:
        parts.append(_collective_changes(difference))
    parts.append(_figures("costs", "Predicted time of a step", difference.costs, Unit.SECONDS))
    title = "Memory per device at the peak"
    parts.append(_figures("memory", title, difference.memory, Unit.BYTES))
    changed = (*difference.inputs, *difference.nodes, *difference.outputs)
    texts = [text for change in changed for text in (change.before, change.after)]
    return Report((*parts, *legend_lines(texts, notation)))


def _totals(difference: PlanDifference) -> tuple[float, float]:
    """Seconds of a step of both plans."""
    total = next(figure for figure in difference.costs if figure.name == "total")
    return total.before, total.after


def search_report(search: MeshSearch, plans: Sequence[Plan | None]) -> Report:
    """The meshes of a search, best first.

    Args:
        search: its meshes.
        plans: the plan of each mesh; None if it was not stored.
    """
    kinds = ["total", "compute", "communication"]
    if any(plan is not None and plan.costs and plan.costs.overlapped for plan in plans):
        kinds.append("overlapped")
    has_pipelines = any(plan is not None and plan.pipeline is not None for plan in plans)
    kinds += ["idle"] * has_pipelines
    times = [Column(kind, Unit.SECONDS) for kind in kinds]
    columns = [Column("mesh"), *times, Column("memory", Unit.BYTES), Column("certificate")]
    columns += [Column("pipeline")] * has_pipelines
    rates = [n for n in _RATES if any(n in _rates(mesh.performance) for mesh in search.meshes)]
    columns[2:2] = [_RATES[name] for name in rates]
    table = Table("meshes", "Meshes, best first", tuple(columns))
    reasons: list[Sentence] = []
    for mesh, plan in zip(search.meshes, plans, strict=True):
        name, pipeline = mesh_text(mesh.mesh), [_pipeline(plan)] * has_pipelines
        if plan is None or plan.costs is None or plan.memory is None:
            reason = _no_plan_reason(mesh) if plan is None else plan.reason
            missing = [None] * (len(kinds) + len(rates) + 1)
            table.add(name, *missing, "no plan", *pipeline)
            reasons.append(Sentence(f"{name}: {in_flags(reason)}", "red"))
            continue
        gap = plan.certificate.gap
        within = "no bound" if gap is None else f"gap {gap:.2%}"
        certificate = f"{plan.certificate.status}, {within}"
        total, *seconds = (getattr(plan.costs, kind) for kind in kinds)
        figures = total, *map(_rates(mesh.performance).get, rates), *seconds, plan.memory.peak
        table.add(name, *figures, certificate, *pipeline)
    reasons += [Sentence(search.statement)] * bool(search.statement)
    compared = dict.fromkeys(m.performance.comparison for m in search.meshes if m.performance)
    return Report((table, *reasons, *(Sentence(f"Predicted times: {text}.") for text in compared)))


def coverage_report(coverage: Coverage) -> Report:
    """The operators of a graph, replicated ones first, and their cost under a plan."""
    total = coverage.total
    columns = [Column("operator", Unit.NAME), Column("rule")]
    columns += [Column("calls", Unit.COUNT), Column("replicated", Unit.COUNT)]
    if total is not None:
        columns += [Column(name, Unit.SHARE) for name in ("time", "time replicated", "resharding")]
    title = f"{len(coverage.operators)} operators, {coverage.num_calls} calls"
    table = Table("operators", title, tuple(columns))
    for use in coverage.operators:
        times = () if total is None else (use.time, use.time_whole, use.time_around)
        table.add(
            use.operator.removeprefix("aten."),
            "yes" if use.has_rule else "found" if use.found_rule else "none",
            use.num_calls,
            use.num_whole,
            *(share_of(time or 0.0, total or 0.0) for time in times),
            bold=not (use.has_rule or use.found_rule),
        )
    text = f"{coverage.num_whole} of {coverage.num_calls} calls are replicated on every rank"
    if total is not None and coverage.share_whole is not None and coverage.share_around is not None:
        text += (
            f": {coverage.share_whole:.2%} of a step of {milliseconds(total)}, and "
            f"{coverage.share_around:.2%} for resharding their inputs and outputs"
        )
    reasons = (f"{use.operator}: {' '.join(use.reasons)}" for use in coverage.operators)
    return Report(
        (table, Sentence(text, _BOLD), *(Sentence(r) for r in reasons if not r.endswith(": ")))
    )


def simulation_report(simulation: Simulation, *, limit: int) -> Report:
    """The time of a step by lane, phase and operation, and the peak of memory.

    Args:
        simulation: of the step.
        limit: maximum rows of the longest operations.
    """
    moment = simulation.memory.peak_moment
    phase, name = simulation.memory.moments[moment]
    start = simulation.moments[simulation.numbers == moment][-1]
    peak = (
        f"Memory peaks at {format_bytes(simulation.memory.peak)}, "
        f"{milliseconds(float(start))} into the step "
        f"({f'{phase} of {name}' if name else phase.value})"
    )
    return Report.of(
        Sentence(f"One step takes {milliseconds(simulation.seconds)}", _BOLD),
        _lanes(simulation),
        _phases(simulation),
        _longest(simulation, limit),
        Sentence(peak, _BOLD),
    )


def calibration_report(calibration: "Calibration") -> Report:
    """The measured device, and the error on collectives that were not used in the fit."""
    topology = calibration.topology
    device = topology.device
    peaks = ", ".join(
        f"{format_flops(flops)} {dtype}" for dtype, flops in device.peak_flops.items()
    )
    columns = (
        Column("axis"),
        Column("collective"),
        Column("size", Unit.BYTES),
        Column("measured", Unit.SECONDS),
        Column("predicted", Unit.SECONDS),
        Column("error", Unit.SHARE),
    )
    table = Table("collectives", "Collectives not used in the fit", columns)
    for comparison in calibration.comparisons:
        sample = comparison.sample
        sizes = sample.nbytes, sample.seconds, comparison.predicted
        table.add(comparison.axis, sample.action, *sizes, comparison.error)
    about = (
        f"{device.name}: {peaks}, memory bandwidth "
        f"{format_rate(device.memory_bandwidth)}, {format_seconds(device.launch_overhead)} "
        f"launch overhead per operator"
    )
    return Report(
        (
            Sentence(f"{topology.name}: {topology.source}", _BOLD),
            Sentence(about),
            *map(Sentence, _calibration_remarks(calibration)),
            *([table] if calibration.comparisons else []),
        )
    )


def _calibration_remarks(calibration: "Calibration") -> Iterator[str]:
    if calibration.num_kept:
        yield f"{calibration.num_kept} measurements are of an interrupted calibration"
    if calibration.comparisons:
        yield (
            f"next to compute, a collective takes {format_seconds(calibration.skew)} more, because "
            f"ranks wait for the slowest one"
        )
    if calibration.remarks:
        yield "other work has disturbed the measurements: calibrate again, or use --busy"


def profile_report(profile: "Profile", *, limit: int) -> Report:
    """Predicted and measured times of a step's operations, at most `limit` rows as text."""
    columns = (
        Column("operation", Unit.NAME),
        Column("lane"),
        Column("predicted", Unit.SECONDS),
        Column("measured", Unit.SECONDS),
        Column("measured/predicted", Unit.RATIO),
    )
    title = "Operations of a step, each measured by itself"
    table = Table("operations", title, columns, limit=limit)
    for row in profile.rows():
        times = row.predicted, row.measured
        table.add(row.name.removeprefix("aten."), row.lane, *times, share_of(times[1], times[0]))
    header = (
        f"One step takes {format_seconds(profile.seconds)}, predicted "
        f"{format_seconds(profile.predicted)}"
    )
    if profile.predicted:
        header += f": {profile.seconds / profile.predicted:.2f} times as long"
    return Report.of(Sentence(header, _BOLD), table)


def legend_lines(texts: Sequence[str], notation: Notation) -> list[Sentence]:
    """The legend of the short notation; nothing for words."""
    return [Sentence(legend(texts))] if notation == "short" and legend(texts) else []


def _pipeline(plan: Plan | None) -> str:
    if plan is None or plan.pipeline is None:
        return "one stage"
    return f"{len(plan.stages)} stages, {plan.pipeline.schedule}"


_RATES: Mapping[str, Column] = {
    "error": Column("error", Unit.SHARE),
    "tokens_per_second": Column("tokens/s", Unit.COUNT),
    "samples_per_second": Column("samples/s", Unit.RATIO),
    "mfu": Column("MFU", Unit.SHARE),
}
"""Columns of `Performance`."""


def _rates(performance: Performance | None) -> dict[str, float]:
    """The figures of a performance that exist; samples only without tokens."""
    found = {} if performance is None else performance.model_dump(include=set(_RATES))
    if found.get("tokens_per_second") is not None:
        found |= {
            "samples_per_second": None,
            "tokens_per_second": round(found["tokens_per_second"]),
        }
    return {name: figure for name, figure in found.items() if figure is not None}


def _no_plan_reason(mesh: SearchedMesh) -> str:
    if mesh.certificate is None:
        return mesh.error
    sizes = ",".join(map(str, mesh.mesh.axis_sizes))
    return f"{mesh.certificate.status}, and no plan was stored: run plan --mesh {sizes}"


def _changes(key: str, title: str, changes: Sequence[Change], notation: Notation) -> Table:
    columns = Column("name", Unit.NAME), Column("count", Unit.COUNT), Column("before")
    table = Table(key, f"{title}: {len(changes)}", (*columns, Column("after")), limit=_MAX_CHANGES)
    for row in fold_changes(changes):
        texts = row.before, row.after
        words = texts_words(texts, notation=notation) if key not in _PLAIN else list(texts)
        table.add(row.name, row.count, *words)
    return table


def _collective_changes(difference: PlanDifference) -> Table:
    table = Table(
        "collectives",
        "Collectives per step that differ",
        (
            *(Column(name) for name in ("collective", "axis", "direction")),
            Column("before", Unit.COUNT),
            Column("after", Unit.COUNT),
            Column("bytes before", Unit.BYTES),
            Column("bytes after", Unit.BYTES),
        ),
    )
    for row in difference.collectives:
        counts, sizes = (row.before, row.after), (row.bytes_before, row.bytes_after)
        table.add(row.kind, row.axis, row.direction, *counts, *sizes)
    return table


def _figures(key: str, title: str, figures: Sequence[Figure], unit: Unit) -> Table:
    names = ("before", "after", "difference")
    table = Table(key, title, (Column("kind"), *(Column(name, unit) for name in names)))
    for figure in figures:
        table.add(figure.name, figure.before, figure.after, figure.difference)
    return table


def _lanes(simulation: Simulation) -> Table:
    columns = (
        Column("lane"),
        Column("events", Unit.COUNT),
        Column("busy", Unit.SECONDS),
        Column("share of step", Unit.SHARE),
        Column("overlapped", Unit.SECONDS),
    )
    table = Table("lanes", "Lanes", columns)
    for lane in simulation.lanes:
        events = [event for event in simulation.events if event.lane == lane]
        busy = sum(event.seconds for event in events)
        overlapped = sum(event.seconds for event in events if event.overlapped)
        table.add(lane, len(events), busy, share_of(busy, simulation.seconds), overlapped)
    return table


def _phases(simulation: Simulation) -> Table:
    times = Column("compute", Unit.SECONDS), Column("communication", Unit.SECONDS)
    table = Table("phases", "Phases of the step", (Column("phase"), *times))
    for phase in dict.fromkeys(event.phase for event in simulation.events):
        events = [event for event in simulation.events if event.phase is phase]
        compute = sum(event.seconds for event in events if event.axis is None)
        communication = sum(event.seconds for event in events if event.axis is not None)
        table.add(phase.value, compute, communication)
    return table


def _longest(simulation: Simulation, limit: int) -> Table:
    columns = (
        Column("operation", Unit.NAME),
        Column("lane"),
        Column("count", Unit.COUNT),
        Column("time", Unit.SECONDS),
        Column("share of step", Unit.SHARE),
    )
    table = Table("operations", "Longest operations", columns, limit=limit)
    found: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for event in simulation.events:
        found[event.name, event.lane].append(event.seconds)
    for (name, lane), times in sorted(found.items(), key=lambda item: -sum(item[1])):
        seconds = sum(times)
        share = share_of(seconds, simulation.seconds)
        table.add(name.removeprefix("aten."), lane, len(times), seconds, share)
    return table
