"""The same conversations without a service: plans are made in this process."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.util import find_spec
from itertools import islice
from math import isfinite
from threading import Event, Lock, Thread
from typing import Any
from uuid import uuid4

from autoshard.client.asked import Asked
from autoshard.client.effects import Conversation, OnProgress, Tell, work
from autoshard.client.offline import FOLDER_VARIABLE, OfflinePlans
from autoshard.client.results import JobProgress, JobStatus, PlanEntry, PlanResult, rejected
from autoshard.client.talk import Offline, Talk
from autoshard.client.versions import versions
from autoshard.errors import RequestRejectedError
from autoshard.graph import Graph, graph_from_json
from autoshard.plan import (
    Explanation,
    Plan,
    PlanDifference,
    compare_plans,
    explain,
    export_plan,
    make_plan,
    plan_id,
)
from autoshard.rules import has_rule
from autoshard.solve import Progress, Status, TableStore
from autoshard_solver_cache import FolderCache, Shelf

_LOOK = 0.1
"""Seconds between looks at a job."""

_MOST_JOBS = 64
"""Jobs that are remembered; the oldest go first."""

_NOT_FOUND = 404
_REFUSED = 422
_CANCELLED = 409


class Local(Talk):
    """Answers in this process, with the solved blocks that the command line keeps too.

    What the service would refuse raises the library's own error.

    Args:
        kept: plans on this machine; None where none are kept.
        folder: of solved blocks; None keeps none.
    """

    def __init__(self, kept: OfflinePlans | None = None, *, blocks: bool = True) -> None:
        super().__init__(kept)
        self._tables: TableStore | None = None
        if blocks:
            folder = os.environ.get(FOLDER_VARIABLE) or None
            self._tables = Shelf(FolderCache(folder), "blocks")
        self._jobs: dict[str, _Job] = {}
        # Threads that share a client ask at the same time.
        self._lock = Lock()

    def answer(
        self,
        asked: Asked,
        on_progress: OnProgress | None = None,
        *,
        offline: Offline = "never",  # noqa: ARG002  here is always somebody who answers
        wait: bool = True,
    ) -> Conversation[PlanResult]:
        """As `Talk.answer`."""
        known = yield from work(lambda: plan_id(asked.program, asked.mesh, asked.options))
        job, is_new = self._join(known, lambda made: self._solve(asked, made), wait=wait)
        cached = not is_new and job.done.is_set()
        if wait:
            yield from self._await_joined(job, on_progress)
            if job.failure is not None:
                raise job.failure
            return PlanResult(job.status().get_plan(), cached, job.id, source="local")
        return PlanResult(job.status().plan, cached, job.id, source="local")

    def get_plan(self, plan_id: str, *, offline: Offline = "fallback") -> Conversation[Plan]:
        """As `Talk.get_plan`."""
        made = (job.plan for job in self._known_jobs() if job.plan_id == plan_id)
        plan = next((plan for plan in made if plan is not None), None)
        kept = self._kept
        if plan is None and kept is not None and offline != "never":
            plan = yield from work(lambda: kept.get(plan_id))
        if plan is None:
            raise _not_found(f"no plan {plan_id} was made in this process, or kept")
        return plan

    def get_job(self, job_id: str) -> Conversation[JobStatus]:
        """As `Talk.get_job`."""
        job = self._find_job(job_id)
        yield from work(lambda: None)
        return job.status()

    def wait_for_job(
        self, job_id: str, *, on_progress: OnProgress | None = None
    ) -> Conversation[Plan]:
        """As `Talk.wait_for_job`."""
        job = self._find_job(job_id)
        job.is_told = True
        yield from self._await(job, on_progress)
        return job.status().get_plan()

    def cancel(self, job_id: str) -> Conversation[JobStatus]:
        """As `Talk.cancel`."""
        job = self._find_job(job_id)
        job.cancel.set()
        # The solver looks for the event often, but not at once.
        yield from work(job.done.wait)
        return job.status()

    def explain(
        self, plan_id: str, name: str, *, value: bool = False, time_limit: float = 60.0
    ) -> Conversation[Explanation]:
        """As `Talk.explain`."""
        plan = yield from self.get_plan(plan_id)
        return (
            yield from work(
                lambda: explain(_program(plan), plan, name, value=value, time_limit=time_limit)
            )
        )

    def compare(self, before: str, after: str) -> Conversation[PlanDifference]:
        """As `Talk.compare`."""
        plans = [(yield from self.get_plan(before)), (yield from self.get_plan(after))]
        return (yield from work(lambda: compare_plans(*plans)))

    def export(self, plan_id: str, target: str) -> Conversation[str]:
        """As `Talk.export`."""
        plan = yield from self.get_plan(plan_id)
        return (yield from work(lambda: export_plan(plan, target)))

    def list_plans(
        self, *, graph_digest: str | None = None, most: int = 100
    ) -> Conversation[tuple[PlanEntry, ...]]:
        """As `Talk.list_plans`; those that were made in this process."""
        made = yield from work(lambda: [j for j in reversed(self._known_jobs()) if j.plan])
        fitting = (
            _entry(job.plan, job.created_at)
            for job in made
            if job.plan is not None and graph_digest in {None, job.plan.graph.digest}
        )
        return tuple(islice(fitting, most))

    def list_jobs(
        self, *, states: Sequence[str] = (), most: int = 100
    ) -> Conversation[tuple[JobStatus, ...]]:
        """As `Talk.list_jobs`."""
        found = yield from work(lambda: [j.status() for j in reversed(self._known_jobs())])
        fitting = (job for job in found if not states or job.state in states)
        return tuple(replace(job, plan=None) for job in islice(fitting, most))

    def health(self) -> Conversation[dict[str, str]]:
        """As `Talk.health`."""
        return (yield from work(versions))

    def _find_job(self, job_id: str) -> "_Job":
        job = self._jobs.get(job_id)
        if job is None:
            raise _not_found(f"there is no job {job_id!r} in this process")
        return job

    def _known_jobs(self) -> "list[_Job]":
        with self._lock:
            return list(self._jobs.values())

    def _join(
        self, known: str, solve: "Callable[[_Job], Plan]", *, wait: bool
    ) -> "tuple[_Job, bool]":
        """The job that makes a plan, with one more who wants it, and whether it is new."""
        with self._lock:
            usable = (j for j in self._jobs.values() if j.plan_id == known and j.is_usable)
            job = next(usable, None)
            is_new = job is None
            if job is None:
                job = _Job(known, solve)
                self._jobs[job.id] = job
                while len(self._jobs) > _MOST_JOBS:
                    self._jobs.pop(next(iter(self._jobs)))
            job.waiters += wait
            job.is_told |= not wait
            return job, is_new

    def _await_joined(self, job: "_Job", on_progress: OnProgress | None) -> Conversation[None]:
        """Wait for a job; the last who stops waiting cancels it, unless somebody has its id."""
        is_over = False
        try:
            yield from self._await(job, on_progress)
            is_over = True
        finally:
            with self._lock:
                job.waiters -= 1
                if not (is_over or job.waiters or job.is_told):
                    job.cancel.set()

    def _await(self, job: "_Job", on_progress: OnProgress | None) -> Conversation[None]:
        told: JobProgress | None = None
        while True:
            is_done = yield from work(lambda: job.done.wait(_LOOK))
            if on_progress is not None and job.progress is not told:
                told = job.progress
                yield Tell(on_progress, told)
            if is_done:
                return

    def _solve(self, asked: Asked, job: "_Job") -> Plan:
        plan = make_plan(
            _with_found_rules(asked.program, self._tables),
            asked.mesh,
            asked.options,
            on_progress=job.advance,
            cancel=job.cancel,
            tables=self._tables,
        )
        # What is found by running operators follows from the request, and does not change its id.
        plan = plan if plan.id == job.plan_id else plan.model_copy(update={"id": job.plan_id})
        if self._kept is not None:
            self._kept.keep(plan, asked)
        return plan


class _Job:
    """One solve in a thread.

    Attributes:
        waiters: how many wait for it who were not told its id.
        is_told: whether somebody was.
    """

    def __init__(self, plan_id: str, solve: "Callable[[_Job], Plan]") -> None:
        self.id = uuid4().hex
        self.plan_id = plan_id
        self.created_at = datetime.now(UTC)
        self.done, self.cancel = Event(), Event()
        self.waiters, self.is_told = 0, False
        self.progress = JobProgress("running", None, None, None, 0.0)
        self.plan: Plan | None = None
        self.failure: Exception | None = None
        self._solve = solve
        # A daemon: a program that ends does not wait for a plan that nobody waits for.
        Thread(target=self._run, daemon=True).start()

    @property
    def is_usable(self) -> bool:
        """Whether somebody else who asks the same may have its plan."""
        if not self.done.is_set():
            return not self.cancel.is_set()
        return self.plan is not None and not _is_unfinished(self.plan)

    def advance(self, progress: Progress) -> None:
        """The solver reports."""
        incumbent = progress.incumbent if isfinite(progress.incumbent) else None
        bound = progress.bound if isfinite(progress.bound) else None
        gap = None
        if incumbent and bound is not None:
            gap = (incumbent - bound) / incumbent
        self.progress = JobProgress(progress.phase, incumbent, bound, gap, progress.elapsed)

    def status(self) -> JobStatus:
        """As the service would describe it."""
        error = self._error() if self.done.is_set() else None
        state = "running"
        if self.done.is_set():
            state = "succeeded" if error is None else "failed"
            state = "cancelled" if error and error["status"] == _CANCELLED else state
        plan = self.plan if error is None else None
        return JobStatus(
            self.id, self.plan_id, state, self.done.is_set(), self.progress, plan, error
        )

    def _error(self) -> dict[str, Any] | None:
        if self.failure is not None:
            title = type(self.failure).__name__
            return {"title": title, "status": _REFUSED, "detail": str(self.failure)}
        if self.plan is not None and self.plan.certificate.status is Status.CANCELLED:
            detail = "the job was cancelled before it was done"
            return {"title": "The job was cancelled", "status": _CANCELLED, "detail": detail}
        return None

    def _run(self) -> None:
        try:
            self.plan = self._solve(self)
        except Exception as error:  # noqa: BLE001  raised again to whoever waits
            self.failure = error
        finally:
            self.done.set()


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


def _with_found_rules(graph: Graph, store: TableStore | None) -> Graph:
    """The program with rules for operators of ATen that have none, where torch is installed."""
    if all(has_rule(node.operator) for node in graph.nodes if node.operator.startswith("aten.")):
        return graph
    if find_spec("torch") is None:
        return graph
    from autoshard.discovery import discover  # noqa: PLC0415  torch is slow to import

    return discover(graph, custom=False, store=store).graph


def _is_unfinished(plan: Plan) -> bool:
    return plan.certificate.status in {Status.TIMED_OUT, Status.CANCELLED}


def _program(plan: Plan) -> Graph:
    return graph_from_json(plan.stages[0].program)


def _not_found(detail: str) -> RequestRejectedError:
    return rejected({"title": "Not found", "status": _NOT_FOUND, "detail": detail})
