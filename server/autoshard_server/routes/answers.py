"""What routes answer with: results of jobs, jobs, and pages of lists."""

from collections.abc import Mapping
from http import HTTPStatus

from fastapi import Request, Response
from starlette.responses import JSONResponse

from autoshard_server.answering.service import Answer, Service
from autoshard_server.http.documents import job_document
from autoshard_server.http.preconditions import is_known
from autoshard_server.http.uploads import preferred_wait
from autoshard_server.jobs.job import Job, JobState
from autoshard_server.jobs.kinds import JobKind
from autoshard_server.problems import PROBLEM_MEDIA_TYPE
from autoshard_server.telemetry.figures import results_total

IMMUTABLE = "private, max-age=31536000, immutable"
"""Cache-Control of what never changes under its address."""

ASK_AGAIN = "private, no-cache"
"""Cache-Control of what may be kept, but not used without asking."""

JSON = "application/json"


async def found_response(
    request: Request, service: Service, found: Answer | Job, *, patience: float = 0.0
) -> Response:
    """The result where it is known or soon done, else the job that makes it.

    Args:
        request: whose `Prefer: wait=N` says how soon is soon.
        service: which is asked.
        found: the result, or a job.
        patience: seconds to wait where the caller does not say.
    """
    if isinstance(found, Answer):
        return answer_response(found)
    preferred = preferred_wait(request, cap=service.settings.max_wait)
    headers = {} if preferred is None else {"Preference-Applied": f"wait={preferred:g}"}
    wait = min(patience, service.settings.max_wait) if preferred is None else preferred
    job = await service.wait(found, wait) if wait else found
    if job.state is JobState.SUCCEEDED:
        return answer_response(await service.answer(job), headers)
    if job.error is not None:
        return JSONResponse(
            job.error, job.error["status"], media_type=PROBLEM_MEDIA_TYPE, headers=headers
        )
    headers |= {
        "Location": f"/v1/jobs/{job.id}",
        "Retry-After": str(service.settings.retry_after),
        "Autoshard-Cache": "miss",
    }
    return await job_response(job, service, status=HTTPStatus.ACCEPTED, headers=headers)


def answer_response(answer: Answer, headers: Mapping[str, str] | None = None) -> Response:
    """A result, with what lets the caller keep it."""
    cache = "hit" if answer.cached else "miss"
    results_total.labels(answer.kind.value, cache).inc()
    sent = {**(headers or {}), "Autoshard-Cache": cache}
    if answer.kept:
        sent["ETag"] = f'"{answer.result_id}"'
        if answer.kind is JobKind.PLAN:
            sent["Content-Location"] = f"/v1/plans/{answer.result_id}"
    return Response(answer.body, media_type=JSON, headers=sent)


async def job_response(
    job: Job,
    service: Service,
    *,
    status: int = HTTPStatus.OK,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """A job; with its result if it has succeeded."""
    sent = {"Cache-Control": "no-cache", **(headers or {})}
    if not job.state.done:
        sent["Retry-After"] = str(service.settings.retry_after)
    body = job_document(job).model_dump_json(exclude_none=True).encode()
    if job.state is JobState.SUCCEEDED:
        # The result goes in as the bytes it is: large, and checked when it was made.
        result = (await service.answer(job)).body
        body = body[:-1] + b',"result":' + result + b"}"
    return Response(body, status, media_type=JSON, headers=sent)


def tagged_response(
    request: Request, body: bytes, tag: str, media_type: str, *, cache: str = IMMUTABLE
) -> Response:
    """Something that is the same under its tag; nothing where the caller has it."""
    headers = {"ETag": f'"{tag}"', "Cache-Control": cache}
    if is_known(request, tag):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return Response(body, media_type=media_type, headers=headers)
