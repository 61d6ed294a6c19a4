"""What takes the memory of a plan's devices, by part and by module."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from autoshard.costs import parameter_bytes
from autoshard.graph import DType, graph_from_json, layer_path
from autoshard.lowering.holders import Holding, Part, all_holdings, holdings, summed
from autoshard.lowering.timeline import Timeline, timeline
from autoshard.plan.document import Plan
from autoshard.plan.options import PlanOptions
from autoshard.pricing.execution import executions, saving_of
from autoshard.pricing.prices import optimizer_of
from autoshard.sizing.results import HeldMemory

_UNSHARDED = frozenset({Part.UNSHARDED_PARAMETERS, Part.UNSHARDED_GRADIENTS})
_ENTERING = "inputs of recomputed modules"


def plan_timeline(plan: Plan) -> Timeline:
    """The memory of a plan of one stage over a step."""
    (stage,) = plan.stages
    graph = graph_from_json(stage.program)
    return timeline(
        stage,
        graph,
        training=plan.options.mode == "training",
        optimizer=optimizer_of(plan.options),
        saving=saving_of(graph, executions(graph, plan.options), plan.options),
    )


def held_memory(plan: Plan) -> HeldMemory:
    """What takes the memory of a plan of one stage."""
    found = plan_timeline(plan)
    phase, name = found.moments[found.peak_moment]
    graph = found.lowering.graph
    number = graph.numbers.get(name, graph.makers.get(name))
    module = "" if number is None else graph.nodes[number].module
    kept = [] if found.turn is None else list(holdings(found, found.turn))
    saved = [held for held in kept if held.part is Part.ACTIVATIONS]
    is_checkpointed = bool(plan.stages[0].checkpoints)
    return HeldMemory(
        parts=summed(holdings(found, found.peak_moment), lambda held: held.part.value),
        phase=phase.value,
        at=module or name,
        activations=summed(saved, _layer),
        unsharded=_most_unsharded(found),
        kept_despite=summed(saved, _reason) if is_checkpointed else {},
    )


def _layer(held: Holding) -> str:
    return layer_path(held.module) or held.module or held.name


def _reason(held: Holding) -> str:
    """Why activation checkpointing does not release an activation."""
    return _ENTERING if held.in_checkpoint else f"saved by {held.module or held.name}"


def _most_unsharded(found: Timeline) -> Mapping[str, int]:
    """The most of unsharded parameters and gradients that each module has at a time."""
    changes: dict[str, NDArray[np.int64]] = {}
    for held in all_holdings(found):
        if held.part in _UNSHARDED:
            module = changes.setdefault(_layer(held), np.zeros(len(found.moments) + 1, np.int64))
            module[held.first] += held.nbytes
            module[held.last + 1] -= held.nbytes
    most = {module: int(change.cumsum().max()) for module, change in changes.items()}
    return dict(sorted(most.items(), key=lambda item: -item[1]))


def host_bytes(plan: Plan, options: PlanOptions) -> int:
    """Bytes of the optimizer's state of one device.

    Args:
        plan: a plan without the state.
        options: those that name the optimizer.
    """
    optimizer = optimizer_of(options)
    return max(
        sum(
            parameter_bytes(placed.local_shape, DType(placed.dtype), optimizer).optimizer
            for placed in stage.parameters
        )
        for stage in plan.stages
    )
