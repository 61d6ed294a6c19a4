"""Propagation of `requires_grad` from the inputs to all values.

Exports record `requires_grad` of inputs only. A value requires a gradient if its element type is
differentiable, an input of its operator requires one, and autograd differentiates the operator.
"""

from dataclasses import replace
from functools import lru_cache

from autoshard.graph.ir import Graph, Node, Tensor

_NOT_DIFFERENTIABLE = frozenset(
    {
        "detach",
        "detach_copy",
        "empty_like",
        "full_like",
        "histc",
        "new_empty",
        "new_empty_strided",
        "new_full",
        "new_ones",
        "new_zeros",
        "ones_like",
        "rand_like",
        "randn_like",
        "zeros_like",
    }
)
"""Operators that read only the shape of their input, or that autograd has no formula for.

Source: `output_differentiability` and `not_differentiable` in PyTorch's derivatives.yaml.
"""


def is_differentiable(node: Node) -> bool:
    """True if autograd differentiates the operator."""
    return _is_differentiable(node.operator)


@lru_cache(maxsize=1 << 12)
def _is_differentiable(operator: str) -> bool:
    packet = operator.split(".")[1] if "." in operator else operator
    return packet not in _NOT_DIFFERENTIABLE


def propagate_gradients(graph: Graph) -> Graph:
    """Return the graph with `requires_grad` of every value recomputed from the inputs."""
    values = dict(graph.values)
    made: dict[tuple[Tensor, bool], Tensor] = {}
    for node in graph.nodes:
        flows = is_differentiable(node) and any(values[n].requires_grad for n in node.inputs)
        for name in node.outputs:
            tensor = values[name]
            wanted = flows and tensor.dtype.is_differentiable
            if tensor.requires_grad != wanted:
                key = (tensor, wanted)
                if key not in made:
                    made[key] = replace(tensor, requires_grad=wanted)
                values[name] = made[key]
    return replace(graph, values=values)
