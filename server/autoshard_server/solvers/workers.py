"""Workers: threads that claim jobs and supervise their solvers.

If the database is unavailable for a while, solvers continue, and their results are written when
it is available again: no other worker can claim a job meanwhile.
"""

import time
from collections.abc import Callable, Mapping
from enum import Enum, auto
from functools import partial
from threading import Event, Semaphore, Thread
from typing import Any
from uuid import uuid4

import structlog

from autoshard_server.phases import PhaseTimes, WorkPhase
from autoshard_server.problems import TYPE_PREFIX, ProblemType, limit_error, problem_of
from autoshard_server.projects import stored_namespace
from autoshard_server.settings import Settings
from autoshard_server.solvers.executor import Executor, Solver
from autoshard_server.solvers.messages import Died, Failed, Progressed, Solved, SolverInput
from autoshard_server.store.database import Stores
from autoshard_server.store.idempotency import LIFETIME
from autoshard_server.store.job_store import JobStore
from autoshard_server.store.jobs import Claim, JobClass, JobKind, known_kind
from autoshard_server.store.retention_clock import RetentionClock
from autoshard_server.telemetry import (
    clock_is_wrong,
    count_limit,
    job_failures_total,
    job_seconds,
    job_span,
    job_wait_seconds,
    trace_id,
)
from autoshard_solver_cache import StoreUnavailableError

MAX_LOST = 3
"""Solvers lost in a row, each before it was ready, after which a worker counts as unhealthy."""

_READY_AFTER = 10.0
"""Seconds after which a solver that waits for a job counts as ready."""

_MAX_PREPARE_DELAY = 30.0
"""Longest pause before another solver is prepared, in seconds."""

_POLL = 0.2
"""Seconds between checks of a running job's row, which may have been cancelled."""

_IDLE = 1.0
"""Seconds between checks of the queue without a wake-up."""

_MAX_BACKOFF = 2.0
"""Longest pause between attempts to reach an unavailable database; much less than a lease."""

_PROGRESS_SHARE = 0.02
"""Shortest time between two progress reports, as a share of the time that the job has run."""

_HOUSEKEEPING = 60.0
"""Seconds between deletions of expired rows and entries."""

_OUTCOMES: Mapping[type, str] = {Solved: "succeeded", Failed: "failed", Died: "crashed"}

_log = structlog.get_logger(__name__)


class SolverHealth:
    """Counts the solvers that one worker has lost in a row, not because of their jobs.

    Args:
        clock: monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lost = 0
        self._since = clock()

    @property
    def is_good(self) -> bool:
        """True if the worker can run jobs, as far as is known."""
        return self._lost < MAX_LOST

    @property
    def delay(self) -> float:
        """Seconds to wait before another solver is prepared; 0 after a single loss."""
        return 0.0 if self._lost <= 1 else min(2.0 ** (self._lost - 2), _MAX_PREPARE_DELAY)

    def prepared(self) -> None:
        """Record that a solver was prepared and waits for a job."""
        self._since = self._clock()

    def waited(self) -> None:
        """Record that the solver still waits for a job."""
        if self._clock() - self._since >= _READY_AFTER:
            self.ready()

    def ready(self) -> None:
        """Record that a solver became ready."""
        self._lost = 0

    def lost(self) -> None:
        """Record that a solver could not be prepared, or died before it was ready or started."""
        self._lost += 1


class _WorkerRole(Enum):
    """The jobs that a worker claims."""

    GENERAL = auto()
    """All jobs; after a quick one, it prefers a solve, so that neither class waits for ever."""
    QUICK = auto()
    """Jobs of the class `quick`."""
    RESERVE = auto()
    """Jobs of projects of which no job runs, while all general workers have a job."""


class Workers:
    """Threads that run jobs, each one at a time.

    Args:
        stores: with the queue and the cache of results.
        executor: runs solves.
        settings: number of workers, and limits.
    """

    def __init__(self, stores: Stores, executor: Executor, settings: Settings) -> None:
        self._stores = stores
        self._jobs = stores.jobs
        self._executor = executor
        self._settings = settings
        ages = (settings.job_retention, settings.audit_retention, settings.cache_max_age, LIFETIME)
        self._clock = RetentionClock(stores.engine, min(ages))
        self._submitted = {role: Semaphore(0) for role in _WorkerRole}
        self._stopping = Event()
        self._deadline = float("inf")
        name = uuid4().hex
        roles = {f"{name}-{i}": role for i, role in enumerate(_roles(settings))}
        self._health = {name: SolverHealth() for name in roles}
        self._free = {name for name, role in roles.items() if role is _WorkerRole.GENERAL}
        self._threads = [
            Thread(target=self._work, args=(name, role), name=name, daemon=True)
            for name, role in roles.items()
        ]
        self._threads.append(Thread(target=self._keep_house, daemon=True))

    def start(self) -> None:
        """Start claiming jobs."""
        for thread in self._threads:
            thread.start()

    def wake(self) -> None:
        """Wake an idle worker of each role: a job was submitted."""
        for submitted in self._submitted.values():
            submitted.release()

    @property
    def alive(self) -> bool:
        """True if the workers are stopping, or all of them run and can start solvers."""
        if self._stopping.is_set():
            return True
        return self.are_running and all(health.is_good for health in self._health.values())

    @property
    def are_running(self) -> bool:
        """True if all threads run; a dead one is not restarted."""
        return all(thread.is_alive() for thread in self._threads)

    def drain(self) -> None:
        """Claim no more jobs; after the grace period, running ones are requeued.

        It does not block, because it runs in a signal handler: idle workers notice within a second.
        """
        if not self._stopping.is_set():
            self._deadline = time.monotonic() + self._settings.shutdown_grace
            self._stopping.set()

    def stop(self) -> None:
        """Drain, and wait until all threads have ended."""
        self.drain()
        for _ in self._threads:
            self.wake()
        for thread in self._threads:
            thread.join()

    def _work(self, owner: str, role: _WorkerRole) -> None:
        health = self._health[owner]
        solver: Solver | None = None
        preferred = JobClass.QUICK
        backoff = _Backoff()
        while not self._stopping.is_set():
            try:
                solver = solver or self._prepare(health)
                if solver is None:
                    self._stopping.wait(_IDLE)
                    continue
                # Preparing takes time, in which the workers may have been drained.
                claim = None if self._stopping.is_set() else self._claim(owner, role, preferred)
                backoff.reset()
                if claim is None:
                    self._submitted[role].acquire(timeout=_IDLE)
                    solver = _checked(solver, health)
                    continue
                preferred = _other_class(claim)
                if not self._finish_from_cache(claim):
                    try:
                        self._run(claim, solver, health)
                    finally:
                        solver.stop()
                        solver = None
            except StoreUnavailableError as error:
                self._stopping.wait(backoff.next(error))
            except Exception:  # noqa: BLE001  a worker survives any job
                _log.exception("worker_failed")
                self._stopping.wait(_IDLE)
        if solver is not None:
            solver.stop()

    def _claim(self, owner: str, role: _WorkerRole, preferred: JobClass) -> Claim | None:
        if role is _WorkerRole.QUICK:
            return self._jobs.claim(owner, (JobClass.QUICK,))
        classes = (preferred, *(other for other in JobClass if other is not preferred))
        if role is _WorkerRole.RESERVE:
            return None if self._free else self._jobs.claim(owner, classes, idle_projects_only=True)
        self._free.add(owner)
        claim = self._jobs.claim(owner, classes)
        if claim is not None:
            self._free.discard(owner)
        return claim

    def _prepare(self, health: SolverHealth) -> Solver | None:
        """A solver that waits for a job; None if it cannot be started now."""
        if health.delay:
            self._stopping.wait(health.delay)
        try:
            solver = self._executor.prepare()
        except OSError as error:
            health.lost()
            _log.warning("solver_not_started", reason=str(error))
            return None
        except Exception:
            health.lost()
            raise
        health.prepared()
        return solver

    def _finish_from_cache(self, claim: Claim) -> bool:
        """Finish a job whose result was cached since it was submitted; False if it was not."""
        started = time.monotonic()
        kind = known_kind(claim.kind)
        if kind is None:
            # Its solver fails it: the job belongs to another release.
            return False
        try:
            namespace = stored_namespace(claim.project, kind.namespace)
            document = self._stores.cache.get(namespace, claim.plan_id)
        except StoreUnavailableError as error:
            # The job is claimed, so no other worker would run it: solve it again.
            _log.warning("store_unavailable", reason=str(error))
            return False
        if document is None:
            return False
        self._when_available(partial(self._jobs.succeed, claim, None))
        _log.info("job_cached", job_id=claim.id, plan_id=claim.plan_id)
        _observe(claim, "cached", time.monotonic() - started)
        return True

    def _run(self, claim: Claim, solver: Solver, health: SolverHealth) -> None:
        named = {"job_id": claim.id, "plan_id": claim.plan_id, "project": claim.project}
        with (
            job_span(f"job {claim.kind}", claim.context),
            structlog.contextvars.bound_contextvars(**claim.context, **named, **trace_id()),
        ):
            lease = _Lease(self._jobs, claim, self._settings.lease)
            times = PhaseTimes()
            try:
                outcome = self._supervise(claim, solver, lease, health, times)
            finally:
                times.leave()
            _log.info(
                f"job_{'finished' if outcome in _OUTCOMES.values() else outcome}",
                outcome=outcome,
                seconds=round(lease.elapsed, 3),
                phases=times.rounded,
            )
            _observe(claim, outcome, lease.elapsed)

    def _supervise(
        self,
        claim: Claim,
        solver: Solver,
        lease: "_Lease",
        health: SolverHealth,
        times: PhaseTimes,
    ) -> str:
        """Wait for the end of a job; return its outcome."""
        _log.info("job_started")
        if claim.waited is not None:
            job_wait_seconds.labels(JobClass.of(claim.kind)).observe(claim.waited)
        solver.start(SolverInput(claim.request, claim.graph))
        times.enter(WorkPhase.PARSE)
        while True:
            message = solver.receive(_POLL)
            if isinstance(message, Progressed):
                times.enter(WorkPhase.of_progress(str(message.progress.get("phase"))))
            if message is not None and not isinstance(message, Progressed):
                times.enter(WorkPhase.STORE)
                solver.stop()
                if isinstance(message, Died) and not message.was_ready:
                    health.lost()
                else:
                    health.ready()
                if not isinstance(message, Solved):
                    _count_failure(claim, message.problem)
                self._when_available(partial(self._finish, claim, message))
                return _OUTCOMES[type(message)]
            if time.monotonic() > self._deadline:
                self._jobs.release(claim)
                return "released"
            if lease.elapsed > self._settings.max_job_seconds:
                solver.stop()
                problem = self._deadline_problem()
                _count_failure(claim, problem)
                self._when_available(partial(self._jobs.fail, claim, problem))
                _log.warning("job_too_long")
                return "failed"
            if not lease.update(message):
                return "withdrawn"

    def _finish(self, claim: Claim, message: Solved | Failed | Died) -> None:
        if isinstance(message, Failed):
            self._jobs.fail(claim, message.problem)
            return
        if isinstance(message, Died):
            _log.warning("solver_died", reason=message.problem["detail"])
            self._jobs.retry(claim, message.problem)
            self.wake()
            return
        is_cached = message.cacheable and self._cache(claim, message.document)
        self._jobs.succeed(claim, None if is_cached else message.document)

    def _cache(self, claim: Claim, document: bytes) -> bool:
        """Cache a result; False if it was evicted immediately.

        If another worker was faster, its document stays, and is the result of this job too.
        """
        kind = JobKind(claim.kind)
        cache, namespace = self._stores.cache, stored_namespace(claim.project, kind.namespace)
        cache.put(namespace, claim.plan_id, document)
        if not cache.existing(namespace, [claim.plan_id]):
            return False
        if kind is JobKind.PLAN:
            self._stores.plans.add(claim.project, claim.plan_id, document)
        return True

    def _when_available(self, action: Callable[[], object]) -> None:
        """Retry while the database is unavailable, so that a result is not lost."""
        backoff = _Backoff()
        while True:
            try:
                action()
            except StoreUnavailableError as error:
                if time.monotonic() > self._deadline:
                    raise
                time.sleep(backoff.next(error))
            else:
                return

    def _deadline_problem(self) -> dict[str, object]:
        limit = self._settings.max_job_seconds
        return problem_of(
            limit_error(
                ProblemType.DEADLINE,
                f"the job took more than {limit:g} seconds, the limit of this service; "
                "use a smaller time_limit, a smaller mesh or a larger relative_gap",
                "max_job_seconds",
                limit,
            )
        )

    def _keep_house(self) -> None:
        cleaned_at = float("-inf")
        while True:
            try:
                if self._jobs.recover():
                    self.wake()
                if time.monotonic() - cleaned_at > _HOUSEKEEPING:
                    self._clean()
                    cleaned_at = time.monotonic()
            except StoreUnavailableError as error:
                _log.warning("store_unavailable", reason=str(error))
            except Exception:  # noqa: BLE001  the next round may succeed
                _log.exception("housekeeping_failed")
            if self._stopping.wait(self._settings.lease / 4):
                return

    def _clean(self) -> None:
        is_over = self._stopping.is_set
        self._stores.cache.enforce_budget(is_over=is_over)
        fault = self._clock.fault()
        clock_is_wrong.set(fault is not None)
        if fault is not None:
            _log.error("nothing_expires", reason=fault)
            return
        self._stores.api_keys.write_uses()
        self._jobs.purge(self._settings.job_retention, is_over=is_over)
        self._stores.idempotency.purge(is_over=is_over)
        self._stores.audit.purge(self._settings.audit_retention, is_over=is_over)
        self._stores.cache.evict(max_age=self._settings.cache_max_age, is_over=is_over)
        self._stores.plans.refresh(is_over=is_over)


def _roles(settings: Settings) -> list[_WorkerRole]:
    """The roles of a process's workers; without general ones there are none."""
    if not settings.num_workers:
        return []
    return [
        *[_WorkerRole.GENERAL] * settings.num_workers,
        *[_WorkerRole.QUICK] * settings.num_quick_workers,
        *[_WorkerRole.RESERVE] * settings.num_reserve_workers,
    ]


def _other_class(claim: Claim) -> JobClass:
    is_quick = JobClass.of(claim.kind) is JobClass.QUICK
    return JobClass.SOLVE if is_quick else JobClass.QUICK


def _checked(solver: Solver, health: SolverHealth) -> Solver | None:
    """The waiting solver; None if it has died, for example for lack of memory."""
    if solver.is_alive():
        health.waited()
        return solver
    _log.warning("solver_lost")
    health.lost()
    solver.stop()
    return None


def _observe(claim: Claim, outcome: str, seconds: float) -> None:
    job_seconds.labels(_kind_label(claim), outcome).observe(seconds)


def _count_failure(claim: Claim, problem: Mapping[str, object]) -> None:
    count_limit(problem)
    slug = str(problem.get("type", "")).removeprefix(TYPE_PREFIX)
    known = {kind.slug for kind in ProblemType}
    job_failures_total.labels(_kind_label(claim), slug if slug in known else "other").inc()


def _kind_label(claim: Claim) -> str:
    kind = known_kind(claim.kind)
    return "other" if kind is None else kind.value


class _Backoff:
    """Growing pauses between attempts to reach the database."""

    def __init__(self) -> None:
        self._pause = _POLL

    def reset(self) -> None:
        self._pause = _POLL

    def next(self, error: StoreUnavailableError) -> float:
        """Log a failed attempt; return the seconds to wait before the next one."""
        pause, self._pause = self._pause, min(2 * self._pause, _MAX_BACKOFF)
        _log.warning("store_unavailable", reason=str(error), again_in=pause)
        return pause


class _Lease:
    """Keeps the row of a running job up to date, without a write per message."""

    def __init__(self, jobs: JobStore, claim: Claim, seconds: float) -> None:
        self._jobs = jobs
        self._claim = claim
        self._seconds = seconds
        self._started = self._renewed = time.monotonic()
        self._next_check = self._started + _POLL
        self._backoff = _Backoff()
        self._progress: Mapping[str, Any] | None = None

    @property
    def elapsed(self) -> float:
        """Seconds since the job was claimed."""
        return time.monotonic() - self._started

    def update(self, message: Progressed | None) -> bool:
        """Record progress and renew the lease if due; False if the job was withdrawn."""
        if message is not None:
            self._progress = message.progress
        now = time.monotonic()
        if now < self._next_check:
            return True
        try:
            is_leased = self._renew(now)
        except StoreUnavailableError as error:
            # No other process can requeue the job meanwhile.
            self._next_check = time.monotonic() + self._backoff.next(error)
            return True
        self._backoff.reset()
        self._next_check = time.monotonic() + _POLL
        return is_leased

    def _renew(self, now: float) -> bool:
        since = now - self._renewed
        interval = max(_POLL, _PROGRESS_SHARE * self.elapsed)
        has_news = self._progress is not None and since >= interval
        if not has_news and since < self._seconds / 4:
            return self._jobs.is_leased(self._claim)
        is_leased = self._jobs.renew(self._claim, self._progress if has_news else None)
        self._renewed = now
        if has_news:
            self._progress = None
        return is_leased
