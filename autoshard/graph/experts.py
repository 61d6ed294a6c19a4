"""Operators for mixtures of experts, on rows of tokens ordered by expert.

A mixture of experts sends each of T tokens to k of E experts. `autoshard.dispatch` lists the rows
of the tokens by expert, in token order within each expert; `autoshard.grouped_mm` multiplies each
row with the matrix of its expert; `autoshard.expert_bias` repeats the bias of an expert for its
rows; `autoshard.combine` sums the rows of each token. All operators in between act on each row
separately.

The number of rows of an expert depends on data. A value with such rows is *ragged*: its shape [A,
B, d] is an average. There are A equal groups of experts with B rows each on average, and A B = T k,
so the number of elements is exact. A shard of dim 0 has the rows of the rank's experts, a shard of
dim 1 those of the rank's tokens; in both cases the number of rows differs between ranks. A = gcd(E,
T k), so any axis that divides both the experts and the rows divides A; A = E if E divides T k.
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
"""Dims of a ragged value whose shards depend on data."""

_SPLITS = frozenset({"aten.chunk", "aten.split", "aten.split_with_sizes", "aten.slice", "aten.cat"})
"""Packets that act on each row separately if their dim is the last."""
_PLAIN = frozenset(
    f"aten.{packet}"
    for packet in (
        *("add", "sub", "rsub", "mul", "div", "neg", "pow", "square", "abs", "clamp", "clamp_min"),
        *("clamp_max", "minimum", "maximum", "exp", "relu", "relu6", "gelu", "silu", "sigmoid"),
        *("tanh", "softplus", "hardtanh", "hardswish", "leaky_relu", "elu", "mish", "log_sigmoid"),
    )
) | {"aten.to.dtype"}
"""Elementwise packets and operators."""


def groups_of_rows(num_experts: int, num_rows: int) -> tuple[int, int]:
    """First two sizes of a ragged value: groups of experts, and average rows per group."""
    groups = gcd(num_experts, num_rows)
    return groups, num_rows // groups


def acts_within_rows(node: Node, rank: int) -> bool:
    """True if an operator acts on each row separately.

    Args:
        node: the operator, with dims counted from the front.
        rank: number of dims of its inputs and outputs.
    """
    packet = node.operator.rpartition(".")[0]
    if packet in _SPLITS:
        return node.argument("dim", 0) == rank - 1
    return packet in _PLAIN or node.operator in _PLAIN


def ragged_values(graph: Graph) -> frozenset[str]:
    """Find all ragged values.

    Raises:
        SchemaError: a ragged value is an input of an operator that does not act on each row
            separately or that combines it with another tensor of rows, or the program returns it.
    """
    if not any(node.operator in EXPERT_OPERATORS for node in graph.nodes):
        return frozenset()
    ragged: set[str] = set()
    for node in graph.nodes:
        takes = ragged.intersection(node.inputs)
        if takes and not _may_take(graph, node, takes):
            raise SchemaError(
                f"node {node.name!r} ({node.operator}) takes {min(takes)!r}, whose rows are "
                f"ordered by expert, but does not act on each row separately"
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
