"""What may be kept of a call for backward: inputs, outputs, and what only autograd sees."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from autoshard.graph import DType
from autoshard.ops.call import Call


@dataclass(frozen=True, slots=True)
class Extra:
    """A tensor that only autograd sees, with dims of the call's own tensors.

    Attributes:
        dims: (tensor, dim) pairs whose sizes multiply; tensors count the call's inputs, then
            its outputs.
        itemsize: bytes of an element.
        times: a factor beside the sizes.
    """

    dims: tuple[tuple[int, int], ...]
    itemsize: int
    times: int = 1

    def nbytes(self, shapes: Sequence[Sequence[int]]) -> int:
        """Bytes, given the (local) shapes of the call's inputs, then of its outputs."""
        return self.times * self.itemsize * prod(shapes[tensor][dim] for tensor, dim in self.dims)


@dataclass(frozen=True, slots=True)
class Saved:
    """What a call keeps for backward.

    Attributes:
        inputs: positions in `Call.inputs` of the inputs that are kept.
        outputs: positions of the outputs that are kept.
        extras: what is kept beside them.
    """

    inputs: frozenset[int] = frozenset()
    outputs: frozenset[int] = frozenset()
    extras: tuple[Extra, ...] = ()


NOTHING = Saved()


def statistic(call: Call, dims: Sequence[int], *, times: int = 1) -> Extra:
    """A mean, a deviation or a sum of exponentials over the other dims of the first input."""
    itemsize = max(call.inputs[0].dtype.itemsize, DType.FLOAT32.itemsize)
    return Extra(tuple((0, dim) for dim in dims), itemsize, times)


def like(call: Call, tensor: int, itemsize: int) -> Extra:
    """A tensor of the shape of one of the call's, counted over inputs, then outputs."""
    rank = len((*call.inputs, *call.outputs)[tensor].shape)
    return Extra(tuple((tensor, dim) for dim in range(rank)), itemsize)
