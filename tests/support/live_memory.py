"""Memory of the tensors that are really alive, whoever holds them."""

import math
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

PATIENCE = 60.0
"""Seconds to wait for another thread."""


class LiveMemory(TorchDispatchMode):
    """A context that counts the memory of what operators make inside it, until it is freed.

    Gloo's threads let go of a collective's tensors a little after it is done. Where that
    matters, what is held too long is waited for.

    Args:
        patient_above: bytes above which a peak counts only if it does not fall at once.

    Attributes:
        peak: the most bytes that were alive after any operator.
    """

    def __init__(self, *, patient_above: float = math.inf) -> None:
        super().__init__()
        self.peak = 0
        self._patient_above = patient_above
        self._alive: dict[int, int] = {}  # changed by any thread, one operation at a time

    @property
    def nbytes(self) -> int:
        """Bytes that were made inside the context and are alive now."""
        return sum(list(self._alive.values()))

    def settled(self, nbytes: float) -> int:
        """Bytes that are alive, after waiting a while until they are at most `nbytes`."""
        self._wait(nbytes)
        return self.nbytes

    def falls_to(self, nbytes: int) -> bool:
        """True if so much stays alive, and no more."""
        return self.settled(nbytes) == nbytes

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        given = {storage._cdata for storage in _storages((args, kwargs))}
        result = func(*args, **kwargs)
        for storage in _storages(result):
            if storage._cdata not in given | self._alive.keys():
                self._alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._alive.pop, storage._cdata)
        self._wait(self._patient_above)
        self.peak = max(self.peak, self.nbytes)
        if self.peak > self._patient_above:  # waiting does not help
            self._patient_above = math.inf
        return result

    def _wait(self, nbytes: float) -> None:
        deadline = time.monotonic() + PATIENCE
        while self.nbytes > nbytes and time.monotonic() < deadline:
            time.sleep(0.001)


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_iter(value):
        # A DTensor has no memory beside its local tensor's.
        tensor = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
        if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
            yield tensor.untyped_storage()
