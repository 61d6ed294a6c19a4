"""The plan: one versioned JSON document, readable without this library.

Its JSON schema is committed as `autoshard/plan/plan.schema.json`. Names of values and
nodes are those of the program, which travels inside the plan, so a plan can be run with
nothing but the model's parameters.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from autoshard.collection import collection_paused
from autoshard.errors import PlanError
from autoshard.mesh import Mesh
from autoshard.outcome import SolveStatus
from autoshard.plan.options import PlanOptions

PLAN_VERSION: Literal[1] = 1

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
Seconds = Annotated[float, Field(ge=0, description="seconds")]
Bytes = Annotated[int, Field(ge=0, description="bytes per device")]
Use = tuple[str, str | None, int]
"""What a resharding is for: the value, the consumer (None for all of them) and the position."""

Direction = Literal["forward", "backward"]
"""When something runs; what runs forward once more during backward counts as backward."""


class Document(BaseModel):
    """Base of the plan's parts: immutable, and closed to unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Certificate(Document):
    """Objective and proven lower bound of a plan, and their relative gap."""

    status: SolveStatus
    objective: float | None = Field(description="price of the plan in seconds; null without one")
    bound: float | None = Field(description="proven lower bound of every plan's price, seconds")
    gap: float | None = Field(ge=0, description="(objective - bound) / objective")


class GraphSummary(Document):
    """The program that was planned."""

    digest: str = Field(pattern="^[0-9a-f]{64}$", description="sha256 of the canonical program")
    num_nodes: int = Field(ge=0)
    num_parameters: int = Field(ge=0, description="elements of all parameters together")


class PlacedInput(Document):
    """A tensor that enters the program, and its layout."""

    name: str = Field(description="value in the program")
    kind: Literal["parameter", "buffer", "constant", "prepared", "user"] = Field(
        description="origin; a prepared tensor is computed once, before the first step"
    )
    target: str = Field(description="name in the state dict, or of the argument")
    aliases: tuple[str, ...] = ()
    dtype: str
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
        description="how the ranks' numbers come together; rows move to the ranks they are for, "
        "and halos are edges of neighbours' slices"
    )
    direction: Direction = Field(description="the pass of the operator that it belongs to")
    nbytes: Bytes = Field(
        description="a rank's numbers; how many rows a rank moves is data, and this the mean; "
        "of halos, what the rank sends or receives that does most"
    )
    time: Seconds = Field(description="with the copies that a halo needs beside it")


class PlacedNode(Document):
    """An operator, and the layouts of its inputs and outputs."""

    name: str
    inputs: tuple[LayoutText, ...]
    outputs: tuple[LayoutText, ...]
    time: Seconds = Field(description="compute, forward plus backward")
    inside: tuple[InnerStep, ...] = Field(
        default=(), description="collectives inside the operator, in the order in which they run"
    )

    @property
    def communication(self) -> float:
        """Seconds of the collectives inside, forward plus backward."""
        return sum(step.time for step in self.inside)


class PlannedStep(Document):
    """One step of a resharding, on one mesh axis."""

    axis: str
    source: str
    target: str
    forward: str = Field(description="action in the forward pass: a collective or a local one")
    backward: str = Field(description="action in the backward pass")
    nbytes: Bytes = Field(description="larger of a rank's tensor before and after the step")
    time: Seconds


class Resharding(Document):
    """A tensor that changes layout between its producer and a consumer.

    A value with several consumers may first change layout for all of them (`consumer` is
    null), and then for each.
    """

    value: str
    consumer: str | None = Field(
        description="name of the consuming node, 'output', or null: shared by all consumers"
    )
    position: int = Field(ge=0, description="which tensor input, or which output")
    source: LayoutText
    target: LayoutText
    steps: tuple[PlannedStep, ...]
    regather: bool = Field(
        default=False,
        description=(
            "whether backward runs the forward steps a second time instead of keeping the "
            "resharded tensor in memory (FSDP's reshard_after_forward)"
        ),
    )
    overlapped: Seconds = Field(
        default=0.0,
        description=(
            "seconds of its communication that overlap with compute, including its re-gather"
        ),
    )

    @property
    def use(self) -> Use:
        """What it is for; no two reshardings of a stage are for the same."""
        return self.value, self.consumer, self.position

    @property
    def time(self) -> float:
        """Seconds, forward plus backward."""
        return sum(step.time for step in self.steps)


class PlacedOutput(Document):
    """A value that leaves the program: a result of forward, or new contents of a buffer."""

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

    Their forward runs once more in backward, up to the last tensor that backward needs. A
    resharding for one consumer belongs to its consumer; a shared one belongs to the nodes if
    its value is made and read among them.
    """

    first: str = Field(description="name of the first node")
    last: str = Field(description="name of the last node")


class Stage(Document):
    """One pipeline stage: a program on its own sub-mesh."""

    name: str
    axes: tuple[tuple[str, int], ...] = Field(description="name and size of each axis")
    program: dict[str, Any] = Field(description="the normalised graph, as graph_to_json writes it")
    inputs: tuple[PlacedInput, ...]
    nodes: tuple[PlacedNode, ...]
    reshardings: tuple[Resharding, ...]
    outputs: tuple[PlacedOutput, ...]
    checkpoints: tuple[Checkpoint, ...] = Field(
        default=(), description="in program order, without overlap"
    )

    @property
    def parameters(self) -> tuple[PlacedInput, ...]:
        """The inputs that are parameters."""
        return tuple(i for i in self.inputs if i.kind == "parameter")


class CollectiveCount(Document):
    """Collectives of one kind, axis and direction in a step of the program."""

    kind: str
    axis: str
    direction: Direction
    count: int = Field(ge=1)
    nbytes: int = Field(ge=0, description="sum of PlannedStep.nbytes")


class Costs(Document):
    """Predicted seconds of one step, on every device."""

    total: Seconds
    compute: Seconds = Field(description="operators, and the writing and holding of inputs")
    communication: Seconds = Field(
        description=(
            "collectives and the local copies around them; each resharding pays its own latency, "
            "also where several share a collective: an upper estimate"
        )
    )
    optimizer: Seconds = Field(description="the local optimizer update")
    recompute: Seconds = Field(
        default=0.0, description="operators and reshardings that backward runs once more"
    )
    overlapped: Seconds = Field(
        default=0.0,
        description=(
            "seconds of communication and recompute that overlap with compute; not in the total"
        ),
    )


class Memory(Document):
    """Predicted bytes per device at the moment when most are alive."""

    peak: Bytes
    budget: int | None = Field(description="memory budget of the request")
    phase: Literal["forward", "turn", "recompute", "backward", "optimizer"] = Field(
        description="part of the step that the peak is in"
    )
    at: str = Field(
        description="node, or value that is resharded, at the peak; empty where it is neither"
    )
    turn: int | None = Field(
        ge=0, description="bytes alive between forward and backward; null in inference"
    )
    parameters: Bytes
    gradients: Bytes = Field(description="of parameters")
    optimizer: Bytes
    buffers: Bytes
    inputs: Bytes
    activations: Bytes = Field(
        description="tensors saved for backward, or alive until their last use in inference"
    )
    temporaries: Bytes = Field(
        description="resharded and recomputed tensors, gradients on their way, working memory"
    )


class RepeatedBlock(Document):
    """A repeated block of nodes, solved once; its tables may come from a cache."""

    first: str = Field(description="name of the first node of the first repetition")
    num_nodes: int = Field(ge=1, description="nodes of one repetition")
    num_repetitions: int = Field(ge=1)
    key: str = Field(
        pattern="^[0-9a-f]{64}$",
        description="digest of the block's content: its choices, their prices and their links",
    )
    num_reused: int = Field(ge=0, description="tables of the block that came from the cache")
    num_solved: int = Field(ge=0, description="tables of the block that were worked out")


class Provenance(Document):
    """Versions, times and problem sizes of the run that made the plan."""

    versions: dict[str, str]
    wall_time: dict[str, float] = Field(description="seconds per phase")
    statistics: dict[str, float] = Field(description="sizes of the problem and its reductions")
    blocks: tuple[RepeatedBlock, ...] = Field(
        default=(), description="what repeats, and how much of it was reused from a cache"
    )


class Conflict(Document):
    """What keeps an infeasible request from having a plan."""

    options: tuple[str, ...] = Field(
        description="options that cannot all hold; empty where memory alone is short"
    )
    minimal: bool = Field(description="whether the others can hold without any one of them")
    budget: int | None = Field(
        description="the memory budget if it is part of the conflict, bytes per device"
    )
    least_budget: int | None = Field(
        description="the smallest budget that works with all options, bytes per device"
    )


class Plan(Document):
    """A sharding plan with its certificate.

    An outcome without a plan (infeasible, timed out) has the same shape: its certificate
    says why, `reason` says it in words, and `stages` is empty.
    """

    version: Literal[1] = PLAN_VERSION
    id: str = Field(pattern="^[0-9a-f]{64}$", description="digest of the request and versions")
    certificate: Certificate
    reason: str = Field(default="", description="why there is no plan, and the way out")
    conflict: Conflict | None = Field(
        default=None, description="what cannot hold at once, where the request is infeasible"
    )
    graph: GraphSummary
    mesh: Mesh
    options: PlanOptions
    costs: Costs | None
    memory: Memory | None
    collectives: tuple[CollectiveCount, ...] = Field(
        description=(
            "what runs in a step; reshardings of parameters that share a collective are one, while "
            "costs charge each its own latency"
        )
    )
    stages: tuple[Stage, ...]
    provenance: Provenance

    @model_validator(mode="after")
    def _plan_or_reason(self) -> "Plan":
        if not self.stages and not self.reason:
            raise ValueError("a document without stages must give the reason")
        if self.stages and (self.costs is None or self.memory is None):
            raise ValueError("a document with stages must give costs and memory")
        return self

    @property
    def found(self) -> bool:
        """Whether there is a plan at all."""
        return bool(self.stages)

    def to_json(self, *, indent: int | None = None) -> str:
        """The document as JSON text."""
        return self.model_dump_json(indent=indent)

    @classmethod
    def from_json(cls, text: str | bytes) -> "Plan":
        """Read a document.

        Raises:
            PlanError: the text is not a plan of a version that we understand.
        """
        with collection_paused():
            try:
                # Not in one step, which takes longer: most of the text is the program, which
                # is any JSON to us. Only names of members repeat enough to be looked up.
                document = from_json(text, cache_strings="keys")
            except ValueError as error:
                raise PlanError(f"not a version {PLAN_VERSION} plan: document: {error}") from None
            return cls.from_document(document)

    @classmethod
    def from_document(cls, document: Any) -> "Plan":
        """Read a document that is no longer text.

        Raises:
            PlanError: it is not a plan of a version that we understand.
        """
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "document"
            raise PlanError(f"not a version {PLAN_VERSION} plan: {place}: {first['msg']}") from None
