"""Options of pipelines: stages, where they are cut, and their schedule."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from autoshard.base.arguments import Whole
from autoshard.base.integers import MAX_INT32
from autoshard.plan.options.group import Declared, OptionGroup
from autoshard.plan.options.training import MAX_MICRO_BATCHES

ScheduleName = Literal[
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
]
"""Pipeline schedules, by the names of `torch.distributed.pipelining`."""

SubMeshes = Literal["equal", "any"]
Weight = Literal["time", "flops", "parameters", "bytes"]
Cut = Annotated[str, Field(pattern="^(before|after|at):.", max_length=520)]

MAX_STAGES = 65_536
"""Maximum number of pipeline stages."""

_Balance = Annotated[
    tuple[Annotated[Whole, Field(ge=1, le=MAX_INT32)], ...],
    Field(min_length=1, max_length=1024, fail_fast=True),
]


class PipelineOptions(OptionGroup):
    """Stages of a pipeline, where they are cut, and their schedule."""

    title: ClassVar[str] = "Pipelines"

    stages: Annotated[
        Annotated[Whole, Field(ge=1, le=MAX_STAGES)] | Literal["auto"] | None,
        Declared(metavar="NUMBER|auto"),
    ] = Field(
        default=None,
        description=(
            "number of pipeline stages; the outermost axes of the mesh are divided among them. "
            "auto: chosen by optimization. If null, as many as `balance` lists, or as `cuts` and "
            "calls of `pipe_split()` in forward make; 1 if there are none. A plan of one stage "
            "ignores calls of `pipe_split()`."
        ),
    )
    cuts: Annotated[
        tuple[Cut, ...],
        Declared(
            flags=("--cut",),
            metavar="PLACE",
            help="Where a pipeline stage must begin: before:MODULE, after:MODULE, or at:OPERATOR; "
            "MODULE may be a pattern: 'before:transformer.h.4'. Repeatable.",
        ),
    ] = Field(
        fail_fast=True,
        default=(),
        max_length=1024,
        description=(
            "places where a pipeline stage must begin: `before:MODULE`, before the first operator "
            "of a module, `after:MODULE`, after its last one, or `at:OPERATOR`. MODULE is a dotted "
            "path, or a pattern in which `*` matches any text; OPERATOR is the name of a node. "
            "Calls of `pipe_split()` in forward count as well. Further cuts are chosen, if "
            "`stages` asks for more."
        ),
    )
    balance: Annotated[
        Weight | _Balance | None,
        Declared(
            metavar="time|flops|parameters|bytes|NUMBERS",
            help="Choose the cuts into stages without optimization: by time, flops, parameters or "
            "bytes, or numbers of layers, such as 3,3,4,2.",
        ),
    ] = Field(
        default=None,
        description=(
            "how to choose the cuts without optimization, for comparison: so that the largest "
            "stage is as small as possible by `time` (of operators on one device), `flops`, "
            "`parameters` (their number) or `bytes` (of parameters and buffers); or the "
            "number of layers of each stage, where layers are the numbered modules, or else "
            "the repeated blocks. If null, cuts are optimized together with the layouts."
        ),
    )
    schedule: ScheduleName | Literal["auto"] = Field(
        default="auto",
        description=(
            "schedule of a pipeline, by its name in torch.distributed.pipelining. auto: the one "
            "with the least simulated step time."
        ),
    )
    stages_per_rank: Annotated[
        Annotated[Whole, Field(ge=1, le=64)] | Literal["auto"], Declared(metavar="NUMBER|auto")
    ] = Field(
        default="auto",
        description=(
            "number of stages of each pipeline rank; schedules with several stages per rank have "
            "less idle time and more transfers. auto: the fastest that the schedule allows."
        ),
    )
    sub_meshes: SubMeshes = Field(
        default="equal",
        description=(
            "whether all stages of a pipeline have sub-meshes of one size, or any aligned blocks "
            "of the mesh that use all its devices."
        ),
    )
    in_flight: Whole = Field(
        default=1,
        ge=1,
        le=MAX_MICRO_BATCHES,
        description=(
            "number of micro-batches whose saved activations a pipeline stage holds at the same "
            "time; chosen by the pipeline schedule. At most micro_batches."
        ),
    )
