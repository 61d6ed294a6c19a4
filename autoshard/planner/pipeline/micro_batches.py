"""Choice of the number of micro-batches into which the batch of a step is divided."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from autoshard.errors import OptionError
from autoshard.graph import Graph, InputKind, resized
from autoshard.mesh import Mesh
from autoshard.plan.options import PlanOptions
from autoshard.planner.pipeline.pipeline_planner import make_plan
from autoshard.solve import CancelToken, KeyValueStore

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
    symbol, batch = _batch_size(graph)
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
        raise OptionError(
            f"no number of micro-batches of a batch of {batch} has a plan: "
            f"{', '.join(map(str, seconds))} were tried; allow more memory or other schedules"
        )
    return best


def _batch_size(graph: Graph) -> tuple[str, int]:
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
