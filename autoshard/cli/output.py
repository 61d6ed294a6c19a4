"""What all commands share: where they print, how they say what is wrong, how they read plans."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

from autoshard.errors import AutoshardError, PlanError
from autoshard.plan import Plan

console = Console()
errors = Console(stderr=True)


@contextmanager
def reported() -> Iterator[None]:
    """Users see what is wrong with their input, not where we noticed."""
    try:
        yield
    except (AutoshardError, OSError) as error:
        errors.print(marked("error:", error), soft_wrap=True)
        raise typer.Exit(1) from None


def marked(word: str, what: object) -> Text:
    """What is wrong behind a red word; not as markup, since it may have brackets in it."""
    return Text.assemble((word, "bold red"), f" {what}")


def read_plan(path: Path) -> Plan:
    """The plan in a file.

    Raises:
        PlanError: it holds none; the message names the file.
    """
    try:
        return Plan.from_json(path.read_bytes())
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
