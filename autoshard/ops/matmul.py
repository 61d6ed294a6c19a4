"""Products of matrices: sums over a contracted letter, linear in each factor."""

from collections import Counter
from collections.abc import Mapping

from autoshard.ops.call import Call, Rule
from autoshard.ops.rule import OperatorRule
from autoshard.ops.space import einsum, replicated


def _linear(call: Call) -> OperatorRule:
    weight = call.inputs[1]
    features = "n" if len(weight.shape) > 1 else ""
    patterns = {"input": "*k", "weight": features + "k", "bias": features}
    return einsum(call, patterns, "*" + features, addends={"bias"})


def _matmul(call: Call) -> OperatorRule:
    left, right = (len(tensor.shape) for tensor in call.inputs)
    rows, columns = "m" * (left > 1), "n" * (right > 1)
    patterns = {
        "self": "*" * (left > 1) + rows + "k",
        "other": "*" * (right > 1) + "k" + columns,
    }
    stars = "*" * (left > 1 or right > 1)
    return einsum(call, patterns, stars + rows + columns)


def _mm(call: Call) -> OperatorRule:
    return einsum(call, {"self": "mk", "mat2": "kn"}, "mn")


def _mv(call: Call) -> OperatorRule:
    return einsum(call, {"self": "mk", "vec": "k"}, "m")


def _dot(call: Call) -> OperatorRule:
    return einsum(call, {"self": "k", "tensor": "k"}, "")


def _bmm(call: Call) -> OperatorRule:
    return einsum(call, {"self": "bmk", "mat2": "bkn"}, "bmn")


def _addmm(call: Call) -> OperatorRule:
    patterns = {"self": "mn", "mat1": "mk", "mat2": "kn"}
    return einsum(call, patterns, "mn", addends={"self"})


def _baddbmm(call: Call) -> OperatorRule:
    patterns = {"self": "bmn", "batch1": "bmk", "batch2": "bkn"}
    return einsum(call, patterns, "bmn", addends={"self"})


def _grouped_mm(call: Call) -> OperatorRule:
    """rows[t,k], one matrix [k,n] per group of rows -> [t,n].

    Which rows are whose is data: `offs` says where each group ends, and stays whole. Rows
    may be cut anywhere, since a rank can tell which groups its rows are of. A slice of the
    matrices (experts) makes the rows of their groups, and zeros elsewhere
    (`Kernel.EXPERTS`): the letter g is summed, though each row meets one matrix only.
    """
    rows, matrices = call.inputs[:2]
    if len(rows.shape) != 2 or len(matrices.shape) != 3 or call.tensor("bias"):  # noqa: PLR2004  ranks
        return replicated(call)
    return einsum(
        call,
        ["tk", "gkn", "e"],
        "tn",
        whole="e",
        constants={"offs"},
        ordered="tg",
        even="kn",  # kernels want rows that begin at multiples of 16 bytes
        flops_per_point=2.0 / matrices.shape[0] ** 2,
    )


def _einsum(call: Call) -> OperatorRule:
    """An equation; dots are dims that broadcast. The dims of a diagonal would be cut at once."""
    equation = str(call.argument("equation")).replace(" ", "").replace("...", "*")
    left, arrow, output = equation.partition("->")
    terms = left.split(",")
    counts = Counter("".join(terms))
    if not arrow:
        single = sorted(letter for letter in counts if letter != "*" and counts[letter] == 1)
        output = "*" * ("*" in counts) + "".join(single)
    diagonal = {letter for term in terms for letter in term if term.count(letter) > 1}
    return einsum(call, terms, output, whole="".join(sorted(diagonal)))


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
    # what transformers has in its place where the element type is not bfloat16
    "transformers.grouped_mm_fallback.default": _grouped_mm,
}
