"""Starts the ranks of a plan with PyTorch's elastic launcher."""

from autoshard.launching.context import (
    LaunchContext,
    StepTimer,
    check_world,
    get_context,
    join,
    own_gpu,
    synchronize,
)
from autoshard.launching.functions import launch

__all__ = [
    "LaunchContext",
    "StepTimer",
    "check_world",
    "get_context",
    "join",
    "launch",
    "own_gpu",
    "synchronize",
]
