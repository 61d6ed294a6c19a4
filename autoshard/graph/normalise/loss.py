"""Mean cross-entropy losses as a sum divided by a count.

The mean over labels that are not ignored is not the mean of the ranks' means, because ranks may
ignore different numbers of labels. Sum and count can be summed over ranks separately, so that data
parallelism computes the gradient of the global batch exactly. With class weights, the count is the
sum of the labels' weights, also with label smoothing.
"""

from dataclasses import replace

from autoshard.graph.dtype import DType
from autoshard.graph.ir import (
    Argument,
    Graph,
    Node,
    Ref,
    Tensor,
    Token,
    TokenKind,
)
from autoshard.graph.normalise.rewriting import GraphBuilder, required

_OPERATOR = "aten.cross_entropy_loss.default"
_NONE, _MEAN, _SUM = 0, 1, 2
"""Values of `reduction`, as in `at::Reduction`."""
_IGNORE_INDEX = -100
_HALF = frozenset({DType.FLOAT16, DType.BFLOAT16})


def split_mean_losses(graph: Graph) -> Graph:
    """Replace every mean cross-entropy over labels by a sum divided by a count.

    Losses over class probabilities do not change, since they count positions. Losses in 16 bits are
    summed in float32, because the sum (unlike the mean) may overflow 16 bits.
    """
    if not any(_is_mean_over_labels(node, graph) for node in graph.nodes):
        return graph
    splitter = _Splitter(graph)
    builder = splitter.builder
    for node in graph.nodes:
        if _is_mean_over_labels(node, graph):
            splitter.split(node)
        else:
            builder.nodes.append(node)
    return replace(graph, nodes=tuple(builder.nodes), values=builder.values)


def _is_mean_over_labels(node: Node, graph: Graph) -> bool:
    if node.operator != _OPERATOR or node.argument("reduction", _MEAN) != _MEAN:
        return False
    target = required(node, "target", Ref)
    return not graph.values[target.name].dtype.is_differentiable


class _Splitter:
    def __init__(self, graph: Graph) -> None:
        self.builder = GraphBuilder.of(graph)

    def split(self, node: Node) -> None:
        """Replace one loss."""
        loss = self.builder.values[node.outputs[0]]
        wide = DType.FLOAT32 if loss.dtype in _HALF else loss.dtype
        total = self._half_sum(node) if loss.dtype in _HALF else self._sum(node, loss)
        divide = {"self": Ref(total), "other": Ref(self._count(node, wide))}
        if wide is loss.dtype:
            mean = replace(node, operator="aten.div.Tensor", arguments=tuple(divide.items()))
        else:
            exact = self.builder.call(node, "aten.div.Tensor", Tensor((), wide), **divide)
            cast = ("self", Ref(exact)), ("dtype", _token(loss.dtype))
            mean = replace(node, operator="aten.to.dtype", arguments=cast)
        self.builder.nodes.append(mean)

    def _sum(self, node: Node, loss: Tensor) -> str:
        return self.builder.call(node, _OPERATOR, loss, **_reduced(node, _SUM))

    def _half_sum(self, node: Node) -> str:
        call, values = self.builder.call, self.builder.values
        shape = values[required(node, "target", Ref).name].shape
        out = replace(values[node.outputs[0]], shape=shape)
        each = call(node, _OPERATOR, out, **_reduced(node, _NONE))
        total, dtype = Tensor((), DType.FLOAT32), _token(DType.FLOAT32)
        return call(node, "aten.sum.default", total, self=Ref(each), dtype=dtype)

    def _count(self, node: Node, dtype: DType) -> str:
        call, target = self.builder.call, required(node, "target", Ref)
        ignored = node.argument("ignore_index", _IGNORE_INDEX)
        flags = replace(self.builder.values[target.name], dtype=DType.BOOL)
        valid = Ref(call(node, "aten.ne.Scalar", flags, self=target, other=ignored))
        weight = node.argument("weight")
        if isinstance(weight, Ref):
            return self._weights(node, weight, target, valid, dtype)
        count = call(node, "aten.sum.default", Tensor((), DType.INT64), self=valid)
        return call(node, "aten.to.dtype", Tensor((), dtype), self=Ref(count), dtype=_token(dtype))

    def _weights(self, node: Node, weight: Ref, target: Ref, valid: Ref, dtype: DType) -> str:
        """The sum of the weights of the labels that are not ignored."""
        call, values = self.builder.call, self.builder.values
        labels = values[target.name]
        # An ignored label may be out of the range of classes.
        choice: dict[str, Argument] = {"condition": valid, "self": target, "other": 0}
        inside = call(node, "aten.where.ScalarOther", labels, **choice)
        each = Tensor(labels.shape, values[weight.name].dtype)
        picked = call(node, "aten.index.Tensor", each, self=weight, indices=(Ref(inside),))
        counted = call(node, "aten.mul.Tensor", each, self=Ref(picked), other=valid)
        total = Tensor((), dtype)
        return call(node, "aten.sum.default", total, self=Ref(counted), dtype=_token(dtype))


def _token(dtype: DType) -> Token:
    return Token(TokenKind.DTYPE, dtype.value)


def _reduced(node: Node, reduction: int) -> dict[str, Argument]:
    """Arguments of the loss with another reduction, in schema order."""
    given = {**dict(node.arguments), "reduction": reduction}
    order = ("self", "target", "weight", "reduction", "ignore_index", "label_smoothing")
    return {key: given[key] for key in order if key in given}
