"""HTTP connections to the planning service: requests, retries, event streams, API keys.

The client is written once, as coroutines over a `Transport`. `AsyncTransport` awaits its I/O.
`BlockingTransport` does its I/O before it returns, so that a coroutine which awaits nothing else
never suspends, and `run_blocking` runs it without an event loop.
"""

import inspect
import json
import logging
import os
import random
import re
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from datetime import UTC
from email.utils import parsedate_to_datetime
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from threading import Lock
from typing import Any, Literal, TypeVar
from urllib.parse import urlencode, urlsplit

import anyio
import anyio.to_thread
import httpx2
import platformdirs

from autoshard.base.arguments import Count, Wait, check_methods
from autoshard.errors import (
    OptionError,
    RequestRejectedError,
    ServiceError,
    ServiceUnavailableError,
)
from autoshard.requests.results import JobProgress, OnProgress, rejected

T = TypeVar("T")

KEY_VARIABLE = "AUTOSHARD_API_KEY"
KEY_FILE_VARIABLE = "AUTOSHARD_API_KEY_FILE"

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})

_EVENT_TIMEOUT = 60.0
"""Seconds without an event or a keep-alive comment after which an event stream counts as dead."""

_UNAVAILABLE = frozenset({429, 503})
"""Statuses that ask to try again later, from the service or a proxy."""

_PROXY_ERRORS = frozenset({500, 502, 504})
"""Statuses that mean the same, if they come from a proxy rather than from the service."""

_ID = re.compile("[0-9a-f]{32,}")
"""Ids and digests in paths."""

_NUMBER_OF_ERROR = re.compile(r"\[Errno -?\d+\] ")

_CONNECTION_ERRORS = (httpx2.TransportError, httpx2.InvalidURL, httpx2.DecodingError)

_log = logging.getLogger(__name__)


@check_methods
@dataclass(frozen=True, slots=True)
class Retry:
    """Retry policy for requests that fail, or are answered with "try again later".

    All requests are idempotent: plans are named by what was requested, and a repeated request
    carries the same `Idempotency-Key`.

    Attributes:
        attempts: largest number of times that a request is sent.
        outage: seconds without a response to tolerate while waiting for a result, so that the
            service can be restarted meanwhile.
        first: seconds before the second attempt; each further delay is twice as long, with a
            random factor between 0.5 and 1.
        longest: largest delay in seconds, unless the service asks for more.
    """

    attempts: Count = 4
    outage: Wait = 60.0
    first: Wait = 0.25
    longest: Wait = 8.0


class Failures:
    """Counts consecutive failed attempts and decides when to try again.

    Args:
        retry: limits.
        waiting: true while waiting for a result: `outage` then applies instead of `attempts`.
    """

    def __init__(self, retry: Retry, *, waiting: bool) -> None:
        self.count = 0
        self._retry = retry
        self._waiting = waiting
        self._since = 0.0

    def reset(self) -> None:
        """Reset the count, after a response of the service."""
        self.count = 0

    def delay(self, error: ServiceUnavailableError) -> float:
        """Count a failure and return the seconds until the next attempt.

        Raises:
            ServiceUnavailableError: the failure, if no further attempt is due.
        """
        now, retry = time.monotonic(), self._retry
        self.count += 1
        if self.count == 1:
            self._since = now
        left = retry.outage - (now - self._since) if self._waiting else retry.longest
        requested = error.retry_after or 0.0
        if requested > left or left <= 0 or (not self._waiting and self.count >= retry.attempts):
            raise error
        backoff = min(retry.first * 2.0 ** min(self.count - 1, 30), retry.longest)
        return max(requested, backoff * random.uniform(0.5, 1.0))  # noqa: S311  no secret


@dataclass(frozen=True, slots=True)
class Request:
    """An HTTP request with its body as bytes, so that it can be repeated unchanged.

    Attributes:
        method: HTTP method.
        path: relative to the address of the service, with the query.
        headers: in addition to those of every request.
        body: empty for none.
        extra_timeout: seconds that the service may take in addition to the timeout.
    """

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    extra_timeout: float = 0.0


class Transport(ABC):
    """Connections to one service.

    Args:
        url: of the service.
        timeout: seconds that a request may take.
        retry: policy for failed requests.
        api_key: as in `Client`.

    Raises:
        OptionError: the API key cannot be read.
    """

    def __init__(
        self, url: str, timeout: float, retry: Retry, api_key: str | Literal[False] | None
    ) -> None:
        self.url = url
        self.retry = retry
        self._timeout = timeout
        self._deprecated: set[str] = set()
        self._settings: dict[str, Any] = {"base_url": url, "headers": _headers(url, api_key)}

    async def send(self, request: Request, *, waiting: bool = False) -> httpx2.Response:
        """Send a request, with retries.

        Args:
            request: an idempotent one.
            waiting: true while waiting for a result, so that an outage is tolerated.

        Raises:
            RequestRejectedError: the service refused.
            ServiceUnavailableError: it does not answer, or is too busy.
        """
        failures = Failures(self.retry, waiting=waiting)
        while True:
            try:
                return await self.send_once(request)
            except ServiceUnavailableError as error:
                await self.sleep(failures.delay(error))
            except RequestRejectedError as error:
                is_gone = request.method == "DELETE" and error.status == httpx2.codes.NOT_FOUND
                if failures.count and is_gone:
                    # An earlier attempt has deleted it, and its response was lost.
                    return httpx2.Response(httpx2.codes.NO_CONTENT)
                raise

    async def send_once(self, request: Request) -> httpx2.Response:
        """Send a request without retries.

        Raises:
            RequestRejectedError: the service refused.
            ServiceUnavailableError: it does not answer, or is too busy.
        """
        try:
            response = await self._request(
                method=request.method,
                url=request.path,
                headers=dict(request.headers),
                content=request.body or None,
                timeout=httpx2.Timeout(self._timeout, read=self._timeout + request.extra_timeout),
            )
        except _CONNECTION_ERRORS as error:
            raise ServiceUnavailableError(
                f"the planning service at {self.url} does not answer "
                f"({_reason(error)}); is it running?"
            ) from error
        self._check(response)
        self._warn_of_deprecation(request, response)
        return response

    @abstractmethod
    def events(
        self, path: str, headers: Mapping[str, str]
    ) -> AsyncGenerator[httpx2.ServerSentEvent, None]:
        """Open a stream of server-sent events.

        Raises:
            RequestRejectedError: the service refused.
            ServiceUnavailableError: the service, or a proxy, is too busy.
            httpx2.TransportError: the connection failed.
            httpx2.SSEError: the response is not an event stream.
        """

    @abstractmethod
    async def sleep(self, seconds: float) -> None:
        """Wait."""

    @abstractmethod
    async def run(self, function: Callable[[], T]) -> T:
        """Call a function that may take long: file access, an export, a solve."""

    @abstractmethod
    async def notify(self, listener: OnProgress, progress: JobProgress) -> None:
        """Report progress to the caller."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connections."""

    @abstractmethod
    async def _request(self, **request: Any) -> httpx2.Response:
        """Send a request and read the whole response."""

    def _event_request(self, path: str, headers: Mapping[str, str]) -> dict[str, Any]:
        timeout = httpx2.Timeout(self._timeout, read=max(_EVENT_TIMEOUT, self._timeout))
        return {"url": path, "headers": dict(headers), "timeout": timeout}

    def _warn_of_deprecation(self, request: Request, response: httpx2.Response) -> None:
        """Log, once for each route, that the service has deprecated it (RFC 9745)."""
        if "Deprecation" not in response.headers:
            return
        route = f"{request.method} {_ID.sub('{id}', request.path.partition('?')[0])}"
        if route in self._deprecated:
            return
        self._deprecated.add(route)
        sunset = response.headers.get("Sunset")
        page = response.links.get("deprecation", {}).get("url")
        _log.warning(
            "the planning service has deprecated %s%s%s; upgrade autoshard",
            route,
            f", and will remove it after {sunset}" if sunset else "",
            f" (see {page})" if page else "",
        )

    def _check(self, response: httpx2.Response) -> None:
        """Raise the error that a response stands for, if any.

        Raises:
            RequestRejectedError: the service refused.
            ServiceUnavailableError: the service, or a proxy, asks to try again later.
        """
        if response.is_success:
            return
        problem = _problem(response)
        status, is_proxy = response.status_code, "type" not in problem
        if status in _UNAVAILABLE or (status in _PROXY_ERRORS and is_proxy):
            raise ServiceUnavailableError(
                f"the planning service at {self.url} is not available: "
                f"{problem.get('detail', problem['title'])}",
                retry_after=retry_after(response),
            )
        raise rejected(problem, status)


class BlockingTransport(Transport):
    """Does its I/O in the caller's thread; threads can share it."""

    def __init__(
        self, url: str, timeout: float, retry: Retry, api_key: str | Literal[False] | None
    ) -> None:
        super().__init__(url, timeout, retry, api_key)
        self._lock = Lock()
        self._opened: httpx2.Client | None = None

    @property
    def _http(self) -> httpx2.Client:
        # Opened when it is first needed: loading certificates takes longer than many requests.
        with self._lock:
            if self._opened is None:
                self._opened = httpx2.Client(**self._settings)
            return self._opened

    async def close(self) -> None:
        """As `Transport.close`."""
        if self._opened is not None:
            self._opened.close()

    async def sleep(self, seconds: float) -> None:
        """As `Transport.sleep`."""
        time.sleep(seconds)  # noqa: ASYNC251  there is no event loop

    async def run(self, function: Callable[[], T]) -> T:
        """As `Transport.run`."""
        return function()

    async def notify(self, listener: OnProgress, progress: JobProgress) -> None:
        """As `Transport.notify`."""
        listener(progress)

    async def events(
        self, path: str, headers: Mapping[str, str]
    ) -> AsyncGenerator[httpx2.ServerSentEvent, None]:
        """As `Transport.events`."""
        with self._http.sse(**self._event_request(path, headers)) as source:
            if not source.response.is_success:
                source.response.read()
                self._check(source.response)
            for event in source:
                yield event

    async def _request(self, **request: Any) -> httpx2.Response:
        return self._http.request(**request)


class AsyncTransport(Transport):
    """Awaits its I/O; functions that take a while run in threads."""

    @cached_property
    def _http(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(**self._settings)

    async def close(self) -> None:
        """As `Transport.close`."""
        if "_http" in self.__dict__:
            await self._http.aclose()

    async def sleep(self, seconds: float) -> None:
        """As `Transport.sleep`."""
        await anyio.sleep(seconds)

    async def run(self, function: Callable[[], T]) -> T:
        """As `Transport.run`."""
        return await anyio.to_thread.run_sync(function, abandon_on_cancel=True)

    async def notify(self, listener: OnProgress, progress: JobProgress) -> None:
        """As `Transport.notify`."""
        outcome = listener(progress)
        if inspect.isawaitable(outcome):
            await outcome

    async def events(
        self, path: str, headers: Mapping[str, str]
    ) -> AsyncGenerator[httpx2.ServerSentEvent, None]:
        """As `Transport.events`."""
        async with self._http.sse(**self._event_request(path, headers)) as source:
            if not source.response.is_success:
                await source.response.aread()
                self._check(source.response)
            async for event in source:
                yield event

    async def _request(self, **request: Any) -> httpx2.Response:
        return await self._http.request(**request)


def _reason(error: Exception) -> str:
    """Reason why a request was not answered, in words."""
    return _NUMBER_OF_ERROR.sub("", str(error)) or type(error).__name__


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine whose only I/O is that of a `BlockingTransport`; return its result."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise AssertionError("the coroutine awaits something besides a blocking transport")


def get(path: str, /, **query: Any) -> Request:
    """Make a GET request; query members that are None are left out."""
    given = {name: value for name, value in query.items() if value is not None}
    return Request("GET", f"{path}?{urlencode(given, doseq=True)}" if given else path)


def post(
    path: str,
    document: Any,
    *,
    headers: Mapping[str, str] | None = None,
    extra_timeout: float = 0.0,
) -> Request:
    """Make a POST request with a JSON body."""
    sent = {"Content-Type": "application/json", **(headers or {})}
    return Request("POST", path, sent, json.dumps(document).encode(), extra_timeout)


def read_json(response: httpx2.Response) -> Any:
    """Read the JSON body of a response.

    Raises:
        ServiceError: it is not JSON.
    """
    try:
        return json.loads(response.content)
    except ValueError as error:
        raise ServiceError(f"the service sent a response that is not JSON: {error}") from error


def retry_after(response: httpx2.Response) -> float | None:
    """Read `Retry-After`, in seconds or as a date; None if it is missing or malformed."""
    given = response.headers.get("Retry-After", "").strip()
    if given.isdecimal():
        return float(given)
    try:
        moment = parsedate_to_datetime(given)
    except ValueError:
        return None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return max(0.0, moment.timestamp() - time.time())


def find_api_key(given: str | None) -> str | None:
    """Find the API key: the one given, or from the environment, or from the user's file.

    The environment names a key (AUTOSHARD_API_KEY) or a file with one (AUTOSHARD_API_KEY_FILE,
    as containers mount secrets). The user's file is `api-key` in their configuration folder.

    Raises:
        OptionError: the file cannot be read, others may read it, or the key is malformed.
    """
    key = given or os.environ.get(KEY_VARIABLE)
    if not key:
        file = os.environ.get(KEY_FILE_VARIABLE)
        key = _read_key(Path(file)) if file else _user_key()
    if key is None:
        return None
    key = key.strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise OptionError("the API key is empty, or has characters that are not allowed in a key")
    return key


def _user_key() -> str | None:
    path = platformdirs.user_config_path("autoshard") / "api-key"
    if not path.exists():
        return None
    if os.name == "posix" and path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise OptionError(f"others may read the API key in {path}; run: chmod 600 {path}")
    return _read_key(path)


def _read_key(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"the API key in {path} cannot be read: {error}") from error


def _headers(url: str, api_key: str | Literal[False] | None) -> dict[str, str]:
    headers = {"User-Agent": f"autoshard/{version('autoshard')}"}
    key = None if api_key is False else find_api_key(api_key)
    if key is None:
        return headers
    address = urlsplit(url)
    if address.scheme == "http" and address.hostname not in _LOOPBACK:
        _log.warning("the API key is sent unencrypted to %s; use https", address.hostname)
    return headers | {"Authorization": f"Bearer {key}"}


def _problem(response: httpx2.Response) -> dict[str, Any]:
    """Problem details of a response; made from its status if a proxy sent it."""
    try:
        problem = json.loads(response.content)
    except ValueError:
        problem = None
    if isinstance(problem, dict) and "title" in problem:
        return problem
    return {"title": response.reason_phrase, "status": response.status_code}
