"""The step of a config's model, divided into micro-batches, and into stages on several nodes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from autoshard.errors import GraphError, OptionError
from autoshard.graph import Graph, load_graph, with_dynamic_batch
from autoshard.graph.sizes.dynamic_sizes import LEAST_SIZE
from autoshard.mesh import Mesh, Topology
from autoshard.plan import PlanOptions
from autoshard.plan.options import PipelineOptions
from autoshard.plan.options.restrictions import restrictions
from autoshard.planner import (
    PipelineEstimate,
    activations_fit,
    estimate_micro_batches,
    estimate_pipeline,
)
from autoshard.requests.model_configs import BatchShape
from autoshard.requests.results import JobProgress
from autoshard.requests.running import ProgressListener
from autoshard.solve import CancelToken, Progress

_FASTER = 0.97
"""Estimated time of a pipeline, relative to that of one stage, from which on it is planned."""


class DividedStep(NamedTuple):
    """A step of a model in micro-batches, on one stage or a pipeline.

    Attributes:
        graph: the archive of the program of a micro-batch.
        options: of planning, with their number; of a pipeline, with `stages`.
        mesh: of the pipeline; None for one stage, whose mesh is not chosen.
        seconds: estimated step time of one stage by number of micro-batches, inf if it does not
            fit; empty if the whole batch fits at once.
        one_stage: of a pipeline, the archive and the options of the fastest number of micro-batches
            of one stage; None if none fits, or for one stage.
    """

    graph: bytes
    options: PlanOptions
    mesh: Mesh | None = None
    seconds: Mapping[int, float] = MappingProxyType({})
    one_stage: tuple[bytes, PlanOptions] | None = None


@dataclass(frozen=True)
class StepDivider:
    """Divides the step of a model into micro-batches, and into stages if that is faster.

    If the devices together hold all activations of the whole batch, a step of one stage is one
    micro-batch. Otherwise first plans of several numbers are compared; see
    `estimate_micro_batches`. On several nodes they are compared with pipelines; see
    `estimate_pipeline`. The program of what is chosen is an export of its own.

    Attributes:
        export: exports the model with a batch.
        batch: of a step, of all devices together.
        options: of planning in training, with one micro-batch.
        num_devices: number of devices.
        topology: of the devices.
        pipelines: False to compare no pipelines.
        on_progress: called with what is exported or estimated.
        cancel: set it to end with what is known.
    """

    export: Callable[[BatchShape], bytes]
    batch: BatchShape
    options: PlanOptions
    num_devices: int
    topology: Topology
    pipelines: bool = True
    on_progress: ProgressListener | None = None
    cancel: CancelToken | None = None
    _exports: dict[int, bytes] = field(default_factory=dict)

    def divided(self) -> DividedStep:
        """The step as it is estimated to be fastest.

        Raises:
            GraphError: the model cannot be exported.
            OptionError: no number of micro-batches has a plan that fits.
        """
        batch, start = self.batch.batch_size, 1
        while batch % (2 * start) == 0 and batch // (2 * start) >= self.num_devices:
            start *= 2
        program = load_graph(self._exported(start))
        where = (self.num_devices, self.topology, self.options)
        number = 1 if activations_fit(program, start, *where) else start
        other = _other_number(batch, start)
        if other is None or (number == 1 and not self._compares_pipelines):
            return self._of_one_stage(number, {})
        try:
            dynamic = with_dynamic_batch(program, load_graph(self._exported(other)))
        except GraphError:
            # The program is another for another batch: only the usual number is known.
            return self._of_one_stage(start, {})
        pipeline = self._pipeline(dynamic, start) if self._compares_pipelines else None
        return self._fastest(dynamic, start, pipeline)

    def _fastest(
        self, dynamic: Graph, start: int, pipeline: PipelineEstimate | None
    ) -> DividedStep:
        """The faster one of a pipeline and of one stage, whose number of micro-batches is chosen.

        Args:
            dynamic: the program of one of `start` micro-batches, with a dynamic batch size.
            start: number of micro-batches.
            pipeline: the fastest one; None if there is none.

        Raises:
            OptionError: nothing fits.
        """
        seconds: Mapping[int, float] = {}
        try:
            found = estimate_micro_batches(
                dynamic,
                self.num_devices,
                self.options.with_values(micro_batches=start),
                topology=self.topology,
                on_progress=self._report,
                cancel=self.cancel,
            )
            best, seconds = found.number, found.seconds
        except OptionError:
            if pipeline is None:
                raise
            best = 0
        if pipeline is None or (best and pipeline.seconds >= _FASTER * seconds[best]):
            return self._of_one_stage(best, seconds)
        return DividedStep(
            self._exported(pipeline.micro_batches),
            self.options.with_values(stages="auto", micro_batches=pipeline.micro_batches),
            pipeline.mesh,
            seconds,
            self._of_one_stage(best, seconds)[:2] if best else None,
        )

    def _of_one_stage(self, number: int, seconds: Mapping[int, float]) -> DividedStep:
        options = self.options.with_values(micro_batches=number)
        return DividedStep(self._exported(number), options, seconds=seconds)

    @property
    def _compares_pipelines(self) -> bool:
        """True on several nodes, unless the options restrict plans or say how they are cut."""
        node = self.topology.levels[0].size or self.num_devices
        is_open = not restrictions(self.options) and self.options.pipeline == PipelineOptions()
        return self.pipelines and is_open and self.num_devices > node

    def _pipeline(self, dynamic: Graph, start: int) -> PipelineEstimate | None:
        return estimate_pipeline(
            dynamic,
            self.num_devices,
            self.options.with_values(micro_batches=start),
            topology=self.topology,
            on_progress=self._report,
            cancel=self.cancel,
        )

    def _exported(self, number: int) -> bytes:
        """The archive of the program of a micro-batch, of a number of them; each is made once."""
        if number not in self._exports:
            shape = self.batch.of_micro_batch(number)
            if self.on_progress is not None:
                phase = f"exporting the model with a batch of {shape.batch_size:,}"
                self.on_progress(JobProgress(phase=phase, elapsed=0.0))
            self._exports[number] = self.export(shape)
        return self._exports[number]

    def _report(self, progress: Progress) -> None:
        if self.on_progress is not None:
            self.on_progress(JobProgress(phase=progress.phase, elapsed=progress.elapsed))


def _other_number(batch: int, number: int) -> int | None:
    """Another number of micro-batches, whose batch size tells how the program depends on it."""
    if batch // number < LEAST_SIZE:
        return None
    # A smaller batch before a larger one, of whose values more are too large to be computed once.
    for other in (2 * number, number // 2):
        if other and batch % other == 0 and batch // other >= LEAST_SIZE:
            return other
    return None
