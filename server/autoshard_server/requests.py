"""What clients send: the JSON part of a planning request."""

import hashlib
import json
from functools import cached_property
from importlib.metadata import version
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Field, RootModel, Tag, field_validator

from autoshard.errors import OptionError
from autoshard.graph import MAX_RULES, RULES_VERSION, rules_from_json, rules_to_json
from autoshard.mesh import Mesh, make_mesh, mesh_from_json, mesh_to_json
from autoshard.plan import PLAN_VERSION, PlanOptions
from autoshard_server.settings import Settings

Bandwidth = Annotated[float, Field(description="bytes per second per device and direction")]
Latency = Annotated[float, Field(description="seconds per step")]


class MeshShorthand(BaseModel):
    """A mesh by its shape and a word or two about the links, as `make_mesh` takes it."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    shape: tuple[int, ...] = Field(
        description="size of each axis, outermost first", examples=[[2, 4]]
    )
    axes: tuple[str, ...] | None = Field(default=None, description="name of each axis")
    topology: str | None = Field(default=None, description="a name of GET /v1/topologies")
    intra_bandwidth: Bandwidth | None = None
    inter_bandwidth: Bandwidth | None = None
    intra_latency: Latency | None = None
    inter_latency: Latency | None = None
    backend: str | None = Field(default=None, description="nccl or gloo")

    def build(self) -> Mesh:
        """The mesh.

        Raises:
            MeshError: it is impossible.
        """
        return make_mesh(
            self.shape,
            axes=self.axes,
            topology=self.topology,
            intra_bandwidth=self.intra_bandwidth,
            inter_bandwidth=self.inter_bandwidth,
            intra_latency=self.intra_latency,
            inter_latency=self.inter_latency,
            backend=self.backend,
        )


class MeshDocument(RootModel[dict[str, Any]]):
    """A whole mesh with every figure, as `mesh_to_json` writes it."""

    def build(self) -> Mesh:
        """The mesh.

        Raises:
            MeshError: it is impossible, or not a mesh.
        """
        return mesh_from_json(json.dumps(self.root))


def _kind_of_mesh(value: object) -> str:
    """A document holds its topology; the shorthand at most names one."""
    whole = isinstance(value, dict) and isinstance(value.get("topology"), dict)
    return "document" if whole or isinstance(value, MeshDocument) else "shorthand"


class PlanRequest(BaseModel):
    """What to plan for."""

    model_config = ConfigDict(extra="forbid")

    mesh: Annotated[
        Annotated[MeshShorthand, Tag("shorthand")] | Annotated[MeshDocument, Tag("document")],
        Discriminator(_kind_of_mesh),
    ]
    options: PlanOptions = PlanOptions()
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


class PlanLookup(PlanRequest):
    """What to plan for, and which graph, by its digest."""

    graph_sha256: Annotated[
        str,
        Field(
            pattern="^[0-9a-f]{64}$",
            description="sha256 of the bytes that POST /v1/plans takes as the part 'graph'",
        ),
    ]


class Question:
    """A request and which graph it is about, checked as far as that goes without the graph.

    Args:
        request: what to plan for.
        graph_sha256: digest of the uploaded bytes, 64 hex digits.
        settings: limits of this service.

    Raises:
        MeshError: the mesh is impossible.
        OptionError: an option exceeds a limit of this service.
    """

    def __init__(self, request: PlanRequest, graph_sha256: str, settings: Settings) -> None:
        limit = settings.max_time_limit
        if request.options.time_limit > limit:
            raise OptionError(
                f"time_limit is {request.options.time_limit:g} seconds, but this service allows "
                f"{limit:g}; ask for less, or raise AUTOSHARD_MAX_TIME_LIMIT"
            )
        self._graph_sha256 = graph_sha256
        self.options = request.options
        self.rules = rules_from_json(list(request.rules))
        self.mesh = request.mesh.build()
        self._limits = settings.archive_limits

    @cached_property
    def digest(self) -> str:
        """Of everything that arrived, as it arrived: found without reading the graph.

        The same program exported twice can differ here and still have the same plan id.
        """
        versions = [version("autoshard"), PLAN_VERSION, version("torch"), RULES_VERSION]
        frame = [*versions, self._graph_sha256, *self._asked]
        return hashlib.sha256(json.dumps(frame, sort_keys=True).encode()).hexdigest()

    def work(self, plan_id: str) -> str:
        """What the solver process needs besides the graph, as JSON text."""
        mesh, options, rules = self._asked
        asked = {"mesh": mesh, "options": options, "rules": rules}
        return json.dumps({"plan_id": plan_id, **asked, "limits": self._limits})

    @cached_property
    def _asked(self) -> tuple[Any, Any, Any]:
        options = self.options.model_dump(mode="json")
        return json.loads(mesh_to_json(self.mesh)), options, rules_to_json(self.rules)
