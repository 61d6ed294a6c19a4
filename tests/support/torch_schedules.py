"""What torch.distributed.pipelining runs for a schedule: lists, and posted sends and receives.

Schedules are built without process groups. GPipe and 1F1B are loops: they are run on a stage that
only writes down what it is asked to do.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.schedules import get_schedule_class

LOOPS = ("GPipe", "1F1B")


@dataclass(frozen=True)
class Computed:
    """An action."""

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        """As torch writes it, `2F0`."""
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class Posted:
    """A send or receive is posted: of forward from a stage, or of a gradient from a stage."""

    transfer: tuple[int, str, int]
    receives: bool


@dataclass(frozen=True)
class Waited:
    """The rank waits until a transfer is complete."""

    transfer: tuple[int, str, int]


Step = Computed | Posted | Waited


def torch_schedule(name: str, num_ranks: int, stages_per_rank: int, micro_batches: int) -> Any:
    """A schedule of torch; raises its errors."""
    stage = SimpleNamespace(
        group_rank=0, group_size=num_ranks, num_stages=num_ranks * stages_per_rank, submod=None
    )
    make: Any = get_schedule_class(name)
    return make(stage if name in LOOPS else [stage] * stages_per_rank, micro_batches)


def torch_actions(
    name: str, num_ranks: int, stages_per_rank: int, micro_batches: int
) -> list[list[list[str]]]:
    """The actions of each rank; each a list with one action, or two overlapped ones."""
    if name in LOOPS:
        steps = torch_steps(name, num_ranks, stages_per_rank, micro_batches)
        return [[[str(s)] for s in rank if isinstance(s, Computed)] for rank in steps]
    found = torch_schedule(name, num_ranks, stages_per_rank, micro_batches)
    return [
        [
            [str(part) for part in action.sub_actions or (action,)]
            for action in found.pipeline_order[rank]
            if action is not None
        ]
        for rank in range(num_ranks)
    ]


def torch_steps(
    name: str, num_ranks: int, stages_per_rank: int, micro_batches: int
) -> list[list[Step]]:
    """What each rank does in a step, in order."""
    if name in LOOPS:
        return [_looped(name, rank, num_ranks, micro_batches) for rank in range(num_ranks)]
    found = torch_schedule(name, num_ranks, stages_per_rank, micro_batches)
    lists = found.pipeline_order_with_comms
    owner = found.stage_index_to_group_rank
    return [list(_instructions(lists[rank], rank, owner)) for rank in range(num_ranks)]


def _instructions(actions: Sequence[Any], rank: int, owner: dict[int, int]) -> Iterator[Step]:
    last = len(owner) - 1
    for action in actions:
        kind, stage, number = (
            action.computation_type.value,
            action.stage_index,
            action.microbatch_index,
        )
        if kind in ("SEND_F", "SEND_B"):
            yield Posted((stage, kind[-1], number), receives=False)
        elif kind in ("RECV_F", "RECV_B"):
            source = stage - 1 if kind == "RECV_F" else stage + 1
            yield Posted((source, kind[-1], number), receives=True)
        elif action.is_compute_op:
            for part in action.sub_actions or (action,):
                yield from _waits(part, rank, owner, last)
                kind = part.computation_type.value
                yield Computed(part.stage_index, kind, part.microbatch_index)


def _waits(action: Any, rank: int, owner: dict[int, int], last: int) -> Iterator[Waited]:
    kind, stage, number = action.computation_type.value, action.stage_index, action.microbatch_index
    if kind == "F" and stage > 0 and owner[stage - 1] != rank:
        yield Waited((stage - 1, "F", number))
    if kind in ("B", "I") and stage < last and owner[stage + 1] != rank:
        yield Waited((stage + 1, "B", number))


class _Recorder:
    """A pipeline stage that writes down what torch's loop asks of it.

    Args:
        index: number of the stage.
        num_stages: number of all stages.
    """

    is_last = False  # of the stages, so that torch computes no loss
    device = "cpu"
    has_backward = True

    def __init__(self, index: int, num_stages: int) -> None:
        self.stage_index, self.num_stages = index, num_stages
        self.steps: list[Step] = []

    def forward_one_chunk(self, number: int, *_args: object, **_kwargs: object) -> None:
        self.steps.append(Computed(self.stage_index, "F", number))

    def backward_one_chunk(self, number: int, **_kwargs: object) -> None:
        self.steps.append(Computed(self.stage_index, "B", number))

    def get_fwd_recv_ops(self, number: int) -> list[Posted]:
        source = self.stage_index - 1
        return [Posted((source, "F", number), receives=True)] if source >= 0 else []

    def get_fwd_send_ops(self, number: int) -> list[Posted]:
        sends = self.stage_index < self.num_stages - 1
        return [Posted((self.stage_index, "F", number), receives=False)] if sends else []

    def get_bwd_recv_ops(self, number: int) -> list[Posted]:
        source = self.stage_index + 1
        return [Posted((source, "B", number), receives=True)] if source < self.num_stages else []

    def get_bwd_send_ops(self, number: int) -> list[Posted]:
        sends = self.stage_index > 0
        return [Posted((self.stage_index, "B", number), receives=False)] if sends else []

    def perform_reduce_grad(self, _scale: int) -> None:
        """What follows is not part of the loop."""

    def release_fwd_send_outputs(self, _number: int) -> None:
        """Memory is not part of the loop; called since 2.15."""

    def post(self, operations: list[Posted], **_kwargs: object) -> list[Posted]:
        self.steps += operations
        return operations

    def wait(self, operations: list[Posted]) -> None:
        self.steps += [Waited(operation.transfer) for operation in operations]


def _looped(name: str, rank: int, num_ranks: int, micro_batches: int) -> list[Step]:
    recorder = _Recorder(rank, num_ranks)
    make: Any = get_schedule_class(name)
    loop = make(recorder, micro_batches)
    with (
        mock.patch.object(loop, "_initialize_stage"),
        mock.patch.object(schedules, "_batch_p2p", recorder.post),
        mock.patch.object(schedules, "_sorted_batch_p2p", lambda ops, **_: {0: recorder.post(ops)}),
        mock.patch.object(schedules, "_wait_batch_p2p", recorder.wait),
    ):
        loop._step_microbatches()
    return recorder.steps
