"""Element by element, with broadcasting: every letter may be cut."""

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from math import inf

from autoshard.ops.call import Call, Rule
from autoshard.ops.rule import OperatorRule
from autoshard.ops.space import Space, broadcast


def pointwise(call: Call, *, linear: Iterable[Collection[int]] = ()) -> OperatorRule:
    """Inputs broadcast to the output, aligned at the last dim."""
    space = Space(call)
    dims = space.free_dims(call.outputs[0].shape)
    inputs = [broadcast(dims, tensor.shape) for tensor in call.inputs]
    return space.rule(inputs, [dims] * len(call.outputs), linear=linear)


def _in_first(call: Call) -> OperatorRule:
    return pointwise(call, linear=[call.positions("self")])


def _in_each(call: Call) -> OperatorRule:
    return pointwise(call, linear=[{i} for i in range(len(call.inputs))])


def _in_all(call: Call) -> OperatorRule:
    """Jointly linear; a number other than 0 in place of the second tensor adds a constant."""
    affine = not call.positions("other") and call.number("other", 0) != 0
    return pointwise(call, linear=() if affine else [range(len(call.inputs))])


def _divide(call: Call) -> OperatorRule:
    rounds = call.argument("rounding_mode") is not None
    return pointwise(call, linear=() if rounds else [call.positions("self")])


def _choose(call: Call, *, first: str, second: str) -> OperatorRule:
    """Jointly linear in two branches, the choice held.

    A branch may be a number that is the sum of itself: 0 or an infinity.
    """
    branches = (*call.positions(first), *call.positions(second))
    sums = all(
        call.positions(key) or value in _SUMS_OF_ITSELF
        for key, value in call.arguments
        if key in (first, second)
    )
    return pointwise(call, linear=[branches] if sums else ())


_SUMS_OF_ITSELF = (0, inf, -inf)


def _like_self(call: Call) -> OperatorRule:
    """`self` cast to the type of another tensor, whose values do not matter."""
    space = Space(call)
    dims = space.free_dims(call.inputs[0].shape)
    same = call.inputs[1].shape == call.inputs[0].shape
    other = dims if same else space.fixed_dims(call.inputs[1].shape)
    return space.rule([dims, other], [dims], linear=[{0}])


_where: Rule = partial(_choose, first="self", second="other")
_masked_fill: Rule = partial(_choose, first="self", second="value")

LINEAR: Mapping[str, Rule] = {
    "aten.add": _in_all,
    "aten.sub": _in_all,
    "aten.rsub": _in_all,
    "aten.mul": _in_each,
    "aten.div": _divide,
    "aten.true_divide": _divide,
    "aten.neg": _in_first,
    "aten.positive": _in_first,
    "aten.clone": _in_first,
    "aten.alias": _in_first,
    "aten.detach": _in_first,
    "aten.contiguous": _in_first,
    "aten.lift_fresh_copy": _in_first,
    "aten.deg2rad": _in_first,
    "aten.rad2deg": _in_first,
    "aten.to.dtype": _in_first,
    "aten.to.dtype_layout": _in_first,
    "aten.to.device": _in_first,
    "aten._to_copy": _in_first,
    "aten.type_as": _like_self,
    "aten.where.self": _where,
    "aten.where.ScalarOther": _where,
    "aten.where.ScalarSelf": _where,
    "aten.where.Scalar": _where,
    "aten.masked_fill": _masked_fill,
    "aten.lerp.Scalar": _in_all,
}

NONLINEAR = """
    __and__ __lshift__ __or__ __rshift__ __xor__ abs acos acosh addcdiv addcmul angle asin asinh
    atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift
    bitwise_xor ceil celu clamp clamp_max clamp_min clip conj_physical copysign cos cosh digamma
    elu eq erf erfc erfinv exp exp2 expm1 floor floor_divide fmax fmin fmod frac ge gelu gt
    hardshrink hardsigmoid hardswish hardtanh heaviside hypot isfinite isinf isnan isneginf
    isposinf ldexp le leaky_relu lerp lgamma log log10 log1p log2 log_sigmoid logaddexp
    logaddexp2 logical_and logical_not logical_or logical_xor logit lt maximum minimum mish
    nan_to_num ne polar pow reciprocal relu relu6 remainder round rsqrt selu sgn sigmoid sign
    signbit silu sin sinc sinh softplus softshrink sqrt square tan tanh threshold trunc xlogy
""".split()  # noqa: SIM905  a table of words
"""Packets whose overloads all act element by element and have no linear group."""

RULES: Mapping[str, Rule] = {
    **LINEAR,
    **{f"aten.{packet}": pointwise for packet in NONLINEAR},
    "aten.max.other": pointwise,
    "aten.min.other": pointwise,
}
