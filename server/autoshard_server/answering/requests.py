"""What clients send, as JSON."""

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Field, RootModel, Tag, field_validator

from autoshard.graph import MAX_RULES, rules_from_json
from autoshard.mesh import Mesh, Topology, make_mesh, mesh_from_json, topology_from_json
from autoshard.plan import PlanOptions

Bandwidth = Annotated[float, Field(description="bytes per second per device and direction")]
Latency = Annotated[float, Field(description="seconds per step")]
TopologyName = Annotated[str, Field(max_length=255, description="a name of GET /v1/topologies")]


class MeshShorthand(BaseModel):
    """A mesh by its shape and a word or two about the links, as `make_mesh` takes it."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    shape: tuple[int, ...] = Field(
        description="size of each axis, outermost first", examples=[[2, 4]]
    )
    axes: tuple[str, ...] | None = Field(default=None, description="name of each axis")
    topology: TopologyName | None = None
    intra_bandwidth: Bandwidth | None = None
    inter_bandwidth: Bandwidth | None = None
    intra_latency: Latency | None = None
    inter_latency: Latency | None = None
    backend: str | None = Field(default=None, description="nccl or gloo")

    def build(self, named: Topology | None = None) -> Mesh:
        """The mesh.

        Args:
            named: what the name of the topology stands for, where that is no preset.

        Raises:
            MeshError: it is impossible.
        """
        return make_mesh(
            self.shape,
            axes=self.axes,
            topology=named or self.topology,
            intra_bandwidth=self.intra_bandwidth,
            inter_bandwidth=self.inter_bandwidth,
            intra_latency=self.intra_latency,
            inter_latency=self.inter_latency,
            backend=self.backend,
        )


class MeshDocument(RootModel[dict[str, Any]]):
    """A whole mesh with every figure, as `mesh_to_json` writes it."""

    def build(self, _named: Topology | None = None) -> Mesh:
        """The mesh, which has its topology with it.

        Raises:
            MeshError: it is impossible, or not a mesh.
        """
        return mesh_from_json(json.dumps(self.root))


def _kind_of_mesh(value: object) -> str:
    """A document holds its topology; the shorthand at most names one."""
    whole = isinstance(value, dict) and isinstance(value.get("topology"), dict)
    return "document" if whole or isinstance(value, MeshDocument) else "shorthand"


MeshInput = MeshShorthand | MeshDocument


def topology_name(mesh: MeshInput | None) -> str | None:
    """The topology that a mesh names; None where it names none, or brings its own."""
    return mesh.topology if isinstance(mesh, MeshShorthand) else None


MeshField = Annotated[
    Annotated[MeshShorthand, Tag("shorthand")] | Annotated[MeshDocument, Tag("document")],
    Discriminator(_kind_of_mesh),
]

GraphField = Annotated[
    str,
    Field(
        pattern="^[0-9a-f]{64}$",
        description="sha256 of the graph's bytes, which PUT /v1/graphs/{digest} stored",
        examples=["0" * 64],
    ),
]


class WithRules(BaseModel):
    """What every request about a graph may bring along."""

    model_config = ConfigDict(extra="forbid")

    rules: tuple[dict[str, Any], ...] = Field(
        default=(),
        max_length=MAX_RULES,
        description=(
            "how calls of the model's own operators may be cut, as `autoshard.discovery` finds "
            "out; they count where this service has no rule of its own."
        ),
    )

    @field_validator("rules")
    @classmethod
    def _readable(cls, rules: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        rules_from_json(list(rules))
        return rules


class PlanRequest(WithRules):
    """What to plan for."""

    mesh: MeshField
    options: PlanOptions = PlanOptions()


class PlanOrder(PlanRequest):
    """What to plan for, and whether only to look at it."""

    validate_only: bool = Field(
        default=False,
        description="whether to answer how large the problem is, and solve nothing",
    )


class GraphPlanOrder(PlanOrder):
    """What to plan for, and which stored graph."""

    graph_sha256: GraphField


class PlanLookup(PlanRequest):
    """What to plan for, and which graph, by its digest."""

    graph_sha256: Annotated[
        str,
        Field(
            pattern="^[0-9a-f]{64}$",
            description="sha256 of the bytes that POST /v1/plans takes as the part 'graph'",
        ),
    ]


class SearchRequest(WithRules):
    """Which devices to find the best mesh of, and for which stored graph."""

    graph_sha256: GraphField
    num_devices: int = Field(ge=1, description="devices that each mesh has", examples=[8])
    topology: TopologyName | dict[str, Any] | None = Field(
        default=None,
        description="a name of GET /v1/topologies, or a whole topology as `topology_to_json` "
        "writes it; the default one if null.",
    )
    max_axes: int = Field(default=3, ge=1, le=6, description="largest number of axes")
    options: PlanOptions = Field(
        default=PlanOptions(), description="the same for all meshes; time_limit is for each."
    )

    @property
    def topology_name(self) -> str | None:
        """The topology that is named; None where none is, or a whole one is there."""
        return self.topology if isinstance(self.topology, str) else None

    def topology_value(self, named: Topology | None = None) -> str | Topology | None:
        """The topology as `make_mesh` takes it.

        Args:
            named: what the name stands for, where that is no preset.

        Raises:
            MeshError: the document is not a topology.
        """
        given = self.topology
        return topology_from_json(json.dumps(given)) if isinstance(given, dict) else named or given


class CoverageRequest(WithRules):
    """Which stored graph to look through, and for which mesh."""

    graph_sha256: GraphField
    mesh: MeshField | None = Field(
        default=None, description="whose axes must be able to cut; any axis at all if null."
    )


class PlanPair(BaseModel):
    """Two plans of one graph."""

    model_config = ConfigDict(extra="forbid")

    before: str = Field(pattern="^[0-9a-f]{64}$", description="id of a plan")
    after: str = Field(pattern="^[0-9a-f]{64}$", description="id of another plan of the graph")
