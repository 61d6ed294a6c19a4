"""Results of functions that are kept in their argument."""

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

Argument = TypeVar("Argument")
Result = TypeVar("Result")


def kept_in_argument(function: Callable[[Argument], Result]) -> Callable[[Argument], Result]:
    """Compute the result of a function once for each argument, an object that never changes.

    The result is stored in the object, as that of a cached property, and freed with it. This is for
    functions of modules that the module of the object's class must not import.

    Example:
        >>> @kept_in_argument
        ... def find_blocks(graph): ...
    """
    key = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def kept(argument: Argument) -> Result:
        values = vars(argument)
        if key not in values:
            values[key] = function(argument)
        result: Result = values[key]
        return result

    return kept
