"""The predicted time of a step as a list of items: layers, collectives by axis, and others.

The items add up to the plan's total. Those of a pipeline are of the pipeline rank with the most
work, as the plan's costs are.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from autoshard.graph import Graph, graph_from_json
from autoshard.layouts import Action
from autoshard.ops import weights_of
from autoshard.plan.document import Plan
from autoshard.plan.options import Mode
from autoshard.plan.stage import Resharding, Stage
from autoshard.pricing.module_kinds import module_kinds

_NOTHING = 1e-9
"""Share of a step that differences of floating-point sums stay below."""


@dataclass(frozen=True, slots=True)
class CostItem:
    """One part of the predicted time of a step.

    Attributes:
        name: what takes the time, such as "compute of MLP".
        seconds: its seconds; negative for what overlaps with other items.
        share: share of the step.
    """

    name: str
    seconds: float
    share: float


def cost_items(plan: Plan) -> tuple[CostItem, ...]:
    """The items of a step's predicted time, the largest first.

    Args:
        plan: a plan with stages.
    """
    assert plan.costs is not None
    costs, seconds = plan.costs, dict[str, float]()
    compute: defaultdict[str, float] = defaultdict(float)
    communication: defaultdict[str, float] = defaultdict(float)
    for stage in _busiest_stages(plan):
        graph = graph_from_json(stage.program)
        _add_compute(stage, graph, compute)
        _add_communication(stage, graph, plan.options.mode, communication)
    seconds.update(compute)
    seconds["reading of inputs and parameters"] = costs.compute - sum(compute.values())
    seconds.update(communication)
    seconds["communication between stages"] = costs.communication - sum(communication.values())
    seconds["optimizer"] = costs.optimizer
    seconds["recomputation in backward"] = costs.recompute
    seconds["overlap of communication with compute"] = -costs.overlapped
    seconds["waiting for other pipeline ranks"] = costs.idle
    items = (
        CostItem(name, value, value / costs.total if costs.total else 0.0)
        for name, value in seconds.items()
        if abs(value) > _NOTHING * costs.total
    )
    return tuple(sorted(items, key=lambda item: -item.seconds))


def _busiest_stages(plan: Plan) -> tuple[Stage, ...]:
    """The stages of the pipeline rank with the most work; the only stage of other plans."""
    if plan.pipeline is None:
        return plan.stages
    totals = [summary.costs.total for summary in plan.pipeline.stages]
    busiest = max(plan.pipeline.ranks, key=lambda held: sum(totals[number] for number in held))
    return tuple(plan.stages[number] for number in busiest)


def _add_compute(stage: Stage, graph: Graph, seconds: defaultdict[str, float]) -> None:
    kinds = module_kinds(graph)
    for node in stage.nodes:
        kind = kinds.get(node.name)
        seconds[f"compute of {kind or 'elementwise and other operators'}"] += node.time


def _add_communication(
    stage: Stage, graph: Graph, mode: Mode, seconds: defaultdict[str, float]
) -> None:
    names = weights_of(graph)
    of_weights = "parameters and gradients" if mode == "training" else "parameters"
    for resharding in stage.reshardings:
        subject = of_weights if resharding.value in names else "activations"
        for axis, actions, time in _steps(resharding):
            seconds[f"{actions} of {subject} over {axis}"] += time
    for node in stage.nodes:
        for inner in node.inside:
            action = inner.action.replace("_", "-")
            seconds[f"{action} inside operators over {inner.axis}"] += inner.time


def _steps(resharding: Resharding) -> Iterator[tuple[str, str, float]]:
    """Axis, collectives in words, and seconds of each step."""
    for step in resharding.steps:
        actions = [Action(step.forward), Action(step.backward)]
        moving = [a.value.replace("_", "-") for a in actions if a.is_collective]
        yield step.axis, "/".join(sorted(set(moving))) or "local copies", step.time
