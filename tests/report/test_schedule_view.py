"""Traces and pictures of schedules have every action, where the simulation has it."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from support.meshes import slow_devices
from support.models import Planner, gpt2, small_graph
from support.pipeline_plans import equal_stages_plan

from autoshard.errors import PlanError
from autoshard.plan.document import ScheduleName, StageTimes
from autoshard.pricing import simulate
from autoshard.report import plan_trace, schedule_svg, schedule_trace
from autoshard.schedules import ScheduleSimulation, simulate_pipeline, simulate_schedule
from autoshard.schedules.schedule import SCHEDULE_NAMES, Schedule

TIMES = StageTimes(
    forward=1e-3,
    backward_input=1e-3,
    backward_weight=2e-3,
    end=5e-4,
    send=1e-4,
    send_gradient=2e-4,
)
DOCS = Path(__file__).parents[2] / "docs"
SVG = "{http://www.w3.org/2000/svg}"


def simulated(name: ScheduleName, micro_batches: int = 8) -> ScheduleSimulation:
    schedule = Schedule(name, 4, 1 if name in {"GPipe", "1F1B"} else 2, micro_batches)
    return simulate_schedule(schedule, [TIMES] * schedule.num_stages)


@pytest.fixture(params=SCHEDULE_NAMES)
def simulation(request: pytest.FixtureRequest) -> ScheduleSimulation:
    return simulated(request.param)


def events_of(trace: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(trace)["traceEvents"] if event["ph"] == "X"]


def test_a_trace_has_all_actions_transfers_and_ends(simulation: ScheduleSimulation) -> None:
    events = events_of(schedule_trace(simulation))
    ranks = simulation.schedule.num_ranks
    assert len(events) == len(simulation.events) + ranks
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(simulation.seconds * 1e6)
    for thread in {event["tid"] for event in events}:
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["tid"] == thread)
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(own))
    busy = sum(event["dur"] for event in events if event["tid"] < ranks) / 1e6
    idle = float(simulation.idle.sum())
    assert busy + idle == pytest.approx(ranks * simulation.seconds)
    assert simulation.bubble == pytest.approx(idle / ranks / simulation.seconds)


def test_a_picture_has_a_rectangle_for_each_action(simulation: ScheduleSimulation) -> None:
    root = ET.fromstring(schedule_svg(simulation))  # noqa: S314  our own picture
    titled = {r.findtext(f"{SVG}title"): r for r in root.iter(f"{SVG}rect") if len(r)}
    actions = [event for event in simulation.events if event.receiver is None]
    assert len(titled) == len(actions) + 1  # all ends of the step have one title
    scale = 1200 / simulation.seconds
    for event in actions:
        start = f"stage {event.action.stage}, "
        micro_batch = f"of micro-batch {event.action.micro_batch}:"
        (shown,) = (
            r
            for title, r in titled.items()
            if title is not None
            and title.startswith(start)
            and micro_batch in title
            and r.attrib["class"][0] == event.action.kind
        )
        assert float(shown.attrib["x"]) == pytest.approx(70 + event.start * scale, abs=0.01)
    numbers = [t.text for t in root.iter(f"{SVG}text") if t.get("class") == "number"]
    assert len(numbers) == len(actions)


def test_a_picture_is_legible_in_light_and_dark() -> None:
    picture = schedule_svg(simulated("InterleavedZeroBubble"))
    assert "prefers-color-scheme: dark" in picture
    fills = re.findall(r"\.[FBIWE]\d \{ fill: #(\w{6}); \}", picture)
    assert len(fills) == 10
    for fill in fills:
        red, green, blue = (int(fill[i : i + 2], 16) / 255 for i in (0, 2, 4))
        assert 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.5, "the numbers are dark"


def test_a_picture_of_very_many_actions_is_refused() -> None:
    with pytest.raises(PlanError, match=r"at most 20,000 actions.*write the trace"):
        schedule_svg(simulated("GPipe", 4000))


def test_a_step_that_takes_no_time_has_a_picture() -> None:
    times = StageTimes(forward=0, backward_input=0, backward_weight=0, end=0)
    simulation = simulate_schedule(Schedule("GPipe", 2, 1, 2), [times] * 2)
    assert simulation.bubble == 0
    assert schedule_svg(simulation).count("<rect") == 2  # the rows


def test_backward_of_weights_that_takes_no_time_is_not_drawn() -> None:
    times = TIMES.model_copy(update={"backward_weight": 0.0})
    simulation = simulate_schedule(Schedule("ZBVZeroBubble", 2, 2, 4), [times] * 4)
    assert "backward of inputs" in schedule_svg(simulation)
    assert "backward of weights" not in schedule_svg(simulation)


def test_the_schedule_of_a_plan_is_simulated(planned: Planner) -> None:
    plan = planned(small_graph(gpt2), slow_devices(dp=2))
    schedule = Schedule("Interleaved1F1B", 2, 2, 4)
    pipeline = equal_stages_plan(plan, schedule, TIMES)
    simulation = simulate_pipeline(pipeline)
    assert simulation.schedule == schedule
    assert simulation.seconds == simulate_schedule(schedule, [TIMES] * 4).seconds
    assert plan_trace(pipeline) == schedule_trace(simulation)
    assert "schedule" not in plan_trace(plan)
    alone = simulate_pipeline(equal_stages_plan(plan, Schedule("LoopedBFS", 1, 3, 4), TIMES))
    assert alone.seconds == pytest.approx(4 * 3 * 4e-3 + 3 * 5e-4)
    with pytest.raises(PlanError, match="`simulate_pipeline`"):
        simulate(pipeline)
    with pytest.raises(PlanError, match="single stage"):
        simulate_pipeline(plan)


def test_the_page_shows_what_is_simulated() -> None:
    page = (DOCS / "pipelines.md").read_text(encoding="utf-8")
    figures = r"([\d.]+) % \| ([\d.]+) % \| ([\d, ]+) \|$"
    rows = re.findall(rf"^\| `(\w+)` \|.*\| {figures}", page, re.MULTILINE)
    assert [row[0] for row in rows] == list(SCHEDULE_NAMES)
    for name, apart, at_once, in_flight in rows:
        per_rank = 1 if name in {"GPipe", "1F1B"} else 2
        schedule = Schedule(name, 4, per_rank, 16)
        for weight, idle in ((1, apart), (0, at_once)):
            times = StageTimes(forward=1, backward_input=2 - weight, backward_weight=weight, end=0)
            simulation = simulate_schedule(schedule, [times] * schedule.num_stages)
            assert f"{simulation.bubble:.1%}" == f"{idle}%"
        held = [schedule.in_flight[stage] for stage in schedule.stages_of_rank(0)]
        assert ", ".join(map(str, held)) == in_flight


def test_the_example_of_the_page_draws_its_picture(capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "pipelines.md").read_text(encoding="utf-8").split("## Schedules")[1]
    (code,) = re.findall(r"```python\n(.*?)```", page.split("\n## ")[0], re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102  our own page
    assert capsys.readouterr().out.endswith("%\n")
    drawn = (DOCS / "pictures" / "zbv_zero_bubble.svg").read_text(encoding="utf-8")
    assert names["picture"] == drawn
