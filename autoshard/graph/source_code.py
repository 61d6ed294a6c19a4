"""The code that a model's forward runs, to notice that it changed since the export."""

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType
from typing import Any

_UNCHANGED = ("torch.", "builtins")
"""Classes of torch itself are not compared: its own changes do not alter what forward means."""


def forward_code(classes: Iterable[type]) -> dict[str, str]:
    """A digest of the code of forward, and of the methods that it calls, by name of the class.

    Comments, docstrings and formatting do not count. Classes of torch, and those whose source
    cannot be read, are left out.
    """
    found = {}
    for cls in dict.fromkeys(classes):
        name = f"{cls.__module__}.{cls.__qualname__}"
        forward = getattr(cls, "forward", None)
        if name.startswith(_UNCHANGED) or not callable(forward):
            continue
        try:
            texts = sorted(_normalised(method) for method in _methods(cls, forward))
        except (OSError, TypeError, SyntaxError):
            continue
        found[name] = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
    return dict(sorted(found.items()))


def _methods(cls: type, forward: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Forward, and the methods of the class whose names its code mentions, and so on."""
    seen: set[str] = set()
    waiting = [forward]
    while waiting:
        method = inspect.unwrap(waiting.pop())
        yield method
        for name in _names(getattr(method, "__code__", None)):
            other = inspect.getattr_static(cls, name, None)
            if inspect.isfunction(other) and name not in seen:
                seen.add(name)
                if not other.__module__.startswith(_UNCHANGED):
                    waiting.append(other)


def _names(code: CodeType | None) -> Iterator[str]:
    if code is not None:
        yield from code.co_names
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from _names(constant)


def _normalised(method: Callable[..., Any]) -> str:
    tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hooked_modules(modules: Mapping[str, object]) -> tuple[str, ...]:
    """Names of the inner modules that have hooks of forward or backward.

    Args:
        modules: modules of a model by name; the model itself has an empty one.
    """
    return tuple(
        name
        for name, module in modules.items()
        if name and any(getattr(module, hooks, None) for hooks in _HOOKS)
    )
