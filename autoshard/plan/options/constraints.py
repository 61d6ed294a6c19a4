"""Options of layouts: families of plans, pins, forbidden collectives, export targets."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from autoshard.base.arguments import Flag, Whole
from autoshard.base.integers import MAX_INT32
from autoshard.plan.options.group import Declared, FrozenOptions, OptionGroup, Pattern

Family = Literal["ddp", "fsdp2", "hsdp", "megatron", "megatron-sp"]
Algorithm = Literal["optimal", "ddp", "fsdp2", "hsdp", "megatron", "megatron-sp"]
ExportableTo = Literal["fsdp2", "parallelize-module", "hf-tp-plan", "torchtitan"]
ExportRole = Literal["replicate", "shard", "context", "tensor"]
Moved = Literal["parameters", "activations"]
CollectiveKind = Literal[
    "all_gather", "all_reduce", "all_to_all", "halo_exchange", "reduce_scatter"
]

MIN_EXPRESSED = 0.5
"""Share of a plan that an export must express, unless less is allowed."""

_LayoutText = Annotated[str, Field(max_length=1024)]
_AxisNames = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=255)], ...],
    Field(max_length=64, fail_fast=True),
]
SkipReplicated = Flag | _AxisNames
"""True if work must be divided at all, or the axes that divide it."""
_PinTable = Annotated[Mapping[Pattern, _LayoutText], Field(max_length=1024)]


class Pins(FrozenOptions):
    """Layouts that a plan must have, by name.

    A name may be a pattern in which `*` matches any text, including dots. A plan obeys every pin
    that matches. A layout has one part per axis of the mesh, separated by commas:

    * `I`, `R`, `S(dim)`, `P`: the SPMD type; for inputs, outputs and parameters `I` and `R` are
      equivalent;
    * `Replicate()`, `Shard(dim)`, `Partial()`: DTensor's names; `Replicate()` is `I` or `R`;
    * `S(dim)/1+1+1`, or `_StridedShard(dim, split_factor=3)`: interleaved, each of three sections
      of the dim is sharded;
    * `S(*)`, `Shard(*)`: sharded, along a dim that the plan chooses. Under a pattern of names, an
      input, parameter, buffer or output is sharded over as many ranks of these axes as it can be;
    * `*`: any type.

    Axes that shard one dim nest in the order of the mesh, or as given: `S(0),S(0);1>0` for axis 1
    outside of axis 0, `S(0),S(0);*` for any order. The part for an axis of one rank is ignored.
    """

    inputs: _PinTable = Field(default={}, description="by argument name of forward.")
    outputs: _PinTable = Field(
        default={}, description="by position among the outputs (`0`), or by value name."
    )
    parameters: _PinTable = Field(
        default={}, description="by dotted name in the state dict; any of several tied names."
    )
    buffers: _PinTable = Field(
        default={},
        description=(
            "by dotted name. Without a pin, a plan shards only buffers that forward updates."
        ),
    )
    nodes: _PinTable = Field(
        default={},
        description=(
            "by operator name, or by module path, which stands for the operators whose results "
            "leave the module. A single layout is for every output; "
            "`S(0),R R,R -> S(0),R` gives inputs and outputs, `*` leaves one free."
        ),
    )


class ForbiddenCollective(FrozenOptions):
    """A collective that a plan may not run, forward or backward."""

    kind: CollectiveKind
    of: Moved | None = Field(
        default=None,
        description=(
            "parameters: forbid it only where it moves parameters, what is computed from one "
            "parameter alone, or their gradients. activations: only where it moves other tensors "
            "or their gradients, so that ZeRO remains possible. All tensors if null."
        ),
    )
    axis: str | None = Field(
        default=None,
        min_length=1,
        max_length=255,
        description="forbid it on this axis only; on all axes if null.",
    )

    def __str__(self) -> str:
        of = "" if self.of is None else f":{self.of}"
        return self.kind + of + ("" if self.axis is None else f"@{self.axis}")


class ConstraintOptions(OptionGroup):
    """Layouts that a plan must have, or may not have."""

    title: ClassVar[str] = "Constraints on the plan"

    algo: Algorithm = Field(
        default="optimal",
        description=(
            "optimal: the fastest of all plans. The others are the fastest within a fixed pattern, "
            "as baselines. ddp: all axes shard the batch, parameters are replicated. fsdp2: all "
            "axes shard the batch, and every parameter too. hsdp: as fsdp2, but only the last axis "
            "shards parameters. megatron: on the last axis weights are column- or row-parallel, "
            "attention is sharded by heads and embeddings by vocabulary; the other axes shard the "
            "batch. megatron-sp: as megatron, and what is between these layers is sharded by "
            "sequence on the last axis. In the patterns of Megatron-LM an axis named dp or ep "
            "shards the batch and never weights, cp the sequence of tokens, and ep also experts."
        ),
    )
    distributed_optimizer: Flag = Field(
        default=False,
        description=(
            "whether the axes of `algo` ddp, megatron or megatron-sp that shard the batch or the "
            "sequence also shard parameters at rest and the optimizer's state (ZeRO-1, the "
            "distributed optimizer of Megatron-LM)."
        ),
    )
    exportable_to: ExportableTo | None = Field(
        default=None,
        description=(
            "plan only what this export target can express. fsdp2: all axes shard the batch, and "
            "parameters over the last one. parallelize-module: in addition, the last axis other "
            "than batch_axis is tensor-parallel: linear layers by columns or rows, embeddings by "
            "vocabulary or features. hf-tp-plan: one axis, tensor-parallel in this way. "
            "torchtitan: the pattern of its models, with the fastest of the parallelisms that its "
            "settings can give to the axes."
        ),
    )
    export_roles: Annotated[
        Annotated[tuple[ExportRole, ...], Field(max_length=64, fail_fast=True)] | None,
        Declared(
            metavar="ROLES",
            help="With --exportable-to, what each axis of several devices is for, outermost first: "
            "shard,tensor; of replicate, shard, context and tensor. The fastest by default.",
        ),
    ] = Field(
        default=None,
        description=(
            "with exportable_to, the role of each axis of several devices, outermost first; in a "
            "pipeline, of those of a stage. replicate and shard are data-parallel, context shards "
            "sequences, tensor layers. If null, the roles of the fastest plan, which has them here."
        ),
    )
    pins: Annotated[
        Pins,
        Declared(
            flags=("--pin",),
            metavar="KIND:NAME=LAYOUT",
            help="Fix a layout, with KIND input, output, parameter, buffer or node; NAME may be a "
            "pattern: 'parameter:*.wte.weight=*,S(0)'; S(*) shards a dim of the plan's choice. "
            "Repeatable.",
        ),
    ] = Field(default=Pins(), description="layouts that the plan must have.")
    forbid: Annotated[
        tuple[ForbiddenCollective, ...],
        Declared(
            metavar="COLLECTIVE[:OF][@AXIS]",
            help="Forbid a collective, OF parameters, activations or both, on one axis or on all: "
            "all_gather:activations@tp. Repeatable.",
        ),
    ] = Field(
        fail_fast=True,
        default=(),
        max_length=64,
        description="collectives that the plan may not run.",
    )
    batch_axis: Annotated[str | None, Declared(metavar="AXIS")] = Field(
        default=None,
        min_length=1,
        max_length=255,
        description=(
            "name of the data-parallel axis, the only one that shards the batch: dim 0 of user "
            "inputs, and the dims that derive from it."
        ),
    )
    unsharded_below: Annotated[Whole, Declared(metavar="ELEMENTS")] = Field(
        default=0,
        ge=0,
        le=MAX_INT32,
        description=(
            "parameters with fewer elements than this are stored whole on every rank, as by "
            "DeepSpeed below stage3_param_persistence_threshold: a gather of a few bytes takes as "
            "long as a message. 0: none has to be."
        ),
    )
    skip_fully_replicated: Annotated[
        SkipReplicated,
        Declared(
            help="Rule out that an operator which can be sharded does all of its work on every "
            "rank; views, scalars and operators without inputs are exempt.",
        ),
    ] = Field(
        default=False,
        description=(
            "whether to rule out that an operator which can be sharded does all of its work on "
            "every rank; views, scalars and operators without inputs are exempt. A list of axes: "
            "each operator is sharded over as many ranks of these axes as it can be."
        ),
    )
