"""Tensors that modules hold beside parameters and buffers, such as in a list, and where they are.

An exported program has them as constants without a name. The export records the path of each, so
that a plan finds its value in the model to which it is applied.
"""

from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from autoshard.errors import ExportError
from autoshard.graph.archive.read import CONSTANT_BYTES
from autoshard.graph.export.python_state.description.paths import (
    Key,
    Path,
    PythonPlace,
    elements,
    instance_dict,
    path_text,
)

_NOT_SEARCHED = (nn.Module, torch.Tensor, type, ModuleType, FunctionType, MethodType)
_REGISTERED = ("_parameters", "_buffers", "_modules")


def held_tensors(model: nn.Module) -> Iterator[tuple[Path, PythonPlace]]:
    """Yield tensors in attributes of modules, and in containers and objects there, with paths.

    Args:
        model: the model; what its modules have registered is left out.
    """
    seen: set[int] = set()
    for name, module in model.named_modules():
        path: Path = tuple(name.split(".")) if name else ()
        own = vars(module)
        waiting = [
            ((*path, key), PythonPlace(own, key, value))
            for key, value in own.items()
            if key not in _REGISTERED
        ]
        while waiting:
            at, place = waiting.pop()
            if isinstance(place.value, torch.Tensor):
                yield at, place
            if id(place.value) not in seen and not isinstance(place.value, _NOT_SEARCHED):
                seen.add(id(place.value))
                waiting += [((*at, part), found) for part, found in _inside(place.value)]


def _inside(holder: Any) -> list[tuple[str | Key, PythonPlace]]:
    found: list[tuple[str | Key, PythonPlace]] = [
        (key, PythonPlace(holder, key.key, value)) for key, value in elements(holder)
    ]
    own = instance_dict(holder)
    return found + [(name, PythonPlace(own, name, value)) for name, value in own.items()]


def constant_paths(program: ExportedProgram, model: nn.Module, what: str) -> dict[str, str]:
    """The paths of the constants of an exported program that the model holds, by name.

    Args:
        program: traced on the meta device.
        model: that was traced.
        what: its name in messages.

    Raises:
        ExportError: the value of a constant is lost, or its gradient.
    """
    held = [(path_text(path), place) for path, place in held_tensors(model)]
    paths = {id(place.value): path for path, place in held}
    in_tuples = {path: place.value for path, place in held if isinstance(place.holder, tuple)}
    parameters = {path: x for path, x in in_tuples.items() if isinstance(x, nn.Parameter)}
    constants = {
        str(spec.target): (spec.arg.name, program.constants[str(spec.target)])
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.CONSTANT_TENSOR and spec.target in program.constants
    }
    used = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    found: dict[str, str] = {}
    for name, (node, tensor) in constants.items():
        if not isinstance(tensor, torch.Tensor) or not used[node].users:
            continue
        path = paths.get(id(tensor))
        if path is None and tensor.is_meta:  # tracing has replaced parameters by other tensors
            path = next((p for p, x in parameters.items() if _are_alike(x, tensor)), None)
            if path is None:
                raise ExportError(_lost(what, next(iter(used[node].users)), tensor))
        if tensor.requires_grad or path in parameters:
            raise ExportError(
                f"forward of {what} reads {path!r}, whose gradient would be lost: make it a "
                f"parameter of a module, and read it as its attribute or in a list or dict, not "
                f"in a tuple; or call requires_grad_(False)"
            )
        if path is not None:
            found[name] = path
    return found


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)


def _lost(what: str, user: torch.fx.Node, tensor: torch.Tensor) -> str:
    lines = str(user.meta.get("stack_trace") or "").strip().splitlines()
    at = " ".join(line.strip() for line in lines[-2:])
    return (
        f"forward of {what} makes a tensor {list(tensor.shape)} of data that an export on the meta "
        f"device does not have ({user.target}{', ' * bool(at)}{at}); it keeps up to "
        f"{CONSTANT_BYTES:,} bytes of numbers. Make it in the constructor, with register_buffer"
    )
