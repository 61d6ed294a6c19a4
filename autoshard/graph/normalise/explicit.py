"""Dim, index and size arguments made explicit: nothing negative, nothing inferred."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from autoshard.errors import SchemaError
from autoshard.graph.ir import Argument, Graph, InputKind, Node, Ref, Tensor
from autoshard.graph.normalise.read import integer, required

_DIM_ARGUMENTS = frozenset({"dim", "dims", "dim0", "dim1", "start_dim", "end_dim"})
_ONE_MORE_DIM = frozenset({"aten.unsqueeze.default", "aten.stack.default"})
"""Operators whose dim counts the dims of their output."""
_BROADCAST = "aten.broadcast_tensors.default"
_SIZES = {
    "aten.view.default": "size",
    "aten.reshape.default": "shape",
    "aten.expand.default": "size",
}


def make_explicit(graph: Graph) -> Graph:
    """The graph with every dim counted from the front and every size written out.

    A broadcast of several tensors becomes an expansion of each. `select` gets a non-negative
    index; `slice` gets dim, start, end within the dim, and step.

    Raises:
        SchemaError: a dim or an index is out of range, or missing.
    """
    graph = _with_own_gradients(graph)
    nodes = (part for node in graph.nodes for part in _broadcasts(node))
    return replace(graph, nodes=tuple(_explicit(node, graph.values) for node in nodes))


def _with_own_gradients(graph: Graph) -> Graph:
    """The graph without gradients that an export gives to what the caller passes.

    A broadcast that leaves a tensor as it is returns that tensor, and tracing marks it as
    requiring a gradient if one of the others does.
    """
    users = {i.name for i in graph.inputs if i.kind is InputKind.USER}
    marked = {
        name
        for node in graph.nodes
        if node.operator == _BROADCAST
        for name in users.intersection(node.inputs)
    }
    cleared = {name: replace(graph.values[name], requires_grad=False) for name in marked}
    return replace(graph, values={**graph.values, **cleared})


def _broadcasts(node: Node) -> Iterator[Node]:
    """A broadcast of several tensors as one expansion for each of them."""
    if node.operator != _BROADCAST:
        yield node
        return
    for source, result in zip(node.inputs, node.outputs, strict=True):
        yield replace(
            node,
            name=result,
            operator="aten.expand.default",
            arguments=(("self", Ref(source)),),
            outputs=(result,),
        )


def _explicit(node: Node, values: Mapping[str, Tensor]) -> Node:
    if not node.inputs:
        return node
    shape = values[node.inputs[0]].shape
    ndim = max(len(shape) + (node.operator in _ONE_MORE_DIM), 1)
    explicit: dict[str, Argument] = {
        key: _from_front(value, ndim, node)
        for key, value in node.arguments
        if key in _DIM_ARGUMENTS
    }
    if node.operator in _SIZES:
        explicit[_SIZES[node.operator]] = values[node.outputs[0]].shape
    if explicit:
        arguments = {**dict(node.arguments), **explicit}
        node = replace(node, arguments=tuple(arguments.items()))
    if node.operator == "aten.slice.Tensor":
        return _explicit_slice(node, shape)
    if node.operator == "aten.select.int":
        return _explicit_select(node, shape)
    return node


def _from_front(dim: Argument, ndim: int, node: Node) -> Argument:
    if isinstance(dim, tuple):
        return tuple(_from_front(d, ndim, node) for d in dim)
    if isinstance(dim, bool) or not isinstance(dim, int):
        return dim
    return _within(dim, ndim, f"node {node.name!r} ({node.operator}): dim")


def _within(index: int, size: int, what: str) -> int:
    if not -size <= index < size:
        raise SchemaError(f"{what} {index} is out of range for size {size}")
    return index % size


def _explicit_slice(node: Node, shape: tuple[int, ...]) -> Node:
    dim = integer(node, "dim", 0)
    step = integer(node, "step", 1)
    size = _size(node, shape, dim)
    if step < 1:
        raise SchemaError(f"node {node.name!r} ({node.operator}): step {step} is not positive")
    bounds = slice(integer(node, "start", 0), integer(node, "end", size))
    start, end, _ = bounds.indices(size)
    arguments: dict[str, Argument] = {
        "self": node.argument("self"),
        "dim": dim,
        "start": start,
        "end": max(start, end),
        "step": step,
    }
    return replace(node, arguments=tuple(arguments.items()))


def _explicit_select(node: Node, shape: tuple[int, ...]) -> Node:
    size = _size(node, shape, required(node, "dim", int))
    what = f"node {node.name!r} ({node.operator}): index"
    index = _within(required(node, "index", int), size, what)
    arguments = {**dict(node.arguments), "index": index}
    return replace(node, arguments=tuple(arguments.items()))


def _size(node: Node, shape: tuple[int, ...], dim: int) -> int:
    if dim >= len(shape):
        raise SchemaError(f"node {node.name!r} ({node.operator}): a scalar has no dim {dim}")
    return shape[dim]
