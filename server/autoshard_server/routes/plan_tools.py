"""What can be asked of a plan that was made."""

import hashlib
from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import TypeAdapter

from autoshard.plan import Plan, PlanDifference, compare_plans, export_plan
from autoshard.planner import Explanation
from autoshard_server import problems
from autoshard_server.answering.questions import explanation_task
from autoshard_server.answering.requests import PlanPair
from autoshard_server.http.auth import Planner, Reader
from autoshard_server.http.documents import JobDocument
from autoshard_server.http.specification import (
    JOB_PROBLEMS,
    PAIR_BODY,
    answer_headers,
    guarded_answers,
    takes,
)
from autoshard_server.http.uploads import read_json
from autoshard_server.routes.answers import ASK_AGAIN, JSON, found_response, tagged_response
from autoshard_server.routes.parameters import PlanId, ServiceHere
from autoshard_server.routes.plans import kept_plan

router = APIRouter(tags=["plans"])

_PATIENCE = 10.0
"""Seconds to wait for an explanation where the caller does not say."""

_LONGEST_EXPLANATION = 600.0

_DIFFERENCE = TypeAdapter(PlanDifference)

_MEDIA_TYPES = {"json": JSON, "csv": "text/csv", "torchtitan": "application/toml"}

Target = Literal["parallelize-module", "fsdp2", "hf-tp-plan", "torchtitan", "json", "csv"]


@router.get(
    "/v1/plans/{plan_id:segment}/explain",
    operation_id="explainPlan",
    summary="Explain a choice of a plan",
    response_model=Explanation,
    openapi_extra=takes("Prefer"),
    responses={
        200: {
            "description": "Every alternative of the choice, with its price.",
            "headers": answer_headers("Autoshard-Cache"),
        },
        202: {
            "model": JobDocument,
            "description": "The job that finds out.",
            "headers": answer_headers("Location", "Retry-After", "Autoshard-Cache"),
        },
        **guarded_answers(
            problems.NOT_FOUND,
            problems.OPTIONS,
            problems.NO_PLAN,
            problems.REQUEST,
            *JOB_PROBLEMS,
        ),
    },
)
async def explain_plan(
    plan_id: PlanId,
    request: Request,
    service: ServiceHere,
    caller: Planner,
    *,
    name: Annotated[
        str, Query(min_length=1, max_length=512, description="a node, input, value or output")
    ],
    value: Annotated[
        bool, Query(description="where a node and a value share the name: the value")
    ] = False,
    time_limit: Annotated[
        float,
        Query(gt=0, le=_LONGEST_EXPLANATION, description="seconds for what is planned anew"),
    ] = 60.0,
) -> Response:
    """Every alternative of one choice of a plan, with its price; waits 10 s unless told."""
    body = await kept_plan(service, plan_id)
    task = explanation_task(
        plan_id, body, service.settings, name=name, value=value, time_limit=time_limit
    )
    found = await service.run(task, caller=caller.name)
    return await found_response(request, service, found, patience=_PATIENCE)


@router.post(
    "/v1/plans:diff",
    operation_id="diffPlans",
    summary="Compare two plans",
    response_model=PlanDifference,
    openapi_extra=takes(**PAIR_BODY),
    responses=guarded_answers(
        problems.NOT_FOUND,
        problems.NO_PLAN,
        problems.TOO_LARGE,
        problems.MEDIA_TYPE,
        problems.CODING,
        problems.REQUEST,
    ),
)
async def diff_plans(request: Request, service: ServiceHere, _caller: Reader) -> Response:
    """What distinguishes two plans of one graph; their meshes may differ."""
    pair = await read_json(request, PlanPair, service.settings)
    before = await kept_plan(service, pair.before)
    after = await kept_plan(service, pair.after)
    return Response(await service.aside(partial(_difference, before, after)), media_type=JSON)


@router.get(
    "/v1/plans/{plan_id:segment}/export",
    operation_id="exportPlan",
    summary="Export a plan",
    response_class=Response,
    openapi_extra=takes("If-None-Match"),
    responses={
        200: {
            "description": "Code or settings; its first lines name what they cannot express.",
            "headers": answer_headers("ETag", "Cache-Control"),
            "content": {
                kind: {"schema": {"type": "string"}}
                for kind in sorted({"text/x-python", "text/csv", "application/toml"})
            }
            | {JSON: {"schema": {}}},
        },
        304: {"description": "The export is the one that the caller has."},
        **guarded_answers(problems.NOT_FOUND, problems.NO_PLAN, problems.OPTIONS, problems.REQUEST),
    },
)
async def export_as(
    plan_id: PlanId,
    request: Request,
    service: ServiceHere,
    _caller: Reader,
    to: Annotated[Target, Query(description="framework or format")],
) -> Response:
    """A plan as code or settings of another framework."""
    body = await kept_plan(service, plan_id)
    text = await service.aside(partial(_export, body, to))
    kind = _MEDIA_TYPES.get(to, "text/x-python")
    # The plan never changes, but another release may write it otherwise.
    tag = hashlib.sha256(text).hexdigest()
    return tagged_response(request, text, tag, kind, cache=ASK_AGAIN)


def _difference(before: bytes, after: bytes) -> bytes:
    found = compare_plans(Plan.from_json(before), Plan.from_json(after))
    return _DIFFERENCE.dump_json(found)


def _export(plan: bytes, target: str) -> bytes:
    return export_plan(Plan.from_json(plan), target).encode()
