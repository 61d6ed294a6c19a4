"""The command line, called in this process."""

from typer.testing import CliRunner, Result

from autoshard.cli import app


def autoshard(*arguments: object) -> Result:
    """Run a command; its arguments are written out as in a shell."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])
