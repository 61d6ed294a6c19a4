"""Strides of tensors, in elements."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from operator import mul

Shape = Sequence[int]

Strides = tuple[int, ...] | None
"""Strides of a tensor; None for a contiguous one (the usual case)."""

FullStrides = tuple[int, ...]


def contiguous_strides(shape: Shape) -> FullStrides:
    """Strides of a contiguous tensor of this shape."""
    return tuple(accumulate(reversed(shape[1:]), mul, initial=1))[::-1] if shape else ()


def normalised(strides: FullStrides, shape: Shape) -> Strides:
    """The strides, or None if they are those of a contiguous tensor."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1:
            if stride != expected:
                return strides
            expected *= size
    return None


def permuted(order: Sequence[int], shape: Shape) -> Strides:
    """Strides of a dense tensor with its dims in this order in memory, outermost first."""
    dense = contiguous_strides([shape[dim] for dim in order])
    by_dim = dict(zip(order, dense, strict=True))
    return normalised(tuple(by_dim[dim] for dim in range(len(shape))), shape)


@lru_cache(maxsize=1 << 12)
def reshaped_strides(
    shape: tuple[int, ...], strides: FullStrides, target: tuple[int, ...]
) -> FullStrides | None:
    """Strides of a reshape; None if it must copy.

    As `at::detail::computeStride`: dims that are contiguous in memory can be merged and split.
    """
    if 0 in shape or normalised(strides, shape) is None:
        return contiguous_strides(target)
    runs: list[tuple[int, int]] = []  # elements and innermost stride of each contiguous run
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if runs and runs[-1][1] == size * stride:
            runs[-1] = (runs[-1][0] * size, stride)
        else:
            runs.append((size, stride))
    found: list[int] = []
    rest = list(target)
    for elements, stride in reversed(runs):
        left, step = elements, stride
        while left > 1 or (rest and rest[-1] == 1):
            if not rest or left % rest[-1]:
                return None
            size = rest.pop()
            found.append(step)
            left //= size
            step *= size
    found.extend(1 for _ in rest)
    return tuple(reversed(found))
