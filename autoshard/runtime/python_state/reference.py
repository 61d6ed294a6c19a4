"""A record of a model as it is, for plans whose exports have none.

Those are exports of `torch.export` itself, or of earlier versions. What their forward reads is not
known, so all plain attributes of modules count, and modes count where an operator or the class of a
module says that it follows them.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from autoshard.graph import OPAQUE_MODULE, Graph, training_modules
from autoshard.graph.export.python_state.description.paths import (
    CALLED,
    CHILDREN,
    HOOKS,
    MODE,
    Path,
    find_place,
    instance_dict,
    name_of,
)
from autoshard.graph.export.python_state.description.values import (
    Value,
    children_of,
    describe,
    hooks_of,
)
from autoshard.graph.export.python_state.user_code.code import code_digest, is_user_module
from autoshard.graph.export.python_state.user_code.holders import MODULE_FIELDS, class_path
from autoshard.torch_private import BatchNormBase, DropoutBase

_UNKNOWN = frozenset({"object", "tensor", "module", "random", "iterator", "context", "array"})
"""Kinds of values of which it is not known what forward reads."""

_WITH_MODES = (BatchNormBase, DropoutBase)


def reference_record(model: nn.Module, kind: type[nn.Module], graph: Graph) -> dict[Path, Value]:
    """A record of a model as it is.

    Args:
        model: the model.
        kind: its class before a plan was applied.
        graph: of the plan.
    """
    whole = tuple(f"{n.module}." for n in graph.nodes if n.operator == OPAQUE_MODULE)
    modules = {n: m for n, m in model.named_modules() if not f"{n}.".startswith(whole or ("\n",))}
    acting = training_modules(graph)
    known = graph.model.training if graph.model else None
    was_training = any(acting.values()) if known is None else known
    found: dict[Path, Value] = {}
    for name, module in modules.items():
        path = tuple(name.split(".")) if name else ()
        found.update(_of_module(path, module, type(module) if name else kind))
        mode = acting.get(name)
        if mode is None and _follows_mode(module) and not was_training:
            mode = False
        if mode == was_training or (mode is not None and isinstance(module, _WITH_MODES)):
            found[*path, MODE] = mode
    return found


def _of_module(
    path: Path, module: nn.Module, kind: type[nn.Module]
) -> Iterator[tuple[Path, Value]]:
    own = instance_dict(module)
    yield path, {"module": name_of(kind)}
    yield (*path, CALLED), True
    if own[CHILDREN]:
        yield (*path, CHILDREN), children_of(module)
    for name in HOOKS if path else ():
        if own[name]:
            yield (*path, name), hooks_of(own[name])
    plain: dict[str, Any] = {n: value for n, value in own.items() if n not in MODULE_FIELDS}
    plain.update((n, buffer) for n, buffer in own["_buffers"].items() if buffer is None)
    for name, value in plain.items():
        described = describe(value)
        is_known = not isinstance(described, dict) or described.keys().isdisjoint(_UNKNOWN)
        if is_known and name != MODE and not name.startswith("_"):
            yield (*path, name), described
    place = find_place(kind, "forward")
    if place is not None and place.owner is not None and is_user_module(place.owner.__module__):
        forward = (*class_path(place.owner), "forward")
        yield forward, describe(place.value)
        if hasattr(place.value, "__code__"):
            yield (*forward, "__code__"), code_digest(place.value.__code__)


def _follows_mode(module: nn.Module) -> bool:
    """True if a module computes something else in training mode than in evaluation mode."""
    if isinstance(module, DropoutBase):
        return module.p > 0
    if isinstance(module, BatchNormBase):
        return module.running_mean is not None
    return any(
        "drop" in name and isinstance(value, float) and value > 0
        for name, value in vars(module).items()
    )
