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
from autoshard.graph.normalise.rewriting import UniqueNames, required

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
    builder = _Builder(graph)
    for node in graph.nodes:
        if _is_mean_over_labels(node, graph):
            builder.split(node)
        else:
            builder.nodes.append(node)
    return replace(graph, nodes=tuple(builder.nodes), values=builder.values)


def _is_mean_over_labels(node: Node, graph: Graph) -> bool:
    if node.operator != _OPERATOR or node.argument("reduction", _MEAN) != _MEAN:
        return False
    target = required(node, "target", Ref)
    return not graph.values[target.name].dtype.is_differentiable


class _Builder:
    def __init__(self, graph: Graph) -> None:
        self.nodes: list[Node] = []
        self.values = dict(graph.values)
        self._value_names = UniqueNames(graph.values)
        self._node_names = UniqueNames(node.name for node in graph.nodes)

    def split(self, node: Node) -> None:
        """Replace one loss."""
        loss = self.values[node.outputs[0]]
        wide = DType.FLOAT32 if loss.dtype in _HALF else loss.dtype
        total = self._half_sum(node) if loss.dtype in _HALF else self._sum(node, loss)
        count = self._count(node, wide)
        divide = (("self", total), ("other", count))
        if wide is loss.dtype:
            self.nodes.append(replace(node, operator="aten.div.Tensor", arguments=divide))
            return
        mean = self._add(node, "div.Tensor", divide, Tensor((), wide))
        cast = (("self", mean), ("dtype", Token(TokenKind.DTYPE, loss.dtype.value)))
        self.nodes.append(replace(node, operator="aten.to.dtype", arguments=cast))

    def _sum(self, node: Node, loss: Tensor) -> Ref:
        return self._add(node, "cross_entropy_loss.default", _reduced(node, _SUM), loss)

    def _half_sum(self, node: Node) -> Ref:
        target = required(node, "target", Ref)
        loss = self.values[node.outputs[0]]
        each = self._add(
            node,
            "cross_entropy_loss.default",
            _reduced(node, _NONE),
            replace(loss, shape=self.values[target.name].shape),
        )
        arguments = (("self", each), ("dtype", Token(TokenKind.DTYPE, DType.FLOAT32.value)))
        return self._add(node, "sum.default", arguments, Tensor((), DType.FLOAT32))

    def _count(self, node: Node, dtype: DType) -> Ref:
        target = required(node, "target", Ref)
        ignored = node.argument("ignore_index", _IGNORE_INDEX)
        labels = self.values[target.name]
        valid = self._add(
            node,
            "ne.Scalar",
            (("self", target), ("other", ignored)),
            replace(labels, dtype=DType.BOOL),
        )
        weight = node.argument("weight")
        if isinstance(weight, Ref):
            return self._weights(node, weight, target, valid, dtype)
        count = self._add(node, "sum.default", (("self", valid),), Tensor((), DType.INT64))
        cast = (("self", count), ("dtype", Token(TokenKind.DTYPE, dtype.value)))
        return self._add(node, "to.dtype", cast, Tensor((), dtype))

    def _weights(self, node: Node, weight: Ref, target: Ref, valid: Ref, dtype: DType) -> Ref:
        """The sum of the weights of the labels that are not ignored."""
        labels = self.values[target.name]
        wide = (("dtype", Token(TokenKind.DTYPE, dtype.value)),)
        # An ignored label may be out of the range of classes.
        choice = (("condition", valid), ("self", target), ("other", 0))
        inside = self._add(node, "where.ScalarOther", choice, labels)
        picked = (("self", weight), ("indices", (inside,)))
        each = Tensor(labels.shape, self.values[weight.name].dtype)
        weights = self._add(node, "index.Tensor", picked, each)
        counted = self._add(node, "mul.Tensor", (("self", weights), ("other", valid)), each)
        return self._add(node, "sum.default", (("self", counted), *wide), Tensor((), dtype))

    def _add(
        self, origin: Node, operator: str, arguments: tuple[tuple[str, Argument], ...], out: Tensor
    ) -> Ref:
        stem = f"{origin.name}_{operator.split('.', maxsplit=1)[0]}"
        name = self._value_names.fresh(stem)
        self.values[name] = out
        node = self._node_names.fresh(stem)
        self.nodes.append(
            Node(node, f"aten.{operator}", arguments, (name,), origin.module, origin.part)
        )
        return Ref(name)


def _reduced(node: Node, reduction: int) -> tuple[tuple[str, Argument], ...]:
    """Arguments of the loss with another reduction, in schema order."""
    given = {**dict(node.arguments), "reduction": reduction}
    order = ("self", "target", "weight", "reduction", "ignore_index", "label_smoothing")
    return tuple((key, given[key]) for key in order if key in given)
