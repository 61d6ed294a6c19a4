"""Graphs and programs of pipeline stages, run operator by operator."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autoshard.graph import (
    OPAQUE_MODULE,
    Argument,
    Graph,
    InputKind,
    Node,
    OpaqueCall,
    Ref,
    Token,
    TokenKind,
)
from autoshard.graph.export.opaque_modules import call_module, tensors_of


def resolve(argument: Argument, values: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(argument, Ref):
        return values[argument.name]
    if isinstance(argument, tuple):
        return [resolve(item, values) for item in argument]
    if isinstance(argument, Token):
        if argument.kind is TokenKind.DEVICE:
            return torch.device("cpu")
        return getattr(torch, argument.value)
    return argument


def bind(graph: Graph, model: torch.nn.Module, user: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    values = {}
    if graph.preparation is not None:
        made = run_graph(graph.preparation, model, {})
        values.update(zip([o.name for o in graph.preparation.outputs], made, strict=True))
    for source in graph.inputs:
        if source.kind is InputKind.PREPARED:
            continue
        if source.kind in (InputKind.USER, InputKind.RECEIVED):
            values[source.name] = user[source.name]
        elif source.kind is not InputKind.LITERAL:
            owner, _, leaf = source.target.rpartition(".")
            values[source.name] = getattr(model.get_submodule(owner), leaf)
    return values


def run_graph(
    graph: Graph, model: torch.nn.Module, user: Mapping[str, Any]
) -> list[torch.Tensor | Any]:
    """Run a graph operator by operator, checking every value against what the graph says."""
    values = bind(graph, model, user)
    for node in graph.nodes:
        if node.operator == OPAQUE_MODULE:
            made = call_opaque(node, model, values)
        else:
            made = call_operator(node, values)
        values.update(zip(node.outputs, made, strict=True))
    for name, tensor in values.items():
        said = graph.values[name]
        assert tuple(tensor.shape) == said.shape, name
        assert str(tensor.dtype) == f"torch.{said.dtype}", name
        assert tensor.requires_grad == said.requires_grad, name
    return [o.literal if o.name is None else values[o.name] for o in graph.outputs]


def call_operator(node: Node, values: Mapping[str, torch.Tensor]) -> Sequence[torch.Tensor]:
    overload: Any = torch.ops
    for part in node.operator.split("."):
        overload = getattr(overload, part)
    made = overload(**{key: resolve(value, values) for key, value in node.arguments})
    return [made] if isinstance(made, torch.Tensor) else made


def call_opaque(
    node: Node, model: torch.nn.Module, values: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    """Results of an opaque module, and the new contents of its buffers."""
    call = OpaqueCall.from_json(node.argument("call"))
    spec = pytree.treespec_loads(call.arguments)
    tensors = iter(resolve(node.argument("tensors"), values))
    literals = dict(call.literals)
    leaves = [literals[i] if i in literals else next(tensors) for i in range(spec.num_leaves)]
    state = dict(zip(call.state, resolve(node.argument("state"), values), strict=True))
    state |= {name: state[name].clone() for name in call.updated}
    module = model.get_submodule(node.module)
    result, after = call_module(module, pytree.tree_unflatten(leaves, spec), state)
    return [*tensors_of(result), *(after.get(name, state[name]).detach() for name in call.updated)]


def run_stages(
    stages: Sequence[Graph], model: torch.nn.Module, user: Mapping[str, Any]
) -> tuple[list[torch.Tensor | Any], dict[str, torch.Tensor]]:
    """Run programs of stages one after the other.

    Each stage gets what the one before sends and the user inputs, and nothing else.

    Returns:
        Results of forward, and new contents of buffers by value name.
    """
    received: dict[str, torch.Tensor] = {}
    results: list[Any] = []
    buffers: dict[str, torch.Tensor] = {}
    for stage in stages:
        wanted = [i.name for i in stage.inputs if i.kind is InputKind.RECEIVED]
        assert wanted == list(received)
        made = run_graph(stage, model, {**user, **received})
        pairs = list(zip(stage.outputs, made, strict=True))
        received = {o.name: value for o, value in pairs if o.sent and o.name is not None}
        results = [value for o, value in pairs if not o.sent and o.updates is None]
        assert not results or stage is stages[-1]
        for output, value in pairs:
            if output.updates is not None:
                assert output.updates not in buffers
                buffers[output.updates] = value
    assert not received
    return results, buffers
