"""Reports of commands, printed as text, CSV or JSON.

CSV and JSON have raw values in seconds and bytes, with the unit in the name.
"""

import csv
import json
from io import StringIO
from typing import Literal

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from autoshard.report.tables import (
    PADDING,
    Report,
    Sentence,
    Table,
    Unit,
    fitted_widths,
    plain_lines,
    shorten,
)

Format = Literal["table", "csv", "json"]
"""Formats of tables."""


def write_csv(report: Report) -> str:
    """The tables as CSV with a row of names each; empty lines separate several tables."""
    texts = []
    for table in report.tables:
        text = StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([column.key for column in table.columns])
        writer.writerows(table.rows)
        texts.append(text.getvalue())
    return "\n".join(texts)


def write_json(report: Report) -> str:
    """The report as one JSON object: a list of rows for each table, and the sentences."""
    document: dict[str, object] = {
        table.key: [
            {column.key: cell for column, cell in zip(table.columns, row, strict=True)}
            for row in table.rows
        ]
        for table in report.tables
    }
    if notes := [part.text for part in report.parts if isinstance(part, Sentence)]:
        document["notes"] = notes
    return json.dumps(document, indent=1) + "\n"


def print_report(report: Report, console: Console) -> None:
    """Print a report as text; on a terminal with at most its width."""
    for part in report.parts:
        if isinstance(part, Sentence):
            console.print(Text(part.text, style=part.style), soft_wrap=not console.is_terminal)
            continue
        if console.is_terminal:
            console.print(_fitted(part, console.width))
        else:
            console.print(Text("\n".join(plain_lines(part))), soft_wrap=True)
        if part.remainder:
            console.print(part.remainder)
        if part is not report.parts[-1]:
            console.print()


def _fitted(table: Table, width: int) -> RichTable:
    texts = table.texts
    widths = fitted_widths(table.columns, texts, width)
    fitted = RichTable(
        title=table.title or None,
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=None,
        padding=(0, PADDING, 0, 0),
        pad_edge=False,
    )
    for number, (column, size) in enumerate(zip(table.columns, widths, strict=True)):
        fitted.add_column(
            column.heading,
            justify="right" if column.unit.is_number else "left",
            style="cyan" if number == 0 else None,
            width=size,
            overflow="fold",
        )
    for number, row in enumerate(texts):
        cells = [
            Text(shorten(text, size) if column.unit is Unit.NAME else text)
            for column, text, size in zip(table.columns, row, widths, strict=True)
        ]
        fitted.add_row(*cells, style="bold" if number in table.bold else None)
    return fitted
