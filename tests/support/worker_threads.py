"""Workers and a store, without a service around them."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
from support.services import ONE_WORKER

from autoshard_server import Executor, Settings
from autoshard_server.projects import stored_namespace
from autoshard_server.solvers.workers import Workers
from autoshard_server.store.database import Stores
from autoshard_server.store.jobs import EventKind, Job, JobKind


@dataclass
class RunningWorkers:
    stores: Stores
    workers: Workers

    def submit(
        self, name: str, *, kind: str = "validation", project: str = "default", **told: Any
    ) -> str:
        request = json.dumps(told)
        job = self.stores.jobs.submit(
            name, request, b"", max_queued=999, kind=kind, project=project
        )
        self.workers.wake()
        return job.id

    def job(self, job_id: str) -> Job:
        found = self.stores.jobs.get(job_id)
        assert found is not None
        return found

    def await_job(
        self, job_id: str, until: Callable[[Job], bool] = lambda job: job.state.done
    ) -> Job:
        for _ in range(12_000):
            if until(job := self.job(job_id)):
                return job
            time.sleep(0.02)
        raise AssertionError(f"the job did not get there: {job}")

    def result(self, job_id: str) -> bytes | None:
        """The result of a job, which is in the cache or in the job, and not in both."""
        job = self.job(job_id)
        namespace = stored_namespace(job.project, JobKind(job.kind).namespace)
        found = self.stores.cache.get(namespace, job.plan_id), self.stores.jobs.result(job_id)
        assert None in found
        return found[0] or found[1]

    def await_unhealthy(self) -> None:
        for _ in range(12_000):
            if not self.workers.alive:
                return
            time.sleep(0.02)
        raise AssertionError("the workers stayed healthy")

    def starts(self, job_id: str) -> int:
        told = self.stores.jobs.events(job_id)
        return sum(e.kind is EventKind.STATE and e.data["state"] == "running" for e in told)


@contextmanager
def running_workers(executor: Executor, **given: Any) -> Iterator[RunningWorkers]:
    defaults = {**ONE_WORKER, "store_url": "sqlite://", "num_workers": 2, "shutdown_grace": 0}
    settings = Settings(**{**defaults, **given})
    stores = Stores(settings)
    workers = Workers(stores, executor, settings)
    workers.start()
    try:
        yield RunningWorkers(stores, workers)
    finally:
        workers.stop()
        stores.close()


def await_end(*pids: int) -> None:
    """Wait until processes have ended."""
    for _ in range(12_000):
        if not any(map(is_running, pids)):
            return
        time.sleep(0.02)
    raise AssertionError("the processes did not end")


def is_running(pid: int) -> bool:
    """Whether a process is there, and not only its exit status."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
