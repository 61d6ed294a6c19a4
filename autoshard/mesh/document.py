"""Meshes and topologies as JSON documents: meshes travel in requests and plans."""

from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from autoshard.errors import MeshError
from autoshard.mesh.mesh import Mesh
from autoshard.mesh.topology import Topology

_MESH = TypeAdapter(Mesh)
_TOPOLOGY = TypeAdapter(Topology)

T = TypeVar("T")


def mesh_to_json(mesh: Mesh) -> str:
    """The mesh as a JSON document that holds every figure, so that it needs no presets."""
    return _MESH.dump_json(mesh).decode()


def mesh_from_json(document: str | bytes) -> Mesh:
    """Read what `mesh_to_json` writes. Unknown fields and inexact types are refused.

    Raises:
        MeshError: the document is not JSON, or does not describe a mesh; the message names
            every field that is wrong.
    """
    return _read(_MESH, document, "mesh")


def topology_to_json(topology: Topology, *, indent: int | None = 1) -> str:
    """The topology as a JSON document, for people to look at and change."""
    return _TOPOLOGY.dump_json(topology, indent=indent).decode()


def topology_from_json(document: str | bytes) -> Topology:
    """Read what `topology_to_json` writes. Unknown fields and inexact types are refused.

    Raises:
        MeshError: the document is not JSON, or does not describe a topology; the message names
            every field that is wrong.
    """
    return _read(_TOPOLOGY, document, "topology")


def _read(adapter: TypeAdapter[T], document: str | bytes, what: str) -> T:
    try:
        return adapter.validate_json(document, strict=True)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, (what, *e['loc'])))}: {e['msg'].removeprefix('Value error, ')}"
            for e in error.errors(include_url=False, include_context=False)
        ]
        raise MeshError("; ".join(problems)) from None
