"""Meshes as JSON documents, as they travel in requests and plans."""

from pydantic import TypeAdapter, ValidationError

from autoshard.errors import MeshError
from autoshard.mesh.mesh import Mesh

_ADAPTER = TypeAdapter(Mesh)


def mesh_to_json(mesh: Mesh) -> str:
    """The mesh as a JSON document that holds every figure, so that it needs no presets."""
    return _ADAPTER.dump_json(mesh).decode()


def mesh_from_json(document: str | bytes) -> Mesh:
    """Read what `mesh_to_json` writes. Unknown fields and inexact types are refused.

    Raises:
        MeshError: the document is not JSON, or does not describe a mesh; the message names
            every field that is wrong.
    """
    try:
        return _ADAPTER.validate_json(document, strict=True)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, ('mesh', *e['loc'])))}: {e['msg'].removeprefix('Value error, ')}"
            for e in error.errors(include_url=False, include_context=False)
        ]
        raise MeshError("; ".join(problems)) from None
