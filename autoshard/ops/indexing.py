"""Reading and writing at positions that are data: dims that are indexed stay whole."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain

from autoshard.graph import DType, Ref
from autoshard.ops.call import Call, Rule
from autoshard.ops.rule import Dims, OperatorRule
from autoshard.ops.space import Shape, Space, broadcast, replicated

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

    What is written may be cut by them if it is added up, with `self` added once. Otherwise
    the last of two writes to one place counts, and a slice does not know which one that is.
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
    apart = not writes or call.flag("accumulate")
    shared = space.free_dims(sizes) if apart else space.fixed_dims(sizes)
    at = _read_dims(dims, indexed, shared)
    inputs = [dims, *[broadcast(shared, index.shape) for index in indices]]
    if not writes:
        return space.rule(inputs, [at], linear=[{0}])
    inputs.extend(broadcast(at, call.inputs[i].shape) for i in call.positions("values"))
    written = {0, len(inputs) - 1}
    return space.rule(inputs, [dims], contracted=chain(*shared), addends={0}, linear=[written])


def _read_dims(dims: Dims, indexed: Sequence[int], shared: Dims) -> Dims:
    """Letters of self[indices]: adjacent indices stay in place, others move to the front."""
    first, last = indexed[0], indexed[-1]
    others = [letters for dim, letters in enumerate(dims) if dim not in indexed]
    place = first if last - first + 1 == len(indexed) else 0
    return (*others[:place], *shared, *others[place:])


def _scatter(call: Call, *, adds: bool = False) -> OperatorRule:
    """self[index[i, j], j] = src[i, j]: equal sizes outside `dim` are independent.

    Jointly linear in what is written and what is written over, with a reduction or not. What
    is added may come from slices of the index: their letter is summed, `self` added once.
    """
    shapes = [tensor.shape for tensor in call.inputs]
    if call.argument("reduce") is not None or () in shapes:
        return replicated(call)
    dim = call.dim("dim", 0)
    space = Space(call)
    equal = [len({shape[d] for shape in shapes}) == 1 for d in range(len(shapes[0]))]
    dims = tuple(
        space.free(size) if equal[d] and d != dim else space.fixed(size)
        for d, size in enumerate(shapes[0])
    )
    rows = shapes[1][dim]
    place = space.free(rows) if adds and rows == shapes[-1][dim] else ()

    def letters(shape: Shape) -> Dims:
        return tuple(
            (place or space.fixed(size)) if d == dim else dims[d] if equal[d] else space.fixed(size)
            for d, size in enumerate(shape)
        )

    affine = not call.positions("src") and bool(call.argument("value"))
    written = {*call.positions("self"), *call.positions("src")}
    return space.rule(
        [dims, *map(letters, shapes[1:])],
        [dims],
        contracted=place,
        addends={0},
        linear=() if affine else [written],
    )


_scatter_add: Rule = partial(_scatter, adds=True)


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


def _masked_scatter(call: Call) -> OperatorRule:
    """Takes the next element of `source` at every place that the mask holds.

    Which element that is depends on all of the mask before it, so nothing is cut.
    """
    space = Space(call)
    dims = [space.fixed_dims(tensor.shape) for tensor in call.inputs]
    return space.rule(dims, [space.fixed_dims(call.outputs[0].shape)], linear=[{0, 2}])


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
    "aten.scatter_add.default": _scatter_add,
    "aten.index_select.default": _index_select,
    "aten.index_add.default": _index_add,
    "aten.masked_scatter.default": _masked_scatter,
}
