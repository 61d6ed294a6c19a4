"""A group of commands whose modules are imported when a command runs.

`autoshard --help` shows a line for each command, and `autoshard --version` shows none: neither
needs the modules of the commands, which take much longer to import.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from autoshard.cli.folded_help import folded


@dataclass(frozen=True, slots=True)
class Deferred:
    """A command that is imported when it runs.

    Attributes:
        source: module and name of a function, or of a `typer.Typer`: `package.module:name`.
        help: one line for the help of the group; the first line of the command's own help.
        panel: heading under which the help of the group lists it.
        settings: settings of the command's context.
        first_options: names of the options that its help lists without --help-all; all if empty.
    """

    source: str
    help: str
    panel: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    first_options: tuple[str, ...] = ()

    def load(self, name: str) -> TyperCommand | TyperGroup:
        """Import the command and return it under a name."""
        module, _, attribute = self.source.partition(":")
        found = getattr(import_module(module), attribute)
        if not isinstance(found, typer.Typer):
            found = _single(found, name, self)
        command = get_command(found)
        assert isinstance(command, TyperCommand | TyperGroup)
        command.name = name
        return command


class LazyGroup(TyperGroup):
    """A group of deferred commands, given as `commands`."""

    deferred: Mapping[str, Deferred]

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands.update({name: _Stub(name, d) for name, d in self.deferred.items()})

    def invoke(self, ctx: Any) -> Any:
        """Run a command; errors of the library end it with a message."""
        from autoshard.cli.rendering.output import reported  # noqa: PLC0415  only needed by a command

        with reported():
            return super().invoke(ctx)


class _Stub(TyperCommand):
    """Stands for a deferred command until it is run."""

    def __init__(self, name: str, deferred: Deferred) -> None:
        super().__init__(name, help=deferred.help, rich_help_panel=deferred.panel)
        self._deferred = deferred

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """Make the context of the command itself: arguments are parsed by its options."""
        command = self._deferred.load(str(info_name))
        return command.make_context(info_name, args, parent, **extra)


def _single(function: Callable[..., None], name: str, deferred: Deferred) -> typer.Typer:
    from autoshard.cli.options import expand_groups  # noqa: PLC0415  only needed by a command

    made = typer.Typer(add_completion=False)
    kind = folded(deferred.first_options) if deferred.first_options else TyperCommand
    settings = dict(deferred.settings)
    made.command(name, cls=kind, context_settings=settings)(expand_groups(function))
    return made
