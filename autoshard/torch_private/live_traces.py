"""Private parts of the tracer of `torch.export`: the graph that it makes while forward runs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from io import BytesIO
from operator import getitem
from typing import Any, Self

import torch
from torch.autograd import forward_ad
from torch.fx import Node

from autoshard.torch_private.tensors import FakeTensorMode, is_transformed
from autoshard.torch_private.versions import expected_of_torch, untested

with expected_of_torch("the tracer of torch.export, and the files of its archives"):
    from torch._export.serde import serialize
    from torch.export.pt2_archive._package import PT2ArchiveReader, PT2ArchiveWriter
    from torch.fx.experimental.proxy_tensor import (
        disable_proxy_modes_tracing,
        get_proxy_mode,
        get_proxy_slot,
        track_tensor_tree,
    )
    from torch.fx.graph import _Namespace
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


@dataclass(frozen=True)
class TraceState:
    """The state of a trace at a time.

    Attributes:
        last: the last node so far.
        used: names of nodes.
        numbers: the last number of each name.
        counts: how often each function of torch was called.
    """

    last: Node
    used: frozenset[str]
    numbers: dict[str, int]
    counts: dict[Any, int]


class LiveTrace:
    """The trace that runs.

    Relies on: the mode of `make_fx`, which `torch.export` uses where it is not strict, has the
    tracer; its graph has the nodes so far, `tensor_tracker` the node of each tensor, `module_stack`
    the modules that run, `num_calls` those that have run, `torch_fn_counts` the calls of functions
    with which nodes are annotated, and the graph's namespace the names. Public is only the program
    afterwards.
    """

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer

    @classmethod
    def current(cls) -> Self | None:
        """The trace that runs; None if none does."""
        mode = get_proxy_mode()
        return None if mode is None else cls(mode.tracer)

    @property
    def graph(self) -> torch.fx.Graph:
        """The nodes so far."""
        graph: torch.fx.Graph = self._tracer.graph
        return graph

    @property
    def module_keys(self) -> tuple[str, ...]:
        """The modules that are being called, from the outermost."""
        return tuple(self._tracer.module_stack)

    @property
    def shares_modules(self) -> bool:
        """True if a module has several names, so that names of modules depend on who calls them."""
        return bool(getattr(self._tracer, "enable_attr_proxy", True))

    def node_of(self, tensor: torch.Tensor) -> Node | None:
        """The node that computes a tensor; None for constants, and for tensors of no node."""
        slot = get_proxy_slot(tensor, self._tracer, None)
        if slot is None or slot.constant is not None:
            return None
        node: Node = slot.proxy.node
        return node

    def state(self) -> TraceState:
        """The present state."""
        names = self.graph._graph_namespace
        return TraceState(
            next(reversed(self.graph.nodes)),
            frozenset(names._used_names),
            dict(names._base_count),
            dict(self._tracer.torch_fn_counts),
        )

    def nodes_since(self, state: TraceState) -> list[Node]:
        """The nodes that were added since a state."""
        found: list[Node] = []
        for node in reversed(self.graph.nodes):
            if node is state.last:
                break
            found.append(node)
        return found[::-1]

    def function_of(self, node: Node, since: TraceState) -> Any:
        """The function of torch whose call, since a state, added a node; None if it is not known.

        Returns:
            The function, and the number of its call, from 1.
        """
        text, kind = node.meta.get("torch_fn", ("_0", ""))
        number = int(text.rpartition("_")[2])
        calls = [
            (function, number - since.counts.get(function, 0))
            for function, count in self._tracer.torch_fn_counts.items()
            if since.counts.get(function, 0) < number <= count
            and kind == f"{type(function).__name__}.{getattr(function, '__name__', '')}"
        ]
        return calls[0] if len(calls) == 1 else None

    def calls_since(self, since: TraceState) -> dict[Any, int]:
        """Number of calls of each function of torch since a state."""
        now = self._tracer.torch_fn_counts.items()
        return {
            function: count - since.counts.get(function, 0)
            for function, count in now
            if count > since.counts.get(function, 0)
        }

    def add_calls(self, calls: dict[Any, int]) -> dict[Any, int]:
        """Count calls of functions of torch; returns the counts before."""
        counts = self._tracer.torch_fn_counts
        before = {function: counts.get(function, 0) for function in calls}
        for function, number in calls.items():
            counts[function] = before[function] + number
        return before

    def create_name(self, base: str) -> str:
        """The name that a node would get, which is then taken."""
        return self.graph._graph_namespace.create_name(base, None)

    def add_call(
        self,
        operator: Any,
        arguments: Sequence[Node],
        number: int,
        name: str,
        made: Sequence[torch.Tensor],
        *,
        unnamed: int = 0,
    ) -> list[str]:
        """Add a call of an operator that returns a list of tensors.

        Args:
            operator: takes a list of tensors, and a number.
            arguments: the nodes of the tensors.
            number: the number.
            name: of the node; those of the results end with their position.
            made: the results.
            unnamed: number of further results, with names like those of other operators.

        Returns:
            The names of the further results.
        """
        tracer = self._tracer
        with torch._C.DisableTorchFunction():
            call = tracer.create_proxy(
                "call_function", operator, (list(map(tracer.proxy, arguments)), number), {}, name
            )
            call.node.meta["val"] = [*made, *list(made[:1]) * unnamed]
            for i, tensor in enumerate(made):
                item = tracer.create_proxy("call_function", getitem, (call, i), {}, f"{name}_{i}")
                track_tensor_tree(tensor, item, constant=None, tracer=tracer)
            further = [
                tracer.create_proxy("call_function", getitem, (call, len(made) + i), {}).node
                for i in range(unnamed)
            ]
            for node in further:
                node.meta["val"] = made[0]
        return [node.name for node in further]


def function_modes() -> tuple[Any, ...]:
    """The modes that see calls of functions of torch."""
    modes: Any = _get_current_function_mode_stack  # torch does not type it
    return tuple(modes())


def interception() -> str:
    """Describe what else takes part in the calls of operators that a trace sees.

    Relies on: the stacks of modes, of transforms and of hooks for saved tensors, and the level of
    forward-mode derivatives. There is no public way to ask for any of them.

    Returns:
        The first that is found, such as a mode of the user; empty if there is none.
    """
    if not torch._C._is_torch_function_enabled():
        return "the modes of functions of torch are switched off"
    functions = (x for x in function_modes() if not type(x).__module__.startswith(_KNOWN))
    operators = (x for x in _get_current_dispatch_mode_stack() if not isinstance(x, FakeTensorMode))
    for mode in (*functions, *operators):
        return f"the mode {type(mode).__name__} is active"
    if is_transformed():
        return "a transform of torch.func is active"
    if forward_ad._current_level >= 0:
        return "forward-mode derivatives are computed"
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "hooks for saved tensors are active"
    return ""


_KNOWN = ("torch.", "autoshard.")


def names_after(state: TraceState, bases: Sequence[str]) -> list[str]:
    """The names that nodes would have got from a state on.

    Relies on: `_Namespace` numbers names that are taken.
    """
    names = _Namespace()
    names._used_names, names._base_count = set(state.used), dict(state.numbers)
    return [names.create_name(base, None) for base in bases]


def outside_of_trace() -> AbstractContextManager[Any]:
    """A context in which operators add no nodes to the trace that runs.

    Relies on: `disable_proxy_modes_tracing`, for what `make_fx` does itself.
    """
    return disable_proxy_modes_tracing()


def without_torch_functions() -> AbstractContextManager[None]:
    """A context in which functions of torch call neither `__torch_function__` nor its modes.

    Relies on: `DisableTorchFunction`, which the pages of torch on extending it name.
    """
    context: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return context


@contextmanager
def without_canonical_form() -> Iterator[None]:
    """A context in which `torch.export.save` does not try the canonical form of a program.

    Relies on: it is only made to see that it can be, and what is made is dropped; that copies the
    whole program. There is no public switch. With a torch that was not tested, it is made.
    """
    if untested():
        yield
        return
    module: Any = serialize
    before = module.canonicalize
    module.canonicalize = _not_made
    try:
        yield
    finally:
        module.canonicalize = before


def _not_made(*_: Any) -> None:
    """Make no canonical form."""


def with_record(archive: bytes, name: str, change: Callable[[bytes], bytes]) -> bytes:
    """An archive of `torch.export.save` with a record replaced.

    Relies on: the classes that write and read the records of such archives, in the order and with
    the checksums of torch.
    """
    reader, buffer = PT2ArchiveReader(BytesIO(archive)), BytesIO()
    with PT2ArchiveWriter(buffer) as writer:
        for record in _records(reader):
            data = reader.read_bytes(record)
            writer.write_bytes(record, change(data) if record == name else data)
    return buffer.getvalue()


_OF_WRITER = ("archive_format", "archive_version", "byteorder", ".data/", "version")


def _records(reader: Any) -> Iterator[str]:
    for name in reader.get_file_names():
        if not name.startswith(_OF_WRITER):
            yield name
