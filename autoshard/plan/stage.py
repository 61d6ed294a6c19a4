"""A stage of a plan: its program, with the layout of every tensor, and every resharding."""

from collections.abc import Mapping
from math import prod
from typing import Annotated, Any, Literal

from pydantic import Field

from autoshard.costs import Frequency
from autoshard.errors import PlanError
from autoshard.layouts import Layout
from autoshard.mesh import split_axes
from autoshard.plan.options import MAX_MICRO_BATCHES
from autoshard.plan.predictions import Bytes, Direction, Document, Seconds

LayoutText = Annotated[
    str,
    Field(
        description=(
            "One type per mesh axis: I, R, P or S(dim). S(dim)/1+1+1 is an interleaved shard with "
            "three equal sub-shards; ';1>0' is a nesting order."
        ),
        examples=["S(0),R", "S(0),S(0);1>0", "I,S(1)/1+1+1"],
    ),
]

Use = tuple[str, str | None, int]
"""A use of a value: the value, its consumer (None for all consumers) and the input's position."""


class PlacedInput(Document):
    """An input tensor of the program, and its layout."""

    name: str = Field(description="value in the program")
    kind: Literal["parameter", "buffer", "constant", "prepared", "received", "user"] = Field(
        description="origin; a prepared tensor is computed once, before the first step, and a "
        "received one comes from the previous pipeline stage"
    )
    target: str = Field(description="name in the state dict, or of the argument")
    aliases: tuple[str, ...] = ()
    dtype: str = Field(
        description="element type at rest; the program may read a parameter converted to another"
    )
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    layout: LayoutText
    placements: tuple[str, ...] = Field(
        description="DTensor's view, one per mesh axis: Shard(dim=0), Replicate(), ..."
    )


class InnerStep(Document):
    """A collective inside an operator that computes along a sharded dim."""

    axis: str
    action: Literal["all_reduce", "all_to_all", "halo_exchange"] = "all_reduce"
    operation: Literal["sum", "max", "move", "halo"] = Field(
        description="sum or max: reduction of statistics; move: rows are sent to the ranks of "
        "their experts; halo: neighbours exchange edges of their slices"
    )
    direction: Direction = Field(description="the pass of the operator in which it runs")
    nbytes: Bytes = Field(
        description="bytes of a rank; the mean if the number of rows depends on data; for a halo, "
        "the larger of sent and received bytes on the rank with the most"
    )
    time: Seconds = Field(
        description="seconds per training step, including the copies that a halo needs"
    )


class PlacedNode(Document):
    """An operator, and the layouts of its inputs and outputs."""

    name: str
    inputs: tuple[LayoutText, ...]
    outputs: tuple[LayoutText, ...]
    time: Seconds = Field(
        description="compute, forward plus backward, of all micro-batches of a step"
    )
    inside: tuple[InnerStep, ...] = Field(
        default=(), description="collectives inside the operator, in the order in which they run"
    )

    @property
    def communication(self) -> float:
        """Seconds of the collectives inside, forward plus backward."""
        return sum(step.time for step in self.inside)


class PlannedStep(Document):
    """One step of a resharding, on one mesh axis or on several as one group."""

    axis: str = Field(
        description="mesh axis; several that communicate as one group are joined by +, such as "
        "dp+tp"
    )
    source: str
    target: str
    forward: str = Field(description="action in the forward pass: a collective or a local one")
    backward: str = Field(description="action in the backward pass")
    nbytes: Bytes = Field(
        description="bytes of a rank's tensor before or after the step, whichever is larger"
    )
    gradient_nbytes: Bytes | None = Field(
        default=None,
        description="the same of the gradient, if that is reduced in another element type; null "
        "if not",
    )
    time: Seconds = Field(description="seconds of all its runs in a training step")

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axis, or the axes that communicate as one group, outermost first."""
        return split_axes(self.axis)

    def num_ranks(self, axis_sizes: Mapping[str, int]) -> int:
        """Number of ranks that communicate.

        Args:
            axis_sizes: size of each mesh axis by name.

        Raises:
            PlanError: the mesh has no such axis.
        """
        for axis in self.axes:
            if axis not in axis_sizes:
                raise PlanError(f"a step is on the axis {axis!r}; the mesh has {[*axis_sizes]}")
        return prod(axis_sizes[axis] for axis in self.axes)

    @property
    def backward_nbytes(self) -> int:
        """Bytes of a rank's gradient after or before the step, whichever is larger."""
        return self.nbytes if self.gradient_nbytes is None else self.gradient_nbytes


class Resharding(Document):
    """The resharding of a tensor between its producer and a consumer.

    A value with several consumers may first be resharded for all of them (`consumer` is null),
    and then for single consumers.
    """

    value: str
    consumer: str | None = Field(
        description="name of the consuming node, 'output', or null: shared by all consumers"
    )
    position: int = Field(
        ge=0, description="position among the consumer's tensor inputs, or among the outputs"
    )
    source: LayoutText
    target: LayoutText
    steps: tuple[PlannedStep, ...]
    regather: bool = Field(
        default=False,
        description=(
            "true if backward runs the forward steps again instead of keeping the resharded "
            "tensor in memory (FSDP's reshard_after_forward)"
        ),
    )
    frequency: Frequency = Field(
        default=Frequency.MICRO_BATCH,
        description=(
            "how often its steps run in a training step of several micro-batches. micro_batch: in "
            "each. reduce_step: the first steps, which only reduce the gradient of a parameter, "
            "run once, with the sum over micro-batches; the others in each. gather_step: in "
            "addition, forward runs once, and the gathered parameter stays in memory (FSDP's "
            "reshard_after_backward=False). step: all steps run once, and full gradients are "
            "summed before they are reduced (FSDP's requires_gradient_sync=False)"
        ),
    )
    overlapped: Seconds = Field(
        default=0.0,
        description=(
            "seconds of its communication in a training step that overlap with compute, including "
            "its re-gather"
        ),
    )

    @property
    def use(self) -> Use:
        """The use for which the value is resharded; unique in a stage."""
        return self.value, self.consumer, self.position

    @property
    def time(self) -> float:
        """Seconds, forward plus backward."""
        return sum(step.time for step in self.steps)


class PlacedOutput(Document):
    """An output of the program: a result of forward, or new contents of a buffer."""

    name: str
    updates: str | None = Field(
        default=None, description="name of the buffer that it replaces; null for a result"
    )
    position: int = Field(ge=0)
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    layout: LayoutText


class Checkpoint(Document):
    """An activation checkpoint: consecutive nodes of which only the inputs are saved for backward.

    Backward runs their forward again, up to the last tensor that it needs. A resharding for one
    consumer belongs to the checkpoint of its consumer; a shared one belongs to the checkpoint if
    its value is computed and read inside of it.
    """

    first: str = Field(description="name of the first node")
    last: str = Field(description="name of the last node")


class Stage(Document):
    """One pipeline stage: a program on a part of the mesh."""

    name: str
    axes: tuple[tuple[str, int], ...] = Field(description="name and size of each axis")
    first_device: int = Field(
        default=0,
        ge=0,
        description="number of its first device; it has consecutive devices of the plan's mesh, "
        "numbered row-major",
    )
    micro_batches: int = Field(
        default=1,
        ge=1,
        le=MAX_MICRO_BATCHES,
        description="how often the program runs in a training step",
    )
    in_flight: int = Field(
        default=1,
        ge=1,
        le=MAX_MICRO_BATCHES,
        description="number of micro-batches whose saved activations are in memory at the same "
        "time; more than 1 in a pipeline",
    )
    accumulation_dtype: str | None = Field(
        default=None,
        description="element type of sums of gradients over micro-batches; that in which the "
        "gradients are reduced if null",
    )
    program: dict[str, Any] = Field(description="the normalised graph, as graph_to_json writes it")
    inputs: tuple[PlacedInput, ...]
    nodes: tuple[PlacedNode, ...]
    reshardings: tuple[Resharding, ...]
    outputs: tuple[PlacedOutput, ...]
    checkpoints: tuple[Checkpoint, ...] = Field(
        default=(), description="in program order, without overlap"
    )

    @property
    def idle_axes(self) -> tuple[str, ...]:
        """Mesh axes of several devices along which all ranks do the same work."""
        texts = {text for node in self.nodes for text in (*node.inputs, *node.outputs)}
        layouts = [Layout.parse(text) for text in texts]
        return tuple(
            name
            for axis, (name, size) in enumerate(self.axes)
            if size > 1 and all(layout.types[axis].is_replicated for layout in layouts)
        )

    @property
    def idle_text(self) -> str:
        """A warning that ranks repeat each other's work; empty where none do."""
        idle = self.idle_axes
        if not idle:
            return ""
        if len(idle) == sum(size > 1 for _, size in self.axes):
            return (
                "no operator is sharded: every rank does all the work, as one device would; plan "
                "a larger batch or model, or use one device"
            )
        return (
            f"no operator is sharded along {', '.join(idle)}: the ranks of that axis repeat each "
            f"other's work; plan a larger batch or model, or a mesh without that axis"
        )

    @property
    def parameters(self) -> tuple[PlacedInput, ...]:
        """The inputs that are parameters."""
        return tuple(i for i in self.inputs if i.kind == "parameter")
