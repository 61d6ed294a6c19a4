"""Tables and figures on a terminal."""

from collections.abc import Sequence

from rich.table import Table


def milliseconds(seconds: float) -> str:
    """Format seconds in milliseconds."""
    return f"{seconds * 1e3:.3f} ms"


def make_table(title: str, labels: Sequence[str], figures: Sequence[str] = ()) -> Table:
    """Make an empty table: columns of text, the first of which may wrap, then of figures."""
    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim")
    table.add_column(labels[0], style="cyan", overflow="fold")
    for label in labels[1:]:
        table.add_column(label, no_wrap=True)
    for figure in figures:
        table.add_column(figure, justify="right", no_wrap=True)
    return table


def share_text(seconds: float, total: float, *, digits: int = 1) -> str:
    """A share of a total in percent; "-" if the total is 0."""
    return f"{seconds / total:.{digits}%}" if total else "-"
