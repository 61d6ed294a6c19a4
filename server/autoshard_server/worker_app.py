"""What a worker on its own answers: whether it lives, and figures for Prometheus."""

from fastapi import APIRouter, FastAPI, Request, Response

from autoshard_server.http.auth import Guard, Scraper
from autoshard_server.http.documents import Alive
from autoshard_server.http.exposition import CONTENT_TYPE, worker_exposition
from autoshard_server.http.handlers import answer_problems
from autoshard_server.http.middleware import RequestLog
from autoshard_server.problems import UNAVAILABLE, ServerError
from autoshard_server.settings import Settings
from autoshard_server.solvers.workers import Workers
from autoshard_server.stores import Stores

_router = APIRouter()


def create_worker_app(workers: Workers, stores: Stores, settings: Settings) -> FastAPI:
    """An application that shows workers, and does nothing else.

    Args:
        workers: that run in this process.
        stores: with the keys of who may see figures; needed as by the service's `/metrics`.
        settings: whether a key is needed.
    """
    app = FastAPI(title="autoshard worker", openapi_url=None)
    app.state.workers = workers
    app.state.guard = Guard(stores.api_keys, settings)
    app.include_router(_router)
    app.add_middleware(RequestLog)
    answer_problems(app, [_router])
    return app


@_router.get("/livez")
async def livez(request: Request) -> Alive:
    """Whether jobs can be done here; 503 where solvers cannot be started, or are lost at once."""
    workers: Workers = request.app.state.workers
    if not workers.alive:
        raise ServerError(
            UNAVAILABLE, "a worker has died, or cannot start solvers; the log says why"
        )
    return Alive()


@_router.get("/metrics")
def metrics(request: Request, _caller: Scraper) -> Response:
    """Jobs by kind and outcome, and how long they took."""
    return Response(worker_exposition(request.app.state.workers), media_type=CONTENT_TYPE)
