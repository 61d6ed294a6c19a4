"""Responses shared by the routes: results, jobs, immutable documents; idempotent requests."""

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from http import HTTPStatus

import anyio.to_thread
import structlog
from fastapi import Request, Response

from autoshard_server.callers import Caller
from autoshard_server.http.documents import JobDocument
from autoshard_server.http.errors import problem_response
from autoshard_server.http.parameters import JSON, is_not_modified, preferred_wait
from autoshard_server.problems import ProblemType, ServerError
from autoshard_server.rate_limits import rate_limit_headers
from autoshard_server.service import Result, Service
from autoshard_server.store.jobs import Job, JobKind, JobState
from autoshard_server.telemetry import results_total

IMMUTABLE = "private, max-age=31536000, immutable"
"""Cache-Control of resources that never change."""

REVALIDATE = "private, no-cache"
"""Cache-Control of resources that must be revalidated before reuse."""

DEFAULT_WAIT = 10.0
"""Seconds to wait for quick jobs without `Prefer: wait=N`."""

_KEY_HEADER = "Idempotency-Key"
_MAX_KEY = 255


async def result_response(
    request: Request,
    service: Service,
    caller: Caller,
    found: Result | Job,
    *,
    default_wait: float = 0.0,
) -> Response:
    """The result if it is known or finished while waiting, else the job that makes it.

    Args:
        request: with `Prefer: wait=N`.
        service: of the application.
        caller: whose quotas are in the headers.
        found: the result, or a job.
        default_wait: seconds to wait without `Prefer`.
    """
    if isinstance(found, Result):
        return _found_response(found, {})
    structlog.contextvars.bind_contextvars(job_id=found.id)
    preferred = preferred_wait(request, cap=service.settings.max_wait)
    headers = {} if preferred is None else {"Preference-Applied": f"wait={preferred:g}"}
    wait = min(default_wait, service.settings.max_wait) if preferred is None else preferred
    job = await service.wait(found, wait, caller) if wait else found
    if job.state is JobState.SUCCEEDED:
        return _found_response(await service.result(job), headers)
    if job.error is not None:
        return problem_response(dict(job.error), headers)
    headers |= rate_limit_headers(await service.quotas(caller))
    headers |= {"Location": f"/v1/jobs/{job.id}", "Autoshard-Cache": "miss"}
    return await job_response(job, service, status=HTTPStatus.ACCEPTED, headers=headers)


async def job_response(
    job: Job,
    service: Service,
    *,
    status: int = HTTPStatus.OK,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """A job, with its result if it has succeeded."""
    sent = {"Cache-Control": "no-cache", **(headers or {})}
    if not job.state.done:
        sent["Retry-After"] = str(service.settings.retry_after)
    body = JobDocument.of(job).model_dump_json(exclude_none=True).encode()
    if job.state is JobState.SUCCEEDED:
        # Inserted as bytes: the result is large, and was validated when it was made.
        result = (await service.result(job)).body
        body = body[:-1] + b',"result":' + result + b"}"
    return Response(body, status, media_type=JSON, headers=sent)


def tagged_response(
    request: Request, body: bytes, tag: str, media_type: str = JSON, *, cache: str = IMMUTABLE
) -> Response:
    """A document with an ETag; 304 if the caller has it."""
    headers = {"ETag": f'"{tag}"', "Cache-Control": cache}
    if is_not_modified(request, tag):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return Response(body, media_type=media_type, headers=headers)


async def run_once(
    request: Request,
    service: Service,
    caller: Caller,
    identity: bytes,
    run: Callable[[], Awaitable[Result | Job]],
) -> Result | Job:
    """Run a request, or return the job of an earlier one with the same Idempotency-Key.

    A key identifies its request from its arrival, also if the request is refused.

    Args:
        request: with the header, if any.
        service: of the application, which stores keys for 24 hours.
        caller: that sent the key.
        identity: bytes that are equal for equal requests to the route, whatever the encoding of
            the body.
        run: runs the request.

    Raises:
        ServerError: IDEMPOTENCY_KEY_REUSED, if the key identifies another request.
    """
    key = request.headers.get(_KEY_HEADER)
    if key is None:
        return await run()
    if not 1 <= len(key) <= _MAX_KEY or not key.isprintable():
        raise ServerError(
            ProblemType.REQUEST, f"{_KEY_HEADER} has 1 to {_MAX_KEY} printable characters"
        )
    digest = hashlib.sha256(request.url.path.encode() + b"\0" + identity).hexdigest()
    store = service.stores.idempotency
    # Reserved before a job is submitted: of two concurrent requests with different bodies, one is
    # refused before it has submitted a job.
    known = await anyio.to_thread.run_sync(store.reserve, caller, key, digest)
    if known.body_sha256 != digest:
        raise ServerError(
            ProblemType.IDEMPOTENCY_KEY_REUSED,
            f"the {_KEY_HEADER} {key!r} was used for another request; use a new one for each",
        )
    if known.job_id is not None:
        with suppress(ServerError):
            return await service.find(caller.project, known.job_id)
    # The key is new, or has no job, or its job was deleted: running the request again is safe.
    found = await run()
    if isinstance(found, Job):
        await anyio.to_thread.run_sync(store.set_job, caller, key, digest, found.id)
    return found


def _found_response(result: Result, headers: Mapping[str, str]) -> Response:
    cache = "hit" if result.is_hit else "miss"
    results_total.labels(result.kind.value, cache).inc()
    sent = {**headers, "Autoshard-Cache": cache}
    if result.is_cached:
        sent["ETag"] = f'"{result.id}"'
        if result.kind in (JobKind.PLAN, JobKind.SEARCH):
            sent["Content-Location"] = f"/v1/{result.kind.namespace}/{result.id}"
    return Response(result.body, media_type=JSON, headers=sent)
