"""Matrix products and recurrent layers: sums over a contracted dim, linear in each factor."""

from collections import Counter
from collections.abc import Collection
from functools import partial
from math import prod

from autoshard.ops.rules.index_space import IndexSpace, einsum, replicated
from autoshard.ops.rules.rule import Dims, OperatorRule
from autoshard.ops.rules.spec import (
    Call,
    ExtraTensor,
    Gradients,
    Kernel,
    OperatorSpec,
    Rule,
    SavedByAutograd,
    addends,
    like,
    saved_by_name,
    saves_everything,
)
from autoshard.ops.rules.strides import Shape


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


def _product(output: str, *, addends: Collection[str] = (), **patterns: str) -> Rule:
    """The rule of a product whose inputs always have these letters."""
    return partial(einsum, patterns=patterns, output=output, addends=addends)


def _grouped_mm(call: Call) -> OperatorRule:
    """rows[t,k], one matrix [k,n] per group of rows -> [t,n].

    `offs` holds the end of each group, and stays whole. Rows may be sharded anywhere, since a
    rank can tell which groups its rows are in. A shard of the matrices (experts) makes the rows
    of their groups, and zeros elsewhere (`Kernel.EXPERTS`): the letter g is summed, though each
    row meets one matrix only.
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
    """An equation; an ellipsis stands for dims that broadcast. A diagonal's dims stay whole."""
    equation = str(call.argument("equation")).replace(" ", "").replace("...", "*")
    left, arrow, output = equation.partition("->")
    terms = left.split(",")
    counts = Counter("".join(terms))
    if not arrow:
        single = sorted(letter for letter in counts if letter != "*" and counts[letter] == 1)
        output = "*" * ("*" in counts) + "".join(single)
    diagonal = {letter for term in terms for letter in term if term.count(letter) > 1}
    return einsum(call, terms, output, whole="".join(sorted(diagonal)))


def _recurrent(call: Call) -> OperatorRule:
    """A recurrence over a sequence: only samples are independent.

    Each step needs the whole previous state, so time and state stay whole. The flops are two
    per sample, step and weight.
    """
    source = call.inputs[0].shape
    batched = len(source) == 3  # noqa: PLR2004  time, samples, features
    batch = 0 if call.flag("batch_first") else 1
    space = IndexSpace(call)
    samples = space.free(source[batch]) if batched else ()

    def dims(shape: Shape, at: int) -> Dims:
        return tuple(
            samples if batched and dim == at else space.fixed(size)
            for dim, size in enumerate(shape)
        )

    states = call.positions("hx")
    weights = [call.inputs[i] for i in call.positions("params")]
    inputs = [
        dims(source, batch),
        *[dims(call.inputs[i].shape, 1) for i in states],
        *[space.fixed_dims(weight.shape) for weight in weights],
    ]
    outputs = [dims(t.shape, batch if i == 0 else 1) for i, t in enumerate(call.outputs)]
    flops = 2.0 * prod(source[:-1]) * sum(weight.numel for weight in weights)
    return space.rule(inputs, outputs, flops=flops)


def _matmul_saves(call: Call, gradients: Gradients) -> SavedByAutograd:
    """Each factor for the other's gradient; one whose batch dims broadcast as it is expanded."""
    ranks = [len(tensor.shape) for tensor in call.inputs]
    batch = call.outputs[0].shape[:-2]
    saved = {i for i in (0, 1) if gradients[1 - i]}
    broadcast = {i for i in saved if min(ranks) > 2 and call.inputs[i].shape[:-2] != batch}  # noqa: PLR2004  matrices
    extras = tuple(
        ExtraTensor(
            (
                *((2, dim) for dim in range(len(batch))),
                *((i, dim) for dim in (ranks[i] - 2, ranks[i] - 1)),
            ),
            call.inputs[i].dtype.itemsize,
        )
        for i in sorted(broadcast)
    )
    return SavedByAutograd(frozenset(saved - broadcast), extras=extras)


def _einsum_saves(call: Call, gradients: Gradients) -> SavedByAutograd:
    """Two factors are saved for each other; more are multiplied pair by pair."""
    if len(call.inputs) != 2:  # noqa: PLR2004  a pair
        return saves_everything(call, gradients)
    return SavedByAutograd(frozenset(i for i in (0, 1) if gradients[1 - i]))


def _recurrent_saves(call: Call, gradients: Gradients) -> SavedByAutograd:
    """The reserve of cuDNN, taken to be all gates, and the states of all layers but the last.

    An LSTM has four gates, a cell and its hyperbolic tangent; a GRU three gates and the
    hidden part of the last.
    """
    gates = 6 if call.operator == "aten.lstm.input" else 4
    layers = call.integer("num_layers", 1)
    itemsize = call.inputs[0].dtype.itemsize
    reserve = like(call, len(call.inputs), itemsize, times=layers * gates + layers - 1)
    return saved_by_name("input hx params out", call, gradients, reserve)


SPECS = (
    OperatorSpec(
        "linear.default",
        _linear,
        saves="input:weight weight:input",
        examples="input[b,s,k] weight[n,k] bias[n] -> [b,s,n]",
    ),
    OperatorSpec(
        "matmul.default",
        _matmul,
        saves=_matmul_saves,
        examples="self[b,h,s,k] other[b,h,k,t] -> [b,h,s,t]",
    ),
    OperatorSpec(
        "mm.default",
        _product("mn", self="mk", mat2="kn"),
        saves="self:mat2 mat2:self",
        examples="self[m,k] mat2[k,n] -> [m,n]",
    ),
    OperatorSpec(
        "mv.default",
        _product("m", self="mk", vec="k"),
        saves="self:vec vec:self",
        examples="self[m,k] vec[k] -> [m]",
    ),
    OperatorSpec(
        "dot.default",
        _product("", self="k", tensor="k"),
        saves="self:tensor tensor:self",
        examples="self[k] tensor[k] -> []",
    ),
    OperatorSpec(
        "bmm.default",
        _product("bmn", self="bmk", mat2="bkn"),
        saves="self:mat2 mat2:self",
        examples="self[b,m,k] mat2[b,k,n] -> [b,m,n]",
    ),
    OperatorSpec(
        "addmm.default",
        _product("mn", self="mn", mat1="mk", mat2="kn", addends={"self"}),
        saves="mat1:mat2 mat2:mat1",
        passes_gradient=addends(self="beta"),
        examples="self[n] mat1[m,k] mat2[k,n] -> [m,n]",
    ),
    OperatorSpec(
        "baddbmm.default",
        _product("bmn", self="bmn", batch1="bmk", batch2="bkn", addends={"self"}),
        saves="batch1:batch2 batch2:batch1",
        passes_gradient=addends(self="beta"),
        examples="self[b,m,n] batch1[b,m,k] batch2[b,k,n] -> [b,m,n]",
    ),
    OperatorSpec(
        "einsum.default",
        _einsum,
        saves=_einsum_saves,
        examples="tensors*[b,s,h,d] tensors*[b,t,h,d] equation='bshd,bthd->bhst' -> [b,h,s,t]",
    ),
    OperatorSpec(
        "_grouped_mm.default",
        _grouped_mm,
        saves="self:mat2 mat2:self offs",
        kernel=Kernel.EXPERTS,
        kernel_argument="offs",
        examples="self:bfloat16[t,k] mat2:bfloat16[e,k,n] offs:int32[e] -> :bfloat16[t,n]",
    ),
    OperatorSpec(
        "transformers.grouped_mm_fallback.default",
        _grouped_mm,
        saves="input weight",
        kernel=Kernel.EXPERTS,
        kernel_argument="offs",
    ),
    OperatorSpec(
        "lstm.input gru.input",
        _recurrent,
        saves=_recurrent_saves,
        draws="dropout",
        unsharded="Time and state: every step needs the whole previous state.",
        examples="""
            input[b,t,i] hx*[1,b,h] hx*[1,b,h] params*[(4 h),i] params*[(4 h),h] \
                has_biases=False num_layers=1 dropout=0.0 train=True bidirectional=False \
                batch_first=True -> [b,t,h] [1,b,h] [1,b,h]
            gru.input: input[b,t,i] hx[1,b,h] params*[(3 h),i] params*[(3 h),h] \
                has_biases=False num_layers=1 dropout=0.0 train=True bidirectional=False \
                batch_first=True -> [b,t,h] [1,b,h]
        """,
    ),
)
