"""What the caller asks for, made ready to be sent, or to be answered here."""

import hashlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from pydantic import ValidationError

from autoshard.errors import ArchiveError, GraphError, MeshError, OptionError
from autoshard.graph import (
    ArchiveLimits,
    Graph,
    load_graph,
    operator_namespaces,
    rules_from_json,
    rules_to_json,
)
from autoshard.mesh import (
    Mesh,
    Topology,
    make_mesh,
    mesh_from_json,
    mesh_to_json,
    topology_to_json,
)
from autoshard.ops import with_rules
from autoshard.plan import Mode, PlanOptions

if TYPE_CHECKING:
    import torch

MeshLike: TypeAlias = Sequence[int] | Mapping[str, Any] | Mesh
ModelLike: TypeAlias = "str | Path | bytes | torch.nn.Module"

_log = logging.getLogger(__name__)

_OF_TORCH = frozenset({"aten", "higher_order"})

_INFLATED = 1032
"""Bytes that one compressed byte may stand for at most; https://zlib.net/zlib_tech.html."""


class AskedGraph(ABC):
    """A graph, and something that is asked about it.

    Args:
        graph: bytes of an archive or of its model.json.
        discover: whether operators of the model's own are run, to find out how they may be cut.

    Attributes:
        topologies: that a mesh may name besides those that are built in, where it is answered here.
    """

    def __init__(self, graph: bytes, *, discover: bool) -> None:
        self.graph = graph
        self.topologies: Mapping[str, Topology] = {}
        self._rules = _custom_rules(graph) if discover else []

    @cached_property
    def graph_sha256(self) -> str:
        """Digest of the bytes."""
        return hashlib.sha256(self.graph).hexdigest()

    @cached_property
    def document(self) -> dict[str, Any]:
        """What the service is asked, beside the graph."""
        return self._question() | ({"rules": self._rules} if self._rules else {})

    @cached_property
    def program(self) -> Graph:
        """The graph with the rules of the model's own operators.

        Raises:
            GraphError: it cannot be read.
        """
        graph = load_graph(self.graph, limits=own_limits(self.graph))
        return with_rules(graph, rules_from_json(self._rules))

    @abstractmethod
    def _question(self) -> dict[str, Any]:
        """What is asked, without the rules."""


class Asked(AskedGraph):
    """A plan of a graph for a mesh.

    Args:
        graph: bytes of an archive or of its model.json.
        mesh: as callers give it.
        options: of planning.
        discover: whether operators of the model's own are run, to find out how they may be cut.
    """

    def __init__(
        self, graph: bytes, mesh: MeshLike, options: PlanOptions, *, discover: bool
    ) -> None:
        super().__init__(graph, discover=discover)
        self.options = options
        self._mesh = mesh

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh.

        Raises:
            MeshError: it is impossible.
        """
        return _mesh_of(self._mesh, self.topologies)

    def _question(self) -> dict[str, Any]:
        return {"mesh": _mesh_document(self._mesh), "options": _options_document(self.options)}


class AskedSearch(AskedGraph):
    """The best mesh of so many devices for a graph.

    Args:
        graph: bytes of an archive or of its model.json.
        num_devices: that each mesh has.
        topology: name of one, or a whole one; the default one if None.
        max_axes: largest number of axes.
        options: of planning, the same for all meshes.
        discover: whether operators of the model's own are run, to find out how they may be cut.
    """

    def __init__(
        self,
        graph: bytes,
        num_devices: int,
        *,
        topology: str | Topology | None,
        max_axes: int,
        options: PlanOptions,
        discover: bool,
    ) -> None:
        super().__init__(graph, discover=discover)
        self.num_devices = num_devices
        self.topology = topology
        self.max_axes = max_axes
        self.options = options

    @property
    def cluster(self) -> str | Topology | None:
        """The topology, or the name of one that is built in."""
        named = self.topology
        return self.topologies.get(named, named) if isinstance(named, str) else named

    @property
    def digest(self) -> str:
        """Of all that is asked."""
        question = self._question() | {"topology": _topology_document(self.cluster)}
        text = json.dumps([self.graph_sha256, question, self._rules], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def _question(self) -> dict[str, Any]:
        return {
            "num_devices": self.num_devices,
            "topology": _topology_document(self.topology),
            "max_axes": self.max_axes,
            "options": _options_document(self.options),
        }


class AskedCoverage(AskedGraph):
    """Which operators of a graph can be cut.

    Args:
        graph: bytes of an archive or of its model.json.
        mesh: as callers give it; None for axes of any size.
        discover: whether operators of the model's own are run, to find out how they may be cut.
    """

    def __init__(self, graph: bytes, mesh: MeshLike | None, *, discover: bool) -> None:
        super().__init__(graph, discover=discover)
        self._mesh = mesh

    @cached_property
    def axis_sizes(self) -> frozenset[int]:
        """Sizes of the axes of which one must be able to cut; empty for any.

        Raises:
            MeshError: the mesh is impossible.
        """
        sizes = () if self._mesh is None else _mesh_of(self._mesh, self.topologies).axis_sizes
        return frozenset(size for size in sizes if size > 1)

    def _question(self) -> dict[str, Any]:
        return {} if self._mesh is None else {"mesh": _mesh_document(self._mesh)}


def merged_options(
    options: PlanOptions | None, mode: Mode | None, memory_budget: int | None
) -> PlanOptions:
    """Options of planning, with those replaced that are given by themselves.

    Raises:
        OptionError: one of them is impossible.
    """
    given = {"mode": mode, "memory_budget": memory_budget}
    changed = {name: value for name, value in given.items() if value is not None}
    try:
        return PlanOptions.model_validate((options or PlanOptions()).model_dump() | changed)
    except ValidationError as error:
        first = error.errors()[0]
        raise OptionError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def graph_bytes(
    model: ModelLike,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
) -> bytes:
    """The bytes of a model as callers give it; a live one is exported.

    Raises:
        GraphError: it cannot be exported, or the file not be read.
    """
    if isinstance(model, bytes):
        return model
    if isinstance(model, str | Path):
        try:
            return Path(model).read_bytes()
        except OSError as error:
            raise ArchiveError(f"{model} cannot be read: {error.strerror or error}") from error
    from autoshard.graph import export_model  # noqa: PLC0415  torch is slow to import

    return export_model(model, args, dict(kwargs or {}))


def own_limits(graph: bytes) -> ArchiveLimits:
    """Limits that no archive of so many bytes exceeds: the caller's own is no attack."""
    most = _INFLATED * len(graph)
    return ArchiveLimits(
        archive_bytes=len(graph), model_bytes=most, compression_ratio=_INFLATED, nodes=most
    )


def _custom_rules(graph: bytes) -> list[dict[str, Any]]:
    """Rules of the graph's operators that are not torch's, if they are registered here."""
    limits = own_limits(graph)
    if operator_namespaces(graph, limits=limits) <= _OF_TORCH:
        return []
    try:
        program = load_graph(graph, limits=limits)
    except GraphError:
        return []  # the service says what is wrong with it
    from autoshard.discovery import discover  # noqa: PLC0415  torch is slow to import

    found = discover(program, aten=False)
    for finding in found.findings:
        if finding.rule is None:
            _log.warning("%s runs whole on every rank: %s", finding.operator, finding.reason)
    return rules_to_json(found.graph.rules)


def _mesh_of(mesh: MeshLike, topologies: Mapping[str, Topology]) -> Mesh:
    document = _mesh_document(mesh)
    named = document.get("topology")
    if isinstance(named, Mapping):
        return mesh_from_json(json.dumps(document))
    if isinstance(named, str) and named in topologies:
        document["topology"] = topologies[named]
    try:
        return make_mesh(**document)
    except TypeError as error:
        raise MeshError(f"the mesh cannot be read: {error}") from None


def _mesh_document(mesh: MeshLike) -> dict[str, Any]:
    if isinstance(mesh, Mesh):
        document: dict[str, Any] = json.loads(mesh_to_json(mesh))
        return document
    if isinstance(mesh, Mapping):
        return dict(mesh)
    try:
        return {"shape": [index(size) for size in mesh]}
    except TypeError:
        raise MeshError(
            f"{mesh!r} is no mesh: give the size of each axis, such as (2, 4), the fields of "
            f"make_mesh as a mapping, or a Mesh"
        ) from None


def _options_document(options: PlanOptions) -> dict[str, Any]:
    return options.model_dump(mode="json")


def _topology_document(topology: str | Topology | None) -> Any:
    if isinstance(topology, Topology):
        return json.loads(topology_to_json(topology))
    return topology
