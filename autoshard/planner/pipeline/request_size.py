"""Requirements of a request for a pipeline: sub-meshes of its stages, size of its problem."""

from collections.abc import Sequence

from autoshard.errors import OptionError
from autoshard.graph import Graph
from autoshard.mesh import Mesh
from autoshard.plan.options import PlanOptions
from autoshard.plan.options.of_stages import on_sub_mesh
from autoshard.plan.problem_size import ProblemSize
from autoshard.plan.sub_meshes import (
    PIPELINE_AXIS,
    num_pipeline_ranks,
    sub_mesh,
    sub_mesh_sizes,
)
from autoshard.planner.pipeline.policies import cuts_of, num_stages, stage_cutter
from autoshard.planner.planner import stage_problem_size


def problem_size(
    graph: Graph,
    mesh: Mesh,
    options: PlanOptions | None = None,
    *,
    max_strategies: int | None = None,
) -> ProblemSize:
    """The size of a request's problem, without solving it.

    Of a pipeline, the problem of the whole program on the largest sub-mesh that a stage may have;
    plans of stages, and those of smaller sub-meshes, are smaller.

    Args:
        graph: the normalised program.
        mesh: the devices and the links between them.
        options: as for `make_plan`.
        max_strategies: as for `make_plan`.

    Raises:
        GraphError: the graph cannot be planned in this mode.
        OptionError: an option is invalid or forbids all strategies of a variable, or the problem
            has more than `max_strategies`.
    """
    options = options or PlanOptions()
    cutter = stage_cutter(graph, options)
    number = num_stages(options, cutter)
    if number == 1:
        return stage_problem_size(graph, mesh, options, max_strategies=max_strategies)
    cuts_of(options, cutter, mesh)
    single = options.with_values(stages=1, cuts=(), balance=None, in_flight=1)
    largest = largest_sub_mesh(mesh, options, number)
    size = stage_problem_size(
        graph, largest, on_sub_mesh(single, largest, mesh), max_strategies=max_strategies
    )
    # The devices of all stages together hold at least the state of the program.
    alone = stage_problem_size(graph, sub_mesh(mesh, 1), _without_pins(single))
    bound = alone.memory_bound // mesh.num_devices
    return size.model_copy(
        update={
            "memory_bound": bound,
            "feasible": False if bound > size.memory_budget else None,
        }
    )


def largest_sub_mesh(mesh: Mesh, options: PlanOptions, number: int | None) -> Mesh:
    """The largest sub-mesh that a stage may have: the whole mesh, if one stage is possible.

    Args:
        mesh: the whole mesh.
        options: as for `make_plan`.
        number: number of stages; None if it is to be chosen.

    Raises:
        OptionError: the devices cannot be divided so.
    """
    total, ranks = mesh.num_devices, num_pipeline_ranks(mesh)
    if number is None:
        return mesh if ranks is None else sub_mesh(mesh, total // ranks)
    if ranks is not None and number % ranks:
        raise OptionError(
            f"{number} stages cannot be divided among the {ranks} pipeline ranks of the mesh, the "
            f"size of its axis {PIPELINE_AXIS}: take a multiple of {ranks} stages, or another mesh"
        )
    per_rank = options.pipeline.stages_per_rank
    numbers: Sequence[int] = range(1, number) if per_rank == "auto" else (per_rank,)
    if ranks is not None:
        numbers = (number // ranks,)
    sizes = set(sub_mesh_sizes(mesh))
    if options.pipeline.sub_meshes == "any":
        return sub_mesh(mesh, max(n for n in sizes if n <= max(total - number + 1, 1)))
    possible = [
        total * held // number
        for held in numbers
        if number % held == 0 and total * held % number == 0 and total * held // number in sizes
    ]
    if not possible:
        known = ", ".join(map(str, sorted(sizes)))
        raise OptionError(
            f"{number} stages do not divide the {total} devices of the mesh into equal sub-meshes: "
            f"a stage can have {known} devices; take another number of stages, or "
            f"sub_meshes='any'"
        )
    return sub_mesh(mesh, max(possible))


def _without_pins(options: PlanOptions) -> PlanOptions:
    """Options for another number of axes, which pins and constraints do not fit."""
    keep = ("mode", "optimizer", "master_weights", "state_dtype", "micro_batches", "memory_budget")
    return PlanOptions().with_values(**{name: options.value(name) for name in keep})
