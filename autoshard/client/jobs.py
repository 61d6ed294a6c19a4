"""Jobs of this process: what several may wait for is made once, in a thread."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from math import isfinite
from threading import Event, Lock, Thread
from typing import Any
from uuid import uuid4

from autoshard.client.effects import Conversation, OnProgress, Tell, work
from autoshard.client.results import JobProgress, JobStatus, MeshSearch, rejected
from autoshard.errors import RequestRejectedError
from autoshard.plan import Plan
from autoshard.planner import SearchProgress
from autoshard.solve import Progress

_LOOK = 0.1
"""Seconds between looks at a job."""

_MOST_JOBS = 64
"""Jobs that are remembered; the oldest go first."""

_NOT_FOUND = 404
_REFUSED = 422
_CANCELLED = 409


@dataclass(frozen=True, slots=True)
class Made:
    """What a job has made.

    Attributes:
        plans: each can be had by its id.
        search: which meshes they are for; None where the job was for a plan alone.
        is_final: whether asking again would give the same.
    """

    plans: tuple[Plan, ...]
    search: MeshSearch | None = None
    is_final: bool = True

    @property
    def plan(self) -> Plan | None:
        """The plan, where the job was for one."""
        return self.plans[0] if self.search is None else None


Make = Callable[["LocalJob"], Made | None]
"""Makes what a job is for; None where the job was cancelled before that was done."""


class LocalJob:
    """One job, in a thread.

    Args:
        asked: what names what it makes: the plan's id, or a digest of the search.
        make: makes it.
        plan_id: that its plan has; empty where it is a search.

    Attributes:
        waiters: how many wait for it who were not told its id.
        is_told: whether somebody was.
    """

    def __init__(self, asked: str, make: Make, plan_id: str) -> None:
        self.id = uuid4().hex
        self.asked = asked
        self.plan_id = plan_id
        self.created_at = datetime.now(UTC)
        self.done, self.cancel = Event(), Event()
        self.waiters, self.is_told = 0, False
        self.progress = JobProgress("running", None, None, None, 0.0)
        self.made: Made | None = None
        self.failure: Exception | None = None
        self._make = make
        # A daemon: a program that ends does not wait for a plan that nobody waits for.
        Thread(target=self._run, daemon=True).start()

    @property
    def is_usable(self) -> bool:
        """Whether somebody else who asks the same may have what it makes."""
        if not self.done.is_set():
            return not self.cancel.is_set()
        return self.made is not None and self.made.is_final

    def advance(self, progress: Progress) -> None:
        """The solver reports."""
        incumbent = progress.incumbent if isfinite(progress.incumbent) else None
        bound = progress.bound if isfinite(progress.bound) else None
        gap = None
        if incumbent and bound is not None:
            gap = (incumbent - bound) / incumbent
        self.progress = JobProgress(progress.phase, incumbent, bound, gap, progress.elapsed)

    def advance_search(self, progress: SearchProgress) -> None:
        """A mesh is planned."""
        latest = progress.latest.objective
        elapsed = (datetime.now(UTC) - self.created_at).total_seconds()
        incumbent = latest if isfinite(latest) else None
        self.progress = JobProgress(progress.phase, incumbent, None, None, elapsed)

    def status(self) -> JobStatus:
        """As the service would describe it."""
        if not self.done.is_set():
            return JobStatus(self.id, self.plan_id, "running", done=False, progress=self.progress)
        error = self._error()
        state = "succeeded" if error is None else "failed"
        state = "cancelled" if error and error["status"] == _CANCELLED else state
        made = self.made
        return JobStatus(
            self.id,
            self.plan_id,
            state,
            done=True,
            progress=self.progress,
            plan=None if made is None else made.plan,
            error=error,
            result=made.search.model_dump(mode="json") if made and made.search else None,
        )

    def _error(self) -> dict[str, Any] | None:
        if self.failure is not None:
            title = type(self.failure).__name__
            return {"title": title, "status": _REFUSED, "detail": str(self.failure)}
        if self.made is None:
            detail = "the job was cancelled before it was done"
            return {"title": "The job was cancelled", "status": _CANCELLED, "detail": detail}
        return None

    def _run(self) -> None:
        try:
            self.made = self._make(self)
        except Exception as error:  # noqa: BLE001  raised again to whoever waits
            self.failure = error
        finally:
            self.done.set()


class LocalJobs:
    """The jobs of this process, oldest first."""

    def __init__(self) -> None:
        self._jobs: dict[str, LocalJob] = {}
        # Threads that share a client ask at the same time.
        self._lock = Lock()

    def find(self, job_id: str) -> LocalJob:
        """A job by its id.

        Raises:
            RequestRejectedError: there is none.
        """
        job = self._jobs.get(job_id)
        if job is None:
            raise not_found(f"there is no job {job_id!r} in this process")
        return job

    def known(self) -> list[LocalJob]:
        """All that are remembered."""
        with self._lock:
            return list(self._jobs.values())

    def plans(self) -> Iterator[tuple[Plan, datetime]]:
        """Plans that were made, and when they were asked for, newest first."""
        for job in reversed(self.known()):
            for plan in () if job.made is None else job.made.plans:
                yield plan, job.created_at

    def searched_plan(self, plan_id: str) -> Plan | None:
        """A plan that a search has made, or None."""
        searches = (j.made for j in self.known() if j.made is not None and j.made.search)
        plans = (plan for made in searches for plan in made.plans)
        return next((plan for plan in plans if plan.id == plan_id), None)

    def join(
        self, asked: str, make: Make, *, plan_id: str = "", wait: bool
    ) -> tuple[LocalJob, bool]:
        """The job that makes something, with one more who wants it, and whether it is new.

        Args:
            asked: what names what is wanted.
            make: makes it.
            plan_id: that the plan has, where a plan is wanted.
            wait: whether who wants it waits for it, and is not told the job's id.
        """
        with self._lock:
            usable = (j for j in self._jobs.values() if j.asked == asked and j.is_usable)
            job = next(usable, None)
            is_new = job is None
            if job is None:
                job = LocalJob(asked, make, plan_id)
                self._jobs[job.id] = job
                while len(self._jobs) > _MOST_JOBS:
                    self._jobs.pop(next(iter(self._jobs)))
            job.waiters += wait
            job.is_told |= not wait
            return job, is_new

    def await_joined(self, job: LocalJob, on_progress: OnProgress | None) -> Conversation[None]:
        """Wait for a job; the last who stops waiting cancels it, unless somebody has its id.

        Raises:
            AutoshardError: what is asked cannot be made.
        """
        is_over = False
        try:
            yield from wait_for(job, on_progress)
            is_over = True
        finally:
            with self._lock:
                job.waiters -= 1
                if not (is_over or job.waiters or job.is_told):
                    job.cancel.set()
        if job.failure is not None:
            raise job.failure


def wait_for(job: LocalJob, on_progress: OnProgress | None) -> Conversation[None]:
    """Wait for a job, and tell how far it has come."""
    told: JobProgress | None = None
    while True:
        is_done = yield from work(lambda: job.done.wait(_LOOK))
        if on_progress is not None and job.progress is not told:
            told = job.progress
            yield Tell(on_progress, told)
        if is_done:
            return


def not_found(detail: str) -> RequestRejectedError:
    """The error for what does not exist, as the service would refuse."""
    return rejected({"title": "Not found", "status": _NOT_FOUND, "detail": detail})
