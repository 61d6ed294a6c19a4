"""Reductions and scans over some dims of one tensor."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain

from autoshard.rules.call import Call, Rule
from autoshard.rules.rule import Dims, OperatorRule
from autoshard.rules.space import Space, replicated, touching


def _reduced(call: Call, dims: Dims, over: frozenset[int]) -> Dims:
    """Letters of an output: reduced dims are gone, or of size 1 where they are kept."""
    if call.flag("keepdim"):
        return tuple(() if dim in over else letters for dim, letters in enumerate(dims))
    return tuple(letters for dim, letters in enumerate(dims) if dim not in over)


def _over(call: Call) -> frozenset[int]:
    """The dims reduced over: all of them where none is named."""
    return call.dims("dim") or frozenset(range(len(call.inputs[0].shape)))


def _sum(call: Call) -> OperatorRule:
    """Summed letters may be cut; a mean of slices is scaled (`Kernel.SCALED`)."""
    over = _over(call)
    space = Space(call)
    dims = space.free_dims(call.inputs[0].shape)
    summed = chain.from_iterable(letters for dim, letters in enumerate(dims) if dim in over)
    return space.rule([dims], [_reduced(call, dims, over)], contracted=summed, linear=[{0}])


def _whole(call: Call) -> OperatorRule:
    """A reduction that needs all of its dims at once."""
    over = _over(call)
    space = Space(call)
    dims = space.free_dims(call.inputs[0].shape, fixed=over)
    return space.rule([dims], [_reduced(call, dims, over) for _ in call.outputs])


def _scan(call: Call, *, linear: bool = False, last: bool = False) -> OperatorRule:
    """Shape-preserving along one dim: softmax, cumsum, sort, top-k."""
    dim = call.dim("dim", -1) if last else call.dim("dim", 0)
    return touching(call, {dim}, linear=[{0}] if linear else ())


def _histogram(call: Call) -> OperatorRule:
    """Counts add up over slices, if the bins do not depend on the values."""
    if call.number("min", 0) == call.number("max", 0):
        return replicated(call)
    space = Space(call)
    dims = space.free_dims(call.inputs[0].shape)
    bins = space.fixed_dims(call.outputs[0].shape)
    return space.rule([dims], [bins], contracted=chain(*dims))


_scan_last: Callable[[Call], OperatorRule] = partial(_scan, last=True)
_scan_linear: Callable[[Call], OperatorRule] = partial(_scan, linear=True)

RULES: Mapping[str, Rule] = {
    "aten.sum": _sum,
    "aten.mean": _sum,
    "aten.prod": _whole,
    "aten.amax": _whole,
    "aten.amin": _whole,
    "aten.max.default": _whole,
    "aten.max.dim": _whole,
    "aten.min.default": _whole,
    "aten.min.dim": _whole,
    "aten.argmax": _whole,
    "aten.argmin": _whole,
    "aten.any": _whole,
    "aten.all": _whole,
    "aten._is_all_true.default": _whole,
    "aten.var": _whole,
    "aten.std": _whole,
    "aten.logsumexp": _whole,
    "aten.linalg_vector_norm": _whole,
    "aten.histc.default": _histogram,
    "aten.softmax.int": _scan,
    "aten.log_softmax.int": _scan,
    "aten.cumsum.default": _scan_linear,
    "aten.cumprod.default": _scan,
    "aten.logcumsumexp.default": _scan,
    "aten.cummax.default": _scan,
    "aten.cummin.default": _scan,
    "aten.sort": _scan_last,
    "aten.argsort": _scan_last,
    "aten.topk.default": _scan_last,
}
