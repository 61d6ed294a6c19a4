"""The summary of a plan, as commands print it, and the commands that it names."""

from pathlib import Path
from shlex import quote

from rich.text import Text

from autoshard.cli.rendering.output import console
from autoshard.cli.rendering.wording import in_flags
from autoshard.plan import Plan


def print_summary(plan: Plan, *, graph: Path | None = None, source: str | None = None) -> None:
    """Print the summary of a plan, wrapped on a terminal only.

    Args:
        plan: the plan, or a document without one.
        graph: file of its graph, if known.
        source: file, id or address of the plan; None if it was not written.
    """
    width = console.width if console.is_terminal else None
    text = plan.summary(width=width, commands=_next_commands(plan, graph, source))
    console.print(Text(in_flags(text)), soft_wrap=True)


def _next_commands(plan: Plan, graph: Path | None, source: str | None) -> tuple[str, ...]:
    if not plan.found:
        return ()
    if source is None:
        return ("add -o plan.json to keep the plan",)
    file = quote(source)
    commands = [f"autoshard show {file} --all"]
    commands += [] if graph is None else [f"autoshard check {quote(str(graph))} {file}"]
    return (*commands, f"autoshard launch --plan {file} train.py")
