"""Settings in files: TOML, YAML, JSON, and what a Python function sets, without running it."""

import ast
import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autoshard.base.extras import from_extra
from autoshard.base.files import read_file
from autoshard.errors import OptionError


def settings_of_file(path: Path) -> Mapping[str, Any]:
    """The settings of a TOML, YAML or JSON file.

    Raises:
        OptionError: the file cannot be read.
    """
    text = read_file(path, OptionError).decode(errors="replace")
    try:
        if path.suffix == ".toml":
            return tomllib.loads(text)
        if path.suffix == ".json":
            found = json.loads(text)
        else:
            with from_extra("transformers"):
                import yaml  # noqa: PLC0415  a package of accelerate
            try:
                found = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise OptionError(f"{path}: {error}") from None
    except ValueError as error:
        raise OptionError(f"{path}: {error}") from None
    if not isinstance(found, dict):
        raise OptionError(f"{path} has no settings: it is no object")
    return found


def flattened(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted name."""
    return dict(_flat(settings, ""))


def _flat(settings: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def constants_of_python(path: Path) -> dict[str, Any]:
    """The constants of a Python file, which is not run."""
    return _module(path)[1]


def settings_of_function(path: Path, name: str) -> dict[str, Any]:
    """The settings that a function of a Python file makes, by dotted name, without running it.

    Read are `config.section.name = value`, keyword arguments of the call that is returned, and
    functions of the same file whose result is changed. Values are constants.

    Raises:
        OptionError: there is no such function.
    """
    functions, constants = _module(path)
    if name not in functions:
        raise OptionError(f"{path} has no function {name!r}; it has {', '.join(functions)}")
    return _of_function(functions, constants, name, frozenset())


Functions = Mapping[str, ast.FunctionDef]


def _module(path: Path) -> tuple[dict[str, ast.FunctionDef], dict[str, Any]]:
    try:
        tree = ast.parse(read_file(path, OptionError))
    except (SyntaxError, ValueError) as error:
        raise OptionError(f"{path}: {error}") from None
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    constants: dict[str, Any] = {}
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and value is not None:
            found = _constant(value, constants)
            if found is not _UNKNOWN:
                constants[target.id] = found
    return functions, constants


_UNKNOWN = object()


def _constant(node: ast.AST, names: Mapping[str, Any]) -> Any:
    """The value of an expression of constants."""
    if isinstance(node, ast.Name):
        return names.get(node.id, _UNKNOWN)
    if isinstance(node, ast.Attribute):  # such as torch.bfloat16
        return ast.unparse(node)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return _UNKNOWN


def _of_function(
    functions: Functions, constants: Mapping[str, Any], name: str, inside: frozenset[str]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for node in ast.walk(functions[name]):
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            place = ast.unparse(target).partition(".")[2]
        elif isinstance(node, ast.Return) and node.value is not None:
            value, place = node.value, ""
        else:
            continue
        if isinstance(value, ast.Call):
            called = ast.unparse(value.func)
            if called in functions and called not in inside and not place:
                found |= _of_function(functions, constants, called, inside | {name})
            found |= dict(_arguments(value, constants, f"{place}." if place else ""))
        elif place:
            read = _constant(value, constants)
            found[place] = None if read is _UNKNOWN else read
    return found


def _arguments(
    call: ast.Call, constants: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, Any]]:
    for argument in call.keywords:
        if argument.arg is None:
            continue
        if isinstance(argument.value, ast.Call):
            yield from _arguments(argument.value, constants, f"{prefix}{argument.arg}.")
        else:
            found = _constant(argument.value, constants)
            if found is not _UNKNOWN:
                yield f"{prefix}{argument.arg}", found
