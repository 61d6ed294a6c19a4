"""`python -m autoshard_server` serves; AUTOSHARD_* variables are its other settings."""

import typer

from autoshard_server.serve import serve

if __name__ == "__main__":
    typer.run(serve)
