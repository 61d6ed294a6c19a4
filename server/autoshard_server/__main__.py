"""`python -m autoshard_server` starts the service; other settings are AUTOSHARD_* variables."""

import sys

import typer

from autoshard.errors import InputError
from autoshard_server.serve import serve

if __name__ == "__main__":
    try:
        typer.run(serve)
    except InputError as error:
        sys.exit(f"error: {error}")
