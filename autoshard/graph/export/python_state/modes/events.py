"""The events of a call of a module: operators, calls of other modules, results."""

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from autoshard.graph.export.python_state.description.paths import Path
from autoshard.graph.export.python_state.description.queries import CONTEXTS
from autoshard.graph.export.python_state.recording.calls import ModuleCall
from autoshard.graph.export.python_state.recording.patching import patched
from autoshard.graph.export.python_state.recording.recorder import Recorder
from autoshard.graph.export.python_state.user_code.holders import identity
from autoshard.graph.export.tracing import OnMeta
from autoshard.torch_private import FakeTensorMode, TorchDispatchMode, pytree

Events = tuple[Any, ...]
"""Operators and calls of modules, the result, and at last what was changed."""


class _Numbers:
    """Numbers of tensors and modules in the order in which they are made; others are themselves.

    Args:
        module: whose modules are not made anew in each call.
    """

    def __init__(self, module: nn.Module) -> None:
        self._made: dict[int, tuple[int, Any]] = {}
        self._lasting = set(map(identity, module.modules()))

    def add(self, made: Any) -> None:
        """Number the tensors of arguments or results."""
        for leaf in pytree.tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                self._made.setdefault(id(leaf), (len(self._made), leaf))

    def of_module(self, module: nn.Module) -> Any:
        """The identity of a module; of one that forward makes, as a loss, its class and number."""
        own = identity(module)
        if own in self._lasting:
            return own
        return type(module), self._made.setdefault(own, (len(self._made), module))[0]

    def describe(self, nested: Any) -> Any:
        """The nested value, with numbers in place of tensors."""
        leaves, spec = pytree.tree_flatten(nested)
        return [self._of(leaf) for leaf in leaves], spec

    def _of(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return (type(leaf), leaf)
        # Numbers are negated, since ids are positive. A parameter that was not made here keeps its
        # id.
        known = self._made.get(id(leaf))
        return ("tensor", id(leaf) if known is None else -known[0], leaf.shape, leaf.dtype)


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Notes operators."""

    def __init__(self, events: list[Any], numbers: _Numbers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._events, self._numbers = events, numbers

    def __torch_dispatch__(
        self, func: Any, _types: Collection[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Note an operator that returns tensors, and run it."""
        described = self._numbers.describe((args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(result)):
            self._events.append((func, described))
        self._numbers.add(result)
        return result


def events_of_call(
    recorder: Recorder, module: nn.Module, call: ModuleCall, contexts: Mapping[Path, bool]
) -> Events:
    """The events of a call of a module.

    Args:
        recorder: records what it reads; what it changes is put back.
        module: on the meta device.
        call: its arguments.
        contexts: modes of torch, by their queries.
    """
    events: list[Any] = []
    numbers = _Numbers(module)
    depth = 0

    def noting(plain: Callable[..., Any]) -> Callable[..., Any]:
        def run(called: nn.Module, *args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            if depth:
                events.append((numbers.of_module(called), numbers.describe((args, kwargs))))
            depth += 1
            try:
                return plain(called, *args, **kwargs)
            finally:
                depth -= 1

        return run

    with ExitStack() as stack:
        for query, value in contexts.items():
            stack.enter_context(CONTEXTS[query](value))
        stack.enter_context(torch.random.fork_rng([]))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(torch.device("meta"))
        stack.enter_context(OnMeta())
        args, kwargs = call.make()
        numbers.add((args, kwargs))
        stack.enter_context(patched(nn.Module, "_call_impl", noting))
        stack.enter_context(recorder.recording())
        stack.enter_context(_Operators(events, numbers))
        result = module(*args, **kwargs)
        events.append(numbers.describe(result))
    return (*events, tuple(map(str, recorder.changes.found)))
