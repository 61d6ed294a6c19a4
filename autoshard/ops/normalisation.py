"""Normalisations: ranks combine statistics of dims that are sharded.

In forward a mean and a variance, in backward two means of gradients; a root mean square has no
mean, and needs one of each.
"""

from functools import partial
from itertools import chain

from autoshard.ops.rules.collectives import Reductions, statistic_bytes
from autoshard.ops.rules.index_space import IndexSpace, broadcast
from autoshard.ops.rules.rule import Dims, OperatorRule
from autoshard.ops.rules.spec import (
    Call,
    Gradients,
    Kernel,
    OperatorSpec,
    SavedByAutograd,
    saved_by_name,
    statistic,
)

_CENTRED, _NOT_CENTRED = "sum sum | sum*2", "sum | sum"


def _over_last_dims(call: Call, *, shared: str) -> OperatorRule:
    """layer_norm and rms_norm: statistics over the dims of `normalized_shape`."""
    shape = call.inputs[0].shape
    first = len(shape) - len(call.integers("normalized_shape"))
    space = IndexSpace(call)
    dims = space.free_dims(shape)
    scales = [dims[first:] for _ in call.inputs[1:]]
    reduced = _shared(call, shared, over=dims[first:], per=dims[:first])
    return space.rule([dims, *scales], [dims], reduced=reduced)


def _group_norm(call: Call) -> OperatorRule:
    """Statistics per sample and group of channels; ranks may have some groups (`Kernel.GROUPS`)."""
    shape = call.inputs[0].shape
    num_groups = call.integer("num_groups", 1)
    space = IndexSpace(call)
    samples, groups = space.free(shape[0]), space.free(num_groups)
    within = space.in_order(space.free(shape[1] // num_groups))  # a group is a contiguous range
    places = space.free_dims(shape[2:])
    channels = (*groups, *within)
    dims = (samples, channels, *places)
    reduced = _shared(call, _CENTRED, over=(within, *places), per=(samples, groups))
    return space.rule([dims, *[(channels,) for _ in call.inputs[1:]]], [dims], reduced=reduced)


def _batch_norm(call: Call) -> OperatorRule:
    """Statistics per channel over everything else, or constants when not training.

    Running statistics are written into buffers that are replicated, so channels are not sharded
    if there are any: a rank would know its own only.
    """
    space = IndexSpace(call)
    training = call.flag("training")
    tracks = training and bool(call.positions("running_mean"))
    dims = space.free_dims(call.inputs[0].shape, fixed={1} if tracks else ())
    others = (dims[0], *dims[2:]) if training else ()
    reduced = _shared(call, _CENTRED, over=others, per=dims[1:2])
    return space.rule([dims, *[(dims[1],) for _ in call.inputs[1:]]], [dims], reduced=reduced)


def _shared(call: Call, text: str, *, over: Dims, per: Dims) -> Reductions:
    itemsize = statistic_bytes(call.inputs[0])
    return Reductions.of(text, over=chain(*over), per=chain(*per), itemsize=itemsize)


def _weight_norm(call: Call) -> OperatorRule:
    """Weights g v / |v|, the norm over all dims of v but one, or over all (-1); linear in g."""
    shape = call.inputs[0].shape
    kept = call.integer("dim", 0)
    space = IndexSpace(call)
    dims = space.free_dims(shape, fixed=set(range(len(shape))) - {kept})
    return space.rule([dims, broadcast(dims, call.inputs[1].shape)], [dims], linear=[{1}])


def _layer_norm_saves(call: Call, gradients: Gradients, *, centred: bool) -> SavedByAutograd:
    """A standard deviation per row, and a mean if it is centred."""
    dims = range(len(call.inputs[0].shape) - len(call.integers("normalized_shape")))
    extra = statistic(call, dims, times=2 if centred else 1)
    return saved_by_name("input weight bias" if centred else "input weight", call, gradients, extra)


def _group_norm_saves(call: Call, gradients: Gradients) -> SavedByAutograd:
    groups = call.integer("num_groups", 1)
    extra = statistic(call, [0], times=2 * groups)
    return saved_by_name("input weight", call, gradients, extra)


def _batch_norm_saves(call: Call, gradients: Gradients) -> SavedByAutograd:
    extras = [statistic(call, [1], times=2)] if call.flag("training") else []
    return saved_by_name("input weight running_mean running_var", call, gradients, *extras)


def _weight_norm_saves(call: Call, gradients: Gradients) -> SavedByAutograd:
    dim = call.integer("dim", 0)
    return saved_by_name("v g", call, gradients, statistic(call, [] if dim == -1 else [dim]))


SPECS = (
    OperatorSpec(
        "layer_norm.default",
        partial(_over_last_dims, shared=_CENTRED),
        saves=partial(_layer_norm_saves, centred=True),
        kernel=Kernel.SHARDED_DIM,
        examples="input[b,s,h] weight[h] bias[h] normalized_shape=(h,) -> [b,s,h]",
    ),
    OperatorSpec(
        "rms_norm.default",
        partial(_over_last_dims, shared=_NOT_CENTRED),
        saves=partial(_layer_norm_saves, centred=False),
        kernel=Kernel.SHARDED_DIM,
        examples="input[b,s,h] weight[h] normalized_shape=(h,) -> [b,s,h]",
    ),
    OperatorSpec(
        "group_norm.default",
        _group_norm,
        saves=_group_norm_saves,
        kernel=Kernel.SHARDED_DIM,
        kernel_argument="num_groups",
        examples="input[b,(g c),x] weight[(g c)] bias[(g c)] num_groups=g -> [b,(g c),x]",
    ),
    OperatorSpec(
        "batch_norm.default",
        _batch_norm,
        saves=_batch_norm_saves,
        kernel=Kernel.SHARDED_DIM,
        examples="""
            input[b,c,x] weight[c] bias[c] momentum=0.1 eps=1e-5 \
                cudnn_enabled=False running_mean=None running_var=None training=True -> [b,c,x]
            input[b,c,x] weight[c] bias[c] running_mean[c] running_var[c] momentum=0.1 eps=1e-5 \
                cudnn_enabled=False training=False -> [b,c,x]
        """,
    ),
    OperatorSpec(
        "_weight_norm.default",
        _weight_norm,
        saves=_weight_norm_saves,
        examples="""
            v[o,i,x] g[o,1,1] dim=0 -> [o,i,x]
            v[o,i] g[] dim=-1 -> [o,i]
        """,
    ),
)
