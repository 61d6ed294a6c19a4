"""Readers of attributes and variables, by the frames that run."""

from types import FrameType
from typing import Any

from torch import nn

from autoshard.graph.export.python_state.user_code.code import is_user_code


def is_asked_for(frame: FrameType, holder: Any) -> bool:
    """True if user code asks for all attributes, or Python's `copy` and `dataclasses` do for it."""
    file = frame.f_code.co_filename
    return is_user_code(file) or (not isinstance(holder, nn.Module) and "torch" not in file)


def is_read_by_user(frame: FrameType | None) -> bool:
    """True if user code reads an environment variable, through whichever function of `os`."""
    while frame is not None and frame.f_globals.get("__name__") in ("os", "collections.abc"):
        frame = frame.f_back
    return frame is not None and is_user_code(frame.f_code.co_filename)


_OF_CHILDREN = ("torch/nn/modules/module.py", "torch/nn/modules/container.py")


def iterates_over_children(frame: FrameType | None) -> bool:
    """True if forward of the user or of a container iterates, and not torch's tracing."""
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.endswith(_OF_CHILDREN):
            return is_user_code(code.co_filename)
        if code.co_name in ("__getattr__", "__setattr__", "__delattr__"):
            return False
        if code.co_qualname == "ModuleDict.__getitem__":
            return False
        if code.co_name == "forward":
            return True
        frame = frame.f_back
    return False
