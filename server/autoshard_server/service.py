"""The service behind the routes: it answers from the cache, or makes a job of it."""

import time
from dataclasses import dataclass
from importlib.metadata import version

import anyio
import anyio.to_thread

from autoshard.graph import ArchiveLimits, load_graph
from autoshard.plan import PLAN_VERSION, plan_id
from autoshard.rules import with_rules
from autoshard_server.executor import Executor
from autoshard_server.jobs import Job
from autoshard_server.problems import NOT_FOUND, UNAVAILABLE, ServerError
from autoshard_server.requests import Question
from autoshard_server.settings import Settings
from autoshard_server.store import PLANS
from autoshard_server.stores import open_stores
from autoshard_server.workers import Workers

_QUESTIONS = "questions"
"""Namespace of plan ids in the cache, by the digest of what arrived."""

_MAX_PARSERS = 2
"""Graphs read at once: reading holds the interpreter, and the other routes must answer."""

_SHORTEST_LOOK = 0.02
_LONGEST_LOOK = 0.25
"""Seconds between looks at a job that somebody waits for: first, and in the end."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A plan document.

    Attributes:
        plan_id: its id.
        plan: the document.
        kept: whether it is in the cache, under its id.
        cached: whether it was there before anybody asked this time.
    """

    plan_id: str
    plan: bytes
    kept: bool
    cached: bool


class Service:
    """Everything that the routes need.

    Args:
        settings: of the service.
        executor: where solves run.

    Raises:
        StoreUnavailableError: the database cannot be opened or written.
    """

    def __init__(self, settings: Settings, executor: Executor) -> None:
        self.settings = settings
        self.draining = False
        self.stores = open_stores(settings)
        self.cache = self.stores.cache
        self.jobs = self.stores.jobs
        self._workers = Workers(self.stores, executor, settings)
        self._parsers = anyio.CapacityLimiter(_MAX_PARSERS)

    def start(self) -> None:
        """Start the workers."""
        self._workers.start()

    def drain(self) -> None:
        """Stop waiting for jobs, and report not ready."""
        self.draining = True

    def close(self) -> None:
        """Stop the workers, and close the database."""
        self.drain()
        self._workers.stop()
        self.stores.close()

    async def look_up(self, question: Question) -> str:
        """The id of a plan that was asked for before.

        Raises:
            ServerError: NOT_FOUND, where it was not.
        """
        known = await anyio.to_thread.run_sync(self._recall, question)
        if known is None:
            raise ServerError(
                NOT_FOUND, "this was not asked before; send the graph with POST /v1/plans"
            )
        return known

    async def ask(self, question: Question, graph: bytes) -> Answer | Job:
        """The plan from the cache, or the job that makes it.

        Args:
            question: what is asked.
            graph: the uploaded bytes.

        Raises:
            GraphError: the graph cannot be read, or not be understood.
            ServerError: the queue is full.
        """
        known = await anyio.to_thread.run_sync(self._recall, question)
        if known is None:
            known = await anyio.to_thread.run_sync(
                self._read, question, graph, limiter=self._parsers
            )
        body = await anyio.to_thread.run_sync(self.cache.get, PLANS, known)
        if body is not None:
            return Answer(known, body, kept=True, cached=True)
        return await anyio.to_thread.run_sync(self._submit, known, question, graph)

    async def wait(self, job: Job, seconds: float) -> Job:
        """The job when it is done, or as it is after so many seconds, or on shutdown."""
        deadline = time.monotonic() + seconds
        pause = _SHORTEST_LOOK
        while not job.state.done and not self.draining and time.monotonic() < deadline:
            await anyio.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_LOOK)
            job = await self.find(job.id)
        return job

    async def find(self, job_id: str) -> Job:
        """A job.

        Raises:
            ServerError: there is none.
        """
        job = await anyio.to_thread.run_sync(self.jobs.get, job_id)
        if job is None:
            raise ServerError(
                NOT_FOUND,
                f"there is no job {job_id!r}; jobs are forgotten "
                f"{self.settings.job_retention:g} seconds after they finish: ask again",
            )
        return job

    async def answer(self, job: Job) -> Answer:
        """The plan of a job that succeeded."""
        kept = await anyio.to_thread.run_sync(self.cache.get, PLANS, job.plan_id)
        plan = await anyio.to_thread.run_sync(self.jobs.result, job.id)
        if plan is None:
            raise ServerError(NOT_FOUND, f"the job {job.id!r} has just been forgotten: ask again")
        return Answer(job.plan_id, plan, kept=kept is not None, cached=False)

    async def check(self) -> None:
        """Whether requests can be served.

        Raises:
            ServerError: UNAVAILABLE, with the reason.
        """
        if self.draining:
            raise _unavailable("the service is shutting down")
        if not self._workers.alive:
            raise _unavailable("a worker has died; restart the service")
        try:
            await anyio.to_thread.run_sync(self.jobs.ping)
        except Exception as error:
            raise _unavailable("the store does not answer; see the service's log") from error

    def _recall(self, question: Question) -> str | None:
        known = self.cache.get(_QUESTIONS, question.digest)
        return None if known is None else known.decode()

    def _read(self, question: Question, graph: bytes) -> str:
        limits = ArchiveLimits(**self.settings.archive_limits)
        program = with_rules(load_graph(graph, limits=limits), question.rules)
        known = plan_id(program, question.mesh, question.options)
        self.cache.put(_QUESTIONS, question.digest, known.encode())
        return known

    def _submit(self, known: str, question: Question, graph: bytes) -> Job:
        work = question.work(known)
        room = self.settings.max_queued_jobs
        job = self.jobs.submit(known, work, graph, max_queued=room)
        self._workers.wake()
        return job


def _unavailable(detail: str) -> ServerError:
    return ServerError(UNAVAILABLE, detail, headers={"Retry-After": "5"})


def versions() -> dict[str, str]:
    """What runs here: the versions that decide what a plan looks like, by name."""
    installed = {name: version(name) for name in ("autoshard", "highspy", "numpy")}
    return {**installed, "plan": str(PLAN_VERSION), "api": "v1"}
