"""How many bytes of tensors are alive, whoever holds them."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

PATIENCE = 10.0
"""Seconds to wait for another thread."""


class LiveStorages(TorchDispatchMode):
    """A context that sees the memory of every tensor that operators make inside it."""

    def __init__(self) -> None:
        super().__init__()
        self._nbytes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        given = {StorageWeakRef(storage) for storage in _storages((args, kwargs))}
        result = func(*args, **kwargs)
        for storage in _storages(result):
            reference = StorageWeakRef(storage)
            if reference not in given:
                self._nbytes[reference] = storage.nbytes()
        return result

    def nbytes(self) -> int:
        """Bytes that were made inside the context and are alive now."""
        return sum(size for ref, size in self._nbytes.items() if not ref.expired())

    def falls_to(self, nbytes: int) -> bool:
        """Whether so much stays alive, and no more.

        Gloo's threads let go of a collective's tensors a little after it is done.
        """
        deadline = time.monotonic() + PATIENCE
        while self.nbytes() > nbytes and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.nbytes() == nbytes


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf.untyped_storage()
