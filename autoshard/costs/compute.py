"""Seconds that operators take on one rank: a roofline over local sizes.

| category    | forward                             | backward                               |
|-------------|-------------------------------------|----------------------------------------|
| view        | free                                | free                                   |
| contraction | max(flops / (peak efficiency),      | as forward, once per factor that needs |
|             | bytes / bandwidth)                  | a gradient; a stream per addend        |
| stream      | max(flops / float32 peak,           | twice the flops; reads inputs and      |
|             | bytes / bandwidth)                  | output gradients, writes input         |
|             |                                     | gradients                              |

and a kernel launch for each forward and each gradient. A contraction is a matrix product
in the widest sense: convolutions and attention are among them. The gradient of a product
of two factors with respect to either is a product over the same index space, so it has
the forward's flops and bytes. (Attention has three factors; three times forward stands for
the 2.5 of FlashAttention, Dao 2023, section 3.1, whose backward computes five products for
the forward's two.)

Roofline: Williams, Waterman and Patterson, "Roofline: an insightful visual performance
model" (2009).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod

import numpy as np

from autoshard.costs.local import FloatArray, LocalSizes, letters_of
from autoshard.graph import DType, Tensor
from autoshard.mesh import Device
from autoshard.rules import OperatorRule, Strategy

MATMUL_EFFICIENCY = 0.8
"""Share of the dense peak that large matrix products reach.

Published sweeps over shapes find a little over 0.8 on A100 and H100 (Bekman, "Machine
Learning Engineering", maximum achievable matmul FLOPS).
"""

TILE = 32
"""Extent at which a product loses half of its efficiency.

Kernels pad every extent to tiles. The figure leaves matrix-vector products bound by memory,
as they are in practice, and cuts of one extent down to a few tiles visibly dearer.
"""


class Category(StrEnum):
    """Which formula prices an operator."""

    VIEW = "view"
    CONTRACTION = "contraction"
    STREAM = "stream"


def operator_times(
    rule: OperatorRule,
    strategies: Sequence[Strategy],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    device: Device,
    *,
    training: bool,
    is_view: bool = False,
) -> FloatArray:
    """Seconds of one operator on one rank, forward and in training also backward.

    Args:
        rule: the operator's rule.
        strategies: strategies of that rule; S of them.
        inputs: global shapes of the tensor inputs, in the rule's order; `requires_grad` says
            which of them get a gradient.
        outputs: global shapes of the outputs.
        device: what a rank runs on.
        training: whether backward counts.
        is_view: whether the outputs only alias the inputs.

    Returns:
        Seconds, shape [S].
    """
    operator = _Operator(rule, LocalSizes(rule, strategies), inputs, outputs, device)
    kind = categorise(rule, inputs, is_view=is_view)
    forward, backward = _FORMULAS[kind]
    seconds = forward(operator)
    if training and operator.needed:
        seconds = seconds + backward(operator)
    return seconds


def categorise(rule: OperatorRule, inputs: Sequence[Tensor], *, is_view: bool) -> Category:
    """The category of an operator.

    A contraction sums a letter that two floating-point inputs share, and its output has a
    letter that not all of the factors have; a dot product has none and is a stream.
    """
    if is_view:
        return Category.VIEW
    shape = _Contraction.of(rule, inputs)
    is_contraction = rule.flops_per_point > 0 and len(shape.factors) > 1 and shape.free
    return Category.CONTRACTION if is_contraction else Category.STREAM


@dataclass(frozen=True, slots=True)
class _Contraction:
    """An operator seen as a product: its factors and the letters of each extent.

    Attributes:
        factors: positions of the floating-point inputs that have a summed letter.
        made: letters of the output.
        free: letters of the output, grouped by the factors that have them; a group that all
            factors have is a batch and left out. A letter that no factor has (the rows that
            a convolution makes of other rows) counts with the first factor's own.
    """

    factors: tuple[int, ...]
    made: frozenset[str]
    free: tuple[frozenset[str], ...]

    @classmethod
    def of(cls, rule: OperatorRule, inputs: Sequence[Tensor]) -> "_Contraction":
        held = [letters_of(dims) for dims in rule.inputs]
        kept = frozenset().union(*(letters_of(dims) for dims in rule.outputs))
        floating = [i for i, tensor in enumerate(inputs) if tensor.dtype.is_differentiable]
        summed = frozenset().union(*(held[i] for i in floating)) - kept
        shared = {x for x in summed if sum(x in held[i] for i in floating) > 1}
        factors = tuple(i for i in floating if held[i] & shared)
        groups: dict[tuple[int, ...], set[str]] = {}
        for letter in sorted(kept):
            owners = tuple(i for i in factors if letter in held[i]) or factors[:1]
            if len(owners) < len(factors):
                groups.setdefault(owners, set()).add(letter)
        return cls(factors, kept, tuple(frozenset(group) for group in groups.values()))

    def efficiency(self, sizes: LocalSizes, flops: FloatArray) -> FloatArray:
        """Share of the peak that a product of these local extents reaches, shape [S].

        How many terms a sum has is half the operations of an element that is made. Letters do
        not tell: a convolution sums some places for each, a grouped product rows of one group.

        Args:
            sizes: local sizes of letters.
            flops: of all points, those that are left out included, shape [S].
        """
        result = MATMUL_EFFICIENCY * sizes.product(())
        terms = flops / (2 * np.maximum(sizes.product(self.made), 1.0))
        for length in (terms, *map(sizes.product, self.free)):
            extent = np.maximum(length, 1.0)
            result *= extent / (extent + TILE)
        return result


class _Operator:
    """What the formulas need to know of one call."""

    def __init__(
        self,
        rule: OperatorRule,
        sizes: LocalSizes,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        device: Device,
    ) -> None:
        self.device = device
        self.sizes = sizes
        self.contraction = _Contraction.of(rule, inputs)
        self.all_flops = rule.flops_per_point * sizes.product(rule.sizes)
        share = _computed(rule, sizes)
        self.flops = self.all_flops * share
        self.needed = [i for i, tensor in enumerate(inputs) if tensor.requires_grad]
        self.peak = device.peak(_widest(inputs))
        self.slices = [sizes.nbytes(t, d) for t, d in zip(inputs, rule.inputs, strict=True)]
        self.zero = 0.0 * self.flops
        made = (sizes.nbytes(t, d) for t, d in zip(outputs, rule.outputs, strict=True))
        self.written = sum(made, self.zero)
        used = (
            np.minimum(nbytes, self.written) if _is_gathered(rule, inputs, i) else nbytes
            for i, nbytes in enumerate(self.slices)
        )
        self.read = sum(used, self.zero) + _spilled(rule, sizes) * share

    def roofline(
        self, flops: FloatArray, peak: FloatArray | float, nbytes: FloatArray
    ) -> FloatArray:
        """Seconds of one kernel."""
        seconds: FloatArray = np.maximum(flops / peak, nbytes / self.device.memory_bandwidth)
        return seconds + self.device.launch_overhead


def _computed(rule: OperatorRule, sizes: LocalSizes) -> FloatArray | float:
    """Share of its points that a rank computes; of the ranks the one with most, shape [S].

    Where a row sees the columns up to its own place, the last rows and the first columns have
    most: if rows first..last are on that rank and s columns, the sum of min(row, s).
    """
    if rule.causal is None:
        return 1.0
    rows, columns = ((letter,) for letter in rule.causal)
    last, num_rows, num_columns = rule.sizes[rows[0]], sizes.product(rows), sizes.product(columns)
    first = last - num_rows + 1
    until = np.clip(num_columns, first - 1, last)  # from here on a row sees all columns
    seen = (until - first + 1) * (first + until) / 2 + (last - until) * num_columns
    return seen / np.maximum(num_rows * num_columns, 1.0)


def _spilled(rule: OperatorRule, sizes: LocalSizes) -> FloatArray | float:
    """Bytes of what goes through memory because a letter is cut, shape [S]."""
    reduced = rule.reduced
    if not reduced.spilled:
        return 0.0
    is_cut = sizes.product(reduced.over) < prod(rule.sizes[letter] for letter in reduced.over)
    return is_cut * sizes.product(reduced.spilled) * reduced.spilled_bytes


def _widest(inputs: Sequence[Tensor]) -> DType:
    floating = [t.dtype for t in inputs if t.dtype.is_differentiable]
    return max(floating, key=lambda dtype: dtype.itemsize, default=DType.FLOAT32)


def _is_gathered(rule: OperatorRule, inputs: Sequence[Tensor], position: int) -> bool:
    """Whether only those rows of an input are read that an index input picks.

    The picked dim's letter is then nowhere else, and in its place the output has a letter of
    the index.
    """
    held = [letters_of(dims) for dims in rule.inputs]
    kept = frozenset().union(*(letters_of(dims) for dims in rule.outputs))
    others = frozenset().union(*(x for i, x in enumerate(held) if i != position))
    indices = [
        letters
        for letters, tensor in zip(held, inputs, strict=True)
        if not tensor.dtype.is_differentiable
    ]
    picked = held[position] - kept - others
    return bool(picked) and any(letters & kept - held[position] for letters in indices)


def _free(operator: _Operator) -> FloatArray:
    return operator.zero


def _contraction_forward(operator: _Operator) -> FloatArray:
    efficiency = operator.contraction.efficiency(operator.sizes, operator.all_flops)
    peak = operator.peak * efficiency
    return operator.roofline(operator.flops, peak, operator.read + operator.written)


def _contraction_backward(operator: _Operator) -> FloatArray:
    factors = set(operator.contraction.factors) & set(operator.needed)
    seconds = len(factors) * _contraction_forward(operator)
    for addend in set(operator.needed) - factors:
        nbytes = operator.written + operator.slices[addend]
        seconds = seconds + operator.roofline(operator.zero, operator.peak, nbytes)
    return seconds


def _stream_forward(operator: _Operator) -> FloatArray:
    nbytes = operator.read + operator.written
    return operator.roofline(operator.flops, operator.device.peak(DType.FLOAT32), nbytes)


def _stream_backward(operator: _Operator) -> FloatArray:
    gradients = sum((operator.slices[i] for i in operator.needed), operator.zero)
    nbytes = operator.read + operator.written + gradients
    return operator.roofline(2 * operator.flops, operator.device.peak(DType.FLOAT32), nbytes)


_Formula = Callable[[_Operator], FloatArray]

_FORMULAS: Mapping[Category, tuple[_Formula, _Formula]] = {
    Category.VIEW: (_free, _free),
    Category.CONTRACTION: (_contraction_forward, _contraction_backward),
    Category.STREAM: (_stream_forward, _stream_backward),
}
"""Category -> (forward, backward)."""
