"""Reductions and scans over some dims of one tensor."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain

from autoshard.ops.call import Call, Rule
from autoshard.ops.reduction import Reductions, is_real, statistic_bytes
from autoshard.ops.rule import Dims, OperatorRule
from autoshard.ops.space import Space, replicated, touching


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


def _along(call: Call, text: str, *, finds_place: bool = False) -> OperatorRule:
    """A reduction that ranks finish together: the same on all of them."""
    over = _over(call)
    tensor = call.inputs[0]
    if not is_real(tensor):
        return _whole(call)
    space = Space(call)
    dims = space.free_dims(tensor.shape)
    worked = tuple(chain.from_iterable(dims[dim] for dim in sorted(over)))
    if finds_place:
        space.in_order(worked)
    reduced = Reductions.of(
        text,
        over=worked,
        per=chain.from_iterable(letters for dim, letters in enumerate(dims) if dim not in over),
        itemsize=statistic_bytes(tensor),
    )
    return space.rule([dims], [_reduced(call, dims, over) for _ in call.outputs], reduced=reduced)


def _first(call: Call) -> OperatorRule:
    """The largest or smallest number along one dim, and the first place where it is."""
    if not call.integers("dim"):
        return _whole(call)
    return _along(call, "max max:int64", finds_place=True)


def _length(call: Call) -> OperatorRule:
    """A norm; that of sums of squares is one sum."""
    is_plain = call.number("ord", 2) == 2 and call.argument("dtype") is None  # noqa: PLR2004  squares
    return _along(call, "sum") if is_plain else _whole(call)


def _softmax(call: Call) -> OperatorRule:
    """Shape-preserving along one dim, of which ranks share the largest and a sum."""
    dim = call.dim("dim", 0)
    space = Space(call)
    dims = space.free_dims(call.inputs[0].shape)
    reduced = Reductions.of(
        "max sum | sum",
        over=dims[dim] if dims else (),
        per=chain(*dims[:dim], *dims[dim + 1 :]),
        itemsize=statistic_bytes(call.outputs[0]),
    )
    return space.rule([dims], [dims], reduced=reduced)


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


def _fourier(call: Call) -> OperatorRule:
    """A transform over some dims, all of them where none is named, perhaps of another size."""
    return touching(call, _over(call), linear=[{0}])


_extreme: Rule = partial(_along, text="max | sum")
_deviation: Rule = partial(_along, text="sum sum")
_sum_of_exponentials: Rule = partial(_along, text="max sum")
_scan_last: Callable[[Call], OperatorRule] = partial(_scan, last=True)
_scan_linear: Callable[[Call], OperatorRule] = partial(_scan, linear=True)

RULES: Mapping[str, Rule] = {
    "aten.sum": _sum,
    "aten.mean": _sum,
    "aten.prod": _whole,
    "aten.amax": _extreme,
    "aten.amin": _extreme,
    "aten.max.default": _whole,
    "aten.max.dim": _first,
    "aten.min.default": _whole,
    "aten.min.dim": _first,
    "aten.argmax": _first,
    "aten.argmin": _first,
    "aten.any": _whole,
    "aten.all": _whole,
    "aten._is_all_true.default": _whole,
    "aten.var": _deviation,
    "aten.std": _deviation,
    "aten.logsumexp": _sum_of_exponentials,
    "aten.linalg_vector_norm": _length,
    "aten.histc.default": _histogram,
    "aten.softmax.int": _softmax,
    "aten.log_softmax.int": _softmax,
    "aten.cumsum.default": _scan_linear,
    "aten.cumprod.default": _scan,
    "aten.logcumsumexp.default": _scan,
    "aten.cummax.default": _scan,
    "aten.cummin.default": _scan,
    "aten.sort": _scan_last,
    "aten.argsort": _scan_last,
    "aten.topk.default": _scan_last,
    "aten.fft_fftn.default": _fourier,
    "aten.fft_ifftn.default": _fourier,
}
