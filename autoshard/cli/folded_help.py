"""Help of a command with many options: those that people use first, and all with --help-all."""

from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperOption

_ALL = "--help-all"


def folded(first_options: tuple[str, ...]) -> type[TyperCommand]:
    """The class of a command whose --help lists only some of its options.

    Args:
        first_options: names of these, such as --mesh.
    """

    class Folded(FoldedCommand):
        first = frozenset({*first_options, "--help", _ALL})

    return Folded


class FoldedCommand(TyperCommand):
    """A command whose --help lists its `first` options, and --help-all the others too."""

    first: ClassVar[frozenset[str]]

    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self._shows_all = self._shows_help = False
        self.params.append(
            TyperOption(
                param_decls=[_ALL],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=self._show_all,
                help="Show all options and exit.",
            )
        )

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters; while help is shown, only those that it lists."""
        found = super().get_params(ctx)
        if not self._shows_help or self._shows_all:
            return found
        return [one for one in found if self.first.intersection(one.opts) or one.opts[0][0] != "-"]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, and how to see the rest of it."""
        number = len(super().get_params(ctx))
        self._shows_help = True
        left_out = number - len(self.get_params(ctx))
        self.epilog = f"{left_out} more options: {ctx.command_path} {_ALL}" if left_out else None
        try:
            super().format_help(ctx, formatter)
        finally:
            self._shows_help = False

    def _show_all(self, ctx: Any, _parameter: Any, value: bool) -> None:  # noqa: FBT001  the base's signature
        if value:
            self._shows_all = True
            typer.echo(ctx.get_help(), nl=False)
            ctx.exit()
