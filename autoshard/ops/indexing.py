"""Gather and scatter operators: indexed dims stay whole, except in embeddings."""

from collections.abc import Sequence
from functools import partial
from itertools import chain

from autoshard.graph import DType, Ref
from autoshard.ops.rules.index_space import IndexSpace, broadcast, replicated
from autoshard.ops.rules.rule import Dims, OperatorRule
from autoshard.ops.rules.spec import Call, Kernel, OperatorSpec, addends
from autoshard.ops.rules.strides import Shape

_SUM, _MAXIMUM = 0, 2
"""Values of the mode of `embedding_bag`."""

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
    """Writes `values`, broadcast to the shape that the same indices would read."""
    return _at_indices(call, writes=True) or replicated(call)


def _at_indices(call: Call, *, writes: bool = False) -> OperatorRule | None:
    """Rule of a read or write at index tensors; None if there are boolean masks.

    For reads, the letters of the indices may be sharded, since each index is independent. For
    writes, only if they accumulate, with `self` added once: otherwise the last of two writes to one
    position wins, and ranks do not know the order of writes on other ranks.
    """
    indexed = _indexed_dims(call)
    indices = [call.inputs[i] for i in call.positions("indices")]
    if any(index.dtype in _MASKS for index in indices):
        return None
    space = IndexSpace(call)
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
    """Letters of self[indices]: adjacent indexed dims stay in place, others move to the front."""
    first, last = indexed[0], indexed[-1]
    others = [letters for dim, letters in enumerate(dims) if dim not in indexed]
    place = first if last - first + 1 == len(indexed) else 0
    return (*others[:place], *shared, *others[place:])


def _scatter(call: Call, *, adds: bool = False) -> OperatorRule:
    """self[index[i, j], j] = src[i, j]: dims of equal size other than `dim` are independent.

    Jointly linear in `self` and `src`, with a reduction or not. If it adds, the index may be
    sharded: its letter is summed, `self` added once.
    """
    shapes = [tensor.shape for tensor in call.inputs]
    if call.argument("reduce") is not None or () in shapes:
        return replicated(call)
    dim = call.dim("dim", 0)
    space = IndexSpace(call)
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


def _gather(call: Call) -> OperatorRule:
    """out[i, j] = self[index[i, j], j]: all elements of the index are independent."""
    source, index = (tensor.shape for tensor in call.inputs)
    if not source or not index:
        return replicated(call)
    dim = call.dim("dim", 0)
    space = IndexSpace(call)
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
    """Writes the next element of `source` where the mask is set, so nothing is sharded."""
    space = IndexSpace(call)
    dims = [space.fixed_dims(tensor.shape) for tensor in call.inputs]
    return space.rule(dims, [space.fixed_dims(call.outputs[0].shape)], linear=[{0, 2}])


def _index_select(call: Call) -> OperatorRule:
    source, index = (tensor.shape for tensor in call.inputs)
    if not source or not index:
        return replicated(call)
    dim = call.dim("dim", 0)
    space = IndexSpace(call)
    dims = space.free_dims(source, fixed={dim})
    place = space.free(index[0])
    after = (*dims[:dim], place, *dims[dim + 1 :])
    return space.rule([dims, (place,)], [after], linear=[{0}])


def _index_write(call: Call, *, adds: bool) -> OperatorRule:
    """Writes the rows of `source` into those of `self`: the other dims are independent.

    A sum over the rows contracts their letter, and adds `self` once.
    """
    shape = call.inputs[0].shape
    index = call.tensor("index")
    if not shape or index is None or not index.shape:
        return replicated(call)
    dim = call.dim("dim", 0)
    space = IndexSpace(call)
    dims = space.free_dims(shape, fixed={dim})
    place = (space.free if adds else space.fixed)(index.shape[0])
    source = (*dims[:dim], place, *dims[dim + 1 :])
    tensors, linear = [dims, (place,), source], [{0, 2}]
    if not adds:
        return space.rule(tensors, [dims], linear=linear)
    return space.rule(tensors, [dims], contracted=place, addends={0}, linear=linear)


def _embedding(call: Call) -> OperatorRule:
    """weight[v,h], ids[*] -> [*,h]: a product with one-hot rows, summed over v.

    A rank with a shard of the rows returns zeros for other ids (`Kernel.VOCABULARY`).
    `scale_grad_by_freq` counts ids, and so needs all of them.
    """
    if call.flag("sparse"):
        return replicated(call)
    weight, ids = call.inputs
    space = IndexSpace(call)
    if call.flag("scale_grad_by_freq"):
        rows, places = space.fixed(weight.shape[0]), space.fixed_dims(ids.shape)
    else:
        rows, places = space.in_order(space.free(weight.shape[0])), space.free_dims(ids.shape)
    columns = space.free(weight.shape[1])
    return space.rule(
        [(rows, columns), places], [(*places, columns)], contracted=rows, linear=[{0}]
    )


def _embedding_bag(call: Call) -> OperatorRule:
    """weight[v,h], ids[n], offsets[b] -> [b,h], and three integer tables.

    Bag lengths are data, so neither ids nor bags align with shards. The sum over the ids of a
    shard of the rows would be partial, but the tables would not, and a mean or a maximum needs
    the whole bag. Columns are independent; a maximum has a table entry for each.
    """
    if call.flag("sparse"):
        return replicated(call)
    weight, ids, offsets, *factors = call.inputs
    space = IndexSpace(call)
    rows, columns = space.fixed(weight.shape[0]), space.free(weight.shape[1])
    entries = space.fixed_dims(ids.shape)
    bags = space.fixed(call.outputs[0].shape[0])
    ends = bags if offsets.shape[0] == call.outputs[0].shape[0] else space.fixed(offsets.shape[0])
    tables = [space.fixed_dims(table.shape) for table in call.outputs[1:]]
    if call.integer("mode", _SUM) == _MAXIMUM:
        tables[-1] = (bags, columns)
    return space.rule(
        [(rows, columns), entries, (ends,), *[entries for _ in factors]],
        [(bags, columns), *tables],
        unaffected=(1, 2, 3),
    )


_LAST_WRITE = (
    "The dim that is written, and the indices: of two writes to one position the last one counts."
)

SPECS = (
    OperatorSpec(
        "embedding.default",
        _embedding,
        saves="indices",
        kernel=Kernel.VOCABULARY,
        examples="weight[v,h] indices:int64[b,s] -> [b,s,h]",
    ),
    OperatorSpec(
        "embedding_bag",
        _embedding_bag,
        saves="indices offsets out1 out2 out3 per_sample_weights weight:per_sample_weights",
        kernel=Kernel.BAGS,
        unsharded="Rows and bags: the lengths of bags are data, and the integer tables that come "
        "with a sum over rows cannot be partial.",
        examples="""
            embedding_bag.padding_idx: weight[v,h] indices:int64[n] offsets:int64[b] \
                scale_grad_by_freq=False mode=0 sparse=False per_sample_weights=None \
                include_last_offset=False padding_idx=-1 \
                -> [b,h] :int64[n] :int64[b] :int64[0]
        """,
    ),
    OperatorSpec(
        "index.Tensor", _index, saves="indices", examples="self[v,h] indices*:int64[b,s] -> [b,s,h]"
    ),
    OperatorSpec(
        "index_put.default",
        _index_put,
        saves="indices",
        unsharded=_LAST_WRITE,
        examples="self[n,h] indices*:int64[m] values[m,h] -> [n,h]",
    ),
    OperatorSpec(
        "index_select.default",
        _index_select,
        saves="index",
        examples="self[n,h] index:int64[m] dim=0 -> [m,h]",
    ),
    OperatorSpec(
        "index_add.default",
        partial(_index_write, adds=True),
        saves="index:source source:source",
        passes_gradient=addends(self=""),
        examples="self[n,h] index:int64[m] source[m,h] dim=0 -> [n,h]",
    ),
    OperatorSpec(
        "index_copy.default",
        partial(_index_write, adds=False),
        saves="index source:source",
        unsharded=_LAST_WRITE,
        examples="self[n,h] index:int64[m] source[m,h] dim=0 -> [n,h]",
    ),
    OperatorSpec(
        "gather.default",
        _gather,
        saves="self index",
        examples="self[n,c] index:int64[n,k] dim=1 -> [n,k]",
    ),
    OperatorSpec(
        "scatter",
        _scatter,
        saves="index",
        unsharded=_LAST_WRITE,
        examples="scatter.src: self[n,c] index:int64[n,k] src[n,k] dim=1 -> [n,c]",
    ),
    OperatorSpec(
        "scatter_add.default",
        partial(_scatter, adds=True),
        saves="index:src",
        passes_gradient=addends(self=""),
        examples="self[n,h] index:int64[m,h] src[m,h] dim=0 -> [n,h]",
    ),
    OperatorSpec(
        "masked_scatter.default",
        _masked_scatter,
        saves="mask",
        unsharded="The element that is written next depends on all of the mask before it.",
        examples="self[n] mask:bool[n] source[n] -> [n]",
    ),
)
