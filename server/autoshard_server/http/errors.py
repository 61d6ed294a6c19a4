"""Error handlers: the response to every error is a problem document."""

from collections.abc import Iterable, Sequence
from contextvars import ContextVar

import structlog
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.types import Scope

from autoshard_server.problems import (
    EXCEPTION_PROBLEMS,
    PROBLEM_MEDIA_TYPE,
    ProblemType,
    ServerError,
    problem_document,
    problem_of,
)
from autoshard_server.telemetry import count_limit
from autoshard_solver_cache import StoreUnavailableError

root_path: ContextVar[str] = ContextVar("root_path", default="")
"""Path at which a reverse proxy publishes the service; `type` of a problem is an address there."""

_log = structlog.get_logger(__name__)


def add_error_handlers(app: FastAPI, routers: Sequence[APIRouter]) -> None:
    """Respond to all errors of an application with problem documents.

    Args:
        app: the application.
        routers: that it includes, for the `Allow` header.
    """
    app.state.routers = routers
    for kind in (*EXCEPTION_PROBLEMS, ServerError):
        is_of_store = issubclass(kind, StoreUnavailableError)
        app.add_exception_handler(kind, _on_store_error if is_of_store else _on_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)


def problem_response(problem: dict[str, object], headers: dict[str, str] | None = None) -> Response:
    """A problem document, with the id of the current request, as a response."""
    status = int(str(problem["status"]))
    problem = {**problem, "type": f"{root_path.get()}{problem['type']}"}
    bound = structlog.contextvars.get_contextvars()
    if "request_id" in bound:
        problem = {**problem, "request_id": bound["request_id"]}
    return JSONResponse(problem, status, headers, media_type=PROBLEM_MEDIA_TYPE)


async def _on_error(_request: Request, error: Exception) -> Response:
    headers = error.headers if isinstance(error, ServerError) else {}
    problem = problem_of(error)
    count_limit(problem)
    return problem_response(problem, headers)


async def _on_store_error(_request: Request, error: Exception) -> Response:
    _log.error("store_unavailable", reason=str(error))
    return problem_response(problem_of(error), {"Retry-After": "5"})


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind, detail = ProblemType.HTTP, str(error.detail)
    headers = dict(error.headers or {})
    if error.status_code == ProblemType.NOT_FOUND.status:
        kind, detail = ProblemType.NOT_FOUND, f"there is no route {request.url.path}"
        if request.url.path.endswith("/"):
            detail += "; addresses have no slash at their end"
    elif error.status_code == ProblemType.METHOD_NOT_ALLOWED.status:
        kind = ProblemType.METHOD_NOT_ALLOWED
        detail = f"{request.method} is not allowed on {request.url.path}"
        allowed = _allowed_methods(request.app.state.routers, request.scope)
        headers |= {"Allow": ", ".join(allowed)} if allowed else {}
    return problem_response(problem_document(kind, detail, status=error.status_code), headers)


async def _on_validation_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = [
        {"pointer": "/" + "/".join(map(str, e["loc"])), "detail": e["msg"]} for e in error.errors()
    ]
    detail = f"{found[0]['pointer']}: {found[0]['detail']}"
    return problem_response(problem_document(ProblemType.REQUEST, detail, errors=found))


def _allowed_methods(routers: Iterable[APIRouter], scope: Scope) -> list[str]:
    """The methods of all routes of a path; the framework lists only those of the first route."""
    found: set[str] = set()
    for route in (route for router in routers for route in router.routes):
        if route.matches(scope)[0] is not Match.NONE:
            found.update(getattr(route, "methods", None) or ())
    return sorted(found)
