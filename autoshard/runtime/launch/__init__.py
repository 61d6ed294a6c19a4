"""Starting the ranks of a plan, through PyTorch's elastic launcher."""

from autoshard.runtime.launch.functions import launch
from autoshard.runtime.launch.launched import Launched, check_world, join, launched
from autoshard.runtime.launch.timing import StepTimer

__all__ = ["Launched", "StepTimer", "check_world", "join", "launch", "launched"]
