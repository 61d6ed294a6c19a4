"""The report that the plan page shows beside the plan: what a browser cannot compute from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from autoshard.errors import PlanError
from autoshard.lowering.timeline import KINDS
from autoshard.plan.document import Plan
from autoshard.pricing.axis_roles import StageRoles, stage_roles
from autoshard.pricing.simulation import Simulation, simulate
from autoshard.report.answer import WITHIN, Answer, answer_of, asked
from autoshard.report.compare import PlanDifference, compare_plans
from autoshard.report.restriction_cost import restriction_sentences
from autoshard.report.summary import remarks_on
from autoshard.schedules.simulation import ScheduleSimulation, simulate_pipeline

_MAX_EVENTS = 60_000
"""Maximum number of events of a timeline in a page."""
_MOMENTS = 1_000
"""Maximum number of points of the memory over time; each is the largest of its part of the step."""


@dataclass(frozen=True, slots=True)
class StepEvents:
    """The events of a step on one rank, in columns.

    Attributes:
        lanes: names of the lanes.
        texts: names and subjects, which events give by number.
        lane, name, subject, start, seconds, nbytes, overlapped, phase, category, micro_batch: one
            entry per event.
    """

    lanes: tuple[str, ...]
    texts: tuple[str, ...]
    lane: tuple[int, ...]
    name: tuple[int, ...]
    subject: tuple[int, ...]
    start: tuple[float, ...]
    seconds: tuple[float, ...]
    nbytes: tuple[int, ...]
    overlapped: tuple[bool, ...]
    phase: tuple[str, ...]
    category: tuple[str, ...]
    micro_batch: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """The live bytes of one rank over a step.

    Attributes:
        start: seconds since the step began of each point.
        nbytes: bytes at each point, by kind.
    """

    start: tuple[float, ...]
    nbytes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class ScheduleColumns:
    """The actions of all pipeline ranks in a step, in columns.

    Attributes:
        name: of the schedule.
        seconds: duration of the step.
        bubble: share of the step in which ranks are idle.
        finish: seconds after which each rank has only the end of its step left.
        end: seconds of that end, per rank.
        rank, stage, kind, micro_batch, start, stop: one entry per action.
    """

    name: str
    seconds: float
    bubble: float
    finish: tuple[float, ...]
    end: tuple[float, ...]
    rank: tuple[int, ...]
    stage: tuple[int, ...]
    kind: tuple[str, ...]
    micro_batch: tuple[int, ...]
    start: tuple[float, ...]
    stop: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ExportedText:
    """A plan as code or settings of another framework.

    Attributes:
        target: name of the export target.
        text: the code or settings; empty if there are none.
        reason: why there are none.
    """

    target: str
    text: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PageReport:
    """The content of the plan page beside the plan.

    Attributes:
        asked: the request as understood, in sentences.
        answer: what the summary prints; None if there is no plan.
        restricted: what the restrictions of the options cost, in sentences.
        remarks: what to know before the plan is applied.
        roles: roles of the axes in every operator and parameter of each stage.
        step: events of a step of one stage; None if `why_no_step` says why not.
        memory: live bytes over the step; None with `step`.
        schedule: actions of a pipeline; None for a plan of one stage.
        why_no_step: why there is no timeline; empty if there is one.
        exports: the plan as code and settings, which the caller made.
        explanations: of choices of the plan, each `autoshard.planner.Explanation` as JSON.
        source: name of the plan in commands.
        difference: of this plan from another; None without one.
    """

    asked: tuple[str, ...]
    answer: Answer | None = None
    restricted: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    roles: tuple[StageRoles, ...] = ()
    step: StepEvents | None = None
    memory: MemoryCurve | None = None
    schedule: ScheduleColumns | None = None
    why_no_step: str = ""
    exports: Sequence[ExportedText] = ()
    explanations: Sequence[Mapping[str, Any]] = ()
    source: str = "plan.json"
    difference: PlanDifference | None = None

    def to_json(self) -> str:
        """The report as JSON text."""
        return _adapter().dump_json(self).decode()


@cache
def _adapter() -> TypeAdapter[PageReport]:
    return TypeAdapter(PageReport)


def page_report(
    plan: Plan,
    *,
    other: Plan | None = None,
    exports: Sequence[ExportedText] = (),
    explanations: Sequence[Mapping[str, Any]] = (),
    source: str = "plan.json",
    within: float = WITHIN,
) -> PageReport:
    """Collect the report of a plan.

    Args:
        plan: the plan, or a document without one.
        other: a plan of the same program, from which the difference is shown.
        exports: the plan as code and settings.
        explanations: of choices of the plan, each `autoshard.planner.Explanation` as JSON.
        source: file, id or address of the plan, for the commands that the page names.
        within: share by which the simplest layout may be slower than the fastest.

    Raises:
        PlanError: the other plan is of another program.
    """
    if not plan.found:
        return PageReport(tuple(asked(plan)), why_no_step=plan.reason)
    answer = answer_of(plan, within=within)
    step, memory, schedule, missing = _step(plan)
    return PageReport(
        asked=answer.asked,
        answer=answer,
        restricted=tuple(restriction_sentences(plan)),
        remarks=tuple(remarks_on(plan)),
        roles=tuple(stage_roles(plan)),
        step=step,
        memory=memory,
        schedule=schedule,
        why_no_step=missing,
        exports=exports,
        explanations=explanations,
        source=source,
        difference=None if other is None else compare_plans(other, plan),
    )


def _step(
    plan: Plan,
) -> tuple[StepEvents | None, MemoryCurve | None, ScheduleColumns | None, str]:
    """Events and memory of a plan of one stage, or the schedule of a pipeline; or why none."""
    try:
        if plan.pipeline is not None:
            found = simulate_pipeline(plan)
            number = sum(map(len, found.schedule.actions))
            if number > _MAX_EVENTS:
                return None, None, None, _too_many(number)
            return None, None, _schedule(found), ""
        simulation = simulate(plan)
    except PlanError as error:
        return None, None, None, str(error)
    if len(simulation.events) > _MAX_EVENTS:
        return None, None, None, _too_many(len(simulation.events))
    return _events(simulation), _memory(simulation), None, ""


def _too_many(number: int) -> str:
    return (
        f"the step has {number:,} events, and a page shows at most {_MAX_EVENTS:,}: "
        f"`autoshard simulate` writes them as a trace"
    )


def _events(simulation: Simulation) -> StepEvents:
    events = simulation.events
    texts = tuple(dict.fromkeys(text for e in events for text in (e.name, e.subject)))
    numbers = {text: number for number, text in enumerate(texts)}
    lanes = {lane: number for number, lane in enumerate(simulation.lanes)}
    return StepEvents(
        lanes=simulation.lanes,
        texts=texts,
        lane=tuple(lanes[e.lane] for e in events),
        name=tuple(numbers[e.name] for e in events),
        subject=tuple(numbers[e.subject] for e in events),
        start=tuple(e.start for e in events),
        seconds=tuple(e.seconds for e in events),
        nbytes=tuple(e.nbytes for e in events),
        overlapped=tuple(e.overlapped for e in events),
        phase=tuple(e.phase.value for e in events),
        category=tuple(e.category for e in events),
        micro_batch=tuple(e.micro_batch for e in events),
    )


def _memory(simulation: Simulation) -> MemoryCurve:
    """The curve at the largest moment of each part of the step, so that the peak is among them."""
    alive = {kind: simulation.memory.nbytes[kind][simulation.numbers] for kind in KINDS}
    totals = np.sum([*alive.values()], axis=0)
    parts = np.array_split(np.arange(len(totals)), min(_MOMENTS, len(totals)))
    kept = np.array([part[np.argmax(totals[part])] for part in parts], dtype=np.intp)
    return MemoryCurve(
        tuple(simulation.moments[kept].tolist()),
        {kind: tuple(nbytes[kept].tolist()) for kind, nbytes in alive.items()},
    )


def _schedule(simulation: ScheduleSimulation) -> ScheduleColumns:
    schedule = simulation.schedule
    actions = [e for e in simulation.events if e.receiver is None and e.end > e.start]
    return ScheduleColumns(
        name=schedule.name,
        seconds=simulation.seconds,
        bubble=simulation.bubble,
        finish=tuple(simulation.finish.tolist()),
        end=tuple(
            sum(simulation.times[stage].end for stage in stages) for stages in schedule.ranks
        ),
        rank=tuple(e.rank for e in actions),
        stage=tuple(e.action.stage for e in actions),
        kind=tuple(e.action.kind for e in actions),
        micro_batch=tuple(e.action.micro_batch for e in actions),
        start=tuple(e.start for e in actions),
        stop=tuple(e.end for e in actions),
    )
