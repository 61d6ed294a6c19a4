"""The service behind the routes: it returns results from the cache, or submits a job."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from threading import Event
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.to_thread
import structlog
from pydantic import ValidationError

from autoshard.errors import MeshError
from autoshard.mesh import (
    Topology,
    get_topology,
    list_topologies,
    topology_from_json,
    topology_to_json,
)
from autoshard.plan import PLAN_VERSION
from autoshard_server.callers import Caller
from autoshard_server.configs import ConfigExport
from autoshard_server.digests import transformers_version
from autoshard_server.disconnection import unless_gone
from autoshard_server.job_watcher import JobWatcher, OpenRequests
from autoshard_server.lru_cache import LruCache
from autoshard_server.phases import WorkPhase, phase
from autoshard_server.problems import ProblemType, ServerError
from autoshard_server.projects import stored_namespace
from autoshard_server.rate_limits import Quota, rate_limit_headers
from autoshard_server.requests import (
    GraphDescription,
    ModelRequestBody,
    PlanQuery,
    SearchRequest,
    Task,
)
from autoshard_server.settings import Settings
from autoshard_server.solvers.executor import Executor
from autoshard_server.solvers.parse_queue import RESERVE, ParseQueue
from autoshard_server.solvers.parsers import Parsers
from autoshard_server.solvers.workers import Workers
from autoshard_server.store.audit import AuditAction
from autoshard_server.store.database import Stores, check_schema, check_writable
from autoshard_server.store.jobs import Job, JobKind, known_kind
from autoshard_server.telemetry import trace_context
from autoshard_solver_cache import EntryInfo, StoreUnavailableError

if TYPE_CHECKING:
    from autoshard_server.solvers.parsing import ParserTask

_log = structlog.get_logger(__name__)

T = TypeVar("T")

_QUERIES = "questions"
"""Namespace of plan ids in the cache, by the digest of the query."""

_DESCRIPTIONS = "descriptions"
"""Namespace of descriptions of graphs in the cache."""

_CONFIGS = "configs"
"""Namespace of digests of graphs in the cache, by the digest of the config and its batch."""

_NO_CONFIGS = (
    "this service has no transformers, which makes the models of configs: send a graph, which "
    "`autoshard plan CONFIG` exports; or install the service with "
    "pip install 'autoshard[configs]', its image with --build-arg CONFIGS=1"
)

_READY_SECONDS = 3.0
"""Time in which the database must be read and written for the service to be ready."""

_MAX_CHECKS = 2
"""Requests checked in threads at once: checking blocks the interpreter lock, and other routes must
respond."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a job.

    Attributes:
        kind: of the result.
        id: of the result.
        body: the document.
        is_cached: true if this document is in the cache, under its id.
        is_hit: true if it was in the cache before this request.
    """

    kind: JobKind
    id: str
    body: bytes
    is_cached: bool
    is_hit: bool


class Service:
    """The stores, caches and workers that the routes use.

    Args:
        settings: of the service.
        executor: runs solves.

    Raises:
        StoreUnavailableError: the database cannot be opened or written.
    """

    def __init__(self, settings: Settings, executor: Executor) -> None:
        self.settings = settings
        self.draining = False
        self.stores = Stores(settings)
        self.cache = self.stores.cache
        self.jobs = self.stores.jobs
        self._lru = LruCache(settings.memory_cache_bytes)
        self._workers = Workers(self.stores, executor, settings)
        self.watcher = JobWatcher(self.jobs, lambda: self.draining)
        streams, waits = ProblemType.TOO_MANY_STREAMS, ProblemType.TOO_MANY_WAITS
        self.streams = OpenRequests(settings, "max_caller_streams", None, streams)
        self._waits = OpenRequests(settings, "max_caller_waits", "max_waits", waits)
        self._parsers = Parsers(settings)
        self._parse_queue = ParseQueue(settings)
        self._parser_threads = anyio.CapacityLimiter(settings.num_parsers + RESERVE)
        self._exporters = Parsers(settings, "export")
        self._export_queue = ParseQueue(settings, settings.num_exporters)
        self._exporter_threads = anyio.CapacityLimiter(settings.num_exporters + RESERVE)
        self._checks = anyio.CapacityLimiter(_MAX_CHECKS)

    def start(self) -> None:
        """Start the workers and the parser processes."""
        self._parsers.start()
        self._workers.start()

    def drain(self) -> None:
        """Claim no more jobs, stop waiting for them, and report not ready."""
        self.draining = True
        self._workers.drain()

    def close(self) -> None:
        """Stop the workers, and close the database."""
        self.drain()
        self._workers.stop()
        self._parsers.close()
        self._exporters.close()
        self.stores.close()

    async def look_up(self, project: str, query: PlanQuery) -> str:
        """The id of the plan of an earlier request of a project.

        Raises:
            ServerError: NOT_FOUND.
        """
        known = await self._known_id(project, query)
        if known is None:
            raise ServerError(
                ProblemType.NOT_FOUND,
                "there was no such request before; send it with POST /v1/plans",
            )
        return known

    async def plan(
        self,
        query: PlanQuery,
        graph: bytes | None,
        caller: Caller,
        *,
        validate_only: bool = False,
    ) -> Result | Job:
        """The plan, or only the size of its problem, from the cache; or the job that makes it.

        Args:
            query: the request.
            graph: the uploaded bytes; None for a stored graph.
            caller: for whose project it is made.
            validate_only: only measure the problem.

        Raises:
            GraphError: the graph cannot be read.
            ServerError: the graph is not stored or too large, or the queue is full.
        """
        project = caller.project
        known = await self._known_id(project, query)
        if known is None:
            rules = query.fields["rules"]
            described = await self.describe(project, query.graph_sha256, graph, rules=rules)
            known = await self.in_thread(partial(query.plan_id, described.identity))
            await self._write(project, _QUERIES, query.digest, known.encode())
        return await self.run(query.task(known, graph, validate_only=validate_only), caller)

    async def known_graph(self, project: str, model: ModelRequestBody) -> str | None:
        """The digest of a request's graph; None for a config that was not exported before.

        Raises:
            ServerError: CONFIG or LIMIT, for a config that arithmetic refuses.
        """
        if model.config is None:
            return model.graph_sha256
        export = await self.in_thread(partial(model.export, self.settings))
        return await self._exported(project, export)

    async def with_graph(
        self, caller: Caller, model: ModelRequestBody, use: Callable[[str], Awaitable[T]]
    ) -> T:
        """Run a request that needs a stored graph; a config is exported at its first use.

        Args:
            caller: for whose project the graph of a config is stored.
            model: the graph or config of the request.
            use: runs the request, given the digest of the graph.

        Raises:
            ServerError: CONFIG, LIMIT or NOT_INSTALLED, for a config; or of `use`.
        """
        known = await self.known_graph(caller.project, model)
        if known is not None:
            try:
                return await use(known)
            except ServerError as error:
                # The graph of a config may have been evicted.
                if model.config is None or error.kind is not ProblemType.GRAPH_UNKNOWN:
                    raise
        export = await self.in_thread(partial(model.export, self.settings))
        return await use(await self._export(caller, export))

    async def put_graph(self, caller: Caller, body: bytes) -> tuple[EntryInfo, bool]:
        """Store a graph, which was described; return its metadata, and true if it is new."""
        put = partial(self.stores.graphs.put, caller.project, body)
        info, is_new = await anyio.to_thread.run_sync(put)
        if is_new:
            await self.record(caller, AuditAction.CREATE, f"/v1/graphs/{info.key}")
        return info, is_new

    async def describe(
        self,
        project: str,
        sha256: str,
        graph: bytes | None,
        *,
        rules: Sequence[Mapping[str, Any]] = (),
    ) -> GraphDescription:
        """The size and identity of a graph of a project, which is read at its first use.

        Args:
            project: that sends the graph, or has stored it.
            sha256: digest of the graph's bytes.
            graph: the bytes; None for a stored graph.
            rules: for operators of the graph.

        Raises:
            GraphError: the graph cannot be read.
            ServerError: the graph is not stored or too large.
        """
        key = GraphDescription.key(sha256, rules, self.settings)
        known = await self._read(project, _DESCRIPTIONS, key)
        if known is not None:
            # A damaged entry counts as missing.
            with suppress(ValidationError):
                return GraphDescription.model_validate_json(known)
        if graph is None:
            graph = await self.stored_graph(project, sha256)
        found = await self.parse(project, "describe_graph", {"rules": rules}, graph)
        await self._write(project, _DESCRIPTIONS, key, found)
        return GraphDescription.model_validate_json(found)

    async def run(self, task: Task, caller: Caller) -> Result | Job:
        """The result of a task from the cache, or the job that makes it.

        Raises:
            ServerError: the graph is not stored, or the queue is full.
        """
        body = await self.find_result(caller.project, task.kind, task.result_id)
        if body is not None:
            return Result(task.kind, task.result_id, body, is_cached=True, is_hit=True)
        payload = task.payload
        if payload is None:
            payload = await self.stored_graph(caller.project, task.graph_sha256)
        try:
            with phase(WorkPhase.STORE):
                submit = partial(self._submit, task, payload, caller, _context())
                return await anyio.to_thread.run_sync(submit)
        except ServerError as error:
            if error.kind is ProblemType.TOO_MANY_JOBS:
                error.headers |= rate_limit_headers(await self.quotas(caller))
            raise

    async def find_result(self, project: str, kind: JobKind, result_id: str) -> bytes | None:
        """A project's document in the cache, or None."""
        return await self._read(project, kind.namespace, result_id)

    async def stored_topology(self, project: str, name: str | None) -> Topology | None:
        """The topology of a name: one that a project can read, or a preset of which it is a part.

        None for the whole name of a preset, and without a name.

        Raises:
            MeshError: there is no such topology.
        """
        if name is None or name in list_topologies():
            return None
        return await anyio.to_thread.run_sync(self._read_topology, project, name)

    async def stored_graph(self, project: str, sha256: str) -> bytes:
        """The bytes of a graph that was uploaded to a project.

        Raises:
            ServerError: GRAPH_UNKNOWN.
        """
        with phase(WorkPhase.STORE):
            graph = await anyio.to_thread.run_sync(self.stores.graphs.get, project, sha256)
        if graph is None:
            raise graph_unknown(sha256)
        return graph

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run a function that may take some time in one of the few threads for checks."""
        return await anyio.to_thread.run_sync(work, limiter=self._checks)

    async def search_task(self, caller: Caller, submitted: SearchRequest) -> Task:
        """The job of a search.

        Raises:
            MeshError: there is no topology of the name.
            ServerError: a field is out of its range.
        """
        name = submitted.topology if isinstance(submitted.topology, str) else None
        topology = await self.stored_topology(caller.project, name)
        request = {"topology": None if topology is None else topology_to_json(topology)}
        body = submitted.model_dump_json().encode()
        found = await self.parse(caller.project, "check_search", request, body)
        return Task(
            JobKind.SEARCH,
            payload=None,
            graph_sha256=submitted.graph_sha256 or "",
            **json.loads(found),
        )

    async def parse(
        self, project: str, task: "ParserTask", request: Mapping[str, Any], payload: bytes
    ) -> bytes:
        """Do a task in a parser process, when it is the project's turn.

        Args:
            project: of the caller.
            task: to do.
            request: its other arguments, as JSON.
            payload: the graph or plan.

        Raises:
            ServerError: the problem of the task; LIMIT if it takes too much time or memory;
                TOO_MANY_PARSES.
            CallerGoneError: the caller has hung up.
        """

        async def work(gone: Event) -> bytes:
            async with self._parse_queue.turn(project, len(payload)):
                run = partial(self._parsers.run, task, request, payload, gone)
                return await anyio.to_thread.run_sync(run, limiter=self._parser_threads)

        with phase(WorkPhase.PARSE):
            return await unless_gone(work)

    async def _exported(self, project: str, export: ConfigExport) -> str | None:
        known = await self._read(project, _CONFIGS, export.digest)
        return None if known is None else known.decode()

    async def _export(self, caller: Caller, export: ConfigExport) -> str:
        """Export a config, when it is the project's turn, and store its graph; return the digest.

        Raises:
            ServerError: NOT_INSTALLED, or the problem of the config.
            CallerGoneError: the caller has hung up.
        """
        if transformers_version() is None:
            raise ServerError(ProblemType.NOT_INSTALLED, _NO_CONFIGS)
        await self.check_records(caller)
        project = caller.project

        async def work(gone: Event) -> str:
            async with self._export_queue.turn(project, len(export.payload)):
                known = await self._exported(project, export)
                if known is not None and await self._is_stored(project, known):
                    return known  # an equal request had the turn before
                run = partial(
                    self._exporters.run, "export_config", export.fields, export.payload, gone
                )
                graph = await anyio.to_thread.run_sync(run, limiter=self._exporter_threads)
                info, _ = await self.put_graph(caller, graph)
                await self._write(project, _CONFIGS, export.digest, info.key.encode())
                return info.key

        with phase(WorkPhase.PARSE):
            return await unless_gone(work)

    async def _is_stored(self, project: str, sha256: str) -> bool:
        info = await anyio.to_thread.run_sync(self.stores.graphs.info, project, sha256)
        return info is not None

    async def delete_result(self, caller: Caller, kind: JobKind, result_id: str) -> bool:
        """Delete a result of the caller's project; False if there is none.

        Other servers of the same database may still send it for some seconds.
        """
        namespace = stored_namespace(caller.project, kind.namespace)
        is_deleted = await anyio.to_thread.run_sync(self.cache.delete, namespace, result_id)
        self._lru.drop(namespace, result_id)
        if is_deleted:
            await self.record(caller, AuditAction.DELETE, f"/v1/{kind.namespace}/{result_id}")
        return is_deleted

    async def record(self, caller: Caller, action: AuditAction, resource: str) -> None:
        """Add an event of the current request to the audit log."""
        add = partial(self.stores.audit.add, caller, action, resource, _context())
        await anyio.to_thread.run_sync(add)

    async def check_records(self, caller: Caller) -> None:
        """Check that the caller's project may store or delete more.

        Raises:
            ServerError: TOO_MANY_JOBS.
        """
        limit = self.settings.max_project_records
        await anyio.to_thread.run_sync(self.stores.audit.check, caller.project, limit)

    async def wait(self, job: Job, seconds: float, caller: Caller) -> Job:
        """Wait until a job is finished, at most some seconds, or until shutdown.

        Raises:
            ServerError: TOO_MANY_WAITS.
        """
        with self._waits.opened(caller.project, caller.name), phase(WorkPhase.WAIT):
            await unless_gone(lambda _: self.watcher.wait(job, seconds))
        return await self.find(job.project, job.id)

    async def find(self, project: str, job_id: str) -> Job:
        """A job of a project.

        Raises:
            ServerError: NOT_FOUND.
        """
        job = await anyio.to_thread.run_sync(self.jobs.get, job_id)
        if job is None or job.project != project:
            raise ServerError(
                ProblemType.NOT_FOUND,
                f"there is no job {job_id!r}; jobs are deleted "
                f"{self.settings.job_retention:g} seconds after they finish: repeat the request",
            )
        return job

    async def result(self, job: Job) -> Result:
        """The result of a job that succeeded.

        Raises:
            ServerError: OTHER_RELEASE, if only a newer release can read it; NOT_FOUND, if it
                has just been deleted.
        """
        kind = known_kind(job.kind)
        if kind is None:
            raise ServerError(
                ProblemType.OTHER_RELEASE,
                f"the job {job.id!r} has made a {job.kind!r}, which this release, "
                f"{version('autoshard')}, cannot read; use a server of the newer release",
            )
        # A job contains its result only if a later one of the same request may find a better one.
        own = await anyio.to_thread.run_sync(self.jobs.result, job.id)
        if own is not None:
            return Result(kind, job.plan_id, own, is_cached=False, is_hit=False)
        body = await self.find_result(job.project, kind, job.plan_id)
        if body is None:
            raise ServerError(
                ProblemType.NOT_FOUND,
                f"the result of the job {job.id!r} was deleted, or evicted from the cache; "
                "repeat the request",
            )
        return Result(kind, job.plan_id, body, is_cached=True, is_hit=False)

    async def quotas(self, caller: Caller) -> list[Quota]:
        """The quotas of a caller, and how much of them it uses."""
        find = partial(self.jobs.usage, caller.project, caller.name)
        usage = await anyio.to_thread.run_sync(find)
        limit = self.settings.max_caller_job_bytes
        nbytes = Quota("job-bytes", "content-bytes", limit, usage.nbytes)
        if caller.name is None:
            return [nbytes]
        limit = self.settings.max_caller_jobs
        return [Quota("jobs", "concurrent-requests", limit, usage.jobs), nbytes]

    async def check(self) -> None:
        """Check that requests can be served.

        Raises:
            ServerError: UNAVAILABLE, with the reason.
        """
        if self.draining:
            raise _unavailable("the service is shutting down")
        if not self._workers.alive:
            raise _unavailable("a worker has died, or cannot start solvers; see the log")
        try:
            with anyio.fail_after(_READY_SECONDS):
                for check in (check_schema, check_writable):
                    run = partial(check, self.stores.engine)
                    await anyio.to_thread.run_sync(run, abandon_on_cancel=True)
        except TimeoutError as error:
            _log.error("not_ready", reason="the database did not answer in time")
            raise _unavailable("the database does not answer; see the service's log") from error
        except StoreUnavailableError as error:
            _log.error("not_ready", reason=str(error))
            raise _unavailable("the database cannot be used; see the service's log") from error

    async def _known_id(self, project: str, query: PlanQuery) -> str | None:
        known = await self._read(project, _QUERIES, query.digest)
        return None if known is None else known.decode()

    async def _read(self, project: str, kind: str, key: str) -> bytes | None:
        """An entry of a project in the cache, from memory if it was read recently."""
        namespace = stored_namespace(project, kind)
        if self._lru.must_check(namespace, key):
            await anyio.to_thread.run_sync(self._check_exists, namespace, key)
        body = self._lru.get(namespace, key)
        if body is None:
            with phase(WorkPhase.STORE):
                body = await anyio.to_thread.run_sync(self.cache.get, namespace, key)
            if body is not None:
                self._lru.put(namespace, key, body)
        return body

    async def _write(self, project: str, kind: str, key: str, body: bytes) -> None:
        namespace = stored_namespace(project, kind)
        with phase(WorkPhase.STORE):
            await anyio.to_thread.run_sync(self.cache.put, namespace, key, body)

    def _read_topology(self, project: str, name: str) -> Topology:
        document = self.stores.topologies.get(project, name)
        if document is None:
            try:
                return get_topology(name)
            except MeshError as error:
                raise MeshError(f"{error}; or store it with PUT /v1/topologies/{{name}}") from None
        return topology_from_json(document)

    def _check_exists(self, namespace: str, key: str) -> None:
        """Drop an entry from memory if it was deleted from the cache, by any server."""
        try:
            if self.cache.existing(namespace, [key]):
                self._lru.checked(namespace, key)
            else:
                self._lru.drop(namespace, key)
        except StoreUnavailableError:
            # An entry never changes, so it can be used meanwhile.
            return

    def _submit(
        self, task: Task, payload: bytes, caller: Caller, context: Mapping[str, str]
    ) -> Job:
        job = self.jobs.submit(
            task.result_id,
            json.dumps({**task.request, "project": caller.project}),
            payload,
            max_queued=self.settings.max_queued_jobs,
            kind=task.kind,
            caller=caller.name,
            project=caller.project,
            max_project=self.settings.max_project_jobs,
            max_active=self.settings.max_caller_jobs,
            max_bytes=self.settings.max_caller_job_bytes,
            max_records=self.settings.max_project_records,
            context=context,
        )
        self._workers.wake()
        return job


def versions() -> dict[str, str]:
    """Versions that a plan depends on, by name."""
    installed = {name: version(name) for name in ("autoshard", "highspy", "numpy")}
    return {**installed, "plan": str(PLAN_VERSION), "api": "v1"}


def graph_unknown(sha256: str) -> ServerError:
    """The error of a request for a graph that is not stored."""
    return ServerError(
        ProblemType.GRAPH_UNKNOWN,
        f"there is no graph {sha256}; send it with PUT /v1/graphs/{sha256}, then retry",
    )


def _context() -> dict[str, str]:
    """Fields of the current request that are added to the logs and traces of its job."""
    bound = structlog.contextvars.get_contextvars()
    named = {"request_id": str(bound["request_id"])} if "request_id" in bound else {}
    return {**named, **trace_context()}


def _unavailable(detail: str) -> ServerError:
    return ServerError(ProblemType.UNAVAILABLE, detail, headers={"Retry-After": "5"})
