"""Planning options."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autoshard.base.arguments import MAX_SECONDS, Flag, Number, Whole
from autoshard.base.integers import MAX_INT32
from autoshard.base.names import did_you_mean
from autoshard.base.outcome import OWN_SOLVER
from autoshard.base.quantities import ByteCount
from autoshard.errors import ArgumentTypeError, OptionError

Mode = Literal["training", "inference"]
Pattern = Literal["ddp", "fsdp2", "hsdp", "megatron", "megatron-sp"]
Algorithm = Literal["optimal", "ddp", "fsdp2", "hsdp", "megatron", "megatron-sp"]
ExportableTo = Literal["fsdp2", "parallelize-module", "hf-tp-plan", "torchtitan"]
Recomputing = Literal["auto", "never", "always"]
ExecutionMode = Literal["eager", "compile"]
AttentionKernel = Literal[
    "auto",
    "flash_attention_1",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "cudnn_attention",
    "math",
]
StateDType = Literal["float32", "float16", "bfloat16"]
Moved = Literal["parameters", "activations"]
CollectiveKind = Literal[
    "all_gather", "all_reduce", "all_to_all", "halo_exchange", "reduce_scatter"
]

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

MAX_MICRO_BATCHES = 65_536
"""Maximum number of micro-batches of a step."""
MAX_STAGES = 65_536
"""Maximum number of pipeline stages."""

MIN_EXPRESSED = 0.5
"""Share of a plan that an export must express, unless less is allowed."""

_Pattern = Annotated[str, Field(min_length=1, max_length=512)]
_LayoutText = Annotated[str, Field(max_length=1024)]
_Balance = Annotated[
    tuple[Annotated[Whole, Field(ge=1, le=MAX_INT32)], ...],
    Field(min_length=1, max_length=1024, fail_fast=True),
]
_AxisNames = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=255)], ...],
    Field(max_length=64, fail_fast=True),
]
SkipReplicated = Flag | _AxisNames
"""True if work must be divided at all, or the axes that divide it."""
_Patterns = Annotated[tuple[_Pattern, ...], Field(max_length=1024, fail_fast=True)]
_PinTable = Annotated[Mapping[_Pattern, _LayoutText], Field(max_length=1024)]


class _Options(BaseModel):
    """Base class of options: immutable, without unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    if not TYPE_CHECKING:  # type checkers know the fields

        def __init__(self, **given: Any) -> None:
            try:
                super().__init__(**given)
            except ValidationError as error:
                raise option_error(error, type(self)) from None

        # Only direct calls run it: validation of documents reports all its errors itself.
        __init__.__pydantic_base_init__ = True


def option_error(error: ValidationError, kind: type[BaseModel]) -> OptionError:
    """The error of invalid options, about the first of them.

    Args:
        error: found by validation.
        kind: type of the options.
    """
    found = error.errors(include_url=False, include_context=False)
    first = found[0]
    # Inside an option there are numbers of its items, and names of types that it may have.
    is_table = first["loc"][:1] == ("pins",)
    place = ".".join(map(str, first["loc"] if is_table else first["loc"][:1]))
    if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
        return unknown_option(place, kind)
    same = [one for one in found if one["loc"][:1] == first["loc"][:1]]
    texts = dict.fromkeys(one["msg"].removeprefix("Value error, ") for one in same)
    return OptionError(f"{place}: {'; or: '.join(texts)}")


def unknown_option(name: str, kind: type[BaseModel]) -> OptionError:
    """The error of an option that does not exist."""
    known = list(kind.model_fields)
    hint = did_you_mean(name, known) or f"; the options are {', '.join(known)}"
    return OptionError(f"there is no option {name!r}{hint}")


class Pins(_Options):
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


class ForbiddenCollective(_Options):
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


class PlanOptions(_Options):
    """Options of planning, with defaults that suit most users."""

    mode: Mode = Field(
        default="training",
        description="training counts forward, backward and the optimizer step; inference forward.",
    )
    optimizer: str = Field(
        default="adamw",
        min_length=1,
        max_length=255,
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
    memory_budget: ByteCount | None = Field(
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
    checkpointed_modules: _Patterns = Field(
        default=(),
        description=(
            "modules that activation_checkpointing recomputes, each as a whole, instead of "
            "repeated blocks: dotted paths, or patterns in which `*` matches any text, such as "
            "`layers.*`. Of nested modules that match, the outermost count."
        ),
    )
    micro_batches: Whole = Field(
        default=1,
        ge=1,
        le=MAX_MICRO_BATCHES,
        description=(
            "number of micro-batches of a training step (gradient accumulation): the program runs "
            "forward and backward this many times before the optimizer's step. Which parameters "
            "are gathered, and which gradients reduced, only once per step is part of the plan."
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
    stages: Annotated[Whole, Field(ge=1, le=MAX_STAGES)] | Literal["auto"] | None = Field(
        default=None,
        description=(
            "number of pipeline stages; the outermost axes of the mesh are divided among them. "
            "auto: chosen by optimization. If null, as many as `balance` lists, or as `cuts` and "
            "calls of `pipe_split()` in forward make; 1 if there are none. A plan of one stage "
            "ignores calls of `pipe_split()`."
        ),
    )
    cuts: tuple[Cut, ...] = Field(
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
    balance: Weight | _Balance | None = Field(
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
    stages_per_rank: Annotated[Whole, Field(ge=1, le=64)] | Literal["auto"] = Field(
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
    accumulation_dtype: StateDType | None = Field(
        default=None,
        description=(
            "element type in which the gradients of micro-batches are summed; the type of the "
            "gradients if null. Gradients are computed and reduced in their own type."
        ),
    )
    fused_gradient_accumulation: Flag = Field(
        default=False,
        description=(
            "whether products that compute gradients add them to the sum over micro-batches, as "
            "Megatron-LM's kernels do, instead of a pass of its own."
        ),
    )
    foreach_optimizer: Flag = Field(
        default=False,
        description=(
            "whether the optimizer updates parameters by several passes over all of them "
            "(foreach=True of torch.optim), instead of one (fused=True)."
        ),
    )
    execution: ExecutionMode = Field(
        default="eager",
        description=(
            "how operators run. eager: each as kernels of its own, which the host launches. "
            "compile: by torch.compile, which fuses pointwise operators, normalisations and "
            "reductions of a layer that follow each other, and saves less for backward."
        ),
    )
    eager_modules: _Patterns = Field(
        default=(),
        description=(
            "with execution compile, modules whose operators run one by one all the same, such as "
            "those that torch.compiler.disable leaves out: dotted paths or patterns, as in "
            "float8_modules."
        ),
    )
    float8_modules: _Patterns = Field(
        default=(),
        description=(
            "modules whose linear layers multiply 16-bit activations and weights in float8, as "
            "after torchao's convert_to_float8_training: dotted paths, or patterns in which `*` "
            "matches any text, such as `layers.*`. The casts are part of the price."
        ),
    )
    attention_kernel: AttentionKernel = Field(
        default="auto",
        description=(
            "kernel of scaled dot-product attention, for devices with rates of kernels. auto: the "
            "first of the device. math: products and a softmax, with all scores in memory; these "
            "are not counted as saved tensors."
        ),
    )
    overlap: Flag | None = Field(
        default=None,
        description=(
            "whether parameter gathers and gradient reductions overlap with the compute of the "
            "operators that read the parameters; then only the rest of them costs time. If null, "
            "they do on devices with rates of kernels, such as most presets of GPUs: there the "
            "share of the compute that they slow down is known."
        ),
    )
    bucket_bytes: ByteCount | None = Field(
        default=None,
        description=(
            "size of the buckets in which a framework gathers parameters and reduces gradients, "
            "bytes of the whole parameters or a text such as '1GB': a smaller parameter is charged "
            "its share of one collective. If null, as here: small parameters share 8 MiB."
        ),
    )
    activation_overlap: Number = Field(
        default=0.0,
        ge=0,
        le=1,
        description=(
            "share of the collectives of what a matrix product or attention reads or makes that a "
            "framework hides by computing it in parts (userbuffers of Transformer Engine, ring "
            "attention): only the rest is charged."
        ),
    )
    dispatch_share: Number = Field(
        default=1.0,
        gt=0,
        le=1,
        description=(
            "share of the rows between tokens and experts that are sent and waited for: 1 for one "
            "row for each expert of a token; less if a token is sent once to a rank or node that "
            "has several of its experts (DeepEP, HybridEP), or beside other compute."
        ),
    )
    balanced_attention: Flag = Field(
        default=False,
        description=(
            "whether ranks that share the queries of causal attention are charged equal work, as "
            "in frameworks that give each an early and a late part of the sequence (context "
            "parallelism of Megatron-LM and torchtitan); else the work of the last queries."
        ),
    )
    float8_saved_inputs: Flag = Field(
        default=False,
        description=(
            "whether products in float8 save their 16-bit inputs for backward in float8, as in "
            "Transformer Engine; torchao's save them in 16 bits."
        ),
    )
    weighted_activations: Flag = Field(
        default=False,
        description=(
            "whether the weights of a token's experts multiply the activation inside the experts, "
            "as in Megatron-Core, so that what experts return is not kept for the gradients of "
            "these weights; here they multiply what experts return, which is kept."
        ),
    )
    expert_launch: Number = Field(
        default=0.0,
        ge=0,
        le=1,
        description=(
            "seconds that the host needs to launch a product of one expert, if a framework "
            "multiplies the experts of a rank one after the other, forward and backward; 0 if one "
            "kernel multiplies all."
        ),
    )
    float8_weights_once: Flag = Field(
        default=False,
        description=(
            "whether weights are cast to float8 once per training step, as by Transformer Engine, "
            "instead of in every micro-batch."
        ),
    )
    time_limit: Number = Field(
        default=60.0,
        gt=0,
        le=MAX_SECONDS,
        description=(
            "time limit, seconds, of listing the strategies and of solving; a request ends at most "
            "10 % and two seconds after it on a quiet machine."
        ),
    )
    relative_gap: Number = Field(
        default=1e-3,
        ge=0,
        lt=1,
        description="stop at a proven relative gap of at most this between plan and lower bound.",
    )
    seed: Whole = Field(
        default=0, ge=0, le=MAX_INT32, description="seed of the solver's random numbers."
    )
    solver: str = Field(
        default=OWN_SOLVER,
        pattern="^[A-Za-z][A-Za-z0-9_]*$",
        max_length=64,
        description=(
            "solver of the optimization problem. autoshard: the problem is reduced first. ilp: it "
            "is stated as one integer program, without reductions, which HiGHS solves; for small "
            "problems. Or another solver of integer programs that cvxpy finds, such as SCIP or "
            "GUROBI. Of pipelines, it plans the stages."
        ),
    )
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
            "torchtitan: the pattern of its models, with FSDP2 on all axes but the last of several."
        ),
    )
    pins: Pins = Field(default=Pins(), description="layouts that the plan must have.")
    forbid: tuple[ForbiddenCollective, ...] = Field(
        fail_fast=True,
        default=(),
        max_length=64,
        description="collectives that the plan may not run.",
    )
    batch_axis: str | None = Field(
        default=None,
        min_length=1,
        max_length=255,
        description=(
            "name of the data-parallel axis, the only one that shards the batch: dim 0 of user "
            "inputs, and the dims that derive from it."
        ),
    )
    comparisons: Flag = Field(
        default=False,
        description=(
            "whether the plan says what DDP, FSDP2, HSDP and Megatron would take on the same mesh, "
            "and what its restrictions cost. They are planned in addition, within half of the "
            "time limit."
        ),
    )
    skip_fully_replicated: SkipReplicated = Field(
        default=False,
        description=(
            "whether to rule out that an operator which can be sharded does all of its work on "
            "every rank; views, scalars and operators without inputs are exempt. A list of axes: "
            "each operator is sharded over as many ranks of these axes as it can be."
        ),
    )


def to_options(options: PlanOptions | None, given: dict[str, Any]) -> PlanOptions:
    """The options of a call that takes them as `options`, as keywords, or both.

    Args:
        options: an object; the defaults if None.
        given: single options, which replace those of the object.

    Raises:
        OptionError: an option is invalid or does not exist; the message names a similar one.
    """
    if not isinstance(options, PlanOptions | None):
        raise ArgumentTypeError(
            f"options is {type(options).__name__}: pass PlanOptions(...), or single options as "
            f"keywords, such as memory_budget='70GB'"
        )
    if options is None:
        return PlanOptions(**given)
    if not given:
        return options
    chosen = {name: getattr(options, name) for name in options.model_fields_set}
    return PlanOptions(**chosen | given)
