"""Reductions and scans over some dims of one tensor."""

from functools import partial
from itertools import chain

from autoshard.ops.rules.collectives import Reductions, is_real, statistic_bytes
from autoshard.ops.rules.index_space import IndexSpace, along_dims, replicated
from autoshard.ops.rules.rule import Dims, OperatorRule
from autoshard.ops.rules.spec import Call, Kernel, OperatorSpec, same_dtype


def _reduced(call: Call, dims: Dims, over: frozenset[int]) -> Dims:
    """Letters of an output: reduced dims are removed, or of size 1 with `keepdim`."""
    if call.flag("keepdim"):
        return tuple(() if dim in over else letters for dim, letters in enumerate(dims))
    return tuple(letters for dim, letters in enumerate(dims) if dim not in over)


def _over(call: Call) -> frozenset[int]:
    """The dims reduced over: all of them if none is named. A scalar has none."""
    every = frozenset(range(len(call.inputs[0].shape)))
    return (call.dims("dim") or every) & every


def _sum(call: Call) -> OperatorRule:
    """Summed letters may be sharded; a mean of shards is scaled (`Kernel.SCALED`)."""
    over = _over(call)
    space = IndexSpace(call)
    dims = space.free_dims(call.inputs[0].shape)
    summed = chain.from_iterable(letters for dim, letters in enumerate(dims) if dim in over)
    return space.rule([dims], [_reduced(call, dims, over)], contracted=summed, linear=[{0}])


def _whole(call: Call) -> OperatorRule:
    """A reduction whose dims stay whole."""
    over = _over(call)
    space = IndexSpace(call)
    dims = space.free_dims(call.inputs[0].shape, fixed=over)
    return space.rule([dims], [_reduced(call, dims, over) for _ in call.outputs])


def _flags(call: Call) -> OperatorRule:
    """Any or all along some dims, which stay whole; an empty list is no dim, not all of them."""
    return along_dims(call, ()) if call.argument("dim") == () else _whole(call)


def _along(call: Call, text: str, *, finds_index: bool = False) -> OperatorRule:
    """A reduction whose result ranks combine inside the operator, so that it is replicated."""
    over = _over(call)
    tensor = call.inputs[0]
    if not is_real(tensor):
        return _whole(call)
    space = IndexSpace(call)
    dims = space.free_dims(tensor.shape)
    worked = tuple(chain.from_iterable(dims[dim] for dim in sorted(over)))
    if finds_index:
        space.in_order(worked)
    reduced = Reductions.of(
        text,
        over=worked,
        per=chain.from_iterable(letters for dim, letters in enumerate(dims) if dim not in over),
        itemsize=statistic_bytes(tensor),
    )
    return space.rule([dims], [_reduced(call, dims, over) for _ in call.outputs], reduced=reduced)


def _extreme_index(call: Call) -> OperatorRule:
    """Maximum or minimum along one dim, and its first index."""
    if not call.integers("dim"):
        return _whole(call)
    return _along(call, "max max:int64", finds_index=True)


def _length(call: Call) -> OperatorRule:
    """A norm; that of sums of squares is one sum."""
    is_plain = call.number("ord", 2) == 2 and call.argument("dtype") is None  # noqa: PLR2004  squares
    return _along(call, "sum") if is_plain else _whole(call)


def _softmax(call: Call) -> OperatorRule:
    """Softmax along one dim, of which ranks combine the maximum and a sum."""
    dim = call.dim("dim", 0)
    space = IndexSpace(call)
    dims = space.free_dims(call.inputs[0].shape)
    reduced = Reductions.of(
        "max sum | sum",
        over=dims[dim] if dims else (),
        per=chain(*dims[:dim], *dims[dim + 1 :]),
        itemsize=statistic_bytes(call.outputs[0]),
    )
    return space.rule([dims], [dims], reduced=reduced)


def _scan(call: Call, *, linear: bool = False, last: bool = False) -> OperatorRule:
    """An operator along one dim: cumulative sums, sort, top-k."""
    dim = call.dim("dim", -1) if last else call.dim("dim", 0)
    return along_dims(call, {dim}, linear=[{0}] if linear else ())


def _histogram(call: Call) -> OperatorRule:
    """Counts of shards add up, if the bins do not depend on the values."""
    if call.number("min", 0) == call.number("max", 0):
        return replicated(call)
    space = IndexSpace(call)
    dims = space.free_dims(call.inputs[0].shape)
    bins = space.fixed_dims(call.outputs[0].shape)
    return space.rule([dims], [bins], contracted=chain(*dims))


def _fourier(call: Call) -> OperatorRule:
    """A Fourier transform over some dims (all if none is named), perhaps of another size."""
    return along_dims(call, _over(call), linear=[{0}])


_WHOLE = (
    "The dim that the operator works along: results of shards cannot be combined by a sum or a "
    "maximum, or models hardly ask for it."
)

SPECS = (
    OperatorSpec(
        "sum",
        _sum,
        saves="",
        passes_gradient=same_dtype,
        examples="sum.dim_IntList: self[b,s,h] dim=(1,) -> [b,h]",
    ),
    OperatorSpec(
        "mean",
        _sum,
        saves="",
        kernel=Kernel.SCALED,
        examples="mean.dim: self[b,s,h] dim=(2,) keepdim=True -> [b,s,1]",
    ),
    OperatorSpec(
        "prod",
        _whole,
        saves="self out",
        unsharded=_WHOLE,
        examples="prod.dim_int: self[b,s] dim=1 -> [b]",
    ),
    OperatorSpec(
        "amax amin",
        partial(_along, text="max | sum"),
        saves="self out",
        kernel=Kernel.SHARDED_DIM,
        examples="amax.default: self[b,s] dim=(1,) -> [b]",
    ),
    OperatorSpec("max.default min.default", _whole, saves="self out", unsharded=_WHOLE),
    OperatorSpec(
        "max.dim min.dim",
        _extreme_index,
        saves="out1",
        kernel=Kernel.SHARDED_DIM,
        examples="self[b,s] dim=1 -> [b] :int64[b]",
    ),
    OperatorSpec(
        "argmax argmin",
        _extreme_index,
        saves="",
        kernel=Kernel.SHARDED_DIM,
        examples="argmax.default: self[b,s] dim=1 -> :int64[b]",
    ),
    OperatorSpec(
        "any all _is_all_true.default",
        _flags,
        saves="",
        unsharded=_WHOLE,
        examples="any.dim: self:bool[b,s] dim=1 -> :bool[b]",
    ),
    OperatorSpec(
        "var",
        partial(_along, text="sum sum"),
        saves="self",
        kernel=Kernel.SHARDED_DIM,
        examples="var.correction: self[b,s] dim=(1,) -> [b]",
    ),
    OperatorSpec(
        "std", partial(_along, text="sum sum"), saves="self out", kernel=Kernel.SHARDED_DIM
    ),
    OperatorSpec(
        "logsumexp",
        partial(_along, text="max sum"),
        saves="self out",
        kernel=Kernel.SHARDED_DIM,
        examples="logsumexp.default: self[b,s] dim=(1,) -> [b]",
    ),
    OperatorSpec(
        "linalg_vector_norm",
        _length,
        saves="self out",
        kernel=Kernel.SHARDED_DIM,
        examples="linalg_vector_norm.default: self[b,s] dim=(1,) -> [b]",
    ),
    OperatorSpec(
        "softmax.int log_softmax.int",
        _softmax,
        saves="out",
        kernel=Kernel.SHARDED_DIM,
        examples="""
            self[b,h,s,t] dim=3 -> [b,h,s,t]
            log_softmax.int: self[n,c] dim=1 -> [n,c]
        """,
    ),
    OperatorSpec(
        "cumsum.default",
        partial(_scan, linear=True),
        saves="",
        unsharded=_WHOLE,
        examples="self[b,s] dim=1 -> [b,s]",
    ),
    OperatorSpec(
        "cumprod.default logcumsumexp.default",
        _scan,
        saves="self out",
        examples="self[b,s] dim=1 -> [b,s]",
    ),
    OperatorSpec("cummax.default cummin.default", _scan, saves="self out1"),
    OperatorSpec(
        "sort topk.default",
        partial(_scan, last=True),
        saves="out1",
        unsharded=_WHOLE,
        examples="""
            sort.default: self[b,s] -> [b,s] :int64[b,s]
            topk.default: self[b,e] k=2 -> [b,2] :int64[b,2]
        """,
    ),
    OperatorSpec(
        "argsort",
        partial(_scan, last=True),
        saves="",
        unsharded=_WHOLE,
        examples="argsort.default: self[b,s] -> :int64[b,s]",
    ),
    OperatorSpec(
        "fft_fftn.default fft_ifftn.default",
        _fourier,
        saves="",
        unsharded=_WHOLE,
        examples="self:complex64[b,s,h] dim=(1,2) -> :complex64[b,s,h]",
    ),
    OperatorSpec(
        "histc.default",
        _histogram,
        saves="",
        kernel=Kernel.COUNTS,
        examples="self[n] bins=e min=0 max=e -> [e]",
    ),
)
