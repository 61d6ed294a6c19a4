"""Carrying out what conversations ask for: one effect after the other, or awaiting them."""

import inspect
import time
from contextlib import AsyncExitStack, ExitStack
from functools import cached_property, partial
from threading import Lock
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import httpx2

from autoshard.client.effects import (
    Answer,
    Conversation,
    Effect,
    Next,
    Open,
    Pause,
    Send,
    Stream,
    Tell,
    Work,
)

T = TypeVar("T")

_QUIET = 60.0
"""Seconds without even a sign of life after which a stream of events counts as dead."""


class Carrier:
    """How requests travel, whoever carries them.

    Args:
        url: of the service.
        timeout: seconds that a request may take.
        headers: of every request.
    """

    def __init__(self, url: str, timeout: float, headers: dict[str, str]) -> None:
        self._timeout = timeout
        self._settings: dict[str, Any] = {"base_url": url, "headers": headers}

    def _request(self, effect: Send) -> dict[str, Any]:
        return {
            "method": effect.method,
            "url": effect.path,
            "headers": dict(effect.headers),
            "content": effect.body or None,
            "timeout": httpx2.Timeout(self._timeout, read=self._timeout + effect.patience),
        }

    def _stream(self, effect: Open) -> dict[str, Any]:
        timeout = httpx2.Timeout(self._timeout, read=max(_QUIET, self._timeout))
        return {"url": effect.path, "headers": dict(effect.headers), "timeout": timeout}


class Blocking(Carrier):
    """Carries effects out in the caller's thread; threads share the connections."""

    def __init__(self, url: str, timeout: float, headers: dict[str, str]) -> None:
        super().__init__(url, timeout, headers)
        self._lock = Lock()
        self._opened: httpx2.Client | None = None

    @property
    def _http(self) -> httpx2.Client:
        # Not before it is needed: reading certificates takes longer than many a request.
        with self._lock:
            if self._opened is None:
                self._opened = httpx2.Client(**self._settings)
            return self._opened

    def close(self) -> None:
        """Close the connections."""
        if self._opened is not None:
            self._opened.close()

    def run(self, conversation: Conversation[T]) -> T:
        """Carry a conversation out; what it returns."""
        with ExitStack() as streams:
            streams.callback(conversation.close)
            advance = partial(next, conversation)
            while True:
                try:
                    effect = advance()
                except StopIteration as end:
                    result: T = end.value
                    return result
                try:
                    advance = partial(conversation.send, self._do(effect, streams))
                except BaseException as error:  # noqa: BLE001  the conversation decides
                    advance = partial(conversation.throw, error)

    def _do(self, effect: Effect, streams: ExitStack) -> Any:
        match effect:
            case Send():
                return _answer(self._http.request(**self._request(effect)))
            case Open():
                return self._open(effect, streams)
            case Next(stream):
                return next(stream.events, None)
            case Pause(seconds):
                return time.sleep(seconds)
            case Work(function):
                return function()
            case Tell(listener, progress):
                return listener(progress)

    def _open(self, effect: Open, streams: ExitStack) -> Answer | Stream:
        source = streams.enter_context(self._http.sse(**self._stream(effect)))
        if not source.response.is_success:
            source.response.read()
            return _answer(source.response)
        return Stream(iter(source))


class Awaiting(Carrier):
    """Carries effects out in a task; what takes a while without I/O runs in threads."""

    @cached_property
    def _http(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(**self._settings)

    async def close(self) -> None:
        """Close the connections."""
        if "_http" in self.__dict__:
            await self._http.aclose()

    async def run(self, conversation: Conversation[T]) -> T:
        """Carry a conversation out; what it returns."""
        async with AsyncExitStack() as streams:
            streams.callback(conversation.close)
            advance = partial(next, conversation)
            while True:
                try:
                    effect = advance()
                except StopIteration as end:
                    result: T = end.value
                    return result
                try:
                    advance = partial(conversation.send, await self._do(effect, streams))
                except BaseException as error:  # noqa: BLE001  the conversation decides
                    advance = partial(conversation.throw, error)

    async def _do(self, effect: Effect, streams: AsyncExitStack) -> Any:
        match effect:
            case Send():
                return _answer(await self._http.request(**self._request(effect)))
            case Open():
                return await self._open(effect, streams)
            case Next(stream):
                return await anext(stream.events, None)
            case Pause(seconds):
                return await anyio.sleep(seconds)
            case Work(function):
                return await anyio.to_thread.run_sync(function, abandon_on_cancel=True)
            case Tell(listener, progress):
                told = listener(progress)
                return await told if inspect.isawaitable(told) else told

    async def _open(self, effect: Open, streams: AsyncExitStack) -> Answer | Stream:
        source = await streams.enter_async_context(self._http.sse(**self._stream(effect)))
        if not source.response.is_success:
            await source.response.aread()
            return _answer(source.response)
        return Stream(aiter(source))


def _answer(response: httpx2.Response) -> Answer:
    return Answer(response.status_code, response.reason_phrase, response.headers, response.content)
