"""Requests that were checked: which result is meant, and what a solver process needs for it."""

import hashlib
import json
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import version
from math import prod
from typing import Any

from autoshard.errors import OptionError
from autoshard.graph import RULES_VERSION, rules_from_json, rules_to_json
from autoshard.mesh import Mesh, Topology, mesh_to_json, topology_to_json
from autoshard.plan import PLAN_VERSION
from autoshard.planner import candidate_meshes, torch_version
from autoshard_server.answering.requests import (
    CoverageRequest,
    MeshInput,
    PlanRequest,
    SearchRequest,
)
from autoshard_server.jobs.kinds import JobKind
from autoshard_server.problems import LIMIT, ServerError
from autoshard_server.settings import Settings


@dataclass(frozen=True, slots=True)
class Task:
    """Something for a solver process.

    Attributes:
        kind: what it makes.
        result_id: under which its result is kept, 64 hex digits.
        work: what the process needs besides the bytes, as JSON text.
        payload: the bytes: a graph as uploaded, or a plan document.
    """

    kind: JobKind
    result_id: str
    work: str
    payload: bytes


class Question:
    """A request and which graph it is about, checked as far as that goes without the graph.

    Args:
        request: what to plan for.
        graph_sha256: digest of the uploaded bytes, 64 hex digits.
        settings: limits of this service.
        topology: what the name of a topology in the request stands for, where that is no preset.
            What depends on the request depends on all of it, and not on its name.

    Raises:
        MeshError: the mesh is impossible.
        OptionError: an option exceeds a limit of this service.
        ServerError: LIMIT, where the mesh exceeds one.
    """

    def __init__(
        self,
        request: PlanRequest,
        graph_sha256: str,
        settings: Settings,
        *,
        topology: Topology | None = None,
    ) -> None:
        _check_time_limit(request.options.time_limit, settings)
        self.graph_sha256 = graph_sha256
        self.options = request.options
        self.rules = rules_from_json(list(request.rules))
        self.mesh = checked_mesh(request.mesh, settings, topology)
        self._limits = settings.archive_limits
        self._most = settings.max_strategies

    @cached_property
    def digest(self) -> str:
        """Of everything that arrived, as it arrived: found without reading the graph.

        The same program exported twice can differ here and still have the same plan id.
        """
        return _digest(*_versions(), self.graph_sha256, *self._asked)

    def plan(self, plan_id: str, graph: bytes) -> Task:
        """Making the plan."""
        work = self._work(plan_id=plan_id, kind=JobKind.PLAN, max_strategies=self._most)
        return Task(JobKind.PLAN, plan_id, work, graph)

    def validation(self, plan_id: str, graph: bytes) -> Task:
        """Only formulating what would be solved for the plan."""
        kind = JobKind.VALIDATION
        work = self._work(plan_id=plan_id, kind=kind, max_strategies=self._most)
        return Task(kind, validation_id(plan_id), work, graph)

    def _work(self, **more: Any) -> str:
        mesh, options, rules = self._asked
        asked = {"mesh": mesh, "options": options, "rules": rules}
        return json.dumps({**more, **asked, "limits": self._limits})

    @cached_property
    def _asked(self) -> tuple[Any, Any, Any]:
        options = self.options.model_dump(mode="json")
        return json.loads(mesh_to_json(self.mesh)), options, rules_to_json(self.rules)


def validation_id(plan_id: str) -> str:
    """Id of the validation of what would be solved for a plan."""
    return _digest(JobKind.VALIDATION, plan_id)


def search_task(
    request: SearchRequest, graph: bytes, settings: Settings, *, topology: Topology | None = None
) -> Task:
    """Planning a graph on every mesh of so many devices, of a stored topology if there is one.

    Raises:
        MeshError: the topology is unknown, or does not hold so many devices.
        OptionError: a number is out of its range.
        ServerError: LIMIT, where there are more devices or meshes than this service allows.
    """
    _check_time_limit(request.options.time_limit, settings)
    _check_devices(request.num_devices, settings)
    limit = settings.max_search_meshes
    # One more than allowed is enough to know: large numbers have very many factorisations.
    meshes = candidate_meshes(
        request.num_devices,
        topology=request.topology_value(topology),
        max_axes=request.max_axes,
        most=limit + 1,
    )
    if len(meshes) > limit:
        raise _over("or more meshes of a search", len(meshes), "max_search_meshes", settings)
    asked = {
        "num_devices": request.num_devices,
        "max_axes": request.max_axes,
        "topology": json.loads(topology_to_json(meshes[0].topology)),
        "options": request.options.model_dump(mode="json"),
        "rules": list(request.rules),
        # In the digest too: a mesh that was too large need not stay so.
        "max_strategies": settings.max_strategies,
    }
    return _graph_task(JobKind.SEARCH, request.graph_sha256, asked, graph, settings)


def coverage_task(
    request: CoverageRequest, graph: bytes, settings: Settings, *, topology: Topology | None = None
) -> Task:
    """How far the rules reach in a graph, on a mesh (of a stored topology if given) or on any.

    Raises:
        MeshError: the mesh is impossible.
        ServerError: LIMIT, where the mesh exceeds one.
    """
    mesh = None if request.mesh is None else checked_mesh(request.mesh, settings, topology)
    sizes = [] if mesh is None else sorted({size for size in mesh.axis_sizes if size > 1})
    asked = {"axis_sizes": sizes, "rules": list(request.rules)}
    return _graph_task(JobKind.COVERAGE, request.graph_sha256, asked, graph, settings)


def explanation_task(
    plan_id: str,
    plan: bytes,
    settings: Settings,
    *,
    name: str,
    value: bool,
    time_limit: float,
) -> Task:
    """Pricing every alternative of one choice of a plan.

    Raises:
        OptionError: the time limit exceeds this service's.
    """
    _check_time_limit(time_limit, settings)
    asked = {"name": name, "value": value, "time_limit": time_limit}
    kind = JobKind.EXPLANATION
    work = json.dumps({"kind": kind, **asked})
    return Task(kind, _digest(kind, *_versions(), plan_id, asked), work, plan)


def checked_mesh(given: MeshInput, settings: Settings, topology: Topology | None) -> Mesh:
    """A mesh within this service's limits.

    Raises:
        MeshError: it is impossible.
        ServerError: LIMIT, where it has too many axes or devices.
    """
    mesh = given.build(topology)
    if len(mesh.axes) > settings.max_mesh_axes:
        raise _over("axes of a mesh", len(mesh.axes), "max_mesh_axes", settings)
    _check_devices(prod(mesh.axis_sizes), settings)
    return mesh


def check_graph_size(num_nodes: int, num_edges: int, settings: Settings) -> None:
    """Refuse a program that is larger than this service allows.

    Raises:
        ServerError: LIMIT.
    """
    if num_nodes > settings.max_nodes:
        raise _over("nodes of a graph", num_nodes, "max_nodes", settings)
    if num_edges > settings.max_edges:
        raise _over("edges of a graph", num_edges, "max_edges", settings)


def _check_devices(number: int, settings: Settings) -> None:
    if number > settings.max_devices:
        raise _over("devices of a mesh", number, "max_devices", settings)


def _check_time_limit(seconds: float, settings: Settings) -> None:
    limit = settings.max_time_limit
    if seconds > limit:
        raise OptionError(
            f"time_limit is {seconds:g} seconds, but this service allows "
            f"{limit:g}; ask for less, or raise AUTOSHARD_MAX_TIME_LIMIT"
        )


def _over(what: str, number: int, setting: str, settings: Settings) -> ServerError:
    limit = getattr(settings, setting)
    name = f"AUTOSHARD_{setting.upper()}"
    return ServerError(
        LIMIT,
        f"{number:,} {what} exceed this service's limit of {limit:,} ({name})",
        extensions={"limit": limit, "limit_name": name},
    )


def _graph_task(
    kind: JobKind, sha256: str, asked: dict[str, Any], graph: bytes, settings: Settings
) -> Task:
    work = json.dumps({"kind": kind, **asked, "limits": settings.archive_limits})
    return Task(kind, _digest(kind, *_versions(), sha256, asked), work, graph)


def _versions() -> tuple[Any, ...]:
    return *_installed(), PLAN_VERSION, RULES_VERSION


@cache
def _installed() -> tuple[str, str | None]:
    # Looking them up takes longer than all the rest of a request that is known.
    return version("autoshard"), torch_version()


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
