"""Environment variables of clients."""

SERVER_VARIABLE = "AUTOSHARD_SERVER"
"""URL of the planning service."""
