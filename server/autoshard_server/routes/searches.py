"""Jobs about stored graphs that make no single plan: mesh searches, coverage."""

from functools import partial

import structlog
from fastapi import APIRouter, Request, Response

from autoshard.plan import Coverage
from autoshard_server import problems
from autoshard_server.answering.questions import coverage_task, search_task
from autoshard_server.answering.requests import (
    CoverageRequest,
    SearchRequest,
    topology_name,
)
from autoshard_server.answering.service import Answer, Service
from autoshard_server.http.auth import Planner
from autoshard_server.http.documents import JobDocument
from autoshard_server.http.repetition import once
from autoshard_server.http.specification import (
    COVERAGE_BODY,
    JOB_PROBLEMS,
    SEARCH_BODY,
    answer_headers,
    guarded_answers,
    takes,
)
from autoshard_server.http.uploads import read_json
from autoshard_server.jobs.job import Job
from autoshard_server.routes.answers import found_response
from autoshard_server.routes.parameters import ServiceHere
from autoshard_server.solvers.results import MeshSearch

router = APIRouter(tags=["graphs"])

_PATIENCE = 10.0
"""Seconds to wait for a coverage where the caller does not say."""

_JOB = {
    "model": JobDocument,
    "description": "The job that finds out.",
    "headers": answer_headers("Location", "Retry-After", "Autoshard-Cache"),
}

_PROBLEMS = guarded_answers(
    problems.TOO_LARGE,
    problems.MEDIA_TYPE,
    problems.CODING,
    problems.GRAPH,
    problems.GRAPH_UNKNOWN,
    problems.MESH,
    problems.OPTIONS,
    problems.LIMIT,
    problems.INPUT,
    problems.REQUEST,
    problems.KEY_REUSED,
    *JOB_PROBLEMS,
)


@router.post(
    "/v1/searches",
    operation_id="searchMeshes",
    summary="Find the best mesh",
    response_model=MeshSearch,
    openapi_extra=takes("Prefer", "Idempotency-Key", **SEARCH_BODY),
    responses={
        200: {
            "description": "Every mesh of so many devices, best first.",
            "headers": answer_headers("Autoshard-Cache", "ETag"),
        },
        202: _JOB,
        **_PROBLEMS,
    },
)
async def search_meshes(request: Request, service: ServiceHere, caller: Planner) -> Response:
    """Plan a stored graph on every mesh of so many devices.

    The plans are kept: GET /v1/plans/{id} has each.
    """
    asked = await read_json(request, SearchRequest, service.settings)

    async def ask() -> Answer | Job:
        topology = await service.named_topology(asked.topology_name)
        graph = await service.stored_graph(asked.graph_sha256)
        make = partial(search_task, asked, graph, service.settings, topology=topology)
        task = await service.aside(make)
        return await service.run(task, caller=caller.name)

    found = await once(request, service, caller, asked.model_dump_json().encode(), ask)
    return await _respond(request, service, found, 0.0)


@router.post(
    "/v1/operators:coverage",
    operation_id="coverOperators",
    summary="Which operators can be cut",
    response_model=Coverage,
    openapi_extra=takes("Prefer", **COVERAGE_BODY),
    responses={
        200: {
            "description": "The operators of the graph, and which of their calls run whole.",
            "headers": answer_headers("Autoshard-Cache", "ETag"),
        },
        202: _JOB,
        **_PROBLEMS,
    },
)
async def cover_operators(request: Request, service: ServiceHere, caller: Planner) -> Response:
    """How far the rules reach in a stored graph, on a mesh or on any; waits 10 s unless told."""
    asked = await read_json(request, CoverageRequest, service.settings)
    topology = await service.named_topology(topology_name(asked.mesh))
    graph = await service.stored_graph(asked.graph_sha256)
    task = coverage_task(asked, graph, service.settings, topology=topology)
    found = await service.run(task, caller=caller.name)
    return await _respond(request, service, found, _PATIENCE)


async def _respond(
    request: Request, service: Service, found: Answer | Job, patience: float
) -> Response:
    if isinstance(found, Job):
        structlog.contextvars.bind_contextvars(job_id=found.id)
    return await found_response(request, service, found, patience=patience)
