"""Bytes that one rank holds: parameters with what training adds to them, and activations."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod

import numpy as np

from autoshard.arrays import FloatArray
from autoshard.costs.local import LocalSizes
from autoshard.costs.optimizer import OptimizerSpec
from autoshard.errors import OptionError
from autoshard.graph import DType, Tensor
from autoshard.ops import OperatorRule, SavedByAutograd, Strategy


@dataclass(frozen=True, slots=True)
class ParameterBytes:
    """Bytes that one rank holds for its slice of a parameter.

    Attributes:
        parameter: the slice itself.
        gradient: its gradient.
        optimizer: the optimizer's state, and its float32 copy where it keeps one.
    """

    parameter: int
    gradient: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameter + self.gradient + self.optimizer


def parameter_bytes(
    shape: Sequence[int], dtype: DType, optimizer: OptimizerSpec | None = None
) -> ParameterBytes:
    """Bytes for one rank's slice of a parameter.

    Args:
        shape: shape of the slice.
        dtype: element type of the parameter and of its gradient.
        optimizer: what trains the parameter; None in inference, for a parameter that is
            frozen and for a buffer, which have neither gradient nor state.
    """
    nbytes = prod(shape) * dtype.itemsize
    if optimizer is None:
        return ParameterBytes(nbytes)
    state = optimizer.state_nbytes(shape, dtype) + optimizer.master_nbytes(shape, dtype)
    return ParameterBytes(nbytes, nbytes, state)


def activation_bytes(
    rule: OperatorRule,
    strategies: Sequence[Strategy],
    outputs: Sequence[Tensor],
    *,
    is_view: bool = False,
) -> FloatArray:
    """Bytes of an operator's outputs on one rank; a view holds nothing of its own.

    Args:
        rule: the operator's rule.
        strategies: strategies of that rule; S of them.
        outputs: global shapes of the outputs.
        is_view: whether the outputs only alias the inputs.

    Returns:
        Bytes, shape [S].
    """
    sizes = LocalSizes(rule, strategies)
    total = 0.0 * sizes.product(())
    if not is_view:
        for tensor, dims in zip(outputs, rule.outputs, strict=True):
            total += sizes.nbytes(tensor, dims)
    return total


@dataclass(frozen=True, slots=True)
class SavedBytes:
    """Bytes that one rank keeps of a call until its backward, each of shape [S].

    Attributes:
        inputs: by position, the inputs that are kept; they belong to whoever makes them, so
            what several calls keep is held once.
        outputs: likewise the outputs.
        extra: what only autograd sees, all of it together.
    """

    inputs: Mapping[int, FloatArray]
    outputs: Mapping[int, FloatArray]
    extra: FloatArray


def saved_bytes(
    rule: OperatorRule,
    strategies: Sequence[Strategy],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    saved: SavedByAutograd,
) -> SavedBytes:
    """Bytes that one rank keeps of a call until its backward.

    Args:
        rule: the operator's rule.
        strategies: strategies of that rule; S of them.
        inputs: global shapes of the inputs.
        outputs: global shapes of the outputs.
        saved: what the call keeps.
    """
    sizes = LocalSizes(rule, strategies)
    dims = (*rule.inputs, *rule.outputs)
    extra = 0.0 * sizes.product(())
    for kept in saved.extras:
        letters = {letter for tensor, dim in kept.dims for letter in dims[tensor][dim]}
        extra += kept.times * kept.itemsize * sizes.product(letters)
    return SavedBytes(
        {i: sizes.nbytes(inputs[i], rule.inputs[i]) for i in sorted(saved.inputs)},
        {i: sizes.nbytes(outputs[i], rule.outputs[i]) for i in sorted(saved.outputs)},
        extra,
    )


def halo_bytes(rule: OperatorRule, strategies: Sequence[Strategy]) -> tuple[FloatArray, FloatArray]:
    """Bytes of halos on one rank: saved until backward, and used while backward runs.

    Args:
        rule: the operator's rule.
        strategies: strategies of that rule; S of them.

    Returns:
        Both of shape [S].
    """
    if not rule.halo.edges:
        nothing = np.zeros(len(strategies))
        return nothing, nothing
    halos = [rule.halo.letter_nbytes(rule.sizes, strategy.sizes) for strategy in strategies]
    return (
        np.array([halo.saved for halo in halos], dtype=float),
        np.array([halo.backward_workspace for halo in halos], dtype=float),
    )


_UNITS = {
    "": 1,
    "B": 1,
    **{f"{prefix}B": 1000**i for i, prefix in enumerate(("k", "M", "G", "T", "P"), start=1)},
    **{f"{prefix}iB": 1024**i for i, prefix in enumerate(("K", "M", "G", "T", "P"), start=1)},
    "KB": 1000,
}
_AMOUNT = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)")


def parse_bytes(text: str) -> int:
    """Read an amount of memory: "80GB" is 80 * 10^9 bytes, "80GiB" is 80 * 2^30.

    Args:
        text: a number, which may have a fraction, and a unit; bytes where there is no unit.
            A fraction of a byte is dropped.

    Raises:
        OptionError: the text is not an amount above zero in a known unit.
    """
    match = _AMOUNT.fullmatch(text.strip())
    if match is None or match[2] not in _UNITS:
        units = ", ".join(unit for unit in _UNITS if unit)
        raise OptionError(
            f"{text!r} is not an amount of memory; write a number and one of {units}, "
            "as in '80GB' or '74.5GiB'"
        )
    amount = int(Fraction(match[1]) * _UNITS[match[2]])
    if amount < 1:
        raise OptionError(f"{text!r} is less than one byte; give at least 1")
    return amount
