"""Dims that hold several things one after the other, and where chunks of them lie."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from autoshard.layouts import reduced

Pieces = tuple[tuple[int, str | None], ...]
"""What lies in a dim one after the other: relative size, and the letter of a dim that is this
piece alone, if there is one."""


def within_pieces(chunks: Sequence[int], pieces: Sequence[int]) -> list[tuple[int, ...]] | None:
    """The chunks of each piece; None where one lies across the end of a piece."""
    whole, total = sum(pieces), sum(chunks)
    ends = [end * whole for end in accumulate(chunks)]
    bounds = [0, *(end * total for end in accumulate(pieces))]
    if not set(ends).issuperset(bounds[1:]):
        return None
    return [
        reduced([size for size, end in zip(chunks, ends, strict=True) if first < end <= last])
        for first, last in pairwise(bounds)
    ]
