"""Plans: asked for, looked up, listed."""

import hashlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated

import anyio.to_thread
import structlog
from fastapi import APIRouter, Query, Request, Response

from autoshard.plan import Plan
from autoshard_server import problems
from autoshard_server.answering.questions import Question
from autoshard_server.answering.requests import (
    GraphPlanOrder,
    PlanLookup,
    PlanOrder,
    topology_name,
)
from autoshard_server.answering.service import Answer, Service
from autoshard_server.http.auth import Planner, Reader
from autoshard_server.http.documents import JobDocument, KnownPlan, PlanPage, plan_entry
from autoshard_server.http.pages import PageSize, PageToken, cursor_of, page_limit, token_of
from autoshard_server.http.repetition import once
from autoshard_server.http.specification import (
    JOB_PROBLEMS,
    LOOKUP_BODY,
    PLAN_BODY,
    answer_headers,
    guarded_answers,
    takes,
)
from autoshard_server.http.uploads import (
    MULTIPART_FORM,
    media_type,
    parse,
    read_bytes,
    read_json,
    read_upload,
)
from autoshard_server.jobs.job import Job
from autoshard_server.jobs.kinds import JobKind
from autoshard_server.problems import MEDIA_TYPE, NOT_FOUND, ServerError
from autoshard_server.routes.answers import JSON, found_response, tagged_response
from autoshard_server.routes.parameters import PlanId, ServiceHere
from autoshard_server.solvers.results import Validation
from autoshard_server.store import Cursor

router = APIRouter(tags=["plans"])

_PATIENCE = 10.0
"""Seconds to wait for an answer about size where the caller does not say."""


@router.post(
    "/v1/plans",
    operation_id="createPlan",
    summary="Ask for a plan",
    response_model=Plan | Validation,
    openapi_extra=takes("Prefer", "Idempotency-Key", **PLAN_BODY),
    responses={
        200: {
            "description": "The plan, or the document that says why there is none; with "
            "`validate_only`, how large the problem is.",
            "headers": answer_headers("Autoshard-Cache", "ETag", "Content-Location"),
        },
        202: {
            "model": JobDocument,
            "description": "The job that makes the plan.",
            "headers": answer_headers("Location", "Retry-After", "Autoshard-Cache"),
        },
        **guarded_answers(
            problems.ARCHIVE,
            problems.MULTIPART,
            problems.TOO_LARGE,
            problems.MEDIA_TYPE,
            problems.CODING,
            problems.PROGRAM,
            problems.UNSUPPORTED,
            problems.GRAPH,
            problems.GRAPH_UNKNOWN,
            problems.MESH,
            problems.OPTIONS,
            problems.LIMIT,
            problems.INPUT,
            problems.REQUEST,
            problems.KEY_REUSED,
            *JOB_PROBLEMS,
        ),
    },
)
async def create_plan(request: Request, service: ServiceHere, caller: Planner) -> Response:
    """Plan a graph for a mesh.

    The graph comes along as a file, or is one that PUT /v1/graphs/{digest} stored. Answers with
    the plan at once where it is known or is done within `Prefer: wait=N` seconds; otherwise with
    the job that makes it. Equal requests share one job.
    """
    order, sha256, graph, text = await _read_order(request, service)
    topology = await service.named_topology(topology_name(order.mesh))
    question = Question(order, sha256, service.settings, topology=topology)
    act = service.validate if order.validate_only else service.ask
    ask: Callable[[], Awaitable[Answer | Job]] = partial(act, question, graph, caller=caller.name)
    found = await once(request, service, caller, sha256.encode() + text, ask)
    if isinstance(found, Job):
        structlog.contextvars.bind_contextvars(job_id=found.id)
    patience = _PATIENCE if order.validate_only else 0.0
    return await found_response(request, service, found, patience=patience)


@router.post(
    "/v1/plans:lookup",
    operation_id="lookUpPlan",
    summary="Look up a plan",
    openapi_extra=takes(**LOOKUP_BODY),
    responses={
        200: {
            "description": "The id of the plan; GET /v1/plans/{id} has it, unless it was dropped.",
            "headers": answer_headers("Content-Location"),
        },
        **guarded_answers(
            problems.NOT_FOUND,
            problems.TOO_LARGE,
            problems.MEDIA_TYPE,
            problems.CODING,
            problems.MESH,
            problems.OPTIONS,
            problems.LIMIT,
            problems.INPUT,
            problems.REQUEST,
        ),
    },
)
async def look_up_plan(
    request: Request, service: ServiceHere, _caller: Reader, response: Response
) -> KnownPlan:
    """Ask for a plan that was asked for before, without sending the graph again."""
    asked = await read_json(request, PlanLookup, service.settings)
    topology = await service.named_topology(topology_name(asked.mesh))
    question = Question(asked, asked.graph_sha256, service.settings, topology=topology)
    found = await service.look_up(question)
    response.headers["Content-Location"] = f"/v1/plans/{found}"
    return KnownPlan(id=found)


@router.get(
    "/v1/plans",
    operation_id="listPlans",
    summary="List plans",
    responses=guarded_answers(problems.REQUEST),
)
async def list_plans(
    service: ServiceHere,
    _caller: Reader,
    page_size: PageSize = 0,
    page_token: PageToken = "",
    graph_digest: Annotated[
        str | None,
        Query(pattern="^[0-9a-f]{64}$", description="only plans of this canonical program"),
    ] = None,
) -> PlanPage:
    """Plans that are kept, newest first."""
    limit = page_limit(page_size)
    read = partial(
        service.stores.plans.page,
        after=cursor_of(page_token),
        graph_digest=graph_digest,
        limit=limit,
    )
    found = await anyio.to_thread.run_sync(read)
    more = len(found) == limit
    token = token_of(Cursor(found[-1].created_at, found[-1].id)) if more else ""
    return PlanPage(plans=[plan_entry(summary) for summary in found], next_page_token=token)


@router.get(
    "/v1/plans/{plan_id:segment}",
    operation_id="getPlan",
    summary="Get a plan",
    response_model=Plan,
    openapi_extra=takes("If-None-Match"),
    responses={
        200: {"description": "The plan.", "headers": answer_headers("ETag", "Cache-Control")},
        304: {"description": "The plan is the one that the caller has; it never changes."},
        **guarded_answers(problems.NOT_FOUND, problems.REQUEST),
    },
)
async def get_plan(
    plan_id: PlanId, request: Request, service: ServiceHere, _caller: Reader
) -> Response:
    """A plan that was made before; it is immutable."""
    body = await kept_plan(service, plan_id)
    return tagged_response(request, body, plan_id, JSON)


async def kept_plan(service: Service, plan_id: str) -> bytes:
    """The document of a plan that was made before.

    Raises:
        ServerError: NOT_FOUND.
    """
    body = await service.find_result(JobKind.PLAN, plan_id)
    if body is None:
        raise ServerError(NOT_FOUND, f"there is no plan {plan_id}; ask for it with POST /v1/plans")
    return body


async def _read_order(
    request: Request, service: Service
) -> tuple[PlanOrder, str, bytes | None, bytes]:
    """What to plan for, the graph's digest, the graph if it came along, and the request's text."""
    kind = media_type(request)
    if kind == MULTIPART_FORM:
        uploaded, graph = await read_upload(request, service.settings)
        digest = await anyio.to_thread.run_sync(_sha256, graph)
        return uploaded, digest, graph, uploaded.model_dump_json().encode()
    if kind != JSON:
        raise ServerError(
            MEDIA_TYPE,
            "send multipart/form-data with the parts 'graph' and 'request', or application/json "
            "with the 'graph_sha256' of a graph that is stored",
        )
    text = await read_bytes(request, service.settings, "max_request_bytes")
    stored = parse(GraphPlanOrder, text, "body")
    return stored, stored.graph_sha256, None, text


def _sha256(graph: bytes) -> str:
    return hashlib.sha256(graph).hexdigest()
