"""Search for the best mesh: plans of a program on every arrangement of the devices."""

import json
import queue
import subprocess
import sys
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import isqrt
from threading import Lock, Thread
from typing import IO, Any

from autoshard.errors import OptionError
from autoshard.graph import Graph, graph_to_json
from autoshard.mesh import Mesh, Topology, make_mesh, mesh_to_json
from autoshard.plan.compare import mesh_text
from autoshard.plan.document import Plan
from autoshard.plan.options import PlanOptions
from autoshard.solve import CancelToken, KeyValueStore

_WORKER = (sys.executable, "-m", "autoshard.planner.search_worker")
_POLL_SECONDS = 0.1
"""Seconds between two looks at the cancel token."""
_MAX_ERRORS = 3
"""Errors that a message lists."""
_MAX_AXES = 6
"""Limit of the number of axes, in which the number of strategies is exponential."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Result of planning for one mesh.

    Attributes:
        mesh: the mesh.
        plan: its plan, a document without stages where none was found. None where the options
            do not fit this mesh, or the process died.
        error: why there is no plan document; empty where there is one.
    """

    mesh: Mesh
    plan: Plan | None
    error: str = ""

    @property
    def objective(self) -> float:
        """Seconds of the plan, or inf."""
        found = None if self.plan is None else self.plan.certificate.objective
        return float("inf") if found is None else found


@dataclass(frozen=True, slots=True)
class SearchProgress:
    """Progress of a search.

    Attributes:
        done: number of meshes that are planned.
        total: number of meshes.
        latest: the result for the latest of them.
    """

    done: int
    total: int
    latest: Candidate

    @property
    def phase(self) -> str:
        """The progress in words."""
        return f"planned {self.done} of {self.total} meshes"


def search_meshes(
    graph: Graph,
    num_devices: int,
    *,
    topology: str | Topology | None = None,
    options: PlanOptions | None = None,
    max_axes: int = 3,
    num_workers: int = 2,
    on_progress: Callable[[SearchProgress], None] | None = None,
    cancel: CancelToken | None = None,
    block_cache: KeyValueStore | None = None,
    max_strategies: int | None = None,
) -> tuple[Candidate, ...]:
    """Plan a program on every mesh of so many devices, best first.

    Plans are made in processes of their own, so a search can be stopped at once.

    Args:
        graph: the normalised program.
        num_devices: number of devices of each mesh.
        topology: name of a preset, or a topology; the default one if None.
        options: the same for all meshes; pins have one part per axis, so with pins only
            meshes of that many axes get a plan. `time_limit` is per mesh.
        max_axes: largest number of axes.
        num_workers: number of processes that plan at the same time.
        on_progress: called after each mesh, from the calling thread.
        cancel: once set, the processes are killed, and the results so far are returned.
        block_cache: a store of solved blocks, as for `make_plan`; used from several threads. A
            worker stops using it after it raises OSError.
        max_strategies: as for `make_plan`; a mesh whose problem is larger has an error.

    Raises:
        OptionError: a number is out of its range, or the options fit no mesh.
        MeshError: the topology is unknown, or has fewer devices.
    """
    if num_workers < 1:
        raise OptionError(f"num_workers is {num_workers}; a search needs 1 process or more")
    meshes = candidate_meshes(num_devices, topology=topology, max_axes=max_axes)
    waiting: queue.SimpleQueue[Mesh] = queue.SimpleQueue()
    results: queue.SimpleQueue[Candidate] = queue.SimpleQueue()
    for mesh in meshes:
        waiting.put(mesh)
    request = json.dumps(
        {
            "graph": graph_to_json(graph),
            "options": (options or PlanOptions()).model_dump(mode="json"),
            "block_cache": block_cache is not None,
            "max_strategies": max_strategies,
        }
    )
    workers = [
        _Worker(request, waiting, results, block_cache)
        for _ in range(min(num_workers, len(meshes)))
    ]
    found: list[Candidate] = []
    try:
        while len(found) < len(meshes) and not (cancel is not None and cancel.is_set()):
            with suppress(queue.Empty):
                found.append(results.get(timeout=_POLL_SECONDS))
                if on_progress is not None:
                    on_progress(SearchProgress(len(found), len(meshes), found[-1]))
    finally:
        for worker in workers:
            worker.stop()
    if found and all(candidate.plan is None for candidate in found):
        errors = "; ".join(f"{mesh_text(c.mesh)}: {c.error}" for c in found[:_MAX_ERRORS])
        raise OptionError(f"no mesh of {num_devices} devices can be planned: {errors}")
    return tuple(sorted(found, key=lambda c: (c.objective, len(c.mesh.axes), c.mesh.axis_sizes)))


def candidate_meshes(
    num_devices: int,
    *,
    topology: str | Topology | None = None,
    max_axes: int = 3,
    most: int | None = None,
) -> tuple[Mesh, ...]:
    """Every mesh of so many devices, fewest axes first.

    Axes have two ranks or more. Meshes whose axes have the same sizes and span the links in the
    same way count once: the order of such axes changes no cost.

    Args:
        num_devices: number of devices of each mesh.
        topology: name of a preset, or a topology.
        max_axes: largest number of axes.
        most: limit of the number of meshes; all if None.

    Raises:
        OptionError: a number is out of its range.
        MeshError: the topology is unknown, or has fewer devices.
    """
    if num_devices < 1:
        raise OptionError(f"num_devices is {num_devices}; a mesh has 1 device or more")
    if not 1 <= max_axes <= _MAX_AXES:
        raise OptionError(f"max_axes is {max_axes}; give a number from 1 to {_MAX_AXES}")
    distinct: dict[object, Mesh] = {}
    for shape in _shapes(num_devices, max_axes):
        mesh = make_mesh(shape, topology=topology)
        axes = Counter((size, mesh.spans(axis)) for axis, size in enumerate(shape))
        distinct.setdefault(frozenset(axes.items()), mesh)
        if len(distinct) == most:
            break
    return tuple(distinct.values())


def _shapes(number: int, most: int) -> Iterator[tuple[int, ...]]:
    """Ordered factors of 2 or more whose product is the number, fewest first; (1,) for 1."""
    yield (number,)
    small = [d for d in range(2, isqrt(number) + 1) if number % d == 0]
    divisors = sorted({*small, *(number // d for d in small)})
    for count in range(2, most + 1):
        yield from _factorisations(number, count, divisors)


def _factorisations(number: int, count: int, divisors: list[int]) -> Iterator[tuple[int, ...]]:
    if count == 1:
        yield (number,)
        return
    for first in divisors:
        # Every factor that is left is 2 or more.
        if first << (count - 1) > number:
            return
        if number % first == 0:
            for rest in _factorisations(number // first, count - 1, divisors):
                yield (first, *rest)


class _Worker:
    """A thread that plans mesh after mesh in a process that can be killed."""

    def __init__(
        self,
        request: str,
        meshes: "queue.SimpleQueue[Mesh]",
        results: "queue.SimpleQueue[Candidate]",
        block_cache: KeyValueStore | None,
    ) -> None:
        self._request = request
        self._meshes = meshes
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
        with suppress(queue.Empty):
            while not self._stopped:
                self._results.put(self._plan(self._meshes.get_nowait()))
        self._close()

    def _plan(self, mesh: Mesh) -> Candidate:
        reply: dict[str, str] | None = None
        # A process that died gives no reply; its exit status goes into the error.
        with suppress(OSError):
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            _write(process.stdin, mesh_to_json(mesh))
            reply = self._reply(process.stdin, process.stdout)
        if reply is None:
            return Candidate(mesh, None, self._close())
        if "error" in reply:
            return Candidate(mesh, None, reply["error"])
        return Candidate(mesh, Plan.from_json(reply["plan"]))

    def _reply(self, stdin: IO[str], stdout: IO[str]) -> dict[str, str] | None:
        """The reply of the process, after its requests to the block cache; None if it ended."""
        while (line := stdout.readline()).endswith("\n"):
            message: dict[str, str] = json.loads(line)
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

        After an OSError planning goes on without the cache.
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
                _WORKER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
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


def _write(stream: IO[str], message: Any) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()
