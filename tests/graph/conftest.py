from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from support.evaluation import run_graph
from torch.utils import _pytree as pytree

from autoshard.graph import Graph, export_model, load_graph

HALF = {torch.float16, torch.bfloat16}


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
