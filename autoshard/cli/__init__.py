"""The command line interface: reads options, calls a client, and prints the results."""

from autoshard.cli.exit_codes import ExitCode
from autoshard.cli.main import app, main

__all__ = ["ExitCode", "app", "main"]
