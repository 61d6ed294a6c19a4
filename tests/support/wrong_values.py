"""Values that an option must refuse, made from its declaration."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

_HUGE = 10**30
_BY_TYPE: dict[Any, tuple[Any, ...]] = {
    bool: ("no", "", 1, _HUGE, b"yes"),
    int: ("4", "4GB", "", 2.5, _HUGE, True),
    float: ("5", "5s", "", float("nan"), True, -1.0),
    str: (5, ["text"], 2.5, True, {}),
}
_LIST_OF_TEXTS = ("text", 5, [5], b"text", True)
_UNKNOWN_WORDS = ("INVALID", "", 5, ["INVALID"], _HUGE)
_LISTS = frozenset({Collection, Iterable, Sequence})


def wrong_values(annotation: Any) -> list[Any]:
    """Values of other types, in other units, unknown words, empty and huge ones.

    Args:
        annotation: the type with which an option is declared.

    Returns:
        values that none of its types takes.
    """
    kinds = list(_kinds(annotation))
    found = [value for kind in kinds for value in _wrong(kind)]
    return [value for value in found if not any(_takes(kind, value) for kind in kinds)]


def _kinds(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Annotated:
        yield from _kinds(get_args(annotation)[0])
    elif get_origin(annotation) in {Union, UnionType}:
        for one in get_args(annotation):
            yield from _kinds(one)
    else:
        yield annotation


def _wrong(kind: Any) -> Iterable[Any]:
    if get_origin(kind) is Literal:
        return _UNKNOWN_WORDS
    if get_origin(kind) in {*_LISTS, tuple}:
        return _LIST_OF_TEXTS
    if kind is NoneType:
        return ()
    return _BY_TYPE.get(kind, (5, 2.5, [5], True, b"text"))


def _takes(kind: Any, value: Any) -> bool:
    """True if a value is right for one of the types of a union, so no wrong one."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) in {*_LISTS, tuple}:
        return int in map(type, value) if isinstance(value, list) else False
    if kind is float:
        return isinstance(value, float | int) and not isinstance(value, bool) and value >= 0
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and 0 < value < _HUGE
    return isinstance(kind, type) and isinstance(value, kind)
