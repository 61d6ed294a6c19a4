"""Values and paths as people know them, and the patterns with which people name them."""

from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from autoshard.errors import ArgumentTypeError
from autoshard.graph.export.python_state.description.paths import (
    CALLED,
    CHILDREN,
    Path,
    is_of_model,
    path_text,
)
from autoshard.graph.export.python_state.description.values import Value

_LONGEST = 200
_HIDDEN = ("__code__", "__closure__", "__defaults__", "__kwdefaults__")
"""Parts of functions, which are shown as the function."""


def shown(value: Value) -> str:
    """A description of a value as readers know the value."""
    if not isinstance(value, dict) or len(value) != 1:
        return repr(value)
    kind, detail = next(iter(value.items()))
    show = _SHOWN.get(kind)
    text = str(detail).rpartition(":")[2] if show is None else show(detail)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _each(detail: Value) -> str:
    return ", ".join(map(shown, detail)) if isinstance(detail, list) else f"{detail} elements"


def _items(detail: Value) -> str:
    if not isinstance(detail, list):
        return f"{detail} items"
    return ", ".join(": ".join(map(shown, x)) for x in detail if isinstance(x, list))


def _alternatives(detail: Value) -> str:
    return (" or ".join(map(shown, detail)) if isinstance(detail, list) else "") or "none"


_SHOWN: Mapping[str, Callable[[Value], str]] = {
    "missing": lambda _: "missing",
    "list": lambda x: f"[{_each(x)}]",
    "tuple": lambda x: f"({_each(x)})",
    "set": lambda x: f"{{{_each(x)}}}",
    "deque": lambda x: f"deque({_each(x)})",
    "partial": lambda x: f"partial({_each(x)})",
    "dict": lambda x: f"{{{_items(x)}}}",
    "hooks": _alternatives,
    "either": _alternatives,
    "tensor": lambda _: "a tensor",
    "device": lambda _: "a device",
    "module": lambda x: f"a {str(x).rpartition(':')[2]}",
    "object": lambda x: f"a {str(x).rpartition(':')[2]}",
    "other": lambda x: f"another {x}",
    "same": lambda x: f"that of {str(x)!r}",
    "context": shown,
    "text": lambda x: f"text {x}",
    "array": lambda x: f"array {x}",
    "bytes": lambda x: f"bytes {x}",
    "code": lambda x: f"code {x}",
}
"""By kind of value; others are names."""


def shown_path(path: Path) -> str:
    """A path as it is shown and matched: without what is only of use to look it up."""
    parts = [part for part in path if part not in (*_HIDDEN, CALLED)]
    if parts and parts[-1] == CHILDREN:
        parts.pop()
    if is_of_model(tuple(parts)):
        return path_text(tuple(parts))
    root, *rest = parts
    module, _, name = str(root).rstrip(":").partition(":")
    return ".".join(filter(None, (name or module, path_text(tuple(rest)))))


def check_patterns(patterns: Any) -> None:
    """Check that patterns are given as a list, not as one string.

    Raises:
        ArgumentTypeError: they are not.
    """
    is_list = isinstance(patterns, Collection) and not isinstance(patterns, str)
    if not is_list or not all(isinstance(one, str) for one in patterns):
        raise ArgumentTypeError(
            f"ignore_state is {patterns!r}: pass a list of patterns, such as ['layers.0.calls']"
        )


def is_ignored(path: Path, patterns: Iterable[str]) -> bool:
    """True if a pattern matches a path, or what holds it."""
    names = [shown_path(path[:end]) for end in range(1, len(path) + 1)] if patterns else []
    return any(
        name == pattern or fnmatchcase(name, pattern)
        for pattern in patterns
        for name in filter(None, names)
    )
