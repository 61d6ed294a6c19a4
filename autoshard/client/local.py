"""Requests of a client that run in this process, instead of at a service."""

from collections.abc import Callable, Sequence
from importlib.metadata import version
from itertools import islice
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from autoshard.client.transport import Transport
from autoshard.errors import OptionError
from autoshard.mesh import Topology
from autoshard.plan import PLAN_VERSION, Plan
from autoshard.requests.kept_plans import Offline
from autoshard.requests.models import MeshSearchRequest, OperatorCoverageRequest, PlanRequest
from autoshard.requests.results import (
    JobProgress,
    JobStatus,
    OnProgress,
    PlanEntry,
    PlanResult,
    SearchResult,
    Validation,
    rejected,
)
from autoshard.requests.running import ProgressListener
from autoshard.requests.this_process import ThisProcess

if TYPE_CHECKING:
    from autoshard import report
    from autoshard.solve import CancelToken

T = TypeVar("T")

_POLL = 0.1
"""Seconds between looks at a request that runs."""

_NOT_FOUND = 404


class _RequestThread:
    """A request in a thread of its own.

    Args:
        work: runs it; its arguments are a listener for progress and an event that ends it.
    """

    def __init__(self, work: Callable[[ProgressListener, Event], Any]) -> None:
        self.done, self.cancel = Event(), Event()
        self.progress = JobProgress(phase="running", elapsed=0.0)
        self.result: Any = None
        self.failure: BaseException | None = None
        self._work = work
        # A daemon thread: the program may end before a request for which nobody waits.
        Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self.result = self._work(self._report, self.cancel)
        except BaseException as error:  # noqa: BLE001  raised where it is waited for
            self.failure = error
        finally:
            self.done.set()

    def _report(self, progress: JobProgress) -> None:
        self.progress = progress


class Local:
    """Runs requests in this process; has the methods of `Remote`, but no jobs.

    Invalid requests raise the library's own errors here, instead of `RequestRejectedError`.

    Args:
        transport: runs functions that may take long, and reports progress.
        here: runs the requests.
    """

    def __init__(self, transport: Transport, here: ThisProcess) -> None:
        self._transport, self._here = transport, here

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
        _check_waits(wait=wait)
        return await self._finished(
            lambda listen, cancel: self._here.plan(
                request, on_progress=listen, cancel=cancel, offline=offline
            ),
            on_progress,
            stop,
        )

    async def search(
        self,
        request: MeshSearchRequest,
        on_progress: OnProgress | None = None,
        *,
        wait: bool = True,
        stop: "CancelToken | None" = None,
    ) -> SearchResult:
        """Plan on every mesh of a number of devices.

        Raises:
            InputError: the request cannot be planned.
        """
        _check_waits(wait=wait)
        found = await self._finished(
            lambda listen, cancel: self._here.search(request, on_progress=listen, cancel=cancel),
            on_progress,
            stop,
        )
        return SearchResult(found, cached=False, source="local")

    async def _finished(
        self,
        work: Callable[[ProgressListener, Event], T],
        on_progress: OnProgress | None,
        stop: "CancelToken | None",
    ) -> T:
        """The result of a request; who stops waiting for it cancels it."""
        running = _RequestThread(work)
        reported = running.progress
        try:
            while not await self._transport.run(lambda: running.done.wait(_POLL)):
                if stop is not None and stop.is_set():
                    running.cancel.set()
                if on_progress is not None and running.progress is not reported:
                    reported = running.progress
                    await self._transport.notify(on_progress, reported)
        finally:
            running.cancel.set()
        if on_progress is not None and running.progress is not reported:
            await self._transport.notify(on_progress, running.progress)
        if running.failure is not None:
            raise running.failure
        found: T = running.result
        return found

    async def validate(self, request: PlanRequest) -> Validation:
        """Check a request and measure its problem, without planning it.

        Raises:
            InputError: it cannot be planned.
        """
        return await self._transport.run(lambda: self._here.validate(request))

    async def coverage(self, request: OperatorCoverageRequest) -> "report.Coverage":
        """List the operators that can be sharded.

        Raises:
            InputError: the graph cannot be read, or the mesh is invalid.
        """
        return await self._transport.run(lambda: self._here.coverage(request))

    async def get_plan(self, plan_id: str, *, offline: Offline = "fallback") -> Plan:
        """Return a plan that was made in this process, or kept on this machine.

        Raises:
            RequestRejectedError: there is none.
        """
        found = await self._transport.run(lambda: self._here.get_plan(plan_id, offline=offline))
        return found if found is not None else _no_plan(plan_id)

    async def delete_plan(self, plan_id: str) -> None:
        """As `Client.delete_plan`."""
        if not await self._transport.run(lambda: self._here.delete_plan(plan_id)):
            _no_plan(plan_id)

    async def list_plans(
        self, *, graph_digest: str | None = None, limit: int = 100
    ) -> tuple[PlanEntry, ...]:
        """As `Client.list_plans`, for the plans that were made in this process."""
        return tuple(islice(self._here.list_plans(graph_digest), limit))

    async def get_job(self, job_id: str) -> JobStatus:
        """There are jobs at a service only."""
        _no_job(job_id)

    async def wait_for_job(self, job_id: str, _on_progress: OnProgress | None) -> JobStatus:
        """There are jobs at a service only."""
        _no_job(job_id)

    async def cancel(self, job_id: str) -> JobStatus:
        """There are jobs at a service only."""
        _no_job(job_id)

    async def delete_job(self, job_id: str) -> None:
        """There are jobs at a service only."""
        _no_job(job_id)

    async def list_jobs(
        self, *, states: Sequence[str] = (), limit: int = 100
    ) -> tuple[JobStatus, ...]:
        """There are jobs at a service only: none here, of any state."""
        del states, limit
        return ()

    async def delete_graph(self, graph_sha256: str) -> None:
        """As `Client.delete_graph`."""
        _not_found(f"the graph {graph_sha256} is not stored: there is no service")

    async def list_topologies(self) -> tuple[str, ...]:
        """As `Client.list_topologies`."""
        return self._here.list_topologies()

    async def get_topology(self, name: str) -> Topology:
        """As `Client.get_topology`."""
        return self._here.get_topology(name)

    async def put_topology(self, topology: Topology) -> None:
        """As `Client.put_topology`, for the lifetime of this client."""
        self._here.put_topology(topology)

    async def delete_topology(self, name: str) -> None:
        """As `Client.delete_topology`."""
        self._here.delete_topology(name)

    async def health(self) -> dict[str, str]:
        """As `Client.health`."""
        installed = {name: version(name) for name in ("autoshard", "highspy", "numpy")}
        return {**installed, "plan": str(PLAN_VERSION)}


def _check_waits(*, wait: bool) -> None:
    if not wait:
        raise OptionError(
            "wait=False: in this process there are no jobs to poll; wait for the result, or run "
            "the request in a thread or a task"
        )


def _no_plan(plan_id: str) -> NoReturn:
    _not_found(f"no plan {plan_id} was made in this process or kept on this machine")


def _no_job(job_id: str) -> NoReturn:
    _not_found(f"there is no job {job_id!r}: requests in this process have none")


def _not_found(detail: str) -> NoReturn:
    """Raise the error of a service that does not find a resource."""
    raise rejected({"title": "Not found", "status": _NOT_FOUND, "detail": detail})
