"""Workers: threads that claim jobs and watch over their solvers."""

import time
from collections.abc import Mapping
from threading import Event, Semaphore, Thread
from typing import Any
from uuid import uuid4

import structlog

from autoshard_server.executor import Advanced, Executor, Failed, Solved, Solver, Work
from autoshard_server.jobs import Claim, JobStore
from autoshard_server.problems import DEADLINE, problem_document
from autoshard_server.settings import Settings
from autoshard_server.store import PLANS
from autoshard_server.stores import Stores

_TICK = 0.2
"""Seconds between looks at a running job's row, which may say that it was cancelled."""

_IDLE = 1.0
"""Seconds between looks at the queue without being woken."""

_HOUSEKEEPING = 10.0
"""Seconds between looks for jobs whose worker died, and for jobs to forget."""

_log = structlog.get_logger(__name__)


class Workers:
    """Threads that run jobs, each one at a time.

    Args:
        stores: where jobs come from, and plans go.
        executor: where solves run.
        settings: how many, and for how long.
    """

    def __init__(self, stores: Stores, executor: Executor, settings: Settings) -> None:
        self._stores = stores
        self._jobs = stores.jobs
        self._cache = stores.cache
        self._executor = executor
        self._settings = settings
        self._name = uuid4().hex
        self._submitted = Semaphore(0)
        self._stopping = Event()
        self._deadline = float("inf")
        names = [f"{self._name}-{i}" for i in range(settings.num_workers)]
        self._threads = [Thread(target=self._work, args=(n,), name=n, daemon=True) for n in names]
        self._housekeeper = Thread(target=self._keep_house, daemon=True)

    def start(self) -> None:
        """Start claiming."""
        for thread in (*self._threads, self._housekeeper):
            thread.start()

    def wake(self) -> None:
        """Say that a job was submitted."""
        self._submitted.release()

    @property
    def alive(self) -> bool:
        """Whether every worker runs."""
        return all(t.is_alive() for t in (*self._threads, self._housekeeper))

    def stop(self) -> None:
        """Claim no more; after the grace period running jobs go back to the queue."""
        self._deadline = time.monotonic() + self._settings.shutdown_grace
        self._stopping.set()
        for _ in self._threads:
            self._submitted.release()
        for thread in (*self._threads, self._housekeeper):
            thread.join()

    def _work(self, owner: str) -> None:
        solver: Solver | None = None
        while not self._stopping.is_set():
            try:
                solver = solver or self._executor.prepare()
                claim = self._jobs.claim(owner)
                if claim is None:
                    self._submitted.acquire(timeout=_IDLE)
                    continue
                try:
                    self._run(claim, solver)
                finally:
                    solver.stop()
                    solver = None
            except Exception:  # noqa: BLE001  a worker outlives any job
                _log.exception("worker_failed")
                self._stopping.wait(_IDLE)
        if solver is not None:
            solver.stop()

    def _run(self, claim: Claim, solver: Solver) -> None:
        with structlog.contextvars.bound_contextvars(job_id=claim.id, plan_id=claim.plan_id):
            self._watch(claim, solver)

    def _watch(self, claim: Claim, solver: Solver) -> None:
        _log.info("job_started")
        watch = _Watch(self._jobs, claim, self._settings.lease)
        solver.start(Work(claim.request, claim.graph))
        while True:
            message = solver.receive(_TICK)
            if isinstance(message, Solved | Failed):
                self._finish(claim, message)
                _log.info("job_finished", seconds=round(watch.elapsed, 3))
                return
            if time.monotonic() > self._deadline:
                self._jobs.release(claim)
                _log.info("job_released")
                return
            if watch.elapsed > self._settings.max_job_seconds:
                self._jobs.fail(claim, self._too_long())
                _log.warning("job_too_long")
                return
            if not watch.keep(message):
                _log.info("job_withdrawn")
                return

    def _finish(self, claim: Claim, message: Solved | Failed) -> None:
        if isinstance(message, Failed):
            self._jobs.fail(claim, message.problem)
            return
        plan = message.plan
        if message.keep and not self._cache.put(PLANS, claim.plan_id, plan):
            # Somebody else was faster: one id, one document.
            plan = self._cache.get(PLANS, claim.plan_id) or plan
        if message.keep:
            self._stores.plans.add(claim.plan_id, plan)
        self._jobs.succeed(claim, plan)

    def _too_long(self) -> dict[str, object]:
        limit = self._settings.max_job_seconds
        return problem_document(
            DEADLINE,
            f"the job took more than {limit:g} seconds, the limit of this service; "
            "give a smaller time_limit, a smaller mesh or a coarser relative_gap",
        )

    def _keep_house(self) -> None:
        while True:
            try:
                self._jobs.recover()
                self._jobs.purge(self._settings.job_retention)
            except Exception:  # noqa: BLE001  the next round may succeed
                _log.exception("housekeeping_failed")
            if self._stopping.wait(_HOUSEKEEPING):
                return


class _Watch:
    """Keeps the row of a running job up to date, without a write per message."""

    def __init__(self, jobs: JobStore, claim: Claim, lease: float) -> None:
        self._jobs = jobs
        self._claim = claim
        self._lease = lease
        self._started = self._looked = self._renewed = time.monotonic()
        self._news: Mapping[str, Any] | None = None

    @property
    def elapsed(self) -> float:
        """Seconds since the job was claimed."""
        return time.monotonic() - self._started

    def keep(self, message: Advanced | None) -> bool:
        """Take note of progress; False where the job is no longer this worker's."""
        if message is not None:
            self._news = message.progress
        now = time.monotonic()
        if now - self._looked < _TICK:
            return True
        self._looked = now
        if self._news is None and now - self._renewed < self._lease / 4:
            return self._jobs.holds(self._claim)
        self._renewed = now
        news, self._news = self._news, None
        return self._jobs.renew(self._claim, news)
