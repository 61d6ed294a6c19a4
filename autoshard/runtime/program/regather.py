"""Re-gathering in backward: resharded tensors are not saved, backward reshards them again.

Autograd saves the tensor that an operator reads, or a view of it. If it shares storage with the
result of a resharding whose `regather` is set, a saved-tensor hook saves a `_SavedView` instead:
the source of the resharding, and the offset, shape and strides of the view in its result.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol
from weakref import WeakSet, WeakValueDictionary

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from autoshard.errors import PlanError
from autoshard.torch_private import backward_pass, version_counter

Reshard = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


class Regathers:
    """The tensors of one run that backward reshards again."""

    def __init__(self) -> None:
        # The weak reference prevents that the address of a freed storage is reused.
        self._by_storage: dict[StorageWeakRef, _Regather] = {}

    def add(
        self,
        sources: Sequence[torch.Tensor],
        resharded: Sequence[torch.Tensor],
        reshard: Reshard,
    ) -> None:
        """Register resharded tensors; backward reshards all of them when it needs the first.

        Args:
            sources: tensors before the resharding, which are saved for backward; they may
                themselves be results that are re-gathered.
            resharded: result of each.
            reshard: maps the sources to the results.
        """
        if not torch.is_grad_enabled():
            return
        group = _RegatherGroup([self._pack(source) for source in sources], reshard)
        pairs = zip(sources, resharded, strict=True)
        for index, (source, tensor) in enumerate(pairs):
            storage = _storage(tensor)
            # If the result is a view of its source, re-gathering would save no memory.
            if storage != _storage(source):
                self._by_storage[storage] = group.member(index)

    def saving(self, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[object]:
        """A context in which an operator that reads these tensors is run."""
        self._by_storage = {r: made for r, made in self._by_storage.items() if not _expired(r)}
        if self._by_storage and any(_storage(tensor) in self._by_storage for tensor in tensors):
            return saved_tensors_hooks(self._pack, _unpack)
        return nullcontext()

    def clear(self) -> None:
        """Release the registered tensors; autograd's hooks keep those that backward needs."""
        self._by_storage.clear()

    def _pack(self, tensor: torch.Tensor) -> "_Packed":
        regather = self._by_storage.get(_storage(tensor))
        # The values of lazily conjugated or negated tensors differ from those in their storage.
        if regather is None or tensor.is_conj() or tensor.is_neg():
            return _SavedTensor(tensor)
        return regather.save_view(tensor)


class _Packed(Protocol):
    """Stored by autograd in place of a tensor that backward needs."""

    def unpack(self) -> torch.Tensor: ...


def _unpack(packed: _Packed) -> torch.Tensor:
    return packed.unpack()


class _SavedTensor:
    """The tensor itself, with the check of its version that autograd does without hooks."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # Detached, since a saved output would form a reference cycle with its autograd node.
        self._tensor = tensor.detach()
        self._version = version_counter(tensor)

    def unpack(self) -> torch.Tensor:
        if version_counter(self._tensor) != self._version:
            raise PlanError(
                f"a tensor of shape {tuple(self._tensor.shape)} that backward needs was changed "
                f"in place after forward; call backward before the optimizer's step, and do not "
                f"write into inputs or results in between"
            )
        return self._tensor


class _SavedView:
    """A view of a resharded tensor, without a reference to its storage."""

    def __init__(self, regather: "_Regather", tensor: torch.Tensor) -> None:
        self._regather = regather
        self._dtype = tensor.dtype
        self._geometry = tensor.storage_offset(), tensor.shape, tensor.stride()

    def unpack(self) -> torch.Tensor:
        storage = self._regather.storage(self)
        made = torch.empty(0, dtype=self._dtype, device=storage.device)
        return made.set_(storage, *self._geometry)


class _RegatherGroup:
    """Reshardings that run again at the same time, such as those of a bucket.

    Args:
        sources: the saved inputs.
        reshard: runs the reshardings.
    """

    def __init__(self, sources: Sequence["_Packed"], reshard: Reshard) -> None:
        self._sources = sources
        self._reshard = reshard
        # Saved views reference the members; a member without views is not needed.
        self._members: WeakValueDictionary[int, _Regather] = WeakValueDictionary()

    def member(self, index: int) -> "_Regather":
        """The resharding of the source with this index."""
        made = self._members[index] = _Regather(self)
        return made

    def run(self, backward_pass: int) -> None:
        """Reshard the sources, and give each member its result."""
        with torch.no_grad():
            resharded = self._reshard([source.unpack() for source in self._sources])
        for index, member in self._members.items():
            member.set_result(resharded[index], backward_pass)


class _Regather:
    """One resharding that runs again in a backward pass.

    The result is freed when the last of its saved views has been unpacked. Another backward pass
    over the same graph reshards again.
    """

    def __init__(self, group: _RegatherGroup) -> None:
        self._group = group
        # Autograd owns the views; those of a freed part of the graph disappear from the sets.
        self._views: WeakSet[_SavedView] = WeakSet()
        self._pending: WeakSet[_SavedView] = WeakSet()
        self._resharded: torch.Tensor | None = None
        self._backward_pass = -1

    def save_view(self, tensor: torch.Tensor) -> _SavedView:
        """Make the saved view for a tensor that shares storage with the result."""
        view = _SavedView(self, tensor)
        self._views.add(view)
        return view

    def set_result(self, resharded: torch.Tensor, backward_pass: int) -> None:
        """Keep the result of a backward pass, unless there are no views of it."""
        self._backward_pass = backward_pass
        self._pending = WeakSet(self._views)
        self._resharded = resharded if self._pending else None

    def storage(self, view: _SavedView) -> torch.UntypedStorage:
        """The storage of the result, resharded if this backward pass has not done so yet.

        The view counts as unpacked afterwards.
        """
        running = backward_pass()
        if self._resharded is None or running != self._backward_pass:
            self._group.run(running)
        resharded = self._resharded
        assert resharded is not None
        self._pending.discard(view)
        if not self._pending:
            self._resharded = None
        return resharded.untyped_storage()


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch


def _expired(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())  # type: ignore[no-untyped-call]  # torch
