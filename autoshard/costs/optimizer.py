"""Optimizers: bytes of their state, and seconds of the local update."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from autoshard.errors import OptionError
from autoshard.graph import DType
from autoshard.mesh import Device


class Optimizer(StrEnum):
    """Optimizers whose state is known (as in `torch.optim`)."""

    NONE = "none"
    SGD = "sgd"
    SGD_MOMENTUM = "sgd-momentum"
    ADAM = "adam"
    ADAMW = "adamw"
    ADAFACTOR = "adafactor"


_FULL_STATES = {
    Optimizer.NONE: 0,
    Optimizer.SGD: 0,
    Optimizer.SGD_MOMENTUM: 1,
    Optimizer.ADAM: 2,
    Optimizer.ADAMW: 2,
    Optimizer.ADAFACTOR: 0,
}
"""Number of state tensors with the shape of the parameter."""

_FOREACH_PASSES = {
    Optimizer.SGD_MOMENTUM: (2, 1, 5),
    Optimizer.ADAM: (2, 2, 14),
    Optimizer.ADAMW: (4, 2, 14),
}
"""Reads and writes of the updated values, of the gradient, and of one state tensor with its
temporaries, by PyTorch's foreach implementations; of other optimizers as by one fused pass."""

_CLIPPING_PASSES = 3
"""Reads and writes of the gradient by `clip_grad_norm_`: its norm, then a product in place, which
runs even if nothing is clipped."""

_GRADIENT_READS = {Optimizer.ADAFACTOR: 2}
"""Number of passes over the gradient if more than one: statistics, then the update."""


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """An optimizer and the element types of its state.

    Attributes:
        name: the optimizer.
        state_dtype: element type of the state; None for that of the updated values (master weights
            if there are any, else the parameter).
        master_weights: True if parameters narrower than float32 have a float32 copy that the
            optimizer updates.
        foreach: True if each operation of the update is a pass over all parameters, as with
            `foreach=True` in PyTorch, instead of one pass for all (`fused=True`).
        clips: True if gradients are scaled to a norm before the update.
    """

    name: Optimizer = Optimizer.ADAMW
    state_dtype: DType | None = None
    master_weights: bool = False
    foreach: bool = False
    clips: bool = False

    @classmethod
    def named(cls, name: str) -> "OptimizerSpec":
        """Return the optimizer with a name, its state in the parameters' element type.

        Raises:
            OptionError: the name is unknown; the message lists all names.
        """
        try:
            return cls(Optimizer(name.lower()))
        except ValueError:
            known = ", ".join(Optimizer)
            raise OptionError(f"optimizer {name!r} is unknown; choose one of {known}") from None

    def master_nbytes(self, shape: Sequence[int], dtype: DType) -> int:
        """Bytes of the float32 master copy of a parameter shard."""
        return prod(shape) * DType.FLOAT32.itemsize if self._has_master(dtype) else 0

    def state_nbytes(self, shape: Sequence[int], dtype: DType) -> int:
        """Bytes of the optimizer state of a parameter shard, without the master copy.

        Adafactor has one mean per row and one per column of the last two dims, and one value per
        element of a vector. Step counters are not counted.
        """
        default = DType.FLOAT32 if self._has_master(dtype) else dtype
        return self._state_elements(shape) * (self.state_dtype or default).itemsize

    def _has_master(self, dtype: DType) -> bool:
        return (
            self.master_weights
            and self.name is not Optimizer.NONE
            and dtype.itemsize < DType.FLOAT32.itemsize
        )

    def _state_elements(self, shape: Sequence[int]) -> int:
        if self.name is Optimizer.ADAFACTOR:
            if len(shape) < 2:  # noqa: PLR2004  a matrix has rows and columns
                return prod(shape)
            *batch, rows, columns = shape
            return prod(batch) * (rows + columns)
        return _FULL_STATES[self.name] * prod(shape)


def optimizer_time(
    optimizer: OptimizerSpec, shape: Sequence[int], dtype: DType, device: Device
) -> float:
    """Seconds of the local update of a parameter shard.

    Updates are bound by memory: the gradient is read, the parameter and each state are read and
    written (Adam reads p, g, m, v and writes p, m, v). With master weights, the master copy is read
    and written, and the parameter is only written. Foreach implementations read and write the
    same tensors several times (torch/optim/adam.py). Kernel launches are not counted: foreach and
    fused optimizers update all parameters in a few kernels. Clipping by norm is part of the update;
    its all-reduce of one number is not counted.

    Args:
        optimizer: the optimizer.
        shape: shape of the shard.
        dtype: element type of parameter and gradient.
        device: device of the rank.
    """
    if optimizer.name is Optimizer.NONE:
        return 0.0
    parameter = prod(shape) * dtype.itemsize
    master = optimizer.master_nbytes(shape, dtype)
    copies = parameter if master else 0
    states = max(_FULL_STATES[optimizer.name], 1)
    default = 2, _GRADIENT_READS.get(optimizer.name, 1), 2 * states
    passes = _FOREACH_PASSES.get(optimizer.name, default) if optimizer.foreach else default
    values = passes[0] * (master or parameter) + copies
    gradient = (passes[1] + (_CLIPPING_PASSES if optimizer.clips else 0)) * parameter
    state = passes[2] * optimizer.state_nbytes(shape, dtype) / states
    return (values + gradient + state) / device.stream_bandwidth
