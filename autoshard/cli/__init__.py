"""The command line: what is asked is read here, and what comes out is written here."""

from autoshard.cli.main import NO_PLAN, app, main

__all__ = ["NO_PLAN", "app", "main"]
