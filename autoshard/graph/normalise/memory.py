"""Which values share memory, and how a write into a view reaches the tensor behind it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from autoshard.errors import SchemaError
from autoshard.graph.ir import Argument, Node, Ref, Tensor
from autoshard.graph.normalise.read import integer, required, sizes

_INVERTIBLE = frozenset(
    {
        "aten.permute.default",
        "aten.select.int",
        "aten.slice.Tensor",
        "aten.squeeze.default",
        "aten.squeeze.dim",
        "aten.squeeze.dims",
        "aten.t.default",
        "aten.transpose.int",
        "aten.unflatten.int",
        "aten.unsqueeze.default",
        "aten.view.default",
    }
)
"""Views through which a write can be carried back to the tensor they look at."""

_SPLITS = frozenset(
    {
        "aten.chunk.default",
        "aten.split.Tensor",
        "aten.split.sizes",
        "aten.split_with_sizes.default",
    }
)

_MAY_SHARE = frozenset(
    {
        "aten.as_strided.default",
        "aten.broadcast_tensors.default",
        "aten.broadcast_to.default",
        "aten.contiguous.default",
        "aten.detach.default",
        "aten.diagonal.default",
        "aten.expand.default",
        "aten.expand_as.default",
        "aten.flatten.using_ints",
        "aten.imag.default",
        "aten.meshgrid.default",
        "aten.meshgrid.indexing",
        "aten.movedim.int",
        "aten.movedim.intlist",
        "aten.numpy_T.default",
        "aten.mT.default",
        "aten.narrow.default",
        "aten.real.default",
        "aten.reshape.default",
        "aten.reshape_as.default",
        "aten.swapaxes.default",
        "aten.tensor_split.sections",
        "aten.tensor_split.indices",
        "aten.unfold.default",
        "aten.view.dtype",
        "aten.view_as.default",
        "aten.view_as_complex.default",
        "aten.view_as_real.default",
    }
)
"""Operators whose outputs share memory with their inputs, or may, depending on strides."""

_SAME = frozenset({"aten.alias.default", "aten.lift.default"})
_CASTS = frozenset({"aten.to.device", "aten.to.dtype", "aten.to.dtype_layout", "aten.to.other"})
_DROPOUTS = frozenset({"aten.dropout.default", "aten.feature_dropout.default"})


@dataclass(frozen=True, slots=True)
class View:
    """One look at a tensor: an operator with its further arguments, and what it yields."""

    operator: str
    arguments: tuple[tuple[str, Argument], ...]
    tensor: Tensor


def is_same(node: Node, values: Mapping[str, Tensor]) -> bool:
    """Whether the operator returns its very input."""
    if not node.inputs or len(node.outputs) != 1:
        return False
    if node.operator in _SAME:
        return True
    if node.operator in _DROPOUTS:
        return node.argument("train") is False or node.argument("p") == 0
    if node.operator == "aten.type_as.default" or node.operator in _CASTS:
        source, result = values[node.inputs[0]], values[node.outputs[0]]
        return source.dtype is result.dtype and node.argument("copy", default=False) is False
    return False


def may_share(node: Node) -> bool:
    """Whether outputs may share memory with inputs in a way that is not followed."""
    return node.operator in _MAY_SHARE


def views_of(node: Node, values: Mapping[str, Tensor]) -> tuple[View, ...]:
    """One view for each output, where the operator makes views that can be written through."""
    if not node.inputs:
        return ()
    if node.operator in _INVERTIBLE:
        arguments = tuple(pair for pair in node.arguments if pair[0] != "self")
        return (View(node.operator, arguments, values[node.outputs[0]]),)
    if node.operator in _SPLITS:
        return tuple(_split_views(node, values))
    if node.operator == "aten.unbind.int":
        dim = integer(node, "dim", 0)
        return tuple(
            View("aten.select.int", (("dim", dim), ("index", i)), values[name])
            for i, name in enumerate(node.outputs)
        )
    return ()


def _split_views(node: Node, values: Mapping[str, Tensor]) -> list[View]:
    dim = integer(node, "dim", 0)
    views, start = [], 0
    for name in node.outputs:
        tensor = values[name]
        if dim >= len(tensor.shape):
            raise SchemaError(f"node {node.name!r} ({node.operator}): {name!r} has no dim {dim}")
        end = start + tensor.shape[dim]
        bounds = (("dim", dim), ("start", start), ("end", end), ("step", 1))
        views.append(View("aten.slice.Tensor", bounds, tensor))
        start = end
    return views


class Emit(Protocol):
    """Runs an operator and names its result."""

    def __call__(self, operator: str, out: Tensor, /, **arguments: Argument) -> str:
        """The name of the result, whose shape and type are `out`."""
        ...


def write_back(view: View, behind: Tensor, *, old: str, new: str, emit: Emit) -> str | None:
    """Put a view's new contents into the tensor behind it.

    Args:
        view: how the tensor was looked at.
        behind: shape and type of the tensor behind the view.
        old: name of that tensor's contents.
        new: name of the view's new contents.
        emit: runs an operator.

    Returns:
        Name of the new contents of the tensor behind; None where the view takes every other
        element and so cannot be written through.
    """
    node = Node("", view.operator, view.arguments, ())
    if view.operator in _SELF_INVERSE:
        return emit(view.operator, behind, self=Ref(new), **dict(view.arguments))
    if view.operator == "aten.permute.default":
        order = sizes(node, "dims")
        if sorted(order) != list(range(len(behind.shape))):
            raise SchemaError(f"{view.operator}: dims {order} do not order {behind.shape}")
        inverse = tuple(order.index(d) for d in range(len(order)))
        return emit(view.operator, behind, self=Ref(new), dims=inverse)
    if view.operator in _SLABS:
        return _write_slab(node, behind, old=old, new=new, emit=emit)
    return emit("aten.reshape.default", behind, self=Ref(new), shape=behind.shape)


_SELF_INVERSE = frozenset({"aten.t.default", "aten.transpose.int"})
_SLABS = frozenset({"aten.select.int", "aten.slice.Tensor"})


def _write_slab(view: Node, behind: Tensor, *, old: str, new: str, emit: Emit) -> str | None:
    """Join what is in front of a slice, its new contents, and what is behind it."""
    dim = required(view, "dim", int)

    def slab(size: int) -> Tensor:
        return Tensor((*behind.shape[:dim], size, *behind.shape[dim + 1 :]), behind.dtype)

    def cut(start: int, end: int) -> tuple[Ref, ...]:
        if start == end:
            return ()
        bounds = {"dim": dim, "start": start, "end": end, "step": 1}
        return (Ref(emit("aten.slice.Tensor", slab(end - start), self=Ref(old), **bounds)),)

    if view.operator == "aten.select.int":
        start = required(view, "index", int)
        end = start + 1
        new = emit("aten.unsqueeze.default", slab(1), self=Ref(new), dim=dim)
    else:
        start, end = required(view, "start", int), required(view, "end", int)
        if required(view, "step", int) != 1:
            return None
    parts = (*cut(0, start), Ref(new), *cut(end, behind.shape[dim]))
    return emit("aten.cat.default", behind, tensors=parts, dim=dim)
