"""Rules of operators that have dims among their arguments, for all dims, on simulated ranks."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.dim_calls import accepted_calls, overloads

from autoshard.graph import Node
from autoshard.graph.dims import with_explicit_dims
from autoshard.ops import has_rule

MESHES = ((3,),)
"""Ranks that divide the dims of the calls."""
CALLS = 12
"""Of each operator, out of up to 150."""
NO_GRADIENT = {"scatter.reduce", "scatter.value_reduce"}
"""Operators without a derivative, of which the proof computes gradients."""
SHARDED = [n for n in overloads() if has_rule(f"aten.{n}") and n not in NO_GRADIENT]


@pytest.mark.matrix
@pytest.mark.parametrize("name", SHARDED)
def test_rules_are_true_for_all_dims(
    name: str, example: Callable[..., Any], prove: Callable[..., Any]
) -> None:
    """With dims as they are written, and as normalised programs have them."""
    torch.manual_seed(0)
    calls = [
        arguments
        for arguments, results in accepted_calls(name)
        if not any(result.isnan().any() for result in results)  # the variance of one number
    ]
    for arguments in random.Random(0).sample(calls, min(CALLS, len(calls))):
        made = example(f"aten.{name}", **arguments)
        values = {f"v{i + 1}": tensor for i, tensor in enumerate(made.call.inputs)}
        results = {f"y{i}": tensor for i, tensor in enumerate(made.call.outputs)}
        node = Node("call", made.call.operator, made.call.arguments, tuple(results))
        explicit = dict(with_explicit_dims(node, values | results).arguments)
        dims = {key: explicit[key] for key in arguments if isinstance(arguments[key], int | list)}
        prove(made, meshes=MESHES)
        prove(example(f"aten.{name}", **{**arguments, **numbers(dims)}), meshes=MESHES)


def numbers(arguments: dict[str, Any]) -> dict[str, Any]:
    """Lists and numbers of a graph as PyTorch takes them, without those of tensors."""
    plain = {key: list(x) if isinstance(x, tuple) else x for key, x in arguments.items()}
    return {key: x for key, x in plain.items() if isinstance(x, int) or all_numbers(x)}


def all_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, int) for item in value)
