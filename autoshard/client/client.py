"""The clients of the planner: at a service, or in this process."""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar, Unpack, cast

from autoshard import exports, planner, report
from autoshard.base.arguments import Count, Seconds, Share, check_methods
from autoshard.client.base import ClientBase
from autoshard.client.remote import PLANS
from autoshard.client.transport import AsyncTransport, BlockingTransport, get, post, run_blocking
from autoshard.errors import OptionError, ServiceError
from autoshard.mesh import Topology
from autoshard.plan import Plan
from autoshard.plan.options import MIN_EXPRESSED
from autoshard.requests import running
from autoshard.requests.kept_plans import Offline
from autoshard.requests.models import (
    ConfigArguments,
    MeshLike,
    MeshSearchRequest,
    ModelLike,
    OperatorCoverageRequest,
    PlanArguments,
    PlanRequest,
    SearchArguments,
    read_model,
)
from autoshard.requests.results import (
    JobStatus,
    MeshSearch,
    OnProgress,
    PlanEntry,
    PlanResult,
    SearchResult,
    Validation,
)

if TYPE_CHECKING:
    from autoshard.solve import CancelToken

P = ParamSpec("P")
T = TypeVar("T")


@check_methods
class AsyncClient(ClientBase):
    """As `Client`, with coroutines; an asynchronous context manager."""

    # `Client` runs these methods too: none may call another one through `self`.

    _transport_class = AsyncTransport

    async def plan(
        self,
        model: "ModelLike | None" = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        on_progress: OnProgress | None = None,
        offline: Offline = "fallback",
        **request: Unpack[PlanArguments],
    ) -> Plan:
        """Plan a model for a mesh, and wait for the plan.

            plan = client.plan("gpt2.pt2", mesh=(2, 4), memory_budget="40GB")
            plan = client.plan(config="config.json", seq_length=4096, mesh=(2, 4))

        Args:
            model: a module, which is exported on the meta device; or the path or bytes of a `.pt2`
                archive or of its model.json.
            config: in place of a model, the config of a text model of transformers, or the path of
                its file. The service makes the model, which needs its extra `configs`.
            batch_size: of a config: sequences of a step, of all devices together; by default 8.
            seq_length: of a config: tokens of each sequence; by default at most 4,096.
            dtype: of a config: element type of the weights; by default its own, or bfloat16.
            args: example arguments of the module's forward.
            kwargs: example keyword arguments of the module's forward.
            one_stage: archive and options of the usual layouts beside a pipeline; in this process.
            mesh: such as `(2, 4)` or `"2x4"`, a mesh, or a mapping of arguments of `make_mesh`.
            options: of planning.
            mode: replaces that of the options.
            memory_budget: per device, such as "80GB"; replaces that of the options.
            discover: run the model's own operators in this process, on small tensors, to find
                their sharding rules; the service never runs them. If False, they are replicated.
            on_progress: called with each progress report of the job.
            offline: use of plans kept on this machine: `fallback` if the service cannot be reached,
                `never`, or `only`, without the service. `request_plan` has the plan's source.

        Returns:
            The plan. Ask `plan.found` first: if there is none, `plan.reason` says why.

        Raises:
            GraphError: the model cannot be exported, or the file cannot be read.
            RequestRejectedError: the service refused; carries the problem details.
            ServiceUnavailableError: the service does not answer, or is too busy.
        """
        result = await AsyncClient.request_plan(
            self, model, args, kwargs, on_progress=on_progress, offline=offline, **request
        )
        if result.plan is None:
            raise ServiceError("the service ended the request without a plan")
        return result.plan

    async def request_plan(
        self,
        model: "ModelLike | None" = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        on_progress: OnProgress | None = None,
        offline: Offline = "fallback",
        wait: bool = True,
        stop: "CancelToken | None" = None,
        **request: Unpack[PlanArguments],
    ) -> PlanResult:
        """As `plan`, with the source of the plan; need not wait for it.

        The arguments and errors are those of `plan`. With `wait=False`, it returns immediately if
        the plan is not known yet: poll the job with `get_job`, or wait with `wait_for_job`. Once
        `stop`, such as a `threading.Event`, is set, planning in this process ends with the best
        plan so far, whose status is `cancelled`; the job of a service is not stopped.
        """
        made = await self._transport.run(lambda: PlanRequest(model, args, kwargs, **request))
        return await self._backend.plan(made, on_progress, offline=offline, wait=wait, stop=stop)

    async def search(
        self,
        model: "ModelLike | None" = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        on_progress: OnProgress | None = None,
        **request: Unpack[SearchArguments],
    ) -> MeshSearch:
        """Plan a model on every mesh of a number of devices, and wait for the ranking.

        The plans are stored: `get_plan` returns each by the `plan_id` of its mesh.

        Args:
            model: as in `plan`.
            args: as in `plan`.
            kwargs: as in `plan`.
            num_devices: of each mesh.
            topology: a name of `list_topologies`, or a topology; the default one if None.
            nodes: number of nodes, as for `make_mesh`.
            gpus_per_node: number of devices of a node, instead of `nodes`.
            max_axes: largest number of mesh axes.
            total_time_limit: seconds of all meshes together; None for those of the plans alone.
            options: of planning, the same for all meshes; `time_limit` is that of each plan.
            mode: replaces that of the options.
            memory_budget: per device, such as "80GB"; replaces that of the options.
            discover: as in `plan`.
            on_progress: called with each progress report of the job: its phase counts the meshes
                that are planned, its incumbent is the seconds of a step under the latest plan.

        Returns:
            Every mesh, best first; one whose plan ran out of time has no `plan_id`.

        Raises:
            GraphError: the model cannot be exported, or the file cannot be read.
            RequestRejectedError: the service refused; carries the problem details.
            ServiceUnavailableError: the service does not answer, or is too busy.
        """
        result = await AsyncClient.request_search(
            self, model, args, kwargs, on_progress=on_progress, **request
        )
        if result.search is None:
            raise ServiceError("the service ended the request without a search")
        return result.search

    async def request_search(
        self,
        model: "ModelLike | None" = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        on_progress: OnProgress | None = None,
        wait: bool = True,
        stop: "CancelToken | None" = None,
        **request: Unpack[SearchArguments],
    ) -> SearchResult:
        """As `search`, with the source of the ranking; need not wait for it.

        The arguments and errors are those of `search`. With `wait=False`, it returns immediately
        if the search is not known yet: poll the job with `get_job`, or wait with
        `wait_for_search`. Once `stop`, such as a `threading.Event`, is set, a search in this
        process ends with the meshes planned so far; the job of a service is not stopped.
        """
        made = await self._transport.run(lambda: MeshSearchRequest(model, args, kwargs, **request))
        return await self._backend.search(made, on_progress, wait=wait, stop=stop)

    async def validate(
        self,
        model: "ModelLike | None" = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        **request: Unpack[PlanArguments],
    ) -> Validation:
        """Check a request for a plan and measure its problem, without planning it.

        A request that planning would refuse is refused here, with the same message: operators or
        options that cannot be planned, an invalid mesh, a limit of the service. The arguments are
        those of `plan`.

        Returns:
            The plan's id, and the size of the problem; `size.feasible` is False if memory rules
            out every plan.

        Raises:
            GraphError: the model cannot be exported, or the file cannot be read.
            RequestRejectedError: the service would refuse; carries the problem details.
            ServiceUnavailableError: the service does not answer, or is too busy.
        """
        made = await self._transport.run(lambda: PlanRequest(model, args, kwargs, **request))
        return await self._backend.validate(made)

    async def coverage(
        self,
        model: "ModelLike | None" = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        mesh: "MeshLike | None" = None,
        plan: Plan | None = None,
        discover: bool = True,
        **of_config: Unpack[ConfigArguments],
    ) -> "report.Coverage":
        """List the operators of a model that can be sharded; as `autoshard.operator_coverage`.

        Args:
            model: as in `plan`.
            args: as in `plan`.
            kwargs: as in `plan`.
            mesh: its axes must be able to shard an operator; axes of any size if None.
            plan: a plan of the model, for the time that each operator takes under it. The
                coverage is then computed in this process, with the rules of the plan.
            discover: as in `plan`.
            config: as in `plan`, with `batch_size`, `seq_length` and `dtype`.

        Raises:
            GraphError: the model cannot be exported, or the file cannot be read.
            RequestRejectedError: the service refused; carries the problem details.
            ServiceUnavailableError: the service does not answer, or is too busy.
        """
        if plan is not None:
            if model is None:
                raise OptionError("plan= needs the model that was planned, not config=")
            return await self._transport.run(
                lambda: running.plan_coverage(read_model(model, args, kwargs), plan)
            )
        request = await self._transport.run(
            lambda: OperatorCoverageRequest(
                model, args, kwargs, mesh, discover=discover, **of_config
            )
        )
        return await self._backend.coverage(request)

    async def get_plan(self, plan_id: str, *, offline: Offline = "fallback") -> Plan:
        """Return a plan that was made before.

        Args:
            plan_id: 64 hex digits.
            offline: as in `plan`.

        Raises:
            RequestRejectedError: there is none.
            ServiceUnavailableError: the service does not answer.
        """
        return await self._backend.get_plan(plan_id, offline=offline)

    async def get_job(self, job_id: str) -> JobStatus:
        """Return the state of a job.

        Raises:
            RequestRejectedError: the job is unknown, or was forgotten.
            ServiceUnavailableError: the service does not answer.
        """
        return await self._backend.get_job(job_id)

    async def wait_for_job(self, job_id: str, *, on_progress: OnProgress | None = None) -> Plan:
        """Wait for the plan of a job.

        Raises:
            RequestRejectedError: the job failed, was cancelled, or is unknown.
            ServiceUnavailableError: the service does not answer.
            ServiceError: the job makes no plan.
        """
        return (await self._backend.wait_for_job(job_id, on_progress)).get_plan()

    async def wait_for_search(
        self, job_id: str, *, on_progress: OnProgress | None = None
    ) -> MeshSearch:
        """Wait for the ranking of a job.

        Raises:
            RequestRejectedError: the job failed, was cancelled, or is unknown.
            ServiceUnavailableError: the service does not answer.
            ServiceError: the job is not a search.
        """
        return (await self._backend.wait_for_job(job_id, on_progress)).get_search()

    async def cancel(self, job_id: str) -> JobStatus:
        """Cancel a job for all callers that wait for it; a finished job does not change.

        Raises:
            RequestRejectedError: the job is unknown.
            ServiceUnavailableError: the service does not answer.
        """
        return await self._backend.cancel(job_id)

    async def delete_plan(self, plan_id: str) -> None:
        """Delete a plan, also the copy that is kept on this machine.

        Raises:
            RequestRejectedError: there is none.
            ServiceUnavailableError: the service does not answer.
        """
        await self._backend.delete_plan(plan_id)

    async def delete_job(self, job_id: str) -> None:
        """Delete a finished job; the plan that it has made is not deleted at a service.

        Raises:
            RequestRejectedError: the job is unknown, or not finished: `cancel` it first.
            ServiceUnavailableError: the service does not answer.
        """
        await self._backend.delete_job(job_id)

    async def delete_graph(self, graph_sha256: str) -> None:
        """Delete a graph that was uploaded to the service; plans that were made for it stay.

        Args:
            graph_sha256: digest of the bytes of the archive or the model.json, in hex.

        Raises:
            RequestRejectedError: there is none; a client without a service stores none.
            ServiceUnavailableError: the service does not answer.
        """
        await self._backend.delete_graph(graph_sha256)

    async def explain(
        self, plan: Plan | str, name: str, *, value: bool = False, time_limit: Seconds = 60.0
    ) -> "planner.Explanation":
        """Price every alternative of one choice of a plan; as `autoshard.explain`.

        Args:
            plan: the id of a plan, or a plan, which is explained in this process.
            name: a node, an input, a value, or the position of an output.
            value: take the value, if a node and a value share the name.
            time_limit: seconds for alternatives that must be planned anew.

        Raises:
            RequestRejectedError: there is no such plan, or nothing of that name.
            ServiceUnavailableError: the service does not answer.
        """
        document = {"name": name, "value": value, "time_limit": time_limit}
        return await self._compute_from_plans(
            plan,
            kind=planner.Explanation,
            make_request=lambda plan_id: post(f"{PLANS}/{plan_id}:explain", document),
            compute=lambda made: running.explain(made, name, value=value, time_limit=time_limit)[0],
            waiting=True,
        )

    async def compare(self, before: Plan | str, after: Plan | str) -> "report.PlanDifference":
        """Compare two plans of one graph; as `autoshard.compare_plans`.

        Args:
            before: the id of a plan, or a plan.
            after: the id of a plan, or a plan. Unless both are ids, they are compared in this
                process.

        Raises:
            RequestRejectedError: there is no such plan, or they are of different graphs.
            ServiceUnavailableError: the service does not answer.
        """
        return await self._compute_from_plans(
            before,
            after,
            kind=report.PlanDifference,
            make_request=lambda *pair: post(
                f"{PLANS}:compare", {"before": pair[0], "after": pair[1]}
            ),
            compute=report.compare_plans,
        )

    async def export(
        self, plan: Plan | str, target: str, *, min_expressed: Share = MIN_EXPRESSED
    ) -> str:
        """Export a plan as code or settings of another framework; as `autoshard.export_plan`.

        Args:
            plan: the id of a plan, or a plan, which is exported in this process.
            target: one of `autoshard.plan.EXPORT_TARGETS`.
            min_expressed: share of the plan that the target must express, from 0 to 1.

        Raises:
            PlanError: the target expresses less of the plan, in this process.
            RequestRejectedError: there is no such plan or target, or the target expresses less of
                the plan.
            ServiceUnavailableError: the service does not answer.
        """
        return await self._compute_from_plans(
            plan,
            kind=str,
            make_request=lambda plan_id: get(
                f"{PLANS}/{plan_id}/export", to=target, min_expressed=min_expressed
            ),
            compute=lambda made: exports.export_plan(made, target, min_expressed=min_expressed),
        )

    async def summarise(self, plan: Plan | str) -> str:
        """Summarise a plan as text of at most 30 lines: parallelism, step time, memory, costs.

        Args:
            plan: the id of a plan, or a plan, which is summarised in this process.

        Raises:
            RequestRejectedError: there is no such plan.
            ServiceUnavailableError: the service does not answer.
        """
        return await self._compute_from_plans(
            plan,
            kind=str,
            make_request=lambda plan_id: get(f"{PLANS}/{plan_id}/summary"),
            compute=lambda made: report.summarise(made, width=80) + "\n",
        )

    async def trace(self, plan: Plan | str) -> str:
        """Trace one predicted step of a plan, as JSON for Perfetto or chrome://tracing.

        Args:
            plan: the id of a plan, or a plan, which is simulated in this process.

        Raises:
            PlanError: the document has no plan, in this process.
            RequestRejectedError: the document has no plan at the service, or there is none.
            ServiceUnavailableError: the service does not answer.
        """
        return await self._compute_from_plans(
            plan,
            kind=str,
            make_request=lambda plan_id: get(f"{PLANS}/{plan_id}/trace"),
            compute=report.plan_trace,
        )

    async def list_plans(
        self, *, graph_digest: str | None = None, limit: Count = 100
    ) -> tuple[PlanEntry, ...]:
        """List the plans that are stored, newest first.

        Args:
            graph_digest: only plans of this program (`plan.graph.digest`).
            limit: maximum number of plans.

        Raises:
            ServiceUnavailableError: the service does not answer.
        """
        return await self._backend.list_plans(graph_digest=graph_digest, limit=limit)

    async def list_jobs(
        self, *, states: Sequence[str] = (), limit: Count = 100
    ) -> tuple[JobStatus, ...]:
        """List the jobs that are remembered, newest first, without their results.

        Args:
            states: only jobs in one of these: queued, running, succeeded, failed, cancelled.
            limit: maximum number of jobs.

        Raises:
            RequestRejectedError: there is no such state.
            ServiceUnavailableError: the service does not answer.
        """
        return await self._backend.list_jobs(states=states, limit=limit)

    async def list_topologies(self) -> tuple[str, ...]:
        """List the topologies that a mesh or a search can name, built in or stored.

        Raises:
            ServiceUnavailableError: the service does not answer.
        """
        return await self._backend.list_topologies()

    async def get_topology(self, name: str) -> Topology:
        """Return a topology; as `autoshard.get_topology`.

        Raises:
            MeshError: there is none of that name, in this process.
            RequestRejectedError: there is none of that name at the service.
            ServiceUnavailableError: the service does not answer.
        """
        return await self._backend.get_topology(name)

    async def put_topology(self, topology: Topology) -> None:
        """Store a topology under its name, or replace the stored one.

        At a service, requests of its project can name it; in this process, those of this client.

        Raises:
            MeshError: the name is that of a built-in topology, in this process.
            RequestRejectedError: it is built in at the service, or too many are stored.
            ServiceUnavailableError: the service does not answer.
        """
        await self._backend.put_topology(topology)

    async def delete_topology(self, name: str) -> None:
        """Delete a stored topology; plans that were made for it stay.

        Raises:
            MeshError: none is stored under the name, in this process.
            RequestRejectedError: none is stored under the name at the service.
            ServiceUnavailableError: the service does not answer.
        """
        await self._backend.delete_topology(name)

    async def health(self) -> dict[str, str]:
        """Return the versions of a service that is ready.

        Raises:
            ServiceUnavailableError: it does not answer, or is not ready.
        """
        return await self._backend.health()

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> "Callable[Concatenate[Client, P], T]":
    """Make a blocking method of a coroutine method: the same code over a blocking transport."""

    @wraps(method)
    def call(self: "Client", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return run_blocking(method(cast("AsyncClient", self), *args, **kwargs))

    return call


class Client(ClientBase):
    """Client of a planning service; a context manager. Safe to share between threads.

    Args:
        url: of the service, such as http://127.0.0.1:8000.
        timeout: seconds that a single request may take; planning may take longer.
        api_key: AUTOSHARD_API_KEY, the file that AUTOSHARD_API_KEY_FILE names, or `api-key` in
            the user's configuration folder, if None; none is sent if False.
        retry: policy for requests that fail, or are answered with "try again later".
        cache: store plans on this machine, for when the service is down, or the folder to store
            them in; AUTOSHARD_CACHE, or the user's cache folder, if True.
        fallback: `local` runs requests in this process if the service cannot be reached and no
            plan is stored on this machine.

    Raises:
        OptionError: the API key cannot be read.
    """

    _transport_class = BlockingTransport

    plan = _blocking(AsyncClient.plan)
    request_plan = _blocking(AsyncClient.request_plan)
    search = _blocking(AsyncClient.search)
    request_search = _blocking(AsyncClient.request_search)
    validate = _blocking(AsyncClient.validate)
    coverage = _blocking(AsyncClient.coverage)
    get_plan = _blocking(AsyncClient.get_plan)
    get_job = _blocking(AsyncClient.get_job)
    wait_for_job = _blocking(AsyncClient.wait_for_job)
    wait_for_search = _blocking(AsyncClient.wait_for_search)
    cancel = _blocking(AsyncClient.cancel)
    explain = _blocking(AsyncClient.explain)
    compare = _blocking(AsyncClient.compare)
    export = _blocking(AsyncClient.export)
    summarise = _blocking(AsyncClient.summarise)
    trace = _blocking(AsyncClient.trace)
    list_plans = _blocking(AsyncClient.list_plans)
    list_jobs = _blocking(AsyncClient.list_jobs)
    list_topologies = _blocking(AsyncClient.list_topologies)
    get_topology = _blocking(AsyncClient.get_topology)
    put_topology = _blocking(AsyncClient.put_topology)
    delete_topology = _blocking(AsyncClient.delete_topology)
    delete_plan = _blocking(AsyncClient.delete_plan)
    delete_job = _blocking(AsyncClient.delete_job)
    delete_graph = _blocking(AsyncClient.delete_graph)
    health = _blocking(AsyncClient.health)
    close = _blocking(AsyncClient.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
