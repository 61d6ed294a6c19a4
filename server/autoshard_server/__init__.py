"""The REST service: makes plans with `autoshard`, caches them, and serves them."""

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

_MODULES = {"Settings": "settings", "create_app": "app", "serve": "serve"}


def __getattr__(name: str) -> Any:
    """Import a public name on first use: solver processes need no web framework."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULES.get(name, "solvers.executor")
    return getattr(import_module(f"{__name__}.{module}"), name)
