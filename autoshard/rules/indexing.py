"""Reading and writing at positions that are data: dims that are indexed stay whole."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from autoshard.graph import DType, Ref
from autoshard.rules.call import Call, Rule
from autoshard.rules.rule import Dims, OperatorRule
from autoshard.rules.space import Space, broadcast, replicated

_MASKS = (DType.BOOL, DType.UINT8)


def _indexed_dims(call: Call) -> tuple[int, ...]:
    """The dims of `self` that have an index tensor."""
    indices = call.argument("indices")
    items = indices if isinstance(indices, tuple) else (indices,)
    return tuple(dim for dim, index in enumerate(items) if isinstance(index, Ref))


def _index(call: Call) -> OperatorRule:
    """self[..., i, j, ...] with index tensors broadcast against each other."""
    return _at_indices(call) or replicated(call)


def _index_put(call: Call) -> OperatorRule:
    """Writes `values`, broadcast to what the same index would read."""
    return _at_indices(call, writes=True) or replicated(call)


def _at_indices(call: Call, *, writes: bool = False) -> OperatorRule | None:
    """Letters that indices share may be cut where they are read: each reads on its own.

    Where they are written, every writer must see the whole of the indices.
    """
    indexed = _indexed_dims(call)
    indices = [call.inputs[i] for i in call.positions("indices")]
    if any(index.dtype in _MASKS for index in indices):
        return None
    space = Space(call)
    dims = space.free_dims(call.inputs[0].shape, fixed=indexed)
    rank = max(len(index.shape) for index in indices)
    sizes = [
        max(i.shape[d - rank] for i in indices if len(i.shape) >= rank - d) for d in range(rank)
    ]
    shared = space.fixed_dims(sizes) if writes else space.free_dims(sizes)
    at = _read_dims(dims, indexed, shared)
    inputs = [dims, *[broadcast(shared, index.shape) for index in indices]]
    if not writes:
        return space.rule(inputs, [at], linear=[{0}])
    inputs.extend(broadcast(at, call.inputs[i].shape) for i in call.positions("values"))
    return space.rule(inputs, [dims], linear=[{0, len(inputs) - 1}])


def _read_dims(dims: Dims, indexed: Sequence[int], shared: Dims) -> Dims:
    """Letters of self[indices]: adjacent indices stay in place, others move to the front."""
    first, last = indexed[0], indexed[-1]
    others = [letters for dim, letters in enumerate(dims) if dim not in indexed]
    place = first if last - first + 1 == len(indexed) else 0
    return (*others[:place], *shared, *others[place:])


def _along_dim(call: Call, *, linear: Iterable[Collection[int]]) -> OperatorRule:
    """Scatters: equal sizes outside `dim` are independent."""
    dim = call.dim("dim", 0)
    shapes = [tensor.shape for tensor in call.inputs]
    rank = len(shapes[0])
    free = {d for d in range(rank) if d != dim and len({shape[d] for shape in shapes}) == 1}
    space = Space(call)
    whole = set(range(rank)) - free
    dims = space.free_dims(shapes[0], fixed=whole)
    others = [
        tuple(dims[d] if d in free else space.fixed(size) for d, size in enumerate(shape))
        for shape in shapes[1:]
    ]
    return space.rule([dims, *others], [dims], linear=linear)


def _scatter(call: Call) -> OperatorRule:
    """Jointly linear in what is written and what is written over, with a reduction or not."""
    if call.argument("reduce") is not None or 0 in {len(t.shape) for t in call.inputs}:
        return replicated(call)
    affine = not call.positions("src") and bool(call.argument("value"))
    written = {*call.positions("self"), *call.positions("src")}
    return _along_dim(call, linear=() if affine else [written])


def _gather(call: Call) -> OperatorRule:
    """out[i, j] = self[index[i, j], j]: every element of the index reads on its own."""
    source, index = (tensor.shape for tensor in call.inputs)
    if not source or not index:
        return replicated(call)
    dim = call.dim("dim", 0)
    space = Space(call)
    places = tuple(
        space.free(size) if d == dim or size == source[d] else space.fixed(size)
        for d, size in enumerate(index)
    )
    dims = tuple(
        places[d] if d != dim and size == index[d] else space.fixed(size)
        for d, size in enumerate(source)
    )
    return space.rule([dims, places], [places], linear=[{0}])


def _index_select(call: Call) -> OperatorRule:
    source, index = (tensor.shape for tensor in call.inputs)
    if not source or not index:
        return replicated(call)
    dim = call.dim("dim", 0)
    space = Space(call)
    dims = space.free_dims(source, fixed={dim})
    place = space.free(index[0])
    after = (*dims[:dim], place, *dims[dim + 1 :])
    return space.rule([dims, (place,)], [after], linear=[{0}])


def _index_add(call: Call) -> OperatorRule:
    """A sum over the rows of `source`: their letter is contracted, `self` added once."""
    shape = call.inputs[0].shape
    index = call.tensor("index")
    if not shape or index is None or not index.shape:
        return replicated(call)
    dim = call.dim("dim", 0)
    space = Space(call)
    dims = space.free_dims(shape, fixed={dim})
    place = space.free(index.shape[0])
    source = (*dims[:dim], place, *dims[dim + 1 :])
    return space.rule(
        [dims, (place,), source], [dims], contracted=place, addends={0}, linear=[{0, 2}]
    )


RULES: Mapping[str, Rule] = {
    "aten.index.Tensor": _index,
    "aten.index_put.default": _index_put,
    "aten.gather.default": _gather,
    "aten.scatter": _scatter,
    "aten.scatter_add.default": _scatter,
    "aten.index_select.default": _index_select,
    "aten.index_add.default": _index_add,
}
