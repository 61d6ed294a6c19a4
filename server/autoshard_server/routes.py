"""The routes of the API."""

import hashlib
from http import HTTPStatus
from typing import Annotated, cast

import anyio.to_thread
import structlog
from fastapi import APIRouter, Depends, Path, Request, Response
from starlette.responses import JSONResponse

from autoshard.mesh import topology_names
from autoshard.plan import Plan
from autoshard_server import problems
from autoshard_server.documents import (
    Alive,
    JobDocument,
    KnownPlan,
    Topologies,
    Versions,
    job_document,
)
from autoshard_server.jobs import Job, JobState
from autoshard_server.problems import (
    NOT_FOUND,
    PROBLEM_MEDIA_TYPE,
    ServerError,
)
from autoshard_server.requests import Question
from autoshard_server.service import Answer, Service, versions
from autoshard_server.specification import (
    LOOKUP_BODY,
    PLAN_FORM,
    answer_headers,
    problem_answers,
)
from autoshard_server.uploads import preferred_wait, read_lookup, read_upload
from autoshard_server.workers import PLANS

router = APIRouter()

_IMMUTABLE = "private, max-age=31536000, immutable"
_JSON = "application/json"


def _service(request: Request) -> Service:
    return cast("Service", request.app.state.service)


ServiceHere = Annotated[Service, Depends(_service)]
PlanId = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="id of a plan")]
JobId = Annotated[str, Path(pattern="^[0-9a-f]{32}$", description="id of a job")]


@router.post(
    "/v1/plans",
    operation_id="createPlan",
    summary="Ask for a plan",
    response_model=Plan,
    openapi_extra=PLAN_FORM,
    responses={
        200: {
            "description": "The plan, or the document that says why there is none.",
            "headers": answer_headers("Autoshard-Cache", "ETag", "Content-Location"),
        },
        202: {
            "model": JobDocument,
            "description": "The job that makes the plan.",
            "headers": answer_headers("Location", "Retry-After", "Autoshard-Cache"),
        },
        **problem_answers(
            problems.ARCHIVE,
            problems.MULTIPART,
            problems.CANCELLED,
            problems.TOO_LARGE,
            problems.MEDIA_TYPE,
            problems.PROGRAM,
            problems.UNSUPPORTED,
            problems.GRAPH,
            problems.MESH,
            problems.OPTIONS,
            problems.INPUT,
            problems.REQUEST,
            problems.TOO_MANY,
            problems.CRASHED,
            problems.DEADLINE,
        ),
    },
)
async def create_plan(request: Request, service: ServiceHere) -> Response:
    """Plan a graph for a mesh.

    Answers with the plan at once where it is known or is done within `Prefer: wait=N`
    seconds; otherwise with the job that makes it. Equal requests share one job.
    """
    asked, graph = await read_upload(request, service.settings)
    digest = await anyio.to_thread.run_sync(_sha256, graph)
    found = await service.ask(Question(asked, digest, service.settings), graph)
    if isinstance(found, Answer):
        return _plan_response(found)
    structlog.contextvars.bind_contextvars(job_id=found.id)
    wait = preferred_wait(request, cap=service.settings.max_wait)
    job = await service.wait(found, wait) if wait else found
    headers = {} if wait is None else {"Preference-Applied": f"wait={wait:g}"}
    if job.state is JobState.SUCCEEDED:
        return _plan_response(await service.answer(job), headers)
    if job.error is not None:
        return JSONResponse(
            job.error, job.error["status"], media_type=PROBLEM_MEDIA_TYPE, headers=headers
        )
    headers |= {
        "Location": f"/v1/jobs/{job.id}",
        "Retry-After": str(service.settings.retry_after),
        "Autoshard-Cache": "miss",
    }
    return await _job_response(job, service, status=HTTPStatus.ACCEPTED, headers=headers)


@router.post(
    "/v1/plans:lookup",
    operation_id="lookUpPlan",
    summary="Look up a plan",
    openapi_extra=LOOKUP_BODY,
    responses={
        200: {
            "description": "The id of the plan; GET /v1/plans/{id} has it, unless it was dropped.",
            "headers": answer_headers("Content-Location"),
        },
        **problem_answers(
            problems.NOT_FOUND,
            problems.TOO_LARGE,
            problems.MEDIA_TYPE,
            problems.MESH,
            problems.OPTIONS,
            problems.INPUT,
            problems.REQUEST,
        ),
    },
)
async def look_up_plan(request: Request, service: ServiceHere, response: Response) -> KnownPlan:
    """Ask for a plan that was asked for before, without sending the graph again."""
    asked = await read_lookup(request, service.settings)
    found = await service.look_up(Question(asked, asked.graph_sha256, service.settings))
    response.headers["Content-Location"] = f"/v1/plans/{found}"
    return KnownPlan(id=found)


@router.get(
    "/v1/plans/{plan_id}",
    operation_id="getPlan",
    summary="Get a plan",
    response_model=Plan,
    responses={
        200: {"description": "The plan.", "headers": answer_headers("ETag", "Cache-Control")},
        304: {"description": "The plan is the one that the caller has; it never changes."},
        **problem_answers(problems.NOT_FOUND, problems.REQUEST),
    },
)
async def get_plan(plan_id: PlanId, request: Request, service: ServiceHere) -> Response:
    """A plan that was made before; it is immutable."""
    body = await anyio.to_thread.run_sync(service.cache.get, PLANS, plan_id)
    if body is None:
        raise ServerError(NOT_FOUND, f"there is no plan {plan_id}; ask for it with POST /v1/plans")
    headers = {"ETag": f'"{plan_id}"', "Cache-Control": _IMMUTABLE}
    if _matches(request.headers.get("if-none-match", ""), plan_id):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return Response(body, media_type=_JSON, headers=headers)


@router.get(
    "/v1/jobs/{job_id}",
    operation_id="getJob",
    summary="Get a job",
    response_model=JobDocument,
    responses={
        200: {
            "description": "The job; with its plan when it has succeeded.",
            "headers": answer_headers("Retry-After"),
        },
        **problem_answers(problems.NOT_FOUND, problems.REQUEST),
    },
)
async def get_job(job_id: JobId, service: ServiceHere) -> Response:
    """Where a job stands. What went wrong in it is in `error`, not in the HTTP status."""
    return await _job_response(await service.find(job_id), service)


@router.post(
    "/v1/jobs/{job_id}:cancel",
    operation_id="cancelJob",
    summary="Cancel a job",
    response_model=JobDocument,
    responses={
        200: {"description": "The job, cancelled; or as it is, where it was done already."},
        **problem_answers(problems.NOT_FOUND, problems.REQUEST),
    },
)
async def cancel_job(job_id: JobId, service: ServiceHere) -> Response:
    """Cancel a job that waits or runs; everybody who waits for it is told."""
    await anyio.to_thread.run_sync(service.jobs.cancel, job_id)
    return await _job_response(await service.find(job_id), service)


@router.get("/v1/topologies", operation_id="listTopologies", summary="List topologies")
async def list_topologies() -> Topologies:
    """Clusters that `mesh.topology` can name."""
    return Topologies(topologies=list(topology_names()))


@router.get("/livez", operation_id="livez", summary="Is the process alive?")
async def livez() -> Alive:
    """Answers without touching anything."""
    return Alive()


@router.get(
    "/readyz",
    operation_id="readyz",
    summary="Can requests be served?",
    responses=problem_answers(problems.UNAVAILABLE),
)
async def readyz(service: ServiceHere) -> Alive:
    """Checks the workers and the store; 503 while shutting down."""
    await service.check()
    return Alive()


@router.get("/version", operation_id="getVersion", summary="What runs here?")
async def get_version() -> Versions:
    """Versions of the service and of what decides how a plan looks."""
    return Versions(versions=versions())


def _sha256(graph: bytes) -> str:
    return hashlib.sha256(graph).hexdigest()


def _matches(if_none_match: str, plan_id: str) -> bool:
    tags = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return "*" in tags or f'"{plan_id}"' in tags


def _plan_response(answer: Answer, headers: dict[str, str] | None = None) -> Response:
    headers = {**(headers or {}), "Autoshard-Cache": "hit" if answer.cached else "miss"}
    if answer.kept:
        headers |= {
            "ETag": f'"{answer.plan_id}"',
            "Content-Location": f"/v1/plans/{answer.plan_id}",
        }
    return Response(answer.plan, media_type=_JSON, headers=headers)


async def _job_response(
    job: Job,
    service: Service,
    *,
    status: int = HTTPStatus.OK,
    headers: dict[str, str] | None = None,
) -> Response:
    headers = {"Cache-Control": "no-cache", **(headers or {})}
    if not job.state.done:
        headers["Retry-After"] = str(service.settings.retry_after)
    body = job_document(job).model_dump_json(exclude_none=True).encode()
    if job.state is JobState.SUCCEEDED:
        # The plan goes in as the bytes it is: large, and checked when it was made.
        plan = (await service.answer(job)).plan
        body = body[:-1] + b',"result":' + plan + b"}"
    return Response(body, status, media_type=_JSON, headers=headers)
