"""Memory of a pipeline rank that holds several stages, compared with a replay of its schedule."""

from typing import Any

import pytest

from autoshard.lowering.timeline import KINDS
from autoshard.plan.options import ScheduleName
from autoshard.plan.predictions import Memory
from autoshard.schedules.rank_memory import largest_rank_memory
from autoshard.schedules.schedule import SCHEDULE_NAMES, Schedule

STATE, SAVED, WORKING = 1000, 10, 300
"""Bytes of the parameters of a stage, of a micro-batch in flight, and of what runs."""


def memory(number: int, **given: Any) -> Memory:
    """Memory of a stage with a number of micro-batches in flight."""
    kinds = dict.fromkeys(KINDS, 0) | {
        "parameters": STATE,
        "activations": number * SAVED,
        "temporaries": WORKING,
    }
    found: dict[str, Any] = {
        "budget": None,
        "phase": "backward",
        "at": "node",
        "peak": sum(kinds.values()),
        "turn": STATE + number * SAVED,
        "per_micro_batch": SAVED,
        "optimizer_step": STATE,
    }
    return Memory(**kinds | found | given)


def replayed(schedule: Schedule, rank: int) -> int:
    """The most bytes of a rank, from the sets of the micro-batches in flight."""
    live: set[tuple[int, int]] = set()
    most = 0
    for action in schedule.actions[rank]:
        if action.kind == "F":
            live.add((action.stage, action.micro_batch))
        most = max(most, len(live))
        if action.kind in ("B", "W"):
            live.remove((action.stage, action.micro_batch))
    return STATE * len(schedule.ranks[rank]) + SAVED * most + WORKING


def per_rank(name: ScheduleName) -> int:
    return 1 if name in ("GPipe", "1F1B") else 2


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_a_rank_needs_its_largest_sum_over_the_schedule(name: ScheduleName) -> None:
    schedule = Schedule(name, 4, per_rank(name), 16)
    stages = [memory(number) for number in schedule.in_flight]
    found = largest_rank_memory(schedule, stages, 10**6)
    assert found.peak == max(replayed(schedule, rank) for rank in range(4))
    assert found.peak == sum(getattr(found, kind) for kind in KINDS)
    assert found.temporaries == WORKING
    assert found.budget == 10**6
    assert found.turn == found.peak - WORKING
    most = schedule.in_flight_of_rank
    assert found.activations == SAVED * max(most)
    assert all(
        number <= sum(schedule.in_flight[s] for s in held)
        for number, held in zip(most, schedule.ranks, strict=True)
    )


def test_stages_of_a_rank_do_not_hold_the_most_at_the_same_time() -> None:
    schedule = Schedule("Interleaved1F1B", 4, 2, 16)
    assert schedule.in_flight_of_rank[0] < sum(schedule.in_flight[s] for s in schedule.ranks[0])


def test_the_step_of_the_optimizer_may_need_the_most() -> None:
    schedule = Schedule("Interleaved1F1B", 2, 2, 4)
    kinds: dict[str, Any] = {"gradients": 5000, "activations": 0, "temporaries": 0}
    kinds |= {"phase": "optimizer", "at": "", "peak": STATE + 5000, "optimizer_step": STATE + 5000}
    stages = [memory(number, **kinds) for number in schedule.in_flight]
    found = largest_rank_memory(schedule, stages, 10**6)
    assert found.peak == 2 * (STATE + 5000)
    assert found.phase == "optimizer"
    assert found.gradients == 2 * 5000


def test_in_inference_stages_have_their_peaks_together() -> None:
    schedule = Schedule("Interleaved1F1B", 2, 2, 4, training=False)
    update: dict[str, Any] = dict.fromkeys(("turn", "per_micro_batch", "optimizer_step"))
    stages = [memory(1, phase="forward", **update) for _ in schedule.in_flight]
    found = largest_rank_memory(schedule, stages, 10**6)
    assert found.peak == 2 * stages[0].peak
    assert found.turn is None
    assert found.per_micro_batch is None
