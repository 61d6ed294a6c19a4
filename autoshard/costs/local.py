"""Local sizes of an operator on one rank, for all strategies at once."""

from collections.abc import Iterable, Sequence
from math import prod

import numpy as np

from autoshard.base.arrays import FloatArray
from autoshard.graph import Tensor
from autoshard.ops import Dims, OperatorRule, Strategy


class LocalSizes:
    """Sizes of an operator's letters on one rank.

    Args:
        rule: the operator's rule, unsharded.
        strategies: strategies of that rule; S of them.
    """

    def __init__(self, rule: OperatorRule, strategies: Sequence[Strategy]) -> None:
        self._whole = rule.sizes
        self._columns = {
            letter: np.array([strategy.sizes[letter] for strategy in strategies], dtype=float)
            for letter in rule.sizes
        }
        self._ones = np.ones(len(strategies))

    def product(self, letters: Iterable[str]) -> FloatArray:
        """Product of the local sizes of some letters, shape [S]."""
        result = self._ones.copy()
        # Sorted: beyond 2^53 a product of floats depends on the order of its factors.
        for letter in sorted(letters):
            result *= self._columns[letter]
        return result

    def nbytes(self, tensor: Tensor, dims: Dims) -> FloatArray:
        """Bytes of one rank's slice of a tensor, shape [S]."""
        letters = letters_of(dims)
        whole = prod(self._whole[letter] for letter in letters)
        return self.product(letters) * (tensor.nbytes / whole) if whole else self._ones * 0.0


def letters_of(dims: Dims) -> frozenset[str]:
    """All letters of a tensor."""
    return frozenset(letter for dim in dims for letter in dim)
