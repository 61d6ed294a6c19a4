"""Memory of a plan's devices, by part and by module."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.costs import parameter_bytes
from autoshard.graph import DType, graph_from_json, layer_path
from autoshard.lowering.holders import UNSHARDED, Holding, Part, all_holdings, summed
from autoshard.lowering.timeline import KINDS, Timeline, timeline
from autoshard.plan.document import Plan
from autoshard.plan.options import PlanOptions
from autoshard.pricing.execution import executions, saving_of
from autoshard.pricing.prices import optimizer_of
from autoshard.sizing.results import HeldMemory
from autoshard.sizing.wrapping import wrapped

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


def held_memory(
    plan: Plan, wrap: Sequence[str] = (), *, reshards: bool = True
) -> tuple[HeldMemory, dict[str, int]]:
    """Memory of a plan of one stage by module, and its peak by kind.

    Args:
        plan: the plan.
        wrap: modules that FSDP2 gathers as a whole, as in `wrapped`; if empty, parameters are
            gathered as the plan says.
        reshards: True if these modules are resharded after forward.

    Raises:
        OptionError: a module does not exist.
    """
    found = plan_timeline(plan)
    held = wrapped(found, wrap, reshards=reshards) if wrap else all_holdings(found)
    total = _over_time(found, held)
    peak = int(total.argmax())
    phase, name = found.moments[peak]
    graph = found.lowering.graph
    number = graph.numbers.get(name, graph.makers.get(name))
    module = "" if number is None else graph.nodes[number].module
    at_peak = [one for one in held if one.first <= peak <= one.last]
    saved = [one for one in held if one.kept and one.part is Part.ACTIVATIONS]
    kinds = dict.fromkeys(KINDS, 0)
    for one in at_peak:
        kinds[one.kind] += one.nbytes
    document = HeldMemory(
        parts=summed(at_peak, lambda one: one.part.value),
        phase=phase.value,
        at=module or name,
        activations=summed(saved, _layer),
        unsharded=_most_unsharded(found, held),
        kept_despite=summed(saved, _reason) if plan.stages[0].checkpoints else {},
    )
    return document, kinds


def _over_time(found: Timeline, held: Iterable[Holding]) -> NDArray[np.int64]:
    """Bytes at each moment, shape [M]."""
    changes = np.zeros(len(found.moments) + 1, np.int64)
    for one in held:
        changes[one.first] += one.nbytes
        changes[one.last + 1] -= one.nbytes
    total: NDArray[np.int64] = changes.cumsum()[:-1]
    return total


def _layer(held: Holding) -> str:
    return layer_path(held.module) or held.module or held.name


def _reason(held: Holding) -> str:
    """Why activation checkpointing does not release an activation."""
    return _ENTERING if held.in_checkpoint else f"saved by {held.module or held.name}"


def _most_unsharded(found: Timeline, held: Iterable[Holding]) -> Mapping[str, int]:
    """The most of unsharded parameters and gradients that each module has at a time."""
    by_module: dict[str, list[Holding]] = {}
    for one in held:
        if one.part in UNSHARDED:
            by_module.setdefault(_layer(one), []).append(one)
    most = {module: int(_over_time(found, own).max()) for module, own in by_module.items()}
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
