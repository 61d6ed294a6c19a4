"""Clusters that a mesh can name: built in, or stored here."""

import hashlib
from functools import partial
from http import HTTPStatus
from typing import Annotated

import anyio.to_thread
from fastapi import APIRouter, Path, Request, Response

from autoshard import mesh
from autoshard.mesh import (
    Topology,
    get_topology,
    topology_from_json,
    topology_to_json,
)
from autoshard_server import problems
from autoshard_server.http.auth import Planner, Reader
from autoshard_server.http.documents import StoredTopologyEntry, Topologies, topology_entry
from autoshard_server.http.preconditions import condition_of
from autoshard_server.http.specification import (
    TOPOLOGY_BODY,
    answer_headers,
    guarded_answers,
    takes,
)
from autoshard_server.http.uploads import read_text
from autoshard_server.problems import MESH, NOT_FOUND, PRESET, ServerError
from autoshard_server.routes.answers import ASK_AGAIN, JSON, tagged_response
from autoshard_server.routes.parameters import ServiceHere
from autoshard_server.store import NAME_PATTERN

router = APIRouter(tags=["topologies"])

StoredName = Annotated[
    str, Path(pattern=NAME_PATTERN, description="name of a topology that is not built in")
]


@router.get(
    "/v1/topologies",
    operation_id="listTopologies",
    summary="List topologies",
    responses=guarded_answers(),
)
async def list_topologies(service: ServiceHere, _caller: Reader) -> Topologies:
    """Clusters that `mesh.topology` can name: built in, and stored here."""
    stored = await anyio.to_thread.run_sync(service.stores.topologies.list)
    names = sorted({*mesh.list_topologies(), *(info.name for info in stored)})
    return Topologies(topologies=names, stored=[topology_entry(info) for info in stored])


@router.get(
    "/v1/topologies/{name:segment}",
    operation_id="getTopology",
    summary="Get a topology",
    response_model=Topology,
    openapi_extra=takes("If-None-Match"),
    responses={
        200: {
            "description": "The topology.",
            "headers": answer_headers("ETag", "Cache-Control"),
        },
        304: {"description": "The topology is the one that the caller has."},
        **guarded_answers(problems.NOT_FOUND, problems.REQUEST),
    },
)
async def get_known_topology(
    name: Annotated[str, Path(max_length=255, description="a name of GET /v1/topologies")],
    request: Request,
    service: ServiceHere,
    _caller: Reader,
) -> Response:
    """Every figure of a topology: a start for one's own, which a mesh takes as a whole."""
    if name in mesh.list_topologies():
        document = topology_to_json(get_topology(name), indent=None)
    else:
        found = await anyio.to_thread.run_sync(service.stores.topologies.get, name)
        if found is None:
            raise _unknown(name)
        document = found.document
    body = document.encode()
    tag = hashlib.sha256(body).hexdigest()
    return tagged_response(request, body, tag, JSON, cache=ASK_AGAIN)


@router.put(
    "/v1/topologies/{name:segment}",
    operation_id="putTopology",
    summary="Store a topology",
    openapi_extra=takes("If-Match", "If-None-Match", **TOPOLOGY_BODY),
    responses={
        200: {
            "description": "It is stored now, in place of the one that had the name.",
            "headers": answer_headers("ETag"),
        },
        201: {
            "model": StoredTopologyEntry,
            "description": "It is stored now, under a new name.",
            "headers": answer_headers("ETag", "Location"),
        },
        **guarded_answers(
            problems.PRESET,
            problems.PRECONDITION,
            problems.TOO_LARGE,
            problems.MEDIA_TYPE,
            problems.CODING,
            problems.MESH,
            problems.LIMIT,
            problems.REQUEST,
        ),
    },
)
async def put_topology(
    name: StoredName, request: Request, response: Response, service: ServiceHere, _caller: Planner
) -> StoredTopologyEntry:
    """Store a topology under its name, as `autoshard calibrate` writes it or made by hand.

    Requests that name it from now on mean this one. Plans that were made for another one of the
    name stay as they are, under their ids.
    """
    if name in mesh.list_topologies():
        raise _is_preset(name)
    body = await read_text(request, service.settings, "max_topology_bytes")
    topology = topology_from_json(body)
    if topology.name != name:
        raise ServerError(
            MESH,
            f"the topology says that its name is {topology.name!r}, and the path says {name!r}; "
            "make them the same",
        )
    put = partial(
        service.stores.topologies.put,
        name,
        topology_to_json(topology, indent=None),
        most=service.settings.max_topologies,
        fits=condition_of(request).holds,
    )
    info, is_new = await anyio.to_thread.run_sync(put)
    response.headers["ETag"] = f'"{info.sha256}"'
    if is_new:
        response.status_code = HTTPStatus.CREATED
        response.headers["Location"] = f"/v1/topologies/{name}"
    return topology_entry(info)


@router.delete(
    "/v1/topologies/{name:segment}",
    operation_id="deleteTopology",
    summary="Forget a topology",
    status_code=HTTPStatus.NO_CONTENT,
    openapi_extra=takes("If-Match"),
    responses=guarded_answers(
        problems.NOT_FOUND, problems.PRESET, problems.PRECONDITION, problems.REQUEST
    ),
)
async def delete_topology(
    name: StoredName, request: Request, service: ServiceHere, _caller: Planner
) -> None:
    """Forget a topology. Plans that were made for it stay."""
    fits = condition_of(request).holds
    if await anyio.to_thread.run_sync(partial(service.stores.topologies.delete, name, fits=fits)):
        return
    raise _is_preset(name) if name in mesh.list_topologies() else _unknown(name)


def _is_preset(name: str) -> ServerError:
    return ServerError(
        PRESET,
        f"{name!r} is built in and stays as it is; store yours under another name, such as "
        f"'my-{name}'",
    )


def _unknown(name: str) -> ServerError:
    return ServerError(
        NOT_FOUND,
        f"topology {name!r} is unknown; GET /v1/topologies has those that there are, and "
        "PUT /v1/topologies/{name} stores one",
    )
