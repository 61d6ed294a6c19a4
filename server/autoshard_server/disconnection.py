"""The caller of the current request: work for it ends when it hangs up."""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Event
from typing import TypeVar

import anyio
from starlette.types import Message, Receive

T = TypeVar("T")

_receive: ContextVar[Receive | None] = ContextVar("receive", default=None)


class CallerGoneError(Exception):
    """The caller has closed its connection, so that nobody reads a response."""


@contextmanager
def calling(receive: Receive) -> Iterator[None]:
    """Make a connection that of the current request within the block.

    Args:
        receive: the connection (ASGI).
    """
    token = _receive.set(receive)
    try:
        yield
    finally:
        _receive.reset(token)


async def unless_gone(work: Callable[[Event], Awaitable[T]]) -> T:
    """Do some work, which is cancelled if the caller hangs up.

    The body of the request must have been read: what arrives meanwhile is dropped.

    Args:
        work: gets an event that is set when the caller hangs up, for threads of its own, which
            cannot be cancelled.

    Raises:
        CallerGoneError: the caller has hung up.
    """
    receive, gone = _receive.get(), Event()
    if receive is None:
        return await work(gone)
    found: list[T] = []
    failures: list[Exception] = []
    async with anyio.create_task_group() as group:

        async def watch() -> None:
            message: Message = {"type": ""}
            while message["type"] != "http.disconnect":
                message = await receive()
            gone.set()
            group.cancel_scope.cancel()

        group.start_soon(watch)
        try:
            found.append(await work(gone))
        # Raised below: a group would raise it as one of several.
        except Exception as error:  # noqa: BLE001
            failures.append(error)
        group.cancel_scope.cancel()
    if gone.is_set() or not (found or failures):
        raise CallerGoneError
    if failures:
        raise failures[0]
    return found[0]
