"""The comparison of Python state in compiled models: an operator of the graph, which runs Python.

A compiler guards what it traces, but must not trace a walk over a thousand modules. An operator
that says that it writes into the index of the step is not removed.
"""

from itertools import count
from typing import Protocol
from weakref import WeakValueDictionary

import torch

_NUMBERS = count()


class Checked(Protocol):
    """An object that can be checked before a call of a compiled model."""

    def check_own(self, name: str) -> None:
        """Check the model for the plan of a name."""


_KNOWN: WeakValueDictionary[int, Checked] = WeakValueDictionary()


def register(checked: Checked) -> int:
    """A number by which a compiled graph finds an object."""
    number = next(_NUMBERS)
    _KNOWN[number] = checked
    return number


@torch.library.custom_op("autoshard::check_state", mutates_args=("step",))
def check_state(step: torch.Tensor, number: int, name: str) -> None:
    """Check the Python state of a model when a compiled graph runs."""
    del step
    checked = _KNOWN.get(number)
    if checked is not None:
        checked.check_own(name)


@check_state.register_fake
def _(step: torch.Tensor, number: int, name: str) -> None:
    del step, number, name
