"""Routes of searches: plan a graph on every mesh of a number of devices; read, delete."""

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from autoshard.requests.results import MeshSearch
from autoshard_server.http.auth import Planner, Reader
from autoshard_server.http.parameters import ServiceParameter, read_json
from autoshard_server.http.specification import (
    CONFIG_PROBLEMS,
    PLANNING_PROBLEMS,
    SEARCH_BODY,
    describe,
)
from autoshard_server.problems import ProblemType, ServerError
from autoshard_server.requests import SearchRequest
from autoshard_server.routes.responses import (
    REVALIDATE,
    result_response,
    run_once,
    tagged_response,
)
from autoshard_server.service import Result
from autoshard_server.store.jobs import Job, JobKind

router = APIRouter(tags=["searches"])

SearchId = Annotated[
    str,
    Path(
        pattern="^[0-9a-f]{64}$",
        description="id of a search, in the Content-Location of its response",
    ),
]


@router.post(
    "/v1/searches",
    response_model=MeshSearch,
    **describe(
        *PLANNING_PROBLEMS,
        *CONFIG_PROBLEMS,
        ProblemType.GRAPH,
        ProblemType.GRAPH_UNKNOWN,
        ProblemType.IDEMPOTENCY_KEY_REUSED,
        headers=("Prefer", "Idempotency-Key"),
        body=SEARCH_BODY,
        answers={
            200: (
                "Every mesh of the devices, best first.",
                *("Autoshard-Cache", "ETag", "Content-Location"),
            )
        },
        job="The job that plans them.",
    ),
)
async def search_meshes(request: Request, service: ServiceParameter, caller: Planner) -> Response:
    """Plan a model on every mesh of a number of devices.

    The plans are cached: GET /v1/plans/{id} returns each.
    """
    submitted = await read_json(request, SearchRequest, service.settings)

    async def search(sha256: str) -> Result | Job:
        task = await service.search_task(caller, submitted.of_graph(sha256))
        return await service.run(task, caller)

    async def run() -> Result | Job:
        if await service.known_graph(caller.project, submitted) is None:
            # What cannot be searched is refused before the config is exported.
            await service.search_task(caller, submitted.of_graph("0" * 64))
        return await service.with_graph(caller, submitted, search)

    found = await run_once(request, service, caller, submitted.model_dump_json().encode(), run)
    return await result_response(request, service, caller, found)


@router.get(
    "/v1/searches/{search_id:segment}",
    response_model=MeshSearch,
    **describe(
        ProblemType.NOT_FOUND,
        ProblemType.REQUEST,
        tagged=("Every mesh of the devices, best first.", "The caller has this search."),
    ),
)
async def get_search(
    search_id: SearchId, request: Request, service: ServiceParameter, caller: Reader
) -> Response:
    """The result of a search that was made before."""
    body = await service.find_result(caller.project, JobKind.SEARCH, search_id)
    if body is None:
        raise _unknown(search_id)
    return tagged_response(request, body, search_id, cache=REVALIDATE)


@router.delete(
    "/v1/searches/{search_id:segment}",
    status_code=HTTPStatus.NO_CONTENT,
    **describe(ProblemType.NOT_FOUND, ProblemType.REQUEST),
)
async def delete_search(search_id: SearchId, service: ServiceParameter, caller: Planner) -> None:
    """Delete the result of a search. Its plans are not deleted."""
    if not await service.delete_result(caller, JobKind.SEARCH, search_id):
        raise _unknown(search_id)


def _unknown(search_id: str) -> ServerError:
    return ServerError(
        ProblemType.NOT_FOUND,
        f"there is no search {search_id}; its id is in the Content-Location of POST /v1/searches",
    )
