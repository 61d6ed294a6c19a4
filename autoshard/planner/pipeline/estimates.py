"""Estimates of pipelines: the fastest of the usual divisions of devices, without its plan."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from autoshard.errors import GraphError, OptionError
from autoshard.graph import Graph, resized
from autoshard.graph.sizes.dynamic_sizes import LEAST_SIZE
from autoshard.mesh import Mesh, Topology, make_mesh, mesh_text
from autoshard.plan.options import PlanOptions
from autoshard.plan.sub_meshes import PIPELINE_AXIS
from autoshard.planner.pipeline.limits import SearchLimits, Stopped
from autoshard.planner.pipeline.micro_batches import batch_symbol
from autoshard.planner.pipeline.policies import stage_cutter
from autoshard.planner.pipeline.search import PipelineSearch
from autoshard.solve import CancelToken, KeyValueStore, Progress

_RANKS = (4, 2, 8, 16)
_TENSOR_RANKS = (2, 4, 1, 8)
"""Numbers of pipeline ranks, and of innermost ranks; those that are often best come first."""


class PipelineEstimate(NamedTuple):
    """A pipeline whose stages are not planned yet.

    Attributes:
        mesh: its devices; the outermost axis is `pp`.
        micro_batches: number of micro-batches of a step.
        seconds: estimated time of a step.
    """

    mesh: Mesh
    micro_batches: int
    seconds: float


def estimate_pipeline(
    graph: Graph,
    num_devices: int,
    options: PlanOptions,
    *,
    topology: Topology,
    on_progress: Callable[[Progress], None] | None = None,
    cancel: CancelToken | None = None,
    block_cache: KeyValueStore | None = None,
) -> PipelineEstimate | None:
    """The fastest of some pipelines on equal sub-meshes, by the estimates of the pipeline search.

    Tried are 2 to 16 pipeline ranks, each with 1 to 8 innermost ranks within a node, and
    micro-batches of one sample for each of the other ranks. All schedules of the options are
    compared.

    Args:
        graph: the program of a part of the batch, with a dynamic batch size.
        num_devices: number of devices.
        options: of planning in training; the batch is that of the graph times its number of
            micro-batches.
        topology: of the devices.
        on_progress: called with what is tried.
        cancel: as for `make_plan`; the best so far is returned.
        block_cache: as for `make_plan`.

    Returns:
        the fastest one; None if none fits the memory, or the program cannot be cut.
    """
    limits = SearchLimits(options.solver.time_limit / 2, cancel, on_progress=on_progress)
    estimates = _PipelineEstimates(graph, options, limits, block_cache)
    best: PipelineEstimate | None = None
    with suppress(Stopped):
        for mesh, data in _meshes(num_devices, topology):
            if limits.is_over:
                break
            best = estimates.better(mesh, data, best) or best
    return best


def _meshes(num_devices: int, topology: Topology) -> Iterator[tuple[Mesh, int]]:
    """Meshes of pipelines, each with the number of ranks that share a batch."""
    node = topology.levels[0].size or num_devices
    for ranks in _RANKS:
        for tensor in _TENSOR_RANKS:
            data, rest = divmod(num_devices, ranks * tensor)
            if data and not rest and tensor <= node:
                sizes = {PIPELINE_AXIS: ranks, "dp": data, "tp": tensor}
                axes = [name for name, size in sizes.items() if size > 1]
                shape = [sizes[name] for name in axes]
                yield make_mesh(shape, axes=axes, topology=topology), data


@dataclass(frozen=True)
class _PipelineEstimates:
    """Estimates of the pipelines of one batch; attributes as for `estimate_pipeline`."""

    graph: Graph
    options: PlanOptions
    limits: SearchLimits
    block_cache: KeyValueStore | None

    def better(
        self, mesh: Mesh, data: int, best: PipelineEstimate | None
    ) -> PipelineEstimate | None:
        """The fastest pipeline on a mesh; None if it is not faster than another.

        Args:
            mesh: the mesh.
            data: number of ranks that share a micro-batch.
            best: the other.

        Raises:
            Stopped: the time is over.
        """
        symbol, part = batch_symbol(self.graph)
        ranks = mesh.axis_sizes[0]
        size = max(data, LEAST_SIZE)
        number, rest = divmod(part * self.options.training.micro_batches, size)
        if rest or number < ranks:
            return None
        options = self.options.with_values(micro_batches=number, stages="auto")
        self.limits.begin(f"{number} micro-batches on {mesh_text(mesh)}")
        try:
            program = resized(self.graph, {symbol: size})
            cutter = stage_cutter(program, options)
            search = PipelineSearch(
                cutter, mesh, options, self.limits, block_cache=self.block_cache
            )
            found = search.search(ranks, below=inf if best is None else best.seconds)
        except (GraphError, OptionError):
            return None
        return None if found is None else PipelineEstimate(mesh, number, found.seconds)
