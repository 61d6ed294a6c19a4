"""Elementwise operators, with broadcasting: every dim may be sharded."""

from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import partial
from math import inf

from autoshard.ops.rules.index_space import IndexSpace, broadcast
from autoshard.ops.rules.rule import OperatorRule
from autoshard.ops.rules.spec import (
    Call,
    ExtraTensor,
    Gradients,
    OperatorSpec,
    Rule,
    addends,
    like,
    same_dtype,
)
from autoshard.ops.rules.strides import FullStrides, Shape, normalised


def pointwise(call: Call, *, linear: Iterable[Collection[int]] = ()) -> OperatorRule:
    """Inputs broadcast to the output, aligned at the last dim."""
    space = IndexSpace(call)
    dims = space.free_dims(call.outputs[0].shape)
    inputs = [broadcast(dims, tensor.shape) for tensor in call.inputs]
    return space.rule(inputs, [dims] * len(call.outputs), linear=linear)


def linear_in_self(call: Call) -> OperatorRule:
    """Elementwise, and linear in `self`."""
    return pointwise(call, linear=[call.positions("self")])


def _linear_in_each(call: Call) -> OperatorRule:
    return pointwise(call, linear=[{i} for i in range(len(call.inputs))])


def _jointly_linear(call: Call) -> OperatorRule:
    """Linear in all inputs; a number other than 0 instead of the second tensor is a constant."""
    affine = not call.positions("other") and call.number("other", 0) != 0
    return pointwise(call, linear=() if affine else [range(len(call.inputs))])


def _divide(call: Call) -> OperatorRule:
    rounds = call.argument("rounding_mode") is not None
    return pointwise(call, linear=() if rounds else [call.positions("self")])


def _choose(call: Call, *, first: str, second: str) -> OperatorRule:
    """Jointly linear in two branches, the condition fixed.

    A branch may be a number x with x + x = x: 0 or an infinity.
    """
    branches = (*call.positions(first), *call.positions(second))
    sums = all(
        call.positions(key) or value in (0, inf, -inf)
        for key, value in call.arguments
        if key in (first, second)
    )
    return pointwise(call, linear=[branches] if sums else ())


def _like_self(call: Call) -> OperatorRule:
    """`self` cast to the type of another tensor, whose values do not matter."""
    space = IndexSpace(call)
    dims = space.free_dims(call.inputs[0].shape)
    same = call.inputs[1].shape == call.inputs[0].shape
    other = dims if same else space.fixed_dims(call.inputs[1].shape)
    return space.rule([dims, other], [dims], linear=[{0}])


def _gated(call: Call) -> OperatorRule:
    """One half of a dim times the sigmoid of the other half: a rank has the same part of both."""
    dim = call.dim("dim", -1)
    space = IndexSpace(call)
    dims = space.free_dims(call.outputs[0].shape)
    halves = (*space.fixed(2), *dims[dim])
    return space.rule([(*dims[:dim], halves, *dims[dim + 1 :])], [dims])


def _is_no_cast(call: Call, _: int = 0) -> bool:
    return same_dtype(call, 0) and not call.flag("copy")


def _cast_strides(call: Call, _: Shape, strides: FullStrides, __: Shape) -> FullStrides | None:
    return strides if _is_no_cast(call) else None


def _contiguous_strides(
    _: Call, shape: Shape, strides: FullStrides, __: Shape
) -> FullStrides | None:
    return strides if normalised(strides, shape) is None else None


def _broadcast_gradient(call: Call, gradients: Gradients) -> tuple[ExtraTensor, ...]:
    """The gradient of a broadcast input, before it is summed to the input's shape."""
    output = call.outputs[0]
    broadcasts = any(
        needed and tensor.shape != output.shape
        for tensor, needed in zip(call.inputs, gradients, strict=True)
    )
    return (like(call, len(call.inputs), output.dtype.itemsize),) if broadcasts else ()


def _two_like_base(call: Call, _: Gradients) -> tuple[ExtraTensor, ...]:
    return (like(call, 0, call.inputs[0].dtype.itemsize, times=2),)


_where: Rule = partial(_choose, first="self", second="other")
_masked_fill: Rule = partial(_choose, first="self", second="value")

_SPECS = (
    OperatorSpec(
        "add",
        _jointly_linear,
        saves="",
        passes_gradient=addends(self="", other="alpha"),
        examples="add.Tensor: self[b,s,h] other[h] -> [b,s,h]",
    ),
    OperatorSpec("sub", _jointly_linear, saves="", passes_gradient=addends(self="")),
    OperatorSpec("rsub lerp.Scalar", _jointly_linear, saves=""),
    OperatorSpec("lerp.Tensor", pointwise, saves="weight self:weight end:weight"),
    OperatorSpec(
        "mul",
        _linear_in_each,
        saves="self:other other:self",
        backward_workspace=_broadcast_gradient,
        examples="mul.Tensor: self[b,s,h] other[h] -> [b,s,h]",
    ),
    OperatorSpec("div true_divide", _divide, saves="other self:other"),
    OperatorSpec(
        "div.Tensor",
        _divide,
        saves="other self:other",
        backward_workspace=_broadcast_gradient,
        examples="self[b,s,h] other[b,1,1] -> [b,s,h]",
    ),
    OperatorSpec(
        "neg deg2rad rad2deg _to_copy",
        linear_in_self,
        saves="",
        examples="neg.default: self[b,s,h] -> [b,s,h]",
    ),
    OperatorSpec(
        "clone positive lift_fresh_copy", linear_in_self, saves="", passes_gradient=same_dtype
    ),
    OperatorSpec(
        "contiguous",
        linear_in_self,
        saves="",
        strides=_contiguous_strides,
        passes_gradient=same_dtype,
    ),
    OperatorSpec(
        "to.dtype to.dtype_layout to.device",
        linear_in_self,
        saves="",
        strides=_cast_strides,
        passes_gradient=_is_no_cast,
        examples="self[b,s,h] dtype=bfloat16 -> :bfloat16[b,s,h]",
    ),
    OperatorSpec(
        "type_as",
        _like_self,
        saves="",
        strides=_cast_strides,
        passes_gradient=_is_no_cast,
        examples="type_as.default: self[b,h] other:float64[h] -> :float64[b,h]",
    ),
    OperatorSpec(
        "where.self where.ScalarOther where.ScalarSelf where.Scalar",
        _where,
        saves="condition",
        examples="condition:bool[s,t] self[b,s,t] other[b,s,t] -> [b,s,t]",
    ),
    OperatorSpec(
        "masked_fill",
        _masked_fill,
        saves="mask",
        examples="masked_fill.Scalar: self[b,s,t] mask:bool[s,t] value=0 -> [b,s,t]",
    ),
    # The derivative is zero, or there is none.
    OperatorSpec(
        """
            ceil floor round sign trunc frac heaviside floor_divide conj_physical fmod.Scalar
            remainder.Scalar remainder.Scalar_Tensor __and__ __lshift__ __or__ __rshift__ __xor__
            bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor
            eq ge gt le lt ne isfinite isinf isnan isneginf isposinf logical_and logical_not
            logical_or logical_xor signbit
        """,
        pointwise,
        saves="",
    ),
    # The derivative is computed from the input.
    OperatorSpec(
        """
            gelu silu abs acos acosh angle asin asinh atan atanh celu clamp clamp_max clamp_min
            clip cos cosh digamma elu erf erfc erfinv hardshrink hardsigmoid hardswish hardtanh
            leaky_relu lgamma log log10 log1p log2 log_sigmoid logit mish nan_to_num relu6 selu
            sin sinc sinh softplus softshrink square threshold
        """,
        pointwise,
        saves="self",
        examples="gelu.default: self[b,s,h] -> [b,s,h]",
    ),
    OperatorSpec("glu", _gated, saves="self", examples="glu.default: self[b,(2 h)] -> [b,h]"),
    OperatorSpec(
        "special_entr",
        pointwise,
        saves="self:self",
        examples="special_entr.default: self[b,s,h] -> [b,s,h]",
    ),
    OperatorSpec(
        "pow.Tensor_Scalar",
        pointwise,
        saves="self",
        backward_workspace=_two_like_base,
        examples="self[b,s,h] exponent=2 -> [b,s,h]",
    ),
    OperatorSpec(
        """
            atan2 fmax fmin logaddexp logaddexp2 maximum minimum xlogy max.other min.other
        """,
        pointwise,
        saves="self other",
    ),
    OperatorSpec("clamp.Tensor clip.Tensor", pointwise, saves="self min max"),
    OperatorSpec("clamp_max.Tensor", pointwise, saves="self max"),
    OperatorSpec("clamp_min.Tensor", pointwise, saves="self min"),
    OperatorSpec("fmod.Tensor remainder.Tensor", pointwise, saves="self:other other:other"),
    OperatorSpec("addcmul", pointwise, saves="tensor1:tensor2 tensor2:tensor1"),
    OperatorSpec("addcdiv", pointwise, saves="tensor2 tensor1:tensor2"),
    # The derivative is computed from the output.
    OperatorSpec(
        "rsqrt exp exp2 expm1 reciprocal relu sigmoid sqrt tan tanh polar",
        pointwise,
        saves="out",
        examples="rsqrt.default: self[b,s,1] -> [b,s,1]",
    ),
    OperatorSpec("sgn", pointwise, saves="self out"),
    OperatorSpec("pow.Tensor_Tensor", pointwise, saves="self exponent out"),
    OperatorSpec("pow.Scalar", pointwise, saves="exponent out"),
    OperatorSpec("copysign", pointwise, saves="self:self out"),
    OperatorSpec("hypot", pointwise, saves="self:self other:other out"),
    OperatorSpec("ldexp", pointwise, saves="self other out"),
)
SPECS = tuple(replace(spec, keeps_memory_order=True) for spec in _SPECS)
