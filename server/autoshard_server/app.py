"""The application: routes, problem answers, and a service that lives as long as it does."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

import anyio.to_thread
import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette_compress import CompressMiddleware

from autoshard_server.answering.service import Service
from autoshard_server.http.auth import Guard
from autoshard_server.http.coding import BodyLimit
from autoshard_server.http.methods import allowed_methods
from autoshard_server.http.middleware import RequestLog
from autoshard_server.http.specification import specification
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
from autoshard_server.routes import router, routers
from autoshard_server.settings import Settings
from autoshard_server.solvers.executor import Executor
from autoshard_server.solvers.executors import make_executor
from autoshard_solver_cache import StoreUnavailableError

_log = structlog.get_logger(__name__)

_ZSTD_LEVEL = 1
"""Plans are full of repetition, which the fastest level finds as well."""


def create_app(settings: Settings | None = None, *, executor: Executor | None = None) -> FastAPI:
    """The planning service as an ASGI application.

    The database is opened, and workers start, when the application starts.

    Args:
        settings: of the service; from the environment if left out.
        executor: where solves run; each in its own process if left out.
    """
    settings = settings or Settings()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        solvers = executor or make_executor(settings)
        service = await anyio.to_thread.run_sync(Service, settings, solvers)
        service.start()
        app.state.service = service
        app.state.guard = Guard(service.stores.api_keys, settings)
        try:
            yield
        finally:
            await anyio.to_thread.run_sync(service.close)

    app = FastAPI(
        title="autoshard",
        version=version("autoshard"),
        description="Optimal, certified sharding plans for exported PyTorch programs.",
        lifespan=lifespan,
    )
    app.include_router(router)
    app.add_middleware(BodyLimit, limit=settings.max_body_bytes)
    app.add_middleware(CompressMiddleware, zstd_level=_ZSTD_LEVEL, brotli=False, gzip_level=1)
    app.add_middleware(RequestLog)
    for kind in (*EXCEPTION_PROBLEMS, ServerError):
        in_store = issubclass(kind, StoreUnavailableError)
        app.add_exception_handler(kind, _on_store_trouble if in_store else _on_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.openapi = lambda: specification(app)  # type: ignore[method-assign]  # FastAPI's own way
    return app


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
        allowed = ", ".join(allowed_methods(routers, request.scope))
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
