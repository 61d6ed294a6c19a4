"""Routes of topologies that a mesh can name: built-in ones, and stored ones."""

import hashlib
from functools import partial
from http import HTTPStatus
from typing import Annotated

import anyio.to_thread
from fastapi import APIRouter, Path, Request, Response

from autoshard import mesh
from autoshard.mesh import Topology, topology_from_json, topology_to_json
from autoshard_server.http.auth import Planner, Reader
from autoshard_server.http.documents import Topologies
from autoshard_server.http.parameters import (
    ServiceParameter,
    check_members,
    precondition,
    read_text,
)
from autoshard_server.http.specification import BODY_PROBLEMS, TOPOLOGY_BODY, describe
from autoshard_server.problems import ProblemType, ServerError
from autoshard_server.projects import SHARED_PROJECT
from autoshard_server.routes.responses import REVALIDATE, tagged_response
from autoshard_server.service import Service
from autoshard_server.store.audit import AuditAction
from autoshard_server.store.topologies import NAME_PATTERN, StoredTopologyEntry

router = APIRouter(tags=["topologies"])

StoredName = Annotated[
    str, Path(pattern=NAME_PATTERN, description="name of a topology that is not built in")
]


@router.get("/v1/topologies", **describe())
async def list_topologies(service: ServiceParameter, caller: Reader) -> Topologies:
    """List the topologies that `mesh.topology` can name.

    These are the built-in ones, those that the project has stored, and those of the project
    `shared`. Where both have a name, it means the project's own.
    """
    stored = await anyio.to_thread.run_sync(service.stores.topologies.list, caller.project)
    names = sorted({*mesh.list_topologies(), *(entry.name for entry in stored)})
    return Topologies(topologies=names, stored=stored)


@router.get(
    "/v1/topologies/{name:segment}",
    response_model=Topology,
    **describe(
        ProblemType.NOT_FOUND,
        ProblemType.REQUEST,
        tagged=("The topology.", "The caller has this topology."),
    ),
)
async def get_topology(
    name: Annotated[str, Path(max_length=255, description="a name of GET /v1/topologies")],
    request: Request,
    service: ServiceParameter,
    caller: Reader,
) -> Response:
    """The document of a topology, which can be edited and sent as part of a mesh."""
    if name in mesh.list_topologies():
        document = topology_to_json(mesh.get_topology(name), indent=None)
    else:
        found = await anyio.to_thread.run_sync(service.stores.topologies.get, caller.project, name)
        if found is None:
            raise _unknown(name)
        document = found
    body = document.encode()
    return tagged_response(request, body, hashlib.sha256(body).hexdigest(), cache=REVALIDATE)


@router.put(
    "/v1/topologies/{name:segment}",
    **describe(
        ProblemType.TOPOLOGY_PRESET,
        ProblemType.PRECONDITION_FAILED,
        *BODY_PROBLEMS,
        ProblemType.MESH,
        ProblemType.LIMIT,
        headers=("If-Match", "If-None-Match"),
        body=TOPOLOGY_BODY,
        answers={
            200: ("It replaced the topology of the same name.", "ETag"),
            201: ("It is stored under a new name.", "ETag", "Location"),
        },
        created=StoredTopologyEntry,
    ),
)
async def put_topology(
    name: StoredName,
    request: Request,
    response: Response,
    service: ServiceParameter,
    caller: Planner,
) -> StoredTopologyEntry:
    """Store a topology under its name; `autoshard calibrate` writes such documents.

    Later requests of the project that name it use this document. Existing plans for an earlier
    topology of the name do not change.
    """
    if name in mesh.list_topologies():
        raise _is_preset(name)
    await service.check_records(caller)
    body = await read_text(request, service.settings, "max_topology_bytes")

    def read() -> Topology:
        found = topology_from_json(body)
        check_members(body)
        return found

    topology = await service.in_thread(read)
    if topology.name != name:
        raise ServerError(
            ProblemType.MESH,
            f"the topology's name is {topology.name!r}, but the path has {name!r}; "
            "make them the same",
        )
    put = partial(
        service.stores.topologies.put,
        caller.project,
        name,
        topology_to_json(topology, indent=None),
        max_stored=service.settings.max_topologies,
        precondition=precondition(request),
    )
    entry, is_new = await anyio.to_thread.run_sync(put)
    action = AuditAction.CREATE if is_new else AuditAction.REPLACE
    await service.record(caller, action, f"/v1/topologies/{name}")
    response.headers["ETag"] = f'"{entry.sha256}"'
    if is_new:
        response.status_code = HTTPStatus.CREATED
        response.headers["Location"] = f"/v1/topologies/{name}"
    return entry


@router.delete(
    "/v1/topologies/{name:segment}",
    status_code=HTTPStatus.NO_CONTENT,
    **describe(
        ProblemType.NOT_FOUND,
        ProblemType.TOPOLOGY_PRESET,
        ProblemType.PRECONDITION_FAILED,
        ProblemType.REQUEST,
        headers=("If-Match",),
    ),
)
async def delete_topology(
    name: StoredName, request: Request, service: ServiceParameter, caller: Planner
) -> None:
    """Delete a topology. Plans that were made for it are not deleted."""
    delete = partial(
        service.stores.topologies.delete,
        caller.project,
        name,
        precondition=precondition(request),
    )
    if not await anyio.to_thread.run_sync(delete):
        raise await _cannot_delete(service, name)
    await service.record(caller, AuditAction.DELETE, f"/v1/topologies/{name}")


async def _cannot_delete(service: Service, name: str) -> ServerError:
    """The error of deleting a topology that the project does not have."""
    if name in mesh.list_topologies():
        return _is_preset(name)
    shared = await anyio.to_thread.run_sync(service.stores.topologies.get, SHARED_PROJECT, name)
    if shared is None:
        return _unknown(name)
    return ServerError(
        ProblemType.FORBIDDEN,
        f"the topology {name!r} belongs to the project {SHARED_PROJECT!r}; only a key of that "
        "project can delete it",
    )


def _is_preset(name: str) -> ServerError:
    return ServerError(
        ProblemType.TOPOLOGY_PRESET,
        f"{name!r} is built in and cannot be changed; store yours under another name, such as "
        f"'my-{name}'",
    )


def _unknown(name: str) -> ServerError:
    return ServerError(
        ProblemType.NOT_FOUND,
        f"unknown topology {name!r}; GET /v1/topologies lists all, and "
        "PUT /v1/topologies/{name} stores one",
    )
