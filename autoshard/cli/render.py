"""Plans and progress as tables on a terminal."""

from collections.abc import Callable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.plan import (
    Certificate,
    Change,
    Costs,
    Coverage,
    Figure,
    Memory,
    Plan,
    PlanDifference,
    fold_parameters,
    mesh_text,
)
from autoshard.plan.memory.timeline import KINDS
from autoshard.planner import Candidate, Explanation

_MILLISECONDS = 1e3
_MOST_CHANGES = 40
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def render_plan(plan: Plan) -> RenderableType:
    """Everything that a person wants to see of a plan."""
    header = _header(plan)
    if not plan.found:
        return Group(header, Text(plan.reason, style="bold red"))
    assert plan.costs is not None
    assert plan.memory is not None
    return Group(
        header,
        _parameters(plan),
        _collectives(plan),
        _costs(plan.costs),
        _memory(plan.memory),
        *_recomputing(plan),
        _certificate(plan.certificate),
    )


def render_explanation(explanation: Explanation, *, most: int = 20) -> RenderableType:
    """Every alternative of one choice, the cheapest first; at most so many of them."""
    what = f"{explanation.kind} {explanation.name}"
    if explanation.operator:
        what += f": {explanation.operator} in {explanation.module or 'the root module'}"
    table = titled_table(f"{what}; the plan takes {milliseconds(explanation.objective)}")
    table.add_column("layouts", style="green", overflow="fold")
    for title in ("own time", "own memory", "regret", "override alone"):
        table.add_column(title, justify="right", no_wrap=True)
    for alternative in explanation.alternatives[:most]:
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
    hidden = len(explanation.alternatives) - most
    note = Text(f"and {hidden} more" if hidden > 0 else "")
    return Group(table, note) if hidden > 0 else table


def render_difference(difference: PlanDifference) -> RenderableType:
    """What distinguishes two plans."""
    before, after = difference.meshes
    if difference.is_empty:
        return Text("the plans are the same", style="bold")
    parts: list[RenderableType] = [Text(f"before: {before}; after: {after}", style="bold")]
    parts.extend(
        _changes(title, changes)
        for title, changes in (
            ("Inputs and parameters", difference.inputs),
            ("Operators", difference.nodes),
            ("Outputs", difference.outputs),
        )
        if changes
    )
    if difference.collectives:
        parts.append(_collective_changes(difference))
    parts.append(_figures("Predicted time of a step", difference.costs, milliseconds))
    parts.append(_figures("Memory per device at the peak", difference.memory, format_bytes))
    return Group(*parts)


def render_candidates(candidates: Sequence[Candidate]) -> RenderableType:
    """Meshes, best first, with what the plan on each of them takes."""
    table = titled_table("Meshes, best first")
    table.add_column("mesh", style="cyan", no_wrap=True)
    kinds = ["total", "compute", "communication"]
    if any(candidate.plan and candidate.plan.options.overlap for candidate in candidates):
        kinds.append("overlapped")
    for title in (*kinds, "memory"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("certificate")
    for candidate in candidates:
        mesh = mesh_text(candidate.mesh)
        plan = candidate.plan
        if plan is None or plan.costs is None or plan.memory is None:
            reason = candidate.error if plan is None else plan.reason
            table.add_row(mesh, *[""] * (len(kinds) + 1), Text(reason, style="red"))
            continue
        gap = plan.certificate.gap
        proven = "nothing proven" if gap is None else f"gap {gap:.2%}"
        table.add_row(
            mesh,
            *(milliseconds(getattr(plan.costs, kind)) for kind in kinds),
            format_bytes(plan.memory.peak),
            f"{plan.certificate.status}, {proven}",
        )
    return table


def render_coverage(coverage: Coverage) -> RenderableType:
    """The operators of a graph, those first that run whole, and what that costs."""
    total = coverage.total
    table = titled_table(f"{len(coverage.operators)} operators, {coverage.num_calls} calls")
    table.add_column("operator", style="cyan", overflow="fold", min_width=24)
    table.add_column("rule", no_wrap=True)
    titles = (
        ("calls", "whole") if total is None else ("calls", "whole", "time", "in whole", "around")
    )
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for use in coverage.operators:
        times = () if total is None else (use.time, use.time_whole, use.time_around)
        table.add_row(
            use.operator.removeprefix("aten."),
            "yes" if use.has_rule else "found" if use.found_rule else "none",
            str(use.num_calls),
            str(use.num_whole),
            *(f"{(time or 0.0) / total:.2%}" if total else "-" for time in times),
            style=None if use.has_rule or use.found_rule else "bold",
        )
    reasons = (f"{use.operator}: {' '.join(use.reasons)}" for use in coverage.operators)
    whole = [Text(reason) for reason in reasons if not reason.endswith(": ")]
    return Group(table, Text(_coverage_text(coverage), style="bold"), *whole)


def _coverage_text(coverage: Coverage) -> str:
    text = f"{coverage.num_whole} of {coverage.num_calls} calls run whole on every rank"
    if coverage.total is None or coverage.share_whole is None or coverage.share_around is None:
        return text
    return (
        f"{text}: {coverage.share_whole:.2%} of a step of {milliseconds(coverage.total)}, and "
        f"{coverage.share_around:.2%} in reshardings around them"
    )


def format_bytes(nbytes: float) -> str:
    """Bytes with the unit that suits them, three significant digits."""
    for scale, unit in _UNITS:
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes:.0f} B"


def _header(plan: Plan) -> Text:
    return Text(
        f"Plan {plan.id[:12]}: {plan.graph.num_nodes} operators, "
        f"{plan.graph.num_parameters:,} parameters on {mesh_text(plan.mesh)} "
        f"({plan.mesh.topology.name}), {plan.options.mode}",
        style="bold",
    )


def _parameters(plan: Plan) -> Table:
    names = ", ".join(axis.name for axis in plan.mesh.axes)
    table = titled_table(
        "Parameters: I whole, gradient summed; S(d) cut along dim d, S(d)/1+1 in chunks; R whole"
    )
    table.add_column("parameter", style="cyan", overflow="fold")
    table.add_column("count", justify="right")
    table.add_column("shape", no_wrap=True)
    table.add_column("per rank", no_wrap=True)
    table.add_column(f"over {names}", style="green", no_wrap=True)
    for row in fold_parameters(plan):
        shapes = (_shape(row.shape), _shape(row.local_shape))
        table.add_row(row.name, str(row.count), *shapes, row.layout.replace(",", ", "))
    return table


def _collectives(plan: Plan) -> Table:
    table = titled_table("Collectives per step")
    for title in ("collective", "axis", "direction"):
        table.add_column(title)
    for title in ("count", "bytes"):
        table.add_column(title, justify="right")
    for row in plan.collectives:
        table.add_row(row.kind, row.axis, row.direction, str(row.count), format_bytes(row.nbytes))
    if not plan.collectives:
        table.add_row("none", "", "", "0", "0 B")
    return table


def _costs(costs: Costs) -> Table:
    table = titled_table("Predicted time of a step")
    always = ("compute", "communication", "optimizer")
    figures = {kind: milliseconds(getattr(costs, kind)) for kind in always}
    if costs.recompute:
        figures["recompute"] = milliseconds(costs.recompute)
    if costs.overlapped:
        figures["overlapped"] = f"-{milliseconds(costs.overlapped)}"
    figures["total"] = milliseconds(costs.total)
    for title in figures:
        table.add_column(title, justify="right")
    table.add_row(*figures.values())
    return table


def _memory(memory: Memory) -> Table:
    where = f"{memory.phase} of {memory.at}" if memory.at else memory.phase
    table = titled_table(f"Predicted memory per device at the peak ({where})")
    table.add_column("kind")
    table.add_column("bytes", justify="right")
    for kind in (*KINDS, "peak"):
        table.add_row(kind, format_bytes(getattr(memory, kind)))
    table.add_row("budget", "none" if memory.budget is None else format_bytes(memory.budget))
    return table


def _recomputing(plan: Plan) -> Iterator[Text]:
    """What backward runs once more, if anything."""
    assert plan.costs is not None
    (stage,) = plan.stages
    again = [c for c in stage.reshardings if c.regather]
    if again or stage.checkpoints:
        parameters = {parameter.name for parameter in stage.parameters}
        gathered = sum(resharding.value in parameters for resharding in again)
        yield Text(
            f"To hold less, backward runs {len(stage.checkpoints)} blocks once more, and converts "
            f"{gathered} parameters and {len(again) - gathered} activations again: "
            f"{milliseconds(plan.costs.recompute)}",
            style="bold",
        )


def _certificate(certificate: Certificate) -> Text:
    assert certificate.objective is not None
    if certificate.bound is None or certificate.gap is None:
        return Text(f"Certificate: {certificate.status}; nothing is proven", style="bold")
    return Text(
        f"Certificate: {certificate.status}; this plan takes "
        f"{certificate.objective * _MILLISECONDS:.6f} ms, none takes less than "
        f"{certificate.bound * _MILLISECONDS:.6f} ms (gap {certificate.gap:.2%})",
        style="bold",
    )


def _changes(title: str, changes: Sequence[Change]) -> Table:
    table = titled_table(f"{title} that differ: {len(changes)}")
    table.add_column("name", style="cyan", overflow="fold")
    for side in ("before", "after"):
        table.add_column(side, style="green", overflow="fold")
    for change in changes[:_MOST_CHANGES]:
        table.add_row(change.name, change.before, change.after)
    hidden = len(changes) - _MOST_CHANGES
    if hidden > 0:
        table.add_row(f"and {hidden} more", "", "")
    return table


def _collective_changes(difference: PlanDifference) -> Table:
    table = titled_table("Collectives per step that differ")
    for title in ("collective", "axis", "direction"):
        table.add_column(title)
    for title in ("before", "after", "bytes before", "bytes after"):
        table.add_column(title, justify="right")
    for row in difference.collectives:
        sizes = (format_bytes(row.bytes_before), format_bytes(row.bytes_after))
        table.add_row(row.kind, row.axis, row.direction, str(row.before), str(row.after), *sizes)
    return table


def _figures(title: str, figures: Sequence[Figure], text: Callable[[float], str]) -> Table:
    table = titled_table(title)
    table.add_column("kind")
    for column in ("before", "after", "difference"):
        table.add_column(column, justify="right", no_wrap=True)
    for figure in figures:
        sign = "-" if figure.difference < 0 else "+"
        change = f"{sign}{text(abs(figure.difference))}" if figure.difference else "0"
        table.add_row(figure.name, text(figure.before), text(figure.after), change)
    return table


def milliseconds(seconds: float) -> str:
    """Seconds as text in milliseconds."""
    return f"{seconds * _MILLISECONDS:.3f} ms"


def titled_table(title: str) -> Table:
    """An empty table as all of ours look."""
    return Table(title=title, title_justify="left", title_style="bold", header_style="dim")


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
