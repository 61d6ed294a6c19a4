"""The command line interface: reads options, calls a client, and prints the results."""

from autoshard.cli.exit_codes import NO_PLAN, ExitCode
from autoshard.cli.main import app, main

__all__ = ["NO_PLAN", "ExitCode", "app", "main"]
