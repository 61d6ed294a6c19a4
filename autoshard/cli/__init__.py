"""The command line interface: reads options, calls a client, and prints the results."""

from autoshard.cli.main import app, main
from autoshard.cli.planning import NO_PLAN

__all__ = ["NO_PLAN", "app", "main"]
