"""Records the collectives that a rank runs, independently of the plan."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from autoshard.plan import CollectiveCount, Direction
from autoshard.runtime.process_groups import axes_of_group
from autoshard.torch_private import HigherOrderOperator, TorchDispatchMode, runs_backward, schema_of

_UNKNOWN = "?"

_KINDS = {
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_reduce_": "all_reduce",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::all_gather_into_tensor_out": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::reduce_scatter_tensor_out": "reduce_scatter",
    "_c10d_functional::all_to_all_single": "all_to_all",
    "_c10d_functional::broadcast": "broadcast",
    "_c10d_functional::broadcast_": "broadcast",
    "c10d::allreduce_": "all_reduce",
    "c10d::allgather_": "all_gather",
    "c10d::_allgather_base_": "all_gather",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::alltoall_": "all_to_all",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::broadcast_": "broadcast",
    "c10d::gather_": "gather",
    "c10d::scatter_": "scatter",
    "c10d::reduce_": "reduce",
}
_PAUSED: ContextVar[bool] = ContextVar("paused", default=False)
_HALO_EXCHANGE = "halo_exchange"
_SENDS, _RECEIVES = "c10d::send", "c10d::recv_"
_NAMESPACES = ("_c10d_functional::", "c10d::")
_IGNORED = frozenset({"c10d::barrier", "c10d::monitored_barrier_"})


@dataclass(frozen=True, slots=True)
class CollectiveRecord:
    """A collective that ran on this rank.

    Attributes:
        kind: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, gather, scatter,
            reduce, or halo_exchange for consecutive point-to-point messages; otherwise the name
            of the operator.
        axis: mesh axis of the process group; `"?"` if no axis of the mesh has that group.
        nbytes: bytes of the rank's input or output, whichever is larger; for an all-to-all, the
            bytes sent, since those received may differ; for a halo exchange, all bytes sent or
            all bytes received, whichever are more.
        direction: `"backward"` if autograd was running backward, else `"forward"`.
    """

    kind: str
    axis: str
    nbytes: int
    direction: Direction


Content = Literal["value", "gradient", "tied gradient"]
"""Messages of pipeline stages: values, their gradients, or gradients of shared parameters."""

CONTENTS: tuple[Content, ...] = get_args(Content)
"""Contents of messages between pipeline stages; the position is the message's tag."""


@dataclass(frozen=True, slots=True)
class MessageRecord:
    """A message between pipeline stages that this rank sent or received.

    Attributes:
        content: what it contains.
        sent: True if this rank sent it, False if it received it.
        nbytes: its bytes.
    """

    content: Content
    sent: bool
    nbytes: int


class CollectiveRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """A context manager that records the collectives of this thread and of its backward passes.

    Attributes:
        records: the collectives, in the order in which they were started.
        messages: the messages between pipeline stages, likewise.
    """

    # As compiled graphs have around operators that write; those of autoshard have no collectives.
    supports_higher_order_operators = True

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.records: list[CollectiveRecord] = []
        self.messages: list[MessageRecord] = []
        self._messages: dict[str, int] = {}  # bytes sent and received since another operator ran
        self._message_group = ""
        self._mesh = mesh
        names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
        self._axis_of_group: dict[str, str] = {
            mesh.get_group(i).group_name: name for i, name in enumerate(names)
        }

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: a compiled model is recorded when it runs, not when it is compiled."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operator, and record it if it is a collective."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if _PAUSED.get() or isinstance(func, HigherOrderOperator):
            return result
        schema = schema_of(func)
        if schema.name in (_SENDS, _RECEIVES):
            tensors, group, _, tag = args
            if self._axis_of(group) != _UNKNOWN:
                self._record_message(schema.name, tensors, group)
            else:
                sent = schema.name == _SENDS
                self.messages.append(MessageRecord(CONTENTS[tag], sent, _nbytes(tensors)))
            return result
        self._messages.clear()
        if schema.name.startswith(_NAMESPACES) and schema.name not in _IGNORED:
            given = dict(zip((a.name for a in schema.arguments), args, strict=False))
            given.update(kwargs)
            # Operators without a process group, such as wait_tensor, do not communicate.
            group = given.get("group_name", given.get("process_group"))
            if group is not None:
                self._record(schema.name, group, given, result)
        return result

    def _record(self, name: str, group: Any, given: Mapping[str, Any], result: Any) -> None:
        kind = _KINDS.get(name, name)
        sent = given.get("input") if kind == "all_to_all" else None
        values = (*given.values(), result) if sent is None else (sent,)
        self.records.append(self._made(kind, group, max(_nbytes(value) for value in values)))

    def _record_message(self, name: str, tensors: Any, group: Any) -> None:
        """Add a message to the halo exchange that the preceding operator belongs to, if any."""
        if self._message_group != _group_name(group):
            self._messages.clear()
            self._message_group = _group_name(group)
        if self._messages:
            self.records.pop()
        self._messages[name] = self._messages.get(name, 0) + _nbytes(tensors)
        self.records.append(self._made(_HALO_EXCHANGE, group, max(self._messages.values())))

    def _axis_of(self, group: Any) -> str:
        """Name of the axis of a group, or of its axes; it may have been made since the start."""
        name = _group_name(group)
        return self._axis_of_group.get(name) or axes_of_group(self._mesh, name) or _UNKNOWN

    def _made(self, kind: str, group: Any, nbytes: int) -> CollectiveRecord:
        return CollectiveRecord(
            kind=kind,
            axis=self._axis_of(group),
            nbytes=nbytes,
            direction="backward" if runs_backward() else "forward",
        )


def record_collectives(mesh: DeviceMesh) -> CollectiveRecorder:
    """A context manager that records the collectives that run inside it.

    Args:
        mesh: the mesh whose axes are reported.

    Example:
        >>> with record_collectives(mesh) as recorder:
        ...     model(batch).backward()
        >>> summarize(recorder.records) == plan.collectives
        True
    """
    return CollectiveRecorder(mesh)


@contextmanager
def not_recorded() -> Iterator[None]:
    """A context whose collectives no recorder counts: checks of calls, which no plan has."""
    token = _PAUSED.set(True)
    try:
        yield
    finally:
        _PAUSED.reset(token)


def summarize(records: Iterable[CollectiveRecord]) -> tuple[CollectiveCount, ...]:
    """Sum records by kind, axis and direction, in the order of `Plan.collectives`."""
    found: dict[tuple[str, str, Direction], list[int]] = {}
    for record in records:
        found.setdefault((record.kind, record.axis, record.direction), []).append(record.nbytes)
    return tuple(
        CollectiveCount(
            kind=kind, axis=axis, direction=direction, count=len(sizes), nbytes=sum(sizes)
        )
        for (kind, axis, direction), sizes in sorted(found.items())
    )


def _group_name(group: Any) -> str:
    if isinstance(group, str):
        return group
    if isinstance(group, torch.ScriptObject):
        group = ProcessGroup.unbox(group)
    return str(group.group_name)


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, (list, tuple)):
        return sum(_nbytes(item) for item in value)
    return 0
