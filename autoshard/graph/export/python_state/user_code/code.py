"""Code of functions: whose it is, and a digest of what it does."""

import hashlib
import inspect
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import CodeType

import numpy as np
import torch

from autoshard.graph.export.python_state.description.values import Value

_PYTHON = tuple(
    {str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "platstdlib")}
    | {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
)
_INSTALLED = ("site-packages", "dist-packages")
_OTHERS = (
    str(Path(torch.__file__).parent),
    str(Path(np.__file__).parent),
    str(Path(__file__).parents[4]),
)
_GENERATED = ("<frozen", "<eval_with_key>", "torch/")
_LIBRARIES = frozenset({"autoshard", "mpmath", "numpy", "sympy", "torch"})
_VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}{'-O' if sys.flags.optimize else ''}"


@cache
def is_user_code(file: str) -> bool:
    """True for files that are neither of Python nor of torch, nor of this library.

    Libraries of models, such as transformers, are the user's.
    """
    if file.startswith((*_OTHERS, *_GENERATED)):
        return False
    if is_installed(file):
        return _library(file) not in _LIBRARIES
    return not file.startswith(_PYTHON)


@cache
def is_installed(file: str) -> bool:
    """True for files of installed packages, which keep caches in globals."""
    return not set(_INSTALLED).isdisjoint(Path(file).parts)


def is_installed_module(name: str) -> bool:
    """True for Python modules of installed packages."""
    return is_installed(getattr(sys.modules.get(name), "__file__", None) or "")


def _library(file: str) -> str:
    parts = Path(file).parts
    at = max(parts.index(folder) for folder in _INSTALLED if folder in parts)
    return parts[at + 1].removesuffix(".py")


def is_user_module(name: str) -> bool:
    """True if a Python module, by its name, has user code."""
    if name.partition(".")[0] in _LIBRARIES | {"builtins"} | sys.stdlib_module_names - {"__main__"}:
        return False
    module = sys.modules.get(name)
    return is_user_code(getattr(module, "__file__", None) or "<none>")


def code_digest(code: CodeType) -> Value:
    """A digest of the compiled code, in which comments, formatting and docstrings do not count.

    Python versions compile to different code; the digest names the version.
    """
    digest = hashlib.sha256(repr(_contents(code)).encode()).hexdigest()[:16]
    return {"code": f"{_VERSION} {digest}"}


def _contents(code: CodeType) -> tuple[object, ...]:
    consts = code.co_consts
    if _has_docstring(code):
        consts = (None, *consts[1:])
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return (
        code.co_code,
        tuple(map(_constant, consts)),
        code.co_names,
        (code.co_freevars, code.co_cellvars, arguments, code.co_flags & ~_DOCSTRING_FLAG),
    )


_DOCSTRING_FLAG = getattr(inspect, "CO_HAS_DOCSTRING", 0)
"""Of Python 3.13 and later; before, the first constant of a function is its docstring, or None."""


def _has_docstring(code: CodeType) -> bool:
    if _DOCSTRING_FLAG:
        return bool(code.co_flags & _DOCSTRING_FLAG)
    is_function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")
    return bool(is_function) and isinstance(next(iter(code.co_consts), None), str)


def _constant(value: object) -> object:
    if isinstance(value, CodeType):
        return _contents(value)
    if isinstance(value, frozenset):
        return sorted(map(repr, value))  # their order differs between processes
    return (type(value).__name__, repr(value))
