"""Search for the best mesh: makes a plan of a program for every mesh of the devices."""

import json
import queue
import subprocess
import sys
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite, isqrt, log2
from threading import Lock, Thread
from typing import IO, Any, NamedTuple

from autoshard.base.arguments import Count, check_arguments
from autoshard.errors import OptionError
from autoshard.graph import GraphLike, graph_to_json, to_graph
from autoshard.mesh import (
    Mesh,
    Topology,
    default_axis_names,
    make_mesh,
    mesh_text,
    mesh_to_json,
    resolve_topology,
)
from autoshard.plan.document import Plan
from autoshard.plan.options import PlanOptions
from autoshard.plan.sub_meshes import PIPELINE_AXIS, num_pipeline_ranks
from autoshard.solve import CancelToken, KeyValueStore

_WORKER = (sys.executable, "-m", "autoshard.planner.meshes.worker")
_POLL_SECONDS = 0.1
"""Seconds between two checks of the cancel token."""
_MAX_ERRORS = 3
"""Maximum number of errors in a message."""
_MAX_AXES = 6
"""Maximum number of axes; the number of strategies is exponential in it."""
_FIRST_AXES = 2
"""Number of axes up to which a mesh always has a plan; others only if they may be faster."""
_MESHES_AHEAD = 2
"""Number of meshes of more axes that may be planned at the same time. A mesh is compared with those
that are further ahead, so that results depend on neither speed nor number of the processes, as long
as these are not more."""


@dataclass(frozen=True, slots=True)
class MeshCandidate:
    """Result of planning for one mesh.

    Attributes:
        mesh: the mesh.
        options: those of its plan, which is of one stage if no axis of the mesh is for a pipeline.
        plan: its plan, a document without stages if none was found; None if the options do not
            fit this mesh, its plans are proven to be at most `relative_gap` faster than that of
            another mesh, or the process died.
        error: reason why `plan` is None; empty otherwise.
    """

    mesh: Mesh
    options: PlanOptions
    plan: Plan | None
    error: str = ""

    @property
    def objective(self) -> float:
        """Seconds of the plan; inf if there is none."""
        found = None if self.plan is None else self.plan.certificate.objective
        return float("inf") if found is None else found


@dataclass(frozen=True, slots=True)
class SearchProgress:
    """Progress of a search.

    Attributes:
        done: number of meshes planned so far.
        total: number of meshes.
        latest: the most recent result.
    """

    done: int
    total: int
    latest: MeshCandidate

    @property
    def phase(self) -> str:
        """Description of the progress."""
        return f"planned {self.done} of {self.total} meshes"


@check_arguments
def search_meshes(
    graph: GraphLike,
    num_devices: int,
    *,
    topology: str | Topology | None = None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    options: PlanOptions | None = None,
    max_axes: int = 3,
    num_workers: Count = 2,
    on_progress: Callable[[SearchProgress], None] | None = None,
    cancel: CancelToken | None = None,
    block_cache: KeyValueStore | None = None,
    max_strategies: Count | None = None,
) -> tuple[MeshCandidate, ...]:
    """Make a plan of a program for every mesh of a number of devices.

    Plans are made in separate processes, so a search can be stopped at any time. If the options
    ask for pipelines, the outermost axis `pp` of a mesh has the pipeline ranks; with `stages`
    'auto', meshes without it are planned as one stage.

    Meshes of one and two axes are planned first. Planning for a mesh of more axes ends without a
    plan as soon as a bound proves that its plans of one stage are at most `relative_gap` faster
    than the best one of the meshes before it, but for the last few; its error names the bound.
    Those whose innermost axis has about the size of a node, which are often fastest, come first.

    Args:
        graph: the program, as for `make_plan`.
        num_devices: number of devices of each mesh.
        topology: name of a preset, or a topology; the default one if None.
        nodes: as for `make_mesh`.
        gpus_per_node: as for `make_mesh`.
        options: options for all meshes. Pins have one part per axis, so with pins only meshes
            with that number of axes can be planned. `time_limit` is per mesh.
        max_axes: maximum number of axes.
        num_workers: number of processes that plan at the same time.
        on_progress: called after each mesh, from the calling thread.
        cancel: an event; once it is set, the processes are killed and the results so far returned.
        block_cache: a store of solved blocks, as for `make_plan`; used from several threads. A
            worker stops using it after it raises OSError.
        max_strategies: as for `make_plan`; a mesh with a larger problem has an error.

    Returns:
        One candidate per mesh, the fastest plan first.

    Raises:
        OptionError: a number is out of its range, or no mesh can be planned with the options.
        MeshError: the topology is unknown, or has fewer devices.
    """
    if num_workers < 1:
        raise OptionError(f"num_workers is {num_workers}; a search needs 1 process or more")
    options = options or PlanOptions()
    meshes = candidate_meshes(
        num_devices,
        topology=topology,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        max_axes=max_axes,
        options=options,
    )
    order = _order(meshes, max(num_workers, _MESHES_AHEAD))
    waiting: queue.SimpleQueue[_MeshTask | None] = queue.SimpleQueue()
    results: queue.SimpleQueue[MeshCandidate] = queue.SimpleQueue()
    request = json.dumps(
        {
            "graph": graph_to_json(to_graph(graph)),
            "block_cache": block_cache is not None,
            "max_strategies": max_strategies,
        }
    )
    workers = [
        _Worker(request, waiting, results, block_cache)
        for _ in range(min(num_workers, len(meshes)))
    ]
    found: list[MeshCandidate] = []
    objectives: dict[Mesh, float] = {}
    asked = 0
    try:
        while len(found) < len(meshes) and not (cancel is not None and cancel.is_set()):
            for mesh, before in order[asked:]:
                if not all(other in objectives for other in before):
                    break
                best = min((objectives[other] for other in before), default=float("inf"))
                waiting.put(_MeshTask(mesh, _options_of(mesh, options), best))
                asked += 1
            with suppress(queue.Empty):
                latest = results.get(timeout=_POLL_SECONDS)
                found.append(latest)
                objectives[latest.mesh] = latest.objective
                if on_progress is not None:
                    on_progress(SearchProgress(len(found), len(meshes), latest))
    finally:
        for _ in workers:
            waiting.put(None)
        for worker in workers:
            worker.stop()
    if len(found) == len(meshes) and all(candidate.plan is None for candidate in found):
        errors = "; ".join(f"{mesh_text(c.mesh)}: {c.error}" for c in found[:_MAX_ERRORS])
        raise OptionError(f"no mesh of {num_devices} devices can be planned: {errors}")
    return tuple(sorted(found, key=lambda c: (c.objective, len(c.mesh.axes), c.mesh.axis_sizes)))


def candidate_meshes(
    num_devices: int,
    *,
    topology: str | Topology | None = None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    max_axes: int = 3,
    most: int | None = None,
    options: PlanOptions | None = None,
) -> tuple[Mesh, ...]:
    """All meshes of a number of devices, in order of the number of axes.

    Axes have at least two ranks. Of meshes that differ only in the order of axes with equal sizes
    and link levels, whose costs are equal, one is returned.

    Args:
        num_devices: number of devices of each mesh.
        topology: name of a preset, or a topology; the default one if None.
        nodes: as for `make_mesh`.
        gpus_per_node: as for `make_mesh`.
        max_axes: maximum number of axes.
        most: maximum number of meshes; None for all.
        options: of planning. If they ask for pipelines, the outermost axis of a mesh is `pp`; with
            `stages` 'auto', meshes without it come first.

    Raises:
        OptionError: a number is out of its range.
        MeshError: the topology is unknown, or has fewer devices.
    """
    if num_devices < 1:
        raise OptionError(f"num_devices is {num_devices}; a mesh has 1 device or more")
    if not 1 <= max_axes <= _MAX_AXES:
        raise OptionError(f"max_axes is {max_axes}; give a number from 1 to {_MAX_AXES}")
    options = options or PlanOptions()
    resolved = resolve_topology(topology, num_devices, nodes, gpus_per_node)
    distinct: dict[object, Mesh] = {}
    for shape in _shapes(num_devices, max_axes):
        for mesh in _meshes(shape, resolved, options):
            ranks = num_pipeline_ranks(mesh)
            first = 0 if ranks is None else 1
            axes = Counter((shape[axis], mesh.spans(axis)) for axis in range(first, len(shape)))
            distinct.setdefault((ranks, frozenset(axes.items())), mesh)
        if most is not None and len(distinct) >= most:
            break
    return tuple(distinct.values())[:most]


def _meshes(shape: tuple[int, ...], topology: Topology, options: PlanOptions) -> Iterator[Mesh]:
    """The meshes of one shape: without a pipeline, and with its outermost axis for one."""
    stages = (
        len(options.pipeline.balance)
        if isinstance(options.pipeline.balance, tuple)
        else options.pipeline.stages
    )
    is_cut = (
        bool(options.pipeline.cuts)
        or options.pipeline.balance is not None
        or stages not in (None, 1)
    )
    if not is_cut or (stages == "auto" and not options.pipeline.cuts):
        yield make_mesh(shape, topology=topology)
    ranks = shape[0]
    if is_cut and ranks > 1 and (not isinstance(stages, int) or stages % ranks == 0):
        inner = default_axis_names(len(shape))[1:]
        yield make_mesh(shape, axes=(PIPELINE_AXIS, *inner), topology=topology)


def _order(meshes: Sequence[Mesh], ahead: int) -> list[tuple[Mesh, Sequence[Mesh]]]:
    """Meshes in the order of planning, each with those that have to be planned before it.

    Args:
        meshes: all meshes.
        ahead: number of meshes of many axes that may be planned at the same time.
    """

    def distance(mesh: Mesh) -> float:
        node = mesh.topology.levels[0].size or mesh.num_devices
        return abs(log2(mesh.axis_sizes[-1] / min(node, mesh.num_devices)))

    first = [mesh for mesh in meshes if len(mesh.axes) <= _FIRST_AXES]
    others = sorted((mesh for mesh in meshes if len(mesh.axes) > _FIRST_AXES), key=distance)
    before = [(*first, *others[: max(i + 1 - ahead, 0)]) for i in range(len(others))]
    return [*((mesh, ()) for mesh in first), *zip(others, before, strict=True)]


def _options_of(mesh: Mesh, options: PlanOptions) -> PlanOptions:
    """Options for one mesh: without an axis for a pipeline, `stages` 'auto' is one stage."""
    if options.pipeline.stages == "auto" and num_pipeline_ranks(mesh) is None:
        return options.with_values(stages=1)
    return options


def _shapes(number: int, most: int) -> Iterator[tuple[int, ...]]:
    """Ordered factorisations into factors of 2 or more, fewest factors first; (1,) for 1."""
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
        # Each remaining factor is 2 or more.
        if first << (count - 1) > number:
            return
        if number % first == 0:
            for rest in _factorisations(number // first, count - 1, divisors):
                yield (first, *rest)


class _MeshTask(NamedTuple):
    """A mesh to plan for, its options, and the seconds of the best plan so far, inf if none."""

    mesh: Mesh
    options: PlanOptions
    best: float


class _Worker:
    """A thread that plans one mesh after the other in a process that can be killed."""

    def __init__(
        self,
        request: str,
        tasks: "queue.SimpleQueue[_MeshTask | None]",
        results: "queue.SimpleQueue[MeshCandidate]",
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
            self._results.put(self._plan(*task))
        self._close()

    def _plan(self, mesh: Mesh, options: PlanOptions, best: float) -> MeshCandidate:
        reply: dict[str, str] | None = None
        # A process that died does not reply; the error then has its exit status.
        with suppress(OSError):
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            message = {
                "mesh": mesh_to_json(mesh),
                "options": options.model_dump(mode="json"),
                "best": best if isfinite(best) else None,
            }
            _write(process.stdin, message)
            reply = self._reply(process.stdin, process.stdout)
        if reply is None:
            return MeshCandidate(mesh, options, None, self._close())
        if "error" in reply:
            return MeshCandidate(mesh, options, None, reply["error"])
        return MeshCandidate(mesh, options, Plan.from_json(reply["plan"]))

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


def _write(stream: IO[str], message: Any) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()
