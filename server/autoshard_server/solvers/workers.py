"""Workers: threads that claim jobs and watch over their solvers.

Where the database is gone for a while, solvers go on, and what they found is written when it
is back: nobody else can take a job meanwhile.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from threading import Event, Semaphore, Thread
from typing import Any, TypeVar
from uuid import uuid4

import structlog

from autoshard_server.jobs.job import Claim
from autoshard_server.jobs.job_store import JobStore
from autoshard_server.jobs.kinds import JobKind, known_kind
from autoshard_server.problems import DEADLINE, problem_document
from autoshard_server.settings import Settings
from autoshard_server.solvers.executor import Advanced, Died, Executor, Failed, Solved, Solver, Work
from autoshard_server.solvers.health import Health
from autoshard_server.stores import Stores
from autoshard_server.telemetry.figures import job_seconds
from autoshard_server.telemetry.tracing import job_span
from autoshard_solver_cache import StoreUnavailableError

_TICK = 0.2
"""Seconds between looks at a running job's row, which may say that it was cancelled."""

_IDLE = 1.0
"""Seconds between looks at the queue without being woken."""

_LONGEST_PAUSE = 2.0
"""Seconds between attempts to reach a database that is gone: much less than a lease."""

_PROGRESS_SHARE = 0.02
"""Of the time that a job has run: the least time between two reports, so that they stay few."""

_HOUSEKEEPING = 60.0
"""Seconds between looks for what can be forgotten."""

_OUTCOMES: Mapping[type, str] = {Solved: "succeeded", Failed: "failed", Died: "crashed"}

_log = structlog.get_logger(__name__)

T = TypeVar("T")


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
        self._executor = executor
        self._settings = settings
        self._name = uuid4().hex
        self._submitted = Semaphore(0)
        self._stopping = Event()
        self._deadline = float("inf")
        names = [f"{self._name}-{i}" for i in range(settings.num_workers)]
        self._health = {name: Health() for name in names}
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
        """Whether every worker runs, or was told to end, and has solvers that live."""
        if self._stopping.is_set():
            return True
        return self.are_running and all(health.is_good for health in self._health.values())

    @property
    def are_running(self) -> bool:
        """Whether every thread is there; none that is gone comes back."""
        return all(t.is_alive() for t in (*self._threads, self._housekeeper))

    def drain(self) -> None:
        """Claim no more; after the grace period, from now on, running jobs go back to the queue.

        Waits for nothing and takes no lock that others hold for long, as it runs in a signal
        handler: idle workers notice within a second.
        """
        if not self._stopping.is_set():
            self._deadline = time.monotonic() + self._settings.shutdown_grace
            self._stopping.set()

    def stop(self) -> None:
        """Drain, and wait until it is done."""
        self.drain()
        for _ in self._threads:
            self._submitted.release()
        for thread in (*self._threads, self._housekeeper):
            thread.join()

    def _work(self, owner: str) -> None:
        health = self._health[owner]
        solver: Solver | None = None
        pause = _TICK
        while not self._stopping.is_set():
            try:
                solver = solver or self._prepared(health)
                # Preparing takes a while, in which we may have been told to stop.
                claim = None if self._stopping.is_set() else self._jobs.claim(owner)
                pause = _TICK
                if claim is None:
                    self._submitted.acquire(timeout=_IDLE)
                    solver = _kept(solver, health)
                elif not self._answer_from_cache(claim):
                    try:
                        self._run(claim, solver, health)
                    finally:
                        solver.stop()
                        solver = None
            except StoreUnavailableError as error:
                _log.warning("store_unavailable", reason=str(error), again_in=pause)
                self._stopping.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            except Exception:  # noqa: BLE001  a worker outlives any job
                _log.exception("worker_failed")
                self._stopping.wait(_IDLE)
        if solver is not None:
            solver.stop()

    def _prepared(self, health: Health) -> Solver:
        """A solver; after several that were lost, not at once."""
        if health.pause:
            self._stopping.wait(health.pause)
        try:
            solver = self._executor.prepare()
        except Exception:
            health.lost()
            raise
        health.prepared()
        return solver

    def _answer_from_cache(self, claim: Claim) -> bool:
        """Finish a job whose document somebody has made since it was asked for."""
        started = time.monotonic()
        known = self._known(claim)
        if known is None:
            return False
        self._patiently(lambda: self._jobs.succeed(claim, known))
        _log.info("job_known", job_id=claim.id, plan_id=claim.plan_id)
        _observe(claim, "known", time.monotonic() - started)
        return True

    def _known(self, claim: Claim) -> bytes | None:
        kind = known_kind(claim.kind)
        if kind is None:
            # Its solver says so.
            return None
        try:
            return self._stores.cache.get(kind.namespace, claim.plan_id)
        except StoreUnavailableError as error:
            # The job is ours, and nobody else would run it: better made again than left.
            _log.warning("store_unavailable", reason=str(error))
            return None

    def _run(self, claim: Claim, solver: Solver, health: Health) -> None:
        about = {**claim.context, "job_id": claim.id, "plan_id": claim.plan_id}
        name = f"job {claim.kind}"
        with structlog.contextvars.bound_contextvars(**about), job_span(name, claim.context):
            watch = _Watch(self._jobs, claim, self._settings.lease)
            outcome = self._watch(claim, solver, watch, health)
            _observe(claim, outcome, watch.elapsed)

    def _watch(self, claim: Claim, solver: Solver, watch: "_Watch", health: Health) -> str:
        """Wait for what becomes of a job; a word for it."""
        _log.info("job_started")
        solver.start(Work(claim.request, claim.graph))
        while True:
            message = solver.receive(_TICK)
            if message is not None and not isinstance(message, Advanced):
                solver.stop()
                _note(message, health)
                self._patiently(partial(self._finish, claim, message))
                _log.info("job_finished", seconds=round(watch.elapsed, 3))
                return _OUTCOMES[type(message)]
            if time.monotonic() > self._deadline:
                self._jobs.release(claim)
                _log.info("job_released")
                return "released"
            if watch.elapsed > self._settings.max_job_seconds:
                solver.stop()
                self._patiently(lambda: self._jobs.fail(claim, self._too_long()))
                _log.warning("job_too_long")
                return "failed"
            if not watch.keep(message):
                _log.info("job_withdrawn")
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
        document = message.plan
        kind = JobKind(claim.kind)
        cache = self._stores.cache
        if message.keep and not cache.put(kind.namespace, claim.plan_id, document):
            # Somebody else was faster: one id, one document.
            document = cache.get(kind.namespace, claim.plan_id) or document
        if message.keep and kind is JobKind.PLAN:
            self._stores.plans.add(claim.plan_id, document)
        self._jobs.succeed(claim, document)

    def _patiently(self, action: Callable[[], T]) -> T:
        """Do it as soon as the database lets us; what was solved is not given up before."""
        pause = _TICK
        while True:
            try:
                return action()
            except StoreUnavailableError as error:
                if time.monotonic() > self._deadline:
                    raise
                _log.warning("store_unavailable", reason=str(error), again_in=pause)
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _too_long(self) -> dict[str, object]:
        limit = self._settings.max_job_seconds
        return problem_document(
            DEADLINE,
            f"the job took more than {limit:g} seconds, the limit of this service; "
            "give a smaller time_limit, a smaller mesh or a coarser relative_gap",
        )

    def _keep_house(self) -> None:
        cleaned = float("-inf")
        while True:
            try:
                if self._jobs.recover():
                    self.wake()
                if time.monotonic() - cleaned > _HOUSEKEEPING:
                    self._clean()
                    cleaned = time.monotonic()
            except StoreUnavailableError as error:
                _log.warning("store_unavailable", reason=str(error))
            except Exception:  # noqa: BLE001  the next round may succeed
                _log.exception("housekeeping_failed")
            if self._stopping.wait(self._settings.lease / 4):
                return

    def _clean(self) -> None:
        self._jobs.purge(self._settings.job_retention)
        self._stores.idempotency.purge()
        self._stores.cache.evict(max_age=self._settings.cache_max_age)
        while self._stores.plans.refresh() and not self._stopping.is_set():
            pass


def _kept(solver: Solver, health: Health) -> Solver | None:
    """A solver that waits; None where it is gone, as when memory ran out."""
    if solver.is_alive():
        health.waited()
        return solver
    _log.warning("solver_lost")
    health.lost()
    solver.stop()
    return None


def _note(message: Solved | Failed | Died, health: Health) -> None:
    if isinstance(message, Died) and not message.was_ready:
        health.lost()
    else:
        health.proved()


def _observe(claim: Claim, outcome: str, seconds: float) -> None:
    kind = known_kind(claim.kind)
    job_seconds.labels("other" if kind is None else kind.value, outcome).observe(seconds)


class _Watch:
    """Keeps the row of a running job up to date, without a write per message."""

    def __init__(self, jobs: JobStore, claim: Claim, lease: float) -> None:
        self._jobs = jobs
        self._claim = claim
        self._lease = lease
        self._started = self._renewed = time.monotonic()
        self._next_look = self._started + _TICK
        self._pause = _TICK
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
        if now < self._next_look:
            return True
        try:
            held = self._look(now)
        except StoreUnavailableError as error:
            # Nobody can take the job from us either.
            _log.warning("store_unavailable", reason=str(error), again_in=self._pause)
            self._next_look = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            return True
        self._pause = _TICK
        self._next_look = time.monotonic() + _TICK
        return held

    def _look(self, now: float) -> bool:
        since = now - self._renewed
        is_told = self._news is not None and since >= max(_TICK, _PROGRESS_SHARE * self.elapsed)
        if not is_told and since < self._lease / 4:
            return self._jobs.holds(self._claim)
        held = self._jobs.renew(self._claim, self._news if is_told else None)
        self._renewed = now
        if is_told:
            self._news = None
        return held
