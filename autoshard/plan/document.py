"""The plan: one versioned JSON document, readable without this library.

Its JSON schema is `autoshard/plan/plan.schema.json`. Names of values and nodes are those of the
program. The program is part of the plan, so only the model's parameters are needed to run it.
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationError, model_validator
from pydantic_core import from_json

from autoshard.base.collection import collection_paused
from autoshard.base.files import explain_plan_error, read_file, write_file
from autoshard.base.integers import check_integers
from autoshard.base.outcome import TIME_LIMIT_REACHED
from autoshard.base.quantities import format_bytes, format_seconds
from autoshard.errors import PlanError
from autoshard.graph import Graph, MixedPrecision, graph_digest
from autoshard.mesh import Mesh
from autoshard.plan.certificate import certificate_statement
from autoshard.plan.comparisons import Baseline, Unrestricted
from autoshard.plan.earlier_versions import upgraded
from autoshard.plan.options import MAX_MICRO_BATCHES, OWN_RUNTIME, Pins, PlanOptions, ScheduleName
from autoshard.plan.predictions import (
    Bytes,
    Certificate,
    CollectiveCount,
    Costs,
    Document,
    Memory,
    Performance,
    Seconds,
)
from autoshard.plan.stage import LayoutText, Stage
from autoshard.plan.tensor_placements import TensorPlacements

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

PLAN_VERSION: Literal[2] = 2
_NOT_A_PLAN = "not a plan of version 1 or 2"


class GraphSummary(Document):
    """The program that was planned."""

    digest: str = Field(pattern="^[0-9a-f]{64}$", description="sha256 of the canonical program")
    num_nodes: int = Field(ge=0)
    num_parameters: int = Field(ge=0, description="total number of elements of all parameters")
    precision: str = Field(
        default="",
        description="element types of most parameters in words: as operators read them, at rest, "
        "and of the sums of their gradients over ranks; one alone if all are equal",
        examples=["bfloat16 compute, float32 parameters, float32 gradient reductions"],
    )
    mixed_precision: MixedPrecision | None = Field(
        default=None, description="the policy under which the model was exported"
    )

    @classmethod
    def of(cls, graph: Graph) -> "GraphSummary":
        """The summary of a program."""
        return cls(
            digest=graph_digest(graph),
            num_nodes=len(graph.nodes),
            num_parameters=sum(graph.values[p.name].numel for p in graph.parameters),
            precision=graph.precision,
            mixed_precision=graph.model.mixed_precision if graph.model else None,
        )


class Transfer(Document):
    """A value that one pipeline stage sends to the next, and its gradient, which comes back.

    Each receiving rank gets every piece of its shard from one sending rank that has it. If the two
    stages have the same devices, nothing is sent.
    """

    value: str
    dtype: str
    shape: tuple[int, ...]
    source: LayoutText = Field(description="layout on the sending stage's axes")
    target: LayoutText = Field(description="layout on the receiving stage's axes")
    has_gradient: bool = Field(description="true if its gradient is sent back in training")
    nbytes: Bytes = Field(
        description="bytes per micro-batch of the rank that sends or receives the most, forward"
    )
    gradient_nbytes: Bytes = Field(description="the same of its gradient")
    messages: int = Field(ge=0, description="messages per micro-batch between all ranks, forward")
    gradient_messages: int = Field(ge=0, description="the same of its gradient")


class TiedParameter(Document):
    """A parameter that several pipeline stages hold and use.

    Its copies start equal. Once per step their gradients are summed over the stages.
    """

    target: str = Field(description="name in the state dict")
    stages: tuple[int, ...] = Field(description="numbers of the stages that hold it")
    time: Seconds = Field(description="seconds per training step to sum its gradients")


class StageTimes(Document):
    """Predicted seconds of a pipeline stage."""

    forward: Seconds = Field(description="forward of a micro-batch")
    backward_input: Seconds = Field(
        description="gradients of activations of a micro-batch, with recomputation"
    )
    backward_weight: Seconds = Field(
        description="gradients of parameters of a micro-batch; 0 if they are not computed apart, "
        "and are in backward_input"
    )
    end: Seconds = Field(
        description="once per step: gathers of parameters and reductions of gradients that do not "
        "run in every micro-batch, and the optimizer's update"
    )
    send: Seconds = Field(
        default=0.0, description="transfer of its outputs to the next stage, per micro-batch"
    )
    send_gradient: Seconds = Field(
        default=0.0,
        description="transfer of the gradients of its inputs to the previous stage, per "
        "micro-batch",
    )


class PipelineArgument(Document):
    """An argument of forward of the whole model."""

    name: str = Field(description="value in the programs of stages")
    target: str = Field(description="name of the argument")
    shape: tuple[int, ...] | None = Field(description="of a micro-batch; null for a literal")
    dtype: str | None
    literal: bool | int | float | str | None = None


class StageSummary(Document):
    """Predictions for one pipeline stage."""

    certificate: Certificate = Field(description="of the stage's own plan")
    times: StageTimes
    costs: Costs
    memory: Memory
    collectives: tuple[CollectiveCount, ...]


class Pipeline(Document):
    """The pipeline that the stages of a plan form."""

    schedule: ScheduleName
    micro_batches: int = Field(ge=1, le=MAX_MICRO_BATCHES, description="micro-batches per step")
    ranks: tuple[tuple[int, ...], ...] = Field(
        description="the stages of each pipeline rank; its stages have the same devices"
    )
    arguments: tuple[PipelineArgument, ...] = Field(
        description="arguments of forward, flattened, in order"
    )
    in_spec: str = Field(description="PyTorch's tree spec of (args, kwargs); may be empty")
    stages: tuple[StageSummary, ...] = Field(description="one entry per stage")
    transfers: tuple[tuple[Transfer, ...], ...] = Field(
        description="what each stage but the last sends to the next"
    )
    tied: tuple[TiedParameter, ...] = Field(
        default=(), description="parameters that several stages hold"
    )
    bubble: float = Field(ge=0, le=1, description="share of the step in which ranks are idle")
    proof: str = Field(
        description="the plans among which the certificate's bound holds, and what was compared"
    )


class RepeatedBlock(Document):
    """A repeated block of nodes, solved once; its tables may come from a cache."""

    first: str = Field(description="name of the first node of the first repetition")
    num_nodes: int = Field(ge=1, description="nodes of one repetition")
    num_repetitions: int = Field(ge=1)
    key: str = Field(
        pattern="^[0-9a-f]{64}$",
        description="digest of the block's content: its strategies, their costs and edge costs",
    )
    num_reused: int = Field(ge=0, description="tables of the block that came from the cache")
    num_solved: int = Field(ge=0, description="tables of the block that were computed")


class Provenance(Document):
    """Versions, times and problem sizes of the run that made the plan."""

    versions: dict[str, str]
    wall_time: dict[str, float] = Field(description="seconds per phase")
    statistics: dict[str, float] = Field(description="sizes of the problem and its reductions")
    blocks: tuple[RepeatedBlock, ...] = Field(
        default=(), description="repeated blocks, and how much of them was reused from a cache"
    )

    @property
    def reached_time_limit(self) -> bool:
        """True if a time limit cut a step short, so that more time may give a better plan."""
        return TIME_LIMIT_REACHED in self.statistics


class Conflict(Document):
    """The options that make a request infeasible."""

    options: tuple[str, ...] = Field(
        description="options that contradict each other; empty if only the memory is insufficient"
    )
    minimal: bool = Field(
        description="true if removing any one of the options resolves the conflict"
    )
    budget: int | None = Field(
        description="the memory budget if it is part of the conflict, bytes per device"
    )
    least_budget: int | None = Field(
        description="the smallest budget for which a plan was found with all options, bytes per "
        "device"
    )
    least_budget_bound: int | None = Field(
        default=None,
        description="no budget below this is feasible, which is proven; bytes per device",
    )


class Plan(Document):
    """A sharding plan with its certificate.

    An outcome without a plan (infeasible, timed out) has the same schema: its certificate has the
    status, `reason` explains it, and `stages` is empty.
    """

    version: Literal[2] = PLAN_VERSION
    id: str = Field(pattern="^[0-9a-f]{64}$", description="digest of the request and versions")
    certificate: Certificate
    reason: str = Field(default="", description="why there is no plan, and what to change")
    conflict: Conflict | None = Field(
        default=None, description="contradicting options, if the request is infeasible"
    )
    graph: GraphSummary
    mesh: Mesh
    options: PlanOptions
    costs: Costs | None
    memory: Memory | None
    performance: Performance | None = Field(
        default=None, description="throughput, and the error of the predicted step time"
    )
    collectives: tuple[CollectiveCount, ...] = Field(
        description=(
            "collectives of a step; reshardings of parameters that share a collective count once, "
            "while costs charge a latency for each"
        )
    )
    stages: tuple[Stage, ...]
    pipeline: Pipeline | None = Field(
        default=None, description="the schedule of several stages; null for a single stage"
    )
    baselines: tuple[Baseline, ...] = Field(
        default=(),
        description=(
            "what DDP, FSDP2, HSDP and Megatron would take on the same devices; empty unless the "
            "option `comparisons` asks for them"
        ),
    )
    unrestricted: Unrestricted | None = Field(
        default=None,
        description=(
            "what a step takes without the restrictions of the options; null if there are none, or "
            "unless the option `comparisons` asks for it"
        ),
    )
    provenance: Provenance

    @model_validator(mode="before")
    @classmethod
    def _of_this_version(cls, document: Any) -> Any:
        return upgraded(document)

    @model_validator(mode="after")
    def _plan_or_reason(self) -> "Plan":
        if not self.stages and not self.reason:
            raise ValueError("a document without stages must give the reason")
        if self.stages and (self.costs is None or self.memory is None):
            raise ValueError("a document with stages must give costs and memory")
        number = len(self.pipeline.stages) if self.pipeline else min(len(self.stages), 1)
        if number != len(self.stages):
            raise ValueError("a document with several stages must describe their pipeline")
        return self

    @property
    def found(self) -> bool:
        """True if there is a plan."""
        return bool(self.stages)

    @property
    def certificate_statement(self) -> str:
        """Statement of the proof of the plan's step time: among which plans, on which hardware."""
        proof = None if self.pipeline is None else self.pipeline.proof
        late = self.provenance.reached_time_limit
        return certificate_statement(self.certificate, self.options, self.mesh, proof, late=late)

    def state_pins(self) -> Pins:
        """Pins that store parameters and buffers as this plan does.

        Plans that store them alike can be applied to one model together.

        Example:
            >>> evaluation = PlanOptions(mode="inference", pins=training_plan.state_pins())
        """
        inputs = [placed for stage in self.stages for placed in stage.inputs]
        return Pins(
            parameters={i.target: i.layout for i in inputs if i.kind == "parameter"},
            buffers={i.target: i.layout for i in inputs if i.kind == "buffer"},
        )

    def summary(
        self, *, width: int | None = None, commands: Sequence[str] = (), within: float = 0.02
    ) -> str:
        """Summary of the plan, its predictions and its proof, as text of about 40 lines.

        Args:
            width: columns at which sentences are wrapped; None for one line each.
            commands: what to run next, one a line.
            within: share by which the simplest layout may be slower than the fastest.
        """
        # The module reads this document, so it cannot be imported by it.
        text: str = import_module("autoshard.report.summary").summarise(
            self, width=width, commands=commands, within=within
        )
        return text

    @property
    def placements(self) -> TensorPlacements:
        """DTensor placements of all parameters and buffers, by name; tied ones by each name."""
        return TensorPlacements(
            {
                name: (tensor.layout, tuple(size for _, size in stage.axes))
                for stage in reversed(self.stages)
                for tensor in stage.inputs
                if tensor.kind in ("parameter", "buffer")
                for name in (tensor.target, *tensor.aliases)
            }
        )

    def __getitem__(self, name: str) -> "tuple[Placement, ...]":
        """The DTensor placement of a parameter or buffer on each mesh axis.

        Raises:
            UnknownNameError: there is none of this name; the message names similar ones.
            LayoutError: DTensor has no placement for its layout.

        Example:
            >>> plan["transformer.h.0.mlp.c_fc.weight"]
            (Shard(dim=1), Shard(dim=0))
        """
        return self.placements[name]

    def __str__(self) -> str:
        """One line: the program, the mesh, and the predictions."""
        axes = " x ".join(f"{axis.name}={axis.size}" for axis in self.mesh.axes)
        request = f"{self.options.mode} on {axes} ({self.mesh.topology.name})"
        if self.options.runtime.name != OWN_RUNTIME:
            request += f" with {self.options.runtime.name}"
        if self.costs is None or self.memory is None:
            return f"No plan for {request}: {self.reason}"
        return (
            f"Plan {self.id[:12]} of {self.graph.num_parameters:,} parameters for {request}: "
            f"{format_seconds(self.costs.total)} a step, {format_bytes(self.memory.peak)} at the "
            f"peak, {self.certificate.status}"
        )

    def __repr__(self) -> str:
        return f"<{self}>"

    def _repr_html_(self) -> str:
        """The plan in a notebook."""
        text: str = import_module("autoshard.report.summary").summary_html(self)
        return text

    def save(self, path: str | Path) -> None:
        """Write the document to a file.

        Raises:
            OptionError: it cannot be written.
        """
        write_file(Path(path), self.to_json(indent=1))

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read the document from a file.

        Raises:
            PlanError: the file cannot be read, or has no plan of a supported version.
        """
        return cls.from_json(read_file(Path(path), PlanError))

    def to_json(self, *, indent: int | None = None) -> str:
        """The document as JSON text."""
        return self.model_dump_json(indent=indent)

    @classmethod
    def from_json(cls, text: str | bytes) -> "Plan":
        """Read a document.

        Raises:
            PlanError: the text is not a plan of a supported version.
        """
        with collection_paused():
            try:
                # Faster than model_validate_json: most of the text is the program, which is not
                # validated here. Only keys repeat often enough to be cached.
                document = from_json(text, cache_strings="keys")
            except ValueError as error:
                reason = f"{_NOT_A_PLAN}: document: {error}"
                raise explain_plan_error(_encoded(text), reason) from None
            try:
                check_integers(text, document, PlanError, _NOT_A_PLAN)
                return cls.from_document(document)
            except PlanError as error:
                raise explain_plan_error(_encoded(text), str(error)) from None

    @classmethod
    def from_document(cls, document: Any) -> "Plan":
        """Read a document from parsed JSON.

        Raises:
            PlanError: it is not a plan of a supported version.
        """
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "document"
            raise PlanError(f"{_NOT_A_PLAN}: {place}: {first['msg']}") from None


def _encoded(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text
