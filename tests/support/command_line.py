"""The command line, called in this process."""

from typer.testing import CliRunner, Result

from autoshard.cli import app


def autoshard(*arguments: object) -> Result:
    """Run a command; its arguments are written out as in a shell."""
    return CliRunner().invoke(app, [str(a) for a in arguments], prog_name="autoshard")
