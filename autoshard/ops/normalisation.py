"""Normalisations: where dims that share statistics are cut, ranks put these together.

Forward a mean and a mean of squares around it, backward two means of gradients; a root mean
square is not centred and takes one of each.
"""

from collections.abc import Mapping
from functools import partial
from itertools import chain

from autoshard.ops.call import Call, Rule
from autoshard.ops.reduction import Reductions, statistic_bytes
from autoshard.ops.rule import Dims, OperatorRule
from autoshard.ops.space import Space, broadcast


def _over_last_dims(call: Call, *, shared: str) -> OperatorRule:
    """layer_norm and rms_norm: statistics over the dims of `normalized_shape`."""
    shape = call.inputs[0].shape
    first = len(shape) - len(call.integers("normalized_shape"))
    space = Space(call)
    dims = space.free_dims(shape)
    scales = [dims[first:] for _ in call.inputs[1:]]
    reduced = _shared(call, shared, over=dims[first:], per=dims[:first])
    return space.rule([dims, *scales], [dims], reduced=reduced)


def _group_norm(call: Call) -> OperatorRule:
    """Statistics per sample and group of channels, whose number a rank shares in.

    A rank with a slice of the groups is told how many it has (`Kernel.GROUPS`).
    """
    shape = call.inputs[0].shape
    num_groups = call.integer("num_groups", 1)
    space = Space(call)
    samples, groups = space.free(shape[0]), space.free(num_groups)
    within = space.in_order(space.free(shape[1] // num_groups))  # groups are told by place
    places = space.free_dims(shape[2:])
    channels = (*groups, *within)
    dims = (samples, channels, *places)
    reduced = _shared(call, _CENTRED, over=(within, *places), per=(samples, groups))
    return space.rule([dims, *[(channels,) for _ in call.inputs[1:]]], [dims], reduced=reduced)


def _batch_norm(call: Call) -> OperatorRule:
    """Statistics per channel over everything else, or constants when not training.

    What training tracks is written into buffers, which every rank has whole: channels are then
    not cut, for a rank would know of its own only.
    """
    space = Space(call)
    training = call.flag("training")
    tracks = training and bool(call.positions("running_mean"))
    dims = space.free_dims(call.inputs[0].shape, fixed={1} if tracks else ())
    others = (dims[0], *dims[2:]) if training else ()
    reduced = _shared(call, _CENTRED, over=others, per=dims[1:2])
    return space.rule([dims, *[(dims[1],) for _ in call.inputs[1:]]], [dims], reduced=reduced)


def _shared(call: Call, text: str, *, over: Dims, per: Dims) -> Reductions:
    itemsize = statistic_bytes(call.inputs[0])
    return Reductions.of(text, over=chain(*over), per=chain(*per), itemsize=itemsize)


_CENTRED, _NOT_CENTRED = "sum sum | sum*2", "sum | sum"


def _weight_norm(call: Call) -> OperatorRule:
    """Weights g v / |v|, the norm taken over all dims of v but one; linear in g."""
    shape = call.inputs[0].shape
    kept = call.integer("dim", 0)
    space = Space(call)
    dims = space.free_dims(shape, fixed=set(range(len(shape))) - {kept})
    return space.rule([dims, broadcast(dims, call.inputs[1].shape)], [dims], linear=[{1}])


RULES: Mapping[str, Rule] = {
    "aten.layer_norm.default": partial(_over_last_dims, shared=_CENTRED),
    "aten.rms_norm.default": partial(_over_last_dims, shared=_NOT_CENTRED),
    "aten.group_norm.default": _group_norm,
    "aten.batch_norm.default": _batch_norm,
    "aten._weight_norm.default": _weight_norm,
}
