"""Memory of a pipeline rank that holds several stages, over the actions of its schedule.

One stage of a rank runs at a time. It needs its own peak, less what micro-batches keep that are not
in flight at that time. Every other stage keeps its state and its micro-batches in flight.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.lowering.timeline import KINDS
from autoshard.plan.predictions import Memory
from autoshard.schedules.schedule import Schedule

_STATE = ("parameters", "optimizer", "buffers", "inputs")
"""The kinds that take the same memory throughout a step."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A stage of a rank, planned for a number of micro-batches in flight."""

    memory: Memory
    most: int

    def missing(self, number: int) -> int:
        """Bytes that the stage was planned for and that `number` micro-batches do not keep."""
        return (self.most - number) * (self.memory.per_micro_batch or 0)

    def running(self, number: int) -> int:
        """Bytes at the peak while one of `number` micro-batches in flight runs."""
        at_end = self.memory.phase == "optimizer"
        return self.memory.peak - (0 if at_end else self.missing(number))

    def waiting(self, number: int) -> int:
        """Bytes while another stage runs; also before and during the optimizer's step."""
        turn, end = self.memory.turn, self.memory.optimizer_step
        if turn is None or end is None:
            return self.memory.peak
        return max(turn - self.missing(number), end)

    def kinds(self, number: int, *, runs: bool) -> dict[str, int]:
        """The bytes of `running` or of `waiting` by kind."""
        found: dict[str, int] = {kind: getattr(self.memory, kind) for kind in KINDS}
        if runs:
            found["activations"] -= self.memory.peak - self.running(number)
            return found
        rest = self.waiting(number) - sum(found[kind] for kind in _STATE)
        if self.memory.turn is not None:
            found["activations"] = min(number * (self.memory.per_micro_batch or 0), rest)
        found["gradients"] = min(found["gradients"], rest - found["activations"])
        found["temporaries"] = rest - found["activations"] - found["gradients"]
        return found


def largest_rank_memory(schedule: Schedule, stages: Sequence[Memory], budget: int) -> Memory:
    """Memory of the pipeline rank with the largest peak.

    Args:
        schedule: of the pipeline.
        stages: memory of each stage by itself, with as many micro-batches in flight as
            `Schedule.in_flight` says.
        budget: bytes per device of the request.
    """
    found = (_rank_memory(schedule, rank, stages) for rank in range(schedule.num_ranks))
    return max(found, key=lambda memory: memory.peak).model_copy(update={"budget": budget})


def _rank_memory(schedule: Schedule, rank: int, stages: Sequence[Memory]) -> Memory:
    held = {s: _Held(stages[s], schedule.in_flight[s]) for s in schedule.ranks[rank]}
    if len(held) == 1:
        (only,) = held.values()
        return only.memory
    live = dict.fromkeys(held, 0)
    turn = waiting = sum(one.waiting(0) for one in held.values())
    peak, running, in_flight = waiting, -1, live.copy()
    for action in schedule.actions[rank]:
        one, before = held[action.stage], live[action.stage]
        live[action.stage] += action.begins
        others = waiting - one.waiting(before)
        now = others + one.running(live[action.stage])
        if now > peak:
            peak, running, in_flight = now, action.stage, live.copy()
        live[action.stage] -= action.ends
        waiting = others + one.waiting(live[action.stage])
        turn = max(turn, waiting)
    kinds = [one.kinds(in_flight[s], runs=s == running) for s, one in held.items()]
    parts = [one.memory for one in held.values()]
    first = parts[0] if running < 0 else stages[running]
    update: dict[str, object] = {kind: sum(part[kind] for part in kinds) for kind in KINDS}
    update["peak"] = peak
    if schedule.training:
        update["turn"] = turn
        for name in ("per_micro_batch", "optimizer_step"):
            update[name] = sum(getattr(part, name) or 0 for part in parts)
    if running < 0:
        update |= {"phase": "optimizer", "at": ""}
    return first.model_copy(update=update)
