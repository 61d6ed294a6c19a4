from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from autoshard.graph import (
    Argument,
    Graph,
    InputKind,
    Ref,
    Token,
    TokenKind,
    export_model,
    load_graph,
)

HALF = {torch.float16, torch.bfloat16}


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
        if source.kind is InputKind.USER:
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
        overload = torch.ops
        for part in node.operator.split("."):
            overload = getattr(overload, part)
        made = overload(**{key: resolve(value, values) for key, value in node.arguments})
        made = [made] if isinstance(made, torch.Tensor) else made
        values.update(zip(node.outputs, made, strict=True))
    for name, tensor in values.items():
        said = graph.values[name]
        assert tuple(tensor.shape) == said.shape, name
        assert str(tensor.dtype) == f"torch.{said.dtype}", name
        assert tensor.requires_grad == said.requires_grad, name
    return [o.literal if o.name is None else values[o.name] for o in graph.outputs]


def gradients(model: torch.nn.Module, outputs: list[Any]) -> dict[str, torch.Tensor | None]:
    """Gradients of the mean of the first output that has one."""
    model.zero_grad()
    first = next((o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad), None)
    if first is not None:
        first.mean().backward()
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }


def copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def compare(model: torch.nn.Module, **user: Any) -> Graph:
    """Assert that a model and its normalised graph agree in results, gradients and buffers."""
    graph = load_graph(export_model(model, (), user))
    same = deepcopy(model)
    expected = pytree.tree_leaves(model(**pytree.tree_map(copied, user)))
    expected_grads = gradients(model, expected)
    outputs = run_graph(graph, same, pytree.tree_map(copied, user))
    actual = outputs[: graph.num_results]
    actual_grads = gradients(same, actual)
    buffers = {i.name: model.get_buffer(i.target) for i in graph.inputs if i.name in graph.updated}
    half = any(isinstance(o, torch.Tensor) and o.dtype in HALF for o in expected)
    tolerance = {"rtol": 1e-2, "atol": 1e-3} if half else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(actual, expected, **tolerance)
    torch.testing.assert_close(actual_grads, expected_grads, **tolerance)
    for name, position in graph.updated.items():
        torch.testing.assert_close(outputs[position], buffers[name], **tolerance)
    return graph


@pytest.fixture(scope="session")
def check_equal() -> Callable[..., Graph]:
    return compare
