"""Resharded tensors that backward makes once more instead of finding them held.

Autograd saves the very tensor that an operator reads, or a view of it. Where its memory is
that of a tensor resharded `again`, a reader is saved in its place: the source of the
resharding, and how the view lies in what the resharding makes.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol
from weakref import WeakSet, WeakValueDictionary

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from autoshard.errors import PlanError

Reshard = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


class Regathers:
    """The tensors of one run that backward reshards once more."""

    def __init__(self) -> None:
        # A weak reference keeps the address of a storage from being used for another one.
        self._alive: dict[StorageWeakRef, _Regather] = {}

    def add(
        self,
        sources: Sequence[torch.Tensor],
        resharded: Sequence[torch.Tensor],
        reshard: Reshard,
    ) -> None:
        """Let backward make tensors from their sources, all of them when the first is needed.

        Args:
            sources: held for backward in their place; may themselves be resharded again.
            resharded: what was made of each.
            reshard: makes them once more.
        """
        if not torch.is_grad_enabled():
            return
        together = _Together([self._pack(source) for source in sources], reshard)
        pairs = zip(sources, resharded, strict=True)
        for place, (source, tensor) in enumerate(pairs):
            storage = _storage(tensor)
            # A resharding may end in a view of its source, which then is all there is to hold.
            if storage != _storage(source):
                self._alive[storage] = together.member(place)

    def saving(self, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[object]:
        """A context for an operator that reads these tensors."""
        self._alive = {ref: made for ref, made in self._alive.items() if not _expired(ref)}
        if self._alive and any(_storage(tensor) in self._alive for tensor in tensors):
            return saved_tensors_hooks(self._pack, _unpack)
        return nullcontext()

    def forget(self) -> None:
        """Let go of everything that no reader needs; the hooks live as long as the graph."""
        self._alive.clear()

    def _pack(self, tensor: torch.Tensor) -> "_Packed":
        reshard_after_forward = self._alive.get(_storage(tensor))
        # What is conjugated or negated lazily is more than its memory says.
        if reshard_after_forward is None or tensor.is_conj() or tensor.is_neg():
            return _Held(tensor)
        return reshard_after_forward.reader(tensor)


class _Packed(Protocol):
    """Stands for a tensor that backward needs."""

    def unpack(self) -> torch.Tensor: ...


def _unpack(packed: _Packed) -> torch.Tensor:
    return packed.unpack()


class _Held:
    """The tensor itself; watched as autograd watches what it saves without hooks."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # Detached: an output that is saved would otherwise hold the node that holds it.
        self._tensor = tensor.detach()
        self._version = tensor._version  # noqa: SLF001  torch has no public way to it

    def unpack(self) -> torch.Tensor:
        if self._tensor._version != self._version:  # noqa: SLF001  as above
            raise PlanError(
                f"a tensor of shape {tuple(self._tensor.shape)} that backward needs was changed "
                f"in place after forward; call backward before the optimizer's step, and do not "
                f"write into inputs or results in between"
            )
        return self._tensor


class _Reader:
    """A view of a resharded tensor that does not hold it."""

    def __init__(self, reshard_after_forward: "_Regather", tensor: torch.Tensor) -> None:
        self._reshard_after_forward = reshard_after_forward
        self._dtype = tensor.dtype
        self._place = tensor.storage_offset(), tensor.shape, tensor.stride()

    def unpack(self) -> torch.Tensor:
        storage = self._reshard_after_forward.storage(self)
        return torch.empty(0, dtype=self._dtype, device=storage.device).set_(storage, *self._place)


class _Together:
    """ReshardingTable that run once more at one time.

    Args:
        sources: what they reshard.
        reshard: runs them.
    """

    def __init__(self, sources: Sequence["_Packed"], reshard: Reshard) -> None:
        self._sources = sources
        self._reshard = reshard
        # Readers hold the members; one without readers is not needed.
        self._members: WeakValueDictionary[int, _Regather] = WeakValueDictionary()

    def member(self, place: int) -> "_Regather":
        """The resharding of one of the sources."""
        made = self._members[place] = _Regather(self)
        return made

    def run(self, backward_pass: int) -> None:
        """Give each member its tensor."""
        with torch.no_grad():
            resharded = self._reshard([source.unpack() for source in self._sources])
        for place, member in self._members.items():
            member.take(resharded[place], backward_pass)


class _Regather:
    """One resharding that runs once more in a backward pass.

    What it makes is held from the turn of the first reader, of it or of another one that runs
    together with it, to that of its last one. Another pass over the same graph reshards anew.
    """

    def __init__(self, together: _Together) -> None:
        self._together = together
        # Autograd holds the readers, and drops those of a part of the graph that it drops.
        self._readers: WeakSet[_Reader] = WeakSet()
        self._waiting: WeakSet[_Reader] = WeakSet()
        self._resharded: torch.Tensor | None = None
        self._backward_pass = -1

    def reader(self, tensor: torch.Tensor) -> _Reader:
        """A reader of a view of the resharded tensor."""
        reader = _Reader(self, tensor)
        self._readers.add(reader)
        return reader

    def take(self, resharded: torch.Tensor, backward_pass: int) -> None:
        """Hold the resharded tensor, if anybody is to read it."""
        self._backward_pass = backward_pass
        self._waiting = WeakSet(self._readers)
        self._resharded = resharded if self._waiting else None

    def storage(self, reader: _Reader) -> torch.UntypedStorage:
        """The memory of the resharded tensor; a reader's turn."""
        backward_pass = torch._C._current_graph_task_id()  # noqa: SLF001  as in the recorder
        if self._resharded is None or backward_pass != self._backward_pass:
            self._together.run(backward_pass)
        resharded = self._resharded
        assert resharded is not None
        self._waiting.discard(reader)
        if not self._waiting:
            self._resharded = None
        return resharded.untyped_storage()


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch


def _expired(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())  # type: ignore[no-untyped-call]  # torch
