"""The ASGI applications: of the service, and of `autoshard worker`."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache, partial
from importlib.metadata import version
from typing import Any

import anyio.to_thread
from fastapi import APIRouter, FastAPI, Request, Response
from prometheus_client.core import GaugeMetricFamily
from starlette.middleware.cors import CORSMiddleware
from starlette_compress import CompressMiddleware

from autoshard_server.environment import load_settings
from autoshard_server.http.auth import Authenticator, Scraper
from autoshard_server.http.compression import BodyLimit
from autoshard_server.http.documents import Alive
from autoshard_server.http.errors import add_error_handlers
from autoshard_server.http.middleware import (
    HeadRequests,
    RequestLog,
    RootPath,
    StartupErrors,
    WeakTags,
)
from autoshard_server.http.specification import operation_id, specification
from autoshard_server.problems import ProblemType, ServerError
from autoshard_server.routes import routers
from autoshard_server.routes.health import METRICS_TYPE, metrics_text
from autoshard_server.service import Service
from autoshard_server.settings import Settings
from autoshard_server.solvers import make_executor
from autoshard_server.solvers.executor import Executor
from autoshard_server.solvers.workers import Workers
from autoshard_server.store.database import Stores

_ZSTD_LEVEL = 1
"""The fastest: plans are repetitive, so higher levels gain little."""

_CORS: dict[str, Any] = {
    "allow_methods": ["DELETE", "GET", "HEAD", "POST", "PUT"],
    "allow_headers": [
        *("Authorization", "Content-Encoding", "Content-Type", "Idempotency-Key", "If-Match"),
        *("If-None-Match", "Last-Event-ID", "Prefer", "X-Request-ID"),
    ],
    "expose_headers": [
        *("Allow", "Autoshard-Cache", "Content-Location", "ETag", "Link", "Location"),
        *("Preference-Applied", "RateLimit", "RateLimit-Policy", "Retry-After", "X-Request-ID"),
    ],
}
"""Methods and headers for pages of allowed origins; keys are sent explicitly, not as cookies."""


def create_app(settings: Settings | None = None, *, executor: Executor | None = None) -> FastAPI:
    """The planning service as an ASGI application.

    The database is opened, and workers start, when the application starts.

    Args:
        settings: of the service; from the environment if left out.
        executor: runs solves; that of the settings if left out.
    """
    settings = settings or load_settings()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        solvers = executor or make_executor(settings)
        service = await anyio.to_thread.run_sync(Service, settings, solvers)
        service.start()
        app.state.service = service
        app.state.authenticator = Authenticator(service.stores.api_keys, settings)
        try:
            yield
        finally:
            await anyio.to_thread.run_sync(service.close)

    app = FastAPI(
        title="autoshard",
        version=version("autoshard"),
        description="Optimal, certified sharding plans for exported PyTorch programs.",
        lifespan=lifespan,
        openapi_url=None,  # FastAPI's route makes it for each request; ours is in `pages`
        redirect_slashes=False,  # behind a proxy, they would lead to other addresses
        generate_unique_id_function=operation_id,
    )
    for router in routers:
        app.include_router(router)
    app.add_middleware(BodyLimit, settings=settings)
    app.add_middleware(CompressMiddleware, zstd_level=_ZSTD_LEVEL, brotli=False, gzip_level=1)
    app.add_middleware(WeakTags)
    app.add_middleware(HeadRequests)
    if settings.allowed_origins:
        app.add_middleware(CORSMiddleware, allow_origins=settings.allowed_origins, **_CORS)
    app.add_middleware(RequestLog)
    if settings.root_path:
        app.add_middleware(RootPath, root_path=settings.root_path)
    app.add_middleware(StartupErrors)
    add_error_handlers(app, routers)
    app.openapi = cache(partial(specification, app))  # type: ignore[method-assign]  # FastAPI's own way
    app.state.specification = cache(
        lambda: json.dumps(app.openapi(), separators=(",", ":")).encode()
    )
    return app


_worker_router = APIRouter()


def create_worker_app(workers: Workers, stores: Stores, settings: Settings) -> FastAPI:
    """The ASGI application of `autoshard worker`: health and metrics.

    Args:
        workers: of this process.
        stores: with the API keys that `/metrics` requires.
        settings: with the mode of authentication.
    """
    app = FastAPI(title="autoshard worker", openapi_url=None)
    app.state.workers = workers
    app.state.authenticator = Authenticator(stores.api_keys, settings)
    app.include_router(_worker_router)
    app.add_middleware(RequestLog)
    add_error_handlers(app, [_worker_router])
    return app


@_worker_router.get("/livez")
async def livez(request: Request) -> Alive:
    """Check that jobs can run here; 503 if solvers cannot be started, or die immediately."""
    workers: Workers = request.app.state.workers
    if not workers.alive:
        raise ServerError(
            ProblemType.UNAVAILABLE,
            "a worker has died, or cannot start solvers; see the log",
        )
    return Alive()


@_worker_router.get("/metrics")
def metrics(request: Request, _caller: Scraper) -> Response:
    """Durations of jobs by kind and outcome; the service exports metrics of the database."""
    workers: Workers = request.app.state.workers
    alive = GaugeMetricFamily(
        "autoshard_worker_alive", "1 while jobs can be run here.", value=int(workers.alive)
    )
    return Response(metrics_text([alive]), media_type=METRICS_TYPE)
