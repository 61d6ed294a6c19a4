"""The REST service: asks `autoshard` for plans, keeps them, and answers from what it keeps."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoshard_server.app import create_app
    from autoshard_server.serve import serve
    from autoshard_server.settings import Settings
    from autoshard_server.solvers.executor import Executor, ProcessExecutor, ThreadExecutor

__all__ = [
    "Executor",
    "ProcessExecutor",
    "Settings",
    "ThreadExecutor",
    "create_app",
    "serve",
]

_HOMES = {
    "Executor": "solvers.executor",
    "ProcessExecutor": "solvers.executor",
    "Settings": "settings",
    "ThreadExecutor": "solvers.executor",
    "create_app": "app",
    "serve": "serve",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is asked for: solver processes need no web framework."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
