"""Requests: their JSON, their limits, and the ids of their results."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    RootModel,
    Tag,
    field_validator,
    model_validator,
)

from autoshard.base.arguments import Seconds
from autoshard.base.quantities import Bandwidth
from autoshard.errors import OptionError
from autoshard.graph import MAX_RULES, rules_from_json, rules_to_json
from autoshard.mesh import (
    Mesh,
    Topology,
    make_mesh,
    mesh_from_json,
    mesh_to_json,
    topology_from_json,
    topology_to_json,
)
from autoshard.plan import PlanOptions
from autoshard.planner import GraphIdentity, candidate_meshes, plan_id
from autoshard.requests.model_configs import BatchShape, ElementType
from autoshard_server.configs import ConfigExport
from autoshard_server.digests import digest, versions
from autoshard_server.problems import ProblemType, ServerError, limit_error
from autoshard_server.settings import Settings
from autoshard_server.store.jobs import JobKind

LinkBandwidth = Annotated[
    Bandwidth,
    Field(description="per device and direction: bytes per second, or a text such as '450GB/s'"),
]
Latency = Annotated[float, Field(description="seconds per step")]
_LARGEST = 2**31 - 1
"""Largest number of devices in a request; the limit of the service is usually smaller."""

_MAX_EXPLANATION = 600.0
"""Largest time_limit of an explanation, seconds."""

_MOST_AXES = 16
"""Largest number of axes in a request, the largest value of AUTOSHARD_MAX_MESH_AXES."""

_MAX_NAME = 255
"""Largest number of characters of a name."""

Length = Annotated[int, Field(ge=1, le=_LARGEST)]
AxisSize = Annotated[int, Field(le=_LARGEST)]
AxisName = Annotated[str, Field(max_length=_MAX_NAME)]
Nodes = Annotated[
    int,
    Field(
        ge=1,
        le=_LARGEST,
        description="number of nodes; default: what the topology's node size gives",
    ),
]
GpusPerNode = Annotated[
    int, Field(ge=1, le=_LARGEST, description="number of devices of a node, instead of nodes")
]
TopologyName = Annotated[
    str,
    Field(
        max_length=_MAX_NAME,
        description="a name of GET /v1/topologies, or a part of one, such as h100",
    ),
]
PlanIdField = Annotated[str, Field(pattern="^[0-9a-f]{64}$", description="id of a plan")]
GraphField = Annotated[
    str,
    Field(
        pattern="^[0-9a-f]{64}$",
        description="sha256 of the graph's bytes: of a graph that PUT /v1/graphs/{digest} stored, "
        "or of the part 'graph' of POST /v1/plans",
        examples=["0" * 64],
    ),
]


class MeshShorthand(BaseModel):
    """A mesh by its shape and optional link figures, as `make_mesh` takes it."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    is_document: ClassVar = False

    shape: tuple[AxisSize, ...] = Field(
        fail_fast=True,
        max_length=_MOST_AXES,
        description="size of each axis, outermost first",
        examples=[[2, 4]],
    )
    axes: Annotated[tuple[AxisName, ...], Field(max_length=_MOST_AXES, fail_fast=True)] | None = (
        Field(default=None, description="name of each axis")
    )
    topology: TopologyName | None = None
    nodes: Nodes | None = None
    gpus_per_node: GpusPerNode | None = None
    intra_bandwidth: LinkBandwidth | None = None
    inter_bandwidth: LinkBandwidth | None = None
    intra_latency: Latency | None = None
    inter_latency: Latency | None = None
    backend: str | None = Field(default=None, max_length=_MAX_NAME, description="nccl or gloo")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Size of each axis, before the mesh is made."""
        return self.shape

    def build(self, stored: Topology | None = None) -> Mesh:
        """Make the mesh.

        Args:
            stored: the topology of the name, if it is not a preset.

        Raises:
            MeshError: it is invalid.
        """
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return make_mesh(fields.pop("shape"), **{**fields, "topology": stored or self.topology})


class MeshDocument(RootModel[dict[str, Any]]):
    """A complete mesh, as `mesh_to_json` writes it."""

    is_document: ClassVar = True

    @property
    def sizes(self) -> tuple[int, ...]:
        """Size of each axis, before the document is checked; 1 if it is not a size."""
        axes = self.root.get("axes")
        items = axes if isinstance(axes, list) else []
        found = (item.get("size") if isinstance(item, dict) else None for item in items)
        return tuple(size if isinstance(size, int) else 1 for size in found)

    def build(self, _stored: Topology | None = None) -> Mesh:
        """Make the mesh, whose topology is part of the document.

        Raises:
            MeshError: it is invalid.
        """
        return mesh_from_json(json.dumps(self.root))


def _mesh_tag(value: object) -> str:
    """The tag of the union: a document contains its topology, a shorthand names it at most."""
    is_document = isinstance(value, dict) and isinstance(value.get("topology"), dict)
    return "document" if is_document or isinstance(value, MeshDocument) else "shorthand"


MeshInput = MeshShorthand | MeshDocument

MeshField = Annotated[
    Annotated[MeshShorthand, Tag("shorthand")] | Annotated[MeshDocument, Tag("document")],
    Discriminator(_mesh_tag),
]


def topology_name(mesh: MeshInput | None) -> str | None:
    """The topology that a mesh names; None if it names none, or contains it."""
    return mesh.topology if isinstance(mesh, MeshShorthand) else None


class GraphRequestBody(BaseModel):
    """The fields of every request about a graph."""

    model_config = ConfigDict(extra="forbid")

    rules: tuple[dict[str, Any], ...] = Field(
        fail_fast=True,
        default=(),
        max_length=MAX_RULES,
        description=(
            "sharding rules of the model's own operators, as `autoshard.discovery` finds them; "
            "used where this service has no rule of its own."
        ),
    )

    @field_validator("rules")
    @classmethod
    def _check_rules(cls, rules: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        rules_from_json(list(rules))
        return rules


class ModelRequestBody(GraphRequestBody):
    """The model of a request: a stored graph, or a config of transformers and its batch."""

    graph_sha256: GraphField | None = None
    config: dict[str, Any] | None = Field(
        default=None,
        description="the config.json of a text model of transformers, in place of a graph: the "
        "service makes the model without weights, and exports it.",
        examples=[{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2}],
    )
    batch_size: Length | None = Field(
        default=None,
        description="of a config: sequences of a step, of all devices and micro-batches together; "
        "8 if null.",
    )
    seq_length: Length | None = Field(
        default=None,
        description="of a config: tokens of each sequence; 4096, or as many as it has, if null.",
    )
    dtype: ElementType | None = Field(
        default=None,
        description="of a config: element type of the weights; its own, or bfloat16, if null.",
    )

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        if (self.graph_sha256 is None) == (self.config is None):
            raise ValueError("give one of graph_sha256 and config")
        named = [name for name in _OF_CONFIGS if getattr(self, name) is not None]
        if self.config is None and named:
            raise ValueError(f"{named[0]} is for a config; a graph has the batch of its export")
        return self

    def of_graph(self, sha256: str) -> Self:
        """The same request about a stored graph."""
        values = dict.fromkeys(("config", *_OF_CONFIGS))
        return self.model_copy(update={**values, "graph_sha256": sha256})

    def export(self, settings: Settings) -> ConfigExport:
        """The export of the config, in the mode of the options; of training without options.

        Raises:
            ServerError: CONFIG or LIMIT, for a config that arithmetic refuses.
        """
        assert self.config is not None, "a graph is given otherwise"
        options = getattr(self, "options", PlanOptions())
        batch = BatchShape(batch_size=self.batch_size or 8, seq_length=self.seq_length)
        try:
            batch = batch.of_micro_batch(options.training.micro_batches)
        except OptionError as error:
            raise ServerError(ProblemType.CONFIG, str(error)) from None
        return ConfigExport(self.config, batch, self.dtype, options.mode, settings)


_OF_CONFIGS = ("batch_size", "seq_length", "dtype")
"""Members about the model of a config."""


class TopologyDocument(RootModel[dict[str, Any]]):
    """A complete topology, as `topology_to_json` writes it."""


class PlanRequestBody(GraphRequestBody):
    """A mesh and options to plan for."""

    mesh: MeshField
    options: PlanOptions = PlanOptions()


class CreatePlanRequest(PlanRequestBody):
    """The part 'request' of an upload: a mesh and options to plan for."""

    validate_only: bool = Field(
        default=False,
        description="only measure the size of the problem, without solving it",
    )


class CreatePlanOfModelRequest(CreatePlanRequest, ModelRequestBody):
    """A mesh and options to plan for, and a model."""


class LookUpPlanRequest(PlanRequestBody, ModelRequestBody):
    """A mesh and options of an earlier request, and its model."""


class SearchRequest(ModelRequestBody):
    """A number of devices to find the best mesh for, and a model."""

    num_devices: int = Field(ge=1, le=_LARGEST, description="devices of each mesh", examples=[8])
    topology: TopologyName | TopologyDocument | None = Field(
        default=None,
        description="a name of GET /v1/topologies, or a whole topology as `topology_to_json` "
        "writes it; the default one if null.",
    )
    nodes: Nodes | None = None
    gpus_per_node: GpusPerNode | None = None
    max_axes: int = Field(default=3, ge=1, le=6, description="largest number of axes")
    total_time_limit: Seconds | None = Field(
        default=None,
        description="seconds of all meshes together, after which those that are not planned have "
        "what is known of them; if null, only each plan has a limit.",
    )
    options: PlanOptions = Field(
        default=PlanOptions(), description="the same for all meshes; time_limit is for each."
    )


class CoverageRequest(ModelRequestBody):
    """A model, and optionally a mesh."""

    mesh: MeshField | None = Field(
        default=None,
        description="an operator counts as sharded if an axis of this mesh can shard it; an axis "
        "of any size if null.",
    )


class ExplainRequest(BaseModel):
    """A choice of a plan, whose alternatives are priced."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1, max_length=512, description="a node, input, value or output")
    value: bool = Field(
        default=False, description="the value, if a node and a value have the same name"
    )
    time_limit: float = Field(
        default=60.0,
        gt=0,
        le=_MAX_EXPLANATION,
        description="seconds for planning the alternatives",
    )


class ComparePlansRequest(BaseModel):
    """Two plans of one graph."""

    model_config = ConfigDict(extra="forbid")

    before: PlanIdField
    after: PlanIdField


@dataclass(frozen=True, slots=True)
class Task:
    """The job of a request.

    Attributes:
        kind: of the result.
        result_id: key of the result in the cache, 64 hex digits.
        request: the solver's other input, as a JSON document.
        payload: a graph as uploaded, or a plan document; None for a stored graph.
        graph_sha256: digest of the graph; empty for a plan document.
    """

    kind: JobKind
    result_id: str
    request: Mapping[str, Any]
    payload: bytes | None
    graph_sha256: str = ""


class GraphDescription(BaseModel):
    """Facts of a graph that requests need, so that it is read only once."""

    num_nodes: int
    num_edges: int
    num_parameters: int
    identity: GraphIdentity

    @staticmethod
    def key(sha256: str, rules: Sequence[Mapping[str, Any]], settings: Settings) -> str:
        """Key in the cache of the description of a graph with the rules of a request.

        With lower limits the graph may be refused, so it is read again.
        """
        limits = {**settings.archive_limits, "values": settings.max_model_values}
        limits["edges"] = settings.max_edges
        return digest(*versions(), sha256, rules, limits)


class PlanQuery:
    """A request to plan a graph; everything but the graph is checked.

    Args:
        request: the mesh and options.
        graph_sha256: digest of the uploaded bytes, 64 hex digits.
        settings: limits of this service.
        topology: the stored topology that the request names, if it is not a preset. Keys depend
            on its contents, not on its name.

    Raises:
        MeshError: the mesh is invalid.
        OptionError: an option exceeds a limit of this service.
        ServerError: LIMIT, if the mesh exceeds one.
    """

    def __init__(
        self,
        request: PlanRequestBody,
        graph_sha256: str,
        settings: Settings,
        *,
        topology: Topology | None = None,
    ) -> None:
        _check_solving(request.options, settings)
        self.graph_sha256 = graph_sha256
        self.options = request.options
        self.rules = rules_from_json(list(request.rules))
        self.mesh = _checked_mesh(request.mesh, settings, topology)
        self._settings = settings

    @cached_property
    def digest(self) -> str:
        """Digest of the request, computed without parsing the graph.

        Two exports of the same program can have different digests and the same plan id.
        """
        return digest(*versions(), self.graph_sha256, *self.fields.values())

    def plan_id(self, identity: GraphIdentity) -> str:
        """The id of the plan of a graph."""
        return plan_id(identity, self.mesh, self.options)

    def task(self, plan_id: str, graph: bytes | None, *, validate_only: bool = False) -> Task:
        """The job that makes the plan, or only measures its problem."""
        kind = JobKind.VALIDATION if validate_only else JobKind.PLAN
        request = {
            "plan_id": plan_id,
            "kind": kind,
            "max_strategies": self._settings.max_strategies,
            **self.fields,
            "limits": self._settings.archive_limits,
        }
        result_id = digest(kind, plan_id) if validate_only else plan_id
        return Task(kind, result_id, request, graph, self.graph_sha256)

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The mesh, the options and the rules, as JSON."""
        return {
            "mesh": json.loads(mesh_to_json(self.mesh)),
            "options": self.options.model_dump(mode="json"),
            "rules": rules_to_json(self.rules),
        }


def search_task(
    request: SearchRequest, settings: Settings, *, stored: Topology | None = None
) -> Task:
    """The job that plans a stored graph on every mesh of a number of devices.

    Args:
        request: with the number of devices.
        settings: limits of this service.
        stored: the topology that the request names, if it is not a preset.

    Raises:
        MeshError: the topology is unknown, or has fewer devices.
        OptionError: a number is out of its range.
        ServerError: LIMIT, if there are more devices or meshes than this service allows.
    """
    _check_solving(request.options, settings)
    check_limit("max_devices", request.num_devices, "devices of a mesh", settings)
    given = request.topology
    inline = None
    if isinstance(given, TopologyDocument):
        inline = topology_from_json(json.dumps(given.root))
    # One more than allowed is enough: large numbers have very many factorisations.
    meshes = candidate_meshes(
        request.num_devices,
        topology=inline or stored or (given if isinstance(given, str) else None),
        nodes=request.nodes,
        gpus_per_node=request.gpus_per_node,
        max_axes=request.max_axes,
        most=settings.max_search_meshes + 1,
        options=request.options,
    )
    check_limit("max_search_meshes", len(meshes), "or more meshes of a search", settings)
    fields = {
        "num_devices": request.num_devices,
        "max_axes": request.max_axes,
        "total_time_limit": request.total_time_limit,
        "topology": json.loads(topology_to_json(meshes[0].topology)),
        "options": request.options.model_dump(mode="json"),
        "rules": list(request.rules),
        # Part of the digest: with another limit, more meshes may be planned.
        "max_strategies": settings.max_strategies,
    }
    return _graph_task(JobKind.SEARCH, request.graph_sha256, fields, settings)


def coverage_task(
    request: CoverageRequest, settings: Settings, *, topology: Topology | None = None
) -> Task:
    """The job that lists the operators of a stored graph that can be sharded.

    Raises:
        MeshError: the mesh is invalid.
        ServerError: LIMIT, if the mesh exceeds one.
    """
    mesh = None if request.mesh is None else _checked_mesh(request.mesh, settings, topology)
    sizes = [] if mesh is None else sorted({size for size in mesh.axis_sizes if size > 1})
    fields = {"axis_sizes": sizes, "rules": list(request.rules)}
    return _graph_task(JobKind.COVERAGE, request.graph_sha256, fields, settings)


def explanation_task(plan_id: str, plan: bytes, settings: Settings, **fields: Any) -> Task:
    """The job that prices every alternative of one choice of a plan.

    Args:
        plan_id: of the plan.
        plan: its document.
        settings: limits of this service.
        **fields: name, value and time_limit.

    Raises:
        OptionError: the time limit exceeds this service's.
    """
    _check_time_limit(fields["time_limit"], settings)
    kind = JobKind.EXPLANATION
    request = {"kind": kind, **fields}
    return Task(kind, digest(kind, *versions(), plan_id, fields), request, plan)


def check_limit(setting: str, number: int, unit: str, settings: Settings) -> None:
    """Refuse a number that is larger than this service allows.

    Raises:
        ServerError: LIMIT.
    """
    limit: int = getattr(settings, setting)
    if number > limit:
        detail = f"{number:,} {unit} exceed this service's limit of {limit:,}"
        raise limit_error(ProblemType.LIMIT, detail, setting, limit)


def _checked_mesh(mesh: MeshInput, settings: Settings, topology: Topology | None) -> Mesh:
    # Before the mesh is made, which takes time for each axis.
    sizes = mesh.sizes
    check_limit("max_mesh_axes", len(sizes), "axes of a mesh", settings)
    check_limit("max_devices", prod(sizes), "devices of a mesh", settings)
    return mesh.build(topology)


def _check_solving(options: PlanOptions, settings: Settings) -> None:
    """Check the options that say who solves a problem, and how long.

    Raises:
        OptionError: this service does not allow them.
    """
    _check_time_limit(options.solver.time_limit, settings)
    allowed = settings.allowed_solvers
    if options.solver.name.lower() not in {name.lower() for name in allowed}:
        raise OptionError(
            f"solver is {options.solver.name!r}, but this service allows {' and '.join(allowed)}; "
            f"use one of them, or add it to AUTOSHARD_SOLVERS"
        )


def _check_time_limit(seconds: float, settings: Settings) -> None:
    limit = settings.max_time_limit
    if seconds > limit:
        raise limit_error(
            ProblemType.OPTIONS,
            f"time_limit is {seconds:g} seconds, but this service allows {limit:g}; use a smaller "
            "one, or raise the limit",
            "max_time_limit",
            limit,
        )


def _graph_task(
    kind: JobKind, sha256: str | None, fields: dict[str, Any], settings: Settings
) -> Task:
    assert sha256 is not None, "a config is exported first"
    request = {"kind": kind, **fields, "limits": settings.archive_limits}
    return Task(kind, digest(kind, *versions(), sha256, fields), request, None, sha256)
