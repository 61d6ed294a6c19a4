"""Simplification: removes dead code and no-ops, makes sizes explicit, canonicalises operators.

Strides are irrelevant in a plan, so `contiguous` and `clone` are no-ops, and `view` is `reshape`.
All tensors of a rank are on its device, so copies between devices are no-ops too.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import accumulate

from autoshard.errors import SchemaError
from autoshard.graph.dependencies import nodes_making
from autoshard.graph.dims import with_explicit_dims, within
from autoshard.graph.ir import Argument, Graph, InputKind, Node, Ref, Tensor, Token, TokenKind
from autoshard.graph.normalise.functional import is_same
from autoshard.graph.normalise.rewriting import integer, required, rewire, sizes


def drop_dead_code(graph: Graph) -> Graph:
    """Remove nodes that no output depends on, including random operators; inputs are kept.

    Outputs that do not change their buffer are removed too.
    """
    outputs = tuple(o for o in graph.outputs if o.updates is None or o.updates != o.name)
    nodes = nodes_making(graph.nodes, (o.name for o in outputs if o.name is not None))
    names = [i.name for i in graph.inputs if i.kind is not InputKind.LITERAL]
    names += [name for node in nodes for name in node.outputs]
    values = {name: graph.values[name] for name in names}
    return Graph(graph.inputs, nodes, outputs, values, graph.in_spec, graph.out_spec)


_BROADCAST = "aten.broadcast_tensors.default"
_SIZES = {
    "aten.view.default": "size",
    "aten.reshape.default": "shape",
    "aten.expand.default": "size",
}


def make_explicit(graph: Graph) -> Graph:
    """Make every dim non-negative (see `autoshard.graph.dims`), and every size explicit.

    A broadcast of several tensors becomes an expansion of each. `select` gets a non-negative
    index; `slice` gets dim, start, end within the dim, and step.

    Raises:
        SchemaError: a dim or an index is out of range, or missing.
    """
    graph = _clear_traced_gradients(graph)
    nodes = (part for node in graph.nodes for part in _broadcasts(node))
    return replace(graph, nodes=tuple(_explicit(node, graph.values) for node in nodes))


def _clear_traced_gradients(graph: Graph) -> Graph:
    """Clear `requires_grad` of user inputs that tracing set by mistake.

    A broadcast that does not change a tensor returns it, and tracing marks it as requiring a
    gradient if one of the other tensors does.
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
    """Replace a broadcast of several tensors by one expand per tensor."""
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
    node = with_explicit_dims(node, values)
    if node.operator in _SIZES:
        sizes = {_SIZES[node.operator]: values[node.outputs[0]].shape}
        node = replace(node, arguments=tuple({**dict(node.arguments), **sizes}.items()))
    shape = values[node.inputs[0]].shape
    if node.operator == "aten.slice.Tensor":
        return _explicit_slice(node, shape)
    if node.operator == "aten.select.int":
        return _explicit_select(node, shape)
    return node


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
    index = within(required(node, "index", int), size, what)
    arguments = {**dict(node.arguments), "index": index}
    return replace(node, arguments=tuple(arguments.items()))


def _size(node: Node, shape: tuple[int, ...], dim: int) -> int:
    if dim >= len(shape):
        raise SchemaError(f"node {node.name!r} ({node.operator}): a scalar has no dim {dim}")
    return shape[dim]


_COPIES = frozenset(
    {
        "aten.alias.default",
        "aten.clone.default",
        "aten.contiguous.default",
        "aten.lift.default",
        "aten.lift_fresh.default",
        "aten.lift_fresh_copy.default",
    }
)
_CASTS = frozenset(
    {
        "aten._to_copy.default",
        "aten.to.device",
        "aten.to.dtype",
        "aten.to.dtype_layout",
        "aten.to.other",
        "aten.type_as.default",
    }
)
_JOINS = {"aten.concat.default", "aten.concatenate.default"}
_EMBEDDINGS = frozenset(
    {
        "aten._embedding_bag.default",
        "aten._embedding_bag_forward_only.default",
        "aten.embedding.default",
        "aten.embedding_bag.default",
        "aten.embedding_bag.padding_idx",
    }
)
_RESHAPES = frozenset(
    {
        "aten._unsafe_view.default",
        "aten.flatten.using_ints",
        "aten.reshape.default",
        "aten.reshape_as.default",
        "aten.unflatten.int",
        "aten.view.default",
        "aten.view_as.default",
    }
)
_NOOP_IF_SAME_TYPE = frozenset(
    {
        "aten.expand.default",
        "aten.reshape.default",
        "aten.slice.Tensor",
        "aten.squeeze.default",
        "aten.squeeze.dim",
        "aten.squeeze.dims",
        "aten.to.dtype",
    }
)
"""Operators that are no-ops if they change neither shape nor element type."""


def simplify(graph: Graph) -> Graph:
    """Remove no-ops. The graph must be explicit, functional and have propagated gradients."""
    simplifier = _Simplifier(graph.values)
    for node in graph.nodes:
        simplifier.add(node)
    return replace(
        graph,
        nodes=tuple(simplifier.nodes),
        outputs=tuple(
            o if o.name is None else replace(o, name=simplifier.name(o.name)) for o in graph.outputs
        ),
    )


class _Simplifier:
    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self.nodes: list[Node] = []
        self._values = values
        self._same: dict[str, str] = {}
        self._cats: dict[str, Node] = {}

    def name(self, name: str) -> str:
        """Name in the new graph of a value of the old graph."""
        return self._same.get(name, name)

    def add(self, node: Node) -> None:
        """Add the next node of the old graph."""
        node = _canonical(rewire(node, lambda name: Ref(self.name(name))), self._values)
        source = self._source(node)
        if source is not None:
            self._same[node.outputs[0]] = source
            return
        node = self._slice_of_cat(node)
        if node.operator == "aten.cat.default":
            self._cats[node.outputs[0]] = node
        self.nodes.append(node)

    def _source(self, node: Node) -> str | None:
        """The value that equals the node's output, if the node is a no-op."""
        if len(node.outputs) != 1 or not node.inputs:
            return None
        if node.operator == "aten.slice.Tensor":
            parts = self._parts(node)
            if len(parts) == 1:
                return parts[0]
        return node.inputs[0] if _is_noop(node, self._values) else None

    def _slice_of_cat(self, node: Node) -> Node:
        """Replace a slice of a concatenation by a concatenation of fewer parts."""
        parts = self._parts(node) if node.operator == "aten.slice.Tensor" else ()
        if not parts:
            return node
        arguments: tuple[tuple[str, Argument], ...] = (
            ("tensors", tuple(map(Ref, parts))),
            ("dim", node.argument("dim")),
        )
        return replace(node, operator="aten.cat.default", arguments=arguments)

    def _parts(self, node: Node) -> tuple[str, ...]:
        """The parts of a concatenation that a slice selects completely, or ()."""
        cat = self._cats.get(required(node, "self", Ref).name)
        dim = required(node, "dim", int)
        if cat is None or cat.argument("dim", 0) != dim or node.argument("step") != 1:
            return ()
        shapes = [self._values[name].shape for name in cat.inputs]
        if any(len(shape) <= dim for shape in shapes):
            return ()
        ends = list(accumulate((shape[dim] for shape in shapes), initial=0))
        start, end = required(node, "start", int), required(node, "end", int)
        if start not in ends or end not in ends or start == end:
            return ()
        return cat.inputs[ends.index(start) : ends.index(end)]


def _is_noop(node: Node, values: Mapping[str, Tensor]) -> bool:
    source, result = values[node.inputs[0]], values[node.outputs[0]]
    if node.operator in _COPIES or is_same(node, values):
        return True
    if node.operator in _NOOP_IF_SAME_TYPE:
        return source.shape == result.shape and source.dtype is result.dtype
    if node.operator == "aten.detach.default":
        return not source.requires_grad
    if node.operator == "aten.transpose.int":
        return node.argument("dim0") == node.argument("dim1")
    if node.operator == "aten.permute.default":
        return node.argument("dims") == tuple(range(len(source.shape)))
    return False


def _canonical(node: Node, values: Mapping[str, Tensor]) -> Node:
    """Canonical form of a call with several equivalent forms."""
    if node.operator in _EMBEDDINGS and node.argument("sparse"):
        # The same gradient, as a dense tensor, which collectives reduce.
        return replace(node, arguments=tuple({**dict(node.arguments), "sparse": False}.items()))
    if not node.inputs or len(node.outputs) != 1:
        return node
    if node.operator == "aten.repeat_interleave.self_int":
        # `output_size` follows from the repeats, and would differ on a rank.
        kept = tuple(pair for pair in node.arguments if pair[0] != "output_size")
        return replace(node, arguments=kept)
    if node.operator in _JOINS:
        return replace(node, operator="aten.cat.default")
    if node.operator == "aten.outer.default":
        factors = tuple(map(Ref, node.inputs))
        return replace(
            node,
            operator="aten.einsum.default",
            arguments=(("equation", "i,j->ij"), ("tensors", factors)),
        )
    return _canonical_of_one(node, values)


def _canonical_of_one(node: Node, values: Mapping[str, Tensor]) -> Node:
    if node.operator in _RESHAPES:
        arguments = ("shape", values[node.outputs[0]].shape)
        return _call(node, "aten.reshape.default", arguments)
    if node.operator in _CASTS:
        dtype = Token(TokenKind.DTYPE, values[node.outputs[0]].dtype.value)
        return _call(node, "aten.to.dtype", ("dtype", dtype))
    if node.operator == "aten.tile.default":
        dims, rank = sizes(node, "dims"), len(values[node.inputs[0]].shape)
        repeats = (1,) * (rank - len(dims)) + dims
        return _call(node, "aten.repeat.default", ("repeats", repeats))
    if node.operator == "aten.expand_as.default":
        return _call(node, "aten.expand.default", ("size", values[node.outputs[0]].shape))
    return node


def _call(node: Node, operator: str, *arguments: tuple[str, Argument]) -> Node:
    return replace(node, operator=operator, arguments=(("self", Ref(node.inputs[0])), *arguments))
