"""Requests run in this process, with what is kept on this machine."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from autoshard import planner, report
from autoshard.errors import MeshError
from autoshard.mesh import Mesh, Topology, get_topology, list_topologies, resolve_topology
from autoshard.plan import Plan
from autoshard.requests import running
from autoshard.requests.kept_plans import Offline, OfflinePlans, open_folder, require_plan
from autoshard.requests.models import MeshSearchRequest, OperatorCoverageRequest, PlanRequest
from autoshard.requests.results import (
    MeshSearch,
    PlanEntry,
    PlanResult,
    Validation,
)
from autoshard_solver_cache import NamespacedCache

if TYPE_CHECKING:
    from autoshard.solve import CancelToken

_MAX_PLANS = 64
"""Number of plans that are remembered; the oldest are forgotten first."""


class _Made(NamedTuple):
    """A plan that was made in this process.

    Attributes:
        plan: the plan.
        at: time of its latest request.
        is_final: True if the same request would give the same plan again.
    """

    plan: Plan
    at: datetime
    is_final: bool


class ThisProcess:
    """Runs requests in this process; safe to share between threads.

    Invalid requests raise the library's own errors, such as `MeshError`.

    Args:
        cache: store plans, solved blocks and found rules on this machine, or the folder to store
            them in; AUTOSHARD_CACHE, or the user's cache folder, if True.
        num_workers: processes that a mesh search plans with.

    Example:
        >>> here = ThisProcess(cache=False)
        >>> here.plan(PlanRequest("gpt2.pt2", mesh="2x4")).plan
    """

    def __init__(self, *, cache: bool | str | Path = True, num_workers: int = 2) -> None:
        self._kept = OfflinePlans.of(cache)
        self._resources = running.Resources(num_workers=num_workers)
        if cache is not False:
            store = open_folder(None if cache is True else cache)
            blocks, rules = NamespacedCache(store, "blocks"), NamespacedCache(store, "rules")
            self._resources = replace(self._resources, blocks=blocks, rules=rules)
        self._plans: dict[str, _Made] = {}
        self._lock = Lock()
        self._topologies: dict[str, Topology] = {}

    def plan(
        self,
        request: PlanRequest,
        *,
        on_progress: running.ProgressListener | None = None,
        cancel: "CancelToken | None" = None,
        offline: Offline = "never",
    ) -> PlanResult:
        """Make the plan of a request; one that was made before is returned again.

        Args:
            request: the request.
            on_progress: called with the solver's progress.
            cancel: set it to end with the best plan so far.
            offline: `only` returns a plan that is kept on this machine, and makes none.

        Raises:
            InputError: it cannot be planned.
            ServiceUnavailableError: only a kept plan was requested, and there is none.
        """
        if offline == "only":
            return require_plan(self._kept, request)
        mesh = request.mesh(self._topologies)
        known = self._plans.get(planner.plan_id(request.program, mesh, request.options))
        if known is not None and known.is_final:
            self._keep(known.plan, request)
            return PlanResult(known.plan, cached=True, source="local")
        made, is_final = running.plan(
            request.program,
            mesh,
            request.options,
            self._resources,
            on_progress=on_progress,
            cancel=cancel,
            made=self._without_comparisons(request, mesh),
            one_stage=request.one_stage,
        )
        self._keep(made, request, is_final=is_final)
        return PlanResult(made, cached=False, source="local")

    def _without_comparisons(self, request: PlanRequest, mesh: Mesh) -> Plan | None:
        """The plan that a search has made for the mesh, to which comparisons are added."""
        if not request.options.solver.comparisons:
            return None
        alone = request.options.with_values(comparisons=False)
        known = self._plans.get(planner.plan_id(request.program, mesh, alone))
        return None if known is None else known.plan

    def search(
        self,
        request: MeshSearchRequest,
        *,
        on_progress: running.ProgressListener | None = None,
        cancel: "CancelToken | None" = None,
    ) -> MeshSearch:
        """Plan on every mesh of a number of devices; the plans can be looked up by their ids.

        Raises:
            InputError: the request cannot be planned.
        """
        named = request.topology
        topology = resolve_topology(
            self._topologies.get(named, named) if isinstance(named, str) else named,
            request.num_devices,
            request.nodes,
            request.gpus_per_node,
        )

        def keep(made: Plan, is_final: bool) -> bool:  # noqa: FBT001  as `KeepPlan` is called
            self._keep(made, is_final=is_final)
            return True

        found, _ = running.search(
            request.program,
            request.num_devices,
            topology=topology,
            max_axes=request.max_axes,
            total_time_limit=request.total_time_limit,
            options=request.options,
            resources=self._resources,
            on_progress=on_progress,
            cancel=cancel,
            keep=keep,
        )
        return found

    def validate(self, request: PlanRequest) -> Validation:
        """Check a request and measure its problem, without planning it.

        Raises:
            InputError: it cannot be planned.
        """
        mesh = request.mesh(self._topologies)
        return running.validate(request.program, mesh, request.options, self._resources)[0]

    def coverage(self, request: OperatorCoverageRequest) -> "report.Coverage":
        """List the operators that can be sharded.

        Raises:
            InputError: the graph cannot be read, or the mesh is invalid.
        """
        sizes = request.axis_sizes(self._topologies)
        return running.coverage(request.program, sizes, self._resources)[0]

    def get_plan(self, known: str, *, offline: Offline = "fallback") -> Plan | None:
        """The plan of an id that was made here, or kept on this machine; None if there is none."""
        if known in self._plans:
            return self._plans[known].plan
        return None if self._kept is None or offline == "never" else self._kept.get(known)

    def plan_ids(self, prefix: str) -> list[str]:
        """Ids that begin with some digits, of plans that were made here or are kept."""
        kept = [] if self._kept is None else self._kept.ids(prefix)
        return sorted({*kept, *(known for known in self._plans if known.startswith(prefix))})

    def delete_plan(self, known: str) -> bool:
        """Forget a plan, also on this machine; False if there is none."""
        was_kept = self._kept is not None and self._kept.delete(known)
        with self._lock:
            return self._plans.pop(known, None) is not None or was_kept

    def list_plans(self, graph_digest: str | None = None) -> Iterator[PlanEntry]:
        """The plans that were made here, newest first."""
        for made in reversed(list(self._plans.values())):
            if graph_digest in {None, made.plan.graph.digest}:
                yield PlanEntry.of(made.plan, made.at)

    def list_topologies(self) -> tuple[str, ...]:
        """Names of topologies, built in or stored."""
        return tuple(sorted({*list_topologies(), *self._topologies}))

    def get_topology(self, name: str) -> Topology:
        """A topology by its name.

        Raises:
            MeshError: there is none of that name.
        """
        return self._topologies.get(name) or get_topology(name)

    def put_topology(self, topology: Topology) -> None:
        """Store a topology under its name, for the lifetime of this object.

        Raises:
            MeshError: the name is that of a built-in topology.
        """
        if topology.name in list_topologies():
            raise MeshError(
                f"{topology.name!r} is built in and cannot be replaced; choose another name"
            )
        self._topologies[topology.name] = topology

    def delete_topology(self, name: str) -> None:
        """Delete a stored topology.

        Raises:
            MeshError: none is stored under the name.
        """
        if self._topologies.pop(name, None) is None:
            raise MeshError(f"no topology {name!r} was stored in this process")

    def _keep(
        self, plan: Plan, request: PlanRequest | None = None, *, is_final: bool = True
    ) -> None:
        """Remember a plan, and keep it on this machine, unless another try may make a better."""
        with self._lock:
            self._plans.pop(plan.id, None)
            self._plans[plan.id] = _Made(plan, datetime.now(UTC), is_final)
            while len(self._plans) > _MAX_PLANS:
                self._plans.pop(next(iter(self._plans)))
        if self._kept is not None:
            self._kept.keep(plan, request)
