"""Private parts of `torch.distributed.pipelining`: what its schedules ask of a stage."""

from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining.stage import _PipelineStageBase


class StageBase(_PipelineStageBase):
    """A stage of several ranks that sends its own messages, for the schedules of torch.

    Relies on: schedules run any `_PipelineStageBase`, and read its position from `group_rank`,
    `group_size` and `stage_index_to_group_rank`. The public `PipelineStage` has one rank per
    stage, and sends whole tensors. The three abstract methods are called by
    `_initialize_pp_stages` alone, which `without_set_up` replaces.

    Args:
        model: the model.
        index: number of the stage.
        num_stages: number of all stages.
        device: of this rank.
        group: of all ranks with stages.
        position: number of this rank's pipeline rank, and of all pipeline ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        index: int,
        num_stages: int,
        *,
        device: torch.device,
        group: ProcessGroup,
        position: tuple[int, int],
    ) -> None:
        # The constructor expects a group of one rank per stage.
        super().__init__(model, index, max(num_stages, group.size()), device, group)
        self.num_stages = num_stages
        self.group_rank, self.group_size = position
        self.stage_index_to_group_rank = {i: i % self.group_size for i in range(num_stages)}
        self.args_recv_info = {0: ()}  # schedules with several stages per rank check it

    def _prepare_forward_infra(self, *_: Any, **__: Any) -> None:
        raise AssertionError("not called: see without_set_up")

    def _prepare_backward_infra(self, *_: Any, **__: Any) -> None:
        raise AssertionError("not called: see without_set_up")

    def _create_grad_recv_info(self, *_: Any, **__: Any) -> tuple[()]:
        raise AssertionError("not called: see without_set_up")


def without_set_up(schedule: Any) -> Any:
    """A schedule that runs its stages without asking them for shapes or warming up their group.

    Relies on: a step first calls `_initialize_pp_stages`, whose result says that forward and
    backward are initialised. There is no public way to say so. A plan has the shapes, and the
    groups of its stages have been used. Since 2.15 the method sends messages between the ranks of
    a group, taken as one rank per stage; before, it asked stages for them.
    """
    schedule._initialize_pp_stages = _nothing_to_initialise
    return schedule


def _nothing_to_initialise(*_: Any, **__: Any) -> tuple[bool, bool]:
    return True, True


def num_micro_batches(schedule: Any) -> int:
    """The number of micro-batches of a schedule.

    Relies on: `_n_microbatches`; public is only the constructor's argument.
    """
    number: int = schedule._n_microbatches
    return number
