"""Seconds of operators on one rank: a roofline model over local sizes.

| category    | forward                             | backward                               |
|-------------|-------------------------------------|----------------------------------------|
| view        | free                                | free                                   |
| contraction | max(flops / (peak efficiency),      | as forward, once per factor that needs |
|             | bytes / bandwidth)                  | a gradient; a stream per addend        |
| stream      | max(flops / float32 peak,           | twice the flops; reads inputs and      |
|             | bytes / bandwidth)                  | output gradients, writes input         |
|             |                                     | gradients                              |

plus a kernel launch for each forward and each gradient, except for views. If the device has
measured times of an operator (`Device.operators`), they are used instead: an overhead, and a
multiple of the seconds in the table; a view then takes a multiple of the seconds of a copy.
Contractions are matrix products, convolutions and attention. The gradient of a product of two
factors with respect to either is a product over the same index space, with the flops and bytes of
forward. (Attention has three factors; three times forward approximates the factor 2.5 of
FlashAttention, Dao 2023, section 3.1, whose backward computes five products and forward two.)

If the device has rates of its kernels (`Device.kernels`), products and attention take the seconds
of `autoshard.costs.kernels` instead, streams move their bytes at the achievable bandwidth (of eager
mode, or of compiled kernels), and an operator takes at least as long as the host needs to run it.

Roofline: Williams, Waterman and Patterson, "Roofline: an insightful visual performance
model" (2009).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np

from autoshard.base.arrays import FloatArray, IntArray
from autoshard.costs.kernels import (
    Extents,
    alignment,
    attention_seconds,
    product_seconds,
    unaligned_seconds,
    unfused_attention_seconds,
)
from autoshard.costs.local import LocalSizes, letters_of
from autoshard.graph import DType, Tensor
from autoshard.mesh import Device, KernelRates, RooflineFit
from autoshard.mesh.topology import MATMUL_EFFICIENCY
from autoshard.ops import Call, OperatorRule, Strategy, spec_for

_FLOPS_PER_TERM = 2.0
"""Operations per point of a matrix product: a multiplication and an addition."""


class Category(StrEnum):
    """Cost category of an operator, which selects its formula."""

    VIEW = "view"
    CONTRACTION = "contraction"
    STREAM = "stream"


@dataclass(frozen=True, slots=True)
class Execution:
    """How an operator of a program is executed.

    Attributes:
        is_compiled: True if compiled code launches its kernels, without work of the host for each.
        launches: False if its kernel includes a later operator, which counts for the launch.
        unread: inputs that its kernel has made or read already.
        unwritten: outputs that only its kernel reads.
        computed_again: those that backward computes again instead of reading them.
        in_float8: True if its factors are cast to float8 and multiplied in it.
        weight_casts: share of its runs before which the second factor, a weight, is cast.
        expert_launch: seconds in which the host launches each of the batched products; 0 if one
            kernel computes all.
        balanced: True if ranks that share the queries of causal attention have equal work.
    """

    is_compiled: bool = False
    launches: bool = True
    unread: frozenset[int] = frozenset()
    unwritten: frozenset[int] = frozenset()
    computed_again: frozenset[int] = frozenset()
    in_float8: bool = False
    weight_casts: float = 1.0
    expert_launch: float = 0.0
    balanced: bool = False


EAGER = Execution()
"""Execution of an operator by itself."""


def operator_times(
    rule: OperatorRule,
    strategies: Sequence[Strategy],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    device: Device,
    *,
    training: bool,
    name: str = "",
    is_view: bool = False,
    execution: Execution = EAGER,
) -> FloatArray:
    """Seconds of one operator on one rank; forward, and in training also backward.

    Args:
        rule: the operator's rule.
        strategies: strategies of that rule; S of them.
        inputs: global shapes of the tensor inputs, in the rule's order; backward computes the
            gradients of those that require one.
        outputs: global shapes of the outputs.
        device: device of the rank.
        training: True to include backward.
        name: key of the operator in `Device.operators` (see `efficiency_key`).
        is_view: True if the outputs only alias the inputs.
        execution: how it is executed.

    Returns:
        Seconds, shape [S].
    """
    sizes = LocalSizes(rule, strategies)
    operator = _Operator(rule, sizes, inputs, outputs, device, execution=execution)
    kind = categorise(rule, inputs, is_view=is_view)
    fits = device.operators.get(name) or device.operators.get(kind)
    if kind is Category.VIEW and fits is None:
        return operator.zero
    forward, backward = _FORMULAS[kind]
    seconds = _seconds(operator, forward(operator), fits.forward if fits else None)
    if training and operator.needed:
        work = backward(operator)
        seconds = seconds + _seconds(operator, work, fits.backward if fits else None)
    return seconds


def efficiency_key(call: Call) -> str:
    """Key of an operator in `Device.operators`.

    It includes attributes that select another kernel: causal attention, and random numbers, as in
    dropout.
    """
    draws = spec_for(call.operator).draws
    words = [call.operator]
    words += ["causal"] * call.flag("is_causal")
    words += ["drawing"] * bool(draws and call.argument(draws))
    return " ".join(words)


class _Work(NamedTuple):
    """Work of an operator in one direction.

    Attributes:
        seconds: roofline seconds without overheads, shape [S].
        num_kernels: number of launched kernels.
    """

    seconds: FloatArray
    num_kernels: int


def _seconds(operator: "_Operator", work: _Work, fit: RooflineFit | None) -> FloatArray:
    device, execution = operator.device, operator.execution
    if fit is not None:
        return execution.launches * fit.overhead + fit.times * work.seconds
    launched = work.num_kernels * execution.launches
    seconds = work.seconds + launched * device.launch_overhead
    if execution.expert_launch:
        experts = operator.sizes.product(operator.contraction.batch | operator.contraction.groups)
        seconds = seconds + work.num_kernels * execution.expert_launch * experts
    if device.kernels is not None and not execution.is_compiled:
        seconds = np.maximum(seconds, launched * device.kernels.dispatch)
    return seconds


def categorise(rule: OperatorRule, inputs: Sequence[Tensor], *, is_view: bool) -> Category:
    """The category of an operator.

    A contraction sums over a letter that two floating-point inputs share, and its output has a
    letter that some factor lacks. (A dot product has no such letter and is a stream.)
    """
    if is_view:
        return Category.VIEW
    shape = _Contraction.of(rule, inputs)
    is_contraction = rule.flops_per_point > 0 and len(shape.factors) > 1 and shape.free
    return Category.CONTRACTION if is_contraction else Category.STREAM


@dataclass(frozen=True, slots=True)
class _Contraction:
    """An operator as a matrix product: its factors, and the letters of each extent.

    Attributes:
        factors: positions of the floating-point inputs that have a summed letter.
        output: letters of the output.
        free: letters of the output, grouped by the factors that have them, without those that all
            factors have (batch letters). A letter that no factor has (output rows of a
            convolution) is grouped with the first factor.
        rows: those of them that the first factor alone has.
        groups: letters of one factor alone that are summed although each row meets one index only
            (experts).
        head: letters of the head sizes of keys and of values, if it is attention.
    """

    factors: tuple[int, ...]
    output: frozenset[str]
    free: tuple[frozenset[str], ...]
    rows: frozenset[str]
    groups: frozenset[str]
    head: tuple[frozenset[str], frozenset[str]] | None

    @classmethod
    def of(cls, rule: OperatorRule, inputs: Sequence[Tensor]) -> "_Contraction":
        letters = [letters_of(dims) for dims in rule.inputs]
        remaining = frozenset().union(*(letters_of(dims) for dims in rule.outputs))
        floating = [i for i, tensor in enumerate(inputs) if tensor.dtype.is_differentiable]
        summed = frozenset().union(*(letters[i] for i in floating)) - remaining
        shared = {x for x in summed if sum(x in letters[i] for i in floating) > 1}
        factors = tuple(i for i in floating if letters[i] & shared)
        groups: dict[tuple[int, ...], set[str]] = {}
        for letter in sorted(remaining):
            owners = tuple(i for i in factors if letter in letters[i]) or factors[:1]
            if len(owners) < len(factors):
                groups.setdefault(owners, set()).add(letter)
        rows = frozenset(groups.get(factors[:1], ()))
        alone = {x for x in summed - shared if sum(x in letters[i] for i in factors) == 1}
        return cls(
            factors,
            remaining,
            tuple(frozenset(group) for group in groups.values()),
            rows,
            frozenset(alone & rule.ordered - rule.halo.edges.keys()),
            _head([letters[i] for i in factors], remaining),
        )

    @property
    def batch(self) -> frozenset[str]:
        """Letters of the output that all factors have."""
        return self.output - frozenset().union(*self.free)

    def extents(self, sizes: LocalSizes, flops: FloatArray) -> Extents:
        """Extents of the matrix products that the operator computes.

        Args:
            sizes: local sizes of letters.
            flops: operations of all points, including masked ones, shape [S].
        """
        outputs = np.maximum(sizes.product(self.output), 1.0)
        columns = sizes.product(frozenset().union(*self.free) - self.rows)
        rows = sizes.product(self.rows)
        groups = np.minimum(sizes.product(self.groups), np.maximum(rows, 1.0))
        batch = groups * sizes.product(self.batch)
        return Extents(rows / groups, columns, flops / (2 * outputs), batch)

    def efficiency(self, sizes: LocalSizes, flops: FloatArray, tile: float) -> FloatArray:
        """Fraction of the peak that a product of these local extents reaches, shape [S].

        The number of terms of a sum is half the operations per output element. It cannot be derived
        from letters: a convolution sums over a window, a grouped product over one group.

        Args:
            sizes: local sizes of letters.
            flops: operations of all points, including masked ones, shape [S].
            tile: extent at which half of the efficiency is lost.
        """
        result = MATMUL_EFFICIENCY * sizes.product(())
        terms = flops / (2 * np.maximum(sizes.product(self.output), 1.0))
        for length in (terms, *map(sizes.product, self.free)):
            extent = np.maximum(length, 1.0)
            result *= extent / (extent + tile)
        return result


def _head(
    factors: Sequence[frozenset[str]], output: frozenset[str]
) -> tuple[frozenset[str], frozenset[str]] | None:
    """Letters of the head sizes of keys and values, if factors are those of attention."""
    if len(factors) != 3:  # noqa: PLR2004  queries, keys and values
        return None
    query, key, value = factors
    depth, keys = (query & key) - value - output, (key & value) - query - output
    return (depth, value & output - query - key) if depth and keys else None


class _Operator:
    """Local sizes, bytes and operations of one call, for the formulas."""

    def __init__(
        self,
        rule: OperatorRule,
        sizes: LocalSizes,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        device: Device,
        *,
        execution: Execution,
    ) -> None:
        self.device = device
        self.execution = execution
        self.sizes = sizes
        self.contraction = _Contraction.of(rule, inputs)
        self.all_flops = rule.flops_per_point * sizes.product(rule.sizes)
        share = _computed(rule, sizes, balanced=execution.balanced)
        self.flops = self.all_flops * share
        self.needed = [i for i, tensor in enumerate(inputs) if tensor.requires_grad]
        self.dtype = _widest([inputs[i] for i in self.contraction.factors] or inputs)
        if execution.in_float8:
            self.dtype = DType.FLOAT8_E4M3FN
        self.peak = device.peak(self.dtype)
        self.is_causal = rule.causal is not None
        self.slices = [sizes.nbytes(t, d) for t, d in zip(inputs, rule.inputs, strict=True)]
        self.zero = 0.0 * self.flops
        # Inductor pads the factors, and cuDNN those of convolutions over windows.
        self._needs_alignment = (
            not execution.is_compiled
            and self.dtype.itemsize == DType.BFLOAT16.itemsize
            and rule.flops_per_point == _FLOPS_PER_TERM
        )
        made = [sizes.nbytes(t, d) for t, d in zip(outputs, rule.outputs, strict=True)]
        unread, unwritten = execution.unread, execution.unwritten
        self.written = sum((x for i, x in enumerate(made) if i not in unwritten), self.zero)
        used = (
            np.minimum(nbytes, self.written) if _is_gathered(rule, inputs, i) else nbytes
            for i, nbytes in enumerate(self.slices)
            if i not in unread
        )
        self.read = sum(used, self.zero) + _spilled(rule, sizes) * share

    def roofline(
        self, flops: FloatArray, peak: FloatArray | float, nbytes: FloatArray
    ) -> FloatArray:
        """Seconds of one kernel, without its launch."""
        seconds: FloatArray = np.maximum(flops / peak, nbytes / self.device.stream_bandwidth)
        return seconds

    def stream(self, flops: FloatArray, nbytes: FloatArray) -> FloatArray:
        """Seconds of a kernel of a stream, without its launch."""
        device = self.device
        reached = device.stream_bandwidth if self.execution.is_compiled else device.eager_bandwidth
        seconds: FloatArray = np.maximum(flops / device.peak(DType.FLOAT32), nbytes / reached)
        return seconds

    def attention(self, kernels: KernelRates, *, backward: bool) -> FloatArray | None:
        """Seconds of attention, fused if there are rates of a fused kernel; None if it is none."""
        contraction = self.contraction
        if contraction.head is None:
            return None
        head_sizes = [float(self.sizes.product(letters).max()) for letters in contraction.head]
        extents = contraction.extents(self.sizes, self.all_flops)
        if not kernels.attention:
            return unfused_attention_seconds(
                extents,
                self.dtype,
                self.device,
                kernels,
                head_sizes=(head_sizes[0], head_sizes[1]),
                itemsize=self.dtype.itemsize,
                is_compiled=self.execution.is_compiled,
                backward=backward,
            )
        seconds = attention_seconds(
            self.flops,
            extents,
            self.dtype,
            self.device,
            kernels,
            head_size=sum(head_sizes) / 2,
            causal=self.is_causal,
            backward=backward,
        )
        moved = self.read + self.written
        if backward:
            moved = moved + sum((self.slices[i] for i in contraction.factors), self.zero)
        return np.maximum(seconds, moved / self.device.stream_bandwidth)

    def product(self, kernels: KernelRates, extents: Extents, output: FloatArray) -> FloatArray:
        """Seconds of a matrix product of the same space as the operator's.

        Args:
            kernels: rates of the device.
            extents: of the product.
            output: bytes of its output, shape [S]; what else the operator has is read.
        """
        read = self.read + self.written - output
        if self.execution.in_float8:
            read = read * (self.dtype.itemsize / DType.BFLOAT16.itemsize)
        seconds = product_seconds(
            extents, self.dtype, self.device, kernels, read=read, written=output
        )
        if not self._needs_alignment:
            return seconds
        return np.maximum(seconds, unaligned_seconds(extents, self._alignment, kernels))

    @cached_property
    def _alignment(self) -> IntArray:
        """Alignment of the matrices of the operator's product and of its gradients, shape [S]."""
        extents = self.contraction.extents(self.sizes, self.all_flops)
        return alignment(extents, self.dtype.itemsize)


def _computed(rule: OperatorRule, sizes: LocalSizes, *, balanced: bool) -> FloatArray | float:
    """Fraction of its points that a rank computes, for the rank with most work, shape [S].

    With a causal mask, each row uses the columns up to its own index, so the rank with the last
    rows and the first columns has most work. If work is balanced, each rank has the fraction of
    the whole operator.
    """
    if rule.causal is None:
        return 1.0
    rows, columns = ((letter,) for letter in rule.causal)
    last, all_columns = rule.sizes[rows[0]], rule.sizes[columns[0]]
    if balanced:
        return _seen(last, np.array(float(last)), np.array(float(all_columns)))
    return _seen(last, sizes.product(rows), sizes.product(columns))


def _seen(last: int, num_rows: FloatArray, num_columns: FloatArray) -> FloatArray:
    """Fraction of a causal mask that is set, of the rows up to the last and the first columns."""
    first = last - num_rows + 1
    until = np.clip(num_columns, first - 1, last)  # first row that uses all columns
    seen = (until - first + 1) * (first + until) / 2 + (last - until) * num_columns
    return seen / np.maximum(num_rows * num_columns, 1.0)


def _spilled(rule: OperatorRule, sizes: LocalSizes) -> FloatArray | float:
    """Bytes of the intermediate tensor that is spilled if a letter is sharded, shape [S]."""
    reduced = rule.reduced
    if not reduced.spilled:
        return 0.0
    is_sharded = sizes.product(reduced.over) < prod(rule.sizes[letter] for letter in reduced.over)
    return is_sharded * sizes.product(reduced.spilled) * reduced.spilled_bytes


def _widest(inputs: Sequence[Tensor]) -> DType:
    floating = [t.dtype for t in inputs if t.dtype.is_differentiable]
    return max(floating, key=lambda dtype: dtype.itemsize, default=DType.FLOAT32)


def _is_gathered(rule: OperatorRule, inputs: Sequence[Tensor], position: int) -> bool:
    """True if only the rows of an input that an index input selects are read.

    The letter of the indexed dim then occurs nowhere else, and the output has a letter of the index
    instead.
    """
    letters = [letters_of(dims) for dims in rule.inputs]
    remaining = frozenset().union(*(letters_of(dims) for dims in rule.outputs))
    others = frozenset().union(*(x for i, x in enumerate(letters) if i != position))
    indices = [
        index
        for index, tensor in zip(letters, inputs, strict=True)
        if not tensor.dtype.is_differentiable
    ]
    picked = letters[position] - remaining - others
    return bool(picked) and any(index & remaining - letters[position] for index in indices)


def _contraction_forward(operator: _Operator) -> _Work:
    activation, *weights = (operator.slices[i] for i in operator.contraction.factors)
    cast = [operator.execution.weight_casts * weight for weight in weights]
    if not operator.execution.is_compiled:  # else it is cast by the kernel that computes it
        cast.append(activation)
    casts = _float8_casts(operator, cast)
    return _Work(_contraction_seconds(operator) + casts.seconds, 1 + casts.num_kernels)


def _contraction_seconds(operator: _Operator) -> FloatArray:
    """Seconds of a contraction forward."""
    kernels = operator.device.kernels
    if kernels is None:
        tile = operator.device.tile
        efficiency = operator.contraction.efficiency(operator.sizes, operator.all_flops, tile)
        peak = operator.peak * efficiency
        return operator.roofline(operator.flops, peak, operator.read + operator.written)
    seconds = operator.attention(kernels, backward=False)
    if seconds is None:
        extents = operator.contraction.extents(operator.sizes, operator.all_flops)
        seconds = operator.product(kernels, extents, operator.written)
    return seconds


def _contraction_backward(operator: _Operator) -> _Work:
    factors = [i for i in operator.contraction.factors if i in operator.needed]
    casts = _float8_casts(operator, [operator.written])
    seconds = _factor_gradients(operator, factors) + casts.seconds
    for addend in set(operator.needed) - set(factors):
        nbytes = operator.written + operator.slices[addend]
        seconds = seconds + operator.roofline(operator.zero, operator.peak, nbytes)
    return _Work(seconds, len(operator.needed) + casts.num_kernels)


def _float8_casts(operator: _Operator, tensors: Sequence[FloatArray]) -> _Work:
    """Casts of 16-bit tensors to float8, as they are and transposed, with one scale each.

    A cast reads a tensor and writes two of half its bytes. In eager mode another kernel reads it
    before for its largest element. Compiled kernels write activations in float8 instead, twice,
    which is as many bytes (as those of Transformer Engine do).
    """
    if not operator.execution.in_float8:
        return _Work(operator.zero, 0)
    kernels = 1 if operator.execution.is_compiled else 2
    moved = (1 + kernels) * sum(tensors, operator.zero)
    return _Work(moved / operator.device.stream_bandwidth, kernels * len(tensors))


def _factor_gradients(operator: _Operator, factors: Sequence[int]) -> FloatArray:
    """Seconds of the gradients of some factors of a contraction."""
    kernels, contraction = operator.device.kernels, operator.contraction
    if kernels is not None and factors:
        seconds = operator.attention(kernels, backward=True)
        if seconds is not None:
            return seconds
        if len(contraction.factors) == 2:  # noqa: PLR2004  a matrix product
            extents = contraction.extents(operator.sizes, operator.all_flops)
            gradients = extents.of_first_gradient(), extents.of_second_gradient()
            products = dict(zip(contraction.factors, gradients, strict=True))
            return sum(
                (operator.product(kernels, products[i], operator.slices[i]) for i in factors),
                operator.zero,
            )
    return len(factors) * _contraction_seconds(operator)


def _stream_forward(operator: _Operator) -> _Work:
    return _Work(operator.stream(operator.flops, operator.read + operator.written), 1)


def _stream_backward(operator: _Operator) -> _Work:
    written = (i for i in operator.needed if i not in operator.execution.unread)
    gradients = sum((operator.slices[i] for i in written), operator.zero)
    nbytes = operator.read + operator.written + gradients
    return _Work(operator.stream(2 * operator.flops, nbytes), 1)


_Formula = Callable[[_Operator], _Work]

_FORMULAS: Mapping[Category, tuple[_Formula, _Formula]] = {
    Category.VIEW: (_stream_forward, _stream_backward),
    Category.CONTRACTION: (_contraction_forward, _contraction_backward),
    Category.STREAM: (_stream_forward, _stream_backward),
}
"""Category -> (forward, backward)."""
