"""Requests run in this process, by jobs in threads."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import islice
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from autoshard import planner, report
from autoshard.base.outcome import SolveStatus
from autoshard.client import core
from autoshard.client.offline import Offline, OfflinePlans, require_plan
from autoshard.client.requests import CoverageRequest, PlanRequest, SearchRequest
from autoshard.client.results import (
    JobProgress,
    JobStatus,
    MeshSearch,
    OnProgress,
    PlanEntry,
    PlanResult,
    SearchResult,
    Validation,
    rejected,
)
from autoshard.client.transport import Transport
from autoshard.errors import MeshError, RequestRejectedError
from autoshard.mesh import Topology, get_topology, list_topologies, resolve_topology
from autoshard.plan import PLAN_VERSION, Plan

if TYPE_CHECKING:
    from autoshard.solve import CancelToken

_POLL = 0.1
"""Seconds between polls of a job."""

_MAX_JOBS = 64
"""Number of jobs that are remembered; the oldest are forgotten first."""

_NOT_FOUND = 404
_CONFLICT = 409
_INVALID = 422


@dataclass(frozen=True, slots=True)
class _Made:
    """The result of a job.

    Attributes:
        plans: each can be looked up by its id.
        search: the meshes that the plans are for; None for a job that made one plan.
        is_final: true if the same request would give the same result again.
    """

    plans: tuple[Plan, ...]
    search: MeshSearch | None = None
    is_final: bool = True


class LocalJob:
    """One job, in a thread.

    Args:
        key: identifies the request: the plan's id, or a digest of the search.
        make: runs it; returns None if the job was cancelled.
        plan_id: of the plan that it makes; empty for a search.

    Attributes:
        waiters: number of waiting callers that did not receive the job's id.
        is_shared: true once a caller has received the job's id and may poll it later.
        is_stopped: true if the job was asked to end with what it has, which is its result.
    """

    def __init__(self, key: str, make: Callable[["LocalJob"], _Made | None], plan_id: str) -> None:
        self.id = uuid4().hex
        self.key = key
        self.plan_id = plan_id
        self.created_at = datetime.now(UTC)
        self.finished_at: datetime | None = None
        self.done, self.cancel = Event(), Event()
        self.waiters, self.is_shared, self.is_stopped = 0, False, False
        self.progress = JobProgress(phase="running", elapsed=0.0)
        self.made: _Made | None = None
        self.failure: Exception | None = None
        self._make = make
        # A daemon thread: the program may end before a job for which no caller waits.
        Thread(target=self._run, daemon=True).start()

    @property
    def is_usable(self) -> bool:
        """True if an equal request may use the result."""
        if not self.done.is_set():
            return not self.cancel.is_set()
        return self.made is not None and self.made.is_final

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans that the job has made so far."""
        return () if self.made is None else self.made.plans

    def stop(self) -> None:
        """End the job with the best that it has found so far."""
        self.is_stopped = True
        self.cancel.set()

    def report(self, progress: JobProgress) -> None:
        """Store a progress report."""
        self.progress = progress

    def status(self) -> JobStatus:
        """Describe the job as the service does."""
        if not self.done.is_set():
            return self._status("running", done=False)
        made, error, state = self.made, None, "succeeded"
        if self.failure is not None:
            state, title = "failed", type(self.failure).__name__
            error = {"title": title, "status": _INVALID, "detail": str(self.failure)}
        elif made is None:
            state, title = "cancelled", "The job was cancelled"
            detail = "the job was cancelled before it was done"
            error = {"title": title, "status": _CONFLICT, "detail": detail}
        search = None if made is None else made.search
        return self._status(
            state,
            done=True,
            plan=made.plans[0] if made is not None and search is None else None,
            error=error,
            result=None if search is None else search.model_dump(mode="json"),
        )

    def _status(self, state: str, *, done: bool, **more: Any) -> JobStatus:
        return JobStatus(
            self.id,
            self.plan_id,
            state,
            done,
            self.progress,
            created_at=self.created_at,
            started_at=self.created_at,
            finished_at=self.finished_at,
            **more,
        )

    def _run(self) -> None:
        try:
            self.made = self._make(self)
        except Exception as error:  # noqa: BLE001  raised again in the threads that wait
            self.failure = error
        finally:
            self.finished_at = datetime.now(UTC)
            self.done.set()


class LocalJobs:
    """The jobs of this process. Equal requests share a job.

    Args:
        transport: waits and reports progress.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._jobs: dict[str, LocalJob] = {}
        # Threads may share a client.
        self._lock = Lock()

    def find(self, job_id: str) -> LocalJob:
        """Return a job by its id.

        Raises:
            RequestRejectedError: it is unknown.
        """
        job = self._jobs.get(job_id)
        if job is None:
            raise _not_found(f"there is no job {job_id!r} in this process")
        return job

    def known(self) -> list[LocalJob]:
        """Return all jobs that are remembered, oldest first."""
        with self._lock:
            return list(self._jobs.values())

    def plans(self) -> Iterator[tuple[Plan, datetime]]:
        """Return the plans that were made, each with the time of its request, newest first."""
        for job in reversed(self.known()):
            for plan in job.plans:
                yield plan, job.created_at

    def forget(self, job: LocalJob) -> None:
        """Remove a job."""
        with self._lock:
            self._jobs.pop(job.id, None)

    def forget_plan(self, plan_id: str) -> bool:
        """Remove a plan from the results of all jobs; False if none has made it."""
        made_it = [job for job in self.known() if any(p.id == plan_id for p in job.plans)]
        for job in made_it:
            if job.plan_id:
                self.forget(job)
            elif job.made is not None:
                others = tuple(plan for plan in job.plans if plan.id != plan_id)
                job.made = replace(job.made, plans=others)
        return bool(made_it)

    def searched_plan(self, plan_id: str) -> Plan | None:
        """Return a plan that a search has made, or None."""
        searches = (j.made for j in self.known() if j.made is not None and j.made.search)
        plans = (plan for made in searches for plan in made.plans)
        return next((plan for plan in plans if plan.id == plan_id), None)

    def join(
        self,
        key: str,
        make: Callable[[LocalJob], _Made | None],
        *,
        plan_id: str = "",
        wait: bool,
    ) -> tuple[LocalJob, bool]:
        """Join the job of a request, or start it.

        Args:
            key: identifies the request.
            make: runs it.
            plan_id: of the plan that is requested; empty for a search.
            wait: true if the caller waits and does not receive the job's id.

        Returns:
            the job; true if it was done before this request.
        """
        with self._lock:
            usable = (job for job in self._jobs.values() if job.key == key and job.is_usable)
            job = next(usable, None)
            cached = job is not None and job.done.is_set()
            if job is None:
                job = LocalJob(key, make, plan_id)
                self._jobs[job.id] = job
                while len(self._jobs) > _MAX_JOBS:
                    self._jobs.pop(next(iter(self._jobs)))
            job.waiters += wait
            job.is_shared |= not wait
            return job, cached

    async def wait_joined(
        self, job: LocalJob, on_progress: OnProgress | None, stop: "CancelToken | None"
    ) -> None:
        """Wait for a job that was joined. If its last waiter is cancelled, so is an unshared job.

        Raises:
            AutoshardError: the request failed.
        """
        try:
            await self.wait(job, on_progress, stop)
        finally:
            with self._lock:
                job.waiters -= 1
                if not (job.done.is_set() or job.waiters or job.is_shared):
                    job.cancel.set()
        if job.failure is not None:
            raise job.failure

    async def wait(
        self, job: LocalJob, on_progress: OnProgress | None, stop: "CancelToken | None" = None
    ) -> None:
        """Wait until a job is done, and report its progress; stop it once `stop` is set."""
        reported: JobProgress | None = None
        is_done = False
        while not is_done:
            is_done = await self._transport.run(lambda: job.done.wait(_POLL))
            if stop is not None and stop.is_set():
                job.stop()
            if on_progress is not None and job.progress is not reported:
                reported = job.progress
                await self._transport.notify(on_progress, reported)


class Local:
    """Runs requests in this process; has the methods of `Remote`.

    Invalid requests raise the library's own errors here, instead of `RequestRejectedError`.

    Args:
        transport: runs functions that may take long, and reports progress.
        kept: store of plans on this machine; None stores none.
        resources: caches and limits.
    """

    def __init__(
        self, transport: Transport, kept: OfflinePlans | None, resources: core.Resources
    ) -> None:
        self._transport = transport
        self._kept = kept
        self._resources = resources
        self._jobs = LocalJobs(transport)
        self._topologies: dict[str, Topology] = {}

    async def plan(
        self,
        request: PlanRequest,
        on_progress: OnProgress | None,
        *,
        offline: Offline = "never",
        wait: bool = True,
        stop: "CancelToken | None" = None,
    ) -> PlanResult:
        """Make the plan of a request.

        Raises:
            InputError: it cannot be planned.
            ServiceUnavailableError: only a stored plan was requested, and there is none.
        """
        kept = self._kept
        if offline == "only":
            return await self._transport.run(lambda: require_plan(kept, request))
        mesh = request.mesh(self._topologies)
        key = await self._transport.run(
            lambda: planner.plan_id(request.program, mesh, request.options)
        )
        searched = self._jobs.searched_plan(key)
        if searched is not None:
            if kept is not None:
                await self._transport.run(lambda: kept.keep(searched, request))
            return PlanResult(searched, cached=True, source="local")

        def make(job: LocalJob) -> _Made | None:
            plan, is_final = core.plan(
                request.program,
                mesh,
                request.options,
                self._resources,
                on_progress=job.report,
                cancel=job.cancel,
            )
            if plan.certificate.status is SolveStatus.CANCELLED and not job.is_stopped:
                return None
            if kept is not None:
                kept.keep(plan, request)
            return _Made((plan,), is_final=is_final)

        job, cached = self._jobs.join(key, make, plan_id=key, wait=wait)
        if not wait:
            return PlanResult(job.status().plan, cached, job.id, source="local")
        await self._jobs.wait_joined(job, on_progress, stop)
        return PlanResult(job.status().get_plan(), cached, job.id, source="local")

    async def search(
        self,
        request: SearchRequest,
        on_progress: OnProgress | None = None,
        *,
        wait: bool = True,
        stop: "CancelToken | None" = None,
    ) -> SearchResult:
        """Plan on every mesh of a number of devices.

        Raises:
            InputError: the request cannot be planned.
        """
        named = request.topology
        topology = resolve_topology(
            self._topologies.get(named, named) if isinstance(named, str) else named,
            request.num_devices,
            request.nodes,
            request.gpus_per_node,
        )

        def make(job: LocalJob) -> _Made | None:
            plans: list[Plan] = []

            def keep(plan: Plan, is_final: bool) -> bool:  # noqa: FBT001  as `KeepPlan` is called
                if not is_final:
                    return False
                plans.append(plan)
                if self._kept is not None:
                    self._kept.keep(plan)
                return True

            search, is_final = core.search(
                request.program,
                request.num_devices,
                topology=topology,
                max_axes=request.max_axes,
                options=request.options,
                resources=self._resources,
                on_progress=job.report,
                cancel=job.cancel,
                keep=keep,
            )
            is_cancelled = job.cancel.is_set() and not job.is_stopped
            return None if is_cancelled else _Made(tuple(plans), search, is_final)

        job, cached = self._jobs.join(request.digest(topology), make, wait=wait)
        if wait:
            await self._jobs.wait_joined(job, on_progress, stop)
        status = job.status()
        search = status.get_search() if wait or status.result is not None else None
        return SearchResult(search, cached, job.id, source="local")

    async def validate(self, request: PlanRequest) -> Validation:
        """Check a request and measure its problem, without planning it.

        Raises:
            InputError: it cannot be planned.
        """
        mesh = request.mesh(self._topologies)
        validation, _ = await self._transport.run(
            lambda: core.validate(request.program, mesh, request.options, self._resources)
        )
        return validation

    async def coverage(self, request: CoverageRequest) -> "report.Coverage":
        """List the operators that can be sharded.

        Raises:
            InputError: the graph cannot be read, or the mesh is invalid.
        """
        sizes = request.axis_sizes(self._topologies)
        coverage, _ = await self._transport.run(
            lambda: core.coverage(request.program, sizes, self._resources)
        )
        return coverage

    async def get_plan(self, plan_id: str, *, offline: Offline = "fallback") -> Plan:
        """Return a plan that was made in this process, or kept on this machine.

        Raises:
            RequestRejectedError: there is none.
        """
        plan = next((plan for plan, _ in self._jobs.plans() if plan.id == plan_id), None)
        kept = self._kept
        if plan is None and kept is not None and offline != "never":
            plan = await self._transport.run(lambda: kept.get(plan_id))
        if plan is None:
            raise _no_plan(plan_id)
        return plan

    async def get_job(self, job_id: str) -> JobStatus:
        """As `Client.get_job`."""
        return self._jobs.find(job_id).status()

    async def wait_for_job(self, job_id: str, on_progress: OnProgress | None) -> JobStatus:
        """Wait until a job is done.

        Raises:
            RequestRejectedError: it is unknown.
        """
        job = self._jobs.find(job_id)
        job.is_shared = True
        await self._jobs.wait(job, on_progress)
        return job.status()

    async def cancel(self, job_id: str) -> JobStatus:
        """As `Client.cancel`."""
        job = self._jobs.find(job_id)
        job.cancel.set()
        # The solver checks the event often, but not immediately.
        await self._transport.run(job.done.wait)
        return job.status()

    async def delete_plan(self, plan_id: str) -> None:
        """As `Client.delete_plan`."""
        was_kept = False
        if self._kept is not None:
            was_kept = await self._transport.run(partial(self._kept.delete, plan_id))
        if not self._jobs.forget_plan(plan_id) and not was_kept:
            raise _no_plan(plan_id)

    async def delete_job(self, job_id: str) -> None:
        """As `Client.delete_job`."""
        job = self._jobs.find(job_id)
        if not job.done.is_set():
            detail = f"the job {job_id!r} is running; cancel it, then delete it"
            title = "The job is not finished"
            raise rejected({"title": title, "status": _CONFLICT, "detail": detail})
        self._jobs.forget(job)

    async def delete_graph(self, graph_sha256: str) -> None:
        """As `Client.delete_graph`."""
        raise _not_found(f"the graph {graph_sha256} is not stored: there is no service")

    async def list_plans(
        self, *, graph_digest: str | None = None, limit: int = 100
    ) -> tuple[PlanEntry, ...]:
        """As `Client.list_plans`, for the plans that were made in this process."""
        # A plan of a search may also have been requested by itself: the newest request counts.
        newest = {plan.id: (plan, at) for plan, at in reversed(list(self._jobs.plans()))}
        matching = (
            _entry(plan, at)
            for plan, at in reversed(newest.values())
            if graph_digest in {None, plan.graph.digest}
        )
        return tuple(islice(matching, limit))

    async def list_jobs(
        self, *, states: Sequence[str] = (), limit: int = 100
    ) -> tuple[JobStatus, ...]:
        """As `Client.list_jobs`."""
        found = (job.status() for job in reversed(self._jobs.known()))
        matching = (job for job in found if not states or job.state in states)
        return tuple(replace(job, plan=None, result=None) for job in islice(matching, limit))

    async def list_topologies(self) -> tuple[str, ...]:
        """As `Client.list_topologies`."""
        return tuple(sorted({*list_topologies(), *self._topologies}))

    async def get_topology(self, name: str) -> Topology:
        """As `Client.get_topology`."""
        return self._topologies.get(name) or get_topology(name)

    async def put_topology(self, topology: Topology) -> None:
        """As `Client.put_topology`, for the lifetime of this client."""
        name = topology.name
        if name in list_topologies():
            raise MeshError(f"{name!r} is built in and cannot be replaced; choose another name")
        self._topologies[name] = topology

    async def delete_topology(self, name: str) -> None:
        """As `Client.delete_topology`."""
        if self._topologies.pop(name, None) is None:
            raise MeshError(f"no topology {name!r} was stored in this process")

    async def health(self) -> dict[str, str]:
        """As `Client.health`."""
        installed = {name: version(name) for name in ("autoshard", "highspy", "numpy")}
        return {**installed, "plan": str(PLAN_VERSION)}


def _no_plan(plan_id: str) -> RequestRejectedError:
    return _not_found(f"no plan {plan_id} was made in this process or kept on this machine")


def _not_found(detail: str) -> RequestRejectedError:
    """Make the error of a service that does not find a resource."""
    problem: dict[str, Any] = {"title": "Not found", "status": _NOT_FOUND, "detail": detail}
    return rejected(problem)


def _entry(plan: Plan, created_at: datetime) -> PlanEntry:
    return PlanEntry(
        id=plan.id,
        created_at=created_at,
        status=plan.certificate.status,
        objective=plan.certificate.objective,
        gap=plan.certificate.gap,
        peak_memory=None if plan.memory is None else plan.memory.peak,
        mode=plan.options.mode,
        mesh=tuple((axis.name, axis.size) for axis in plan.mesh.axes),
        topology=plan.mesh.topology.name,
        graph_digest=plan.graph.digest,
    )
