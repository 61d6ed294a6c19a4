"""What an application answers where something went wrong: problems, whatever it was."""

from collections.abc import Sequence

import structlog
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from autoshard_server.http.methods import allowed_methods
from autoshard_server.problems import (
    EXCEPTION_PROBLEMS,
    HTTP,
    METHOD,
    NOT_FOUND,
    PROBLEM_MEDIA_TYPE,
    REQUEST,
    ServerError,
    problem_document,
    problem_of,
)
from autoshard_solver_cache import StoreUnavailableError

_log = structlog.get_logger(__name__)


def answer_problems(app: FastAPI, routers: Sequence[APIRouter]) -> None:
    """Let an application answer with problem documents, whatever its routes raise.

    Args:
        app: the application.
        routers: that it includes, which say what a path allows.
    """
    app.state.routers = routers
    for kind in (*EXCEPTION_PROBLEMS, ServerError):
        in_store = issubclass(kind, StoreUnavailableError)
        app.add_exception_handler(kind, _on_store_trouble if in_store else _on_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)


async def _on_error(_request: Request, error: Exception) -> Response:
    problem = problem_of(error)
    headers = error.headers if isinstance(error, ServerError) else {}
    return _problem(problem, headers)


async def _on_store_trouble(_request: Request, error: Exception) -> Response:
    _log.error("store_unavailable", reason=str(error))
    return _problem(problem_of(error), {"Retry-After": "5"})


async def _on_http_exception(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    kinds = {kind.status: kind for kind in (NOT_FOUND, METHOD)}
    details = {
        NOT_FOUND.status: f"there is no route {request.url.path}",
        METHOD.status: f"{request.method} is not allowed on {request.url.path}",
    }
    detail = details.get(error.status_code, str(error.detail))
    kind = kinds.get(error.status_code, HTTP)
    problem = problem_document(kind, detail, status=error.status_code)
    headers = dict(error.headers or {})
    if kind is METHOD:
        allowed = ", ".join(allowed_methods(request.app.state.routers, request.scope))
        headers |= {"Allow": allowed} if allowed else {}
    return _problem(problem, headers)


async def _on_validation_error(_request: Request, error: Exception) -> Response:
    if not isinstance(error, RequestValidationError):
        raise error
    found = [
        {"pointer": "/" + "/".join(map(str, e["loc"])), "detail": e["msg"]} for e in error.errors()
    ]
    detail = f"{found[0]['pointer']}: {found[0]['detail']}"
    return _problem(problem_document(REQUEST, detail, errors=found), {})


def _problem(problem: dict[str, object], headers: dict[str, str]) -> Response:
    return JSONResponse(
        problem, int(str(problem["status"])), headers, media_type=PROBLEM_MEDIA_TYPE
    )
