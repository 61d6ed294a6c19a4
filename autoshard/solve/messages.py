"""What one bucket of an elimination tells its neighbours, and what it is told."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from autoshard.arrays import FloatArray, IntArray

_BLOCK = 1 << 18
"""Entries of sums that are held at once, where a table has no more."""


@dataclass(frozen=True, slots=True, eq=False)
class Input:
    """A factor seen from a bucket: for each axis, the entry that each bucket class selects."""

    factor: int
    order: tuple[int, ...]
    picks: tuple[IntArray, ...]
    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """The elimination of one variable into the table `output` over its neighbours."""

    variable: int
    classes: IntArray
    shape: tuple[int, ...]
    inputs: tuple[Input, ...]
    output: int
    key: bytes


def message(bucket: Bucket, cost: FloatArray, tables: Sequence[FloatArray]) -> FloatArray:
    """The least price of a bucket's variable and inputs, by the classes of its neighbours.

    Args:
        bucket: the elimination of the variable.
        cost: of each strategy of the variable, shape [S].
        tables: of all factors, by their numbers.
    """
    least = np.full(bucket.shape[0], np.inf)
    np.minimum.at(least, bucket.classes, cost)
    arms = [_arm(bucket, seen, tables) for seen in bucket.inputs]
    out = np.full(bucket.shape[1:], np.inf)
    flat = (1,) * (len(bucket.shape) - 1)
    step = max(1, _BLOCK // max(out.size, 1))
    for start in range(0, len(least), step):
        part = slice(start, start + step)
        total = least[part].reshape(-1, *flat)
        for arm in arms:
            total = total + arm[part]
        np.minimum(out, total.min(axis=0), out=out)
    return out


def beliefs(
    bucket: Bucket,
    cost: FloatArray,
    tables: Sequence[FloatArray],
    outside: FloatArray,
    *,
    num_given: int,
) -> tuple[FloatArray, FloatArray, list[tuple[Input, FloatArray]]]:
    """Least price of everything, by what a bucket and its inputs see.

    Args:
        bucket: the elimination of a variable.
        cost: of each strategy of the variable, shape [S].
        tables: of all factors, by their numbers.
        outside: what lies outside of the bucket's subtree, by the classes of its neighbours.
        num_given: factors with lower numbers are no messages of other buckets.

    Returns:
        the least cost in each class of the variable, shape [K]; the least price of all
        choices with each class, shape [K]; and for each message that came in, the
        least price by the bucket's classes of the message's variables.
    """
    base = np.full(bucket.shape[0], np.inf)
    np.minimum.at(base, bucket.classes, cost)
    arms = [_arm(bucket, seen, tables) for seen in bucket.inputs]
    messages = [seen for seen in bucket.inputs if seen.factor >= num_given]
    least = np.empty(bucket.shape[0])
    tops = [(seen, np.empty([bucket.shape[i] for i in seen.axes])) for seen in messages]
    step = max(1, _BLOCK // prod(bucket.shape[1:]))
    flat = (1,) * (len(bucket.shape) - 1)
    for start in range(0, len(base), step):
        part = slice(start, start + step)
        belief = base[part].reshape(-1, *flat) + outside[None]
        for arm in arms:
            belief = belief + arm[part]
        least[part] = belief.reshape(len(belief), -1).min(axis=1)
        for seen, top in tops:
            others = tuple(i for i in range(belief.ndim) if i not in seen.axes)
            top[part] = belief.min(axis=others)
    return base, least, tops


def told(table: FloatArray, seen: Input, message: FloatArray) -> FloatArray:
    """What a bucket tells one of its inputs: its belief without the input's own message."""
    for axis, pick in enumerate(seen.picks):
        table = _grouped_min(table, axis, pick)
    # Back from the order of the bucket to the order of the message.
    table = table.transpose(np.argsort(seen.order))
    with np.errstate(invalid="ignore"):
        without = table - message
    return np.where(np.isfinite(message), without, np.inf)


def _arm(bucket: Bucket, seen: Input, tables: Sequence[FloatArray]) -> FloatArray:
    """A table by the classes of the bucket, with an axis for each of its variables."""
    table = tables[seen.factor].transpose(seen.order)
    table = table[np.ix_(*seen.picks)]
    shape = [1] * len(bucket.shape)
    for axis, size in zip(seen.axes, table.shape, strict=True):
        shape[axis] = size
    return table.reshape(shape)


def _grouped_min(table: FloatArray, axis: int, classes: IntArray) -> FloatArray:
    """Least entry of each class along an axis."""
    if (classes == np.arange(len(classes))).all():
        return table
    order = np.argsort(classes, kind="stable")
    starts = np.searchsorted(classes[order], np.arange(int(classes.max()) + 1))
    return np.minimum.reduceat(table.take(order, axis=axis), starts, axis=axis)
