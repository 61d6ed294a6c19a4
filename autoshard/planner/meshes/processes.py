"""Processes that plan for meshes, one after the other, and can be killed at any time."""

import json
import queue
import subprocess
import sys
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import inf, isfinite
from threading import Lock, Thread
from typing import IO, Any, NamedTuple

from autoshard.base.outcome import SolveStatus
from autoshard.mesh import Mesh, mesh_to_json
from autoshard.plan.document import Plan
from autoshard.plan.options import PlanOptions
from autoshard.plan.sub_meshes import num_pipeline_ranks
from autoshard.planner.meshes.candidates import MeshCandidate
from autoshard.solve import KeyValueStore

_WORKER = (sys.executable, "-m", "autoshard.planner.meshes.worker")


class MeshTask(NamedTuple):
    """A mesh to plan for.

    Attributes:
        mesh: the mesh.
        options: of its plan.
        best: seconds of the best plan so far; inf if there is none.
        is_first: True if the first plan that fits memory is enough; of a pipeline, a bound.
    """

    mesh: Mesh
    options: PlanOptions
    best: float
    is_first: bool


Tasks = queue.SimpleQueue[MeshTask | None]
Results = queue.SimpleQueue[MeshCandidate]


@contextmanager
def mesh_workers(
    request: str, number: int, block_cache: KeyValueStore | None
) -> Iterator[tuple[Tasks, Results]]:
    """Processes that take tasks from a queue and put results into another; killed at the end."""
    tasks: Tasks = queue.SimpleQueue()
    results: Results = queue.SimpleQueue()
    workers = [MeshWorker(request, tasks, results, block_cache) for _ in range(number)]
    try:
        yield tasks, results
    finally:
        for _ in workers:
            tasks.put(None)
        for worker in workers:
            worker.stop()


class MeshWorker:
    """A thread that plans one mesh after the other in a process that can be killed."""

    def __init__(
        self,
        request: str,
        tasks: Tasks,
        results: Results,
        block_cache: KeyValueStore | None,
    ) -> None:
        self._request = request
        self._tasks = tasks
        self._results = results
        self._block_cache = block_cache
        self._process: subprocess.Popen[str] | None = None
        self._lock = Lock()
        self._stopped = False
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Kill the process."""
        with self._lock:
            self._stopped = True
            if self._process is not None:
                self._process.kill()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped and (task := self._tasks.get()) is not None:
            self._results.put(self._plan(task))
        self._close()

    def _plan(self, task: MeshTask) -> MeshCandidate:
        reply: dict[str, Any] | None = None
        mesh, options = task.mesh, task.options
        # A process that died does not reply; the error then has its exit status.
        with suppress(OSError):
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            message = {
                "mesh": mesh_to_json(mesh),
                "options": options.model_dump(mode="json"),
                "best": task.best if isfinite(task.best) else None,
                "first": task.is_first,
            }
            _write(process.stdin, message)
            reply = self._reply(process.stdin, process.stdout)
        if reply is None:
            return MeshCandidate(mesh, options, None, self._close())
        if "plan" in reply:
            plan = Plan.from_json(reply["plan"])
            return MeshCandidate(mesh, options, plan, bound=_bound_of(plan))
        if "error" in reply:
            bound = inf if reply["is_proof"] else -inf
            return MeshCandidate(mesh, options, None, reply["error"], bound)
        bound = -inf if reply["bound"] is None else reply["bound"]
        is_excluded = (1 - options.solver.relative_gap) * task.best < bound
        reason = slower_reason(bound, task.best) if is_excluded else ""
        return MeshCandidate(mesh, options, None, reason, bound)

    def _reply(self, stdin: IO[str], stdout: IO[str]) -> dict[str, Any] | None:
        """The reply of the process, after its requests to the block cache; None if it ended."""
        while (line := stdout.readline()).endswith("\n"):
            message: dict[str, Any] = json.loads(line)
            if "get" in message:
                found = self._access_cache(message["get"])
                _write(stdin, {"body": None if found is None else b64encode(found).decode()})
            elif "put" in message:
                self._access_cache(message["put"], b64decode(message["body"]))
            else:
                return message
        return None

    def _access_cache(self, key: str, body: bytes | None = None) -> bytes | None:
        """Read a key of the block cache, or write it if there is a body.

        After an OSError, planning continues without the cache.
        """
        if self._block_cache is None:
            return None
        try:
            if body is None:
                return self._block_cache.get(key)
            self._block_cache.put(key, body)
        except OSError:
            self._block_cache = None
        return None

    def _running(self) -> "subprocess.Popen[str]":
        with self._lock:
            if self._stopped:
                raise BrokenPipeError
            if self._process is not None:
                return self._process
            process = self._process = subprocess.Popen(  # noqa: S603  a fixed command
                _WORKER,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                encoding="utf-8",
                process_group=0,  # Ctrl-C in a terminal is for this process, which stops it
            )
        assert process.stdin is not None
        process.stdin.write(self._request + "\n")
        return process

    def _close(self) -> str:
        """Wait for the end of the process, and describe it."""
        process, self._process = self._process, None
        if process is None:
            return "the search was stopped"
        with suppress(OSError):
            process.communicate()
        return f"the planning process ended with status {process.returncode} without a plan"


def _bound_of(plan: Plan) -> float:
    """Proven lower bound of the plans of a mesh, seconds; inf if there is none, -inf if unknown.

    That of a pipeline is known before: the search for one compares most by estimates.
    """
    certificate = plan.certificate
    if num_pipeline_ranks(plan.mesh) is not None:
        return -inf
    if certificate.status is SolveStatus.INFEASIBLE:
        return inf
    return -inf if certificate.bound is None else certificate.bound


def slower_reason(bound: float, best: float) -> str:
    """Reason why a mesh is not planned further, since another has a plan that is as fast."""
    other = f"the {best:.5g} s of another mesh"
    compared = f"more than {other}"
    if bound <= best:
        compared = f"at most {1 - bound / best:.2%} less than {other}, which is within relative_gap"
    return f"every plan takes at least {bound:.5g} s per step, {compared}"


def _write(stream: IO[str], message: Any) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()
