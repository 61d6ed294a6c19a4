"""Routes of graphs: uploads by digest, operator coverage."""

import hashlib
from functools import partial
from http import HTTPStatus

import anyio.to_thread
from fastapi import APIRouter, Request, Response

from autoshard.report import Coverage
from autoshard_server.http.auth import Planner, Reader
from autoshard_server.http.documents import GraphDocument, UploadedGraph
from autoshard_server.http.parameters import (
    GraphDigest,
    ServiceParameter,
    read_bytes,
    read_json,
)
from autoshard_server.http.specification import (
    CONFIG_PROBLEMS,
    COVERAGE_BODY,
    GRAPH_BODY,
    PLANNING_PROBLEMS,
    UPLOAD_PROBLEMS,
    describe,
)
from autoshard_server.problems import ProblemType, ServerError
from autoshard_server.requests import (
    CoverageRequest,
    coverage_task,
    topology_name,
)
from autoshard_server.routes.responses import DEFAULT_WAIT, result_response
from autoshard_server.service import Result, graph_unknown
from autoshard_server.store.audit import AuditAction
from autoshard_server.store.jobs import Job

router = APIRouter(tags=["graphs"])


@router.put(
    "/v1/graphs/{digest:segment}",
    **describe(
        *UPLOAD_PROBLEMS,
        ProblemType.DIGEST_MISMATCH,
        body=GRAPH_BODY,
        answers={200: ("It was stored before.",), 201: ("It is new.", "Location")},
        created=UploadedGraph,
    ),
)
async def put_graph(
    digest: GraphDigest,
    request: Request,
    response: Response,
    service: ServiceParameter,
    caller: Planner,
) -> UploadedGraph:
    """Store a graph, after checking that it can be parsed. The least recently used are evicted."""
    await service.check_records(caller)
    body = await read_bytes(request, service.settings, "max_body_bytes")
    found = await anyio.to_thread.run_sync(lambda: hashlib.sha256(body).hexdigest())
    if found != digest:
        raise ServerError(
            ProblemType.DIGEST_MISMATCH,
            f"the sha256 of the body is {found}, but the path has {digest}",
        )
    described = await service.describe(caller.project, digest, body)
    info, is_new = await service.put_graph(caller, body)
    if is_new:
        response.status_code = HTTPStatus.CREATED
        response.headers["Location"] = f"/v1/graphs/{digest}"
    return UploadedGraph.of(info, **described.model_dump(exclude={"identity"}))


@router.get(
    "/v1/graphs/{digest:segment}", **describe(ProblemType.GRAPH_UNKNOWN, ProblemType.REQUEST)
)
async def get_graph(
    digest: GraphDigest, service: ServiceParameter, caller: Reader
) -> GraphDocument:
    """Metadata of a stored graph."""
    info = await anyio.to_thread.run_sync(service.stores.graphs.info, caller.project, digest)
    if info is None:
        raise graph_unknown(digest)
    return GraphDocument.of(info)


@router.head(
    "/v1/graphs/{digest:segment}", **describe(ProblemType.GRAPH_UNKNOWN, ProblemType.REQUEST)
)
async def head_graph(
    digest: GraphDigest, service: ServiceParameter, caller: Reader
) -> GraphDocument:
    """The same as GET, without the response's body."""
    return await get_graph(digest, service, caller)


@router.delete(
    "/v1/graphs/{digest:segment}",
    status_code=HTTPStatus.NO_CONTENT,
    **describe(ProblemType.GRAPH_UNKNOWN, ProblemType.REQUEST),
)
async def delete_graph(digest: GraphDigest, service: ServiceParameter, caller: Planner) -> None:
    """Delete a stored graph. Its plans, and jobs that were submitted with it, are not deleted."""
    delete = partial(service.stores.graphs.delete, caller.project, digest)
    if not await anyio.to_thread.run_sync(delete):
        raise graph_unknown(digest)
    await service.record(caller, AuditAction.DELETE, f"/v1/graphs/{digest}")


@router.post(
    "/v1/operators:coverage",
    response_model=Coverage,
    **describe(
        *PLANNING_PROBLEMS,
        *CONFIG_PROBLEMS,
        ProblemType.GRAPH,
        ProblemType.GRAPH_UNKNOWN,
        headers=("Prefer",),
        body=COVERAGE_BODY,
        answers={
            200: (
                "The operators of the graph, and the number of their replicated calls.",
                *("Autoshard-Cache", "ETag"),
            )
        },
        job="The job that lists them.",
    ),
)
async def operator_coverage(
    request: Request, service: ServiceParameter, caller: Planner
) -> Response:
    """List the operators of a model that can be sharded, on one mesh or on any.

    Waits 10 s by default.
    """
    submitted = await read_json(request, CoverageRequest, service.settings)
    topology = await service.stored_topology(caller.project, topology_name(submitted.mesh))

    async def run(sha256: str) -> Result | Job:
        of_graph = submitted.of_graph(sha256)
        make = partial(coverage_task, of_graph, service.settings, topology=topology)
        return await service.run(await service.in_thread(make), caller)

    found = await service.with_graph(caller, submitted, run)
    return await result_response(request, service, caller, found, default_wait=DEFAULT_WAIT)
