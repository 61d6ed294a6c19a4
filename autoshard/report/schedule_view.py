"""A simulated pipeline schedule for people: a trace and a picture."""

import json
from collections.abc import Iterator
from html import escape
from typing import Any

from autoshard.errors import PlanError
from autoshard.plan.document import Plan
from autoshard.pricing.simulation import MICROSECONDS, chrome_trace, simulate, trace_record
from autoshard.schedules.schedule import ActionKind
from autoshard.schedules.simulation import (
    ScheduleEvent,
    ScheduleSimulation,
    simulate_pipeline,
)

_MAX_ACTIONS = 20_000
"""Maximum number of actions in a picture."""

NAMES: dict[ActionKind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "backward of inputs",
    "W": "backward of weights",
}
_END = "end of step"

_COLOURS = {
    "F": (110, 168, 254),
    "B": (255, 180, 84),
    "I": (64, 200, 186),
    "W": (154, 214, 100),
    _END: (176, 182, 192),
}
_WIDTH, _LEFT, _TOP, _ROW, _GAP, _FOOT = 1200, 70, 64, 26, 6, 34
_DIGIT = 7
"""Pixels: of the time axis, of margins, and of a digit."""

_TICKS = 8
_STYLE = """
text { font: 11px sans-serif; fill: #1f2328; }
.number { text-anchor: middle; pointer-events: none; fill: #101418; }
.label { text-anchor: end; }
.tick { text-anchor: middle; }
.title { font: bold 14px sans-serif; }
.row { fill: #8b949e; fill-opacity: 0.15; }
.line { stroke: #8b949e; stroke-opacity: 0.4; }
rect { stroke: #101418; stroke-opacity: 0.35; stroke-width: 0.5; }
.row { stroke: none; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; }
.number { fill: #101418; }
}
"""
"""Colours of actions are light in both colour schemes, and their numbers dark."""


def schedule_trace(simulation: ScheduleSimulation) -> str:
    """A schedule as a trace for chrome://tracing and Perfetto.

    Each rank has a thread, and so have its sends to each other rank. A transfer begins when both
    ranks are ready.

    Args:
        simulation: a simulated step.
    """
    schedule = simulation.schedule
    sends = sorted({(e.rank, e.receiver) for e in simulation.events if e.receiver is not None})
    threads: dict[tuple[int, int | None], str] = {
        (rank, None): f"rank {rank}" for rank in range(schedule.num_ranks)
    }
    threads |= {pair: f"rank {pair[0]} sends to {pair[1]}" for pair in sends}
    numbers = {pair: number for number, pair in enumerate(threads)}
    name = f"{schedule.name}, predicted"
    records = [trace_record("M", "process_name", 0, args={"name": name})]
    for pair, thread in threads.items():
        number = numbers[pair]
        records.append(trace_record("M", "thread_name", 0, number, args={"name": thread}))
        records.append(
            trace_record("M", "thread_sort_index", 0, number, args={"sort_index": number})
        )
    records += [_trace_event(e, numbers[e.rank, e.receiver]) for e in simulation.events]
    records += [
        trace_record(
            "X",
            _END,
            0,
            rank,
            cat=_END,
            ts=start * MICROSECONDS,
            dur=seconds * MICROSECONDS,
            args={"stages": list(schedule.ranks[rank])},
        )
        for rank, start, seconds in _ends(simulation)
    ]
    return json.dumps({"traceEvents": records, "displayTimeUnit": "ms"})


def plan_trace(plan: Plan) -> str:
    """One step of a plan as a trace: of its operators, or of the schedule of its pipeline.

    Raises:
        PlanError: as `simulate`.
    """
    if plan.pipeline is None:
        return chrome_trace(simulate(plan))
    return schedule_trace(simulate_pipeline(plan))


def schedule_svg(simulation: ScheduleSimulation) -> str:
    """A schedule as a picture: a row per rank, time to the right, micro-batch numbers.

    Stages of a rank have the same colours, later stages in lighter shades. Actions that take no
    time are left out.

    Args:
        simulation: a simulated step.

    Raises:
        PlanError: there are too many actions for a picture.
    """
    schedule = simulation.schedule
    number = sum(map(len, schedule.actions))
    if number > _MAX_ACTIONS:
        raise PlanError(
            f"a picture has at most {_MAX_ACTIONS:,} actions, but the step has {number:,}: write "
            f"the trace instead"
        )
    height = _TOP + schedule.num_ranks * (_ROW + _GAP) + _FOOT
    width = _LEFT + _WIDTH + 20
    title = (
        f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages, "
        f"{schedule.micro_batches} micro-batches; {_duration(simulation.seconds)}, "
        f"{simulation.bubble:.1%} idle"
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}{_shades(schedule.stages_per_rank)}</style>",
        f'<text class="title" x="{_LEFT}" y="20">{escape(title)}</text>',
        *_legend(simulation),
        *_axis(simulation),
    ]
    for rank in range(schedule.num_ranks):
        lines += _row(simulation, rank)
    return "\n".join([*lines, "</svg>", ""])


def _ends(simulation: ScheduleSimulation) -> Iterator[tuple[int, float, float]]:
    """Rank, start and duration of what is due at the end of the step, where there is something."""
    for rank, stages in enumerate(simulation.schedule.ranks):
        seconds = sum(simulation.times[stage].end for stage in stages)
        if seconds:
            yield rank, float(simulation.finish[rank]), seconds


def _trace_event(event: ScheduleEvent, thread: int) -> dict[str, Any]:
    action = event.action
    moved = "activations" if action.kind == "F" else "gradients"
    name = NAMES[action.kind] if event.receiver is None else f"send {moved}"
    return trace_record(
        "X",
        f"{name} {action.micro_batch}",
        0,
        thread,
        cat=name,
        ts=event.start * MICROSECONDS,
        dur=(event.end - event.start) * MICROSECONDS,
        args={"stage": action.stage, "micro_batch": action.micro_batch},
    )


def _duration(seconds: float) -> str:
    if not seconds:
        return "0"
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds * 1e6:.4g} µs"


def _shades(stages_per_rank: int) -> str:
    """Rules of style sheets: the colour of each kind and stage of a rank."""
    rules = []
    for name, colour in _COLOURS.items():
        for index in range(stages_per_rank):
            share = 0.6 * index / max(stages_per_rank - 1, 1)
            red, green, blue = (round(c + (255 - c) * share) for c in colour)
            rules.append(f".{_class(name, index)} {{ fill: #{red:02x}{green:02x}{blue:02x}; }}")
    return "\n".join(rules) + "\n"


def _class(name: str, index: int) -> str:
    return f"{name[0] if name in NAMES else 'E'}{index}"


def _legend(simulation: ScheduleSimulation) -> Iterator[str]:
    kinds = {e.action.kind for e in simulation.events if e.receiver is None and e.end > e.start}
    shown = [(kind, name) for kind, name in NAMES.items() if kind in kinds]
    items: list[tuple[str, str]] = [*shown, *([(_END, _END)] if any(_ends(simulation)) else [])]
    left = _LEFT
    for kind, name in items:
        yield f'<rect class="{_class(kind, 0)}" x="{left}" y="32" width="14" height="14"/>'
        yield f'<text x="{left + 20}" y="43">{name}</text>'
        left += 40 + _DIGIT * len(name)
    if simulation.schedule.stages_per_rank > 1:
        yield f'<text x="{left}" y="43">lighter: later stages of the rank</text>'


def _axis(simulation: ScheduleSimulation) -> Iterator[str]:
    """Lines and labels at round times."""
    rows = simulation.schedule.num_ranks * (_ROW + _GAP)
    if not simulation.seconds:
        return
    for tick in _ticks(simulation.seconds):
        x = _LEFT + _WIDTH * tick / simulation.seconds
        bottom = _TOP + rows
        yield f'<line class="line" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}"/>'
        yield f'<text class="tick" x="{x:.1f}" y="{bottom + 16}">{_duration(tick)}</text>'


def _ticks(seconds: float) -> list[float]:
    """Round times from 0 on, at most `_TICKS` of them."""
    step = 10.0**-12
    while seconds / step > _TICKS:
        for factor in (2, 5, 10):
            if seconds / (step * factor) <= _TICKS:
                return [
                    step * factor * number for number in range(int(seconds / (step * factor)) + 1)
                ]
        step *= 10
    return [step * number for number in range(int(seconds / step) + 1)]


def _row(simulation: ScheduleSimulation, rank: int) -> Iterator[str]:
    top = _TOP + rank * (_ROW + _GAP)
    stages = simulation.schedule.ranks[rank]
    scale = _WIDTH / simulation.seconds if simulation.seconds else 0.0
    yield f'<text class="label" x="{_LEFT - 8}" y="{top + 17}">rank {rank}</text>'
    yield f'<rect class="row" x="{_LEFT}" y="{top}" width="{_WIDTH}" height="{_ROW}"/>'
    for event in simulation.of_rank(rank):
        if event.start == event.end:
            continue
        action = event.action
        left, width = _LEFT + event.start * scale, (event.end - event.start) * scale
        label = (
            f"stage {action.stage}, {NAMES[action.kind]} of micro-batch {action.micro_batch}: "
            f"{_duration(event.start)} to {_duration(event.end)}"
        )
        yield _rectangle(_class(action.kind, stages.index(action.stage)), left, top, width, label)
        if width >= _DIGIT * len(str(action.micro_batch)) + 1:
            middle = left + width / 2
            text = action.micro_batch
            yield f'<text class="number" x="{middle:.2f}" y="{top + 17}">{text}</text>'
    for ending, start, seconds in _ends(simulation):
        if ending == rank:
            yield _rectangle("E0", _LEFT + start * scale, top, seconds * scale, _END)


def _rectangle(name: str, left: float, top: float, width: float, label: str) -> str:
    return (
        f'<rect class="{name}" x="{left:.2f}" y="{top}" width="{width:.2f}" height="{_ROW}">'
        f"<title>{label}</title></rect>"
    )
