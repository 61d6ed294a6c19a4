"""The OpenAPI specification, generated from the routes and the table of problems."""

import json
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from autoshard.mesh import get_topology, topology_to_json
from autoshard_server.answering.requests import (
    CoverageRequest,
    GraphPlanOrder,
    PlanLookup,
    PlanOrder,
    PlanPair,
    SearchRequest,
)
from autoshard_server.http.documents import Problem
from autoshard_server.problems import (
    CANCELLED,
    CRASHED,
    DEADLINE,
    FORBIDDEN,
    INTERNAL,
    MEMORY,
    OTHER_RELEASE,
    PROBLEM_MEDIA_TYPE,
    STORE_FULL,
    TOO_MANY,
    UNAUTHENTICATED,
    UNAVAILABLE,
    ProblemType,
    problem_document,
)

_REF = "#/components/schemas/{model}"

_HEADERS = {
    "Autoshard-Cache": "`hit` where the plan was there before, else `miss`.",
    "Cache-Control": "Plans are immutable.",
    "Content-Location": "Where the plan can be had; absent where time ran out.",
    "ETag": "Digest of what is answered, of a plan its id; strong.",
    "Location": "The job, or what was stored.",
    "Retry-After": "Seconds after which to ask again.",
}

_MESH_EXAMPLE: dict[str, Any] = {"shape": [2, 4], "topology": "h100-sxm"}
_DIGEST = "0" * 64

_HEADER_PARAMETERS = {
    "Prefer": (
        "wait=10",
        "Wait up to so many seconds for the result (RFC 7240); capped.",
    ),
    "Idempotency-Key": (
        "a3b8d6f0",
        (
            "Names this request for 24 hours: sent again, it gets the same job. Another request "
            "under the same key is refused."
        ),
    ),
    "If-Match": (f'"{_DIGEST}"', "Change it only where this is what is there."),
    "If-None-Match": (
        f'"{_DIGEST}"',
        "Answer 304 where this is what the caller has; with PUT, `*` replaces nothing.",
    ),
    "Last-Event-ID": ("3", "Number of the last event that was seen; later ones follow."),
}


def taken_headers(*names: str) -> list[dict[str, Any]]:
    """Headers that a route reads, which FastAPI cannot see in its signature."""
    return [
        {
            "name": name,
            "in": "header",
            "required": False,
            "schema": {"type": "string"},
            "example": _HEADER_PARAMETERS[name][0],
            "description": _HEADER_PARAMETERS[name][1],
        }
        for name in names
    ]


def json_body(model: type[BaseModel], **example: Any) -> dict[str, Any]:
    """The content of a JSON body, which is read within a limit of its own."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"application/json": {"schema": schema, "example": example}}


def takes(*headers: str, **content: dict[str, Any]) -> dict[str, Any]:
    """What a route reads besides its path and query: headers, and `content` by media type."""
    found: dict[str, Any] = {"parameters": taken_headers(*headers)} if headers else {}
    if content:
        found["requestBody"] = {"required": True, "content": content}
    return found


PLAN_BODY: dict[str, Any] = {
    "multipart/form-data": {
        "schema": {
            "type": "object",
            "required": ["graph", "request"],
            "properties": {
                "graph": {
                    "type": "string",
                    "contentMediaType": "application/octet-stream",
                    "description": "A .pt2 archive of torch.export.save, or its "
                    "models/model.json; sent as a file.",
                },
                "request": {"$ref": _REF.format(model="PlanOrder")},
            },
        },
        "encoding": {"request": {"contentType": "application/json"}},
        "example": {
            "graph": "(bytes of model.pt2)",
            "request": {"mesh": _MESH_EXAMPLE, "options": {"mode": "training"}},
        },
    },
    **json_body(GraphPlanOrder, graph_sha256=_DIGEST, mesh=_MESH_EXAMPLE),
}
"""The body of POST /v1/plans: with the graph, or with the digest of one that is stored."""

LOOKUP_BODY = json_body(PlanLookup, graph_sha256=_DIGEST, mesh=_MESH_EXAMPLE)
SEARCH_BODY = json_body(SearchRequest, graph_sha256=_DIGEST, num_devices=8, topology="h100-sxm")
COVERAGE_BODY = json_body(CoverageRequest, graph_sha256=_DIGEST, mesh=_MESH_EXAMPLE)
PAIR_BODY = json_body(PlanPair, before=_DIGEST, after="1" * 64)

GRAPH_BODY: dict[str, Any] = {
    "application/octet-stream": {
        "schema": {
            "type": "string",
            "contentMediaType": "application/octet-stream",
            "description": "A .pt2 archive of torch.export.save, or its models/model.json.",
        }
    }
}
"""The body of PUT /v1/graphs/{digest}."""

TOPOLOGY_BODY: dict[str, Any] = {
    "application/json": {
        "schema": {"$ref": _REF.format(model="Topology")},
        "example": {
            **json.loads(topology_to_json(get_topology("h100-sxm"), indent=None)),
            "name": "my-cluster",
        },
    }
}
"""The body of PUT /v1/topologies/{name}."""


def answer_headers(*names: str) -> dict[str, Any]:
    """Descriptions of the headers of an answer."""
    return {name: {"description": _HEADERS[name], "schema": {"type": "string"}} for name in names}


def problem_answers(*kinds: ProblemType) -> dict[int | str, dict[str, Any]]:
    """Descriptions of the problems that a route can answer with, by status."""
    answers: dict[int | str, dict[str, Any]] = {}
    for status in sorted({kind.status for kind in (*kinds, INTERNAL)}):
        same = [kind for kind in (*kinds, INTERNAL) if kind.status == status]
        examples = {kind.slug: {"value": problem_document(kind, kind.meaning)} for kind in same}
        schema = {"$ref": _REF.format(model="Problem")}
        answers[status] = {
            "description": " ".join(f"{kind.title}." for kind in same),
            "content": {PROBLEM_MEDIA_TYPE: {"schema": schema, "examples": examples}},
        }
    return answers


JOB_PROBLEMS = (CANCELLED, OTHER_RELEASE, TOO_MANY, CRASHED, MEMORY, DEADLINE)
"""What can go wrong with a job, of a route that answers with what one makes."""


def guarded_answers(*kinds: ProblemType) -> dict[int | str, dict[str, Any]]:
    """The problems of a route that may need a key and asks the store."""
    return problem_answers(UNAUTHENTICATED, FORBIDDEN, UNAVAILABLE, STORE_FULL, *kinds)


def specification(app: FastAPI) -> dict[str, Any]:
    """The specification of an application that `create_app` made."""
    found = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
    )
    given = (GraphPlanOrder, PlanLookup, PlanOrder, PlanPair, SearchRequest, CoverageRequest)
    _, extra = models_json_schema(
        [*((model, "validation") for model in given), (Problem, "serialization")],
        ref_template=_REF,
    )
    schemas: dict[str, Any] = found["components"]["schemas"]
    schemas.update(extra["$defs"])
    # Checked by `mesh_from_json` when it arrives; what it looks like is known all the same.
    schemas["MeshDocument"] = {"$ref": _REF.format(model="Mesh")}
    for path in found["paths"].values():
        for operation in path.values():
            _drop_default_validation_answer(operation)
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    found["components"]["schemas"] = dict(sorted(schemas.items()))
    return found


def _drop_default_validation_answer(operation: Mapping[str, Any]) -> None:
    """FastAPI adds its own 422 to routes with parameters; ours are problems."""
    answer = operation["responses"].get("422", {})
    if "HTTPValidationError" in json.dumps(answer):
        del operation["responses"]["422"]
