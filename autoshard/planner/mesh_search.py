"""The best mesh for a program: every way to arrange the devices, planned side by side."""

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
_LOOK = 0.1
"""Seconds between two looks at the cancel token."""
_MOST_ERRORS = 3
MOST_AXES = 6
"""More axes than this no search will plan: strategies grow exponentially with them."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A mesh that was planned for.

    Attributes:
        mesh: the mesh.
        plan: its plan; one without stages says why there is none. None where the options do
            not fit this mesh, or the process died.
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
    """How far a search has come.

    Attributes:
        done: meshes that are planned.
        total: meshes that there are.
        latest: the one that was planned last.
    """

    done: int
    total: int
    latest: Candidate

    @property
    def phase(self) -> str:
        """How far, in words."""
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

    Each plan is made in a process of its own kind, so a search can be stopped at once.

    Args:
        graph: the normalised program.
        num_devices: how many devices the meshes have.
        topology: a preset's name, or a topology; the default one if None.
        options: the same for all meshes; pins have one part per axis, so with pins only
            meshes of that many axes get a plan. `time_limit` holds for each mesh.
        max_axes: largest number of axes.
        num_workers: how many processes plan at the same time.
        on_progress: called after each mesh, from the calling thread.
        cancel: once set, the processes are killed and what is done is returned.
        block_cache: keeps solved blocks, as for `make_plan`; asked from several threads. Where it
            raises OSError, the worker that met it goes on without it.
        max_strategies: as for `make_plan`; a mesh whose problem is larger has an error.

    Raises:
        OptionError: a number is out of its range, or the options fit no mesh.
        MeshError: the topology is unknown, or does not hold so many devices.
    """
    if num_workers < 1:
        raise OptionError(f"num_workers is {num_workers}; a search needs 1 process or more")
    meshes = candidate_meshes(num_devices, topology=topology, max_axes=max_axes)
    waiting: queue.SimpleQueue[Mesh] = queue.SimpleQueue()
    answers: queue.SimpleQueue[Candidate] = queue.SimpleQueue()
    for mesh in meshes:
        waiting.put(mesh)
    asked = (options or PlanOptions()).model_dump(mode="json")
    request = json.dumps(
        {
            "graph": graph_to_json(graph),
            "options": asked,
            "block_cache": block_cache is not None,
            "max_strategies": max_strategies,
        }
    )
    workers = [
        _Worker(request, waiting, answers, block_cache)
        for _ in range(min(num_workers, len(meshes)))
    ]
    found: list[Candidate] = []
    try:
        while len(found) < len(meshes) and not (cancel is not None and cancel.is_set()):
            with suppress(queue.Empty):
                found.append(answers.get(timeout=_LOOK))
                if on_progress is not None:
                    on_progress(SearchProgress(len(found), len(meshes), found[-1]))
    finally:
        for worker in workers:
            worker.stop()
    if found and all(candidate.plan is None for candidate in found):
        errors = "; ".join(f"{mesh_text(c.mesh)}: {c.error}" for c in found[:_MOST_ERRORS])
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

    Axes have two ranks or more. Meshes whose axes have the same sizes and lie over the
    links in the same way are one: the order of such axes changes no price.

    Args:
        num_devices: ranks of each mesh.
        topology: a preset's name, or a topology.
        max_axes: largest number of axes.
        most: look for no more meshes than this; for all if left out.

    Raises:
        OptionError: a number is out of its range.
        MeshError: the topology is unknown, or does not hold so many devices.
    """
    if num_devices < 1:
        raise OptionError(f"num_devices is {num_devices}; a mesh has 1 device or more")
    if not 1 <= max_axes <= MOST_AXES:
        raise OptionError(f"max_axes is {max_axes}; give a number from 1 to {MOST_AXES}")
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
    """A thread that plans one mesh after the other in a process that can be killed."""

    def __init__(
        self,
        request: str,
        meshes: "queue.SimpleQueue[Mesh]",
        answers: "queue.SimpleQueue[Candidate]",
        block_cache: KeyValueStore | None,
    ) -> None:
        self._request = request
        self._meshes = meshes
        self._answers = answers
        self._block_cache = block_cache
        self._process: subprocess.Popen[str] | None = None
        self._lock = Lock()
        self._stopped = False
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Kill the process, whatever it does."""
        with self._lock:
            self._stopped = True
            if self._process is not None:
                self._process.kill()
        self._thread.join()

    def _run(self) -> None:
        with suppress(queue.Empty):
            while not self._stopped:
                mesh = self._meshes.get_nowait()
                self._answers.put(self._plan(mesh))
        self._end()

    def _plan(self, mesh: Mesh) -> Candidate:
        answer: dict[str, str] | None = None
        # A process that is gone gives no answer, and its end says why.
        with suppress(OSError):
            process = self._started()
            assert process.stdin is not None
            assert process.stdout is not None
            _say(process.stdin, mesh_to_json(mesh))
            answer = self._answer(process.stdin, process.stdout)
        if answer is None:
            return Candidate(mesh, None, self._end())
        if "error" in answer:
            return Candidate(mesh, None, answer["error"])
        return Candidate(mesh, Plan.from_json(answer["plan"]))

    def _answer(self, stdin: IO[str], stdout: IO[str]) -> dict[str, str] | None:
        """What the process answers; None if it ends. Until then it has the tables it wants."""
        while (line := stdout.readline()).endswith("\n"):
            message: dict[str, str] = json.loads(line)
            if "get" in message:
                body = self._kept(message["get"])
                _say(stdin, {"body": None if body is None else b64encode(body).decode()})
            elif "put" in message:
                self._keep(message["put"], b64decode(message["body"]))
            else:
                return message
        return None

    def _kept(self, key: str) -> bytes | None:
        """A table; None where there is none, or no store without trouble."""
        if self._block_cache is not None:
            try:
                return self._block_cache.get(key)
            except OSError:
                self._block_cache = None
        return None

    def _keep(self, key: str, body: bytes) -> None:
        """Keep a table, unless the store is in trouble: it costs a solve and never an answer."""
        if self._block_cache is not None:
            try:
                self._block_cache.put(key, body)
            except OSError:
                self._block_cache = None

    def _started(self) -> "subprocess.Popen[str]":
        with self._lock:
            if self._stopped:
                raise BrokenPipeError
            if self._process is not None:
                return self._process
            process = self._process = subprocess.Popen(  # noqa: S603  the command is ours
                _WORKER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
            )
        assert process.stdin is not None
        process.stdin.write(self._request + "\n")
        return process

    def _end(self) -> str:
        """Let the process go, and say how it ended."""
        process, self._process = self._process, None
        if process is None:
            return "the search was stopped"
        with suppress(OSError):
            process.communicate()
        return f"the planning process ended with status {process.returncode} without an answer"


def _say(stream: IO[str], message: Any) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()
