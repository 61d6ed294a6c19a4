"""Pipeline schedules: the order in which the ranks of a pipeline compute their micro-batches.

The lists are those of `torch.distributed.pipelining`, action for action, without its idle slots.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple, get_args

from autoshard.errors import OptionError
from autoshard.plan.document import Pipeline, Plan
from autoshard.plan.options import ScheduleName

ActionKind = Literal["F", "B", "I", "W"]
"""Forward, full backward, and its two parts: gradients of inputs, and gradients of weights."""

SCHEDULE_NAMES: tuple[ScheduleName, ...] = get_args(ScheduleName)


class ComputeAction(NamedTuple):
    """Forward or backward of one micro-batch on one stage.

    Attributes:
        stage: number of the stage.
        kind: forward, full backward or a part of it.
        micro_batch: number of the micro-batch.
        overlaps_next: True if it and the next action are one action of torch's list
            (`OVERLAP_F_B`), after which both send their results.
    """

    stage: int
    kind: ActionKind
    micro_batch: int
    overlaps_next: bool = False

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @property
    def begins(self) -> bool:
        """True if the stage holds activations of the micro-batch from this action on."""
        return self.kind == "F"

    @property
    def ends(self) -> bool:
        """True if the stage holds none any more after this action."""
        return self.kind in ("B", "W")


@dataclass(frozen=True)
class Schedule:
    """A schedule for given numbers of pipeline ranks, stages and micro-batches.

    Attributes:
        name: name of the schedule in torch.
        num_ranks: number of pipeline ranks.
        stages_per_rank: number of stages that each of them holds.
        micro_batches: number of micro-batches per step.
        training: False for inference, which runs the forward actions only.

    Raises:
        OptionError: torch has no such schedule.
    """

    name: ScheduleName
    num_ranks: int
    stages_per_rank: int
    micro_batches: int
    training: bool = True

    def __post_init__(self) -> None:
        error = schedule_error(self.name, self.num_ranks, self.stages_per_rank, self.micro_batches)
        if error is not None:
            raise OptionError(error)

    @property
    def num_stages(self) -> int:
        """Number of stages of the pipeline."""
        return self.num_ranks * self.stages_per_rank

    @property
    def splits_backward(self) -> bool:
        """True if backward of weights may run later than backward of inputs."""
        return _SCHEDULES[self.name].splits_backward

    @cached_property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each pipeline rank, in ascending order."""
        return tuple(self.stages_of_rank(rank) for rank in range(self.num_ranks))

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """The stages of a pipeline rank, in ascending order."""
        return _SCHEDULES[self.name].placement(rank, self.num_ranks, self.stages_per_rank)

    @cached_property
    def rank_of_stage(self) -> tuple[int, ...]:
        """The pipeline rank of each stage."""
        rank_of = {stage: rank for rank, stages in enumerate(self.ranks) for stage in stages}
        return tuple(rank_of[stage] for stage in range(self.num_stages))

    @cached_property
    def actions(self) -> tuple[tuple[ComputeAction, ...], ...]:
        """The actions of each pipeline rank, in order."""
        found = [self._actions_of_rank(rank) for rank in range(self.num_ranks)]
        if self.training:
            return tuple(tuple(actions) for actions in found)
        return tuple(
            tuple(ComputeAction(*action[:3]) for action in actions if action.kind == "F")
            for actions in found
        )

    def _actions_of_rank(self, rank: int) -> list[ComputeAction]:
        make = _SCHEDULES[self.name].actions
        return make(rank, self.num_ranks, self.stages_per_rank, self.micro_batches)

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """Maximum number of micro-batches that each stage holds activations of.

        A micro-batch is in flight from its forward to the end of its backward, of weights too. In
        inference, none is kept after its forward.
        """
        if not self.training:
            return (1,) * self.num_stages
        live: Counter[int] = Counter()
        most: Counter[int] = Counter()
        for action in (action for actions in self.actions for action in actions):
            live[action.stage] += action.begins - action.ends
            most[action.stage] = max(most[action.stage], live[action.stage])
        return tuple(most[stage] for stage in range(self.num_stages))

    @cached_property
    def in_flight_of_rank(self) -> tuple[int, ...]:
        """Maximum number of micro-batches that the stages of each rank hold at the same time.

        A micro-batch counts once for each stage of the rank that holds it.
        """
        if not self.training:
            return tuple(map(len, self.ranks))
        return tuple(
            max(accumulate(action.begins - action.ends for action in actions))
            for actions in self.actions
        )


def planned_schedule(plan: Plan, pipeline: Pipeline) -> Schedule:
    """The schedule of a plan's pipeline.

    Raises:
        OptionError: torch has no such schedule.
    """
    return Schedule(
        pipeline.schedule,
        len(pipeline.ranks),
        len(plan.stages) // max(len(pipeline.ranks), 1),
        pipeline.micro_batches,
        training=plan.options.mode == "training",
    )


def schedule_error(
    name: ScheduleName, num_ranks: int, stages_per_rank: int, micro_batches: int
) -> str | None:
    """Reason why torch cannot run such a schedule, and the way out; None if it can."""
    if min(num_ranks, stages_per_rank, micro_batches) < 1:
        return (
            f"a pipeline of {num_ranks} ranks, {stages_per_rank} stages per rank and "
            f"{micro_batches} micro-batches does not exist: all three must be at least 1"
        )
    kind = _SCHEDULES[name]
    if kind.stages_per_rank not in (None, stages_per_rank):
        others = ", ".join(
            other
            for other in SCHEDULE_NAMES
            if _SCHEDULES[other].stages_per_rank in (None, stages_per_rank)
        )
        return (
            f"schedule {name} has exactly {kind.stages_per_rank} stages per pipeline rank, not "
            f"{stages_per_rank}: take {others}, or {kind.stages_per_rank * num_ranks} stages"
        )
    return kind.micro_batch_error(name, num_ranks, micro_batches)


def _at_least_stages(name: ScheduleName, num_ranks: int, micro_batches: int) -> str | None:
    num_stages = num_ranks * (_SCHEDULES[name].stages_per_rank or 1)
    if micro_batches >= num_stages:
        return None
    return (
        f"schedule {name} with {num_stages} stages runs at least {num_stages} micro-batches, "
        f"not {micro_batches}: take more micro-batches, fewer stages, or schedule GPipe"
    )


def _equal_rounds(name: ScheduleName, num_ranks: int, micro_batches: int) -> str | None:
    if _has_equal_rounds(num_ranks, micro_batches):
        return None
    lower, upper = micro_batches - 1, micro_batches + 1
    while not _has_equal_rounds(num_ranks, lower):
        lower -= 1
    while not _has_equal_rounds(num_ranks, upper):
        upper += 1
    return (
        f"schedule {name} on {num_ranks} ranks runs {micro_batches // num_ranks} rounds of "
        f"equally many micro-batches, which {micro_batches} micro-batches are not: take {lower} "
        f"or {upper}"
    )


def _has_equal_rounds(num_ranks: int, micro_batches: int) -> bool:
    return micro_batches % _num_rounds(num_ranks, micro_batches) == 0


def _num_rounds(num_ranks: int, micro_batches: int) -> int:
    return max(1, micro_batches // num_ranks)


def _any_number(_name: ScheduleName, _num_ranks: int, _micro_batches: int) -> None:
    return None


def _loop(rank: int, num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    return tuple(range(rank, num_ranks * stages_per_rank, num_ranks))


def _v_shape(rank: int, num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    return (rank, stages_per_rank * num_ranks - 1 - rank)


def _gpipe(rank: int, _num_ranks: int, _v: int, micro_batches: int) -> list[ComputeAction]:
    return [
        *(ComputeAction(rank, "F", number) for number in range(micro_batches)),
        *(ComputeAction(rank, "B", number) for number in range(micro_batches)),
    ]


def _one_forward_one_backward(
    rank: int, num_ranks: int, _stages_per_rank: int, micro_batches: int
) -> list[ComputeAction]:
    # After as many forwards as there are ranks behind it, the first gradient is on its way back. So
    # a rank holds at most `num_ranks - rank` micro-batches, however many there are in a step.
    forward = [ComputeAction(rank, "F", number) for number in range(micro_batches)]
    backward = [ComputeAction(rank, "B", number) for number in range(micro_batches)]
    return _alternate(forward, [[action] for action in backward], num_ranks - 1 - rank)


def _looped_bfs(
    rank: int, num_ranks: int, stages_per_rank: int, micro_batches: int
) -> list[ComputeAction]:
    stages = _loop(rank, num_ranks, stages_per_rank)
    numbers = range(micro_batches)
    return [
        *(ComputeAction(stage, "F", number) for stage in stages for number in numbers),
        *(
            ComputeAction(stage, "B", number)
            for stage in reversed(stages)
            for number in reversed(numbers)
        ),
    ]


def _interleaved(
    rank: int, num_ranks: int, stages_per_rank: int, micro_batches: int
) -> list[ComputeAction]:
    stages = _loop(rank, num_ranks, stages_per_rank)
    forward = _in_rounds("F", stages, num_ranks, micro_batches)
    backward = _in_rounds("B", stages[::-1], num_ranks, micro_batches)
    per_round = micro_batches // _num_rounds(num_ranks, micro_batches)
    # As in Megatron-LM (Narayanan et al., SC 2021), where a round has a micro-batch for each rank.
    warmup = (stages_per_rank - 1) * per_round + 2 * (num_ranks - 1 - rank)
    return _alternate(forward, [[action] for action in backward], warmup)


def _interleaved_zero_bubble(
    rank: int, num_ranks: int, stages_per_rank: int, micro_batches: int
) -> list[ComputeAction]:
    stages = _loop(rank, num_ranks, stages_per_rank)
    forward = _in_rounds("F", stages, num_ranks, micro_batches)
    backward = [[a] for a in _in_rounds("I", stages[::-1], num_ranks, micro_batches)]
    weights = _in_rounds("W", stages[::-1], num_ranks, micro_batches)
    # Nothing waits for gradients of weights, so they run later than those of inputs and fill the
    # time in which the rank would wait (Qi et al. 2024).
    for weight, group in zip(weights, backward[rank:], strict=False):
        group.append(weight)
    late = weights[max(len(weights) - rank, 0) :]
    per_round = micro_batches // _num_rounds(num_ranks, micro_batches)
    warmup = (stages_per_rank - 1) * per_round + num_ranks - 1 - rank
    return [*_alternate(forward, backward, warmup), *late]


def _in_rounds(
    kind: ActionKind, stages: Iterable[int], num_ranks: int, micro_batches: int
) -> list[ComputeAction]:
    """Actions of all stages in rounds: a round's micro-batches on one stage, then on the next."""
    stages = tuple(stages)
    rounds = _num_rounds(num_ranks, micro_batches)
    per_round = micro_batches // rounds
    return [
        ComputeAction(stage, kind, number)
        for first in range(0, micro_batches, per_round)
        for stage in stages
        for number in range(first, first + per_round)
    ]


def _alternate(
    forward: list[ComputeAction], backward: list[list[ComputeAction]], warmup: int
) -> list[ComputeAction]:
    """Forward actions for warm-up, then one forward and one backward each, then what is left."""
    warmup = min(warmup, len(forward))
    found = forward[:warmup]
    for number, group in enumerate(backward):
        found += forward[warmup + number : warmup + number + 1]
        found += group
    return found


class _ActionList:
    """A list of actions whose micro-batches are numbered by stage and pass.

    Attributes:
        actions: the actions.
    """

    def __init__(self) -> None:
        self.actions: list[ComputeAction] = []
        self._next: Counter[tuple[int, str]] = Counter()
        self._pending: list[ComputeAction] = []

    def add(self, stage: int, kind: ActionKind, *, overlaps_next: bool = False) -> None:
        """Append the next micro-batch of a stage; backward of weights waits for `add_weight`."""
        key = (stage, "F" if kind == "F" else "backward")
        action = ComputeAction(stage, kind, self._next[key], overlaps_next)
        self._next[key] += 1
        self.actions.append(action)
        if kind == "I":
            self._pending.append(action._replace(kind="W"))

    def add_weight(self, stage: int | None = None) -> None:
        """Append the earliest missing backward of weights, of a stage or of any, if there is one.

        Args:
            stage: the stage; None for any.
        """
        for number, action in enumerate(self._pending):
            if stage in (None, action.stage):
                self.actions.append(self._pending.pop(number))
                return

    def add_overlapped(self, forward: int, backward: int) -> None:
        """Append forward of one stage and full backward of another, as one action of torch."""
        self.add(forward, "F", overlaps_next=True)
        self.add(backward, "B")


def _zbv_zero_bubble(
    rank: int, num_ranks: int, stages_per_rank: int, micro_batches: int
) -> list[ComputeAction]:
    first, second = _v_shape(rank, num_ranks, stages_per_rank)
    total = max(2 * num_ranks - 1, micro_batches)  # those that there are not are left out below
    found = _ActionList()
    for _ in range(2 * (num_ranks - rank) - 1):
        found.add(first, "F")
    for _ in range(rank):
        found.add(second, "F")
        found.add(first, "F")
    for _ in range(num_ranks - rank):
        found.add(second, "F")
        _add_backward(found, second)
    for number in range(total - num_ranks):
        if number < total - (2 * num_ranks - 1 - rank):
            found.add(first, "F")
        _add_backward(found, first)
        found.add(second, "F")
        _add_backward(found, second)
    for _ in range(rank):
        found.add(first, "I")
        found.add(second, "I")
    for _ in range(num_ranks - rank):
        found.add(first, "I")
        found.add_weight(first)
    for stage in (second, first):
        for _ in range(rank):
            found.add_weight(stage)
    return [action for action in found.actions if action.micro_batch < micro_batches]


def _add_backward(found: _ActionList, stage: int) -> None:
    found.add(stage, "I")
    found.add_weight(stage)


def _dual_pipe_v(
    rank: int, num_ranks: int, stages_per_rank: int, micro_batches: int
) -> list[ComputeAction]:
    first, second = _v_shape(rank, num_ranks, stages_per_rank)
    later = num_ranks - rank - 1
    found = _ActionList()
    for _ in range(2 * later):
        found.add(first, "F")
    for _ in range(rank + 1):
        found.add(first, "F")
        found.add(second, "F")
    for _ in range(later):
        _add_backward(found, second)
        found.add(second, "F")
    for number in range(micro_batches - 2 * num_ranks + rank + 1):
        if number == later == 0:
            found.add(first, "F")
            found.add(second, "B")
        else:
            found.add_overlapped(first, second)
        found.add_overlapped(second, first)
    for _ in range(later):
        found.add(second, "B")
        found.add_overlapped(second, first)
    _drain_dual_pipe_v(found, rank, num_ranks, (first, second))
    return found.actions


def _drain_dual_pipe_v(
    found: _ActionList, rank: int, num_ranks: int, stages: tuple[int, int]
) -> None:
    """Append the backward actions after the last forward; from the middle on they are split."""
    first, second = stages
    for number, stage in enumerate((second, first) * (rank + 1)):
        found.add(stage, "B" if number <= rank else "I")
    for _ in range(num_ranks - rank - 1):
        found.add_weight()
        found.add(first, "I")
    for _ in range(rank + 1):
        found.add_weight()


@dataclass(frozen=True, slots=True)
class _Definition:
    """Description of a schedule.

    Attributes:
        actions: makes the list of a rank.
        placement: the stages of a rank.
        stages_per_rank: the only number of stages per rank; None for any.
        splits_backward: True if it has actions of kinds I and W.
        micro_batch_error: why a number of micro-batches is impossible.
    """

    actions: Callable[[int, int, int, int], list[ComputeAction]]
    placement: Callable[[int, int, int], tuple[int, ...]] = _loop
    stages_per_rank: int | None = None
    splits_backward: bool = False
    micro_batch_error: Callable[[ScheduleName, int, int], str | None] = _any_number


# GPipe: Huang et al. 2019. 1F1B and Interleaved1F1B: Narayanan et al., SC 2021. LoopedBFS:
# Lamy-Poirier, "Breadth-first pipeline parallelism", 2023. InterleavedZeroBubble and ZBVZeroBubble:
# Qi et al., "Zero bubble pipeline parallelism", 2024. DualPipeV: DualPipe of DeepSeek-V3 (2024),
# cut in half to a V shape.
_SCHEDULES: Mapping[ScheduleName, _Definition] = {
    "GPipe": _Definition(_gpipe, stages_per_rank=1),
    "1F1B": _Definition(
        _one_forward_one_backward, stages_per_rank=1, micro_batch_error=_at_least_stages
    ),
    "Interleaved1F1B": _Definition(_interleaved, micro_batch_error=_equal_rounds),
    "LoopedBFS": _Definition(_looped_bfs),
    "InterleavedZeroBubble": _Definition(
        _interleaved_zero_bubble, splits_backward=True, micro_batch_error=_equal_rounds
    ),
    "ZBVZeroBubble": _Definition(
        _zbv_zero_bubble, _v_shape, stages_per_rank=2, splits_backward=True
    ),
    "DualPipeV": _Definition(
        _dual_pipe_v, _v_shape, 2, splits_backward=True, micro_batch_error=_at_least_stages
    ),
}
