"""Normalisations: the dims that share statistics stay whole."""

from collections.abc import Mapping

from autoshard.rules.call import Call, Rule
from autoshard.rules.rule import OperatorRule
from autoshard.rules.space import Space


def _over_last_dims(call: Call) -> OperatorRule:
    """layer_norm and rms_norm: statistics over the dims of `normalized_shape`."""
    shape = call.inputs[0].shape
    first = len(shape) - len(call.integers("normalized_shape"))
    space = Space(call)
    dims = space.free_dims(shape, fixed=range(first, len(shape)))
    scales = [dims[first:] for _ in call.inputs[1:]]
    return space.rule([dims, *scales], [dims])


def _group_norm(call: Call) -> OperatorRule:
    """Statistics per sample and group of channels; `num_groups` counts all channels."""
    shape = call.inputs[0].shape
    space = Space(call)
    dims = space.free_dims(shape, fixed=range(1, len(shape)))
    return space.rule([dims, *[(dims[1],) for _ in call.inputs[1:]]], [dims])


def _batch_norm(call: Call) -> OperatorRule:
    """Statistics per channel over everything else, or constants when not training."""
    shape = call.inputs[0].shape
    others = [dim for dim in range(len(shape)) if dim != 1]
    space = Space(call)
    dims = space.free_dims(shape, fixed=others if call.flag("training") else ())
    return space.rule([dims, *[(dims[1],) for _ in call.inputs[1:]]], [dims])


RULES: Mapping[str, Rule] = {
    "aten.layer_norm.default": _over_last_dims,
    "aten.rms_norm.default": _over_last_dims,
    "aten.group_norm.default": _group_norm,
    "aten.batch_norm.default": _batch_norm,
}
