"""Attributes of classes that are replaced for a time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_ABSENT = object()


def own_attribute(kind: type, name: str) -> object:
    """The attribute that a class itself has under a name, for `restore`."""
    return vars(kind).get(name, _ABSENT)


def restore(kind: type, name: str, before: object) -> None:
    """Give a class back what `own_attribute` returned."""
    if before is _ABSENT:
        delattr(kind, name)
    else:
        setattr(kind, name, before)


@contextmanager
def patched(
    kind: type, name: str, patch: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """A context in which a method is replaced by what a function makes of it."""
    before = own_attribute(kind, name)
    setattr(kind, name, patch(getattr(kind, name)))
    try:
        yield
    finally:
        restore(kind, name, before)
