"""The service behind the routes: it answers from the cache, or makes a job of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import TypeVar

import anyio
import anyio.to_thread
import structlog

from autoshard.errors import MeshError
from autoshard.graph import ArchiveLimits, Graph, load_graph
from autoshard.mesh import Topology, list_topologies, topology_from_json
from autoshard.ops import with_rules
from autoshard.plan import PLAN_VERSION
from autoshard.planner import plan_id
from autoshard_server.answering.hot import Hot
from autoshard_server.answering.questions import Question, Task, check_graph_size, validation_id
from autoshard_server.jobs.job import Job
from autoshard_server.jobs.kinds import JobKind, known_kind
from autoshard_server.jobs.waiting import Waiting
from autoshard_server.problems import (
    GRAPH_UNKNOWN,
    NOT_FOUND,
    OTHER_RELEASE,
    UNAVAILABLE,
    ServerError,
)
from autoshard_server.settings import Settings
from autoshard_server.solvers.executor import Executor
from autoshard_server.solvers.workers import Workers
from autoshard_server.stores import open_stores
from autoshard_server.telemetry.tracing import carried_context

Made = TypeVar("Made")

_QUESTIONS = "questions"
"""Namespace of plan ids in the cache, by the digest of what arrived."""

_MAX_PARSERS = 2
"""Graphs read at once: reading holds the interpreter, and the other routes must answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a job.

    Attributes:
        kind: what it is.
        result_id: its id.
        body: the document.
        kept: whether this document is in the cache, under its id.
        cached: whether it was there before anybody asked this time.
    """

    kind: JobKind
    result_id: str
    body: bytes
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
        self.hot = Hot(settings.hot_bytes)
        self._workers = Workers(self.stores, executor, settings)
        self._waiting = Waiting(self.find, lambda: self.draining)
        self._parsers = anyio.CapacityLimiter(_MAX_PARSERS)

    def start(self) -> None:
        """Start the workers."""
        self._workers.start()

    def drain(self) -> None:
        """Claim no more, stop waiting for jobs, and report not ready; time to end runs from now."""
        self.draining = True
        self._workers.drain()

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
        known = await self._recall(question)
        if known is None:
            raise ServerError(
                NOT_FOUND, "this was not asked before; send the graph with POST /v1/plans"
            )
        return known

    async def ask(
        self, question: Question, graph: bytes | None, *, caller: str | None = None
    ) -> Answer | Job:
        """The plan from the cache, or the job that makes it.

        Args:
            question: what is asked.
            graph: the uploaded bytes; those that are stored if None.
            caller: who asks.

        Raises:
            GraphError: the graph cannot be read, or not be understood.
            ServerError: the graph is not stored or too large, or the queue is full.
        """
        known, graph = await self._identify(question, graph)
        return await self._get_or_make(
            kind=JobKind.PLAN,
            result_id=known,
            make=partial(question.plan, known),
            question=question,
            graph=graph,
            caller=caller,
        )

    async def validate(
        self, question: Question, graph: bytes | None, *, caller: str | None = None
    ) -> Answer | Job:
        """How large the problem of a plan is, from the cache, or the job that finds out.

        Raises:
            GraphError: the graph cannot be read, or not be understood.
            ServerError: the graph is not stored or too large, or the queue is full.
        """
        known, graph = await self._identify(question, graph)
        return await self._get_or_make(
            kind=JobKind.VALIDATION,
            result_id=validation_id(known),
            make=partial(question.validation, known),
            question=question,
            graph=graph,
            caller=caller,
        )

    async def run(self, task: Task, *, caller: str | None = None) -> Answer | Job:
        """The result of a task from the cache, or the job that makes it.

        Raises:
            ServerError: the queue is full.
        """
        body = await self.find_result(task.kind, task.result_id)
        if body is not None:
            return Answer(task.kind, task.result_id, body, kept=True, cached=True)
        return await anyio.to_thread.run_sync(self._submit, task, caller, _context())

    async def find_result(self, kind: JobKind, result_id: str) -> bytes | None:
        """A document that is kept, or None."""
        return await self._read_kept(kind.namespace, result_id)

    async def named_topology(self, name: str | None) -> Topology | None:
        """The stored topology of a name, as it is now; None where a preset or none is named.

        Raises:
            MeshError: there is neither.
        """
        if name is None or name in list_topologies():
            return None
        found = await anyio.to_thread.run_sync(self.stores.topologies.get, name)
        if found is None:
            raise MeshError(
                f"topology {name!r} is unknown; choose one of {', '.join(list_topologies())}, or "
                "store it with PUT /v1/topologies/{name}"
            )
        return topology_from_json(found.document)

    async def stored_graph(self, sha256: str) -> bytes:
        """The bytes of a graph that was uploaded.

        Raises:
            ServerError: GRAPH_UNKNOWN.
        """
        graph = await anyio.to_thread.run_sync(self.stores.graphs.get, sha256)
        if graph is None:
            raise ServerError(
                GRAPH_UNKNOWN,
                f"there is no graph {sha256}; send it with PUT /v1/graphs/{sha256}, then ask again",
            )
        return graph

    async def read_graph(self, graph: bytes) -> Graph:
        """The program of an upload, read where it holds up nobody.

        Raises:
            GraphError: it cannot be read, or not be understood.
            ServerError: it is too large.
        """
        return await self.aside(partial(self._load, graph))

    async def aside(self, work: Callable[[], Made]) -> Made:
        """The result of work that takes a while, done where it holds up nobody."""
        return await anyio.to_thread.run_sync(work, limiter=self._parsers)

    async def wait(self, job: Job, seconds: float) -> Job:
        """The job when it is done, or as it is after so many seconds, or on shutdown."""
        return await self._waiting.wait(job, seconds)

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
        """The result of a job that succeeded.

        Raises:
            ServerError: OTHER_RELEASE, where only a newer release knows what it is; NOT_FOUND,
                where it has just been forgotten.
        """
        kind = known_kind(job.kind)
        if kind is None:
            raise ServerError(
                OTHER_RELEASE,
                f"the job {job.id!r} has made a {job.kind!r}, which this release, "
                f"{version('autoshard')}, does not know; ask a server of the newer one",
            )
        kept = await self.find_result(kind, job.plan_id)
        made = await anyio.to_thread.run_sync(self.jobs.result, job.id)
        if made is None:
            raise ServerError(NOT_FOUND, f"the job {job.id!r} has just been forgotten: ask again")
        # A later job may have made more of the same request than this one had time for.
        return Answer(kind, job.plan_id, made, kept=kept == made, cached=False)

    async def check(self) -> None:
        """Whether requests can be served.

        Raises:
            ServerError: UNAVAILABLE, with the reason.
        """
        if self.draining:
            raise _unavailable("the service is shutting down")
        if not self._workers.alive:
            raise _unavailable("a worker has died, or cannot start solvers; the log says why")
        try:
            current = await anyio.to_thread.run_sync(self.stores.is_current)
        except Exception as error:
            raise _unavailable("the store does not answer; see the service's log") from error
        if not current:
            raise _unavailable("another release has migrated the store; restart with that one")

    async def _identify(self, question: Question, graph: bytes | None) -> tuple[str, bytes | None]:
        """The plan's id, and the graph if it had to be looked at."""
        known = await self._recall(question)
        if known is None:
            if graph is None:
                graph = await self.stored_graph(question.graph_sha256)
            program = await self.read_graph(graph)
            known = await self.aside(partial(self._name, question, program))
        return known, graph

    async def _get_or_make(
        self,
        *,
        kind: JobKind,
        result_id: str,
        make: Callable[[bytes], Task],
        question: Question,
        graph: bytes | None,
        caller: str | None,
    ) -> Answer | Job:
        body = await self.find_result(kind, result_id)
        if body is not None:
            return Answer(kind, result_id, body, kept=True, cached=True)
        if graph is None:
            graph = await self.stored_graph(question.graph_sha256)
        return await anyio.to_thread.run_sync(self._submit, make(graph), caller, _context())

    async def _recall(self, question: Question) -> str | None:
        known = await self._read_kept(_QUESTIONS, question.digest)
        return None if known is None else known.decode()

    async def _read_kept(self, namespace: str, key: str) -> bytes | None:
        """An entry of the cache; at once where it was read lately."""
        body = self.hot.get(namespace, key)
        if body is None:
            body = await anyio.to_thread.run_sync(self.cache.get, namespace, key)
            if body is not None:
                self.hot.keep(namespace, key, body)
        return body

    def _load(self, graph: bytes) -> Graph:
        program = load_graph(graph, limits=ArchiveLimits(**self.settings.archive_limits))
        edges = sum(len(node.inputs) for node in program.nodes)
        check_graph_size(len(program.nodes), edges, self.settings)
        return program

    def _name(self, question: Question, program: Graph) -> str:
        known = plan_id(with_rules(program, question.rules), question.mesh, question.options)
        self.cache.put(_QUESTIONS, question.digest, known.encode())
        return known

    def _submit(self, task: Task, caller: str | None, context: Mapping[str, str]) -> Job:
        job = self.jobs.submit(
            task.result_id,
            task.work,
            task.payload,
            max_queued=self.settings.max_queued_jobs,
            kind=task.kind,
            caller=caller,
            max_active=self.settings.max_caller_jobs if caller is not None else None,
            context=context,
        )
        self._workers.wake()
        return job


def _context() -> dict[str, str]:
    """What the logs and traces of a job should carry of the request that asked for it."""
    bound = structlog.contextvars.get_contextvars()
    named = {"request_id": str(bound["request_id"])} if "request_id" in bound else {}
    return {**named, **carried_context()}


def _unavailable(detail: str) -> ServerError:
    return ServerError(UNAVAILABLE, detail, headers={"Retry-After": "5"})


def versions() -> dict[str, str]:
    """What runs here: the versions that decide what a plan looks like, by name."""
    installed = {name: version(name) for name in ("autoshard", "highspy", "numpy")}
    return {**installed, "plan": str(PLAN_VERSION), "api": "v1"}
