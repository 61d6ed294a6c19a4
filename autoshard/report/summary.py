"""The summary of a plan: plain text of at most 30 lines for people.

In this order: model, hardware, element type and batch; the parallelism in words and the roles of
axes; predicted time, throughput and memory of a step; the baselines on the same mesh; the largest
costs; the certificate; commands to run next.
"""

from collections.abc import Iterator, Sequence
from textwrap import wrap

from autoshard.base.quantities import format_bytes
from autoshard.graph import graph_from_json
from autoshard.mesh import mesh_text
from autoshard.plan.comparisons import Baseline
from autoshard.plan.document import Plan
from autoshard.plan.options import OWN_RUNTIME
from autoshard.plan.predictions import step_time, three_digits
from autoshard.pricing.axis_roles import AxisRole, AxisUse, Storage, find_roles, percent
from autoshard.pricing.performance import plan_performance
from autoshard.pricing.throughput import batch_of
from autoshard.report.cost_items import cost_items
from autoshard.report.plain_words import parallelism_sentences
from autoshard.report.requirements import requirements
from autoshard.report.restriction_cost import restriction_sentences

MAX_LINES = 30
"""Maximum number of lines of a summary that is wrapped at 80 columns or more."""

_NUM_COSTS = 5
_TIME = 9
"""Minimum width of the step time of a baseline."""
_LISTED = 0.005
"""Least share of a role that the line of an axis lists."""


def summarise(plan: Plan, *, width: int | None = None, commands: Sequence[str] = ()) -> str:
    """The summary of a plan.

    Args:
        plan: a plan, or a document without one.
        width: columns at which sentences are wrapped; None for one line each.
        commands: what to run next, one a line.

    Returns:
        Lines without trailing spaces. Names, figures and commands are never wrapped.
    """
    header = _wrapped(_header(plan), width)
    if not plan.found:
        return "\n".join([*header, *_wrapped(f"No plan: {plan.reason}", width)])
    roles = find_roles(plan)
    words = list(parallelism_sentences(plan, roles))
    axes = [line for use in roles.axes for line in _wrapped(_axis(use), width)]
    remarks = [*(use.remark for use in roles.axes if use.remark), *_idle_remarks(plan)]
    remarks += requirements(plan)
    rest = [
        *(line for text in remarks for line in _wrapped(f"Remark: {text}", width)),
        *(line for text in _predictions(plan) for line in _wrapped(text, width)),
        *(line for text in restriction_sentences(plan) for line in _wrapped(text, width)),
        *_baselines(plan, width),
        *_largest_costs(plan),
        *_wrapped(f"Certificate: {plan.certificate_statement}", width),
        *_next(commands),
    ]
    room = MAX_LINES - len(header) - len(rest)
    return "\n".join([*header, *_fitted(words, axes, room, width), *rest])


def headline(plan: Plan) -> str:
    """A plan in one line: its mesh, its parallelism in words, predicted step and memory.

    Args:
        plan: a plan, not a document without one.
    """
    words = " ".join(parallelism_sentences(plan, find_roles(plan)))
    return f"mesh {mesh_text(plan.mesh)}. {words} {next(_predictions(plan))}"


def _fitted(words: list[str], axes: list[str], room: int, width: int | None) -> list[str]:
    """The paragraph and the lines of axes, of which some are left out if there is no room."""
    lines = _wrapped(" ".join(words), width, indent="")
    if len(lines) + len(axes) <= room:
        return [*lines, *axes]
    while len(lines) > max(room, 1) and len(words) > 1:
        words = words[:-1]
        lines = _wrapped(f"{' '.join(words)} And more: see the tables of parameters.", width, "")
    return lines


def _wrapped(text: str, width: int | None, indent: str = "  ") -> list[str]:
    if width is None:
        return [text]
    return wrap(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _header(plan: Plan) -> str:
    model = graph_from_json(plan.stages[0].program).model if plan.found else None
    name = model.name if model is not None and model.name else "Model"
    parts = [f"{name}, {plan.graph.num_parameters:,} parameters"]
    parts += [f"on {plan.mesh.description}", f"mesh {mesh_text(plan.mesh)}"]
    precision = plan.graph.precision or "no floating-point tensors"
    parts += [precision, *_batch(plan)] if plan.found else []
    runtime = plan.options.runtime.name
    parts += (
        [] if runtime == OWN_RUNTIME else [f"priced for {runtime}, not for autoshard's runtime"]
    )
    return ", ".join([*parts, plan.options.mode])


def _batch(plan: Plan) -> Iterator[str]:
    batch = batch_of(plan)
    if batch is not None:
        tokens = "" if batch.sequence is None else f" x {batch.sequence} tokens"
        yield f"batch {batch.samples}{tokens}"


def _axis(use: AxisUse) -> str:
    """The line of one axis."""
    parts = [f"{use.stages} groups of pipeline stages"] if use.stages > 1 else []
    work = [(role, share) for role, share in use.work.items() if share >= _LISTED]
    if work:
        first, *others = [f"{role.words} in {percent(share)}" for role, share in work]
        listed = ", ".join([f"{first} of flops", *others])
        parts.append("shards nothing" if use.work.get(AxisRole.IDLE) == 1 else f"shards {listed}")
    gathered, sharded = (use.stored.get(s, 0.0) for s in (Storage.GATHERED, Storage.SHARDED))
    held = [f"{percent(gathered)} gathered for use (FSDP)"] if gathered >= _LISTED else []
    held += [f"{percent(sharded)} used in shards"] if sharded >= _LISTED else []
    if held:
        parts.append(f"stores parameters in shards: {', '.join(held)}")
    elif use.stored:
        parts.append("stores parameters whole")
    return f"Axis {use.name}={use.size}: {'; '.join(parts) or 'unused'}"


def _idle_remarks(plan: Plan) -> Iterator[str]:
    for number, stage in enumerate(plan.stages):
        if text := stage.idle_text:
            yield text if plan.pipeline is None else f"stage {number}: {text}"


def _predictions(plan: Plan) -> Iterator[str]:
    assert plan.costs is not None
    assert plan.memory is not None
    performance = plan.performance or plan_performance(plan)
    parts = [f"Predicted step: {step_time(plan.costs.total, performance)}", *performance.rates]
    budget = plan.memory.budget or plan.mesh.topology.device.memory
    memory = f"peak memory {format_bytes(plan.memory.peak)} of {format_bytes(budget)} per device"
    yield ", ".join([*parts, memory])
    if performance.error is None:
        yield f"The predicted time is {performance.comparison}."


def _baselines(plan: Plan, width: int | None) -> list[str]:
    if not plan.baselines:
        return []
    longest = max(len(baseline.name) for baseline in plan.baselines)
    lines = ["Baselines on the same mesh:"]
    for baseline in plan.baselines:
        text = f"  {baseline.name:{longest}}  {_baseline(plan, baseline)}"
        shown = _wrapped(text, width)[0] if width is not None else text
        lines.append(shown if shown == text else f"{text[: (width or 0) - 3].rstrip()}...")
    return lines


def _baseline(plan: Plan, baseline: Baseline) -> str:
    assert plan.costs is not None
    if baseline.costs is None or baseline.memory is None:
        if baseline.needed_memory is not None:
            return f"does not fit: needs {format_bytes(baseline.needed_memory)}"
        return f"not possible: {baseline.reason}"
    seconds = baseline.costs.total
    times = f"{seconds / plan.costs.total:.2f} x as long" if plan.costs.total else ""
    performance = baseline.performance
    used = [] if performance is None or performance.mfu is None else [f"MFU {performance.mfu:.1%}"]
    parts = [times, *used, f"peak {format_bytes(baseline.memory.peak)}"]
    return f"{step_time(seconds, performance):>{_TIME}}  {', '.join(parts)}"


def _largest_costs(plan: Plan) -> Iterator[str]:
    items = [item for item in cost_items(plan) if item.seconds > 0][:_NUM_COSTS]
    yield "Largest costs:"
    longest = max((len(three_digits(item.seconds)) for item in items), default=0)
    for item in items:
        yield f"  {three_digits(item.seconds):>{longest}} {percent(item.share):>5}  {item.name}"


def _next(commands: Sequence[str]) -> list[str]:
    return ["Next:", *(f"  {command}" for command in commands)] if commands else []
