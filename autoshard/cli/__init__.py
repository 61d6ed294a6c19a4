"""The command line: what is asked is read here, and what comes out is written here."""

from autoshard.cli.main import app, main
from autoshard.cli.planning import NO_PLAN

__all__ = ["NO_PLAN", "app", "main"]
