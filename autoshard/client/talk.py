"""What can be asked for, described once: for both clients, with and without a service."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from autoshard.client.asked import Asked, MeshLike, ModelLike, graph_bytes, merged_options
from autoshard.client.effects import Conversation, OnProgress, work
from autoshard.client.offline import OfflinePlans
from autoshard.client.results import JobStatus, PlanEntry, PlanResult
from autoshard.client.studies import Studies
from autoshard.errors import ServiceError, ServiceUnavailableError
from autoshard.mesh import Topology
from autoshard.plan import Mode, Plan, PlanDifference, PlanOptions
from autoshard.planner import Explanation

Offline = Literal["fallback", "never", "only"]
"""Whether a plan that is kept on this machine may be the answer: where the service is not there,
never, or without asking the service at all."""


class Talk(Studies):
    """The methods of a client, as conversations.

    Args:
        kept: plans on this machine; None where none are kept.
    """

    def __init__(self, kept: OfflinePlans | None = None) -> None:
        self._kept = kept

    def plan(
        self,
        model: ModelLike,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        mesh: MeshLike,
        options: PlanOptions | None = None,
        mode: Mode | None = None,
        memory_budget: int | None = None,
        discover: bool = True,
        on_progress: OnProgress | None = None,
        offline: Offline = "fallback",
    ) -> Conversation[Plan]:
        """Plan a model for a mesh, and wait for the plan.

        Args:
            model: a module, which is exported on the meta device; or the path or bytes of a
                `.pt2` archive or of its model.json.
            args: example arguments of the module's forward.
            kwargs: example keyword arguments of the module's forward.
            mesh: size of each axis, or the fields of `make_mesh` as a mapping, or a mesh.
            options: of planning.
            mode: replaces that of the options.
            memory_budget: bytes per device; replaces that of the options.
            discover: whether operators of the model's own are run here, on small tensors, to
                find out how they may be cut; the service never runs them. If not, all of their
                work is done on every rank.
            on_progress: called each time that there is news of the job.
            offline: whether a plan of this request that is kept on this machine may be the
                answer: `fallback` where the service is not there, `never`, or `only`, which does
                not ask the service at all. `request_plan` says where a plan comes from.

        Returns:
            The plan; or, where there is none, the document whose reason says why.

        Raises:
            GraphError: the model cannot be exported, or the file not be read.
            RequestRejectedError: the service refused; carries the problem details.
            ServiceUnavailableError: the service does not answer, or is too busy.
        """
        result = yield from self.request_plan(
            model,
            args,
            kwargs,
            mesh=mesh,
            options=options,
            mode=mode,
            memory_budget=memory_budget,
            discover=discover,
            on_progress=on_progress,
            offline=offline,
        )
        if result.plan is None:
            raise ServiceError("the service ended the request without a plan")
        return result.plan

    def request_plan(
        self,
        model: ModelLike,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        mesh: MeshLike,
        options: PlanOptions | None = None,
        mode: Mode | None = None,
        memory_budget: int | None = None,
        discover: bool = True,
        on_progress: OnProgress | None = None,
        offline: Offline = "fallback",
        wait: bool = True,
    ) -> Conversation[PlanResult]:
        """As `plan`, and says where the plan comes from.

        Args:
            model: as in `plan`, and so on.
            args: likewise.
            kwargs: likewise.
            mesh: likewise.
            options: likewise.
            mode: likewise.
            memory_budget: likewise.
            discover: likewise.
            on_progress: likewise.
            offline: likewise.
            wait: whether to wait for a plan that is not known yet; if not, ask for the job
                later with `get_job`, or wait with `wait_for_job`.
        """
        merged = merged_options(options, mode, memory_budget)
        asked = yield from work(
            lambda: Asked(graph_bytes(model, args, kwargs), mesh, merged, discover=discover)
        )
        if offline == "only":
            plan = yield from self._find_kept(asked)
            if plan is None:
                raise ServiceUnavailableError("no plan of this request is kept on this machine")
            return PlanResult(plan, cached=True, source="offline")
        return (yield from self.answer(asked, on_progress, offline=offline, wait=wait))

    @abstractmethod
    def answer(
        self,
        asked: Asked,
        on_progress: OnProgress | None = None,
        *,
        offline: Offline = "never",
        wait: bool = True,
    ) -> Conversation[PlanResult]:
        """The plan of a request that was put together, as `request_plan`.

        Args:
            asked: the request.
            on_progress: as in `plan`.
            offline: whether a plan that is kept may take the place of a service that is not there.
            wait: as in `request_plan`.

        Raises:
            InputError: the request cannot be planned.
            RequestRejectedError: the service refused; carries the problem details.
            ServiceUnavailableError: the service does not answer, or is too busy.
        """

    @abstractmethod
    def get_plan(self, plan_id: str, *, offline: Offline = "fallback") -> Conversation[Plan]:
        """A plan that was made before.

        Args:
            plan_id: 64 hex digits.
            offline: as in `plan`.

        Raises:
            RequestRejectedError: there is none.
            ServiceUnavailableError: the service does not answer.
        """

    @abstractmethod
    def get_job(self, job_id: str) -> Conversation[JobStatus]:
        """Where a job stands.

        Raises:
            RequestRejectedError: there is no such job, or no longer.
            ServiceUnavailableError: the service does not answer.
        """

    @abstractmethod
    def wait_for_job(
        self, job_id: str, *, on_progress: OnProgress | None = None
    ) -> Conversation[Plan]:
        """Wait for the plan of a job.

        Raises:
            RequestRejectedError: the job failed, was cancelled, or does not exist.
            ServiceUnavailableError: the service does not answer.
        """

    @abstractmethod
    def cancel(self, job_id: str) -> Conversation[JobStatus]:
        """Cancel a job, for everybody who waits for it; one that is done stays as it is.

        Raises:
            RequestRejectedError: there is no such job.
            ServiceUnavailableError: the service does not answer.
        """

    @abstractmethod
    def explain(
        self, plan_id: str, name: str, *, value: bool = False, time_limit: float = 60.0
    ) -> Conversation[Explanation]:
        """Every alternative of one choice of a plan, with its price; as `autoshard.explain`.

        Args:
            plan_id: of a plan that was made before.
            name: a node, an input, a value, or the position of an output.
            value: where a node and a value share the name: the value.
            time_limit: seconds for what must be planned anew.

        Raises:
            RequestRejectedError: there is no such plan, or nothing of that name.
            ServiceUnavailableError: the service does not answer.
        """

    @abstractmethod
    def compare(self, before: str, after: str) -> Conversation[PlanDifference]:
        """What distinguishes two plans of one graph, by their ids; as `compare_plans`.

        Raises:
            RequestRejectedError: there is no such plan, or they are of different graphs.
            ServiceUnavailableError: the service does not answer.
        """

    @abstractmethod
    def export(self, plan_id: str, target: str) -> Conversation[str]:
        """A plan as code or settings of another framework; as `export_plan`.

        Raises:
            RequestRejectedError: there is no such plan or target.
            ServiceUnavailableError: the service does not answer.
        """

    @abstractmethod
    def list_plans(
        self, *, graph_digest: str | None = None, most: int = 100
    ) -> Conversation[tuple[PlanEntry, ...]]:
        """Plans that are kept, newest first.

        Args:
            graph_digest: only plans of this program (`plan.graph.digest`).
            most: how many at most.

        Raises:
            ServiceUnavailableError: the service does not answer.
        """

    @abstractmethod
    def list_jobs(
        self, *, states: Sequence[str] = (), most: int = 100
    ) -> Conversation[tuple[JobStatus, ...]]:
        """Jobs that are remembered, newest first, without what they made.

        Args:
            states: only jobs in one of these: queued, running, succeeded, failed, cancelled.
            most: how many at most.

        Raises:
            RequestRejectedError: there is no such state.
            ServiceUnavailableError: the service does not answer.
        """

    @abstractmethod
    def list_topologies(self) -> Conversation[tuple[str, ...]]:
        """Names of the clusters that a mesh or a search can name: built in, and stored.

        Raises:
            ServiceUnavailableError: the service does not answer.
        """

    @abstractmethod
    def get_topology(self, name: str) -> Conversation[Topology]:
        """A cluster with all its figures; as `autoshard.get_topology`.

        Raises:
            MeshError: there is none of that name, where no service is asked.
            RequestRejectedError: there is none of that name.
            ServiceUnavailableError: the service does not answer.
        """

    @abstractmethod
    def put_topology(self, topology: Topology) -> Conversation[None]:
        """Store a cluster under its name, in place of the one that had the name.

        A mesh or a search that names it from now on means this one; without a service, one of
        this client.

        Raises:
            MeshError: the name is of one that is built in, where no service is asked.
            RequestRejectedError: so it is at the service; or there are too many.
            ServiceUnavailableError: the service does not answer.
        """

    @abstractmethod
    def delete_topology(self, name: str) -> Conversation[None]:
        """Forget a cluster that was stored; plans that were made for it stay.

        Raises:
            MeshError: none was stored under the name, where no service is asked.
            RequestRejectedError: so it is at the service.
            ServiceUnavailableError: the service does not answer.
        """

    @abstractmethod
    def health(self) -> Conversation[dict[str, str]]:
        """Versions of a service that is ready.

        Raises:
            ServiceUnavailableError: it does not answer, or is not ready.
        """

    def _find_kept(self, asked: Asked) -> Conversation[Plan | None]:
        """The plan of a request, if it is kept on this machine."""
        kept = self._kept
        return None if kept is None else (yield from work(lambda: kept.find(asked)))
