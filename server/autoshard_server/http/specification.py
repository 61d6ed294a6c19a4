"""The OpenAPI specification, generated from the routes and the problem types."""

import json
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import models_json_schema

from autoshard.mesh import Mesh, get_topology, topology_to_json
from autoshard_server.http.documents import JobDocument, Problem
from autoshard_server.http.parameters import JSON
from autoshard_server.problems import PROBLEM_MEDIA_TYPE, ProblemType, problem_document
from autoshard_server.requests import (
    ComparePlansRequest,
    CoverageRequest,
    CreatePlanOfGraphRequest,
    CreatePlanRequest,
    LookUpPlanRequest,
    SearchRequest,
)

_REF = "#/components/schemas/{model}"
_INPUT_NAME = "{model}Input"
_INPUT_REF = f"#/components/schemas/{_INPUT_NAME}"

_ANSWER_HEADERS = {
    "Autoshard-Cache": "`hit` if the result was cached before, else `miss`.",
    "Cache-Control": "Plans are immutable.",
    "Content-Location": "Address of the plan; absent if time ran out.",
    "ETag": "Digest of the response; the id of a plan. Strong.",
    "Location": "Address of the job, or of the stored resource.",
    "Retry-After": "Seconds after which to retry.",
}

_MESH_EXAMPLE: dict[str, Any] = {"shape": [2, 4], "topology": "h100-sxm"}
_DIGEST = "0" * 64

_REQUEST_HEADERS = {
    "Prefer": ("wait=10", "Largest number of seconds to wait for the result (RFC 7240); capped."),
    "Idempotency-Key": (
        "a3b8d6f0",
        (
            "Identifies this request for 24 hours: a repeated request gets the same job. Another "
            "request with the same key is refused."
        ),
    ),
    "If-Match": (f'"{_DIGEST}"', "Change the resource only if it has this ETag."),
    "If-None-Match": (
        f'"{_DIGEST}"',
        "With GET, the status is 304 if the resource has this ETag; with PUT, `*` only creates.",
    ),
}

BODY_PROBLEMS = (
    ProblemType.TOO_LARGE,
    ProblemType.MEDIA_TYPE,
    ProblemType.CONTENT_CODING,
    ProblemType.REQUEST,
)
"""Problems of a route that reads a body."""

UPLOAD_PROBLEMS = (
    ProblemType.ARCHIVE,
    *BODY_PROBLEMS,
    ProblemType.PROGRAM,
    ProblemType.UNSUPPORTED,
    ProblemType.GRAPH,
    ProblemType.LIMIT,
)
"""Problems of a route that reads a graph."""

PLANNING_PROBLEMS = (
    *BODY_PROBLEMS,
    ProblemType.MESH,
    ProblemType.OPTIONS,
    ProblemType.LIMIT,
    ProblemType.INPUT,
)
"""Problems of a route that takes a mesh and options."""

JOB_PROBLEMS = (
    ProblemType.CANCELLED,
    ProblemType.OTHER_RELEASE,
    ProblemType.TOO_MANY_JOBS,
    ProblemType.SOLVER_CRASHED,
    ProblemType.OUT_OF_MEMORY,
    ProblemType.DEADLINE,
)
"""Problems of a route that returns the result of a job."""

_COMMON_PROBLEMS = (
    ProblemType.UNAUTHENTICATED,
    ProblemType.FORBIDDEN,
    ProblemType.UNAVAILABLE,
    ProblemType.STORE_FULL,
)
"""Problems of every route that may require a key and reads the database."""


def describe(
    *problems: ProblemType,
    headers: tuple[str, ...] = (),
    body: Mapping[str, Any] | None = None,
    answers: Mapping[int, tuple[str, ...]] | None = None,
    content: Mapping[str, Any] | None = None,
    created: type[BaseModel] | None = None,
    job: str = "",
) -> dict[str, Any]:
    """Arguments of a route's decorator that describe it in the specification.

    Args:
        *problems: of its error responses, in addition to the common ones.
        headers: that it reads.
        body: content of its request body, by media type.
        answers: responses by status: a description, then the names of headers.
        content: of response 200, by media type, if it is not JSON.
        created: document of response 201.
        job: description of the job that makes the result; empty if there is none.
    """
    responses: dict[int | str, dict[str, Any]] = {
        status: {"description": text, **_answer_headers(*names)}
        for status, (text, *names) in (answers or {}).items()
    }
    if content is not None:
        responses[200]["content"] = content
    if created is not None:
        responses[201]["model"] = created
    if job:
        names = ("Location", "Retry-After", "Autoshard-Cache")
        responses[202] = {"model": JobDocument, "description": job, **_answer_headers(*names)}
    problems += JOB_PROBLEMS if job else ()
    extra: dict[str, Any] = {}
    if headers:
        extra["parameters"] = [_request_header(name) for name in headers]
    if body is not None:
        extra["requestBody"] = {"required": True, "content": body}
    return {
        "openapi_extra": extra or None,
        "responses": {**responses, **problem_answers(*_COMMON_PROBLEMS, *problems)},
    }


def problem_answers(*problems: ProblemType) -> dict[int | str, dict[str, Any]]:
    """Descriptions of a route's error responses, by status."""
    answers: dict[int | str, dict[str, Any]] = {}
    kinds = dict.fromkeys((*problems, ProblemType.INTERNAL))
    for status in sorted({kind.status for kind in kinds}):
        same = [kind for kind in kinds if kind.status == status]
        examples = {kind.slug: {"value": problem_document(kind, kind.meaning)} for kind in same}
        schema = {"$ref": _REF.format(model="Problem")}
        answers[status] = {
            "description": " ".join(f"{kind.title}." for kind in same),
            "content": {PROBLEM_MEDIA_TYPE: {"schema": schema, "examples": examples}},
        }
    return answers


def operation_id(route: APIRoute) -> str:
    """The id of an operation: the function's name in camel case."""
    first, *rest = route.name.split("_")
    return first + "".join(word.title() for word in rest)


def _answer_headers(*names: str) -> dict[str, Any]:
    schema = {"type": "string"}
    found = {name: {"description": _ANSWER_HEADERS[name], "schema": schema} for name in names}
    return {"headers": found} if found else {}


def _request_header(name: str) -> dict[str, Any]:
    """A header that a route reads itself, so that FastAPI does not document it."""
    example, description = _REQUEST_HEADERS[name]
    return {
        "name": name,
        "in": "header",
        "required": False,
        "schema": {"type": "string"},
        "example": example,
        "description": description,
    }


def _json_body(model: type[BaseModel], **example: Any) -> dict[str, Any]:
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {JSON: {"schema": schema, "example": example}}


def _bytes_schema(description: str) -> dict[str, Any]:
    return {
        "type": "string",
        "contentMediaType": "application/octet-stream",
        "description": description,
    }


PLAN_BODY: dict[str, Any] = {
    "multipart/form-data": {
        "schema": {
            "type": "object",
            "required": ["graph", "request"],
            "properties": {
                "graph": _bytes_schema(
                    "A .pt2 archive of torch.export.save, or its models/model.json; sent as a file."
                ),
                "request": {"$ref": _REF.format(model="CreatePlanRequest")},
            },
        },
        "encoding": {"request": {"contentType": JSON}},
        "example": {
            "graph": "(bytes of model.pt2)",
            "request": {"mesh": _MESH_EXAMPLE, "options": {"mode": "training"}},
        },
    },
    **_json_body(CreatePlanOfGraphRequest, graph_sha256=_DIGEST, mesh=_MESH_EXAMPLE),
}
"""The body of POST /v1/plans: with the graph, or with the digest of a stored one."""

LOOKUP_BODY = _json_body(LookUpPlanRequest, graph_sha256=_DIGEST, mesh=_MESH_EXAMPLE)
SEARCH_BODY = _json_body(SearchRequest, graph_sha256=_DIGEST, num_devices=8, topology="h100-sxm")
COVERAGE_BODY = _json_body(CoverageRequest, graph_sha256=_DIGEST, mesh=_MESH_EXAMPLE)
COMPARE_BODY = _json_body(ComparePlansRequest, before=_DIGEST, after="1" * 64)

GRAPH_BODY: dict[str, Any] = {
    "application/octet-stream": {
        "schema": _bytes_schema("A .pt2 archive of torch.export.save, or its models/model.json.")
    }
}
"""The body of PUT /v1/graphs/{digest}."""

TOPOLOGY_BODY: dict[str, Any] = {
    JSON: {
        "schema": {"$ref": _INPUT_REF.format(model="Topology")},
        "example": {
            **json.loads(topology_to_json(get_topology("h100-sxm"), indent=None)),
            "name": "my-cluster",
        },
    }
}
"""The body of PUT /v1/topologies/{name}."""


def specification(app: FastAPI) -> dict[str, Any]:
    """The specification of an application that `create_app` made."""
    found = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
    )
    bodies = (
        CreatePlanOfGraphRequest,
        LookUpPlanRequest,
        CreatePlanRequest,
        ComparePlansRequest,
        SearchRequest,
        CoverageRequest,
    )
    _, extra = models_json_schema(
        [*((model, "validation") for model in bodies), (Problem, "serialization")],
        ref_template=_REF,
    )
    schemas: dict[str, Any] = found["components"]["schemas"]
    schemas.update(extra["$defs"])
    # Its type is a free-form object, because `mesh_from_json` validates it; this is its schema.
    schemas["MeshDocument"] = {"$ref": _INPUT_REF.format(model="Mesh")}
    schemas.update(_input_schemas())
    for path in found["paths"].values():
        for operation in path.values():
            _drop_default_validation_answer(operation)
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    found["components"]["schemas"] = dict(sorted(schemas.items()))
    return found


def _input_schemas() -> dict[str, Any]:
    """Schemas of a mesh in a request, in which bytes and bandwidths may be texts with units."""
    _, found = TypeAdapter.json_schemas(
        [("mesh", "validation", TypeAdapter(Mesh))], ref_template=_INPUT_REF
    )
    return {_INPUT_NAME.format(model=name): schema for name, schema in found["$defs"].items()}


def _drop_default_validation_answer(operation: Mapping[str, Any]) -> None:
    """Drop the response 422 that FastAPI adds to routes with parameters, unless it is a problem."""
    answer = operation["responses"].get("422", {})
    if "HTTPValidationError" in json.dumps(answer):
        del operation["responses"]["422"]
