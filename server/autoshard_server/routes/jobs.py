"""Jobs: listed, looked at, followed, cancelled."""

import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated

import anyio
import anyio.to_thread
from fastapi import APIRouter, Depends, Header, Query, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent

from autoshard_server import problems
from autoshard_server.http.auth import Planner, Reader, Scope
from autoshard_server.http.documents import JobDocument, JobEvent, JobPage, job_entry, moment
from autoshard_server.http.pages import PageSize, PageToken, cursor_of, page_limit, token_of
from autoshard_server.http.specification import answer_headers, guarded_answers
from autoshard_server.jobs.job import Job, JobState
from autoshard_server.routes.answers import job_response
from autoshard_server.routes.parameters import JobId, ServiceHere
from autoshard_server.store import Event, EventKind

router = APIRouter(tags=["jobs"])

_KNOWN = guarded_answers(problems.NOT_FOUND, problems.REQUEST)

_RESULT = guarded_answers(problems.NOT_FOUND, problems.REQUEST, problems.OTHER_RELEASE)

_LOOK = 0.2
"""Seconds between looks for new events."""

_LOOK_BACK = 5.0
"""Seconds between looks whether the job is still remembered."""

_RETRY = 2000
"""Milliseconds after which to come back, when the service ends a stream."""


@router.get(
    "/v1/jobs",
    operation_id="listJobs",
    summary="List jobs",
    responses=guarded_answers(problems.REQUEST),
)
async def list_jobs(
    service: ServiceHere,
    caller: Reader,
    page_size: PageSize = 0,
    page_token: PageToken = "",
    state: Annotated[
        list[JobState] | None, Query(max_length=10, description="only jobs in one of these")
    ] = None,
) -> JobPage:
    """Jobs that are remembered, newest first: those that the key's name asked for first.

    A key with the scope `admin` sees all. By its id any job can be looked at.
    """
    limit = page_limit(page_size)
    read = partial(
        service.jobs.page,
        after=cursor_of(page_token),
        caller=None if Scope.ADMIN in caller.scopes else caller.name,
        states=tuple(state or ()),
        limit=limit,
    )
    found = await anyio.to_thread.run_sync(read)
    token = token_of(found[-1].cursor) if len(found) == limit else ""
    return JobPage(jobs=[job_entry(job) for job in found], next_page_token=token)


@router.get(
    "/v1/jobs/{job_id:segment}",
    operation_id="getJob",
    summary="Get a job",
    response_model=JobDocument,
    responses={
        200: {
            "description": "The job; with its result when it has succeeded.",
            "headers": answer_headers("Retry-After"),
        },
        **_RESULT,
    },
)
async def get_job(job_id: JobId, service: ServiceHere, _caller: Reader) -> Response:
    """Where a job stands. What went wrong in it is in `error`, not in the HTTP status."""
    return await job_response(await service.find(job_id), service)


@router.post(
    "/v1/jobs/{job_id:segment}:cancel",
    operation_id="cancelJob",
    summary="Cancel a job",
    response_model=JobDocument,
    responses={
        200: {"description": "The job, cancelled; or as it is, where it was done already."},
        **_RESULT,
    },
)
async def cancel_job(job_id: JobId, service: ServiceHere, _caller: Planner) -> Response:
    """Cancel a job that waits or runs; everybody who waits for it is told."""
    await anyio.to_thread.run_sync(service.jobs.cancel, job_id)
    return await job_response(await service.find(job_id), service)


async def _followed(job_id: JobId, service: ServiceHere, _caller: Reader) -> Job:
    # Before the stream begins, so that what is wrong is still an answer of its own.
    return await service.find(job_id)


@router.get(
    "/v1/jobs/{job_id:segment}/events",
    operation_id="streamJobEvents",
    summary="Follow a job",
    response_class=EventSourceResponse,
    responses=_KNOWN,
)
async def stream_events(
    job: Annotated[Job, Depends(_followed)],
    service: ServiceHere,
    last_event_id: Annotated[
        int, Header(ge=0, le=2**31 - 1, description="number of the last event that was seen")
    ] = 0,
) -> AsyncIterator[ServerSentEvent]:
    """What happens to a job, as server-sent events, until it is done.

    Ids are numbers from 1; after a break, `Last-Event-ID` asks for those that follow. Any
    server of the same store can go on with any stream.
    """
    seen = last_event_id
    looked = time.monotonic()
    while True:
        events = await anyio.to_thread.run_sync(partial(service.jobs.events, job.id, after=seen))
        for event in events:
            seen = event.number
            yield _sent(event)
        if events and _is_last(events[-1]):
            return
        if not events and job.state.done:
            # Seen to its end before, or done under a release that wrote no events.
            return
        if service.draining:
            yield ServerSentEvent(retry=_RETRY, comment="shutting down: come back")
            return
        if not events and time.monotonic() - looked > _LOOK_BACK:
            looked = time.monotonic()
            known = await anyio.to_thread.run_sync(service.jobs.get, job.id)
            if known is None or known.state.done:
                return
        if not events:
            await anyio.sleep(_LOOK)


def _sent(event: Event) -> ServerSentEvent:
    data = JobEvent(
        number=event.number,
        kind=event.kind,
        created_at=moment(event.created_at),
        data=dict(event.data),
    )
    return ServerSentEvent(
        raw_data=data.model_dump_json(), event=event.kind.value, id=str(event.number)
    )


def _is_last(event: Event) -> bool:
    return event.kind is EventKind.STATE and JobState(str(event.data["state"])).done
