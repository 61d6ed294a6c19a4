"""Graphs: uploaded once by digest, planned many times."""

import hashlib
from functools import partial
from http import HTTPStatus

import anyio.to_thread
from fastapi import APIRouter, Request, Response

from autoshard_server import problems
from autoshard_server.answering.service import Service
from autoshard_server.http.auth import Planner, Reader
from autoshard_server.http.documents import (
    GraphDocument,
    UploadedGraph,
    graph_document,
    uploaded_graph,
)
from autoshard_server.http.specification import (
    GRAPH_BODY,
    answer_headers,
    guarded_answers,
    takes,
)
from autoshard_server.http.uploads import media_type, read_bytes
from autoshard_server.problems import CONTENT, GRAPH_UNKNOWN, MEDIA_TYPE, ServerError
from autoshard_server.routes.parameters import GraphDigest, ServiceHere

router = APIRouter(tags=["graphs"])

_BYTES = "application/octet-stream"

_NOT_THERE = guarded_answers(problems.GRAPH_UNKNOWN, problems.REQUEST)


@router.put(
    "/v1/graphs/{digest:segment}",
    operation_id="putGraph",
    summary="Store a graph",
    openapi_extra=takes(**GRAPH_BODY),
    responses={
        200: {"description": "It was stored before."},
        201: {
            "model": UploadedGraph,
            "description": "It is stored now.",
            "headers": answer_headers("Location"),
        },
        **guarded_answers(
            problems.ARCHIVE,
            problems.TOO_LARGE,
            problems.MEDIA_TYPE,
            problems.CODING,
            problems.CONTENT,
            problems.PROGRAM,
            problems.UNSUPPORTED,
            problems.GRAPH,
            problems.LIMIT,
            problems.REQUEST,
        ),
    },
)
async def put_graph(
    digest: GraphDigest,
    request: Request,
    response: Response,
    service: ServiceHere,
    _caller: Planner,
) -> UploadedGraph:
    """Store a graph, which is read and checked first. The least recently used go in time."""
    if media_type(request) not in ("", _BYTES):
        raise ServerError(MEDIA_TYPE, f"send {_BYTES}")
    body = await read_bytes(request, service.settings, "max_body_bytes")
    found = await service.aside(lambda: hashlib.sha256(body).hexdigest())
    if found != digest:
        raise ServerError(CONTENT, f"the bytes have the sha256 {found}, and the path says {digest}")
    graph = await service.read_graph(body)
    info, is_new = await service.aside(partial(service.stores.graphs.put, body))
    if is_new:
        response.status_code = HTTPStatus.CREATED
        response.headers["Location"] = f"/v1/graphs/{digest}"
    return uploaded_graph(info, graph)


@router.get(
    "/v1/graphs/{digest:segment}",
    operation_id="getGraph",
    summary="What is known of a graph",
    responses=_NOT_THERE,
)
async def get_graph(digest: GraphDigest, service: ServiceHere, _caller: Reader) -> GraphDocument:
    """Whether a graph is stored, and what is known of it without reading it."""
    return await _find(service, digest)


@router.head(
    "/v1/graphs/{digest:segment}",
    operation_id="headGraph",
    summary="Whether a graph is stored",
    responses=_NOT_THERE,
)
async def head_graph(digest: GraphDigest, service: ServiceHere, _caller: Reader) -> GraphDocument:
    """As GET, without the answer's body."""
    return await _find(service, digest)


async def _find(service: Service, digest: str) -> GraphDocument:
    info = await anyio.to_thread.run_sync(service.stores.graphs.info, digest)
    if info is None:
        raise ServerError(
            GRAPH_UNKNOWN, f"there is no graph {digest}; send it with PUT /v1/graphs/{digest}"
        )
    return graph_document(info)
