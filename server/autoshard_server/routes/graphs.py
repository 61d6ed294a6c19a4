"""Routes of graphs: uploads by digest, mesh searches, operator coverage."""

import hashlib
from functools import partial
from http import HTTPStatus

import anyio.to_thread
from fastapi import APIRouter, Request, Response

from autoshard.client.results import MeshSearch
from autoshard.plan import Coverage
from autoshard_server.http.auth import Planner, Reader
from autoshard_server.http.documents import GraphDocument, UploadedGraph
from autoshard_server.http.parameters import (
    GraphDigest,
    ServiceParameter,
    media_type,
    read_bytes,
    read_json,
)
from autoshard_server.http.specification import (
    COVERAGE_BODY,
    GRAPH_BODY,
    PLANNING_PROBLEMS,
    SEARCH_BODY,
    UPLOAD_PROBLEMS,
    describe,
)
from autoshard_server.problems import ProblemType, ServerError
from autoshard_server.requests import (
    CoverageRequest,
    SearchRequest,
    coverage_task,
    search_task,
    topology_name,
)
from autoshard_server.routes.responses import DEFAULT_WAIT, result_response, run_once
from autoshard_server.service import Result, graph_unknown
from autoshard_server.store.jobs import Job

router = APIRouter(tags=["graphs"])

_BYTES = "application/octet-stream"


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
    _caller: Planner,
) -> UploadedGraph:
    """Store a graph, after checking that it can be parsed. The least recently used are evicted."""
    if media_type(request) not in ("", _BYTES):
        raise ServerError(ProblemType.MEDIA_TYPE, f"send {_BYTES}")
    body = await read_bytes(request, service.settings, "max_body_bytes")
    found = await service.in_parser(lambda: hashlib.sha256(body).hexdigest())
    if found != digest:
        raise ServerError(
            ProblemType.DIGEST_MISMATCH,
            f"the sha256 of the body is {found}, but the path has {digest}",
        )
    graph = await service.parse_graph(body)
    info, is_new = await service.in_parser(partial(service.stores.graphs.put, body))
    if is_new:
        response.status_code = HTTPStatus.CREATED
        response.headers["Location"] = f"/v1/graphs/{digest}"
    return UploadedGraph.of_graph(info, graph)


@router.get(
    "/v1/graphs/{digest:segment}", **describe(ProblemType.GRAPH_UNKNOWN, ProblemType.REQUEST)
)
async def get_graph(
    digest: GraphDigest, service: ServiceParameter, _caller: Reader
) -> GraphDocument:
    """Metadata of a stored graph."""
    info = await anyio.to_thread.run_sync(service.stores.graphs.info, digest)
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


@router.post(
    "/v1/searches",
    response_model=MeshSearch,
    **describe(
        *PLANNING_PROBLEMS,
        ProblemType.GRAPH,
        ProblemType.GRAPH_UNKNOWN,
        ProblemType.IDEMPOTENCY_KEY_REUSED,
        headers=("Prefer", "Idempotency-Key"),
        body=SEARCH_BODY,
        answers={200: ("Every mesh of the devices, best first.", "Autoshard-Cache", "ETag")},
        job="The job that plans them.",
    ),
)
async def search_meshes(request: Request, service: ServiceParameter, caller: Planner) -> Response:
    """Plan a stored graph on every mesh of a number of devices.

    The plans are cached: GET /v1/plans/{id} returns each.
    """
    submitted = await read_json(request, SearchRequest, service.settings)

    async def run() -> Result | Job:
        name = submitted.topology if isinstance(submitted.topology, str) else None
        stored = await service.stored_topology(name)
        make = partial(search_task, submitted, service.settings, stored=stored)
        return await service.run(await service.in_parser(make), caller=caller.name)

    found = await run_once(request, service, caller, submitted.model_dump_json().encode(), run)
    return await result_response(request, service, found)


@router.post(
    "/v1/operators:coverage",
    response_model=Coverage,
    **describe(
        *PLANNING_PROBLEMS,
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
    """List the operators of a stored graph that can be sharded, on one mesh or on any.

    Waits 10 s by default.
    """
    submitted = await read_json(request, CoverageRequest, service.settings)
    topology = await service.stored_topology(topology_name(submitted.mesh))
    make = partial(coverage_task, submitted, service.settings, topology=topology)
    task = await service.in_parser(make)
    found = await service.run(task, caller=caller.name)
    return await result_response(request, service, found, default_wait=DEFAULT_WAIT)
