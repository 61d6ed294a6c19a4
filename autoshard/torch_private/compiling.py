"""Private parts of `torch.compile`."""

import inspect
import warnings
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import torch

from autoshard.torch_private.versions import expected_of_torch

with expected_of_torch("functions that choose which Python frames are compiled"):
    from torch._C._dynamo.eval_frame import (
        _FrameAction,
        _FrameExecStrategy,
        set_code_exec_strategy,
        set_eval_frame,
    )
    from torch._dynamo import config, mark_static

P = ParamSpec("P")
T = TypeVar("T")
_RUN = ("autoshard.", "spmd_types.", "torch.distributed.tensor.")
"""Beginnings of the modules whose functions of autograd planned models run."""

_COMPILER: ContextVar[Any] = ContextVar("compiler", default=None)


def not_compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Let a compiler skip the frame of a function, and compile those that it calls.

    Relies on: `set_code_exec_strategy` says it of a code object. The public
    `torch.compiler.disable(recursive=False)` wraps the function, and `torch.compile` unwraps it.
    """
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)
    set_code_exec_strategy(function.__code__, skip)
    return function


def never_compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Let a compiler run a function, and all that it calls, as Python.

    Relies on: as `not_compiled`, for `torch.compile` of the function itself. The public
    `torch.compiler.disable` is for a compiled function that calls it.
    """
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, skip)
    disable: Any = torch.compiler.disable  # torch does not type it
    disabled: Callable[P, T] = disable(function)
    return disabled


def leave_backward_uncompiled() -> None:
    """Let a compiler skip backward of functions of autograd that planned models run.

    Where `loss.backward()` is called in a compiled function, it would compile each of them.

    Relies on: as `not_compiled`, and for all that these functions call.
    """
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    waiting: list[Any] = [torch.autograd.Function]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        backward = inspect.unwrap(vars(kind).get("backward", _first))
        if kind.__module__.startswith(_RUN) and hasattr(backward, "__code__"):
            set_code_exec_strategy(backward.__code__, skip)


def not_traced(tensors: type[T]) -> type[T]:
    """Let a compiler treat tensors of a class as it treats objects.

    Relies on: classes in this set are not wrapped. The compiler would compute with the tensor when
    it wraps it, on the ranks that compile. There is no public way.
    """
    config.nontraceable_tensor_subclasses.add(tensors)
    return tensors


@not_compiled
def end_graph(reason: str) -> None:
    """Let a compiler that traces the caller run what follows uncompiled.

    Relies on: `torch._dynamo.graph_break` does so, or is an error with the reason where a compiler
    must make one graph of all. There is no public one.
    """
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg=reason)


@not_compiled
def without_compiler(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function, of which a compiler compiles what `compiled` calls alone.

    Relies on: `set_eval_frame` sets what compiles the frames of this thread, and returns what did
    before. The public `torch.compiler.disable` has no counterpart that enables it again.
    """
    compiler = set_eval_frame(None)
    if compiler is None:
        return function(*args, **kwargs)
    token = _COMPILER.set(compiler)
    try:
        return function(*args, **kwargs)
    finally:
        _COMPILER.reset(token)
        set_eval_frame(compiler)


def has_compiler() -> bool:
    """True if `compiled` compiles."""
    return _COMPILER.get() is not None


def compiled(function: Callable[..., T], tensors: Sequence[torch.Tensor], *args: Any) -> T:
    """Call a function, compiled by the compiler that `without_compiler` has taken away.

    Args:
        function: takes the tensors and the arguments.
        tensors: their shapes are constants of the graph.
        args: further arguments.
    """
    for tensor in tensors:
        mark_static(tensor)
    with warnings.catch_warnings():
        # PyTorch warns of what its compiler does itself: it looks at `grad` of tensors that are no
        # leaves, and makes objects of functions of autograd.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        warnings.filterwarnings("ignore", ".*autograd.function.Function", DeprecationWarning)
        set_eval_frame(_COMPILER.get())
        try:
            return function(tensors, *args)
        finally:
            set_eval_frame(None)


def note_uncompiled() -> None:
    """Tell a compiler that a call runs uncompiled, for which it has to compile something."""
    if has_compiler():
        compiled(_first, (torch.zeros(1),))


def _first(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] + 1
