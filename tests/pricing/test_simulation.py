"""Simulated steps: their sums equal the costs that the checker verified."""

import json
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from support.meshes import slow_devices
from support.models import Planner, gpt2, small_graph

from autoshard.errors import PlanError
from autoshard.lowering.timeline import Phase
from autoshard.plan import Plan
from autoshard.pricing import Event, Simulation, chrome_trace, simulate

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "inference": {"mode": "inference"},
    "overlap": {"overlap": True},
    "checkpoints": {"activation_checkpointing": "always"},
    "checkpoints and overlap": {"activation_checkpointing": "always", "overlap": True},
    "resharded again": {"reshard_after_forward": "always", "overlap": True},
    "micro-batches": {"micro_batches": 3},
    "micro-batches and overlap": {"micro_batches": 2, "overlap": True},
    "micro-batches, resharded again": {"micro_batches": 3, "reshard_after_forward": "always"},
}

MESH = slow_devices(dp=2, tp=2)
ROUNDING = 1e-9


@pytest.fixture(scope="module")
def plans(planned: Planner) -> dict[str, Plan]:
    graph = small_graph(gpt2)
    pins = {"pins": {"inputs": {"*": "S(0),R"}, "parameters": {"*mlp*weight": "S(0),S(1)"}}}
    return {name: planned(graph, MESH, **options, **pins) for name, options in OPTIONS.items()}


@pytest.fixture(params=OPTIONS)
def simulated(request: pytest.FixtureRequest, plans: dict[str, Plan]) -> tuple[Plan, Simulation]:
    plan = plans[request.param]
    return plan, simulate(plan)


def waited(simulation: Simulation) -> Iterator[Event]:
    return (event for event in simulation.events if not event.overlapped)


@pytest.mark.matrix
def test_the_step_takes_what_the_plan_says(simulated: tuple[Plan, Simulation]) -> None:
    plan, simulation = simulated
    assert plan.costs is not None
    assert simulation.seconds == pytest.approx(plan.costs.total, rel=ROUNDING)
    assert simulation.overlapped == pytest.approx(plan.costs.overlapped, rel=ROUNDING)
    for category in ("compute", "communication", "optimizer", "recompute"):
        found = sum(event.seconds for event in simulation.events if event.category == category)
        assert found == pytest.approx(getattr(plan.costs, category), rel=ROUNDING), category


def test_compute_waits_for_one_thing_after_the_other(simulated: tuple[Plan, Simulation]) -> None:
    _, simulation = simulated
    order = sorted(waited(simulation), key=lambda event: event.start)
    assert order[0].start == 0.0
    for before, after in pairwise(order):
        assert after.start == pytest.approx(before.start + before.seconds, rel=ROUNDING)


def test_nothing_on_a_lane_overlaps(simulated: tuple[Plan, Simulation]) -> None:
    _, simulation = simulated
    for lane in simulation.lanes:
        events = [event for event in simulation.events if event.lane == lane]
        for before, after in pairwise(events):
            assert after.start >= before.start + before.seconds - 1e-12


def test_collectives_are_those_of_the_plan(simulated: tuple[Plan, Simulation]) -> None:
    plan, simulation = simulated
    names = {count.kind for count in plan.collectives}
    events = [event for event in simulation.events if event.name in names]
    # What is hidden in part is two events, and of a bucket several.
    count: Counter[tuple[str, str | None, str]] = Counter()
    nbytes: Counter[tuple[str, str | None, str]] = Counter()
    begun: set[tuple[str, str | None, str, Phase, int]] = set()
    for e in sorted(events, key=lambda event: event.overlapped):
        one = e.name, e.axis, e.subject, e.phase, e.micro_batch
        if not e.overlapped or one not in begun:
            key = e.name, e.axis, "forward" if e.phase is Phase.FORWARD else "backward"
            count[key] += 1
            nbytes[key] += e.nbytes
        begun.add(one)
    assert nbytes == {(c.kind, c.axis, c.direction): c.nbytes for c in plan.collectives}
    assert count == {(c.kind, c.axis, c.direction): c.count for c in plan.collectives}


def test_a_bucket_is_one_collective(plans: dict[str, Plan]) -> None:
    plan = plans["plain"]
    together, apart = simulate(plan), simulate(plan, bucketed=False)
    assert together.seconds == pytest.approx(apart.seconds, rel=ROUNDING)
    events = [event for event in together.events if " more" in event.subject]
    assert events
    assert len(together.events) < len(apart.events)


def test_memory_is_that_of_the_plan(simulated: tuple[Plan, Simulation]) -> None:
    plan, simulation = simulated
    assert plan.memory is not None
    assert simulation.memory.peak == plan.memory.peak
    assert simulation.moments.shape == simulation.numbers.shape
    micro_batches = plan.stages[0].micro_batches
    moments = range(len(simulation.memory.moments) - (plan.options.mode == "training"))
    for number in moments:
        assert np.count_nonzero(simulation.numbers == number) == micro_batches
    assert (np.diff(simulation.moments) >= 0).all()


def test_the_options_show(plans: dict[str, Plan]) -> None:
    phases = {
        name: {event.phase for event in simulate(plan).events} for name, plan in plans.items()
    }
    assert phases["inference"] == {Phase.FORWARD}
    assert phases["plain"] == {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER}
    assert Phase.RECOMPUTE in phases["checkpoints"]
    assert Phase.RECOMPUTE in phases["resharded again"]
    assert simulate(plans["overlap"]).overlapped > 0


def test_a_trace_has_what_perfetto_asks_for(plans: dict[str, Plan]) -> None:
    simulation = simulate(plans["overlap"])
    document = json.loads(chrome_trace(simulation))
    records = document["traceEvents"]
    kinds: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        assert {"ph", "name", "pid", "tid"} <= record.keys()
        kinds.setdefault(record["ph"], []).append(record)
    assert kinds.keys() == {"M", "X", "C"}
    threads = {r["tid"]: r["args"]["name"] for r in kinds["M"] if r["name"] == "thread_name"}
    lanes = list(threads.values())
    assert lanes[:3] == ["compute", "axis dp", "axis tp"]
    assert lanes[3:] == ["axis dp+tp"], "a plan of this model sums over both axes as one group"
    for record in kinds["X"]:
        assert record["tid"] in threads
        assert record["dur"] > 0
        assert record["ts"] + record["dur"] <= simulation.seconds * 1e6 * (1 + ROUNDING)
    seconds = sum(event.seconds for event in simulation.events)
    assert sum(r["dur"] for r in kinds["X"]) == pytest.approx(1e6 * seconds)
    peak = max(sum(record["args"].values()) for record in kinds["C"])
    assert peak == simulation.memory.peak


def test_without_a_plan_there_is_nothing_to_simulate(plans: dict[str, Plan]) -> None:
    nothing = plans["plain"].model_copy(update={"stages": (), "reason": "out of luck"})
    with pytest.raises(PlanError, match="no plan to simulate: out of luck"):
        simulate(nothing)


def test_a_step_of_too_many_micro_batches_is_not_drawn(plans: dict[str, Plan]) -> None:
    (stage,) = plans["micro-batches"].stages
    many = stage.model_copy(update={"micro_batches": 60_000})
    plan = plans["micro-batches"].model_copy(update={"stages": (many,)})
    with pytest.raises(PlanError, match=r"60000 micro-batches .* plan fewer micro-batches"):
        simulate(plan)
