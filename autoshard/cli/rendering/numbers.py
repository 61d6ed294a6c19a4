"""Options of commands that are numbers: what is not one, or out of range, ends the command."""

from math import isnan
from typing import Any

import typer

from autoshard.base.arguments import MAX_SECONDS
from autoshard.base.integers import MAX_INT32

_MOST = 1e18
"""Largest amount of an option."""
_MAX_DURATION = 100_000
"""Most hours or days of an option."""


def count(*flags: str, help: str, least: int = 1) -> Any:  # noqa: A002  as typer.Option names it
    """An option that is a whole number of things."""
    return typer.Option(*flags, min=least, max=MAX_INT32, help=help)


def duration(*flags: str, help: str, unit: str) -> Any:  # noqa: A002  as typer.Option names it
    """An option that is a time, in a unit such as days."""
    largest = MAX_SECONDS if unit == "seconds" else _MAX_DURATION
    metavar = unit.upper()
    return typer.Option(
        *flags, min=0, max=largest, metavar=metavar, callback=_check_number, help=help
    )


def amount(*flags: str, help: str) -> Any:  # noqa: A002  as typer.Option names it
    """An option that is a number of things or a price, perhaps not a whole one."""
    return typer.Option(*flags, min=0, max=_MOST, callback=_check_number, help=help)


def share(*, most: float, help: str) -> Any:  # noqa: A002  as typer.Option names it
    """An option that is a share of something, 0.02 for 2 %."""
    return typer.Option(min=0, max=most, metavar="SHARE", callback=_check_number, help=help)


def _check_number(value: float | None) -> float | None:
    """Refuse what is not a number: it is within any range."""
    if value is not None and isnan(value):
        raise typer.BadParameter("nan is not a number")
    return value
