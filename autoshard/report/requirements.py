"""Arguments that `parallelize` needs to apply a plan, so that they are known when it is made."""

from collections.abc import Iterator
from typing import Any

from autoshard.graph import Graph, graph_from_json
from autoshard.ops import has_rule
from autoshard.plan.document import Plan


def requirements(plan: Plan) -> Iterator[str]:
    """Arguments that `parallelize` needs, one sentence each; none for most plans."""
    programs = [stage.program for stage in plan.stages]
    custom = sorted({name for program in programs for name in _custom_operators(program)})
    if custom:
        yield (
            f"parallelize runs operators of the model's own only if it is told so: "
            f"custom_operators={custom}"
        )
    unknown = sorted({name for program in programs for name in _unknown_constants(program)})
    if unknown:
        yield (
            f"the exported program does not have the values of {', '.join(unknown)}: parallelize "
            f"takes those that are no attributes of the model from constants=..., such as "
            f"exported_program.constants; an export by export_model needs none"
        )

    if plan.pipeline is not None and plan.options.mode == "training":
        number = len(loss_positions(graph_from_json(programs[-1])))
        if number != 1:
            yield several_losses(number)


def loss_positions(graph: Graph) -> list[int]:
    """Positions of the results of forward that may be the loss: scalars with a gradient."""
    named = [(i, o.name) for i, o in enumerate(graph.outputs[: graph.num_results]) if o.name]
    tensors = [(i, graph.values[name]) for i, name in named]
    return [i for i, tensor in tensors if tensor.requires_grad and not tensor.shape]


def several_losses(number: int) -> str:
    """The message of a pipeline that does not know its loss, for `loss_positions` of a number."""
    return (
        f"forward returns {number} scalars with gradients, so it is not known which one is the "
        f"loss: pass loss_fn to autoshard.pipeline"
    )


def _custom_operators(program: dict[str, Any]) -> Iterator[str]:
    for node in program["nodes"]:
        namespace, _, rest = node["operator"].partition(".")
        if namespace != "aten" and not has_rule(node["operator"]):
            yield f"{namespace}::{rest.partition('.')[0]}"


def _unknown_constants(program: dict[str, Any]) -> Iterator[str]:
    """Constants without a value, of an export that does not say where the model has them."""
    if program.get("model") is None:
        for source in program["inputs"]:
            if source["kind"] == "constant" and source.get("contents") is None:
                yield source["target"]
