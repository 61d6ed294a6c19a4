"""Which tensors share memory: views, and the strides that decide whether a reshape is one.

Strides are in elements, one per dim; None stands for contiguous, which nearly all are.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from itertools import accumulate
from operator import mul

from autoshard.ops import attention, pointwise
from autoshard.ops.call import Call
from autoshard.ops.local_kernels import Kernel, kernel_for
from autoshard.ops.registry import is_view
from autoshard.ops.space import Shape

Strides = tuple[int, ...] | None
"""None for a contiguous tensor."""


def contiguous_strides(shape: Shape) -> tuple[int, ...]:
    """Strides of a contiguous tensor of this shape."""
    return tuple(accumulate(reversed(shape[1:]), mul, initial=1))[::-1] if shape else ()


def view_strides(
    call: Call, shape: Shape, strides: Strides, output_shapes: Sequence[Shape]
) -> tuple[Strides, ...] | None:
    """Strides of the outputs if they are the first input's memory; None if they are their own.

    Args:
        call: the call; its sizes are not looked at.
        shape: a rank's shape of the first input.
        strides: of the first input.
        output_shapes: a rank's shape of each output.
    """
    if not is_view(call.operator):
        return (strides,) * len(output_shapes) if _returns_its_input(call, strides) else None
    if kernel_for(call.operator).kind is Kernel.RESHAPE:
        found = reshaped_strides(tuple(shape), strides, tuple(output_shapes[0]))
        return None if found is _COPY else (found,)
    full = contiguous_strides(shape) if strides is None else strides
    after = _MOVES[call.operator.split(".")[1]](call, shape, full, output_shapes[0])
    return tuple(_normalised(after, output) for output in output_shapes)


_COPY: Strides = (-1,)


def passes_gradient(call: Call, position: int) -> bool:
    """Whether the gradient of an input is that of the output, seen differently.

    Then backward of the call makes no tensor for it: sums without broadcasting, joins, and
    views whose backward is a view.

    Args:
        call: the call.
        position: which input.
    """
    source, output = call.inputs[position], call.outputs[0]
    packet = call.operator.split(".")[1]
    if packet in ("view_as_real", "view_as_complex"):
        return True
    if source.dtype is not output.dtype:
        return False
    factor = _ADDING.get((packet, position))
    if factor is not None:
        return source.shape == output.shape and call.number(factor, 1) == 1
    return (
        packet in _PASSING
        or (packet in ("expand", "broadcast_to") and source.shape == output.shape)
        or kernel_for(call.operator).kind is Kernel.RESHAPE
        or _returns_its_input(call, None)
    )


_ADDING = {
    ("add", 0): "",
    ("add", 1): "alpha",
    ("sub", 0): "",
    ("addmm", 0): "beta",
    ("baddbmm", 0): "beta",
    ("scatter_add", 0): "",
    ("index_add", 0): "",
}
"""Addends by packet and position, and the argument that names their factor."""

_PASSING = frozenset(
    """alias cat clone contiguous lift_fresh_copy numpy_T permute positive stack sum swapaxes t
    transpose""".split()  # noqa: SIM905  a table of words
)


def _returns_its_input(call: Call, strides: Strides) -> bool:
    """ReshardingTable to what the input is already, and a dropout that drops nothing."""
    if call.operator in _RESHARDING:
        same = call.inputs[0].dtype is call.outputs[0].dtype
        return same and not call.flag("copy")
    if call.operator == "aten.contiguous.default":
        return strides is None
    return call.operator == "aten.dropout.default" and (
        not call.flag("train") or call.number("p", 0.5) == 0
    )


_RESHARDING = frozenset(
    {"aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten.type_as.default"}
)


def made_strides(
    call: Call, shapes: Sequence[Shape], strides: Sequence[Strides], output: Shape
) -> Strides:
    """Strides of an output that has memory of its own.

    What acts element by element follows its first input of the output's shape, as
    `TensorIterator` does, and fused attention the queries. All else is contiguous.

    Args:
        call: the call; its sizes are not looked at.
        shapes: a rank's shape of each input.
        strides: of each input.
        output: a rank's shape of the output.
    """
    if _follows_an_input(call.operator):
        first = next((s for s, shape in zip(strides, shapes, strict=True) if shape == output), None)
        if first is not None and 0 not in first:
            return _permuted(sorted(range(len(output)), key=lambda dim: -first[dim]), output)
    return None


@cache
def _follows_an_input(operator: str) -> bool:
    tables = (pointwise.RULES, attention.RULES)
    return any(operator in table or operator.rpartition(".")[0] in table for table in tables)


def _permuted(order: Sequence[int], shape: Shape) -> Strides:
    """Strides of a dense tensor whose dims lie in this order, outermost first."""
    dense = contiguous_strides([shape[dim] for dim in order])
    by_dim = dict(zip(order, dense, strict=True))
    return _normalised(tuple(by_dim[dim] for dim in range(len(shape))), shape)


_Move = Callable[[Call, Shape, tuple[int, ...], Shape], tuple[int, ...]]
"""Takes the call, the input's shape and strides, and the output's shape."""


def _swapped(first: str, second: str) -> _Move:
    def move(call: Call, shape: Shape, strides: tuple[int, ...], _: Shape) -> tuple[int, ...]:
        order = list(range(len(shape)))
        if order:
            a, b = call.dim(first, 0), call.dim(second, 0)
            order[a], order[b] = order[b], order[a]
        return tuple(strides[dim] for dim in order)

    return move


def _expanded(_: Call, shape: Shape, strides: tuple[int, ...], output: Shape) -> tuple[int, ...]:
    new = len(output) - len(shape)
    kept = (0 if shape[d] != output[new + d] else stride for d, stride in enumerate(strides))
    return (*(0 for _ in range(new)), *kept)


def _selected(call: Call, _: Shape, strides: tuple[int, ...], __: Shape) -> tuple[int, ...]:
    dim = call.dim("dim", 0)
    return strides[:dim] + strides[dim + 1 :]


def _sliced(call: Call, _: Shape, strides: tuple[int, ...], __: Shape) -> tuple[int, ...]:
    dim, step = call.dim("dim", 0), call.integer("step", 1)
    return tuple(stride * step if d == dim else stride for d, stride in enumerate(strides))


def _same(_: Call, __: Shape, strides: tuple[int, ...], ___: Shape) -> tuple[int, ...]:
    return strides


def _unfolded(call: Call, _: Shape, strides: tuple[int, ...], __: Shape) -> tuple[int, ...]:
    dim, step = call.dim("dimension", 0), call.integer("step", 1)
    moved = (stride * step if d == dim else stride for d, stride in enumerate(strides))
    return (*moved, strides[dim])


_MOVES: Mapping[str, _Move] = {
    "transpose": _swapped("dim0", "dim1"),
    "swapaxes": _swapped("axis0", "axis1"),
    "permute": lambda call, _, strides, __: tuple(strides[dim] for dim in call.integers("dims")),
    "t": lambda _, __, strides, ___: strides[::-1],
    "numpy_T": lambda _, __, strides, ___: strides[::-1],
    "expand": _expanded,
    "broadcast_to": _expanded,
    "select": _selected,
    "unbind": _selected,
    "slice": _sliced,
    "narrow": _same,
    "split": _same,
    "split_with_sizes": _same,
    "chunk": _same,
    "alias": _same,
    "detach": _same,
    "view_as_real": lambda _, __, strides, ___: (*(2 * stride for stride in strides), 1),
    "view_as_complex": lambda _, __, strides, ___: tuple(stride // 2 for stride in strides[:-1]),
    "real": lambda _, __, strides, ___: tuple(2 * stride for stride in strides),
    "unfold": _unfolded,
}
"""How the views that are no reshapes change strides, by packet."""


def _normalised(strides: tuple[int, ...], shape: Shape) -> Strides:
    return None if _is_contiguous(strides, shape) else strides


def _is_contiguous(strides: tuple[int, ...], shape: Shape) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


@lru_cache(maxsize=1 << 12)
def reshaped_strides(shape: tuple[int, ...], strides: Strides, target: tuple[int, ...]) -> Strides:
    """Strides of a reshape; `(-1,)` where it must copy.

    As `at::detail::computeStride`: dims that lie in one piece of memory can be cut anew.
    """
    if strides is None or 0 in shape:
        return None
    pieces: list[tuple[int, int]] = []  # elements and innermost stride of each piece
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if pieces and pieces[-1][1] == size * stride:
            pieces[-1] = (pieces[-1][0] * size, stride)
        else:
            pieces.append((size, stride))
    found: list[int] = []
    rest = list(target)
    for elements, stride in reversed(pieces):
        left, step = elements, stride
        while left > 1 or (rest and rest[-1] == 1):
            if not rest or left % rest[-1]:
                return _COPY
            size = rest.pop()
            found.append(step)
            left //= size
            step *= size
    found.extend(1 for _ in rest)
    return _normalised(tuple(reversed(found)), target)
