"""What optimizers keep per parameter, and how long their local update takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from autoshard.errors import OptionError
from autoshard.graph import DType
from autoshard.mesh import Device


class Optimizer(StrEnum):
    """Optimizers whose state is known, by what `torch.optim` keeps for them."""

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
"""Tensors of the parameter's shape that an optimizer keeps."""

_GRADIENT_READS = {Optimizer.ADAFACTOR: 2}
"""Passes over the gradient where it takes more than one: statistics first, then the update."""


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """An optimizer and how it keeps its state.

    Attributes:
        name: which optimizer.
        state_dtype: element type of the state; None for that of the values it updates, the
            master weights where there are any and the parameter otherwise.
        master_weights: whether parameters narrower than float32 have a float32 copy that the
            optimizer updates.
    """

    name: Optimizer = Optimizer.ADAMW
    state_dtype: DType | None = None
    master_weights: bool = False

    @classmethod
    def named(cls, name: str) -> "OptimizerSpec":
        """The optimizer of that name, its state in the parameters' element type.

        Raises:
            OptionError: there is no such optimizer; the message lists those there are.
        """
        try:
            return cls(Optimizer(name.lower()))
        except ValueError:
            known = ", ".join(Optimizer)
            raise OptionError(f"optimizer {name!r} is unknown; choose one of {known}") from None

    def master_nbytes(self, shape: Sequence[int], dtype: DType) -> int:
        """Bytes of the float32 copy of one rank's slice of a parameter."""
        return prod(shape) * DType.FLOAT32.itemsize if self._has_master(dtype) else 0

    def state_nbytes(self, shape: Sequence[int], dtype: DType) -> int:
        """Bytes of the optimizer's own state for one rank's slice, without the master copy.

        Adafactor keeps a mean per row and one per column over the last two dims, and one
        element each for a vector. Step counters are a few bytes and not counted.
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
    """Seconds of the local update of one rank's slice of a parameter.

    Updates are bound by memory: the gradient is read, the parameter and each state are read
    and written (Adam reads p, g, m, v and writes p, m, v). With master weights it is the
    master copy that is read and written, and the parameter is only written. No launch is
    counted: PyTorch's foreach and fused optimizers update all parameters in a few kernels.

    Args:
        optimizer: which optimizer.
        shape: shape of the slice.
        dtype: element type of parameter and gradient.
        device: what a rank runs on.
    """
    if optimizer.name is Optimizer.NONE:
        return 0.0
    parameter = prod(shape) * dtype.itemsize
    master = optimizer.master_nbytes(shape, dtype)
    values = 2 * master + parameter if master else 2 * parameter
    gradient = _GRADIENT_READS.get(optimizer.name, 1) * parameter
    state = 2 * optimizer.state_nbytes(shape, dtype)
    return (values + gradient + state) / device.memory_bandwidth
