"""The OpenAPI specification, generated from the routes and the problem types."""

import json
import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter

from autoshard.mesh import Mesh, Topology
from autoshard_server.http.documents import JobDocument
from autoshard_server.http.examples import (
    DIGEST,
    EXAMPLES,
    PATH_EXAMPLES,
    REQUEST_ID,
    STREAM_EXAMPLE,
    TAGS,
)
from autoshard_server.http.parameters import BYTES, JSON, MULTIPART_FORM
from autoshard_server.problems import PROBLEM_MEDIA_TYPE, ProblemType, problem_document
from autoshard_server.requests import (
    ComparePlansRequest,
    CoverageRequest,
    CreatePlanOfModelRequest,
    CreatePlanRequest,
    ExplainRequest,
    LookUpPlanRequest,
    SearchRequest,
)
from autoshard_server.store.jobs import JobEvent

_REF = "#/components/schemas/{model}"
_INPUT_NAME = "{model}Input"
_INPUT_REF = f"#/components/schemas/{_INPUT_NAME}"

_SENTENCE = re.compile(r"\.?\n|\. |\.$")
"""End of the first sentence of a description."""

_FREE_FORM = {"MeshDocument": "Mesh", "TopologyDocument": "Topology"}
"""Types of the members of requests that take any object, since the library validates them."""

_ANSWER_HEADERS = {
    "Autoshard-Cache": "`hit` if the result was cached before, else `miss`.",
    "Cache-Control": "Plans are immutable.",
    "Content-Location": "Address of the plan or search; absent if time ran out.",
    "ETag": "Digest of the response; the id of a plan. Weak if the response is compressed.",
    "Link": "Addresses of the first page (`first`) and of the next (`next`), if there is one.",
    "Location": "Address of the job, or of the stored resource.",
    "RateLimit": "What is left of the caller's quotas (draft-ietf-httpapi-ratelimit-headers).",
    "RateLimit-Policy": "The caller's quotas: unfinished jobs, and bytes in jobs.",
    "Retry-After": "Seconds after which to retry.",
}

_REQUEST_HEADERS = {
    "Prefer": ("wait=10", "Largest number of seconds to wait for the result (RFC 7240); capped."),
    "Idempotency-Key": (
        "a3b8d6f0",
        (
            "Identifies this request for 24 hours: a repeated request gets the same job. Another "
            "request with the same key is refused."
        ),
    ),
    "If-Match": (f'"{DIGEST}"', "Change the resource only if it has this ETag."),
    "If-None-Match": (
        f'"{DIGEST}"',
        "With GET, the status is 304 if the resource has this ETag; with PUT, `*` only creates.",
    ),
}

_SERVERS = [
    {"url": ".", "description": "The service that this document was read from."},
    {"url": "http://127.0.0.1:8000", "description": "`autoshard serve` on this machine."},
]

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

CONFIG_PROBLEMS = (
    ProblemType.CONFIG,
    ProblemType.NOT_INSTALLED,
    ProblemType.TOO_MANY_PARSES,
)
"""Problems of a route that makes the model of a config."""

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
    tagged: tuple[str, str] | None = None,
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
        tagged: of a document with an ETag: descriptions of responses 200, and 304 if the caller has
            it.
        content: of response 200, by media type, if it is not JSON.
        created: document of response 201.
        job: description of the job that makes the result; empty if there is none.
    """
    if tagged is not None:
        headers = (*headers, "If-None-Match")
        answers = {200: (tagged[0], "ETag", "Cache-Control"), 304: (tagged[1],)}
    responses: dict[int | str, dict[str, Any]] = {
        status: {"description": text, **_answer_headers(*names)}
        for status, (text, *names) in (answers or {}).items()
    }
    if content is not None:
        responses[200]["content"] = content
    if created is not None:
        responses[201]["model"] = created
    if job:
        names = ("Location", "Retry-After", "Autoshard-Cache", "RateLimit-Policy", "RateLimit")
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
        examples = {
            kind.slug: {"value": problem_document(kind, kind.meaning, request_id=REQUEST_ID)}
            for kind in same
        }
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


def _json_body(model: type[BaseModel]) -> dict[str, Any]:
    return {JSON: {"schema": {"$ref": _REF.format(model=model.__name__)}}}


def _bytes_schema(description: str) -> dict[str, Any]:
    return {
        "type": "string",
        "format": "binary",  # read by generators that do not know the next line
        "contentMediaType": BYTES,
        "description": description,
    }


PLAN_BODY: dict[str, Any] = {
    MULTIPART_FORM: {
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
            "request": EXAMPLES["CreatePlanRequest"],
        },
    },
    **_json_body(CreatePlanOfModelRequest),
}
"""The body of POST /v1/plans: with the graph, the digest of a stored one, or a config."""

_BODIES = (
    CreatePlanOfModelRequest,
    LookUpPlanRequest,
    CreatePlanRequest,
    ComparePlansRequest,
    ExplainRequest,
    SearchRequest,
    CoverageRequest,
)
"""Models of JSON in requests."""

LOOKUP_BODY = _json_body(LookUpPlanRequest)
SEARCH_BODY = _json_body(SearchRequest)
COVERAGE_BODY = _json_body(CoverageRequest)
EXPLAIN_BODY = _json_body(ExplainRequest)
COMPARE_BODY = _json_body(ComparePlansRequest)

GRAPH_BODY: dict[str, Any] = {
    BYTES: {
        "schema": _bytes_schema("A .pt2 archive of torch.export.save, or its models/model.json.")
    }
}
"""The body of PUT /v1/graphs/{digest}."""

TOPOLOGY_BODY: dict[str, Any] = {JSON: {"schema": {"$ref": _INPUT_REF.format(model="Topology")}}}
"""The body of PUT /v1/topologies/{name}."""


def specification(app: FastAPI) -> dict[str, Any]:
    """The specification of an application that `create_app` made."""
    found = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
        tags=[{"name": name, "description": text} for name, text in TAGS.items()],
        servers=_SERVERS,
    )
    schemas: dict[str, Any] = found["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas.update(_further_schemas(schemas))
    for schema in schemas.values():
        _describe_defaults(schema)
    for path in found["paths"].values():
        for method, operation in path.items():
            operation["summary"] = _SENTENCE.split(operation["description"])[0]
            operation.setdefault("security", [])  # none, rather than none that is known
            _drop_default_validation_answer(operation)
            _describe_streams(operation)
            if method == "head":
                _drop_contents(operation)
            _add_examples(operation)
    found["components"]["schemas"] = dict(sorted(schemas.items()))
    return found


def _further_schemas(answers: Mapping[str, Any]) -> dict[str, Any]:
    """Schemas of documents that FastAPI does not know of: bodies of requests, and events.

    A model that occurs in responses too, such as a mesh, has a schema of its own for requests, in
    which members have defaults and bytes may be texts with units. It has its own name and title:
    generators name their types after either.

    Args:
        answers: schemas of responses, by name.
    """
    documents = (*_BODIES, Mesh, Topology, JobEvent)
    _, found = TypeAdapter.json_schemas(
        [(document, "validation", TypeAdapter(document)) for document in documents],
        ref_template=_REF,
    )
    schemas = found["$defs"]
    taken = {name for name, schema in schemas.items() if name in answers and "enum" not in schema}
    names = {name: _INPUT_NAME.format(model=name) for name in taken}
    names |= {name: names[target] for name, target in _FREE_FORM.items()}
    made = {}
    for name, schema in schemas.items():
        if name not in _FREE_FORM:
            renamed = names.get(name, name)
            made[renamed] = {**_with_references(schema, names), "title": renamed}
    return made


def _with_references(schema: Any, names: Mapping[str, str]) -> Any:
    """A schema whose references to some models lead to others."""
    if isinstance(schema, list):
        return [_with_references(item, names) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _with_references(item, names) for key, item in schema.items()}
    if isinstance(reference := made.get("$ref"), str):
        name = reference.rpartition("/")[2]
        made["$ref"] = _REF.format(model=names.get(name, name))
    return made


def _describe_defaults(schema: Mapping[str, Any]) -> None:
    """Move the defaults of members into their descriptions.

    Generators for TypeScript make a member with a `default` mandatory, also in requests.
    """
    for member in schema.get("properties", {}).values():
        default = member.pop("default", None)
        if isinstance(default, str | int | float):
            texts = (member.get("description", "").rstrip("."), f"default {json.dumps(default)}")
            member["description"] = "; ".join(filter(None, texts))


def _drop_default_validation_answer(operation: Mapping[str, Any]) -> None:
    """Drop the response 422 that FastAPI adds to routes with parameters, unless it is a problem."""
    answer = operation["responses"].get("422", {})
    if "HTTPValidationError" in json.dumps(answer):
        del operation["responses"]["422"]


def _describe_streams(operation: Mapping[str, Any]) -> None:
    """Replace FastAPI's schema of an event stream, whose keyword is none of OpenAPI 3.1."""
    for answer in operation["responses"].values():
        for content in answer.get("content", {}).values():
            if content.pop("itemSchema", None):
                content["example"] = STREAM_EXAMPLE
                answer["description"] = (
                    f"Server-sent events. The data of each is a {JobEvent.__name__}, as JSON."
                )


def _add_examples(operation: Mapping[str, Any]) -> None:
    """Add the examples of the JSON bodies of an operation, and of the parts of its path.

    It is done here since FastAPI would leave out members that are null.
    """
    bodies = {"request": operation.get("requestBody", {}), **operation["responses"]}
    for status, body in bodies.items():
        content = body.get("content", {}).get(JSON, {})
        schema = content.get("schema", {})
        first = schema.get("anyOf", [schema])[0].get("$ref", "").rpartition("/")[2]
        if first in EXAMPLES:
            content["example"] = EXAMPLES.get(f"{first} {status}", EXAMPLES[first])
    for parameter in operation.get("parameters", ()):
        if parameter["name"] in PATH_EXAMPLES:
            parameter["example"] = PATH_EXAMPLES[parameter["name"]]


def _drop_contents(operation: Mapping[str, Any]) -> None:
    """Drop the bodies of the responses to HEAD, which has none."""
    for answer in operation["responses"].values():
        answer.pop("content", None)
