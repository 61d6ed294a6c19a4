"""Functions that compute each element from those at its place in tensors that broadcast."""

import torch

from autoshard.runtime.global_tensors.letters import broadcast, numbered
from autoshard.runtime.global_tensors.on_shards import Letters, ShardedCall, TorchCall

ELEMENTWISE = frozenset(
    """
    __abs__ __add__ __and__ __div__ __eq__ __floordiv__ __ge__ __gt__ __invert__ __le__ __lshift__
    __lt__ __mod__ __mul__ __ne__ __neg__ __or__ __pos__ __pow__ __radd__ __rdiv__ __rfloordiv__
    __rlshift__ __rmod__ __rmul__ __rpow__ __rrshift__ __rshift__ __rsub__ __rtruediv__ __sub__
    __truediv__ __xor__ abs absolute acos acosh add addcdiv addcmul angle arccos arccosh arcsin
    arcsinh arctan arctan2 arctanh asin asinh atan atan2 atanh bitwise_and bitwise_left_shift
    bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min clip
    clone conj_physical copysign cos cosh deg2rad digamma div divide elu eq erf erfc erfinv exp exp2
    expm1 fix float_power floor floor_divide fmax fmin fmod frac full_like ge gelu greater
    greater_equal gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot i0 igamma igammac
    isclose isfinite isinf isnan isneginf isposinf isreal ldexp le leaky_relu lerp less less_equal
    lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor
    logit logsigmoid lt masked_fill maximum minimum mish mul multiply nan_to_num ne neg negative
    nextafter not_equal ones_like positive pow rad2deg reciprocal relu relu6 remainder round rsqrt
    rsub selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink softsign sqrt square
    sub subtract tan tanh tanhshrink threshold true_divide trunc where xlogy zeros_like
    """.split()  # noqa: SIM905  a table of words
)
"""Names of such functions; a name with a trailing underscore writes the result in place."""

CASTS = frozenset(
    """
    bfloat16 bool byte cdouble cfloat char contiguous detach double float half int long short
    to type type_as
    """.split()  # noqa: SIM905  a table of words
)
"""Names of methods that keep each element in its place, and convert it."""


def elementwise(call: TorchCall) -> ShardedCall | None:
    """The rule of functions of elements."""
    tensors = call.tensors
    found = broadcast(tensors)
    if found is None or (call.function.__name__ == "where" and len(tensors) == 1):
        return None
    shape, letters = found
    return ShardedCall(tensors, letters, call.compute, lambda *_: numbered(len(shape)))


def cast(call: TorchCall) -> ShardedCall | None:
    """The rule of casts: further tensors only give an element type and a device."""
    tensors = call.tensors
    tensor = tensors[0]
    device = tensor.local.device
    for given in (*call.args[1:], *call.kwargs.values()):
        if isinstance(given, str | torch.device) and not _is_device(given, device):
            return None
    letters = numbered(len(tensor.shape))
    given_whole: list[Letters] = [(None,) * len(other.shape) for other in tensors[1:]]
    return ShardedCall(tensors, [letters, *given_whole], call.compute, lambda *_: letters)


def _is_device(given: str | torch.device, device: torch.device) -> bool:
    """True unless the argument names another device than that of the shards."""
    try:
        wanted = torch.device(given)
    except RuntimeError:  # the name of a type, as in type("torch.FloatTensor")
        return False
    return wanted.type == device.type and wanted.index in (None, device.index)
