"""Starts the ranks of a plan with PyTorch's elastic launcher."""

from autoshard.runtime.launch.context import (
    LaunchContext,
    StepTimer,
    check_world,
    get_context,
    join,
    own_gpu,
    synchronize,
)
from autoshard.runtime.launch.functions import launch

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
