"""Starting the ranks of a plan, through PyTorch's elastic launcher."""

from autoshard.runtime.launch.functions import launch
from autoshard.runtime.launch.launched import LaunchContext, check_world, get_context, join
from autoshard.runtime.launch.timing import StepTimer

__all__ = ["LaunchContext", "StepTimer", "check_world", "get_context", "join", "launch"]
