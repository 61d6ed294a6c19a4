"""Cuts of a program into pipeline stages, as far as options say them without optimization."""

from autoshard.constraints import dim_origins
from autoshard.errors import OptionError
from autoshard.graph import OPAQUE_MODULE, Graph, Node, StageCutter
from autoshard.mesh import Mesh
from autoshard.ops import draws_random_numbers
from autoshard.plan.options import PlanOptions
from autoshard.planner.pipeline.balance import balanced_cuts, node_weights
from autoshard.planner.pipeline.named_cuts import layer_cuts, marked_cuts, named_cuts


def stage_cutter(graph: Graph, options: PlanOptions | None = None) -> StageCutter:
    """A `StageCutter` that copies neither nodes that draw random numbers nor opaque modules.

    Args:
        graph: the normalised program.
        options: of planning; some need to know where the batch is in what a stage receives.
    """
    if options is None or (
        options.constraints.batch_axis is None and options.constraints.algo == "optimal"
    ):
        return StageCutter(graph, runs_once=_runs_once)
    return StageCutter(
        graph,
        runs_once=_runs_once,
        dims=lambda value: dim_origins(graph).of_value(value),
    )


def _runs_once(node: Node) -> bool:
    return node.operator == OPAQUE_MODULE or draws_random_numbers(node)


def required_cuts(options: PlanOptions, cutter: StageCutter) -> tuple[int, ...]:
    """Nodes of cut points before which a stage must begin: named cuts, and marks in forward.

    Raises:
        OptionError: an option names something that does not exist, or the program cannot be cut
            there.
    """
    if options.pipeline.stages == 1 and not options.pipeline.cuts:
        return ()
    return tuple(sorted({*named_cuts(cutter, options.pipeline.cuts), *marked_cuts(cutter)}))


def num_stages(options: PlanOptions, cutter: StageCutter) -> int | None:
    """Number of pipeline stages; None if it is to be chosen by optimization.

    Raises:
        OptionError: options contradict each other or the program.
    """
    required = len(required_cuts(options, cutter)) + 1
    if isinstance(options.pipeline.balance, tuple):
        listed = len(options.pipeline.balance)
        if options.pipeline.stages not in (None, "auto", listed):
            raise OptionError(
                f"stages is {options.pipeline.stages}, but balance lists {listed} stages"
            )
        # Checks the numbers as well: those of one stage are used nowhere else.
        return len(layer_cuts(cutter, options.pipeline.balance)) + 1
    is_open = options.pipeline.stages == "auto" or (
        options.pipeline.stages is None and required == 1
    )
    if is_open and options.pipeline.balance is not None:
        raise OptionError(f"balance {options.pipeline.balance!r} needs a number of stages")
    if options.pipeline.stages is None:
        return required
    if options.pipeline.stages == "auto":
        return None
    if options.pipeline.stages < required:
        raise OptionError(
            f"stages is {options.pipeline.stages}, but cuts and calls of pipe_split() in forward "
            f"make {required} stages; ask for at least as many, or for stages=1 without cuts"
        )
    most = len(cutter.cut_points) + 1
    if options.pipeline.stages > most:
        raise OptionError(
            f"stages is {options.pipeline.stages}, but the program has at most {most} stages"
        )
    return options.pipeline.stages


def cuts_of(options: PlanOptions, cutter: StageCutter, mesh: Mesh) -> tuple[int, ...] | None:
    """The cuts that the options determine; None if they are to be chosen by optimization.

    Args:
        options: `stages`, `cuts` and `balance`.
        cutter: the program.
        mesh: the devices, whose speed predicts times.

    Returns:
        Nodes of cut points, ascending.

    Raises:
        OptionError: options contradict each other or the program.
    """
    number, required = num_stages(options, cutter), required_cuts(options, cutter)
    if isinstance(options.pipeline.balance, tuple):
        cuts = layer_cuts(cutter, options.pipeline.balance)
        if not set(required) <= set(cuts):
            raise OptionError(
                f"balance {list(options.pipeline.balance)} does not cut where cuts or calls of "
                f"pipe_split() in forward ask for it; leave out one of them"
            )
        return cuts
    if number is None:
        return None
    if number == len(required) + 1:
        return required
    if options.pipeline.balance is None:
        return None
    weights = node_weights(cutter, options.pipeline.balance, mesh, options)
    return balanced_cuts(cutter, number, weights, required=required)
