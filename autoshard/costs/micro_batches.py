"""Communication of a training step that accumulates the gradients of several micro-batches.

Forward and backward of the program run once per micro-batch. A parameter does not change between
them, so it may be gathered once and kept (FSDP's `reshard_after_backward=False`). Gradients add up,
so they may be summed on each rank and reduced once, after the last micro-batch (`no_sync` of DDP,
`requires_gradient_sync=False` of FSDP). Both need memory: gathered parameters and full gradients
then stay in memory from one micro-batch to the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from autoshard.costs.frequency import GATHERED_ONCE, Frequency
from autoshard.costs.overlap import ForwardBackward, Seconds, overlapped_seconds
from autoshard.graph import InputKind
from autoshard.layouts import Action


def num_waiting(forward: Sequence[str]) -> int:
    """Number of the first steps of a parameter's resharding that only reduce its gradient.

    Args:
        forward: the forward action of each step.

    Example:
        Parameters that are sharded on one axis and replicated on another (hybrid sharding) reduce
        and scatter gradients in every micro-batch, and all-reduce the shards once:

        >>> num_waiting(["nothing", "all_gather"])
        1
    """
    moving = (i for i, action in enumerate(forward) if action != Action.NOTHING)
    return next(moving, len(forward))


def inputs_held(kind: InputKind, micro_batches: int, in_flight: int) -> int:
    """Number of micro-batches for which an input is in memory.

    Args:
        kind: origin of the input.
        micro_batches: micro-batches of a step.
        in_flight: micro-batches whose activations are in memory at the same time; more than 1 in a
            pipeline, whose step takes the whole batch.
    """
    if kind is InputKind.RECEIVED:
        return in_flight
    return micro_batches if kind is InputKind.USER and in_flight > 1 else 1


def most_held(micro_batches: int, in_flight: int) -> int:
    """Largest number of micro-batches for which anything is in memory, with these arguments."""
    kinds = (InputKind.RECEIVED, InputKind.USER)
    return max(inputs_held(kind, micro_batches, in_flight) for kind in kinds)


def runs_per_step(
    forward: Sequence[str], frequency: Frequency, micro_batches: int
) -> list[tuple[int, int]]:
    """Number of runs of the steps of a parameter's resharding in a training step.

    Args:
        forward: the forward action of each step.
        frequency: how often the resharding runs.
        micro_batches: number of micro-batches.

    Returns:
        For each step the number of runs in forward and in backward.

    Example:
        >>> runs_per_step(["nothing", "all_gather"], Frequency.GATHER_STEP, 4)
        [(1, 1), (1, 4)]
    """
    waiting = 0 if frequency is Frequency.MICRO_BATCH else num_waiting(forward)
    gathers = 1 if frequency in GATHERED_ONCE else micro_batches
    reductions = 1 if frequency is Frequency.STEP else micro_batches
    return [(gathers, 1 if i < waiting else reductions) for i in range(len(forward))]


@dataclass(frozen=True, eq=False)
class StepCommunication(Generic[Seconds]):
    """Seconds of a resharding in a training step of one or more micro-batches.

    Attributes:
        total: seconds of forward and backward of one run; inf if it is impossible.
        run: the same by pass; any finite numbers if it is impossible.
        waiting: seconds of backward of the first steps, which only reduce the gradient.
        micro_batches: number of micro-batches.
        frequency: how often it runs.
        contention: fraction of overlapped seconds by which compute takes longer.
    """

    total: Seconds
    run: ForwardBackward[Seconds]
    waiting: Seconds
    micro_batches: int
    frequency: Frequency
    contention: float = 0.0

    def seconds(self) -> Seconds:
        """Seconds of all runs, without running forward again in backward."""
        every = self.every
        return self.total + (self.micro_batches - 1) * (every.forward + every.backward)

    def again(self) -> Seconds:
        """Seconds of running forward again in every backward."""
        return self.micro_batches * self.run.forward

    def overlapped(self, compute: ForwardBackward[Seconds], *, again: bool = False) -> Seconds:
        """Seconds that the overlap of all runs with compute saves.

        Args:
            compute: the weight's share of the reader's compute in one micro-batch.
            again: True if the forward part runs again in backward.
        """
        hidden = self._saved(self.run, compute, again=again)
        if self.micro_batches == 1:
            return hidden
        others = self._saved(self.every, compute, again=again)
        return hidden + (self.micro_batches - 1) * others

    def _saved(
        self, run: ForwardBackward[Seconds], compute: ForwardBackward[Seconds], *, again: bool
    ) -> Seconds:
        return overlapped_seconds(run, compute, again=again, contention=self.contention)

    @property
    def every(self) -> ForwardBackward[Seconds]:
        """Seconds of what runs in every micro-batch, not only once per step."""
        forward, backward = self.run.forward, self.run.backward
        if self.frequency is Frequency.STEP:
            backward = 0.0 * backward
        elif self.frequency is not Frequency.MICRO_BATCH:
            backward = backward - self.waiting
        gathers = self.frequency not in GATHERED_ONCE
        return ForwardBackward(forward if gathers else 0.0 * forward, backward)
