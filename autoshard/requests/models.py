"""Requests about a model, to be sent to a service or run in this process."""

import hashlib
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypeAlias, TypedDict, Unpack

from autoshard.base.files import read_graph_file
from autoshard.errors import ArgumentTypeError, GraphError, MeshError, OptionError
from autoshard.graph import (
    ArchiveLimits,
    Graph,
    graph_source,
    load_graph,
    operator_namespaces,
    rules_to_json,
)
from autoshard.mesh import (
    Mesh,
    Topology,
    make_mesh,
    mesh_from_json,
    mesh_sizes,
    mesh_to_json,
    parse_shape,
    to_mesh,
    topology_to_json,
)
from autoshard.mesh.sources import MeshLike as PlainMeshLike
from autoshard.plan import Mode, PlanOptions
from autoshard.plan.options import to_options
from autoshard.requests.model_configs import (
    BatchShape,
    ElementType,
    num_positions,
    read_config,
)
from autoshard.requests.running import load_request_graph

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.nn import Module

    from autoshard.planner import OneStage

MeshLike: TypeAlias = "PlainMeshLike | Mapping[str, Any]"
ModelLike: TypeAlias = "str | Path | bytes | ExportedProgram | Module"

_TORCH_NAMESPACES = frozenset({"aten", "higher_order"})

_MAX_DEFLATE_RATIO = 1032
"""Largest compression ratio of deflate; https://zlib.net/zlib_tech.html."""

_log = logging.getLogger(__name__)


class ConfigArguments(TypedDict, total=False):
    """Keyword arguments of a request about the model of a config, in place of a model."""

    config: Mapping[str, Any] | str | Path | None
    batch_size: int | None
    seq_length: int | None
    dtype: ElementType | None


class _ModelArguments(ConfigArguments, total=False):
    """Keyword arguments of every request for plans."""

    options: PlanOptions | None
    mode: Mode | None
    memory_budget: str | int | None
    discover: bool


class PlanArguments(_ModelArguments):
    """Keyword arguments of `Client.plan` that describe the plan."""

    mesh: MeshLike
    one_stage: NotRequired[tuple[bytes, PlanOptions] | None]


class SearchArguments(_ModelArguments):
    """Keyword arguments of `Client.search` that describe the meshes and their plans."""

    num_devices: int
    topology: NotRequired[str | Topology | None]
    nodes: NotRequired[int | None]
    gpus_per_node: NotRequired[int | None]
    max_axes: NotRequired[int]
    total_time_limit: NotRequired[float | None]


class GraphRequest:
    """A request about a graph, or about a config of which the graph is made where it runs.

    Args:
        model: as in `Client.plan`; None for a config.
        args: as in `Client.plan`.
        kwargs: as in `Client.plan`.
        members: of the JSON document of the request, without the rules.
        discover: run the model's own operators on small tensors to find their sharding rules.
        options: of planning, of whose mode and number of micro-batches a config is exported.
        given: `ConfigArguments`.

    Attributes:
        document: the JSON document of the request, without a graph.

    Raises:
        GraphError: the module cannot be exported, or the file cannot be read.
        OptionError: there is a model and a config, or neither, or the batch of none.
    """

    def __init__(
        self,
        model: "ModelLike | None",
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
        members: dict[str, Any],
        *,
        discover: bool,
        options: PlanOptions | None = None,
        given: Mapping[str, Any],
    ) -> None:
        self._options = options or PlanOptions()
        self.of_config = _config_members(model, given)
        self.rules: list[dict[str, Any]] = []
        if model is not None:
            self.graph = read_model(model, args, kwargs)
            self.rules = _custom_rules(self.graph) if discover else []
        self.document = members | self.of_config | ({"rules": self.rules} if self.rules else {})

    @cached_property
    def graph(self) -> bytes:
        """Bytes of an archive or of its model.json; that of a config is made here when it is used.

        Raises:
            OptionError: it is no config of a model of the installed transformers.
            GraphError: the model cannot be exported.
            MissingPackageError: transformers is not installed.
        """
        # torch is slow to import.
        from autoshard.requests.model_files import config_file, export_config  # noqa: PLC0415

        given = dict(self.of_config)
        config, dtype = given.pop("config"), given.pop("dtype", None)
        batch = BatchShape(**given).of_micro_batch(self._options.training.micro_batches)
        with config_file(json.dumps(config).encode()) as path:
            return export_config(path, batch, mode=self._options.mode, dtype=dtype)

    @cached_property
    def graph_sha256(self) -> str | None:
        """Digest of the graph's bytes; None for a config."""
        return None if self.of_config else hashlib.sha256(self.graph).hexdigest()

    @property
    def named_document(self) -> dict[str, Any]:
        """The JSON document of the request, which names a graph by its digest."""
        return self.document | ({} if self.of_config else {"graph_sha256": self.graph_sha256})

    @cached_property
    def program(self) -> Graph:
        """The graph with the rules of the model's own operators.

        Raises:
            GraphError: it cannot be read.
        """
        return load_request_graph(self.graph, self.rules, _unlimited(self.graph))


class PlanRequest(GraphRequest):
    """A request for a plan, or for a validation; the arguments are those of `Client.plan`."""

    def __init__(
        self,
        model: "ModelLike | None" = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        mesh: MeshLike,
        discover: bool = True,
        one_stage: tuple[bytes, PlanOptions] | None = None,
        **options: Any,
    ) -> None:
        self._one_stage = one_stage
        given = _config_arguments(options)
        self.options = _merge_options(**options)
        members = {"mesh": _mesh_document(mesh), "options": self.options.model_dump(mode="json")}
        how: dict[str, Any] = {"discover": discover, "options": self.options, "given": given}
        super().__init__(model, args, kwargs, members, **how)

    @cached_property
    def one_stage(self) -> "OneStage | None":
        """The step without a pipeline that the usual layouts are planned for; None for its own."""
        # The planner is loaded only where it plans.
        from autoshard.planner import OneStage  # noqa: PLC0415

        if self._one_stage is None:
            return None
        archive, options = self._one_stage
        return OneStage(load_graph(archive), options)

    def mesh(self, topologies: Mapping[str, Topology]) -> Mesh:
        """Build the mesh.

        Args:
            topologies: stored topologies by name, in addition to the built-in ones.

        Raises:
            MeshError: it is invalid.
        """
        return _build_mesh(self.document["mesh"], topologies)


class MeshSearchRequest(GraphRequest):
    """A request for the best mesh; the arguments are those of `Client.search`."""

    def __init__(
        self,
        model: "ModelLike | None" = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        num_devices: int,
        topology: str | Topology | None = None,
        nodes: int | None = None,
        gpus_per_node: int | None = None,
        max_axes: int = 3,
        total_time_limit: float | None = None,
        discover: bool = True,
        **options: Any,
    ) -> None:
        self.num_devices, self.topology, self.max_axes = num_devices, topology, max_axes
        self.nodes, self.gpus_per_node = nodes, gpus_per_node
        self.total_time_limit = total_time_limit
        given = _config_arguments(options)
        self.options = _merge_options(**options)
        members = {
            "num_devices": num_devices,
            "topology": _topology_document(topology),
            "nodes": nodes,
            "gpus_per_node": gpus_per_node,
            "max_axes": max_axes,
            **({} if total_time_limit is None else {"total_time_limit": total_time_limit}),
            "options": self.options.model_dump(mode="json"),
        }
        how: dict[str, Any] = {"discover": discover, "options": self.options, "given": given}
        super().__init__(model, args, kwargs, members, **how)


class OperatorCoverageRequest(GraphRequest):
    """A request for operators that can be sharded; the arguments are those of `Client.coverage`."""

    def __init__(
        self,
        model: "ModelLike | None" = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        mesh: "MeshLike | None" = None,
        *,
        discover: bool = True,
        **given: Unpack[ConfigArguments],
    ) -> None:
        members = {} if mesh is None else {"mesh": _mesh_document(mesh)}
        super().__init__(model, args, kwargs, members, discover=discover, given=given)

    def axis_sizes(self, topologies: Mapping[str, Topology]) -> frozenset[int]:
        """Sizes of the mesh axes; empty for any size.

        Raises:
            MeshError: the mesh is invalid.
        """
        document = self.document.get("mesh")
        sizes = () if document is None else _build_mesh(document, topologies).axis_sizes
        return frozenset(size for size in sizes if size > 1)


def read_model(
    model: ModelLike, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> bytes:
    """Return the bytes of an exported model; a live module is exported.

    Raises:
        GraphError: the module cannot be exported, or the file cannot be read.
    """
    if isinstance(model, Graph):
        raise ArgumentTypeError(
            "a Graph is passed in place of a model: pass the file or the bytes that it was loaded "
            "from"
        )
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        from autoshard.graph import export_model  # noqa: PLC0415  torch is slow to import

        return export_model(model, args, dict(kwargs or {}))
    source = graph_source(model)
    return source if isinstance(source, bytes) else read_graph_file(Path(source))


def _config_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Take the arguments about a config out of those of a request."""
    return {name: options.pop(name) for name in ConfigArguments.__annotations__ if name in options}


def _config_members(model: "ModelLike | None", given: Mapping[str, Any]) -> dict[str, Any]:
    """Members of the document of a request about a config; none for a model.

    Raises:
        OptionError: both are given, or none, or a number is out of its range.
    """
    members = {name: value for name, value in given.items() if value is not None}
    if (model is None) == ("config" not in members):
        raise OptionError("give one of a model and config=")
    if model is not None and members:
        raise OptionError(f"{next(iter(members))} is for config=, not for a model")
    if not members:
        return {}
    config = members["config"]
    if not isinstance(config, Mapping):
        config = members["config"] = read_config(config)
    shape = {name: members[name] for name in ("batch_size", "seq_length") if name in members}
    BatchShape(**shape).num_tokens(num_positions(config), "the config")
    return members


def _merge_options(options: PlanOptions | None = None, **given: Any) -> PlanOptions:
    """Replace options by those that were given as separate arguments.

    Raises:
        OptionError: one of them is invalid or does not exist.
    """
    return to_options(options, {k: value for k, value in given.items() if value is not None})


def _unlimited(graph: bytes) -> ArchiveLimits:
    """Limits that no archive of this size exceeds: the caller's own archive is trusted."""
    largest = _MAX_DEFLATE_RATIO * len(graph)
    return ArchiveLimits(
        archive_bytes=len(graph),
        model_bytes=largest,
        compression_ratio=_MAX_DEFLATE_RATIO,
        nodes=largest,
    )


def _custom_rules(graph: bytes) -> list[dict[str, Any]]:
    """Rules of the model's own operators that are registered in this process."""
    limits = _unlimited(graph)
    if operator_namespaces(graph, limits=limits) <= _TORCH_NAMESPACES:
        return []
    try:
        program = load_graph(graph, limits=limits)
    except GraphError:
        return []  # reported when the request is run
    from autoshard.discovery import discover  # noqa: PLC0415  torch is slow to import

    found = discover(program, aten=False)
    for finding in found.findings:
        if finding.rule is None:
            _log.warning(
                "%s is replicated, as no rule was found: %s", finding.operator, finding.reason
            )
    return rules_to_json(found.graph.rules)


def _build_mesh(document: Mapping[str, Any], topologies: Mapping[str, Topology]) -> Mesh:
    topology = document.get("topology")
    if isinstance(topology, Mapping):
        return mesh_from_json(json.dumps(document))
    given = dict(document)
    if isinstance(topology, str):
        given["topology"] = topologies.get(topology, topology)
    try:
        return make_mesh(**given)
    except TypeError as error:
        raise MeshError(f"invalid mesh: {error}") from None


def _mesh_document(mesh: MeshLike) -> dict[str, Any]:
    if isinstance(mesh, Mapping):
        return _mesh_arguments(mesh)
    if isinstance(mesh, str):
        return _mesh_arguments({"shape": mesh})
    if isinstance(mesh, Sequence | int):
        return {"shape": [*mesh_sizes(mesh)]}
    document: dict[str, Any] = json.loads(mesh_to_json(to_mesh(mesh)))
    return document


def _mesh_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `make_mesh` as the service takes them: a list of sizes, and `axes`."""
    document = dict(given)
    if "mesh_dim_names" in document and "axes" not in document:
        document["axes"] = document.pop("mesh_dim_names")
    shape = document.get("shape")
    if isinstance(shape, str):
        sizes, names = parse_shape(shape)
        document["shape"] = list(sizes)
        if names is not None:
            if document.get("axes") is not None:
                raise MeshError(
                    f"the axes are named twice: {names} in the shape, and {document['axes']}"
                )
            document["axes"] = list(names)
    return document


def _topology_document(topology: str | Topology | None) -> Any:
    if isinstance(topology, Topology):
        return json.loads(topology_to_json(topology))
    return topology
