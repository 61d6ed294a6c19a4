"""What can be asked about a model besides its plan for one mesh: for both clients, as `Talk`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from autoshard.client.asked import (
    Asked,
    AskedCoverage,
    AskedSearch,
    MeshLike,
    ModelLike,
    graph_bytes,
    merged_options,
)
from autoshard.client.effects import Conversation, OnProgress, work
from autoshard.client.results import MeshSearch, SearchResult, Validation
from autoshard.errors import ServiceError
from autoshard.mesh import Topology
from autoshard.plan import Coverage, Mode, PlanOptions


class Studies(ABC):
    """The best mesh of a model, what a plan would be refused for, operators that can be cut."""

    def search(
        self,
        model: ModelLike,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        num_devices: int,
        topology: str | Topology | None = None,
        max_axes: int = 3,
        options: PlanOptions | None = None,
        mode: Mode | None = None,
        memory_budget: int | None = None,
        discover: bool = True,
        on_progress: OnProgress | None = None,
    ) -> Conversation[MeshSearch]:
        """Plan a model on every mesh of so many devices, and wait for the ranking.

        The plans are kept: `get_plan` has each under the `plan_id` of its mesh.

        Args:
            model: as in `plan`.
            args: as in `plan`.
            kwargs: as in `plan`.
            num_devices: that each mesh has.
            topology: a name of `list_topologies`, or a topology; the default one if None.
            max_axes: largest number of axes.
            options: of planning, the same for all meshes; `time_limit` holds for each.
            mode: replaces that of the options.
            memory_budget: bytes per device; replaces that of the options.
            discover: as in `plan`.
            on_progress: called each time that there is news of the job: its phase says how many
                meshes are planned, its incumbent is the price of the latest plan.

        Returns:
            Every mesh, best first; one whose plan ran out of time has no `plan_id`.

        Raises:
            GraphError: the model cannot be exported, or the file not be read.
            RequestRejectedError: the service refused; carries the problem details.
            ServiceUnavailableError: the service does not answer, or is too busy.
        """
        result = yield from self.request_search(
            model,
            args,
            kwargs,
            num_devices=num_devices,
            topology=topology,
            max_axes=max_axes,
            options=options,
            mode=mode,
            memory_budget=memory_budget,
            discover=discover,
            on_progress=on_progress,
        )
        if result.search is None:
            raise ServiceError("the service ended the request without a search")
        return result.search

    def request_search(
        self,
        model: ModelLike,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        num_devices: int,
        topology: str | Topology | None = None,
        max_axes: int = 3,
        options: PlanOptions | None = None,
        mode: Mode | None = None,
        memory_budget: int | None = None,
        discover: bool = True,
        on_progress: OnProgress | None = None,
        wait: bool = True,
    ) -> Conversation[SearchResult]:
        """As `search`, and says where the ranking comes from.

        Args:
            model: as in `search`, and so on.
            args: likewise.
            kwargs: likewise.
            num_devices: likewise.
            topology: likewise.
            max_axes: likewise.
            options: likewise.
            mode: likewise.
            memory_budget: likewise.
            discover: likewise.
            on_progress: likewise.
            wait: whether to wait for a search that is not known yet; if not, ask for the job
                later with `get_job`, or wait with `wait_for_search`.
        """
        merged = merged_options(options, mode, memory_budget)
        asked = yield from work(
            lambda: AskedSearch(
                graph_bytes(model, args, kwargs),
                num_devices,
                topology=topology,
                max_axes=max_axes,
                options=merged,
                discover=discover,
            )
        )
        return (yield from self.answer_search(asked, on_progress, wait=wait))

    @abstractmethod
    def wait_for_search(
        self, job_id: str, *, on_progress: OnProgress | None = None
    ) -> Conversation[MeshSearch]:
        """Wait for the ranking of a job.

        Raises:
            RequestRejectedError: the job failed, was cancelled, or does not exist.
            ServiceUnavailableError: the service does not answer.
            ServiceError: the job is no search.
        """

    def validate(
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
    ) -> Conversation[Validation]:
        """Whether a model would be planned for a mesh, and how large that is; plans nothing.

        What would be refused is refused here, for the same reason: an operator or an option that
        cannot be planned, a mesh that is impossible, a limit of the service.

        Args:
            model: as in `plan`, and so on.
            args: likewise.
            kwargs: likewise.
            mesh: likewise.
            options: likewise.
            mode: likewise.
            memory_budget: likewise.
            discover: likewise.

        Returns:
            The plan's id, and the size of the problem; `size.feasible` is False where memory
            rules out every plan.

        Raises:
            GraphError: the model cannot be exported, or the file not be read.
            RequestRejectedError: the service would refuse; carries the problem details.
            ServiceUnavailableError: the service does not answer, or is too busy.
        """
        merged = merged_options(options, mode, memory_budget)
        asked = yield from work(
            lambda: Asked(graph_bytes(model, args, kwargs), mesh, merged, discover=discover)
        )
        return (yield from self.answer_validation(asked))

    def coverage(
        self,
        model: ModelLike,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        mesh: MeshLike | None = None,
        discover: bool = True,
    ) -> Conversation[Coverage]:
        """Which operators of a model can be cut, and why others cannot; as `operator_coverage`.

        Args:
            model: as in `plan`, and so on.
            args: likewise.
            kwargs: likewise.
            mesh: of whose axes one must be able to cut; axes of any size if None.
            discover: as in `plan`.

        Raises:
            GraphError: the model cannot be exported, or the file not be read.
            RequestRejectedError: the service refused; carries the problem details.
            ServiceUnavailableError: the service does not answer, or is too busy.
        """
        asked = yield from work(
            lambda: AskedCoverage(graph_bytes(model, args, kwargs), mesh, discover=discover)
        )
        return (yield from self.answer_coverage(asked))

    @abstractmethod
    def answer_search(
        self, asked: AskedSearch, on_progress: OnProgress | None = None, *, wait: bool = True
    ) -> Conversation[SearchResult]:
        """The answer to a search that was put together, as `request_search`."""

    @abstractmethod
    def answer_validation(self, asked: Asked) -> Conversation[Validation]:
        """The answer to a request that was put together, as `validate`."""

    @abstractmethod
    def answer_coverage(self, asked: AskedCoverage) -> Conversation[Coverage]:
        """The answer to a request that was put together, as `coverage`."""
