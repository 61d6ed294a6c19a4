"""Functionalisation: in-place operators become operators that return new values.

Values are grouped by the tensor whose memory they share (their base). A write creates new contents
of the base, and later uses of a view take the view of the new contents. If it is unknown whether
two values share memory (a `reshape` may copy), it is an error to use one after a write to the
other.

A buffer that the program overwrites (a counter, a running mean, a key-value cache) gets an output
with its new contents, which the runtime stores after the step. A user input that the program
overwrites is marked: the caller's tensor keeps its contents.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import takewhile

from autoshard.errors import SchemaError, UnsupportedError
from autoshard.graph.dtype import DType
from autoshard.graph.ir import (
    Argument,
    Graph,
    Input,
    InputKind,
    Node,
    Output,
    Ref,
    Tensor,
    Token,
    TokenKind,
)
from autoshard.graph.normalise.rewriting import GraphBuilder, integer, required, rewire, sizes

_WITHOUT_FUNCTIONAL_FORM = frozenset(
    {
        *("as_strided_", "resize_", "resize_as_", "set_", "rename_", "requires_grad_"),
        *("squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_"),
        *("eq_", "ge_", "gt_", "le_", "lt_", "ne_", "not_equal_"),
        *("greater_", "greater_equal_", "less_", "less_equal_"),
        *("logical_and_", "logical_not_", "logical_or_", "logical_xor_"),
        *("cauchy_", "geometric_", "log_normal_", "random_"),
    }
)
"""In-place operators without an equivalent functional form: they change the shape of a value, keep
an element type that the functional form changes, or have arguments in another order."""

_WITHOUT_PROMOTION = frozenset(
    {
        *("addbmm_", "addmm_", "addmv_", "addr_", "baddbmm_", "index_add_", "index_copy_"),
        *("index_fill_", "index_put_", "index_reduce_", "masked_fill_", "masked_scatter_", "put_"),
        *("scatter_", "scatter_add_", "scatter_reduce_"),
    }
)
"""Operators whose functional form returns the element type of the first input."""

_RANDOM = {
    "aten.bernoulli_.float": "aten.bernoulli.p",
    "aten.normal_.default": "aten.normal_functional.default",
}

OVERWRITES: dict[str, str | None] = {
    "aten.copy_.default": "src",
    "aten.fill_.Scalar": "value",
    "aten.fill_.Tensor": "value",
    "aten.zero_.default": None,
}
"""Operators that replace all contents, with the argument that has the new contents."""


@lru_cache(maxsize=1 << 12)
def is_inplace(operator: str) -> bool:
    """True for the name of an in-place operator."""
    packet = _packet(operator)
    return packet.endswith("_") and not packet.endswith("__")


def promotes(operator: str) -> bool:
    """True if the functional form promotes element types, instead of keeping the first one."""
    return _packet(operator) not in _WITHOUT_PROMOTION


def functional_form(node: Node) -> str:
    """Functional form of an in-place operator.

    Raises:
        UnsupportedError: there is none with the same arguments.
    """
    if node.operator in _RANDOM:
        return _RANDOM[node.operator]
    namespace, packet, *overload = node.operator.split(".")
    if namespace == "aten" and packet not in _WITHOUT_FUNCTIONAL_FORM:
        return ".".join([namespace, packet[:-1], *overload])
    raise UnsupportedError(
        f"node {node.name!r}: in-place operator {node.operator} has no functional form; "
        "write the model without it"
    )


def _check_no_renorm(node: Node) -> None:
    """Check that a call is not that of an embedding that scales its own rows.

    Raises:
        UnsupportedError: it is.
    """
    if node.operator == "aten.embedding_renorm_.default":
        raise UnsupportedError(
            f"node {node.name!r}: an embedding with max_norm overwrites rows of its weight in "
            f"forward, and a plan updates buffers only; leave max_norm out, and scale the rows "
            f"before each step, under torch.no_grad(): norm = weight.norm(dim=1, keepdim=True); "
            f"weight.mul_(torch.where(norm > max_norm, max_norm / (norm + 1e-7), 1.0))"
        )


def _packet(operator: str) -> str:
    parts = operator.split(".")
    return parts[1] if len(parts) > 1 else ""


_CATEGORIES = (
    frozenset({DType.BOOL}),
    frozenset(d for d in DType if d.value.startswith(("int", "uint"))),
    frozenset(d for d in DType if d.value.startswith(("float", "bfloat"))),
    frozenset(d for d in DType if d.value.startswith("complex")),
)


def category(dtype: DType) -> int:
    """Rank in type promotion: 0 boolean, 1 integer, 2 floating-point, 3 complex."""
    return next(i for i, dtypes in enumerate(_CATEGORIES) if dtype in dtypes)


def keeps_dtype(own: Tensor, other: Tensor) -> bool:
    """True if type promotion with another tensor gives the element type of the first."""
    rank, other_rank = category(own.dtype), category(other.dtype)
    if own.dtype is other.dtype or rank != other_rank:
        return rank >= other_rank
    if not other.shape and own.shape:
        return True
    signed = own.dtype.value.startswith("int") and other.dtype is DType.UINT8
    return own.dtype.itemsize > other.dtype.itemsize and (
        signed or own.dtype.value.startswith("u") == other.dtype.value.startswith("u")
    )


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
"""Views through which a write can be propagated to the base."""

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
"""Operators whose outputs may share memory with their inputs, depending on strides."""

_SAME = frozenset({"aten.alias.default", "aten.lift.default"})
_CASTS = frozenset({"aten.to.device", "aten.to.dtype", "aten.to.dtype_layout", "aten.to.other"})
_DROPOUTS = frozenset({"aten.dropout.default", "aten.feature_dropout.default"})


@dataclass(frozen=True, slots=True)
class ViewCall:
    """A view: the operator, its arguments without the input, and the resulting tensor."""

    operator: str
    arguments: tuple[tuple[str, Argument], ...]
    tensor: Tensor


def is_same(node: Node, values: Mapping[str, Tensor]) -> bool:
    """True if the operator returns its input itself."""
    if not node.inputs or len(node.outputs) != 1:
        return False
    if node.operator in _SAME:
        return True
    if node.operator == "aten.detach.default":
        return not values[node.inputs[0]].requires_grad
    if node.operator in _DROPOUTS:
        return node.argument("train") is False or node.argument("p") == 0
    if node.operator == "aten.type_as.default" or node.operator in _CASTS:
        source, result = values[node.inputs[0]], values[node.outputs[0]]
        return source.dtype is result.dtype and node.argument("copy", default=False) is False
    return False


def may_share(node: Node) -> bool:
    """True if outputs may share memory with inputs in a way that is not tracked."""
    return node.operator in _MAY_SHARE


def views_of(node: Node, values: Mapping[str, Tensor]) -> tuple[ViewCall, ...]:
    """Return a `ViewCall` per output if writes to the outputs can be propagated, else ()."""
    if not node.inputs:
        return ()
    if node.operator in _INVERTIBLE:
        arguments = tuple(pair for pair in node.arguments if pair[0] != "self")
        return (ViewCall(node.operator, arguments, values[node.outputs[0]]),)
    if node.operator in _SPLITS:
        return tuple(_split_views(node, values))
    if node.operator == "aten.unbind.int":
        dim = integer(node, "dim", 0)
        return tuple(
            ViewCall("aten.select.int", (("dim", dim), ("index", i)), values[name])
            for i, name in enumerate(node.outputs)
        )
    return ()


def _split_views(node: Node, values: Mapping[str, Tensor]) -> list[ViewCall]:
    dim = integer(node, "dim", 0)
    views, start = [], 0
    for name in node.outputs:
        tensor = values[name]
        if dim >= len(tensor.shape):
            raise SchemaError(f"node {node.name!r} ({node.operator}): {name!r} has no dim {dim}")
        end = start + tensor.shape[dim]
        bounds = (("dim", dim), ("start", start), ("end", end), ("step", 1))
        views.append(ViewCall("aten.slice.Tensor", bounds, tensor))
        start = end
    return views


Emit = Callable[..., str]
"""Adds a call, given its operator, the shape and type of its result, and its arguments by name, and
returns the result's name: `GraphBuilder.call` for one node."""


def write_back(view: ViewCall, source: Tensor, *, old: str, new: str, emit: Emit) -> str | None:
    """Propagate new contents of a view to the viewed tensor.

    Args:
        view: the view.
        source: shape and type of the viewed tensor.
        old: name of its old contents.
        new: name of the new contents of the view.
        emit: adds an operator call.

    Returns:
        Name of the new contents of the viewed tensor; None for a slice with a step, which is not
        supported.
    """
    node = Node("", view.operator, view.arguments, ())
    if view.operator in _SELF_INVERSE:
        return emit(view.operator, source, self=Ref(new), **dict(view.arguments))
    if view.operator == "aten.permute.default":
        order = sizes(node, "dims")
        if sorted(order) != list(range(len(source.shape))):
            raise SchemaError(f"{view.operator}: dims {order} do not order {source.shape}")
        inverse = tuple(order.index(d) for d in range(len(order)))
        return emit(view.operator, source, self=Ref(new), dims=inverse)
    if view.operator in _SLABS:
        return _write_slab(node, source, old=old, new=new, emit=emit)
    return emit("aten.reshape.default", source, self=Ref(new), shape=source.shape)


_SELF_INVERSE = frozenset({"aten.t.default", "aten.transpose.int"})
_SLABS = frozenset({"aten.select.int", "aten.slice.Tensor"})


def _write_slab(view: Node, source: Tensor, *, old: str, new: str, emit: Emit) -> str | None:
    """Concatenate the part before a slice, its new contents, and the part after it."""
    dim = required(view, "dim", int)

    def slab(size: int) -> Tensor:
        return Tensor((*source.shape[:dim], size, *source.shape[dim + 1 :]), source.dtype)

    def part(start: int, end: int) -> tuple[Ref, ...]:
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
    parts = (*part(0, start), Ref(new), *part(end, source.shape[dim]))
    return emit("aten.cat.default", source, tensors=parts, dim=dim)


def make_functional(graph: Graph) -> Graph:
    """Replace in-place operators by functional ones; dims and bounds must be explicit.

    Raises:
        UnsupportedError: a write cannot be expressed, or changes a parameter or a constant, which
            a plan cannot update; the message has the node.
    """
    if not any(is_inplace(node.operator) for node in graph.nodes):
        return graph
    state = _CurrentNames(graph)
    assignments = _assignments(graph)
    for node in graph.nodes[: len(graph.nodes) - len(assignments)]:
        if is_inplace(node.operator):
            state.write(node)
        else:
            state.read(node)
    # A result that was a buffer before an assignment keeps its contents.
    outputs = tuple(
        o if o.name is None else replace(o, name=state.now(o.name, _RETURN)) for o in graph.outputs
    )
    for node in assignments:
        state.write(node)
    outputs += tuple(state.updates())
    inputs = tuple(
        replace(i, overwritten=True) if i.kind is InputKind.USER and i.name in state.written else i
        for i in graph.inputs
    )
    nodes = tuple(state.nodes)
    return replace(graph, inputs=inputs, nodes=nodes, outputs=outputs, values=state.values)


def _assignments(graph: Graph) -> Sequence[Node]:
    """The last nodes, by which an export expresses `module.buffer = tensor` in forward.

    They have the default name of the operator, which traced calls of `copy_` have not.
    """
    found = takewhile(
        lambda node: (
            node.operator == "aten.copy_.default" and node.name.startswith("copy__default")
        ),
        reversed(graph.nodes),
    )
    return tuple(found)[::-1]


_RETURN = Node("return", "return", (), ())
"""Pseudo-node that uses the outputs of the graph."""


class _CurrentNames:
    """Current name, in the functional graph, of every value of the original graph."""

    def __init__(self, graph: Graph) -> None:
        self._builder = GraphBuilder.of(graph)
        self.nodes, self.values = self._builder.nodes, self._builder.values
        self._inputs: Mapping[str, Input] = {i.name: i for i in graph.inputs}
        self._base = {name: name for name in graph.values}
        self._views: dict[str, tuple[ViewCall, ...]] = dict.fromkeys(graph.values, ())
        self._current = {name: name for name in graph.values}
        self._version: dict[str, int] = defaultdict(int)
        self._seen: dict[str, int] = defaultdict(int)
        self._may_share: dict[str, set[str]] = defaultdict(set)
        self._stale: dict[str, str] = {}
        self._contents: dict[str, str] = {}
        self.written: set[str] = set()

    def read(self, node: Node) -> None:
        """Add an operator without writes."""
        self.nodes.append(rewire(node, lambda name: Ref(self.now(name, node))))
        if is_same(node, self.values):
            self._add_view(node.outputs[0], node.inputs[0], ())
        elif may_share(node):
            for output in node.outputs:
                for name in node.inputs:
                    self._may_share[self._base[name]].add(output)
                    self._may_share[output].add(self._base[name])
        else:
            views = views_of(node, self.values)
            for output, view in zip(node.outputs, views, strict=False):
                self._add_view(output, node.inputs[0], (view,))

    def _add_view(self, name: str, at: str, views: tuple[ViewCall, ...]) -> None:
        self._base[name] = self._base[at]
        self._views[name] = self._views[at] + views
        self._seen[name] = self._version[self._base[name]]

    def now(self, name: str, user: Node) -> str:
        """Name of the value with the current contents of `name`."""
        base = self._base[name]
        if base in self._stale:
            raise UnsupportedError(
                f"{user.name!r} uses {name!r}, which may share memory with what "
                f"{self._stale[base]!r} has overwritten; clone it first, or write "
                "the operator without the trailing underscore"
            )
        # Views are taken again when they are used, and not at each write: nobody may use them
        # again.
        if self._seen[name] != self._version[base]:
            value = self._contents.get(base, base)
            emit = partial(self._builder.call, user)
            for view in self._views[name]:
                source = Ref(value)
                value = emit(view.operator, view.tensor, self=source, **dict(view.arguments))
            self._current[name] = value
            self._seen[name] = self._version[base]
        return self._current[name]

    def write(self, node: Node) -> None:
        """Add an in-place operator."""
        _check_no_renorm(node)
        name = required(node, "self", Ref).name
        base = self._base[name]
        self._refuse_state(node, base)
        new = self._new_contents(node, self.now(name, node))
        self._mark_stale(node, base)
        old = self._contents.get(base, base)
        self._contents[base] = self._propagate_write(node, old, self._views[name], new)
        self._version[base] += 1
        if node.operator != "aten.detach_.default":
            self.written.add(base)
        for alias in (name, node.outputs[0]):
            self._base[alias] = base
            self._views[alias] = self._views[name]
            self._current[alias] = new
            self._seen[alias] = self._version[base]

    def _refuse_state(self, node: Node, base: str) -> None:
        source = self._inputs.get(base)
        if source is None or source.kind is InputKind.USER:
            return
        if node.operator == "aten.detach_.default":  # it changes no contents
            return
        if source.kind is not InputKind.BUFFER:
            raise UnsupportedError(
                f"node {node.name!r} ({node.operator}) overwrites the {source.kind.value} "
                f"{source.target!r}; a plan updates buffers only: make it one with register_buffer"
            )

    def updates(self) -> Iterator[Output]:
        """New contents of the buffers that were written."""
        for base, contents in self._contents.items():
            source = self._inputs.get(base)
            if source is not None and source.kind is InputKind.BUFFER:
                yield Output(contents, updates=base)

    def _mark_stale(self, node: Node, base: str) -> None:
        """Mark all values that may share memory with the written base."""
        reached, waiting = {base}, [base]
        while waiting:
            for other in self._may_share[waiting.pop()] - reached:
                reached.add(other)
                waiting.append(other)
        self._stale.update(dict.fromkeys(reached - {base}, node.name))

    def _new_contents(self, node: Node, old: str) -> str:
        if node.operator in OVERWRITES:
            return self._overwrite(node, old)
        tensor = self.values[old]
        for name in node.inputs[1:]:
            other = self.values[name]
            if promotes(node.operator) and not keeps_dtype(tensor, other):
                raise UnsupportedError(
                    f"node {node.name!r} ({node.operator}) writes {other.dtype.value} into "
                    f"{tensor.dtype.value}; convert {name!r} with .to() first"
                )
        read = rewire(node, lambda name: Ref(self.now(name, node)))
        self.values[node.outputs[0]] = tensor
        self.nodes.append(replace(read, operator=functional_form(node)))
        return node.outputs[0]

    def _overwrite(self, node: Node, old: str) -> str:
        """Add the new contents of a tensor that is overwritten completely."""
        emit = partial(self._builder.call, node)
        tensor = self.values[old]
        source = OVERWRITES[node.operator]
        if source is None:
            return emit("aten.zeros_like.default", tensor, self=Ref(old))
        value = node.argument(source)
        if not isinstance(value, Ref):
            return emit("aten.full_like.default", tensor, self=Ref(old), fill_value=value)
        new = self.now(value.name, node)
        if self.values[new].shape != tensor.shape:
            wide = Tensor(tensor.shape, self.values[new].dtype)
            new = emit("aten.expand.default", wide, self=Ref(new), size=tensor.shape)
        if self.values[new].dtype is not tensor.dtype:
            dtype = Token(TokenKind.DTYPE, tensor.dtype.value)
            new = emit("aten.to.dtype", tensor, self=Ref(new), dtype=dtype)
        return new

    def _propagate_write(self, node: Node, base: str, views: tuple[ViewCall, ...], new: str) -> str:
        """Name of the base's contents after new contents of a view were propagated."""
        emit = partial(self._builder.call, node)
        chain = [base]
        for view in views[:-1]:
            arguments = {"self": Ref(chain[-1]), **dict(view.arguments)}
            chain.append(emit(view.operator, view.tensor, **arguments))
        for view, old in zip(reversed(views), reversed(chain), strict=False):
            written = write_back(view, self.values[old], old=old, new=new, emit=emit)
            if written is None:
                raise UnsupportedError(
                    f"node {node.name!r} ({node.operator}) writes into every other element of a "
                    "tensor; write the operator without the trailing underscore"
                )
            new = written
        return new
