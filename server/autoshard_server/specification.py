"""The OpenAPI specification, generated from the routes and the table of problems."""

import json
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from autoshard_server.documents import Problem
from autoshard_server.problems import (
    INTERNAL,
    PROBLEM_MEDIA_TYPE,
    ProblemType,
    problem_document,
)
from autoshard_server.requests import PlanLookup, PlanRequest

_REF = "#/components/schemas/{model}"

_HEADERS = {
    "Autoshard-Cache": "`hit` where the plan was there before, else `miss`.",
    "Cache-Control": "Plans are immutable.",
    "Content-Location": "Where the plan can be had; absent where time ran out.",
    "ETag": "The plan's id; strong.",
    "Location": "The job.",
    "Retry-After": "Seconds after which to ask again.",
}

PLAN_FORM: dict[str, Any] = {
    "parameters": [
        {
            "name": "Prefer",
            "in": "header",
            "required": False,
            "schema": {"type": "string"},
            "example": "wait=10",
            "description": "Wait up to so many seconds for the plan (RFC 7240); capped.",
        }
    ],
    "requestBody": {
        "required": True,
        "content": {
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
                        "request": {"$ref": _REF.format(model="PlanRequest")},
                    },
                },
                "encoding": {"request": {"contentType": "application/json"}},
                "example": {
                    "graph": "(bytes of model.pt2)",
                    "request": {
                        "mesh": {"shape": [2, 4], "topology": "h100-sxm"},
                        "options": {"mode": "training"},
                    },
                },
            }
        },
    },
}
"""The body and the headers of POST /v1/plans, which FastAPI cannot see in its signature."""

LOOKUP_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"$ref": _REF.format(model="PlanLookup")},
                "example": {
                    "graph_sha256": "0" * 64,
                    "mesh": {"shape": [2, 4], "topology": "h100-sxm"},
                    "options": {"mode": "training"},
                },
            }
        },
    },
}
"""The body of POST /v1/plans:lookup, which is read within a limit of its own."""


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


def specification(app: FastAPI) -> dict[str, Any]:
    """The specification of an application that `create_app` made."""
    found = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
    )
    _, extra = models_json_schema(
        [
            (PlanRequest, "validation"),
            (PlanLookup, "validation"),
            (Problem, "serialization"),
        ],
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
