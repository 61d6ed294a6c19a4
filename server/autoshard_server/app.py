"""The application: routes, and a service that lives as long as it does."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

import anyio.to_thread
from fastapi import FastAPI
from starlette_compress import CompressMiddleware

from autoshard_server.answering.service import Service
from autoshard_server.http.auth import Guard
from autoshard_server.http.coding import BodyLimit
from autoshard_server.http.handlers import answer_problems
from autoshard_server.http.middleware import RequestLog
from autoshard_server.http.specification import specification
from autoshard_server.routes import router, routers
from autoshard_server.settings import Settings
from autoshard_server.solvers.executor import Executor
from autoshard_server.solvers.executors import make_executor

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
    answer_problems(app, routers)
    app.openapi = lambda: specification(app)  # type: ignore[method-assign]  # FastAPI's own way
    return app
