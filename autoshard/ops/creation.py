"""Tensors made of nothing but arguments."""

from collections.abc import Mapping

from autoshard.ops.call import Call, Rule
from autoshard.ops.rule import OperatorRule
from autoshard.ops.space import Space, replicated


def _filled(call: Call) -> OperatorRule:
    """One value everywhere: any dim may be cut.

    A tensor that only lends its dtype or shape lies like the output where shapes agree.
    """
    shape = call.outputs[0].shape
    space = Space(call)
    dims = space.free_dims(shape)
    inputs = [
        dims if tensor.shape == shape else space.fixed_dims(tensor.shape) for tensor in call.inputs
    ]
    return space.rule(inputs, [dims])


_FILLING = """
    zeros.default ones.default full.default empty.memory_format scalar_tensor.default
    new_zeros.default new_ones.default new_full.default new_empty.default
    zeros_like.default ones_like.default full_like.default empty_like.default
""".split()  # noqa: SIM905  a table of words

RULES: Mapping[str, Rule] = {
    **{f"aten.{operator}": _filled for operator in _FILLING},
    # Values that count from the start of the tensor. Nothing is lost by making them whole:
    # they are rows or small squares of integers, and taking a slice is free.
    "aten.arange": replicated,
    "aten.linspace": replicated,
    "aten.eye": replicated,
}
