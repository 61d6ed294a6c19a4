"""Routes of plans: create, look up, list, read, delete, explain, compare, export, sum up, trace."""

import hashlib
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any

import anyio.to_thread
from fastapi import APIRouter, Query, Request, Response

from autoshard import exports
from autoshard.plan import Plan
from autoshard.plan.options import MIN_EXPRESSED
from autoshard.planner import Explanation
from autoshard.report import PlanDifference
from autoshard.requests.results import Validation
from autoshard_server.callers import Caller
from autoshard_server.http.auth import Planner, Reader
from autoshard_server.http.deprecation import note_deprecated_route
from autoshard_server.http.documents import KnownPlan, PlanPage
from autoshard_server.http.paging import PagingParameter
from autoshard_server.http.parameters import (
    JSON,
    MULTIPART_FORM,
    QUICK_BYTES,
    PlanId,
    ServiceParameter,
    media_type,
    parse_json,
    read_bytes,
    read_json,
    read_text,
    read_upload,
)
from autoshard_server.http.specification import (
    BODY_PROBLEMS,
    COMPARE_BODY,
    CONFIG_PROBLEMS,
    EXPLAIN_BODY,
    LOOKUP_BODY,
    PLAN_BODY,
    PLANNING_PROBLEMS,
    UPLOAD_PROBLEMS,
    describe,
)
from autoshard_server.problems import ProblemType, ServerError
from autoshard_server.requests import (
    ComparePlansRequest,
    CreatePlanOfModelRequest,
    CreatePlanRequest,
    ExplainRequest,
    LookUpPlanRequest,
    PlanQuery,
    PlanRequestBody,
    explanation_task,
    topology_name,
)
from autoshard_server.routes.responses import (
    DEFAULT_WAIT,
    REVALIDATE,
    result_response,
    run_once,
    tagged_response,
)
from autoshard_server.service import Result, Service
from autoshard_server.store.jobs import Job, JobKind

router = APIRouter(tags=["plans"])

_TEXT = "text/plain"

_TRACE = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {"traceEvents": {"type": "array", "items": {"type": "object"}}},
}

_EXPORTS = {
    target.media_type: {"schema": {} if target.media_type == JSON else {"type": "string"}}
    for target in exports.EXPORT_TARGETS.values()
}


@router.post(
    "/v1/plans",
    response_model=Plan | Validation,
    **describe(
        *UPLOAD_PROBLEMS,
        *PLANNING_PROBLEMS,
        *CONFIG_PROBLEMS,
        ProblemType.MULTIPART,
        ProblemType.GRAPH_UNKNOWN,
        ProblemType.IDEMPOTENCY_KEY_REUSED,
        headers=("Prefer", "Idempotency-Key"),
        body=PLAN_BODY,
        answers={
            200: (
                "The plan, or why there is none; with `validate_only`, the size of the problem.",
                *("Autoshard-Cache", "ETag", "Content-Location"),
            )
        },
        job="The job that makes the plan.",
    ),
)
async def create_plan(request: Request, service: ServiceParameter, caller: Planner) -> Response:
    """Plan a model for a mesh.

    A graph is sent as a file, or was stored by PUT /v1/graphs/{digest}; of a config, the service
    makes the graph. The response is the plan if it is cached or finished within `Prefer: wait=N`
    seconds; otherwise it is the job that makes the plan. Equal requests share one job.
    """
    submitted, sha256, graph, text = await _read_request(request, service)
    # What cannot be planned is refused before a config is exported.
    query = await _query(service, caller, submitted, sha256, len(text))
    validate_only = submitted.validate_only

    async def plan(sha256: str) -> Result | Job:
        asked = query
        if sha256 != query.graph_sha256:
            asked = await _query(service, caller, submitted, sha256, len(text))
        return await service.plan(asked, graph, caller, validate_only=validate_only)

    if isinstance(submitted, CreatePlanOfModelRequest):
        run = partial(service.with_graph, caller, submitted, plan)
    else:
        run = partial(plan, sha256)
    found = await run_once(request, service, caller, sha256.encode() + text, run)
    wait = DEFAULT_WAIT if validate_only else 0.0
    return await result_response(request, service, caller, found, default_wait=wait)


@router.post(
    "/v1/plans:lookup",
    **describe(
        ProblemType.NOT_FOUND,
        *PLANNING_PROBLEMS,
        ProblemType.CONFIG,
        body=LOOKUP_BODY,
        answers={
            200: (
                "The id of the plan; GET /v1/plans/{id} returns it, unless it was evicted.",
                "Content-Location",
            )
        },
    ),
)
async def look_up_plan(
    request: Request, service: ServiceParameter, caller: Reader, response: Response
) -> KnownPlan:
    """Find the plan of an earlier request, without sending the graph again."""
    text = await read_text(request, service.settings, "max_request_bytes")
    submitted = await parse_json(request, LookUpPlanRequest, text, "body", service.settings)
    sha256 = await service.known_graph(caller.project, submitted)
    query = await _query(service, caller, submitted, sha256 or "", len(text))
    found = await service.look_up(caller.project, query)
    response.headers["Content-Location"] = f"/v1/plans/{found}"
    return KnownPlan(id=found)


@router.get(
    "/v1/plans", **describe(ProblemType.REQUEST, answers={200: ("A page of plans.", "Link")})
)
async def list_plans(
    service: ServiceParameter,
    caller: Reader,
    paging: PagingParameter,
    *,
    graph_digest: Annotated[
        str | None,
        Query(pattern="^[0-9a-f]{64}$", description="only plans of this canonical program"),
    ] = None,
) -> PlanPage:
    """List the plans of the cache, newest first."""
    read = partial(
        service.stores.plans.page,
        caller.project,
        after=paging.after,
        graph_digest=graph_digest,
        limit=paging.limit,
    )
    found, cursor = await anyio.to_thread.run_sync(read)
    return PlanPage(plans=found, next_page_token=paging.next_token(cursor))


@router.get(
    "/v1/plans/{plan_id:segment}",
    response_model=Plan,
    **describe(
        ProblemType.NOT_FOUND,
        ProblemType.REQUEST,
        tagged=("The plan.", "The caller has the plan; it never changes."),
    ),
)
async def get_plan(
    plan_id: PlanId, request: Request, service: ServiceParameter, caller: Reader
) -> Response:
    """A plan. It never changes."""
    return tagged_response(request, await _cached_plan(service, caller, plan_id), plan_id)


@router.delete(
    "/v1/plans/{plan_id:segment}",
    status_code=HTTPStatus.NO_CONTENT,
    **describe(ProblemType.NOT_FOUND, ProblemType.REQUEST),
)
async def delete_plan(plan_id: PlanId, service: ServiceParameter, caller: Planner) -> None:
    """Delete a plan; the same request plans it again.

    Within two seconds, no server of the database sends it any more.
    """
    if not await service.delete_result(caller, JobKind.PLAN, plan_id):
        raise _unknown(plan_id)


_EXPLAINED: dict[str, Any] = {
    "headers": ("Prefer",),
    "answers": {200: ("Every alternative of the choice, with its cost.", "Autoshard-Cache")},
    "job": "The job that prices them.",
}


@router.post(
    "/v1/plans/{plan_id:segment}:explain",
    response_model=Explanation,
    **describe(
        *(ProblemType.NOT_FOUND, ProblemType.OPTIONS, ProblemType.PLAN, *BODY_PROBLEMS),
        ProblemType.LIMIT,
        body=EXPLAIN_BODY,
        **_EXPLAINED,
    ),
)
async def explain_choice(
    plan_id: PlanId, request: Request, service: ServiceParameter, caller: Planner
) -> Response:
    """List every alternative of one choice of a plan, with its cost; waits 10 s by default."""
    asked = await read_json(request, ExplainRequest, service.settings)
    return await _explain(request, service, caller, plan_id, asked)


@router.get(
    "/v1/plans/{plan_id:segment}/explain",
    response_model=Explanation,
    deprecated=True,
    **describe(
        *(ProblemType.NOT_FOUND, ProblemType.OPTIONS, ProblemType.PLAN, ProblemType.REQUEST),
        **_EXPLAINED,
    ),
)
async def explain_plan(
    plan_id: PlanId,
    request: Request,
    service: ServiceParameter,
    caller: Planner,
    asked: Annotated[ExplainRequest, Query()],
) -> Response:
    """Do as POST /v1/plans/{plan_id}:explain, which replaces it: GET should submit no jobs."""
    if getattr(request.state, "is_head", False):
        raise ServerError(
            ProblemType.METHOD_NOT_ALLOWED,
            "HEAD would submit a job; use POST /v1/plans/{plan_id}:explain",
            headers={"Allow": "GET"},
        )
    note_deprecated_route(request, f"/v1/plans/{plan_id}:explain")
    return await _explain(request, service, caller, plan_id, asked)


@router.post(
    "/v1/plans:compare",
    response_model=PlanDifference,
    **describe(
        *(ProblemType.NOT_FOUND, ProblemType.PLAN, ProblemType.LIMIT, *BODY_PROBLEMS),
        body=COMPARE_BODY,
    ),
)
async def compare_plans(request: Request, service: ServiceParameter, caller: Reader) -> Response:
    """Compare two plans of one graph; their meshes may differ."""
    pair = await read_json(request, ComparePlansRequest, service.settings)
    before = await _cached_plan(service, caller, pair.before)
    after = await _cached_plan(service, caller, pair.after)
    found = await service.parse(caller.project, "compare", {"length": len(before)}, before + after)
    return Response(found, media_type=JSON)


@router.get(
    "/v1/plans/{plan_id:segment}/export",
    response_class=Response,
    **describe(
        *(ProblemType.NOT_FOUND, ProblemType.PLAN, ProblemType.OPTIONS, ProblemType.REQUEST),
        ProblemType.LIMIT,
        tagged=(
            "Code or settings; the first lines say what share of the plan they express.",
            "The caller has this export.",
        ),
        content=_EXPORTS,
    ),
)
async def export_plan(
    plan_id: PlanId,
    request: Request,
    service: ServiceParameter,
    caller: Reader,
    *,
    to: Annotated[
        str,
        Query(
            description="framework or format", json_schema_extra={"enum": [*exports.EXPORT_TARGETS]}
        ),
    ],
    min_expressed: Annotated[
        float,
        Query(ge=0, le=1, description="share of the plan that the target must express"),
    ] = MIN_EXPRESSED,
) -> Response:
    """Export a plan as code or settings of another framework.

    The first line says what share of the plan the target expresses.
    """
    body = await _cached_plan(service, caller, plan_id)
    options = {"target": to, "min_expressed": min_expressed}
    text = await service.parse(caller.project, "export", options, body)
    # The plan never changes, but another release may export it differently.
    tag = hashlib.sha256(text).hexdigest()
    return tagged_response(
        request, text, tag, exports.EXPORT_TARGETS[to].media_type, cache=REVALIDATE
    )


@router.get(
    "/v1/plans/{plan_id:segment}/trace",
    response_class=Response,
    **describe(
        *(ProblemType.NOT_FOUND, ProblemType.PLAN, ProblemType.REQUEST, ProblemType.LIMIT),
        tagged=("A trace of the Trace Event Format, in JSON.", "The caller has this trace."),
        content={JSON: {"schema": _TRACE}},
    ),
)
async def trace_plan(
    plan_id: PlanId, request: Request, service: ServiceParameter, caller: Reader
) -> Response:
    """Trace one predicted step of a plan, for Perfetto or chrome://tracing.

    The trace has compute, communication on each mesh axis, and memory over time.
    """
    plan = await _cached_plan(service, caller, plan_id)
    text = await service.parse(caller.project, "trace", {}, plan)
    # The plan never changes, but another release may trace it differently.
    return tagged_response(request, text, hashlib.sha256(text).hexdigest(), cache=REVALIDATE)


@router.get(
    "/v1/plans/{plan_id:segment}/summary",
    response_class=Response,
    **describe(
        *(ProblemType.NOT_FOUND, ProblemType.REQUEST, ProblemType.LIMIT),
        headers=("If-None-Match",),
        answers={
            200: ("The summary: about 40 lines.", "ETag", "Cache-Control"),
            304: ("The caller has this summary.",),
        },
        content={_TEXT: {"schema": {"type": "string"}}},
    ),
)
async def summarise_plan(
    plan_id: PlanId, request: Request, service: ServiceParameter, caller: Reader
) -> Response:
    """Summarise a plan in plain text, as `autoshard show` does.

    Its parallelism in words, step time and memory, the largest costs, and the certificate; or why
    there is no plan.
    """
    plan = await _cached_plan(service, caller, plan_id)
    text = await service.parse(caller.project, "summarise", {}, plan)
    # The plan never changes, but another release may summarise it differently.
    tag = hashlib.sha256(text).hexdigest()
    return tagged_response(request, text, tag, _TEXT, cache=REVALIDATE)


@router.get("/plans/{plan_id:segment}", include_in_schema=False)
async def get_plan_page(
    plan_id: PlanId, request: Request, service: ServiceParameter, caller: Reader
) -> Response:
    """The page of a plan, for browsers; its own policy allows nothing but its script and style."""
    plan = await _cached_plan(service, caller, plan_id)
    text = await service.parse(caller.project, "page", {}, plan)
    # The plan never changes, but another release may show it differently.
    tag = hashlib.sha256(text).hexdigest()
    answer = tagged_response(request, text, tag, "text/html; charset=utf-8", cache=REVALIDATE)
    answer.headers["Content-Security-Policy"] = "frame-ancestors 'none'"
    return answer


async def _query(
    service: Service, caller: Caller, submitted: PlanRequestBody, sha256: str, num_bytes: int
) -> PlanQuery:
    """The query of a request of some bytes, with its digest; in a thread if that may take long."""
    topology = await service.stored_topology(caller.project, topology_name(submitted.mesh))

    def make() -> PlanQuery:
        query = PlanQuery(submitted, sha256, service.settings, topology=topology)
        _ = query.digest
        return query

    is_quick = not (topology or submitted.rules or submitted.mesh.is_document)
    is_quick = is_quick and num_bytes <= QUICK_BYTES
    return make() if is_quick else await service.in_thread(make)


async def _explain(
    request: Request, service: Service, caller: Caller, plan_id: str, asked: ExplainRequest
) -> Response:
    body = await _cached_plan(service, caller, plan_id)
    task = explanation_task(plan_id, body, service.settings, **asked.model_dump())
    found = await service.run(task, caller)
    return await result_response(request, service, caller, found, default_wait=DEFAULT_WAIT)


async def _cached_plan(service: Service, caller: Caller, plan_id: str) -> bytes:
    body = await service.find_result(caller.project, JobKind.PLAN, plan_id)
    if body is None:
        raise _unknown(plan_id)
    return body


def _unknown(plan_id: str) -> ServerError:
    return ServerError(
        ProblemType.NOT_FOUND, f"there is no plan {plan_id}; create it with POST /v1/plans"
    )


async def _read_request(
    request: Request, service: Service
) -> tuple[CreatePlanRequest, str, bytes | None, bytes]:
    """The request, the graph's digest, the graph if it was uploaded, and the request's text.

    The digest is empty for a config.
    """
    if media_type(request) == MULTIPART_FORM:
        uploaded, graph = await read_upload(request, service.settings)
        digest = await anyio.to_thread.run_sync(lambda: hashlib.sha256(graph).hexdigest())
        return uploaded, digest, graph, uploaded.model_dump_json().encode()
    text = await read_bytes(request, service.settings, "max_request_bytes")
    named = await parse_json(request, CreatePlanOfModelRequest, text, "body", service.settings)
    return named, named.graph_sha256 or "", None, text
