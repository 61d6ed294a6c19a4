"""Whether the service lives, is ready, and what it is."""

from fastapi import APIRouter

from autoshard_server import problems
from autoshard_server.answering.service import versions
from autoshard_server.http.documents import Alive, Versions
from autoshard_server.http.specification import problem_answers
from autoshard_server.routes.parameters import ServiceHere

router = APIRouter(tags=["health"])


@router.get("/livez", operation_id="livez", summary="Is the process alive?")
async def livez() -> Alive:
    """Answers without touching anything."""
    return Alive()


@router.get(
    "/readyz",
    operation_id="readyz",
    summary="Can requests be served?",
    responses=problem_answers(problems.UNAVAILABLE),
)
async def readyz(service: ServiceHere) -> Alive:
    """Checks the workers, the store and its migrations; 503 while shutting down."""
    await service.check()
    return Alive()


@router.get("/version", operation_id="getVersion", summary="What runs here?")
async def get_version() -> Versions:
    """Versions of the service and of what decides how a plan looks."""
    return Versions(versions=versions())
