"""Operators that only move elements: reshapes, permutations, slices and joins. All linear."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from itertools import chain
from math import gcd

from autoshard.graph import Tensor
from autoshard.ops.call import Call, Rule
from autoshard.ops.rule import Dims, OperatorRule
from autoshard.ops.space import Shape, Space, broadcast, replicated, touching


def _reshape(call: Call) -> OperatorRule:
    space = Space(call)
    before, after = _common_factors(space, call.inputs[0].shape, call.outputs[0].shape)
    return space.rule([before], [after], linear=[{0}])


def _common_factors(space: Space, before: Shape, after: Shape) -> tuple[Dims, Dims]:
    """Letters of two shapes of the same elements in the same order.

    Both shapes are read from the major end. What is left of the current dim on each side
    shares the greatest common divisor as a letter: a cut of it takes the same run of
    elements on both sides. Where the two are coprime, nothing below lines up until both
    sides have used up the same number of elements, and the letters in between are whole.
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
    space: Space,
    sides: tuple[list[list[str]], list[list[str]]],
    shapes: tuple[list[int], list[int]],
    left: list[int],
) -> None:
    """Give whole letters to dims until both sides have used up as many elements."""
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
    space = Space(call)
    dims = space.free_dims(call.inputs[0].shape)
    return space.rule([dims], [tuple(dims[dim] for dim in order)], linear=[{0}])


def _permute(call: Call) -> OperatorRule:
    order = call.integers("dims")
    return _permuted(call, [dim % len(order) for dim in order])


def _transpose(call: Call, *, first: str, second: str) -> OperatorRule:
    order = list(range(len(call.inputs[0].shape)))
    if order:
        a, b = call.dim(first, 0), call.dim(second, 0)
        order[a], order[b] = order[b], order[a]
    return _permuted(call, order)


def _reverse(call: Call) -> OperatorRule:
    return _permuted(call, range(len(call.inputs[0].shape))[::-1])


def _expand(call: Call) -> OperatorRule:
    """Dims that are new or were of size 1 have letters that only the output has."""
    space = Space(call)
    dims = space.free_dims(call.outputs[0].shape)
    return space.rule([broadcast(dims, call.inputs[0].shape)], [dims], linear=[{0}])


def _within(call: Call, *, name: str = "dim") -> OperatorRule:
    """Acts within the named dims, jointly linear in all inputs."""
    dims = call.dims(name) or {0}
    return touching(call, dims, linear=[range(len(call.inputs))])


def _split(call: Call) -> OperatorRule:
    """A dim is taken apart into pieces (`Kernel.SPLIT`)."""
    dim = call.dim("dim", 0)
    space = Space(call)
    whole, pieces = space.joined([tensor.shape[dim] for tensor in call.outputs])
    around = _around(space, call.inputs[0].shape, dim)
    return space.rule([around(whole)], map(around, pieces), linear=[{0}])


def _run(call: Call, start: int) -> OperatorRule:
    """A piece of a dim is taken, from `start` on (`Kernel.RUN`)."""
    before, after = call.inputs[0].shape, call.outputs[0].shape
    dim = call.dim("dim", 0)
    if not after[dim]:
        return touching(call, {dim}, linear=[{0}])
    space = Space(call)
    sizes = (start, after[dim], before[dim] - start - after[dim])
    whole, pieces = space.joined(sizes, taken={1})
    around = _around(space, before, dim)
    return space.rule([around(whole)], [around(pieces[1])], linear=[{0}])


def _around(space: Space, shape: Shape, dim: int) -> Callable[[tuple[str, ...]], Dims]:
    """Puts letters of one dim between new ones for the others."""
    before, after = space.free_dims(shape[:dim]), space.free_dims(shape[dim + 1 :])
    return lambda letters: (*before, letters, *after)


def _narrow(call: Call) -> OperatorRule:
    size = call.inputs[0].shape[call.dim("dim", 0)]
    return _run(call, call.integer("start", 0) % max(size, 1))


def _slice(call: Call) -> OperatorRule:
    """One element of every step, or a run of elements; else it acts within the dim."""
    before, after = call.inputs[0].shape, call.outputs[0].shape
    dim, step = call.dim("dim", 0), call.integer("step", 1)
    first = call.argument("start") or 0
    within = step == 1 or (isinstance(first, int) and 0 <= first < step)
    if before and before[dim] == after[dim] * step and within:
        space = Space(call)
        dims = space.free_dims(after)
        blocks = (*dims[:dim], (*dims[dim], *space.fixed(step)), *dims[dim + 1 :])
        return space.rule([blocks], [dims], linear=[{0}])
    if step == 1 and isinstance(first, int) and after[dim]:
        return _run(call, max(first, -before[dim]) % before[dim])
    return touching(call, {dim}, linear=[{0}])


def _flip(call: Call) -> OperatorRule:
    """Flips and rolls; a roll without dims acts on the flattened tensor."""
    every = range(len(call.inputs[0].shape))
    return touching(call, call.dims("dims") or every, linear=[{0}])


def _diff(call: Call) -> OperatorRule:
    return touching(call, {call.dim("dim", -1)}, linear=[range(len(call.inputs))])


def _pad(call: Call) -> OperatorRule:
    """Pads come in pairs, last dim first; filling with a number other than 0 is affine."""
    rank = len(call.inputs[0].shape)
    pads = call.integers("pad")
    dims = {rank - 1 - i // 2 for i, pad in enumerate(pads) if pad}
    filled = call.argument("mode", "constant") == "constant" and bool(call.argument("value"))
    return touching(call, dims, linear=() if filled else [{0}])


def _triangle(call: Call) -> OperatorRule:
    """A rank is told where the diagonal runs in its rows and columns (`Kernel.DIAGONAL`)."""
    space = Space(call)
    dims = space.free_dims(call.inputs[0].shape)
    for letters in dims[-2:]:
        space.in_order(letters)
    return space.rule([dims], [dims], linear=[{0}])


def _select(call: Call) -> OperatorRule:
    """One dim disappears."""
    dim = call.dim("dim", 0)
    space = Space(call)
    dims = space.free_dims(call.inputs[0].shape, fixed={dim})
    kept = dims[:dim] + dims[dim + 1 :]
    return space.rule([dims], [kept] * len(call.outputs), linear=[{0}])


def _stack(call: Call) -> OperatorRule:
    shape = call.outputs[0].shape
    dim = call.integer("dim", 0) % len(shape)
    space = Space(call)
    dims = space.free_dims(shape, fixed={dim})
    each = dims[:dim] + dims[dim + 1 :]
    return space.rule([each] * len(call.inputs), [dims], linear=[range(len(call.inputs))])


def _cat(call: Call) -> OperatorRule:
    """Tensors become pieces of a dim; empty ones may have one dim."""
    shape = call.outputs[0].shape
    dim = call.integer("dim", 0) % len(shape)
    filling = [i for i, t in enumerate(call.inputs) if len(t.shape) == len(shape) and t.shape[dim]]
    space = Space(call)
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
    """An output dim is (repeat, element); of a slice of the repeats a rank makes only those.

    See `Kernel.REPEAT`. Elements of a dim that is repeated stay whole.
    """
    before = call.inputs[0].shape
    repeats = call.integers("repeats")
    space = Space(call)
    times = [space.free(number) for number in repeats]
    new = len(repeats) - len(before)
    dims = tuple(
        space.free(size) if number == 1 else space.fixed(size)
        for size, number in zip(before, repeats[new:], strict=True)
    )
    repeated = ((*outer, *inner) for outer, inner in zip(times[new:], dims, strict=True))
    return space.rule([dims], [(*times[:new], *repeated)], linear=[{0}])


def _repeat_interleave(call: Call) -> OperatorRule:
    """Each element repeated next to itself: an output dim is (element, repeat).

    Without a dim the elements of the whole tensor are in one row.
    """
    if call.argument("output_size") is not None:
        return replicated(call)
    space = Space(call)
    dims = space.free_dims(call.inputs[0].shape)
    repeats = space.fixed(call.integer("repeats", 1))
    if call.argument("dim") is None:
        return space.rule([dims], [((*chain(*dims), *repeats),)], linear=[{0}])
    dim = call.dim("dim", 0)
    after = (*dims[:dim], (*dims[dim], *repeats), *dims[dim + 1 :])
    return space.rule([dims], [after], linear=[{0}])


def _meshgrid(call: Call) -> OperatorRule:
    """Rows a and columns b -> [a, b] each, or [b, a] for the indexing "xy"."""
    space = Space(call)
    dims = [space.free(tensor.numel) for tensor in call.inputs]
    grid = list(dims)
    if call.argument("indexing") == "xy":
        grid[:2] = reversed(grid[:2])
    inputs = [(d,) if tensor.shape else () for d, tensor in zip(dims, call.inputs, strict=True)]
    return space.rule(inputs, [tuple(grid)] * len(grid), linear=[range(len(grid))])


def _paired(call: Call) -> OperatorRule:
    """view_as_real and view_as_complex: a last dim of two numbers appears or disappears."""

    def letters(tensor: Tensor) -> Dims:
        return dims if tensor.dtype.value.startswith("complex") else (*dims, pair)

    tensors = (call.inputs[0], call.outputs[0])
    plain = next(t for t in tensors if t.dtype.value.startswith("complex"))
    space = Space(call)
    dims, pair = space.free_dims(plain.shape), space.fixed(2)
    return space.rule([letters(tensors[0])], [letters(tensors[1])], linear=[{0}])


def _real(call: Call) -> OperatorRule:
    """The real part of each number."""
    return touching(call, (), linear=[{0}])


def _unfold(call: Call) -> OperatorRule:
    """Windows on a dim, which overlap, so it stays whole; their elements are a new last dim."""
    shape, dim = call.outputs[0].shape, call.dim("dimension", 0)
    space = Space(call)
    around = _around(space, call.inputs[0].shape, dim)
    before, after = space.fixed(call.inputs[0].shape[dim]), space.fixed(shape[dim])
    windows = (*around(after), space.fixed(shape[-1]))
    return space.rule([around(before)], [windows], linear=[{0}])


_swap: Rule = partial(_transpose, first="dim0", second="dim1")
_swap_axes: Rule = partial(_transpose, first="axis0", second="axis1")

_VIEWS: Mapping[str, Rule] = {
    "aten.reshape.default": _reshape,
    "aten.view.default": _reshape,
    "aten._unsafe_view.default": _reshape,
    "aten.flatten.using_ints": _reshape,
    "aten.unflatten.int": _reshape,
    "aten.squeeze": _reshape,
    "aten.unsqueeze.default": _reshape,
    "aten.transpose.int": _swap,
    "aten.swapaxes.default": _swap_axes,
    "aten.permute.default": _permute,
    "aten.t.default": _reverse,
    "aten.numpy_T.default": _reverse,
    "aten.expand.default": _expand,
    "aten.broadcast_to.default": _expand,
    "aten.slice.Tensor": _slice,
    "aten.narrow.default": _narrow,
    "aten.select.int": _select,
    "aten.unbind.int": _select,
    "aten.split": _split,
    "aten.split_with_sizes.default": _split,
    "aten.chunk.default": _split,
    "aten.view_as_real.default": _paired,
    "aten.view_as_complex.default": _paired,
    "aten.real.default": _real,
    "aten.unfold.default": _unfold,
}
"""Operators that copy nothing."""

RULES: Mapping[str, Rule] = {
    **_VIEWS,
    "aten.cat.default": _cat,
    "aten.stack.default": _stack,
    "aten.pad.default": _pad,
    "aten.constant_pad_nd.default": _pad,
    "aten.diff.default": _diff,
    "aten.roll.default": _flip,
    "aten.flip.default": _flip,
    "aten.tril.default": _triangle,
    "aten.triu.default": _triangle,
    "aten.repeat.default": _repeat,
    "aten.repeat_interleave.self_int": _repeat_interleave,
    "aten.meshgrid": _meshgrid,
}

JOINING = frozenset(
    {"aten.split", "aten.split_with_sizes", "aten.chunk", "aten.slice", "aten.narrow", "aten.cat"}
)
"""Packets that take a dim apart into pieces, or put it together."""

SELECTING = frozenset({"aten.select", "aten.unbind"})
"""Packets that take a dim apart into its elements."""

VIEWS = frozenset(_VIEWS) | {"aten.alias", "aten.detach"}
"""Operators, or packets whose overloads all, return the memory of their input."""
