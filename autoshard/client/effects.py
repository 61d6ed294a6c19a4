"""What a conversation with the service needs done, as values: it does no I/O of its own.

A conversation is a generator. It yields effects, gets their results back, and returns what the
caller wants. `Client` carries effects out one after the other, `AsyncClient` awaits them; what is
asked, how answers are read and what happens when they fail to come is written once.
"""

from collections.abc import Awaitable, Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from autoshard.client.results import JobProgress

T = TypeVar("T")

OnProgress = Callable[[JobProgress], Awaitable[None] | None]
"""Called each time that there is news of a job; `AsyncClient` awaits what it returns."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send a request; the result is an `Answer`. Raises httpx2's errors.

    Attributes:
        method: of HTTP.
        path: below the address of the service.
        headers: besides those of every request.
        body: bytes; empty for none.
        patience: seconds that the service may take longer than usual.
    """

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    patience: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What the service answered.

    Attributes:
        status: of HTTP.
        reason: phrase of the status.
        headers: names in any case.
        body: decoded bytes.
    """

    status: int
    reason: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Open:
    """Open a stream of server-sent events; the result is an `Answer` where there is none."""

    path: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream that is open: an iterator, of the kind that its carrier can use."""

    events: Any


@dataclass(frozen=True, slots=True)
class Next:
    """The next event of a stream, an httpx2 `ServerSentEvent`; None where it has ended."""

    stream: Stream


@dataclass(frozen=True, slots=True)
class Pause:
    """Let so many seconds pass."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Work:
    """Call something that takes a while: files, an export, a solve; its result is the result."""

    function: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell the caller how far a job has come."""

    listener: OnProgress
    progress: JobProgress


Effect = Send | Open | Next | Pause | Work | Tell

Conversation = Generator[Effect, Any, T]
"""Yields effects, is sent their results, returns a value."""


def work(function: Callable[[], T]) -> Conversation[T]:
    """Call something that takes a while."""
    result: T = yield Work(function)
    return result
