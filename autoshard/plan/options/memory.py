"""Options of memory: the budget, and what is freed and computed again to stay within it."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from autoshard.base.arguments import Flag
from autoshard.base.quantities import ByteCount
from autoshard.plan.options.group import Declared, OptionGroup, Patterns

Recomputing = Literal["auto", "never", "always"]


class MemoryOptions(OptionGroup):
    """Memory budget of a device, and what is freed and computed again to stay within it."""

    title: ClassVar[str] = "Memory"

    budget: Annotated[
        ByteCount | None,
        Declared(
            keyword="memory_budget",
            flags=("--memory", "--memory-budget"),
            metavar="BYTES",
            help="Memory per device, such as 80GB; default: all that the device has.",
        ),
    ] = Field(
        default=None,
        description="limit of the peak memory per device, bytes or a text such as '80GB'; the "
        "device's memory if null.",
    )
    reshard_after_forward: Recomputing = Field(
        default="auto",
        description=(
            "whether resharded tensors, such as gathered parameters, are freed after forward and "
            "resharded again in backward (FSDP's reshard_after_forward). auto: where it is needed "
            "to fit memory, at the least cost. never. always: every resharded graph input, other "
            "tensors as in auto. Recomputation inside activation checkpoints is not affected."
        ),
    )
    regather_activations: Flag = Field(
        default=False,
        description=(
            "whether activations that an all-gather makes, such as those of sequence or context "
            "parallelism, are kept sharded, and gathered again in backward, as in Megatron-LM "
            "(Korthikanti and others, 2022). If false, that is done where reshard_after_forward "
            "does it to fit memory."
        ),
    )
    activation_checkpointing: Recomputing = Field(
        default="auto",
        description=(
            "whether repeated blocks are recomputed in backward and only their inputs are saved. "
            "auto: where it is needed to fit memory, at least cost. never. always: every block; "
            "an error if there is none. `checkpointed_modules` names modules instead."
        ),
    )
    checkpointed_modules: Annotated[
        Patterns,
        Declared(
            flags=("--checkpointed-module",),
            metavar="MODULE",
            help="Module that activation checkpointing recomputes as a whole, instead of repeated "
            "blocks; it may be a pattern: 'layers.*'. Repeatable.",
        ),
    ] = Field(
        default=(),
        description=(
            "modules that activation_checkpointing recomputes, each as a whole, instead of "
            "repeated blocks: dotted paths, or patterns in which `*` matches any text, such as "
            "`layers.*`. Of nested modules that match, the outermost count."
        ),
    )
