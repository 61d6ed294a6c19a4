"""Views and other operators that only rearrange elements; all are linear."""

from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import chain
from math import gcd

from autoshard.graph import Tensor
from autoshard.ops.pointwise import linear_in_self
from autoshard.ops.rules.index_space import IndexSpace, along_dims, broadcast, replicated
from autoshard.ops.rules.rule import Dims, OperatorRule
from autoshard.ops.rules.spec import (
    Call,
    Gradients,
    Kernel,
    OperatorSpec,
    SavedByAutograd,
    same_dtype,
    saved_by_name,
)
from autoshard.ops.rules.strides import FullStrides, Shape, reshaped_strides


def _reshape(call: Call) -> OperatorRule:
    space = IndexSpace(call)
    before, after = _common_factors(space, call.inputs[0].shape, call.outputs[0].shape)
    return space.rule([before], [after], linear=[{0}])


def _common_factors(space: IndexSpace, before: Shape, after: Shape) -> tuple[Dims, Dims]:
    """Letters of two shapes of the same elements in the same order.

    Both shapes are read from the major end. The greatest common divisor of what is left of the
    current dim on each side becomes a letter: a shard of it is the same range of elements on both
    sides. If the two are coprime, dims do not align until both sides have covered the same number
    of elements, and the letters up to there stay whole.
    """
    if 0 in before or 0 in after:
        return space.fixed_dims(before), space.fixed_dims(after)
    sides: tuple[list[list[str]], list[list[str]]] = ([], [])
    shapes = (list(reversed(before)), list(reversed(after)))
    left = [1, 1]
    while any(shapes) or left != [1, 1]:
        for side in (0, 1):
            if left[side] == 1 and shapes[side]:
                left[side] = shapes[side].pop()
                sides[side].append([])
        common = gcd(*left)
        if common > 1:
            letters = space.free(common)
            for side in (0, 1):
                sides[side][-1].extend(letters)
                left[side] //= common
        elif 1 not in left:
            _skip_misaligned(space, sides, shapes, left)
    before_dims, after_dims = (tuple(tuple(dim) for dim in side) for side in sides)
    return before_dims, after_dims


def _skip_misaligned(
    space: IndexSpace,
    sides: tuple[list[list[str]], list[list[str]]],
    shapes: tuple[list[int], list[int]],
    left: list[int],
) -> None:
    """Allocate whole letters until both sides have covered the same number of elements."""
    used = list(left)
    for side in (0, 1):
        sides[side][-1].extend(space.fixed(left[side]))
    while used[0] != used[1]:
        side = 0 if used[0] < used[1] else 1
        size = shapes[side].pop()
        used[side] *= size
        sides[side].append(list(space.fixed(size)))
    left[:] = [1, 1]


def _permuted(call: Call, order: Collection[int]) -> OperatorRule:
    space = IndexSpace(call)
    dims = space.free_dims(call.inputs[0].shape)
    return space.rule([dims], [tuple(dims[dim] for dim in order)], linear=[{0}])


def _permute(call: Call) -> OperatorRule:
    order = call.integers("dims")
    return _permuted(call, [dim % len(order) for dim in order])


def _transpose(call: Call) -> OperatorRule:
    return _permuted(call, _swapped_order(call))


def _swapped_order(call: Call) -> list[int]:
    """The order of dims after a transpose; its last two arguments are the dims."""
    order = list(range(len(call.inputs[0].shape)))
    if order:
        a, b = (call.dim(name, 0) for name, _ in call.arguments[-2:])
        order[a], order[b] = order[b], order[a]
    return order


def _reverse(call: Call) -> OperatorRule:
    return _permuted(call, range(len(call.inputs[0].shape))[::-1])


def _expand(call: Call) -> OperatorRule:
    """New dims, and those that were of size 1, have letters that only the output has."""
    space = IndexSpace(call)
    dims = space.free_dims(call.outputs[0].shape)
    return space.rule([broadcast(dims, call.inputs[0].shape)], [dims], linear=[{0}])


def _split(call: Call) -> OperatorRule:
    """A dim is split into pieces (`Kernel.SPLIT`)."""
    dim = call.dim("dim", 0)
    space = IndexSpace(call)
    whole, pieces = space.joined([tensor.shape[dim] for tensor in call.outputs])
    around = _around(space, call.inputs[0].shape, dim)
    return space.rule([around(whole)], map(around, pieces), linear=[{0}])


def _range(call: Call, start: int) -> OperatorRule:
    """A range of a dim, from `start` on (`Kernel.RANGE`)."""
    before, after = call.inputs[0].shape, call.outputs[0].shape
    dim = call.dim("dim", 0)
    if not after[dim]:
        return along_dims(call, {dim}, linear=[{0}])
    space = IndexSpace(call)
    sizes = (start, after[dim], before[dim] - start - after[dim])
    whole, pieces = space.joined(sizes, taken={1})
    around = _around(space, before, dim)
    return space.rule([around(whole)], [around(pieces[1])], linear=[{0}])


def _around(space: IndexSpace, shape: Shape, dim: int) -> Callable[[tuple[str, ...]], Dims]:
    """A function that adds new letters for the other dims to the letters of one dim."""
    before, after = space.free_dims(shape[:dim]), space.free_dims(shape[dim + 1 :])
    return lambda letters: (*before, letters, *after)


def _narrow(call: Call) -> OperatorRule:
    size = call.inputs[0].shape[call.dim("dim", 0)]
    return _range(call, call.integer("start", 0) % max(size, 1))


def _slice(call: Call) -> OperatorRule:
    """One element of every step, or a range; otherwise the dim stays whole."""
    before, after = call.inputs[0].shape, call.outputs[0].shape
    dim, step = call.dim("dim", 0), call.integer("step", 1)
    first = call.argument("start") or 0
    within = step == 1 or (isinstance(first, int) and 0 <= first < step)
    if before and before[dim] == after[dim] * step and within:
        space = IndexSpace(call)
        dims = space.free_dims(after)
        blocks = (*dims[:dim], (*dims[dim], *space.fixed(step)), *dims[dim + 1 :])
        return space.rule([blocks], [dims], linear=[{0}])
    if step == 1 and isinstance(first, int) and after[dim]:
        return _range(call, max(first, -before[dim]) % before[dim])
    return along_dims(call, {dim}, linear=[{0}])


def _flip(call: Call) -> OperatorRule:
    """Flips and rolls; a roll without dims works on the flattened tensor."""
    every = range(len(call.inputs[0].shape))
    return along_dims(call, call.dims("dims") or every, linear=[{0}])


def _diff(call: Call) -> OperatorRule:
    return along_dims(call, {call.dim("dim", -1)}, linear=[range(len(call.inputs))])


def _pad(call: Call) -> OperatorRule:
    """Pads are pairs, last dim first; filling with a number other than 0 is affine."""
    rank = len(call.inputs[0].shape)
    pads = call.integers("pad")
    dims = {rank - 1 - i // 2 for i, pad in enumerate(pads) if pad}
    filled = call.argument("mode", "constant") == "constant" and bool(call.argument("value"))
    return along_dims(call, dims, linear=() if filled else [{0}])


def _triangle(call: Call) -> OperatorRule:
    """Ranks need the diagonal of their rows and columns (`Kernel.DIAGONAL`)."""
    space = IndexSpace(call)
    dims = space.free_dims(call.inputs[0].shape)
    for letters in dims[-2:]:
        space.in_order(letters)
    return space.rule([dims], [dims], linear=[{0}])


def _select(call: Call) -> OperatorRule:
    """One dim is removed."""
    dim = call.dim("dim", 0)
    space = IndexSpace(call)
    dims = space.free_dims(call.inputs[0].shape, fixed={dim})
    kept = dims[:dim] + dims[dim + 1 :]
    return space.rule([dims], [kept] * len(call.outputs), linear=[{0}])


def _stack(call: Call) -> OperatorRule:
    shape = call.outputs[0].shape
    dim = call.integer("dim", 0) % len(shape)
    space = IndexSpace(call)
    dims = space.free_dims(shape, fixed={dim})
    each = dims[:dim] + dims[dim + 1 :]
    return space.rule([each] * len(call.inputs), [dims], linear=[range(len(call.inputs))])


def _cat(call: Call) -> OperatorRule:
    """Tensors become pieces of a dim; empty ones may be 1-D."""
    shape = call.outputs[0].shape
    dim = call.integer("dim", 0) % len(shape)
    filling = [i for i, t in enumerate(call.inputs) if len(t.shape) == len(shape) and t.shape[dim]]
    space = IndexSpace(call)
    whole, pieces = space.joined([call.inputs[i].shape[dim] for i in filling])
    around = _around(space, shape, dim)
    by_input = dict(zip(filling, pieces, strict=True))

    def letters(i: int, tensor: Tensor) -> Dims:
        if len(tensor.shape) != len(shape):
            return space.fixed_dims(tensor.shape)
        return around(by_input.get(i, ()))

    inputs = [letters(i, tensor) for i, tensor in enumerate(call.inputs)]
    return space.rule(inputs, [around(whole)], linear=[filling])


def _repeat(call: Call) -> OperatorRule:
    """An output dim is (repeat, element): the repeats may be sharded (`Kernel.REPEAT`).

    Elements of a dim that is repeated stay whole.
    """
    before = call.inputs[0].shape
    repeats = call.integers("repeats")
    space = IndexSpace(call)
    times = [space.free(number) for number in repeats]
    new = len(repeats) - len(before)
    dims = tuple(
        space.free(size) if number == 1 else space.fixed(size)
        for size, number in zip(before, repeats[new:], strict=True)
    )
    repeated = ((*outer, *inner) for outer, inner in zip(times[new:], dims, strict=True))
    return space.rule([dims], [(*times[:new], *repeated)], linear=[{0}])


def _repeat_interleave(call: Call) -> OperatorRule:
    """Each element is repeated consecutively: an output dim is (element, repeat).

    Without a dim the tensor is flattened.
    """
    if call.argument("output_size") is not None:
        return replicated(call)
    space = IndexSpace(call)
    dims = space.free_dims(call.inputs[0].shape)
    repeats = space.fixed(call.integer("repeats", 1))
    if call.argument("dim") is None:
        return space.rule([dims], [((*chain(*dims), *repeats),)], linear=[{0}])
    dim = call.dim("dim", 0)
    after = (*dims[:dim], (*dims[dim], *repeats), *dims[dim + 1 :])
    return space.rule([dims], [after], linear=[{0}])


def _meshgrid(call: Call) -> OperatorRule:
    """Rows a and columns b -> [a, b] each, or [b, a] for the indexing "xy"."""
    space = IndexSpace(call)
    dims = [space.free(tensor.numel) for tensor in call.inputs]
    grid = list(dims)
    if call.argument("indexing") == "xy":
        grid[:2] = reversed(grid[:2])
    inputs = [(d,) if tensor.shape else () for d, tensor in zip(dims, call.inputs, strict=True)]
    return space.rule(inputs, [tuple(grid)] * len(grid), linear=[range(len(grid))])


def _paired(call: Call) -> OperatorRule:
    """view_as_real and view_as_complex: a last dim of two numbers is added or removed."""

    def letters(tensor: Tensor) -> Dims:
        return dims if tensor.dtype.value.startswith("complex") else (*dims, pair)

    tensors = (call.inputs[0], call.outputs[0])
    plain = next(t for t in tensors if t.dtype.value.startswith("complex"))
    space = IndexSpace(call)
    dims, pair = space.free_dims(plain.shape), space.fixed(2)
    return space.rule([letters(tensors[0])], [letters(tensors[1])], linear=[{0}])


def _real(call: Call) -> OperatorRule:
    """The real part of each number."""
    return along_dims(call, (), linear=[{0}])


def _unfold(call: Call) -> OperatorRule:
    """Overlapping windows on a dim, which stays whole; their elements are a new last dim."""
    shape, dim = call.outputs[0].shape, call.dim("dimension", 0)
    space = IndexSpace(call)
    around = _around(space, call.inputs[0].shape, dim)
    before, after = space.fixed(call.inputs[0].shape[dim]), space.fixed(shape[dim])
    windows = (*around(after), space.fixed(shape[-1]))
    return space.rule([around(before)], [windows], linear=[{0}])


def _same_strides(_: Call, __: Shape, strides: FullStrides, ___: Shape) -> FullStrides:
    return strides


def _reshaped(_: Call, shape: Shape, strides: FullStrides, output: Shape) -> FullStrides | None:
    """None if the reshape must copy."""
    return reshaped_strides(tuple(shape), strides, tuple(output))


def _swapped_strides(call: Call, _: Shape, strides: FullStrides, __: Shape) -> FullStrides:
    return tuple(strides[dim] for dim in _swapped_order(call))


def _permuted_strides(call: Call, _: Shape, strides: FullStrides, __: Shape) -> FullStrides:
    return tuple(strides[dim] for dim in call.integers("dims"))


def _reversed_strides(_: Call, __: Shape, strides: FullStrides, ___: Shape) -> FullStrides:
    return strides[::-1]


def _expanded_strides(_: Call, shape: Shape, strides: FullStrides, output: Shape) -> FullStrides:
    """0 along dims that repeat one element."""
    new = len(output) - len(shape)
    kept = (0 if shape[d] != output[new + d] else stride for d, stride in enumerate(strides))
    return (*(0 for _ in range(new)), *kept)


def _selected_strides(call: Call, _: Shape, strides: FullStrides, __: Shape) -> FullStrides:
    dim = call.dim("dim", 0)
    return strides[:dim] + strides[dim + 1 :]


def _sliced_strides(call: Call, _: Shape, strides: FullStrides, __: Shape) -> FullStrides:
    dim, step = call.dim("dim", 0), call.integer("step", 1)
    return tuple(stride * step if d == dim else stride for d, stride in enumerate(strides))


def _unfolded_strides(call: Call, _: Shape, strides: FullStrides, __: Shape) -> FullStrides:
    dim, step = call.dim("dimension", 0), call.integer("step", 1)
    moved = (stride * step if d == dim else stride for d, stride in enumerate(strides))
    return (*moved, strides[dim])


def _strides_as_real(_: Call, __: Shape, strides: FullStrides, ___: Shape) -> FullStrides:
    return (*(2 * stride for stride in strides), 1)


def _strides_as_complex(_: Call, __: Shape, strides: FullStrides, ___: Shape) -> FullStrides:
    return tuple(stride // 2 for stride in strides[:-1])


def _strides_of_real_parts(_: Call, __: Shape, strides: FullStrides, ___: Shape) -> FullStrides:
    return tuple(2 * stride for stride in strides)


def _same_shape(call: Call, position: int) -> bool:
    same = call.inputs[position].shape == call.outputs[0].shape
    return same and same_dtype(call, position)


def _always(_: Call, __: int) -> bool:
    return True


def _pad_saves(call: Call, gradients: Gradients) -> SavedByAutograd:
    """The input, unless it fills with a constant."""
    names = "" if call.argument("mode", "constant") == "constant" else "self"
    return saved_by_name(names, call, gradients)


_HALVES = "self[b,(2 h)] -> [b,h] [b,h]"

_VIEWS = (
    OperatorSpec(
        """
            reshape.default view.default _unsafe_view.default flatten.using_ints unflatten.int
            squeeze unsqueeze.default
        """,
        _reshape,
        saves="",
        strides=_reshaped,
        passes_gradient=same_dtype,
        kernel=Kernel.RESHAPE,
        examples="""
            self[b,s,(h d)] shape=(b,s,h,d) -> [b,s,h,d]
            self[b,s,h] shape=(b*s,h) -> [(b s),h]
            unsqueeze.default: self[b,h] dim=1 -> [b,1,h]
            squeeze.dim: self[b,1,h] dim=1 -> [b,h]
        """,
    ),
    OperatorSpec(
        "transpose.int swapaxes.default",
        _transpose,
        saves="",
        strides=_swapped_strides,
        passes_gradient=same_dtype,
        examples="self[b,s,h,d] dim0=1 dim1=2 -> [b,h,s,d]",
    ),
    OperatorSpec(
        "permute.default",
        _permute,
        saves="",
        strides=_permuted_strides,
        passes_gradient=same_dtype,
        examples="self[b,c,x] dims=(2,0,1) -> [x,b,c]",
    ),
    OperatorSpec(
        "t.default numpy_T.default",
        _reverse,
        saves="",
        strides=_reversed_strides,
        passes_gradient=same_dtype,
        examples="self[n,k] -> [k,n]",
    ),
    OperatorSpec(
        "expand.default broadcast_to.default",
        _expand,
        saves="",
        strides=_expanded_strides,
        passes_gradient=_same_shape,
        kernel=Kernel.RESIZE,
        kernel_argument="size",
        examples="self[b,g,1,s,d] size=(b,g,m,s,d) -> [b,g,m,s,d]",
    ),
    OperatorSpec(
        "slice.Tensor",
        _slice,
        saves="",
        strides=_sliced_strides,
        kernel=Kernel.RANGE,
        examples="""
            self[b,s,h] dim=1 start=0 end=1 -> [b,1,h]
            self[b,(x 2),h] dim=1 start=1 step=2 -> [b,x,h]
        """,
    ),
    OperatorSpec(
        "narrow.default",
        _narrow,
        saves="",
        strides=_same_strides,
        kernel=Kernel.RANGE,
        examples="self[b,s,h] dim=1 start=1 length=2 -> [b,2,h]",
    ),
    OperatorSpec(
        "select.int unbind.int",
        _select,
        saves="",
        strides=_selected_strides,
        examples="""
            self[b,s,h] dim=1 index=0 -> [b,h]
            unbind.int: self[2,b,h] -> [b,h] [b,h]
        """,
    ),
    OperatorSpec(
        "split split_with_sizes.default chunk.default",
        _split,
        saves="",
        strides=_same_strides,
        kernel=Kernel.SPLIT,
        examples="""
            split.Tensor: self[b,(2 h)] split_size=h dim=1 -> [b,h] [b,h]
            split_with_sizes.default: self[b,(2 h)] split_sizes=(h,h) dim=1 -> [b,h] [b,h]
            chunk.default: self[b,(2 h)] chunks=2 dim=1 -> [b,h] [b,h]
        """,
    ),
    OperatorSpec(
        "view_as_complex.default",
        _paired,
        saves="",
        strides=_strides_as_complex,
        passes_gradient=_always,
        examples="self[b,s,d,2] -> :complex64[b,s,d]",
    ),
    OperatorSpec(
        "view_as_real.default",
        _paired,
        saves="",
        strides=_strides_as_real,
        passes_gradient=_always,
        examples="self:complex64[b,s,d] -> [b,s,d,2]",
    ),
    OperatorSpec(
        "real.default",
        _real,
        saves="",
        strides=_strides_of_real_parts,
        examples="self:complex64[b,s,d] -> [b,s,d]",
    ),
    OperatorSpec(
        "unfold.default",
        _unfold,
        saves="",
        strides=_unfolded_strides,
        unsharded="The dim that windows slide along.",
        examples="self[b,16,h] dimension=1 size=4 step=2 -> [b,7,h,4]",
    ),
    OperatorSpec(
        "alias", linear_in_self, saves="", strides=_same_strides, passes_gradient=same_dtype
    ),
    OperatorSpec("detach", linear_in_self, saves="", strides=_same_strides),
)

SPECS = (
    *(replace(spec, is_view=True) for spec in _VIEWS),
    OperatorSpec(
        "cat.default",
        _cat,
        saves="",
        passes_gradient=same_dtype,
        examples="tensors*[b,s,h] tensors*[b,s,h] dim=2 -> [b,s,(2 h)]",
    ),
    OperatorSpec(
        "stack.default",
        _stack,
        saves="",
        passes_gradient=same_dtype,
        examples="tensors*[b,h] tensors*[b,h] dim=1 -> [b,2,h]",
    ),
    OperatorSpec("pad.default", _pad, saves=_pad_saves, examples="self[b,s] pad=(0,1) -> [b,s+1]"),
    OperatorSpec("constant_pad_nd.default", _pad, saves=""),
    OperatorSpec("diff.default", _diff, saves="", examples="self[b,s+1] -> [b,s]"),
    OperatorSpec(
        "flip.default roll.default",
        _flip,
        saves="",
        examples="""
            self[b,s] dims=(1,) -> [b,s]
            roll.default: self[b,x,h] shifts=(1,) dims=(1,) -> [b,x,h]
        """,
    ),
    OperatorSpec(
        "tril.default triu.default",
        _triangle,
        saves="",
        kernel=Kernel.DIAGONAL,
        kernel_argument="diagonal",
        examples="self[b,s,t] -> [b,s,t]",
    ),
    OperatorSpec(
        "repeat.default",
        _repeat,
        saves="",
        kernel=Kernel.REPEAT,
        kernel_argument="repeats",
        examples="self[1,q,h] repeats=(b,1,1) -> [b,q,h]",
    ),
    OperatorSpec(
        "repeat_interleave.self_int",
        _repeat_interleave,
        saves="",
        examples="self[b,g,s] repeats=m dim=1 -> [b,(g m),s]",
    ),
    OperatorSpec(
        "meshgrid",
        _meshgrid,
        saves="",
        examples="meshgrid.indexing: tensors*[x] tensors*[y] indexing='ij' -> [x,y] [x,y]",
    ),
)

SELECTING = frozenset({"aten.select", "aten.unbind"})
"""Packets that split a dim into its elements."""
