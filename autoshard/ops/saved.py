"""What autograd keeps of an operator's call until its backward has run.

A row lists tensors by the names of the operator's schema, and `out` (or `out1`, ...) for its
outputs. `weight:input` is kept if `input` needs a gradient, `input` alone as soon as anything
does. An empty row keeps nothing. The source is PyTorch's `tools/autograd/derivatives.yaml`,
and for composite operators what they are composed of; a test runs the operators and looks.

Where devices differ the row is that of CUDA: attention runs fused (flash or memory-efficient)
and keeps a logarithm of sums per row instead of all scores, root-mean-square norms run fused,
and a dropout mask takes a byte per element. A product that keeps a rearranged copy of an input
(of a transposed matrix, say) is taken to keep the input. Single elements are not counted, and
neither are the ids that `Kernel.VOCABULARY` lowers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

from autoshard.graph import DType
from autoshard.graph.experts import COMBINE, DISPATCH, EXPERT_BIAS, GROUPED_MM
from autoshard.ops.call import Call
from autoshard.ops.kept import NOTHING, Extra, Saved, like, statistic
from autoshard.ops.random import FILLING_AT_RANDOM, SIZED_AT_RANDOM
from autoshard.ops.views import VIEWS


def saved_by(call: Call, gradients: Sequence[bool]) -> Saved:
    """What a call keeps for backward.

    An operator that is not in the table is taken to keep all its inputs and outputs, which is
    an upper estimate for every operator that is no composite.

    Args:
        call: the call; shapes matter only by their number of dims and where they are 1.
        gradients: whether each input needs a gradient.
    """
    if not any(gradients) or not any(tensor.dtype.is_differentiable for tensor in call.outputs):
        return NOTHING
    row = _lookup(call.operator)
    if row is None:
        return Saved(frozenset(range(len(call.inputs))), frozenset(range(len(call.outputs))))
    if callable(row):
        return row(call, gradients)
    return _kept(row, call, gradients)


def has_saved_row(operator: str) -> bool:
    """Whether the table says what an operator keeps."""
    return _lookup(operator) is not None


Row = str | Callable[[Call, Sequence[bool]], Saved]


def _lookup(operator: str) -> Row | None:
    row = ROWS.get(operator)
    return ROWS.get(operator.rpartition(".")[0]) if row is None else row


@cache
def _terms(row: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    terms = (term.partition(":") for term in row.split())
    return tuple(
        (name, tuple(condition.split(",")) if colon else ()) for name, colon, condition in terms
    )


def _kept(row: str, call: Call, gradients: Sequence[bool], *extras: Extra) -> Saved:
    inputs: set[int] = set()
    outputs: set[int] = set()
    for name, conditions in _terms(row):
        if conditions and not any(gradients[i] for c in conditions for i in call.positions(c)):
            continue
        if name.startswith("out"):
            outputs.add(int(name[3:] or 0))
        else:
            inputs.update(call.positions(name))
    return Saved(frozenset(inputs), frozenset(outputs), extras)


def _attention(call: Call, gradients: Sequence[bool]) -> Saved:
    """A sum per query; a mask of flags is turned into numbers to add, call by call."""
    rank = len(call.inputs[0].shape)
    extras = [statistic(call, range(rank - 1))]
    row = "query key value out"
    mask = call.tensor("attn_mask")
    if mask is not None and mask.dtype.is_differentiable:
        row += " attn_mask"
    elif mask is not None:
        extras.append(like(call, 3, call.inputs[0].dtype.itemsize))
    return _kept(row, call, gradients, *extras)


def _layer_norm(call: Call, gradients: Sequence[bool]) -> Saved:
    dims = range(len(call.inputs[0].shape) - len(call.integers("normalized_shape")))
    return _kept("input weight bias", call, gradients, statistic(call, dims, times=2))


def _rms_norm(call: Call, gradients: Sequence[bool]) -> Saved:
    dims = range(len(call.inputs[0].shape) - len(call.integers("normalized_shape")))
    return _kept("input weight", call, gradients, statistic(call, dims))


def _group_norm(call: Call, gradients: Sequence[bool]) -> Saved:
    groups = call.integer("num_groups", 1)
    return _kept("input weight", call, gradients, statistic(call, [0], times=2 * groups))


def _weight_norm(call: Call, gradients: Sequence[bool]) -> Saved:
    kept = call.integer("dim", 0) % len(call.inputs[0].shape)
    return _kept("v g", call, gradients, statistic(call, [kept]))


def _recurrent(call: Call, gradients: Sequence[bool]) -> Saved:
    """What cuDNN reserves, taken to be all gates, and the states of all layers but the last.

    An LSTM has four gates, a cell and its hyperbolic tangent; a GRU three gates and the
    hidden part of the last.
    """
    gates = 6 if call.operator == "aten.lstm.input" else 4
    made = like(call, len(call.inputs), call.inputs[0].dtype.itemsize)
    layers = call.integer("num_layers", 1)
    reserve = replace(made, times=layers * gates + layers - 1)
    return _kept("input hx params out", call, gradients, reserve)


def _batch_norm(call: Call, gradients: Sequence[bool]) -> Saved:
    extras = [statistic(call, [1], times=2)] if call.flag("training") else []
    return _kept("input weight running_mean running_var", call, gradients, *extras)


def _cross_entropy(call: Call, gradients: Sequence[bool]) -> Saved:
    """The logarithm of the softmax; smoothing picks the positions that count by a mask."""
    scores, target = call.inputs[:2]
    logarithms = like(call, 0, scores.dtype.itemsize)
    if target.dtype.is_differentiable:
        return _kept("target:self weight:self", call, gradients, logarithms)
    if call.number("label_smoothing", 0.0):
        return _kept("target weight", call, gradients, logarithms, like(call, 1, 1))
    return _kept("target weight", call, gradients, logarithms)


def _l1_loss(call: Call, gradients: Sequence[bool]) -> Saved:
    """The difference."""
    larger = int(call.inputs[1].numel > call.inputs[0].numel)
    return _kept("", call, gradients, like(call, larger, call.inputs[0].dtype.itemsize))


def _kl_div(call: Call, gradients: Sequence[bool]) -> Saved:
    if not call.flag("log_target"):
        return _kept("target self:target", call, gradients)
    # The exponential of the target, and for its gradient the difference of the two.
    times = 2 if any(gradients[i] for i in call.positions("target")) else 1
    exponential = like(call, 1, call.inputs[1].dtype.itemsize)
    return _kept("", call, gradients, replace(exponential, times=times))


def _dropout(call: Call, gradients: Sequence[bool]) -> Saved:
    if not call.flag("train") or call.number("p", 0.5) == 0:
        return NOTHING
    return _kept("", call, gradients, like(call, 0, DType.BOOL.itemsize))


def _pad(call: Call, gradients: Sequence[bool]) -> Saved:
    return _kept("" if call.argument("mode", "constant") == "constant" else "self", call, gradients)


def _adaptive_pool(call: Call, gradients: Sequence[bool]) -> Saved:
    """To one place it is a mean."""
    return _kept("" if set(call.integers("output_size")) == {1} else "self", call, gradients)


def _max_pool(call: Call, gradients: Sequence[bool]) -> Saved:
    places = like(call, len(call.inputs), DType.INT64.itemsize)
    return _kept("self", call, gradients, places)


def _matmul(call: Call, gradients: Sequence[bool]) -> Saved:
    """A factor whose batch dims broadcast is kept as it is after broadcasting."""
    ranks = [len(tensor.shape) for tensor in call.inputs]
    batch = call.outputs[0].shape[:-2]
    kept = {i for i in (0, 1) if gradients[1 - i]}
    broadcast = {i for i in kept if min(ranks) > 2 and call.inputs[i].shape[:-2] != batch}  # noqa: PLR2004  matrices
    extras = tuple(
        Extra(
            (
                *((2, dim) for dim in range(len(batch))),
                *((i, dim) for dim in (ranks[i] - 2, ranks[i] - 1)),
            ),
            call.inputs[i].dtype.itemsize,
        )
        for i in sorted(broadcast)
    )
    return Saved(frozenset(kept - broadcast), extras=extras)


def _einsum(call: Call, gradients: Sequence[bool]) -> Saved:
    """Two factors keep each other; more are multiplied pair by pair."""
    if len(call.inputs) != 2:  # noqa: PLR2004  a pair
        return Saved(frozenset(range(len(call.inputs))), frozenset({0}))
    return Saved(frozenset(i for i in (0, 1) if gradients[1 - i]))


def _places(rows: int) -> Extra:
    """A number for each row; the rows' number counts inputs, then outputs."""
    return Extra(((rows, 0), (rows, 1)), DType.INT64.itemsize)


def _dispatch(call: Call, gradients: Sequence[bool]) -> Saved:
    return _kept("", call, gradients, _places(len(call.inputs)))


def _combine(call: Call, gradients: Sequence[bool]) -> Saved:
    """Rows are kept as they came back to their tokens."""
    rows = (like(call, 0, call.inputs[0].dtype.itemsize),) if gradients[2] else ()
    return _kept("weights:rows", call, gradients, _places(0), *rows)


def _each(row: Row, operators: str) -> dict[str, Row]:
    return {f"aten.{operator}": row for operator in operators.split()}


ROWS: Mapping[str, Row] = {
    # what only moves, adds or scales
    **dict.fromkeys(VIEWS, ""),
    **_each(
        "",
        """add sub rsub neg positive clone contiguous lift_fresh_copy deg2rad rad2deg to.dtype
        to.dtype_layout to.device _to_copy type_as cat.default stack.default
        constant_pad_nd.default diff.default roll.default flip.default tril.default triu.default
        repeat.default repeat_interleave.self_int meshgrid sum mean cumsum.default lerp.Scalar
        fft_fftn.default fft_ifftn.default
        upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest3d.vec upsample_linear1d.vec
        upsample_bilinear2d.vec upsample_bicubic2d.vec upsample_trilinear3d.vec""",
    ),
    # steps, whose slope is zero, and what has no gradient
    **_each(
        "",
        """ceil floor round sign trunc frac heaviside floor_divide conj_physical fmod.Scalar
        remainder.Scalar remainder.Scalar_Tensor histc.default argmax argmin argsort any all
        __and__ __lshift__ __or__ __rshift__ __xor__ bitwise_and bitwise_left_shift bitwise_not
        bitwise_or bitwise_right_shift bitwise_xor eq ge gt le lt ne isfinite isinf isnan
        isneginf isposinf logical_and logical_not logical_or logical_xor signbit
        zeros.default ones.default full.default empty.memory_format scalar_tensor.default
        new_zeros.default new_ones.default new_full.default new_empty.default
        zeros_like.default ones_like.default full_like.default empty_like.default
        arange linspace eye _is_all_true.default multinomial.default""",
    ),
    **_each("", " ".join((*SIZED_AT_RANDOM, *FILLING_AT_RANDOM))),
    # products: each factor for the sake of the other
    "aten.linear.default": "input:weight weight:input",
    "aten.matmul.default": _matmul,
    "aten.mm.default": "self:mat2 mat2:self",
    "aten.mv.default": "self:vec vec:self",
    "aten.dot.default": "self:tensor tensor:self",
    "aten.bmm.default": "self:mat2 mat2:self",
    "aten.addmm.default": "mat1:mat2 mat2:mat1",
    "aten.baddbmm.default": "batch1:batch2 batch2:batch1",
    "aten.einsum.default": _einsum,
    "aten._grouped_mm.default": "self:mat2 mat2:self offs",
    "transformers.grouped_mm_fallback.default": "input weight",
    **_each(
        "input weight",
        """conv1d conv2d conv3d conv_transpose1d.default conv_transpose2d.input
        conv_transpose3d.input""",
    ),
    "aten.mul": "self:other other:self",
    **_each("other self:other", "div true_divide"),
    **_each("self:other other:other", "fmod.Tensor remainder.Tensor"),
    "aten.addcmul": "tensor1:tensor2 tensor2:tensor1",
    "aten.addcdiv": "tensor2 tensor1:tensor2",
    "aten.lerp.Tensor": "weight self:weight end:weight",
    # functions whose slope follows from the argument
    **_each(
        "self",
        """abs acos acosh angle asin asinh atan atanh celu clamp clamp_max.default
        clamp_min.default clip cos cosh digamma elu erf erfc erfinv gelu hardshrink hardsigmoid
        hardswish hardtanh leaky_relu lgamma log log10 log1p log2 log_sigmoid logit mish
        nan_to_num pow.Tensor_Scalar relu6 selu silu sin sinc sinh softplus softshrink square
        threshold var avg_pool1d.default avg_pool2d.default avg_pool3d.default""",
    ),
    **_each(
        "self other",
        "atan2 fmax fmin logaddexp logaddexp2 maximum minimum xlogy max.other min.other",
    ),
    **_each("self min max", "clamp.Tensor clip.Tensor"),
    **_each("self max", "clamp_max.Tensor"),
    **_each("self min", "clamp_min.Tensor"),
    # functions whose slope follows from the value
    **_each(
        "out",
        """exp exp2 expm1 reciprocal relu rsqrt sigmoid sqrt tan tanh polar softmax.int
        log_softmax.int""",
    ),
    **_each(
        "self out",
        """sgn prod amax amin max.default min.default std logsumexp linalg_vector_norm
        cumprod.default logcumsumexp.default pow.Tensor_Tensor pow.Scalar""",
    ),
    "aten.pow.Tensor_Tensor": "self exponent out",
    "aten.pow.Scalar": "exponent out",
    "aten.copysign": "self:self out",
    "aten.hypot": "self:self other:other out",
    # rows by expert: where they come from and go to, beside products
    DISPATCH: _dispatch,
    GROUPED_MM: "rows:matrices matrices:rows",
    EXPERT_BIAS: _dispatch,
    COMBINE: _combine,
    # choices
    "aten.where": "condition",
    "aten.masked_fill": "mask",
    **_each("out1", "max.dim min.dim sort topk.default"),
    **_each("self out1", "cummax.default cummin.default"),
    "aten.index.Tensor": "indices",
    "aten.index_put.default": "indices",
    "aten.gather.default": "self index",
    "aten.scatter": "index",
    "aten.scatter_add.default": "index:src",
    "aten.index_select.default": "index",
    "aten.index_add.default": "index:source source:source",
    "aten.masked_scatter.default": "mask",
    "aten.embedding.default": "indices",
    "aten.embedding_bag": (
        "indices offsets out1 out2 out3 per_sample_weights weight:per_sample_weights"
    ),
    "aten.grid_sampler.default": "input grid",
    "aten.max_pool1d.default": _max_pool,
    "aten.max_pool2d.default": _max_pool,
    "aten.max_pool3d.default": _max_pool,
    "aten.adaptive_avg_pool1d.default": _adaptive_pool,
    "aten.adaptive_avg_pool2d.default": _adaptive_pool,
    "aten.adaptive_avg_pool3d.default": _adaptive_pool,
    "aten.pad.default": _pad,
    "aten.dropout.default": _dropout,
    "aten.native_dropout": "out1",
    # attention and norms
    "aten.scaled_dot_product_attention.default": _attention,
    "aten._scaled_dot_product_flash_attention": "query key value out out1",
    "aten._scaled_dot_product_flash_attention_for_cpu": "query key value attn_mask out out1",
    "aten._scaled_dot_product_efficient_attention": "query key value attn_bias out out1",
    "aten.layer_norm.default": _layer_norm,
    "aten.rms_norm.default": _rms_norm,
    "aten.group_norm.default": _group_norm,
    "aten.batch_norm.default": _batch_norm,
    "aten._weight_norm.default": _weight_norm,
    "aten.lstm.input": _recurrent,
    "aten.gru.input": _recurrent,
    # losses
    "aten.cross_entropy_loss.default": _cross_entropy,
    **_each("self target weight", "nll_loss_nd.default nll_loss.default nll_loss2d.default"),
    **_each(
        "self target",
        "mse_loss.default smooth_l1_loss.default huber_loss.default soft_margin_loss.default",
    ),
    "aten.l1_loss.default": _l1_loss,
    "aten.kl_div.default": _kl_div,
    "aten.binary_cross_entropy.default": "self target weight",
    "aten.binary_cross_entropy_with_logits.default": "self target weight pos_weight",
}
"""Rows by operator, or by packet for all overloads."""
