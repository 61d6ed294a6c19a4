"""The schedule of a plan, as an object of torch.distributed.pipelining."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.pipelining import schedules

from autoshard.errors import PlanError
from autoshard.plan.document import Pipeline
from autoshard.runtime.pipelining.devices import StageDevices
from autoshard.runtime.pipelining.stage import ScheduledStage
from autoshard.torch_private import num_micro_batches, without_set_up

Loss = Callable[[Any, torch.Tensor], torch.Tensor]
"""The loss of a micro-batch, from the results of forward and the micro-batch's number."""

MakeSchedule = Callable[..., Any]
"""A class of torch's schedules, or a function with the arguments of one for several stages."""

_ALL_ON_ONE_RANK = "LoopedBFS"
_SINGLE = (schedules.ScheduleGPipe, schedules.Schedule1F1B)
"""Schedules of one stage per rank, which run the last micro-batch last."""
SPLIT = frozenset({"InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"})
"""Schedules that run backward in two parts."""


def make_schedule(
    pipeline: Pipeline,
    devices: StageDevices,
    stages: Sequence[ScheduledStage],
    loss: Loss | None,
    own: MakeSchedule | None = None,
) -> Any:
    """The schedule that runs the stages of this rank.

    Args:
        pipeline: names the schedule.
        devices: of the stages.
        stages: of this rank.
        loss: of a micro-batch; None for inference.
        own: makes a schedule in place of the one that `pipeline` names.

    Raises:
        PlanError: the schedule does not support the number of stages or micro-batches, or places
            stages on other ranks than the plan.
    """
    alone = len(devices.positions) == 1
    named = schedules.get_schedule_class(_ALL_ON_ONE_RANK if alone else pipeline.schedule)
    name = getattr(own, "__name__", pipeline.schedule)
    made = _made(own or named, name, pipeline.micro_batches, stages, loss)
    for position, held in enumerate(devices.positions):
        for stage in held:
            if stages[0].stage_index_to_group_rank[stage] != position:
                raise PlanError(
                    f"schedule {name} runs stage {stage} on pipeline rank "
                    f"{stages[0].stage_index_to_group_rank[stage]}, and the plan on {position}"
                )
    return without_set_up(made)


def _made(
    kind: MakeSchedule,
    name: str,
    micro_batches: int,
    stages: Sequence[ScheduledStage],
    loss: Loss | None,
) -> Any:
    """The schedule itself, or an error that says why it cannot run."""
    is_single = isinstance(kind, type) and issubclass(kind, schedules.PipelineScheduleSingle)
    if is_single and len(stages) > 1:
        raise PlanError(f"schedule {name} runs one stage per rank, and the plan has {len(stages)}")
    try:
        # The loss is divided by the number of micro-batches instead of the gradients, which may
        # contain those of an earlier step.
        given = stages[0] if is_single else list(stages)
        made = kind(given, micro_batches, loss_fn=loss, scale_grads=False)
    except ValueError as error:
        raise PlanError(f"schedule {name} cannot run the plan: {error}") from error
    if type(made) in _SINGLE or (
        isinstance(made, schedules.PipelineScheduleMulti) and _order(made)
    ):
        return made
    raise PlanError(
        f"schedule {name} does not say in which order it runs micro-batches: give ScheduleGPipe, "
        f"Schedule1F1B, or a PipelineScheduleMulti of torch.distributed.pipelining.schedules with "
        f"a pipeline_order"
    )


def _order(schedule: Any) -> Any:
    """The actions of each rank; a schedule that was read with its messages has only those."""
    return schedule.pipeline_order or getattr(schedule, "pipeline_order_with_comms", None)


def last_backward(schedule: Any, stage: ScheduledStage) -> int:
    """The micro-batch whose gradients of parameters come last on a stage.

    Args:
        schedule: from `make_schedule`.
        stage: one of its stages.
    """
    number = num_micro_batches(schedule) - 1
    if isinstance(schedule, schedules.PipelineScheduleSingle):
        return number
    parts = ("FULL_BACKWARD", "BACKWARD_WEIGHT" if stage.splits_backward else "BACKWARD_INPUT")
    for action in _order(schedule)[stage.group_rank]:
        for one in () if action is None else action.sub_actions or (action,):
            if one.stage_index == stage.stage_index and one.computation_type.name in parts:
                number = one.microbatch_index
    return number
