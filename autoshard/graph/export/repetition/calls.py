"""A call of a module while a model is traced, and the nodes that tracing it has added."""

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import getitem
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.fx.traceback import get_current_meta

from autoshard.graph.export.python_state.description.paths import Path
from autoshard.graph.export.python_state.description.queries import QUERIES
from autoshard.graph.export.repetition.alike import is_plain
from autoshard.graph.export.tracing import AUTOCAST_DEVICES
from autoshard.torch_private import (
    FakeTensorMode,
    LiveTrace,
    OpOverload,
    TraceState,
    function_modes,
    names_after,
    pytree,
    schema_of,
    shares_memory,
)


class UnsuitedError(Exception):
    """A call that has to be traced; the message says why."""


@cache
def own_attributes() -> frozenset[str]:
    """Attributes of all tensors without memory, and of parameters. To be asked before a trace."""
    made = FakeTensorMode().from_tensor(torch.empty(0, device="meta"))
    return frozenset(vars(made)) | {"_is_param"}


def tensor_like(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The properties of a tensor that forward could see.

    Raises:
        UnsuitedError: it has a value, attributes of its own or dynamic sizes.
    """
    own = vars(tensor)
    if not own.keys() <= own_attributes():
        raise UnsuitedError("a tensor has attributes of its own")
    if own.get("constant") is not None:
        raise UnsuitedError("a tensor has a value that forward may read")
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    if any(type(size) is not int for size in (*shape, *stride)):
        raise UnsuitedError("a size is dynamic")
    flags = (tensor.requires_grad, tensor.is_leaf, tensor.is_conj(), tensor.is_neg())
    place = (tensor.device, tensor.layout, tensor.storage_offset())
    return type(tensor), shape, stride, tensor.dtype, *flags, *place


@dataclass(frozen=True)
class DescribedCall:
    """A call of a module.

    Attributes:
        module: the module.
        path: its path in the model.
        arguments: the arguments, flat.
        given: the tensors among the arguments, then parameters and buffers.
        nodes: the nodes of these.
        keys: the names under which the trace has the modules that run.
        key: equal for calls that are alike.
    """

    module: nn.Module
    path: Path
    arguments: tuple[Any, ...]
    given: tuple[torch.Tensor, ...]
    nodes: tuple[Node, ...]
    keys: tuple[str, ...]
    key: tuple[Any, ...]

    @classmethod
    def of(
        cls, trace: LiveTrace, module: nn.Module, path: Path, args: Any, kwargs: Mapping[str, Any]
    ) -> "DescribedCall":
        """Describe a call that is about to be made.

        Raises:
            UnsuitedError: it has to be traced.
        """
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        given = (*tensors, *module.parameters(), *module.buffers())
        nodes = tuple(node for x in given if (node := trace.node_of(x)) is not None)
        if len(nodes) < len(given):
            raise UnsuitedError("a tensor that it is given is a constant")
        first = {node: i for i, node in reversed(list(enumerate(nodes)))}
        keys = trace.module_keys
        key = (
            type(module),
            id(trace.graph),
            keys[:-1],
            spec,
            tuple(map(_leaf_key, leaves)),
            tuple(map(tensor_like, given)),
            tuple(first[node] for node in nodes),
            tuple(state() for state in _STATES),
            function_modes(),
            tuple(_callers()),
        )
        return cls(module, path, tuple(leaves), given, nodes, keys, key)


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return torch.Tensor
    if not is_plain(leaf):
        raise UnsuitedError(f"an argument is a {type(leaf).__name__}")
    return type(leaf), repr(leaf)


_BACKENDS = torch.backends.cuda
_STATES: tuple[Callable[[], object], ...] = (
    *QUERIES.values(),
    torch.initial_seed,
    torch.is_autocast_cache_enabled,
    *(partial(torch.is_autocast_enabled, device) for device in AUTOCAST_DEVICES),
    *(partial(torch.get_autocast_dtype, device) for device in AUTOCAST_DEVICES),
    *(_BACKENDS.flash_sdp_enabled, _BACKENDS.mem_efficient_sdp_enabled),
    *(_BACKENDS.math_sdp_enabled, _BACKENDS.cudnn_sdp_enabled),
    lambda: repr(get_current_meta().get("custom")),
)
"""States of torch that a layer may ask for, or that are annotated to its nodes."""


def _callers() -> Iterator[tuple[int, int]]:
    """The lines that run, from the innermost: they are annotated to nodes."""
    frame = sys._getframe(3)  # noqa: SLF001  the documented way
    while frame is not None:
        yield id(frame.f_code), frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]


@dataclass(frozen=True)
class LayerResults:
    """The results of a call.

    Attributes:
        spec: the nesting.
        leaves: for each leaf, the place among the given tensors, or among those that are made, or
            a plain value.
        made: for each tensor that is made, the place of its node.
        likes: what forward could see of each of these.
        mode: makes tensors like them.
    """

    spec: pytree.TreeSpec
    leaves: tuple[tuple[str, Any], ...]
    made: tuple[int, ...]
    likes: tuple[tuple[Any, ...], ...]
    mode: Any

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for calls that return alike."""
        leaves = tuple((kind, type(x), repr(x)) for kind, x in self.leaves)
        return self.spec, leaves, self.made, self.likes


@dataclass(frozen=True)
class TracedCall:
    """The nodes that the trace of a call has added.

    Attributes:
        call: the call.
        names: names of the nodes.
        bases: the names without their numbers.
        items: of the nodes that take a result of another one, the place of that and the number.
        functions: the function of torch that has added each node, and the number of its call in
            this call; None for nodes without one.
        calls: how often functions of torch were called.
        results: what the call returned.
        form: equal for calls whose traces are alike.
    """

    call: DescribedCall
    names: tuple[str, ...]
    bases: tuple[str, ...]
    items: dict[int, tuple[int, int]]
    functions: tuple[Any, ...]
    calls: dict[Any, int]
    results: LayerResults
    form: tuple[Any, ...]

    @classmethod
    def of(
        cls, trace: LiveTrace, since: TraceState, call: DescribedCall, result: Any
    ) -> "TracedCall":
        """Describe what was added since a state.

        Raises:
            UnsuitedError: the call cannot be repeated without being traced.
        """
        nodes = trace.nodes_since(since)
        for node in nodes:
            _check_node(node, call)
        names = tuple(node.name for node in nodes)
        bases = tuple(re.sub(r"_\d+$", "", name) for name in names)
        if tuple(names_after(since, bases)) != names:
            raise UnsuitedError("the names of its nodes are not numbered in order")
        functions = tuple(_function(trace, node, since) for node in nodes)
        items = dict(_items(nodes))
        place = {node: ("given", i) for i, node in reversed(list(enumerate(call.nodes)))}
        place |= {node: ("made", i) for i, node in enumerate(nodes)}
        results = _results(trace, call, result, place)
        form = tuple(_form(node, place, call.keys) for node in nodes)
        calls = trace.calls_since(since)
        return cls(
            call,
            names,
            bases,
            items,
            functions,
            calls,
            results,
            (form, bases, functions, results.key),
        )


def _check_node(node: Node, call: DescribedCall) -> None:
    if node.target is getitem:
        return
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        raise UnsuitedError(f"its trace has {node.op} {node.target}")
    schema = schema_of(node.target)
    if not schema.returns:
        raise UnsuitedError(f"its trace has {node.target}, which returns nothing")
    by_name = dict(zip((x.name for x in schema.arguments), node.args, strict=False))
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            written = by_name.get(argument.name, node.kwargs.get(argument.name))
            for value in pytree.tree_leaves(written):
                changed = value.meta["val"] if isinstance(value, Node) else None
                if changed is None or any(shares_memory(changed, x) for x in call.given):
                    raise UnsuitedError(f"{node.target} writes into what it is given")


def _items(nodes: Sequence[Node]) -> Iterator[tuple[int, tuple[int, int]]]:
    place = {node: i for i, node in enumerate(nodes)}
    for node, i in place.items():
        if node.target is getitem:
            whole, number = node.args
            if not isinstance(whole, Node) or whole not in place or whole.target is getitem:
                raise UnsuitedError("it takes a part of what it does not make")
            assert isinstance(number, int)
            yield i, (place[whole], number)


def _function(trace: LiveTrace, node: Node, since: TraceState) -> Any:
    if "torch_fn" not in node.meta:
        return None
    found = trace.function_of(node, since)
    if found is None:
        raise UnsuitedError(f"the function that calls {node.target} is not known")
    return found


def _results(
    trace: LiveTrace, call: DescribedCall, result: Any, place: Mapping[Node, tuple[str, int]]
) -> LayerResults:
    leaves, spec = pytree.tree_flatten(result)
    given = {id(x): i for i, x in reversed(list(enumerate(call.given)))}
    made: list[torch.Tensor] = []
    nodes: list[int] = []
    found: list[tuple[str, Any]] = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            if not is_plain(leaf):
                raise UnsuitedError(f"it returns a {type(leaf).__name__}")
            found.append(("plain", leaf))
        elif id(leaf) in given:
            found.append(("given", given[id(leaf)]))
        else:
            known = next((i for i, x in enumerate(made) if x is leaf), None)
            if known is None:
                nodes.append(_place_of(trace, leaf, (*call.given, *made), place))
                made.append(leaf)
            found.append(("made", len(made) - 1 if known is None else known))
    if not made:
        raise UnsuitedError("it returns no tensor of its own")
    likes = tuple(map(tensor_like, made))
    mode = getattr(made[0], "fake_mode", None)
    return LayerResults(spec, tuple(found), tuple(nodes), likes, mode)


def _place_of(
    trace: LiveTrace,
    leaf: torch.Tensor,
    others: Sequence[torch.Tensor],
    place: Mapping[Node, tuple[str, int]],
) -> int:
    """The place of the node that makes a result."""
    node = trace.node_of(leaf)
    kind, number = ("", 0) if node is None else place.get(node, ("", 0))
    if node is None or kind != "made":
        raise UnsuitedError("it returns a tensor that it does not make")
    if node.target is torch.ops.aten.detach.default:
        raise UnsuitedError("it returns a detached tensor, which the export may leave out")
    source = node.args[0] if node.target is getitem else None
    parts = source.all_input_nodes if isinstance(source, Node) else ()
    values = [x.meta["val"] for x in parts if isinstance(x.meta.get("val"), torch.Tensor)]
    if any(shares_memory(leaf, x) for x in (*others, *values)):
        raise UnsuitedError("it returns a view of what it is given or returns")
    return number


def _form(node: Node, place: Mapping[Node, tuple[str, int]], keys: tuple[str, ...]) -> Any:
    """Operator, arguments and annotations of a node, with places of nodes and relative names."""

    def described(argument: Any) -> Any:
        if isinstance(argument, Node):
            if argument not in place:
                raise UnsuitedError("it reads a tensor that is neither its own nor an argument")
            return place[argument]
        if isinstance(argument, (list, tuple)):
            return tuple(map(described, argument))
        if isinstance(argument, dict):
            return tuple((key, described(value)) for key, value in argument.items())
        if isinstance(argument, slice):
            return "slice", *map(described, (argument.start, argument.stop, argument.step))
        if not is_plain(argument):
            raise UnsuitedError(f"an operator takes a {type(argument).__name__}")
        return type(argument), repr(argument)

    stack = []
    for key, (path, kind) in node.meta["nn_module_stack"].items():
        inner = key.removeprefix(keys[-1])
        stack.append((inner, path.endswith(inner), kind))
    values = [
        tensor_like(x)
        for x in pytree.tree_leaves(node.meta.get("val"))
        if isinstance(x, torch.Tensor)
    ]
    trace = node.meta.get("stack_trace")
    return node.target, described(node.args), described(node.kwargs), stack, values, trace
