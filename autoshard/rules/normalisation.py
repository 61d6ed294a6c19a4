"""Normalisations: the dims that share statistics stay whole."""

from collections.abc import Mapping

from autoshard.rules.call import Call, Rule
from autoshard.rules.rule import OperatorRule
from autoshard.rules.space import Space, broadcast


def _over_last_dims(call: Call) -> OperatorRule:
    """layer_norm and rms_norm: statistics over the dims of `normalized_shape`."""
    shape = call.inputs[0].shape
    first = len(shape) - len(call.integers("normalized_shape"))
    space = Space(call)
    dims = space.free_dims(shape, fixed=range(first, len(shape)))
    scales = [dims[first:] for _ in call.inputs[1:]]
    return space.rule([dims, *scales], [dims])


def _group_norm(call: Call) -> OperatorRule:
    """Statistics per sample and group of channels, whose number a rank shares in.

    A rank with a slice of the groups is told how many it has (`Kernel.GROUPS`).
    """
    shape = call.inputs[0].shape
    groups = call.integer("num_groups", 1)
    space = Space(call)
    samples = space.free(shape[0])
    channels = (*space.free(groups), *space.fixed(shape[1] // groups))
    dims = (samples, channels, *space.fixed_dims(shape[2:]))
    return space.rule([dims, *[(channels,) for _ in call.inputs[1:]]], [dims])


def _batch_norm(call: Call) -> OperatorRule:
    """Statistics per channel over everything else, or constants when not training."""
    shape = call.inputs[0].shape
    others = [dim for dim in range(len(shape)) if dim != 1]
    space = Space(call)
    dims = space.free_dims(shape, fixed=others if call.flag("training") else ())
    return space.rule([dims, *[(dims[1],) for _ in call.inputs[1:]]], [dims])


def _weight_norm(call: Call) -> OperatorRule:
    """Weights g v / |v|, the norm taken over all dims of v but one; linear in g."""
    shape = call.inputs[0].shape
    kept = call.integer("dim", 0)
    space = Space(call)
    dims = space.free_dims(shape, fixed=set(range(len(shape))) - {kept})
    return space.rule([dims, broadcast(dims, call.inputs[1].shape)], [dims], linear=[{1}])


RULES: Mapping[str, Rule] = {
    "aten.layer_norm.default": _over_last_dims,
    "aten.rms_norm.default": _over_last_dims,
    "aten.group_norm.default": _group_norm,
    "aten.batch_norm.default": _batch_norm,
    "aten._weight_norm.default": _weight_norm,
}
