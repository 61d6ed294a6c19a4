"""Search for the best mesh: makes a plan of a program for every mesh of the devices."""

import json
import queue
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf, isfinite, log2

from autoshard.base.arguments import Count, Seconds, check_arguments
from autoshard.base.outcome import SolveStatus
from autoshard.errors import OptionError
from autoshard.graph import GraphLike, graph_to_json, to_graph
from autoshard.mesh import Mesh, Topology, mesh_text
from autoshard.plan.certificate import with_statement
from autoshard.plan.document import Plan
from autoshard.plan.options import PlanOptions
from autoshard.plan.sub_meshes import num_pipeline_ranks
from autoshard.planner.meshes.candidates import MeshCandidate, candidate_meshes
from autoshard.planner.meshes.processes import (
    MeshTask,
    Results,
    Tasks,
    mesh_workers,
    slower_reason,
)
from autoshard.solve import CancelToken, KeyValueStore

_POLL_SECONDS = 0.1
"""Seconds between two checks of the cancel token."""
_MAX_ERRORS = 3
"""Maximum number of errors in a message."""
_FIRST_AXES = 2
"""Number of axes of a stage up to which a mesh gets a first plan and a bound, which need a fraction
of the time of a plan; with more axes, they take most of it."""
_NOT_TRIED = "not planned: the search was stopped before"
_MESHES_AHEAD = 2
"""Number of meshes that are compared with each other only when both are planned. A mesh is compared
with those that are further ahead, so that results depend on neither speed nor number of the
processes, as long as these are not more."""


@dataclass(frozen=True, slots=True)
class SearchProgress:
    """Progress of a search.

    Attributes:
        done: number of meshes planned so far.
        total: number of meshes.
        latest: the most recent result.
        best: seconds of the fastest plan so far; inf if there is none.
        bound: proven lower bound of the plans of all meshes; -inf as long as one has none.
    """

    done: int
    total: int
    latest: MeshCandidate
    best: float
    bound: float

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
    total_time_limit: Seconds | None = None,
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

    A first plan that fits memory, and a bound of all that do, take a fraction of the time of a
    plan; every mesh of one or two axes has them before any mesh is planned in full, a pipeline
    whose stages have at most two axes a bound. Then the most promising meshes come first, those
    with more axes last, among them those whose innermost axis has about the size of a node. A mesh
    is planned no further as soon as a bound proves that its plans are at most `relative_gap` faster
    than one of the meshes before it, but for the last few; its error names the bound.

    Args:
        graph: the program, as for `make_plan`.
        num_devices: number of devices of each mesh.
        topology: name of a preset, or a topology; the default one if None.
        nodes: as for `make_mesh`.
        gpus_per_node: as for `make_mesh`.
        options: options for all meshes. Pins have one part per axis, so with pins only meshes
            with that number of axes can be planned. `time_limit` is per mesh.
        max_axes: maximum number of axes.
        total_time_limit: seconds of all meshes together, after which the search ends as if it were
            cancelled; None for no limit but those of the meshes.
        num_workers: number of processes that plan at the same time.
        on_progress: called after each plan, from the calling thread.
        cancel: an event; once it is set, the processes are killed and the results so far returned,
            with the first plan of meshes that are not planned in full; see `was_stopped`.
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
    request = json.dumps(
        {
            "graph": graph_to_json(to_graph(graph)),
            "block_cache": block_cache is not None,
            "max_strategies": max_strategies,
        }
    )
    with mesh_workers(request, min(num_workers, len(meshes)), block_cache) as (tasks, results):
        end = inf if total_time_limit is None else time.monotonic() + total_time_limit
        search = _Search(meshes, options, tasks, results, on_progress, cancel, end)
        found = search.run(max(num_workers, _MESHES_AHEAD))
    if all(candidate.plan is None and not candidate.was_stopped for candidate in found):
        errors = "; ".join(f"{mesh_text(c.mesh)}: {c.error}" for c in found[:_MAX_ERRORS])
        raise OptionError(f"no mesh of {num_devices} devices can be planned: {errors}")
    return tuple(sorted(found, key=lambda c: (c.objective, len(c.mesh.axes), c.mesh.axis_sizes)))


@dataclass
class _Search:
    """A search over some meshes: first plans and bounds of all, then full plans of some.

    Attributes:
        meshes: all meshes.
        options: those for all of them.
        tasks: what is to be planned.
        results: what was planned.
        on_progress: as for `search_meshes`.
        cancel: as for `search_meshes`.
        end: time at which the search ends.
        first: first plan and bound of each mesh that has one.
        done: final candidates.
        bounds: lower bound of each mesh that has one.
    """

    meshes: Sequence[Mesh]
    options: PlanOptions
    tasks: Tasks
    results: Results
    on_progress: Callable[[SearchProgress], None] | None
    cancel: CancelToken | None
    end: float = inf
    first: dict[Mesh, MeshCandidate] = field(default_factory=dict)
    done: dict[Mesh, MeshCandidate] = field(default_factory=dict)
    bounds: dict[Mesh, float] = field(default_factory=dict)

    def run(self, ahead: int) -> list[MeshCandidate]:
        """All candidates; those of a search that is cancelled have what was found so far.

        Args:
            ahead: number of meshes that are compared only when both are planned.
        """
        few = [mesh for mesh in self.meshes if _num_axes(mesh) <= _FIRST_AXES]
        self._plan([(mesh, ()) for mesh in few], is_first=True)
        left = [mesh for mesh in self.meshes if mesh not in self.done]
        if not self._is_cancelled:
            # The best plans first, as others may then be proven to be slower.
            left.sort(key=self._rank)
            others = [mesh for mesh in self.meshes if mesh not in left]
            before = [(*others, *left[: max(i + 1 - ahead, 0)]) for i in range(len(left))]
            self._plan(list(zip(left, before, strict=True)), is_first=False)
        missing = (mesh for mesh in self.meshes if mesh not in self.done)
        return [*self.done.values(), *map(self._stopped, missing)]

    def _rank(self, mesh: Mesh) -> tuple[float, float, float]:
        """Order of a mesh that is to be planned: by first plan, by bound, by innermost axis."""
        node = mesh.topology.levels[0].size or mesh.num_devices
        distance = abs(log2(mesh.axis_sizes[-1] / min(node, mesh.num_devices)))
        bound = self.bounds.get(mesh, inf)
        return self._seconds(mesh), bound if isfinite(bound) else inf, distance

    def _stopped(self, mesh: Mesh) -> MeshCandidate:
        """A mesh that the search did not come to, with its first plan if it has one."""
        bound = self.bounds.get(mesh, -inf)
        first = self.first.get(mesh)
        if first is None or first.plan is None:
            options = _options_of(mesh, self.options)
            return MeshCandidate(mesh, options, None, _NOT_TRIED, bound, was_stopped=True)
        is_cancelled = self.cancel is not None and self.cancel.is_set()
        status = SolveStatus.CANCELLED if is_cancelled else SolveStatus.FEASIBLE
        certificate = with_statement(
            first.plan.certificate.model_copy(update={"status": status}),
            first.options,
            mesh,
            late=not is_cancelled,
        )
        plan = first.plan.model_copy(update={"certificate": certificate})
        return replace(first, plan=plan, bound=bound, was_stopped=True)

    def _plan(self, order: Sequence[tuple[Mesh, Sequence[Mesh]]], *, is_first: bool) -> None:
        """Plan meshes, each once those before it are planned.

        Args:
            order: the meshes, each with those before it.
            is_first: True for their first plans, else for full plans.
        """
        known = {mesh for mesh in self.meshes if not is_first and mesh not in dict(order)}
        first = {} if is_first else {mesh: c.objective for mesh, c in self.first.items()}
        asked, end = 0, len(known) + len(order)
        while len(known) < end and not self._is_cancelled:
            for mesh, before in order[asked:]:
                if not known.issuperset(before):
                    break
                # First plans of meshes in front are faster; two meshes cannot exclude each other.
                in_front = (first.get(other, inf) for other, _ in order[:asked])
                best = min((*map(self._seconds, before), *in_front), default=inf)
                self._ask(MeshTask(mesh, _options_of(mesh, self.options), best, is_first))
                asked += 1
            with suppress(queue.Empty):
                candidate = self.results.get(timeout=_POLL_SECONDS)
                known.add(candidate.mesh)
                self._record(candidate, is_first=is_first)

    def _ask(self, task: MeshTask) -> None:
        """Plan a mesh, unless its bound is known to be too high."""
        bound = self.bounds.get(task.mesh, -inf)
        if (1 - task.options.solver.relative_gap) * task.best < bound < inf:
            reason = slower_reason(bound, task.best)
            self.results.put(MeshCandidate(task.mesh, task.options, None, reason, bound))
        else:
            self.tasks.put(task)

    def _record(self, candidate: MeshCandidate, *, is_first: bool) -> None:
        """Record a result, and report it."""
        mesh, plan = candidate.mesh, candidate.plan
        bound = self.bounds[mesh] = max(candidate.bound, self.bounds.get(mesh, -inf))
        if is_first and not candidate.error and not _is_final(plan, candidate.options):
            if plan is not None and plan.found:
                self.first[mesh] = candidate
        else:
            first = self.first.get(mesh, candidate)
            is_faster = plan is not None and first.objective < candidate.objective
            self.done[mesh] = replace(first if is_faster else candidate, bound=bound)
        if self.on_progress is not None and (mesh in self.done or mesh in self.first):
            seconds = min(map(self._seconds, self.meshes))
            least = min(self.bounds.get(other, -inf) for other in self.meshes)
            self.on_progress(
                SearchProgress(len(self.done), len(self.meshes), candidate, seconds, least)
            )

    def _seconds(self, mesh: Mesh) -> float:
        """Seconds of the best plan of a mesh so far; inf if there is none."""
        known = (found[mesh].objective for found in (self.first, self.done) if mesh in found)
        return min(known, default=inf)

    @property
    def _is_cancelled(self) -> bool:
        is_over = time.monotonic() > self.end
        return is_over or (self.cancel is not None and self.cancel.is_set())


def _is_final(plan: Plan | None, options: PlanOptions) -> bool:
    """True for a first plan that is the fastest one, and complete."""
    is_optimal = plan is not None and plan.certificate.status is SolveStatus.OPTIMAL
    return is_optimal and not options.solver.comparisons


def _num_axes(mesh: Mesh) -> int:
    """Number of axes of the mesh of a stage."""
    return len(mesh.axes) - (num_pipeline_ranks(mesh) is not None)


def _options_of(mesh: Mesh, options: PlanOptions) -> PlanOptions:
    """Options for one mesh: without an axis for a pipeline, `stages` 'auto' is one stage."""
    if options.pipeline.stages == "auto" and num_pipeline_ranks(mesh) is None:
        return options.with_values(stages=1)
    return options
