"""Lower bounds of the time of a step on a mesh, without a plan."""

from threading import Event

from autoshard.graph import Graph
from autoshard.limits import LimitReached
from autoshard.mesh import Mesh
from autoshard.outcome import SolveStatus
from autoshard.plan.options import PlanOptions
from autoshard.plan.sub_meshes import num_pipeline_ranks
from autoshard.planner.formulating import check_mode, formulated, work_limits
from autoshard.planner.pipeline.policies import num_stages, stage_cutter
from autoshard.solve import Progress, solve_problem

_ENOUGH_GAP = 0.01
"""Relative gap from which on a solution is not improved: the bound hardly grows then."""


def plans_one_stage(graph: Graph, mesh: Mesh, options: PlanOptions) -> bool:
    """True if plans of a program have one stage on a mesh.

    Raises:
        OptionError: options contradict each other or the program.
    """
    if num_pipeline_ranks(mesh) is not None:
        return False
    return options.stages == 1 or num_stages(options, stage_cutter(graph, options)) == 1


def bound_above(
    graph: Graph,
    mesh: Mesh,
    options: PlanOptions,
    seconds: float,
    max_strategies: int | None = None,
) -> float | None:
    """A lower bound of a step's time in plans of one stage, if one above some seconds is proven.

    The memory budget is ignored, and so is recomputing, which only adds time. No bound is searched
    for longer than the time limit of the options.

    Args:
        graph: the program.
        mesh: the devices and the links between them.
        options: of planning.
        seconds: the bound is of interest if it is larger.
        max_strategies: maximum total number of strategies of all variables.

    Raises:
        GraphError: the graph cannot be planned in this mode.
        OptionError: an option is invalid, or the problem has more than `max_strategies`.
    """
    check_mode(graph, options)
    try:
        formulation = formulated(
            graph, mesh, options, work_limits(options.time_limit), max_strategies
        )
    except LimitReached:
        return None
    decided = Event()

    def stop_if_decided(progress: Progress) -> None:
        if progress.bound > seconds or progress.incumbent <= seconds:
            decided.set()

    solution = solve_problem(
        formulation.problem,
        time_limit=options.time_limit,
        relative_gap=max(options.relative_gap, _ENOUGH_GAP),
        seed=options.seed,
        on_progress=stop_if_decided,
        cancel=decided,
    )
    is_proven = solution.status is not SolveStatus.INFEASIBLE and solution.bound > seconds
    return solution.bound if is_proven else None
