"""Formulation within limits: of time, of the number of strategies, and until it is cancelled."""

import re
import time
from contextlib import suppress
from fnmatch import fnmatchcase
from math import inf, prod

from autoshard.base.collection import collection_paused
from autoshard.base.limits import CancelToken, LimitReached, Limits, limited
from autoshard.base.outcome import SolveStatus
from autoshard.costs import most_held
from autoshard.errors import GraphError, OptionError, TooManyStrategiesError
from autoshard.graph import Graph, InputKind, check_total_bytes, find_blocks, module_paths
from autoshard.graph.gradients import Gradients
from autoshard.lowering.recompute import checkpoint_units
from autoshard.mesh import Mesh
from autoshard.ops import has_rule
from autoshard.plan.options import PlanOptions
from autoshard.planner.formulation.formulation import Formulation

LEAST_SECONDS = 1.0
"""Least time limit of a formulation, so that short limits have a plan of usual programs."""
LEAST_MADE = 20_000
"""Number of strategies and layouts that no time limit stops, so that programs on two axes have a
plan on a slow machine too."""
_USUAL_AXES = 3
"""Largest number of mesh axes for which nearly all programs have few strategies."""
_USUAL_SIZE = 8
"""Size of the innermost axis of a mesh that a message proposes; usual numbers of GPUs of a node."""

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_MAX_PATTERNS = 20
"""Maximum number of patterns of modules that a message lists."""


def work_limits(seconds: float = inf, cancel: CancelToken | None = None) -> Limits:
    """Limits of a formulation that begins now.

    Args:
        seconds: time limit; a shorter one than `LEAST_SECONDS` counts as that, and the first
            `LEAST_MADE` strategies and layouts are made in any case.
        cancel: setting it stops the formulation.
    """
    return Limits(time.perf_counter() + max(seconds, LEAST_SECONDS), cancel, least=LEAST_MADE)


@collection_paused()
def formulated(
    graph: Graph,
    mesh: Mesh,
    options: PlanOptions,
    limits: Limits,
    max_strategies: int | None = None,
    *,
    keeps_forbidden: bool = False,
) -> Formulation:
    """The formulation of planning a graph as one stage on a mesh, with its problem.

    Args:
        graph: the normalised program.
        mesh: the devices and the links between them.
        options: of planning.
        limits: of the time, and of the number of different strategies.
        max_strategies: maximum total number of strategies of all variables.
        keeps_forbidden: as for `Formulation`.

    Raises:
        GraphError: the graph cannot be planned in this mode.
        OptionError: an option is invalid, or the problem has too many strategies.
        LimitReached: the time is over, or the request is cancelled.
    """
    check_total_bytes(graph, most_held(options.training.micro_batches, options.pipeline.in_flight))
    try:
        with limited(limits):
            formulation = Formulation.of(graph, mesh, options, keeps_forbidden=keeps_forbidden)
            check_size(formulation, max_strategies)
            # The matrices of edges are most of its work.
            _ = formulation.problem
    except LimitReached as reached:
        if reached.status is None:
            raise too_many_strategies(reached, mesh) from None
        raise
    return formulation


def check_mode(graph: Graph, options: PlanOptions) -> None:
    """Check that a graph can be planned as one stage in the mode that the options ask for.

    Raises:
        GraphError: it has nothing to train.
        OptionError: micro-batches contradict the mode or each other, or activation checkpointing
            does not find what the options ask for.
    """
    check_runs(graph)
    check_checkpointing(graph, options)
    if options.mode == "training":
        check_trainable(graph)
    elif options.training.micro_batches > 1:
        raise OptionError(
            "micro_batches is for training, where their gradients are summed; leave it out with "
            "mode 'inference'"
        )
    if options.pipeline.in_flight > options.training.micro_batches:
        raise OptionError(
            f"in_flight is {options.pipeline.in_flight}, but a step has "
            f"{options.training.micro_batches} micro-batches; give at most as many"
        )


def check_runs(graph: Graph) -> None:
    """Check that ranks will run all operators of a graph, as far as this process knows them.

    Raises:
        UnsupportedError: they will not.
    """
    if any(not has_rule(node.operator) for node in graph.nodes):
        with suppress(ModuleNotFoundError):  # without torch, operators are not known
            from autoshard.ops.calls import check_callable  # noqa: PLC0415  torch is slow to import

            check_callable(graph)


def check_checkpointing(graph: Graph, options: PlanOptions) -> None:
    """Check that activation checkpointing finds the modules and blocks that the options ask for.

    A part of a program may be without them.

    Raises:
        OptionError: it does not.
    """
    names, asked = options.memory.checkpointed_modules, options.memory.activation_checkpointing
    if names and asked == "never":
        raise OptionError(
            "checkpointed_modules names what activation checkpointing recomputes, but "
            "activation_checkpointing is 'never': leave one of them out"
        )
    if _is_part(graph):
        return
    paths = dict.fromkeys(path for node in graph.nodes for path in module_paths(node.module))
    patterns = list(dict.fromkeys(_NUMBER.sub("*", path) for path in paths))
    shown = ", ".join(patterns[:_MAX_PATTERNS]) + (", ..." if patterns[_MAX_PATTERNS:] else "")
    for name in names:
        if not any(fnmatchcase(path, name) for path in paths):
            raise OptionError(
                f"checkpointed_modules: no module matches {name!r}; there are {shown or 'none'}"
            )
    if asked == "always" and options.mode == "training":
        units = checkpoint_units(graph, find_blocks(graph), names)
        made = {value for unit in units for i in unit for value in graph.nodes[i].outputs}
        if not any(graph.values[value].requires_grad for value in made):
            kind = "module of these names" if names else "repeated block"
            what = f"no {kind} has gradients" if units else f"the program has no {kind}"
            raise OptionError(
                f"activation_checkpointing is 'always', but {what}: name modules to recompute in "
                f"checkpointed_modules (there are {shown or 'none'}), or leave it out"
            )


def check_size(formulation: Formulation, max_strategies: int | None) -> None:
    """Check that a problem is not larger than allowed.

    Raises:
        TooManyStrategiesError: it has more strategies.
    """
    number = sum(len(variable.strategies) for variable in formulation.variables)
    if max_strategies is not None and number > max_strategies:
        raise TooManyStrategiesError(
            f"the problem has {number:,} strategies, but at most {max_strategies:,} are allowed; "
            f"{_fewer_strategies(formulation.mesh)}"
        )


def too_many_strategies(reached: LimitReached, mesh: Mesh) -> TooManyStrategiesError:
    """The error of a problem whose strategies were too many to list."""
    return TooManyStrategiesError(
        f"the problem has more than {max(reached.made, 1) - 1:,} strategies, or tensors with too "
        f"many layouts, on a mesh of {_num_axes(mesh)} axes of several devices; "
        f"{_fewer_strategies(mesh)}"
    )


def unfinished_reason(reached: LimitReached, mesh: Mesh) -> str:
    """Reason why there is no plan, if formulation was stopped."""
    if reached.status is SolveStatus.CANCELLED:
        return "planning was cancelled before a plan was found"
    return (
        f"the time limit ended while the strategies of operators were listed ({reached.made:,} "
        f"strategies and layouts so far, on a mesh of {_num_axes(mesh)} axes of several devices); "
        f"raise time_limit, or {_fewer_strategies(mesh)}"
    )


def _num_axes(mesh: Mesh) -> int:
    return sum(size > 1 for size in mesh.axis_sizes)


def _fewer_strategies(mesh: Mesh) -> str:
    """Advice on how to get fewer strategies."""
    if _num_axes(mesh) <= _USUAL_AXES:
        return "plan for fewer axes or a smaller graph"
    inner = 1
    for size in reversed(mesh.axis_sizes):
        if inner * size > _USUAL_SIZE:
            break
        inner *= size
    outer = prod(mesh.axis_sizes) // inner
    return (
        f"plan for fewer axes, such as a mesh of {outer}x{inner} for the same "
        f"{mesh.num_devices} devices"
    )


def check_trainable(graph: Graph) -> None:
    """Check that a parameter requires a gradient, and that custom rules have a needed backward.

    A part of a program, which receives or sends values, may be without such a parameter.

    Raises:
        GraphError: one of both does not hold.
    """
    trained = any(graph.values[p.name].requires_grad for p in graph.parameters)
    if not trained and not _is_part(graph):
        raise GraphError(
            "the graph has no parameter that requires a gradient, so there is nothing to train; "
            "plan with mode 'inference', or export the model with its parameters"
        )
    if not graph.rules:
        return
    gradients = Gradients(graph, training=True)
    for node in graph.nodes:
        rule = graph.rule_of(node)
        if rule is not None and not rule.differentiable and gradients.flows(node):
            raise GraphError(
                f"node {node.name!r}: backward needs the gradient of {node.operator}, but the "
                "operator has none; register one with register_autograd, or plan with mode "
                "'inference'"
            )


def _is_part(graph: Graph) -> bool:
    """True for a part of a program, which receives or sends values."""
    return any(i.kind is InputKind.RECEIVED for i in graph.inputs) or any(
        output.sent for output in graph.outputs
    )
