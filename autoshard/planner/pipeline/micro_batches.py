"""Choice of the number of micro-batches into which the batch of a step is divided."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf

from autoshard.errors import OptionError
from autoshard.graph import Graph, InputKind, resized
from autoshard.mesh import Mesh, Topology, make_mesh, mesh_text, resolve_topology
from autoshard.plan.options import PlanOptions
from autoshard.planner.memory.least_memory import LeastMemory
from autoshard.planner.pipeline.limits import SearchLimits, Stopped
from autoshard.planner.pipeline.pipeline_planner import make_plan
from autoshard.planner.planner import make_stage_plan
from autoshard.solve import CancelToken, KeyValueStore, Progress

_MOST = 1024
"""Maximum number of micro-batches that is tried."""
_MOST_WORSE = 2
"""Number of choices in a row that are worse than the best one, after which no more are tried."""


@dataclass(frozen=True)
class MicroBatches:
    """A number of micro-batches, with what is needed to plan it.

    Attributes:
        number: the number.
        graph: the program of one micro-batch.
        options: the options with this number.
        seconds: planned step time of each number that was tried; inf if there is no plan.
    """

    number: int
    graph: Graph
    options: PlanOptions
    seconds: dict[int, float]


def choose_micro_batches(
    graph: Graph,
    mesh: Mesh,
    options: PlanOptions | None = None,
    *,
    cancel: CancelToken | None = None,
    block_cache: KeyValueStore | None = None,
) -> MicroBatches:
    """The number of micro-batches with the fastest plan.

    Powers of two are tried, and the whole batch, from few to many, until two in a row are slower
    than the best one: more micro-batches leave ranks idle for less time and need less memory, and
    have smaller operators and more transfers.

    Args:
        graph: the program of the whole batch of a step, exported with a dynamic batch size.
        mesh: the devices.
        options: as for `make_plan`; its number of micro-batches does not matter.
        cancel: as for `make_plan`.
        block_cache: as for `make_plan`.

    Raises:
        OptionError: the batch size is not dynamic, or no number has a plan.

    Example:
        >>> chosen = choose_micro_batches(graph, mesh, PlanOptions(stages=4))
        >>> plan = make_plan(chosen.graph, mesh, chosen.options)
    """
    options = options or PlanOptions()
    symbol, batch = batch_symbol(graph)
    best: MicroBatches | None = None
    seconds: dict[int, float] = {}
    worse = 0
    for number in _numbers(graph, symbol, batch):
        program = resized(graph, {symbol: batch // number})
        limits = options.with_values(micro_batches=number)
        try:
            plan = make_plan(program, mesh, limits, cancel=cancel, block_cache=block_cache)
            seconds[number] = plan.costs.total if plan.costs else inf
        except OptionError:  # such as a schedule that needs more micro-batches
            seconds[number] = inf
        if seconds[number] < (inf if best is None else seconds[best.number]):
            best, worse = MicroBatches(number, program, limits, seconds), 0
        elif best is not None:
            worse += 1
        if worse == _MOST_WORSE or (cancel is not None and cancel.is_set()):
            break
    if best is None:
        raise OptionError(_without_plan(batch, seconds))
    return best


def estimate_micro_batches(
    graph: Graph,
    num_devices: int,
    options: PlanOptions | None = None,
    *,
    topology: str | Topology | None = None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    cancel: CancelToken | None = None,
    block_cache: KeyValueStore | None = None,
) -> MicroBatches:
    """The number of micro-batches whose first plan of one stage is the fastest.

    The first number tried is that with one sample for each device; then half of it and so on, as
    long as that is faster, and otherwise twice as many. The plans are the first ones that fit the
    memory of one mesh, of nodes by devices of a node.

    Args:
        graph: the program of the whole batch of a step, or of a part of it, with a dynamic batch
            size, such as `with_dynamic_batch` makes it.
        num_devices: number of devices.
        options: of planning in training; the batch is that of the graph times its number of
            micro-batches.
        topology: as for `make_mesh`.
        nodes: as for `make_mesh`.
        gpus_per_node: as for `make_mesh`.
        on_progress: called with each number that is tried.
        cancel: as for `make_plan`; what is known then is returned.
        block_cache: as for `make_plan`.

    Raises:
        OptionError: the batch size is not dynamic, or no number that was tried fits the memory.
        MeshError: the topology has fewer devices.
    """
    options = options or PlanOptions()
    symbol, part = batch_symbol(graph)
    batch = part * options.training.micro_batches
    where = resolve_topology(topology, num_devices, nodes, gpus_per_node)
    limits = SearchLimits(options.solver.time_limit / 2, cancel, on_progress=on_progress)
    mesh = _usual_mesh(num_devices, where)
    estimates = _Estimates(graph, symbol, batch, mesh, options, limits, block_cache)
    numbers = list(_numbers(graph, symbol, batch))
    start = max((n for n in numbers if batch // n >= num_devices), default=1)
    with suppress(Stopped):
        _try_numbers(numbers, numbers.index(start), estimates.seconds_of)
    best = min(estimates.seconds, key=lambda number: estimates.seconds[number], default=start)
    if estimates.seconds.get(best, inf) == inf:
        raise OptionError(_without_plan(batch, estimates.seconds, estimates.reason))
    return MicroBatches(best, *estimates.program(best), estimates.seconds)


def activations_fit(
    graph: Graph, number: int, num_devices: int, topology: Topology, options: PlanOptions
) -> bool:
    """True if all devices together hold a step's activations and the training state at once.

    Every value of the program counts, so that nothing needs to be recomputed or divided; values
    that a layout replicates may still be too large.

    Args:
        graph: the program of a micro-batch.
        number: of micro-batches of the step.
        num_devices: number of devices.
        topology: of the devices.
        options: of planning in training.
    """
    mesh = make_mesh((num_devices,), topology=topology)
    least = LeastMemory.of(graph, mesh, options)
    made = (graph.values[name].nbytes for node in graph.nodes for name in node.outputs)
    return least.stored + number * sum(made) <= num_devices * least.budget


def _usual_mesh(num_devices: int, topology: Topology) -> Mesh:
    """A mesh of nodes by devices of a node; of one node, of two by the rest."""
    node = min(topology.levels[0].size or num_devices, num_devices)
    inner = node if node < num_devices else num_devices // 2 if num_devices % 2 == 0 else 1
    shape = (num_devices // inner, inner) if inner > 1 else (num_devices,)
    return make_mesh(shape, topology=topology)


def _try_numbers(numbers: list[int], start: int, seconds_of: Callable[[int], float]) -> None:
    """Try numbers from one of them on, fewer or else more, as long as that is faster."""
    at = seconds_of(numbers[start])
    for step in (-1, 1):
        best, place, is_better = at, start + step, False
        while 0 <= place < len(numbers):
            found = seconds_of(numbers[place])
            # Where nothing fits yet, more micro-batches may.
            if found >= best and not (step > 0 and found == inf):
                break
            best, place, is_better = found, place + step, True
        if is_better:
            return


@dataclass
class _Estimates:
    """First plans of several numbers of micro-batches of one batch.

    Attributes:
        graph: the program, with a dynamic batch size.
        symbol: its name.
        batch: samples of a step.
        mesh: of the plans.
        options: of the plans.
        limits: of all of them together.
        block_cache: as for `make_plan`.
        seconds: of a step with each number that was tried; inf if it does not fit.
        reason: why the latest number cannot fit, by arithmetic; empty if it may.
    """

    graph: Graph
    symbol: str
    batch: int
    mesh: Mesh
    options: PlanOptions
    limits: SearchLimits
    block_cache: KeyValueStore | None = None
    seconds: dict[int, float] = field(default_factory=dict)
    reason: str = ""

    def program(self, number: int) -> tuple[Graph, PlanOptions]:
        """The program of a micro-batch, and the options with their number."""
        size = {self.symbol: self.batch // number}
        return resized(self.graph, size), self.options.with_values(micro_batches=number)

    def seconds_of(self, number: int) -> float:
        """Seconds of a step with a number of micro-batches; inf if its plan does not fit.

        Raises:
            Stopped: the time is over.
        """
        self.limits.begin(f"{number} micro-batches on {mesh_text(self.mesh)}")
        program, options = self.program(number)
        seconds = inf
        least = LeastMemory.of(program, self.mesh, options)
        self.reason = "" if least.fits else least.reason
        if least.fits:
            made = make_stage_plan(
                program,
                self.mesh,
                options.with_values(
                    time_limit=max(self.limits.time_limit - self.limits.seconds, 1)
                ),
                on_progress=self.limits.report,
                cancel=self.limits.cancel,
                block_cache=self.block_cache,
                quick=True,
                proves=False,
            )
            seconds = inf if made.costs is None else made.costs.total
        if self.limits.is_over and seconds == inf:
            raise self.limits.stopped()
        self.seconds[number] = seconds
        return seconds


def _without_plan(batch: int, tried: Iterable[int], reason: str = "") -> str:
    numbers = ", ".join(map(str, tried))
    return (
        f"no number of micro-batches of a batch of {batch} has a plan: {numbers} were tried; "
        f"{reason or 'allow more memory or other schedules'}"
    )


def batch_symbol(graph: Graph) -> tuple[str, int]:
    """The symbol of the batch size and its value, from dim 0 of the arguments."""
    if graph.dynamic is not None:
        for given in graph.inputs:
            if given.kind is InputKind.USER:
                symbol = graph.dynamic.symbols_of(given.name).get(0)
                if symbol is not None:
                    return symbol, graph.dynamic.planned[symbol]
    raise OptionError(
        "the number of micro-batches can be chosen only if the batch size is dynamic: export the "
        "model with dynamic_shapes for dim 0 of its arguments, or give a number"
    )


def _numbers(graph: Graph, symbol: str, batch: int) -> Iterator[int]:
    assert graph.dynamic is not None
    planned = graph.dynamic.planned
    number = 1
    while number <= min(batch, _MOST):
        if batch % number == 0 and graph.dynamic.supports(planned | {symbol: batch // number}):
            yield number
        number *= 2
