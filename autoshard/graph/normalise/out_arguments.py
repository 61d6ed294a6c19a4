"""Operators that write into an `out` argument: the functional operator, and a copy into it.

The copy is an in-place operator, as if the program had written `out.copy_(...)`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from autoshard.errors import UnsupportedError
from autoshard.graph.checks import CREATION_PACKETS
from autoshard.graph.dtype import DType
from autoshard.graph.ir import Argument, Graph, Node, Ref, Tensor, Token, TokenKind
from autoshard.graph.normalise.rewriting import GraphBuilder

_OUT = ("out",)
_OTHER_NAMES: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("add.out", "copysign.out", "div.out", "ldexp.out", "mul.out", "sub.out"),
            *("divide.out", "multiply.out", "subtract.out", "true_divide.out", "xlogy.OutTensor"),
        ),
        "Tensor",
    ),
    **dict.fromkeys(("all.out", "any.out", "std.out", "var.out"), "dim"),
    **dict.fromkeys(("all.all_out", "any.all_out"), "default"),
    **dict.fromkeys(("max.out", "min.out"), "other"),
    **dict.fromkeys(("max.unary_out", "min.unary_out"), "default"),
    "mean.dtype_out": "default",
    "mean.out": "dim",
    "arange.start_out": "start_step",
    "bernoulli.float_out": "p",
    "div.out_mode": "Tensor_mode",
    "divide.out_mode": "Tensor_mode",
    "nansum.out": "default",
    "norm.out": "ScalarOpt_dim",
    "prod.int_out": "dim_int",
    "range.out": "step",
    "range.out_": "default",
    "sum.IntList_out": "dim_IntList",
    "xlogy.OutScalar_Other": "Scalar_Other",
    "xlogy.OutScalar_Self": "Scalar_Self",
}
"""Overloads of functional operators that do not follow from those with an `out` argument."""

_SEVERAL: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "kthvalue.values": ("default", ("values", "indices")),
    "max.dim_max": ("dim", ("max", "max_values")),
    "median.dim_values": ("dim", ("values", "indices")),
    "min.dim_min": ("dim", ("min", "min_indices")),
    "mode.values": ("default", ("values", "indices")),
    "sort.values": ("default", ("values", "indices")),
    "sort.values_stable": ("stable", ("values", "indices")),
    "topk.values": ("default", ("values", "indices")),
}
"""Operators with several such arguments: the functional overload, and their names."""


_FLAGS = frozenset(
    """
    all any eq ge greater greater_equal gt isfinite isin isinf isnan isneginf isposinf le less
    less_equal logical_and logical_not logical_or logical_xor lt ne not_equal signbit
    """.split()  # noqa: SIM905  a table of words
)
"""Packets whose results are boolean."""

_POSITIONS = frozenset({"argmax", "argmin", "bucketize", "count_nonzero", "searchsorted"})
"""Packets whose results are of int64."""

_SUMS = frozenset({"cumprod", "cumsum", "nansum", "prod", "sum"})
"""Packets that sum in the element type of `out` if none is given."""


def without_out_arguments(graph: Graph) -> Graph:
    """Replace operators that write into an `out` argument.

    Raises:
        UnsupportedError: the argument has another shape or element type than the result.
    """
    forms = [functional_overload(node) for node in graph.nodes]
    if not any(forms):
        return graph
    builder = GraphBuilder.of(graph)
    nodes, values = builder.nodes, builder.values
    for node, form in zip(graph.nodes, forms, strict=True):
        if form is None:
            nodes.append(node)
            continue
        operator, names = form
        written = [node.argument(name) for name in names]
        outs = [argument.name for argument in written if isinstance(argument, Ref)]
        results = tuple(
            builder.value(f"{output}_result", values[output]) for output in node.outputs
        )
        if len(outs) != len(node.outputs):
            raise UnsupportedError(
                f"node {node.name!r}: {node.operator} writes into several tensors; leave out=... "
                f"away"
            )
        call = _functional(node, operator, names, results, values)
        for name, out, output, result in zip(names, outs, node.outputs, results, strict=True):
            _check_shape(node, values[out], values[output])
            dtype = _dtype(node, call, name, values[out].dtype, values)
            values[result] = replace(values[output], dtype=dtype)
        nodes.append(replace(call, name=builder.node_name(f"{node.name}_result")))
        nodes += _copies(node, outs, results, builder)
    return replace(graph, nodes=tuple(nodes), values=values)


def functional_overload(node: Node) -> tuple[str, tuple[str, ...]] | None:
    """The functional operator, and names of arguments that are written; None without any."""
    namespace, _, rest = node.operator.partition(".")
    if namespace != "aten":
        return None
    packet, _, overload = rest.partition(".")
    if rest in _SEVERAL:
        functional, names = _SEVERAL[rest]
        return f"aten.{packet}.{functional}", names
    if not isinstance(node.argument("out"), Ref):
        return None
    if rest in _OTHER_NAMES:
        return f"aten.{packet}.{_OTHER_NAMES[rest]}", _OUT
    if overload == "out":
        return f"aten.{packet}.default", _OUT
    return f"aten.{packet}.{overload.removesuffix('_out').removeprefix('out_')}", _OUT


def _functional(
    node: Node,
    operator: str,
    names: tuple[str, ...],
    results: tuple[str, ...],
    values: Mapping[str, Tensor],
) -> Node:
    kept: list[tuple[str, Argument]] = [pair for pair in node.arguments if pair[0] not in names]
    call = replace(node, operator=operator, arguments=tuple(kept), outputs=results)
    packet, dtype = operator.split(".")[1], _dtype_of(node, names, values)
    if packet in _SUMS and node.argument("dtype") is None:
        kept = [*(pair for pair in kept if pair[0] != "dtype"), ("dtype", dtype)]
        call = replace(call, arguments=tuple(kept))
    if packet in CREATION_PACKETS:
        kept += [("dtype", dtype), ("device", Token(TokenKind.DEVICE, "meta"))]
        call = replace(call, arguments=tuple(kept))
    return call


def _dtype_of(node: Node, names: tuple[str, ...], values: Mapping[str, Tensor]) -> Token:
    out = node.argument(names[0])
    assert isinstance(out, Ref)
    return Token(TokenKind.DTYPE, values[out.name].dtype.value)


def _check_shape(node: Node, out: Tensor, result: Tensor) -> None:
    if out.shape != result.shape:
        raise UnsupportedError(
            f"node {node.name!r} ({node.operator}) resizes its argument out from "
            f"{list(out.shape)} to {list(result.shape)}; leave out=... away"
        )


def _dtype(node: Node, call: Node, name: str, out: DType, values: Mapping[str, Tensor]) -> DType:
    """The element type of a result.

    Raises:
        UnsupportedError: it is not known to be that of `out`.
    """
    packet = call.operator.split(".")[1]
    if packet in _FLAGS:
        return DType.BOOL
    if packet in _POSITIONS or name in ("indices", "max_values", "min_indices"):
        return DType.INT64
    dtypes = {values[name].dtype for name in call.inputs}
    floats = {dtype for dtype in dtypes if dtype.is_differentiable}
    if (floats or dtypes) <= {out} or packet in _SUMS:
        return out
    raise UnsupportedError(
        f"node {node.name!r} ({node.operator}) writes into {out.value} what it computes of "
        f"{', '.join(sorted(dtypes))}; leave out=... away, and convert the result with .to()"
    )


def _copies(
    node: Node, outs: list[str], results: tuple[str, ...], builder: GraphBuilder
) -> Iterator[Node]:
    for out, output, result in zip(outs, node.outputs, results, strict=True):
        name = (
            node.name if output == node.outputs[0] else builder.node_name(f"{node.name}_{output}")
        )
        arguments: tuple[tuple[str, Argument], ...] = (("self", Ref(out)), ("src", Ref(result)))
        yield Node(name, "aten.copy_.default", arguments, (output,), node.module, node.part)
