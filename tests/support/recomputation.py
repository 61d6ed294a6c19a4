"""Plans edited by hand so that they recompute, and what a step of them does."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from support.comparison import device_mesh, whole
from support.live_memory import LiveMemory
from torch import nn

from autoshard.graph import Graph, Node, graph_from_json
from autoshard.layouts import Action
from autoshard.lowering.instructions import count_collectives
from autoshard.ops import Kernel, call_of, is_view, saved_tensors, spec_for
from autoshard.plan import Checkpoint, CollectiveCount, Plan, Resharding
from autoshard.plan.stage import Use
from autoshard.runtime import parallelize, record_collectives, summarize

COLLECTIVES = {action.value for action in Action if action.is_collective}


@dataclass
class Step:
    """What one training step of a plan did on this rank."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    collectives: tuple[CollectiveCount, ...]
    held: int
    """Bytes that forward made and that were alive when backward began."""


def run_step(
    plan: Plan,
    build: Callable[[], tuple[nn.Module, dict[str, Any]]],
    *,
    patient_until: int | None = None,
) -> Step:
    """Run a step of a model.

    Args:
        plan: of the model.
        build: makes the model and its arguments.
        patient_until: bytes to which what is held should fall, if one waits a little.
    """
    torch.manual_seed(0)
    model, inputs = build()
    mesh = device_mesh(plan)
    planned = parallelize(model, plan, mesh, seed=7)
    live = LiveMemory()
    with record_collectives(mesh) as recorder:
        with live:
            loss = planned(**inputs)["loss"]
        if patient_until is not None:
            live.falls_to(patient_until)
        held = live.nbytes
        loss.backward()
    gradients = {name: whole(p.grad) for name, p in planned.named_parameters()}
    return Step(whole(loss.detach()), gradients, summarize(recorder.records), held)


def edited(plan: Plan, **update: Any) -> Plan:
    """The plan with another stage and its collectives counted anew."""
    stage = plan.stages[0].model_copy(update=update)
    collectives = count_collectives((stage,), (graph_from_json(stage.program),))
    return plan.model_copy(update={"stages": (stage,), "collectives": collectives})


def holding_everything(plan: Plan) -> Plan:
    """The plan with nothing that runs once more."""
    return resharding_again(edited(plan, checkpoints=()), lambda _: False)


def resharding_again(plan: Plan, wanted: Callable[[Resharding], bool]) -> Plan:
    """The plan with `again` on all wanted reshardings whose result backward would hold."""
    stage = plan.stages[0]
    kept = set(held_reshardings(plan))
    return edited(
        plan,
        reshardings=tuple(
            resharding.model_copy(update={"regather": resharding in kept and wanted(resharding)})
            for resharding in stage.reshardings
        ),
    )


def checkpointing(plan: Plan, *modules: str) -> Plan:
    """The plan with a checkpoint over the nodes of each module."""
    inside = [nodes_of(plan, module) for module in modules]
    checkpoints = [Checkpoint(first=nodes[0].name, last=nodes[-1].name) for nodes in inside]
    return edited(plan, checkpoints=tuple(checkpoints))


def nodes_of(plan: Plan, module: str) -> list[Node]:
    """The nodes of a module and of those in it, in program order."""
    nodes = graph_from_json(plan.stages[0].program).nodes
    return [node for node in nodes if f"{node.module}.".startswith(f"{module}.") or not module]


def held_reshardings(plan: Plan) -> Iterator[Resharding]:
    """ReshardingTable that communicate, and of whose result an operator keeps something.

    Not all of them: whether a reshape is a view depends on strides.
    """
    stage = plan.stages[0]
    graph = graph_from_json(stage.program)
    resharded = {c.use for c in stage.reshardings}
    for resharding in stage.reshardings:
        if not any(step.forward in COLLECTIVES for step in resharding.steps):
            continue
        for user, position in graph.consumers[resharding.value]:
            name = graph.nodes[user].name
            own = (resharding.value, name, position) in resharded
            mine = (resharding.consumer, resharding.position) == (name, position)
            shared = resharding.consumer is None and not own
            if (mine or shared) and _keeps(graph, resharded, user, position):
                yield resharding
                break


def _keeps(graph: Graph, resharded: set[Use], number: int, position: int) -> bool:
    """Whether a node, or a reader of its view, keeps what it reads."""
    node = graph.nodes[number]
    gradients = [graph.values[value].requires_grad for value in node.inputs]
    if position in saved_tensors(call_of(graph, node), gradients).inputs:
        return True
    if not is_view(node.operator) or spec_for(node.operator).kernel is Kernel.RESHAPE:
        return False
    return any(
        _keeps(graph, resharded, *use)
        for value in node.outputs
        for use in graph.consumers[value]
        if not {(value, None, 0), (value, graph.nodes[use[0]].name, use[1])} & resharded
    )
