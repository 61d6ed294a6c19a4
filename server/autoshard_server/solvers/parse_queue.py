"""Queue of the requests that wait for a parser process, in which projects take turns."""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from autoshard_server.problems import ProblemType, ServerError, limit_error
from autoshard_server.settings import Settings

RESERVE = 1
"""Parsers in addition to the others, for projects of which nothing is being read."""

_RETRY = {"Retry-After": "2"}


class ParseQueue:
    """Turns of the requests for a parser process; used by one event loop.

    Of the projects that wait, the one that was served longest ago is next. A project of which
    nothing is being read may use one parser more than there are for all, so that it does not wait
    for the graphs of others.

    Args:
        settings: with the limits.
        number: of parsers, in addition to `RESERVE`; `num_parsers` if None.
    """

    def __init__(self, settings: Settings, number: int | None = None) -> None:
        self._settings = settings
        self._number = number or settings.num_parsers
        self._running: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._bytes: Counter[str] = Counter()

    @asynccontextmanager
    async def turn(self, project: str, nbytes: int) -> AsyncIterator[None]:
        """Wait for a parser, and use it within the block.

        Args:
            project: of the caller.
            nbytes: in memory of this request while it waits and is read.

        Raises:
            ServerError: TOO_MANY_PARSES.
        """
        self._check(project, nbytes)
        self._bytes[project] += nbytes
        try:
            await self._wait(project)
            try:
                yield
            finally:
                _take(self._running, project, 1)
                self._grant()
        finally:
            _take(self._bytes, project, nbytes)

    def _check(self, project: str, nbytes: int) -> None:
        settings = self._settings
        own = len(self._waiting.get(project, ())) + self._running[project]
        everyone = sum(map(len, self._waiting.values()))
        if own >= settings.max_project_parses:
            detail = f"{own} graphs or plans of your project wait to be read"
            raise _refused(detail, "max_project_parses", settings.max_project_parses)
        limit = settings.max_project_parse_bytes
        if self._bytes[project] + nbytes > limit:
            detail = f"{self._bytes[project]:,} bytes of your project wait to be read"
            raise _refused(detail, "max_project_parse_bytes", limit)
        if everyone >= settings.max_parses:
            detail = f"{everyone} graphs or plans wait to be read"
            raise _refused(detail, "max_parses", settings.max_parses)

    async def _wait(self, project: str) -> None:
        """Wait until a parser is free for the project; then it is counted as running."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(project, deque()).append(waiter)
        self._grant()
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                # It had just got its turn.
                _take(self._running, project, 1)
            else:
                self._remove(project, waiter)
            self._grant()
            raise

    def _remove(self, project: str, waiter: asyncio.Future[None]) -> None:
        line = self._waiting[project]
        line.remove(waiter)
        if not line:
            del self._waiting[project]

    def _grant(self) -> None:
        """Give free parsers to those who wait."""
        while (project := self._next()) is not None:
            line = self._waiting[project]
            waiter = line.popleft()
            if line:
                self._waiting.move_to_end(project)
            else:
                del self._waiting[project]
            self._running[project] += 1
            waiter.set_result(None)

    def _next(self) -> str | None:
        free = self._number - self._running.total()
        if free > 0:
            return next(iter(self._waiting), None)
        if free <= -RESERVE:
            return None
        return next((name for name in self._waiting if not self._running[name]), None)


def _take(counts: Counter[str], project: str, number: int) -> None:
    """Lower a project's count, and forget the project at zero: there may be many over time."""
    counts[project] -= number
    if not counts[project]:
        del counts[project]


def _refused(detail: str, setting: str, limit: int) -> ServerError:
    kind = ProblemType.TOO_MANY_PARSES
    return limit_error(kind, f"{detail}; retry later", setting, limit, headers=_RETRY)
