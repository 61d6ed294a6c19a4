"""Products of matrices: sums over a contracted letter, linear in each factor."""

from collections.abc import Mapping

from autoshard.rules.call import Call, Rule
from autoshard.rules.rule import OperatorRule
from autoshard.rules.space import einsum, replicated


def _linear(call: Call) -> OperatorRule:
    weight = call.inputs[1]
    features = "n" if len(weight.shape) > 1 else ""
    patterns = {"input": "*k", "weight": features + "k", "bias": features}
    return einsum(call, patterns, "*" + features, contracted="k", addends={"bias"})


def _matmul(call: Call) -> OperatorRule:
    left, right = (len(tensor.shape) for tensor in call.inputs)
    rows, columns = "m" * (left > 1), "n" * (right > 1)
    patterns = {
        "self": "*" * (left > 1) + rows + "k",
        "other": "*" * (right > 1) + "k" + columns,
    }
    stars = "*" * (left > 1 or right > 1)
    return einsum(call, patterns, stars + rows + columns, contracted="k")


def _mm(call: Call) -> OperatorRule:
    return einsum(call, {"self": "mk", "mat2": "kn"}, "mn", contracted="k")


def _mv(call: Call) -> OperatorRule:
    return einsum(call, {"self": "mk", "vec": "k"}, "m", contracted="k")


def _dot(call: Call) -> OperatorRule:
    return einsum(call, {"self": "k", "tensor": "k"}, "", contracted="k")


def _bmm(call: Call) -> OperatorRule:
    return einsum(call, {"self": "bmk", "mat2": "bkn"}, "bmn", contracted="k")


def _addmm(call: Call) -> OperatorRule:
    patterns = {"self": "mn", "mat1": "mk", "mat2": "kn"}
    return einsum(call, patterns, "mn", contracted="k", addends={"self"})


def _baddbmm(call: Call) -> OperatorRule:
    patterns = {"self": "bmn", "batch1": "bmk", "batch2": "bkn"}
    return einsum(call, patterns, "bmn", contracted="k", addends={"self"})


def _grouped_mm(call: Call) -> OperatorRule:
    """One matrix per group of rows; the rows' groups are data, so rows stay together."""
    rows, matrices = call.inputs[:2]
    if len(rows.shape) != 2 or len(matrices.shape) != 3 or call.tensor("bias"):  # noqa: PLR2004  ranks
        return replicated(call)
    return einsum(
        call,
        {"self": "tk", "mat2": "gkn", "offs": "g"},
        "tn",
        contracted="k",
        whole="tg",
        constants={"offs"},
        flops_per_point=2.0 / matrices.shape[0],
    )


def _einsum(call: Call) -> OperatorRule:
    equation = str(call.argument("equation")).replace(" ", "")
    left, arrow, output = equation.partition("->")
    terms = left.split(",")
    repeats = any(len(set(term)) != len(term) for term in (*terms, output))
    if not arrow or "." in equation or repeats:
        return replicated(call)
    summed = "".join(sorted(set("".join(terms)) - set(output)))
    return einsum(call, terms, output, contracted=summed)


RULES: Mapping[str, Rule] = {
    "aten.linear.default": _linear,
    "aten.matmul.default": _matmul,
    "aten.mm.default": _mm,
    "aten.mv.default": _mv,
    "aten.dot.default": _dot,
    "aten.bmm.default": _bmm,
    "aten.addmm.default": _addmm,
    "aten.baddbmm.default": _baddbmm,
    "aten.einsum.default": _einsum,
    "aten._grouped_mm.default": _grouped_mm,
}
