"""Shapes of meshes as strings, and names of axes."""

import re
from collections.abc import Iterable, Sequence

from autoshard.errors import MeshError

_AXIS = re.compile(r"\s*(?:([A-Za-z_][\w.-]*)\s*=\s*)?([0-9]{1,9})\s*")
_SEPARATORS = frozenset(",xX*×")  # noqa: RUF001  the multiplication sign is meant


MAX_AXES = 32
"""Maximum number of axes of a mesh."""


def check_num_axes(number: int) -> None:
    """Raise MeshError if a mesh would have too many axes."""
    if number > MAX_AXES:
        raise MeshError(f"the mesh has {number:,} axes; the limit is {MAX_AXES}")


def default_axis_names(num_axes: int) -> tuple[str, ...]:
    """Names of axes that were not named: axis0, axis1 and so on."""
    return tuple(f"axis{i}" for i in range(num_axes))


_JOINT = "+"


def join_axes(names: Iterable[str]) -> str:
    """The name of axes that communicate as one group, such as `dp+tp`; a single name as it is."""
    return _JOINT.join(names)


def split_axes(name: str) -> tuple[str, ...]:
    """The names of the axes that `join_axes` joined."""
    return tuple(name.split(_JOINT))


def check_axis_name(name: str) -> None:
    """Raise MeshError if a name could be that of several axes."""
    if _JOINT in name:
        raise MeshError(
            f"axis {name!r} must have a name without {_JOINT!r}, which joins the names of axes "
            f"that communicate as one group"
        )


def parse_shape(text: str) -> tuple[tuple[int, ...], tuple[str, ...] | None]:
    """Read the size of each mesh axis, and the names if they are given.

    Args:
        text: such as `2x4`, `2,4`, `2*4`, `8` or `dp=2,tp=4`.

    Raises:
        MeshError: the text cannot be read; the message says what to write.
    """
    sizes: list[int] = []
    names: list[str] = []
    position = 0
    while (found := _AXIS.match(text, position)) is not None:
        if found[1]:
            names.append(found[1])
        sizes.append(int(found[2]))
        position = found.end()
        if position == len(text):
            break
        if text[position] not in _SEPARATORS:
            raise _unreadable(text)
        position += 1
    else:
        raise _unreadable(text)
    if names and len(names) < len(sizes):
        raise MeshError(f"mesh {text!r} names some axes only; name all of them or none")
    return tuple(sizes), tuple(names) or None


def check_axis_names(names: Sequence[str], shape: Sequence[int]) -> None:
    """Raise MeshError unless there is one name per axis."""
    if len(names) != len(shape):
        raise MeshError(f"{len(names)} axis names are given for {len(shape)} axes")


def _unreadable(text: str) -> MeshError:
    return MeshError(
        f"{text!r} is not a mesh; write the size of each axis, outermost first, such as 2x4, or "
        "with names, such as dp=2,tp=4"
    )
