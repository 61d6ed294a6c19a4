"""Simulation of a pipeline schedule: when each micro-batch runs on each rank, and a lower bound.

What is assumed is what `torch.distributed.pipelining` does:

* A rank computes one action after the other; so it does with the two of an overlapped action
  (`OVERLAP_F_B`), which sends both results after the second.
* Backward of inputs takes `backward_input`, backward of weights `backward_weight`, which is 0 for a
  stage that computes all gradients at once, and full backward both.
* A transfer starts as soon as the sender has the result and the receiver has posted the receive. It
  takes its seconds and overlaps with the compute of both. Stages of one rank transfer nothing.
* GPipe and 1F1B post a receive when the rank has nothing else to do before the receiving action. So
  the transfer overlaps with compute of the sender only. In 1F1B the next action also waits until
  the send before it is complete, if it goes in the other direction; in warm-up and cool-down, until
  the send before the last one is. In inference, 1F1B is simulated like GPipe.
* The other schedules place receives in the lists of instructions of the ranks as early as they can
  without deadlock, and wait for sends at the end of the step. Transfers between two ranks, in both
  directions, run one after the other in the order of these lists (NCCL has one stream per pair of
  ranks).
* What runs once per step comes after the last action and the last send of a rank. In the run, only
  the optimizer does: parameters are gathered in the first forward of a stage, and gradients reduced
  in its last backward. Other stages may have to wait for them.

Transfers between different pairs of ranks do not slow each other down, and neither do transfers and
collectives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import PlanError
from autoshard.plan.document import Plan, StageTimes
from autoshard.schedules.schedule import ComputeAction, Schedule, planned_schedule

_NOTHING = -1
"""Stands for an action or transfer that is not waited for."""

_ROWS = {"F": 0, "B": 1, "I": 2, "W": 3}
_SEND, _SEND_GRADIENT = 4, 5
"""Rows of the table of seconds by kind and stage."""


class ScheduleEvent(NamedTuple):
    """An action of a pipeline rank, or the transfer of its result, with its time.

    Attributes:
        action: the action.
        rank: the rank that computes or sends.
        start: seconds since the step began.
        end: the same, of its end.
        receiver: the rank to which the result is sent; None for the action itself.
    """

    action: ComputeAction
    rank: int
    start: float
    end: float
    receiver: int | None = None


@dataclass(frozen=True, eq=False)
class ScheduleSimulation:
    """A step of a pipeline.

    Attributes:
        schedule: the schedule.
        times: the seconds of its stages.
        seconds: duration of the step.
        finish: seconds after which each rank has no action and no send left, and begins what is due
            at the end of the step, shape [ranks].
        idle: seconds in which each rank computes nothing, shape [ranks].
    """

    schedule: Schedule
    times: tuple[StageTimes, ...]
    seconds: float
    finish: NDArray[np.float64]
    idle: NDArray[np.float64]
    _order: "_Order"
    _starts: NDArray[np.float64]
    _ends: NDArray[np.float64]

    @property
    def bubble(self) -> float:
        """Share of the step in which ranks are idle."""
        return float(self.idle.mean() / self.seconds) if self.seconds else 0.0

    @cached_property
    def events(self) -> tuple[ScheduleEvent, ...]:
        """All actions and transfers, in an order in which none waits for a later one."""
        order = self._order
        receivers = (None if rank < 0 else rank for rank in order.receivers.tolist())
        columns = (order.ranks.tolist(), self._starts.tolist(), self._ends.tolist(), receivers)
        return tuple(map(ScheduleEvent, order.actions, *columns))

    def of_rank(self, rank: int) -> tuple[ScheduleEvent, ...]:
        """The actions of a rank, without transfers."""
        return tuple(e for e in self.events if e.rank == rank and e.receiver is None)


def simulate_schedule(schedule: Schedule, times: Sequence[StageTimes]) -> ScheduleSimulation:
    """Simulate one step.

    Args:
        schedule: the schedule.
        times: seconds of each stage; `send` and `send_gradient` count only between stages on
            different ranks.

    Raises:
        PlanError: there are times of another number of stages.
    """
    table = _seconds(schedule, times)
    order = _order_of(schedule)
    durations = table[order.rows * schedule.num_stages + order.stages]
    starts, ends = _run(order, durations)
    finish = np.zeros(schedule.num_ranks)
    np.maximum.at(finish, order.ranks, ends)
    last = np.array([sum(times[stage].end for stage in stages) for stages in schedule.ranks])
    seconds = float((finish + last).max())
    computing = order.receivers < 0
    busy = np.bincount(order.ranks[computing], durations[computing], schedule.num_ranks) + last
    idle = np.maximum(seconds - busy, 0.0)
    return ScheduleSimulation(schedule, tuple(times), seconds, finish, idle, order, starts, ends)


def simulate_pipeline(plan: Plan) -> ScheduleSimulation:
    """Simulate one step of a plan with several stages.

    Raises:
        PlanError: the plan is not a pipeline.
        OptionError: torch has no such schedule.
    """
    pipeline = plan.pipeline
    if pipeline is None:
        raise PlanError(plan.reason or "the plan has a single stage, and so no schedule")
    schedule = planned_schedule(plan, pipeline)
    return simulate_schedule(schedule, [summary.times for summary in pipeline.stages])


def _seconds(schedule: Schedule, times: Sequence[StageTimes]) -> NDArray[np.float64]:
    """Seconds by kind and stage, flattened."""
    if len(times) != schedule.num_stages:
        raise PlanError(
            f"the schedule has {schedule.num_stages} stages, but there are times of {len(times)}"
        )
    rows = [
        (
            *(t.forward, t.backward_input + t.backward_weight),
            *(t.backward_input, t.backward_weight),
            *(t.send, t.send_gradient),
        )
        for t in times
    ]
    return np.array(rows, dtype=np.float64).T.ravel()


def _run(
    order: "_Order", durations: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Start and end of all actions and transfers, in the given order."""
    starts: list[float] = []
    ends = [0.0] * (len(durations) + 1)  # the last stands for nothing to wait for
    columns = (*(row.tolist() for row in order.waits), durations.tolist())
    for number, (a, b, c, duration) in enumerate(zip(*columns, strict=True)):
        # Each comes after those that it waits for, so one pass finds the longest paths.
        start = max(ends[a], ends[b], ends[c])
        starts.append(start)
        ends[number] = start + duration
    return np.array(starts), np.array(ends[:-1])


@dataclass(frozen=True, eq=False)
class _Order:
    """All actions and transfers of a step, each after those that it waits for.

    Attributes:
        actions: the action, or the one whose result is sent.
        waits: positions of up to three that end before it starts, shape [3, N].
        rows: row of its seconds in the table, shape [N].
        stages: its stage, shape [N].
        ranks: the rank that computes or sends, shape [N].
        receivers: the rank that receives, negative for an action, shape [N].
    """

    actions: tuple[ComputeAction, ...]
    waits: NDArray[np.int32]
    rows: NDArray[np.int32]
    stages: NDArray[np.int32]
    ranks: NDArray[np.int32]
    receivers: NDArray[np.int32]


@lru_cache(maxsize=32)
def _order_of(schedule: Schedule) -> _Order:
    # The order follows from the lists of actions, not from seconds: a search simulates one schedule
    # with the times of many partitions, and makes it once.
    if schedule.name in ("GPipe", "1F1B"):
        return _LoopOrder(schedule).build()
    return _InstructionOrder(schedule).build()


class _OrderBuilder:
    """Base class of the two ways in which torch runs schedules.

    Args:
        schedule: the schedule.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._rank_of = schedule.rank_of_stage
        self._nodes: list[tuple[int, int, int, int, int, int, int]] = []
        self._actions: list[ComputeAction] = []
        self._done = [0] * schedule.num_ranks
        """Number of actions of each rank that are in the order."""
        self._last = [_NOTHING] * schedule.num_ranks
        """Position of the last action of each rank."""
        self._arrival = [_NOTHING] * (2 * schedule.num_stages * schedule.micro_batches)
        """The action that brings the input of each forward and backward; see `_input`."""

    def build(self) -> _Order:
        """Append actions of all ranks in turn until all are in the order."""
        left = [len(actions) for actions in self._schedule.actions]
        while self._done != left:
            for rank in range(self._schedule.num_ranks):
                if self._done[rank] < left[rank]:
                    self._advance(rank)
        columns = np.array(self._nodes, dtype=np.int32).T
        return _Order(tuple(self._actions), columns[:3], *columns[3:])

    def _advance(self, rank: int) -> None:
        """Append what a rank can do next, if it can do something."""
        raise NotImplementedError

    def _input(self, action: ComputeAction) -> int | None:
        """Index in `_arrival` of what an action needs from another stage; None if nothing."""
        stage, kind, number, _ = action
        if kind == "F":
            return self._slot(stage, "F", number) if stage else None
        if kind == "W" or stage == self._schedule.num_stages - 1:
            return None
        return self._slot(stage, "B", number)

    def _slot(self, stage: int, kind: str, number: int) -> int:
        row = stage if kind == "F" else self._schedule.num_stages + stage
        return row * self._schedule.micro_batches + number

    def _reader(self, action: ComputeAction) -> int | None:
        """The other stage that reads the result of an action; None if there is none."""
        if action.kind == "F" and action.stage < self._schedule.num_stages - 1:
            return action.stage + 1
        if action.kind in ("B", "I") and action.stage:
            return action.stage - 1
        return None

    def _compute(self, action: ComputeAction, arrival: int, sent: int = _NOTHING) -> int:
        rank = self._rank_of[action.stage]
        waits = (self._last[rank], arrival, sent)
        self._actions.append(action)
        self._nodes.append((*waits, _ROWS[action.kind], action.stage, rank, _NOTHING))
        self._last[rank] = len(self._nodes) - 1
        self._done[rank] += 1
        return self._last[rank]

    def _transfer(self, action: ComputeAction, produced: int, earlier: int) -> int:
        """Append a transfer; its receive is posted after the last action of the receiver."""
        reader = action.stage + 1 if action.kind == "F" else action.stage - 1
        rank, receiver = self._rank_of[action.stage], self._rank_of[reader]
        waits = (produced, self._last[receiver], earlier)
        row = _SEND if action.kind == "F" else _SEND_GRADIENT
        self._actions.append(action)
        self._nodes.append((*waits, row, action.stage, rank, receiver))
        sent = len(self._nodes) - 1
        self._arrival[self._slot(reader, action.kind, action.micro_batch)] = sent
        return sent


class _InstructionOrder(_OrderBuilder):
    """Order of schedules with lists of instructions, to which torch adds sends and receives."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule)
        self._between: dict[frozenset[int], int] = {}
        """Position of the last transfer between two ranks."""
        self._others = [_other_instructions(actions) for actions in schedule.actions]
        """Number of other instructions before each action, which are not in the order yet."""

    def _advance(self, rank: int) -> None:
        actions, number = self._schedule.actions[rank], self._done[rank]
        if self._others[rank][number]:
            self._others[rank][number] -= 1
            return
        group = actions[number : number + 1 + actions[number].overlaps_next]
        arrivals = [self._arrival_of(action) for action in group]
        if None in arrivals:
            return
        for action, arrival in zip(group, arrivals, strict=True):
            if arrival is not None:
                produced = self._compute(action, arrival)
        for action in group:
            self._deliver(action, produced)

    def _arrival_of(self, action: ComputeAction) -> int | None:
        """The action that brings the input of another; None if it is not in the order yet."""
        needed = self._input(action)
        if needed is None:
            return _NOTHING
        return None if self._arrival[needed] == _NOTHING else self._arrival[needed]

    def _deliver(self, action: ComputeAction, produced: int) -> None:
        """Send the result of an action to the stage that reads it, if another rank has it."""
        reader = self._reader(action)
        if reader is None:
            return
        ranks = frozenset((self._rank_of[action.stage], self._rank_of[reader]))
        if len(ranks) == 1:
            self._arrival[self._slot(reader, action.kind, action.micro_batch)] = produced
        else:
            earlier = self._between.get(ranks, _NOTHING)
            self._between[ranks] = self._transfer(action, produced, earlier)


def _other_instructions(actions: Sequence[ComputeAction]) -> list[int]:
    """Number of instructions of torch before each action, other than sends and receives.

    Before an action come `UNSHARD` for the next three stages, as far as it is new, and `RESHARD`
    for others; after the last backward of a stage comes `REDUCE_GRAD`. Each delays, by one, where
    torch places receives in the list of the rank.
    """
    number = [0] * (len(actions) + 1)
    upcoming: list[int] = []
    unsharded: frozenset[int] = frozenset()
    for position, action in reversed(list(enumerate(actions))):
        ends = action.stage not in upcoming and action.kind != "F"
        upcoming = [action.stage, *(stage for stage in upcoming if stage != action.stage)]
        following, unsharded = unsharded, frozenset(upcoming[:3])
        number[position + 1] += len(following ^ unsharded) + ends
    number[0] += len(unsharded)
    return number


class _LoopOrder(_OrderBuilder):
    """Order of GPipe and 1F1B, which post a receive just before the action that needs it."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule)
        self._waits_for_sends = schedule.name == "1F1B" and schedule.training
        self._produced = [_NOTHING] * len(self._arrival)
        """Position of each forward and backward."""

    def _advance(self, rank: int) -> None:
        actions, number = self._schedule.actions[rank], self._done[rank]
        action = actions[number]
        posting, sent = self._sends_before(actions[max(number - 2, 0) : number], action)
        if posting is None:
            return
        arrival = self._receive(action, posting)
        if arrival is not None and sent is not None:
            position = self._compute(action, arrival, posting if sent == _NOTHING else sent)
            self._produced[self._slot(action.stage, action.kind, action.micro_batch)] = position

    def _sends_before(
        self, earlier: tuple[ComputeAction, ...], action: ComputeAction
    ) -> tuple[int | None, int | None]:
        """Transfers that end before an action's receive is posted, and before it is computed.

        Args:
            earlier: the last two actions of the rank, as far as there are two.
            action: the action.
        """
        posting: int | None = _NOTHING
        sent: int | None = _NOTHING
        if self._waits_for_sends and earlier:
            if earlier[0] != earlier[-1] and earlier[0].kind == earlier[-1].kind:
                posting = self._sent(earlier[0])
            if earlier[-1].kind != action.kind:
                sent = self._sent(earlier[-1])
        return posting, sent

    def _sent(self, action: ComputeAction) -> int | None:
        """The transfer of an action's result; None if it is not in the order yet."""
        reader = self._reader(action)
        if reader is None:
            return _NOTHING
        position = self._arrival[self._slot(reader, action.kind, action.micro_batch)]
        return None if position == _NOTHING else position

    def _receive(self, action: ComputeAction, posting: int) -> int | None:
        """The transfer that brings the input of an action; None if it cannot start yet."""
        needed = self._input(action)
        if needed is None:
            return _NOTHING
        if self._arrival[needed] == _NOTHING:
            source = action.stage - 1 if action.kind == "F" else action.stage + 1
            produced = self._produced[self._slot(source, action.kind, action.micro_batch)]
            if produced == _NOTHING:
                return None
            self._transfer(self._actions[produced], produced, posting)
        return self._arrival[needed]
