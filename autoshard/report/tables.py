"""Tables of reports: typed columns and raw values, and their text without colours.

A report is built once as tables and sentences. Text on a given width has at most that width where
words allow it: long names are shortened in the middle, texts wrapped between words. Elsewhere,
such as in a pipe, nothing is shortened or wrapped.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import zip_longest
from textwrap import wrap
from time import time

from autoshard.base.quantities import format_bytes, format_seconds

Cell = str | int | float | bool | None
"""A raw value; None for one that does not exist."""

_MIN_NAME = 12
"""Minimum width of a shortened name."""
PADDING = 2
"""Spaces between two columns of a table."""


class Unit(StrEnum):
    """Unit of the values of a column."""

    NAME = "name"
    """A dotted name, which may be shortened in the middle to fit a terminal."""
    TEXT = "text"
    COUNT = "count"
    SECONDS = "seconds"
    BYTES = "bytes"
    SHARE = "share"
    """A fraction of 1."""
    RATIO = "ratio"
    UNIX_TIME = "unix_time"
    """Seconds since 1970."""

    @property
    def is_number(self) -> bool:
        """True if values are aligned to the right."""
        return self not in {Unit.NAME, Unit.TEXT}


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its heading and unit."""

    heading: str
    unit: Unit = Unit.TEXT

    @property
    def key(self) -> str:
        """Its name in CSV and JSON, with the unit."""
        name = self.heading.replace(" ", "_").replace("/", "_per_").replace(",", "")
        has_unit = self.unit in {Unit.SECONDS, Unit.BYTES, Unit.SHARE, Unit.UNIX_TIME}
        return f"{name}_{self.unit}" if has_unit and not name.endswith(self.unit) else name

    def text(self, cell: Cell) -> str:
        """A value as text for people."""
        if cell is None:
            return "-"
        if isinstance(cell, bool):
            return "yes" if cell else "no"
        if isinstance(cell, str):
            return cell
        return _FORMATS[self.unit](cell)


def milliseconds(seconds: float) -> str:
    """Format seconds in milliseconds."""
    return f"{seconds * 1e3:.3f} ms"


def ago(unix_time: float, clock: Callable[[], float] = time) -> str:
    """Format a moment as the time since then."""
    seconds = max(0.0, clock() - unix_time)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _signed(value: float, text: Callable[[float], str]) -> str:
    return f"-{text(-value)}" if value < 0 else text(value)


_FORMATS: Mapping[Unit, Callable[[float], str]] = {
    Unit.NAME: str,
    Unit.TEXT: str,
    Unit.COUNT: str,
    Unit.SECONDS: lambda cell: _signed(cell, format_seconds),
    Unit.BYTES: lambda cell: _signed(cell, format_bytes),
    Unit.SHARE: lambda cell: f"{cell:.1%}",
    Unit.RATIO: lambda cell: f"{cell:.2f}",
    Unit.UNIX_TIME: ago,
}


@dataclass(slots=True)
class Table:
    """A table of a report.

    Attributes:
        key: its name in JSON.
        title: its title as text; may be empty.
        columns: its columns.
        rows: a value for each column.
        bold: numbers of the rows that are shown in bold on a terminal.
        limit: maximum rows as text; None for all. CSV and JSON have all rows.
    """

    key: str
    title: str
    columns: tuple[Column, ...]
    rows: list[tuple[Cell, ...]] = field(default_factory=list)
    bold: set[int] = field(default_factory=set)
    limit: int | None = None

    def add(self, *cells: Cell, bold: bool = False) -> None:
        """Add a row."""
        assert len(cells) == len(self.columns)
        if bold:
            self.bold.add(len(self.rows))
        self.rows.append(cells)

    @property
    def texts(self) -> list[list[str]]:
        """The rows that are shown as text."""
        shown = self.rows[: self.limit]
        return [[c.text(x) for c, x in zip(self.columns, row, strict=True)] for row in shown]

    @property
    def remainder(self) -> str:
        """A line about rows that are not shown as text; empty if there are none."""
        left = len(self.rows) - len(self.rows[: self.limit])
        return f"and {left} more" if left else ""


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence of a report, which CSV leaves out.

    Attributes:
        text: the sentence.
        style: its style on a terminal.
    """

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """The output of a command: tables and sentences, in order."""

    parts: tuple[Table | Sentence, ...]

    @classmethod
    def of(cls, *parts: Table | Sentence) -> "Report":
        """A report of these parts."""
        return cls(parts)

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables."""
        return tuple(part for part in self.parts if isinstance(part, Table))


def plain_lines(table: Table, width: int | None = None) -> Iterator[str]:
    """The lines of a table: a title, headings, rows; columns are aligned.

    Args:
        table: the table.
        width: columns at which texts are wrapped and names shortened; None for no limit.
    """
    if table.title:
        yield table.title
    texts = [[column.heading for column in table.columns], *table.texts]
    widths = [max(len(row[i]) for row in texts) for i in range(len(table.columns))]
    if width is not None:
        widths = fitted_widths(table.columns, texts[1:], width)
    for row in texts:
        cells = [
            [shorten(text, size)] if column.unit is Unit.NAME else wrap(text, size) or [""]
            for column, size, text in zip(table.columns, widths, row, strict=True)
        ]
        for line in zip_longest(*cells, fillvalue=""):
            shown = (
                f"{text:>{size}}" if column.unit.is_number else f"{text:{size}}"
                for column, size, text in zip(table.columns, widths, line, strict=True)
            )
            yield (" " * PADDING).join(shown).rstrip()


def fitted_widths(
    columns: Sequence[Column], texts: Sequence[Sequence[str]], width: int
) -> list[int]:
    """The width of each column, so that a table fits a width if that is possible.

    Texts are wrapped between words first; then names are shortened.
    """
    cells = [[column.heading, *(row[i] for row in texts)] for i, column in enumerate(columns)]
    widths = [max(map(len, column)) for column in cells]
    words = [max(len(word) for cell in column for word in cell.split() or [""]) for column in cells]
    texts_first = [(Unit.TEXT, words), (Unit.NAME, [_MIN_NAME] * len(columns))]
    excess = sum(widths) + PADDING * (len(widths) - 1) - width
    for unit, least in texts_first:
        shrinking = [i for i, column in enumerate(columns) if column.unit is unit]
        while excess > 0 and any(widths[i] > least[i] for i in shrinking):
            widest = max((i for i in shrinking if widths[i] > least[i]), key=widths.__getitem__)
            widths[widest] -= 1
            excess -= 1
    return widths


def shorten(name: str, width: int) -> str:
    """A name of at most `width` characters, without its middle if it is longer.

    >>> shorten("model.layers.{0..31}.self_attn.q_proj.weight", 24)
    'model.layer...oj.weight'
    """
    if len(name) <= width:
        return name
    left = (width - 3 + 1) // 2
    right = width - 3 - left
    return f"{name[:left]}...{name[len(name) - right :]}"


def share_of(seconds: float, total: float) -> float | None:
    """A share of a total; None if the total is 0."""
    return seconds / total if total else None
