"""Requests and answers: what is sent, what an answer means, and trying again."""

import json
import time
from collections.abc import Callable, Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import urlencode

import httpx2

from autoshard.client.effects import Answer, Conversation, Pause, Send
from autoshard.client.results import rejected
from autoshard.client.retries import Retry, Trouble
from autoshard.errors import ServiceError, ServiceUnavailableError

T = TypeVar("T")

_COME_BACK = frozenset({429, 503})
"""Statuses that say to come back later, whoever says it."""

_GATEWAY = frozenset({500, 502, 504})
"""The same where the service itself did not say it: something between us may be down."""

_NO_ANSWER = (httpx2.TransportError, httpx2.InvalidURL, httpx2.DecodingError)


class Link:
    """One service: how it is reached, and how patiently.

    Args:
        url: of the service, for messages.
        retry: when to try again.
    """

    def __init__(self, url: str, retry: Retry) -> None:
        self.url = url
        self.retry = retry

    def send(self, request: Send, *, waiting: bool = False) -> Conversation[Answer]:
        """Send a request, again where that may help.

        Args:
            request: one that can be repeated safely.
            waiting: whether a plan is waited for, so that an outage is sat out.

        Raises:
            RequestRejectedError: the service refused.
            ServiceUnavailableError: it does not answer, or is too busy.
        """
        return (yield from self.patiently(lambda: self.once(request), waiting=waiting))

    def patiently(
        self, attempt: Callable[[], Conversation[T]], *, waiting: bool
    ) -> Conversation[T]:
        """Do something again until it works, or it is time to give up."""
        trouble = Trouble(self.retry, waiting=waiting)
        while True:
            try:
                return (yield from attempt())
            except ServiceUnavailableError as error:
                yield Pause(trouble.pause(error))

    def once(self, request: Send) -> Conversation[Answer]:
        """Send a request once.

        Raises:
            RequestRejectedError: the service refused.
            ServiceUnavailableError: it does not answer, or is too busy.
        """
        try:
            answer: Answer = yield request
        except _NO_ANSWER as error:
            raise self.silence(error) from error
        return self.accepted(answer)

    def accepted(self, answer: Answer) -> Answer:
        """The answer, where it is what was asked for.

        Raises:
            RequestRejectedError: the service refused.
            ServiceUnavailableError: it, or something before it, says to come back later.
        """
        if 200 <= answer.status < 300:  # noqa: PLR2004  the class of statuses that mean success
            return answer
        problem = _problem(answer)
        is_ours = "type" in problem
        if answer.status in _COME_BACK or (answer.status in _GATEWAY and not is_ours):
            raise ServiceUnavailableError(
                f"the planning service at {self.url} asks to come back later: "
                f"{problem.get('detail', problem['title'])}",
                retry_after=retry_after(answer),
            )
        raise rejected(problem, answer.status)

    def silence(self, error: Exception) -> ServiceUnavailableError:
        """The error for a request without an answer."""
        return ServiceUnavailableError(
            f"the planning service at {self.url} does not answer "
            f"({type(error).__name__}: {error}); is it running?"
        )


def get(path: str, /, **query: Any) -> Send:
    """A request that only reads; what is None is left out of its query."""
    given = {name: value for name, value in query.items() if value is not None}
    return Send("GET", f"{path}?{urlencode(given, doseq=True)}" if given else path)


def post(
    path: str,
    document: Any,
    *,
    headers: Mapping[str, str] | None = None,
    patience: float = 0.0,
) -> Send:
    """A request with JSON."""
    sent = {"Content-Type": "application/json", **(headers or {})}
    return Send("POST", path, sent, json.dumps(document).encode(), patience)


def post_form(path: str, files: Any, *, headers: Mapping[str, str], patience: float) -> Send:
    """A request with a form, put together once: a repeated one is the same, byte for byte."""
    form = httpx2.Request("POST", "http://service", files=files)
    sent = {"Content-Type": form.headers["Content-Type"], **headers}
    return Send("POST", path, sent, form.read(), patience)


def member(answer: Answer, name: str) -> str:
    """A member of an answer that is a JSON object, as text.

    Raises:
        ServiceError: it has none.
    """
    try:
        return str(json.loads(answer.body)[name])
    except (ValueError, KeyError, TypeError) as error:
        raise ServiceError(f"the service's answer has no {name!r}: {error!r}") from error


def document_of(answer: Answer) -> Any:
    """The JSON of an answer.

    Raises:
        ServiceError: it is none.
    """
    try:
        return json.loads(answer.body)
    except ValueError as error:
        raise ServiceError(f"the service answered something that is no JSON: {error}") from error


def retry_after(answer: Answer) -> float | None:
    """Seconds of `Retry-After`, which may be a date; None where it is missing or neither."""
    given = answer.headers.get("Retry-After", "").strip()
    if given.isdecimal():
        return float(given)
    try:
        moment = parsedate_to_datetime(given)
    except ValueError:
        return None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return max(0.0, moment.timestamp() - time.time())


def _problem(answer: Answer) -> dict[str, Any]:
    """Problem details of an answer; from its status alone where a proxy has answered."""
    try:
        problem = json.loads(answer.body)
    except ValueError:
        problem = None
    if isinstance(problem, dict) and "title" in problem:
        return problem
    return {"title": answer.reason, "status": answer.status}
