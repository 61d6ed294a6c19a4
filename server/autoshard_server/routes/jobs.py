"""Routes of jobs: list, read, stream events, cancel, delete."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from http import HTTPStatus
from typing import Annotated

import anyio.to_thread
from fastapi import APIRouter, Depends, Header, Query, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent

from autoshard_server.callers import Scope
from autoshard_server.http.auth import Planner, Reader
from autoshard_server.http.documents import JobDocument, JobEntry, JobPage
from autoshard_server.http.paging import PagingParameter
from autoshard_server.http.parameters import JobId, ServiceParameter
from autoshard_server.http.specification import describe
from autoshard_server.problems import ProblemType, ServerError
from autoshard_server.routes.responses import job_response
from autoshard_server.store.audit import AuditAction
from autoshard_server.store.jobs import Job, JobState

router = APIRouter(tags=["jobs"])

_RESULT_PROBLEMS = (ProblemType.NOT_FOUND, ProblemType.REQUEST, ProblemType.OTHER_RELEASE)

_RETRY = 2000
"""Milliseconds after which to reconnect, when the service ends a stream."""


@router.get("/v1/jobs", **describe(ProblemType.REQUEST, answers={200: ("A page of jobs.", "Link")}))
async def list_jobs(
    service: ServiceParameter,
    caller: Reader,
    paging: PagingParameter,
    *,
    state: Annotated[
        list[JobState] | None, Query(max_length=10, description="only jobs in one of these")
    ] = None,
) -> JobPage:
    """List jobs, newest first: those submitted with keys of the caller's name.

    A key with the scope `admin` lists all of its project. Every job of the project can be read by
    its id.
    """
    read = partial(
        service.jobs.page,
        after=paging.after,
        project=caller.project,
        caller=None if Scope.ADMIN in caller.scopes else caller.name,
        states=tuple(state or ()),
        limit=paging.limit,
    )
    found, cursor = await anyio.to_thread.run_sync(read)
    entries = [JobEntry.of(job) for job in found]
    return JobPage(jobs=entries, next_page_token=paging.next_token(cursor))


@router.get(
    "/v1/jobs/{job_id:segment}",
    response_model=JobDocument,
    **describe(
        *_RESULT_PROBLEMS,
        answers={200: ("The job; with its result if it has succeeded.", "Retry-After")},
    ),
)
async def get_job(job_id: JobId, service: ServiceParameter, caller: Reader) -> Response:
    """State and progress of a job. The problem of a failed job is in `error`; the status is 200."""
    return await job_response(await service.find(caller.project, job_id), service)


@router.post(
    "/v1/jobs/{job_id:segment}:cancel",
    response_model=JobDocument,
    **describe(
        *_RESULT_PROBLEMS,
        answers={200: ("The cancelled job; unchanged if it was finished.",)},
    ),
)
async def cancel_job(job_id: JobId, service: ServiceParameter, caller: Planner) -> Response:
    """Cancel a queued or running job, also for other callers that wait for it."""
    await service.find(caller.project, job_id)
    if await anyio.to_thread.run_sync(service.jobs.cancel, job_id):
        await service.record(caller, AuditAction.CANCEL, f"/v1/jobs/{job_id}")
    return await job_response(await service.find(caller.project, job_id), service)


@router.delete(
    "/v1/jobs/{job_id:segment}",
    status_code=HTTPStatus.NO_CONTENT,
    **describe(ProblemType.NOT_FOUND, ProblemType.REQUEST, ProblemType.JOB_NOT_FINISHED),
)
async def delete_job(job_id: JobId, service: ServiceParameter, caller: Planner) -> None:
    """Delete a finished job and its events. A plan that it has made is not deleted."""
    job = await service.find(caller.project, job_id)
    if not await anyio.to_thread.run_sync(service.jobs.delete, job_id):
        raise ServerError(
            ProblemType.JOB_NOT_FINISHED,
            f"the job {job_id!r} is {job.state}; cancel it with POST /v1/jobs/{job_id}:cancel, "
            "then delete it",
        )
    await service.record(caller, AuditAction.DELETE, f"/v1/jobs/{job_id}")


async def _followed(job_id: JobId, service: ServiceParameter, caller: Reader) -> AsyncIterator[Job]:
    """The job of a stream; the stream is counted until its response has ended."""
    # Before the stream starts, so that an error is still an HTTP response.
    job = await service.find(caller.project, job_id)
    with service.streams.opened(caller.project, caller.name):
        yield job


@router.get(
    "/v1/jobs/{job_id:segment}/events",
    response_class=EventSourceResponse,
    **describe(ProblemType.NOT_FOUND, ProblemType.REQUEST, ProblemType.TOO_MANY_STREAMS),
)
async def stream_job_events(
    job: Annotated[Job, Depends(_followed)],
    service: ServiceParameter,
    last_event_id: Annotated[
        int, Header(ge=0, le=2**31 - 1, description="number of the last event that was received")
    ] = 0,
) -> AsyncIterator[ServerSentEvent]:
    """Events of a job, as server-sent events, until it is finished.

    Ids are numbers from 1; after an interruption, `Last-Event-ID` requests the following ones.
    Every server of the same database can continue the stream.
    """
    async with aclosing(service.watcher.events(job, after=last_event_id)) as events:
        async for event in events:
            yield ServerSentEvent(raw_data=event.text, event=event.kind.value, id=str(event.number))
    if service.draining:
        yield ServerSentEvent(retry=_RETRY, comment="shutting down: reconnect")
