"""What users ask of a plan, besides graph and mesh."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Mode = Literal["training", "inference"]
Algorithm = Literal["optimal", "megatron"]
Recomputing = Literal["auto", "never", "always"]
StateDType = Literal["float32", "float16", "bfloat16"]
CollectiveKind = Literal[
    "all_gather", "all_reduce", "all_to_all", "halo_exchange", "reduce_scatter"
]

_Pattern = Annotated[str, Field(min_length=1, max_length=512)]
_LayoutText = Annotated[str, Field(max_length=1024)]
_PinTable = Annotated[Mapping[_Pattern, _LayoutText], Field(max_length=1024)]


class Pins(BaseModel):
    """Layouts that a plan must have, by name.

    A name may be a pattern: `*` stands for any text, dots included. All pins that match
    hold. A layout has one part per axis of the mesh, separated by commas:

    * `I`, `R`, `S(dim)`, `P`: the type; at rest (inputs, outputs, parameters) there is one
      whole type only, so `I` and `R` both mean it;
    * `Replicate()`, `Shard(dim)`, `Partial()`: DTensor's words; `Replicate()` is `I` or `R`;
    * `*`: left free.

    A part for an axis of one rank says nothing.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    inputs: _PinTable = Field(
        default={}, description="by argument name: what the caller passes to forward."
    )
    outputs: _PinTable = Field(
        default={}, description="by position among the outputs (`0`), or by value name."
    )
    parameters: _PinTable = Field(
        default={}, description="by dotted name in the state dict; tied names all count."
    )
    nodes: _PinTable = Field(
        default={},
        description=(
            "by operator name, or by module path, which stands for the operators that make what "
            "leaves the module. One layout holds for every output; "
            "`S(0),R R,R -> S(0),R` gives inputs and outputs, `*` one that is free."
        ),
    )


class ForbiddenCollective(BaseModel):
    """A collective that a plan may not run, forward or backward."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: CollectiveKind
    axis: str | None = Field(default=None, description="only on this axis; on all axes if null.")

    def __str__(self) -> str:
        return self.kind if self.axis is None else f"{self.kind}@{self.axis}"


class PlanOptions(BaseModel):
    """Options of planning; every default is what most people want."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Mode = Field(
        default="training",
        description="training prices forward, backward and the optimizer; inference forward.",
    )
    optimizer: str = Field(
        default="adamw", description="whose state is kept and updated in training."
    )
    master_weights: bool = Field(
        default=False,
        description=(
            "whether the optimizer keeps a float32 copy of parameters that are narrower, and "
            "updates that."
        ),
    )
    state_dtype: StateDType | None = Field(
        default=None,
        description=(
            "element type of the optimizer's state; that of the values it updates if null."
        ),
    )
    memory_budget: int | None = Field(
        default=None,
        gt=0,
        description="bytes per device that the peak must obey; the device's memory if null.",
    )
    reshard_after_forward: Recomputing = Field(
        default="auto",
        description=(
            "whether backward reshards a tensor again instead of finding it held, such as a "
            "parameter that is gathered again (FSDP's reshard after forward). auto: where memory "
            "is short and it costs least. never. always: every input that was moved, the rest as "
            "in auto. What a checkpoint reshards again is not meant."
        ),
    )
    activation_checkpointing: Recomputing = Field(
        default="auto",
        description=(
            "whether repeated blocks run forward once more in backward and hold only what enters "
            "them. auto: where memory is short and it costs least. never. always: every block."
        ),
    )
    overlap: bool = Field(
        default=False,
        description=(
            "whether gathers of parameters and reductions of their gradients run beside the "
            "compute of what reads them, so that only what does not fit is priced."
        ),
    )
    time_limit: float = Field(default=60.0, gt=0, description="seconds for the solver.")
    relative_gap: float = Field(
        default=1e-3, ge=0, lt=1, description="stop when the proven gap is at most this."
    )
    seed: int = Field(default=0, ge=0, description="for the solver's own choices.")
    algo: Algorithm = Field(
        default="optimal",
        description=(
            "optimal: the cheapest of all plans. megatron: the cheapest within the fixed pattern "
            "of Megatron-LM, a baseline: weights cut by columns or rows, attention by heads, "
            "embeddings by vocabulary over the last axis, the batch over the others."
        ),
    )
    pins: Pins = Field(default=Pins(), description="layouts that the plan must have.")
    forbid: tuple[ForbiddenCollective, ...] = Field(
        default=(), max_length=64, description="collectives that the plan may not run."
    )
    batch_axis: str | None = Field(
        default=None,
        description=(
            "name of the axis that cuts the batch dim, and no other axis does: dim 0 of what "
            "the caller passes, and the dims that come from it."
        ),
    )
    skip_fully_replicated: bool = Field(
        default=False,
        description=(
            "no operator that can be cut does all of its work on every rank; views, scalars and "
            "what is made from nothing may."
        ),
    )
