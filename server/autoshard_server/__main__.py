"""`python -m autoshard_server` starts the service; other settings are AUTOSHARD_* variables."""

import typer

from autoshard_server.serve import serve

if __name__ == "__main__":
    typer.run(serve)
