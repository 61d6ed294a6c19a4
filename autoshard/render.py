"""Plans and progress as tables on a terminal."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.plan import Certificate, Costs, Memory, Plan, fold_parameters

_MILLISECONDS = 1e3
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
        _certificate(plan.certificate),
    )


def format_bytes(nbytes: float) -> str:
    """Bytes with the unit that suits them, three significant digits."""
    for scale, unit in _UNITS:
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes:.0f} B"


def _header(plan: Plan) -> Text:
    axes = " x ".join(f"{axis.name}={axis.size}" for axis in plan.mesh.axes)
    return Text(
        f"Plan {plan.id[:12]}: {plan.graph.num_nodes} operators, "
        f"{plan.graph.num_parameters:,} parameters on {axes} ({plan.mesh.topology.name}), "
        f"{plan.options.mode}",
        style="bold",
    )


def _parameters(plan: Plan) -> Table:
    names = ", ".join(axis.name for axis in plan.mesh.axes)
    table = _table("Parameters: I whole, gradient summed; S(d) cut along dim d; R whole")
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
    table = _table("Collectives per step")
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
    table = _table("Predicted time of a step")
    for title in ("compute", "communication", "optimizer", "total"):
        table.add_column(title, justify="right")
    values = (costs.compute, costs.communication, costs.optimizer, costs.total)
    table.add_row(*(f"{seconds * _MILLISECONDS:.3f} ms" for seconds in values))
    return table


def _memory(memory: Memory) -> Table:
    table = _table("Predicted memory per device at the peak")
    table.add_column("kind")
    table.add_column("bytes", justify="right")
    kinds = ("parameters", "gradients", "optimizer", "buffers", "inputs", "activations")
    for kind in (*kinds, "peak"):
        table.add_row(kind, format_bytes(getattr(memory, kind)))
    table.add_row("budget", "none" if memory.budget is None else format_bytes(memory.budget))
    return table


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


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", header_style="dim")


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
