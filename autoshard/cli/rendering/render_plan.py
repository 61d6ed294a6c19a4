"""Reports on a plan: tables of parameters, collectives, costs, memory and pipeline stages."""

from autoshard.cli.rendering.render import legend_lines
from autoshard.cli.rendering.render_pipeline import pipeline_parts
from autoshard.layouts import Notation, text_words
from autoshard.lowering.timeline import KINDS
from autoshard.plan import Memory, Plan
from autoshard.report import fold_parameters
from autoshard.report.cost_items import cost_items
from autoshard.report.tables import Column, Report, Sentence, Table, Unit

SECTIONS = ("parameters", "collectives", "costs", "memory", "pipeline")
"""The tables of a plan by name of their option."""


def plan_report(
    plan: Plan, sections: tuple[str, ...] = SECTIONS, *, notation: Notation = "dtensor"
) -> Report:
    """The tables of a plan.

    Args:
        plan: a plan with stages.
        sections: some of `SECTIONS`.
        notation: of layouts.
    """
    parts: list[Table | Sentence] = []
    if "pipeline" in sections:
        parts += pipeline_parts(plan)
    if "parameters" in sections:
        layouts = [row.layout for row in fold_parameters(plan)]
        parts += [_parameters(plan, notation), *legend_lines(layouts, notation)]
    parts += [_collectives(plan)] if "collectives" in sections else []
    parts += [_costs(plan)] if "costs" in sections else []
    if "memory" in sections and plan.memory is not None:
        parts.append(_memory(plan.memory))
    return Report(tuple(parts))


def _parameters(plan: Plan, notation: Notation) -> Table:
    axes = {tuple(name for name, _ in stage.axes) for stage in plan.stages}
    names = ", ".join(next(iter(axes))) if len(axes) == 1 else "the axes of its stage"
    title = f"Parameters: placement over {names}"
    columns = [Column("parameter", Unit.NAME), Column("shape"), Column("per rank")]
    columns += [Column("placement"), Column("gradient"), Column("count", Unit.COUNT)]
    table = Table("parameters", title, tuple(columns))
    for row in fold_parameters(plan):
        shapes = _shape(row.shape), _shape(row.local_shape)
        placement = text_words(row.layout, notation=notation)
        table.add(row.name, *shapes, placement, row.gradient or "local", row.count)
    return table


def _collectives(plan: Plan) -> Table:
    labels = [Column(name) for name in ("collective", "axis", "direction")]
    columns = (*labels, Column("count", Unit.COUNT), Column("size", Unit.BYTES))
    table = Table("collectives", "Collectives per step", columns)
    for row in plan.collectives:
        table.add(row.kind, row.axis, row.direction, row.count, row.nbytes)
    return table


def _costs(plan: Plan) -> Table:
    columns = Column("cost", Unit.NAME), Column("time", Unit.SECONDS), Column("share", Unit.SHARE)
    table = Table("costs", "Predicted time of a step", columns)
    for item in cost_items(plan):
        table.add(item.name, item.seconds, item.share)
    if plan.costs is not None:
        table.add("total", plan.costs.total, 1.0, bold=True)
    return table


def _memory(memory: Memory) -> Table:
    where = f"{memory.phase} of {memory.at}" if memory.at else memory.phase
    title = f"Predicted memory per device at the peak ({where})"
    table = Table("memory", title, (Column("kind"), Column("size", Unit.BYTES)))
    for kind in (*KINDS, "peak"):
        table.add(kind, getattr(memory, kind), bold=kind == "peak")
    table.add("budget", memory.budget)
    return table


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
