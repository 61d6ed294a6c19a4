"""Structure of forward's arguments: their nesting in positional and named arguments."""

from collections.abc import Mapping, Sequence
from inspect import Parameter, Signature
from typing import Any

import torch

from autoshard.errors import GraphError, PlanError
from autoshard.graph.archive.tree_specs import spec_nodes
from autoshard.graph.export.structured_types import register_type
from autoshard.torch_private import pytree

_ARGUMENTS = (
    "pass those arguments, or plan an export with these too, and pass both plans together, as in "
    "parallelize(model, {'one': ..., 'other': ...}, mesh)"
)
_CACHES = frozenset({"past_key_values", "use_cache", "cache_position"})
_GENERATE = (
    "pass those arguments; generate of transformers runs with PlannedGenerator on a model "
    "with a static cache, or with an unsharded model that has the full weights, as after "
    "unsharded.load_state_dict(full_tensor(model.state_dict())) on every rank"
)

_NAMED = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_Given = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional arguments, and those by name."""


class CallStructure:
    """Flattens the arguments of a call as they were flattened when the model was exported.

    Args:
        targets: names of the flat arguments, in order.
        in_spec: JSON tree spec of (args, kwargs); may be empty.
        signature: signature of the model's forward, without `self`; None if unknown.
    """

    def __init__(
        self, targets: Sequence[str], in_spec: str, signature: Signature | None = None
    ) -> None:
        self._signature = signature
        self._targets = tuple(targets)
        self._spec = read_spec(in_spec) if in_spec else None
        self._num_positional, self._names, self._is_flat = 0, list[str](), False
        if self._spec is not None:
            positional, named = self._spec.children()
            self._num_positional, self._names = positional.num_children, list(named.context)
            passed = (*positional.children(), *named.children())
            self._is_flat = all(child.is_leaf() for child in passed)

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The arguments as a flat list in the order of the program's inputs.

        They may be passed by position or by name, and left out where they are the defaults,
        however they were passed when the model was exported.

        Raises:
            PlanError: they are not those that were exported, or are structured otherwise.
        """
        given = tuple(args), dict(kwargs)
        if self._spec is not None:
            if len(args) != self._num_positional or list(kwargs) != self._names:
                given = self._as_exported(given, self._num_positional, self._names) or given
            leaves = [*given[0], *given[1].values()]
            if self._is_flat and len(leaves) == len(self._targets) and _are_leaves(leaves):
                same = len(given[0]) == self._num_positional and list(given[1]) == self._names
                if same:
                    return leaves
        leaves, spec = pytree.tree_flatten(given)
        if self._spec is None and not kwargs and len(leaves) == len(self._targets):
            return leaves
        if spec != self._spec:
            called = _call(pytree.tree_structure((tuple(args), dict(kwargs))))
            raise PlanError(
                f"forward was exported as {self._call()}, and called as {called}: "
                f"{_GENERATE if _CACHES & kwargs.keys() else _ARGUMENTS}"
            )
        return leaves

    def _as_exported(
        self, given: _Given, num_positional: int, names: Sequence[str]
    ) -> _Given | None:
        """The arguments passed as they were exported; None where that cannot be done."""
        args, kwargs = given
        if self._signature is None:
            same = len(args) == num_positional and set(kwargs) == set(names)
            return (args, {name: kwargs[name] for name in names}) if same else None
        parameters = self._signature.parameters
        try:
            passed = self._signature.bind(*args, **kwargs).arguments
        except TypeError:
            return None
        if any(parameters[name].kind is Parameter.VAR_POSITIONAL for name in passed):
            return None
        passed = {name: x for name, x in passed.items() if parameters[name].kind in _NAMED}
        passed.update({name: x for name, x in kwargs.items() if name not in passed})
        positional = [name for name, p in parameters.items() if p.kind in _NAMED]
        wanted = [*positional[:num_positional], *names]
        defaults = {name: p.default for name, p in parameters.items() if name in positional}
        values = [passed.pop(name, defaults.get(name, Parameter.empty)) for name in wanted]
        if any(x is not defaults.get(name, Parameter.empty) for name, x in passed.items()):
            return None
        if len(positional) < num_positional or any(x is Parameter.empty for x in values):
            return None
        by_name = dict(zip(names, values[num_positional:], strict=True))
        return tuple(values[:num_positional]), by_name

    def _call(self) -> str:
        if self._spec is None:
            return f"forward({', '.join(self._targets)})"
        return _call(self._spec)


_LEAVES = (torch.Tensor, int, float, str, type(None))
"""Types of arguments that are leaves of a pytree, whatever is registered."""


def _are_leaves(values: Sequence[Any]) -> bool:
    return all(isinstance(value, _LEAVES) for value in values)


def _call(spec: pytree.TreeSpec) -> str:
    positional, keywords = spec.children()
    shown = [str(child) for child in positional.children()]
    shown += [
        f"{name}={child}" for name, child in zip(keywords.context, keywords.children(), strict=True)
    ]
    return f"forward({', '.join(shown)})"


def read_spec(text: str) -> pytree.TreeSpec:
    """Read a pytree spec written by `treespec_dumps`, without importing or running anything.

    Raises:
        PlanError: it is malformed, or names a type that is not registered as a pytree node.
    """
    try:
        for node in spec_nodes(text):
            register_type(str(node["type"]))
            if isinstance(node["context"], str):  # of a named tuple
                register_type(node["context"])
        return pytree.treespec_loads(text)
    except NotImplementedError as error:
        raise PlanError(
            f"{error}; import the module that defines this type, not inside of a function, before "
            f"applying the plan"
        ) from None
    except GraphError as error:
        raise PlanError(f"the plan: {error}") from None
    except (ValueError, TypeError, KeyError) as error:
        raise PlanError(f"the plan's tree spec cannot be read: {error}") from None
