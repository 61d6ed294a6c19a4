"""Rows of tokens ordered by expert: the operators that exchange them are this library's own.

A mixture of experts sends each of T tokens to k of E experts. `autoshard.dispatch` lists the
tokens' rows by expert, in the order of the tokens within each; `autoshard.grouped_mm` multiplies
each row with its expert's matrix, `autoshard.expert_bias` repeats an expert's bias for its rows,
and `autoshard.combine` puts the rows of each token together again. What stands between them acts
on each row by itself.

How many rows an expert gets is data. A value that holds them is *ragged*: its shape [A, B, d]
says what there is on average. Of A equal groups of experts each has B rows, and A B = T k, so
the number of elements is exact. A rank with a slice of dim 0 holds the rows of its experts, one
with a slice of dim 1 those of its tokens, and either way their number differs from rank to rank.
A is the greatest common divisor of E and T k, so that whatever divides experts and tokens
divides A: it is E itself wherever E divides T k.
"""

from math import gcd

from autoshard.errors import SchemaError
from autoshard.graph.ir import Graph, Node

DISPATCH = "autoshard.dispatch.default"
"""tokens[T, d], ids[T, k], num_experts -> rows[A, B, d]."""
GROUPED_MM = "autoshard.grouped_mm.default"
"""rows[A, B, d], matrices[E, d, f], ids[T, k] -> [A, B, f]."""
EXPERT_BIAS = "autoshard.expert_bias.default"
"""bias[E, f], ids[T, k] -> [A, B, f]."""
COMBINE = "autoshard.combine.default"
"""rows[A, B, d], ids[T, k], weights[T, k], num_experts -> [T, d], each token's weighted sum."""

EXPERT_OPERATORS = frozenset({DISPATCH, GROUPED_MM, EXPERT_BIAS, COMBINE})
RAGGED_DIMS = frozenset({0, 1})
"""The dims of a ragged value of which a slice is a matter of data."""

_SPLITS = frozenset({"aten.chunk", "aten.split", "aten.split_with_sizes", "aten.slice", "aten.cat"})
"""Packets that act within rows if their dim is the last."""
_PLAIN = frozenset(
    f"aten.{packet}"
    for packet in (
        *("add", "sub", "rsub", "mul", "div", "neg", "pow", "square", "abs", "clamp", "clamp_min"),
        *("clamp_max", "minimum", "maximum", "exp", "relu", "relu6", "gelu", "silu", "sigmoid"),
        *("tanh", "softplus", "hardtanh", "hardswish", "leaky_relu", "elu", "mish", "log_sigmoid"),
    )
) | {"aten.to.dtype"}
"""Packets, or operators, that act on each element by itself."""


def groups_of_rows(num_experts: int, num_rows: int) -> tuple[int, int]:
    """The first two dims of a ragged value: groups of experts, and rows of each on average."""
    groups = gcd(num_experts, num_rows)
    return groups, num_rows // groups


def acts_within_rows(node: Node, rank: int) -> bool:
    """Whether an operator does to each row what it does to all.

    Args:
        node: the operator, with dims counted from the front.
        rank: number of dims of the rows that it takes and makes.
    """
    packet = node.operator.rpartition(".")[0]
    if packet in _SPLITS:
        return node.argument("dim", 0) == rank - 1
    return packet in _PLAIN or node.operator in _PLAIN


def ragged_values(graph: Graph) -> frozenset[str]:
    """The values whose number of rows is data.

    Raises:
        SchemaError: one of them enters an operator that does not act within rows, meets a tensor
            that has a dim for rows, or leaves the program.
    """
    if not any(node.operator in EXPERT_OPERATORS for node in graph.nodes):
        return frozenset()
    ragged: set[str] = set()
    for node in graph.nodes:
        takes = ragged.intersection(node.inputs)
        if takes and not _may_take(graph, node, takes):
            raise SchemaError(
                f"node {node.name!r} ({node.operator}) takes {min(takes)!r}, whose rows are "
                f"ordered by expert, and does not act within rows"
            )
        if node.operator in EXPERT_OPERATORS or takes:
            ragged.update(() if node.operator == COMBINE else node.outputs)
    leaving = sorted(o.name for o in graph.outputs if o.name in ragged and o.name is not None)
    if leaving:
        raise SchemaError(f"the graph returns {leaving[0]!r}, whose rows are ordered by expert")
    return frozenset(ragged)


def _may_take(graph: Graph, node: Node, takes: set[str]) -> bool:
    if node.operator in EXPERT_OPERATORS:
        return set(node.inputs[:1]) == takes and node.operator in (GROUPED_MM, COMBINE)
    if not acts_within_rows(node, 3):
        return False
    others = (graph.values[name].shape for name in node.inputs if name not in takes)
    return all(set(shape[:-1]) <= {1} for shape in others) and _keep_rows(graph, node, takes)


def _keep_rows(graph: Graph, node: Node, takes: set[str]) -> bool:
    rows = {graph.values[name].shape[:2] for name in (*takes, *node.outputs)}
    return len(rows) == 1
