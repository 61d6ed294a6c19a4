"""Options of what a training step computes: optimizer, element types and micro-batches."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from autoshard.base.arguments import Flag, Whole
from autoshard.costs.optimizer import Optimizer
from autoshard.plan.options.group import Declared, OptionGroup

StateDType = Literal["float32", "float16", "bfloat16"]

MAX_MICRO_BATCHES = 65_536
"""Maximum number of micro-batches of a step."""


class TrainingOptions(OptionGroup):
    """Optimizer, element types and micro-batches of a training step."""

    title: ClassVar[str] = "Training or inference"

    optimizer: Optimizer = Field(
        default=Optimizer.ADAMW,
        description="optimizer whose state is counted in memory and whose step is timed.",
    )
    master_weights: Flag = Field(
        default=False,
        description=(
            "whether the optimizer keeps and updates float32 copies of parameters of a narrower "
            "type."
        ),
    )
    state_dtype: StateDType | None = Field(
        default=None,
        description="element type of the optimizer state; the type of the updated values if null.",
    )
    clip_gradients: Flag = Field(
        default=False,
        description=(
            "whether gradients are clipped by their norm before the optimizer's step, as by "
            "`torch.nn.utils.clip_grad_norm_`; then every gradient is read twice and written once "
            "more."
        ),
    )
    accumulation_dtype: StateDType | None = Field(
        default=None,
        description=(
            "element type in which the gradients of micro-batches are summed; the type of the "
            "gradients if null. Gradients are computed and reduced in their own type."
        ),
    )
    micro_batches: Annotated[
        Whole,
        Declared(
            help="Number of micro-batches of a step (gradient accumulation), which are equal parts "
            "of the batch of a config; a graph is that of one micro-batch. 1 by default; for a "
            "config with --gpus, plan chooses it.",
            may_be_chosen=True,
        ),
    ] = Field(
        default=1,
        ge=1,
        le=MAX_MICRO_BATCHES,
        description=(
            "number of micro-batches of a training step (gradient accumulation): the program runs "
            "forward and backward this many times before the optimizer's step. Which parameters "
            "are gathered, and which gradients reduced, only once per step is part of the plan."
        ),
    )
