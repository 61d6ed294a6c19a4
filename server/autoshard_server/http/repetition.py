"""Requests with an Idempotency-Key: asked again, they get the job of the first time."""

import hashlib
from collections.abc import Awaitable, Callable

import anyio.to_thread
from fastapi import Request

from autoshard_server.answering.service import Answer, Service
from autoshard_server.http.auth import Caller
from autoshard_server.jobs.job import Job
from autoshard_server.problems import KEY_REUSED, REQUEST, ServerError

_HEADER = "Idempotency-Key"
_LONGEST = 255


async def once(
    request: Request,
    service: Service,
    caller: Caller,
    asked: bytes,
    ask: Callable[[], Awaitable[Answer | Job]],
) -> Answer | Job:
    """What `ask` finds; or the job that it found when the key was new.

    A key stands for its request from the moment that it arrives, also where that is refused.

    Args:
        request: whose header may have a key.
        service: which remembers keys for 24 hours.
        caller: whose key it is.
        asked: what distinguishes requests to one route: not the coding of the body.
        ask: does what the request says.

    Raises:
        ServerError: KEY_REUSED, where the key stands for another request.
    """
    key = request.headers.get(_HEADER)
    if key is None:
        return await ask()
    if not 1 <= len(key) <= _LONGEST or not key.isprintable():
        raise ServerError(REQUEST, f"{_HEADER} has 1 to {_LONGEST} printable characters")
    digest = hashlib.sha256(request.url.path.encode() + b"\0" + asked).hexdigest()
    name = caller.name or ""
    store = service.stores.idempotency
    # Reserved before anything is started: of two that send it at once with different bodies,
    # one has not started a job when it is refused.
    known = await anyio.to_thread.run_sync(store.reserve, name, key, digest)
    if known.body_sha256 != digest:
        raise ServerError(
            KEY_REUSED,
            f"the {_HEADER} {key!r} was used for another request; make a new one for each",
        )
    job_id = known.answer.get("job")
    job = None if job_id is None else await anyio.to_thread.run_sync(service.jobs.get, job_id)
    if job is not None:
        return job
    # New, or a plan that was there, or a job that is long forgotten: asking changes nothing.
    found = await ask()
    if isinstance(found, Job):
        await anyio.to_thread.run_sync(store.answer, name, key, digest, {"job": found.id})
    return found
