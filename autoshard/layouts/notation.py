"""Layouts as texts for people: in the words of DTensor, or in the short notation with a legend.

A layout is `Replicate` for both `I` and `R`, as in DTensor. Where both occur for one tensor, `R` is
`Replicate (gradient Partial)`.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Literal

from autoshard.layouts.layout import AxisType, Kind, Layout

Notation = Literal["dtensor", "short"]
"""Words of DTensor, or one letter per type."""

_LAYOUT = re.compile(
    r"(?:[IRP]|S\(\d+\)(?:/\d+(?:\+\d+)+)?)(?:,(?:[IRP]|S\(\d+\)(?:/[\d+]+)?))*(?:;\d+(?:>\d+)+)*"
)

_MEANINGS = {
    "I": "I = Replicate, each rank has the full gradient",
    "R": "R = Replicate, gradients of ranks are summed (Partial)",
    "P": "P = Partial, values of ranks are summed",
    "S": "S(d) = Shard(d)",
    "/": "S(d)/1+1+1 = Shard(d) of each of three sections of dim d (_StridedShard)",
    ";": ";1>0 = axis 1 shards the dim before axis 0",
}
"""Symbols of the short notation, and what they mean."""


def layout_words(layout: Layout, *, gradients: bool = False) -> str:
    """A layout in DTensor's words: one placement per mesh axis.

    Args:
        layout: the layout.
        gradients: True to distinguish `I` and `R` by their gradients.

    Example:
        >>> layout_words(Layout.parse("S(0),R"))
        'Shard(0), Replicate'
    """
    text = ", ".join(_words(axis_type, gradients=gradients) for axis_type in layout.types)
    orders = (" then ".join(f"axis {axis}" for axis in order) for order in layout.nesting)
    return "".join([text, *(f" ({order})" for order in orders)])


def text_words(text: str, *, notation: Notation = "dtensor", gradients: bool = False) -> str:
    """A text in which every layout of the short notation is in a notation.

    Several layouts of several axes each are in parentheses.

    Example:
        >>> text_words("S(0),R R,R -> S(0),R")
        '(Shard(0), Replicate) (Replicate, Replicate) -> (Shard(0), Replicate)'
    """
    if notation == "short":
        return text.replace(",", ", ")
    words = text.split(" ")
    layouts = [word for word in words if _LAYOUT.fullmatch(word)]

    def convert(word: str) -> str:
        if not _LAYOUT.fullmatch(word):
            return word
        layout = Layout.parse(word)
        converted = layout_words(layout, gradients=gradients)
        return f"({converted})" if len(layouts) > 1 and len(layout.types) > 1 else converted

    return " ".join(map(convert, words))


def texts_words(texts: Sequence[str], *, notation: Notation = "dtensor") -> list[str]:
    """Texts in a notation, in which different texts stay different.

    `R` is distinguished from `I` only if two texts would be equal otherwise.
    """
    words = [text_words(text, notation=notation) for text in texts]
    if len(set(words)) == len(set(texts)):
        return words
    return [text_words(text, notation=notation, gradients=True) for text in texts]


def legend(texts: Iterable[str]) -> str:
    """Meanings of the symbols of the short notation that occur in texts."""
    joined = " ".join(texts)
    return "; ".join(meaning for symbol, meaning in _MEANINGS.items() if symbol in joined)


def _words(axis_type: AxisType, *, gradients: bool) -> str:
    if axis_type.kind is Kind.PARTIAL:
        return "Partial"
    if axis_type.kind is Kind.REPLICATE and gradients:
        return "Replicate (gradient Partial)"
    if axis_type.is_replicated:
        return "Replicate"
    if not axis_type.sub_shards:
        return f"Shard({axis_type.dim})"
    if len(set(axis_type.sub_shards)) == 1:
        return f"_StridedShard({axis_type.dim}, split_factor={len(axis_type.sub_shards)})"
    sections = "+".join(map(str, axis_type.sub_shards))
    return f"Shard({axis_type.dim}) of each section {sections}"
