"""The same conversations without a service: plans are made in this process."""

import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from importlib.util import find_spec
from itertools import islice

from autoshard.client.asked import Asked, AskedCoverage, AskedSearch
from autoshard.client.effects import Conversation, OnProgress, work
from autoshard.client.jobs import LocalJob, LocalJobs, Made, Make, not_found, wait_for
from autoshard.client.offline import FOLDER_VARIABLE, OfflinePlans
from autoshard.client.results import (
    JobStatus,
    MeshSearch,
    PlanEntry,
    PlanResult,
    SearchedMesh,
    SearchResult,
    Validation,
)
from autoshard.client.talk import Offline, Talk
from autoshard.client.versions import versions
from autoshard.errors import MeshError
from autoshard.graph import Graph, graph_from_json
from autoshard.mesh import Topology, get_topology, list_topologies
from autoshard.ops import has_rule
from autoshard.outcome import SolveStatus
from autoshard.plan import (
    Coverage,
    Plan,
    PlanDifference,
    compare_plans,
    export_plan,
    operator_coverage,
)
from autoshard.planner import (
    Candidate,
    Explanation,
    explain,
    make_plan,
    plan_id,
    problem_size,
    search_meshes,
)
from autoshard.solve import KeyValueStore
from autoshard_solver_cache import FolderCache, NamespacedCache

_UNFINISHED = frozenset({SolveStatus.TIMED_OUT, SolveStatus.CANCELLED})

_PROCESSES = 2
"""Processes of a search."""


class Local(Talk):
    """Answers in this process, with the solved blocks that the command line keeps too.

    What the service would refuse raises the library's own error.

    Args:
        kept: plans on this machine; None where none are kept.
        folder: of solved blocks; None keeps none.
    """

    def __init__(self, kept: OfflinePlans | None = None, *, blocks: bool = True) -> None:
        super().__init__(kept)
        self._block_cache: KeyValueStore | None = None
        if blocks:
            folder = os.environ.get(FOLDER_VARIABLE) or None
            self._block_cache = NamespacedCache(FolderCache(folder), "blocks")
        self._jobs = LocalJobs()
        self._topologies: dict[str, Topology] = {}

    def answer(
        self,
        asked: Asked,
        on_progress: OnProgress | None = None,
        *,
        offline: Offline = "never",  # noqa: ARG002  here is always somebody who answers
        wait: bool = True,
    ) -> Conversation[PlanResult]:
        """As `Talk.answer`."""
        asked.topologies = dict(self._topologies)
        known = yield from work(lambda: plan_id(asked.program, asked.mesh, asked.options))
        searched, kept = self._jobs.searched_plan(known), self._kept
        if searched is not None:
            if kept is not None:
                yield from work(lambda: kept.keep(searched, asked))
            return PlanResult(searched, cached=True, source="local")
        job, cached = yield from self._ordered(
            known, lambda job: self._solve(asked, job), on_progress, plan_id=known, wait=wait
        )
        status = job.status()
        plan = status.get_plan() if wait else status.plan
        return PlanResult(plan, cached, job.id, source="local")

    def answer_search(
        self, asked: AskedSearch, on_progress: OnProgress | None = None, *, wait: bool = True
    ) -> Conversation[SearchResult]:
        """As `Talk.answer_search`."""
        asked.topologies = dict(self._topologies)
        job, cached = yield from self._ordered(
            asked.digest, lambda job: self._search(asked, job), on_progress, wait=wait
        )
        status = job.status()
        search = status.get_search() if wait or status.result is not None else None
        return SearchResult(search, cached, job.id, source="local")

    def answer_validation(self, asked: Asked) -> Conversation[Validation]:
        """As `Talk.answer_validation`."""
        asked.topologies = dict(self._topologies)

        def validate() -> Validation:
            known = plan_id(asked.program, asked.mesh, asked.options)
            graph = _with_found_rules(asked.program, self._block_cache)
            size = problem_size(graph, asked.mesh, asked.options)
            return Validation(plan_id=known, size=size)

        return (yield from work(validate))

    def answer_coverage(self, asked: AskedCoverage) -> Conversation[Coverage]:
        """As `Talk.answer_coverage`."""
        asked.topologies = dict(self._topologies)

        def cover() -> Coverage:
            graph = _with_found_rules(asked.program, self._block_cache)
            return operator_coverage(graph, axis_sizes=asked.axis_sizes)

        return (yield from work(cover))

    def get_plan(self, plan_id: str, *, offline: Offline = "fallback") -> Conversation[Plan]:
        """As `Talk.get_plan`."""
        plan = next((plan for plan, _ in self._jobs.plans() if plan.id == plan_id), None)
        kept = self._kept
        if plan is None and kept is not None and offline != "never":
            plan = yield from work(lambda: kept.get(plan_id))
        if plan is None:
            raise not_found(f"no plan {plan_id} was made in this process, or kept")
        return plan

    def get_job(self, job_id: str) -> Conversation[JobStatus]:
        """As `Talk.get_job`."""
        job = self._jobs.find(job_id)
        yield from work(lambda: None)
        return job.status()

    def wait_for_job(
        self, job_id: str, *, on_progress: OnProgress | None = None
    ) -> Conversation[Plan]:
        """As `Talk.wait_for_job`."""
        job = self._jobs.find(job_id)
        job.is_told = True
        yield from wait_for(job, on_progress)
        return job.status().get_plan()

    def wait_for_search(
        self, job_id: str, *, on_progress: OnProgress | None = None
    ) -> Conversation[MeshSearch]:
        """As `Talk.wait_for_search`."""
        job = self._jobs.find(job_id)
        job.is_told = True
        yield from wait_for(job, on_progress)
        return job.status().get_search()

    def cancel(self, job_id: str) -> Conversation[JobStatus]:
        """As `Talk.cancel`."""
        job = self._jobs.find(job_id)
        job.cancel.set()
        # The solver looks for the event often, but not at once.
        yield from work(job.done.wait)
        return job.status()

    def explain(
        self, plan_id: str, name: str, *, value: bool = False, time_limit: float = 60.0
    ) -> Conversation[Explanation]:
        """As `Talk.explain`."""
        plan = yield from self.get_plan(plan_id)
        return (
            yield from work(
                lambda: explain(_program(plan), plan, name, value=value, time_limit=time_limit)
            )
        )

    def compare(self, before: str, after: str) -> Conversation[PlanDifference]:
        """As `Talk.compare`."""
        plans = [(yield from self.get_plan(before)), (yield from self.get_plan(after))]
        return (yield from work(lambda: compare_plans(*plans)))

    def export(self, plan_id: str, target: str) -> Conversation[str]:
        """As `Talk.export`."""
        plan = yield from self.get_plan(plan_id)
        return (yield from work(lambda: export_plan(plan, target)))

    def list_plans(
        self, *, graph_digest: str | None = None, most: int = 100
    ) -> Conversation[tuple[PlanEntry, ...]]:
        """As `Talk.list_plans`; those that were made in this process."""
        made = yield from work(lambda: list(self._jobs.plans()))
        # A plan of a search may have been asked for by itself before.
        newest = {plan.id: (plan, at) for plan, at in reversed(made)}
        fitting = (
            _entry(plan, at)
            for plan, at in reversed(newest.values())
            if graph_digest in {None, plan.graph.digest}
        )
        return tuple(islice(fitting, most))

    def list_jobs(
        self, *, states: Sequence[str] = (), most: int = 100
    ) -> Conversation[tuple[JobStatus, ...]]:
        """As `Talk.list_jobs`."""
        found = yield from work(lambda: [j.status() for j in reversed(self._jobs.known())])
        fitting = (job for job in found if not states or job.state in states)
        return tuple(replace(job, plan=None, result=None) for job in islice(fitting, most))

    def list_topologies(self) -> Conversation[tuple[str, ...]]:
        """As `Talk.list_topologies`."""
        return (yield from work(lambda: tuple(sorted({*list_topologies(), *self._topologies}))))

    def get_topology(self, name: str) -> Conversation[Topology]:
        """As `Talk.get_topology`."""
        return (yield from work(lambda: self._topologies.get(name) or get_topology(name)))

    def put_topology(self, topology: Topology) -> Conversation[None]:
        """As `Talk.put_topology`; for as long as this client lives."""
        name = topology.name
        if name in list_topologies():
            raise MeshError(f"{name!r} is built in and stays as it is; choose another name")
        yield from work(lambda: self._topologies.update({name: topology}))

    def delete_topology(self, name: str) -> Conversation[None]:
        """As `Talk.delete_topology`."""
        found = yield from work(lambda: self._topologies.pop(name, None))
        if found is None:
            raise MeshError(f"no topology {name!r} was stored in this process")

    def health(self) -> Conversation[dict[str, str]]:
        """As `Talk.health`."""
        return (yield from work(versions))

    def _ordered(
        self,
        asked: str,
        make: Make,
        on_progress: OnProgress | None,
        *,
        plan_id: str = "",
        wait: bool,
    ) -> Conversation[tuple[LocalJob, bool]]:
        """The job that makes something, and whether it was done before anybody asked this time.

        Raises:
            AutoshardError: it cannot be made, where it is waited for.
        """
        job, is_new = self._jobs.join(asked, make, plan_id=plan_id, wait=wait)
        cached = not is_new and job.done.is_set()
        if wait:
            yield from self._jobs.await_joined(job, on_progress)
        return job, cached

    def _solve(self, asked: Asked, job: LocalJob) -> Made | None:
        plan = make_plan(
            _with_found_rules(asked.program, self._block_cache),
            asked.mesh,
            asked.options,
            on_progress=job.advance,
            cancel=job.cancel,
            block_cache=self._block_cache,
        )
        if plan.certificate.status is SolveStatus.CANCELLED:
            return None
        plan = _named(plan, job.plan_id)
        if self._kept is not None:
            self._kept.keep(plan, asked)
        return Made((plan,), is_final=_is_final(plan))

    def _search(self, asked: AskedSearch, job: LocalJob) -> Made | None:
        found = search_meshes(
            _with_found_rules(asked.program, self._block_cache),
            asked.num_devices,
            topology=asked.cluster,
            options=asked.options,
            max_axes=asked.max_axes,
            num_workers=_PROCESSES,
            on_progress=job.advance_search,
            cancel=job.cancel,
            block_cache=self._block_cache,
        )
        if job.cancel.is_set():
            return None
        pairs = [(candidate, _plan_of(candidate, asked)) for candidate in found]
        plans = [plan for _, plan in pairs if plan is not None]
        for plan in plans:
            if self._kept is not None:
                self._kept.keep(plan)
        search = MeshSearch(meshes=tuple(_searched_mesh(*pair) for pair in pairs))
        return Made(
            tuple(plan for plan in plans if _is_final(plan)),
            search,
            is_final=all(_is_final(plan) for plan in plans),
        )


def _plan_of(candidate: Candidate, asked: AskedSearch) -> Plan | None:
    """The plan of a mesh, under the id that it has when it is asked for by itself."""
    if candidate.plan is None:
        return None
    return _named(candidate.plan, plan_id(asked.program, candidate.mesh, asked.options))


def _searched_mesh(candidate: Candidate, plan: Plan | None) -> SearchedMesh:
    if plan is None:
        return SearchedMesh(mesh=candidate.mesh, error=candidate.error)
    return SearchedMesh(
        mesh=candidate.mesh,
        plan_id=plan.id if _is_final(plan) else None,
        certificate=plan.certificate,
        peak_memory=None if plan.memory is None else plan.memory.peak,
        reason=plan.reason,
    )


def _named(plan: Plan, known: str) -> Plan:
    # What is found by running operators follows from the request, and does not change its id.
    return plan if plan.id == known else plan.model_copy(update={"id": known})


def _entry(plan: Plan, created_at: datetime) -> PlanEntry:
    return PlanEntry(
        id=plan.id,
        created_at=created_at,
        status=plan.certificate.status,
        objective=plan.certificate.objective,
        gap=plan.certificate.gap,
        peak_memory=None if plan.memory is None else plan.memory.peak,
        mode=plan.options.mode,
        mesh=tuple((axis.name, axis.size) for axis in plan.mesh.axes),
        topology=plan.mesh.topology.name,
        graph_digest=plan.graph.digest,
    )


def _with_found_rules(graph: Graph, store: KeyValueStore | None) -> Graph:
    """The program with rules for operators of ATen that have none, where torch is installed."""
    if all(has_rule(node.operator) for node in graph.nodes if node.operator.startswith("aten.")):
        return graph
    if find_spec("torch") is None:
        return graph
    from autoshard.discovery import discover  # noqa: PLC0415  torch is slow to import

    return discover(graph, custom=False, store=store).graph


def _is_final(plan: Plan) -> bool:
    return plan.certificate.status not in _UNFINISHED


def _program(plan: Plan) -> Graph:
    return graph_from_json(plan.stages[0].program)
