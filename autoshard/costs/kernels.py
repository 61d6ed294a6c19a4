"""Seconds of matrix products and attention on a GPU whose kernel rates are known.

A product is computed in tiles of the output, one per streaming multiprocessor at a time, so a last
wave that is not full costs as much as a full one (*wave quantisation*), and extents count as
multiples of the tile (*tile quantisation*; NVIDIA, "Matrix Multiplication Background User's
Guide"). Smaller tiles reuse operands less. Where there are fewer tiles than multiprocessors, the
sum may be split among several (split-K), whose partial sums go through memory. Of all tiles and
splits the fastest counts, as in the heuristics of cuBLAS. Operands are read while tiles are
computed; the output of Ampere's and Hopper's kernels is written in between.

The fast kernels load and store 16 bytes at once, so they need rows of a multiple of 16 bytes, such
as a vocabulary that 8 divides (NVIDIA, "Matrix Multiplication Background User's Guide", section on
tensor core requirements). For others, cuBLAS has kernels whose rates hardly depend on the shape.

Fused attention computes a block of queries per multiprocessor, with the time to start and to end a
block given in keys (`AttentionRate`). Attention that is not fused is a product, a softmax and
another product, between which the scores go through memory.
"""

from dataclasses import dataclass

import numpy as np

from autoshard.base.arrays import FloatArray, IntArray
from autoshard.mesh import AttentionRate, Device, KernelRates

_TILES = np.array(
    [
        *((256, 128), (192, 128), (160, 128), (128, 128), (64, 128), (64, 64), (256, 64)),
        *((128, 256), (128, 192), (128, 160), (128, 64), (64, 256)),
    ],
    dtype=float,
)
"""Rows and columns of the tiles of cuBLAS and CUTLASS."""

_SPLITS = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
"""Number of parts of a sum."""

_REUSE = 16.0
"""Reuse of operands (product over sum of a tile's extents) at which half of the rate is lost."""

_QUERIES = 128
"""Queries of a block of fused attention, and keys of its steps."""

_SPLIT_KEYS = 1024
"""Keys of a part, where there are too few blocks of queries and keys are split too."""

_PARTIAL_BYTES = 8
"""Bytes written and read for each float32 partial sum of a split product."""


_ALIGNED = 16
"""Bytes that rows must be a multiple of for the fast kernels."""

_UNALIGNED_RATES = {2: 0.92e12, 4: 1.8e12, 8: 1.8e12}
"""FLOP/s of a multiprocessor, by the bytes that rows are a multiple of.

Measured on an H200 with PyTorch 2.11, products of 4096 or 8192 rows with 768, 1600 or 2048 terms,
forward and both gradients: 0.67 to 0.96e12 for 1001 columns, 1.3 to 2.0e12 for 1002 and 1004, 2.6
to 5.4e12 for 1000. Other processes used the GPU then, in turns that are longer than these products;
on the GPU alone, the output layer of GPT-2 (8192 tokens, 50,257 columns) reached 0.92e12 in a
training step. Other generations are given the same.
"""


@dataclass(frozen=True, eq=False)
class Extents:
    """Extents of batched matrix products, each of shape [S].

    Attributes:
        rows: rows of the output.
        columns: columns of the output.
        terms: terms of each sum.
        batch: number of products.
    """

    rows: FloatArray
    columns: FloatArray
    terms: FloatArray
    batch: FloatArray

    def of_first_gradient(self) -> "Extents":
        """Extents of the product that computes the gradient of the first factor."""
        return Extents(self.rows, self.terms, self.columns, self.batch)

    def of_second_gradient(self) -> "Extents":
        """Extents of the product that computes the gradient of the second factor."""
        return Extents(self.terms, self.columns, self.rows, self.batch)


def product_seconds(
    extents: Extents,
    dtype: str,
    device: Device,
    kernels: KernelRates,
    *,
    read: FloatArray,
    written: FloatArray,
) -> FloatArray:
    """Seconds of matrix products without their launch, shape [S].

    Args:
        extents: of the products.
        dtype: PyTorch's name of the element type of the factors.
        device: device of the rank.
        kernels: its rates.
        read: bytes of the factors, shape [S].
        written: bytes of the outputs, shape [S].
    """
    bandwidth = device.stream_bandwidth
    tiles = _TILES[:, :, None]
    area = tiles[:, 0] * tiles[:, 1]
    reuse = area / (tiles[:, 0] + tiles[:, 1])
    most = reuse.max()
    relative = reuse / (reuse + _REUSE) * (most + _REUSE) / most
    rate = device.peak(dtype) * kernels.matmul_efficiency(dtype) * relative
    count = extents.batch * np.ceil(extents.rows / tiles[:, 0])
    count = count * np.ceil(extents.columns / tiles[:, 1])
    splits = _SPLITS[:, None, None]
    waves = np.ceil(count * splits / kernels.multiprocessors) * kernels.multiprocessors
    seconds = waves * (2 * area * extents.terms / splits / rate)
    outputs = extents.batch * extents.rows * extents.columns
    seconds += (splits > 1) * splits * _PARTIAL_BYTES * outputs / bandwidth
    exposed = kernels.exposed_writes * written
    moved = (read + written - exposed) / bandwidth
    result: FloatArray = np.maximum(seconds.min(axis=(0, 1)), moved) + exposed / bandwidth
    return result


def alignment(extents: Extents, itemsize: int) -> IntArray:
    """Bytes that the rows of all matrices of a product are a multiple of, at most 16; shape [S].

    The factors have rows of `terms` or `columns`, and so have those of its gradients.
    """
    rows = [np.rint(x * itemsize).astype(np.int64) for x in (extents.columns, extents.terms)]
    result: IntArray = np.gcd(_ALIGNED, np.gcd(*rows))
    return result


def unaligned_seconds(extents: Extents, aligned: IntArray, kernels: KernelRates) -> FloatArray:
    """Least seconds of 16-bit matrix products whose rows are not aligned; 0 for others; shape [S].

    Args:
        extents: of the products.
        aligned: their `alignment`.
        kernels: rates of the device.
    """
    flops = 2 * extents.batch * extents.rows * extents.columns * extents.terms
    result: FloatArray = np.zeros_like(flops)
    for nbytes, rate in _UNALIGNED_RATES.items():
        result += (aligned == nbytes) * flops / (rate * kernels.multiprocessors)
    return result


def attention_seconds(
    flops: FloatArray,
    extents: Extents,
    dtype: str,
    device: Device,
    kernels: KernelRates,
    *,
    head_size: float,
    causal: bool,
    backward: bool,
) -> FloatArray:
    """Seconds of fused attention without memory traffic and launch, shape [S].

    Args:
        flops: operations of forward, without masked ones, shape [S].
        extents: queries per batch and head as rows, the head size of values as columns.
        dtype: PyTorch's name of the element type.
        device: device of the rank.
        kernels: its rates, with those of a kernel of attention.
        head_size: mean of the head sizes of keys and values.
        causal: True with a causal mask.
        backward: True for backward.
    """
    rate = next(iter(kernels.attention.values()))
    speed = kernels.clock * _speed(rate, head_size, backward=backward)
    speed *= min(device.peak(dtype) / device.peak("bfloat16"), 1.0)
    queries = np.maximum(extents.batch * extents.rows, 1.0)
    seen = np.maximum(flops / (4 * head_size * queries), 1.0)
    overhead = rate.keys + (_QUERIES / 2 if causal else 0.0)
    blocks = extents.batch * np.ceil(extents.rows / _QUERIES)
    few = blocks < kernels.multiprocessors
    blocks = np.maximum(blocks * np.where(few, np.ceil(seen / _SPLIT_KEYS), 1.0), 1.0)
    waves = np.ceil(blocks / kernels.multiprocessors) * kernels.multiprocessors / blocks
    work = flops * (1 + overhead / seen) * waves
    result: FloatArray = (2.5 if backward else 1.0) * work / speed
    return result / rate.causal if causal else result


def unfused_attention_seconds(
    extents: Extents,
    dtype: str,
    device: Device,
    kernels: KernelRates,
    *,
    head_sizes: tuple[float, float],
    itemsize: int,
    is_compiled: bool,
    backward: bool,
) -> FloatArray:
    """Seconds of attention by products that write and read all scores, shape [S].

    Scores are computed by one product, become weights, and are read by another; masked ones are
    computed too. Backward computes four products.

    Args:
        extents: of the whole as one product: queries per batch and head, the head size of values,
            and as terms the keys times both head sizes over that of values.
        dtype: PyTorch's name of the element type.
        device: device of the rank.
        kernels: its rates.
        head_sizes: head sizes of keys and of values.
        itemsize: bytes of a score.
        is_compiled: True if scale, mask and softmax are one kernel.
        backward: True for backward.
    """
    depth, size = (head_size + 0.0 * extents.rows for head_size in head_sizes)
    queries, batch = extents.rows, extents.batch
    keys = extents.terms * size / (depth + size)
    scores = itemsize * batch * queries * keys
    writing, reading = [(queries, keys, depth)], [(queries, size, keys)]
    if backward:
        writing = [(queries, keys, size)]
        reading = [(keys, size, queries), (queries, depth, keys), (keys, depth, queries)]
    seconds = _UNFUSED_PASSES[is_compiled, backward] * scores / device.stream_bandwidth
    for products, is_written in ((writing, True), (reading, False)):
        for rows, columns, terms in products:
            seconds = seconds + product_seconds(
                Extents(rows, columns, terms, batch),
                dtype,
                device,
                kernels,
                read=(not is_written) * scores + itemsize * batch * (rows + columns) * depth,
                written=is_written * scores,
            )
    return seconds


_UNFUSED_PASSES = {(False, False): 6, (False, True): 10, (True, False): 2, (True, True): 3}
"""Reads and writes of the scores between the products of attention that is not fused, compiled or
not, forward and backward. Forward, scale, mask and softmax each read and write them, or one kernel
does; backward of a softmax reads two and writes one. In eager mode backward follows the published
rates of PyTorch (plots of Dao-AILab/flash-attention)."""


def _speed(rate: AttentionRate, head_size: float, *, backward: bool) -> float:
    """FLOP/s for a head size: interpolated, and for smaller ones proportional to it."""
    known = rate.backward if backward else rate.forward
    small = min(head_size / rate.head_sizes[0], 1.0)
    return small * float(np.interp(head_size, rate.head_sizes, known))
