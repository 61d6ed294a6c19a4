"""Following a job until it is done: by its events where the service has them, else by asking."""

from datetime import datetime
from typing import Any

import httpx2

from autoshard.client.effects import Answer, Conversation, Next, OnProgress, Open, Pause, Tell
from autoshard.client.link import Link, document_of, get, retry_after
from autoshard.client.results import JobProgress, JobStatus, read_job, read_progress
from autoshard.client.retries import Trouble
from autoshard.errors import ServiceUnavailableError

_PAUSE = 1.0
"""Seconds between two looks at a job where the service does not say."""

_MOST_SILENT = 3
"""Streams in a row that break before they say anything, and nobody asks for another."""

_NO_STREAMS = frozenset({404, 405, 406, 501})
"""Statuses that say that the service has no such route."""


class Follower:
    """Follows one job, through breaks of the connection and restarts of the service.

    Args:
        link: to the service.
        job: as it was last seen.
        on_progress: told of what happens.
    """

    def __init__(self, link: Link, job: JobStatus, on_progress: OnProgress | None) -> None:
        self._link = link
        self._job = job
        self._on_progress = on_progress
        self._streams = True
        self._last_event = ""
        self._silent = 0
        self._started: datetime | None = None

    def until_done(self, pause: float = 0.0) -> Conversation[JobStatus]:
        """The job when it is done.

        Args:
            pause: seconds after which to ask for the first time, where there are no events.

        Raises:
            RequestRejectedError: the job is no longer known.
            ServiceUnavailableError: the service stayed away for too long.
        """
        trouble = Trouble(self._link.retry, waiting=True)
        while not self._job.done:
            # A stream that fails says nothing of the job: only who cannot even be asked is away.
            broke = yield from self._listen()
            try:
                if not self._streams:
                    yield Pause(pause)
                pause = yield from self._look()
            except ServiceUnavailableError as error:
                yield Pause(trouble.pause(error))
                continue
            trouble.over()
            self._silent += broke
            if self._silent == _MOST_SILENT:
                self._streams = False
            if self._streams and not self._job.done:
                # The service ended the stream before the job was done: it is going down.
                yield Pause(pause)
        return self._job

    def _look(self) -> Conversation[float]:
        """Ask for the job; seconds after which to ask again."""
        answer = yield from self._link.once(get(f"/v1/jobs/{self._job.id}"))
        self._job = read_job(document_of(answer))
        if not self._streams:
            yield from self._tell(self._job.progress)
        asked = retry_after(answer)
        return _PAUSE if asked is None else asked

    def _listen(self) -> Conversation[bool]:
        """Hear what happens to the job until the stream ends; whether it broke instead."""
        if not self._streams:
            return False
        given = {"Last-Event-ID": self._last_event} if self._last_event else {}
        try:
            stream = yield Open(f"/v1/jobs/{self._job.id}/events", given)
            if isinstance(stream, Answer):
                self._streams = stream.status not in _NO_STREAMS
                if self._streams:
                    self._link.accepted(stream)
                return False
            while (event := (yield Next(stream))) is not None:
                self._last_event = event.id or self._last_event
                self._silent = 0
                yield from self._hear(event)
        except (httpx2.SSEError, httpx2.ReadTimeout):
            # What answers is no stream of events, or something before it keeps them back.
            self._streams = False
        except (httpx2.TransportError, ServiceUnavailableError):
            return True
        return False

    def _hear(self, event: httpx2.ServerSentEvent) -> Conversation[None]:
        """Tell the caller what an event says; what this client does not know is no news."""
        try:
            document: Any = event.json()
            data, moment = document["data"], datetime.fromisoformat(document["created_at"])
            if data.get("state") == "running" or self._started is None:
                self._started = moment
            elapsed = max(0.0, (moment - self._started).total_seconds())
            progress = read_progress({"phase": data.get("state", ""), **data}, elapsed)
        except (ValueError, KeyError, TypeError, AttributeError):
            return
        yield from self._tell(progress)

    def _tell(self, progress: JobProgress) -> Conversation[None]:
        if self._on_progress is not None:
            yield Tell(self._on_progress, progress)


def finished(
    link: Link, answer: Answer, on_progress: OnProgress | None = None
) -> Conversation[JobStatus | None]:
    """The job that an answer names, when it has succeeded; None where the answer is no job.

    Raises:
        RequestRejectedError: the job failed, was cancelled, or was forgotten.
        ServiceUnavailableError: the service stayed away for too long.
    """
    if answer.status != httpx2.codes.ACCEPTED:
        return None
    job = read_job(document_of(answer))
    job = yield from Follower(link, job, on_progress).until_done(retry_after(answer) or 0.0)
    job.check()
    return job
