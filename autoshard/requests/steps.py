"""The step of a config's model: its batch, divided into micro-batches for a number of devices."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from autoshard.errors import GraphError
from autoshard.graph import load_graph, with_dynamic_batch
from autoshard.mesh import Topology, resolve_topology
from autoshard.plan import PlanOptions
from autoshard.planner import activations_fit, estimate_micro_batches
from autoshard.requests.model_configs import BatchShape
from autoshard.requests.results import JobProgress
from autoshard.requests.running import ProgressListener
from autoshard.solve import CancelToken, Progress

_LEAST = 2
"""The least batch size of an export that tells others: 1 is a special case in PyTorch."""


@dataclass(frozen=True)
class DividedStep:
    """A step in micro-batches.

    Attributes:
        graph: the archive of the program of a micro-batch.
        number: of micro-batches.
        seconds: estimated step time of each number that was tried, inf if it does not fit; empty if
            the whole batch fits at once.
    """

    graph: bytes
    number: int
    seconds: Mapping[int, float] = field(default_factory=dict)


def divide_step(
    export: Callable[[BatchShape], bytes],
    batch: BatchShape,
    options: PlanOptions,
    num_devices: int,
    *,
    topology: str | Topology | None = None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    on_progress: ProgressListener | None = None,
    cancel: CancelToken | None = None,
) -> DividedStep:
    """Divide a step into as many micro-batches as are estimated to be fastest.

    If the devices together hold all activations of the whole batch, it is one micro-batch.
    Otherwise first plans of several numbers are compared; see `estimate_micro_batches`. The program
    of the chosen number is an export of its own.

    Args:
        export: exports the model with a batch.
        batch: of a step, of all devices together.
        options: of planning in training, with one micro-batch.
        num_devices: number of devices.
        topology: as for `make_mesh`.
        nodes: as for `make_mesh`.
        gpus_per_node: as for `make_mesh`.
        on_progress: called with what is exported or estimated.
        cancel: set it to end with what is known.

    Raises:
        GraphError: the model cannot be exported.
        OptionError: no number of micro-batches has a plan that fits.
        MeshError: the topology has fewer devices.
    """
    exports = _Exports(export, batch, on_progress)
    where = resolve_topology(topology, num_devices, nodes, gpus_per_node)
    start = 1
    while batch.batch_size % (2 * start) == 0 and batch.batch_size // (2 * start) >= num_devices:
        start *= 2
    program = load_graph(exports.of(start))
    if activations_fit(program, start, num_devices, where, options):
        return DividedStep(exports.of(1), 1)
    other = _other_number(batch.batch_size, start)
    if other is None:
        return DividedStep(exports.of(start), start)
    try:
        dynamic = with_dynamic_batch(program, load_graph(exports.of(other)))
    except GraphError:
        # The program is another for another batch: only the number that is usual is known.
        return DividedStep(exports.of(start), start)
    found = estimate_micro_batches(
        dynamic,
        num_devices,
        options.with_values(micro_batches=start),
        topology=where,
        on_progress=partial(_report, on_progress),
        cancel=cancel,
    )
    return DividedStep(exports.of(found.number), found.number, found.seconds)


def _other_number(batch: int, number: int) -> int | None:
    """Another number of micro-batches, whose batch size tells how the program depends on it."""
    if batch // number < _LEAST:
        return None
    # A smaller batch before a larger one, of whose values more are too large to be computed once.
    for other in (2 * number, number // 2):
        if other and batch % other == 0 and batch // other >= _LEAST:
            return other
    return None


@dataclass
class _Exports:
    """Exports of one model with micro-batches of several sizes, each made once."""

    export: Callable[[BatchShape], bytes]
    batch: BatchShape
    on_progress: ProgressListener | None
    made: dict[int, bytes] = field(default_factory=dict)

    def of(self, number: int) -> bytes:
        """The archive of the program of a micro-batch, of a number of them."""
        if number not in self.made:
            shape = self.batch.of_micro_batch(number)
            if self.on_progress is not None:
                phase = f"exporting the model with a batch of {shape.batch_size:,}"
                self.on_progress(JobProgress(phase=phase, elapsed=0.0))
            self.made[number] = self.export(shape)
        return self.made[number]


def _report(on_progress: ProgressListener | None, progress: Progress) -> None:
    if on_progress is not None:
        on_progress(JobProgress(phase=progress.phase, elapsed=progress.elapsed))
