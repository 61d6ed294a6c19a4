"""Bytes on one rank: parameters with gradients and optimizer state, and activations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from autoshard.base.arrays import FloatArray
from autoshard.costs.local import LocalSizes
from autoshard.costs.optimizer import OptimizerSpec
from autoshard.graph import DType, Tensor
from autoshard.ops import OperatorRule, SavedByAutograd, Strategy


@dataclass(frozen=True, slots=True)
class ParameterBytes:
    """Bytes of a parameter shard on one rank.

    Attributes:
        parameter: bytes of the shard.
        gradient: bytes of its gradient.
        optimizer: bytes of the optimizer state, including a float32 master copy if there is one.
    """

    parameter: int
    gradient: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        """Sum of all bytes."""
        return self.parameter + self.gradient + self.optimizer


def parameter_bytes(
    shape: Sequence[int], dtype: DType, optimizer: OptimizerSpec | None = None
) -> ParameterBytes:
    """Bytes of a parameter shard on one rank.

    Args:
        shape: shape of the shard.
        dtype: element type of the parameter and of its gradient.
        optimizer: optimizer of the parameter; None in inference, for a frozen parameter and for a
            buffer, which have neither gradient nor state.
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
    """Bytes of an operator's outputs on one rank; 0 for a view.

    Args:
        rule: the operator's rule.
        strategies: strategies of that rule; S of them.
        outputs: global shapes of the outputs.
        is_view: True if the outputs only alias the inputs.

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
    """Bytes of the tensors of a call that are saved for backward on one rank, each of shape [S].

    Attributes:
        inputs: bytes of saved inputs by position; a tensor that several calls save is in memory
            once.
        outputs: bytes of saved outputs by position.
        extra: total bytes of tensors that only autograd uses.
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
    """Bytes of the tensors of a call that are saved for backward on one rank.

    Args:
        rule: the operator's rule.
        strategies: strategies of that rule; S of them.
        inputs: global shapes of the inputs.
        outputs: global shapes of the outputs.
        saved: the saved tensors of the call.
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
    """Bytes of halos on one rank: saved for backward, and temporary during backward.

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
