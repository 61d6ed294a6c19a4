"""Simulated schedules against what torch runs, known formulas, and the lower bound."""

import random
from collections import deque
from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from support.torch_schedules import Computed, Posted, Waited, torch_steps

from autoshard.errors import PlanError
from autoshard.plan.document import ScheduleName, StageTimes
from autoshard.schedules.schedule import SCHEDULE_NAMES, Schedule, schedule_error
from autoshard.schedules.simulation import simulate_schedule

Case = tuple[ScheduleName, int, int, int]
Moved = tuple[int, str, int]
"""A transfer: of forward or backward, from a stage, of a micro-batch."""

CASES: list[Case] = [
    (name, ranks, stages, number)
    for name in SCHEDULE_NAMES
    for ranks, stages, number in (
        *((1, 2, 3), (2, 2, 4), (3, 2, 6), (3, 4, 9), (4, 2, 10), (4, 3, 8), (5, 2, 7)),
        *((2, 1, 5), (3, 1, 3), (4, 1, 12), (5, 1, 10)),
    )
    if schedule_error(name, ranks, stages, number) is None
]


def equal_stages(number: int, **times: float) -> list[StageTimes]:
    given = {"forward": 1.0, "backward_input": 1.0, "backward_weight": 0.0, "end": 0.0, **times}
    return [StageTimes(**given)] * number


def random_stages(generator: random.Random, number: int) -> list[StageTimes]:
    names = ("forward", "backward_input", "backward_weight", "end", "send", "send_gradient")
    scale = generator.choice((0.0, 0.1, 1.0))
    return [
        StageTimes(**{n: generator.random() * (scale if "send" in n else 1.0) for n in names})
        for _ in range(number)
    ]


class TorchStep:
    """One step, event by event, of what torch's ranks compute, post and wait for.

    Args:
        schedule: the schedule.
        times: seconds of its stages.
    """

    def __init__(self, schedule: Schedule, times: Sequence[StageTimes]) -> None:
        case = (schedule.name, schedule.num_ranks, schedule.stages_per_rank, schedule.micro_batches)
        self.times = times
        self.steps = torch_steps(*case)
        self.clock = [0.0] * schedule.num_ranks
        self.starts: dict[str, float] = {}
        self.ends: dict[str, float] = {}
        self.posted: dict[Moved, list[float]] = {}
        self.complete: dict[Moved, float] = {}
        self.before = {} if schedule.name in ("GPipe", "1F1B") else self.order_between_ranks()

    def order_between_ranks(self) -> dict[Moved, Moved]:
        """The transfer before each one on the stream of its pair of ranks; equal on both ranks."""
        posts = [[s.transfer for s in rank if isinstance(s, Posted)] for rank in self.steps]
        found: dict[Moved, Moved] = {}
        for one, other in combinations(posts, 2):
            common = set(one) & set(other)
            stream = [transfer for transfer in one if transfer in common]
            assert stream == [transfer for transfer in other if transfer in common]
            found.update((later, earlier) for earlier, later in pairwise(stream))
        return found

    def run(self) -> None:
        """Run all ranks as far as they get, complete transfers, and so on until the end."""
        queues = [deque(steps) for steps in self.steps]
        while any(queues):
            left = sum(map(len, queues))
            for rank, queue in enumerate(queues):
                while queue and self.did(rank, queue[0]):
                    queue.popleft()
            while self.transferred():
                pass
            assert sum(map(len, queues)) < left, "deadlock"

    def did(self, rank: int, step: Computed | Posted | Waited) -> bool:
        """Do one step of a rank; False if it has to wait for something not known yet."""
        if isinstance(step, Posted):
            self.posted.setdefault(step.transfer, []).append(self.clock[rank])
        elif isinstance(step, Computed):
            self.starts[str(step)] = self.clock[rank]
            self.clock[rank] += self.taken(self.times[step.stage], step.kind)
            self.ends[str(step)] = self.clock[rank]
        elif step.transfer in self.complete:
            self.clock[rank] = max(self.clock[rank], self.complete[step.transfer])
        else:
            return False
        return True

    def taken(self, times: StageTimes, kind: str) -> float:
        full = times.backward_input + times.backward_weight
        first, second = times.backward_input, times.backward_weight
        return {"F": times.forward, "B": full, "I": first, "W": second}[kind]

    def transferred(self) -> bool:
        """Complete one transfer; False if none is ready."""
        for (stage, kind, number), ready in self.posted.items():
            moved = (stage, kind, number)
            earlier = self.before.get(moved)
            known = earlier is None or earlier in self.complete
            if moved not in self.complete and len(ready) == 2 and known:
                times = self.times[stage]
                free = 0.0 if earlier is None else self.complete[earlier]
                taken = times.send if kind == "F" else times.send_gradient
                self.complete[moved] = max(*ready, free) + taken
                return True
        return False

    def seconds(self, schedule: Schedule) -> float:
        """Duration of the step: a rank ends after its computing and its sends."""
        ends = list(self.clock)
        for (stage, _, _), end in self.complete.items():
            rank = schedule.rank_of_stage[stage]
            ends[rank] = max(ends[rank], end)
        last = [sum(self.times[s].end for s in stages) for stages in schedule.ranks]
        return max(end + more for end, more in zip(ends, last, strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_actions_run_when_torch_runs_them(case: Case) -> None:
    generator = random.Random(str(case))
    schedule = Schedule(*case)
    for _ in range(3):
        times = random_stages(generator, schedule.num_stages)
        step = TorchStep(schedule, times)
        step.run()
        found = simulate_schedule(schedule, times)
        events = [e for e in found.events if e.receiver is None]
        assert {str(e.action): e.end for e in events} == pytest.approx(step.ends)
        assert {str(e.action): e.start for e in events} == pytest.approx(step.starts)
        assert found.seconds == pytest.approx(step.seconds(schedule))


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_clocks_of_equal_stages(name: ScheduleName) -> None:
    """Alpa's count: 2(m + b - 1) clocks, and one that applies gradients."""
    for ranks in range(1, 7):
        for number in range(ranks, 9):
            found = simulate_schedule(Schedule(name, ranks, 1, number), equal_stages(ranks, end=1))
            assert found.seconds == 2 * (ranks + number - 1) + 1
            assert found.bubble == pytest.approx(2 * (ranks - 1) / found.seconds)


def test_forward_and_backward_of_a_stage_are_on_one_rank() -> None:
    """In Alpa's numbering of 2m stages, backward of stage f is stage 2m - 1 - f."""
    for name in ("GPipe", "1F1B"):
        found = simulate_schedule(Schedule(name, 4, 1, 5), equal_stages(4))
        ranks = {(e.action.kind, e.action.stage): e.rank for e in found.events if not e.receiver}
        numbered = {s if kind == "F" else 7 - s: rank for (kind, s), rank in ranks.items()}
        assert all(numbered[stage] == numbered[7 - stage] == stage for stage in range(4))


def test_unequal_stages_against_the_formulas_of_other_planners() -> None:
    """Alpa: sum + (b - 1) max; nnScaler: max (b - 1 + s). They differ for unequal stages.

    Without transfers, GPipe takes what Alpa's formula says. 1F1B can be faster: a rank that waits
    for its first gradient runs forward of the next micro-batch.
    """
    for times, alpa, nnscaler, one_f_one_b in (
        ([1.0, 1.0, 1.0], 24, 24, 24),
        ([1.0, 2.0, 1.0], 42, 48, 40),
        ([3.0, 1.0, 1.0], 60, 72, 54),
        ([1.0, 1.0, 3.0], 60, 72, 60),
    ):
        stages = [s for t in times for s in equal_stages(1, forward=t, backward_input=2 * t)]
        totals = [3 * t for t in times]
        assert sum(totals) + 5 * max(totals) == alpa
        assert max(totals) * (5 + len(totals)) == nnscaler
        assert simulate_schedule(Schedule("GPipe", 3, 1, 6), stages).seconds == alpa
        assert simulate_schedule(Schedule("1F1B", 3, 1, 6), stages).seconds == one_f_one_b


def test_interleaving_divides_the_bubble() -> None:
    """Megatron: the bubble is (ranks - 1) / (stages per rank x micro-batches) of the work."""
    for per_rank in (1, 2, 4):
        stages = equal_stages(4 * per_rank, forward=1 / per_rank, backward_input=1 / per_rank)
        found = simulate_schedule(Schedule("Interleaved1F1B", 4, per_rank, 8), stages)
        assert found.seconds == pytest.approx(2 * 8 * (1 + 3 / (per_rank * 8)))


def test_zero_bubble_needs_backward_of_weights_apart() -> None:
    names: tuple[ScheduleName, ...] = ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
    apart, at_once = (
        {n: simulate_schedule(Schedule(n, 4, 2, 16), stages).seconds for n in names}
        for stages in (equal_stages(8, backward_weight=1), equal_stages(8, backward_input=2))
    )
    assert apart["ZBVZeroBubble"] == 2 * 16 * 3 + 3  # filling the pipeline is all that is idle
    assert apart["InterleavedZeroBubble"] < apart["Interleaved1F1B"] == at_once["Interleaved1F1B"]
    assert at_once["ZBVZeroBubble"] > at_once["Interleaved1F1B"]


def test_times_of_another_number_of_stages_are_refused() -> None:
    with pytest.raises(PlanError, match="the schedule has 4 stages, but there are times of 3"):
        simulate_schedule(Schedule("GPipe", 4, 1, 4), equal_stages(3))
