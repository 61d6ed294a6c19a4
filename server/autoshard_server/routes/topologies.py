"""Clusters that a mesh can name."""

from typing import Annotated

from fastapi import APIRouter, Path

from autoshard.errors import MeshError
from autoshard.mesh import Topology, get_topology, topology_names
from autoshard_server import problems
from autoshard_server.http.auth import Reader
from autoshard_server.http.documents import Topologies
from autoshard_server.http.specification import guarded_answers
from autoshard_server.problems import NOT_FOUND, ServerError

router = APIRouter(tags=["topologies"])


@router.get(
    "/v1/topologies",
    operation_id="listTopologies",
    summary="List topologies",
    responses=guarded_answers(),
)
async def list_topologies(_caller: Reader) -> Topologies:
    """Clusters that `mesh.topology` can name."""
    return Topologies(topologies=list(topology_names()))


@router.get(
    "/v1/topologies/{name:segment}",
    operation_id="getTopology",
    summary="Get a topology",
    responses=guarded_answers(problems.NOT_FOUND, problems.REQUEST),
)
async def get_known_topology(
    name: Annotated[str, Path(max_length=255, description="a name of GET /v1/topologies")],
    _caller: Reader,
) -> Topology:
    """Every figure of a topology: a start for one's own, which a mesh takes as a whole."""
    try:
        return get_topology(name)
    except MeshError as error:
        raise ServerError(NOT_FOUND, str(error)) from None
