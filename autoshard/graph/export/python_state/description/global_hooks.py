"""Hooks of all modules, as `torch.nn.modules.module.register_module_forward_hook` adds them."""

from collections.abc import Collection, Mapping
from typing import Any

from torch.nn.modules import module as torch_module

from autoshard.errors import ExportError
from autoshard.graph.export.python_state.description.paths import HOOKS, path_text
from autoshard.graph.export.python_state.description.wording import is_ignored

GLOBAL_HOOKS = f"{torch_module.__name__}:"
"""First part of the paths of these hooks."""


def global_hooks() -> dict[str, dict[int, Any]]:
    """The hooks of all modules by kind."""
    return {f"_global{name}": getattr(torch_module, f"_global{name}") for name in HOOKS}


def of_users(hooks: Mapping[int, Any]) -> dict[int, Any]:
    """Hooks that are not those of a tool of torch, such as its counters of operations."""
    return {
        number: hook
        for number, hook in hooks.items()
        if not str(getattr(hook, "__module__", "")).startswith("torch.")
    }


def check_no_global_hooks(ignored: Collection[str]) -> None:
    """Check that no hooks of all modules are registered.

    Args:
        ignored: patterns of what is not compared.

    Raises:
        ExportError: there are some, which would be traced, and run in calls of the whole model too.
    """
    names = [
        path_text((GLOBAL_HOOKS, name))
        for name, hooks in global_hooks().items()
        if of_users(hooks) and not is_ignored((GLOBAL_HOOKS, name), ignored)
    ]
    if names:
        raise ExportError(
            f"hooks of all modules are registered ({', '.join(names)}): remove them, or register "
            f"hooks of single modules, which are traced; or, where they change nothing, export "
            f"with ignore_state=['*._global*']"
        )
