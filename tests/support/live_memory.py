"""Memory of the tensors that are really alive."""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveMemory(TorchDispatchMode):
    """A context that counts the memory of what operators make, until it is freed.

    Args:
        present: tensors that are there before, and are not counted.

    Attributes:
        nbytes: bytes that are alive.
        peak: the most that were alive after any operator.
    """

    def __init__(self, present: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.nbytes = 0
        self.peak = 0
        # An address may be used again once its storage is gone, so those here must stay.
        self._present = list(map(_local, present))
        self._known = {tensor.untyped_storage()._cdata for tensor in self._present}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter(result):
            # A DTensor has no memory beside its local tensor's.
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor):
                self._see(leaf.untyped_storage())
        self.peak = max(self.peak, self.nbytes)
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if address not in self._known and storage.device.type != "meta":
            self._known.add(address)
            self.nbytes += storage.nbytes()
            weakref.finalize(storage, self._forget, address, storage.nbytes())

    def _forget(self, address: int, nbytes: int) -> None:
        self._known.discard(address)
        self.nbytes -= nbytes


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
