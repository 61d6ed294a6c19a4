"""Schedules: the same lists as torch's classes, and errors for what torch refuses."""

import pytest
from support.torch_schedules import torch_actions, torch_schedule

from autoshard.errors import OptionError
from autoshard.plan.options import ScheduleName
from autoshard.schedules.schedule import SCHEDULE_NAMES, Schedule, schedule_error

STAGES_PER_RANK: dict[ScheduleName, tuple[int, ...]] = {
    "GPipe": (1,),
    "1F1B": (1,),
    "Interleaved1F1B": (1, 2, 3, 4),
    "LoopedBFS": (1, 2, 4),
    "InterleavedZeroBubble": (1, 2, 3, 4),
    "ZBVZeroBubble": (2,),
    "DualPipeV": (2,),
}
RANKS = range(1, 6)
MICRO_BATCHES = range(1, 14)


def cases(name: ScheduleName) -> list[tuple[int, int, int]]:
    return [(n, v, m) for n in RANKS for v in STAGES_PER_RANK[name] for m in MICRO_BATCHES]


def written(schedule: Schedule) -> list[list[list[str]]]:
    """The actions of each rank in torch's notation; overlapped ones together."""
    found: list[list[list[str]]] = []
    for actions in schedule.actions:
        groups: list[list[str]] = []
        joined = False
        for action in actions:
            if not joined:
                groups.append([])
            groups[-1].append(str(action))
            joined = action.overlaps_next
        found.append(groups)
    return found


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_the_lists_are_torchs(name: ScheduleName) -> None:
    legal = [case for case in cases(name) if schedule_error(name, *case) is None]
    assert len(legal) > 20
    for case in legal:
        assert written(Schedule(name, *case)) == torch_actions(name, *case), (name, case)


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_what_torch_refuses_is_refused(name: ScheduleName) -> None:
    for case in cases(name):
        if schedule_error(name, *case) is not None:
            with pytest.raises(ValueError, match=r"micro|stages"):
                torch_schedule(name, *case)
            with pytest.raises(OptionError, match="take"):
                Schedule(name, *case)


def test_torch_knows_the_names() -> None:
    for name in SCHEDULE_NAMES:
        stages = STAGES_PER_RANK[name][0]
        assert type(torch_schedule(name, 2, stages, 4)).__name__ == f"Schedule{name}"


@pytest.mark.parametrize("name", ["ZBVZeroBubble", "DualPipeV"])
def test_placement_in_the_shape_of_a_v(name: ScheduleName) -> None:
    schedule = Schedule(name, 4, 2, 8)
    assert schedule.ranks == ((0, 7), (1, 6), (2, 5), (3, 4))
    assert schedule.rank_of_stage == (0, 1, 2, 3, 3, 2, 1, 0)


def test_placement_in_a_loop() -> None:
    schedule = Schedule("LoopedBFS", 3, 2, 4)
    assert schedule.ranks == ((0, 3), (1, 4), (2, 5))
    assert schedule.rank_of_stage == (0, 1, 2, 0, 1, 2)


def test_errors_name_the_way_out() -> None:
    assert schedule_error("Interleaved1F1B", 4, 2, 9) == (
        "schedule Interleaved1F1B on 4 ranks runs 2 rounds of equally many micro-batches, which 9 "
        "micro-batches are not: take 8 or 10"
    )
    assert schedule_error("1F1B", 4, 1, 3) == (
        "schedule 1F1B with 4 stages runs at least 4 micro-batches, not 3: take more "
        "micro-batches, fewer stages, or schedule GPipe"
    )
    error = schedule_error("ZBVZeroBubble", 4, 1, 8)
    assert str(error).endswith(
        "not 1: take GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, or 8 stages"
    )
    assert "at least 1" in str(schedule_error("GPipe", 0, 1, 8))


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_inference_runs_the_forward_actions(name: ScheduleName) -> None:
    case = (3, STAGES_PER_RANK[name][-1], 6)
    training, inference = Schedule(name, *case), Schedule(name, *case, training=False)
    for trained, run in zip(training.actions, inference.actions, strict=True):
        assert [str(a) for a in run] == [str(a) for a in trained if a.kind == "F"]
    assert set(inference.in_flight) == {1}


def test_micro_batches_in_flight_of_1f1b_decrease_along_the_pipeline() -> None:
    for ranks in RANKS:
        for number in range(ranks, 9):
            found = Schedule("1F1B", ranks, 1, number).in_flight
            assert found == tuple(min(ranks - rank, number) for rank in range(ranks))
            assert Schedule("GPipe", ranks, 1, number).in_flight == (number,) * ranks


def test_a_micro_batch_is_in_flight_until_its_gradients_of_weights() -> None:
    schedule = Schedule("InterleavedZeroBubble", 2, 1, 4)
    assert " ".join(map(str, schedule.actions[1])) == (
        "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3"
    )
    assert schedule.in_flight == (2, 2)
